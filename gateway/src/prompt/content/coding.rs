//! `Content-Encoding` of requests: gzip, deflate (with zlib's head, as the standard has it, or without, as
//! some send it) and zstd, which Codex sends. What comes out is bounded, in all and by what went in, and much
//! of it is not computed on the cores that serve clients.

use std::io::{self, Read};

use bytes::Bytes;
use flate2::{Decompress, FlushDecompress, Status, read::MultiGzDecoder};
use http::{HeaderMap, header::CONTENT_ENCODING};
use ruzstd::decoding::{FrameDecoder, StreamingDecoder};

use crate::{
    error::Error,
    limits::{
        DECODING_INLINE_BYTES, DECODING_RATIO_FREE_BYTES, DECODING_RATIO_MAX, MAX_CODINGS, ZSTD_WINDOW_BYTES,
    },
    machine::threads::large_bodies,
};

/// Room that is made for what is to come out, and then again.
const STEP_BYTES: usize = 32 << 10;

/// One that is undone here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coding {
    /// `gzip` or `x-gzip`; may be several of them in a row.
    Gzip,
    /// `deflate`, with zlib's head or without: clients send both.
    Deflate,
    /// `zstd`, with a bounded window; may be several frames.
    Zstd,
}

/// Why a body cannot be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    TooLarge,
    /// Far more than what went in.
    Bomb,
    Damaged,
}

impl Coding {
    /// All of them, for people.
    pub const NAMES: &str = "gzip, deflate, zstd";

    /// What was done to a body, in that order; `None` where one of them is another, or they are too many.
    pub fn of(headers: &HeaderMap) -> Option<Vec<Self>> {
        let mut codings = Vec::new();
        for value in headers.get_all(CONTENT_ENCODING) {
            for name in value.as_bytes().split(|byte| *byte == b',') {
                match name.trim_ascii().to_ascii_lowercase().as_slice() {
                    b"" | b"identity" => {}
                    b"gzip" | b"x-gzip" => codings.push(Self::Gzip),
                    b"deflate" => codings.push(Self::Deflate),
                    b"zstd" => codings.push(Self::Zstd),
                    _ => return None,
                }
            }
        }
        (codings.len() <= MAX_CODINGS).then_some(codings)
    }

    fn undo(self, bytes: &[u8], limit_bytes: usize) -> Result<Vec<u8>, Fault> {
        let free = bytes.len().saturating_mul(DECODING_RATIO_MAX).max(DECODING_RATIO_FREE_BYTES);
        let limit = limit_bytes.min(free);
        let plain = match self {
            Self::Gzip => gunzipped(bytes, limit),
            Self::Deflate if has_zlib_head(bytes) => inflated(bytes, true, limit),
            Self::Deflate => inflated(bytes, false, limit),
            Self::Zstd => zstd(bytes, limit),
        };
        plain.map_err(
            |fault| if fault == Fault::TooLarge && limit < limit_bytes { Fault::Bomb } else { fault },
        )
    }
}

/// A body before all that was done to it; `None` where it is not what its codings say.
pub async fn decoded(body: Bytes, codings: &[Coding], limit_bytes: usize) -> Result<Option<Bytes>, Error> {
    let codings = codings.to_vec();
    let result = if body.len() <= DECODING_INLINE_BYTES {
        undo_all(&body, &codings, limit_bytes.min(DECODING_INLINE_BYTES))
    } else {
        Err(Fault::TooLarge)
    };
    let result = match result {
        // Much comes out.
        Err(Fault::TooLarge) => {
            let threads = large_bodies().ok_or(Error::Internal)?;
            let work = threads.run(move || Some(undo_all(&body, &codings, limit_bytes)));
            // There is a place for each.
            let Some(work) = work else { return Ok(None) };
            work.await.unwrap_or(Err(Fault::Damaged))
        }
        done => done,
    };
    match result {
        Ok(plain) => Ok(Some(plain)),
        Err(Fault::Damaged) => Ok(None),
        Err(Fault::TooLarge) => Err(Error::BodyTooLarge { limit_bytes }),
        Err(Fault::Bomb) => {
            let bytes = format!("it stands for more than {DECODING_RATIO_MAX} times its own bytes");
            Err(Error::BodyUnreadable(bytes))
        }
    }
}

/// The last that was done is undone first.
fn undo_all(body: &Bytes, codings: &[Coding], limit_bytes: usize) -> Result<Bytes, Fault> {
    let undo = |bytes: Bytes, coding: &Coding| coding.undo(&bytes, limit_bytes).map(Bytes::from);
    codings.iter().rev().try_fold(body.clone(), undo)
}

/// Room for all that may come out, where that is much: a vector that grew would be held twice while it is
/// moved. What is not used of it takes no memory.
fn room(limit: usize) -> Vec<u8> {
    if limit > DECODING_INLINE_BYTES { Vec::with_capacity(limit + 1) } else { Vec::new() }
}

fn read_all(decoder: impl Read, limit: usize, out: &mut Vec<u8>) -> Result<(), Fault> {
    let left = (limit - out.len()) as u64;
    decoder.take(left + 1).read_to_end(out).map_err(|_: io::Error| Fault::Damaged)?;
    if out.len() > limit { Err(Fault::TooLarge) } else { Ok(()) }
}

fn gunzipped(bytes: &[u8], limit: usize) -> Result<Vec<u8>, Fault> {
    let mut out = room(limit);
    read_all(MultiGzDecoder::new(bytes), limit, &mut out)?;
    Ok(out)
}

/// Method 8, and a check that of 31 texts without this head one passes by chance: raw deflate begins
/// otherwise, unless its first block is a stored one of a kind that no encoder writes.
fn has_zlib_head(bytes: &[u8]) -> bool {
    matches!(bytes, [method, flags, ..] if method & 0x0f == 8 && (u16::from(*method) << 8 | u16::from(*flags)) % 31 == 0)
}

/// To its very end: a reader of streams takes one that was cut for whole.
fn inflated(bytes: &[u8], zlib: bool, limit: usize) -> Result<Vec<u8>, Fault> {
    let mut inflate = Decompress::new(zlib);
    let (mut out, mut step) = (room(limit), vec![0; STEP_BYTES]);
    loop {
        let (read, wrote) = (inflate.total_in(), inflate.total_out());
        let status = inflate.decompress(&bytes[read as usize..], &mut step, FlushDecompress::None);
        let status = status.map_err(|_| Fault::Damaged)?;
        let came = (inflate.total_out() - wrote) as usize;
        if out.len() + came > limit {
            return Err(Fault::TooLarge);
        }
        out.extend_from_slice(&step[..came]);
        match status {
            Status::StreamEnd => return Ok(out),
            // Nothing moves any more.
            _ if inflate.total_in() == read && came == 0 => return Err(Fault::Damaged),
            _ => {}
        }
    }
}

/// Undoes it frame after frame; `limit` bounds what all of them come to.
fn zstd(mut bytes: &[u8], limit: usize) -> Result<Vec<u8>, Fault> {
    let mut out = room(limit);
    while !bytes.is_empty() {
        let mut decoder = FrameDecoder::new();
        decoder.set_max_window_size(ZSTD_WINDOW_BYTES);
        let frame = StreamingDecoder::new_with_decoder(&mut bytes, decoder).map_err(|_| Fault::Damaged)?;
        read_all(frame, limit, &mut out)?;
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::{
        Compression,
        write::{DeflateEncoder, GzEncoder, ZlibEncoder},
    };
    use http::HeaderValue;
    use proptest::prelude::*;
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};

    use super::*;

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn zlib(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = ZlibEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn raw(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = DeflateEncoder::new(Vec::new(), Compression::best());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn zstd(bytes: &[u8]) -> Vec<u8> {
        compress_to_vec(bytes, CompressionLevel::Fastest)
    }

    fn said(codings: &str) -> Option<Vec<Coding>> {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_ENCODING, HeaderValue::from_str(codings).unwrap());
        Coding::of(&headers)
    }

    async fn undone(body: &[u8], codings: &str, limit: usize) -> Result<Option<Bytes>, Error> {
        decoded(Bytes::copy_from_slice(body), &said(codings).unwrap(), limit).await
    }

    #[test]
    fn names_are_read_in_any_case_and_unknown_ones_and_too_many_are_not() {
        assert_eq!(said("gzip"), Some(vec![Coding::Gzip]));
        assert_eq!(said(" X-GZIP , identity"), Some(vec![Coding::Gzip]));
        assert_eq!(said("deflate, Zstd"), Some(vec![Coding::Deflate, Coding::Zstd]));
        assert_eq!(said("identity"), Some(vec![]));
        for other in ["br", "gzip, br", "compress", "gzip;q=1", "gzip,gzip,gzip"] {
            assert_eq!(said(other), None, "{other}");
        }
    }

    #[tokio::test]
    async fn every_form_comes_out_as_it_went_in() {
        let small = br#"{"model":"m"}"#.to_vec();
        let large: Vec<u8> = (0..400_000_u32).flat_map(|i| i.wrapping_mul(i).to_le_bytes()).collect();
        for body in [vec![], small, large] {
            for (codings, bytes) in [
                ("gzip", gzip(&body)),
                ("gzip", [gzip(&body[..body.len() / 2]), gzip(&body[body.len() / 2..])].concat()),
                ("deflate", zlib(&body)),
                ("deflate", raw(&body)),
                ("zstd", zstd(&body)),
                ("zstd", [zstd(&body), zstd(b"")].concat()),
                ("deflate, gzip", gzip(&raw(&body))),
            ] {
                assert_eq!(
                    undone(&bytes, codings, 1 << 24).await,
                    Ok(Some(body.clone().into())),
                    "{codings}"
                );
            }
        }
    }

    #[tokio::test]
    async fn what_was_cut_or_is_something_else_is_damaged() {
        let body = br#"{"model":"m","messages":[]}"#;
        for (codings, bytes) in
            [("gzip", gzip(body)), ("deflate", zlib(body)), ("deflate", raw(body)), ("zstd", zstd(body))]
        {
            for end in 1..bytes.len() {
                assert_eq!(undone(&bytes[..end], codings, 1 << 20).await, Ok(None), "{codings} cut at {end}");
            }
            assert_eq!(undone(body, codings, 1 << 20).await, Ok(None), "plain text as {codings}");
        }
    }

    #[tokio::test]
    async fn a_bomb_is_too_large_in_all_and_by_what_went_in() {
        let bomb = vec![b' '; 32 << 20];
        for (codings, bytes) in [
            ("gzip", gzip(&bomb)),
            ("deflate", zlib(&bomb)),
            ("deflate", raw(&bomb)),
            ("zstd", zstd(&bomb)),
            ("gzip, gzip", gzip(&gzip(&bomb))),
        ] {
            // Below the limit in all; but a thousand times what went in.
            let answer = undone(&bytes, codings, 64 << 20).await;
            assert!(matches!(answer, Err(Error::BodyUnreadable(_))), "{codings}: {answer:?}");
            let answer = undone(&bytes, codings, 1_000).await;
            assert_eq!(answer, Err(Error::BodyTooLarge { limit_bytes: 1_000 }), "{codings}");
        }
        let wide = [&[0x28, 0xb5, 0x2f, 0xfd, 0x00, 0xa0][..], &[1, 0, 0]].concat();
        assert_eq!(undone(&wide, "zstd", 64 << 20).await, Ok(None), "a window of a gigabyte");
    }

    #[tokio::test]
    async fn exactly_the_limit_passes() {
        for (codings, bytes) in
            [("gzip", gzip(&[7; 100])), ("deflate", raw(&[7; 100])), ("zstd", zstd(&[7; 100]))]
        {
            assert!(undone(&bytes, codings, 100).await.is_ok(), "{codings}");
            assert!(undone(&bytes, codings, 99).await.is_err(), "{codings}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic_or_grow(bytes in prop::collection::vec(any::<u8>(), 0..300), keep in 0_usize..60, which in 0_usize..4) {
            let seed = br#"{"model":"m","messages":[{"role":"user","content":"hello hello hello"}]}"#;
            let good = [gzip(seed), zlib(seed), raw(seed), zstd(seed)][which].clone();
            let bytes = [&good[..keep.min(good.len())], &bytes].concat();
            for coding in [Coding::Gzip, Coding::Deflate, Coding::Zstd] {
                prop_assert!(coding.undo(&bytes, 500).is_ok_and(|out| out.len() <= 500) || coding.undo(&bytes, 500).is_err());
            }
        }
    }
}
