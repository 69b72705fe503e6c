//! What two workers say to each other, version 2, over one TCP connection for each transfer. Numbers are
//! little-endian. The importer begins:
//!
//! ```text
//! hello   "KWKV" version u16, nonce [32]                       importer
//! reply   "KWKV" version u16, nonce [32], proof [32]           exporter
//! frame   length u32, kind u8, payload [length], tag [32]      both, from here on
//!         1 ask      transfer u128, first u32, blocks u32, link [32], room, two texts: u16 and bytes
//!         2 offer    blocks u32, whether they come through the room u8
//!         3 refusal  cause u8
//!         4 block    group u8, place u32, link [32], KV
//!         5 end      nothing
//!         6 find     tokens: u32 and ids u32, salt: u16 and bytes, room, two texts
//!         7 from     first u32
//!         8 placed   group u8, place u32, link [32], sum [16]; the KV is in the room
//!         9 read     blocks u32 that the importer has read there
//! room    process u32, file u32, places u32, 0 where there is none: see room.rs
//! ```
//!
//! An ask names a prompt that is kept for the importer. A find has a prompt, of which the importer takes
//! what is cached: the offer says how many blocks these are, and `from` which of them is the first to be
//! sent.
//!
//! A frame's length is checked before memory is taken for it; every tag before its frame is read.

use std::io;
use std::time::Duration;

use bytes::Buf;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::time::timeout;

use super::chain::Link;
use super::fault::Fault;
use super::room::{Mark, Spot};
use super::seal::{Nonce, TAG, Tags};
use crate::limits::KV_FIND_TOKENS_MAX;

/// What this worker speaks.
pub(super) const VERSION: u16 = 2;
const MAGIC: [u8; 4] = *b"KWKV";
/// Bytes of a hello.
pub(super) const HELLO: usize = 4 + 2 + 32;
/// Bytes of a frame before its payload.
const HEAD: usize = 4 + 1;
/// Bytes of a block's frame before its KV.
pub(super) const BLOCK_HEAD: usize = 1 + 4 + 32;
/// Bytes of the largest other frame but a find: an ask's two texts are the most of it.
pub(super) const CONTROL_MAX: usize = 4 << 10;
/// Bytes of the largest find: of its prompt, mostly.
pub(super) const FIND_MAX: usize = CONTROL_MAX + size_of::<u32>() * KV_FIND_TOKENS_MAX;
/// Bytes of the salt, and of each text: both ends' own words are short.
const TEXT_MAX: usize = CONTROL_MAX / 4;

/// What a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Ask = 1,
    Offer = 2,
    Refusal = 3,
    Block = 4,
    End = 5,
    Find = 6,
    From = 7,
    Placed = 8,
    Read = 9,
}

impl Kind {
    const ALL: [Self; 9] = [
        Self::Ask,
        Self::Offer,
        Self::Refusal,
        Self::Block,
        Self::End,
        Self::Find,
        Self::From,
        Self::Placed,
        Self::Read,
    ];

    fn of(byte: u8) -> Result<Self, Fault> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == byte).ok_or(Fault::Protocol)
    }
}

/// What the importer wants, and what it would take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Ask {
    /// As the exporter named it.
    pub(super) transfer: u128,
    /// The first block that the importer does not have.
    pub(super) first: u32,
    /// Blocks of the whole prefix.
    pub(super) blocks: u32,
    /// The name of that prefix.
    pub(super) link: Link,
    pub(super) room: Spot,
    pub(super) numerics_id: String,
    pub(super) layout: String,
}

/// A prompt of which the importer would take what is cached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Find {
    pub(super) tokens: Vec<u32>,
    pub(super) salt: Vec<u8>,
    pub(super) room: Spot,
    pub(super) numerics_id: String,
    pub(super) layout: String,
}

/// Where one block's KV belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BlockHead {
    pub(super) group: u8,
    pub(super) place: u32,
    /// The name of the prefix that ends with the block.
    pub(super) link: Link,
}

/// The first bytes of each end.
pub(super) fn hello(nonce: &Nonce) -> [u8; HELLO] {
    let mut bytes = [0; HELLO];
    bytes[..4].copy_from_slice(&MAGIC);
    bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
    bytes[6..].copy_from_slice(nonce);
    bytes
}

/// The nonce in a hello.
pub(super) fn read_hello(bytes: &[u8; HELLO]) -> Result<Nonce, Fault> {
    if bytes[..4] != MAGIC {
        return Err(Fault::Protocol);
    }
    if bytes[4..6] != VERSION.to_le_bytes() {
        return Err(Fault::Version);
    }
    let mut nonce = [0; 32];
    nonce.copy_from_slice(&bytes[6..]);
    Ok(nonce)
}

impl Ask {
    /// As it is sent.
    pub(super) fn write(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(CONTROL_MAX);
        out.extend(self.transfer.to_le_bytes());
        out.extend(self.first.to_le_bytes());
        out.extend(self.blocks.to_le_bytes());
        out.extend(self.link);
        write_spot(&mut out, self.room);
        write_text(&mut out, &self.numerics_id);
        write_text(&mut out, &self.layout);
        out
    }

    /// What was sent; an error where it is anything else.
    pub(super) fn read(bytes: &[u8]) -> Result<Self, Fault> {
        let mut rest = bytes;
        let ask = Self {
            transfer: u128::from_le_bytes(take(&mut rest)?),
            first: u32::from_le_bytes(take(&mut rest)?),
            blocks: u32::from_le_bytes(take(&mut rest)?),
            link: take(&mut rest)?,
            room: take_spot(&mut rest)?,
            numerics_id: take_text(&mut rest)?,
            layout: take_text(&mut rest)?,
        };
        if rest.is_empty() { Ok(ask) } else { Err(Fault::Protocol) }
    }
}

impl Find {
    /// As it is sent; `None` of what is too long to be sent.
    pub(super) fn write(&self) -> Option<Vec<u8>> {
        if self.tokens.len() > KV_FIND_TOKENS_MAX || self.salt.len() > TEXT_MAX {
            return None;
        }
        let mut out = Vec::with_capacity(size_of::<u32>() * self.tokens.len() + CONTROL_MAX);
        out.extend((self.tokens.len() as u32).to_le_bytes());
        out.extend(self.tokens.iter().flat_map(|id| id.to_le_bytes()));
        out.extend((self.salt.len() as u16).to_le_bytes());
        out.extend(&self.salt);
        write_spot(&mut out, self.room);
        write_text(&mut out, &self.numerics_id);
        write_text(&mut out, &self.layout);
        Some(out)
    }

    /// What was sent; an error where it is anything else.
    pub(super) fn read(bytes: &[u8]) -> Result<Self, Fault> {
        let mut rest = bytes;
        let count = u32::from_le_bytes(take(&mut rest)?) as usize;
        let ids = count.checked_mul(size_of::<u32>()).and_then(|bytes| rest.split_at_checked(bytes));
        let (ids, behind) = ids.ok_or(Fault::Protocol)?;
        rest = behind;
        let (ids, _) = ids.as_chunks::<4>();
        let find = Self {
            tokens: ids.iter().map(|id| u32::from_le_bytes(*id)).collect(),
            salt: take_bytes(&mut rest)?.to_vec(),
            room: take_spot(&mut rest)?,
            numerics_id: take_text(&mut rest)?,
            layout: take_text(&mut rest)?,
        };
        if rest.is_empty() { Ok(find) } else { Err(Fault::Protocol) }
    }
}

impl BlockHead {
    /// As it is sent, before the block's KV or its sum.
    pub(super) fn write(&self) -> [u8; BLOCK_HEAD] {
        let mut out = [0; BLOCK_HEAD];
        out[0] = self.group;
        out[1..5].copy_from_slice(&self.place.to_le_bytes());
        out[5..].copy_from_slice(&self.link);
        out
    }

    /// What was sent, and the KV or its sum.
    pub(super) fn read(bytes: &[u8]) -> Result<(Self, &[u8]), Fault> {
        let mut rest = bytes;
        let [group] = take(&mut rest)?;
        let head = Self { group, place: u32::from_le_bytes(take(&mut rest)?), link: take(&mut rest)? };
        Ok((head, rest))
    }
}

/// An offer of so many blocks.
pub(super) fn write_offer(blocks: u32, is_shared: bool) -> [u8; 5] {
    let [a, b, c, d] = blocks.to_le_bytes();
    [a, b, c, d, u8::from(is_shared)]
}

/// The blocks of an offer, and whether they come through the room.
pub(super) fn read_offer(bytes: &[u8]) -> Result<(u32, bool), Fault> {
    match *bytes {
        [a, b, c, d, shared @ (0 | 1)] => Ok((u32::from_le_bytes([a, b, c, d]), shared == 1)),
        _ => Err(Fault::Protocol),
    }
}

/// The one number of where to begin, or of what was read.
pub(super) fn read_number(bytes: &[u8]) -> Result<u32, Fault> {
    bytes.try_into().map(u32::from_le_bytes).map_err(|_| Fault::Protocol)
}

/// The cause of a refusal.
pub(super) fn read_refusal(bytes: &[u8]) -> Fault {
    match bytes {
        [code] => Fault::told(*code),
        _ => Fault::Protocol,
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N], Fault> {
    let (taken, behind) = rest.split_first_chunk().ok_or(Fault::Protocol)?;
    *rest = behind;
    Ok(*taken)
}

fn take_bytes<'a>(rest: &mut &'a [u8]) -> Result<&'a [u8], Fault> {
    let length = u16::from_le_bytes(take(rest)?);
    let (taken, behind) = rest.split_at_checked(length.into()).ok_or(Fault::Protocol)?;
    *rest = behind;
    Ok(taken)
}

fn take_text(rest: &mut &[u8]) -> Result<String, Fault> {
    let text = take_bytes(rest)?;
    std::str::from_utf8(text).map(str::to_owned).map_err(|_| Fault::Protocol)
}

fn take_spot(rest: &mut &[u8]) -> Result<Spot, Fault> {
    let mut number = || -> Result<u32, Fault> { Ok(u32::from_le_bytes(take(rest)?)) };
    Ok(Spot { process: number()?, file: number()?, places: number()? })
}

fn write_spot(out: &mut Vec<u8>, spot: Spot) {
    out.extend([spot.process, spot.file, spot.places].into_iter().flat_map(u32::to_le_bytes));
}

/// Writes a text of which what is cut off makes another one.
fn write_text(out: &mut Vec<u8>, text: &str) {
    let bytes = &text.as_bytes()[..text.len().min(TEXT_MAX)];
    out.extend((bytes.len() as u16).to_le_bytes());
    out.extend(bytes);
}

/// A frame's kind and the bytes of its payload, of which there may be so many.
fn read_head(head: [u8; HEAD], most: usize) -> Result<(Kind, usize), Fault> {
    let [a, b, c, d, kind] = head;
    let length = u32::from_le_bytes([a, b, c, d]) as usize;
    if length > most { Err(Fault::Protocol) } else { Ok((Kind::of(kind)?, length)) }
}

/// A connection whose ends know each other.
pub(super) struct Sealed<S> {
    pub(super) stream: S,
    pub(super) sends: Tags,
    pub(super) receives: Tags,
    /// What a room of these two ends bears.
    pub(super) mark: Mark,
    /// How long the other end may take for each step.
    pub(super) stall: Duration,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Sealed<S> {
    /// Sends a frame with its tag.
    pub(super) async fn send(&mut self, kind: Kind, payload: &[u8]) -> Result<(), Fault> {
        self.send_both(kind, payload, &[]).await
    }

    /// Sends a frame of two parts, which are not copied together, with its tag.
    pub(super) async fn send_both(&mut self, kind: Kind, first: &[u8], rest: &[u8]) -> Result<(), Fault> {
        let [a, b, c, d] = ((first.len() + rest.len()) as u32).to_le_bytes();
        let head = [a, b, c, d, kind as u8];
        let tag = self.sends.tag(&[&head, first, rest]);
        let mut frame = Buf::chain(&head[..], first).chain(rest).chain(&tag[..]);
        within(self.stall, self.stream.write_all_buf(&mut frame)).await
    }

    /// Takes in the next frame, with a payload of so many bytes at most.
    pub(super) async fn receive(&mut self, most: usize) -> Result<(Kind, Vec<u8>), Fault> {
        let mut head = [0; HEAD];
        within(self.stall, self.stream.read_exact(&mut head)).await?;
        let (kind, length) = read_head(head, most)?;
        let mut payload = vec![0; length + TAG];
        within(self.stall, self.stream.read_exact(&mut payload)).await?;
        let tag = payload.split_off(length);
        if !self.receives.is_tag(&[&head, &payload], &tag) {
            return Err(Fault::Corrupt);
        }
        Ok((kind, payload))
    }
}

/// One step of the other end, for which it has so long.
pub(super) async fn within<T>(
    limit: Duration,
    step: impl Future<Output = io::Result<T>>,
) -> Result<(), Fault> {
    match timeout(limit, step).await {
        Err(_) => Err(Fault::Timeout),
        Ok(Err(_)) => Err(Fault::Lost),
        Ok(Ok(_)) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::seal::{Nonces, Secret, To};
    use super::*;

    fn sealed<S>(stream: S, secret: &Secret, is_importer: bool) -> Sealed<S> {
        let nonces = Nonces { importer: [1; 32], exporter: [2; 32] };
        let (to, from) = (secret.tags(&nonces, To::Exporter), secret.tags(&nonces, To::Importer));
        let (sends, receives) = if is_importer { (to, from) } else { (from, to) };
        Sealed { stream, sends, receives, mark: secret.mark(&nonces), stall: Duration::from_secs(5) }
    }

    /// The frames that a stream of these bytes gives, until its first fault.
    fn frames(bytes: &[u8], most: usize) -> (Vec<(Kind, Vec<u8>)>, Fault) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let stream = tokio::io::join(bytes, tokio::io::sink());
            let mut channel = sealed(stream, &Secret::none(), false);
            let mut frames = Vec::new();
            loop {
                match channel.receive(most).await {
                    Ok(frame) => frames.push(frame),
                    Err(fault) => return (frames, fault),
                }
            }
        })
    }

    /// What an importer's end writes for these payloads.
    fn written(payloads: &[Vec<u8>]) -> Vec<u8> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let stream = tokio::io::join(tokio::io::empty(), Vec::new());
            let mut channel = sealed(stream, &Secret::none(), true);
            for payload in payloads {
                channel.send(Kind::Block, payload).await.unwrap();
            }
            channel.stream.into_inner().1
        })
    }

    fn ask() -> impl Strategy<Value = Ask> {
        let spot = any::<[u32; 3]>().prop_map(|[process, file, places]| Spot { process, file, places });
        let numbers = (any::<u128>(), any::<u32>(), any::<u32>(), any::<[u8; 32]>());
        (numbers, spot, "\\PC{0,60}", "\\PC{0,60}").prop_map(
            |((transfer, first, blocks, link), room, numerics_id, layout)| Ask {
                transfer,
                first,
                blocks,
                link,
                room,
                numerics_id,
                layout,
            },
        )
    }

    proptest! {
        #[test]
        fn what_was_written_is_read(
            ask in ask(),
            group in any::<u8>(),
            place in any::<u32>(),
            kv in prop::collection::vec(any::<u8>(), 0..90),
            ids in prop::collection::vec(any::<u32>(), 0..40),
        ) {
            prop_assert!(ask.write().len() <= CONTROL_MAX);
            prop_assert_eq!(Ask::read(&ask.write()), Ok(ask.clone()));
            let head = BlockHead { group, place, link: ask.link };
            let block = [&head.write()[..], &kv].concat();
            prop_assert_eq!(read_offer(&write_offer(place, group > 9)), Ok((place, group > 9)));
            prop_assert_eq!(BlockHead::read(&block), Ok((head, &kv[..])));
            prop_assert_eq!(read_hello(&hello(&ask.link)), Ok(ask.link));
            let cut = ask.write();
            prop_assert_eq!(Ask::read(&cut[..cut.len() - 1]), Err(Fault::Protocol));
            prop_assert_eq!(Ask::read(&[&cut[..], &[0]].concat()), Err(Fault::Protocol));
            let (salt, tokens) = (kv, ids);
            let find = Find { tokens, salt, room: ask.room, numerics_id: ask.numerics_id, layout: ask.layout };
            let written = find.write().unwrap();
            prop_assert!(written.len() <= FIND_MAX);
            prop_assert_eq!(Find::read(&written), Ok(find));
            prop_assert_eq!(Find::read(&written[..written.len() - 1]), Err(Fault::Protocol));
            prop_assert_eq!(Find::read(&[&written[..], &[0]].concat()), Err(Fault::Protocol));
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200), most in 0usize..300) {
            let _ = Ask::read(&bytes);
            let _ = Find::read(&bytes);
            let _ = BlockHead::read(&bytes);
            let _ = (read_number(&bytes), read_offer(&bytes));
            read_refusal(&bytes);
            let (came, fault) = frames(&bytes, most);
            prop_assert!(came.is_empty(), "without a tag nothing is taken");
            prop_assert!(matches!(fault, Fault::Protocol | Fault::Lost | Fault::Corrupt), "{}", fault);
        }

        /// Frames that are changed anywhere, cut, repeated or left out end what is taken.
        #[test]
        fn frames_come_whole_and_in_order_or_not_at_all(
            payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 1..5),
            at in any::<prop::sample::Index>(),
            bit in 0u8..8,
        ) {
            let bytes = written(&payloads);
            let (came, fault) = frames(&bytes, 40);
            let expected: Vec<_> = payloads.iter().map(|payload| (Kind::Block, payload.clone())).collect();
            prop_assert_eq!((&came, fault), (&expected, Fault::Lost));
            let sizes: Vec<usize> = payloads.iter().map(|payload| HEAD + payload.len() + TAG).collect();
            let whole = |at: usize| sizes.iter().scan(0, |end, size| { *end += size; Some(*end) }).filter(|end| *end <= at).count();
            let at = at.index(bytes.len());
            let mut flipped = bytes.clone();
            flipped[at] ^= 1 << bit;
            prop_assert_eq!(frames(&flipped, 40).0, expected[..whole(at)].to_vec());
            prop_assert_eq!(frames(&bytes[..at], 40).0, expected[..whole(at)].to_vec());
            prop_assert_eq!(frames(&bytes[sizes[0]..], 40).0, vec![]);
            let twice = [&bytes[..sizes[0]], &bytes].concat();
            prop_assert_eq!(frames(&twice, 40).0.len(), 1);
        }
    }

    #[test]
    fn what_is_too_long_to_be_found_is_not_asked_for() {
        let find = |tokens, salt| {
            let (numerics_id, layout) = ("n".repeat(9_000), "l".repeat(9_000));
            Find { tokens: vec![7; tokens], salt: vec![7; salt], room: Spot::default(), numerics_id, layout }
                .write()
        };
        assert!(find(KV_FIND_TOKENS_MAX, TEXT_MAX).is_some_and(|find| find.len() <= FIND_MAX));
        assert_eq!((find(KV_FIND_TOKENS_MAX + 1, 0), find(0, TEXT_MAX + 1)), (None, None));
        // One that says that it has more ids than it has bytes.
        assert_eq!(Find::read(&[255, 255, 255, 255, 0]), Err(Fault::Protocol));
    }

    #[test]
    fn no_memory_is_taken_for_a_frame_that_may_not_come() {
        assert_eq!(read_head([255, 255, 255, 255, 4], CONTROL_MAX), Err(Fault::Protocol));
        assert_eq!(read_head([0, 16, 0, 0, 4], CONTROL_MAX), Ok((Kind::Block, CONTROL_MAX)));
        assert_eq!(read_head([1, 16, 0, 0, 4], CONTROL_MAX), Err(Fault::Protocol));
        assert_eq!(read_head([0, 0, 0, 0, 10], CONTROL_MAX), Err(Fault::Protocol));
    }

    #[test]
    fn another_version_is_told_from_another_protocol() {
        let mut bytes = hello(&[7; 32]);
        bytes[4] = 1;
        assert_eq!(read_hello(&bytes), Err(Fault::Version));
        assert_eq!(read_hello(b"GET / HTTP/1.1\r\nhost: ab\r\naccept: */*\r"), Err(Fault::Protocol));
    }
}
