//! Ten thousand random requests in tight memory: equal prefixes, salts, priorities, stop strings,
//! resumptions, and clients that leave at any moment. Every KV read is checked, the block manager after every
//! step, and every answer against the request's run alone, over a backend that is waited for and over one
//! that draws tokens and is a step behind. What is malformed never reaches the engine: `tests/http/soak.rs`.

use std::collections::VecDeque;

use keyway_text::TextModel;

use super::drawing::drawing;
use super::*;
use crate::answer::output::TextOutput;
use crate::engine::block_manager::witness::{Part, Witness};
use crate::engine::logprobs::TokenScore;
use crate::engine::token_rules::{Penalties, TokenRules};

const REQUESTS: usize = 10_000;
const LIVE_MAX: usize = 24;
const SETUP: Setup = Setup {
    groups: HYBRID,
    block_size: 4,
    // The longest sequence needs 36: a few of them fill the memory.
    num_blocks: 90,
    limits: StepLimits { max_batched_tokens: 40, max_running: 12 },
};

/// What the soak must have seen, or it has tested nothing.
#[derive(Debug, Default)]
struct Seen {
    submitted: usize,
    left: usize,
    ended: usize,
    stopped_by_text: usize,
    resumed: usize,
}

/// One client, with what it ought to be told.
struct Client {
    generation: Generation,
    output: TextOutput,
    expected: VecDeque<(u32, Option<FinishReason>)>,
    scores: Vec<TokenScore>,
    /// Leaves after this many more events.
    patience: usize,
}

struct Soak {
    random: fastrand::Rng,
    text: TextModel,
    engine: Engine,
    /// Of steps that are waited for.
    witness: Option<Witness>,
    slots: Arc<Semaphore>,
    clients: Vec<Client>,
    seen: Seen,
}

impl Soak {
    fn new(seed: u64, draws: bool) -> Self {
        let witness = Witness::new(SETUP.num_blocks, SETUP.block_size, SETUP.groups);
        Self {
            random: fastrand::Rng::with_seed(seed),
            text: TextModel::builtin(),
            engine: if draws { drawing(SETUP, true).0 } else { engine(SETUP) },
            witness: (!draws).then_some(witness),
            slots: Arc::new(Semaphore::new(LIVE_MAX)),
            clients: Vec::new(),
            seen: Seen::default(),
        }
    }

    /// Prompts begin like one of three others, more or less far.
    fn request(&mut self) -> GenerationRequest {
        let random = &mut self.random;
        let family = random.u32(0..3);
        let shared = (0..random.u32(0..60)).map(|i| (i * i + family) % VOCAB as u32).collect::<Vec<_>>();
        let own = (0..random.usize(1..20)).map(|_| random.u32(0..VOCAB as u32)).collect::<Vec<_>>();
        let sampling = Sampling {
            temperature: if random.bool() { 0.0 } else { 0.9 },
            top_p: if random.bool() { 1.0 } else { 0.9 },
            top_k: random.usize(0..8),
            min_p: if random.bool() { 0.0 } else { 0.1 },
            seed: random.u64(..),
        };
        let penalties = Penalties { presence: 0.5, frequency: 0.5, repetition: 1.2 };
        let rules =
            TokenRules { penalties, logit_bias: vec![(1, 2.0)], min_tokens: 5, stop_token_ids: vec![9] };
        GenerationRequest {
            prompt: [shared, own].concat(),
            rules: if random.bool() { TokenRules::default() } else { rules },
            prompt_logprobs: (random.u8(0..4) == 0).then_some(1),
            max_tokens: random.usize(1..30),
            ignore_eos: random.bool(),
            sampling,
            salt: Arc::from(["", "a", "b"][random.usize(0..3)].as_bytes()),
            priority: random.i64(-1..2),
            ..GenerationRequest::default()
        }
    }

    fn submit(&mut self) {
        let mut request = self.request();
        let mut alone = engine(Setup { groups: HYBRID, ..ROOMY });
        alone.options = EngineOptions { limits: ROOMY.limits, ..self.engine.options.clone() };
        let solo = add(&mut alone, request.clone());
        let mut events = finish_all(&mut alone, vec![solo]).remove(0);
        let scores = match events.first() {
            Some(Event::Prompt(outcome)) => outcome.scores.clone(),
            _ => Vec::new(),
        };
        let mut expected: VecDeque<_> =
            events.drain(..).filter_map(token).map(|e| (e.token, e.finish)).collect();
        let stop = self.random.bool().then(|| char::from(self.random.u8(0..VOCAB as u8)).to_string());
        let mut output = self.output(&request, stop.clone());
        if self.random.u8(0..4) == 0 {
            let cut = self.random.usize(0..expected.len());
            request.output_ids = expected.drain(..cut).map(|(token, _)| token).collect();
            if output.resume(&request.output_ids, 0).is_err() {
                return; // the stop string came before the cut
            }
            self.seen.resumed += 1;
        }
        let slot = Arc::clone(&self.slots).try_acquire_owned().unwrap();
        let (sequence, generation) = Sequence::new(request, slot, Instant::now());
        self.engine.scheduler.add(sequence);
        let patience = if self.random.u8(0..3) == 0 { self.random.usize(0..20) } else { usize::MAX };
        self.clients.push(Client { generation, output, expected, scores, patience });
        self.seen.submitted += 1;
    }

    fn output(&self, request: &GenerationRequest, stop: Option<String>) -> TextOutput {
        let stops = stop.into_iter().collect();
        TextOutput::new(&self.text, &request.prompt, stops).unwrap()
    }

    fn step(&mut self) {
        let engine = &mut self.engine;
        engine.plan();
        uncached_tokens_are_exact(engine);
        let running = engine.scheduler.running();
        let part = |planned: &Planned| {
            let sequence = &running[planned.sequence];
            let (start, end) = (sequence.computed, sequence.computed + planned.tokens);
            Part { table: &sequence.table, tokens: &sequence.tokens[..end], start, salt: &sequence.salt }
        };
        let parts: Vec<Part<'_>> = engine.scheduler.plan().parts.iter().map(part).collect();
        let works = !parts.is_empty() || engine.scheduler.is_idle() || engine.under_way.is_some();
        assert!(works, "a step without work");
        if let Some(witness) = &mut self.witness {
            witness.step(&parts);
        }
        if parts.is_empty() {
            engine.catch_up();
        } else {
            engine.carry_out();
        }
        engine.record_state();
        engine.scheduler.check().unwrap();
        uncached_tokens_are_exact(engine);
    }

    /// Clients read what has come; those who have enough leave.
    fn listen(&mut self) {
        let (seen, random) = (&mut self.seen, &mut self.random);
        self.clients.retain_mut(|client| {
            let stays = client.listen(seen);
            // Others leave before they are told anything.
            let leaves = stays && random.u8(..) == 0;
            seen.left += usize::from(leaves);
            stays && !leaves
        });
    }
}

/// Compares the gauge with what each sequence would find if it were admitted now.
fn uncached_tokens_are_exact(engine: &mut Engine) {
    let blocks = engine.scheduler.blocks();
    let waiting = engine.scheduler.waiting();
    let waiting = waiting.map(|s| s.tokens.len() - blocks.found(&s.tokens, &s.salt, s.reusable()));
    let running = engine.scheduler.running().iter();
    let running = running.filter(|s| s.generated() == 0 || s.remaining() > 1).map(Sequence::remaining);
    let expected = waiting.sum::<usize>() + running.sum::<usize>();
    engine.record_state();
    assert_eq!(engine.metrics.waiting_uncached_tokens.get(), expected as i64);
}

impl Client {
    /// Checks every event; false once the client is gone.
    fn listen(&mut self, seen: &mut Seen) -> bool {
        let mut context = Context::from_waker(std::task::Waker::noop());
        while let Poll::Ready(event) = self.generation.poll_next(&mut context) {
            let event = match event.expect("the generation ended without its last event") {
                Event::Token(event) => event,
                // Scores do not depend on who else was there.
                Event::Prompt(outcome) => {
                    assert_eq!(outcome.scores, self.scores);
                    continue;
                }
                Event::Kept(_) => panic!("nobody asked for that"),
                Event::Failed(reason) | Event::BrokenOff(reason) => panic!("{reason}"),
            };
            assert_eq!(self.expected.pop_front(), Some((event.token, event.finish)));
            self.output.push(&event).unwrap();
            if self.output.finish.is_some() {
                seen.ended += 1;
                seen.stopped_by_text += usize::from(event.finish.is_none());
                return false;
            }
            if self.patience == 0 {
                seen.left += 1;
                return false;
            }
            self.patience -= 1;
        }
        true
    }
}

#[test]
fn ten_thousand_random_requests_end_as_if_each_were_alone() {
    soak(Soak::new(1, false));
}

#[test]
fn ten_thousand_more_end_so_while_steps_run_ahead() {
    soak(Soak::new(2, true));
}

fn soak(mut soak: Soak) {
    while soak.seen.submitted < REQUESTS || !soak.clients.is_empty() {
        let room = LIVE_MAX - soak.clients.len();
        if soak.seen.submitted < REQUESTS && soak.slots.available_permits() > 0 {
            for _ in 0..soak.random.usize(0..=room.min(3).min(soak.slots.available_permits())) {
                soak.submit();
            }
        }
        soak.step();
        soak.listen();
    }
    soak.step(); // notices the last ones who left
    soak.step(); // and what was still under way for them
    let Soak { engine, slots, seen, .. } = soak;
    assert!(engine.scheduler.is_idle());
    assert_eq!(engine.scheduler.blocks().used_blocks(), 0);
    assert_eq!(slots.available_permits(), LIVE_MAX);
    let metrics = &engine.metrics;
    let gauges = [&metrics.requests_running, &metrics.requests_waiting, &metrics.waiting_uncached_tokens];
    for gauge in gauges.into_iter().chain([&metrics.kv_blocks_used]) {
        assert_eq!(gauge.get(), 0);
    }
    assert_eq!(seen.ended + seen.left, seen.submitted);
    let enough = seen.left > 1000 && seen.stopped_by_text > 200 && seen.resumed > 1000;
    let tight = metrics.preemptions.get() > 500 && metrics.cached_tokens.get() > 10_000;
    assert!(enough && tight, "{seen:?}, {} preempted", metrics.preemptions.get());
}
