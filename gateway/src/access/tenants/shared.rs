//! Limits that hold over several gateways. Requests are judged by what the store has granted beforehand, so
//! that they need not wait for it; one that finds nothing waits for the store's next answer, some
//! milliseconds at most. While the store is away each gateway goes by its part of the limits.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

use super::{
    Account, Left, Tenant,
    account::BudgetName,
    limit::{Denied, Judge},
};
use crate::{
    clock::{self, Clock, Instant},
    config::StoreConfig,
    error::Error,
    limits::{
        STORE_BUDGETS_FOR, STORE_EVERY, STORE_PATIENCE, STORE_PAUSE, STORE_QUESTIONS_MAX, STORE_SIGN_OF_LIFE,
    },
    metrics::{PeerStates, StoreMetrics},
    store::{About, LimitAnswer, LimitQuestion, Link, StoreError},
};

/// What all tenants' shared limits have in common.
#[derive(Debug)]
pub struct SharedLimits {
    config: StoreConfig,
    /// This process, at the store.
    gateway: String,
    clock: Clock,
    metrics: StoreMetrics,
    peers: PeerStates,
    /// Parts by which limits are judged; 0: by the store.
    parts: AtomicUsize,
    /// Connections to the store so far: a new one may be to a store that has forgotten all.
    links: AtomicUsize,
    /// Gateways, as the store last said.
    known: AtomicUsize,
    /// Number of the next tenant, which tells those of one name apart.
    next: AtomicUsize,
    /// Those with requests of late, or with something that is the store's.
    listed: Mutex<Vec<Arc<Tenant>>>,
    /// Those of which a request waits for the store.
    urgent: Mutex<Vec<Arc<Tenant>>>,
    wanted: Notify,
    /// Changes with every answer, and where the store goes away.
    answered: watch::Sender<()>,
}

impl SharedLimits {
    /// Nothing is known of the store before [`SharedLimits::keep`] runs.
    pub fn new(config: StoreConfig, clock: Clock, metrics: StoreMetrics, peers: PeerStates) -> Arc<Self> {
        metrics.is_up(false);
        Arc::new(Self {
            parts: config.gateways.into(),
            config,
            gateway: format!("{:016x}", fastrand::u64(..)),
            clock,
            metrics,
            peers,
            links: AtomicUsize::default(),
            known: 1.into(),
            next: AtomicUsize::default(),
            listed: Mutex::default(),
            urgent: Mutex::default(),
            wanted: Notify::new(),
            answered: watch::Sender::new(()),
        })
    }

    /// A number that no other tenant of this process has.
    pub(super) fn number(&self) -> u64 {
        self.next.fetch_add(1, Relaxed) as u64
    }

    pub(super) fn judge(&self) -> Judge {
        match self.parts.load(Relaxed) {
            0 => Judge::Store,
            parts => Judge::Part(parts),
        }
    }

    /// Connections to the store so far.
    pub(super) fn links(&self) -> usize {
        self.links.load(Relaxed)
    }

    /// A tenant has requests, or something that is the store's.
    pub(super) fn list(&self, tenant: &Arc<Tenant>) {
        self.listed.lock().push(Arc::clone(tenant));
    }

    /// One of a tenant's requests waits.
    pub(super) fn hurry(&self, tenant: &Arc<Tenant>) {
        self.urgent.lock().push(Arc::clone(tenant));
        self.wanted.notify_one();
    }

    /// Tries until it may, or may not; while the store may have more, again after each of its answers. After
    /// [`STORE_PATIENCE`] this gateway's part decides.
    pub(super) async fn ask<T>(
        &self,
        tenant: &Arc<Tenant>,
        attempt: impl Fn(Judge) -> Result<T, Denied>,
    ) -> Result<T, Error> {
        match attempt(self.judge()) {
            Ok(done) => return Ok(done),
            Err(Denied::Over(error)) => return Err(self.refused(error, self.judge())),
            Err(Denied::Ask) => {}
        }
        let mut answered = self.answered.subscribe();
        let until = Instant::now() + STORE_PATIENCE;
        loop {
            tenant.hurries();
            let in_time = clock::timeout_at(until, answered.changed()).await.is_ok();
            let judge = if in_time { self.judge() } else { Judge::Part(self.gateways()) };
            match attempt(judge) {
                Ok(done) => return Ok(done),
                Err(Denied::Over(error)) => return Err(self.refused(error, judge)),
                Err(Denied::Ask) if in_time => {}
                // A part never asks; and one that did must not wait for ever.
                Err(Denied::Ask) => return Err(Error::Internal),
            }
        }
    }

    fn refused(&self, error: Error, judge: Judge) -> Error {
        if judge != Judge::Store {
            self.metrics.refused_without();
        }
        error
    }

    /// How many gateways there are, as far as anybody has said: rather too many than too few.
    fn gateways(&self) -> usize {
        self.config.gateways.max(self.known.load(Relaxed)).max(self.peers.heard_now() + 1)
    }

    /// Asks the store whatever there is to ask, for ever; comes back to it when it was away.
    pub async fn keep(self: Arc<Self>) {
        let (mut pause, mut told) = (STORE_PAUSE.0, false);
        loop {
            let lost = match Link::connect(&self.config, &self.gateway).await {
                Ok(mut link) => {
                    let lost = self.serve(&mut link, &mut told).await;
                    if self.parts.load(Relaxed) == 0 {
                        pause = STORE_PAUSE.0;
                    }
                    lost
                }
                Err(lost) => lost,
            };
            let gateways = self.gateways();
            self.parts.store(gateways, Relaxed);
            self.metrics.is_up(false);
            self.answered.send_replace(());
            if !told {
                let store = self.config.place();
                tracing::warn!(
                    store, error = %lost, gateways,
                    "the store of tenants' limits is away: each gateway goes by its part of them until it is back"
                );
                told = true;
            }
            clock::sleep(pause).await;
            pause = (2 * pause).min(STORE_PAUSE.1);
        }
    }

    /// Asks until there is no answer.
    async fn serve(&self, link: &mut Link, told: &mut bool) -> StoreError {
        let mut next_all = Duration::ZERO;
        self.links.fetch_add(1, Relaxed);
        loop {
            let now = self.clock.now();
            let all = now >= next_all;
            let hurried = std::mem::take(&mut *self.urgent.lock());
            let tenants = if all { self.listed.lock().clone() } else { hurried };
            if let Err(lost) = self.ask_for(link, &tenants).await {
                return lost;
            }
            if self.parts.swap(0, Relaxed) != 0 {
                self.metrics.is_up(true);
                let (store, gateways) = (self.config.place(), self.known.load(Relaxed));
                tracing::info!(store, gateways, "tenants' limits are kept together by the store");
                *told = false;
            }
            self.answered.send_replace(());
            self.forget(now);
            let some = !self.listed.lock().is_empty();
            let pause = if some { STORE_EVERY } else { STORE_SIGN_OF_LIFE };
            next_all = if all { now + pause } else { next_all.min(now + pause) };
            let rest = next_all.saturating_sub(self.clock.now());
            // Late or wanted: both are a reason to ask.
            let _ = clock::timeout(rest, self.wanted.notified()).await;
        }
    }

    /// Asks for these tenants, and says at least that this gateway lives.
    async fn ask_for(&self, link: &mut Link, tenants: &[Arc<Tenant>]) -> Result<(), StoreError> {
        let mut left = tenants;
        loop {
            let (mut questions, mut asked) = (Vec::<LimitQuestion>::new(), 0);
            // A tenant has three limits at most, and a budget of each name.
            while asked < left.len() && questions.len() + 3 + BudgetName::ALL.len() <= STORE_QUESTIONS_MAX {
                left[asked].questions(&mut questions);
                asked += 1;
            }
            let now = self.clock.now();
            let answers = link.ask(&questions).await;
            let answered = self.clock.now();
            let mut limits = answers.as_ref().map(|answers| answers.limits.iter().copied()).ok();
            for tenant in &left[..asked] {
                tenant.answers(limits.as_mut(), answered);
            }
            let gateways = answers?.gateways;
            self.known.store(gateways, Relaxed);
            self.metrics.answered(answered.saturating_sub(now), gateways);
            left = &left[asked..];
            if left.is_empty() {
                return Ok(());
            }
        }
    }

    /// Of tenants without requests, and without anything of the store's, nothing is said any more.
    fn forget(&self, now: Duration) {
        // A request lists its tenant while it has the tenant's lock, so that is never waited for with the
        // list's.
        let listed = self.listed.lock().clone();
        let gone: Vec<_> = listed.into_iter().filter(|tenant| tenant.unlisted(now)).collect();
        let mut listed = self.listed.lock();
        for tenant in gone {
            // Once: a request may have listed it again.
            if let Some(at) = listed.iter().position(|other| Arc::ptr_eq(other, &tenant)) {
                listed.swap_remove(at);
            }
        }
    }
}

impl Tenant {
    /// Something of its limits is taken or given back: the store is asked from now on, where there is one.
    pub(super) fn is_used(self: &Arc<Self>, left: &mut Left) {
        let Some((shared, _)) = &self.shared else { return };
        left.used_at = self.clock.now();
        if !std::mem::replace(&mut left.listed, true) {
            shared.list(self);
            // What others have used of its budgets is not waited for, so it is asked for at once.
            if self.account().is_some() && !std::mem::replace(&mut left.hurries, true) {
                shared.hurry(self);
            }
        }
    }

    /// The store is asked at least once what is used of its budgets, if it has any.
    pub(super) fn asks_of_budgets(self: &Arc<Self>) {
        if let Some((shared, _)) = &self.shared
            && self.account().is_some()
            && !std::mem::replace(&mut self.left.lock().listed, true)
        {
            shared.list(self);
        }
    }

    /// One of its requests waits for the store.
    pub(super) fn hurries(self: &Arc<Self>) {
        if let Some((shared, _)) = &self.shared
            && !std::mem::replace(&mut self.left.lock().hurries, true)
        {
            shared.hurry(self);
        }
    }

    /// Adds what the store is to be asked now.
    pub(super) fn questions(&self, into: &mut Vec<LimitQuestion>) {
        let Some((_, number)) = self.shared else { return };
        let now = self.clock.now();
        let left = &mut *self.left.lock();
        left.hurries = false;
        let slots = left.slots.as_mut().map(|slots| (slots.ask(left.in_flight, now), slots.most()));
        let abouts = [
            ("requests", left.requests.as_mut().and_then(|limit| limit.ask(About::Requests, now))),
            ("tokens", left.tokens.as_mut().and_then(|limit| limit.ask(About::Tokens, now))),
            ("in_flight", slots.map(|(asked, most)| About::Slots(asked, most))),
        ];
        into.extend(abouts.into_iter().filter_map(|(limit, about)| {
            Some(LimitQuestion { key: format!("{limit}:{}", self.name()), number, about: about? })
        }));
        let asks = |account: &Arc<Account>| account.questions(into, clock::unix_seconds() as u64);
        left.asked = self.account().map(asks).unwrap_or_default();
    }

    /// Takes the answers to [`Tenant::questions`], in the same order; `None`: there are none.
    pub(super) fn answers(&self, mut answers: Option<&mut impl Iterator<Item = LimitAnswer>>, now: Duration) {
        let left = &mut *self.left.lock();
        let mut next = || answers.as_mut().and_then(Iterator::next);
        for limit in [&mut left.requests, &mut left.tokens].into_iter().flatten() {
            limit.take(next(), now);
        }
        if let Some(slots) = &mut left.slots {
            match next() {
                Some(answer) => slots.take_answer(answer.of_slots(), now),
                None => slots.gets_no_answer(),
            }
        }
        for asked in std::mem::take(&mut left.asked) {
            let answer = next();
            if let (Some(account), Some(answer)) = (&self.account, answer) {
                let crossed = account.answer(asked, answer.of_budget(), clock::unix_seconds() as u64);
                account.tell(&crossed);
            }
        }
    }

    /// Whether the store need not be asked of it until its next request; then it is no longer listed.
    pub(super) fn unlisted(&self, now: Duration) -> bool {
        let left = &mut *self.left.lock();
        let mut limits = [&left.requests, &left.tokens].into_iter().flatten();
        let rests = limits.all(|limit| limit.rests(now))
            && left.slots.as_ref().is_none_or(|slots| left.in_flight == 0 && slots.rests(now));
        let budgets_rest = |account: &Arc<Account>| {
            account.is_said() && now.saturating_sub(left.used_at) >= STORE_BUDGETS_FOR
        };
        let rests = rests && self.account().is_none_or(budgets_rest);
        left.listed = !rests;
        rests
    }
}
