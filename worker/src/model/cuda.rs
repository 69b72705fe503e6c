//! The CUDA backend: a dense decoder on a [`Device`], which is an NVIDIA GPU or, in tests, the emulator that compiles
//! the same kernels. Numbers are bf16 with f32 sums. Which models it computes is `cuda/coverage.rs`'s business.

mod coverage;
mod forward;
mod integers;
mod recordings;
mod room;
mod step;
mod synthetic;
mod weights;

use half::bf16;
use keyway_kernels::cuda::matmul::Unit;
use keyway_kernels::cuda::paged_attention::{KvType, Pages};
use keyway_kernels::cuda::{self, Device, DeviceError, Launch, Slice};
use keyway_kernels::rope::Rope;

pub(super) use self::coverage::check;
use self::forward::Forward;
use self::recordings::{Met, Recordings};
use self::room::{Room, Widths};
use self::step::{Fixed, Step};
use self::weights::DeviceWeights;
use super::cache_plan::CachePlan;
use super::config::{Attention, Config, Grouped};
use super::{KvLayout, LoadedModel, ModelError, ModelInfo, Quantize, describe, kv_bytes_per_block_position};
use crate::backend::{Backend, CacheGroup, Chunk, StepError};
use crate::limits::{
    ATTENTION_PARTIAL_FLOATS_MAX, GPU_STEP_TOKENS_MAX, KV_BLOCK_SIZE_MIN, SCORED_TOKENS_PER_STEP_MAX,
};

/// A model whose weights are on a device; not yet able to compute, since the KV cache takes what is left.
#[derive(Debug)]
pub struct CudaModel<D> {
    /// What it is there: number types, and so the numerics id and sizes, are the device's.
    pub info: ModelInfo,
    device: D,
    config: Config,
    grouped: Grouped,
    rope: Rope,
    weights: DeviceWeights,
    room: Room,
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
    /// What the last step gave back, as bytes and its hidden states.
    output: Vec<u8>,
    hidden: Vec<f32>,
}

impl LoadedModel {
    /// Copies the weights to a device, quantised as asked for; the model must be loaded as it is stored. The error
    /// names the key in `config.json` for which there is no kernel.
    pub fn onto<D: Device>(self, mut device: D, quantize: Quantize) -> Result<CudaModel<D>, ModelError> {
        let grouped = covered(&self.config, quantize)?;
        let weights = DeviceWeights::copy(&mut device, &self.weights, quantize).map_err(failed)?;
        let id = (quantize, self.weights_id.as_str());
        Ok(CudaModel::new(self.info.name, device, (self.config, grouped), weights, self.weights.rope, id))
    }
}

/// The attention of a model that kernels cover.
fn covered(config: &Config, quantize: Quantize) -> Result<Grouped, ModelError> {
    coverage::check(config, quantize)?;
    match config.attention {
        Attention::Grouped(grouped) => Ok(grouped),
        Attention::Latent(_) => Err(ModelError::Device("only grouped attention has kernels".into())),
    }
}

impl<D: Device> CudaModel<D> {
    /// `id`: how matrices are kept, and the weights' hash.
    fn new(
        name: String,
        device: D,
        (config, grouped): (Config, Grouped),
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
        Self { info, device, config, grouped, rope, weights, room: Room::default() }
    }

    /// Memory of the device that nobody has taken, in bytes.
    pub fn free_bytes(&self) -> Result<usize, ModelError> {
        self.device.free_bytes().map_err(failed)
    }

    /// Takes the memory of steps of so many tokens and sequences, so that it is not the KV cache's.
    pub fn reserve_steps(&mut self, tokens: usize, sequences: usize) -> Result<(), ModelError> {
        if tokens > GPU_STEP_TOKENS_MAX {
            return Err(ModelError::Device(format!(
                "max-batched-tokens {tokens} is more than a GPU takes: use {GPU_STEP_TOKENS_MAX} at most"
            )));
        }
        let widths = Widths::new(&self.config, &self.grouped);
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
        let Grouped { kv_heads, head_dim, .. } = self.grouped;
        let bytes = positions * kv_heads * head_dim * size_of::<bf16>();
        let slabs = (0..plan.slots).map(|_| self.slab(bytes, block_size)).collect::<Result<_, _>>();
        let slabs = slabs.map_err(|error| {
            let reason = format!("{num_blocks} blocks are not there on the device ({error}); ask for fewer");
            ModelError::KvCache(reason)
        })?;
        let (recordings, output, hidden) = (Recordings::default(), Vec::new(), Vec::new());
        Ok(CudaBackend { model: self, kv, plan, slabs, recordings, replayed: 0, output, hidden })
    }

    /// Keys and values of one slot's layers: zeros, since what a mask hides must still be finite.
    fn slab(&mut self, bytes: usize, page_size: usize) -> Result<Pages, DeviceError> {
        let Some(kind) = coverage::head_kind(&self.grouped) else {
            return Err(DeviceError("heads without a kernel".into()));
        };
        let mut zeros = || -> Result<Slice<u8>, DeviceError> {
            let buffer = self.device.allocate(bytes)?;
            self.device.zero(buffer, bytes)?;
            Ok(Slice::new(buffer, 0, bytes))
        };
        let (keys, values) = (zeros()?, Some(zeros()?));
        Ok(Pages { keys, values, kv_type: KvType::Bf16, kind, kv_heads: self.grouped.kv_heads, page_size })
    }
}

impl<D: Device> CudaBackend<D> {
    /// Tells the device of a step.
    fn plan(&mut self, chunks: &[Chunk<'_>]) -> Result<Step, DeviceError> {
        let CudaModel { device, config, grouped, rope, weights, room, .. } = &mut self.model;
        let fixed = Fixed {
            rope,
            cache_groups: &self.plan.groups,
            block_size: self.kv.block_size,
            kind: self.slabs[0].kind,
            kv_heads: grouped.kv_heads,
            heads_per_kv: grouped.heads / grouped.kv_heads,
            processors: device.processors(),
        };
        let step = Step::new(chunks, &fixed);
        let sizes = [step.rows, step.head_rows(), step.partial_floats(&fixed)];
        room.reserve(device, &Widths::new(config, grouped), weights, sizes)?;
        room.tell(device, &step.words)?;
        Ok(step)
    }

    /// What is launched for a step.
    fn launches(&self, step: &Step) -> Vec<Launch> {
        let CudaModel { config, grouped, weights, room, .. } = &self.model;
        let widths = Widths::new(config, grouped);
        let forward = Forward {
            config,
            grouped: *grouped,
            widths,
            weights,
            step,
            room,
            slabs: &self.slabs,
            places: &self.plan.places,
            launches: Vec::new(),
            rows: step.rows,
            residual: room.residual.slice(0, step.rows * widths.hidden),
        };
        forward.run()
    }

    fn run(&mut self, chunks: &[Chunk<'_>], logits: &mut Vec<f32>) -> Result<(), DeviceError> {
        let step = self.plan(chunks)?;
        let (form, moves) = (step.form(), self.model.room.moves);
        let met = form.as_ref().map(|form| self.recordings.meet(&mut self.model.device, moves, form));
        match (met, form) {
            (Some(Met::Recorded(recording)), _) => {
                self.replayed += 1;
                self.model.device.replay(recording)?;
            }
            (Some(Met::Before), Some(form)) => {
                let launches = self.launches(&step);
                let recording = self.model.device.record(&launches)?;
                self.recordings.add(form, recording);
                self.model.device.replay(recording)?;
            }
            _ => {
                let launches = self.launches(&step);
                launches.iter().try_for_each(|launch| self.model.device.launch(launch))?;
            }
        }
        self.fetch(&step, logits)
    }

    /// Copies back what is wanted of a step: hidden states and logits.
    fn fetch(&mut self, step: &Step, logits: &mut Vec<f32>) -> Result<(), DeviceError> {
        let (wanted, config) = (step.wanted_rows, &self.model.config);
        let (hidden_row, row) = (config.hidden * size_of::<bf16>(), config.vocab_size * size_of::<f32>());
        self.hidden.clear();
        self.read_output(0, wanted * hidden_row)?;
        let numbers = self.output.as_chunks().0.iter();
        self.hidden.extend(numbers.map(|bytes| bf16::from_le_bytes(*bytes).to_f32()));
        self.read_output(step.head_rows() * hidden_row, wanted * row)?;
        logits.extend(self.output.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)));
        Ok(())
    }

    /// Some bytes of what a step gives back.
    fn read_output(&mut self, first: usize, bytes: usize) -> Result<(), DeviceError> {
        self.output.resize(bytes, 0);
        if bytes == 0 {
            return Ok(());
        }
        let from: Slice<u8> = self.model.room.output.slice(first, bytes);
        self.model.device.read(from.buffer, from.offset, &mut self.output)
    }
}

#[cfg(feature = "cuda")]
impl CudaBackend<keyway_kernels::cuda::gpu::Gpu> {
    /// Milliseconds that each of `repeats` runs of a step takes on the device alone, without the host: for benchmarks.
    ///
    /// # Errors
    /// If the device fails.
    pub fn time_on_device(&mut self, chunks: &[Chunk<'_>], repeats: usize) -> Result<Vec<f32>, StepError> {
        let mut timed = || {
            let step = self.plan(chunks)?;
            let launches = self.launches(&step);
            self.model.device.time(&launches, repeats)
        };
        timed().map_err(|error| StepError(error.to_string()))
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
        assert!(chunks.iter().all(|chunk| !chunk.tokens.is_empty()), "step: a chunk has no tokens");
        // A device would read whatever lies behind the embeddings.
        let known =
            |chunk: &Chunk<'_>| chunk.tokens.iter().all(|token| (*token as usize) < self.vocab_size());
        assert!(chunks.iter().all(known), "step: a token is not in the vocabulary");
        if chunks.is_empty() {
            return Ok(());
        }
        self.run(chunks, logits).map_err(|error| StepError(format!("the GPU failed: {error}")))
    }

    fn hidden(&self) -> Option<&[f32]> {
        Some(&self.hidden)
    }
}

fn failed(error: DeviceError) -> ModelError {
    ModelError::Device(error.to_string())
}
