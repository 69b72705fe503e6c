//! What came of sessions, where a trace tells which turns belong to one: how many ended, how long each took,
//! how long turns were paused, and what of the prompts caches could have had. Prints nothing.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use keyway_wire::block_hash::BlockHash;
use serde::Serialize;

use super::{hindsight::Placements, optimum::Prompts, turns::SessionEnd};
use crate::{
    engine_model::Nanos,
    stats::{Samples, Summary},
    trace::links::Link,
};

/// With so many times as many sessions as go on at once, figures are of the time in which that many do.
const SESSIONS_PER_PLACE: usize = 3;

/// The figures of a run's sessions. Those a second, and shares of tokens, are of the time in which as many
/// sessions as may go on at once do: from when so many have ended until none is left to begin.
#[derive(Debug, Clone, Serialize)]
pub struct SessionFigures {
    /// Sessions that went on at once; null where each began at its recorded time.
    pub at_once: Option<usize>,
    /// Sessions that ended, in the whole run.
    pub ended: u64,
    /// Seconds that the figures below are of, up to the pauses.
    pub seconds: f64,
    /// Sessions that ended in a second.
    pub sessions_per_s: f64,
    /// Requests that ended in a second.
    pub requests_per_s: f64,
    /// Share of prompt tokens found cached.
    pub cached: f64,
    /// Share of prompt tokens that one unbounded cache would have had.
    pub possible: f64,
    /// `cached` over `possible`.
    pub of_possible: f64,
    /// Share of prompt tokens, of the whole run, that no placement could find more of: one cache as large as
    /// all together that knows what will be asked. Only with `--optimum`.
    pub optimum: Option<f64>,
    /// What was found of that, in the whole run.
    pub of_optimum: Option<f64>,
    /// Share of prompt tokens, of the whole run, that the best placement found that was tried afterwards in
    /// a reckoning that knows no load. Only with `--hindsight`.
    pub hindsight: Option<f64>,
    /// What the run's own placement found of that.
    pub of_hindsight: Option<f64>,
    /// Of turns behind a first one, in the whole run; null if there are none.
    pub later_turns: Option<LaterTurns>,
    /// From a session's begin to its last answer's end, in milliseconds, of all sessions.
    pub job: Option<Summary>,
    /// Turns that waited because their session was paused, and for how long, in milliseconds; of the whole
    /// run.
    pub paused: Option<Summary>,
}

/// What became of the turns that go on from an answer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct LaterTurns {
    /// Such turns that had a first token.
    pub requests: u64,
    /// Share of their prompt tokens found cached.
    pub cached: f64,
    /// Share of those that an unbounded cache would have had.
    pub possible: f64,
    /// Share of them that went to the worker which had their agent's turn before.
    pub same_worker: f64,
}

/// A run's sessions as they are counted.
#[derive(Debug)]
pub(super) struct SessionCount {
    at_once: Option<usize>,
    /// Whether what happens now is counted, and since when.
    since: Option<Nanos>,
    /// When counting ended.
    until: Option<Nanos>,
    ended: u64,
    counted: Counted,
    jobs: Samples,
    paused: Samples,
    block_tokens: u64,
    /// Blocks that an unbounded cache would hold.
    seen: HashSet<BlockHash>,
    cached_tokens: u64,
    prompts: Option<Prompts>,
    placements: Option<(Placements, u32)>,
    later: Counted,
    /// Later turns that went where the turn before went, and where each agent's last one went.
    went_back: u64,
    workers: HashMap<(u64, u32, u32), usize>,
    /// Agents and sessions, by copy and number, as they came.
    agents: HashMap<(u64, u32, u32), u32>,
    sessions: HashMap<(u64, u32), u32>,
}

#[derive(Debug, Default)]
struct Counted {
    sessions: u64,
    requests: u64,
    prompt_tokens: u64,
    cached_tokens: u64,
    possible_tokens: u64,
}

impl Counted {
    fn add(&mut self, used: CacheUse, cached_tokens: u32) {
        self.prompt_tokens += used.prompt_tokens;
        self.possible_tokens += used.possible_tokens;
        self.cached_tokens += u64::from(cached_tokens);
    }
}

/// What a run is compared with.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Judged {
    /// Whether with what no placement can beat.
    pub(super) optimum: bool,
    /// With the best of so many placements that are tried afterwards.
    pub(super) hindsight: Option<u32>,
}

/// A request as far as caches are concerned.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct CacheUse {
    pub(super) prompt_tokens: u64,
    /// Those that an unbounded cache would have had.
    pub(super) possible_tokens: u64,
    /// Whether it goes on from an answer.
    pub(super) is_later: bool,
}

// === impl SessionCount ===

impl SessionCount {
    /// Of a run of so many sessions, compared with what was possible as `judged` says.
    pub(super) fn new(
        (sessions, at_once): (usize, Option<usize>),
        block_tokens: u32,
        judged: Judged,
    ) -> Self {
        let Judged { optimum, hindsight } = judged;
        let is_short = at_once.is_none_or(|at_once| sessions < at_once * SESSIONS_PER_PLACE);
        Self {
            at_once,
            since: is_short.then_some(0),
            until: None,
            ended: 0,
            counted: Counted::default(),
            jobs: Samples::default(),
            paused: Samples::default(),
            block_tokens: block_tokens.into(),
            seen: HashSet::new(),
            cached_tokens: 0,
            prompts: (optimum || hindsight.is_some()).then(Prompts::default),
            placements: hindsight.map(|tries| (Placements::default(), tries)),
            later: Counted::default(),
            went_back: 0,
            workers: HashMap::new(),
            agents: HashMap::new(),
            sessions: HashMap::new(),
        }
    }

    fn counts(&self) -> bool {
        self.since.is_some() && self.until.is_none()
    }

    /// A request of an agent is sent to a worker, all of whose full blocks these are.
    pub(super) fn sent(
        &mut self,
        (chain, prompt_tokens): (&[BlockHash], u64),
        (copy, link): (u64, &Link),
        worker: usize,
    ) -> CacheUse {
        // The last token is always computed.
        let most = ((prompt_tokens - 1) / self.block_tokens) as usize;
        // Who has seen a block has seen all before it.
        let known = chain.partition_point(|block| self.seen.contains(block));
        self.seen.extend(&chain[known..]);
        let askable = &chain[..most.min(chain.len())];
        if let Some(prompts) = &mut self.prompts {
            prompts.add(chain, askable.len(), prompt_tokens);
        }
        if let Some((placements, _)) = &mut self.placements {
            let (agents, sessions) = (self.agents.len() as u32, self.sessions.len() as u32);
            let session = *self.sessions.entry((copy, link.session)).or_insert(sessions);
            let agent = *self.agents.entry((copy, link.session, link.agent)).or_insert(agents);
            placements.add((agent, session), worker);
        }
        let before = self.workers.insert((copy, link.session, link.agent), worker);
        let is_later = link.turn > 0;
        self.went_back += u64::from(is_later && before == Some(worker));
        let possible_tokens = known.min(askable.len()) as u64 * self.block_tokens;
        CacheUse { prompt_tokens, possible_tokens, is_later }
    }

    /// A request's first token came, so many of whose tokens were cached.
    pub(super) fn first_token(&mut self, used: CacheUse, cached_tokens: u32) {
        self.cached_tokens += u64::from(cached_tokens);
        if used.is_later {
            self.later.requests += 1;
            self.later.add(used, cached_tokens);
        }
        if self.counts() {
            self.counted.add(used, cached_tokens);
        }
    }

    /// A turn begins that was paused for so long.
    pub(super) fn paused(&mut self, paused: Duration) {
        self.paused.add_ns(paused.as_nanos() as u64);
    }

    /// An answer ended, and with it its session or not.
    pub(super) fn ended(&mut self, at: Nanos, session: Option<SessionEnd>) {
        let counts = self.counts();
        self.counted.requests += u64::from(counts);
        let Some(SessionEnd { began, is_replaced }) = session else { return };
        self.ended += 1;
        self.jobs.add_ns(at - began);
        self.counted.sessions += u64::from(counts);
        let Some(at_once) = self.at_once else { return };
        if self.since.is_none() && self.ended >= at_once as u64 {
            self.since = Some(at);
        }
        if !is_replaced && self.since != Some(0) && self.until.is_none() {
            self.until = Some(at);
        }
    }

    /// The figures of a run that ended then, on so many caches of so many blocks each.
    pub(super) fn figures(&self, end: Nanos, (workers, blocks): (usize, usize)) -> SessionFigures {
        let since = self.since.unwrap_or(0);
        let seconds = self.until.unwrap_or(end).saturating_sub(since) as f64 / 1e9;
        let rate = |count: u64| if seconds > 0.0 { count as f64 / seconds } else { 0.0 };
        let share = |part: u64, whole: u64| part as f64 / whole.max(1) as f64;
        let Counted { sessions, requests, prompt_tokens, cached_tokens, possible_tokens } = self.counted;
        let best = self.prompts.as_ref().map(|prompts| {
            (prompts.found(workers * blocks) as u64 * self.block_tokens, prompts.prompt_tokens)
        });
        let searched = self.placements.as_ref().zip(self.prompts.as_ref());
        let searched = searched.map(|((placements, tries), prompts)| {
            let found = placements.search(prompts, (workers, blocks), *tries);
            (found, prompts.prompt_tokens)
        });
        SessionFigures {
            at_once: self.at_once,
            ended: self.ended,
            seconds,
            sessions_per_s: rate(sessions),
            requests_per_s: rate(requests),
            cached: share(cached_tokens, prompt_tokens),
            possible: share(possible_tokens, prompt_tokens),
            of_possible: share(cached_tokens, possible_tokens),
            optimum: best.map(|(found, asked)| share(found, asked)),
            of_optimum: best.map(|(found, _)| share(self.cached_tokens, found)),
            hindsight: searched.map(|(found, asked)| share(found.best as u64 * self.block_tokens, asked)),
            of_hindsight: searched.map(|(found, _)| share(found.own as u64, found.best as u64)),
            later_turns: (self.later.requests > 0).then(|| LaterTurns {
                requests: self.later.requests,
                cached: share(self.later.cached_tokens, self.later.prompt_tokens),
                possible: share(self.later.possible_tokens, self.later.prompt_tokens),
                same_worker: share(self.went_back, self.later.requests),
            }),
            job: self.jobs.summary(),
            paused: self.paused.summary(),
        }
    }
}
