//! Which events must be read once content has come: those in which a word stands that may matter. One event
//! of an answer is much like the one before, so only that is searched in which it differs.

use std::ops::Range;
use std::sync::LazyLock;

use aho_corasick::packed::{Config, MatchKind, Searcher};

/// Words of which none stands in an event that says nothing but content. The first two are said of every
/// chunk, mostly with null.
const WORDS: [&str; 13] = [
    "finish_reason\"",
    "stop_reason\"",
    "\"error\"",
    "[DONE]",
    "message_stop",
    // Of a response, as are the next three.
    "completed\"",
    "incomplete\"",
    ".failed\"",
    ".cancelled\"",
    "\"abort\"",
    "\"detail\"",
    "event: error",
    "event:error",
];
/// Of [`WORDS`], those that say nothing with null behind them.
const WITH_VALUE: usize = 2;
/// Bytes of the longest of [`WORDS`].
const WORD_BYTES_MAX: usize = "finish_reason\"".len();

/// Made once: to set a search up takes longer than to look through an event. It compares a register of bytes
/// at a time; an automaton, which goes byte by byte, took a quarter of all instructions that an event costs.
/// `None` on a processor that cannot do that: there every event is read.
static SEARCH: LazyLock<Option<Searcher>> =
    LazyLock::new(|| Config::new().match_kind(MatchKind::LeftmostFirst).builder().extend(WORDS).build());

/// Events beyond this size are not kept, and so the ones behind them are searched whole.
const KEPT_BYTES_MAX: usize = 1 << 10;
/// Bytes that are compared at once.
const STEP: usize = 16;

/// The events before, if they said nothing but content.
#[derive(Debug, Default)]
pub(super) struct Before(Vec<u8>);

impl Before {
    /// Whether a word that may matter stands in these events, which take the place of those before.
    pub(super) fn is_notable(&mut self, events: &[u8]) -> bool {
        let is_notable = is_notable(events, self.news(events));
        self.0.clear();
        if !is_notable && events.len() <= KEPT_BYTES_MAX {
            self.0.extend_from_slice(events);
        }
        is_notable
    }

    /// Where in some events all words lie that are not among those before, or have another value there.
    fn news(&self, events: &[u8]) -> Range<usize> {
        let (begins, begin) = (self.0.as_chunks::<STEP>().0, events.as_chunks::<STEP>().0);
        let begin = STEP * begins.iter().zip(begin).take_while(|(a, b)| a == b).count();
        let end = same_at_end(&self.0[begin..], &events[begin..]);
        if begin + end == events.len() && events.len() == self.0.len() {
            return 0..0;
        }
        // A word at the end of what is the same may have another value behind it now.
        let value = events[..begin].iter().rev().take_while(|byte| is_between(**byte)).count();
        let from = begin.saturating_sub(value + WORD_BYTES_MAX);
        let to = (events.len() - end + WORD_BYTES_MAX).min(events.len());
        from.min(to)..to
    }
}

/// How many bytes are the same at the ends of both.
fn same_at_end(a: &[u8], b: &[u8]) -> usize {
    let steps = a.as_rchunks::<STEP>().1.iter().rev().zip(b.as_rchunks::<STEP>().1.iter().rev());
    let same = STEP * steps.take_while(|(a, b)| a == b).count();
    let bytes = a[..a.len() - same].iter().rev().zip(b[..b.len() - same].iter().rev());
    same + bytes.take_while(|(a, b)| a == b).count()
}

/// Whether a byte may stand between a field's name and its value.
fn is_between(byte: u8) -> bool {
    matches!(byte, b':' | b' ' | b'\t')
}

/// Whether a word that may matter lies within a part of some events.
fn is_notable(events: &[u8], within: Range<usize>) -> bool {
    let Some(words) = &*SEARCH else { return true };
    let from = within.start;
    words.find_iter(&events[within]).any(|found| {
        let behind = events[from + found.end()..].iter().find(|byte| !is_between(**byte));
        found.pattern().as_usize() >= WITH_VALUE || behind != Some(&b'n')
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        api::{Api, Said},
        sse::events,
    };

    const TOKEN: &str = "data: {\"id\":\"chatcmpl-1\",\"choices\":[{\"delta\":{\"content\":\"a\"},\"finish_reason\":null}]}\n\n";

    #[test]
    fn only_what_is_new_is_searched() {
        let mut before = Before::default();
        assert!(!before.is_notable(TOKEN.as_bytes()));
        assert_eq!(before.news(TOKEN.as_bytes()).len(), 0);
        let other = TOKEN.replace(":\"a\"", ":\" of other words\"");
        assert!(before.news(other.as_bytes()).len() < other.len() / 2 + 2 * WORD_BYTES_MAX);
        assert!(!before.is_notable(other.as_bytes()));
        let stop = TOKEN.replace("null", "\"stop\"");
        assert!(before.is_notable(stop.as_bytes()) && before.is_notable(stop.as_bytes()));
    }

    #[test]
    fn a_value_that_changes_far_behind_its_name_is_seen() {
        for gap in 0..80 {
            let spaced = |value: &str| format!("data: {{\"finish_reason\"{}{value}}}\n\n", " ".repeat(gap));
            let mut before = Before::default();
            assert!(!before.is_notable(spaced("null").as_bytes()));
            assert!(before.is_notable(spaced("\"stop\"").as_bytes()), "{gap}");
        }
    }

    #[test]
    fn little_is_kept_of_an_answer() {
        let mut before = Before::default();
        let long = TOKEN.repeat(100);
        assert!(!before.is_notable(long.as_bytes()));
        assert!(before.0.capacity() <= KEPT_BYTES_MAX);
    }

    /// What events are made of: words, halves of them, and what may stand between a name and its value.
    fn pieces() -> impl Strategy<Value = Vec<&'static str>> {
        let piece = prop::sample::select(
            WORDS
                .into_iter()
                .chain(WORDS.iter().map(|word| &word[..word.len() / 2]))
                .chain(WORDS.iter().map(|word| &word[word.len() / 2..]))
                .chain([
                    ":",
                    " ",
                    "\t",
                    "null",
                    "\"stop\"",
                    "a",
                    "content",
                    "                    ",
                    "data: {",
                    "}\n\n",
                ])
                .collect::<Vec<_>>(),
        );
        prop::collection::vec(piece, 0..12)
    }

    proptest! {
        /// An event behind others, made of some of their pieces, is told from them as if it stood alone.
        #[test]
        fn what_was_before_hides_nothing(
            (begin, end) in (pieces(), pieces()),
            middles in prop::collection::vec(pieces(), 1..6),
        ) {
            let mut before = Before::default();
            for middle in middles {
                let event = [begin.concat(), middle.concat(), end.concat()].concat().into_bytes();
                prop_assert_eq!(before.is_notable(&event), is_notable(&event, 0..event.len()));
            }
        }

        /// The same of events that are mostly content, of which the one before is kept.
        #[test]
        fn nor_among_much_content(
            events in prop::collection::vec(("[a-z \"]{0,40}", pieces(), 0_usize..8, "[a-z]{0,40}"), 1..8),
        ) {
            let mut before = Before::default();
            for (said, odd, often, more) in events {
                let odd = if often == 0 { odd.concat() } else { "null".to_owned() };
                let event = format!("data: {{\"delta\":\"{said}\",\"finish_reason\":{odd}{more}}}\n\n").into_bytes();
                prop_assert_eq!(before.is_notable(&event), is_notable(&event, 0..event.len()));
            }
        }

        /// Once content has come events are read only where a word stands in them: nothing is missed by that.
        #[test]
        fn what_is_not_read_says_nothing(
            api in prop::sample::select(vec![Api::Chat, Api::Completions, Api::Responses, Api::Messages]),
            name in prop::sample::select(vec!["", "event: error\n", "event:error\n", "event: x\n"]),
            field in prop::sample::select(vec![
                "\"choices\":[{\"finish_reason\":null}]", "\"choices\":[{\"finish_reason\" : \"stop\"}]", "\"error\":{}",
                "\"choices\":[{\"finish_reason\":\"abort\"}]", "\"object\":\"error\"", "\"type\":\"message_stop\"",
                "\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"}", "\"type\":\"response.completed\"",
                "\"type\":\"response.incomplete\"", "\"type\":\"response.failed\"", "\"type\":\"response.cancelled\"",
                "\"type\":\"error\"", "\"detail\":\"x\"", "\"type\":\"abort\"", "\"choices\":[{\"delta\":{\"content\":\"x\"}}]",
            ]),
        ) {
            let stream = format!("{name}data: {{{field}}}\n\n");
            let said = Said::of(api, &events(stream.as_bytes()).next().unwrap());
            if said.end.is_some() || said.fault.is_some() {
                prop_assert!(Before::default().is_notable(stream.as_bytes()), "{}", stream);
            }
        }
    }
}
