//! The engine over a backend that draws tokens and is a step behind: what it says, what it caches and what it
//! announces are as if each step were waited for.

mod lists;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};

use self::lists::{Kept, Lists, score};
use super::*;
use crate::engine::backend::{Draw, PENDING, Parameters};
use crate::engine::token_rules::{Penalties, TokenRules};

/// Draws from another backend's logits. Runs a step as late as it may: when it is waited for.
pub(super) struct Drawing<B> {
    inner: B,
    steps: VecDeque<Started>,
    /// What each row of the step that ran last drew.
    drawn: Vec<Option<u32>>,
    sampler: Sampler,
    lists: Lists,
    /// How many steps were started while one was under way.
    pub(super) ahead: Arc<AtomicUsize>,
}

/// A step as it was started.
struct Started {
    chunks: Vec<Owned>,
    draws: Vec<Option<Kept>>,
}

struct Owned {
    tokens: Vec<u32>,
    start: usize,
    tables: Vec<Vec<u32>>,
    wants_logits: bool,
}

impl<B: Backend> Drawing<B> {
    pub(super) fn new(inner: B) -> Self {
        let (steps, drawn, sampler) = (VecDeque::new(), Vec::new(), Sampler::default());
        Self { inner, steps, drawn, sampler, lists: Lists::default(), ahead: Arc::default() }
    }

    /// Runs a step, its placeholders filled in.
    fn run(&mut self, mut step: Started, output: &mut StepOutput) -> Result<(), StepError> {
        for token in step.chunks.iter_mut().flat_map(|chunk| &mut chunk.tokens) {
            if let Some(row) = token.checked_sub(PENDING) {
                *token = self.drawn[row as usize].expect("only drawn tokens are waited for");
            }
        }
        let tables: Vec<Vec<&[u32]>> =
            step.chunks.iter().map(|chunk| chunk.tables.iter().map(Vec::as_slice).collect()).collect();
        let chunks: Vec<Chunk<'_>> = step
            .chunks
            .iter()
            .zip(&tables)
            .map(|(chunk, tables)| {
                let Owned { start, wants_logits, .. } = *chunk;
                Chunk { tokens: &chunk.tokens, start, tables, wants_logits }
            })
            .collect();
        let mut logits = Vec::new();
        self.inner.step(&chunks, &mut logits)?;
        *output = StepOutput::default();
        self.drawn.clear();
        assert_eq!(step.draws.len() * self.vocab_size(), logits.len());
        for (row, draw) in logits.chunks_mut(self.inner.vocab_size()).zip(step.draws) {
            let token = draw.map(|draw| {
                for (id, logit) in row.iter_mut().enumerate() {
                    if draw.mask.as_ref().is_some_and(|mask| mask[id / 32] >> (id % 32) & 1 == 0) {
                        *logit = f32::NEG_INFINITY;
                    }
                }
                if let Some(rules) = draw.rules {
                    let last = *step.chunks[rules.chunk].tokens.last().unwrap();
                    self.lists.apply(rules, last, row);
                }
                let Parameters { temperature, top_p, min_p, top_k, seed, position } = draw.by;
                let sampling = Sampling { temperature, top_p, top_k: top_k as usize, min_p, seed };
                let token = self.sampler.sample(row, &sampling, position as usize);
                if let Some(top) = draw.score {
                    output.scores.push(score(row, token, top));
                }
                token
            });
            self.drawn.push(token);
            match token {
                Some(token) => output.tokens.push(token),
                None => output.logits.extend_from_slice(row),
            }
        }
        Ok(())
    }
}

impl<B: Backend> Backend for Drawing<B> {
    fn vocab_size(&self) -> usize {
        self.inner.vocab_size()
    }

    fn block_size(&self) -> usize {
        self.inner.block_size()
    }

    fn num_blocks(&self) -> usize {
        self.inner.num_blocks()
    }

    fn cache_groups(&self) -> &[CacheGroup] {
        self.inner.cache_groups()
    }

    fn step(&mut self, _: &[Chunk<'_>], _: &mut Vec<f32>) -> Result<(), StepError> {
        unreachable!("it draws")
    }

    fn draws(&self) -> bool {
        true
    }

    fn start(&mut self, chunks: &[Chunk<'_>], draws: &[Option<Draw<'_>>]) -> Result<(), StepError> {
        self.ahead.fetch_add(self.steps.len(), Ordering::Relaxed);
        assert!(self.steps.len() < 2, "three steps at once");
        assert!(self.steps.iter().all(|step| step.draws.iter().all(Option::is_some)), "logits would be lost");
        let chunk = |chunk: &Chunk<'_>| Owned {
            tokens: chunk.tokens.to_vec(),
            start: chunk.start,
            tables: chunk.tables.iter().map(|table| table.to_vec()).collect(),
            wants_logits: chunk.wants_logits,
        };
        let wanted = chunks.iter().enumerate().filter(|(_, chunk)| chunk.wants_logits);
        let kept = |((i, chunk), draw): ((usize, &Chunk<'_>), &Option<Draw<'_>>)| {
            let is_pending = chunk.tokens.last().is_some_and(|token| token & PENDING != 0);
            draw.map(|draw| Kept {
                by: draw.by,
                rules: draw.rules.map(|rules| self.lists.keep(&rules, i, is_pending)),
                mask: draw.mask.map(<[u32]>::to_vec),
                score: draw.score,
            })
        };
        let draws = wanted.zip(draws).map(kept).collect();
        self.steps.push_back(Started { chunks: chunks.iter().map(chunk).collect(), draws });
        Ok(())
    }

    fn finish(&mut self, output: &mut StepOutput) -> Result<(), StepError> {
        let step = self.steps.pop_front().expect("a step is under way");
        self.run(step, output)
    }
}

/// An engine over such a backend, and how often it was ahead.
pub(super) fn drawing(setup: Setup, step_ahead: bool) -> (Engine, Arc<AtomicUsize>) {
    let backend = Drawing::new(Remembering::new(setup.block_size, setup.num_blocks, setup.groups));
    let ahead = Arc::clone(&backend.ahead);
    let mut engine = engine_with(setup, Box::new(backend));
    engine.options.step_ahead = step_ahead;
    engine.options.suppress_token_ids.clear();
    (engine, ahead)
}

/// What each request is told when it has an engine that waits for each step to itself.
fn expected(
    requests: &[GenerationRequest],
    groups: &'static [CacheGroup],
    suppressed: &[u32],
) -> Vec<Vec<TokenEvent>> {
    let expected = |request: &GenerationRequest| {
        let mut engine = engine(Setup { groups, ..ROOMY });
        engine.options.suppress_token_ids = suppressed.to_vec();
        let generation = add(&mut engine, request.clone());
        finish(&mut engine, vec![generation]).remove(0)
    };
    requests.iter().map(expected).collect()
}

/// Everything that a row may be wanted for, most often nothing but the next token.
fn wishes() -> impl Strategy<Value = Vec<GenerationRequest>> {
    let prompt = prop::collection::vec(0u32..2, 1..30);
    let cuts = (prop_oneof![Just(0.0f32), Just(0.9)], 0usize..6, prop_oneof![Just(1.0f32), Just(0.8)]);
    let one = (prompt, 1usize..14, cuts, prop::collection::vec(0u32..50, 0..6), -1i64..2, 0u8..16);
    let one = one.prop_map(|(prompt, max_tokens, (temperature, top_k, top_p), stops, priority, kind)| {
        let mut request = request(&prompt, max_tokens, temperature);
        request.sampling = Sampling { top_k, top_p, seed: max_tokens as u64, ..request.sampling };
        request.rules.stop_token_ids = stops;
        request.priority = priority;
        match kind {
            0 => request.logprobs = Some(2),
            1 => request.prompt_logprobs = Some(0),
            2 => request.rules.logit_bias = vec![(1, 3.0)],
            3 => request.rules.min_tokens = 4,
            4 => request.rules.penalties = Penalties { presence: 0.5, frequency: 0.5, repetition: 1.2 },
            5 => request.rules.logit_bias = vec![(1, 3.0), (0, 0.3), (1, -1.1)],
            6 => {
                let penalties = Penalties { presence: -0.3, frequency: 0.7, repetition: 1.0 };
                let (logit_bias, min_tokens) = (vec![(0, 1.5), (7, -0.7)], 3);
                request.rules = TokenRules { penalties, logit_bias, min_tokens, ..request.rules };
            }
            _ => request.ignore_eos = kind % 2 == 0,
        }
        request
    });
    prop::collection::vec(one, 1..9)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Stop tokens, ends by length, preemption, prefix hits, clients that leave, rows that are sampled by the
    /// engine: each client hears what it hears alone, and no block is lost.
    #[test]
    fn nobody_hears_that_steps_run_ahead(
        requests in wishes(),
        block_size in 1usize..9,
        spare_blocks in 0usize..12,
        max_running in 1usize..9,
        spare_budget in 0usize..20,
        groups in groups(),
        step_ahead in prop::bool::weighted(0.8),
        suppressed in prop_oneof![3 => Just(vec![]), 1 => Just(vec![SUPPRESSED, 1])],
        patience in prop::collection::vec(prop::option::weighted(0.3, 0usize..10), 8),
    ) {
        let expected = expected(&requests, groups, &suppressed);
        let limits = StepLimits { max_batched_tokens: max_running + spare_budget, max_running };
        let rules = GroupRules::new(groups, block_size);
        let needed = |r: &GenerationRequest| {
            rules.blocks_needed(r.prompt.len() + r.max_tokens, limits.max_batched_tokens)
        };
        let largest = requests.iter().map(needed).max().unwrap();
        let tight = Setup { groups, block_size, num_blocks: largest + spare_blocks, limits };
        let (mut engine, _) = drawing(tight, step_ahead);
        engine.options.suppress_token_ids = suppressed;
        for _warmth in 0..2 {
            let mut clients: Vec<_> =
                requests.iter().map(|r| (Some(add(&mut engine, r.clone())), Vec::new())).collect();
            let mut context = Context::from_waker(std::task::Waker::noop());
            while !engine.is_idle() {
                step(&mut engine);
                for ((generation, heard), patience) in clients.iter_mut().zip(&patience) {
                    let Some(open) = generation else { continue };
                    while let Poll::Ready(Some(event)) = open.poll_next(&mut context) {
                        heard.extend(token(event));
                    }
                    if patience.is_some_and(|patience| heard.len() >= patience) {
                        *generation = None;
                    }
                }
            }
            prop_assert_eq!(engine.scheduler.blocks().used_blocks(), 0);
            for ((open, heard), expected) in clients.iter().zip(&expected) {
                let heard: Vec<_> = heard.iter().map(|e| (e.token, e.finish, e.score.clone())).collect();
                let mut expected: Vec<_> =
                    expected.iter().map(|e| (e.token, e.finish, e.score.clone())).collect();
                if open.is_none() {
                    expected.truncate(heard.len());
                }
                prop_assert_eq!(heard, expected);
            }
        }
    }
}

#[test]
fn plain_requests_run_ahead_and_others_are_waited_for() {
    let plain = GenerationRequest { ignore_eos: true, ..request(&[1, 2, 3], 20, 0.9) };
    let scored = GenerationRequest { logprobs: Some(0), ..plain.clone() };
    let penalties = Penalties { presence: 0.5, frequency: 0.25, repetition: 1.1 };
    let rules = TokenRules { penalties, logit_bias: vec![(1, 0.5)], min_tokens: 5, ..TokenRules::default() };
    let ruled = GenerationRequest { rules, ..plain.clone() };
    // Two biases of one id are added one after the other, which no list says.
    let bias = TokenRules { logit_bias: vec![(1, 0.5), (1, 0.25)], ..TokenRules::default() };
    let biased_twice = GenerationRequest { rules: bias, ..plain.clone() };
    let drawn = std::cell::Cell::new(0);
    let steps_ahead = |requests: &[GenerationRequest], step_ahead| {
        let (mut engine, ahead) = drawing(ROOMY, step_ahead);
        let generations = requests.iter().map(|r| add(&mut engine, r.clone())).collect();
        finish(&mut engine, generations);
        drawn.set(engine.metrics.drawn_tokens.get());
        ahead.load(Ordering::Relaxed)
    };
    // The first step has none before it, and the last token is known to be the last.
    assert_eq!(steps_ahead(std::slice::from_ref(&plain), true), 19);
    assert_eq!(steps_ahead(std::slice::from_ref(&plain), false), 0);
    assert_eq!(steps_ahead(&[plain.clone(), ruled.clone()], true), 19);
    assert_eq!(drawn.get(), 40);
    assert_eq!(steps_ahead(&[plain.clone(), scored.clone()], true), 19);
    assert_eq!(drawn.get(), 40);
    // Scores are of logits that nothing has changed, which rules leave nowhere.
    let both = GenerationRequest { rules: ruled.rules.clone(), ..scored };
    for other in [both, biased_twice] {
        assert_eq!(steps_ahead(&[plain.clone(), other], true), 0);
        assert_eq!(drawn.get(), 20);
    }
}

/// A stop token at any place in a block: the surplus step's KV is found by nobody, and no block is missing.
#[test]
fn the_same_blocks_are_cached_whether_or_not_steps_run_ahead() {
    let mut stopped = 0;
    for first in 0..60 {
        let resident = |step_ahead| {
            let (mut engine, _) = drawing(ROOMY, step_ahead);
            let generation = add(&mut engine, request(&[first, 1], 30, 1.0));
            let said = finish(&mut engine, vec![generation]).remove(0);
            engine.scheduler.record_changes();
            (said, engine.scheduler.blocks().resident())
        };
        let ahead = resident(true);
        stopped += usize::from(ahead.0.last().unwrap().finish == Some(FinishReason::Stop));
        assert_eq!(ahead, resident(false));
    }
    assert!(stopped > 5, "{stopped} stopped by themselves");
}

/// Fails once, when so many steps are waited for; its KV may be gone with that.
struct Failing {
    inner: Drawing<Remembering>,
    left: usize,
    loses: bool,
    lost: bool,
}

impl Backend for Failing {
    fn vocab_size(&self) -> usize {
        VOCAB
    }
    fn block_size(&self) -> usize {
        self.inner.block_size()
    }
    fn num_blocks(&self) -> usize {
        self.inner.num_blocks()
    }
    fn cache_groups(&self) -> &[CacheGroup] {
        self.inner.cache_groups()
    }
    fn step(&mut self, _: &[Chunk<'_>], _: &mut Vec<f32>) -> Result<(), StepError> {
        unreachable!("it draws")
    }
    fn draws(&self) -> bool {
        true
    }
    fn start(&mut self, chunks: &[Chunk<'_>], draws: &[Option<Draw<'_>>]) -> Result<(), StepError> {
        self.inner.start(chunks, draws)
    }
    fn finish(&mut self, output: &mut StepOutput) -> Result<(), StepError> {
        self.left = self.left.wrapping_sub(1);
        if self.left == 0 {
            self.inner.steps.clear();
            self.lost = self.loses;
            return Err(StepError("the device is gone".to_owned()));
        }
        self.inner.finish(output)
    }

    fn cache_was_lost(&mut self) -> bool {
        std::mem::take(&mut self.lost)
    }
}

fn failing(left: usize, loses: bool) -> Engine {
    let inner = Drawing::new(Remembering::new(4, 400, FULL));
    let mut engine = engine_with(ROOMY, Box::new(Failing { inner, left, loses, lost: false }));
    engine.options.suppress_token_ids.clear();
    engine
}

/// Whoever fails while a step is under way ends everybody, and the next requests begin anew.
#[test]
fn a_failure_with_a_step_under_way_ends_everybody_once() {
    let plain = GenerationRequest { ignore_eos: true, ..request(&[1, 2, 3], 12, 0.0) };
    let expected = expected(std::slice::from_ref(&plain), FULL, &[]).remove(0);
    for left in 1..12 {
        let mut engine = failing(left, false);
        let broken = add(&mut engine, plain.clone());
        let events = finish_all(&mut engine, vec![broken]).remove(0);
        let (last, before) = events.split_last().unwrap();
        assert_eq!(*last, Event::BrokenOff("the device is gone".to_owned()));
        assert_eq!(before.len(), left - 1);
        let again = add(&mut engine, plain.clone());
        assert_eq!(finish(&mut engine, vec![again]).remove(0), expected);
    }
}

/// If only the KV is gone, what was being drawn is drawn again, and nobody hears of it: also who ends in the
/// step before, and who is not ahead.
#[test]
fn a_lost_cache_with_a_step_under_way_changes_no_answer() {
    let plain = GenerationRequest { ignore_eos: true, ..request(&[1, 2, 3], 12, 0.0) };
    let short = GenerationRequest { ignore_eos: true, ..request(&[4, 5], 3, 0.9) };
    let requests = [plain, short];
    let expected = expected(&requests, FULL, &[]);
    for step_ahead in [true, false] {
        for left in 1..14 {
            let mut engine = failing(left, true);
            engine.options.step_ahead = step_ahead;
            let generations = requests.iter().map(|request| add(&mut engine, request.clone())).collect();
            assert_eq!(finish(&mut engine, generations), expected, "lost in step {left}, {step_ahead}");
            assert_eq!(engine.scheduler.blocks().used_blocks(), 0);
        }
    }
    // Who wants scores comes while a step is under way, in which another one ends: their step is waited for
    // at once.
    let scored = GenerationRequest { logprobs: Some(0), ..requests[0].clone() };
    let with_scores = self::expected(std::slice::from_ref(&scored), FULL, &[]).remove(0);
    for left in 1..14 {
        let mut engine = failing(left, true);
        let short = add(&mut engine, requests[1].clone());
        step(&mut engine);
        step(&mut engine);
        let scored = add(&mut engine, scored.clone());
        let said = finish(&mut engine, vec![short, scored]);
        assert_eq!(said, [expected[1].clone(), with_scores.clone()], "lost in step {left}");
    }
}
