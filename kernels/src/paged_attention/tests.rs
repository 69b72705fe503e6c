//! Against the oracle, everywhere, and against every way of cutting the same sequence.

use super::*;
use crate::check::{assert_close, everywhere, same_bits, threads, values};

/// What kind of attention, and how its cache is cut.
#[derive(Debug, Clone, Copy)]
struct Kind {
    heads: usize,
    kv_heads: usize,
    key_dim: usize,
    value_dim: usize,
    block_size: usize,
    latent: bool,
    window: Option<usize>,
    sinks: bool,
}

const PLAIN: Kind = Kind {
    heads: 4,
    kv_heads: 2,
    key_dim: 16,
    value_dim: 16,
    block_size: 16,
    latent: false,
    window: None,
    sinks: false,
};
const LATENT: Kind = Kind { heads: 12, kv_heads: 1, key_dim: 40, value_dim: 32, latent: true, ..PLAIN };
/// Every kind whose cuts and paging are tried.
const KINDS: [Kind; 6] = [
    PLAIN,
    LATENT,
    Kind { window: Some(1), ..PLAIN },
    Kind { window: Some(40), sinks: true, value_dim: 32, ..PLAIN },
    Kind { window: Some(300), ..PLAIN },
    Kind { window: Some(70), sinks: true, ..LATENT },
];

struct Case {
    kind: Kind,
    cache: KvCache,
    blocks: Vec<u32>,
    queries: Vec<f32>,
    sinks: Vec<f32>,
}

/// `tokens` positions written into blocks taken from `order`; every other byte of the cache is NaN.
fn case(kind: Kind, tokens: usize, order: impl Fn(usize) -> u32) -> Case {
    let Kind { heads, kv_heads, key_dim, value_dim, block_size, .. } = kind;
    let shape = KvShape { kv_heads, key_dim, value_dim, block_size, num_blocks: 40 };
    let mut cache = if kind.latent { KvCache::new_latent(shape) } else { KvCache::new(shape) }.unwrap();
    let nan = vec![f32::NAN; kv_heads * key_dim.max(value_dim)];
    for block in 0..40 {
        for offset in 0..block_size {
            write(&mut cache, (block, offset), &nan[..kv_heads * key_dim], &nan[..kv_heads * value_dim]);
        }
    }
    let keys = values(1, tokens * kv_heads * key_dim);
    let vals = values(2, tokens * kv_heads * value_dim);
    let blocks: Vec<u32> = (0..tokens.div_ceil(block_size)).map(order).collect();
    for (p, (key, value)) in
        keys.chunks_exact(kv_heads * key_dim).zip(vals.chunks_exact(kv_heads * value_dim)).enumerate()
    {
        write(&mut cache, (blocks[p / block_size], p % block_size), key, value);
    }
    Case { kind, cache, blocks, queries: values(3, tokens * heads * key_dim), sinks: values(4, heads) }
}

fn write(cache: &mut KvCache, (block, offset): (u32, usize), key: &[f32], value: &[f32]) {
    if cache.is_latent() {
        cache.write_latent(block, offset, key);
    } else {
        cache.write(block, offset, key, value);
    }
}

impl Case {
    fn queries(&self, start: usize) -> Queries<'_> {
        let stride = self.kind.heads * self.kind.key_dim;
        Queries {
            rows: &self.queries[start * stride..],
            stride,
            heads: self.kind.heads,
            start,
            blocks: &self.blocks,
            window: self.kind.window,
            sinks: self.kind.sinks.then_some(&self.sinks),
        }
    }

    fn width(&self) -> usize {
        self.kind.heads * self.kind.value_dim
    }

    fn run(&self, compute: &Compute, start: usize, end: usize) -> Vec<f32> {
        let mut out = vec![f32::NAN; (end - start) * self.width()];
        cpu(compute, &self.cache, self.queries(start), 0.25, &mut out);
        out
    }
}

#[test]
fn agrees_with_the_oracle_everywhere() {
    let shaped = |heads, kv_heads, head_dim, block_size| Kind {
        heads,
        kv_heads,
        key_dim: head_dim,
        value_dim: head_dim,
        block_size,
        ..PLAIN
    };
    for (kind, tokens) in [
        (PLAIN, 1),
        (shaped(2, 2, 16, 32), 63),
        (shaped(7, 1, 32, 16), 65),
        (shaped(4, 2, 80, 48), 130),
        (shaped(3, 3, 16, 16), 257),
        (shaped(4, 2, 16, 32), 520),
        (Kind { key_dim: 21, value_dim: 48, ..PLAIN }, 40),
    ]
    .into_iter()
    .chain(KINDS.map(|kind| (kind, 270)))
    {
        let case = case(kind, tokens, |i| i as u32);
        let out = everywhere(|compute| case.run(compute, 0, tokens));
        let exact = oracle(&case.cache, case.queries(0), tokens, 0.25);
        // Outputs are means of values, which reach 100; where scores reach hundreds, exp amplifies roundings.
        assert_close(&out, &exact, &vec![100.0; out.len()], 2e-5);
    }
}

#[test]
fn the_cut_of_a_sequence_does_not_change_a_bit() {
    for kind in KINDS {
        let case = case(kind, 520, |i| i as u32);
        let (width, compute) = (case.width(), threads(3));
        let whole = case.run(&Compute::single(), 0, 520);
        for (start, end) in
            [(0, 1), (1, 2), (3, 20), (17, 256), (255, 257), (250, 300), (256, 520), (519, 520)]
        {
            let piece = case.run(&compute, start, end);
            assert!(same_bits(&whole[start * width..end * width], &piece), "{start}..{end} {kind:?}");
        }
    }
}

#[test]
fn paging_does_not_change_a_bit() {
    let compute = &Compute::single();
    for kind in KINDS {
        let in_order = case(kind, 520, |i| i as u32).run(compute, 0, 520);
        let scattered = case(kind, 520, |i| (i as u32 * 7 + 3) % 40).run(compute, 0, 520);
        let larger = Kind { block_size: 48, ..kind };
        let large_blocks = case(larger, 520, |i| 19 - i as u32).run(compute, 0, 520);
        assert!(same_bits(&in_order, &scattered) && same_bits(&in_order, &large_blocks), "{kind:?}");
    }
}

#[test]
fn what_lies_behind_a_token_is_never_read() {
    for kind in [Kind { heads: 2, kv_heads: 1, ..PLAIN }, LATENT] {
        // The cache around the sequence is NaN; here the later tokens of the same tile are infinite, too.
        let mut case = case(kind, 8, |i| i as u32);
        let before = case.run(&Compute::single(), 0, 8);
        let infinite = vec![f32::INFINITY; kind.key_dim];
        write(&mut case.cache, (0, 7), &infinite, &infinite[..kind.value_dim.min(16)]);
        let after = case.run(&Compute::single(), 0, 8);
        assert!(same_bits(&before[..7 * case.width()], &after[..7 * case.width()]));
        assert!(before.iter().all(|v| v.is_finite()));
    }
}

#[test]
fn what_lies_before_a_window_is_never_read() {
    for kind in [Kind { window: Some(20), ..PLAIN }, Kind { window: Some(20), ..LATENT }] {
        let mut case = case(kind, 400, |i| i as u32);
        let before = case.run(&Compute::single(), 300, 400);
        // Row 300 sees positions from 281, the tenth of block 17.
        case.blocks[..17].fill(u32::MAX);
        let infinite = vec![f32::INFINITY; kind.kv_heads * kind.key_dim];
        for offset in 0..9 {
            write(&mut case.cache, (17, offset), &infinite, &infinite[..kind.kv_heads * 16]);
        }
        let after = case.run(&threads(2), 300, 400);
        assert!(same_bits(&before, &after) && after.iter().all(|v| v.is_finite()));
    }
}

#[test]
fn sinks_that_weigh_nothing_change_nothing() {
    let with = |sink: f32| {
        let mut case = case(Kind { sinks: true, ..PLAIN }, 70, |i| i as u32);
        case.sinks.fill(sink);
        case.run(&Compute::single(), 0, 70)
    };
    let without = case(PLAIN, 70, |i| i as u32).run(&Compute::single(), 0, 70);
    assert!(same_bits(&with(f32::NEG_INFINITY), &without) && !same_bits(&with(1.0), &without));
}

#[test]
fn a_cut_covers_all_rows_with_enough_tiles() {
    for (parts, tokens, kv_heads, group) in
        [(1, 5, 2, 4), (2, 1, 2, 4), (8, 1, 1, 128), (8, 3, 2, 7), (12, 300, 8, 4), (64, 1, 1, 7)]
    {
        let (tile_tokens, tile_heads) = cut(parts, tokens, kv_heads, group);
        assert!(group.is_multiple_of(tile_heads) && tile_tokens > 0);
        let tiles = tokens.div_ceil(tile_tokens) * kv_heads * (group / tile_heads);
        assert!(tiles >= parts.min(tokens * kv_heads * group), "{parts} {tiles}");
    }
}

/// Sequences of one batch, some of one token and one of none, against each alone.
#[test]
fn a_batch_of_sequences_gives_the_bits_of_each_alone() {
    for kind in KINDS {
        let case = case(kind, 300, |i| (i * 7 % 30) as u32);
        let spans = [(299, 300), (0, 40), (17, 17), (100, 101), (3, 280)];
        let sequences = spans.map(|(start, end)| (case.queries(start), end - start));
        let together = everywhere(|compute| {
            let tokens: usize = sequences.iter().map(|(_, tokens)| tokens).sum();
            let mut out = vec![f32::NAN; tokens * case.width()];
            batch(compute, &case.cache, &sequences, 0.25, &mut out);
            out
        });
        let alone: Vec<f32> =
            spans.iter().flat_map(|(start, end)| case.run(&Compute::single(), *start, *end)).collect();
        assert!(same_bits(&together, &alone));
    }
}
