//! RMSNorm: whole rows, heads inside rows, the fused addition.

use keyway_kernels::cuda::rms_norm::{NormRows, launch};
use keyway_kernels::heads::Heads;
use keyway_kernels::rms_norm::oracle;

use super::{BF16, Lab, values, wide};

const EPS: f32 = 1e-6;

pub(crate) fn check(lab: &mut Lab<'_>) -> Result<(), String> {
    // As many packets a thread as there are kernels for, and more.
    let mut shapes =
        vec![(0, 8), (1, 8), (3, 64), (2, 264), (5, 1000), (2, 4104), (2, 9000), (2, 13_000), (2, 16_392)];
    if lab.is_large() {
        shapes.extend([(4096, 4096), (333, 7168), (1, 16384)]);
    }
    for (rows, width) in shapes {
        whole_rows(lab, rows, width)?;
        added(lab, rows, width)?;
        lab.clear();
    }
    heads(lab)
}

fn whole_rows(lab: &mut Lab<'_>, rows: usize, width: usize) -> Result<(), String> {
    let (x, weight) = (values(width as u64, rows * width), values(7, width));
    let (device_x, device_weight, out) = (lab.upload(&x)?, lab.upload(&weight)?, lab.poisoned(rows * width)?);
    lab.launch(launch(device_x, None, device_weight, EPS, NormRows::whole(rows, width), out))?;
    let out = lab.download(out)?;
    let exact = oracle(&wide(&x), &wide(&weight), EPS);
    lab.close(&format!("{rows} rows of {width}"), &out, &exact, |i| exact[i].abs() * BF16 + 1e-37)?;
    if rows > 1 {
        let (last, alone) = (lab.upload(&x[(rows - 1) * width..])?, lab.poisoned(width)?);
        lab.launch(launch(last, None, device_weight, EPS, NormRows::whole(1, width), alone))?;
        let alone = lab.download(alone)?;
        lab.same("a row alone and among others", &alone, &out[(rows - 1) * width..])?;
    }
    Ok(())
}

fn added(lab: &mut Lab<'_>, rows: usize, width: usize) -> Result<(), String> {
    let (x, residual, weight) = (values(1, rows * width), values(2, rows * width), values(3, width));
    let sums: Vec<half::bf16> =
        x.iter().zip(&residual).map(|(x, r)| half::bf16::from_f32(x.to_f32() + r.to_f32())).collect();
    let (x, residual, device_weight) = (lab.upload(&x)?, lab.upload(&residual)?, lab.upload(&weight)?);
    let out = lab.poisoned(rows * width)?;
    lab.launch(launch(x, Some(residual), device_weight, EPS, NormRows::whole(rows, width), out))?;
    let (out, residual) = (lab.download(out)?, lab.download(residual)?);
    lab.same("the residual after the addition", &residual, &sums)?;
    let exact = oracle(&wide(&sums), &wide(&weight), EPS);
    lab.close("after the addition", &out, &exact, |i| exact[i].abs() * BF16 + 1e-37)
}

/// Query and key heads where a projection left them; nothing else in the row may change.
fn heads(lab: &mut Lab<'_>) -> Result<(), String> {
    let heads = Heads { stride: 96, first: 8, count: 2, pitch: 32 };
    let (rows, width) = (3, 24);
    let (x, weight) = (values(5, rows * heads.stride), values(6, width));
    let (device_x, device_weight) = (lab.upload(&x)?, lab.upload(&weight)?);
    lab.launch(launch(device_x, None, device_weight, EPS, NormRows { rows, width, heads }, device_x))?;
    let out = lab.download(device_x)?;
    let mut exact: Vec<f64> = x.iter().map(|v| f64::from(v.to_f32())).collect();
    for row in 0..rows {
        for head in 0..heads.count {
            let at = row * heads.stride + heads.first + head * heads.pitch;
            let normalised = oracle(&wide(&x[at..at + width]), &wide(&weight), EPS);
            exact[at..at + width].copy_from_slice(&normalised);
        }
    }
    lab.close("heads inside rows", &out, &exact, |i| exact[i].abs() * BF16 + 1e-37)
}
