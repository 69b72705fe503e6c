//! A rank other than 0 whose experts are on a device: it launches, for every step that rank 0 tells of, its
//! part in all layers' rounds, and knows no tokens but what the exchange brings. It ends when the group
//! fails; rank 0, which started it, starts it anew.

use std::collections::VecDeque;
use std::time::Duration;

use keyway_kernels::cuda::{Device, DeviceError, Launch};
use keyway_kernels::fabric::{Cause, Fabric, Phase};
use keyway_kernels::moe::parallel::note_in;

use super::failed;
use super::joint::attend;
use super::recordings::{Met, Recordings};
use super::sharing::{HeldExperts, Load, OpenMailboxes, Plan, Sharing};
use super::weights::{Upload, kept};
use crate::limits::EXPERT_LOAD_MAX;
use crate::model::experts::{Note, Place, RankError, Store};
use crate::model::{LoadedModel, ModelError, Quantize};

/// A rank's experts on a device.
#[derive(Debug)]
pub(crate) struct CudaRank<D> {
    device: D,
    store: Store,
    quantize: Quantize,
    /// By layer; `None` for layers without experts.
    layers: Vec<Option<HeldExperts>>,
    sharing: Sharing,
    recordings: Recordings,
    under_way: VecDeque<UnderWay>,
}

/// A model with the share of the experts of so many ranks that a rank has.
pub(crate) type WholeModel<'a> = &'a dyn Fn(usize, usize) -> Result<LoadedModel, ModelError>;

/// What a rank is told when it is started.
pub(crate) struct RankSettings<'a> {
    /// What may pass between two messages of rank 0.
    pub(crate) deadline: Duration,
    /// Tokens and sequences of a step, at most.
    pub(crate) tokens_max: usize,
    pub(crate) sequences_max: usize,
    /// Where ranks run attention too: whether their KV caches are in FP8.
    pub(crate) fp8_kv: bool,
    /// What it computes with where ranks run attention too.
    pub(crate) whole: WholeModel<'a>,
}

/// A step that was launched.
#[derive(Debug)]
struct UnderWay {
    load: Load,
    first_round: u32,
    fetch: u64,
}

impl<D: Device + Send> CudaRank<D> {
    /// Serves as one rank of a group until it fails, with experts from `store`, which gives them as they are
    /// stored, quantised for the device.
    ///
    /// # Errors
    /// Always: there is no other end.
    pub(crate) fn serve(
        mut device: D,
        (store, quantize): (Store, Quantize),
        mut fabric: Box<dyn Fabric>,
        open: OpenMailboxes<D>,
        by: &RankSettings<'_>,
    ) -> Result<(), RankError> {
        let RankSettings { deadline, tokens_max, .. } = *by;
        let plan = Plan::new(store.config(), fabric.size(), tokens_max)?;
        let sharing = Sharing::new(&mut device, plan, 1, deadline).map_err(failed)?;
        let (layers, recordings, under_way) = (Vec::new(), Recordings::default(), VecDeque::new());
        let mut rank = Self { device, store, quantize, layers, sharing, recordings, under_way };
        // The first message comes when all ranks have started.
        let mut patience = EXPERT_LOAD_MAX;
        loop {
            fabric.exchange(Phase::Dispatch, patience)?;
            patience = deadline;
            let note = note_in(fabric.inbox(0)).to_vec();
            match (Note::of(&note), &note[..]) {
                (Some(Note::KeepAlive), _) => rank.catch_up(0)?,
                (Some(Note::Place), note) if rank.layers.is_empty() => {
                    let place = rank.read_place(&mut *fabric, note)?;
                    if let Some(attention) = place.attention {
                        let Self { device, quantize, sharing, .. } = rank;
                        return attend((device, quantize), sharing, fabric, (attention, open), by);
                    }
                    rank.hold(fabric.rank())?;
                    fabric.exchange(Phase::Placement, EXPERT_LOAD_MAX)?;
                    rank.sharing.join(&mut rank.device, &mut *fabric, open).map_err(failed)?;
                }
                (Some(Note::Step), [_, recorded, words @ ..]) => {
                    let Some(load) = Load::read(words, fabric.size()) else {
                        return Err(nonsense(&mut *fabric, "a step of another number of ranks"));
                    };
                    rank.step(load, *recorded == 1)?;
                }
                _ => return Err(nonsense(&mut *fabric, "a note of another kind")),
            }
        }
    }

    /// What rank 0 says of who holds what.
    fn read_place(&self, fabric: &mut dyn Fabric, note: &[u32]) -> Result<Place, RankError> {
        let place = Place::read(note, fabric.size(), &self.store.experts(), self.store.fingerprint());
        let shared = |place: &Place| {
            place.placements.iter().flatten().all(|other| *other == self.sharing.plan.placement)
        };
        place.filter(shared).ok_or_else(|| nonsense(fabric, "a placement for another model"))
    }

    /// Loads what it shall hold of the experts.
    fn hold(&mut self, rank: usize) -> Result<(), RankError> {
        let counts = self.store.experts();
        for layer in 0..counts.len() {
            let Some(mut bank) = self.store.empty_bank(layer) else {
                self.layers.push(None);
                continue;
            };
            self.store.load(layer, &mut bank, |expert| self.sharing.plan.placement.holds(rank, expert))?;
            let held = Upload::new(&mut self.device).held(&bank, kept(self.quantize));
            self.layers.push(Some(held.map_err(failed)?));
        }
        Ok(())
    }

    /// Launches this rank's part of a step; those before the last one must be through.
    fn step(&mut self, load: Load, recorded: bool) -> Result<(), RankError> {
        self.catch_up(1)?;
        let first_round = self.sharing.begin(&load);
        let fetch = self.launch(&load, recorded).map_err(failed)?;
        self.under_way.push_back(UnderWay { load, first_round, fetch });
        Ok(())
    }

    fn launch(&mut self, load: &Load, recorded: bool) -> Result<u64, DeviceError> {
        let form: Vec<usize> = load.rows.iter().chain(&load.wanted).copied().collect();
        let met = if recorded { self.recordings.meet(&mut self.device, 0, &form) } else { Met::Never };
        match met {
            Met::Recorded(recording) => self.device.replay(recording)?,
            Met::Before => {
                let recording = self.device.record(&self.launches(load))?;
                self.recordings.add(form, recording);
                self.device.replay(recording)?;
            }
            Met::Never => {
                self.launches(load).iter().try_for_each(|launch| self.device.launch(launch))?;
            }
        }
        let words = self.sharing.report().ok_or_else(|| DeviceError("a step before the group".into()))?;
        self.device.fetch(words.buffer, words.offset, words.len * size_of::<u32>())
    }

    /// All rounds of a step, of whose tokens this rank has none.
    fn launches(&self, load: &Load) -> Vec<Launch> {
        let plan = &self.sharing.plan;
        let mut launches = Vec::new();
        for (layer, tokens) in plan.layers(load) {
            let Some(Some(experts)) = self.layers.get(layer) else { continue };
            for all in plan.rounds(tokens) {
                launches.extend(self.sharing.round(experts, None, all));
            }
        }
        launches
    }

    /// Waits for all steps but the last `left`. An error is the fault that ended the group.
    fn catch_up(&mut self, left: usize) -> Result<(), RankError> {
        while self.under_way.len() > left {
            let (Some(step), Some(report)) = (self.under_way.pop_front(), self.sharing.report()) else {
                return Ok(());
            };
            let mut bytes = vec![0; report.len * size_of::<u32>()];
            self.device.collect(step.fetch, &mut bytes).map_err(failed)?;
            let words: Vec<u32> = bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
            self.sharing.read(&words, &step.load, step.first_round)?;
        }
        Ok(())
    }
}

/// Ends the group because of what rank 0 sent.
pub(super) fn nonsense(fabric: &mut dyn Fabric, what: &'static str) -> RankError {
    fabric.fail(0, Phase::Dispatch, Cause::Protocol(what)).into()
}
