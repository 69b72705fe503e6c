//! How many tokens an item has as far as its bytes say, before any answer has told what they cost a model.

use base64::{Engine, engine::general_purpose::STANDARD};

use super::MediaKind;

/// A picture's tokens, each of so many pixels square: Qwen2-VL's patches of 14 by 14, four in a token (arXiv
/// 2409.12191, section 2.1). Other models are within some times of that.
const PIXELS_OF_TOKEN: u64 = 28 * 28;
/// The most of one: Qwen2-VL's default.
const IMAGE_TOKENS_MAX: u64 = 16_384;
/// One of a megapixel or so, which is what an unknown one is taken for.
const IMAGE_TOKENS: u64 = 1_000;

/// A second of sound: Qwen2-Audio's (arXiv 2407.10759: a token for about 40 ms).
const TOKENS_OF_SECOND: u64 = 25;
/// Bytes of a second where its head does not say: 128 kbit.
const BYTES_OF_SECOND: u64 = 16_000;
/// Tokens of a sound whose bytes did not come along: half a minute's.
const AUDIO_TOKENS: u64 = 750;

/// A film of which nothing is known: as four pictures.
const VIDEO_TOKENS: u64 = 4 * IMAGE_TOKENS;
/// A page or two.
const FILE_TOKENS: u64 = 2_000;
/// Bytes for a token of a film or a document.
const BYTES_OF_TOKEN: u64 = 64;

/// The fewest of an item: Qwen2-VL's smallest picture (`min_pixels` of its processor, 56 by 56).
const TOKENS_MIN: u64 = 4;
/// The most of any, so that no request's sum grows beyond bounds.
const TOKENS_MAX: u64 = 256 << 10;

/// Tokens of an item, whose bytes are this base64 if they were sent along.
pub(super) fn tokens(kind: MediaKind, base64: Option<&str>) -> u32 {
    let bytes = base64.map(|base64| base64.len() as u64 / 4 * 3);
    let tokens = match kind {
        MediaKind::Image => {
            let (width, height) = base64.and_then(pixels).unwrap_or_default();
            let tokens = (width.saturating_mul(height) / PIXELS_OF_TOKEN).min(IMAGE_TOKENS_MAX);
            if tokens == 0 { IMAGE_TOKENS } else { tokens }
        }
        MediaKind::Audio => {
            let second = base64.and_then(wav_bytes_of_second).unwrap_or(BYTES_OF_SECOND);
            bytes.map_or(AUDIO_TOKENS, |bytes| bytes * TOKENS_OF_SECOND / second)
        }
        MediaKind::Video => bytes.map_or(VIDEO_TOKENS, |bytes| bytes / BYTES_OF_TOKEN),
        MediaKind::File => bytes.map_or(FILE_TOKENS, |bytes| bytes / BYTES_OF_TOKEN),
    };
    tokens.clamp(TOKENS_MIN, TOKENS_MAX) as u32
}

/// The first bytes of some base64 in a JSON string; none where it is none.
fn head(base64: &str, bytes: usize) -> Vec<u8> {
    // Some writers of JSON escape its slashes.
    let written = base64.bytes().filter(|byte| *byte != b'\\').take(bytes.div_ceil(3) * 4);
    let mut head: Vec<u8> = written.collect();
    head.truncate(head.len() / 4 * 4);
    STANDARD.decode(head).unwrap_or_default()
}

/// Width and height of a picture, mostly in its first bytes; a photograph may have another one of itself
/// before.
fn pixels(base64: &str) -> Option<(u64, u64)> {
    let size = |bytes| imagesize::blob_size(&head(base64, bytes)).ok();
    let size = size(1 << 9).or_else(|| size(96 << 10))?;
    Some((size.width as u64, size.height as u64))
}

/// Bytes of a second of a WAV file, as its head says (RIFF: "fmt " with `nAvgBytesPerSec` at byte 28).
fn wav_bytes_of_second(base64: &str) -> Option<u64> {
    let head = head(base64, 36);
    let is_wav = head.starts_with(b"RIFF") && head.get(8..16) == Some(b"WAVEfmt ");
    let rate = head.get(28..32).filter(|_| is_wav)?.first_chunk()?;
    Some(u64::from(u32::from_le_bytes(*rate))).filter(|rate| *rate > 0)
}
