//! Steps that run ahead, as the engine has them: tokens are drawn on the device and are the next step's
//! input, which is started before the host knows them.

use std::time::Instant;

use keyway_kernels::cuda::Device;
use keyway_worker::backend::{Draw, PENDING, Parameters};
use keyway_worker::model::{CudaBackend, CudaModel};

use crate::cases::text;
use crate::driver::{Driver, Sequence};

/// When a step is started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum When {
    /// Once the tokens of the one before are known.
    Waiting,
    /// While the one before runs.
    Ahead,
}

/// How every row is drawn at a temperature: seeds differ by row.
fn draws(sequences: &[Sequence], new: &[Vec<u32>], temperature: f32) -> Vec<Option<Draw<'static>>> {
    let draw = |(i, (sequence, new)): (usize, (&Sequence, &Vec<u32>))| {
        let position = (sequence.len + new.len()) as u64;
        Some(
            Parameters { temperature, top_p: 0.95, min_p: 0.0, top_k: 50, seed: i as u64 + 1, position }
                .into(),
        )
    };
    sequences.iter().zip(new).enumerate().map(draw).collect()
}

fn start<D: Device + Send>(
    driver: &mut Driver<CudaBackend<D>>,
    sequences: &mut [Sequence],
    tokens: &[Vec<u32>],
    temperature: f32,
) -> Result<(), String> {
    let draws = draws(sequences, tokens, temperature);
    let slices: Vec<&[u32]> = tokens.iter().map(Vec::as_slice).collect();
    driver.start(sequences, &slices, &draws)
}

/// Draws `count` tokens behind each sequence, the first step being `first`; each step's tokens, and
/// microseconds from one step's end to the next one's.
pub(crate) fn decode<D: Device + Send>(
    driver: &mut Driver<CudaBackend<D>>,
    sequences: &mut [Sequence],
    first: &[Vec<u32>],
    (count, temperature): (usize, f32),
    when: When,
) -> Result<(Vec<Vec<u32>>, Vec<f64>), String> {
    let (mut steps, mut times) = (Vec::with_capacity(count), Vec::with_capacity(count));
    let pending: Vec<Vec<u32>> = (0..sequences.len() as u32).map(|row| vec![PENDING | row]).collect();
    start(driver, sequences, first, temperature)?;
    let mut ended = Instant::now();
    for i in 0..count {
        let more = i + 1 < count;
        if more && when == When::Ahead {
            start(driver, sequences, &pending, temperature)?;
        }
        let tokens = driver.finish()?;
        times.push(ended.elapsed().as_secs_f64() * 1e6);
        ended = Instant::now();
        if more && when == When::Waiting {
            let known: Vec<Vec<u32>> = tokens.iter().map(|token| vec![*token]).collect();
            start(driver, sequences, &known, temperature)?;
        }
        steps.push(tokens);
    }
    Ok((steps, times))
}

/// Errs unless running ahead gives the tokens that waiting does, greedily and drawn; how many were compared.
pub(crate) fn same_tokens<D: Device + Send>(
    model: CudaModel<D>,
    layout: keyway_worker::model::KvLayout,
    vocab: u32,
) -> Result<usize, String> {
    const COUNT: usize = 24;
    let prompts: Vec<Vec<u32>> = [(40, 7), (9, 11), (71, 13), (16, 17)]
        .map(|(len, step)| (0..len).map(|i| i * step % vocab).collect())
        .into();
    let mut driver = Driver::new(model.into_backend(layout).map_err(text)?, 3);
    let mut compared = 0;
    for temperature in [0.0, 0.9] {
        let mut said = Vec::new();
        for when in [When::Waiting, When::Ahead] {
            let mut sequences = vec![driver.sequence(); prompts.len()];
            let how = (COUNT, temperature);
            said.push(decode(&mut driver, &mut sequences, &prompts, how, when)?.0);
        }
        if let Some(step) = said[0].iter().zip(&said[1]).position(|(a, b)| a != b) {
            let (a, b) = (&said[0][step], &said[1][step]);
            return Err(format!("temperature {temperature}, step {step}: {a:?} waiting, {b:?} ahead"));
        }
        compared += COUNT * prompts.len();
    }
    Ok(compared)
}
