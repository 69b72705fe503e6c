//! Steps that all ranks take together, each with a device, its own tokens and its own KV cache: data-parallel
//! attention on GPUs. What `model/joint.rs` is for CPUs; the notes and the rows that go back are the same.
//! Who runs in a step is decided elsewhere: `data_parallel.rs`.

use std::mem;

use keyway_kernels::cuda::Device;
use keyway_kernels::fabric::{Cause, Fabric, FabricError, Phase};
use keyway_kernels::moe::parallel::{note_in, write_note_to};

use super::lead::{Counted, Failure};
use super::rank::{RankSettings, nonsense};
use super::sharing::{Load, OpenMailboxes, Sharing};
use super::weights::DeviceFeedForward;
use super::{CudaBackend, failed};
use crate::engine::backend::StepOutput;
use crate::limits::EXPERT_LOAD_MAX;
use crate::model::experts::{Attention, Exchange, GroupError, Note, RankError};
use crate::model::joint::{collect_rows, send_rows};
use crate::model::step_words::{self, StepWords};
use crate::model::{Joint, JointError, ModelError, Quantize, RankOutput};

/// What rank 0 does: tells each rank its part of a step, runs its own, and collects what they came to.
impl<D: Device + Send> Joint for CudaBackend<D> {
    fn ensure_group(&mut self) -> Result<(), GroupError> {
        self.model.ensure_group()
    }

    fn losses(&mut self) -> u64 {
        self.model.lead.as_ref().map_or(0, |lead| lead.group.losses())
    }

    fn joint_step(&mut self, parts: &[StepWords], outputs: &mut Vec<RankOutput>) -> Result<(), JointError> {
        outputs.resize_with(parts.len(), RankOutput::default);
        let Err(failure) = self.try_joint(parts, outputs) else { return Ok(()) };
        let reason = self.give_up(failure);
        let lost = self.model.lead.as_mut().is_some_and(|lead| mem::take(&mut lead.lost));
        Err(if lost { JointError::Lost(reason) } else { JointError::Failed(reason) })
    }
}

impl<D: Device + Send> CudaBackend<D> {
    fn try_joint(&mut self, parts: &[StepWords], outputs: &mut [RankOutput]) -> Result<(), Failure> {
        let (Some((own, _)), Some((output, rest))) = (parts.split_first(), outputs.split_first_mut()) else {
            return Ok(());
        };
        let load = Load::of_parts(parts);
        self.tell(parts, &load).map_err(Failure::Rank)?;
        let mut counted = self.take_part(&own.words, load, output)?;
        let widths = (self.model.config.vocab_size, self.model.config.hidden);
        let Some(lead) = &mut self.model.lead else { return Ok(()) };
        let Exchange { fabric: Some(fabric), deadline, .. } = &mut lead.group.exchange else {
            return Ok(());
        };
        fabric.exchange(Phase::Result, *deadline).map_err(Failure::Rank)?;
        for rank in 1..fabric.size() {
            if fabric.inbox(rank).len() != counted.rows.len() {
                let cause = Cause::Protocol("word of another number of experts");
                return Err(Failure::Rank(fabric.fail(rank, Phase::Result, cause)));
            }
            for (all, more) in counted.rows.iter_mut().zip(fabric.inbox(rank)) {
                *all += more;
            }
        }
        let most = parts.iter().map(|part| part.wanted).max().unwrap_or(0);
        collect_rows(&mut **fabric, *deadline, parts, most, widths, rest).map_err(Failure::Rank)?;
        self.model.count(&counted);
        Ok(())
    }

    /// Tells every rank what is its part.
    fn tell(&mut self, parts: &[StepWords], load: &Load) -> Result<(), FabricError> {
        let Some(lead) = &mut self.model.lead else { return Ok(()) };
        let Exchange { fabric: Some(fabric), deadline, .. } = &mut lead.group.exchange else {
            return Ok(());
        };
        let most = parts.iter().map(|part| part.wanted).max().unwrap_or(0);
        let mut note = Vec::new();
        for (to, part) in parts.iter().enumerate().skip(1) {
            note.clear();
            note.extend([Note::Step.word(), most as u32]);
            note.extend(load.words());
            note.extend(&part.words);
            write_note_to(&mut **fabric, to, &note)?;
        }
        fabric.exchange(Phase::Dispatch, *deadline)
    }
}

/// What every rank does, rank 0 among them: its own part of a step.
impl<D: Device + Send> CudaBackend<D> {
    /// Runs this rank's part of a step, which the others know of.
    fn take_part(&mut self, words: &[u32], load: Load, output: &mut RankOutput) -> Result<Counted, Failure> {
        output.logits.clear();
        output.hidden.clear();
        if words.is_empty() {
            return self.serve_only(load);
        }
        let limits = step_words::Limits {
            groups: self.plan.groups.len(),
            block_size: self.kv.block_size,
            num_blocks: self.kv.num_blocks,
            vocab_size: self.model.config.vocab_size,
            positions: self.model.config.max_positions,
        };
        let Some((heads, tables)) = step_words::read(words, &limits) else {
            let (phase, cause) = (Phase::Dispatch, Cause::Protocol("a step that cannot be"));
            return Err(Failure::Rank(FabricError { rank: 0, exchange: 0, phase, layer: None, cause }));
        };
        let chunks = step_words::chunks(&heads, &tables, limits.groups);
        let draws = vec![None; chunks.iter().filter(|chunk| chunk.wants_logits).count()];
        let step = self.plan(&chunks, &draws)?;
        self.launch_step(&step, &draws, Some(load))?;
        let mut said = StepOutput { logits: mem::take(&mut output.logits), ..StepOutput::default() };
        let counted = self.collect(&mut said);
        output.logits = said.logits;
        output.hidden.extend_from_slice(&self.hidden);
        counted
    }

    /// Runs this rank's experts for the others.
    fn serve_only(&mut self, load: Load) -> Result<Counted, Failure> {
        let model = &mut self.model;
        let mut launches = Vec::new();
        if let Some(sharing) = &model.sharing {
            for (layer, tokens) in sharing.plan.layers(&load) {
                let DeviceFeedForward::Experts(experts) = &model.weights.layers[layer].feed_forward else {
                    continue;
                };
                for all in sharing.plan.rounds(tokens) {
                    launches.extend(sharing.round(&experts.held, None, all));
                }
            }
        }
        launches.iter().try_for_each(|launch| model.device.launch(launch))?;
        match model.fetch_report(Some(load))? {
            Some(exchanged) => model.take_report(&exchanged),
            None => Ok(Counted::default()),
        }
    }
}

/// A rank other than 0 that runs attention too: loads the model, and takes part in every step until the group
/// fails.
///
/// # Errors
/// Always: there is no other end.
pub(super) fn attend<D: Device + Send>(
    (device, quantize): (D, Quantize),
    sharing: Sharing,
    mut fabric: Box<dyn Fabric>,
    (attention, open): (Attention, OpenMailboxes<D>),
    by: &RankSettings<'_>,
) -> Result<(), RankError> {
    let model = (by.whole)(fabric.size(), fabric.rank())?;
    if model.attention(attention.kv) != attention {
        return Err(nonsense(&mut *fabric, "a placement for other weights"));
    }
    let mut model = model.share_onto(device, quantize)?;
    if by.fp8_kv {
        model = model.with_fp8_kv();
    }
    model.reserve_steps(by.tokens_max, by.sequences_max)?;
    model.sharing = Some(sharing);
    let mut backend = model.into_backend(attention.kv)?;
    fabric.exchange(Phase::Placement, EXPERT_LOAD_MAX)?;
    if let Some(sharing) = &mut backend.model.sharing {
        sharing.join(&mut backend.model.device, &mut *fabric, open).map_err(failed)?;
    }
    let (mut output, size) = (RankOutput::default(), fabric.size());
    let widths = (backend.model.config.vocab_size, backend.model.config.hidden);
    loop {
        fabric.exchange(Phase::Dispatch, by.deadline)?;
        let note = note_in(fabric.inbox(0)).to_vec();
        let (most, words) = match (Note::of(&note), &note[..]) {
            (Some(Note::KeepAlive), _) => continue,
            (Some(Note::Step), [_, most, words @ ..]) if words.len() >= 2 * size => (*most, words),
            _ => return Err(nonsense(&mut *fabric, "a note of another kind")),
        };
        let (load, words) = words.split_at(2 * size);
        let Some(load) = Load::read(load, size) else {
            return Err(nonsense(&mut *fabric, "a step of another number of ranks"));
        };
        let counted = backend.take_part(words, load, &mut output).map_err(ended)?;
        fabric.outbox(0, counted.rows.len())?.copy_from_slice(&counted.rows);
        fabric.exchange(Phase::Result, by.deadline)?;
        send_rows(&mut *fabric, by.deadline, &output, most as usize, widths)?;
    }
}

/// Why a rank ends that could not carry out its part.
fn ended(failure: Failure) -> RankError {
    match failure {
        Failure::Rank(error) => error.into(),
        Failure::Device(error) => failed(error).into(),
        Failure::Group(error) => ModelError::Device(error.to_string()).into(),
    }
}
