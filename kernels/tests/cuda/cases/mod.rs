//! What is checked of every kernel, on whichever device: agreement with the float64 oracle on adversarial
//! input, and equal bits however the same work is cut. Buffers start poisoned; a case says what it
//! compared.

mod attention;
mod elementwise;
mod experts;
mod experts_paired;
mod gather;
mod matmul;
mod matmul_clustered;
mod moe;
mod packed;
pub(crate) mod peer;
mod probe;
mod rms_norm;
mod rope;
mod rules;
mod sample;

use experts::narrow as experts_narrow;
use half::bf16;
use keyway_kernels::cuda::{Device, Element, Launch, Slice};

/// One case.
pub(crate) struct Case {
    /// The operation.
    pub(crate) name: &'static str,
    /// Its check; the error says what was wrong.
    pub(crate) run: fn(&mut Lab<'_>) -> Result<(), String>,
}

macro_rules! cases {
    ($($name:ident),* $(,)?) => {
        /// All of them.
        pub(crate) const CASES: &[Case] = &[$(Case { name: stringify!($name), run: $name::check }),*];
    };
}
cases!(
    attention,
    elementwise,
    experts,
    experts_narrow,
    experts_paired,
    gather,
    matmul,
    matmul_clustered,
    moe,
    peer,
    probe,
    rms_norm,
    rope,
    rules,
    sample
);

/// How large the shapes are: an emulator cannot do a GPU's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Size {
    Small,
    #[allow(dead_code, reason = "of the check on a GPU")]
    Large,
}

/// A device, and what a case found on it.
pub(crate) struct Lab<'a> {
    device: &'a mut dyn Device,
    size: Size,
    buffers: Vec<u64>,
    compared: usize,
    worst: f64,
}

impl Drop for Lab<'_> {
    fn drop(&mut self) {
        self.clear();
    }
}

impl<'a> Lab<'a> {
    pub(crate) fn new(device: &'a mut dyn Device, size: Size) -> Self {
        Self { device, size, buffers: Vec::new(), compared: 0, worst: 0.0 }
    }

    /// Whether shapes of a GPU's size are wanted too.
    pub(crate) fn is_large(&self) -> bool {
        self.size == Size::Large
    }

    /// Whether the device has Hopper's matrix instructions.
    pub(crate) fn has_warpgroups(&self) -> bool {
        self.device.has_warpgroups()
    }

    /// How many blocks of a kind that stays the device holds at once.
    #[allow(dead_code, reason = "of the check on a GPU")]
    pub(crate) fn processors(&self) -> usize {
        self.device.processors()
    }

    /// Elements compared.
    pub(crate) fn compared(&self) -> usize {
        self.compared
    }

    /// The largest error met, as a share of its tolerance.
    #[allow(dead_code, reason = "of the check on a GPU")]
    pub(crate) fn worst(&self) -> f64 {
        self.worst
    }

    /// Leaves all buffers to the device: for timings.
    #[allow(dead_code, reason = "of the check on a GPU")]
    pub(crate) fn keep(&mut self) {
        self.buffers.clear();
    }

    /// Frees all buffers.
    pub(crate) fn clear(&mut self) {
        for buffer in self.buffers.drain(..) {
            self.device.free(buffer);
        }
    }

    /// A buffer with these elements.
    pub(crate) fn upload<T: Element>(&mut self, elements: &[T]) -> Result<Slice<T>, String> {
        let slice = self.device.upload(elements).map_err(|e| e.to_string())?;
        self.buffers.push(slice.buffer);
        Ok(slice)
    }

    /// A poisoned buffer.
    pub(crate) fn poisoned<T: Element>(&mut self, len: usize) -> Result<Slice<T>, String> {
        let slice = self.device.slice(len).map_err(|e| e.to_string())?;
        self.buffers.push(slice.buffer);
        Ok(slice)
    }

    /// A buffer of `bytes` filled with bf16 values of [`values`], a block of them again and again: for
    /// timings.
    #[allow(dead_code, reason = "of the check on a GPU")]
    pub(crate) fn filled(&mut self, bytes: usize, seed: u64) -> Result<Slice<u8>, String> {
        self.filled_with(bytes, |n| values(seed, n))
    }

    /// The same of values without outliers, of variance 1, as other engines' timings have them: where the
    /// time hangs on how they differ.
    #[allow(dead_code, reason = "of the check on a GPU")]
    pub(crate) fn filled_evenly(&mut self, bytes: usize, seed: u64) -> Result<Slice<u8>, String> {
        // Four numbers of [-1, 1] add up to a variance of 4 / 3.
        self.filled_with(bytes, |n| {
            let unit = |v: &bf16| if v.to_f32().abs() > 1.0 { 0.5 } else { v.to_f32() };
            let of_four = |four: &[bf16]| four.iter().map(unit).sum::<f32>() * 0.75f32.sqrt();
            values(seed, 4 * n).chunks(4).map(|four| bf16::from_f32(of_four(four))).collect()
        })
    }

    #[allow(dead_code, reason = "of the check on a GPU")]
    fn filled_with(&mut self, bytes: usize, make: impl Fn(usize) -> Vec<bf16>) -> Result<Slice<u8>, String> {
        let slice = self.poisoned(bytes)?;
        let block: Vec<u8> = make((bytes / 2).min(1 << 20)).iter().flat_map(|v| v.to_le_bytes()).collect();
        for at in (0..bytes).step_by(block.len().max(1)) {
            let part = &block[..block.len().min(bytes - at)];
            self.device.write(slice.buffer, at as u64, part).map_err(|e| e.to_string())?;
        }
        Ok(slice)
    }

    /// A buffer's elements.
    pub(crate) fn download<T: Element>(&mut self, slice: Slice<T>) -> Result<Vec<T>, String> {
        self.device.download(slice).map_err(|e| e.to_string())
    }

    /// Runs what there is to run.
    pub(crate) fn launch(&mut self, launches: impl IntoIterator<Item = Launch>) -> Result<(), String> {
        launches
            .into_iter()
            .try_for_each(|launch| self.device.launch(&launch).map_err(|e| format!("{}: {e}", launch.kernel)))
    }

    /// Errs unless `|actual - exact| <= tolerance(i)` for every element.
    pub(crate) fn close(
        &mut self,
        what: &str,
        actual: &[impl Into<f64> + Copy],
        exact: &[f64],
        tolerance: impl Fn(usize) -> f64,
    ) -> Result<(), String> {
        if actual.len() != exact.len() {
            return Err(format!("{what}: {} elements instead of {}", actual.len(), exact.len()));
        }
        for (i, (a, e)) in actual.iter().zip(exact).enumerate() {
            let (a, tolerance): (f64, f64) = ((*a).into(), tolerance(i));
            let share = (a - e).abs() / tolerance;
            if share.is_nan() || share > 1.0 {
                return Err(format!("{what}: element {i} is {a} instead of {e}, tolerance {tolerance:e}"));
            }
            self.worst = self.worst.max(share);
        }
        self.compared += exact.len();
        Ok(())
    }

    /// Errs unless all bits agree.
    pub(crate) fn same<T: Element + PartialEq + std::fmt::Debug>(
        &mut self,
        what: &str,
        a: &[T],
        b: &[T],
    ) -> Result<(), String> {
        if a.len() != b.len() {
            return Err(format!("{what}: {} elements instead of {}", a.len(), b.len()));
        }
        let bytes = |element: &T| {
            let mut bytes = Vec::new();
            element.put(&mut bytes);
            bytes
        };
        for (i, (a, b)) in a.iter().zip(b).enumerate() {
            if bytes(a) != bytes(b) {
                return Err(format!("{what}: element {i} is {a:?} here and {b:?} there"));
            }
        }
        self.compared += a.len();
        Ok(())
    }
}

/// What rounding to bf16 may change, relative to the value: half a unit in its 8 bits, and a little for the
/// f32 arithmetic before.
pub(crate) const BF16: f64 = 1.0 / 256.0 * 1.01;

/// `n` reproducible values: mostly of order one, with exact zeros, tiny values and outliers of order 100
/// among them, so that nothing averages out and a softmax is not flat.
pub(crate) fn values(seed: u64, n: usize) -> Vec<bf16> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut value = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let unit = ((state >> 40) as f32 / (1 << 23) as f32) - 1.0;
        match state % 101 {
            0 => 0.0,
            1 => unit * 1e-20,
            2 => unit * 100.0,
            _ => unit,
        }
    };
    (0..n).map(|_| bf16::from_f32(value())).collect()
}

/// The f32 of each.
pub(crate) fn wide(values: &[bf16]) -> Vec<f32> {
    values.iter().map(|v| v.to_f32()).collect()
}
