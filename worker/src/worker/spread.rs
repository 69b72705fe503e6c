//! Starts a model whose experts are spread over processes. What is asked for is checked against the model here.

use std::sync::Arc;

use super::{StartError, WorkerOptions};
use crate::metrics::Metrics;
use crate::model::{CpuBackend, LoadedModel};

#[cfg(target_os = "linux")]
pub(super) use linux::{plan, start};

#[cfg(target_os = "linux")]
mod linux {
    use super::{Arc, CpuBackend, LoadedModel, Metrics, StartError, WorkerOptions};
    use crate::expert_parallel::{Hosts, Processes, Ranks};
    use crate::limits::EXPERT_MESSAGE_BYTES_MAX;
    use crate::model::{ExpertGroup, GroupOptions, Supervisor};
    use crate::worker::{blocking, threads};

    /// Words of a placement beside its masks, generously.
    const PLACEMENT_HEAD: usize = 16;

    /// What the group is started with.
    pub(in crate::worker) struct Spread {
        ranks: Ranks,
        /// Of the largest layer.
        experts: usize,
    }

    /// `None` if nothing is to be spread.
    pub(in crate::worker) fn plan(
        options: &WorkerOptions,
        model: &LoadedModel,
    ) -> Result<Option<Spread>, StartError> {
        let size = options.expert_parallel.size;
        if size == 1 {
            return Ok(None);
        }
        let counts = model.experts();
        let experts = counts.iter().copied().max().unwrap_or(0);
        let fewest = counts.iter().copied().filter(|count| *count > 0).min().unwrap_or(0);
        if size > fewest {
            return Err(StartError::Options(format!(
                "{} has {fewest} experts: expert-parallel-size {size} must be at most {}",
                model.info.name,
                fewest.max(1)
            )));
        }
        let words = model.words_for(options.max_batched_tokens).min(EXPERT_MESSAGE_BYTES_MAX / 4);
        let ranks = Ranks {
            options: options.expert_parallel.clone(),
            model: options.model.clone(),
            quantize: options.quantize,
            // Processes of one machine share its cores.
            threads: match threads(options.threads).get() {
                all if options.expert_parallel.hosts.is_empty() => (all / size).max(1),
                all => all,
            },
            // One token, or the placement of all layers, must go into a message.
            capacity: words.max(model.words_for(1)).max(PLACEMENT_HEAD + counts.iter().sum::<usize>()),
        };
        Ok(Some(Spread { ranks, experts }))
    }

    /// Starts the other ranks and waits until they have loaded their experts.
    pub(in crate::worker) async fn start(
        spread: Spread,
        backend: CpuBackend,
        metrics: &Arc<Metrics>,
    ) -> Result<CpuBackend, StartError> {
        let Spread { ranks, experts } = spread;
        let of_group = metrics.with_experts(ranks.options.size, experts);
        let of_group = of_group.map_err(|e| StartError::Engine(e.to_string()))?;
        blocking(move || {
            let options = GroupOptions {
                ranks: ranks.options.size,
                deadline: ranks.options.deadline,
                retries: ranks.options.retries,
                redundant: ranks.options.redundant_experts,
                threads: threads(Some(ranks.threads)),
            };
            let (model, quantize) = (ranks.model.clone(), ranks.quantize);
            let hosts = ranks.options.hosts.clone();
            let supervisor: Box<dyn Supervisor> = if hosts.is_empty() {
                Box::new(Processes::new(ranks))
            } else {
                Box::new(Hosts::listen(hosts).map_err(StartError::Options)?)
            };
            let group = ExpertGroup::new(&model, quantize, options, supervisor, of_group)?;
            backend.with_group(group).map_err(|error| StartError::Engine(error.to_string()))
        })
        .await?
    }
}

#[cfg(not(target_os = "linux"))]
pub(super) use elsewhere::{plan, start};

#[cfg(not(target_os = "linux"))]
mod elsewhere {
    use super::{Arc, CpuBackend, LoadedModel, Metrics, StartError, WorkerOptions};

    /// There is none.
    pub(in crate::worker) enum Spread {}

    pub(in crate::worker) fn plan(
        options: &WorkerOptions,
        _: &LoadedModel,
    ) -> Result<Option<Spread>, StartError> {
        match options.expert_parallel.size {
            1 => Ok(None),
            _ => Err(StartError::Options("expert-parallel-size needs Linux".to_owned())),
        }
    }

    pub(in crate::worker) async fn start(
        spread: Spread,
        _: CpuBackend,
        _: &Arc<Metrics>,
    ) -> Result<CpuBackend, StartError> {
        match spread {}
    }
}
