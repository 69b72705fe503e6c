//! From sums to what they gained between two samples, and from there to rows over an hour: of the busiest by
//! name, and one row for the rest.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    iter, mem,
};

/// Those that are not among the busiest; no model and no tenant is called so.
pub(super) const OTHERS: &str = "(others)";

/// Sums of one model or tenant, or what they gained between two samples.
pub(super) trait Sums: Clone + Default {
    /// Whose they are.
    fn name(&self) -> &str;

    /// The same sums as another one's.
    fn named(self, name: &str) -> Self;

    /// Requests, by which the busiest are found, and whatever else moved. Of whom neither did, nothing is
    /// kept.
    fn moved(&self) -> (u64, u64);

    /// Both together, by the name of the first.
    fn plus(self, more: &Self) -> Self;

    /// What they gained since `before`.
    fn since(&self, before: &Self) -> Self;
}

/// One model's or tenant's row: a value for each sample.
pub(super) trait Row: Default {
    /// What its values are made of.
    type Of: Sums;

    /// A row without values.
    fn of(name: &str) -> Self;

    /// How many values it has.
    fn len(&self) -> usize;

    /// Adds the next sample's values.
    fn push(&mut self, gained: &Self::Of);
}

/// The sums at the sample before, by name.
#[derive(Debug, Default)]
pub(super) struct LastSums<T>(BTreeMap<String, T>);

impl<T: Sums> LastSums<T> {
    /// What each has gained since the call before: at most `most`, the rest in one.
    pub(super) fn gained(&mut self, sums: Vec<T>, most: usize) -> Vec<T> {
        let (before, nothing) = (mem::take(&mut self.0), T::default());
        let gained = |now: &T| now.since(before.get(now.name()).unwrap_or(&nothing));
        let mut rows: Vec<T> = sums.iter().map(gained).filter(|row| row.moved() > (0, 0)).collect();
        self.0 = sums.into_iter().map(|now| (now.name().to_owned(), now)).collect();
        rows.sort_by_key(|row| Reverse(row.moved()));
        if rows.len() > most {
            let rest = rows.split_off(most - 1);
            rows.push(rest.iter().fold(T::default(), T::plus).named(OTHERS));
        }
        rows
    }
}

/// Rows over all `samples`: everybody together first, then at most `most` by name, the rest in one of these.
pub(super) fn rows<R: Row>(samples: &[&[R::Of]], most: usize) -> Vec<R> {
    let busiest = busiest(samples, most);
    let mut all = R::of("all");
    let mut named: BTreeMap<&str, R> = BTreeMap::new();
    for (at, sample) in samples.iter().enumerate() {
        all.push(&sample.iter().fold(R::Of::default(), R::Of::plus));
        let (known, rest): (Vec<&R::Of>, Vec<_>) =
            sample.iter().partition(|gained| busiest.contains(gained.name()));
        for gained in known {
            let row = named.entry(gained.name()).or_insert_with(|| R::of(gained.name()));
            fill(row, at);
            row.push(gained);
        }
        if !rest.is_empty() {
            let row = named.entry(OTHERS).or_insert_with(|| R::of(OTHERS));
            fill(row, at);
            row.push(&rest.into_iter().fold(R::Of::default(), R::Of::plus));
        }
    }
    for row in named.values_mut() {
        fill(row, samples.len());
    }
    iter::once(all).chain(named.into_values()).collect()
}

/// Nothing happened until this sample.
fn fill<R: Row>(row: &mut R, until: usize) {
    while row.len() < until {
        row.push(&R::Of::default());
    }
}

/// Who has a row: with one for the rest, if there are any, at most `most`.
fn busiest<'a, T: Sums>(samples: &[&'a [T]], most: usize) -> BTreeSet<&'a str> {
    let mut moved: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for gained in samples.iter().copied().flatten() {
        let (requests, else_moved) = gained.moved();
        let sum = moved.entry(gained.name()).or_default();
        *sum = (sum.0 + requests, sum.1 + else_moved);
    }
    let all_fit = moved.remove(OTHERS).is_none() && moved.len() <= most;
    let mut names: Vec<_> = moved.into_iter().collect();
    names.sort_by_key(|(_, moved)| Reverse(*moved));
    names.truncate(if all_fit { most } else { most - 1 });
    names.into_iter().map(|(name, _)| name).collect()
}
