//! Who may come in, and how much each may ask for: API keys stand for tenants, tenants have limits, and a
//! tenant's prompts share no cache with another's. A client's key ends here; workers get their own. Without a
//! file of tenants all clients may come in.

mod estimate;
mod file;
mod owners;
mod salt;
mod standing;
mod steering;
mod totals;
mod visit;

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
    time::{Duration, SystemTime},
};

use http::{HeaderMap, HeaderName, header::AUTHORIZATION};
use keyway_core::{RateLimit, index::Owner};
use keyway_wire::block_hash::HashKey;
use parking_lot::{Mutex, RwLock};
use prometheus::IntCounter;

pub use self::{
    estimate::{Estimate, unclear},
    file::{TenantTable, hex, key_hash},
    salt::{keep_apart, rewritten},
    steering::Steering,
    totals::TenantTotals,
    visit::{Used, Visit},
};
use self::{
    file::{KeyHash, Parsed},
    owners::Numbers,
};
use crate::{
    clock::Clock,
    config::{ConfigError, TenantRules},
    error::Error,
    ledger::{KeyId, Tokens},
    machine::descriptors,
    metrics::TenantMetrics,
    party::Party,
};

/// Where Anthropic's clients put their key.
pub(crate) const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");
/// The outcome of a request that was let in.
const ADMITTED: &str = "admitted";

/// The tenants as the file has them, read again when it changes.
#[derive(Debug)]
pub struct Tenants {
    path: PathBuf,
    rules: TenantRules,
    /// What the rules let all of them steer engines by.
    steering: Arc<Steering>,
    salt_key: HashKey,
    clock: Clock,
    counted: TenantMetrics,
    /// When the file had changed at the last look.
    seen: Mutex<Option<SystemTime>>,
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
    /// Stands for the name where owners are counted.
    number: u32,
    /// Whose the blocks of its prompts are in the index, where tenants share none.
    owner: Owner,
    /// What separates its prompts from others'; `None` where tenants share.
    salt: Option<String>,
    /// By what it may steer engines.
    steering: Arc<Steering>,
    budget: Mutex<Budget>,
    /// What it has of the gateway's places.
    party: Party,
    clock: Clock,
    counted: TenantMetrics,
    /// Its prompts', cached and generated tokens, once there are any.
    tokens: OnceLock<[IntCounter; 3]>,
}

#[derive(Debug)]
struct Budget {
    in_flight: usize,
    /// Tokens of answers that no share of the waiting room has been charged for yet.
    owed: f64,
    /// Prompt tokens of its answers so far.
    prompt_tokens: u64,
    requests: Option<RateLimit>,
    tokens: Option<RateLimit>,
}

/// Why a request may not come in.
#[derive(Debug)]
pub struct Refused {
    /// What its client is told.
    pub error: Error,
    /// Whose it is, where its key says so: it counts as in flight nowhere.
    pub visit: Option<Visit>,
}

/// Whether the file of tenants can be used, and what they may steer engines by.
pub fn check(path: Option<&Path>, rules: &TenantRules) -> Result<(), ConfigError> {
    Steering::allowing(&rules.steering)?;
    path.map(file::read).transpose().map(drop)
}

impl Tenants {
    /// Reads the file. `salt_key`: from which names are made that keep prompts apart.
    pub fn load(
        path: PathBuf,
        rules: TenantRules,
        salt_key: HashKey,
        clock: Clock,
        counted: TenantMetrics,
    ) -> Result<Arc<Self>, ConfigError> {
        let seen = Mutex::new(changed_at(&path));
        let parsed = file::read(&path)?;
        let steering = Arc::new(Steering::allowing(&rules.steering)?);
        let current = RwLock::default();
        let tenants = Self { path, rules, steering, salt_key, clock, counted, seen, current };
        tenants.take_over(parsed);
        Ok(Arc::new(tenants))
    }

    /// The same tenants by another file or another rule; what they have used of their limits stays used where
    /// the rule is the same.
    pub fn moved(&self, path: PathBuf, rules: TenantRules) -> Result<Arc<Self>, ConfigError> {
        let seen = Mutex::new(changed_at(&path));
        let parsed = file::read(&path)?;
        let mut known = Known::default();
        if rules == self.rules {
            known.by_name.clone_from(&self.current.read().by_name);
        }
        let steering = Arc::new(Steering::allowing(&rules.steering)?);
        let (salt_key, clock, counted) = (self.salt_key, self.clock, self.counted.clone());
        let moved =
            Self { path, rules, steering, salt_key, clock, counted, seen, current: RwLock::new(known) };
        moved.take_over(parsed);
        Ok(Arc::new(moved))
    }

    /// Whose key a request carries; the key is taken out of it.
    pub fn admit(&self, headers: &mut HeaderMap) -> Result<Visit, Refused> {
        let (tenant, key) = self.whose(headers).ok_or(Refused { error: Error::BadKey, visit: None })?;
        headers.remove(AUTHORIZATION);
        headers.remove(X_API_KEY);
        let entered = tenant.enter();
        let outcome = entered.as_ref().map_or_else(Error::code, |()| ADMITTED);
        self.counted.requests.with_label_values(&[tenant.name(), outcome]).inc();
        let visit = Visit::new(tenant, key, entered.is_ok());
        match entered {
            Ok(()) => Ok(visit),
            Err(error) => Err(Refused { error, visit: Some(visit) }),
        }
    }

    fn whose(&self, headers: &HeaderMap) -> Option<(Arc<Tenant>, KeyId)> {
        let bearer = headers.get(AUTHORIZATION).map(http::HeaderValue::as_bytes).and_then(bearer);
        let key = bearer.or_else(|| headers.get(X_API_KEY).map(http::HeaderValue::as_bytes))?;
        let hash = key_hash(key);
        let tenant = self.current.read().by_key.get(&hash).cloned()?;
        Some((tenant, KeyId::of(&hash)))
    }

    fn take_over(&self, parsed: Parsed) {
        // Held throughout, so that no request finds the door without its keys.
        let mut current = self.current.write();
        let now = self.clock.now();
        let known = |table: &TenantTable| current.by_name.get(&table.name).map(|known| known.owner);
        let mut numbers = Numbers::kept(parsed.tenants.iter().filter_map(known));
        let tenant = |table: TenantTable| match current.by_name.get(&table.name) {
            // What it has used of its limits stays used, unless they are others now.
            Some(same) if same.table.same_limits(&table) => Arc::clone(same),
            _ => Arc::new(Tenant {
                steering: Arc::clone(&self.steering),
                salt: self.rules.isolate.then(|| salt::salt_of(self.salt_key, &table.name)),
                budget: Mutex::new(Budget {
                    in_flight: 0,
                    owed: 0.0,
                    prompt_tokens: 0,
                    requests: table.requests_per_minute.map(|limit| RateLimit::per_minute(limit, now)),
                    tokens: table.tokens_per_minute.map(|limit| RateLimit::per_minute(limit, now)),
                }),
                party: Party::default(),
                clock: self.clock,
                counted: self.counted.clone(),
                tokens: OnceLock::new(),
                number: file::number_of(&table.name),
                owner: known(&table).unwrap_or_else(|| numbers.give(&table.name)),
                table,
            }),
        };
        let tenants: Vec<Arc<Tenant>> = parsed.tenants.into_iter().map(tenant).collect();
        *current = Known {
            by_key: parsed.of_key.into_iter().map(|(key, i)| (key, Arc::clone(&tenants[i]))).collect(),
            by_name: tenants.iter().map(|tenant| (tenant.name().to_owned(), Arc::clone(tenant))).collect(),
        };
    }

    /// Reads the file again if it has changed since the last look. One that is wrong changes nothing but the
    /// log.
    pub fn look(&self) {
        if descriptors::have_run_out() {
            // It is read once there is a descriptor for it.
            return;
        }
        let now = changed_at(&self.path);
        if std::mem::replace(&mut *self.seen.lock(), now) == now {
            return;
        }
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

fn changed_at(path: &Path) -> Option<SystemTime> {
    fs::metadata(path).and_then(|file| file.modified()).ok()
}

impl Tenant {
    /// Its name in the file of tenants, which logs and metrics show.
    pub fn name(&self) -> &str {
        &self.table.name
    }

    /// All of its requests.
    pub fn party(&self) -> &Party {
        &self.party
    }

    /// Counts what one of its requests has used.
    pub fn used(&self, tokens: Tokens) {
        if tokens.total() == 0 {
            return;
        }
        let of = |kind| self.counted.tokens.with_label_values(&[self.name(), kind]);
        let counters = self.tokens.get_or_init(|| ["prompt", "cached", "generated"].map(of));
        for (counter, more) in counters.iter().zip([tokens.prompt, tokens.cached, tokens.generated]) {
            counter.inc_by(more);
        }
    }

    fn enter(&self) -> Result<(), Error> {
        let now = self.clock.now();
        let mut budget = self.budget.lock();
        if self.table.max_in_flight.is_some_and(|max| budget.in_flight >= max) {
            let limit = "requests in flight (max_in_flight)";
            return Err(Error::TenantLimit { limit, retry_after: Duration::from_secs(1) });
        }
        if let Some(tokens) = &mut budget.tokens {
            // What it takes is reserved once its body is here: that of a request which cannot begin is not
            // read.
            tokens.wait(1.0, now).map_err(over_tokens)?;
        }
        if let Some(requests) = &mut budget.requests {
            let over = |retry_after| Error::TenantLimit {
                limit: "requests in a minute (requests_per_minute)",
                retry_after,
            };
            requests.take(1.0, now).map_err(over)?;
        }
        budget.in_flight += 1;
        Ok(())
    }
}

fn over_tokens(retry_after: Duration) -> Error {
    Error::TenantLimit { limit: "tokens in a minute (tokens_per_minute)", retry_after }
}

/// The key of `Bearer KEY`; the scheme's letters may be of either case (RFC 9110 §11.1).
fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, key) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
}

#[cfg(test)]
mod tests;
