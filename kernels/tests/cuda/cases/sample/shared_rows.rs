//! Rows that many blocks share, each hard on them in its own way, all in one launch, with other settings for
//! each: ties over the borders between blocks, lists of the likeliest that are too long or too short, rows of
//! which hardly anything may come. The expected ids are found in whole numbers, as the worker's sampler does.

use keyway_kernels::cuda::sample::{Parameters, launch, work_words};
use keyway_kernels::scalar::exp;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::super::{Lab, values};
use super::scored;

/// No multiple of a packet, so that rows and parts begin anywhere in one. Alone a row has 20 parts, among the
/// others 15.
const VOCABULARY: usize = 40_003;
/// Ids of a part of a row alone.
const PART: usize = VOCABULARY.div_ceil(20).next_multiple_of(4);
/// What a list of the likeliest holds.
const LISTED: u32 = 2048;
const UNIT: f32 = (1u64 << 40) as f32;

/// A row, how it is drawn from, and how long the list of its likeliest may be, if the blocks make one.
struct Hard {
    logits: Vec<f32>,
    by: Parameters,
    listed: std::ops::Range<u32>,
}

fn hard_rows() -> Vec<Hard> {
    let by = Parameters { temperature: 0.8, top_p: 1.0, min_p: 0.0, top_k: 0, seed: 7, position: 0 };
    let random: Vec<f32> = values(5, VOCABULARY).iter().map(|v| v.to_f32().clamp(-4.0, 4.0)).collect();
    let of = |logit: &dyn Fn(usize) -> f32| (0..VOCABULARY).map(logit).collect::<Vec<f32>>();
    let but =
        |few: &[usize], rest: f32| of(&|id| if few.contains(&id) { 2.0 - id as f32 * 1e-5 } else { rest });
    // So many of equal logits to both sides of each border that a cut falls among them.
    let borders = of(&|id| if (id + 3) % PART < 6 { 3.0 } else { random[id].min(2.0) });
    let side_by_side = of(&|id| if (100..3100).contains(&id) { 5.0 - id as f32 * 1e-4 } else { random[id] });
    // Not one bit apart, and so few that all of them are a few bins.
    let spread = of(&|id| ((id * 7919) % VOCABULARY) as f32 * (8.0 / VOCABULARY as f32));
    let narrow = spread.iter().map(|logit| logit * 1e-4).collect::<Vec<f32>>();
    let ten: Vec<usize> = (0..10).map(|i| i * 4001 + i % 3).collect();
    let masked = but(&ten, f32::NEG_INFINITY);
    let unlikely = but(&ten, -20.0);
    let strange = of(&|id| match id % 5 {
        0 => f32::NAN,
        1 => -0.0,
        2 => 0.0,
        _ => f32::NEG_INFINITY,
    });
    let too_many = LISTED + 1..u32::MAX;
    let rows = [
        (random.clone(), Parameters { top_k: 50, top_p: 0.95, ..by }, 51..400),
        (random.clone(), Parameters { top_p: 0.3, temperature: 0.25, ..by }, 150..LISTED),
        (borders.clone(), Parameters { top_k: 50, ..by }, 51..400),
        (borders, Parameters { top_k: 0, top_p: 0.002, ..by }, 100..LISTED),
        (vec![0.5; VOCABULARY], Parameters { top_k: 100, top_p: 0.5, ..by }, too_many.clone()),
        (side_by_side.clone(), Parameters { top_k: 60, top_p: 0.9, ..by }, too_many.clone()),
        (side_by_side, Parameters { top_p: 0.7, ..by }, too_many),
        (spread.clone(), Parameters { top_p: 0.9, ..by }, 100..LISTED),
        (spread, Parameters { top_k: 3000, top_p: 0.99, ..by }, 100..LISTED),
        (narrow, Parameters { top_p: 0.9, ..by }, 100..LISTED),
        (masked.clone(), Parameters { top_k: 50, ..by }, 10..11),
        (masked.clone(), Parameters { top_k: 10, top_p: 0.8, ..by }, 10..11),
        (masked, Parameters { top_k: 9, position: 3, ..by }, 10..11),
        (unlikely.clone(), Parameters { top_k: 40, min_p: 0.1, top_p: 0.9, ..by }, 10..11),
        (unlikely, Parameters { temperature: 1.3, min_p: 0.3, ..by }, 0..1),
        (strange, Parameters { top_k: 20, top_p: 0.9, temperature: 1.0, ..by }, 21..LISTED),
        (random, Parameters { temperature: 0.0, top_k: 5, ..by }, 0..1),
    ];
    let row = |(i, (logits, by, listed)): (usize, (_, Parameters, _))| {
        let by = Parameters { seed: by.seed + i as u64, position: by.position + 11 * i as u64, ..by };
        Hard { logits, by, listed }
    };
    rows.into_iter().enumerate().map(row).collect()
}

pub(super) fn check(lab: &mut Lab<'_>) -> Result<(), String> {
    let rows = hard_rows();
    let logits: Vec<f32> = rows.iter().flat_map(|row| row.logits.iter().copied()).collect();
    let words: Vec<u32> = rows.iter().flat_map(|row| row.by.words()).collect();
    let expected: Vec<u32> = rows.iter().map(|row| chosen(&row.logits, &row.by)).collect();
    let (device, by) = (lab.upload(&logits)?, lab.upload(&words)?);
    let (tokens, logprobs) = (lab.poisoned(rows.len())?, lab.poisoned(rows.len())?);
    let work = lab.poisoned(work_words(rows.len(), VOCABULARY))?;
    let launches = launch(device, VOCABULARY, by, work, tokens, logprobs);
    lab.launch(launches.clone())?;
    let (first, first_logprobs) = (lab.download(tokens)?, lab.download(logprobs)?);
    lab.same("what rows draw that many blocks share", &first, &expected)?;
    // As a recording does, over what the scores before have left.
    let wanted: Vec<u32> = (0..rows.len() as u32).map(|i| [20, 1, 7][i as usize % 3]).collect();
    scored(lab, &logits, VOCABULARY, &wanted, work)?;
    lab.launch(launches)?;
    let (again, again_logprobs) = (lab.download(tokens)?, lab.download(logprobs)?);
    lab.same("the same again", &again, &expected)?;
    lab.same("the same again, log-probabilities", &again_logprobs, &first_logprobs)?;
    for (i, row) in rows.iter().enumerate() {
        let (token, logprob) = (lab.poisoned(1)?, lab.poisoned(1)?);
        let (own, own_by) = (device.part(i * VOCABULARY, VOCABULARY), by.part(i * 8, 8));
        lab.launch(launch(own, VOCABULARY, own_by, work, token, logprob))?;
        let (token, logprob) = (lab.download(token)?, lab.download(logprob)?);
        lab.same("a row by more blocks", &token, &expected[i..=i])?;
        lab.same("its log-probability", &logprob, &first_logprobs[i..=i])?;
        // The second word of the work says how many elements were listed.
        let listed = lab.download(work.part(0, 2))?[1];
        if !row.listed.contains(&listed) {
            return Err(format!("row {i}, {:?}: {listed} are listed, not {:?}", row.by, row.listed));
        }
    }
    lab.clear();
    Ok(())
}

/// The sampler's choice, in its whole numbers.
fn chosen(row: &[f32], by: &Parameters) -> u32 {
    let best = (0..row.len()).filter(|i| !row[*i].is_nan()).fold(None, |best: Option<usize>, i| match best {
        Some(best) if row[best] >= row[i] => Some(best),
        _ => Some(i),
    });
    let best = best.expect("a number");
    if by.temperature < 1e-5 {
        return best as u32;
    }
    let least = ((by.min_p * UNIT) as u64).max(1);
    let weight = |i: usize| (exp((row[i] - row[best]) / by.temperature) * UNIT) as u64;
    let possible = (0..row.len()).filter(|i| row[*i] > f32::NEG_INFINITY).map(|i| (i, weight(i)));
    let mut kept: Vec<(usize, u64)> = possible.filter(|(_, weight)| *weight >= least).collect();
    let few = by.top_k > 0 && (by.top_k as usize) < kept.len();
    if few || by.top_p < 1.0 {
        let value = |i: usize| row[i];
        kept.sort_by(|a, b| value(b.0).partial_cmp(&value(a.0)).expect("numbers").then(a.0.cmp(&b.0)));
    }
    if few {
        kept.truncate(by.top_k as usize);
    }
    let total = |kept: &[(usize, u64)]| kept.iter().map(|(_, weight)| weight).sum::<u64>();
    if by.top_p < 1.0 {
        let wanted = (f64::from(by.top_p) * total(&kept) as f64) as u64;
        let mut sum = 0;
        let last = kept.iter().position(|(_, weight)| {
            sum += weight;
            sum >= wanted
        });
        kept.truncate(last.map_or(kept.len(), |last| last + 1));
    }
    let number = xxh3_64_with_seed(&by.position.to_le_bytes(), by.seed) >> 11 << 11;
    let mut left = ((u128::from(number) * u128::from(total(&kept))) >> 64) as u64;
    for (id, weight) in kept {
        match left.checked_sub(weight) {
            Some(rest) => left = rest,
            None => return id as u32,
        }
    }
    best as u32
}
