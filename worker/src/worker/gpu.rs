//! Whether a GPU computes, and a model that is started on one. Builds without the feature `cuda` have none.

use super::{StartError, WorkerOptions};
use crate::device::DeviceChoice;

#[cfg(not(feature = "cuda"))]
pub(super) use absent::{Gpu, start};
#[cfg(feature = "cuda")]
pub(super) use present::{Gpu, start};

#[cfg(not(feature = "cuda"))]
use absent::usable;
#[cfg(feature = "cuda")]
use present::usable;

/// The GPU that shall compute; `None`: the CPU does.
pub(super) fn choose(options: &WorkerOptions) -> Result<Option<Gpu>, StartError> {
    let gpu = match options.device {
        DeviceChoice::Cpu => None,
        DeviceChoice::Cuda(number) => Some(usable(options, number).map_err(StartError::Options)?),
        DeviceChoice::Auto => match usable(options, 0) {
            Ok(gpu) => {
                tracing::info!("a GPU computes: there is one, and it covers the model");
                Some(gpu)
            }
            Err(reason) => {
                tracing::info!("the CPU computes: {reason}");
                None
            }
        },
    };
    if options.fp8_kv && gpu.is_none() {
        let reason =
            "kv-cache-dtype fp8 is a GPU's, and the CPU computes: leave it out, or run with --device cuda";
        return Err(StartError::Options(reason.to_owned()));
    }
    Ok(gpu)
}

#[cfg(feature = "cuda")]
mod present {
    pub(in crate::worker) use keyway_kernels::cuda::gpu::Gpu;

    use crate::model::LoadedModel;
    use crate::worker::kv_memory::{Place, kv_layout};
    use crate::worker::{Computing, StartError, WorkerOptions, blocking};

    /// The GPU of this number, if it is there and computes what the options ask for; else one line that says why not.
    pub(super) fn usable(options: &WorkerOptions, number: usize) -> Result<Gpu, String> {
        if options.expert_parallel.size > 1 {
            return Err("expert-parallel processes compute on the CPU: run with --device cpu".to_owned());
        }
        // What is wrong with the model is wrong on every machine.
        LoadedModel::check_gpu(&options.model, options.quantize).map_err(|e| e.to_string())?;
        Gpu::new(number).map_err(|e| e.to_string())
    }

    /// Copies a model to the GPU and gives the KV cache what is left of its memory.
    pub(in crate::worker) async fn start(
        gpu: Gpu,
        model: LoadedModel,
        options: &WorkerOptions,
    ) -> Result<Computing, StartError> {
        let options = options.clone();
        let started = blocking(move || {
            let mut model = model.onto(gpu, options.quantize)?;
            if options.fp8_kv {
                model = model.with_fp8_kv();
            }
            model.reserve_steps(options.max_batched_tokens, options.max_running)?;
            let free = model.free_bytes()?;
            let info = model.info.clone();
            let (kv, max_model_len) = kv_layout(&options, &info, Place::Device { free })?;
            let backends = vec![Box::new(model.into_backend(kv)?) as _];
            Ok(Computing { info, kv, max_model_len, backends, experts: None })
        });
        started.await?
    }
}

#[cfg(not(feature = "cuda"))]
mod absent {
    use crate::model::LoadedModel;
    use crate::worker::{Computing, StartError, WorkerOptions};

    /// There is none.
    pub(in crate::worker) enum Gpu {}

    pub(super) fn usable(_: &WorkerOptions, _: usize) -> Result<Gpu, String> {
        Err("this build has no CUDA backend: run with --device cpu".to_owned())
    }

    pub(in crate::worker) async fn start(
        gpu: Gpu,
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
        let Err(StartError::Options(reason)) = choose(&options) else { panic!("it is taken") };
        assert!(reason.contains("kv-cache-dtype") && reason.contains("--device cuda"), "{reason}");
        assert_eq!(reason.lines().count(), 1);
        assert!(matches!(choose(&WorkerOptions::default()), Ok(None)));
    }
}
