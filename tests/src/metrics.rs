//! Reads the Prometheus text format, as far as the tests look at it: names, labels, values, types.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use crate::client::get;

/// The gateway's gauges that must read 0 when nothing is in flight.
const IN_FLIGHT: [&str; 5] = [
    "keyway_in_flight",
    "keyway_requests_in_flight",
    "keyway_requests_waiting",
    "keyway_resume_bytes",
    "keyway_waiting_prefill_tokens",
];

/// One line of the exposition.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// Name of the series, with `_bucket`, `_sum` or `_count` where it has one.
    pub name: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Its value.
    pub value: f64,
}

/// One scrape.
#[derive(Debug, Clone, Default)]
pub struct Metrics {
    /// The text as served.
    pub text: String,
    /// All samples in order.
    pub samples: Vec<Sample>,
    /// Type of each family.
    pub types: BTreeMap<String, String>,
}

impl Metrics {
    /// Scrapes `http://addr/metrics`.
    pub async fn fetch(addr: SocketAddr) -> Self {
        let response = get(addr, "/metrics").await;
        assert_eq!(response.status(), 200, "{}", response.text());
        Self::parse(&response.text())
    }

    /// Parses an exposition.
    ///
    /// # Panics
    /// On a line that is not one.
    pub fn parse(text: &str) -> Self {
        let mut metrics = Self { text: text.to_owned(), ..Self::default() };
        for line in text.lines().filter(|l| !l.is_empty()) {
            if let Some(family) = line.strip_prefix("# TYPE ") {
                let (name, kind) = family.split_once(' ').expect("a name and a type");
                metrics.types.insert(name.to_owned(), kind.to_owned());
            } else if !line.starts_with('#') {
                metrics.samples.push(parse_sample(line).unwrap_or_else(|| panic!("not a sample: {line:?}")));
            }
        }
        metrics
    }

    /// Sum over the series of this name that carry these labels.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let carries = |s: &Sample| labels.iter().all(|(k, v)| s.labels.get(*k).is_some_and(|x| x == v));
        self.samples.iter().filter(|s| s.name == name && carries(s)).map(|s| s.value).sum()
    }

    /// Whether a family of this name is exposed, with or without samples.
    pub fn has(&self, family: &str) -> bool {
        self.types.contains_key(family)
    }

    /// The gauges that must read 0 when nothing is in flight, and do not.
    pub fn busy(&self) -> Vec<&Sample> {
        self.samples.iter().filter(|s| IN_FLIGHT.contains(&s.name.as_str()) && s.value != 0.0).collect()
    }
}

fn parse_sample(line: &str) -> Option<Sample> {
    let (series, value) = line.rsplit_once(' ')?;
    let (name, labels) = match series.split_once('{') {
        Some((name, labels)) => (name, parse_labels(labels.strip_suffix('}')?)?),
        None => (series, BTreeMap::new()),
    };
    Some(Sample { name: name.to_owned(), labels, value: value.parse().ok()? })
}

fn parse_labels(mut text: &str) -> Option<BTreeMap<String, String>> {
    let mut labels = BTreeMap::new();
    while !text.is_empty() {
        let (key, rest) = text.split_once("=\"")?;
        let mut value = String::new();
        let mut chars = rest.char_indices();
        let end = loop {
            match chars.next()? {
                (at, '"') => break at,
                (_, '\\') => value.push(match chars.next()?.1 {
                    'n' => '\n',
                    other => other,
                }),
                (_, c) => value.push(c),
            }
        };
        labels.insert(key.to_owned(), value);
        text = rest[end + 1..].trim_start_matches(',');
    }
    Some(labels)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_labels_values_and_types_are_read() {
        let metrics = Metrics::parse(
            "# HELP a_total Things.\n# TYPE a_total counter\na_total{m=\"x\",o=\"q\\\"}, \\\\\"} 2\na_total{m=\"y\"} 3\nb 0.5\n\
             keyway_requests_in_flight{w=\"1\"} 0\nkeyway_requests_in_flight{w=\"2\"} 1\n",
        );
        assert!(metrics.has("a_total") && !metrics.has("b"));
        assert_eq!(metrics.sum("a_total", &[]), 5.0);
        assert_eq!(metrics.sum("a_total", &[("m", "x")]), 2.0);
        assert_eq!(metrics.samples[0].labels["o"], "q\"}, \\");
        assert_eq!(metrics.sum("b", &[]), 0.5);
        assert_eq!(metrics.busy().len(), 1);
    }
}
