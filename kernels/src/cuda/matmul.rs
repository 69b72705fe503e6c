//! Launches `matmul.cu` and `matmul_sm90.cu`: bf16 rows by bf16, int8, int4, FP8 or MXFP4 weights, which
//! `packing.rs` packs.
//!
//! How K is split follows from the weight's shape alone ([`Shape::splits`]); how many rows a block takes,
//! and whether the splits go to blocks of their own, follows the batch and changes no bit.

mod few;
mod packing;

use half::bf16;

use super::constants::codes::{self, BF16_IMAGE};
use super::constants::matmul::REDUCE_THREADS;
use super::constants::{Block, Packing, pipeline_sm90, product, product_few};
use super::{Argument, Kernel, Launch, Slice, pipeline};

pub(super) use few::Few;
pub use packing::{pack_bf16, pack_fp8, pack_integers, pack_mxfp4};

/// Outputs and inputs of a packed tile.
pub const TILE: usize = codes::TILE;
/// Inputs that share a scale.
pub const GROUP: usize = codes::GROUP;
/// Blocks of 64 outputs that a product with few rows should have, and no more: two for each of an H100's 132
/// processors, so that they come in one wave.
const BLOCKS: usize = 264;
/// A split should not be shorter, in tiles: each leaves a sum that must be read again.
const SPLIT_TILES_MIN: usize = 8;
/// Rows up to which splits go to blocks of their own, and blocks of 64 outputs that make it needless: blocks
/// of their own would come in two waves, and their sums have to be read again.
const SPLIT_ROWS_MAX: usize = 128;
const SPLIT_BLOCKS_MAX: usize = 200;
/// Rows up to which weights of 8 or 4 bits have their splits summed side by side in a block.
const FEW_ROWS: usize = product_few::ROWS;
/// Instead of a block's rows: 256 rows whose K is one split.
const WHOLE_K: usize = 257;

/// How a weight is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weights {
    /// bf16 values, two bytes a weight, without scales.
    Bf16,
    /// Integers in -128..=127 with a scale per output and 128 inputs.
    Int8,
    /// Integers in -8..=7 with such a scale.
    Int4,
    /// E4M3 codes with such a scale: it multiplies the sum of the group, so that nothing is rounded before.
    Fp8,
    /// MXFP4: E2M1 codes with an E8M0 power of two for 32 inputs. Products have the bits of the same values
    /// in bf16.
    Mxfp4,
}

impl Weights {
    /// Inputs are a multiple of it.
    pub fn granule(self) -> usize {
        if self.has_scales() { GROUP } else { TILE }
    }

    /// Whether each output has an f32 scale for every 128 inputs.
    fn has_scales(self) -> bool {
        matches!(self, Self::Int8 | Self::Int4 | Self::Fp8)
    }

    /// How codes lie; none of bf16.
    fn packing(self) -> Option<Packing> {
        match self {
            Self::Bf16 => None,
            Self::Int8 => Some(product_few::INT8),
            Self::Int4 => Some(product_few::INT4),
            Self::Fp8 => Some(product_few::FP8),
            Self::Mxfp4 => Some(product_few::MXFP4),
        }
    }
}

/// How large a weight matrix `[N, K]` is, and how its elements are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// N: how many outputs a row of the product has.
    pub outputs: usize,
    /// K, a multiple of [`Weights::granule`].
    pub inputs: usize,
    /// How it is kept.
    pub weights: Weights,
}

impl Shape {
    /// Bytes of a packed tile.
    pub(super) fn image(self) -> usize {
        self.weights.packing().map_or(BF16_IMAGE, |packing| packing.image)
    }

    /// Bytes of the packed weight.
    pub fn packed_bytes(self) -> usize {
        self.outputs.div_ceil(TILE) * (self.inputs / TILE) * self.image()
    }

    /// How many f32 scales there are, `[inputs / 128, outputs]`; none of bf16 and MXFP4.
    pub fn scales(self) -> usize {
        if self.weights.has_scales() { self.inputs / GROUP * self.outputs } else { 0 }
    }

    /// Tiles of a split: a function of the weight's shape alone, since it decides the order of sums.
    pub(super) fn split_tiles(self) -> usize {
        let tiles = self.inputs / TILE;
        let wanted = (BLOCKS / self.outputs.div_ceil(TILE)).min(tiles / SPLIT_TILES_MIN).max(1);
        // Even, so that no group of 128 inputs is cut.
        tiles.div_ceil(wanted).next_multiple_of(2)
    }

    /// Into how many ranges K is cut.
    pub fn splits(self) -> usize {
        (self.inputs / TILE).div_ceil(self.split_tiles())
    }

    /// Panics if `inputs` is not whole tiles or groups.
    pub(super) fn check(self) {
        let granule = self.weights.granule();
        assert!(
            self.inputs > 0 && self.inputs.is_multiple_of(granule),
            "matmul: inputs must be a multiple of {granule}"
        );
    }
}

/// Which matrix instruction multiplies. They may round differently: a worker keeps to one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// A warp's, of every GPU since sm_80 (`mma.sync`).
    Warp,
    /// A warpgroup's, of Hopper (`wgmma`); bf16 weights alone.
    Warpgroup,
}

/// A packed weight on the device.
#[derive(Debug, Clone, Copy)]
pub struct Packed {
    /// The weight's sizes and type, by which the images were packed.
    pub shape: Shape,
    /// The matrix instruction that multiplies it; the images are the same for either.
    pub unit: Unit,
    /// The packed tiles, [`Shape::packed_bytes`] in all, as a `pack_*` function made them.
    pub images: Slice<u8>,
    /// As many as [`Shape::scales`]; `None` where these are none.
    pub scales: Option<Slice<f32>>,
    /// Added to every row of the product, `[outputs]`; `None`: nothing is.
    pub bias: Option<Slice<bf16>>,
}

/// What the product goes to.
#[derive(Debug, Clone, Copy)]
pub enum Out {
    /// The sums rounded to bf16, `[rows, outputs]`.
    Bf16(Slice<bf16>),
    /// The sums in f32, as they are, `[rows, outputs]`: logits.
    F32(Slice<f32>),
}

/// How a product is cut into blocks: speed alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProductCut {
    /// Rows per block: 16, 64 or, of bf16 weights, 128, 192 or 256 (128, where the unit is a warp).
    pub rows: usize,
    /// Whether the splits go to blocks of their own.
    pub apart: bool,
    /// Whether two blocks of a cluster share copies of the weights, where there is such a kernel: bf16
    /// weights on Hopper, blocks of 128 or 256 rows. [`ProductCut::choose`] leaves it until a device has
    /// timed it.
    pub clustered: bool,
}

impl ProductCut {
    /// The cut for a product of `rows` rows by a weight of this shape.
    pub fn choose(shape: Shape, rows: usize) -> Self {
        let block = match rows {
            0..=FEW_ROWS => FEW_ROWS,
            17..=128 => 64,
            _ if shape.weights == Weights::Bf16 => pipeline::suits(shape.outputs, rows),
            _ => 64,
        };
        let narrow_few = rows <= FEW_ROWS && shape.weights != Weights::Bf16;
        let enough = shape.outputs.div_ceil(TILE) * rows.div_ceil(block) >= SPLIT_BLOCKS_MAX;
        let apart = shape.splits() > 1 && rows <= SPLIT_ROWS_MAX && !narrow_few && !enough;
        Self { rows: block, apart, clustered: false }
    }

    /// The rows of a block, by which [`Kernel::choose`] goes.
    fn kernel_rows(self, splits: usize, wide: bool) -> usize {
        match self.rows {
            // What has room for so many rows has none for other ends than sums in bf16.
            129.. if self.apart || wide => 128,
            256 if splits == 1 => WHOLE_K,
            rows => rows,
        }
    }

    /// f32 elements that the splits of `rows` rows take.
    pub fn partial_floats(self, shape: Shape, rows: usize) -> usize {
        if self.apart { shape.splits() * rows * shape.outputs } else { 0 }
    }
}

/// A kernel of `matmul.cu` or `matmul_sm90.cu`, and its blocks.
struct Blocks {
    kernel: Kernel,
    block: Block,
    /// Of weights that are not bf16.
    few: Option<Few>,
    /// Whether blocks stay, and go through the work.
    stay: bool,
    /// Blocks of a cluster.
    cluster: usize,
}

impl Blocks {
    /// The kernel for blocks of so many rows.
    fn choose(shape: Shape, unit: Unit, rows: usize, clustered: bool, few: Few) -> Self {
        let (kernel, block) = match (unit, shape.weights, rows) {
            (Unit::Warpgroup, Weights::Bf16, 16) => (Kernel::matmul_sm90_16, product::HOPPER_ROWS_16),
            (Unit::Warpgroup, Weights::Bf16, _) => {
                let clustered = if clustered { Self::clustered(rows) } else { None };
                return clustered.unwrap_or_else(|| Self::staying(rows));
            }
            (_, Weights::Bf16, 16) => (Kernel::matmul_bf16_16, product::ROWS_16),
            (_, Weights::Bf16, 64) => (Kernel::matmul_bf16_64, product::ROWS_64),
            (_, Weights::Bf16, _) => (Kernel::matmul_bf16_128, product::ROWS_128),
            (_, weights, _) => return Self::few(weights, few),
        };
        Self { kernel, block, few: None, stay: false, cluster: 1 }
    }

    fn few(weights: Weights, few: Few) -> Self {
        let kernel = match (weights, few.is_of_few_rows()) {
            (Weights::Bf16 | Weights::Int8, true) => Kernel::matmul_int8_16,
            (Weights::Bf16 | Weights::Int8, _) => Kernel::matmul_int8_64,
            (Weights::Int4, true) => Kernel::matmul_int4_16,
            (Weights::Int4, _) => Kernel::matmul_int4_64,
            (Weights::Fp8, true) => Kernel::matmul_fp8_16,
            (Weights::Fp8, _) => Kernel::matmul_fp8_64,
            (Weights::Mxfp4, true) => Kernel::matmul_mxfp4_16,
            (Weights::Mxfp4, _) => Kernel::matmul_mxfp4_64,
        };
        Self { kernel, block: few.block(), few: Some(few), stay: false, cluster: 1 }
    }

    /// For `rows` rows, and so many splits in blocks of their own.
    fn grid(&self, shape: Shape, rows: usize, apart: usize) -> [u32; 3] {
        let tile_rows = self.block.rows * self.cluster;
        let tiles = [shape.outputs.div_ceil(self.block.outputs), rows.div_ceil(tile_rows), apart];
        let tiles = tiles.map(|n| n as u32);
        if self.stay { pipeline::grid(tiles, self.cluster as u32) } else { tiles }
    }

    fn staying(rows: usize) -> Self {
        let (kernel, block) = match rows {
            0..=64 => (Kernel::matmul_sm90_64, pipeline_sm90::ROWS_64),
            65..=128 => (Kernel::matmul_sm90_128, pipeline_sm90::ROWS_128),
            129..=192 => (Kernel::matmul_sm90_192, pipeline_sm90::ROWS_192),
            WHOLE_K => (Kernel::matmul_sm90_256_whole, pipeline_sm90::WHOLE_256),
            _ => (Kernel::matmul_sm90_256, pipeline_sm90::ROWS_256),
        };
        Self { kernel, block, few: None, stay: true, cluster: 1 }
    }

    /// Those that share weights; `None` of so many rows.
    fn clustered(rows: usize) -> Option<Self> {
        let (kernel, block) = match rows {
            128 => (Kernel::matmul_sm90_128_clustered, pipeline_sm90::CLUSTERED_128),
            256 => (Kernel::matmul_sm90_256_clustered, pipeline_sm90::CLUSTERED_256),
            WHOLE_K => (Kernel::matmul_sm90_256_whole_clustered, pipeline_sm90::CLUSTERED_WHOLE_256),
            _ => return None,
        };
        Some(Self { kernel, block, few: None, stay: true, cluster: pipeline_sm90::CLUSTER })
    }
}

/// `y = x w^T + bias` of `rows` rows `[rows, inputs]`; splits that are apart are added by a second launch.
///
/// # Panics
/// If shapes disagree.
pub fn launch(
    x: Slice<bf16>,
    rows: usize,
    weight: &Packed,
    cut: ProductCut,
    out: Out,
    partials: Slice<f32>,
) -> Vec<Launch> {
    launch_split(x, rows, weight, cut, weight.shape.split_tiles(), out, partials)
}

/// [`launch`] with splits of `split_tiles` tiles of K, an even number, whatever the weight's shape says:
/// other bits. Splits that suit a batch are what those that suit the weight are held against, to see what it
/// costs to be independent of the batch.
///
/// # Panics
/// If shapes disagree.
pub fn launch_split(
    x: Slice<bf16>,
    rows: usize,
    weight: &Packed,
    cut: ProductCut,
    split_tiles: usize,
    out: Out,
    partials: Slice<f32>,
) -> Vec<Launch> {
    let Packed { shape, unit, images, scales, bias } = *weight;
    shape.check();
    assert!(split_tiles > 0 && split_tiles.is_multiple_of(2), "matmul: a split is an even number of tiles");
    let splits = (shape.inputs / TILE).div_ceil(split_tiles);
    let (y, len, wide) = match out {
        Out::Bf16(y) => (Argument::from(y), y.len, 0usize),
        Out::F32(y) => (Argument::from(y), y.len, 1),
    };
    assert!(
        x.len == rows * shape.inputs
            && len == rows * shape.outputs
            && images.len == shape.packed_bytes()
            && bias.is_none_or(|b| b.len == shape.outputs)
            && scales.map_or(0, |s| s.len) == shape.scales()
            && partials.len >= if cut.apart { splits * rows * shape.outputs } else { 0 },
        "matmul: shapes disagree"
    );
    if rows == 0 {
        return Vec::new();
    }
    let apart = if cut.apart { splits } else { 1 };
    let few = Few::choose(shape, cut.rows, rows, rows.div_ceil(cut.rows), splits.div_ceil(apart));
    let blocks = Blocks::choose(shape, unit, cut.kernel_rows(splits, wide == 1), cut.clustered, few);
    let mut arguments = vec![
        x.into(),
        images.into(),
        scales.into(),
        bias.into(),
        y,
        if cut.apart { Argument::from(partials) } else { Argument::Null },
        rows.into(),
        shape.outputs.into(),
        shape.inputs.into(),
        split_tiles.into(),
        wide.into(),
    ];
    arguments.extend(blocks.few.into_iter().flat_map(Few::arguments));
    let product = Launch {
        kernel: blocks.kernel,
        grid: blocks.grid(shape, rows, apart),
        cluster: blocks.cluster as u32,
        threads: blocks.block.threads as u32,
        shared_bytes: blocks.block.shared_bytes as u32,
        arguments,
    };
    if !cut.apart {
        return vec![product];
    }
    let reduce = Launch {
        kernel: Kernel::matmul_reduce,
        grid: [shape.outputs.div_ceil(REDUCE_THREADS) as u32, rows as u32, 1],
        cluster: 1,
        threads: REDUCE_THREADS as u32,
        shared_bytes: 0,
        arguments: vec![
            partials.into(),
            bias.into(),
            y,
            splits.into(),
            rows.into(),
            shape.outputs.into(),
            wide.into(),
        ],
    };
    vec![product, reduce]
}
