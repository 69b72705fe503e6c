//! What is timed: each operation at the shapes of the roofline table, on random data larger than the
//! second-level cache, as one captured graph. Says the bytes and operations that no form of it can avoid;
//! judging them is `kernels/check`'s.

pub(crate) mod attention;
mod experts;
pub(crate) mod product;

use keyway_kernels::cuda::gpu::Gpu;
use keyway_kernels::cuda::matmul::{Unit, Weights};
use keyway_kernels::cuda::paged_attention::{HeadKind, KvType, Pages};
use keyway_kernels::cuda::rules::{self, RowRules, Rule};
use keyway_kernels::cuda::sample::{self, Parameters, SCORE_WORDS};
use keyway_kernels::cuda::{Device, Launch, Slice, elementwise, probe, rms_norm, rope};
use keyway_kernels::rope::Pairing;

use self::attention::{Attention, Decode};
use self::product::Product;
use crate::cases::{Lab, Size};

/// All of them. The first two are the ceilings that the rest are shares of.
pub(crate) const NAMES: &[&str] = &[
    "copy",
    "matrix_peak",
    "decode_32x4096_page8",
    "decode_32x4096_page16",
    "decode_32x4096_page32",
    "decode_32x4096_page64",
    "decode_32x4096_page128",
    "decode_32x4096_page256",
    "decode_32x4096_fp8",
    "decode_1x1024",
    "decode_1x32768",
    "decode_latent_32x4096",
    "decode_latent_1x32768",
    "prefill_2048",
    "prefill_8192",
    "matmul_bf16_1x14336x4096",
    "matmul_bf16_16x14336x4096",
    "matmul_bf16_64x14336x4096",
    "matmul_int8_16x14336x4096",
    "matmul_int4_16x14336x4096",
    "matmul_fp8_16x14336x4096",
    "matmul_mxfp4_16x14336x4096",
    "matmul_int8_1x14336x4096",
    "matmul_int4_1x14336x4096",
    "matmul_int4_1x4096x4096",
    "matmul_int4_16x4096x14336",
    "matmul_int8_64x14336x4096",
    "matmul_int4_64x14336x4096",
    "matmul_bf16_8192x8192x8192",
    "matmul_sm90_1x14336x4096",
    "matmul_sm90_64x14336x4096",
    "matmul_sm90_8192x8192x8192",
    "matmul_sm90_clustered_8192x8192x8192",
    "matmul_sm90_2048x14336x4096",
    "matmul_sm90_clustered_2048x14336x4096",
    "moe_1",
    "moe_8",
    "moe_64",
    "moe_1024",
    "moe_4096",
    "moe_sm90_1",
    "moe_sm90_8",
    "moe_sm90_64",
    "moe_sm90_1024",
    "moe_sm90_4096",
    "moe_fp8_1",
    "moe_fp8_64",
    "moe_sm90_32",
    "moe_pair_1",
    "moe_pair_8",
    "moe_sm90_pair_1",
    "moe_sm90_pair_8",
    "moe_sm90_pair_32",
    "moe_fp8_pair_1",
    "moe_route_group_combine_64",
    "rms_norm_4096x4096",
    "rope_write_4096",
    "silu_mul_4096x14336",
    "rules_256x151936",
    "sample_1x151936",
    "sample_64x151936",
    "sample_256x151936",
    "sample_plain_1x151936",
    "sample_plain_256x151936",
    "sample_top_p_64x151936",
    "score_1x151936",
    "score_256x151936",
];
pub(crate) const REPEATS: usize = 50;
pub(crate) const PAGE_SIZE: usize = 16;

/// Launches, and what they cannot avoid.
pub(crate) struct Work {
    pub(crate) launches: Vec<Launch>,
    pub(crate) bytes: u64,
    pub(crate) operations: u64,
}

/// The median of [`REPEATS`] replays, as a line of JSON.
pub(crate) fn run(name: &str) -> Result<String, String> {
    let mut gpu = Gpu::new(0).map_err(|e| e.to_string())?;
    let processors = gpu.processors();
    let work = {
        let mut lab = Lab::new(&mut gpu, Size::Large);
        let work = work(&mut lab, name, processors)?;
        lab.keep();
        work
    };
    let times = gpu.time(&work.launches, REPEATS).map_err(|e| e.to_string())?;
    Ok(line(name, times, work.bytes, work.operations))
}

/// The median of so many milliseconds, as a line of JSON.
pub(crate) fn line(name: &str, mut times: Vec<f32>, bytes: u64, operations: u64) -> String {
    times.sort_by(f32::total_cmp);
    let microseconds = f64::from(times[times.len() / 2]) * 1e3;
    format!(
        "{{\"timing\": \"{name}\", \"us\": {microseconds:.2}, \"bytes\": {bytes}, \
         \"operations\": {operations}}}"
    )
}

fn work(lab: &mut Lab<'_>, name: &str, processors: usize) -> Result<Work, String> {
    let plain = Decode::default();
    let decode = |lab: &mut Lab<'_>, d: Decode| Attention::decode(lab, d)?.work(lab, processors);
    let product = |lab: &mut Lab<'_>, weights: Weights, unit: Unit, mnk: [usize; 3]| {
        Product::new(lab, weights, unit, mnk)?.work(lab, false)
    };
    let clustered = |lab: &mut Lab<'_>, mnk: [usize; 3]| {
        Product::new(lab, Weights::Bf16, Unit::Warpgroup, mnk)?.work(lab, true)
    };
    match name {
        "copy" => copy(lab, processors),
        "matrix_peak" => matrix_peak(lab, processors),
        "decode_32x4096_page8" => decode(lab, Decode { page_size: 8, ..plain }),
        "decode_32x4096_page16" => decode(lab, plain),
        "decode_32x4096_page32" => decode(lab, Decode { page_size: 32, ..plain }),
        "decode_32x4096_page64" => decode(lab, Decode { page_size: 64, ..plain }),
        "decode_32x4096_page128" => decode(lab, Decode { page_size: 128, ..plain }),
        "decode_32x4096_page256" => decode(lab, Decode { page_size: 256, ..plain }),
        "decode_32x4096_fp8" => decode(lab, Decode { kv_type: KvType::Fp8, ..plain }),
        "decode_1x1024" => decode(lab, Decode { sequences: 1, context: 1024, ..plain }),
        "decode_1x32768" => decode(lab, Decode { sequences: 1, context: 32_768, ..plain }),
        "decode_latent_32x4096" => decode(lab, Decode { kind: HeadKind::Latent, ..plain }),
        "decode_latent_1x32768" => {
            decode(lab, Decode { kind: HeadKind::Latent, sequences: 1, context: 32_768, ..plain })
        }
        "prefill_2048" => Attention::prefill(lab, 2048)?.work(lab, processors),
        "prefill_8192" => Attention::prefill(lab, 8192)?.work(lab, processors),
        "matmul_bf16_1x14336x4096" => product(lab, Weights::Bf16, Unit::Warp, [1, 14_336, 4096]),
        "matmul_bf16_16x14336x4096" => product(lab, Weights::Bf16, Unit::Warp, [16, 14_336, 4096]),
        "matmul_bf16_64x14336x4096" => product(lab, Weights::Bf16, Unit::Warp, [64, 14_336, 4096]),
        "matmul_int8_16x14336x4096" => product(lab, Weights::Int8, Unit::Warp, [16, 14_336, 4096]),
        "matmul_int4_16x14336x4096" => product(lab, Weights::Int4, Unit::Warp, [16, 14_336, 4096]),
        "matmul_fp8_16x14336x4096" => product(lab, Weights::Fp8, Unit::Warp, [16, 14_336, 4096]),
        "matmul_mxfp4_16x14336x4096" => product(lab, Weights::Mxfp4, Unit::Warp, [16, 14_336, 4096]),
        "matmul_int8_1x14336x4096" => product(lab, Weights::Int8, Unit::Warp, [1, 14_336, 4096]),
        "matmul_int4_1x14336x4096" => product(lab, Weights::Int4, Unit::Warp, [1, 14_336, 4096]),
        "matmul_int4_1x4096x4096" => product(lab, Weights::Int4, Unit::Warp, [1, 4096, 4096]),
        "matmul_int4_16x4096x14336" => product(lab, Weights::Int4, Unit::Warp, [16, 4096, 14_336]),
        "matmul_int8_64x14336x4096" => product(lab, Weights::Int8, Unit::Warp, [64, 14_336, 4096]),
        "matmul_int4_64x14336x4096" => product(lab, Weights::Int4, Unit::Warp, [64, 14_336, 4096]),
        "matmul_bf16_8192x8192x8192" => product(lab, Weights::Bf16, Unit::Warp, [8192; 3]),
        "matmul_sm90_1x14336x4096" => product(lab, Weights::Bf16, Unit::Warpgroup, [1, 14_336, 4096]),
        "matmul_sm90_64x14336x4096" => product(lab, Weights::Bf16, Unit::Warpgroup, [64, 14_336, 4096]),
        "matmul_sm90_8192x8192x8192" => product(lab, Weights::Bf16, Unit::Warpgroup, [8192; 3]),
        "matmul_sm90_clustered_8192x8192x8192" => clustered(lab, [8192; 3]),
        "matmul_sm90_2048x14336x4096" => product(lab, Weights::Bf16, Unit::Warpgroup, [2048, 14_336, 4096]),
        "matmul_sm90_clustered_2048x14336x4096" => clustered(lab, [2048, 14_336, 4096]),
        moe if moe.starts_with("moe_") => experts::work(lab, moe),
        "rms_norm_4096x4096" => norm(lab, 4096, 4096),
        "rope_write_4096" => rotate(lab, 4096),
        "silu_mul_4096x14336" => gate(lab, 4096, 14_336),
        "rules_256x151936" => change(lab, 256, 151_936),
        "sample_1x151936" => draw(lab, 1, 151_936, CUT),
        "sample_64x151936" => draw(lab, 64, 151_936, CUT),
        "sample_256x151936" => draw(lab, 256, 151_936, CUT),
        "sample_plain_1x151936" => draw(lab, 1, 151_936, PLAIN),
        "sample_plain_256x151936" => draw(lab, 256, 151_936, PLAIN),
        "sample_top_p_64x151936" => draw(lab, 64, 151_936, Parameters { top_k: 0, ..CUT }),
        "score_1x151936" => score(lab, 1, 151_936),
        "score_256x151936" => score(lab, 256, 151_936),
        _ => Err(format!("no timing {name}")),
    }
}

fn copy(lab: &mut Lab<'_>, processors: usize) -> Result<Work, String> {
    let bytes = 1 << 30;
    let (from, to) = (lab.filled(bytes, 1)?, lab.poisoned(bytes)?);
    Ok(Work { launches: vec![probe::copy(from, to, processors)], bytes: 2 * bytes as u64, operations: 0 })
}

fn matrix_peak(lab: &mut Lab<'_>, processors: usize) -> Result<Work, String> {
    let seed = lab.filled(probe::SEED_WORDS * 4, 2)?.cast();
    let out = lab.poisoned(probe::matrix_peak_outputs(processors))?;
    let (launch, operations) = probe::matrix_peak(seed, out, processors, 4096);
    Ok(Work { launches: vec![launch], bytes: 0, operations })
}

pub(crate) fn scales(lab: &mut Lab<'_>, count: usize) -> Result<Option<Slice<f32>>, String> {
    if count == 0 { Ok(None) } else { lab.upload(&vec![0.01; count]).map(Some) }
}

fn norm(lab: &mut Lab<'_>, rows: usize, width: usize) -> Result<Work, String> {
    let bytes = rows * width * 2;
    let (x, residual, weight) =
        (lab.filled(bytes, 1)?.cast(), lab.filled(bytes, 2)?.cast(), lab.filled(width * 2, 3)?.cast());
    let out = lab.poisoned(rows * width)?;
    let launch =
        rms_norm::launch(x, Some(residual), weight, 1e-6, rms_norm::NormRows::whole(rows, width), out);
    // Reads both, writes both.
    Ok(Work { launches: launch.into_iter().collect(), bytes: 4 * bytes as u64, operations: 0 })
}

fn rotate(lab: &mut Lab<'_>, tokens: usize) -> Result<Work, String> {
    let (heads, kv_heads, dim) = (32, 8, 128);
    let stride = (heads + 2 * kv_heads) * dim;
    let vectors = tokens * kv_heads * dim * 2;
    let pages = Pages {
        keys: lab.poisoned(vectors)?,
        values: Some(lab.poisoned(vectors)?),
        kv_type: KvType::Bf16,
        kind: HeadKind::Dim128,
        kv_heads,
        page_size: PAGE_SIZE,
    };
    let angles = vec![0.6f32; tokens * dim / 2];
    let slots: Vec<u32> = (0..tokens as u32).collect();
    let tokens_of = rope::ProjectedTokens {
        x: lab.filled(tokens * stride * 2, 8)?.cast(),
        stride,
        kv: None,
        heads,
        norms: None,
        angles: [lab.upload(&angles)?, lab.upload(&angles)?],
        rotated_from: 0,
        pairing: Pairing::Halves,
        slots: lab.upload(&slots)?,
    };
    let launches = rope::launch(&tokens_of, &pages, [1.0; 2]);
    // Every row is read; queries, keys and values are written; angles are read.
    let bytes = (tokens * (2 * stride * 2 + dim * 4)) as u64;
    Ok(Work { launches, bytes, operations: 0 })
}

fn gate(lab: &mut Lab<'_>, rows: usize, width: usize) -> Result<Work, String> {
    let (gate_up, out) = (lab.filled(rows * width * 4, 9)?.cast(), lab.poisoned(rows * width)?);
    let launch = elementwise::silu_mul(gate_up, width, out);
    Ok(Work { launches: launch.into_iter().collect(), bytes: (rows * width * 6) as u64, operations: 0 })
}

/// Logits of every row, a block of them again and again.
fn logits(lab: &mut Lab<'_>, rows: usize, vocabulary: usize) -> Result<Slice<f32>, String> {
    let block: Vec<f32> =
        crate::cases::values(10, vocabulary).iter().map(|v| v.to_f32().clamp(-6.0, 6.0)).collect();
    lab.upload(&block.iter().copied().cycle().take(rows * vocabulary).collect::<Vec<f32>>())
}

/// Penalties on a thousand tokens of each row, which takes one more.
fn change(lab: &mut Lab<'_>, rows: usize, vocabulary: usize) -> Result<Work, String> {
    const RULES: usize = 1000;
    let rule = |i: usize| Rule { id: (i * 151) as u32, generated: 1 + i as u32 % 3, ..Rule::default() };
    let list = rules::list(&(0..RULES).map(rule).collect::<Vec<Rule>>(), RULES);
    let lists: Vec<u32> = list.iter().copied().cycle().take(rows * list.len()).collect();
    let of_row = |row: usize| RowRules {
        list: Some(row * (1 + RULES)),
        token: Some(row),
        repetition: 1.1,
        frequency: 0.1,
        presence: 0.1,
        ..RowRules::default()
    };
    let words: Vec<u32> = (0..rows).flat_map(|row| of_row(row).words()).collect();
    let tokens: Vec<u32> = (0..rows).map(|row| rule(row % RULES).id).collect();
    let (logits, lists, tokens) = (logits(lab, rows, vocabulary)?, lab.upload(&lists)?, lab.upload(&tokens)?);
    let words = lab.upload(&words)?;
    let launch = rules::launch(logits, vocabulary, words, lists, words, tokens);
    // Rules are read, and a logit for each read and written.
    let bytes = (rows * RULES * (16 + 8)) as u64;
    Ok(Work { launches: launch.into_iter().collect(), bytes, operations: 0 })
}

/// Scores with the 20 likeliest of every row.
fn score(lab: &mut Lab<'_>, rows: usize, vocabulary: usize) -> Result<Work, String> {
    let tokens: Vec<u32> = (0..rows as u32).collect();
    let (logits, tokens) = (logits(lab, rows, vocabulary)?, lab.upload(&tokens)?);
    let (wanted, scores) = (lab.upload(&vec![20; rows])?, lab.poisoned(rows * SCORE_WORDS)?);
    let work = lab.poisoned(sample::work_words(rows, vocabulary))?;
    let launches = sample::score(logits, vocabulary, wanted, work, tokens, scores);
    Ok(Work { launches, bytes: (rows * vocabulary * 4) as u64, operations: 0 })
}

/// How tokens are drawn where a request says nothing, and where it cuts what is unlikely.
const PLAIN: Parameters =
    Parameters { temperature: 1.0, top_p: 1.0, min_p: 0.0, top_k: 0, seed: 0, position: 9 };
const CUT: Parameters = Parameters { temperature: 0.8, top_p: 0.95, top_k: 50, ..PLAIN };

fn draw(lab: &mut Lab<'_>, rows: usize, vocabulary: usize, by: Parameters) -> Result<Work, String> {
    let words: Vec<u32> = (0..rows).flat_map(|row| Parameters { seed: row as u64, ..by }.words()).collect();
    let (logits, words) = (logits(lab, rows, vocabulary)?, lab.upload(&words)?);
    let work = lab.poisoned(sample::work_words(rows, vocabulary))?;
    let (tokens, logprobs) = (lab.poisoned(rows)?, lab.poisoned(rows)?);
    let launches = sample::launch(logits, vocabulary, words, work, tokens, logprobs);
    Ok(Work { launches, bytes: (rows * vocabulary * 4) as u64, operations: 0 })
}
