//! Rows in a file: a table of hours, and one of days for what is older. All that is added at a time is one
//! transaction with a number, so that a write of which nobody knows whether it arrived is not repeated.

use redb::{
    Builder, Database, DatabaseError, ReadTransaction, ReadableDatabase as _, ReadableTable as _, Table,
    TableDefinition, TableError,
};

use super::{Counts, Series, counts::Row, pending::HourRow};
use crate::{
    config::UsageConfig,
    limits::{USAGE_CACHE_BYTES, USAGE_HOURLY_DAYS, USAGE_SWEEP_ROWS},
    machine::panics,
};

/// When, in hours or days since 1970; tenant, key, model.
type At = (u32, &'static str, &'static str, &'static str);

const HOURS: TableDefinition<At, &[u8]> = TableDefinition::new("hours");
const DAYS: TableDefinition<At, &[u8]> = TableDefinition::new("days");
/// The number of the last write.
const LAST: TableDefinition<(), u64> = TableDefinition::new("last_write");

/// What costs in the file are in.
const CURRENCY: TableDefinition<(), &str> = TableDefinition::new("currency");

/// A number that no other file has.
const ID: TableDefinition<(), u64> = TableDefinition::new("id");

/// Seconds of an hour and of a day.
const UNITS_S: [u64; 2] = [3_600, 86_400];

/// Why the file cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum StoreError {
    /// Another process has it.
    #[error("another process has it open")]
    Held,
    /// What was paid in one currency cannot be added to what is paid in another.
    #[error("its costs are in {has}, and usage.currency is {wanted}: name another file for it")]
    Currency {
        /// What costs in the file are in.
        has: String,
        /// What they would be in.
        wanted: String,
    },
    /// In the words of the system or of the database.
    #[error("{0}")]
    Unusable(String),
}

impl<E: Into<redb::Error>> From<E> for StoreError {
    fn from(error: E) -> Self {
        Self::Unusable(error.into().to_string())
    }
}

/// The file, open for this process alone.
#[derive(Debug)]
pub(super) struct Store(Database);

/// What was in the file at one moment.
pub(super) struct Reading(ReadTransaction);

/// Begins a range of rows.
fn from(at: u32) -> (u32, &'static str, &'static str, &'static str) {
    (at, "", "", "")
}

impl Store {
    pub(super) fn open(config: &UsageConfig) -> Result<Self, StoreError> {
        let open = || Builder::new().set_cache_size(USAGE_CACHE_BYTES).create(&config.file);
        // What is no database may be anything.
        let opened = panics::stopped(open);
        let damaged = || StoreError::Unusable("it is damaged".to_owned());
        match opened.ok_or_else(damaged)? {
            Ok(database) => {
                let store = Self(database);
                config.prices.as_ref().map_or(Ok(()), |prices| store.keeps(&prices.currency))?;
                Ok(store)
            }
            Err(DatabaseError::DatabaseAlreadyOpen) => Err(StoreError::Held),
            Err(error) => Err(error.into()),
        }
    }

    /// Costs are in this currency from now on, or were before.
    fn keeps(&self, currency: &str) -> Result<(), StoreError> {
        let transaction = self.0.begin_write()?;
        {
            let mut table = transaction.open_table(CURRENCY)?;
            let has = table.get(())?.map(|has| has.value().to_owned());
            match has {
                Some(has) if has == currency => {}
                Some(has) => return Err(StoreError::Currency { has, wanted: currency.to_owned() }),
                None => {
                    table.insert((), currency)?;
                }
            }
        }
        Ok(transaction.commit()?)
    }

    /// A number that tells it from other gateways' files; drawn once.
    pub(super) fn id(&self) -> Result<u64, StoreError> {
        if let Some(id) = self.numbered(ID)? {
            return Ok(id);
        }
        let (id, transaction) = (fastrand::u64(1..), self.0.begin_write()?);
        transaction.open_table(ID)?.insert((), id)?;
        transaction.commit()?;
        Ok(id)
    }

    fn numbered(&self, table: TableDefinition<(), u64>) -> Result<Option<u64>, StoreError> {
        match self.0.begin_read()?.open_table(table) {
            Ok(table) => Ok(table.get(())?.map(|number| number.value())),
            Err(TableError::TableDoesNotExist(_)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether this write was the last that arrived.
    pub(super) fn has(&self, write: u64) -> Result<bool, StoreError> {
        Ok(self.numbered(LAST)? == Some(write))
    }

    /// Adds rows, all or none.
    pub(super) fn add(&self, batch: &[HourRow], write: u64) -> Result<(), StoreError> {
        let transaction = self.0.begin_write()?;
        {
            let mut hours = transaction.open_table(HOURS)?;
            for (hour, series, counts) in batch {
                add(&mut hours, *hour, series.as_row(), counts)?;
            }
            transaction.open_table(LAST)?.insert((), write)?;
        }
        Ok(transaction.commit()?)
    }

    /// Moves hours that are old to their days, and removes what is older than `keep_days`. Returns whether
    /// there may be more to do.
    pub(super) fn sweep(&self, hour_now: u32, keep_days: u32) -> Result<bool, StoreError> {
        let today = hour_now / 24;
        let (hourly_from, kept_from) =
            (today.saturating_sub(USAGE_HOURLY_DAYS), today.saturating_sub(keep_days));
        let transaction = self.0.begin_write()?;
        let mut done = 0;
        {
            let (mut hours, mut days) = (transaction.open_table(HOURS)?, transaction.open_table(DAYS)?);
            let old = hourly_from.max(kept_from) * 24;
            for (hour, series, counts) in oldest(&hours, old)? {
                if hour / 24 >= kept_from {
                    add(&mut days, hour / 24, series.as_row(), &counts)?;
                }
                remove(&mut hours, hour, series.as_row())?;
                done += 1;
            }
            for (day, series, _) in oldest(&days, kept_from)? {
                remove(&mut days, day, series.as_row())?;
                done += 1;
            }
        }
        if done == 0 {
            transaction.abort()?;
            return Ok(false);
        }
        transaction.commit()?;
        Ok(true)
    }

    /// Whose rows an hour has.
    pub(super) fn series_of(&self, hour: u32) -> Result<Vec<Series>, StoreError> {
        let mut found = Vec::new();
        let note = |_, row: Row<'_>, _: &Counts| {
            found.push(Series { tenant: row.tenant.into(), key: row.key.into(), model: row.model.into() });
            Ok::<_, std::convert::Infallible>(())
        };
        let [hour_s, _] = UNITS_S;
        let at = u64::from(hour) * hour_s;
        self.read()?.each(at, at + hour_s, note)?.map_or_else(|never| match never {}, |()| Ok(found))
    }

    pub(super) fn read(&self) -> Result<Reading, StoreError> {
        Ok(Reading(self.0.begin_read()?))
    }
}

impl Reading {
    /// Shows all rows that begin from `since` on and before `until`, in seconds since 1970: days first. Stops
    /// where `show` does.
    pub(super) fn each<E>(
        &self,
        since: u64,
        until: u64,
        mut show: impl FnMut(u64, Row<'_>, &Counts) -> Result<(), E>,
    ) -> Result<Result<(), E>, StoreError> {
        let [hour_s, day_s] = UNITS_S;
        for (definition, unit) in [(DAYS, day_s), (HOURS, hour_s)] {
            let table = match self.0.open_table(definition) {
                Err(TableError::TableDoesNotExist(_)) => continue,
                table => table?,
            };
            let bound = |at: u64| u32::try_from(at.div_ceil(unit)).unwrap_or(u32::MAX);
            if bound(since) >= bound(until) {
                continue;
            }
            for row in table.range(from(bound(since))..from(bound(until)))? {
                let (at, counts) = row?;
                let (at, tenant, key, model) = at.value();
                let counts = Counts::from_bytes(counts.value());
                if let Err(stop) = show(u64::from(at) * unit, Row { tenant, key, model }, &counts) {
                    return Ok(Err(stop));
                }
            }
        }
        Ok(Ok(()))
    }
}

type Rows<'a> = Table<'a, At, &'static [u8]>;

fn add(table: &mut Rows<'_>, at: u32, row: Row<'_>, counts: &Counts) -> Result<(), StoreError> {
    let key = (at, row.tenant, row.key, row.model);
    let mut sum = table.get(key)?.map(|bytes| Counts::from_bytes(bytes.value())).unwrap_or_default();
    sum.add(counts);
    table.insert(key, &*sum.to_bytes())?;
    Ok(())
}

fn remove(table: &mut Rows<'_>, at: u32, row: Row<'_>) -> Result<(), StoreError> {
    table.remove((at, row.tenant, row.key, row.model))?;
    Ok(())
}

/// The first rows before `end`.
fn oldest(table: &Rows<'_>, end: u32) -> Result<Vec<HourRow>, StoreError> {
    let mut found = Vec::new();
    for row in table.range(from(0)..from(end))?.take(USAGE_SWEEP_ROWS) {
        let (at, counts) = row?;
        let (at, tenant, key, model) = at.value();
        let series = Series { tenant: tenant.into(), key: key.into(), model: model.into() };
        found.push((at, series, Counts::from_bytes(counts.value())));
    }
    Ok(found)
}

#[cfg(test)]
mod tests;
