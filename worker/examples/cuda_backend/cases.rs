//! What must hold on a GPU: logits are the CPU backend's within bf16, no bit depends on the batch, and no
//! token on whether steps run ahead.

use std::ops::Range;

use keyway_kernels::cuda::Device;
use keyway_worker::backend::Backend;
use keyway_worker::model::{CudaModel, KvLayout, LoadedModel, Quantize};
use serde_json::{Value, json};

use crate::ahead::same_tokens;
use crate::driver::Driver;
use crate::models::{MODELS, VOCAB};
use crate::ranks;
use crate::shapes::{LLAMA_8B, QWEN3_30B, VOCAB as VOCAB_PUBLISHED};

/// All of them but those of ranks.
pub(crate) const NAMES: &[&str] =
    &["backend_logits", "backend_bits_small", "backend_ahead", "backend_bits_8b", "backend_bits_30b_layers"];

const LAYOUT: KvLayout = KvLayout { block_size: 16, num_blocks: 1009 };
/// Root of the mean squared difference over the deviation of the CPU's logits: some ten roundings of 2^-9 a
/// layer, of two layers.
const TOLERANCE: f64 = 0.03;
/// Tokens that follow each prompt.
const DECODED: usize = 8;

/// Runs one; `device` opens the device anew for each model.
pub(crate) fn run<D: Device + Send>(
    name: &str,
    device: impl Fn() -> Result<D, String>,
) -> Result<Value, String> {
    let (compared, worst) = match name {
        "backend_logits" => logits(device)?,
        "backend_bits_small" => {
            let mut compared = 0;
            for variant in MODELS {
                let model = LoadedModel::synthetic(&variant.config()).map_err(text)?;
                let model = model.onto(device()?, Quantize::None).map_err(text)?;
                compared += bits(model, VOCAB)?;
            }
            (compared, 0.0)
        }
        "backend_ahead" => {
            let mut compared = 0;
            for variant in MODELS {
                let model = LoadedModel::synthetic(&variant.config()).map_err(text)?;
                let model = model.onto(device()?, Quantize::None).map_err(text)?;
                compared += same_tokens(model, LAYOUT, VOCAB)?;
            }
            (compared, 0.0)
        }
        "backend_bits_8b" => {
            let model = CudaModel::synthetic(LLAMA_8B.config, device()?, Quantize::None).map_err(text)?;
            (bits(model, VOCAB_PUBLISHED)?, 0.0)
        }
        // Its products are the whole model's; four layers take seconds to make.
        "backend_bits_30b_layers" => {
            let config = QWEN3_30B.config.replace(r#""num_hidden_layers": 48"#, r#""num_hidden_layers": 4"#);
            let model = CudaModel::synthetic(&config, device()?, Quantize::None).map_err(text)?;
            (bits(model, VOCAB_PUBLISHED)?, 0.0)
        }
        _ if ranks::NAMES.contains(&name) => (ranks::run(name, device)?, 0.0),
        _ => return Err(format!("no case {name}")),
    };
    Ok(json!({ "case": name, "compared": compared, "worst": worst }))
}

/// Logits of a prompt in two pieces and of single tokens, of every small model.
fn logits<D: Device + Send>(device: impl Fn() -> Result<D, String>) -> Result<(usize, f64), String> {
    let (mut compared, mut worst) = (0, 0.0_f64);
    let singles = (592..600).map(|at| at..at + 1);
    let pieces: Vec<Range<usize>> = [0..470, 470..592].into_iter().chain(singles).collect();
    for variant in MODELS {
        let model = || LoadedModel::synthetic(&variant.config()).map_err(text);
        let mut cpu = Driver::new(model()?.into_backend(LAYOUT).map_err(text)?, 3);
        let on_gpu = model()?.onto(device()?, Quantize::None).map_err(text)?;
        let mut gpu = Driver::new(on_gpu.into_backend(LAYOUT).map_err(text)?, 5);
        let prompt: Vec<u32> = (0..600).map(|i| i * 7 % VOCAB).collect();
        let (mut here, mut there) = ([gpu.sequence()], [cpu.sequence()]);
        let mut shares = Vec::new();
        for piece in &pieces {
            let found = gpu.step(&mut here, &[&prompt[piece.clone()]])?;
            let exact = cpu.step(&mut there, &[&prompt[piece.clone()]])?;
            shares.push(distance(&found[0], &exact[0]) / TOLERANCE);
            compared += found[0].len();
        }
        shares.sort_by(f64::total_cmp);
        // Where a router is torn between two experts rounding decides: a row in four may be further off.
        let counted = if variant.has_experts() { shares.len() * 3 / 4 } else { shares.len() - 1 };
        if shares.iter().any(|share| share.is_nan()) || shares[counted] > 1.0 {
            return Err(format!(
                "{}: logits are off by these shares of what bf16 explains: {shares:.2?}",
                variant.name
            ));
        }
        worst = worst.max(shares[counted]);
    }
    Ok((compared, worst))
}

/// Prompts alone and whole, and side by side in pieces and other blocks: every logit's bits, of the prompts'
/// ends and of greedily chosen tokens behind them.
fn bits<D: Device + Send>(model: CudaModel<D>, vocab: u32) -> Result<usize, String> {
    let prompts: Vec<Vec<u32>> = [(300, 7), (41, 11), (700, 13), (16, 17)]
        .map(|(len, step)| (0..len).map(|i| i * step % vocab).collect())
        .into();
    let mut driver = Driver::new(model.into_backend(LAYOUT).map_err(text)?, 1);
    let mut expected = Vec::new();
    for prompt in &prompts {
        expected.push(generate(&mut driver, std::slice::from_ref(prompt), prompt.len())?.remove(0));
    }
    let together = generate(&mut driver, &prompts, 96)?;
    let mut compared = 0;
    for (i, (alone, beside)) in expected.iter().zip(&together).enumerate() {
        for (t, (a, b)) in alone.iter().zip(beside).enumerate() {
            let differs = a.iter().zip(b).position(|(a, b)| a.to_bits() != b.to_bits() || a.is_nan());
            if let Some(at) = differs {
                let (a, b) = (a[at], b[at]);
                return Err(format!("prompt {i}, token {t}: logit {at} is {a:e} alone and {b:e} in a batch"));
            }
            compared += a.len();
        }
    }
    Ok(compared)
}

/// Logits behind each prompt, taken in pieces of `piece` side by side, and behind each of the tokens that
/// follow.
pub(crate) fn generate<B: Backend>(
    driver: &mut Driver<B>,
    prompts: &[Vec<u32>],
    piece: usize,
) -> Result<Vec<Vec<Vec<f32>>>, String> {
    let mut sequences = vec![driver.sequence(); prompts.len()];
    let mut rows = vec![Vec::new(); prompts.len()];
    // Every step one piece of each prompt that is not done, or the likeliest token behind it.
    let mut at = vec![0; prompts.len()];
    while rows.iter().any(|rows: &Vec<Vec<f32>>| rows.len() <= DECODED) {
        let next: Vec<Vec<u32>> = (0..prompts.len())
            .map(|i| match rows[i].last() {
                Some(row) => vec![keyway_kernels::scalar::argmax(row) as u32],
                None => prompts[i][at[i]..(at[i] + piece).min(prompts[i].len())].to_vec(),
            })
            .collect();
        let tokens: Vec<&[u32]> = next.iter().map(Vec::as_slice).collect();
        let logits = driver.step(&mut sequences, &tokens)?;
        for (i, row) in logits.into_iter().enumerate() {
            at[i] += next[i].len();
            if at[i] >= prompts[i].len() {
                rows[i].push(row);
            }
        }
    }
    for rows in &mut rows {
        rows.truncate(DECODED + 1);
    }
    Ok(rows)
}

fn distance(found: &[f32], exact: &[f32]) -> f64 {
    let mean = exact.iter().map(|x| f64::from(*x)).sum::<f64>() / exact.len() as f64;
    let variance = exact.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>();
    let error = found.iter().zip(exact).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum::<f64>();
    (error / variance).sqrt()
}

pub(crate) fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}
