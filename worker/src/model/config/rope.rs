//! The rotary embedding's base and scaling: `rope_parameters` (transformers 5), or `rope_theta` beside
//! `rope_scaling` (before).

use keyway_kernels::rope::RopeScaling;

use super::read::refuse;
use super::{ModelError, RawConfig, RawRope};

const KEY: &str = "rope_parameters";

impl RawConfig {
    /// Where the embedding's parameters are.
    pub(in crate::model) fn rope(&self) -> Option<&RawRope> {
        self.rope_parameters.as_ref().or(self.rope_scaling.as_ref())
    }

    /// The base of the frequencies.
    pub(in crate::model) fn rope_base(&self, default: f64) -> Result<f64, ModelError> {
        let theta = self.rope().and_then(|rope| rope.rope_theta).or(self.rope_theta).unwrap_or(default);
        if !theta.is_finite() || theta <= 1.0 {
            return refuse("rope_theta", format!("is {theta}; must be above 1"));
        }
        Ok(theta)
    }

    /// How the frequencies are stretched.
    pub(in crate::model) fn rope_stretch(&self) -> Result<RopeScaling, ModelError> {
        if self.partial_rotary_factor.is_some_and(|factor| factor != 1.0) {
            return refuse("partial_rotary_factor", "rotating a part of a head is not supported");
        }
        self.rope().map_or(Ok(RopeScaling::None), scaling)
    }
}

fn scaling(rope: &RawRope) -> Result<RopeScaling, ModelError> {
    if rope.partial_rotary_factor.is_some_and(|factor| factor != 1.0) {
        return refuse(KEY, "`partial_rotary_factor`: rotating a part of a head is not supported");
    }
    match rope.kind() {
        Some("default") => Ok(RopeScaling::None),
        Some("linear") => Ok(RopeScaling::Linear { factor: need("factor", rope.factor)? }),
        Some("llama3") => llama3(rope),
        Some("yarn") => yarn(rope),
        Some(other) => refuse(
            KEY,
            format!("rope type `{other}` is not supported; supported are default, linear, llama3 and yarn"),
        ),
        None => refuse(KEY, "names no `rope_type`; one for each kind of layer is not supported"),
    }
}

fn llama3(rope: &RawRope) -> Result<RopeScaling, ModelError> {
    let low_freq_factor = need("low_freq_factor", rope.low_freq_factor)?;
    let high_freq_factor = need("high_freq_factor", rope.high_freq_factor)?;
    if high_freq_factor <= low_freq_factor {
        return refuse(KEY, "`high_freq_factor` must be above `low_freq_factor`");
    }
    Ok(RopeScaling::Llama3 {
        factor: need("factor", rope.factor)?,
        low_freq_factor,
        high_freq_factor,
        original_max_position: need(
            "original_max_position_embeddings",
            rope.original_max_position_embeddings,
        )?,
    })
}

/// With the defaults of transformers' `_compute_yarn_parameters`.
fn yarn(rope: &RawRope) -> Result<RopeScaling, ModelError> {
    let factor = need("factor", rope.factor)?;
    let derived = || RopeScaling::yarn_attention_factor(factor, rope.mscale, rope.mscale_all_dim);
    let scaling = RopeScaling::Yarn {
        factor,
        beta_fast: need("beta_fast", rope.beta_fast.or(Some(32.0)))?,
        beta_slow: need("beta_slow", rope.beta_slow.or(Some(1.0)))?,
        original_max_position: need(
            "original_max_position_embeddings",
            rope.original_max_position_embeddings,
        )?,
        truncate: rope.truncate.unwrap_or(true),
        attention_factor: need("attention_factor", Some(rope.attention_factor.unwrap_or_else(derived)))?,
    };
    Ok(scaling)
}

fn need(name: &str, value: Option<f64>) -> Result<f64, ModelError> {
    match value {
        Some(value) if value.is_finite() && value > 0.0 => Ok(value),
        Some(value) => refuse(KEY, format!("`{name}` is {value}; must be above 0")),
        None => refuse(KEY, format!("`{name}` is missing")),
    }
}
