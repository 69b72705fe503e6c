//! What is taken for a picture and the like, in every API's shape, and what is not.

use base64::{Engine, engine::general_purpose::STANDARD};
use proptest::prelude::*;
use serde_json::{Value as Json, json};

use super::*;

/// The items of a message's content, as kinds and values.
fn found(content: &Json) -> Vec<(MediaKind, String)> {
    found_in("content", content)
}

fn found_in(name: &str, value: &Json) -> Vec<(MediaKind, String)> {
    let text = value.to_string();
    find(name, Value::found(&text)).iter().map(|item| (item.kind, item.raw.to_owned())).collect()
}

fn kinds(content: &Json) -> Vec<MediaKind> {
    found(content).into_iter().map(|(kind, _)| kind).collect()
}

/// A picture's first bytes.
fn png(width: u32, height: u32) -> String {
    let mut head = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR".to_vec();
    head.extend(width.to_be_bytes().into_iter().chain(height.to_be_bytes()));
    head.extend([8, 6, 0, 0, 0, 0]);
    STANDARD.encode(head)
}

fn jpeg(before: usize, width: u16, height: u16) -> String {
    // A start, a segment of no meaning, and the frame's.
    let mut bytes = vec![0xff, 0xd8, 0xff, 0xe1];
    bytes.extend((before as u16 + 2).to_be_bytes());
    bytes.resize(bytes.len() + before, 0);
    bytes.extend([0xff, 0xc0, 0, 17, 8]);
    bytes.extend(height.to_be_bytes().into_iter().chain(width.to_be_bytes()));
    bytes.extend([3, 1, 0x22, 0, 2, 0x11, 1, 3, 0x11, 1]);
    STANDARD.encode(bytes)
}

fn tokens_of(url: &str) -> u32 {
    let raw = json!({ "url": url }).to_string();
    Found { raw: &raw, kind: kind_written(&raw).unwrap_or(MediaKind::Image) }.tokens()
}

#[test]
fn items_are_found_in_every_api_s_shape() {
    let data = "data:image/png;base64,QUJD";
    for (content, kind) in [
        (json!([{ "type": "image_url", "image_url": { "url": data, "detail": "low" } }]), MediaKind::Image),
        (json!([{ "type": "image_url", "image_url": data }]), MediaKind::Image),
        (json!([{ "type": "input_image", "image_url": "https://example.org/a.png" }]), MediaKind::Image),
        (json!([{ "type": "image", "image": "file:///tmp/a.png" }]), MediaKind::Image),
        (json!([{ "type": "image_embeds", "image_embeds": "Q".repeat(400) }]), MediaKind::Image),
        (
            json!([{ "type": "input_audio", "input_audio": { "data": "QUJD", "format": "wav" } }]),
            MediaKind::Audio,
        ),
        (
            json!([{ "type": "audio_url", "audio_url": { "url": "data:audio/ogg;base64,QUJD" } }]),
            MediaKind::Audio,
        ),
        (
            json!([{ "type": "video_url", "video_url": { "url": "https://example.org/a.mp4" } }]),
            MediaKind::Video,
        ),
        (
            json!([{ "type": "file", "file": { "file_data": "data:application/pdf;base64,QUJD", "filename": "a" } }]),
            MediaKind::File,
        ),
        (json!([{ "type": "input_file", "file_data": data }]), MediaKind::Image),
        (
            json!([{ "type": "image", "source": { "type": "base64", "media_type": "image/png", "data": "QUJD" } }]),
            MediaKind::Image,
        ),
        (
            json!([{ "type": "document", "source": { "type": "base64", "media_type": "application/pdf", "data": "QUJD" } }]),
            MediaKind::File,
        ),
        (
            json!([{ "type": "image", "source": { "type": "url", "url": "https://example.org/a" } }]),
            MediaKind::Image,
        ),
        (
            json!([{ "type": "tool_result", "content": [{ "type": "image", "source": { "type": "base64", "data": "QUJD" } }] }]),
            MediaKind::Image,
        ),
        (
            json!([{ "type": "document", "source": { "type": "content", "content": [
                { "type": "image", "source": { "type": "base64", "media_type": "image/gif", "data": "QUJD" } }] } }]),
            MediaKind::Image,
        ),
    ] {
        assert_eq!(kinds(&content), [kind], "{content}");
        let text = json!({ "type": "text", "text": "what is this?" });
        let several = json!([text, content[0], text, content[0]]);
        assert_eq!(kinds(&several), [kind, kind], "{several}");
    }
    // What tools give back, where it is no content.
    assert_eq!(
        found_in("output", &json!({ "type": "computer_screenshot", "image_url": data })),
        [(MediaKind::Image, format!("\"{data}\""))]
    );
    assert_eq!(found_in("image", &json!(data)).len(), 1);
}

#[test]
fn what_is_text_to_a_model_is_no_item() {
    let long = "Q".repeat(400);
    for content in [
        json!("data:image/png;base64,QUJD, says the text"),
        json!([{ "type": "text", "text": format!("data:image/png;base64,{long}") }]),
        json!([{ "type": "image_url", "image_url": null, "uuid": "a-cached-picture" }]),
        json!([{ "type": "tool_use", "name": "draw", "input": { "image_url": format!("https://example.org/{long}") } }]),
        json!([{ "type": "document", "source": { "type": "text", "data": long } }]),
        json!([{ "type": "text", "text": "a", "image": "a word" }]),
        json!([[{ "image_url": "https://example.org/a" }]]),
        json!([]),
        json!(7),
    ] {
        assert_eq!(found(&content), [], "{content}");
    }
    assert_eq!(found_in("tool_calls", &json!([{ "image_url": "https://example.org/a" }])), []);
}

#[test]
fn a_picture_s_size_is_in_its_first_bytes() {
    for (url, tokens) in [
        (format!("data:image/png;base64,{}", png(1_024, 768)), 1_003),
        (format!("data:image/png;base64,{}", png(280, 280)), 100),
        (format!("data:image/png;base64,{}", png(1, 1)), 1_000),
        (format!("data:image/png;base64,{}", png(u32::MAX, u32::MAX)), 16_384),
        (format!("data:image/jpeg;base64,{}", jpeg(10, 560, 280)), 200),
        (format!("data:image/jpeg;base64,{}", jpeg(60_000, 560, 280)), 200),
        ("data:image/png;base64,QUJDREVG".to_owned(), 1_000),
        ("https://example.org/a.png".to_owned(), 1_000),
        (String::new(), 1_000),
    ] {
        assert_eq!(tokens_of(&url), tokens, "{}", &url[..url.len().min(60)]);
    }
    // As PHP writes it.
    let raw = json!({ "url": format!("data:image/png;base64,{}", png(0x00ff_ffff, 0x0000_00ff)) });
    let escaped = raw.to_string().replace('/', "\\/");
    let of = |raw: &str| Found { raw, kind: MediaKind::Image }.tokens();
    assert_eq!((of(&escaped), of(&escaped) > 1_000), (of(&raw.to_string()), true));
}

#[test]
fn a_sound_has_the_tokens_of_its_seconds() {
    let wav = |bytes_of_second: u32, seconds: u32| {
        let mut bytes = b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0\x01\0\x01\0\x80\x3e\0\0".to_vec();
        bytes.extend(bytes_of_second.to_le_bytes());
        bytes.resize((bytes_of_second * seconds) as usize, 0);
        json!({ "data": STANDARD.encode(bytes), "format": "wav" }).to_string()
    };
    let tokens = |raw: &str| Found { raw, kind: MediaKind::Audio }.tokens();
    for (raw, want) in [(wav(32_000, 4), 100), (wav(8_000, 60), 1_500), (wav(32_000, 0), 4)] {
        assert!(tokens(&raw).abs_diff(want) <= 1, "{} for {want}", tokens(&raw));
    }
    assert_eq!(tokens(r#"{"url":"https://example.org/a.ogg"}"#), 750);
}

#[test]
fn very_many_items_take_the_room_of_some() {
    let mut items = MediaItems::default();
    for i in 0..10_000 {
        items.add(Item {
            at: 100 * i,
            bytes: 64,
            kind: MediaKind::Image,
            count: 1,
            tokens: 16,
            raw_bytes: 80,
        });
    }
    let [.., last] = items.all() else { panic!("there are some") };
    assert_eq!(items.all().len(), MEDIA_ITEMS_MAX);
    assert_eq!(last.at + last.bytes, 100 * 9_999 + 64);
    assert_eq!((items.sum(|item| item.count), items.sum(|item| item.tokens)), (10_000, 160_000));
}

proptest! {
    /// Whatever a message holds: items lie in its text, in their order, and do not overlap.
    #[test]
    fn items_are_parts_of_their_value(
        parts in prop::collection::vec(prop::sample::select(vec![
            r#"{"type":"text","text":"a \"quoted\" one"}"#, r#"{"image_url":{"url":"data:image/png;base64,AAAA"}}"#,
            r#"{"content":[{"source":{"type":"base64","data":"AAAA"}},{"text":"b"}]}"#, "7", "[]", "{}", "\"é\"",
            r#"{"image":"http://a","audio":{"data":"x"},"input":{"image":"http://bbbbbbbbbbbbbb"}}"#,
            r#"{"source":{"content":{"content":[{"image_url":"https://example.org"}]},"type":"content"}}"#,
        ]), 0..8),
        cut in any::<prop::sample::Index>(),
    ) {
        let text = format!("[{}]", parts.join(" , "));
        for text in [&text[..], text.get(..cut.index(text.len() + 1)).unwrap_or_default()] {
            let mut from = 0;
            for item in find("content", Value::found(text)) {
                let at = item.raw.as_ptr() as usize - text.as_ptr() as usize;
                prop_assert!(at >= from && !item.raw.is_empty());
                prop_assert_eq!(text.get(at..at + item.raw.len()), Some(item.raw));
                from = at + item.raw.len();
                prop_assert!((4..=256 << 10).contains(&item.tokens()));
            }
        }
    }
}
