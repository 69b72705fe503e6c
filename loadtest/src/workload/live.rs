//! Turns of a trace in a history that holds the server's own answers: what a turn says anew, where the
//! trace's answer before it is left out. Makes no text.

use serde::{Deserialize, Serialize};

use crate::{
    trace::Trace,
    workload::{
        Ask, conversation, is_unshared,
        scale::{Block, Scale},
    },
};

/// Whose answers stand in the history of a trace's turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Answers {
    /// The trace's: each prompt is the text of its blocks, in one message.
    Recorded,
    /// The server's own, in messages of the assistant; the trace says what is added to them.
    Live,
}

/// Turn number `row` of `trace`: what it adds to the turn before and the answer to that, or all of it where
/// it does not go on from there.
pub(super) fn turn(trace: &Trace, scale: Scale, row: usize) -> Ask {
    let request = &trace.rows[row];
    // What the trace does not name is part of the history too, so later turns of the agent share it.
    let named = |(place, block): (usize, Block)| match block.id {
        id if is_unshared(id) => Block { id: conversation::block_id(row, false, place as u32), ..block },
        _ => block,
    };
    let blocks: Vec<Block> = scale.blocks(row, request).enumerate().map(named).collect();
    let output_tokens = scale.output_tokens(request);
    let Some(before) = turn_before(trace, row).filter(|&before| extends(trace, before, row)) else {
        return Ask { blocks, output_tokens, said: None, begins_history: true };
    };
    let before = &trace.rows[before];
    let said = scale.prompt_tokens(before) + scale.output_tokens(before);
    let added = scale.prompt_tokens(request).saturating_sub(said).max(1);
    Ask { blocks: last(blocks, added), output_tokens, said: None, begins_history: false }
}

/// The turn that the same agent took before.
fn turn_before(trace: &Trace, row: usize) -> Option<usize> {
    let links = trace.links.as_ref()?;
    let link = &links[row];
    let is_before = |&before: &usize| {
        let other = &links[before];
        other.agent == link.agent && other.turn + 1 == link.turn
    };
    link.after.iter().map(|&before| before as usize).find(is_before)
}

/// Whether the prompt of `row` begins with the whole blocks of that of `before`, and is longer.
fn extends(trace: &Trace, before: usize, row: usize) -> bool {
    let (before, row) = (&trace.rows[before], &trace.rows[row]);
    let whole = (before.input_tokens / trace.block_tokens) as usize;
    let blocks = &before.blocks[..whole.min(before.blocks.len())];
    row.input_tokens > before.input_tokens && row.blocks.starts_with(blocks)
}

/// The last `tokens` of a prompt, at least 1.
fn last(mut blocks: Vec<Block>, tokens: u64) -> Vec<Block> {
    let mut left = tokens;
    let mut first = blocks.len();
    while let Some(block) = first.checked_sub(1).map(|i| &mut blocks[i]).filter(|_| left > 0) {
        block.tokens = block.tokens.min(u32::try_from(left).unwrap_or(u32::MAX));
        left -= u64::from(block.tokens);
        first -= 1;
    }
    blocks.split_off(first)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::trace::{Row, links::Link};

    fn trace(prompts: &[(u32, &[u64])]) -> Trace {
        let row = |&(input_tokens, blocks): &(u32, &[u64])| Row {
            timestamp_ms: 0,
            input_tokens,
            output_tokens: 4,
            blocks: blocks.into(),
        };
        let link = |turn: u32| Link {
            session: 0,
            agent: 0,
            parent: None,
            turn,
            after: turn.checked_sub(1).into_iter().collect(),
            wait: Duration::ZERO,
        };
        let links = (0..prompts.len() as u32).map(link).collect();
        Trace { rows: prompts.iter().map(row).collect(), block_tokens: 10, links: Some(links) }
    }

    fn added(trace: &Trace, row: usize) -> (bool, Vec<(u64, u32)>) {
        let ask = turn(trace, Scale::of(1.0, 10), row);
        (ask.begins_history, ask.blocks.iter().map(|block| (block.id, block.tokens)).collect())
    }

    #[test]
    fn a_turn_adds_what_the_trace_has_behind_the_answer_before() {
        let trace = trace(&[
            (15, &[1, 2]),
            (42, &[1, 3, 4, 5, 6]),
            // Shorter, then of other blocks: new histories.
            (20, &[1, 3]),
            (30, &[9, 10, 11]),
            // Nothing but the answer has come to it.
            (33, &[9, 10, 11, 12]),
        ]);
        assert_eq!(added(&trace, 0), (true, vec![(1, 10), (2, 5)]));
        // 42 tokens less 15 and an answer of 4.
        assert_eq!(added(&trace, 1), (false, vec![(3, 1), (4, 10), (5, 10), (6, 2)]));
        assert_eq!(added(&trace, 2), (true, vec![(1, 10), (3, 10)]));
        assert_eq!(added(&trace, 3), (true, vec![(9, 10), (10, 10), (11, 10)]));
        assert_eq!(added(&trace, 4), (false, vec![(12, 1)]));
    }

    proptest! {
        #[test]
        fn a_history_grows_to_the_trace_s_prompts(lengths in prop::collection::vec(1u32..90, 1..12)) {
            let sums: Vec<u32> = lengths.iter().scan(0, |sum, n| { *sum += n + 4; Some(*sum) }).collect();
            let ids: Vec<u64> = (0..200).collect();
            // The last, partial block has no id.
            let prompts: Vec<(u32, &[u64])> =
                sums.iter().map(|&tokens| (tokens, &ids[..tokens as usize / 10])).collect();
            let trace = trace(&prompts);
            let mut said = 0;
            for (row, &tokens) in sums.iter().enumerate() {
                let ask = turn(&trace, Scale::of(1.0, 10), row);
                prop_assert_eq!(said + ask.prompt_tokens(), u64::from(tokens));
                prop_assert!(ask.blocks.iter().all(|block| !is_unshared(block.id)));
                said += ask.prompt_tokens() + ask.output_tokens;
            }
        }
    }
}
