//! Rank 0's end of a group of processes that share a model's experts, each with a GPU or with a part of one: joins the
//! group, tells the others of every step, finds out whose fault it is when one fails, and counts what experts did.
//! Starting and watching processes is `experts/group.rs`' business, the exchange itself the device's (`sharing.rs`).

use keyway_kernels::cuda::peer::Report;
use keyway_kernels::cuda::{Device, DeviceError};
use keyway_kernels::fabric::{FabricError, Phase};
use keyway_kernels::moe::parallel::write_note;

use super::sharing::{Load, OpenMailboxes, Plan, Sharing};
use super::step::Step;
use super::{CudaModel, failed};
use crate::model::ModelError;
use crate::model::experts::{Exchange, ExpertGroup, GroupError, Note};

/// Rank 0's end of a group.
#[derive(Debug)]
pub(super) struct Lead<D> {
    group: Box<ExpertGroup>,
    open: OpenMailboxes<D>,
    /// Which group the device has joined, by how many ended before.
    joined: Option<u64>,
    /// What the device reported last.
    report: Option<Report>,
    /// Whether a step was lost since anybody asked.
    pub(super) lost: bool,
}

/// Why a step was not carried out.
#[derive(Debug)]
pub(super) enum Failure {
    Device(DeviceError),
    /// A rank's.
    Rank(FabricError),
    /// There is no group, and none can be started.
    Group(GroupError),
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
    /// Shares the experts with the other processes of a group, which is started. Of the model its share must be loaded,
    /// see `LoadedModel::load_share`. `tokens_max`: of a step.
    pub(crate) fn with_group(
        mut self,
        group: ExpertGroup,
        open: OpenMailboxes<D>,
        tokens_max: usize,
    ) -> Result<Self, ModelError> {
        let plan = Plan::new(&self.config, group.ranks(), tokens_max)?;
        self.sharing = Some(Sharing::new(&mut self.device, plan, 1, group.deadline()).map_err(failed)?);
        self.lead = Some(Lead { group: Box::new(group), open, joined: None, report: None, lost: false });
        self.ensure_group().map_err(|GroupError(reason)| ModelError::Device(reason))?;
        Ok(self)
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
                Ok(()) => {
                    lead.joined = Some(lead.group.losses());
                    lead.report = None;
                }
                Err(DeviceError(reason)) => {
                    lead.group.end();
                    lead.group.does_not_start(&reason)?;
                }
            }
        }
    }

    /// Tells the other ranks, if there are any, of a step, before its launches.
    pub(super) fn tell_ranks(&mut self, step: &Step) -> Result<Option<(Load, u32)>, FabricError> {
        let Some(sharing) = &mut self.sharing else { return Ok(None) };
        let load = Load::of_first(sharing.plan.layout.ranks, step.rows, step.head_rows());
        if let Some(lead) = &mut self.lead
            && let Exchange { fabric: Some(fabric), deadline, .. } = &mut lead.group.exchange
        {
            let recorded = u32::from(step.form().is_some());
            let note: Vec<u32> = [Note::Step.word(), recorded].into_iter().chain(load.words()).collect();
            write_note(&mut **fabric, &note)?;
            fabric.exchange(Phase::Dispatch, *deadline)?;
        }
        let first_round = sharing.begin(&load);
        Ok(Some((load, first_round)))
    }

    /// Begins to fetch what the exchange of a step came to, behind its launches.
    pub(super) fn fetch_report(
        &mut self,
        told: Option<(Load, u32)>,
    ) -> Result<Option<Exchanged>, DeviceError> {
        let words = self.sharing.as_ref().and_then(Sharing::report);
        let (Some((load, first_round)), Some(words)) = (told, words) else { return Ok(None) };
        let bytes = words.len * size_of::<u32>();
        let fetch = self.device.fetch(words.buffer, words.offset, bytes)?;
        Ok(Some(Exchanged { load, first_round, fetch, words: words.len }))
    }

    /// Waits for what the exchange of a step came to, and counts it.
    pub(super) fn take_report(&mut self, exchanged: &Exchanged) -> Result<(), Failure> {
        let mut bytes = vec![0; exchanged.words * size_of::<u32>()];
        self.device.collect(exchanged.fetch, &mut bytes)?;
        let words: Vec<u32> = bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
        let Some(sharing) = &self.sharing else { return Ok(()) };
        let read = sharing.read(&words, &exchanged.load, exchanged.first_round);
        let Some(lead) = &mut self.lead else {
            // All ranks are here: nobody is to be started again.
            return read.map(drop).map_err(|fault| DeviceError(fault.to_string()).into());
        };
        let report = read.map_err(Failure::Rank)?;
        let plan = &sharing.plan;
        let rows = match &lead.report {
            Some(before) => report.rows_since(before),
            None => report.rows(),
        };
        let [_, layers] = plan.rounds_of(&exchanged.load);
        let times = lead.report.as_ref().map(|before| report.times_since(before));
        lead.group.count(&plan.placement, rows.chunks_exact(plan.layout.held), times, layers);
        lead.group.step_through();
        lead.report = Some(report);
        Ok(())
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
            (Failure::Group(GroupError(reason)), _) => reason,
            (Failure::Rank(error), None) => error.to_string(),
            (Failure::Rank(error), Some(lead)) => match lead.group.fail(&error) {
                Ok(()) => {
                    lead.lost = true;
                    error.to_string()
                }
                Err(GroupError(reason)) => reason,
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
    pub(super) fn group_alive_every(&self) -> Option<std::time::Duration> {
        self.lead.as_ref().map(|lead| lead.group.keep_alive_every())
    }
}
