//! Rows by their numbers.

use half::bf16;
use keyway_kernels::cuda::gather::{PENDING, fill_in, packed, plain};
use keyway_kernels::cuda::matmul::{Packed, Shape, Unit, Weights, pack_bf16};

use super::{Lab, values};

pub(crate) fn check(lab: &mut Lab<'_>) -> Result<(), String> {
    let mut shapes = vec![(1, 64, 0), (70, 64, 3), (130, 192, 70), (65, 1088, 2)];
    if lab.is_large() {
        shapes.extend([(32_000, 4096, 513), (300, 7168, 4000)]);
    }
    for (height, width, count) in shapes {
        let matrix = values(height as u64, height * width);
        let numbers: Vec<u32> = (0..count).map(|i| ((i * 37 + 1) % height) as u32).collect();
        let (rows, device) = (lab.upload(&numbers)?, lab.upload(&matrix)?);
        let picked = |width_of: usize| -> Vec<bf16> {
            numbers.iter().flat_map(|n| &matrix[*n as usize * width..][..width_of]).copied().collect()
        };

        let narrow = width - 8;
        let out = lab.poisoned(count * narrow)?;
        lab.launch(plain(device, width, rows, narrow, out))?;
        let found = lab.download(out)?;
        lab.same("plain", &found, &picked(narrow))?;

        let shape = Shape { outputs: height, inputs: width, weights: Weights::Bf16 };
        let images = lab.upload(&pack_bf16(shape, &matrix))?;
        let weight = Packed { shape, unit: Unit::Warp, images, scales: None, bias: None };
        let out = lab.poisoned(count * width)?;
        lab.launch(packed(&weight, rows, out))?;
        let found = lab.download(out)?;
        lab.same("packed", &found, &picked(width))?;
        lab.clear();
    }
    for count in [0, 1, 3, 128, 300] {
        let drawn: Vec<u32> = (0..70).map(|row| row * 3 + 1).collect();
        let pending = |i: u32| i.is_multiple_of(3).then_some(i * 11 % 70);
        let planned: Vec<u32> =
            (0..count).map(|i| pending(i).map_or(PENDING - 1 - i, |row| PENDING | row)).collect();
        let (tokens, on_device) = (lab.upload(&planned)?, lab.upload(&drawn)?);
        lab.launch(fill_in(tokens, on_device))?;
        let filled = lab.download(tokens)?;
        let expected: Vec<u32> =
            (0..count).map(|i| pending(i).map_or(PENDING - 1 - i, |row| drawn[row as usize])).collect();
        lab.same("tokens filled in", &filled, &expected)?;
        lab.clear();
    }
    Ok(())
}
