//! Which models the CUDA kernels cover. What they do not is refused by its key in `config.json`, before a weight is
//! read.

use keyway_kernels::cuda::matmul::{GROUP, TILE};
use keyway_kernels::cuda::paged_attention::HeadKind;

use crate::model::config::{Attention, Config, FeedForward, Grouped, Quantisation, refuse};
use crate::model::{ModelError, Quantize};

/// What a refusal ends with.
const ADVICE: &str = "run with --device cpu";

/// Errs unless every part of the model has a kernel.
pub(in crate::model) fn check(config: &Config, quantize: Quantize) -> Result<(), ModelError> {
    let Attention::Grouped(grouped) = config.attention else {
        return refuse("kv_lora_rank", format!("latent attention is not computed on a GPU yet: {ADVICE}"));
    };
    let head_dim = grouped.head_dim;
    if head_kind(&grouped).is_none() {
        return refuse("head_dim", format!("{head_dim} has no GPU kernel, 64 and 128 have: {ADVICE}"));
    }
    if config.quantisation != Quantisation::None {
        return refuse(
            "quantization_config",
            format!("FP8 and MXFP4 are not computed on a GPU yet: {ADVICE}"),
        );
    }
    let granule = if quantize == Quantize::None { TILE } else { GROUP };
    let whole = |key: &'static str, size: usize| {
        if size.is_multiple_of(granule) {
            return Ok(());
        }
        refuse(key, format!("{size} is not a multiple of {granule}, as GPU kernels want: {ADVICE}"))
    };
    whole("hidden_size", config.hidden)?;
    whole("num_attention_heads", grouped.heads * head_dim)?;
    for layer in &config.layers {
        match layer.feed_forward {
            FeedForward::Dense { width } => whole("intermediate_size", width)?,
            FeedForward::Experts(_) => {
                return refuse(
                    "num_experts_per_tok",
                    format!("experts are not computed on a GPU yet: {ADVICE}"),
                );
            }
        }
    }
    Ok(())
}

/// The kernels' name for these heads, if there are kernels.
pub(super) fn head_kind(grouped: &Grouped) -> Option<HeadKind> {
    [HeadKind::Dim64, HeadKind::Dim128].into_iter().find(|kind| kind.key_dim() == grouped.head_dim)
}
