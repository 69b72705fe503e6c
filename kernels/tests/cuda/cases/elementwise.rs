//! The gated activations.

use keyway_kernels::cuda::elementwise::{clamped_gate_mul, silu_mul};
use keyway_kernels::elementwise::{ClampedGate, clamped_gate_mul_oracle, silu_mul_oracle};

use super::{BF16, Lab, values, wide};

pub(crate) fn check(lab: &mut Lab<'_>) -> Result<(), String> {
    let mut shapes = vec![(0, 8), (1, 8), (3, 40), (2, 1032)];
    if lab.is_large() {
        shapes.extend([(1024, 14_336), (7, 704)]);
    }
    let by = ClampedGate { alpha: 1.702, limit: 7.0 };
    for (rows, width) in shapes {
        let gate_up = values(width as u64, rows * width * 2);
        let device = lab.upload(&gate_up)?;
        let (out, clamped) = (lab.poisoned(rows * width)?, lab.poisoned(rows * width)?);
        lab.launch(silu_mul(device, width, out))?;
        lab.launch(clamped_gate_mul(device, width, by, clamped))?;
        let (out, clamped) = (lab.download(out)?, lab.download(clamped)?);
        let exact = silu_mul_oracle(&wide(&gate_up), width);
        // An exponential of 2^-22 relative error, of arguments up to 150, and an underflow below e^-87.
        lab.close("silu_mul", &out, &exact, |i| exact[i].abs() * (BF16 + 3e-5) + 1e-34)?;
        let exact = clamped_gate_mul_oracle(&wide(&gate_up), width, by);
        lab.close("clamped_gate_mul", &clamped, &exact, |i| exact[i].abs() * (BF16 + 3e-5) + 1e-6)?;
        lab.clear();
    }
    Ok(())
}
