//! Logits and greedy continuations against goldens made by `tests/make_goldens.py`.

use keyway_kernels::isa::Isa;
use keyway_kernels::scalar::argmax;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

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

/// The largest error of any logit.
fn worst_error(golden: &Golden, mut backend: CpuBackend) -> f64 {
    let (mut pool, mut sequence) = (scattered(), Sequence::new(&backend));
    let (vocab, mut worst) = (backend.vocab_size(), 0.0_f64);
    for (position, exact) in golden.positions.iter().zip(golden.logits.chunks(vocab)) {
        let tokens = &golden.ids[sequence.len()..=*position as usize];
        let logits = sequence.run(&mut backend, &mut pool, tokens);
        let errors = logits.iter().zip(exact).map(|(l, e)| (f64::from(*l) - e).abs());
        worst = errors.fold(worst, f64::max);
    }
    worst
}

/// A copy of a family's checkpoint whose bf16 tensors are the same numbers in f32.
fn in_f32(family: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(family_dir(family)).unwrap() {
        let from = entry.unwrap().path();
        let to = dir.path().join(from.file_name().unwrap());
        if from.extension().is_some_and(|extension| extension == "safetensors") {
            widen_file(&from, &to);
        } else {
            std::fs::copy(from, to).unwrap();
        }
    }
    dir
}

fn widen_file(from: &Path, to: &Path) {
    let bytes = std::fs::read(from).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let widened: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = file
        .iter()
        .map(|(name, tensor)| {
            let (shape, data) = (tensor.shape().to_vec(), tensor.data());
            if tensor.dtype() != Dtype::BF16 {
                return (name.to_owned(), tensor.dtype(), shape, data.to_vec());
            }
            let data = data.as_chunks().0.iter().flat_map(|[low, high]| [0, 0, *low, *high]).collect();
            (name.to_owned(), Dtype::F32, shape, data)
        })
        .collect();
    let views = widened.iter().map(|(name, dtype, shape, data)| {
        (name.as_str(), TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    safetensors::serialize_to_file(views, None, to).unwrap();
}

#[test]
fn logits_in_f32_are_within_1e_5_of_the_float64_goldens_on_every_isa() {
    for family in FAMILIES {
        let (golden, dir) = (golden(family), in_f32(family));
        for isa in Isa::available() {
            let backend = backend(&ModelSource::Dir(dir.path().to_owned())).with_isa(isa);
            let worst = worst_error(&golden, backend);
            assert!(worst < 1e-5, "{family} on {}: {worst:e}", isa.name());
            println!("{family} on {}: largest error {worst:.1e}", isa.name());
        }
    }
}

/// Rounding inputs to bf16 costs 2^-9 of each at most; logits here are of order one.
#[test]
fn logits_in_bf16_are_near_the_float64_goldens() {
    let family = "qwen3";
    let worst = worst_error(&golden(family), backend(&ModelSource::Dir(family_dir(family))));
    assert!((1e-5..3e-2).contains(&worst), "{worst:e}");
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
