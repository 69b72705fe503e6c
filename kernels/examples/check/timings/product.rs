//! Products of M rows by a weight of N outputs and K inputs, at the shapes of the roofline table.

use half::bf16;
use keyway_kernels::cuda::matmul::{self, Out, Packed, ProductCut, Shape, Unit, Weights};
use keyway_kernels::cuda::{Launch, Slice};

use super::{Work, scales};
use crate::cases::Lab;

/// A product whose operands are on the device.
pub(crate) struct Product {
    pub(crate) shape: Shape,
    pub(crate) rows: usize,
    packed: Packed,
    x: Slice<bf16>,
    y: Slice<bf16>,
}

impl Product {
    pub(crate) fn new(
        lab: &mut Lab<'_>,
        weights: Weights,
        unit: Unit,
        [rows, outputs, inputs]: [usize; 3],
    ) -> Result<Self, String> {
        if unit == Unit::Warpgroup && !lab.has_warpgroups() {
            return Err("this GPU has no wgmma".into());
        }
        let shape = Shape { outputs, inputs, weights };
        let scales = scales(lab, shape.scales())?;
        Ok(Self {
            packed: Packed { shape, unit, images: lab.filled(shape.packed_bytes(), 6)?, scales, bias: None },
            x: lab.filled(rows * inputs * 2, 7)?.cast(),
            y: lab.poisoned(rows * outputs)?,
            shape,
            rows,
        })
    }

    /// Cut so, with K split as the weight's shape says or, given, into splits of so many tiles.
    pub(crate) fn launches(
        &self,
        lab: &mut Lab<'_>,
        cut: ProductCut,
        split_tiles: Option<usize>,
    ) -> Result<Vec<Launch>, String> {
        let Self { shape, rows, packed, x, y } = self;
        let out = Out::Bf16(*y);
        let Some(tiles) = split_tiles else {
            let partials = lab.poisoned(cut.partial_floats(*shape, *rows))?;
            return Ok(matmul::launch(*x, *rows, packed, cut, out, partials));
        };
        let splits = if cut.apart { (shape.inputs / matmul::TILE).div_ceil(tiles) } else { 0 };
        let partials = lab.poisoned(splits * rows * shape.outputs)?;
        Ok(matmul::launch_split(*x, *rows, packed, cut, tiles, out, partials))
    }

    /// As the worker launches it, or, `clustered`, by blocks that share copies of weights besides.
    pub(crate) fn work(&self, lab: &mut Lab<'_>, clustered: bool) -> Result<Work, String> {
        let Self { shape, rows, packed, .. } = self;
        let cut = ProductCut { clustered, ..ProductCut::choose(*shape, *rows) };
        let launches = self.launches(lab, cut, None)?;
        let scale_bytes = packed.scales.map_or(0, |s| s.len * 4);
        let bytes = (shape.packed_bytes() + scale_bytes + 2 * rows * (shape.outputs + shape.inputs)) as u64;
        Ok(Work { launches, bytes, operations: 2 * (rows * shape.outputs) as u64 * shape.inputs as u64 })
    }
}
