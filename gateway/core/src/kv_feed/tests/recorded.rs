//! Real engines: what vLLM 0.32.0 said of its cache, and what its answers said that they had found there.
//! Recorded by `tests/external/engines/record.py`, which says what a line is.

use std::collections::HashMap;

use super::*;

const BLOCK_SIZE: u32 = 32;

/// A line of a recording.
enum Line {
    Batch(Vec<u8>),
    /// Tokens of a prompt, how many were found cached, and the name of its last whole block.
    Prompt(usize, usize, u64),
}

fn lines(recording: &str) -> Vec<Line> {
    let line = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["batch", hex] => {
                let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
                Line::Batch(hex.as_bytes().chunks(2).map(byte).collect())
            }
            ["prompt", tokens, found, last] => {
                Line::Prompt(tokens.parse().unwrap(), found.parse().unwrap(), last.parse().unwrap())
            }
            _ => panic!("{line}"),
        }
    };
    recording.lines().map(line).collect()
}

/// Each block of a whole prefix: the one before it, and its tokens.
fn blocks(lines: &[Line]) -> HashMap<u64, (Option<u64>, Vec<u32>)> {
    let mut blocks = HashMap::new();
    for line in lines {
        let Line::Batch(payload) = line else { continue };
        for event in EventBatch::decode(payload).unwrap().batch.events {
            let KvEvent::BlockStored(event) = event else { continue };
            if event.kv_cache_spec_kind.as_deref() != Some("full_attention") {
                continue;
            }
            let mut before = event.parent_block_hash.as_ref().map(EngineHash::short);
            let tokens = event.token_ids.chunks(BLOCK_SIZE as usize);
            for (hash, tokens) in event.block_hashes.iter().zip(tokens) {
                blocks.insert(hash.short(), (before, tokens.to_vec()));
                before = Some(hash.short());
            }
        }
    }
    blocks
}

/// Replays all of it, and compares what the index has of each prompt with what the engine found.
fn replay(recording: &str) {
    let lines = lines(recording);
    let blocks = blocks(&lines);
    let (mut feed, index) = feed(Recovery::Nothing, 64);
    let _ = feed.connected_now(&index);
    let space = TokenSpace { salt: b"", adapter: None, block_size: BLOCK_SIZE };
    let (mut seq, mut prompts, mut reused, mut forgotten) = (0, 0, 0, 0);
    for line in &lines {
        let (tokens, found, last) = match line {
            Line::Batch(payload) => {
                assert_eq!(feed.live_now(&index, seq, payload), Action::Wait);
                seq += 1;
                continue;
            }
            Line::Prompt(tokens, found, last) => (*tokens, *found, *last),
        };
        let mut ids: Vec<&[u32]> = Vec::new();
        let mut at = Some(last);
        while let Some((before, block)) = at.map(|name| &blocks[&name]) {
            ids.push(block);
            at = *before;
        }
        ids.reverse();
        let chain = space.chain(key(), &ids.concat());
        assert_eq!(chain.len(), tokens / BLOCK_SIZE as usize);
        let reusable = &chain[..(tokens - 1) / BLOCK_SIZE as usize];
        let held = index.index().lengths(reusable).of(WORKER);
        assert_eq!(held * BLOCK_SIZE, found as u32, "prompt {prompts} of {tokens} tokens");
        prompts += 1;
        reused += usize::from(found > 0);
        forgotten += usize::from(found == 0);
    }
    // It is a test of something.
    assert!(prompts >= 35 && reused > 10 && forgotten > 5, "{prompts} {reused} {forgotten}");
    let stats = feed.stats();
    assert_eq!((stats.malformed, stats.ignored, stats.orphans, stats.unknown_removals), (0, 0, 0, 0));
}

#[test]
fn vllm_with_layers_that_keep_all() {
    replay(include_str!("recorded/vllm_full.txt"));
}

#[test]
fn vllm_with_layers_that_keep_a_window() {
    replay(include_str!("recorded/vllm_window.txt"));
}
