//! One step of the engine, from its plan to its tokens. A backend that draws tokens runs while the host goes
//! on: the next step is planned and started before this one's tokens are known, with placeholders in their
//! places. So the host learns of a stop token one step late; what the surplus step draws is dropped, and the
//! KV that it writes lies in a block that no lookup finds.
//!
//! Rows whose logits the host must see (prompts' scores, hidden states, scores where rules change the logits)
//! end that: their step is waited for at once. So do rows with a grammar, whose next mask hangs on the token.
//! `scheduler.rs` decides who runs.

use std::collections::HashMap;
use std::time::Instant;

use super::{Engine, EngineOptions};
use crate::engine::backend::{Draw, Parameters, Rule, RuleList, Rules, StepError};
use crate::engine::block_manager::CacheChange;
use crate::engine::grammar::Broken;
use crate::engine::logprobs::TokenScore;
use crate::engine::sampler::{Sampler, Sampling};
use crate::engine::sequence::{Rank, Sequence};
use crate::engine::token_rules::RuleState;
use crate::limits::GPU_RULES_MAX;
use crate::metrics::Metrics;

/// A step that was started.
#[derive(Debug)]
pub(super) struct UnderWay {
    rows: Vec<Row>,
    /// Changes of the prefix cache whose KV this step computes.
    pub(super) changes: Vec<CacheChange>,
}

/// What a row of logits is for.
#[derive(Debug, Clone, Copy)]
struct Row {
    rank: Rank,
    /// Its sequence's place among those running when it was planned.
    place: usize,
    purpose: Purpose,
}

#[derive(Debug, Clone, Copy)]
enum Purpose {
    /// The prompt's token behind this position is scored.
    Score(usize),
    /// The next token is sampled here.
    Sample,
    /// The backend draws the next token; it is waited for if what may come next hangs on it.
    Draw { is_waited_for: bool, is_scored: bool },
}

impl Row {
    fn is_drawn(&self) -> bool {
        matches!(self.purpose, Purpose::Draw { .. })
    }

    /// Whether no step may be started before this row's token is known.
    fn is_waited_for(&self) -> bool {
        !matches!(self.purpose, Purpose::Draw { is_waited_for: false, .. })
    }
}

/// What a sequence's list of rules is made of.
struct Listed<'a> {
    rules: &'a RuleState,
    options: &'a EngineOptions,
}

impl RuleList for Listed<'_> {
    fn list(&self) -> Vec<Rule> {
        self.rules.list(&self.options.eos_token_ids, &self.options.suppress_token_ids)
    }
}

impl Listed<'_> {
    /// Whether they change the logits behind so many tokens.
    fn changes(&self, generated: usize) -> bool {
        !self.rules.is_neutral(generated) || !self.options.suppress_token_ids.is_empty()
    }

    /// Whether a backend can apply them.
    fn is_short(&self) -> bool {
        let EngineOptions { eos_token_ids, suppress_token_ids, .. } = self.options;
        self.rules.list_len(eos_token_ids, suppress_token_ids).is_some_and(|len| len <= GPU_RULES_MAX)
    }
}

impl Engine {
    /// Carries the planned step out, or starts it and learns what the one before came to.
    pub(super) fn carry_out(&mut self) {
        let done = self.try_step();
        self.end_turn(done);
    }

    /// Waits for the step that is under way, if there is one.
    pub(super) fn catch_up(&mut self) {
        let done = self.under_way.take().map_or(Ok(()), |step| self.learn(step));
        self.end_turn(done);
    }

    fn end_turn(&mut self, done: Result<(), StepError>) {
        let Err(StepError(reason)) = done else { return self.scheduler.remove_finished() };
        if let Some(step) = self.under_way.take() {
            self.announce(step.changes);
        }
        if self.backend.cache_was_lost() {
            tracing::warn!("computing all sequences again: {reason}");
            self.recompute_all();
            return;
        }
        tracing::error!("a step failed: {reason}");
        self.failures.add(&reason);
        self.scheduler.fail_all(&reason);
    }

    fn try_step(&mut self) -> Result<(), StepError> {
        let next = self.start()?;
        if let Some(before) = self.under_way.take() {
            self.learn(before)?;
        }
        // By now all tokens of the step are known, and the backend computes it before any later one.
        self.scheduler.commit();
        if !self.backend.draws() || !self.options.step_ahead || next.rows.iter().any(Row::is_waited_for) {
            return self.learn(next);
        }
        let (_, running) = self.scheduler.planned_mut();
        for (i, row) in next.rows.iter().enumerate() {
            let sequence = &mut running[row.place];
            if sequence.finish.is_none() {
                sequence.expect(i);
            }
        }
        self.under_way = Some(next);
        Ok(())
    }

    /// Starts the planned step; without a backend that does so, runs it.
    fn start(&mut self) -> Result<UnderWay, StepError> {
        let masks = if self.backend.draws() { self.masks() } else { HashMap::new() };
        let rows = self.rows(&masks);
        let tables = self.scheduler.tables();
        let chunks = self.scheduler.chunks(&tables);
        if self.backend.draws() {
            let (running, options) = (self.scheduler.running(), &self.options);
            let listed = |row: &Row| Listed { rules: &running[row.place].rules, options };
            let lists: Vec<Listed<'_>> = rows.iter().map(listed).collect();
            let draw = |(row, list): (&Row, _)| {
                let mask = masks.get(&row.place).map(Vec::as_slice);
                row.is_drawn().then(|| Draw { mask, ..draw(&running[row.place], list) })
            };
            let draws: Vec<Option<Draw<'_>>> = rows.iter().zip(&lists).map(draw).collect();
            self.backend.start(&chunks, &draws)?;
        } else {
            self.backend.step(&chunks, &mut self.output.logits)?;
        }
        Ok(UnderWay { rows, changes: Vec::new() })
    }

    /// What may come next of the planned sequences with a grammar whose token a backend draws, by their
    /// places among those running.
    fn masks(&mut self) -> HashMap<usize, Vec<u32>> {
        let (vocab_size, eos) = (self.backend.vocab_size(), &self.options.eos_token_ids);
        let (parts, running) = self.scheduler.planned_mut();
        let mut masks = HashMap::new();
        for part in parts {
            let sequence = &mut running[part.sequence];
            let is_next = sequence.computed + part.tokens >= sequence.tokens.len();
            let is_drawn = is_next && sequence.wants_a_token_only() && sequence.logprobs.is_none();
            // An error comes again where the row is sampled instead.
            if let Some(grammar) = sequence.grammar.as_mut().filter(|_| is_drawn)
                && let Ok(mask) = grammar.mask_bits(vocab_size, eos)
            {
                masks.insert(part.sequence, mask);
            }
        }
        masks
    }

    /// The planned step's rows of logits, in the order of its chunks.
    fn rows(&self, masks: &HashMap<usize, Vec<u32>>) -> Vec<Row> {
        let running = self.scheduler.running();
        let mut rows = Vec::new();
        for part in &self.scheduler.plan().parts {
            let sequence = &running[part.sequence];
            let (end, known) = (sequence.computed + part.tokens, sequence.tokens.len());
            let mut add = |purpose| rows.push(Row { rank: sequence.rank, place: part.sequence, purpose });
            if sequence.is_scoring() {
                (sequence.computed..end.min(known - 1)).for_each(|position| add(Purpose::Score(position)));
            }
            if end < known {
                continue;
            }
            let is_waited_for = sequence.grammar.is_some();
            let is_scored = sequence.logprobs.is_some();
            let list = Listed { rules: &sequence.rules, options: &self.options };
            let changes = is_waited_for || list.changes(sequence.generated());
            let is_drawn = self.backend.draws()
                && sequence.wants_a_token_only()
                && !(is_scored && changes)
                && (!is_waited_for || masks.contains_key(&part.sequence))
                && list.is_short();
            add(if is_drawn { Purpose::Draw { is_waited_for, is_scored } } else { Purpose::Sample });
        }
        rows
    }

    /// Scores prompts, and extends every sequence whose tokens are all computed.
    fn learn(&mut self, step: UnderWay) -> Result<(), StepError> {
        let finished = if self.backend.draws() { self.backend.finish(&mut self.output) } else { Ok(()) };
        // After an error they are taken back.
        self.announce(step.changes);
        finished?;
        self.failures.clear();
        let now = Instant::now();
        let hidden = self.backend.hidden();
        let count = self.output.logits.len() / self.backend.vocab_size();
        let mut logits = self.output.logits.chunks_exact_mut(self.backend.vocab_size());
        let (mut drawn, mut scores) = (self.output.tokens.iter(), self.output.scores.iter());
        for row in step.rows {
            let index = count - logits.len();
            if !matches!(row.purpose, Purpose::Score(_)) {
                self.scheduler.keep_prompt(row.rank, row.place);
            }
            let (token, logits) = match row.purpose {
                Purpose::Draw { is_scored, .. } => {
                    let scored =
                        drawn.next().map(|token| (*token, is_scored.then(|| scores.next()).flatten()));
                    (scored, None)
                }
                Purpose::Score(_) | Purpose::Sample => (None, logits.next()),
            };
            // Of a sequence that left meanwhile, or ended, nothing is wanted any more.
            let Some(sequence) = self.scheduler.find(row.rank, row.place) else { continue };
            if sequence.finish.is_some() {
                continue;
            }
            let sampled = match (row.purpose, token, logits) {
                (Purpose::Draw { .. }, Some((token, score)), _) => {
                    Ok((token, score.map(|score| Box::new(TokenScore::new(token, score)))))
                }
                (Purpose::Score(position), _, Some(logits)) => {
                    sequence.score(position, logits);
                    continue;
                }
                (Purpose::Sample, _, Some(logits)) => {
                    let hidden = hidden
                        .and_then(|states| states.chunks_exact((states.len() / count).max(1)).nth(index));
                    sequence.prompt_computed(hidden);
                    if sequence.finish.is_some() {
                        continue;
                    }
                    sample(&mut self.sampler, &self.options, sequence, logits)
                }
                _ => return Err(StepError("a step gave back fewer rows than it had".to_owned())),
            };
            let (token, score) = match sampled {
                Ok(sampled) => sampled,
                Err(reason) => {
                    sequence.fail(reason);
                    continue;
                }
            };
            self.metrics.drawn_tokens.inc_by(row.is_drawn().into());
            emit(&self.metrics, &self.options, (sequence, now), token, score);
        }
        Ok(())
    }
}

/// Counts a sequence's next token, drawn by `now`, and tells its client.
fn emit(
    metrics: &Metrics,
    options: &EngineOptions,
    (sequence, now): (&mut Sequence, Instant),
    token: u32,
    score: Option<Box<TokenScore>>,
) {
    let (histogram, since) = match sequence.last_token.replace(now) {
        None => (&metrics.time_to_first_token, sequence.arrived),
        Some(last) => (&metrics.inter_token_latency, last),
    };
    histogram.observe((now - since).as_secs_f64());
    metrics.generation_tokens.inc();
    // Last: who has the token finds it counted.
    sequence.push(token, options.eos_token_ids.contains(&token), score);
}

/// How a backend draws a sequence's next token, but for its mask.
fn draw<'a>(sequence: &Sequence, list: &'a Listed<'_>) -> Draw<'a> {
    let Sampling { temperature, top_p, top_k, min_p, seed } = sequence.sampling;
    let top_k = u32::try_from(top_k).unwrap_or(u32::MAX);
    let position = sequence.tokens.len() as u64;
    let (rules, generated) = (&sequence.rules, sequence.generated());
    let rules = list.changes(generated).then(|| Rules {
        sequence: sequence.rank.arrival,
        generated: rules.counts().then_some(generated),
        holds: rules.holds(generated),
        penalties: rules.penalties(),
        list,
    });
    let by = Parameters { temperature, top_p, min_p, top_k, seed, position };
    Draw { by, rules, mask: None, score: sequence.logprobs }
}

/// The next token of a sequence from its row of logits, and its score if the client wants one. The error says
/// why the answer's form cannot be kept.
fn sample(
    sampler: &mut Sampler,
    options: &EngineOptions,
    sequence: &mut Sequence,
    row: &mut [f32],
) -> Result<(u32, Option<Box<TokenScore>>), Broken> {
    // Scores are of the model's own distribution, before anything changes it.
    let raw = sequence.logprobs.map(|_| row.to_vec());
    let eos = &options.eos_token_ids;
    let masked = match &mut sequence.grammar {
        None => None,
        Some(grammar) => {
            grammar.mask(row, eos)?;
            Some(row.to_vec())
        }
    };
    for id in &options.suppress_token_ids {
        row[*id as usize] = f32::NEG_INFINITY;
    }
    sequence.rules.apply(row, eos, sequence.generated());
    if let Some(masked) = masked
        && row.iter().all(|logit| *logit == f32::NEG_INFINITY)
    {
        // The answer's form comes before everything else.
        row.copy_from_slice(&masked);
    }
    let token = sampler.sample(row, &sequence.sampling, sequence.tokens.len());
    let score = raw.zip(sequence.logprobs).map(|(raw, top)| Box::new(TokenScore::of(&raw, token, top)));
    Ok((token, score))
}
