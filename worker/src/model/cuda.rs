//! The CUDA backend: a decoder on a [`Device`], which is an NVIDIA GPU or, in tests, the emulator that
//! compiles the same kernels. Numbers are bf16 with f32 sums. Which models it computes is
//! `cuda/coverage.rs`'s business.

mod coverage;
mod experts;
mod forward;
mod heads;
mod integers;
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "of builds that have GPUs"))]
mod joint;
mod latent;
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "of builds that have GPUs"))]
mod lead;
mod packing;
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "of builds that have GPUs"))]
mod rank;
mod recordings;
mod room;
mod rules;
mod run;
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "of builds that have GPUs"))]
mod sharing;
mod step;
mod synthetic;
mod trial;
mod weights;

use std::collections::VecDeque;
use std::mem;
use std::time::Duration;

use half::bf16;
use keyway_kernels::cuda::matmul::Unit;
use keyway_kernels::cuda::paged_attention::{HeadKind, KvType, Pages};
use keyway_kernels::cuda::{self, Device, DeviceError, Slice};
use keyway_kernels::rope::Rope;

pub(super) use self::coverage::check;
use self::heads::HeadShape;
use self::lead::Lead;
#[cfg_attr(
    not(any(test, feature = "cuda")),
    allow(unused_imports, reason = "of builds that have devices")
)]
pub(crate) use self::rank::{CudaRank, RankSettings, WholeModel};
use self::recordings::Recordings;
use self::room::{Room, Widths};
use self::run::UnderWay;
#[cfg_attr(
    not(any(test, feature = "cuda")),
    allow(unused_imports, reason = "of builds that have devices")
)]
pub(crate) use self::sharing::OpenMailboxes;
pub(super) use self::sharing::Plan;
use self::sharing::Sharing;
use self::weights::DeviceWeights;
use super::cache_plan::CachePlan;
use super::config::{Attention, Config};
use super::{KvLayout, LoadedModel, ModelError, ModelInfo, Quantize, describe, kv_bytes_per_block_position};
use crate::engine::backend::{Backend, CacheGroup, Chunk, Draw, StepError, StepOutput};
use crate::limits::{
    ATTENTION_PARTIAL_FLOATS_MAX, GPU_LATENT_STEP_TOKENS_MAX, GPU_STEP_TOKENS_MAX, KV_BLOCK_SIZE_MIN,
    SCORED_TOKENS_PER_STEP_MAX,
};

/// Ranks of one process do not miss each other.
const RANKS_HERE_DEADLINE: Duration = Duration::from_secs(10);

/// A model whose weights are on a device; not yet able to compute, since the KV cache takes what is left.
#[derive(Debug)]
pub struct CudaModel<D> {
    /// What it is there: number types, and so the numerics id and sizes, are the device's.
    pub info: ModelInfo,
    device: D,
    config: Config,
    heads: HeadShape,
    rope: Rope,
    weights: DeviceWeights,
    kv_type: KvType,
    room: Room,
    /// The other processes that share the experts: ended before what they reach into.
    lead: Option<Lead<D>>,
    sharing: Option<Sharing>,
}

/// A model and its KV cache on a device.
#[derive(Debug)]
pub struct CudaBackend<D> {
    model: CudaModel<D>,
    kv: KvLayout,
    plan: CachePlan,
    /// One per slot of the plan.
    slabs: Vec<Pages>,
    recordings: Recordings,
    /// How many steps were started from a recording made before.
    pub(super) replayed: u64,
    /// Steps that were started and not waited for.
    under_way: VecDeque<UnderWay>,
    /// Which rows of the step that was started last were drawn.
    drawn: Vec<bool>,
    /// What the last step gave back, as bytes and the hidden states of rows that were not drawn.
    output: Vec<u8>,
    hidden: Vec<f32>,
}

impl LoadedModel {
    /// Copies the weights to a device, quantised as asked for; the model must be loaded as it is stored. The
    /// error names the key in `config.json` for which there is no kernel.
    pub fn onto<D: Device>(self, device: D, quantize: Quantize) -> Result<CudaModel<D>, ModelError> {
        if !self.weights.holds_all_experts() {
            return Err(ModelError::Device("an expert that is not held here".into()));
        }
        self.share_onto(device, quantize)
    }

    /// [`LoadedModel::onto`] of what `LoadedModel::load_share` has loaded: to compute it needs a group.
    pub(crate) fn share_onto<D: Device>(
        self,
        mut device: D,
        quantize: Quantize,
    ) -> Result<CudaModel<D>, ModelError> {
        let heads = covered(&self.config, quantize)?;
        let weights = DeviceWeights::copy(&mut device, &self.weights, quantize).map_err(failed)?;
        let id = (quantize, self.weights_id.as_str());
        Ok(CudaModel::new(self.info.name, device, (self.config, heads), weights, self.weights.rope, id))
    }
}

/// Errs with what keeps ranks from sharing a model's experts.
#[cfg(feature = "cuda")]
pub(super) fn check_ranks(config: &Config, ranks: usize) -> Result<(), ModelError> {
    Plan::new(config, ranks, 1).map(drop)
}

/// The heads of a model that kernels cover.
fn covered(config: &Config, quantize: Quantize) -> Result<HeadShape, ModelError> {
    coverage::check(config, quantize)?;
    HeadShape::of(&config.attention).ok_or_else(|| ModelError::Device("heads without a kernel".into()))
}

impl<D: Device> CudaModel<D> {
    /// `id`: how matrices are kept, and the weights' hash.
    fn new(
        name: String,
        device: D,
        (config, heads): (Config, HeadShape),
        weights: DeviceWeights,
        rope: Rope,
        (quantize, hash): (Quantize, &str),
    ) -> Self {
        let numbers = if quantize == Quantize::None { "bf16" } else { quantize.option() };
        let unit = match weights.embedding.unit {
            Unit::Warpgroup => "wgmma",
            Unit::Warp => "mma",
        };
        let (generation, version) = (device.generation(), cuda::NUMERICS_VERSION);
        let info = ModelInfo {
            numerics_id: format!("cuda-{generation}-{unit}-{numbers}-k{version}-{hash}"),
            weight_bytes: weights.bytes,
            // f32 on the CPU.
            kv_bytes_per_block_position: kv_bytes_per_block_position(&config) / size_of::<f32>()
                * size_of::<bf16>(),
            ..describe(name, &config)
        };
        let (kv_type, room) = (KvType::Bf16, Room::default());
        Self { info, device, config, heads, rope, weights, kv_type, room, lead: None, sharing: None }
    }

    /// Keeps the KV cache in FP8 (E4M3): half the memory, and other numbers, which its numerics id says. Keys
    /// and values are rounded as they are, without a scale, those beyond 448 to it: models' are far below.
    #[must_use]
    pub fn with_fp8_kv(mut self) -> Self {
        if self.kv_type == KvType::Bf16 {
            self.kv_type = KvType::Fp8;
            self.info.kv_bytes_per_block_position /= 2;
            self.info.numerics_id += "-kvfp8";
        }
        self
    }

    /// Computes both products of few tokens' experts in one launch instead of two: the same bits.
    #[must_use]
    pub fn with_paired_experts(mut self) -> Self {
        self.room.experts.pair();
        self
    }

    /// Has so many ranks, all of them here, share the experts: for checks and benchmarks of what they
    /// exchange. `tokens_max`: of a round.
    pub fn with_ranks_here(mut self, ranks: usize, tokens_max: usize) -> Result<Self, ModelError> {
        let plan = Plan::new(&self.config, ranks, tokens_max)?;
        let sharing = Sharing::new(&mut self.device, plan, ranks, RANKS_HERE_DEADLINE);
        let mut sharing = sharing.map_err(failed)?;
        sharing.join_all(&mut self.device).map_err(failed)?;
        self.sharing = Some(sharing);
        Ok(self)
    }

    /// Memory of the device that is not taken yet, in bytes.
    pub fn free_bytes(&self) -> Result<usize, ModelError> {
        self.device.free_bytes().map_err(failed)
    }

    /// Takes the memory of steps of so many tokens and sequences, so that it is not the KV cache's.
    pub fn reserve_steps(&mut self, tokens: usize, sequences: usize) -> Result<(), ModelError> {
        let most = match self.config.attention {
            Attention::Grouped(_) => GPU_STEP_TOKENS_MAX,
            Attention::Latent(_) => GPU_LATENT_STEP_TOKENS_MAX,
        };
        if tokens > most {
            return Err(ModelError::Device(format!(
                "max-batched-tokens {tokens} is more than a GPU takes: use {most} at most"
            )));
        }
        let widths = Widths::new(&self.config, &self.heads);
        let sizes =
            [tokens, (sequences + SCORED_TOKENS_PER_STEP_MAX).min(tokens), ATTENTION_PARTIAL_FLOATS_MAX];
        self.room.reserve(&mut self.device, &widths, &self.weights, sizes).map_err(failed)
    }

    /// Makes it able to compute; takes the KV cache's memory at once, and that of steps as they need it.
    pub fn into_backend(mut self, kv: KvLayout) -> Result<CudaBackend<D>, ModelError> {
        let KvLayout { block_size, num_blocks } = kv;
        if block_size < KV_BLOCK_SIZE_MIN || !block_size.is_power_of_two() {
            let reason = format!(
                "a block size of {block_size} is not supported on a GPU; use a power of two from {KV_BLOCK_SIZE_MIN} on"
            );
            return Err(ModelError::KvCache(reason));
        }
        let positions = block_size.checked_mul(num_blocks).filter(|n| *n < u32::MAX as usize);
        let positions = positions.ok_or_else(|| {
            ModelError::KvCache(format!(
                "{num_blocks} blocks of {block_size} tokens are too many; ask for fewer"
            ))
        })?;
        let plan = CachePlan::new(self.config.kept());
        let slabs = (0..plan.slots).map(|_| self.slab(positions, block_size)).collect::<Result<_, _>>();
        let slabs = slabs.map_err(|error| {
            let reason = format!("{num_blocks} blocks are not there on the device ({error}); ask for fewer");
            ModelError::KvCache(reason)
        })?;
        Ok(CudaBackend {
            model: self,
            kv,
            plan,
            slabs,
            recordings: Recordings::default(),
            replayed: 0,
            under_way: VecDeque::new(),
            drawn: Vec::new(),
            output: Vec::new(),
            hidden: Vec::new(),
        })
    }

    /// Keys and values, or latents, of one slot's layers: zeros, since what a mask hides must still be
    /// finite.
    fn slab(&mut self, positions: usize, page_size: usize) -> Result<Pages, DeviceError> {
        let HeadShape { kind, kv_heads, .. } = self.heads;
        let (kv_type, element) =
            (self.kv_type, if self.kv_type == KvType::Fp8 { 1 } else { size_of::<bf16>() });
        let mut zeros = |dim: usize| -> Result<Slice<u8>, DeviceError> {
            let bytes = positions * kv_heads * dim * element;
            let buffer = self.device.allocate(bytes)?;
            self.device.zero(buffer, bytes)?;
            Ok(Slice::new(buffer, 0, bytes))
        };
        let keys = zeros(kind.key_dim())?;
        let values = if kind == HeadKind::Latent { None } else { Some(zeros(kind.value_dim())?) };
        Ok(Pages { keys, values, kv_type, kind, kv_heads, page_size })
    }
}

impl<D: Device + Send> Backend for CudaBackend<D> {
    fn vocab_size(&self) -> usize {
        self.model.config.vocab_size
    }

    fn block_size(&self) -> usize {
        self.kv.block_size
    }

    fn num_blocks(&self) -> usize {
        self.kv.num_blocks
    }

    fn cache_groups(&self) -> &[CacheGroup] {
        &self.plan.groups
    }

    fn step(&mut self, chunks: &[Chunk<'_>], logits: &mut Vec<f32>) -> Result<(), StepError> {
        logits.clear();
        if chunks.is_empty() {
            return Ok(());
        }
        let wanted = chunks.iter().filter(|chunk| chunk.wants_logits).count();
        self.start(chunks, &vec![None; wanted])?;
        let mut output = StepOutput { logits: mem::take(logits), ..StepOutput::default() };
        self.finish(&mut output)?;
        *logits = output.logits;
        Ok(())
    }

    fn draws(&self) -> bool {
        true
    }

    fn start(&mut self, chunks: &[Chunk<'_>], draws: &[Option<Draw<'_>>]) -> Result<(), StepError> {
        self.check(chunks, draws);
        let started = self.launch(chunks, draws);
        self.or_give_up(started)
    }

    fn finish(&mut self, output: &mut StepOutput) -> Result<(), StepError> {
        let finished = self.collect(output).map(|counted| self.model.count(&counted));
        self.or_give_up(finished)
    }

    fn hidden(&self) -> Option<&[f32]> {
        Some(&self.hidden)
    }

    fn keep_alive_every(&self) -> Option<Duration> {
        self.model.group_alive_every()
    }

    fn keep_alive(&mut self) {
        if self.under_way.is_empty()
            && let Err(error) = self.model.keep_group_alive()
        {
            // The next step tries again.
            tracing::error!("{error}");
        }
    }

    fn cache_was_lost(&mut self) -> bool {
        self.model.lead.as_mut().is_some_and(|lead| mem::take(&mut lead.lost))
    }
}

fn failed(error: DeviceError) -> ModelError {
    ModelError::Device(error.to_string())
}
