//! Prints what each hot operation reaches on every instruction set and number of threads of this machine:
//! `cargo bench -p keyway-kernels`. Rates only mean something on a quiet machine.

use std::hint::black_box;
use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use keyway_kernels::compute::Compute;
use keyway_kernels::isa::Isa;
use keyway_kernels::kv_cache::{KvCache, KvShape};
use keyway_kernels::matmul::{self, PackedMatrix, WeightType};
use keyway_kernels::paged_attention::{self, Queries};

fn main() {
    let cores = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    for isa in Isa::available() {
        for threads in [1, 2, 4, 8, 16, 32].into_iter().filter_map(NonZeroUsize::new) {
            if threads <= cores {
                bench(&Compute::new(threads).with_isa(isa));
            }
        }
    }
}

fn bench(compute: &Compute) {
    for (m, n, k) in [(512, 512, 512), (512, 64, 64), (512, 128, 64), (1, 1024, 1024), (1, 4096, 4096)] {
        for (kept_as, weight) in weights(n, k) {
            bench_matmul(compute, m, kept_as, &weight);
        }
    }
    for (tokens, context, head_dim) in [(256, 4096, 16), (256, 4096, 128), (1, 4096, 16), (1, 4096, 128)] {
        let shape = KvShape { kv_heads: 2, key_dim: head_dim, value_dim: head_dim, ..KV_SHAPE };
        bench_attention(
            compute,
            tokens,
            context,
            4,
            KvCache::new(KvShape { num_blocks: context / 16, ..shape }),
        );
    }
    // DeepSeek-V3's, with a quarter of its heads.
    let latent = KvShape { kv_heads: 1, key_dim: 576, value_dim: 512, ..KV_SHAPE };
    for tokens in [1, 8] {
        bench_attention(compute, tokens, 4096, 32, KvCache::new_latent(latent));
    }
}

fn label(compute: &Compute) -> String {
    format!("{} x{}", compute.isa().name(), compute.threads())
}

/// Seconds per call: the fastest of repeated timings.
fn seconds(mut op: impl FnMut()) -> f64 {
    let begin = Instant::now();
    let mut best = f64::MAX;
    while begin.elapsed() < Duration::from_millis(300) {
        let start = Instant::now();
        op();
        best = best.min(start.elapsed().as_secs_f64());
    }
    best
}

fn ramp(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i % 251) as f32 / 251.0 - 0.5).collect()
}

/// A weight in every number type it can be kept in.
fn weights(n: usize, k: usize) -> [(&'static str, PackedMatrix); 4] {
    let fill = |row: usize, out: &mut [f32]| out.fill(row as f32 / n as f32);
    let fp8 = PackedMatrix::pack_fp8(n, k, 128, |row, codes, scales| {
        codes.fill(row as u8 % 120);
        scales.fill(0.01);
    });
    let mxfp4 = PackedMatrix::pack_mxfp4(n, k, |row, codes, scales| {
        codes.fill(row as u8);
        scales.fill(120);
    });
    [
        ("f32", PackedMatrix::pack(n, k, WeightType::F32, fill)),
        ("bf16", PackedMatrix::pack(n, k, WeightType::Bf16, fill)),
        ("fp8", fp8),
        ("mxfp4", mxfp4),
    ]
}

fn bench_matmul(compute: &Compute, m: usize, kept_as: &str, w: &PackedMatrix) {
    let (n, k) = (w.outputs(), w.inputs());
    let (x, mut y) = (ramp(m * k), vec![0.0; m * n]);
    let s = seconds(|| matmul::cpu(compute, black_box(&x), w, &mut y));
    println!(
        "{:9} matmul    {m}x{n}x{k} {kept_as}: {:.1} GFLOP/s, weights {:.1} GB/s",
        label(compute),
        2.0 * (m * n * k) as f64 / s / 1e9,
        w.bytes() as f64 / s / 1e9
    );
}

const KV_SHAPE: KvShape =
    KvShape { kv_heads: 2, key_dim: 16, value_dim: 16, block_size: 16, num_blocks: 256 };

fn bench_attention(compute: &Compute, tokens: usize, context: usize, heads: usize, cache: Option<KvCache>) {
    let Some(mut cache) = cache else {
        println!("not enough memory");
        return;
    };
    let KvShape { kv_heads, key_dim, value_dim, block_size, num_blocks } = cache.shape();
    let (key, value) = (ramp(kv_heads * key_dim), ramp(kv_heads * value_dim));
    for p in 0..context {
        let (block, offset) = ((p / block_size) as u32, p % block_size);
        if cache.is_latent() {
            cache.write_latent(block, offset, &key);
        } else {
            cache.write(block, offset, &key, &value);
        }
    }
    let blocks: Vec<u32> = (0..num_blocks as u32).collect();
    let (stride, start) = (heads * key_dim, context - tokens);
    let (rows, mut out) = (ramp(tokens * stride), vec![0.0; tokens * heads * value_dim]);
    let s = seconds(|| {
        let rows = black_box(rows.as_slice());
        let queries = Queries { rows, stride, heads, start, blocks: &blocks, window: None, sinks: None };
        paged_attention::cpu(compute, &cache, queries, 0.25, &mut out);
    });
    let pairs = (tokens * heads) as f64 * (start as f64 + tokens as f64 / 2.0);
    println!(
        "{:9} attention {tokens} tokens, context {context}, {heads} heads of {key_dim}{}: {:.1} GFLOP/s, {:.1} us",
        label(compute),
        if cache.is_latent() { " (latent)" } else { "" },
        2.0 * pairs * (key_dim + value_dim) as f64 / s / 1e9,
        s * 1e6
    );
}
