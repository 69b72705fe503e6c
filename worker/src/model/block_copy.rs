//! Copies of KV blocks out of the CPU backend's memory and into it, bit for bit. Whose blocks they are, and
//! where they go, is decided elsewhere: `engine/holds.rs`.

use keyway_kernels::kv_cache::KvCache;

use super::CpuBackend;
use crate::engine::backend::{BlockLayout, CacheGroup, CopyError};

impl CpuBackend {
    /// Sizes and order of its blocks. A slab that a group has no layer for is not copied: what lies there is
    /// of another group's blocks.
    pub(super) fn layout_of_blocks(&self) -> BlockLayout {
        let kinds: Vec<String> =
            self.plan.groups.iter().enumerate().map(|(g, kind)| self.named(g, *kind)).collect();
        let words = match self.slabs.first().map(KvCache::shape) {
            Some(shape) => format!(
                "f32x16 block={} heads={} key={} value={} {}",
                shape.block_size,
                shape.kv_heads,
                shape.key_dim,
                shape.value_dim,
                kinds.join(" ")
            ),
            None => "no layers".to_owned(),
        };
        let block_bytes = (0..self.plan.groups.len()).map(|group| self.bytes_of_block(group)).collect();
        BlockLayout { words, block_bytes }
    }

    fn named(&self, group: usize, kind: CacheGroup) -> String {
        let layers = self.layers_of(group);
        match kind {
            CacheGroup::Full => format!("full={layers}"),
            CacheGroup::MlaLatent => format!("latent={layers}"),
            CacheGroup::SlidingWindow { window } => format!("window{window}={layers}"),
        }
    }

    /// How many layers use a group's table: they have the first slabs.
    fn layers_of(&self, group: usize) -> usize {
        self.plan.places.iter().filter(|place| place.group == group).count()
    }

    fn bytes_of_block(&self, group: usize) -> usize {
        self.slabs[..self.layers_of(group)].iter().map(KvCache::block_bytes).sum()
    }

    /// Appends a block's KV to `out`, layer by layer.
    pub(super) fn copy_of_block(&self, group: usize, block: u32, out: &mut Vec<u8>) {
        for slab in &self.slabs[..self.layers_of(group)] {
            slab.copy_block(block, out);
        }
    }

    /// Writes what [`CpuBackend::copy_of_block`] gave.
    pub(super) fn take_block(&mut self, group: usize, block: u32, bytes: &[u8]) -> Result<(), CopyError> {
        if bytes.len() != self.bytes_of_block(group) {
            return Err(CopyError);
        }
        let (layers, mut rest) = (self.layers_of(group), bytes);
        for slab in &mut self.slabs[..layers] {
            let (own, behind) = rest.split_at(slab.block_bytes());
            slab.write_block(block, own);
            rest = behind;
        }
        Ok(())
    }
}
