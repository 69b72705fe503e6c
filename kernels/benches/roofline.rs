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
        for kept_as in [WeightType::F32, WeightType::Bf16] {
            bench_matmul(compute, m, n, k, kept_as);
        }
    }
    for (tokens, context, head_dim) in [(256, 4096, 16), (256, 4096, 128), (1, 4096, 16), (1, 4096, 128)] {
        bench_attention(compute, tokens, context, head_dim);
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

fn bench_matmul(compute: &Compute, m: usize, n: usize, k: usize, kept_as: WeightType) {
    let w = PackedMatrix::pack(n, k, kept_as, |row, out| out.fill(row as f32 / n as f32));
    let (x, mut y) = (ramp(m * k), vec![0.0; m * n]);
    let s = seconds(|| matmul::cpu(compute, black_box(&x), &w, &mut y));
    println!(
        "{:9} matmul    {m}x{n}x{k} {kept_as:?}: {:.1} GFLOP/s, weights {:.1} GB/s",
        label(compute),
        2.0 * (m * n * k) as f64 / s / 1e9,
        w.bytes() as f64 / s / 1e9
    );
}

fn bench_attention(compute: &Compute, tokens: usize, context: usize, head_dim: usize) {
    let (heads, kv_heads, block_size) = (4, 2, 16);
    let num_blocks = context / block_size;
    let Some(mut cache) =
        KvCache::new(KvShape { kv_heads, key_dim: head_dim, value_dim: head_dim, block_size, num_blocks })
    else {
        println!("not enough memory");
        return;
    };
    let row = ramp(kv_heads * head_dim);
    for p in 0..context {
        cache.write((p / block_size) as u32, p % block_size, &row, &row);
    }
    let blocks: Vec<u32> = (0..num_blocks as u32).collect();
    let stride = heads * head_dim;
    let rows = ramp(tokens * stride);
    let mut out = vec![0.0; tokens * stride];
    let start = context - tokens;
    let s = seconds(|| {
        let queries = Queries {
            rows: black_box(&rows),
            stride,
            heads,
            start,
            blocks: &blocks,
            window: None,
            sinks: None,
        };
        paged_attention::cpu(compute, &cache, queries, 0.25, &mut out);
    });
    let flops = 4.0 * (tokens * stride) as f64 * (start as f64 + tokens as f64 / 2.0);
    println!(
        "{:9} attention {tokens} tokens, context {context}, head_dim {head_dim}: {:.1} GFLOP/s, {:.1} us",
        label(compute),
        flops / s / 1e9,
        s * 1e6
    );
}
