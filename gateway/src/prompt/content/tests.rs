//! What a body says does not depend on how it came; what goes on is what came, or is plain.

use std::io::Write;

use flate2::{Compression, write::GzEncoder};
use proptest::prelude::*;

use super::*;

const LIMIT: usize = 1 << 20;

fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
    let value = |value: &str| HeaderValue::from_str(value).unwrap();
    pairs.iter().map(|(name, text)| (http::HeaderName::from_static(name), value(text))).collect()
}

fn utf16(text: &str, big: bool) -> Vec<u8> {
    text.encode_utf16().flat_map(|unit| if big { unit.to_be_bytes() } else { unit.to_le_bytes() }).collect()
}

fn utf32(text: &str, big: bool) -> Vec<u8> {
    let bytes = |char: char| if big { u32::from(char).to_be_bytes() } else { u32::from(char).to_le_bytes() };
    text.chars().flat_map(bytes).collect()
}

/// A text in every encoding that Python's `json.loads` takes.
fn encoded(text: &str) -> Vec<Vec<u8>> {
    let mark = |mark: &[u8], rest: Vec<u8>| [mark, &rest].concat();
    vec![
        text.into(),
        mark(&[0xef, 0xbb, 0xbf], text.into()),
        utf16(text, true),
        utf16(text, false),
        mark(&[0xfe, 0xff], utf16(text, true)),
        mark(&[0xff, 0xfe], utf16(text, false)),
        utf32(text, true),
        utf32(text, false),
        mark(&[0, 0, 0xfe, 0xff], utf32(text, true)),
        mark(&[0xff, 0xfe, 0, 0], utf32(text, false)),
    ]
}

async fn content(headers: &mut HeaderMap, body: Bytes) -> Content {
    let plain = Plain::of(headers, body, LIMIT).await.unwrap();
    Content::of(headers, plain, LIMIT).unwrap()
}

/// The text of a body, as routing reads it.
fn read(body: Vec<u8>) -> Option<Bytes> {
    let text = utf8(&body.into(), LIMIT).unwrap()?;
    let mended = mended(&text, LIMIT).unwrap().unwrap_or(text);
    std::str::from_utf8(&mended).is_ok().then_some(mended)
}

proptest! {
    #[test]
    fn every_encoding_is_the_same_text(inner in "[^\u{0}\"\\\\]{0,40}") {
        let text = format!("{{\"model\":\"{inner}\"}}");
        for body in encoded(&text) {
            prop_assert_eq!(read(body), Some(Bytes::from(text.clone())));
        }
    }

    #[test]
    fn no_bytes_make_it_panic_and_what_comes_out_is_text(mark in 0_usize..10, bytes in prop::collection::vec(any::<u8>(), 0..60)) {
        let marked = [&encoded("{}")[mark][..], &bytes].concat();
        for body in [bytes, marked] {
            if let Some(text) = read(body) {
                prop_assert!(std::str::from_utf8(&text).is_ok());
            }
        }
    }
}

#[test]
fn a_surrogate_without_its_partner_becomes_its_escape() {
    let text = Some(Bytes::from_static(br#"{"a":"x\ud83dy"}"#));
    for big in [true, false] {
        let unit = |unit: u16| if big { unit.to_be_bytes() } else { unit.to_le_bytes() };
        let body = [utf16("{\"a\":\"x", big), unit(0xd83d).to_vec(), utf16("y\"}", big)].concat();
        assert_eq!(read(body), text);
        let unit = |unit: u32| if big { unit.to_be_bytes() } else { unit.to_le_bytes() };
        let body = [utf32("{\"a\":\"x", big), unit(0xd83d).to_vec(), utf32("y\"}", big)].concat();
        assert_eq!(read(body), text);
    }
    // As Python's `surrogatepass` writes it, alone and twice.
    assert_eq!(read(b"{\"a\":\"x\xed\xa0\xbdy\"}".to_vec()), text);
    assert_eq!(
        read(b"\"\xed\xa0\xbd\xed\xb8\x80\"".to_vec()),
        Some(Bytes::from_static(br#""\ud83d\ude00""#))
    );
}

#[test]
fn what_is_no_text_is_none_and_what_grows_has_a_limit() {
    for body in
        [&b"{\"a\":\"\xff\"}"[..], b"\xed\xa0", b"\xff\xfe{\0}", b"\0\0\xfe\xff\0\x11\0\0", b"\xed\x7f\x80"]
    {
        assert_eq!(read(body.to_vec()), None, "{body:?}");
    }
    let large = utf16(&"€".repeat(100), true);
    assert!(utf8(&[&[0xfe, 0xff], &large[..]].concat().into(), 299).is_err());
    assert!(utf8(&[&[0xfe, 0xff], &large[..]].concat().into(), 300).is_ok());
}

#[test]
fn plain_text_is_not_copied() {
    let body = Bytes::from_static(b"{\"model\":\"m\"}");
    assert_eq!(utf8(&body, 1).unwrap().unwrap().as_ptr(), body.as_ptr());
}

#[tokio::test]
async fn a_compressed_body_goes_on_plain_and_one_in_another_charset_as_it_came() {
    let text = br#"{"model":"m"}"#;
    let mut gzip = GzEncoder::new(Vec::new(), Compression::default());
    gzip.write_all(&utf16(std::str::from_utf8(text).unwrap(), false)).unwrap();
    let mut sent = headers(&[("content-encoding", "gzip"), ("content-type", "application/json")]);
    let content = content(&mut sent, gzip.finish().unwrap().into()).await;
    assert_eq!((&content.text[..], content.unread), (&text[..], None));
    assert_eq!(content.came.unwrap(), utf16(std::str::from_utf8(text).unwrap(), false));
    assert!(!sent.contains_key("content-encoding"));
}

#[tokio::test]
async fn what_cannot_be_undone_stays_as_it_came_and_says_why() {
    for (coding, unread) in
        [("br", Unread::Coding), ("gzip", Unread::Damaged), ("zstd, deflate", Unread::Damaged)]
    {
        let mut sent = headers(&[("content-encoding", coding)]);
        let body = Bytes::from_static(b"{\"model\":\"m\"}");
        let content = content(&mut sent, body.clone()).await;
        assert_eq!((content.text, content.unread), (body, Some(unread)), "{coding}");
        assert_eq!(sent["content-encoding"], coding);
    }
}

#[tokio::test]
async fn a_form_s_bytes_are_no_text_and_are_left_alone() {
    let mut sent = headers(&[("content-type", "Multipart/Form-Data; boundary=x")]);
    let body = Bytes::from_static(b"--x\r\n\xff\xfe\0");
    let content = content(&mut sent, body.clone()).await;
    assert_eq!((content.text.as_ptr(), content.unread), (body.as_ptr(), None));
}

#[test]
fn a_charset_that_is_no_more_is_not_named() {
    let named = |kind: &str| in_utf8(&headers(&[("content-type", kind)]));
    assert_eq!(named("application/json; charset=utf-16").unwrap(), "application/json");
    assert_eq!(named("application/json ;Charset=\"UTF-16LE\"").unwrap(), "application/json");
    assert_eq!(named("application/json"), None);
}
