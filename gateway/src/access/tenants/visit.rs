//! One request of a tenant: in flight until it is dropped, and charged for its tokens once. What it may take
//! is reserved before a worker is asked, and settled when its answer's usage is known; where it ends without
//! one, by what has passed.

use std::sync::Arc;

use keyway_core::{index::Owner, waiting_room::Share};
use parking_lot::Mutex;

use super::{
    Crossed, Estimate, Held, SharedLimits, Tenant,
    limit::{Denied, Judge},
    over_tokens,
};
use crate::{
    clock,
    error::Error,
    ledger::{KeyId, Outlay, Tokens},
    limits::ANSWER_TOKENS_STEP,
};

/// A tenant's request. It counts as in flight until it is dropped, if it was let in.
#[derive(Debug)]
pub struct Visit {
    tenant: Arc<Tenant>,
    key: KeyId,
    is_in: bool,
    reservation: Mutex<Option<Reservation>>,
}

/// Tokens that are set aside for a request.
#[derive(Debug)]
struct Reservation {
    estimate: Estimate,
    tokens: u64,
    /// A worker was asked: the prompt may have been computed, even if the client has left since.
    asked: bool,
}

/// What a request has used of its tenant's tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Used {
    /// Nothing: it was refused, or failed before its client had anything of it.
    Nothing,
    /// As many, as its worker says.
    Tokens(Tokens),
    /// As many: of its prompt as its worker says, of its answer as have passed.
    Begun(Tokens),
    /// Its prompt, as that was estimated, and as many tokens of its answer.
    Passed(u64),
    /// All that it may: it goes on at its worker, unseen from here.
    Most,
}

impl Visit {
    pub(super) fn new(tenant: Arc<Tenant>, key: KeyId, is_in: bool) -> Self {
        Self { tenant, key, is_in, reservation: Mutex::new(None) }
    }

    /// The tenant whose key the request carried.
    pub fn tenant(&self) -> &Tenant {
        &self.tenant
    }

    /// Which of its tenant's keys it carried.
    pub fn key(&self) -> KeyId {
        self.key
    }

    /// What separates its prompts from other tenants'.
    pub fn salt(&self) -> Option<&str> {
        self.tenant.salt.as_deref()
    }

    /// Whose the blocks of its prompt are in the index. Where tenants share their blocks, no tenant's.
    pub fn index_owner(&self) -> Owner {
        if self.tenant.salt.is_some() { self.tenant.owner } else { Owner::NOBODY }
    }

    /// How it stands among other tenants' requests, with what answers have cost since the last one.
    pub fn share(&self) -> Share {
        let table = &self.tenant.table;
        let (weight, priority) = (table.weight.unwrap_or(1.0), table.priority.unwrap_or(0));
        let owed = std::mem::take(&mut self.tenant.left.lock().owed);
        Share { owner: self.tenant.number, weight, priority, owed, ..Share::default() }
    }

    /// Notes the tokens of an answer: those generated for its tenant's share of the workers, the prompt's for
    /// operators.
    pub fn owes(&self, prompt_tokens: u64, completion_tokens: u64) {
        let mut left = self.tenant.left.lock();
        left.owed += completion_tokens as f64;
        left.prompt_tokens += prompt_tokens;
    }

    /// Whether its tenant has a limit of tokens.
    pub fn is_metered(&self) -> bool {
        self.tenant.table.tokens_per_minute.is_some()
    }

    /// Sets aside what it may take, where its tenant has any tokens left. Once; without a limit, nothing.
    /// Where limits hold over several gateways, [`Visit::reserve_shared`] does that.
    pub fn reserve(&self, estimate: Estimate) -> Result<(), Error> {
        let reserved = self.try_reserve(estimate, Judge::Store).map_err(|denied| match denied {
            Denied::Over(error) => error,
            // No store is asked here.
            Denied::Ask => Error::Internal,
        });
        self.reserved(reserved)
    }

    /// By what its tenant's limits hold over several gateways, if they do.
    pub fn shared(&self) -> Option<&SharedLimits> {
        self.tenant.shared.as_ref().map(|(shared, _)| &**shared)
    }

    /// As [`Visit::reserve`], of limits that hold over several gateways: where nothing of them is here the
    /// store is asked.
    pub async fn reserve_shared(&self, shared: &SharedLimits, estimate: Estimate) -> Result<(), Error> {
        let reserve = |judge| self.try_reserve(estimate, judge);
        self.reserved(shared.ask(&self.tenant, reserve).await)
    }

    fn reserved(&self, reserved: Result<(), Error>) -> Result<(), Error> {
        reserved.inspect_err(|error| self.tenant.refuses(error))
    }

    fn try_reserve(&self, estimate: Estimate, judge: Judge) -> Result<(), Denied> {
        let tenant = &self.tenant;
        let tokens = estimate.tokens();
        let mut reservation = self.reservation.lock();
        let left = &mut *tenant.left.lock();
        if let Some(limit) = &mut left.tokens
            && reservation.is_none()
        {
            let reserved = limit.reserve(tokens as f64, judge, tenant.clock.now());
            reserved.map_err(|dry| Denied::of(dry, over_tokens))?;
            *reservation = Some(Reservation { estimate, tokens, asked: false });
            tenant.is_used(left);
        }
        Ok(())
    }

    /// Whether its tenant has a budget.
    pub fn has_budget(&self) -> bool {
        self.tenant.account().is_some()
    }

    /// Sets aside of its tenant's budgets what it may use, where they have anything left; `None`: there are
    /// none.
    pub fn hold(&self, outlay: Outlay) -> Result<Option<Held>, Error> {
        let held = self.tenant.account().map(|account| account.hold(outlay, clock::unix_seconds() as u64));
        held.transpose().inspect_err(|error| self.tenant.refuses(error))
    }

    /// Charges its tenant's budgets what it has used instead of what was set aside for it, as it is entered
    /// in the ledger.
    pub fn charge(&self, held: Option<Held>, outlay: Outlay) -> Crossed {
        let now = clock::unix_seconds() as u64;
        match (held, self.tenant.account()) {
            (Some(held), _) => held.charge(outlay, now),
            (None, Some(account)) => account.charge(outlay, now),
            (None, None) => Crossed::default(),
        }
    }

    /// It was charged, and its tenant's budgets have come to these marks by that.
    pub fn charged(&self, crossed: &Crossed) {
        if let Some(account) = self.tenant.account() {
            account.tell(crossed);
            self.tenant.is_used(&mut self.tenant.left.lock());
        }
    }

    /// A worker is asked.
    pub fn asks(&self) {
        if let Some(reservation) = &mut *self.reservation.lock() {
            reservation.asked = true;
        }
    }

    /// So many tokens of its answer have passed: what goes beyond the reservation is taken as it passes, in
    /// steps.
    pub fn passes(&self, answer_tokens: u64) {
        let Some(reservation) = &mut *self.reservation.lock() else { return };
        let passed = reservation.estimate.prompt.saturating_add(answer_tokens);
        if passed > reservation.tokens {
            let more = passed - reservation.tokens + ANSWER_TOKENS_STEP;
            reservation.tokens += more;
            let left = &mut *self.tenant.left.lock();
            if let Some(limit) = &mut left.tokens {
                limit.extend(more as f64, || self.tenant.by());
                self.tenant.is_used(left);
            }
        }
    }

    /// Charges it. The first word counts.
    pub fn settle(&self, used: Used) {
        if let Some(reservation) = self.reservation.lock().take() {
            reservation.settle(&self.tenant, used);
        }
    }
}

impl Reservation {
    fn settle(&self, tenant: &Arc<Tenant>, used: Used) {
        let Estimate { prompt, most, .. } = self.estimate;
        let used = match used {
            Used::Nothing => 0,
            Used::Tokens(tokens) | Used::Begun(tokens) => tokens.total(),
            Used::Passed(answer) => prompt.saturating_add(answer),
            Used::Most => prompt.saturating_add(most),
        };
        let left = &mut *tenant.left.lock();
        if let Some(limit) = &mut left.tokens {
            limit.settle(self.tokens as f64, used as f64, || tenant.by());
            tenant.is_used(left);
        }
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        if let Some(reservation) = self.reservation.get_mut().take() {
            // Its client has left before any answer.
            let used = if reservation.asked { Used::Passed(0) } else { Used::Nothing };
            reservation.settle(&self.tenant, used);
        }
        if self.is_in {
            self.tenant.left.lock().in_flight -= 1;
        }
    }
}
