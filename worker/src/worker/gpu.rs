//! Whether a GPU computes, and a model that is started on one. Builds without the feature `cuda` have none.

use super::{OptionsError, StartError, WorkerOptions};
use crate::device::DeviceChoice;

#[cfg(not(feature = "cuda"))]
pub(super) use absent::{Gpu, start};
#[cfg(feature = "cuda")]
pub(super) use present::{Gpu, start};

#[cfg(not(feature = "cuda"))]
use absent::{is_there, usable};
#[cfg(feature = "cuda")]
use present::{is_there, usable};

/// The GPU that shall compute, and its number; `None`: the CPU does.
pub(super) fn choose(options: &WorkerOptions) -> Result<Option<(Gpu, usize)>, StartError> {
    let gpu = match options.device {
        DeviceChoice::Cpu => None,
        DeviceChoice::Cuda(number) => {
            let gpu = usable(options, number).map_err(|why| OptionsError::Gpu(Box::new(why)))?;
            Some((gpu, number))
        }
        DeviceChoice::Auto => match usable(options, 0) {
            Ok(gpu) => Some((gpu, 0)),
            // A GPU that stays unused should be noticed.
            Err(reason) if is_there() => {
                tracing::warn!("the CPU computes, not the GPU: {reason}");
                None
            }
            Err(reason) => {
                tracing::info!("the CPU computes: {reason}");
                None
            }
        },
    };
    if gpu.is_none() {
        check_cpu(options)?;
    }
    Ok(gpu)
}

/// Whether the CPU computes what the options ask for.
fn check_cpu(options: &WorkerOptions) -> Result<(), OptionsError> {
    if options.fp8_kv { Err(OptionsError::Fp8OnCpu) } else { Ok(()) }
}

/// Whether the CPU shall compute after a GPU could not, for this reason; errs with it if not.
pub(super) fn fall_back(options: &WorkerOptions, reason: StartError) -> Result<(), StartError> {
    let cpu_may = options.device == DeviceChoice::Auto && check_cpu(options).is_ok();
    if !cpu_may || matches!(reason, StartError::Options(_)) {
        return Err(reason);
    }
    tracing::warn!("the CPU computes, not the GPU: {reason}");
    Ok(())
}

#[cfg(feature = "cuda")]
mod present {
    use std::sync::Arc;

    use keyway_kernels::cuda::DeviceError;
    pub(in crate::worker) use keyway_kernels::cuda::gpu::Gpu;

    use crate::device::DeviceChoice;
    use crate::metrics::ExpertMetrics;
    use crate::model::ExpertParallelOptions;
    use crate::model::{Attention, CudaBackend, KvLayout, LoadedModel, ModelError};
    #[cfg(target_os = "linux")]
    use crate::parallel::expert_parallel::OPEN_MAILBOXES;
    use crate::worker::kv_memory::{Place, kv_layout};
    use crate::worker::spread::OnGpu;
    #[cfg(target_os = "linux")]
    use crate::worker::spread::gpu_group;
    use crate::worker::{Computing, StartError, WorkerOptions, blocking, engines};

    /// Why a GPU does not compute what the options ask for.
    #[derive(Debug, thiserror::Error)]
    pub(super) enum Unusable {
        /// An option that only the CPU has.
        #[error("{0} is computed on the CPU: run with --device cpu")]
        OnlyCpu(&'static str),
        /// No GPU computes the model, or it cannot be read.
        #[error(transparent)]
        Model(#[from] ModelError),
        /// There is no GPU of this number.
        #[error(transparent)]
        Device(#[from] DeviceError),
        /// The GPU does not take the kernels.
        #[error("{0}: run with --device cpu")]
        Kernels(#[source] DeviceError),
    }

    /// The GPU of this number, if it is there and computes what the options ask for.
    pub(super) fn usable(options: &WorkerOptions, number: usize) -> Result<Gpu, Unusable> {
        check_ranks(options)?;
        // What is wrong with the model is wrong on every machine.
        LoadedModel::check_gpu(&options.model, options.quantize)?;
        let mut gpu = Gpu::new(number)?;
        gpu.load_all().map_err(Unusable::Kernels)?;
        Ok(gpu)
    }

    /// Whether there is a GPU at all.
    pub(super) fn is_there() -> bool {
        Gpu::count() > 0
    }

    /// Whether GPUs share a model's experts as the options ask for.
    fn check_ranks(options: &WorkerOptions) -> Result<(), Unusable> {
        let ExpertParallelOptions { size, hosts, redundant_experts, .. } = &options.expert_parallel;
        if *size == 1 {
            return Ok(());
        }
        let only_on_the_cpu = [
            ("expert-parallel-size on other systems than Linux", !cfg!(target_os = "linux")),
            ("expert-parallel-hosts", !hosts.is_empty()),
            ("redundant-experts", *redundant_experts > 0),
        ];
        if let Some(&(what, _)) = only_on_the_cpu.iter().find(|(_, asked)| *asked) {
            return Err(Unusable::OnlyCpu(what));
        }
        Ok(LoadedModel::check_gpu_ranks(&options.model, *size)?)
    }

    /// Copies a model to the GPU and gives the KV cache what is left of its memory.
    pub(in crate::worker) async fn start(
        (gpu, number): (Gpu, usize),
        model: LoadedModel,
        options: &WorkerOptions,
    ) -> Result<Computing, StartError> {
        let options = options.clone();
        let started = blocking(move || {
            let (size, limits) = (options.expert_parallel.size, options.limits(true));
            let (experts, output_words) = (model.experts(), model.output_words());
            let weights = model.attention(KvLayout { block_size: 0, num_blocks: 0 }).weights;
            let mut model = model.share_onto(gpu, options.quantize)?;
            if options.fp8_kv {
                model = model.with_fp8_kv();
            }
            if options.paired_experts {
                model = model.with_paired_experts();
            }
            model.reserve_steps(limits.max_batched_tokens, limits.max_running)?;
            if size > 1 {
                model.reserve_sharing(size, limits.max_batched_tokens, options.expert_parallel.deadline)?;
            }
            let free = model.free_bytes()?.saturating_sub(model.mailbox_bytes());
            let info = model.info.clone();
            let (kv, max_model_len) = kv_layout(&options, &info, Place::Device { free })?;
            let backend = model.into_backend(kv)?;
            let attention = Attention { kv, weights };
            let gpus = [number, Gpu::count()];
            let model =
                OnGpu { experts: &experts, info: &info, attention, output_words, max_model_len, gpus };
            let (mut backend, experts) =
                if size == 1 { (backend, None) } else { spread(backend, &model, &options)? };
            // Where ranks have tokens of their own their steps are taken together.
            if !options.expert_parallel.data_parallel_attention {
                let failed = |e| ModelError::Device(format!("{e}, in a first step: run with --device cpu"));
                backend.try_out().map_err(failed)?;
            }
            let backends = engines::backends(engines::count(&options), backend, experts.as_ref())?;
            if options.device == DeviceChoice::Auto {
                tracing::info!(
                    "a GPU computes: there is one, it covers the model, and it took its first steps"
                );
            }
            Ok(Computing { info, kv, limits, max_model_len, backends, experts })
        });
        started.await?
    }

    /// Has other processes share the model's experts, each with a GPU, or with a part of one.
    #[cfg(target_os = "linux")]
    fn spread(
        backend: CudaBackend<Gpu>,
        model: &OnGpu<'_>,
        options: &WorkerOptions,
    ) -> Result<(CudaBackend<Gpu>, Option<Arc<ExpertMetrics>>), StartError> {
        let (group, metrics) = gpu_group(options, model)?;
        let backend = backend.with_group(group, OPEN_MAILBOXES);
        Ok((backend.map_err(StartError::engine)?, Some(metrics)))
    }

    /// Never called for several ranks: without Linux such options are refused before.
    #[cfg(not(target_os = "linux"))]
    fn spread(
        backend: CudaBackend<Gpu>,
        _: &OnGpu<'_>,
        _: &WorkerOptions,
    ) -> Result<(CudaBackend<Gpu>, Option<Arc<ExpertMetrics>>), StartError> {
        Ok((backend, None))
    }
}

#[cfg(not(feature = "cuda"))]
mod absent {
    use crate::model::LoadedModel;
    use crate::worker::{Computing, StartError, WorkerOptions};

    /// A GPU of a build without CUDA: there is none.
    pub(in crate::worker) enum Gpu {}

    /// A build without CUDA has no GPU that it could use.
    #[derive(Debug, thiserror::Error)]
    #[error("this build has no CUDA backend: run with --device cpu")]
    pub(super) struct Unusable;

    pub(super) fn usable(_: &WorkerOptions, _: usize) -> Result<Gpu, Unusable> {
        Err(Unusable)
    }

    /// Whether there is a GPU at all, which a build without CUDA cannot tell: no.
    pub(super) fn is_there() -> bool {
        false
    }

    pub(in crate::worker) async fn start(
        (gpu, _): (Gpu, usize),
        _: LoadedModel,
        _: &WorkerOptions,
    ) -> Result<Computing, StartError> {
        match gpu {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_keeps_no_kv_in_fp8() {
        let options = WorkerOptions { fp8_kv: true, ..WorkerOptions::default() };
        let Err(StartError::Options(refused)) = choose(&options) else { panic!("it is taken") };
        let reason = refused.to_string();
        assert!(reason.contains("kv-cache-dtype") && reason.contains("--device cuda"), "{reason}");
        assert_eq!(reason.lines().count(), 1);
        assert!(matches!(choose(&WorkerOptions::default()), Ok(None)));
    }
}
