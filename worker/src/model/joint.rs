//! Steps that all ranks of a group take together, each with its own tokens over its own KV cache:
//! data-parallel attention. Rank 0 tells every rank its chunks, all run the same layers (who has no tokens
//! joins their exchanges with empty messages), and the logits go back to rank 0. Who runs in a step is
//! decided elsewhere: `data_parallel.rs`.

use std::time::Duration;

use keyway_kernels::fabric::{Cause, Fabric, FabricError, Phase, floats, floats_mut};
use keyway_kernels::moe::parallel::{note_in, write_note_to};

use super::experts::{Exchange, ExpertGroup, GroupError, Note, RankError, Spread, Widest};
use super::step_words::{self, StepWords};
use super::{CpuBackend, ModelError};
use crate::engine::backend::Backend;

/// What one rank's part of a step came to: a row for each chunk that wants one.
#[derive(Debug, Default)]
pub(crate) struct RankOutput {
    /// A row of logits for each such chunk, `[wanted, vocabulary]`.
    pub(crate) logits: Vec<f32>,
    /// The final hidden states that they were made from, `[wanted, hidden]`.
    pub(crate) hidden: Vec<f32>,
}

/// Why a joint step was not carried out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum JointError {
    /// A group failed and is started again: what its ranks kept is lost, and the step may be planned anew.
    Lost(String),
    /// It failed too often.
    Failed(String),
}

/// Rank 0's backend of a group whose ranks take steps together.
pub(crate) trait Joint: Backend {
    /// Starts the group, if it is not there.
    fn ensure_group(&mut self) -> Result<(), GroupError>;

    /// Changes whenever the ranks lost their KV.
    fn losses(&mut self) -> u64;

    /// Runs a step of every rank, whose `parts` come by rank, into `outputs`, by rank too. The group must
    /// have been started.
    fn joint_step(&mut self, parts: &[StepWords], outputs: &mut Vec<RankOutput>) -> Result<(), JointError>;
}

/// Rows of several ranks on their way to rank 0: so many exchanges, of so many rows of each rank at most.
fn pieces(capacity: usize, row: usize, widest: usize) -> impl Iterator<Item = (usize, usize)> {
    let most = (capacity / row).max(1);
    (0..widest).step_by(most).map(move |first| (first, first + most))
}

/// The rows of a piece that a rank with `rows` of them has.
fn of_piece((first, end): (usize, usize), rows: usize) -> std::ops::Range<usize> {
    first.min(rows)..end.min(rows)
}

/// What rank 0 does: tells each rank its part of a step, runs its own, and collects what they came to.
impl Joint for CpuBackend {
    fn ensure_group(&mut self) -> Result<(), GroupError> {
        self.group().map_or(Ok(()), ExpertGroup::ensure)
    }

    fn losses(&mut self) -> u64 {
        self.group().map_or(0, |group| group.losses())
    }

    fn joint_step(&mut self, parts: &[StepWords], outputs: &mut Vec<RankOutput>) -> Result<(), JointError> {
        outputs.resize_with(parts.len(), RankOutput::default);
        let done = self.try_joint(parts, outputs);
        let Some(Spread::Lead(group)) = &mut self.buffers.feed_forward.group else {
            return Err(JointError::Failed("there is no expert-parallel group".to_owned()));
        };
        group.exchange.widest = None;
        if let Err(error) = done {
            return Err(match group.fail(&error) {
                Ok(()) => JointError::Lost(error.to_string()),
                Err(error) => JointError::Failed(error.to_string()),
            });
        }
        if let Err(error) = group.step_done(&mut self.decoder.weights) {
            // This step is through; the next one starts the group again.
            tracing::error!("{error}");
        }
        Ok(())
    }
}

impl CpuBackend {
    fn try_joint(&mut self, parts: &[StepWords], outputs: &mut [RankOutput]) -> Result<(), FabricError> {
        let widest = Widest {
            rows: parts.iter().map(|part| part.rows).max().unwrap_or(0),
            wanted: parts.iter().map(|part| part.wanted).max().unwrap_or(0),
        };
        let (Some((own, _)), Some((output, rest))) = (parts.split_first(), outputs.split_first_mut()) else {
            return Ok(());
        };
        if let Some(Spread::Lead(group)) = &mut self.buffers.feed_forward.group
            && let Some(fabric) = &mut group.exchange.fabric
        {
            tell(&mut **fabric, parts, widest, group.exchange.deadline)?;
            group.exchange.widest = Some(widest);
        }
        self.take_part(&own.words, output)?;
        let widths = (self.decoder.config.vocab_size, self.decoder.config.hidden);
        self.group().map_or(Ok(()), |group| collect(group, parts, widest, widths, rest))
    }
}

/// Tells every rank what is its part.
fn tell(
    fabric: &mut dyn Fabric,
    parts: &[StepWords],
    widest: Widest,
    deadline: Duration,
) -> Result<(), FabricError> {
    let mut note = Vec::new();
    for (to, part) in parts.iter().enumerate().skip(1) {
        note.clear();
        note.extend([Note::Step.word(), widest.rows as u32, widest.wanted as u32]);
        note.extend(&part.words);
        write_note_to(fabric, to, &note)?;
    }
    fabric.exchange(Phase::Dispatch, deadline)
}

/// Takes in what the others' parts came to: first what their experts did, then their rows.
fn collect(
    group: &mut ExpertGroup,
    parts: &[StepWords],
    widest: Widest,
    widths: (usize, usize),
    outputs: &mut [RankOutput],
) -> Result<(), FabricError> {
    group.count_others()?;
    let Exchange { fabric: Some(fabric), deadline, .. } = &mut group.exchange else { return Ok(()) };
    collect_rows(&mut **fabric, *deadline, parts, widest.wanted, widths, outputs)
}

/// Takes in the rows of the other ranks' parts, `outputs` of rank 1 and on. The widest part wants `most`.
pub(super) fn collect_rows(
    fabric: &mut dyn Fabric,
    deadline: Duration,
    parts: &[StepWords],
    most: usize,
    (vocab, hidden): (usize, usize),
    outputs: &mut [RankOutput],
) -> Result<(), FabricError> {
    let row = vocab + hidden;
    for output in &mut *outputs {
        output.logits.clear();
        output.hidden.clear();
    }
    for piece in pieces(fabric.capacity(), row, most) {
        fabric.exchange(Phase::Result, deadline)?;
        for (i, (part, output)) in parts[1..].iter().zip(&mut *outputs).enumerate() {
            let rows = of_piece(piece, part.wanted);
            let came = fabric.inbox(i + 1);
            if came.len() != rows.len() * row {
                let cause = Cause::Protocol("another number of rows than were wanted");
                return Err(fabric.fail(i + 1, Phase::Result, cause));
            }
            for row in floats(came).chunks_exact(row) {
                output.logits.extend_from_slice(&row[..vocab]);
                output.hidden.extend_from_slice(&row[vocab..]);
            }
        }
    }
    Ok(())
}

/// Sends the rows of this rank's part to rank 0; the widest part wants `most`.
pub(super) fn send_rows(
    fabric: &mut dyn Fabric,
    deadline: Duration,
    output: &RankOutput,
    most: usize,
    (vocab, hidden): (usize, usize),
) -> Result<(), FabricError> {
    let rows = output.logits.len() / vocab;
    for piece in pieces(fabric.capacity(), vocab + hidden, most) {
        let rows = of_piece(piece, rows);
        let outbox = floats_mut(fabric.outbox(0, rows.len() * (vocab + hidden))?);
        for (place, row) in outbox.chunks_exact_mut(vocab + hidden).zip(rows) {
            place[..vocab].copy_from_slice(&output.logits[row * vocab..][..vocab]);
            place[vocab..].copy_from_slice(&output.hidden[row * hidden..][..hidden]);
        }
        fabric.exchange(Phase::Result, deadline)?;
    }
    Ok(())
}

/// What every rank does, rank 0 among them: its own part of a step.
impl CpuBackend {
    /// Rank 0's end of the group, if there is one.
    pub(super) fn group(&mut self) -> Option<&mut ExpertGroup> {
        match &mut self.buffers.feed_forward.group {
            Some(Spread::Lead(group)) => Some(group),
            _ => None,
        }
    }

    /// Runs this rank's part of a step, in which the group's exchange is.
    fn take_part(&mut self, words: &[u32], output: &mut RankOutput) -> Result<(), FabricError> {
        output.logits.clear();
        let limits = step_words::Limits {
            groups: self.plan.groups.len(),
            block_size: self.kv.block_size,
            num_blocks: self.kv.num_blocks,
            vocab_size: self.decoder.config.vocab_size,
            positions: self.decoder.config.max_positions,
        };
        let Some((heads, tables)) = step_words::read(words, &limits) else {
            return Err(self.nonsense("a step that cannot be"));
        };
        let chunks = step_words::chunks(&heads, &tables, limits.groups);
        let (slabs, places) = (&mut self.slabs, &self.plan.places);
        self.decoder.step(&chunks, slabs, places, &mut self.buffers, &mut output.logits)?;
        let rows = output.logits.len() / limits.vocab_size;
        output.hidden.clear();
        output.hidden.extend_from_slice(&self.buffers.normed[..rows * self.decoder.config.hidden]);
        Ok(())
    }

    /// What rank 0 sent makes no sense.
    fn nonsense(&mut self, what: &'static str) -> FabricError {
        let phase = Phase::Dispatch;
        match self.buffers.feed_forward.group.as_mut().and_then(Spread::fabric) {
            Some(fabric) => fabric.fail(0, phase, Cause::Protocol(what)),
            None => FabricError { rank: 0, exchange: 0, phase, layer: None, cause: Cause::Protocol(what) },
        }
    }
}

/// What ranks other than 0 do: join a group, and take part in its steps.
impl CpuBackend {
    /// Takes the group's exchange; see [`CpuBackend::serve`].
    pub(super) fn join(&mut self, exchange: Exchange) {
        self.buffers.feed_forward.group = Some(Spread::Rank(Box::new(exchange)));
    }

    /// Takes part in every step until the group fails. `place` does as a note says that gives experts other
    /// ranks.
    ///
    /// # Errors
    /// Always: there is no other end.
    pub(super) fn serve(
        &mut self,
        mut place: impl FnMut(&mut Self, &[u32]) -> Result<(), RankError>,
    ) -> Result<(), RankError> {
        let (mut note, mut output) = (Vec::new(), RankOutput::default());
        loop {
            let exchange = match &mut self.buffers.feed_forward.group {
                Some(Spread::Rank(exchange)) => Some(&mut **exchange),
                _ => None,
            };
            let Some(Exchange { fabric: Some(fabric), deadline, .. }) = exchange else {
                return Err(ModelError::KvCache("this rank is in no group".to_owned()).into());
            };
            fabric.exchange(Phase::Dispatch, *deadline)?;
            note.clear();
            note.extend_from_slice(note_in(fabric.inbox(0)));
            match (Note::of(&note), &note[..]) {
                (Some(Note::KeepAlive), _) => {}
                (Some(Note::Place), note) => place(self, note)?,
                (Some(Note::Step), [_, rows, wanted, words @ ..]) => {
                    let widest = Widest { rows: *rows as usize, wanted: *wanted as usize };
                    self.serve_step(widest, words, &mut output)?;
                }
                _ => return Err(self.nonsense("a note of another kind").into()),
            }
        }
    }

    fn serve_step(
        &mut self,
        widest: Widest,
        words: &[u32],
        output: &mut RankOutput,
    ) -> Result<(), FabricError> {
        if let Some(Spread::Rank(exchange)) = &mut self.buffers.feed_forward.group {
            exchange.widest = Some(widest);
        }
        self.take_part(words, output)?;
        let (vocab, hidden) = (self.decoder.config.vocab_size, self.decoder.config.hidden);
        let Some(Spread::Rank(exchange)) = &mut self.buffers.feed_forward.group else { return Ok(()) };
        exchange.tell_counts()?;
        let Exchange { fabric: Some(fabric), deadline, .. } = &mut **exchange else { return Ok(()) };
        send_rows(&mut **fabric, *deadline, output, widest.wanted, (vocab, hidden))
    }
}
