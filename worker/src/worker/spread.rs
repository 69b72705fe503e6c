//! Starts a model whose experts are spread over processes. What is asked for is checked against the model
//! here.

use std::sync::Arc;

use super::{OptionsError, StartError, WorkerOptions};
use crate::metrics::ExpertMetrics;
#[cfg(feature = "cuda")]
use crate::model::{Attention, ModelInfo};
use crate::model::{CpuBackend, KvLayout, LoadedModel};

#[cfg(all(target_os = "linux", feature = "cuda"))]
pub(super) use linux::gpu_group;
#[cfg(target_os = "linux")]
pub(super) use linux::{plan, start};

/// What is known of a model once it is on a GPU.
#[cfg(feature = "cuda")]
pub(super) struct OnGpu<'a> {
    /// The experts of each layer.
    pub(super) experts: &'a [usize],
    pub(super) info: &'a ModelInfo,
    /// What every rank needs that runs attention too.
    pub(super) attention: Attention,
    /// Words of a row of what its part of a step comes to.
    pub(super) output_words: usize,
    pub(super) max_model_len: usize,
    /// Rank 0's GPU, and how many there are.
    pub(super) gpus: [usize; 2],
}

#[cfg(target_os = "linux")]
mod linux {
    use keyway_kernels::compute::Compute;

    #[cfg(feature = "cuda")]
    use super::OnGpu;
    use super::{
        Arc, CpuBackend, ExpertMetrics, KvLayout, LoadedModel, OptionsError, StartError, WorkerOptions,
    };
    use crate::engine::scheduler::StepLimits;
    use crate::limits::{EXPERT_MESSAGE_BYTES_MAX, SCORED_TOKENS_PER_STEP_MAX};
    #[cfg(feature = "cuda")]
    use crate::model::Quantize;
    use crate::model::{Attention, ExpertGroup, GroupOptions, StepWords, Supervisor};
    use crate::parallel::expert_parallel::{Devices, Hosts, ListenError, Processes, Ranks};
    use crate::worker::{blocking, threads};

    /// Words of a placement beside its masks, generously.
    const PLACEMENT_HEAD: usize = 16;
    /// Words of a note beside a step's, generously.
    const NOTE_HEAD: usize = 16;

    /// What the group is started with.
    pub(in crate::worker) struct Spread {
        ranks: Ranks,
        /// Of the largest layer.
        experts: usize,
        attention: Option<Attention>,
    }

    /// `None` if nothing is to be spread.
    pub(in crate::worker) fn plan(
        options: &WorkerOptions,
        model: &LoadedModel,
        kv: KvLayout,
        max_model_len: usize,
    ) -> Result<Option<Spread>, StartError> {
        let size = options.expert_parallel.size;
        if size == 1 {
            return Ok(None);
        }
        let counts = model.experts();
        let experts = counts.iter().copied().max().unwrap_or(0);
        check_size(size, &counts, &model.info.name)?;
        let groups = model.info.cache_groups.len();
        let limits = options.limits(false);
        let mut words = model.words_for(limits.max_batched_tokens).min(EXPERT_MESSAGE_BYTES_MAX / 4);
        let attention = options.expert_parallel.data_parallel_attention.then(|| model.attention(kv));
        if attention.is_some() {
            let step = step_words(&limits, groups, kv, max_model_len);
            if !options.expert_parallel.hosts.is_empty() && step > EXPERT_MESSAGE_BYTES_MAX / 4 {
                return Err(OptionsError::AttentionStep { mib: step >> 18 }.into());
            }
            words = words.max(step).max(model.output_words());
        }
        let ranks = Ranks {
            options: options.expert_parallel.clone(),
            model: options.model.clone(),
            quantize: options.quantize,
            fp8_kv: false,
            devices: Devices::Cpu,
            most: [limits.max_batched_tokens, limits.max_running],
            // Processes of one machine share its cores.
            threads: match threads(options.threads).get() {
                all if options.expert_parallel.hosts.is_empty() => (all / size).max(1),
                all => all,
            },
            // One token, or the placement of all layers, must go into a message.
            capacity: words.max(model.words_for(1)).max(PLACEMENT_HEAD + counts.iter().sum::<usize>()),
        };
        Ok(Some(Spread { ranks, experts, attention }))
    }

    /// Every rank holds an expert. `counts`: of each layer.
    fn check_size(ranks: usize, counts: &[usize], model: &str) -> Result<(), OptionsError> {
        let experts = counts.iter().copied().filter(|count| *count > 0).min().unwrap_or(0);
        if ranks <= experts {
            return Ok(());
        }
        Err(OptionsError::RanksWithoutExpert { model: model.to_owned(), experts, ranks })
    }

    /// A group of processes with a GPU each, or a part of one, not started.
    #[cfg(feature = "cuda")]
    pub(in crate::worker) fn gpu_group(
        options: &WorkerOptions,
        model: &OnGpu<'_>,
    ) -> Result<(ExpertGroup, Arc<ExpertMetrics>), StartError> {
        let (size, counts) = (options.expert_parallel.size, model.experts);
        check_size(size, counts, &model.info.name)?;
        let most = counts.iter().copied().max().unwrap_or(0);
        let metrics = ExpertMetrics::new(size, most).map_err(StartError::engine)?;
        let attention = options.expert_parallel.data_parallel_attention.then_some(model.attention);
        let mut words: usize = counts.iter().sum();
        let limits = options.limits(true);
        if let Some(Attention { kv, .. }) = attention {
            let groups = model.info.cache_groups.len();
            words = words.max(step_words(&limits, groups, kv, model.max_model_len)).max(model.output_words);
        }
        let limits = [limits.max_batched_tokens, limits.max_running];
        let (source, quantize, fp8_kv) = (options.model.clone(), options.quantize, options.fp8_kv);
        let gpus = model.gpus;
        let ranks = Ranks::on_gpus(&options.expert_parallel, source, quantize, fp8_kv, limits, words, gpus);
        let group = GroupOptions { attention, ..GroupOptions::of_devices(&options.expert_parallel) };
        let supervisor = Box::new(Processes::new(ranks));
        // Devices quantise what is stored.
        let of_group = Arc::clone(&metrics);
        let group = ExpertGroup::new(&options.model, Quantize::None, group, supervisor, of_group)?;
        Ok((group, metrics))
    }

    /// Words in which rank 0 tells another what its part of a step is, at most.
    fn step_words(limits: &StepLimits, groups: usize, kv: KvLayout, max_model_len: usize) -> usize {
        // Who runs has a chunk, and so has each token of a prompt that is scored.
        let chunks = limits.max_running + SCORED_TOKENS_PER_STEP_MAX;
        let blocks = max_model_len.div_ceil(kv.block_size) + 1;
        NOTE_HEAD + StepWords::most(limits.max_batched_tokens, chunks, groups, blocks)
    }

    /// Starts the other ranks and waits until they have loaded their experts.
    pub(in crate::worker) async fn start(
        spread: Spread,
        backend: CpuBackend,
    ) -> Result<(CpuBackend, Arc<ExpertMetrics>), StartError> {
        let Spread { ranks, experts, attention } = spread;
        let metrics = ExpertMetrics::new(ranks.options.size, experts);
        let metrics = metrics.map_err(StartError::engine)?;
        let of_group = Arc::clone(&metrics);
        let backend = blocking(move || {
            let options = GroupOptions {
                ranks: ranks.options.size,
                deadline: ranks.options.deadline,
                retries: ranks.options.retries,
                redundant: ranks.options.redundant_experts,
                threads: threads(Some(ranks.threads)),
                attention,
            };
            // Where all ranks run attention, they do it at the same time.
            let backend = match attention {
                Some(_) => backend.with_compute(Compute::new(options.threads)),
                None => backend,
            };
            let (model, quantize) = (ranks.model.clone(), ranks.quantize);
            let hosts = ranks.options.hosts.clone();
            let supervisor: Box<dyn Supervisor> = if hosts.is_empty() {
                Box::new(Processes::new(ranks))
            } else {
                let refused = |ListenError { addr, source }| StartError::Listen { addr, source };
                Box::new(Hosts::listen(hosts).map_err(refused)?)
            };
            let group = ExpertGroup::new(&model, quantize, options, supervisor, of_group)?;
            backend.with_group(group).map_err(StartError::engine)
        });
        Ok((backend.await??, metrics))
    }
}

#[cfg(not(target_os = "linux"))]
pub(super) use elsewhere::{plan, start};

#[cfg(not(target_os = "linux"))]
mod elsewhere {
    use super::{
        Arc, CpuBackend, ExpertMetrics, KvLayout, LoadedModel, OptionsError, StartError, WorkerOptions,
    };

    /// Experts spread over processes, which takes Linux: there are none here.
    pub(in crate::worker) enum Spread {}

    pub(in crate::worker) fn plan(
        options: &WorkerOptions,
        _: &LoadedModel,
        _: KvLayout,
        _: usize,
    ) -> Result<Option<Spread>, StartError> {
        match options.expert_parallel.size {
            1 => Ok(None),
            _ => Err(OptionsError::NeedsLinux.into()),
        }
    }

    pub(in crate::worker) async fn start(
        spread: Spread,
        _: CpuBackend,
    ) -> Result<(CpuBackend, Arc<ExpertMetrics>), StartError> {
        match spread {}
    }
}
