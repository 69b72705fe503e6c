//! Sampling: that the token drawn is the one at which the float64 distribution's running sum passes the
//! hash's number, after every cut; the log-probability; scores. Of rows that are hard on the blocks which
//! share them, that it is the one that whole numbers say.

mod shared_rows;

use keyway_kernels::cuda::Slice;
use keyway_kernels::cuda::sample::{NOT_WANTED, Parameters, SCORE_WORDS, Score, launch, score, work_words};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::{Lab, values};

/// Of the distribution: what f32 exponentials, and weights in units of 2^-40, may shift a boundary by.
const SHIFT: f64 = 2e-6;

pub(crate) fn check(lab: &mut Lab<'_>) -> Result<(), String> {
    let plain = Parameters { temperature: 0.8, top_p: 1.0, min_p: 0.0, top_k: 0, seed: 42, position: 0 };
    let kinds = [
        plain,
        Parameters { temperature: 0.0, ..plain },
        Parameters { top_k: 3, ..plain },
        Parameters { top_p: 0.9, seed: u64::MAX - 5, ..plain },
        Parameters { top_p: 0.6, top_k: 40, temperature: 1.7, ..plain },
        Parameters { min_p: 0.2, ..plain },
        Parameters { top_k: 1, ..plain },
        Parameters { top_p: 1e-6, position: 1 << 33, ..plain },
    ];
    // A row of 4,500 is shared by blocks. Narrow rows have more logits side by side than are sorted at once.
    let mut rows = vec![(1, 4.0), (5, 4.0), (1500, 4.0), (4500, 4.0), (4500, 1e-3)];
    if lab.is_large() {
        rows.extend([(128_256, 4.0), (151_936, 4.0), (151_936, 12.0), (151_936, 1e-3)]);
    }
    for (vocabulary, width) in rows {
        draws(lab, vocabulary, &kinds, width)?;
        scores(lab, vocabulary, width)?;
        lab.clear();
    }
    shared_rows::check(lab)
}

/// Rows with ties, infinities, both zeros and NaN; rows that nobody asks about.
fn scores(lab: &mut Lab<'_>, vocabulary: usize, width: f32) -> Result<(), String> {
    const WANTED: [u32; 4] = [20, 0, NOT_WANTED, 5];
    let logit = |(i, v): (usize, &half::bf16)| match i % 97 {
        3 => f32::NEG_INFINITY,
        7 => -0.0,
        11 => 0.0,
        13 if vocabulary > 10 => f32::NAN,
        _ => v.to_f32().clamp(-9.0, 9.0) * (width / 4.0),
    };
    let logits: Vec<f32> = values(21, WANTED.len() * vocabulary).iter().enumerate().map(logit).collect();
    let work = lab.poisoned(work_words(WANTED.len(), vocabulary))?;
    scored(lab, &logits, vocabulary, &WANTED, work)
}

/// Sums in float64, ranks and the likeliest by sorting.
fn scored(
    lab: &mut Lab<'_>,
    logits: &[f32],
    vocabulary: usize,
    wanted_of: &[u32],
    work: Slice<u32>,
) -> Result<(), String> {
    let count = wanted_of.len();
    let tokens: Vec<u32> = (0..count as u32).map(|row| row * 37 % vocabulary as u32).collect();
    let there = lab.poisoned(count * SCORE_WORDS)?;
    let before = lab.download(there)?;
    let (rows, wanted, drawn) = (lab.upload(logits)?, lab.upload(wanted_of)?, lab.upload(&tokens)?);
    lab.launch(score(rows, vocabulary, wanted, work, drawn, there))?;
    let words = lab.download(there)?;
    for (i, (row, words)) in logits.chunks(vocabulary).zip(words.chunks(SCORE_WORDS)).enumerate() {
        if wanted_of[i] == NOT_WANTED {
            lab.same("a row that is not wanted", words, &before[i * SCORE_WORDS..][..SCORE_WORDS])?;
            continue;
        }
        let score = Score::of(words, (wanted_of[i] as usize).min(vocabulary));
        let mut order: Vec<u32> = (0..vocabulary as u32).filter(|id| !row[*id as usize].is_nan()).collect();
        let at = |id: u32| row[id as usize];
        order.sort_by(|a, b| at(*b).partial_cmp(&at(*a)).expect("numbers").then(a.cmp(b)));
        order.extend((0..vocabulary as u32).filter(|id| at(*id).is_nan()));
        order.truncate(score.top.len());
        let own = row[tokens[i] as usize];
        let ids: Vec<u32> = score.top.iter().map(|(id, _)| *id).collect();
        lab.same("the likeliest", &ids, &order)?;
        let values: Vec<f32> = score.top.iter().map(|(_, logit)| *logit).collect();
        lab.same("their logits", &values, &order.iter().map(|id| at(*id)).collect::<Vec<f32>>())?;
        let rank = row.iter().filter(|logit| **logit >= own).count() as u32;
        lab.same("the rank", &[score.rank], &[rank])?;
        let maximum = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        lab.same("the token's logit and the largest", &[score.logit, score.maximum], &[own, maximum])?;
        // What is no number weighs nothing, nor does anything beside a largest that is not finite.
        let weights = row.iter().map(|logit| f64::from(logit - maximum).exp());
        let sum: f64 = weights.filter(|weight| !weight.is_nan()).sum();
        let total = score.total as f64 / (1u64 << 40) as f64;
        lab.close("the sum of weights", &[total], &[sum], |_| sum * 1e-6 + 1e-12)?;
    }
    Ok(())
}

fn draws(lab: &mut Lab<'_>, vocabulary: usize, kinds: &[Parameters], width: f32) -> Result<(), String> {
    let rounds = if vocabulary > 1000 { 1 } else { 4 };
    let by: Vec<Parameters> = (0..rounds as u64)
        .flat_map(|i| kinds.iter().map(move |k| Parameters { position: k.position + 7 * i, ..*k }))
        .collect();
    let mut logits: Vec<f32> = values(3, by.len() * vocabulary).iter().map(|v| v.to_f32()).collect();
    for (i, logit) in logits.iter_mut().enumerate() {
        // bf16 values repeat, so there are ties; outliers are cut, or they would win always; a few are
        // impossible.
        let cut = logit.clamp(-4.0, 4.0) * (width / 4.0);
        *logit = if i % 17 == 3 && vocabulary > 4 { f32::NEG_INFINITY } else { cut };
    }
    let device = lab.upload(&logits)?;
    let words: Vec<u32> = by.iter().flat_map(Parameters::words).collect();
    let parameters = lab.upload(&words)?;
    let (tokens, logprobs) = (lab.poisoned(by.len())?, lab.poisoned(by.len())?);
    let work = lab.poisoned(work_words(by.len(), vocabulary))?;
    lab.launch(launch(device, vocabulary, parameters, work, tokens, logprobs))?;
    let (tokens, logprobs) = (lab.download(tokens)?, lab.download(logprobs)?);
    for (row, by) in by.iter().enumerate() {
        let logits = &logits[row * vocabulary..][..vocabulary];
        expect(lab, logits, by, tokens[row])
            .map_err(|fault| format!("{vocabulary} ids, row {row}, {by:?}: {fault}"))?;
        let max = logits.iter().copied().fold(f32::MIN, f32::max);
        let sum: f64 = logits.iter().map(|l| f64::from(l - max).exp()).sum();
        let exact = f64::from(logits[tokens[row] as usize] - max) - sum.ln();
        lab.close("the log-probability", &logprobs[row..=row], &[exact], |_| 2e-6 + exact.abs() * 1e-6)?;
    }
    // A row alone is drawn as among others.
    let last = by.len() - 1;
    let (alone, logprob) = (lab.poisoned(1)?, lab.poisoned(1)?);
    let own = lab.upload(&words[last * 8..])?;
    let work = lab.poisoned(work_words(1, vocabulary))?;
    lab.launch(launch(device.starting_at(last * vocabulary), vocabulary, own, work, alone, logprob))?;
    let (alone, logprob) = (lab.download(alone)?, lab.download(logprob)?);
    lab.same("a row alone", &alone, &tokens[last..])?;
    lab.same("a row alone, its log-probability", &logprob, &logprobs[last..])
}

/// Errs unless `token` is the choice, in float64, or so near a boundary that f32 may differ.
fn expect(lab: &mut Lab<'_>, logits: &[f32], by: &Parameters, token: u32) -> Result<(), String> {
    let mut order: Vec<usize> = (0..logits.len()).filter(|i| logits[*i] > f32::NEG_INFINITY).collect();
    let likelier = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
    order.sort_by(likelier);
    let best = order[0];
    if by.temperature < 1e-5 {
        return lab.same("the most likely token", &[token], &[best as u32]);
    }
    let weight = |i: usize| (f64::from(logits[i] - logits[best]) / f64::from(by.temperature)).exp();
    order.retain(|i| weight(*i) >= f64::from(by.min_p));
    let few = by.top_k > 0 && (by.top_k as usize) < order.len();
    if few {
        order.truncate(by.top_k as usize);
    }
    if by.top_p < 1.0 {
        let wanted = f64::from(by.top_p) * order.iter().map(|i| weight(*i)).sum::<f64>();
        let mut sum = 0.0;
        let last = order.iter().position(|i| {
            sum += weight(*i);
            sum >= wanted
        });
        order.truncate(last.map_or(order.len(), |last| last + 1));
    }
    if !few && by.top_p >= 1.0 {
        order.sort_unstable();
    }
    let total: f64 = order.iter().map(|i| weight(*i)).sum();
    let bits = xxh3_64_with_seed(&by.position.to_le_bytes(), by.seed);
    let number = (bits >> 11) as f64 / (1u64 << 53) as f64;
    let Some(place) = order.iter().position(|i| *i == token as usize) else {
        return Err(format!("{token} was cut off"));
    };
    let before: f64 = order[..place].iter().map(|i| weight(*i) / total).sum();
    let after = before + weight(order[place]) / total;
    let middle = f64::midpoint(before, after);
    lab.close("where the number falls", &[number], &[middle], |_| (after - before) / 2.0 + SHIFT)
}
