//! Paged attention: every kind of head, type, page size and cut, windows and sinks, against the oracle; and
//! that no cut, page layout or neighbour changes a bit.

use half::bf16;
use keyway_kernels::cuda::matmul::Unit;
use keyway_kernels::cuda::paged_attention::{
    AttentionCut, AttentionPlan, Batch, CHUNK, HeadKind, KvType, Pages, Sequence, launch,
};
use keyway_kernels::kv_cache::{KvCache, KvShape};
use keyway_kernels::paged_attention::{Queries, oracle};
use keyway_kernels::quant::e4m3;

use super::{Lab, values};

/// What one rounding to bf16 may change, relative to the value: half a unit in the last of its 8 bits.
const ROUNDING: f64 = 1.0 / 256.0;
/// Error against the same sums over magnitudes. Three roundings to bf16: of the weights in the numerator, of
/// those in the denominator (where one position weighs most and its value is near 0, the two sums hang on
/// different weights, so that their errors do not cancel), and of the output. The rest is what scores lose in
/// f32: of order 2^10 in base 2, by 8 products of matrix units that drop what lies below 2^-23, both a score
/// and the maximum: 2 * 2^-10 * ln 2.
const TOLERANCE: f64 = 3.5 * ROUNDING;
const KV_SCALE: [f32; 2] = [0.5, 0.25];

/// One test: a batch over a cache.
#[derive(Debug, Clone)]
struct Setup {
    kind: HeadKind,
    kv_type: KvType,
    kv_heads: usize,
    group: usize,
    /// (new tokens, start) of each sequence.
    sequences: Vec<(usize, usize)>,
    window: Option<usize>,
    sinks: bool,
    /// Whether the first chunk's values and the second's are large and cancel, so that the order in which
    /// chunks are joined shows in the output.
    cancelling: bool,
    /// Whether blocks carry one state over all their chunks.
    carried: bool,
    /// Of blocks of many rows.
    unit: Unit,
    /// Blocks that stay.
    processors: usize,
}

impl Setup {
    fn heads(&self) -> usize {
        self.kv_heads * self.group
    }

    fn scale(&self) -> f32 {
        1.0 / (self.kind.key_dim() as f32).sqrt()
    }
}

pub(crate) fn check(lab: &mut Lab<'_>) -> Result<(), String> {
    let plain = Setup {
        kind: HeadKind::Dim128,
        kv_type: KvType::Bf16,
        kv_heads: 2,
        group: 4,
        sequences: vec![(1, 0), (1, 63), (5, 0), (1, 256), (20, 243), (1, 300)],
        window: None,
        sinks: false,
        cancelling: false,
        carried: false,
        unit: Unit::Warp,
        processors: 132,
    };
    let mut setups = vec![
        plain.clone(),
        Setup { kv_type: KvType::Fp8, sinks: true, ..plain.clone() },
        Setup { kind: HeadKind::Dim64, group: 3, sinks: true, window: Some(100), ..plain.clone() },
        Setup { kind: HeadKind::Dim64, kv_type: KvType::Fp8, group: 1, window: Some(1), ..plain.clone() },
        Setup { kind: HeadKind::Dim64, sequences: vec![(2, 700)], cancelling: true, ..plain.clone() },
    ];
    // More tiles than lie in shared memory at once, and a border of tiles and of chunks between what the
    // halves of a block's rows see: at its end, and, by their windows, at its beginning.
    for window in [None, Some(129), Some(257)] {
        let sequences = vec![(40, 496), (3, 10), (33, 0)];
        setups.push(Setup { sequences, window, sinks: window.is_none(), ..plain.clone() });
    }
    for kv_type in [KvType::Bf16, KvType::Fp8] {
        // Where there are blocks of 64 rows, one that is not full and a border of chunks inside another.
        let last = if kv_type == KvType::Bf16 { (4, 253) } else { (2, 290) };
        let sequences = vec![(1, 0), last];
        let latent =
            Setup { kind: HeadKind::Latent, kv_type, kv_heads: 1, group: 20, sequences, ..plain.clone() };
        setups.push(latent);
    }
    if lab.is_large() {
        setups.push(Setup {
            kind: HeadKind::Latent,
            kv_heads: 1,
            group: 128,
            sequences: vec![(1, 1500), (3, 700)],
            ..plain.clone()
        });
        setups.push(Setup {
            kv_heads: 8,
            sequences: vec![(1, 4095), (300, 1700), (1, 777), (64, 0)],
            ..plain.clone()
        });
        setups.push(Setup { sequences: vec![(1, 20_000), (17, 9000)], window: Some(4096), ..plain });
    }
    for (i, setup) in setups.iter().enumerate() {
        let page_size = [16, 8, 64, 256, 32, 128, 16, 8][i % 8];
        run_one(lab, setup, page_size).map_err(|fault| format!("{setup:?}: {fault}"))?;
        lab.clear();
    }
    for kind in [HeadKind::Dim64, HeadKind::Dim128, HeadKind::Latent] {
        let kv_heads = if kind == HeadKind::Latent { 1 } else { 2 };
        let setup =
            Setup { kind, kv_type: KvType::Fp8, kv_heads, sequences: vec![(5, 80)], ..setups[0].clone() };
        nan_shows(lab, &setup).map_err(|fault| format!("{setup:?}: {fault}"))?;
        lab.clear();
    }
    Ok(())
}

/// An FP8 code that is no number: as a value it spoils its column, as a key all that see it, of its KV head
/// alone.
fn nan_shows(lab: &mut Lab<'_>, setup: &Setup) -> Result<(), String> {
    let (key_dim, value_dim) = (setup.kind.key_dim(), setup.kind.value_dim());
    let rows: &[usize] = if setup.kind == HeadKind::Latent { &[16] } else { &[16, 128] };
    for (code, element, position) in [(0x7f, 18, 50), (0xff, 19, 3), (0x7f, 0, 64), (0xff, 37, 79)] {
        for (&rows, of_key) in rows.iter().flat_map(|rows| [(rows, false), (rows, true)]) {
            if setup.kind == HeadKind::Latent && !of_key {
                continue;
            }
            let mut data = Data::new(setup);
            let (bytes, dim) =
                if of_key { (&mut data.key_bytes, key_dim) } else { (&mut data.value_bytes, value_dim) };
            bytes[0][position * setup.kv_heads * dim + element] = code;
            let out = data.run(lab, setup, 16, AttentionCut { rows, chunks: None }, &[0])?;
            for (i, value) in out.iter().enumerate() {
                let of_head = i / value_dim % setup.heads() < setup.group;
                let wanted = of_head && (of_key || i % value_dim == element);
                if value.is_nan() != wanted {
                    return Err(format!(
                        "a NaN at {position}, {element} (key: {of_key}): element {i} is {value}"
                    ));
                }
            }
        }
    }
    Ok(())
}

fn run_one(lab: &mut Lab<'_>, setup: &Setup, page_size: usize) -> Result<(), String> {
    let data = Data::new(setup);
    let narrow = AttentionCut { rows: 16, chunks: None };
    let all: Vec<usize> = (0..setup.sequences.len()).collect();
    let out = data.run(lab, setup, page_size, narrow, &all)?;
    let (exact, bound) = data.oracle(setup);
    lab.close("against the oracle", &out, &exact, |i| bound[i] * TOLERANCE + 1e-30)?;

    let rows: &[usize] = if setup.kind == HeadKind::Latent { &[16] } else { &[16, 128] };
    for &rows in rows {
        for chunks in [None, Some(1), Some(2)] {
            let other = data.run(lab, setup, page_size, AttentionCut { rows, chunks }, &all)?;
            lab.same(&format!("{rows} rows, {chunks:?} chunks apart"), &other, &out)?;
        }
    }
    if setup.kv_type == KvType::Bf16 && lab.has_warpgroups() {
        // A block for each piece of work, and blocks that go from one to the next.
        let cuts = [(None, 2), (Some(1), 3), (None, 1), (None, 132), (None, 5), (Some(1), 132), (Some(2), 2)];
        let (rows, cuts) = if setup.kind == HeadKind::Latent { (64, &cuts[..2]) } else { (128, &cuts[1..]) };
        for &(chunks, processors) in cuts {
            let pipelined = Setup { unit: Unit::Warpgroup, processors, ..setup.clone() };
            let other = data.run(lab, &pipelined, page_size, AttentionCut { rows, chunks }, &all)?;
            let what = format!("by warpgroups of {processors} blocks, {chunks:?} chunks apart");
            lab.same(&what, &other, &out)?;
        }
    }
    if (setup.kind, setup.kv_type) == (HeadKind::Dim128, KvType::Bf16) {
        // Right as well, but with the same bits only where a block has one chunk.
        let carried = Setup { carried: true, ..setup.clone() };
        for (rows, chunks) in
            [(16, None), (128, None), (16, Some(1)), (128, Some(1)), (16, Some(2)), (128, Some(2))]
        {
            let what = format!("{rows} rows, carried over {chunks:?} chunks");
            let other = data.run(lab, &carried, page_size, AttentionCut { rows, chunks }, &all)?;
            lab.close(&what, &other, &exact, |i| bound[i] * TOLERANCE + 1e-30)?;
            if chunks == Some(1) {
                lab.same(&what, &other, &out)?;
            }
        }
    }
    for other_size in [8, 256] {
        let other = data.run(lab, setup, other_size, AttentionCut { rows: 16, chunks: Some(1) }, &all)?;
        lab.same(&format!("pages of {other_size}"), &other, &out)?;
    }
    // Each sequence alone, and each one's last token alone, as decoding computes it.
    let width = setup.heads() * setup.kind.value_dim();
    let mut end = 0;
    for (i, (tokens, start)) in setup.sequences.iter().enumerate() {
        end += tokens;
        let alone = data.run(lab, setup, page_size, narrow, &[i])?;
        lab.same("a sequence alone", &alone, &out[(end - tokens) * width..end * width])?;
        let last = data.decode_last(lab, setup, page_size, i, start + tokens - 1)?;
        lab.same("the last token alone", &last, &out[(end - 1) * width..end * width])?;
        lab.clear();
    }
    Ok(())
}

/// The queries, keys and values of a setup: position by position, as the device will see them.
struct Data {
    q: Vec<Vec<bf16>>,
    /// Per sequence `[position][kv_head][key_dim]`, as f32 of the stored codes times their scale.
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
    key_bytes: Vec<Vec<u8>>,
    value_bytes: Vec<Vec<u8>>,
    sinks: Vec<f32>,
}

impl Data {
    fn new(setup: &Setup) -> Self {
        let mut data = Self {
            q: Vec::new(),
            keys: Vec::new(),
            values: Vec::new(),
            key_bytes: Vec::new(),
            value_bytes: Vec::new(),
            sinks: values(99, setup.heads()).iter().map(|v| v.to_f32()).collect(),
        };
        for (i, (tokens, start)) in setup.sequences.iter().enumerate() {
            let positions = start + tokens;
            let seed = i as u64 * 10;
            data.q.push(values(seed + 1, tokens * setup.heads() * setup.kind.key_dim()));
            let (keys, bytes) =
                stored(setup, seed + 2, positions * setup.kv_heads * setup.kind.key_dim(), KV_SCALE[0]);
            data.keys.push(keys);
            data.key_bytes.push(bytes);
            let (values, bytes) =
                stored(setup, seed + 3, positions * setup.kv_heads * setup.kind.value_dim(), KV_SCALE[1]);
            data.values.push(values);
            data.value_bytes.push(bytes);
            if setup.cancelling {
                data.cancel(setup, i);
            }
        }
        data
    }

    /// Equal weights, and values of sequence `i` that are large in the first chunk and their opposite in the
    /// second.
    fn cancel(&mut self, setup: &Setup, i: usize) {
        self.q[i].fill(bf16::ZERO);
        let width = setup.kv_heads * setup.kind.value_dim();
        for (at, value) in self.values[i].iter_mut().enumerate() {
            *value = match at / width / CHUNK {
                0 => 1048576.0,
                1 => -1048576.0,
                _ => *value,
            };
        }
        let bytes = self.values[i].iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes());
        self.value_bytes[i] = bytes.collect();
    }

    /// All sequences' outputs, and the same sums over magnitudes.
    fn oracle(&self, setup: &Setup) -> (Vec<f64>, Vec<f64>) {
        let (mut exact, mut bound) = (Vec::new(), Vec::new());
        for (i, (tokens, start)) in setup.sequences.iter().enumerate() {
            let q: Vec<f32> = self.q[i].iter().map(|v| v.to_f32()).collect();
            let blocks: Vec<u32> = (0..(start + tokens).div_ceil(16) as u32).collect();
            let queries = Queries {
                rows: &q,
                stride: setup.heads() * setup.kind.key_dim(),
                heads: setup.heads(),
                start: *start,
                blocks: &blocks,
                window: setup.window,
                sinks: setup.sinks.then_some(&self.sinks),
            };
            let cache = self.cache(setup, i, false);
            exact.extend(oracle(&cache, queries, *tokens, setup.scale()));
            if setup.kind == HeadKind::Latent {
                // Magnitudes of a latent's value would change its key: outliers bound the sum.
                let largest = self.keys[i].iter().fold(0.0f32, |max, v| max.max(v.abs()));
                let from = bound.len();
                bound.extend(exact[from..].iter().map(|v| v.abs() + f64::from(largest) / 16.0));
            } else {
                bound.extend(oracle(&self.cache(setup, i, true), queries, *tokens, setup.scale()));
            }
        }
        (exact, bound)
    }

    fn cache(&self, setup: &Setup, i: usize, magnitudes: bool) -> KvCache {
        let (key_dim, value_dim) = (setup.kind.key_dim(), setup.kind.value_dim());
        let (keys, width) = (&self.keys[i], setup.kv_heads * key_dim);
        let positions = keys.len() / width;
        let shape = KvShape {
            kv_heads: setup.kv_heads,
            key_dim,
            value_dim,
            block_size: 16,
            num_blocks: positions.div_ceil(16),
        };
        let latent = setup.kind == HeadKind::Latent;
        let cache = if latent { KvCache::new_latent(shape) } else { KvCache::new(shape) };
        let mut cache = cache.expect("memory for a test's cache");
        for p in 0..positions {
            let key = &keys[p * width..][..width];
            if latent {
                cache.write_latent((p / 16) as u32, p % 16, key);
                continue;
            }
            let value = &self.values[i][p * setup.kv_heads * value_dim..][..setup.kv_heads * value_dim];
            let value: Vec<f32> = value.iter().map(|v| if magnitudes { v.abs() } else { *v }).collect();
            cache.write((p / 16) as u32, p % 16, key, &value);
        }
        cache
    }

    /// Attention of the sequences `which` on the device.
    fn run(
        &self,
        lab: &mut Lab<'_>,
        setup: &Setup,
        page_size: usize,
        cut: AttentionCut,
        which: &[usize],
    ) -> Result<Vec<bf16>, String> {
        let mut q = Vec::new();
        let (mut sequences, mut table) = (Vec::new(), 0);
        let mut query = 0;
        for &i in which {
            let (tokens, start) = setup.sequences[i];
            q.extend_from_slice(&self.q[i]);
            sequences.push(Sequence { query, tokens, start, table });
            query += tokens;
            table += (start + tokens).div_ceil(page_size);
        }
        self.launch(lab, setup, page_size, cut, which, &sequences, &q)
    }

    /// The last token of sequence `i` as a decode step.
    fn decode_last(
        &self,
        lab: &mut Lab<'_>,
        setup: &Setup,
        page_size: usize,
        i: usize,
        at: usize,
    ) -> Result<Vec<bf16>, String> {
        let width = setup.heads() * setup.kind.key_dim();
        let q = &self.q[i][self.q[i].len() - width..];
        let sequence = Sequence { query: 0, tokens: 1, start: at, table: 0 };
        self.launch(lab, setup, page_size, AttentionCut { rows: 16, chunks: Some(1) }, &[i], &[sequence], q)
    }

    #[allow(clippy::too_many_arguments, reason = "what differs between the runs of one setup")]
    fn launch(
        &self,
        lab: &mut Lab<'_>,
        setup: &Setup,
        page_size: usize,
        cut: AttentionCut,
        which: &[usize],
        sequences: &[Sequence],
        q: &[bf16],
    ) -> Result<Vec<bf16>, String> {
        let (key_dim, value_dim) = (setup.kind.key_dim(), setup.kind.value_dim());
        let (keys, tables) = paged(setup, which.iter().map(|i| &self.key_bytes[*i]), key_dim, page_size);
        let (values, _) = paged(setup, which.iter().map(|i| &self.value_bytes[*i]), value_dim, page_size);
        let values = if setup.kind == HeadKind::Latent { None } else { Some(lab.upload(&values)?) };
        let pages = Pages {
            keys: lab.upload(&keys)?,
            values,
            kv_type: setup.kv_type,
            kind: setup.kind,
            kv_heads: setup.kv_heads,
            page_size,
        };
        let plan = if setup.carried { AttentionPlan::carried } else { AttentionPlan::new };
        let plan = plan(sequences, setup.group, setup.window, cut);
        let tokens: usize = sequences.iter().map(|s| s.tokens).sum();
        let out = lab.poisoned(tokens * setup.heads() * value_dim)?;
        let batch = Batch {
            plan: &plan,
            items: lab.upload(&plan.items)?,
            merges: lab.upload(&plan.merges)?,
            tables: lab.upload(&tables)?,
            q: lab.upload(q)?,
            q_stride: setup.heads() * key_dim,
            heads: setup.heads(),
            sinks: if setup.sinks { Some(lab.upload(&self.sinks)?) } else { None },
            window: setup.window,
            unit: setup.unit,
            processors: setup.processors,
            scale: setup.scale(),
            kv_scale: match (setup.kv_type, setup.kind) {
                (KvType::Bf16, _) => [1.0; 2],
                (KvType::Fp8, HeadKind::Latent) => [KV_SCALE[0]; 2],
                (KvType::Fp8, _) => KV_SCALE,
            },
            out,
            partials: lab.poisoned(plan.partial_floats(setup.kv_heads, value_dim, setup.processors))?,
        };
        lab.launch(launch(&pages, &batch))?;
        lab.download(out)
    }
}

/// Adversarial vectors as the cache stores them: what they are worth, and their bytes.
fn stored(setup: &Setup, seed: u64, n: usize, scale: f32) -> (Vec<f32>, Vec<u8>) {
    let values = values(seed, n);
    match setup.kv_type {
        KvType::Bf16 => (
            values.iter().map(|v| v.to_f32()).collect(),
            values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        ),
        KvType::Fp8 => {
            // Codes of every exponent, by the bits of the value; NaN's two left out.
            let code = |v: &bf16| {
                let bits = v.to_bits();
                let code = (bits >> 8 & 0x80) as u8 | (bits.wrapping_mul(37) >> 3 & 0x3f) as u8;
                if code & 0x7f == 0x7f { code ^ 1 } else { code }
            };
            let codes: Vec<u8> = values.iter().map(code).collect();
            (codes.iter().map(|c| e4m3(*c) * scale).collect(), codes)
        }
    }
}

/// The sequences' vectors in pages that are dealt in a scrambled order, with pages of poison between them
/// and poison behind each end; and their tables, one behind the other.
fn paged<'a>(
    setup: &Setup,
    sequences: impl Iterator<Item = &'a Vec<u8>>,
    dim: usize,
    page_size: usize,
) -> (Vec<u8>, Vec<u32>) {
    let vector = dim * if setup.kv_type == KvType::Fp8 { 1 } else { 2 };
    let sequences: Vec<&Vec<u8>> = sequences.collect();
    let lengths: Vec<usize> = sequences.iter().map(|s| s.len() / (vector * setup.kv_heads)).collect();
    let pages: usize = lengths.iter().map(|l| l.div_ceil(page_size)).sum();
    // A bijection onto some of twice as many pages and a few more: 7 shares no factor with the number.
    let total = 2 * pages + if (2 * pages + 1).is_multiple_of(7) { 3 } else { 1 };
    let number = |i: usize| (i * 7 + 3) % total;
    let mut bytes = vec![0xff; total * setup.kv_heads * page_size * vector];
    let mut tables = Vec::new();
    for (sequence, length) in sequences.iter().zip(&lengths) {
        let first = tables.len();
        tables.extend((0..length.div_ceil(page_size)).map(|i| number(first + i) as u32));
        for p in 0..*length {
            for head in 0..setup.kv_heads {
                let page = tables[first + p / page_size] as usize;
                let to = ((page * setup.kv_heads + head) * page_size + p % page_size) * vector;
                let from = (p * setup.kv_heads + head) * vector;
                bytes[to..to + vector].copy_from_slice(&sequence[from..from + vector]);
            }
        }
    }
    (bytes, tables)
}
