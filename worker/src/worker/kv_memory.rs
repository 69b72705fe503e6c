//! How much memory the KV cache takes, and what fits into it.

use super::{OptionsError, WorkerOptions};
use crate::engine::block_manager::GroupRules;
use crate::limits::{GPU_KV_SHARE, KV_BYTES_DEFAULT};
use crate::memory;
use crate::model::{KvLayout, ModelInfo};

/// Where the KV cache is to lie.
#[derive(Debug, Clone, Copy)]
pub(super) enum Place {
    /// In this machine's memory.
    Host,
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "of builds that have a device"))]
    /// On a device with as much memory left, the weights and steps having theirs.
    Device { free: usize },
}

/// The KV cache's shape and the longest context it and the model allow. One sequence of that length always
/// fits, so every request that is accepted can be finished.
pub(super) fn kv_layout(
    options: &WorkerOptions,
    info: &ModelInfo,
    place: Place,
) -> Result<(KvLayout, usize), OptionsError> {
    let is_on_gpu = matches!(place, Place::Device { .. });
    let (block_size, chunk) = (options.block_size, options.limits(is_on_gpu).max_batched_tokens);
    let num_blocks = match options.num_kv_blocks {
        Some(blocks) => blocks,
        None => (kv_bytes(options, place)? / (info.kv_bytes_per_block_position * block_size).max(1)).max(1),
    };
    let rules = GroupRules::new(&info.cache_groups, block_size);
    let capacity = rules.longest(num_blocks, chunk);
    if capacity == 0 {
        return Err(OptionsError::FewBlocks {
            blocks: num_blocks,
            model: info.name.clone(),
            needed: rules.blocks_needed(1, chunk),
        });
    }
    let max_model_len = match options.max_model_len {
        None => info.max_model_len.min(capacity),
        Some(len) if len > info.max_model_len => {
            let (most, model) = (info.max_model_len, info.name.clone());
            return Err(OptionsError::BeyondModel { len, most, model });
        }
        Some(len) if len > capacity => {
            let needed = rules.blocks_needed(len, chunk);
            return Err(OptionsError::BeyondCache { blocks: num_blocks, capacity, len, needed });
        }
        Some(len) => len,
    };
    Ok((KvLayout { block_size, num_blocks }, max_model_len))
}

/// Memory that the KV cache shall take, called once the weights are loaded.
fn kv_bytes(options: &WorkerOptions, place: Place) -> Result<usize, OptionsError> {
    let share_of = |free: usize, share: f64| (free as f64 * share) as usize;
    match (options.kv_cache_memory, options.memory_utilization, place) {
        (Some(bytes), ..) => Ok(bytes),
        (None, share, Place::Device { free }) => Ok(share_of(free, share.unwrap_or(GPU_KV_SHARE))),
        (None, None, Place::Host) => Ok(KV_BYTES_DEFAULT),
        (None, Some(share), Place::Host) => match memory::available_bytes() {
            Some(free) => Ok(share_of(free, share)),
            None => Err(OptionsError::FreeMemory),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{LoadedModel, ModelSource};

    #[test]
    fn a_device_gives_a_share_of_what_it_has_left() {
        let info = LoadedModel::load(&ModelSource::Random).unwrap().info;
        let block = 16 * info.kv_bytes_per_block_position;
        let blocks = |options: WorkerOptions, free: usize| {
            kv_layout(&options, &info, Place::Device { free }).unwrap().0.num_blocks
        };
        let free = 1000 * block;
        assert_eq!(blocks(WorkerOptions::default(), free), 900);
        let half = WorkerOptions { memory_utilization: Some(0.5), ..WorkerOptions::default() };
        assert_eq!(blocks(half, free), 500);
        let fixed = WorkerOptions { kv_cache_memory: Some(7 * block), ..WorkerOptions::default() };
        assert_eq!(blocks(fixed, free), 7);
    }
}
