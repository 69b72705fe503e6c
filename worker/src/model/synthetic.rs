//! Random weights for any shape: for checks that compare backends, and for benchmarks. Their text means
//! nothing. The random model that is served is `random.rs`'s.

use std::borrow::Cow;

use half::bf16;
use xxhash_rust::xxh3::xxh3_64;

use super::config::{Config, Quantisation};
use super::experts::{Store, even};
use super::stored::FP8_BLOCK;
use super::tensor::{Tensor, TensorSource, TensorType};
use super::weights::Weights;
use super::{LoadedModel, ModelError, Quantize};

impl LoadedModel {
    /// The model that a `config.json` describes, with weights in bf16, or as it says, that are a function of
    /// their tensors' names.
    pub fn synthetic(config: &str) -> Result<Self, ModelError> {
        Self::synthetic_share(config, 1, 0)
    }

    /// The same with a rank's share of the experts among `ranks` ranks.
    pub(crate) fn synthetic_share(config: &str, ranks: usize, rank: usize) -> Result<Self, ModelError> {
        let config = Config::from_json(config)?;
        let placements = even(&config, ranks);
        let held = |layer: usize, expert: usize| {
            placements[layer].as_ref().is_none_or(|placement| placement.holds(rank, expert))
        };
        let (weights, id) = Weights::load(&Synthetic::of(&config), &config, Quantize::None, &held)?;
        Ok(Self::new("synthetic".into(), config, weights, Quantize::None, id))
    }
}

/// Codes of E4M3 whose highest exponent bit is 0, and the deviation of such at random.
const FP8_BELOW_2: u8 = 0b1011_1111;
const FP8_DEVIATION: f32 = 0.6;

impl Store {
    /// The experts of such a model.
    #[cfg(any(test, feature = "cuda"))]
    pub(crate) fn synthetic(config: &str) -> Result<Self, ModelError> {
        let config = Config::from_json(config)?;
        Ok(Self::over(Box::new(Synthetic::of(&config)), config, Quantize::None))
    }
}

/// Its tensors: approximately normal, norms around 1, products that keep the size of their inputs.
struct Synthetic {
    /// Whether layers' products are in FP8.
    fp8: bool,
}

impl Synthetic {
    /// The tensors of this model.
    fn of(config: &Config) -> Self {
        Self { fp8: config.quantisation == Quantisation::Fp8Blocks }
    }
}

impl TensorSource for Synthetic {
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor<'_>, ModelError> {
        let mut random = fastrand::Rng::with_seed(xxh3_64(name.as_bytes()));
        let width = shape.last().copied().unwrap_or(1);
        if let Some(exponents) = codes(name) {
            let bytes = (0..shape.iter().product()).map(|_| random.u8(exponents.clone())).collect();
            return Ok(Tensor { kind: TensorType::U8, width, bytes: Cow::Owned(bytes) });
        }
        if self.fp8 && name.contains("_proj") && name.ends_with(".weight") {
            let bytes = (0..shape.iter().product()).map(|_| random.u8(..) & FP8_BELOW_2).collect();
            return Ok(Tensor { kind: TensorType::F8E4M3, width, bytes: Cow::Owned(bytes) });
        }
        if let Some(name) = name.strip_suffix("_scale_inv") {
            let (_, deviation) = distribution(name, width * FP8_BLOCK);
            let scale = |random: &mut fastrand::Rng| deviation / FP8_DEVIATION * (0.5 + random.f32());
            let bytes = (0..shape.iter().product()).flat_map(|_| scale(&mut random).to_le_bytes()).collect();
            return Ok(Tensor { kind: TensorType::F32, width, bytes: Cow::Owned(bytes) });
        }
        let (mean, deviation) = distribution(name, width);
        // The sum of twelve numbers from 0 to 1 deviates by 1.
        let mut value = || (0..12).map(|_| random.f32()).sum::<f32>() - 6.0;
        let elements = (0..shape.iter().product()).map(|_| bf16::from_f32(value() * deviation + mean));
        let bytes: Vec<u8> = elements.flat_map(bf16::to_le_bytes).collect();
        Ok(Tensor { kind: TensorType::Bf16, width, bytes: Cow::Owned(bytes) })
    }
}

/// Of a tensor in MXFP4 what its bytes are: codes of four bits, or exponents, of which 127 stands for 1.
/// Values are then about 0.09, which keeps the size of 128 inputs.
fn codes(name: &str) -> Option<std::ops::RangeInclusive<u8>> {
    let codes = name.ends_with("_blocks").then_some(0..=255);
    codes.or_else(|| name.ends_with("_scales").then_some(121..=123))
}

/// Queries are large, so that a token attends to few others and a wrong position shows; so are routers'
/// outputs, so that a token's experts are not all alike.
fn distribution(name: &str, width: usize) -> (f32, f32) {
    let kept = 1.0 / (width as f32).sqrt();
    match name {
        _ if name.ends_with("q_norm.weight") => (2.0, 0.1),
        _ if name.ends_with("norm.weight") => (1.0, 0.1),
        _ if name.ends_with("bias") || name.contains("embed_tokens") => (0.0, 0.3),
        _ if name.contains("q_proj") => (0.0, 2.0 * kept),
        _ if name.ends_with(".gate.weight") || name.ends_with(".router.weight") => (0.0, 2.0 * kept),
        _ => (0.0, kept),
    }
}
