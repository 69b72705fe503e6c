//! What is added is there, once, and for as long as it is to be kept.

use super::*;
use crate::ledger::{BilledEnd, Tokens};

fn config(folder: &tempfile::TempDir) -> UsageConfig {
    UsageConfig {
        file: folder.path().join("usage"),
        keep_days: 400,
        max_series: 10,
        instance: "a".to_owned(),
        prices: None,
    }
}

fn rows(hour: u32, prompt: u64) -> Vec<HourRow> {
    let tokens = Tokens { prompt, ..Tokens::default() };
    vec![(hour, Series::new(None, "m"), Counts::of(BilledEnd::Completed, tokens, Tokens::default(), None))]
}

/// When rows begin, and their prompts' tokens.
fn all(store: &Store) -> Vec<(u64, u64)> {
    let mut found = Vec::new();
    let note = |at, _: Row<'_>, counts: &Counts| {
        let prompt = counts.named().find(|(name, _)| *name == "prompt_tokens").unwrap().1;
        found.push((at, prompt));
        Ok::<_, ()>(())
    };
    store.read().unwrap().each(0, u64::MAX, note).unwrap().unwrap();
    found
}

#[test]
fn sums_outlive_the_process_and_no_write_counts_twice() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(&config(&folder)).unwrap();
    assert!(all(&store).is_empty() && !store.has(1).unwrap());
    store.add(&rows(5, 7), 1).unwrap();
    store.add(&rows(5, 8), 2).unwrap();
    store.add(&rows(6, 1), 3).unwrap();
    assert!(store.has(3).unwrap() && !store.has(2).unwrap());
    drop(store);
    let store = Store::open(&config(&folder)).unwrap();
    assert_eq!(all(&store), [(5 * 3_600, 15), (6 * 3_600, 1)]);
    let id = store.id().unwrap();
    drop(store);
    let store = Store::open(&config(&folder)).unwrap();
    assert_eq!(store.id().unwrap(), id);
    let other = tempfile::tempdir().unwrap();
    assert_ne!(Store::open(&config(&other)).unwrap().id().unwrap(), id);
    assert_eq!((store.series_of(5).unwrap().len(), store.series_of(7).unwrap().len()), (1, 0));
}

#[test]
fn a_file_has_one_owner_and_must_be_one() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(&folder);
    let _store = Store::open(&config).unwrap();
    assert!(matches!(Store::open(&config), Err(StoreError::Held)));
    config.file = folder.path().join("text");
    std::fs::write(&config.file, "no database, and long enough to be taken for one".repeat(1_000)).unwrap();
    assert!(matches!(Store::open(&config), Err(StoreError::Unusable(_))));
    config.file = folder.path().join("nowhere/usage");
    assert!(matches!(Store::open(&config), Err(StoreError::Unusable(_))));
}

#[test]
fn old_hours_become_days_and_older_days_go() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(&config(&folder)).unwrap();
    let (day, now) = (1_000_u32, 1_000 * 24 + 13);
    for old in [0, 34, 35, 36, 36, 399, 400, 401, 500] {
        for hour in [0, 23] {
            store.add(&rows((day - old) * 24 + hour, 1), 1).unwrap();
        }
    }
    while store.sweep(now, 400).unwrap() {}
    let found = all(&store);
    let at = |old: u32, hour: u32| u64::from((day - old) * 24 + hour) * 3_600;
    let days = [(at(400, 0), 2), (at(399, 0), 2), (at(36, 0), 4)];
    let hours = [35, 34, 0].map(|old| [(at(old, 0), 1), (at(old, 23), 1)]);
    assert_eq!(found, [&days[..], hours.as_flattened()].concat());
    // A month and a half later, what was kept by the hour is kept by the day.
    while store.sweep(now + 45 * 24, 400).unwrap() {}
    let later = all(&store);
    assert_eq!(later.iter().map(|(_, prompt)| prompt).sum::<u64>(), 4 + 6);
    // And of less than a month nothing becomes a day.
    while store.sweep(now, 10).unwrap() {}
    assert_eq!(all(&store), [(at(0, 0), 2)]);
}

#[test]
fn a_part_of_the_time_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(&config(&folder)).unwrap();
    for hour in 0..10 {
        store.add(&rows(hour, u64::from(hour)), 1).unwrap();
    }
    let mut found = Vec::new();
    let note = |at: u64, _: Row<'_>, _: &Counts| {
        found.push(at / 3_600);
        if at == 5 * 3_600 { Err("enough") } else { Ok(()) }
    };
    let stopped = store.read().unwrap().each(3 * 3_600, 9 * 3_600, note).unwrap();
    assert_eq!((found, stopped), (vec![3, 4, 5], Err("enough")));
}
