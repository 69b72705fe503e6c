//! Rows added up as a question asks, and written as JSON or CSV.

use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;
use serde_json::{Map, Value, json};

use super::{Counts, Format, UsageQuestion, counts::Row, question::Group};
use crate::{error::Error, limits::USAGE_ANSWER_ROWS};

/// Sums, by when a piece of time begins and whose they are.
#[derive(Debug)]
pub(super) struct Report<'a> {
    question: &'a UsageQuestion,
    /// What costs are in; `None`: there are no prices.
    currency: Option<&'a str>,
    rows: BTreeMap<(u64, [String; 3]), Counts>,
}

impl<'a> Report<'a> {
    pub(super) fn new(question: &'a UsageQuestion, currency: Option<&'a str>) -> Self {
        Self { question, currency, rows: BTreeMap::new() }
    }

    /// Adds a row that begins then, in seconds since 1970, if it is asked for.
    pub(super) fn add(&mut self, at: u64, row: &Row<'_>, counts: &Counts) -> Result<(), Error> {
        let asked = self.question;
        let fits = |wanted: &Option<String>, has: &str| wanted.as_deref().is_none_or(|wanted| wanted == has);
        let is_asked_for = (asked.from..asked.to).contains(&at)
            && fits(&asked.tenant, row.tenant)
            && fits(&asked.key, row.key)
            && fits(&asked.model, row.model);
        if !is_asked_for {
            return Ok(());
        }
        let Group { tenant, key, model } = asked.group;
        let apart = |is: bool, name: &str| if is { name.to_owned() } else { String::new() };
        let whose = [apart(tenant, row.tenant), apart(key, row.key), apart(model, row.model)];
        self.rows.entry((asked.by.start(at), whose)).or_default().add(counts);
        if self.rows.len() > USAGE_ANSWER_ROWS {
            let message = format!(
                "the answer would have more than {USAGE_ANSWER_ROWS} rows: ask for less time (from, to), longer \
                 pieces of it (by), or fewer names (group, tenant, key, model)"
            );
            return Err(Error::BadQuery { message, param: None });
        }
        Ok(())
    }

    /// The whole answer of the gateway of this name.
    pub(super) fn write(&self, instance: &str) -> Vec<u8> {
        match self.question.format {
            Format::Json => self.json(instance),
            Format::Csv => self.csv(instance),
        }
    }

    /// Which of tenant, key and model tell rows apart.
    fn names(&self) -> impl Iterator<Item = (usize, &'static str)> {
        let Group { tenant, key, model } = self.question.group;
        let all = [(0, "tenant"), (1, "key"), (2, "model")].into_iter().zip([tenant, key, model]);
        all.filter_map(|(name, is)| is.then_some(name))
    }

    fn json(&self, instance: &str) -> Vec<u8> {
        let row = |((start, whose), counts): (&(u64, [String; 3]), &Counts)| {
            let mut row = Map::new();
            row.insert("start".to_owned(), time(*start).into());
            row.insert("instance".to_owned(), instance.into());
            for (at, name) in self.names() {
                row.insert(name.to_owned(), whose[at].as_str().into());
            }
            row.extend(counts.named().map(|(name, sum)| (name.to_owned(), sum.into())));
            if self.currency.is_some() {
                // As text: readers of JSON round numbers.
                row.insert("cost".to_owned(), counts.cost().to_string().into());
            }
            Value::Object(row)
        };
        let rows: Vec<Value> = self.rows.iter().map(row).collect();
        let UsageQuestion { by, from, to, .. } = *self.question;
        let mut answer = json!({
            "instance": instance, "by": by.as_str(), "from": time(from), "to": time(to), "rows": rows,
        });
        if let Some(currency) = self.currency {
            answer["currency"] = currency.into();
        }
        let mut bytes = serde_json::to_vec(&answer).unwrap_or_default();
        bytes.push(b'\n');
        bytes
    }

    fn csv(&self, instance: &str) -> Vec<u8> {
        let named = self.names().map(|(_, name)| name);
        let money = self.currency.iter().flat_map(|_| ["cost", "currency"]);
        let head = ["start", "instance"].into_iter().chain(named).chain(Counts::NAMES).chain(money);
        let head: Vec<&str> = head.collect();
        let mut text = head.join(",") + "\r\n";
        for ((start, whose), counts) in &self.rows {
            text += &time(*start);
            let names = self.names().map(|(at, _)| whose[at].as_str());
            for name in [instance].into_iter().chain(names) {
                text.push(',');
                text += &field(name);
            }
            for (_, sum) in counts.named() {
                text.push(',');
                text += &sum.to_string();
            }
            if let Some(currency) = self.currency {
                text += &["", &counts.cost().to_string(), currency].join(",");
            }
            text += "\r\n";
        }
        text.into_bytes()
    }
}

/// RFC 3339, in UTC.
fn time(at: u64) -> String {
    let at = i64::try_from(at).ok().and_then(|at| Timestamp::from_second(at).ok());
    at.unwrap_or(Timestamp::MAX).to_string()
}

/// As RFC 4180 writes it; what a spreadsheet would take for a formula begins with a quote.
fn field(text: &str) -> String {
    let text =
        if text.starts_with(['=', '+', '-', '@', '\t', '\r']) { format!("'{text}") } else { text.to_owned() };
    if text.contains([',', '"', '\r', '\n']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text }
}

#[cfg(test)]
mod tests {
    use http::HeaderMap;
    use keyway_core::Money;

    use super::*;
    use crate::ledger::{BilledEnd, Tokens};

    /// 2026-11-29T09:30:00Z.
    const NOW: u64 = 1_795_944_600;

    fn report(query: &str, rows: &[(u64, &str, &str, &str)]) -> Result<String, Error> {
        let question = UsageQuestion::read(query, &HeaderMap::new(), NOW).unwrap();
        let mut report = Report::new(&question, None);
        for (at, tenant, key, model) in rows {
            let tokens = Tokens { prompt: 10, cached: 4, generated: 3 };
            let estimated = Tokens { generated: 1, ..Tokens::default() };
            let counts = Counts::of(BilledEnd::Completed, tokens, estimated, None);
            report.add(*at, &Row { tenant, key, model }, &counts)?;
        }
        Ok(String::from_utf8(report.write("gw-1")).unwrap())
    }

    const ROWS: [(u64, &str, &str, &str); 4] = [
        (NOW - 7_200, "a", "k1", "m"),
        (NOW - 7_200, "a", "k2", "m"),
        (NOW - 86_400, "b", "k3", "n"),
        (NOW - 40 * 86_400, "a", "k1", "m"),
    ];

    #[test]
    fn rows_are_added_up_as_asked() {
        let rows = |query: &str| {
            let answer: Value = serde_json::from_str(&report(query, &ROWS).unwrap()).unwrap();
            let of = |row: &Value| {
                let name = |name: &str| row[name].as_str().unwrap_or("-").to_owned();
                (name("start"), name("tenant"), name("model"), row["prompt_tokens"].as_u64().unwrap())
            };
            answer["rows"].as_array().unwrap().iter().map(of).collect::<Vec<_>>()
        };
        let row = |start: &str, tenant: &str, model: &str, prompt| {
            (format!("{start}:00:00Z"), tenant.to_owned(), model.to_owned(), prompt)
        };
        assert_eq!(rows(""), [row("2026-11-28T00", "-", "-", 10), row("2026-11-29T00", "-", "-", 20)]);
        assert_eq!(
            rows("by=month&from=2026-01-01"),
            [row("2026-10-01T00", "-", "-", 10), row("2026-11-01T00", "-", "-", 30)]
        );
        assert_eq!(rows("by=hour&group=tenant,model&tenant=a"), [row("2026-11-29T07", "a", "m", 20)]);
        assert_eq!(rows("key=k3&group=model"), [row("2026-11-28T00", "-", "n", 10)]);
        assert_eq!(rows("model=none"), []);
    }

    #[test]
    fn a_table_is_one_for_spreadsheets() {
        let text = report("format=csv&group=tenant,key", &[(NOW, "a, \"b\"", "=k", "m")]).unwrap();
        let names = Counts::NAMES.join(",");
        let want = format!(
            "start,instance,tenant,key,{names}\r\n2026-11-29T00:00:00Z,gw-1,\"a, \"\"b\"\"\",'=k,1,1,0,0,0,0,0,10,4,3,1,0,1,0,0,13\r\n"
        );
        assert_eq!(text, want);
    }

    #[test]
    fn costs_are_shown_to_the_last_digit() {
        let counts = Counts::of(
            BilledEnd::Completed,
            Tokens { prompt: 9, ..Tokens::default() },
            Tokens::default(),
            None,
        );
        let told = |query: &str| {
            let question = UsageQuestion::read(query, &HeaderMap::new(), NOW).unwrap();
            let mut report = Report::new(&question, Some("EUR"));
            for cost in [Some(12_500_000_001), Some(2), None] {
                let counts = cost.map_or(counts, |cost| counts.priced(Money::of_nanos(cost)));
                report.add(NOW, &Row { tenant: "a", key: "k", model: "m" }, &counts).unwrap();
            }
            String::from_utf8(report.write("gw-1")).unwrap()
        };
        let answer: Value = serde_json::from_str(&told("")).unwrap();
        assert_eq!(answer["currency"], "EUR");
        assert_eq!(
            (&answer["rows"][0]["cost"], &answer["rows"][0]["unpriced_tokens"]),
            (&"12.500000003".into(), &9.into())
        );
        let table = told("format=csv");
        assert!(
            table.contains(",unpriced_tokens,cost,currency\r\n")
                && table.ends_with(",9,12.500000003,EUR\r\n")
        );
    }

    #[test]
    fn an_answer_has_so_many_rows() {
        let names: Vec<String> = (0..=USAGE_ANSWER_ROWS).map(|i| i.to_string()).collect();
        let rows: Vec<_> = names.iter().map(|name| (NOW, &**name, "", "")).collect();
        let error = report("group=tenant", &rows).unwrap_err();
        assert!(error.to_string().contains("50000 rows"), "{error}");
        assert!(report("", &rows).is_ok() && report("group=tenant", &rows[1..]).is_ok());
    }
}
