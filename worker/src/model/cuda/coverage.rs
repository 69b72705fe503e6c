//! Which models the CUDA kernels cover. What they do not is refused by its key in `config.json`, before a
//! weight is read.

use keyway_kernels::cuda::matmul::{GROUP, TILE};
use keyway_kernels::cuda::moe::{EXPERTS_MAX, GROUPS_MAX};

use super::heads::HeadShape;
use crate::limits::{GPU_EXPERTS_PER_TOKEN_MAX, GPU_LATENT_HEADS_MAX};
use crate::model::config::{
    Attention, Config, ExpertNames, Experts, FeedForward, Grouped, Latent, Quantisation, refuse,
};
use crate::model::{ModelError, Quantize};

/// What a refusal ends with.
const ADVICE: &str = "run with --device cpu";

/// Errs unless every part of the model has a kernel.
pub(in crate::model) fn check(config: &Config, quantize: Quantize) -> Result<(), ModelError> {
    let grouped = quantize != Quantize::None || config.quantisation == Quantisation::Fp8Blocks;
    let sizes = Sizes { granule: if grouped { GROUP } else { TILE } };
    sizes.heads(&config.attention)?;
    sizes.whole("hidden_size", config.hidden)?;
    for layer in &config.layers {
        match layer.feed_forward {
            FeedForward::Dense { width } => sizes.whole("intermediate_size", width)?,
            FeedForward::Experts(shape) => sizes.experts(&shape, &config.names.experts)?,
        }
    }
    Ok(())
}

/// What products want of sizes.
struct Sizes {
    /// Inputs of a product are a multiple of it.
    granule: usize,
}

impl Sizes {
    fn heads(&self, attention: &Attention) -> Result<(), ModelError> {
        let known = HeadShape::of(attention).is_some();
        match *attention {
            Attention::Grouped(Grouped { head_dim, .. }) if !known => {
                refuse("head_dim", format!("{head_dim} has no GPU kernel, 64 and 128 have: {ADVICE}"))
            }
            Attention::Latent(Latent { rank, rope_dim, .. }) if !known => refuse(
                "kv_lora_rank",
                format!(
                    "{rank} beside a qk_rope_head_dim of {rope_dim} has no GPU kernel, 512 beside 64 has: {ADVICE}"
                ),
            ),
            Attention::Grouped(Grouped { heads, head_dim, .. }) => {
                self.whole("num_attention_heads", heads * head_dim)
            }
            Attention::Latent(latent) => {
                at_most("num_attention_heads", latent.heads, GPU_LATENT_HEADS_MAX)?;
                self.whole("q_lora_rank", latent.query_rank.unwrap_or(0))?;
                // Heads' own factors stay bf16.
                Sizes { granule: TILE }.whole("qk_nope_head_dim", latent.nope_dim + latent.rope_dim)?;
                self.whole("v_head_dim", latent.heads * latent.value_dim)
            }
        }
    }

    fn whole(&self, key: &'static str, size: usize) -> Result<(), ModelError> {
        let granule = self.granule;
        if size.is_multiple_of(granule) {
            return Ok(());
        }
        refuse(key, format!("{size} is not a multiple of {granule}, as GPU kernels want: {ADVICE}"))
    }

    fn experts(&self, shape: &Experts, names: &ExpertNames) -> Result<(), ModelError> {
        at_most("num_experts", shape.count, EXPERTS_MAX)?;
        at_most("num_experts_per_tok", shape.routing.top, GPU_EXPERTS_PER_TOKEN_MAX)?;
        at_most("n_group", shape.routing.groups.map_or(0, |groups| groups.count), GROUPS_MAX)?;
        // Where experts' matrices are named as dense ones are, their width has a name of its own.
        let key = match names {
            ExpertNames::Apart([_, "up_proj", _]) => "moe_intermediate_size",
            ExpertNames::Apart(_) | ExpertNames::Fused => "intermediate_size",
        };
        self.whole(key, shape.width)?;
        self.whole("n_shared_experts", shape.shared_width.unwrap_or(0))
    }
}

fn at_most(key: &'static str, size: usize, most: usize) -> Result<(), ModelError> {
    if size <= most {
        return Ok(());
    }
    refuse(key, format!("{size} is more than the {most} that GPU kernels take: {ADVICE}"))
}
