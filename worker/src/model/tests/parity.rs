//! Logits and greedy continuations against goldens made by `tests/make_goldens.py`.

use keyway_kernels::isa::Isa;
use keyway_kernels::scalar::argmax;
use safetensors::SafeTensors;

use super::*;

struct Golden {
    ids: Vec<u32>,
    positions: Vec<u32>,
    /// `[positions, vocab]`.
    logits: Vec<f64>,
    greedy: Vec<u32>,
}

fn golden(family: &str) -> Golden {
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

/// A table that is no run of neighbours.
fn blocks() -> Vec<u32> {
    (0..NUM_BLOCKS as u32).map(|i| i * 7 % NUM_BLOCKS as u32).collect()
}

const NUM_BLOCKS: usize = 20;

#[test]
fn logits_are_within_1e_5_of_the_float64_goldens() {
    for family in FAMILIES {
        let golden = golden(family);
        let mut backend = backend(&ModelSource::Dir(family_dir(family)), NUM_BLOCKS);
        let vocab = backend.vocab_size();
        for (position, exact) in golden.positions.iter().zip(golden.logits.chunks(vocab)) {
            let logits = run(&mut backend, &golden.ids[..=*position as usize], 0, &blocks());
            let worst = logits.iter().zip(exact).map(|(l, e)| (f64::from(*l) - e).abs()).fold(0.0, f64::max);
            assert!(worst < 1e-5, "{family}, position {position}: {worst:e}");
        }
    }
}

#[test]
fn greedy_continuations_are_those_of_the_goldens_on_every_isa() {
    for family in FAMILIES {
        for isa in Isa::available() {
            let golden = golden(family);
            let mut backend = backend(&ModelSource::Dir(family_dir(family)), NUM_BLOCKS).with_isa(isa);
            let mut ids = golden.ids.clone();
            let mut logits = run(&mut backend, &ids, 0, &blocks());
            for expected in golden.greedy {
                let next = argmax(&logits) as u32;
                assert_eq!(next, expected, "{family} on {}, after {} tokens", isa.name(), ids.len());
                logits = run(&mut backend, &[next], ids.len(), &blocks());
                ids.push(next);
            }
        }
    }
}
