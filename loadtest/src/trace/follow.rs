//! What follows what in traces of single requests: by the chats' own ids, or, where there are none, by a
//! prompt that goes on where an earlier one ended. Such traces do not tell how long an answer took: a turn
//! waits as long as it came behind the row that it follows.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use serde::Deserialize;

use super::{Row, links::Link};

/// How a request names itself, and the one that it follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub(super) struct Chat {
    chat_id: i64,
    #[serde(default = "nobody")]
    parent_chat_id: i64,
}

/// No request has this id.
fn nobody() -> i64 {
    -1
}

/// By the chats' ids. A row whose parent is not in the trace begins a session.
pub(super) fn of_chats(rows: &[Row], chats: &[Option<Chat>]) -> Vec<Link> {
    let mut rows_of = HashMap::new();
    let before = chats.iter().zip(0..).map(|(chat, row)| {
        let chat = chat.as_ref()?;
        let before = (chat.parent_chat_id >= 0).then(|| rows_of.get(&chat.parent_chat_id).copied()).flatten();
        rows_of.insert(chat.chat_id, row);
        before
    });
    linked(rows, before.collect())
}

/// By the prompts' whole blocks: a row follows the longest earlier prompt that it begins with. Each is
/// followed once, and one that other prompts had before, such as the system prompt alone, by none.
pub(super) fn of_blocks(rows: &[Row], block_tokens: u32) -> Vec<Link> {
    // Ids are prefix hashes: a prompt's last whole block stands for all of them.
    let mut open: HashMap<u64, u32> = HashMap::new();
    let mut seen = HashSet::new();
    let mut before = Vec::with_capacity(rows.len());
    for (row, number) in rows.iter().zip(0..) {
        let whole = ((row.input_tokens / block_tokens) as usize).min(row.blocks.len());
        let blocks = &row.blocks[..whole];
        let is_shorter = |&earlier: &u32| rows[earlier as usize].input_tokens < row.input_tokens;
        let found = blocks.iter().rev().find(|id| open.get(id).is_some_and(is_shorter));
        let found = found.and_then(|id| open.remove(id));
        before.push(found);
        if let Some(&last) = blocks.last()
            && (found.is_some() || !seen.contains(&last))
        {
            open.insert(last, number);
        }
        seen.extend(blocks.iter().copied());
    }
    linked(rows, before)
}

/// The links of rows that each follow at most one. Who follows a row first is its agent's next turn; any
/// other branch is an agent of its own.
fn linked(rows: &[Row], before: Vec<Option<u32>>) -> Vec<Link> {
    let mut links: Vec<Link> = Vec::with_capacity(rows.len());
    let (mut agents, mut is_followed) = (Vec::<u32>::new(), vec![false; rows.len()]);
    for (row, before) in rows.iter().zip(before) {
        let Some(before) = before else {
            let session = agents.len() as u32;
            agents.push(1);
            let (after, wait) = (Box::default(), Duration::ZERO);
            links.push(Link { session, agent: 0, parent: None, turn: 0, after, wait });
            continue;
        };
        let earlier = &links[before as usize];
        let is_branch = std::mem::replace(&mut is_followed[before as usize], true);
        let (agent, parent, turn) = if is_branch {
            let count = &mut agents[earlier.session as usize];
            *count += 1;
            (*count - 1, Some(earlier.agent), 0)
        } else {
            (earlier.agent, earlier.parent, earlier.turn + 1)
        };
        let wait = Duration::from_millis(row.timestamp_ms - rows[before as usize].timestamp_ms);
        links.push(Link { session: earlier.session, agent, parent, turn, after: [before].into(), wait });
    }
    links
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::trace::sessions::tests::assert_links_hold;

    fn row(timestamp_ms: u64, input_tokens: u32, blocks: &[u64]) -> Row {
        Row { timestamp_ms, input_tokens, output_tokens: 1, blocks: blocks.into() }
    }

    fn places(links: &[Link]) -> Vec<(u32, u32, u32)> {
        links.iter().map(|link| (link.session, link.agent, link.turn)).collect()
    }

    #[test]
    fn chats_follow_the_chat_that_they_name() {
        let chat = |chat_id, parent_chat_id| Some(Chat { chat_id, parent_chat_id });
        let chats = [chat(7, -1), chat(8, 7), chat(9, 99), None, chat(10, 8), chat(11, 7)];
        let rows: Vec<Row> = (0..6).map(|i| row(i * 100, 9, &[])).collect();
        let links = of_chats(&rows, &chats);
        // The last asks again behind the first: a branch.
        assert_eq!(places(&links), [(0, 0, 0), (0, 0, 1), (1, 0, 0), (2, 0, 0), (0, 0, 2), (0, 1, 0)]);
        assert_eq!((&*links[4].after, links[4].wait), (&[1][..], Duration::from_millis(300)));
        assert_eq!(links[5].parent, Some(0));
        assert_links_hold(&rows, &links);
    }

    #[test]
    fn a_prompt_follows_the_longest_one_that_it_goes_on_from() {
        let rows = [
            row(0, 20, &[1, 2]),
            row(1, 30, &[1, 2, 3]),
            row(2, 40, &[1, 2, 3, 4]),
            // Its whole blocks are those of the first, which is followed already.
            row(3, 20, &[1, 2]),
            // Nobody follows what several prompts begin with.
            row(4, 30, &[1, 2, 9]),
            // Its last block is not whole.
            row(5, 35, &[5, 6, 7, 8]),
            row(6, 55, &[5, 6, 7, 18, 19, 20]),
            row(7, 5, &[]),
        ];
        let links = of_blocks(&rows, 10);
        let want = [(0, 0, 0), (0, 0, 1), (0, 0, 2), (1, 0, 0), (2, 0, 0), (3, 0, 0), (3, 0, 1), (4, 0, 0)];
        assert_eq!(places(&links), want);
        assert_links_hold(&rows, &links);
    }

    proptest! {
        #[test]
        fn links_hold_whatever_the_trace_says(
            chats in prop::collection::vec(prop::option::of((0i64..9, -1i64..9)), 1..40),
            prompts in prop::collection::vec((0u64..5, 1u32..60, 0u64..3), 1..40),
        ) {
            let of = |(chat_id, parent_chat_id)| Chat { chat_id, parent_chat_id };
            let chats: Vec<_> = chats.into_iter().map(|chat| chat.map(of)).collect();
            let rows: Vec<Row> = (0..chats.len()).map(|i| row(i as u64, 9, &[])).collect();
            assert_links_hold(&rows, &of_chats(&rows, &chats));
            let mut at = 0;
            let rows: Vec<Row> = prompts.into_iter().map(|(gap, tokens, kind)| {
                at += gap;
                let blocks: Vec<u64> = (0..u64::from(tokens.div_ceil(10))).map(|i| i * (kind + 1)).collect();
                row(at, tokens, &blocks)
            }).collect();
            assert_links_hold(&rows, &of_blocks(&rows, 10));
        }
    }
}
