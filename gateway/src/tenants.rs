//! Who may come in, and how much each may ask for: API keys stand for tenants, tenants have limits, and a tenant's prompts
//! share no cache with another's. A client's key ends here; workers get their own. Without a file of tenants everybody may
//! come in.

mod file;
mod salt;

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use http::{HeaderMap, HeaderName, header::AUTHORIZATION};
use keyway_core::RateLimit;
use keyway_wire::{block_hash::HashKey, openai::Usage};
use parking_lot::{Mutex, RwLock};
use prometheus::IntCounterVec;

use self::file::{KeyHash, Parsed};
pub use self::{
    file::{TenantTable, hex, key_hash},
    salt::salted,
};
use crate::{
    clock::{self, Clock},
    config::ConfigError,
    error::Error,
    limits::TENANTS_RELOAD_INTERVAL,
};

/// Where Anthropic's clients put their key.
const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// The tenants as the file has them, read again when it changes.
#[derive(Debug)]
pub struct Tenants {
    path: PathBuf,
    isolate: bool,
    salt_key: HashKey,
    clock: Clock,
    counted: IntCounterVec,
    current: RwLock<Known>,
}

#[derive(Debug, Default)]
struct Known {
    by_name: HashMap<String, Arc<Tenant>>,
    by_key: HashMap<KeyHash, Arc<Tenant>>,
}

/// One tenant and what is left of its limits.
#[derive(Debug)]
pub struct Tenant {
    table: TenantTable,
    /// What separates its prompts from others'; `None` where tenants share.
    salt: Option<String>,
    budget: Mutex<Budget>,
    clock: Clock,
}

#[derive(Debug)]
struct Budget {
    in_flight: usize,
    requests: Option<RateLimit>,
    tokens: Option<RateLimit>,
}

/// A tenant's request, which counts as in flight until it is dropped.
#[derive(Debug)]
pub struct Visit(Arc<Tenant>);

/// Whether a file of tenants can be used.
pub fn check(path: &Path) -> Result<(), ConfigError> {
    file::read(path).map(drop)
}

impl Tenants {
    /// Reads the file. `isolate`: whether their prompts are kept apart; `salt_key`: from which names are made for that.
    pub fn load(
        path: PathBuf,
        isolate: bool,
        salt_key: HashKey,
        clock: Clock,
        counted: IntCounterVec,
    ) -> Result<Arc<Self>, ConfigError> {
        let parsed = file::read(&path)?;
        let tenants = Self { path, isolate, salt_key, clock, counted, current: RwLock::default() };
        tenants.take_over(parsed);
        Ok(Arc::new(tenants))
    }

    /// Whose key a request carries; the key is taken out of it.
    pub fn admit(&self, headers: &mut HeaderMap) -> Result<Visit, Error> {
        let tenant = self.whose(headers).ok_or(Error::BadKey)?;
        headers.remove(AUTHORIZATION);
        headers.remove(X_API_KEY);
        let result = tenant.enter();
        let outcome = result.as_ref().map_or_else(Error::code, |()| "admitted");
        self.counted.with_label_values(&[tenant.name(), outcome]).inc();
        result.map(|()| Visit(tenant))
    }

    fn whose(&self, headers: &HeaderMap) -> Option<Arc<Tenant>> {
        let bearer = headers.get(AUTHORIZATION).map(http::HeaderValue::as_bytes).and_then(bearer);
        let key = bearer.or_else(|| headers.get(X_API_KEY).map(http::HeaderValue::as_bytes))?;
        self.current.read().by_key.get(&key_hash(key)).cloned()
    }

    fn take_over(&self, parsed: Parsed) {
        let old = std::mem::take(&mut *self.current.write());
        let now = self.clock.now();
        let tenant = |table: TenantTable| match old.by_name.get(&table.name) {
            // What it has used of its limits stays used, unless they are others now.
            Some(same) if same.table.same_limits(&table) => Arc::clone(same),
            _ => Arc::new(Tenant {
                salt: self.isolate.then(|| salt::salt_of(self.salt_key, &table.name)),
                budget: Mutex::new(Budget {
                    in_flight: 0,
                    requests: table.requests_per_minute.map(|limit| RateLimit::per_minute(limit, now)),
                    tokens: table.tokens_per_minute.map(|limit| RateLimit::per_minute(limit, now)),
                }),
                clock: self.clock,
                table,
            }),
        };
        let tenants: Vec<Arc<Tenant>> = parsed.tenants.into_iter().map(tenant).collect();
        *self.current.write() = Known {
            by_key: parsed.of_key.into_iter().map(|(key, i)| (key, Arc::clone(&tenants[i]))).collect(),
            by_name: tenants.iter().map(|tenant| (tenant.name().to_owned(), Arc::clone(tenant))).collect(),
        };
    }

    /// Reads the file again whenever it has changed, for ever. One that is wrong changes nothing but the log.
    pub async fn follow_file(self: Arc<Self>) {
        let mut seen = self.changed_at();
        loop {
            clock::sleep(TENANTS_RELOAD_INTERVAL).await;
            let now = self.changed_at();
            if now == seen {
                continue;
            }
            seen = now;
            match file::read(&self.path) {
                Ok(parsed) => {
                    let count = parsed.tenants.len();
                    self.take_over(parsed);
                    tracing::info!(tenants = count, "the file of tenants was read again");
                }
                Err(error) => tracing::warn!(%error, "the tenants stay as they were"),
            }
        }
    }

    fn changed_at(&self) -> Option<SystemTime> {
        fs::metadata(&self.path).and_then(|file| file.modified()).ok()
    }
}

impl Tenant {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.table.name
    }

    fn enter(&self) -> Result<(), Error> {
        let now = self.clock.now();
        let mut budget = self.budget.lock();
        if self.table.max_in_flight.is_some_and(|max| budget.in_flight >= max) {
            let limit = "requests in flight (max_in_flight)";
            return Err(Error::TenantLimit { limit, retry_after: Duration::from_secs(1) });
        }
        let late = |limit| move |retry_after| Error::TenantLimit { limit, retry_after };
        if let Some(tokens) = &mut budget.tokens {
            // Whoever owes nothing may begin; what it took is charged at its end.
            tokens.wait(1.0, now).map_err(late("tokens in a minute (tokens_per_minute)"))?;
        }
        if let Some(requests) = &mut budget.requests {
            requests.take(1.0, now).map_err(late("requests in a minute (requests_per_minute)"))?;
        }
        budget.in_flight += 1;
        Ok(())
    }
}

impl Visit {
    /// Whose it is.
    pub fn tenant(&self) -> &Tenant {
        &self.0
    }

    /// What separates its prompts from other tenants'.
    pub fn salt(&self) -> Option<&str> {
        self.0.salt.as_deref()
    }

    /// Charges the tokens of an answer.
    pub fn charge(&self, usage: &Usage) {
        if let Some(tokens) = &mut self.0.budget.lock().tokens {
            tokens.charge((usage.prompt_tokens + usage.completion_tokens) as f64);
        }
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        self.0.budget.lock().in_flight -= 1;
    }
}

/// The key of `Bearer KEY`; the scheme's letters may be of either case (RFC 9110 §11.1).
fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, key) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
}

#[cfg(test)]
mod tests;
