//! Reads the events that nearly all streams of chats and completions are made of, in one pass and without
//! deserializing them. Says nothing of any other: whatever it does not expect, an error in the JSON among it,
//! is left to [`super::EventContent::read`], beside which it is tested.

use keyway_wire::openai::Usage;

use super::{
    BROKEN_OFF, EventContent,
    content::is_label,
    counts::{Counts, Details},
};

/// Depth of values in values; deeper ones are left to the other reader.
const DEPTH_MAX: u32 = 8;

/// What an event says, and the text of its one choice where it is written without escapes.
pub(super) type Said<'a> = (EventContent, Option<&'a str>);

/// Something that is not usual.
struct Odd;

type Read<T> = Result<T, Odd>;

/// A place in an event's data, which has no character below a space.
struct Place<'a> {
    data: &'a [u8],
    at: usize,
    /// There are backslashes in it.
    escapes: bool,
}

/// A string's inside, as it is written.
#[derive(Clone, Copy)]
struct Quoted<'a> {
    bytes: &'a [u8],
    escapes: bool,
}

/// What of the event has been read.
#[derive(Default)]
struct Seen<'a> {
    choices: Option<usize>,
    usage: Option<Counts>,
    has_usage: bool,
    said: EventContent,
    text: Option<&'a [u8]>,
}

/// Reads `data`, of an event without a name; `so_far` are the counts that events before it told.
pub(super) fn read<'a>(data: &'a [u8], so_far: Option<&Usage>) -> Option<Said<'a>> {
    // Once for all of it, which takes a fraction of what it takes for each string.
    std::str::from_utf8(data).ok()?;
    let escapes = memchr::memchr(b'\\', data).is_some();
    if data.iter().copied().min().is_some_and(|least| least < b' ') {
        return None;
    }
    let mut place = Place { data, at: 0, escapes };
    let mut seen = Seen::default();
    let fields = place.fields(|place, field| match field {
        b"choices" if seen.choices.is_none() => {
            let mut count = 0;
            place.items(|place| {
                count += 1;
                place.choice(&mut seen)
            })?;
            seen.choices = Some(count);
            Ok(())
        }
        b"usage" if !seen.has_usage => {
            seen.has_usage = true;
            seen.usage = if place.null() { None } else { Some(place.counts()?) };
            Ok(())
        }
        // A second time, of other APIs, or of an error.
        b"choices" | b"usage" | b"type" | b"delta" | b"item" | b"content_block" | b"response"
        | b"message" | b"error" | b"detail" => Err(Odd),
        _ => place.skip(DEPTH_MAX),
    });
    fields.ok()?;
    place.space();
    if place.at != data.len() {
        return None;
    }
    let usage = seen.usage.map(|counts| counts.onto(so_far));
    let has_one = seen.choices? == 1;
    // Between quotes, thus whole characters.
    let said_text = seen.text.filter(|_| has_one).and_then(|bytes| std::str::from_utf8(bytes).ok());
    Some((EventContent { usage, ..seen.said }, said_text))
}

/// Where the first quote is. Strings here are a few bytes long, for which a function that is made for long
/// ones takes twice as long.
fn quote_in(bytes: &[u8]) -> Option<usize> {
    const ONES: u64 = u64::from_ne_bytes([1; 8]);
    let (eights, rest) = bytes.as_chunks::<8>();
    for (nth, eight) in eights.iter().enumerate() {
        // A byte is 0 where there is a quote, and its highest bit is set below; never before the first such.
        let others = u64::from_le_bytes(*eight) ^ (ONES * u64::from(b'"'));
        let found = others.wrapping_sub(ONES) & !others & (ONES << 7);
        if found != 0 {
            return Some(nth * 8 + found.trailing_zeros() as usize / 8);
        }
    }
    let at = rest.iter().position(|&byte| byte == b'"')?;
    Some(eights.len() * 8 + at)
}

/// Length of the string that ends at the first quote without a backslash in front of it, and whether it has
/// escapes.
fn escaped(bytes: &[u8]) -> Read<(usize, bool)> {
    let (mut at, mut escapes) = (0, false);
    loop {
        match bytes.get(at).ok_or(Odd)? {
            b'"' => return Ok((at, escapes)),
            b'\\' => {
                escapes = true;
                let escaped = bytes.get(at + 1);
                if !matches!(escaped, Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't')) {
                    return Err(Odd);
                }
                at += 2;
            }
            _ => at += 1,
        }
    }
}

impl<'a> Place<'a> {
    fn peek(&self) -> Option<u8> {
        self.data.get(self.at).copied()
    }

    fn space(&mut self) {
        while self.peek() == Some(b' ') {
            self.at += 1;
        }
    }

    /// Whether `byte` is next, behind any space; it is taken.
    fn next(&mut self, byte: u8) -> bool {
        self.space();
        let is_next = self.peek() == Some(byte);
        self.at += usize::from(is_next);
        is_next
    }

    fn null(&mut self) -> bool {
        self.space();
        let is_null = self.data[self.at..].starts_with(b"null");
        self.at += if is_null { 4 } else { 0 };
        is_null
    }

    /// An object, of which `field` reads the value behind each name.
    fn fields(&mut self, mut field: impl FnMut(&mut Self, &'a [u8]) -> Read<()>) -> Read<()> {
        self.list(b'{', b'}', |place| {
            let name = place.string()?;
            if name.escapes || !place.next(b':') {
                return Err(Odd);
            }
            field(place, name.bytes)
        })
    }

    /// An array, of which `item` reads each value.
    fn items(&mut self, item: impl FnMut(&mut Self) -> Read<()>) -> Read<()> {
        self.list(b'[', b']', item)
    }

    fn list(&mut self, open: u8, close: u8, mut one: impl FnMut(&mut Self) -> Read<()>) -> Read<()> {
        if !self.next(open) {
            return Err(Odd);
        }
        if self.next(close) {
            return Ok(());
        }
        loop {
            one(self)?;
            if self.next(close) {
                return Ok(());
            }
            if !self.next(b',') {
                return Err(Odd);
            }
        }
    }

    fn string(&mut self) -> Read<Quoted<'a>> {
        if !self.next(b'"') {
            return Err(Odd);
        }
        let rest = &self.data[self.at..];
        let (length, escapes) = match quote_in(rest) {
            Some(length) if !self.escapes => (length, false),
            _ => escaped(rest)?,
        };
        self.at += length + 1;
        Ok(Quoted { bytes: &rest[..length], escapes })
    }

    /// A text, or nothing.
    fn text(&mut self) -> Read<Option<Quoted<'a>>> {
        if self.null() { Ok(None) } else { self.string().map(Some) }
    }

    fn number(&mut self) -> Read<u64> {
        self.space();
        let (begin, mut number) = (self.at, 0_u64);
        while let Some(digit @ b'0'..=b'9') = self.peek() {
            let next = number.checked_mul(10).and_then(|tens| tens.checked_add(u64::from(digit - b'0')));
            number = next.ok_or(Odd)?;
            self.at += 1;
        }
        let is_padded = self.at > begin + 1 && self.data[begin] == b'0';
        let is_more = matches!(self.peek(), Some(b'.' | b'e' | b'E'));
        if self.at > begin && !is_padded && !is_more { Ok(number) } else { Err(Odd) }
    }

    /// A value that says nothing here.
    fn skip(&mut self, depth: u32) -> Read<()> {
        let depth = depth.checked_sub(1).ok_or(Odd)?;
        self.space();
        match self.peek().ok_or(Odd)? {
            b'"' => self.string().map(|_| ()),
            b'{' => self.fields(|place, _| place.skip(depth)),
            b'[' => self.items(|place| place.skip(depth)),
            b'0'..=b'9' => self.number().map(|_| ()),
            _ => {
                let rest = &self.data[self.at..];
                let word = [&b"null"[..], b"true", b"false"].into_iter().find(|word| rest.starts_with(word));
                let word = word.ok_or(Odd)?;
                self.at += word.len();
                Ok(())
            }
        }
    }

    fn choice(&mut self, seen: &mut Seen<'a>) -> Read<()> {
        let (mut delta, mut text, mut reason) = (None, None, None);
        self.fields(|place, field| {
            match field {
                b"delta" if delta.is_none() => {
                    delta = Some(if place.null() { None } else { place.delta(&mut seen.said)? });
                }
                b"text" if text.is_none() => text = Some(place.text()?),
                b"finish_reason" if reason.is_none() => reason = Some(place.text()?),
                b"delta" | b"text" | b"finish_reason" | b"token_ids" => return Err(Odd),
                _ => place.skip(DEPTH_MAX)?,
            }
            Ok(())
        })?;
        if let Some(Some(reason)) = reason {
            if reason.escapes || BROKEN_OFF.iter().any(|word| word.as_bytes() == reason.bytes) {
                return Err(Odd);
            }
            seen.said.finished = true;
        }
        let (content, text) = (delta.flatten(), text.flatten());
        let is_filled = |text: Quoted<'_>| !text.bytes.is_empty();
        seen.said.generated |= content.is_some_and(is_filled) || text.is_some_and(is_filled);
        seen.text = content.or(text).filter(|text| !text.escapes).map(|text| text.bytes);
        Ok(())
    }

    /// The content of a delta in which nothing else but labels is told.
    fn delta(&mut self, said: &mut EventContent) -> Read<Option<Quoted<'a>>> {
        let mut content = None;
        self.fields(|place, field| {
            match field {
                b"content" if content.is_none() => content = Some(place.text()?),
                b"content" => return Err(Odd),
                label if std::str::from_utf8(label).is_ok_and(is_label) => place.skip(DEPTH_MAX)?,
                _ => said.generated |= place.text()?.is_some_and(|text| !text.bytes.is_empty()),
            }
            Ok(())
        })?;
        Ok(content.flatten())
    }

    fn counts(&mut self) -> Read<Counts> {
        let (mut prompt, mut completion, mut details) = (None, None, None);
        self.fields(|place, field| {
            match field {
                b"prompt_tokens" if prompt.is_none() => prompt = Some(place.count()?),
                b"completion_tokens" if completion.is_none() => completion = Some(place.count()?),
                b"prompt_tokens_details" if details.is_none() => {
                    details = Some(if place.null() { None } else { Some(place.details()?) });
                }
                b"total_tokens" | b"completion_tokens_details" => place.skip(DEPTH_MAX)?,
                _ => return Err(Odd),
            }
            Ok(())
        })?;
        Ok(Counts::of_chat(prompt.flatten(), completion.flatten(), details.flatten()))
    }

    fn details(&mut self) -> Read<Details> {
        let mut cached = None;
        self.fields(|place, field| {
            match field {
                b"cached_tokens" if cached.is_none() => cached = Some(place.count()?),
                b"cached_tokens" => return Err(Odd),
                _ => place.skip(DEPTH_MAX)?,
            }
            Ok(())
        })?;
        Ok(Details { cached_tokens: cached.flatten() })
    }

    /// A number, or nothing.
    fn count(&mut self) -> Read<Option<u64>> {
        if self.null() { Ok(None) } else { self.number().map(Some) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::client::sse;

    /// What the other reader says of the same.
    fn deserialized(data: &[u8]) -> Option<Said<'_>> {
        EventContent::read_with_text(sse::Event { name: b"", data }, None).ok()
    }

    const USUAL: [&str; 8] = [
        r#"{"id":"c","object":"chat.completion.chunk","created":17,"model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}"#,
        r#"{"id":"c","choices":[{"index":0,"delta":{"content":" a"},"finish_reason":null,"stop_reason":null}]}"#,
        r#"{"choices": [{"delta": {"content": "a\n\"b\""}}], "usage": null}"#,
        r#"{"choices":[{"delta":{"content":null,"reasoning":"hm"}},{"delta":null,"finish_reason":"stop"}]}"#,
        r#"{"choices":[{"index":0,"text":"x","finish_reason":"length"}]}"#,
        r#"{"choices":[{"delta":{"content":"é","type":"text","refusal":null}}],"system_fingerprint":"f","service":[true,false,{"a":[0,10]}]}"#,
        r#"{"choices":[],"usage":{"prompt_tokens":9,"total_tokens":11,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":8,"audio_tokens":0}}}"#,
        r#"{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":null,"prompt_tokens_details":null,"completion_tokens_details":{"reasoning_tokens":1}}}"#,
    ];

    #[test]
    fn the_usual_events_are_read_as_the_other_reader_reads_them() {
        for data in USUAL {
            let said = read(data.as_bytes(), None);
            assert_eq!((said.is_some(), &said), (true, &deserialized(data.as_bytes())), "{data}");
        }
    }

    #[test]
    fn what_is_not_usual_is_left_to_the_other_reader() {
        for data in [
            "",
            "{}",
            "[DONE]",
            r#"{"choices":null}"#,
            r#"{"choices":[]} x"#,
            r#"{"choices":[],"choices":[]}"#,
            r#"{"choices":[],"error":"dead"}"#,
            r#"{"choices":[],"a":-1}"#,
            r#"{"choices":[],"a":01}"#,
            r#"{"choices":[],"a":1.5}"#,
            r#"{"choices":[],"a":"\u0041"}"#,
            r#"{"choices":[],"a":nul}"#,
            r#"{"choices":[],}"#,
            r#"{"choices":[{"delta":{"content":[{"text":"a"}]}}]}"#,
            r#"{"choices":[{"token_ids":[7]}]}"#,
            r#"{"choices":[{"finish_reason":"abort"}]}"#,
            r#"{"choices":[],"usage":{"input_tokens":9}}"#,
            r#"{"type":"response.output_text.delta","delta":"hi"}"#,
            "{\"choices\":[],\"a\":\"\n\"}",
        ] {
            assert_eq!(read(data.as_bytes(), None), None, "{data}");
        }
    }

    proptest! {
        #[test]
        fn the_first_quote_is_found(bytes in prop::collection::vec(prop_oneof![any::<u8>(), 0x20u8..0x24, 0xa1u8..0xa4], 0..40)) {
            prop_assert_eq!(quote_in(&bytes), bytes.iter().position(|&byte| byte == b'"'));
        }

        /// An event with some of its bytes changed is read as the other reader reads it, or left to it.
        #[test]
        fn whatever_is_read_is_read_alike(
            usual in prop::sample::select(&USUAL[..]),
            edits in prop::collection::vec((any::<usize>(), 0usize..4, prop::sample::select(vec![
                "", "\"", "\\", ",", ":", "{", "}", "[", "]", "null", "0", "1e", "-", ".", " ", "\n", "\t", "\u{e9}", "x",
                "\"delta\"", "\"content\":\"z\"", "\"usage\":", "\"error\":", "\"id\":\"y\",", "\\u00e9", "\\x",
            ])), 0..4),
            raw in prop::option::of((any::<usize>(), any::<u8>())),
        ) {
            let mut data = usual.as_bytes().to_vec();
            for (at, cut, text) in edits {
                let at = at % (data.len() + 1);
                let end = (at + cut).min(data.len());
                data.splice(at..end, text.bytes());
            }
            if let (Some((at, byte)), false) = (raw, data.is_empty()) {
                let at = at % data.len();
                data[at] = byte;
            }
            if let Some(said) = read(&data, None) {
                prop_assert_eq!(Some(said), deserialized(&data), "{}", data.escape_ascii());
            }
        }
    }
}
