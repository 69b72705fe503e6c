//! Small dense models of several families whose sizes the CUDA kernels cover, with random weights in bf16.

use std::borrow::Cow;

use half::bf16;

use crate::model::config::Config;
use crate::model::tensor::{Tensor, TensorSource, TensorType};
use crate::model::weights::Weights;
use crate::model::{LoadedModel, ModelError, Quantize};

pub(super) const VOCAB: u32 = 120;

/// A family, and what its `config.json` has beside the sizes that all have.
#[derive(Debug)]
pub(super) struct Variant {
    pub(super) name: &'static str,
    more: &'static str,
}

/// Head widths 64 and 128, grouped queries or none, windows in all layers or some, biases, tied heads, scaled angles.
pub(super) const MODELS: &[Variant] = &[
    Variant {
        name: "LlamaForCausalLM",
        more: r#""num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
            "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64}"#,
    },
    Variant {
        name: "MistralForCausalLM",
        more: r#""num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64, "sliding_window": 41"#,
    },
    Variant {
        name: "Qwen2ForCausalLM",
        more: r#""num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": true,
            "use_sliding_window": true, "sliding_window": 70, "max_window_layers": 1"#,
    },
    Variant {
        name: "Qwen3ForCausalLM",
        more: r#""num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "tie_word_embeddings": true"#,
    },
];

impl Variant {
    pub(super) fn config(&self) -> Config {
        let Self { name, more } = self;
        let text = format!(
            r#"{{"architectures": ["{name}"], "vocab_size": {VOCAB}, "hidden_size": 128,
                "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 2048,
                "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu", {more}}}"#
        );
        Config::from_json(&text).unwrap()
    }
}

pub(super) fn load(variant: &Variant) -> LoadedModel {
    let config = variant.config();
    let (weights, id) = Weights::load(&Normal, &config, Quantize::None, &|_, _| true).unwrap();
    LoadedModel::new(variant.name.into(), config, weights, Quantize::None, id)
}

/// Tensors of normally distributed values: norms around 1, products that keep the size of their inputs.
struct Normal;

impl TensorSource for Normal {
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor<'_>, ModelError> {
        let mut random = fastrand::Rng::with_seed(xxhash_rust::xxh3::xxh3_64(name.as_bytes()));
        let width = shape.last().copied().unwrap_or(1);
        let (mean, deviation) = match name {
            // Sharper choices of whom to attend to, so that a wrong position shows.
            _ if name.ends_with("q_norm.weight") => (2.0, 0.1),
            _ if name.ends_with("norm.weight") => (1.0, 0.1),
            _ if name.ends_with("bias") => (0.0, 0.3),
            _ if name.contains("embed_tokens") => (0.0, 0.3),
            _ if name.contains("q_proj") => (0.0, 2.0 / (width as f32).sqrt()),
            _ => (0.0, 1.0 / (width as f32).sqrt()),
        };
        let mut value = || (0..12).map(|_| random.f32()).sum::<f32>() - 6.0;
        let elements = (0..shape.iter().product()).map(|_| bf16::from_f32(value() * deviation + mean));
        let bytes: Vec<u8> = elements.flat_map(bf16::to_le_bytes).collect();
        Ok(Tensor { kind: TensorType::Bf16, width, bytes: Cow::Owned(bytes) })
    }
}
