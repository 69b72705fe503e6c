//! What several families say in the same way, and the refusal of what none of them computes.

use keyway_kernels::kv_cache::KvShape;
use keyway_kernels::rope::Pairing;

use crate::model::ModelError;
use crate::model::config::{
    Attention, Config, ExpertNames, Experts, FeedForward, Grouped, LayerShape, Names, Quantisation,
    RawConfig, RopeShape, TokenIds, refuse, size,
};

/// The names of Llama and of most that came after it.
pub(in crate::model) const NAMES: Names = Names {
    feed_forward: "mlp",
    router: "gate",
    experts: ExpertNames::Apart(["gate_proj", "up_proj", "down_proj"]),
};

/// What a family decides itself.
pub(super) struct Parts {
    pub(super) attention: Attention,
    pub(super) layers: Vec<LayerShape>,
    pub(super) pairing: Pairing,
    pub(super) names: &'static Names,
    pub(super) quantisation: Quantisation,
    /// Where the configuration says nothing.
    pub(super) norm_eps: f32,
    pub(super) rope_theta: f64,
}

impl Parts {
    /// Of a family in Llama's manner.
    pub(super) fn new(attention: Grouped, layers: Vec<LayerShape>) -> Self {
        Self {
            attention: Attention::Grouped(attention),
            layers,
            pairing: Pairing::Halves,
            names: &NAMES,
            quantisation: Quantisation::None,
            norm_eps: 1e-6,
            rope_theta: 10_000.0,
        }
    }
}

/// A model from its family's parts and what every `config.json` says alike.
pub(super) fn assemble(raw: &RawConfig, parts: Parts) -> Result<Config, ModelError> {
    let activation = raw.hidden_act.as_deref().unwrap_or("silu");
    if activation != "silu" {
        return refuse("hidden_act", format!("`{activation}` is not supported; supported is silu"));
    }
    if raw.mlp_bias {
        return refuse("mlp_bias", "a bias in the feed-forward part is not supported");
    }
    if raw.quantization_config.is_some() && parts.quantisation == Quantisation::None {
        return refuse(
            "quantization_config",
            "this family's quantised checkpoints are not supported; use the F32, F16 or BF16 one",
        );
    }
    let rope = RopeShape {
        theta: raw.rope_base(parts.rope_theta)?,
        scaling: raw.rope_stretch()?,
        pairing: parts.pairing,
    };
    Ok(Config {
        vocab_size: size("vocab_size", raw.vocab_size)?,
        hidden: size("hidden_size", raw.hidden_size)?,
        max_positions: size("max_position_embeddings", raw.max_position_embeddings)?,
        norm_eps: raw.rms_norm_eps.unwrap_or(parts.norm_eps),
        attention: parts.attention,
        rope,
        layers: parts.layers,
        tied_embeddings: raw.tie_word_embeddings,
        names: parts.names,
        quantisation: parts.quantisation,
        eos_token_ids: raw.eos_token_id.clone().map(TokenIds::into_vec).unwrap_or_default(),
    })
}

/// Grouped-query attention without extras; `attention_bias` puts one on all four projections.
pub(super) fn grouped(raw: &RawConfig, default_bias: bool) -> Result<Grouped, ModelError> {
    let heads = size("num_attention_heads", raw.num_attention_heads)?;
    let hidden = size("hidden_size", raw.hidden_size)?;
    let head_dim = multiple("head_dim", raw.head_dim.or(Some(hidden / heads)))?;
    let kv_heads = size("num_key_value_heads", raw.num_key_value_heads.or(Some(heads)))?;
    if !heads.is_multiple_of(kv_heads) {
        return refuse("num_key_value_heads", format!("{heads} heads are not a multiple of {kv_heads}"));
    }
    let bias = raw.attention_bias.unwrap_or(default_bias);
    Ok(Grouped { heads, kv_heads, head_dim, qkv_bias: bias, output_bias: bias, qk_norm: false, sinks: false })
}

/// A size that the KV cache wants in whole vectors.
pub(super) fn multiple(key: &'static str, value: Option<usize>) -> Result<usize, ModelError> {
    let value = size(key, value)?;
    if !value.is_multiple_of(KvShape::GRANULE) {
        return refuse(key, format!("{value} is not a multiple of {}", KvShape::GRANULE));
    }
    Ok(value)
}

/// FP8 as DeepSeek-V3 and Qwen3 are published in: E4M3 with a scale per 128 by 128.
pub(super) fn fp8_blocks(raw: &RawConfig) -> Result<Quantisation, ModelError> {
    let Some(config) = &raw.quantization_config else {
        return Ok(Quantisation::None);
    };
    let known = config.quant_method.as_deref() == Some("fp8")
        && config.fmt.as_deref().is_none_or(|fmt| fmt == "e4m3")
        && config.activation_scheme.as_deref().is_none_or(|scheme| scheme == "dynamic")
        && config.weight_block_size.as_deref() == Some(&[128, 128]);
    if !known {
        return refuse(
            "quantization_config",
            "for this family only `quant_method` fp8 is supported, with `fmt` e4m3, `activation_scheme` dynamic \
             and `weight_block_size` [128, 128]",
        );
    }
    Ok(Quantisation::Fp8Blocks)
}

/// One shape per layer.
pub(super) fn layers(
    raw: &RawConfig,
    window: impl Fn(usize) -> Option<usize>,
    feed_forward: impl Fn(usize) -> Result<FeedForward, ModelError>,
) -> Result<Vec<LayerShape>, ModelError> {
    let count = size("num_hidden_layers", raw.num_hidden_layers)?;
    let layer = |i| Ok(LayerShape { window: window(i), feed_forward: feed_forward(i)? });
    let layers: Vec<LayerShape> = (0..count).map(layer).collect::<Result<_, ModelError>>()?;
    if layers.iter().any(|layer| layer.window == Some(0)) {
        return refuse("sliding_window", "is 0; must be at least 1");
    }
    check_layer_types(raw, &layers)?;
    Ok(layers)
}

/// Where `layer_types` is given it must say what the family computes.
fn check_layer_types(raw: &RawConfig, layers: &[LayerShape]) -> Result<(), ModelError> {
    let Some(kinds) = &raw.layer_types else {
        return Ok(());
    };
    if kinds.len() != layers.len() {
        return refuse("layer_types", format!("names {} layers of {}", kinds.len(), layers.len()));
    }
    for (i, (kind, layer)) in kinds.iter().zip(layers).enumerate() {
        let computed = if layer.window.is_some() { "sliding_attention" } else { "full_attention" };
        if kind != computed {
            return refuse("layer_types", format!("layer {i} is `{kind}`, this model would use {computed}"));
        }
    }
    Ok(())
}

/// The plain feed-forward part.
pub(super) fn dense(raw: &RawConfig) -> Result<FeedForward, ModelError> {
    Ok(FeedForward::Dense { width: size("intermediate_size", raw.intermediate_size)? })
}

/// Experts whose routing suits their number.
pub(super) fn experts(experts: Experts) -> Result<FeedForward, ModelError> {
    match experts.routing.check(experts.count) {
        Ok(()) => Ok(FeedForward::Experts(experts)),
        Err(error) => refuse("num_experts_per_tok", error.to_string()),
    }
}
