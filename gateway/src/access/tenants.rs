//! Who may come in, and how much each may ask for: API keys stand for tenants, tenants have limits, and a
//! tenant's prompts share no cache with another's. A client's key ends here; workers get their own. Without a
//! file of tenants all clients may come in.

mod account;
mod budgets;
mod estimate;
mod file;
mod limit;
mod owners;
mod salt;
mod shared;
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
use keyway_core::{Slots, index::Owner};
use keyway_wire::block_hash::HashKey;
use parking_lot::{Mutex, RwLock};
use prometheus::IntCounter;

use self::{
    account::AskedBudget,
    budgets::Watched,
    file::{KeyHash, Parsed},
    limit::{Denied, Judge, Limit, has_slot},
    owners::Numbers,
};
pub use self::{
    account::{Account, Crossed, Held},
    estimate::{Estimate, unclear},
    file::{TenantTable, hex, key_hash},
    salt::{keep_apart, rewritten},
    shared::SharedLimits,
    steering::Steering,
    totals::TenantTotals,
    visit::{Used, Visit},
};
use crate::{
    access::oidc::Oidc,
    clock::{self, Clock},
    config::{ConfigError, TenantRules},
    error::Error,
    ledger::{KeyId, Ledger, Tokens},
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
    held_by: HeldBy,
    watched: Watched,
    /// When the file had changed at the last look.
    seen: Mutex<Option<SystemTime>>,
    current: RwLock<Known>,
}

/// By what tenants are known and held, beside the file of them.
#[derive(Debug, Clone, Default)]
pub struct HeldBy {
    /// By what limits hold over several gateways; `None`: over this one.
    pub shared: Option<Arc<SharedLimits>>,
    /// Judges tokens in place of keys; `None`: none are good.
    pub oidc: Option<Arc<Oidc>>,
    /// What has been used before of budgets; `None`: there can be none.
    pub ledger: Option<Arc<Ledger>>,
}

#[derive(Debug, Default)]
struct Known {
    by_name: HashMap<String, Arc<Tenant>>,
    by_key: HashMap<KeyHash, Arc<Tenant>>,
    /// By the name of their tenant, where usage is kept. They outlive other limits and other rules.
    accounts: HashMap<String, Arc<Account>>,
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
    left: Mutex<Left>,
    /// What it has of the gateway's places.
    party: Party,
    clock: Clock,
    counted: TenantMetrics,
    /// Its prompts', cached and generated tokens, once there are any.
    tokens: OnceLock<[IntCounter; 3]>,
    /// By what its limits hold over several gateways, and its number there.
    shared: Option<(Arc<SharedLimits>, u64)>,
    /// What it has used of its budgets; `None`: it can have none.
    account: Option<Arc<Account>>,
}

#[derive(Debug)]
struct Left {
    in_flight: usize,
    /// Of a limit on requests in flight that several gateways keep together.
    slots: Option<Slots>,
    /// Its limits are among those of which the store is asked; and at once.
    listed: bool,
    hurries: bool,
    /// When something of them was last used, where the store is asked of them.
    used_at: Duration,
    /// What the store was last asked of its budgets.
    asked: Vec<AskedBudget>,
    /// Tokens of answers that no share of the waiting room has been charged for yet.
    owed: f64,
    /// Prompt tokens of its answers so far.
    prompt_tokens: u64,
    requests: Option<Limit>,
    tokens: Option<Limit>,
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
    path.map(|path| file::read(path, rules.budgets)).transpose().map(drop)
}

impl Tenants {
    /// Reads the file. `salt_key`: from which names are made that keep prompts apart.
    pub fn load(
        path: PathBuf,
        rules: TenantRules,
        salt_key: HashKey,
        clock: Clock,
        counted: TenantMetrics,
        held_by: HeldBy,
    ) -> Result<Arc<Self>, ConfigError> {
        let seen = Mutex::new(changed_at(&path));
        let parsed = file::read(&path, rules.budgets)?;
        let steering = Arc::new(Steering::allowing(&rules.steering)?);
        let current = RwLock::default();
        let watched = Watched::default();
        let tenants =
            Self { path, rules, steering, salt_key, clock, counted, held_by, watched, seen, current };
        tenants.take_over(parsed);
        Ok(Arc::new(tenants))
    }

    /// The same tenants by another file or another rule; what they have used of their limits stays used where
    /// the rule is the same.
    pub fn moved(&self, path: PathBuf, rules: TenantRules) -> Result<Arc<Self>, ConfigError> {
        let seen = Mutex::new(changed_at(&path));
        let parsed = file::read(&path, rules.budgets)?;
        let mut known = Known { accounts: self.current.read().accounts.clone(), ..Known::default() };
        if rules == self.rules {
            known.by_name.clone_from(&self.current.read().by_name);
        }
        let steering = Arc::new(Steering::allowing(&rules.steering)?);
        let (salt_key, clock, counted) = (self.salt_key, self.clock, self.counted.clone());
        let (held_by, watched) = (self.held_by.clone(), Watched::default());
        let current = RwLock::new(known);
        let moved = Self { path, rules, steering, salt_key, clock, counted, held_by, watched, seen, current };
        moved.take_over(parsed);
        Ok(Arc::new(moved))
    }

    /// Whose key a request carries; the key is taken out of it. Where limits hold over several gateways,
    /// [`Tenants::admit_shared`] does that. `computes`: it may make a worker compute.
    pub fn admit(&self, headers: &mut HeaderMap, computes: bool) -> Result<Visit, Refused> {
        let (tenant, key) = self.known(headers)?;
        let entered = tenant.has_budget_left(computes).and_then(|()| {
            tenant.enter(Judge::Store).map_err(|denied| match denied {
                Denied::Over(error) => error,
                // No store is asked here.
                Denied::Ask => Error::Internal,
            })
        });
        self.admitted((tenant, key), entered)
    }

    /// By what limits hold over several gateways, if they do.
    pub fn shared(&self) -> Option<&Arc<SharedLimits>> {
        self.held_by.shared.as_ref()
    }

    /// As [`Tenants::admit`], of limits that hold over several gateways: where nothing of them is here the
    /// store is asked.
    pub async fn admit_shared(
        &self,
        shared: &SharedLimits,
        headers: &mut HeaderMap,
        computes: bool,
    ) -> Result<Visit, Refused> {
        let (tenant, key) = self.known(headers)?;
        let entered = match tenant.has_budget_left(computes) {
            Ok(()) => shared.ask(&tenant, |judge| tenant.enter(judge)).await,
            over => over,
        };
        self.admitted((tenant, key), entered)
    }

    fn known(&self, headers: &mut HeaderMap) -> Result<(Arc<Tenant>, KeyId), Refused> {
        let known = self.whose(headers).map_err(|error| Refused { error, visit: None })?;
        headers.remove(AUTHORIZATION);
        headers.remove(X_API_KEY);
        Ok(known)
    }

    fn admitted(
        &self,
        (tenant, key): (Arc<Tenant>, KeyId),
        entered: Result<(), Error>,
    ) -> Result<Visit, Refused> {
        let outcome = entered.as_ref().map_or_else(Error::code, |()| ADMITTED);
        self.counted.requests.with_label_values(&[tenant.name(), outcome]).inc();
        let visit = Visit::new(tenant, key, entered.is_ok());
        match entered {
            Ok(()) => Ok(visit),
            Err(error) => Err(Refused { error, visit: Some(visit) }),
        }
    }

    fn whose(&self, headers: &HeaderMap) -> Result<(Arc<Tenant>, KeyId), Error> {
        let bearer = headers.get(AUTHORIZATION).map(http::HeaderValue::as_bytes).and_then(bearer);
        let key = bearer.or_else(|| headers.get(X_API_KEY).map(http::HeaderValue::as_bytes));
        let key = key.ok_or(Error::BadKey)?;
        let hash = key_hash(key);
        if let Some(tenant) = self.current.read().by_key.get(&hash) {
            return Ok((Arc::clone(tenant), KeyId::of(&hash)));
        }
        let oidc = self.held_by.oidc.as_ref().filter(|_| Oidc::may_be_one(key)).ok_or(Error::BadKey)?;
        let holder = oidc.judge(key, &hash)?;
        let current = self.current.read();
        let named = holder.names.iter().find_map(|name| current.by_name.get(name));
        let tenant = match named {
            Some(tenant) => tenant,
            // One that was configured and is not in the file any more has no place for its tokens.
            None => current.by_name.get(oidc.tenant_of_others()?).ok_or(Error::BadKey)?,
        };
        oidc.admits();
        Ok((Arc::clone(tenant), holder.key))
    }

    fn take_over(&self, parsed: Parsed) {
        // Held throughout, so that no request finds the door without its keys.
        let mut current = self.current.write();
        let now = self.clock.now();
        let known = |table: &TenantTable| current.by_name.get(&table.name).map(|known| known.owner);
        let accounts: HashMap<String, Arc<Account>> = match &self.held_by.ledger {
            Some(ledger) => {
                let of = |table| self.account(table, &current, ledger);
                parsed.tenants.iter().map(of).collect()
            }
            None => HashMap::new(),
        };
        let mut numbers = Numbers::kept(parsed.tenants.iter().filter_map(known));
        let tenant = |table: TenantTable| match current.by_name.get(&table.name) {
            // What it has used of its limits stays used, unless they are others now.
            Some(same) if same.table.same_limits(&table) => Arc::clone(same),
            _ => Arc::new(Tenant {
                steering: Arc::clone(&self.steering),
                salt: self.rules.isolate.then(|| salt::salt_of(self.salt_key, &table.name)),
                left: Mutex::new(Left::of(&table, self.held_by.shared.is_some(), now)),
                shared: self.held_by.shared.as_ref().map(|shared| (Arc::clone(shared), shared.number())),
                party: Party::default(),
                clock: self.clock,
                counted: self.counted.clone(),
                tokens: OnceLock::new(),
                number: file::number_of(&table.name),
                owner: known(&table).unwrap_or_else(|| numbers.give(&table.name)),
                account: accounts.get(&table.name).cloned(),
                table,
            }),
        };
        let tenants: Vec<Arc<Tenant>> = parsed.tenants.into_iter().map(tenant).collect();
        *current = Known {
            by_key: parsed.of_key.into_iter().map(|(key, i)| (key, Arc::clone(&tenants[i]))).collect(),
            by_name: tenants.iter().map(|tenant| (tenant.name().to_owned(), Arc::clone(tenant))).collect(),
            accounts,
        };
    }

    /// A tenant's name, and what it has used of its budgets, which are the table's from now on.
    fn account(&self, table: &TenantTable, current: &Known, ledger: &Ledger) -> (String, Arc<Account>) {
        let known = current.accounts.get(&table.name).cloned();
        let account = known.unwrap_or_else(|| Account::new(&table.name, self.counted.clone(), ledger.id()));
        let crossed = account.allow(table.budget.as_ref(), clock::unix_seconds() as u64);
        account.tell(&crossed);
        (table.name.clone(), account)
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
        match file::read(&self.path, self.rules.budgets) {
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

    /// One of its requests is refused that was let in.
    fn refuses(&self, error: &Error) {
        self.counted.requests.with_label_values(&[self.name(), error.code()]).inc();
    }

    /// What it has used of its budgets, where it has any.
    fn account(&self) -> Option<&Arc<Account>> {
        self.account.as_ref().filter(|account| account.has_budget())
    }

    /// Whether its budgets have something left for a request. `computes`: others need nothing of them.
    fn has_budget_left(&self, computes: bool) -> Result<(), Error> {
        match self.account().filter(|_| computes) {
            Some(account) => account.may_begin(clock::unix_seconds() as u64),
            None => Ok(()),
        }
    }

    fn enter(self: &Arc<Self>, judge: Judge) -> Result<(), Denied> {
        let now = self.clock.now();
        let left = &mut *self.left.lock();
        self.is_used(left);
        let over_in_flight =
            |retry_after| Error::TenantLimit { limit: "requests in flight (max_in_flight)", retry_after };
        let slots = match &mut left.slots {
            Some(slots) => has_slot(slots, left.in_flight, judge, now),
            None if self.table.max_in_flight.is_some_and(|max| left.in_flight >= max) => {
                return Err(Denied::Over(over_in_flight(Duration::from_secs(1))));
            }
            None => Ok(()),
        };
        let slots = slots.map_err(|dry| Denied::of(dry, over_in_flight));
        if let Err(Denied::Over(_)) = &slots {
            return slots;
        }
        // What it takes is reserved once its body is here: that of a request which cannot begin is not read.
        let tokens = left.tokens.as_mut().map_or(Ok(()), |tokens| tokens.has_one(1.0, judge, now));
        let tokens = tokens.map_err(|dry| Denied::of(dry, over_tokens));
        if let Err(Denied::Over(_)) = &tokens {
            return tokens;
        }
        // So that the store is asked of all of them at once.
        if let (Some(Limit::Shared(_)), true) = (&left.requests, slots.is_err() || tokens.is_err()) {
            let requests = left.requests.as_mut().map_or(Ok(()), |limit| limit.has_one(1.0, judge, now));
            requests.map_err(|dry| Denied::of(dry, over_requests))?;
        }
        slots.and(tokens)?;
        let requests = left.requests.as_mut().map_or(Ok(()), |limit| limit.reserve(1.0, judge, now));
        requests.map_err(|dry| Denied::of(dry, over_requests))?;
        left.in_flight += 1;
        left.slots.iter_mut().for_each(|slots| slots.begins(now));
        Ok(())
    }

    /// By what its limits are judged, and the time.
    fn by(&self) -> (Judge, Duration) {
        (self.judge(), self.clock.now())
    }

    /// By what its limits are judged.
    fn judge(&self) -> Judge {
        self.shared.as_ref().map_or(Judge::Store, |(shared, _)| shared.judge())
    }
}

impl Left {
    fn of(table: &TenantTable, is_shared: bool, now: Duration) -> Self {
        let limit = |limit: Option<f64>| limit.map(|limit| Limit::per_minute(limit, is_shared, now));
        Self {
            in_flight: 0,
            slots: table.max_in_flight.filter(|_| is_shared).map(|most| Slots::at_most(most, now)),
            listed: false,
            hurries: false,
            used_at: now,
            asked: Vec::new(),
            owed: 0.0,
            prompt_tokens: 0,
            requests: limit(table.requests_per_minute),
            tokens: limit(table.tokens_per_minute),
        }
    }
}

fn over_requests(retry_after: Duration) -> Error {
    Error::TenantLimit { limit: "requests in a minute (requests_per_minute)", retry_after }
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
