//! Which events must be read once content has come: those in which a word stands that may matter. One event
//! of an answer is much like the one before, so only that is searched in which it differs.

use std::ops::Range;
use std::sync::LazyLock;

use aho_corasick::packed::{Config, MatchKind, Searcher};

use crate::usage;

/// Words of which none stands in an event that says nothing but content. The first two are said of every
/// chunk, mostly with null.
const WORDS: [&str; 14] = [
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
    USAGE,
];
/// The one that is told of apart.
const USAGE: &str = "\"usage\"";
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
const STEP: usize = 32;

/// The events before, if they said nothing but content.
#[derive(Debug, Default)]
pub(super) struct Before {
    events: Vec<u8>,
    /// They name a usage.
    usage: bool,
}

/// Which words stand in some events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Words {
    /// One that may matter.
    pub(super) matter: bool,
    /// The name of a usage.
    pub(super) usage: bool,
}

impl Before {
    /// The words in these events, which take the place of those before.
    pub(super) fn words(&mut self, events: &[u8]) -> Words {
        let Some(news) = self.news(events) else { return Words { matter: false, usage: self.usage } };
        let mut words = Words::within(events, news);
        // What was named before may still be.
        words.usage = words.usage || (self.usage && usage::is_mentioned(events));
        self.events.clear();
        if !words.matter && events.len() <= KEPT_BYTES_MAX {
            self.events.extend_from_slice(events);
        }
        self.usage = words.usage;
        words
    }

    /// Where in some events all words lie that are not among those before, or have another value there.
    /// `None` where they are the same.
    fn news(&self, events: &[u8]) -> Option<Range<usize>> {
        let (begins, begin) = (self.events.as_chunks::<STEP>().0, events.as_chunks::<STEP>().0);
        let begin = STEP * begins.iter().zip(begin).take_while(|(a, b)| a == b).count();
        let (left, news) = (&self.events[begin..], &events[begin..]);
        if left == news && !events.is_empty() {
            return None;
        }
        let ends = left.as_rchunks::<STEP>().1.iter().rev().zip(news.as_rchunks::<STEP>().1.iter().rev());
        let end = STEP * ends.take_while(|(a, b)| a == b).count();
        // A word at the end of what is the same may have another value behind it now.
        let value = events[..begin].iter().rev().take_while(|byte| is_between(**byte)).count();
        let from = begin.saturating_sub(value + WORD_BYTES_MAX);
        let to = (events.len() - end + WORD_BYTES_MAX).min(events.len());
        Some(from.min(to)..to)
    }
}

/// Whether a byte may stand between a field's name and its value.
fn is_between(byte: u8) -> bool {
    matches!(byte, b':' | b' ' | b'\t')
}

impl Words {
    /// Those that lie within a part of some events.
    fn within(events: &[u8], part: Range<usize>) -> Self {
        let Some(search) = &*SEARCH else { return Self { matter: true, usage: usage::is_mentioned(events) } };
        let from = part.start;
        let mut words = Self { matter: false, usage: false };
        for found in search.find_iter(&events[part]) {
            let pattern = found.pattern().as_usize();
            if WORDS[pattern] == USAGE {
                words.usage = true;
                continue;
            }
            let behind = events[from + found.end()..].iter().find(|byte| !is_between(**byte));
            words.matter |= pattern >= WITH_VALUE || behind != Some(&b'n');
        }
        words
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        api::{Api, Said},
        sse::events,
    };

    const TOKEN: &str = concat!(
        "data: {\"id\":\"chatcmpl-0123456789abcdef\",\"object\":\"chat.completion.chunk\",\"created\":1764000000,",
        "\"model\":\"a-model-of-some-name\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"},\"finish_reason\":null}]}\n\n",
    );

    #[test]
    fn only_what_is_new_is_searched() {
        let mut before = Before::default();
        assert!(!before.words(TOKEN.as_bytes()).matter);
        assert_eq!(before.news(TOKEN.as_bytes()), None);
        let other = TOKEN.replace(":\"a\"", ":\" of other words\"");
        assert!(before.news(other.as_bytes()).unwrap().len() < 2 * (STEP + WORD_BYTES_MAX) + 20);
        assert!(!before.words(other.as_bytes()).matter);
        let stop = TOKEN.replace("null", "\"stop\"");
        assert!(before.words(stop.as_bytes()).matter && before.words(stop.as_bytes()).matter);
    }

    #[test]
    fn a_value_that_changes_far_behind_its_name_is_seen() {
        for gap in 0..80 {
            let spaced = |value: &str| format!("data: {{\"finish_reason\"{}{value}}}\n\n", " ".repeat(gap));
            let mut before = Before::default();
            assert!(!before.words(spaced("null").as_bytes()).matter);
            assert!(before.words(spaced("\"stop\"").as_bytes()).matter, "{gap}");
        }
    }

    #[test]
    fn little_is_kept_of_an_answer() {
        let mut before = Before::default();
        let long = TOKEN.repeat(100);
        assert!(!before.words(long.as_bytes()).matter);
        assert!(before.events.capacity() <= KEPT_BYTES_MAX);
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
                prop_assert_eq!(before.words(&event), Words::within(&event, 0..event.len()));
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
                prop_assert_eq!(before.words(&event), Words::within(&event, 0..event.len()));
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
                prop_assert!(Before::default().words(stream.as_bytes()).matter, "{}", stream);
            }
        }
    }
}
