//! Who has used how much: requests and tokens by key, tenant, model and hour. A request is entered once, when
//! it is over, in memory; once a second what is new is added to a file, off the threads that serve. What is
//! in the file was added in whole transactions, so a crash loses the last second and counts nothing twice.
//!
//! Its parts: what a row has (`counts`), the rows in memory (`pending`), those in the file (`store`), and
//! what operators ask for (`question`, `report`).

mod counts;
mod pending;
mod question;
mod report;
mod store;

use std::{
    collections::HashMap,
    sync::{
        Arc, OnceLock,
        atomic::{
            AtomicUsize,
            Ordering::{Acquire, Relaxed, Release},
        },
    },
};

use keyway_core::Money;

use parking_lot::Mutex;
use tokio::task::spawn_blocking;

use self::{
    counts::Row,
    pending::{HourRow, Pending},
    report::Report,
    store::{Reading, Store, StoreError},
};
pub use self::{
    counts::{BilledEnd, Counts, KeyId, Series, Tokens},
    question::{By, Format, UsageQuestion},
};
use crate::{
    clock::{self, Instant},
    config::{ConfigError, UsageConfig},
    error::Error,
    limits::{
        USAGE_LAST_REQUESTS_PATIENCE, USAGE_LAST_WRITE_PATIENCE, USAGE_LOOK, USAGE_RETRY_INTERVAL,
        USAGE_WRITE_INTERVAL,
    },
    metrics::UsageMetrics,
};

/// Seconds of an hour.
const HOUR_S: u64 = 3_600;

/// The rows, those that are in the file and those that are not yet.
#[derive(Debug)]
pub struct Ledger {
    config: UsageConfig,
    pending: Mutex<Pending>,
    /// Locked before `pending` where both are.
    book: Mutex<Book>,
    /// Requests that are to be entered.
    open: AtomicUsize,
    /// The file's number, once it was open.
    id: Arc<OnceLock<u64>>,
    metrics: UsageMetrics,
}

/// What a tenant has used of what budgets are of.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Outlay {
    /// Tokens of prompts and answers.
    pub tokens: u64,
    /// What those of them cost that had a price.
    pub cost: Money,
}

/// What each tenant has used so far in the day and in the month that began then, in seconds since 1970.
pub type Sums = [(u64, HashMap<String, Outlay>); 2];

/// What has the file.
#[derive(Debug, Default)]
struct Book {
    store: Option<Store>,
    /// A write that failed, with its number: whether it arrived shows when the file is open again.
    unsure: Option<(u64, Vec<HourRow>)>,
    /// When the file is tried again.
    retry_at: Option<Instant>,
    /// Hour of the last look for what is old.
    swept: Option<u32>,
    /// Nothing is written any more.
    is_closed: bool,
}

impl Ledger {
    /// Keeps rows in memory until the file is open.
    pub fn new(config: UsageConfig, metrics: UsageMetrics) -> Arc<Self> {
        let pending = Mutex::new(Pending::new(config.max_series));
        let (book, open, id) = (Mutex::default(), AtomicUsize::new(0), Arc::default());
        Arc::new(Self { config, pending, book, open, id, metrics })
    }

    /// Opens the file. One that cannot be used is said once and tried again later; `waits`: so is one that
    /// another process has.
    ///
    /// # Errors
    /// Another process has the file, or its costs are in another currency.
    pub fn open(&self, waits: bool) -> Result<(), ConfigError> {
        let opened = self.try_open(&mut self.book.lock());
        match opened {
            Err(StoreError::Held) if !waits => Err(ConfigError(format!(
                "usage.file {}: another process has it open; each gateway needs a file of its own",
                self.config.file.display()
            ))),
            Err(error @ StoreError::Currency { .. }) => {
                Err(ConfigError(format!("usage.file {}: {error}", self.config.file.display())))
            }
            _ => Ok(()),
        }
    }

    fn try_open(&self, book: &mut Book) -> Result<(), StoreError> {
        let opened = Store::open(&self.config).and_then(|store| {
            // One that was open before had one already.
            let _ = self.id.set(store.id()?);
            let arrived = book.unsure.as_ref().map(|(write, _)| store.has(*write)).transpose()?;
            let (hour, mut pending) = (hour_now(), self.pending.lock());
            pending.know(hour, store.series_of(hour)?);
            if let (Some((_, batch)), Some(false)) = (book.unsure.take(), arrived) {
                pending.put_back(batch);
            }
            Ok(store)
        });
        let store = opened.inspect_err(|error| self.complain(book, error))?;
        if book.retry_at.take().is_some() {
            tracing::info!(file = %self.config.file.display(), "usage is written again");
        }
        book.store = Some(store);
        Ok(())
    }

    /// A number that tells this gateway's use from others', once the file was open: it outlives the process.
    pub fn id(&self) -> Arc<OnceLock<u64>> {
        Arc::clone(&self.id)
    }

    /// A request has come in that is to be entered.
    pub fn begins(&self) {
        self.open.fetch_add(1, Relaxed);
    }

    /// A request is over, and entered.
    pub fn ended(&self) {
        self.open.fetch_sub(1, Release);
    }

    /// What a request costs that went to this model; `None`: the model has no price.
    pub fn cost(&self, model: &str, tokens: Tokens) -> Option<Money> {
        let Tokens { prompt, cached, generated } = tokens;
        self.config.prices.as_ref()?.cost(model, prompt, cached, generated)
    }

    /// Enters a request that is over. `charge`: counts it elsewhere too, at one moment with this as far as
    /// [`Ledger::sums`] sees.
    pub fn enter(&self, series: Series, counts: &Counts, charge: impl FnOnce()) {
        let is_other = {
            let mut pending = self.pending.lock();
            charge();
            pending.add(hour_now(), series, counts)
        };
        if is_other {
            self.metrics.other.inc();
        }
    }

    /// What all tenants have used so far in the day and month of `now`. `asked` is called at the moment of
    /// which that is true, while nothing is entered. Reads the file: off the threads that serve.
    pub fn sums(&self, now: u64, asked: impl FnOnce()) -> Result<Sums, Error> {
        let (reading, unwritten) = self.rows(asked)?;
        let mut sums: Sums = [By::Day, By::Month].map(|by| (by.start(now), HashMap::new()));
        let mut add = |at: u64, tenant: &str, counts: &Counts| {
            for (_, of) in sums.iter_mut().filter(|(begins, _)| at >= *begins) {
                match of.get_mut(tenant) {
                    Some(sum) => sum.add(Outlay::of(counts)),
                    None => {
                        of.insert(tenant.to_owned(), Outlay::of(counts));
                    }
                }
            }
        };
        let month = By::Month.time(now);
        let show = |at, row: Row<'_>, counts: &Counts| {
            add(at, row.tenant, counts);
            Ok::<_, std::convert::Infallible>(())
        };
        let read = reading.each(month.start, month.end, show).map_err(|error| unreadable(&error))?;
        read.unwrap_or_else(|never| match never {});
        for (hour, series, counts) in &unwritten {
            add(u64::from(*hour) * HOUR_S, &series.tenant, counts);
        }
        Ok(sums)
    }

    /// Writes what is new, once a second, for ever.
    pub async fn keep(self: Arc<Self>) {
        loop {
            clock::sleep(USAGE_WRITE_INTERVAL).await;
            let this = Arc::clone(&self);
            // A panic was logged; the rows are still there.
            let _ = spawn_blocking(move || this.write(&mut this.book.lock(), false)).await;
        }
    }

    /// Writes what is left, and closes the file: for the end of the process, when all clients have gone.
    pub async fn close(self: Arc<Self>) {
        let entered = async {
            while self.open.load(Acquire) > 0 {
                clock::sleep(USAGE_LOOK).await;
            }
        };
        if clock::timeout(USAGE_LAST_REQUESTS_PATIENCE, entered).await.is_err() {
            let requests = self.open.load(Acquire);
            tracing::error!(requests, "these are not over, and their usage is lost");
        }
        let closing = spawn_blocking(move || {
            let mut book = self.book.lock();
            self.write(&mut book, true);
            (book.is_closed, book.store) = (true, None);
            self.unwritten(&book)
        });
        match clock::timeout(USAGE_LAST_WRITE_PATIENCE, closing).await {
            Ok(Ok(0)) => {}
            Ok(Ok(requests)) => tracing::error!(requests, "the usage of these is in no file and is lost"),
            _ => tracing::error!("the usage file took too long: what was not written is lost"),
        }
    }

    /// Adds what is new to the file. `last`: a file that could not be written is tried at once.
    fn write(&self, book: &mut Book, last: bool) {
        let is_due = last || book.retry_at.is_none_or(|at| at <= Instant::now());
        let may_write = !book.is_closed && (book.store.is_some() || (is_due && self.try_open(book).is_ok()));
        if may_write && let Err(error) = self.write_new(book, last) {
            book.store = None;
            self.complain(book, &error);
        }
        self.metrics.unwritten.set(self.unwritten(book) as i64);
    }

    fn write_new(&self, book: &mut Book, last: bool) -> Result<(), StoreError> {
        let Some(store) = &book.store else { return Ok(()) };
        let batch = self.pending.lock().take();
        if !batch.is_empty() {
            let write = fastrand::u64(..);
            if let Err(error) = store.add(&batch, write) {
                book.unsure = Some((write, batch));
                return Err(error);
            }
        }
        let now = hour_now();
        if !last && book.swept != Some(now) && !store.sweep(now, self.config.keep_days)? {
            book.swept = Some(now);
        }
        Ok(())
    }

    /// Requests that are not known to be in the file.
    fn unwritten(&self, book: &Book) -> u64 {
        let unsure = book.unsure.iter().flat_map(|(_, batch)| batch).map(|(.., counts)| counts.requests());
        self.pending.lock().requests() + unsure.sum::<u64>()
    }

    /// Notes that the file cannot be used; says so when that begins.
    fn complain(&self, book: &mut Book, error: &StoreError) {
        let is_held = matches!(error, StoreError::Held);
        let again = if is_held { USAGE_WRITE_INTERVAL } else { USAGE_RETRY_INTERVAL };
        let begins = book.retry_at.replace(Instant::now() + again).is_none();
        let file = self.config.file.display();
        if is_held {
            if begins {
                tracing::info!(%file, "usage is held in memory until the process before has closed its file");
            }
            return;
        }
        self.metrics.failures.inc();
        if begins {
            tracing::error!(
                %file, %error,
                "usage cannot be written: requests go on, and it is held in memory until it can"
            );
        }
    }

    /// Answers an operator's question, off the threads that serve.
    pub async fn answer(self: Arc<Self>, question: UsageQuestion) -> Result<Vec<u8>, Error> {
        let answer = spawn_blocking(move || self.report(&question)).await;
        answer.map_err(|_| Error::Internal)?
    }

    /// All rows, those in the file and those that are not yet: together, so that none is seen twice or not at
    /// all. `asked` is called at that moment.
    fn rows(&self, asked: impl FnOnce()) -> Result<(Reading, Vec<HourRow>), Error> {
        let book = self.book.lock();
        let store = book.store.as_ref().ok_or(Error::UsageUnreadable)?;
        let reading = store.read().map_err(|error| unreadable(&error))?;
        let pending = self.pending.lock();
        asked();
        Ok((reading, pending.all()))
    }

    fn report(&self, question: &UsageQuestion) -> Result<Vec<u8>, Error> {
        let (reading, unwritten) = self.rows(|| {})?;
        let currency = self.config.prices.as_ref().map(|prices| prices.currency.as_str());
        let mut report = Report::new(question, currency);
        let add = |at, row: Row<'_>, counts: &Counts| report.add(at, &row, counts);
        reading.each(question.from, question.to, add).map_err(|error| unreadable(&error))??;
        for (hour, series, counts) in &unwritten {
            report.add(u64::from(*hour) * HOUR_S, &series.as_row(), counts)?;
        }
        Ok(report.write(&self.config.instance))
    }
}

impl Outlay {
    /// Of these rows or requests.
    pub fn of(counts: &Counts) -> Self {
        Self { tokens: counts.tokens(), cost: counts.cost() }
    }

    /// Adds what another request or row has used.
    pub fn add(&mut self, more: Self) {
        self.tokens = self.tokens.saturating_add(more.tokens);
        self.cost = self.cost.plus(more.cost);
    }

    /// Takes away what was added before.
    pub fn take(&mut self, less: Self) {
        self.tokens = self.tokens.saturating_sub(less.tokens);
        self.cost = self.cost.minus(less.cost);
    }
}

fn unreadable(error: &StoreError) -> Error {
    tracing::error!(%error, "usage cannot be read");
    Error::UsageUnreadable
}

fn hour_now() -> u32 {
    (clock::unix_seconds() as u64 / HOUR_S) as u32
}

#[cfg(test)]
mod tests;
