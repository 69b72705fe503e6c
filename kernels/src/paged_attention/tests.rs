//! Against the oracle, across instruction sets, and against every way of cutting the same sequence.

use super::*;
use crate::check::{assert_close, everywhere, same_bits, values};
use crate::isa::Isa;

struct Case {
    heads: usize,
    cache: KvCache,
    blocks: Vec<u32>,
    queries: Vec<f32>,
}

/// `tokens` positions written into blocks taken from `order`; every other byte of the cache is NaN.
fn case(heads: usize, shape: KvShape, tokens: usize, order: impl Fn(usize) -> u32) -> Case {
    let KvShape { kv_heads, key_dim: head_dim, block_size, num_blocks, .. } = shape;
    let mut cache = KvCache::new(shape).unwrap();
    let width = kv_heads * head_dim;
    let nan = vec![f32::NAN; width];
    for block in 0..num_blocks {
        for offset in 0..block_size {
            cache.write(block as u32, offset, &nan, &nan);
        }
    }
    let (keys, vals) = (values(1, tokens * width), values(2, tokens * width));
    let blocks: Vec<u32> = (0..tokens.div_ceil(block_size)).map(order).collect();
    for p in 0..tokens {
        let row = p * width..(p + 1) * width;
        cache.write(blocks[p / block_size], p % block_size, &keys[row.clone()], &vals[row]);
    }
    Case { heads, cache, blocks, queries: values(3, tokens * heads * head_dim) }
}

impl Case {
    fn queries(&self, start: usize) -> Queries<'_> {
        let width = self.heads * self.cache.shape().key_dim;
        Queries {
            rows: &self.queries[start * width..],
            stride: width,
            heads: self.heads,
            start,
            blocks: &self.blocks,
            window: None,
            sinks: None,
        }
    }

    fn run(&self, compute: &Compute, start: usize, end: usize) -> Vec<f32> {
        let mut out = vec![f32::NAN; (end - start) * self.heads * self.cache.shape().key_dim];
        cpu(compute, &self.cache, self.queries(start), 0.25, &mut out);
        out
    }
}

fn shape(kv_heads: usize, head_dim: usize, block_size: usize) -> KvShape {
    KvShape { kv_heads, key_dim: head_dim, value_dim: head_dim, block_size, num_blocks: 40 }
}

#[test]
fn agrees_with_the_oracle_everywhere() {
    for (heads, kv_heads, head_dim, block_size, tokens) in [
        (4, 2, 16, 16, 1),
        (2, 2, 16, 32, 63),
        (7, 1, 32, 16, 65),
        (4, 2, 80, 48, 130),
        (3, 3, 16, 16, 257),
        (4, 2, 16, 32, 520),
    ] {
        let case = case(heads, shape(kv_heads, head_dim, block_size), tokens, |i| i as u32);
        let out = everywhere(|compute| case.run(compute, 0, tokens));
        let exact = oracle(&case.cache, case.queries(0), tokens, 0.25);
        // Outputs are means of values, which reach 100; where scores reach hundreds, exp amplifies roundings.
        assert_close(&out, &exact, &vec![100.0; out.len()], 2e-5);
    }
}

#[test]
fn the_cut_of_a_sequence_does_not_change_a_bit() {
    let case = case(4, shape(2, 16, 16), 520, |i| i as u32);
    let width = 64;
    for isa in Isa::available() {
        let isa = &Compute::single().with_isa(isa);
        let whole = case.run(isa, 0, 520);
        for (start, end) in
            [(0, 1), (1, 2), (3, 20), (17, 256), (255, 257), (250, 300), (256, 520), (519, 520)]
        {
            assert!(
                same_bits(&whole[start * width..end * width], &case.run(isa, start, end)),
                "{start}..{end}"
            );
        }
    }
}

#[test]
fn paging_does_not_change_a_bit() {
    let isa = &Compute::single();
    let in_order = case(4, shape(2, 16, 16), 520, |i| i as u32).run(isa, 0, 520);
    let scattered = case(4, shape(2, 16, 16), 520, |i| (i as u32 * 7 + 3) % 40).run(isa, 0, 520);
    let large_blocks = case(4, shape(2, 16, 48), 520, |i| 19 - i as u32).run(isa, 0, 520);
    assert!(same_bits(&in_order, &scattered) && same_bits(&in_order, &large_blocks));
}

#[test]
fn what_lies_behind_a_token_is_never_read() {
    // The cache around the sequence is NaN; here the later tokens of the same tile are infinite, too.
    let mut case = case(2, shape(1, 16, 16), 8, |i| i as u32);
    let before = case.run(&Compute::single(), 0, 8);
    case.cache.write(0, 7, &[f32::INFINITY; 16], &[f32::INFINITY; 16]);
    let after = case.run(&Compute::single(), 0, 8);
    assert!(same_bits(&before[..7 * 32], &after[..7 * 32]));
    assert!(before.iter().all(|v| v.is_finite()));
}
