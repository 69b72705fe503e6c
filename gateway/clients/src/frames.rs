//! Counts the frames of HTTP/2 that ask for nothing and have to be dealt with: PING, SETTINGS, WINDOW_UPDATE,
//! PRIORITY and types that are not known (RFC 9113, section 6). A client sends some for what it reads, so
//! what is written to it earns them; one that sends many more keeps a core busy at no cost of its own. Frames
//! that ask for something are counted where they are understood.

use tokio::time::Instant;

use crate::limits::{H2_CONTROL_BURST, H2_CONTROL_BYTES_EACH, H2_CONTROL_PER_REQUEST, H2_CONTROL_PER_SECOND};

const HEAD_BYTES: usize = 9;
/// The frame types of HTTP/2 that are told apart here, by their numbers in RFC 9113, section 6.
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const CONTINUATION: u8 = 9;

/// One connection's, from behind the preface on.
#[derive(Debug)]
pub(crate) struct Frames {
    head: [u8; HEAD_BYTES],
    /// Bytes of the head that have come.
    came: usize,
    /// Bytes of the frame's payload that are still to come.
    payload: usize,
    /// Frames that it may still send.
    left: u64,
    /// Bytes of the answers that such frames themselves are given, which earn nothing.
    answers: usize,
    /// Until when time has earned it some.
    earned: Instant,
}

impl Frames {
    pub(crate) fn new() -> Self {
        Self {
            head: [0; HEAD_BYTES],
            came: 0,
            payload: 0,
            left: H2_CONTROL_BURST,
            answers: 0,
            earned: Instant::now(),
        }
    }

    /// So much was written to the client.
    pub(crate) fn wrote(&mut self, bytes: usize) {
        let answers = self.answers.min(bytes);
        self.answers -= answers;
        self.earn((bytes - answers) as u64 / H2_CONTROL_BYTES_EACH);
    }

    /// What comes of it. `false` if it is too much.
    pub(crate) fn may_come(&mut self, mut bytes: &[u8]) -> bool {
        let mut may = true;
        loop {
            let skipped = self.payload.min(bytes.len());
            self.payload -= skipped;
            bytes = &bytes[skipped..];
            let room = &mut self.head[self.came..];
            let taken = room.len().min(bytes.len());
            room[..taken].copy_from_slice(&bytes[..taken]);
            self.came += taken;
            bytes = &bytes[taken..];
            if self.came < HEAD_BYTES {
                return may;
            }
            let [a, b, c, kind, ..] = self.head;
            (self.came, self.payload) = (0, u32::from_be_bytes([0, a, b, c]) as usize);
            match kind {
                PING => self.answers += HEAD_BYTES + self.payload,
                SETTINGS => self.answers += HEAD_BYTES,
                _ => {}
            }
            match kind {
                HEADERS => self.earn(H2_CONTROL_PER_REQUEST),
                DATA | RST_STREAM | CONTINUATION => {}
                _ => may &= self.spend(),
            }
        }
    }

    fn spend(&mut self) -> bool {
        if self.left == 0 {
            // The clock is read once in many frames.
            let (now, before) = (Instant::now(), self.earned);
            self.earned = now;
            self.earn(
                now.saturating_duration_since(before).as_millis() as u64 * H2_CONTROL_PER_SECOND / 1_000,
            );
        }
        let may = self.left > 0;
        self.left = self.left.saturating_sub(1);
        may
    }

    fn earn(&mut self, frames: u64) {
        self.left = (self.left + frames).min(H2_CONTROL_BURST);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn frame(kind: u8, payload: usize) -> Vec<u8> {
        let mut frame = (payload as u32).to_be_bytes()[1..].to_vec();
        frame.extend([kind, 0, 0, 0, 0, 0]);
        frame.resize(HEAD_BYTES + payload, 0xff);
        frame
    }

    /// How many of such a frame a connection takes.
    fn taken(frames: &mut Frames, kind: u8, most: usize) -> usize {
        let one = frame(kind, 8);
        (0..most).take_while(|_| frames.may_come(&one)).count()
    }

    #[tokio::test(start_paused = true)]
    async fn what_asks_for_nothing_is_bounded_whatever_it_is() {
        for kind in [2, 4, 5, 6, 7, 8, 10, 0xff] {
            assert_eq!(taken(&mut Frames::new(), kind, 10_000), H2_CONTROL_BURST as usize, "type {kind}");
        }
        for kind in [DATA, HEADERS, RST_STREAM, CONTINUATION] {
            assert_eq!(taken(&mut Frames::new(), kind, 10_000), 10_000, "type {kind}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn time_requests_and_what_is_written_earn_some() {
        let mut frames = Frames::new();
        let burst = H2_CONTROL_BURST as usize;
        assert_eq!(taken(&mut frames, 6, 10_000), burst);
        tokio::time::advance(Duration::from_secs(2)).await;
        assert_eq!(taken(&mut frames, 6, 10_000), 2 * H2_CONTROL_PER_SECOND as usize);
        // The answers to the pings above are no events of a stream.
        frames.wrote((burst + 2 * H2_CONTROL_PER_SECOND as usize + 2) * (HEAD_BYTES + 8));
        assert_eq!(taken(&mut frames, 8, 10_000), 0);
        frames.wrote(1_000 * H2_CONTROL_BYTES_EACH as usize);
        assert_eq!(taken(&mut frames, 8, 10_000), 1_000);
        assert_eq!(taken(&mut frames, HEADERS, 10), 10);
        assert_eq!(taken(&mut frames, 8, 10_000), 10 * H2_CONTROL_PER_REQUEST as usize);
        // No more than at first, however long it has waited.
        tokio::time::advance(Duration::from_secs(100_000)).await;
        assert_eq!(taken(&mut frames, 6, 10_000), burst);
    }

    proptest! {
        #[test]
        fn it_does_not_matter_in_which_pieces_frames_come(
            sent in prop::collection::vec((0_u8..12, 0_usize..40), 0..60),
            cuts in prop::collection::vec(1_usize..50, 1..20),
        ) {
            let bytes: Vec<u8> = sent.iter().flat_map(|(kind, payload)| frame(*kind, *payload)).collect();
            let (mut whole, mut pieces) = (Frames::new(), Frames::new());
            prop_assert!(whole.may_come(&bytes));
            let (mut rest, mut cuts) = (&bytes[..], cuts.iter().cycle());
            while !rest.is_empty() {
                let (piece, later) = rest.split_at(rest.len().min(*cuts.next().unwrap()));
                prop_assert!(pieces.may_come(piece));
                rest = later;
            }
            prop_assert_eq!((whole.left, whole.payload, whole.came), (pieces.left, 0, 0));
            prop_assert_eq!((pieces.payload, pieces.came), (0, 0));
        }
    }
}
