//! What is entered is in the sums, once, whatever becomes of the file.

use std::path::Path;

use http::HeaderMap;
use serde_json::Value;

use super::*;
use crate::{config::UsageFile, metrics::Metrics};

fn ledger(file: &Path) -> Arc<Ledger> {
    Ledger::new(config(file, "EUR"), Metrics::new().unwrap().usage)
}

fn config(file: &Path, currency: &str) -> UsageConfig {
    let price = "[[price]]\nmodel = \"m\"\nprompt_per_million = 2\ngenerated_per_million = 5";
    let usage: UsageFile =
        toml::from_str(&format!("currency = {currency:?}\nmax_series = 100\nfile = {file:?}\n{price}"))
            .unwrap();
    UsageConfig { instance: "gw".to_owned(), ..usage.validated().unwrap().unwrap() }
}

fn enter(ledger: &Ledger, prompt: u64) {
    let tokens = Tokens { prompt, cached: 0, generated: 1 };
    let counts = Counts::of(BilledEnd::Completed, tokens, Tokens::default(), None);
    let cost = ledger.cost("m", tokens).unwrap();
    ledger.enter(Series::new(Some(("a", KeyId::of(&[7; 32]))), "m"), &counts.priced(cost), || {});
}

/// Requests and prompt tokens of all that is known.
fn sums(ledger: &Ledger) -> (u64, u64) {
    let now = clock::unix_seconds() as u64;
    let question = UsageQuestion::read("by=month&group=tenant,key,model", &HeaderMap::new(), now).unwrap();
    let answer: Value = serde_json::from_slice(&ledger.report(&question).unwrap()).unwrap();
    let rows = answer["rows"].as_array().unwrap();
    assert!(rows.len() <= 1, "{rows:?}");
    let sum = |name: &str| rows.iter().map(|row| row[name].as_u64().unwrap()).sum();
    for row in rows {
        assert_eq!((&row["tenant"], &row["key"]), (&"a".into(), &"070707070707".into()));
    }
    (sum("requests"), sum("prompt_tokens"))
}

fn write(ledger: &Ledger) {
    ledger.write(&mut ledger.book.lock(), true);
}

#[tokio::test]
async fn what_is_entered_is_seen_at_once_and_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("usage");
    for run in 1..4 {
        let ledger = ledger(&file);
        ledger.open(false).unwrap();
        enter(&ledger, 10);
        assert_eq!(sums(&ledger), (3 * run - 2, 30 * run - 20), "in memory");
        write(&ledger);
        assert_eq!(sums(&ledger), (3 * run - 2, 30 * run - 20), "in the file");
        enter(&ledger, 10);
        enter(&ledger, 10);
        assert_eq!(sums(&ledger), (3 * run, 30 * run), "in both");
        // The last word comes as the process ends.
        Arc::clone(&ledger).close().await;
        assert_eq!(ledger.metrics.failures.get(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn who_is_not_over_is_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("usage");
    let first = ledger(&file);
    first.open(false).unwrap();
    first.begins();
    let late = Arc::clone(&first);
    let over = tokio::spawn(async move {
        clock::sleep(USAGE_LAST_REQUESTS_PATIENCE / 2).await;
        enter(&late, 5);
        late.ended();
    });
    Arc::clone(&first).close().await;
    over.await.unwrap();
    let second = ledger(&file);
    second.open(false).unwrap();
    assert_eq!(sums(&second), (1, 5));
}

#[test]
fn a_file_that_cannot_be_used_is_tried_again_and_loses_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let ledger = ledger(&folder.path().join("later/usage"));
    ledger.open(false).unwrap();
    enter(&ledger, 3);
    ledger.write(&mut ledger.book.lock(), false);
    assert_eq!(ledger.metrics.failures.get(), 1, "not at every write");
    write(&ledger);
    assert_eq!((ledger.metrics.failures.get(), ledger.metrics.unwritten.get()), (2, 1));
    let question = UsageQuestion::read("", &HeaderMap::new(), clock::unix_seconds() as u64).unwrap();
    assert_eq!(ledger.report(&question).unwrap_err(), Error::UsageUnreadable);
    std::fs::create_dir(folder.path().join("later")).unwrap();
    write(&ledger);
    assert_eq!((sums(&ledger), ledger.metrics.unwritten.get()), ((1, 3), 0));
}

#[tokio::test]
async fn another_s_file_is_an_error_and_a_predecessor_s_is_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("usage");
    let (first, second) = (ledger(&file), ledger(&file));
    first.open(false).unwrap();
    assert!(second.open(false).unwrap_err().to_string().contains("another process"));
    second.open(true).unwrap();
    enter(&first, 1);
    enter(&second, 2);
    write(&second);
    assert_eq!(second.metrics.unwritten.get(), 1);
    first.close().await;
    write(&second);
    assert_eq!(sums(&second), (2, 3));
}

#[test]
fn a_write_that_failed_counts_once_whether_it_arrived_or_not() {
    let folder = tempfile::tempdir().unwrap();
    let ledger = ledger(&folder.path().join("usage"));
    for (arrives, all) in [(true, 1), (false, 2)] {
        ledger.open(false).unwrap();
        enter(&ledger, 1);
        let mut book = ledger.book.lock();
        let batch = ledger.pending.lock().take();
        if arrives {
            book.store.as_ref().unwrap().add(&batch, 77).unwrap();
        }
        (book.store, book.unsure) = (None, Some((if arrives { 77 } else { 78 }, batch)));
        assert_eq!(ledger.unwritten(&book), 1);
        drop(book);
        write(&ledger);
        assert_eq!((sums(&ledger), ledger.metrics.unwritten.get()), ((all, all), 0));
        ledger.book.lock().store = None;
    }
}

#[tokio::test]
async fn what_a_tenant_has_used_is_known_of_the_day_and_month() {
    let folder = tempfile::tempdir().unwrap();
    let ledger = ledger(&folder.path().join("usage"));
    let now = clock::unix_seconds() as u64;
    let asked = std::cell::Cell::new(0);
    assert!(ledger.sums(now, || asked.set(1)).is_err() && asked.get() == 0, "no file is open");
    ledger.open(false).unwrap();
    // Rows of the time before the month, of the month before today, and of today; more of that in memory.
    let (day, month) = (By::Day.time(now).start, By::Month.time(now).start);
    let counts = |prompt| {
        let tokens = Tokens { prompt, cached: 0, generated: 1 };
        let counts = Counts::of(BilledEnd::Completed, tokens, Tokens::default(), None);
        counts.priced(ledger.cost("m", tokens).unwrap())
    };
    let row = |at: u64, tenant: &str, prompt| {
        let series = Series { tenant: tenant.into(), key: "k".into(), model: "m".into() };
        ((at / HOUR_S) as u32, series, counts(prompt))
    };
    let rows = [row(month - 1, "a", 1_000), row(month, "a", 100), row(day, "a", 10), row(day, "b", 5)];
    ledger.book.lock().store.as_ref().unwrap().add(&rows, 1).unwrap();
    enter(&ledger, 7);
    let [(day_began, of_day), (month_began, of_month)] = ledger.sums(now, || asked.set(2)).unwrap();
    assert_eq!((asked.get(), day_began, month_began), (2, day, month));
    // Two nano-units for a millionth of two, and five for each answer's token.
    let outlay = |prompt: u64, requests: u64| Outlay {
        tokens: prompt + requests,
        cost: Money::of_nanos(2_000 * prompt + 5_000 * requests),
    };
    // On the first of a month, its first hour is today's.
    let first = if day == month { (100, 1) } else { (0, 0) };
    assert_eq!(of_day["a"], outlay(17 + first.0, 2 + first.1));
    assert_eq!((of_month["a"], of_month["b"], of_month.len()), (outlay(117, 3), outlay(5, 1), 2));
}

#[test]
fn costs_of_another_currency_are_not_added_to_those_in_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("usage");
    let in_currency = |currency: &str| Ledger::new(config(&file, currency), Metrics::new().unwrap().usage);
    in_currency("EUR").open(false).unwrap();
    in_currency("EUR").open(true).unwrap();
    let error = in_currency("USD").open(true).unwrap_err().to_string();
    assert!(error.contains("EUR") && error.contains("USD") && error.contains("another file"), "{error}");
}
