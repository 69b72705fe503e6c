//! What it costs that no bit depends on the batch: each operation whose sums are cut at fixed places, beside
//! itself with every cut that there is, those among them that suit this batch and would give another one's
//! rows other bits. Normalisation, rotation, gates and sampling have no such cut: a row is one block's.

use keyway_kernels::cuda::gpu::Gpu;
use keyway_kernels::cuda::matmul::{self, TILE, Unit, Weights};
use keyway_kernels::cuda::{Device as _, Launch, paged_attention};

use crate::cases::{Lab, Size};
use crate::quoted;
use crate::timings::attention::{Attention, Decode};
use crate::timings::product::Product;

pub(crate) const NAMES: &[&str] = &[
    "fixed_decode_32x4096",
    "fixed_decode_1x32768",
    "fixed_prefill_8192",
    "fixed_matmul_bf16_16x14336x4096",
    "fixed_matmul_bf16_16x4096x14336",
    "fixed_matmul_sm90_1x14336x4096",
    "fixed_matmul_sm90_64x4096x14336",
    "fixed_matmul_sm90_8192x8192x8192",
];
const REPEATS: usize = 30;
/// All are timed in turn so often, so that a clock that falls does not favour the first.
const ROUNDS: usize = 2;
/// Rows up to which splits to blocks of their own are tried: more leave more to be added than there is
/// memory.
const APART_ROWS_MAX: usize = 256;

/// One way to cut the work.
struct Variant {
    label: String,
    launches: Vec<Launch>,
}

/// The worker's own cut and the fastest of all, by the medians of their times, as a line of JSON.
pub(crate) fn run(name: &str) -> Result<String, String> {
    let mut gpu = Gpu::new(0).map_err(|e| e.to_string())?;
    let processors = gpu.processors();
    let variants = {
        let mut lab = Lab::new(&mut gpu, Size::Large);
        let variants = variants(&mut lab, name, processors)?;
        lab.keep();
        variants
    };
    let mut times = vec![Vec::new(); variants.len()];
    for _ in 0..ROUNDS {
        for (variant, times) in variants.iter().zip(&mut times) {
            let found = gpu.time(&variant.launches, REPEATS);
            times.extend(found.map_err(|e| format!("{}: {e}", variant.label))?);
        }
    }
    let medians: Vec<f64> = times.iter_mut().map(|times| median(times)).collect();
    let fastest = (0..medians.len()).min_by(|a, b| medians[*a].total_cmp(&medians[*b])).unwrap_or(0);
    Ok(format!(
        "{{\"timing\": {}, \"us\": {:.2}, \"fastest_us\": {:.2}, \"fastest\": {}, \"variants\": {}}}",
        quoted(name),
        medians[0],
        medians[fastest],
        quoted(&variants[fastest].label),
        variants.len()
    ))
}

/// Of milliseconds, in microseconds.
fn median(times: &mut [f32]) -> f64 {
    times.sort_by(f32::total_cmp);
    f64::from(times[times.len() / 2]) * 1e3
}

/// What `name` says, the worker's own cut first.
fn variants(lab: &mut Lab<'_>, name: &str, processors: usize) -> Result<Vec<Variant>, String> {
    let one_long = Decode { sequences: 1, context: 32_768, ..Decode::default() };
    let product = |lab: &mut Lab<'_>, unit: Unit, mnk: [usize; 3]| {
        let product = Product::new(lab, Weights::Bf16, unit, mnk)?;
        splits(lab, &product)
    };
    match name {
        "fixed_decode_32x4096" => {
            let attention = Attention::decode(lab, Decode::default())?;
            carries(lab, &attention, processors)
        }
        "fixed_decode_1x32768" => {
            let attention = Attention::decode(lab, one_long)?;
            carries(lab, &attention, processors)
        }
        "fixed_prefill_8192" => {
            let attention = Attention::prefill(lab, 8192)?;
            carries(lab, &attention, processors)
        }
        "fixed_matmul_bf16_16x14336x4096" => product(lab, Unit::Warp, [16, 14_336, 4096]),
        "fixed_matmul_bf16_16x4096x14336" => product(lab, Unit::Warp, [16, 4096, 14_336]),
        "fixed_matmul_sm90_1x14336x4096" => product(lab, Unit::Warpgroup, [1, 14_336, 4096]),
        "fixed_matmul_sm90_64x4096x14336" => product(lab, Unit::Warpgroup, [64, 4096, 14_336]),
        "fixed_matmul_sm90_8192x8192x8192" => product(lab, Unit::Warpgroup, [8192; 3]),
        _ => Err(format!("no timing {name}")),
    }
}

/// Attention by every number of chunks in a block, joined at fixed positions and carried from one to the
/// next.
fn carries(lab: &mut Lab<'_>, attention: &Attention, processors: usize) -> Result<Vec<Variant>, String> {
    let chosen = attention.chosen(lab, processors);
    let mut found =
        vec![Variant { label: "the worker's".into(), launches: attention.launches(lab, chosen, false)? }];
    // A prompt's blocks take all chunks; its states apart would fill the memory.
    let apart: &[usize] = if chosen.rows == 16 { &[1, 2, 4, 8, 16, 32] } else { &[] };
    for carried in [false, true] {
        for chunks in apart.iter().copied().map(Some).chain([None]) {
            let cut = paged_attention::AttentionCut { chunks, ..chosen };
            found.push(Variant {
                label: format!("{chunks:?} chunks a block{}", if carried { ", carried" } else { "" }),
                launches: attention.launches(lab, cut, carried)?,
            });
        }
    }
    Ok(found)
}

/// A product with K in 1 to 32 splits, one after another in a block or each in a block of its own, by every
/// number of rows a block.
fn splits(lab: &mut Lab<'_>, product: &Product) -> Result<Vec<Variant>, String> {
    let chosen = matmul::ProductCut::choose(product.shape, product.rows);
    let mut found =
        vec![Variant { label: "the worker's".into(), launches: product.launches(lab, chosen, None)? }];
    let tiles = product.shape.inputs / TILE;
    for rows in [16, 64, 128, 192, 256] {
        // Blocks far larger or smaller than the batch are no candidates.
        if rows > 4 * product.rows.max(16) || product.rows > 64 * rows {
            continue;
        }
        for splits in [1, 2, 4, 8, 16, 32] {
            let split_tiles = tiles.div_ceil(splits).next_multiple_of(2);
            for apart in [false, true] {
                if apart && (splits == 1 || product.rows > APART_ROWS_MAX) {
                    continue;
                }
                let cut = matmul::ProductCut { rows, apart, clustered: false };
                found.push(Variant {
                    label: format!("{splits} splits{}, {rows} rows", if apart { " apart" } else { "" }),
                    launches: product.launches(lab, cut, Some(split_tiles))?,
                });
            }
        }
    }
    Ok(found)
}
