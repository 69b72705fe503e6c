//! What `--quantize` makes of a checkpoint's matrices when they are loaded. The arithmetic is in
//! `kernels/src/matmul/integers.rs`.

use std::fmt;

use keyway_kernels::matmul::IntBits;

/// How matrices are kept beside what their checkpoint says: as whole numbers with a bf16 scale per 32 inputs
/// of a row. Their inputs are quantised to 8 bits alike, row by row, so that a row's result depends on no
/// other.
///
/// Not quantised: norms, biases, routers, the factors of latent attention that are absorbed, embeddings that
/// are not the head as well, and what is stored in FP8 or MXFP4.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Quantize {
    /// Nothing is quantised beyond what the checkpoint is already.
    #[default]
    None,
    /// 8 bits, 8.5 with their scales.
    Int8,
    /// 4 bits, 4.5 with their scales; the head (and the embeddings, where they are the head) as
    /// [`Quantize::Int8`].
    Int4,
}

impl Quantize {
    /// For the matrices of layers.
    pub(super) fn layers(self) -> Option<IntBits> {
        match self {
            Self::None => None,
            Self::Int8 => Some(IntBits::Eight),
            Self::Int4 => Some(IntBits::Four),
        }
    }

    /// For the head: the choice between tokens loses most by coarse weights.
    pub(super) fn head(self) -> Option<IntBits> {
        self.layers().map(|_| IntBits::Eight)
    }
}

impl Quantize {
    /// As `--quantize` spells it.
    pub(crate) fn option(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
        }
    }
}

impl fmt::Display for Quantize {
    /// As the numerics id names the type of products.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "f32",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
        })
    }
}
