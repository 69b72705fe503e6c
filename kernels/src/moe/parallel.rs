//! A layer's experts spread over the ranks of a group: tokens go to the ranks that hold their experts, rows
//! come back and are summed in slot order. What a rank computes for a row does not depend on the rows beside
//! it, so the result has the bits of the same layer on one rank, for every number of ranks and every
//! placement.
//!
//! One layer takes two exchanges. In the first every rank sends each other one the tokens that need it, or
//! nothing; a rank without tokens of its own ([`Parallel::serve`]) learns from the others' messages which
//! layer it is. In the second the outputs go back. Which weights an expert has is the caller's business
//! ([`Experts`]).

use std::time::{Duration, Instant};

use super::{ExchangePlan, Placement, combine_parts};
use crate::compute::Compute;
use crate::fabric::{Cause, Fabric, FabricError, Phase, floats, floats_mut};

/// What the first word of a message says it is.
const TOKENS: u32 = 1;
const NOTE: u32 = 2;
/// Words before a message's content: kind; layer; tokens; experts.
const HEAD: usize = 4;

/// The experts that a rank holds.
pub trait Experts {
    /// Width of a token in `layer`, and how many experts the layer has; `None` if it has none.
    fn shape(&self, layer: u32) -> Option<(usize, usize)>;

    /// Whether this rank holds the weights of `expert`.
    fn holds(&self, layer: u32, expert: usize) -> bool;

    /// Maps the rows `x` `[rows, width]` to `out`, each row as if it were alone.
    fn run(&mut self, layer: u32, expert: usize, x: &[f32], out: &mut [f32]);
}

/// A layer's tokens on one rank.
#[derive(Debug, Clone, Copy)]
pub struct LayerTokens<'a> {
    /// The model's layer whose experts serve them, counted from 0.
    pub layer: u32,
    /// How many experts each token chose.
    pub top: usize,
    /// What goes into the experts, `[tokens, width]`.
    pub x: &'a [f32],
    /// The router's choice, `[tokens, top]`.
    pub ids: &'a [u32],
    /// The outputs' weights, `[tokens, top]`.
    pub weights: &'a [f32],
}

/// What [`Parallel::serve`] took part in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Served {
    /// A layer: so many rows were computed here.
    Layer {
        /// The model's layer, counted from 0; `u32::MAX` if no rank had tokens.
        layer: u32,
        /// Rows that this rank's experts served.
        rows: usize,
    },
    /// One rank sent a note, which [`note_in`] reads from its inbox.
    Note {
        /// The rank that sent it; of several the lowest.
        from: usize,
    },
}

/// Where a layer's time went on this rank.
#[derive(Debug, Clone, Copy, Default)]
pub struct Times {
    /// Planning, writing messages and waiting for the others'.
    pub dispatch: Duration,
    /// The experts' products, with the gathering of their rows.
    pub compute: Duration,
    /// Writing the outputs, waiting for the others', and summing.
    pub combine: Duration,
}

/// Memory that is used again from layer to layer.
#[derive(Debug, Default)]
pub struct Parallel {
    /// Of this rank's own tokens.
    plan: ExchangePlan,
    arrivals: Arrivals,
    /// Inputs and outputs of this rank's experts, grouped by expert: `[rows, width]`.
    gathered: Vec<f32>,
    outputs: Vec<f32>,
    times: Times,
}

/// The rows that this rank's experts serve.
#[derive(Debug, Default)]
struct Arrivals {
    layer: Option<u32>,
    /// Expert `e` serves the places `offsets[e]..offsets[e + 1]`.
    offsets: Vec<usize>,
    /// By place: which rank's token.
    sources: Vec<(u32, u32)>,
    /// By rank: the places of its rows, in its order.
    places: Vec<Vec<u32>>,
    /// By rank: where in its message the tokens begin.
    starts: Vec<usize>,
    next: Vec<usize>,
}

/// Sends `words` to every rank in place of tokens: the next exchange of those who [`Parallel::serve`].
pub fn write_note(fabric: &mut dyn Fabric, words: &[u32]) -> Result<(), FabricError> {
    let rank = fabric.rank();
    (0..fabric.size()).filter(|to| *to != rank).try_for_each(|to| write_note_to(fabric, to, words))
}

/// Sends `words` to one rank in place of tokens; see [`write_note`].
pub fn write_note_to(fabric: &mut dyn Fabric, to: usize, words: &[u32]) -> Result<(), FabricError> {
    let message = fabric.outbox(to, HEAD + words.len())?;
    message[..HEAD].copy_from_slice(&[NOTE, 0, 0, 0]);
    message[HEAD..].copy_from_slice(words);
    Ok(())
}

/// The words of a note that came from a rank; empty if it sent none.
pub fn note_in(message: &[u32]) -> &[u32] {
    if message.first() == Some(&NOTE) { message.get(HEAD..).unwrap_or_default() } else { &[] }
}

/// How many tokens of `top` slots of `width` a fabric of so many words surely takes at once, whichever
/// experts they choose.
pub fn tokens_max(capacity: usize, experts: usize, top: usize, width: usize) -> usize {
    // To a rank go at most its head, all experts' counts, and of each token the row and its slots; back come
    // its slots' rows.
    let there = capacity.saturating_sub(HEAD + 2 * experts) / (width + top);
    there.min(capacity / (top * width).max(1))
}

/// The words that a fabric must take for `tokens` tokens at once; see [`tokens_max`].
pub fn capacity_for(tokens: usize, experts: usize, top: usize, width: usize) -> usize {
    (HEAD + 2 * experts + tokens * (width + top)).max(tokens * top * width)
}

// === impl Parallel ===

impl Parallel {
    /// Runs a layer on this rank's `tokens`, and on what others send, into `out` `[tokens, width]`.
    ///
    /// # Errors
    /// Which rank failed. `out` then means nothing.
    ///
    /// # Panics
    /// If shapes disagree.
    #[allow(clippy::too_many_arguments, reason = "a layer's whole surroundings")]
    pub fn run(
        &mut self,
        compute: &Compute,
        fabric: &mut dyn Fabric,
        placement: &Placement,
        tokens: LayerTokens<'_>,
        experts: &mut dyn Experts,
        out: &mut [f32],
        deadline: Duration,
    ) -> Result<(), FabricError> {
        let LayerTokens { layer, top, x, ids, weights } = tokens;
        let width = (x.len() * top).checked_div(ids.len()).unwrap_or(0);
        assert!(x.len() == out.len() && ids.len() * width == x.len() * top, "parallel: shapes disagree");
        let started = Instant::now();
        self.plan.make(ids, top, placement);
        self.send(fabric, layer, x, width).map_err(|error| error.in_layer(layer))?;
        let exchanged = fabric.exchange(Phase::Dispatch, deadline);
        exchanged.map_err(|error| error.in_layer(layer))?;
        let own = self.plan.parts.get(fabric.rank());
        self.arrivals.read(fabric, own, Some(layer), experts)?;
        self.times.dispatch = started.elapsed();
        let computed = self.compute(fabric, layer, x, experts, deadline)?;
        self.sum(compute, fabric, weights, top, out);
        self.times.combine = computed.elapsed();
        Ok(())
    }

    /// Takes part in whatever the others do next, without tokens of one's own.
    ///
    /// # Errors
    /// Which rank failed.
    pub fn serve(
        &mut self,
        fabric: &mut dyn Fabric,
        experts: &mut dyn Experts,
        deadline: Duration,
    ) -> Result<Served, FabricError> {
        fabric.exchange(Phase::Dispatch, deadline)?;
        let note = (0..fabric.size()).find(|from| fabric.inbox(*from).first() == Some(&NOTE));
        if let Some(from) = note {
            return Ok(Served::Note { from });
        }
        self.arrivals.read(fabric, None, None, experts)?;
        let Some(layer) = self.arrivals.layer else {
            // No rank had tokens: there is still a way back, so that all ranks are in step.
            fabric.exchange(Phase::Combine, deadline)?;
            return Ok(Served::Layer { layer: u32::MAX, rows: 0 });
        };
        self.compute(fabric, layer, &[], experts, deadline)?;
        Ok(Served::Layer { layer, rows: self.arrivals.sources.len() })
    }

    /// Where the time of the last [`Parallel::run`] went.
    pub fn times(&self) -> Times {
        self.times
    }

    /// Rows that this rank's experts served in the last layer.
    pub fn rows_served(&self) -> usize {
        self.arrivals.sources.len()
    }

    /// Rows of the last [`Parallel::run`]'s own tokens, by the rank that served them.
    pub fn rows_by_rank(&self) -> impl Iterator<Item = usize> {
        self.plan.parts.iter().map(|part| part.rows.len())
    }
}

impl Parallel {
    /// Writes the tokens of every other rank's part.
    fn send(&self, fabric: &mut dyn Fabric, layer: u32, x: &[f32], width: usize) -> Result<(), FabricError> {
        let rank = fabric.rank();
        let parts = self.plan.parts.iter().enumerate();
        for (to, part) in parts.filter(|(to, part)| *to != rank && !part.tokens.is_empty()) {
            let counts = 2 * part.experts.len();
            let words = HEAD + counts + part.rows.len() + part.tokens.len() * width;
            let (head, message) = fabric.outbox(to, words)?.split_at_mut(HEAD);
            head.copy_from_slice(&[TOKENS, layer, part.tokens.len() as u32, part.experts.len() as u32]);
            let (groups, message) = message.split_at_mut(counts);
            for (words, (expert, count)) in groups.chunks_exact_mut(2).zip(&part.experts) {
                words.copy_from_slice(&[*expert, *count]);
            }
            let (rows, tokens) = message.split_at_mut(part.rows.len());
            rows.copy_from_slice(&part.rows);
            for (row, token) in floats_mut(tokens).chunks_exact_mut(width).zip(&part.tokens) {
                row.copy_from_slice(&x[*token as usize * width..][..width]);
            }
        }
        Ok(())
    }

    /// Gathers the rows that came and this rank's own, runs the experts, and sends the outputs back. Returns
    /// when the experts were through.
    fn compute(
        &mut self,
        fabric: &mut dyn Fabric,
        layer: u32,
        x: &[f32],
        experts: &mut dyn Experts,
        deadline: Duration,
    ) -> Result<Instant, FabricError> {
        let started = Instant::now();
        let rank = fabric.rank();
        // Without a width no rank could have sent a row, nor has this rank one.
        let width = experts.shape(layer).map_or(1, |(width, _)| width);
        self.gathered.resize(self.arrivals.sources.len() * width, 0.0);
        for (row, (from, token)) in self.gathered.chunks_exact_mut(width).zip(&self.arrivals.sources) {
            let from = *from as usize;
            let start = self.arrivals.starts[from];
            let tokens = if from == rank { x } else { floats(&fabric.inbox(from)[start..]) };
            row.copy_from_slice(&tokens[*token as usize * width..][..width]);
        }
        self.outputs.resize(self.gathered.len(), 0.0);
        for (expert, ends) in self.arrivals.offsets.windows(2).enumerate() {
            let rows = ends[0] * width..ends[1] * width;
            if !rows.is_empty() {
                experts.run(layer, expert, &self.gathered[rows.clone()], &mut self.outputs[rows]);
            }
        }
        self.times.compute = started.elapsed();
        let after = Instant::now();
        for (to, places) in self.arrivals.places.iter().enumerate() {
            if to != rank && !places.is_empty() {
                let outbox = fabric.outbox(to, places.len() * width)?;
                for (row, place) in floats_mut(outbox).chunks_exact_mut(width).zip(places) {
                    row.copy_from_slice(&self.outputs[*place as usize * width..][..width]);
                }
            }
        }
        fabric.exchange(Phase::Combine, deadline).map_err(|error| error.in_layer(layer))?;
        for (from, part) in self.plan.parts.iter().enumerate() {
            // Who serves has made no plan.
            let expected = if from == rank || x.is_empty() { 0 } else { part.rows.len() * width };
            if fabric.inbox(from).len() != expected {
                let cause = Cause::Protocol("another number of rows than it was sent");
                return Err(fabric.fail(from, Phase::Combine, cause).in_layer(layer));
            }
        }
        Ok(after)
    }

    /// Sums, of each of this rank's tokens, the rows of its slots, in slot order.
    fn sum(&mut self, compute: &Compute, fabric: &dyn Fabric, weights: &[f32], top: usize, out: &mut [f32]) {
        let rank = fabric.rank();
        // Rows of this rank's own experts lie in their own order.
        for (from, row) in self.plan.returns.iter_mut().filter(|(from, _)| *from as usize == rank) {
            *row = self.arrivals.places[*from as usize][*row as usize];
        }
        let rows = |from| if from == rank { &self.outputs[..] } else { floats(fabric.inbox(from)) };
        let parts: Vec<&[f32]> = (0..fabric.size()).map(rows).collect();
        combine_parts(compute, &parts, &self.plan.returns, weights, top, out);
    }
}

impl Arrivals {
    /// Takes in which rows are to be served: of every message, and of this rank's own part.
    fn read(
        &mut self,
        fabric: &mut dyn Fabric,
        own: Option<&super::Part>,
        layer: Option<u32>,
        experts: &dyn Experts,
    ) -> Result<(), FabricError> {
        let (rank, size) = (fabric.rank(), fabric.size());
        self.layer = layer;
        self.starts.clear();
        self.places.resize_with(size, Vec::new);
        for from in 0..size {
            match self.check(fabric.inbox(from), experts) {
                Ok(start) => self.starts.push(start),
                Err(what) => return Err(fabric.fail(from, Phase::Dispatch, Cause::Protocol(what))),
            }
        }
        let count = self.layer.and_then(|layer| experts.shape(layer)).map_or(0, |(_, experts)| experts);
        let layer_of_own = layer.unwrap_or_default();
        let message = |from: usize| Message::of(fabric.inbox(from));
        self.offsets.clear();
        self.offsets.resize(count + 1, 0);
        for from in 0..size {
            let own = own.filter(|_| from == rank);
            let held =
                |own: &super::Part| own.experts.iter().all(|(e, _)| experts.holds(layer_of_own, *e as usize));
            assert!(own.is_none_or(held), "parallel: this rank does not hold what the placement says");
            for (expert, rows) in
                message(from).groups().chain(own.into_iter().flat_map(|p| p.experts.clone()))
            {
                self.offsets[expert as usize + 1] += rows as usize;
            }
        }
        for expert in 0..count {
            self.offsets[expert + 1] += self.offsets[expert];
        }
        self.next.clear();
        self.next.extend_from_slice(&self.offsets);
        self.sources.clear();
        self.sources.resize(self.offsets[count], (0, 0));
        for from in 0..size {
            self.places[from].clear();
            match own.filter(|_| from == rank) {
                // One's own tokens are not packed.
                Some(part) => {
                    self.place(from, part.experts.iter().copied(), &part.rows, |row| part.tokens[row]);
                }
                None => self.place(from, message(from).groups(), message(from).rows(), |row| row as u32),
            }
        }
        Ok(())
    }

    /// Whether a message is one that can be served; where its tokens begin.
    fn check(&mut self, message: &[u32], experts: &dyn Experts) -> Result<usize, &'static str> {
        if message.is_empty() {
            return Ok(0);
        }
        if message.len() < HEAD || message[0] != TOKENS {
            return Err("a message of another kind");
        }
        let layer = *self.layer.get_or_insert(message[1]);
        if message[1] != layer {
            return Err("tokens of another layer");
        }
        let Some((width, count)) = experts.shape(layer) else {
            return Err("tokens of a layer without experts");
        };
        let (tokens, groups) = (message[2] as usize, message[3] as usize);
        let heads = HEAD.saturating_add(groups.saturating_mul(2));
        if heads > message.len() {
            return Err("a message that is cut");
        }
        let found = Message::of(message);
        let mut rows = 0_usize;
        for (expert, served) in found.groups() {
            if expert as usize >= count || !experts.holds(layer, expert as usize) {
                return Err("tokens for an expert that is not here");
            }
            rows = rows.saturating_add(served as usize);
        }
        let start = heads.saturating_add(rows);
        if message.len() != start.saturating_add(tokens.saturating_mul(width)) {
            return Err("a message that is cut");
        }
        if found.rows().iter().any(|token| *token as usize >= tokens) {
            return Err("a row of no token");
        }
        Ok(start)
    }

    /// Gives each of a rank's `rows` its place; `token` says which of the rank's tokens a row is of.
    fn place(
        &mut self,
        from: usize,
        groups: impl Iterator<Item = (u32, u32)>,
        rows: &[u32],
        token: impl Fn(usize) -> u32,
    ) {
        let mut rows = rows.iter();
        for (expert, count) in groups {
            for row in rows.by_ref().take(count as usize) {
                let place = &mut self.next[expert as usize];
                self.sources[*place] = (from as u32, token(*row as usize));
                self.places[from].push(*place as u32);
                *place += 1;
            }
        }
    }
}

/// A message of tokens whose length has been checked, or an empty one.
struct Message<'a> {
    groups: &'a [u32],
    rest: &'a [u32],
}

impl<'a> Message<'a> {
    fn of(message: &'a [u32]) -> Self {
        let groups = message.get(HEAD - 1).map_or(0, |groups| *groups as usize * 2);
        let (groups, rest) = message.get(HEAD..).unwrap_or_default().split_at(groups);
        Self { groups, rest }
    }

    fn groups(&self) -> impl Iterator<Item = (u32, u32)> + use<'a> {
        self.groups.chunks_exact(2).map(|pair| (pair[0], pair[1]))
    }

    fn rows(&self) -> &'a [u32] {
        let rows = self.groups().map(|(_, count)| count as usize).sum::<usize>();
        self.rest.get(..rows).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests;
