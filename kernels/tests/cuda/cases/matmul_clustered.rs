//! Products whose blocks share copies of weights, two of a cluster: the bits of blocks that do not, whatever
//! the sizes.

use keyway_kernels::cuda::matmul::{Out, ProductCut, Shape, Unit, Weights, launch};

use super::matmul::{Weight, cut};
use super::{Lab, values};

pub(crate) fn check(lab: &mut Lab<'_>) -> Result<(), String> {
    if !lab.has_warpgroups() {
        return Ok(());
    }
    // Fewer tiles of inputs than stages, all of K at once.
    let short = Shape { outputs: 72, inputs: 192, weights: Weights::Bf16 };
    // More tiles than stages. The last outputs are one tile, which one of the blocks brings.
    let long = Shape { outputs: 130, inputs: 960, ..short };
    // Two splits, the last shorter.
    let split = Shape { outputs: 130, inputs: 1088, ..short };
    // With one row the second block has none. So it has with an odd number of tiles.
    let mut products = vec![
        (short, vec![1, 300, 520]),
        (long, vec![129, 300]),
        (split, vec![1, 260]),
        // As many bands of rows as make the next one begin.
        (Shape { outputs: 260, inputs: 128, ..short }, vec![1100]),
    ];
    if lab.is_large() {
        products.push((Shape { outputs: 8192, inputs: 8192, ..short }, vec![1000, 8192]));
        products.push((Shape { outputs: 4096, inputs: 4096, ..short }, vec![129, 513, 2304]));
        products.push((Shape { outputs: 16_448, inputs: 1024, ..short }, vec![2000]));
    }
    for (shape, counts) in products {
        for rows in counts {
            one(lab, shape, rows).map_err(|fault| format!("{shape:?}, {rows} rows: {fault}"))?;
            lab.clear();
        }
    }
    Ok(())
}

fn one(lab: &mut Lab<'_>, shape: Shape, rows: usize) -> Result<(), String> {
    let weight = Weight::new(lab, shape, Unit::Warpgroup)?;
    let x = lab.upload(&values(11, rows * shape.inputs))?;
    for alone in [cut(256, false), cut(128, false), cut(128, shape.splits() > 1)] {
        let clustered = ProductCut { clustered: true, ..alone };
        let expected = weight.multiply(lab, x, rows, alone)?;
        let found = weight.multiply(lab, x, rows, clustered)?;
        lab.same(&format!("{clustered:?}"), &found, &expected)?;
        let found = weight.by_two_blocks(lab, x, rows, clustered)?;
        lab.same(&format!("{clustered:?}, one cluster"), &found, &expected)?;
    }
    let both = [false, true].map(|clustered| ProductCut { clustered, ..cut(128, false) });
    let mut logits = Vec::new();
    for cut in both {
        let (y, none) = (lab.poisoned(rows * shape.outputs)?, lab.poisoned(0)?);
        lab.launch(launch(x, rows, &weight.packed, cut, Out::F32(y), none))?;
        logits.push(lab.download(y)?);
    }
    lab.same("logits", &logits[1], &logits[0])
}
