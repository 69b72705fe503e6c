//! Rank 0's end of a group of processes that share a model's experts, each with a GPU or with a part of one:
//! joins the group, tells the others of every step, finds out whose fault it is when one fails, and counts
//! what experts did. Starting and watching processes is `experts/group.rs`' business, the exchange itself the
//! device's (`sharing.rs`).

use std::time::Duration;

use keyway_kernels::cuda::{Device, DeviceError};
use keyway_kernels::fabric::{FabricError, Phase};
use keyway_kernels::moe::parallel::{Times, write_note};

use super::sharing::{Load, OpenMailboxes, Plan, Sharing};
use super::step::Step;
use super::{CudaBackend, CudaModel, failed};
use crate::model::ModelError;
use crate::model::experts::{Exchange, ExpertGroup, GroupError, Note};

/// Rank 0's end of a group.
#[derive(Debug)]
pub(super) struct Lead<D> {
    pub(super) group: Box<ExpertGroup>,
    open: OpenMailboxes<D>,
    /// Which group the device has joined, by how many ended before.
    joined: Option<u64>,
    /// Whether, since this was last asked, a step was lost with a group that may start anew.
    pub(super) lost: bool,
}

/// Why a step was not carried out.
#[derive(Debug)]
pub(super) enum Failure {
    Device(DeviceError),
    /// A rank failed in an exchange, or sent what makes no sense.
    Rank(FabricError),
    /// There is no group, and none can be started.
    Group(GroupError),
}

/// What the first rank's tokens asked of experts in a step.
#[derive(Debug, Default)]
pub(super) struct Counted {
    /// The rows that each rank's experts were sent, `[ranks, held]`.
    pub(super) rows: Vec<u32>,
    /// Where the time went.
    times: Option<Times>,
    layers: u32,
}

/// A step's part in the exchange, for when it is waited for.
#[derive(Debug)]
pub(super) struct Exchanged {
    load: Load,
    first_round: u32,
    /// The device's number of the copy of what the first rank here reports.
    fetch: u64,
    words: usize,
}

impl From<DeviceError> for Failure {
    fn from(error: DeviceError) -> Self {
        Self::Device(error)
    }
}

impl From<GroupError> for Failure {
    fn from(error: GroupError) -> Self {
        Self::Group(error)
    }
}

impl<D: Device> CudaModel<D> {
    /// Takes the memory of an exchange between `ranks` ranks, of which this one is here; `tokens_max`: of a
    /// step.
    pub(crate) fn reserve_sharing(
        &mut self,
        ranks: usize,
        tokens_max: usize,
        deadline: Duration,
    ) -> Result<(), ModelError> {
        let plan = Plan::new(&self.config, ranks, tokens_max)?;
        self.sharing = Some(Sharing::new(&mut self.device, plan, 1, deadline).map_err(failed)?);
        Ok(())
    }

    /// What the exchange takes beside, once the group is joined, in bytes.
    pub(crate) fn mailbox_bytes(&self) -> usize {
        self.sharing.as_ref().map_or(0, |sharing| sharing.plan.layout.mailbox_bytes())
    }

    /// Starts the group and joins it, if that is not done.
    pub(super) fn ensure_group(&mut self) -> Result<(), GroupError> {
        let (Some(lead), Some(sharing)) = (&mut self.lead, &mut self.sharing) else { return Ok(()) };
        loop {
            lead.group.ensure()?;
            if lead.joined == Some(lead.group.losses()) {
                return Ok(());
            }
            let Some(fabric) = &mut lead.group.exchange.fabric else { continue };
            // Recordings name what is replaced.
            self.room.moves += 1;
            match sharing.join(&mut self.device, &mut **fabric, lead.open) {
                Ok(()) => lead.joined = Some(lead.group.losses()),
                Err(error) => {
                    lead.group.end();
                    lead.group.does_not_start(error)?;
                }
            }
        }
    }

    /// The tokens of a step that this rank alone has any in; `None` where no ranks share the experts.
    pub(super) fn load_of(&self, step: &Step) -> Option<Load> {
        let sharing = self.sharing.as_ref()?;
        Some(Load::of_first(sharing.plan.layout.ranks, step.rows, step.head_rows()))
    }

    /// Tells the other ranks, if there are any, of a step, before its launches.
    pub(super) fn tell_ranks(&mut self, load: &Load, recorded: bool) -> Result<(), FabricError> {
        let Some(lead) = &mut self.lead else { return Ok(()) };
        let Exchange { fabric: Some(fabric), deadline, .. } = &mut lead.group.exchange else {
            return Ok(());
        };
        let note: Vec<u32> = [Note::Step.word(), recorded.into()].into_iter().chain(load.words()).collect();
        write_note(&mut **fabric, &note)?;
        fabric.exchange(Phase::Dispatch, *deadline)
    }

    /// Begins to fetch what the exchange of a step came to, behind its launches.
    pub(super) fn fetch_report(&mut self, load: Option<Load>) -> Result<Option<Exchanged>, DeviceError> {
        let (Some(load), Some(sharing)) = (load, &mut self.sharing) else { return Ok(None) };
        let Some(words) = sharing.report() else { return Ok(None) };
        let first_round = sharing.begin(&load);
        let fetch = self.device.fetch(words.buffer, words.offset, words.len * size_of::<u32>())?;
        Ok(Some(Exchanged { load, first_round, fetch, words: words.len }))
    }

    /// Waits for what the exchange of a step came to.
    pub(super) fn take_report(&mut self, exchanged: &Exchanged) -> Result<Counted, Failure> {
        let mut bytes = vec![0; exchanged.words * size_of::<u32>()];
        self.device.collect(exchanged.fetch, &mut bytes)?;
        let words: Vec<u32> = bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
        let Some(sharing) = &mut self.sharing else { return Ok(Counted::default()) };
        let report = sharing.read(&words, &exchanged.load, exchanged.first_round).map_err(Failure::Rank)?;
        let [_, layers] = sharing.plan.rounds_of(&exchanged.load);
        let before = sharing.last.replace(report.clone());
        Ok(Counted {
            rows: before.as_ref().map_or_else(|| report.rows(), |before| report.rows_since(before)),
            times: before.map(|before| report.times_since(&before)),
            layers,
        })
    }

    /// Counts what a step came to that is through.
    pub(super) fn count(&mut self, counted: &Counted) {
        if let (Some(lead), Some(sharing)) = (&mut self.lead, &self.sharing) {
            let by_rank = counted.rows.chunks_exact(sharing.plan.layout.held);
            lead.group.count(&sharing.plan.placement, by_rank, counted.times, counted.layers);
            lead.group.step_through();
        }
    }

    /// Lets go of what a step's exchange came to.
    pub(super) fn drop_report(&mut self, exchanged: &Exchanged) {
        let _ = self.device.collect(exchanged.fetch, &mut []);
    }

    /// What those who wait for a step are told of a failure; none of its launches is under way any more.
    pub(super) fn told_of(&mut self, failure: Failure) -> String {
        match (failure, &mut self.lead) {
            (Failure::Device(error), lead) => {
                if let Some(lead) = lead {
                    lead.group.end();
                }
                format!("the GPU failed: {error}")
            }
            (Failure::Group(error), _) => error.to_string(),
            (Failure::Rank(error), None) => error.to_string(),
            (Failure::Rank(error), Some(lead)) => match lead.group.fail(&error) {
                Ok(()) => {
                    lead.lost = true;
                    error.to_string()
                }
                Err(error) => error.to_string(),
            },
        }
    }

    /// Tells the ranks that rank 0 is still there. No step is under way.
    pub(super) fn keep_group_alive(&mut self) -> Result<(), GroupError> {
        self.ensure_group()?;
        if let Some(lead) = &mut self.lead {
            lead.group.keep_alive()?;
        }
        // It may have been started again.
        self.ensure_group()
    }

    /// How often, between two steps, the ranks want to be told.
    pub(super) fn group_alive_every(&self) -> Option<Duration> {
        self.lead.as_ref().map(|lead| lead.group.keep_alive_every())
    }
}

impl<D: Device> CudaBackend<D> {
    /// Shares the experts with the other processes of a group, which is started. Of the model its share must
    /// be loaded, see `LoadedModel::load_share`, and the exchange's memory taken.
    pub(crate) fn with_group(
        mut self,
        group: ExpertGroup,
        open: OpenMailboxes<D>,
    ) -> Result<Self, GroupError> {
        self.model.lead = Some(Lead { group: Box::new(group), open, joined: None, lost: false });
        self.model.ensure_group()?;
        Ok(self)
    }
}
