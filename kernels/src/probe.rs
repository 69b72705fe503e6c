//! How fast this machine reads memory and multiplies at this moment: the ceilings that benchmarks are held
//! to. No operation of a decoder.

use std::hint::black_box;
use std::time::Instant;

use crate::arena::Arena;
use crate::compute::Compute;
use crate::grid::Grid;
use crate::isa::Body;
use crate::lanes::{LANES, Lanes};
use crate::simd::Simd;

/// Bytes that one thread reads: many times what caches hold.
const BYTES_PER_THREAD: usize = 768 << 20;
/// How far ahead the loops ask for memory, in bytes; 0: they leave it to the processor.
const AHEAD: [usize; 4] = [0, 1024, 2048, 4096];
/// Vectors read in a turn of the loop.
const TURN: usize = 8;

/// Memory to read, 768 MiB for each thread.
#[derive(Debug)]
pub struct Bandwidth {
    memory: Arena<Lanes>,
}

impl Bandwidth {
    /// Takes and fills the memory.
    pub fn new(compute: &Compute) -> Self {
        let vectors = BYTES_PER_THREAD / size_of::<Lanes>();
        Self { memory: Arena::filled(Lanes([1.0; LANES]), compute.threads().get() * vectors) }
    }

    /// Bytes per second at which all threads together read it once; the best of a few loops.
    pub fn measure(&self, compute: &Compute) -> f64 {
        AHEAD.iter().map(|ahead| self.read(compute, *ahead)).fold(0.0, f64::max)
    }

    fn read(&self, compute: &Compute, ahead: usize) -> f64 {
        let mut sums = vec![0.0; compute.threads().get()];
        let per_thread = self.memory.len() / sums.len();
        let begin = Instant::now();
        compute.tiles(Grid::new(&mut sums, 1, 1, 1), |mut tile| {
            let memory = &self.memory[tile.rows().start * per_thread..][..per_thread];
            tile.whole_rows()[0] = compute.isa().run(Read { memory, ahead });
        });
        black_box(&sums);
        size_of_val(&*self.memory) as f64 / begin.elapsed().as_secs_f64()
    }
}

struct Read<'a> {
    memory: &'a [Lanes],
    ahead: usize,
}

impl Body for Read<'_> {
    type Out = f32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f32 {
        let (one, mut sums) = (simd.splat(1.0), [simd.zero(); TURN]);
        for turn in self.memory.as_chunks::<TURN>().0 {
            for i in 0..TURN {
                if self.ahead > 0 {
                    simd.prefetch(&raw const turn[i], self.ahead);
                }
                sums[i] = simd.mul_add(simd.load(&turn[i].0), one, sums[i]);
            }
        }
        let mut total = Lanes::ZERO;
        for sum in sums {
            let mut lanes = Lanes::ZERO;
            simd.store(sum, &mut lanes.0);
            total = total.add(lanes);
        }
        total.sum()
    }
}

/// Fused multiply-adds per second times two, on all threads together, of numbers in registers.
pub fn multiplications(compute: &Compute) -> f64 {
    const TURNS: usize = 2_000_000;
    let mut sums = vec![0.0; compute.threads().get()];
    let begin = Instant::now();
    compute.tiles(Grid::new(&mut sums, 1, 1, 1), |mut tile| {
        tile.whole_rows()[0] = compute.isa().run(Multiply { turns: black_box(TURNS) });
    });
    black_box(&sums);
    (2 * SUMS * LANES * TURNS * sums.len()) as f64 / begin.elapsed().as_secs_f64()
}

/// Independent sums that hide the latency of an addition.
const SUMS: usize = 12;

struct Multiply {
    turns: usize,
}

impl Body for Multiply {
    type Out = f32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f32 {
        let (a, b) = (simd.splat(black_box(0.999)), simd.splat(black_box(0.001)));
        let mut sums = [simd.splat(1.0); SUMS];
        for _ in 0..self.turns {
            for sum in &mut sums {
                *sum = simd.mul_add(*sum, a, b);
            }
        }
        let mut total = Lanes::ZERO;
        for sum in sums {
            let mut lanes = Lanes::ZERO;
            simd.store(sum, &mut lanes.0);
            total = total.add(lanes);
        }
        total.sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;

    #[test]
    fn everything_is_read() {
        let memory: Vec<Lanes> = (0..3 * TURN).map(|i| Lanes([i as f32; LANES])).collect();
        let expected = (LANES * (3 * TURN) * (3 * TURN - 1) / 2) as f32;
        for isa in Isa::available() {
            for ahead in AHEAD {
                assert_eq!(isa.run(Read { memory: &memory, ahead }), expected);
            }
        }
    }
}
