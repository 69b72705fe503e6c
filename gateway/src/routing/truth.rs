//! The truth loop: what an answer reports as cached beside what the index predicted. The difference is a
//! metric; for a worker whose cache is modelled it corrects the model's size, and where most predictions fail
//! it is named once, because then tokens, salts or block sizes differ and no correction helps.

use std::time::Duration;

use keyway_core::{index::PrefixIndex, pick::Pick};
use keyway_wire::openai::Usage;

use super::{
    Router, Ticket,
    miss::{Miss, Source, is_explained},
    pulls::Found,
    setting::index_id,
};
use crate::{
    fleet::{Worker, residency::Outcome, scrape::CacheConfig},
    metrics::Prediction,
    prompt::{
        request::{RequestInfo, Untold},
        token_keyer::Proved,
    },
};

/// How much of a prediction by text its estimate of tokens may be wrong, as a part of it: real tokenizers
/// differ by so much from one prompt to the next.
const ESTIMATED_WITHIN: u64 = 10;

impl Router {
    /// Takes the usage of an answer that has ended `now`. Returns why the prediction failed, if it did.
    pub fn learn(
        &self,
        request: &RequestInfo,
        pick: &Pick,
        usage: &Usage,
        (ticket, now): (&Ticket, Duration),
    ) -> Option<&'static str> {
        if !request.names.is_empty() {
            // Its prompt may hold what its worker has stored, which the gateway has not seen.
            return None;
        }
        if request.untold != Some(Untold::Truncated) {
            self.token_sizes.learn(request, usage.prompt_tokens);
        }
        if ticket.handed().is_some() {
            // What the worker found itself is not told apart from what it fetched.
            return None;
        }
        if !request.work.fills_cache() {
            // Nothing was predicted, and what it found says nothing of what chats left.
            return None;
        }
        let saved = usage.cached_tokens().unwrap_or(pick.matched_tokens);
        ticket.worker().saved.lock().add(saved as f64, now);
        let (worker, by_tokens) = (ticket.worker(), request.tokens.is_some());
        let residency = &worker.residency;
        let reported = self.reported(request, pick, usage, worker)?;
        let predicted = pick.matched_tokens;
        let of_block = self.block_tokens(request, worker);
        let block_tokens = slack(request, predicted.max(reported), (worker, of_block));
        if let Some(pull) = ticket.pull() {
            // What came from the other worker says nothing of what is believed of this one's cache.
            let found = Found { own: predicted.saturating_sub(pull.tokens), predicted, reported };
            self.pull_ended(now, (&pull.from, worker), found, block_tokens);
            return None;
        }
        tracing::trace!(worker = %worker.name, predicted, reported, "cached tokens, as predicted and as reported");
        let (over, under) = (predicted.saturating_sub(reported), reported.saturating_sub(predicted));
        let came_out = match (over > block_tokens, under > block_tokens) {
            (true, _) => Prediction::Over,
            (_, true) => Prediction::Under,
            _ => Prediction::Right,
        };
        worker.series(&self.metrics).predicted(came_out, over, under);
        let exact = by_tokens && residency.trusted();
        let tokens_agree = request.tokens.as_ref().is_none_or(|tokens| tokens.total == usage.prompt_tokens);
        // Of a prompt that is another there than here nothing is known.
        let computed = usage.prompt_tokens.saturating_sub(reported);
        if exact && tokens_agree && computed > 2 * block_tokens {
            residency.blocks_stored(ticket.sent(), now);
        }
        if !exact {
            self.correct_capacity(request, ticket, (predicted, reported), (block_tokens, of_block));
        }
        let source = match (by_tokens, exact) {
            (false, _) => Source::Text,
            (true, false) => Source::Model,
            (true, true) => Source::Events,
        };
        let facts = Miss {
            source,
            tokens_agree,
            predicted,
            reported,
            announced: ticket.announced_tokens(),
            events_came: residency.batch_since(ticket.sent()),
            blocks_removed: ticket.blocks_removed(),
            slack: block_tokens,
        };
        let miss = (came_out != Prediction::Right).then(|| facts.cause());
        if let Some(cause) = miss {
            self.metrics.caches.truth.misses.with_label_values(&[worker.name.as_str(), cause]).inc();
        }
        // Where little was found, nothing is said of the tokens.
        if reported > block_tokens {
            prove(request, usage, worker, !tokens_agree && came_out == Prediction::Under);
        }
        if by_tokens {
            warn_of_drift(request, usage, worker, &facts, miss);
        }
        miss
    }

    /// The cached tokens that an answer tells of, if that says whether its prediction was right.
    fn reported(&self, request: &RequestInfo, pick: &Pick, usage: &Usage, worker: &Worker) -> Option<u64> {
        let cause = match (request.untold, usage.cached_tokens()) {
            (None, Some(reported)) => {
                worker.residency.reports();
                return Some(reported);
            }
            (Some(untold), _) => untold.as_str(),
            (None, None) => "not_reported",
        };
        self.metrics.caches.truth.uncounted.with_label_values(&[worker.name.as_str(), cause]).inc();
        if request.untold.is_none() && worker.residency.reports_nothing(pick.matched_tokens) {
            tracing::warn!(
                worker = worker.name.as_str(),
                "its answers do not say how much of a prompt was found cached, so predictions cannot be checked: vLLM says it \
                 with --enable-prompt-tokens-details, SGLang with --enable-cache-report"
            );
        }
        None
    }

    /// Takes what a worker's metrics say of its cache.
    pub fn cache_is(&self, worker: &Worker, config: CacheConfig) {
        let residency = &worker.residency;
        // Its events say how large its blocks are, once there are some, but not how many there may be.
        if let (Some(tokens), false) = (config.block_size, residency.is_block_size_announced()) {
            residency.set_block_size(tokens);
        }
        let mut index = self.index.lock();
        residency.capacity.lock().tell(config.tokens());
        self.bound_cache(worker, &mut index);
    }

    /// Takes what a worker's metrics say that it has found in its cache since it began. It counts as reported
    /// where its answers say nothing.
    pub fn cache_hits_are(&self, worker: &Worker, tokens: u64) {
        let Some(more) = worker.residency.found_since(tokens) else { return };
        let model = worker.models().into_iter().next().map(|model| model.id);
        self.metrics.model(model.as_deref()).tokens(0, 0, 0, more);
    }

    /// Models the worker's cache as large as it is believed to be: as many tokens, in blocks of text or in
    /// its own. What events that are trusted say it holds it does hold.
    pub(crate) fn bound_cache(&self, worker: &Worker, index: &mut PrefixIndex) {
        let residency = &worker.residency;
        let tokens = residency.capacity.lock().tokens();
        let blocks = |block_tokens: f64| tokens.map(|tokens| (tokens as f64 / block_tokens) as usize);
        index.set_capacity(worker.id, blocks(self.text_block_tokens(worker)));
        let own = if residency.trusted() { None } else { blocks(f64::from(residency.block_size())) };
        index.set_capacity(residency.token_id, own);
    }

    /// Tokens of a block of text, about, as the worker's model cuts it.
    pub(super) fn text_block_tokens(&self, worker: &Worker) -> f64 {
        let model = worker.models().into_iter().next().map(|model| model.id);
        self.block_bytes as f64 / self.token_sizes.bytes_per_token(model.as_deref())
    }

    fn correct_capacity(
        &self,
        request: &RequestInfo,
        ticket: &Ticket,
        (predicted, reported): (u64, u64),
        (slack, block_tokens): (u64, f64),
    ) {
        let worker = ticket.worker();
        let id = index_id(worker, request.tokens.is_some());
        let mut index = self.index.settled();
        let mut capacity = worker.residency.capacity.lock();
        let before = capacity.tokens();
        let resident = (index.resident(id) as f64 * block_tokens) as u64;
        capacity.observe(predicted, reported, slack, resident);
        let now = capacity.tokens();
        drop(capacity);
        if now != before {
            self.bound_cache(worker, &mut index);
        }
    }

    fn block_tokens(&self, request: &RequestInfo, worker: &Worker) -> f64 {
        if request.tokens.is_some() {
            return f64::from(worker.residency.block_size());
        }
        request.chain.block_bytes.max(1) as f64 / self.token_sizes.bytes_per_token(request.model.as_deref())
    }
}

/// Tokens that a prediction may be off by, where so many were found or foretold, and a block has so many.
fn slack(request: &RequestInfo, tokens: u64, (worker, block_tokens): (&Worker, f64)) -> u64 {
    let own = u64::from(worker.residency.block_size());
    if request.tokens.is_some() {
        return own;
    }
    // Text is cut elsewhere than tokens, one block of either more or less, and how many tokens it has is an
    // estimate.
    let of_text = block_tokens.ceil() as u64;
    (tokens / ESTIMATED_WITHIN).max(own + own.max(of_text))
}

/// Says once of a worker that most predictions fail there, and what the failures have in common.
fn warn_of_drift(
    request: &RequestInfo,
    usage: &Usage,
    worker: &Worker,
    facts: &Miss,
    miss: Option<&'static str>,
) {
    let outcome = match facts {
        _ if miss.is_none() => Outcome::Right,
        _ if miss.is_some_and(is_explained) => Outcome::Explained,
        Miss { tokens_agree: false, .. } => Outcome::OtherTokens,
        Miss { reported: 0, .. } => Outcome::NothingCached,
        _ => Outcome::Wrong,
    };
    if let Some(why) = worker.residency.drifts(outcome, facts.reported > 0) {
        tracing::warn!(
            worker = worker.name.as_str(),
            model = request.model,
            prompt_tokens = usage.prompt_tokens,
            tokenised = request.tokens.as_ref().map(|tokens| tokens.total),
            predicted = facts.predicted,
            reported = facts.reported,
            "most predictions of cached tokens fail here: {why}"
        );
    }
}

/// Tells what an answer says of tokens that were computed here: whether the engine had others.
fn prove(request: &RequestInfo, usage: &Usage, worker: &Worker, are_others: bool) {
    let proved = if are_others { Proved::OtherTokens } else { Proved::Right };
    if request.proof.as_ref().is_some_and(|proof| proof.came_out(proved)) {
        tracing::warn!(
            model = request.model,
            worker = worker.name.as_str(),
            prompt_tokens = usage.prompt_tokens,
            tokenised = request.tokens.as_ref().map(|tokens| tokens.total),
            "prompts of this API have other tokens at the engine than here: they are routed by their text"
        );
    }
}

#[cfg(test)]
mod tests;
