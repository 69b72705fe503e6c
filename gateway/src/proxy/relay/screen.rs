//! What a worker's events say, looked at before anything becomes of them: whether content was generated, how
//! far the answer has come to its end, and where it says that it failed. Up to its first content every event
//! is read; afterwards only those are in which a word stands that may matter.

use super::notable::{Before, Words};
use crate::{
    api::{Api, AtFault, End, Said},
    sse::events,
    usage,
};

/// What is known of a stream.
#[derive(Debug)]
pub(super) struct Screen {
    api: Api,
    /// The worker at hand has generated content.
    generated: bool,
    end: Option<End>,
    /// An error event has gone to the client.
    faulty: bool,
    /// Events so far, where the API numbers them.
    events: u64,
    /// What came last, once content has come.
    before: Before,
}

/// What some whole events say.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Seen {
    /// There is content among them, up to the fault.
    pub(super) generated: bool,
    /// There is more among them than the word that an answer was begun.
    pub(super) binds: bool,
    /// They name a usage, or may.
    pub(super) mentions_usage: bool,
    /// The first event that says that the answer failed.
    pub(super) failing: Option<Failing>,
}

/// An event that says that the answer failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Failing {
    /// Where it begins and ends in the bytes.
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) fault: AtFault,
    /// It is no error event: the engine has only aborted the answer.
    pub(super) aborts: bool,
    /// Clients raise an error on it.
    pub(super) raises: bool,
}

impl Screen {
    pub(super) fn new(api: Api) -> Self {
        Self { api, generated: false, end: None, faulty: false, events: 0, before: Before::default() }
    }

    /// Another worker's stream begins.
    pub(super) fn goes_on(&mut self) {
        (self.generated, self.end) = (false, None);
    }

    /// Looks at whole events.
    pub(super) fn see(&mut self, bytes: &[u8]) -> Seen {
        if self.api == Api::Responses {
            self.events += events(bytes).filter(|event| event.data.is_some()).count() as u64;
        }
        let words = if self.generated {
            self.before.words(bytes)
        } else {
            Words { matter: true, usage: usage::is_mentioned(bytes) }
        };
        let (generated, binds) = (self.generated, self.generated);
        let mut seen = Seen { generated, binds, mentions_usage: words.usage, failing: None };
        if !words.matter {
            return seen;
        }
        let mut from = 0;
        for event in events(bytes) {
            let said = Said::of(self.api, &event);
            let to = from + event.raw.len();
            if let Some(fault) = said.fault {
                let aborts = said.aborts;
                seen.failing = Some(Failing { from, to, fault, aborts, raises: said.raises });
                return seen;
            }
            seen.generated |= said.generated;
            seen.binds |= said.binds;
            self.generated |= said.generated;
            self.end = self.end.max(said.end);
            from = to;
        }
        seen
    }

    /// An error event goes to the client.
    pub(super) fn failed(&mut self) {
        self.faulty = true;
    }

    /// Whether an error event has gone to the client.
    pub(super) fn is_faulty(&self) -> bool {
        self.faulty
    }

    /// Whether the stream has said all that it had to say.
    pub(super) fn is_done(&self) -> bool {
        self.end == Some(End::Done)
    }

    /// Whether the stream may end here.
    pub(super) fn may_end(&self) -> bool {
        self.end.is_some() || self.faulty || !self.api.says_its_end()
    }

    /// Events so far, where the API numbers them.
    pub(super) fn events(&self) -> u64 {
        self.events
    }

    /// Whether what is left at a stream's end is a whole event that only lacks its blank line.
    pub(super) fn is_whole(&self, tail: &[u8]) -> bool {
        let Some(event) = events(tail).last() else { return true };
        let ended = tail.ends_with(b"\n") || tail.ends_with(b"\r");
        match event.data.as_deref().map(<[u8]>::trim_ascii) {
            None => ended,
            Some(b"[DONE]") => true,
            Some([b'{', ..]) => {
                let json = event.text().map(serde_json::from_str::<serde::de::IgnoredAny>);
                json.is_some_and(|json| json.is_ok())
            }
            Some(_) => ended && !self.api.says_its_end(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROLE: &str = "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n";
    const TOKEN: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"},\"finish_reason\":null}]}\n\n";
    const STOP: &str = "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n";
    const ABORT: &str = "data: {\"choices\":[{\"delta\":{},\"finish_reason\": \"abort\"}]}\n\n";
    const ERROR: &str = "data: {\"error\":{\"message\":\"x\",\"code\":500}}\n\n";
    const DONE: &str = "data: [DONE]\n\n";

    #[test]
    fn content_is_seen_where_it_is() {
        let mut screen = Screen::new(Api::Chat);
        for quiet in [": ping\n\n", ROLE, "data: {\"choices\":[],\"error\":null}\n\n"] {
            let seen = screen.see(quiet.as_bytes());
            assert_eq!((seen.generated, seen.binds, seen.failing), (false, false, None), "{quiet}");
        }
        assert!(!screen.generated);
        assert!(screen.see(TOKEN.as_bytes()).generated && screen.generated);
    }

    #[test]
    fn an_end_is_seen_before_and_behind_content() {
        for before in ["", TOKEN] {
            let mut screen = Screen::new(Api::Chat);
            screen.see(before.as_bytes());
            assert!(!screen.may_end());
            screen.see(STOP.as_bytes());
            assert!(screen.may_end() && !screen.is_done());
            screen.see(DONE.as_bytes());
            assert!(screen.is_done());
        }
    }

    #[test]
    fn a_fault_is_found_in_its_place() {
        for (fault, aborts) in [(ABORT, true), (ERROR, false)] {
            let mut screen = Screen::new(Api::Chat);
            let stream = [TOKEN, fault, TOKEN].concat();
            let failing = screen.see(stream.as_bytes()).failing.unwrap();
            assert_eq!(&stream[failing.from..failing.to], fault);
            assert_eq!((failing.fault, failing.aborts, failing.raises), (AtFault::Worker, aborts, !aborts));
            assert!(!screen.may_end());
        }
    }

    #[test]
    fn a_tail_is_whole_only_where_all_of_an_event_is_there() {
        let screen = Screen::new(Api::Chat);
        for whole in ["", "data: [DONE]", "data: [DONE]\n", "data: {\"a\":[1]}\n", ": ping\n"] {
            assert!(screen.is_whole(whole.as_bytes()), "{whole:?}");
        }
        for half in ["data: {\"a\":[1]", "data: {\"a\":1}}", "data: [DON", "event: mess", "data: hal\n"] {
            assert!(!screen.is_whole(half.as_bytes()), "{half:?}");
        }
    }
}
