//! What rank 0 tells the others beside tokens, in words. When it is told is `group.rs`' and `joint.rs`'
//! business.

use keyway_kernels::moe::Placement;

use crate::model::KvLayout;

/// What rank 0 tells the others beside tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::model) enum Note {
    /// Nothing is to be done; rank 0 is there.
    KeepAlive,
    /// Who shall hold what: see [`Place`].
    Place,
    /// A step that all ranks take: see `joint.rs`.
    Step,
}

impl Note {
    pub(in crate::model) const fn word(self) -> u32 {
        match self {
            Self::KeepAlive => 1,
            Self::Place => 2,
            Self::Step => 3,
        }
    }

    pub(in crate::model) fn of(note: &[u32]) -> Option<Self> {
        [Self::KeepAlive, Self::Place, Self::Step].into_iter().find(|kind| note.first() == Some(&kind.word()))
    }
}

/// Which experts ranks shall hold, and whether they run attention too. In a note: behind its first word the
/// model's fingerprint, the attention's four words (0 without), and each layer's masks of holders.
#[derive(Debug)]
pub(in crate::model) struct Place {
    pub(in crate::model) attention: Option<Attention>,
    pub(in crate::model) placements: Vec<Option<Placement>>,
}

/// What a rank that runs attention too must have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Attention {
    /// Its own KV cache.
    pub(crate) kv: KvLayout,
    /// A hash of the numerics id, so of every weight.
    pub(crate) weights: [u32; 2],
}

impl Place {
    pub(super) fn words(
        fingerprint: [u32; 2],
        attention: Option<Attention>,
        placements: &[Option<Placement>],
    ) -> Vec<u32> {
        let mut note = vec![Note::Place.word()];
        note.extend(fingerprint);
        note.extend(attention.map_or([0; 4], |Attention { kv, weights: [low, high] }| {
            [kv.block_size as u32, kv.num_blocks as u32, low, high]
        }));
        for placement in placements.iter().flatten() {
            note.extend(placement.holders());
        }
        note
    }

    /// What a note says; `None` if it is not for this model, whose experts by layer are `layers`.
    pub(in crate::model) fn read(
        note: &[u32],
        ranks: usize,
        layers: &[usize],
        fingerprint: [u32; 2],
    ) -> Option<Self> {
        let (attention, mut masks) = note.get(1..)?.strip_prefix(&fingerprint)?.split_first_chunk::<4>()?;
        let [block_size, num_blocks, low, high] = *attention;
        let kv = KvLayout { block_size: block_size as usize, num_blocks: num_blocks as usize };
        let attention = (block_size > 0).then_some(Attention { kv, weights: [low, high] });
        let mut placements = Vec::new();
        for experts in layers {
            let (of_layer, rest) = masks.split_at_checked(*experts)?;
            masks = rest;
            let placement = if *experts == 0 {
                None
            } else {
                Some(Placement::from_holders(ranks, of_layer.to_vec()).ok()?)
            };
            placements.push(placement);
        }
        masks.is_empty().then_some(Self { attention, placements })
    }
}
