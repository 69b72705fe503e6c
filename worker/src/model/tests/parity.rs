//! Logits and greedy continuations against goldens made by `tests/make_goldens.py`.

use keyway_kernels::isa::Isa;
use keyway_kernels::scalar::argmax;
use safetensors::SafeTensors;

use super::*;

pub(super) struct Golden {
    pub(super) ids: Vec<u32>,
    pub(super) positions: Vec<u32>,
    /// `[positions, vocab]`.
    pub(super) logits: Vec<f64>,
    greedy: Vec<u32>,
}

pub(super) fn golden(family: &str) -> Golden {
    let bytes = std::fs::read(family_dir(family).join("golden.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let ints = |name: &str| {
        let data = file.tensor(name).unwrap();
        data.data().as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
    };
    let logits = file.tensor("logits").unwrap();
    Golden {
        ids: ints("ids"),
        positions: ints("positions"),
        logits: logits.data().as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect(),
        greedy: ints("greedy"),
    }
}

/// A pool that hands out no neighbours.
fn scattered() -> Pool {
    let blocks = NUM_BLOCKS as u32;
    Pool::new((0..blocks).map(|i| i * 7 % blocks).collect())
}

#[test]
fn logits_are_within_1e_5_of_the_float64_goldens_on_every_isa() {
    for family in FAMILIES {
        let golden = golden(family);
        for isa in Isa::available() {
            let mut backend = backend(&ModelSource::Dir(family_dir(family))).with_isa(isa);
            let (mut pool, mut sequence) = (scattered(), Sequence::new(&backend));
            let (vocab, mut worst) = (backend.vocab_size(), 0.0_f64);
            for (position, exact) in golden.positions.iter().zip(golden.logits.chunks(vocab)) {
                let tokens = &golden.ids[sequence.len()..=*position as usize];
                let logits = sequence.run(&mut backend, &mut pool, tokens);
                let errors = logits.iter().zip(exact).map(|(l, e)| (f64::from(*l) - e).abs());
                worst = errors.fold(worst, f64::max);
                assert!(worst < 1e-5, "{family} on {}, position {position}: {worst:e}", isa.name());
            }
            println!("{family} on {}: largest error {worst:.1e}", isa.name());
        }
    }
}

#[test]
fn greedy_continuations_are_those_of_the_goldens_on_every_isa() {
    for family in FAMILIES {
        let golden = golden(family);
        for isa in Isa::available() {
            let mut backend = backend(&ModelSource::Dir(family_dir(family))).with_isa(isa);
            let (mut pool, mut sequence) = (scattered(), Sequence::new(&backend));
            let mut logits = sequence.run(&mut backend, &mut pool, &golden.ids);
            for expected in &golden.greedy {
                let next = argmax(&logits) as u32;
                assert_eq!(next, *expected, "{family} on {}, after {} tokens", isa.name(), sequence.len());
                logits = sequence.run(&mut backend, &mut pool, &[next]);
            }
        }
    }
}
