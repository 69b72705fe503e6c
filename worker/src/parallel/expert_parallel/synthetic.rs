//! A model of random weights whose experts processes share, each with a GPU or with a part of one: for checks
//! on a machine with GPUs, where no checkpoint need be. Nothing else of a worker.

use keyway_kernels::cuda::gpu::Gpu;

use super::{OPEN_MAILBOXES, Processes, RankExit, RankGroup, RankOptions, Ranks, serve_on_gpu};
use crate::device::DeviceChoice;
use crate::metrics::ExpertMetrics;
use crate::model::ExpertParallelOptions;
use crate::model::{
    CudaBackend, ExpertGroup, GroupOptions, KvLayout, LoadedModel, ModelSource, Quantize, RankError, Store,
};

/// The model that a `config.json` describes, its experts shared by `options.size` processes, which are
/// started: this one is rank 0, with the first GPU. What `options.rank_command` starts must call
/// [`run_synthetic_rank`] with the same configuration. `tokens_max`: of a step. The error is one line.
pub fn synthetic_on_gpus(
    config: &str,
    options: &ExpertParallelOptions,
    (tokens_max, kv): (usize, KvLayout),
) -> Result<CudaBackend<Gpu>, String> {
    let gpu = Gpu::new(0).map_err(|e| e.to_string())?;
    let model = LoadedModel::synthetic_share(config, options.size, 0).map_err(|e| e.to_string())?;
    let experts = model.experts();
    let most = experts.iter().copied().max().unwrap_or(0);
    let metrics = ExpertMetrics::new(options.size, most).map_err(|e| e.to_string())?;
    let (words, gpus) = (experts.iter().sum(), [0, Gpu::count()]);
    // Ranks are told of a model, and know better.
    let (source, quantize, limits) = (ModelSource::Random, Quantize::None, [tokens_max; 2]);
    let ranks = Ranks::on_gpus(options, source, quantize, false, limits, words, gpus);
    let store = Store::synthetic(config).map_err(|e| e.to_string())?;
    let supervisor = Box::new(Processes::new(ranks));
    let group = ExpertGroup::over(store, GroupOptions::of_devices(options), supervisor, metrics);
    let mut model = model.share_onto(gpu, Quantize::None).map_err(|e| e.to_string())?;
    model.reserve_sharing(options.size, tokens_max, options.deadline).map_err(|e| e.to_string())?;
    let backend = model.into_backend(kv).map_err(|e| e.to_string())?;
    backend.with_group(group, OPEN_MAILBOXES).map_err(|e| e.to_string())
}

/// Is a rank of such a group until it fails or rank 0 ends. The error says why it ended.
pub fn run_synthetic_rank(config: &str, options: &RankOptions) -> Result<(), RankExit> {
    let (RankGroup::Memory(memory), DeviceChoice::Cuda(number)) = (&options.group, options.device) else {
        return Err(RankExit::NoGpu);
    };
    let store = Store::synthetic(config).map_err(RankError::Model)?;
    let whole = |ranks, rank| LoadedModel::synthetic_share(config, ranks, rank);
    serve_on_gpu(options, number, memory, (store, &whole))
}
