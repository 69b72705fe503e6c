//! A stream of which the client has no content yet: it may begin anew at any worker. What the client has seen
//! of its opening (a role, "the answer was created") is not said again, and later chunks bear the first one's
//! name, so that it sees one answer.

use bytes::Bytes;

use super::{Obstacle, PassedOn, chunk::Chunk, chunk::Identity, memory::Reservation};
use crate::{
    api::{Api, Said},
    sse::{Event, events},
};

/// What the client has of such a stream.
#[derive(Debug)]
pub(super) struct Restart {
    api: Api,
    /// Why the stream cannot go on elsewhere once there is content.
    obstacle: Obstacle,
    /// Of the request; `None` once it is of no more use.
    room: Option<Reservation>,
    /// Whether the client has seen an opening.
    opened: bool,
    /// The name of the answer that it has seen, where chunks bear one.
    identity: Option<Identity>,
    /// Another worker's stream has taken the place of the first one.
    renewed: bool,
}

impl Restart {
    pub(super) fn new(api: Api, obstacle: Obstacle, room: Reservation) -> Self {
        Self { api, obstacle, room: Some(room), opened: false, identity: None, renewed: false }
    }

    /// Whether the stream may still begin anew.
    pub(super) fn may_begin(&self) -> Result<(), Obstacle> {
        if self.room.is_some() { Ok(()) } else { Err(self.obstacle) }
    }

    /// Another worker's stream begins.
    pub(super) fn renewed(&mut self) {
        self.renewed = true;
    }

    /// Takes whole events. `binds`: there is more among them than an opening.
    pub(super) fn tell(&mut self, bytes: Bytes, binds: bool) -> PassedOn {
        if self.renewed && self.opened {
            return PassedOn { bytes: self.one_answer(&bytes), over: None };
        }
        if binds {
            return PassedOn { bytes, over: Some(self.obstacle) };
        }
        for event in events(&bytes).filter(|event| event.data.is_some()) {
            self.opened = true;
            if matches!(self.api, Api::Chat | Api::Completions) && self.identity.is_none() {
                self.identity = event.text().and_then(Chunk::read).map(|chunk| chunk.identity());
            }
        }
        PassedOn { bytes, over: None }
    }

    /// Another worker's events, as those of the answer that the client has seen begin.
    fn one_answer(&mut self, bytes: &Bytes) -> Bytes {
        let mut out = Vec::with_capacity(bytes.len());
        for event in events(bytes) {
            if event.data.is_none() || self.room.is_none() {
                self.renamed(&event, &mut out);
            } else if Said::of(self.api, &event).binds {
                self.room = None;
                self.renamed(&event, &mut out);
            }
        }
        out.into()
    }

    fn renamed(&self, event: &Event<'_>, out: &mut Vec<u8>) {
        let chunk = event.text().and_then(Chunk::read).zip(self.identity.as_ref());
        match chunk {
            Some((chunk, identity)) => event.write_with(Some(&chunk.named(identity)), out),
            None => out.extend_from_slice(event.raw),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use prometheus::IntGauge;

    use super::*;
    use crate::proxy::resume::memory::Memory;

    fn restart(api: Api) -> Restart {
        let memory = Arc::new(Memory::new(1 << 20, IntGauge::new("g", "g").unwrap()));
        Restart::new(api, Obstacle::Engine, memory.reserve(9).unwrap())
    }

    fn tell(restart: &mut Restart, event: &str) -> String {
        let binds = events(event.as_bytes()).any(|event| Said::of(restart.api, &event).binds);
        let passed = restart.tell(Bytes::copy_from_slice(event.as_bytes()), binds);
        assert_eq!(passed.over.is_some(), binds && !restart.renewed, "{event}");
        String::from_utf8(passed.bytes.to_vec()).unwrap()
    }

    #[test]
    fn an_opening_is_said_once_and_one_answer_has_one_name() {
        for end in ["\n\n", "\r\n\r\n"] {
            let role = |id: &str| {
                format!(
                    "data: {{\"id\":\"{id}\",\"created\":{},\"choices\":[{{\"delta\":{{\"role\":\"assistant\"}}}}]}}{end}",
                    id.len()
                )
            };
            let token = |id: &str| {
                format!(
                    "data: {{\"id\":\"{id}\",\"created\":{},\"choices\":[{{\"delta\":{{\"content\":\"a\"}}}}]}}{end}",
                    id.len()
                )
            };
            let mut restart = restart(Api::Chat);
            assert_eq!(tell(&mut restart, &role("first")), role("first"));
            restart.renewed();
            assert_eq!(tell(&mut restart, ": ping\n\n"), ": ping\n\n");
            assert_eq!(tell(&mut restart, &role("b")), "");
            assert!(restart.may_begin().is_ok());
            assert_eq!(tell(&mut restart, &token("b")), token("first"));
            assert_eq!(restart.may_begin(), Err(Obstacle::Engine));
            assert_eq!(tell(&mut restart, &role("b")), role("first"), "what follows content is content's");
            assert_eq!(tell(&mut restart, "data: [DONE]\n\n"), "data: [DONE]\n\n");
        }
    }

    #[test]
    fn the_openings_of_other_apis_are_said_once_too() {
        for (api, opening, content) in [
            (
                Api::Responses,
                "event: response.created\ndata: {\"type\":\"response.created\"}\n\n",
                "data: {\"type\":\"response.output_text.delta\",\"delta\":\"a\"}\n\n",
            ),
            (
                Api::Messages,
                "event: message_start\ndata: {\"type\":\"message_start\"}\n\n",
                "data: {\"type\":\"content_block_start\",\"content_block\":{\"type\":\"text\",\"text\":\"\"}}\n\n",
            ),
        ] {
            let mut restart = restart(api);
            assert_eq!(tell(&mut restart, opening), opening);
            restart.renewed();
            assert_eq!(tell(&mut restart, &[opening, content].concat()), content);
        }
    }

    #[test]
    fn without_an_opening_the_other_stream_is_as_it_comes() {
        let mut restart = restart(Api::Chat);
        assert_eq!(tell(&mut restart, ": ping\n\n"), ": ping\n\n");
        restart.renewed();
        let stream = "data: {\"id\":\"b\",\"choices\":[{\"delta\":{\"role\":\"assistant\"}}]}\n\n";
        assert_eq!(tell(&mut restart, stream), stream);
    }
}
