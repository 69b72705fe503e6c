//! `--quantize`: as independent of batch, cuts, threads and instruction sets as everything else; smaller; and
//! how much of a model is left.

use std::num::NonZeroUsize;

use keyway_kernels::compute::Compute;
use keyway_kernels::isa::Isa;

use super::invariance::{side_by_side, tokens};
use super::parity::golden;
use super::*;

const QUANTIZED: [Quantize; 2] = [Quantize::Int8, Quantize::Int4];

fn load(source: &ModelSource, quantize: Quantize) -> LoadedModel {
    LoadedModel::load_quantized(source, quantize).unwrap()
}

fn quantized(source: &ModelSource, quantize: Quantize) -> CpuBackend {
    load(source, quantize).into_backend(KvLayout { block_size: 16, num_blocks: NUM_BLOCKS }).unwrap()
}

#[test]
fn neither_batch_nor_cuts_nor_threads_nor_the_instruction_set_change_a_bit() {
    let prompts: Vec<Vec<u32>> = [(300, 7), (41, 11), (3, 13)].map(|(len, step)| tokens(len, step)).into();
    let cuts = [vec![250, 1, 7], vec![40, 1], vec![1]];
    for source in sources() {
        for quantize in QUANTIZED {
            let alone = |prompt: &Vec<u32>| bits(&run_whole(&mut quantized(&source, quantize), prompt));
            let expected: Vec<Vec<u32>> = prompts.iter().map(alone).collect();
            for isa in Isa::available() {
                let compute = Compute::new(NonZeroUsize::new(3).unwrap()).with_isa(isa);
                let mut backend = quantized(&source, quantize).with_compute(compute);
                let mut pool = Pool::ascending(&backend);
                let results = side_by_side(&mut backend, &mut pool, &prompts, &cuts);
                assert_eq!(results, expected, "{source} in {quantize} on {}", isa.name());
            }
        }
    }
}

#[test]
fn the_numerics_id_and_the_memory_follow_the_option() {
    for family in ["llama", "qwen3", "mixtral"] {
        let source = ModelSource::Dir(family_dir(family));
        let [stored, int8, int4] =
            [Quantize::None, Quantize::Int8, Quantize::Int4].map(|quantize| load(&source, quantize).info);
        assert!(int8.numerics_id.starts_with("cpu-int8-k") && int4.numerics_id.starts_with("cpu-int4-k"));
        assert!(stored.numerics_id.starts_with("cpu-f32-k"));
        assert!(int4.weight_bytes < int8.weight_bytes && int8.weight_bytes < stored.weight_bytes);
    }
}

/// Of the goldens' positions, in how many the likeliest token of float64 is still the likeliest, and how far
/// logits are off in units of their own deviation. The goldens' weights are random: their logits are far
/// closer together than a trained model's.
#[test]
fn a_quantized_model_still_chooses_the_goldens_tokens() {
    for (quantize, agreement_min, error_max) in [(Quantize::Int8, 0.9, 0.05), (Quantize::Int4, 0.6, 0.4)] {
        let (mut positions, mut agreeing) = (0, 0);
        for family in FAMILIES {
            let golden = golden(family);
            let mut backend = quantized(&ModelSource::Dir(family_dir(family)), quantize);
            let (mut pool, mut sequence) = (Pool::ascending(&backend), Sequence::new(&backend));
            let vocab = backend.vocab_size();
            let mut error = 0.0;
            for (position, exact) in golden.positions.iter().zip(golden.logits.chunks(vocab)) {
                let tokens = &golden.ids[sequence.len()..=*position as usize];
                let logits = sequence.run(&mut backend, &mut pool, tokens);
                let logits: Vec<f64> = logits.iter().map(|logit| f64::from(*logit)).collect();
                positions += 1;
                agreeing += usize::from(largest(&logits) == largest(exact));
                let off: Vec<f64> = logits.iter().zip(exact).map(|(l, e)| l - e).collect();
                error += deviation(&off) / deviation(exact) / golden.positions.len() as f64;
            }
            println!("{family} in {quantize}: logits off by {error:.3} of their deviation");
            assert!(error < error_max, "{family} in {quantize}: {error}");
        }
        println!("{quantize}: {agreeing} of {positions} likeliest tokens agree");
        assert!(agreeing as f64 >= agreement_min * f64::from(positions), "{quantize}: {agreeing}");
    }
}

fn largest(logits: &[f64]) -> Option<usize> {
    (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b]))
}

fn deviation(values: &[f64]) -> f64 {
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    (values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / values.len() as f64).sqrt()
}
