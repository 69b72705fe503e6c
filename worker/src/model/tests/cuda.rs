//! The CUDA backend on the emulator, which compiles the very kernels for the CPU: against the CPU backend, and held to
//! the same promise of equal bits. Where there is no C++ compiler it says SKIPPED.

#[path = "../../../../kernels/tests/cuda/emulator.rs"]
mod emulator;
mod generating;
mod models;
mod refusals;

use proptest::prelude::*;

use self::emulator::Emulator;
use self::models::{MODELS, VOCAB, Variant, load};
use super::invariance::{side_by_side, tokens};
use super::*;
use crate::model::cuda::CudaBackend;

const LAYOUT: KvLayout = KvLayout { block_size: 16, num_blocks: 80 };

/// `None` where there is no compiler.
fn emulated_with(variant: &Variant, quantize: Quantize, layout: KvLayout) -> Option<CudaBackend<Emulator>> {
    let emulator = Emulator::start(1)?;
    Some(load(variant).onto(emulator, quantize).unwrap().into_backend(layout).unwrap())
}

fn emulated(variant: &Variant) -> Option<CudaBackend<Emulator>> {
    emulated_with(variant, Quantize::None, LAYOUT)
}

fn whole(backend: &mut dyn Backend, tokens: &[u32]) -> Vec<f32> {
    let (mut pool, mut sequence) = (Pool::ascending(backend), Sequence::new(backend));
    sequence.run(backend, &mut pool, tokens)
}

/// The root of the mean squared difference, over the deviation of `exact`.
fn distance(found: &[f32], exact: &[f32]) -> f64 {
    let mean = exact.iter().map(|x| f64::from(*x)).sum::<f64>() / exact.len() as f64;
    let variance = exact.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>();
    let error = found.iter().zip(exact).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum::<f64>();
    (error / variance).sqrt()
}

/// A prompt in uneven pieces, across a border of chunks of 256 positions, then single tokens.
#[test]
fn logits_are_the_cpus_within_bf16() {
    let prompt: Vec<u32> = tokens(270, 7).iter().map(|t| t % VOCAB).collect();
    for variant in MODELS {
        let Some(mut backend) = emulated(variant) else { return };
        let mut cpu = load(variant).into_backend(LAYOUT).unwrap();
        let mut pools = [Pool::ascending(&backend), Pool::ascending(&cpu)];
        let (mut here, mut there) = (Sequence::new(&backend), Sequence::new(&cpu));
        for piece in [0..190, 190..268, 268..269, 269..270] {
            let begun = std::time::Instant::now();
            let found = here.run(&mut backend, &mut pools[0], &prompt[piece.clone()]);
            println!("{} {piece:?} {:?}", variant.name, begun.elapsed());
            let exact = there.run(&mut cpu, &mut pools[1], &prompt[piece.clone()]);
            let distance = self::distance(&found, &exact);
            println!("{}: {distance}", variant.name);
            assert!(distance < 0.03, "{} {piece:?}: {distance}", variant.name);
            let hidden = backend.hidden().unwrap();
            assert!(self::distance(hidden, cpu.hidden().unwrap()) < 0.03, "{} hidden", variant.name);
        }
    }
}
