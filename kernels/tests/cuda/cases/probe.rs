//! The probes do what their figures are computed from.

use keyway_kernels::cuda::probe::{SEED_WORDS, copy, matrix_peak, matrix_peak_outputs};

use super::{Lab, values};

pub(crate) fn check(lab: &mut Lab<'_>) -> Result<(), String> {
    for packets in [1usize, 300, 10_000] {
        let bytes: Vec<u8> = values(9, packets * 8).iter().flat_map(|v| v.to_le_bytes()).collect();
        let (from, to) = (lab.upload(&bytes)?, lab.poisoned(bytes.len())?);
        lab.launch([copy(from, to, 1)])?;
        let copied = lab.download(to)?;
        lab.same("a copy", &copied, &bytes)?;
    }
    // bf16 ones: every product adds 16 to each of a lane's 32 sums.
    let (seed, out) = (lab.upload(&[0x3f80_3f80u32; SEED_WORDS])?, lab.poisoned(matrix_peak_outputs(1))?);
    let (launch, operations) = matrix_peak(seed, out, 1, 3);
    lab.launch([launch])?;
    let out = lab.download(out)?;
    let sums: f64 = out.iter().map(|v| f64::from(*v)).sum();
    lab.close("operations", &[sums * 2.0], &[operations as f64], |_| 0.5)
}
