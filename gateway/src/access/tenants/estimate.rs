//! What a request of a tenant with a limit of tokens may take, as far as its body says; and what in it could
//! be read in two ways, so that the answer would not say what it took.

use crate::{
    error::Error,
    json::Value,
    limits::{ANSWER_TOKENS_RESERVED, ANSWER_TOKENS_RESERVED_MAX, BYTES_PER_TOKEN},
    prompt::{
        content::Unread,
        request::{RequestInfo, StreamOptions},
        work::Work,
    },
    usage::ask,
};

/// What a request may take, in tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Estimate {
    /// Of its prompt: counted where that was tokenised, else by its bytes; 0 for a form with files.
    pub prompt: u64,
    /// Set aside for its answer.
    pub answer: u64,
    /// The most that its answer may have.
    pub most: u64,
}

impl Estimate {
    /// By what was read of a body; `has_files`: its size says nothing of its tokens.
    pub fn of(info: &RequestInfo, body_bytes: usize, has_files: bool) -> Self {
        let media = &info.media;
        let text_tokens = |bytes: u64, of_media: u64| {
            bytes.saturating_sub(of_media).div_ceil(BYTES_PER_TOKEN) + media.sum(|item| item.tokens)
        };
        let by_bytes = || match info.work {
            _ if has_files => 0,
            Work::Generates if info.chain.total_bytes > 0 => {
                text_tokens(info.chain.total_bytes, media.sum(|item| item.bytes))
            }
            _ => text_tokens(body_bytes as u64, media.sum(|item| item.raw_bytes)),
        };
        let prompt = info.tokens.as_ref().map_or_else(by_bytes, |tokens| tokens.total);
        let asked = (info.max_tokens > 0).then_some(u64::from(info.max_tokens));
        let most = asked.unwrap_or(ANSWER_TOKENS_RESERVED_MAX);
        let answer = match info.work {
            // They generate nothing.
            Work::Pools | Work::Counts => 0,
            _ => asked.unwrap_or(ANSWER_TOKENS_RESERVED).min(ANSWER_TOKENS_RESERVED_MAX),
        };
        Self { prompt, answer, most }
    }

    /// What is set aside.
    pub fn tokens(&self) -> u64 {
        self.prompt.saturating_add(self.answer)
    }
}

/// Refuses a body that two readers could understand differently where it says what its stream is to hold.
pub fn unclear(info: &RequestInfo, body: &[u8]) -> Result<(), Error> {
    let field = match &info.stream_options {
        _ if info.unread == Some(Unread::NoObject) => return Ok(()),
        _ if info.stream_is_odd => "stream",
        StreamOptions::Twice => "stream_options",
        StreamOptions::At(place) => {
            let options = body.get(place.clone()).and_then(|options| std::str::from_utf8(options).ok());
            match options.map(Value::found) {
                Some(options) if ask::is_clear(options) => return Ok(()),
                _ => "stream_options",
            }
        }
        StreamOptions::Unclear | StreamOptions::Nowhere(_) => return Ok(()),
    };
    Err(Error::UnclearOption { field })
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use keyway_wire::block_hash::HashKey;

    use super::*;
    use crate::prompt::request::{self, KeyerConfig};

    fn info(body: &str, work: Work) -> RequestInfo {
        let config = KeyerConfig { key: HashKey::new(1), block_bytes: NonZeroUsize::new(16).unwrap() };
        RequestInfo { work, ..request::read(body.as_bytes(), config) }
    }

    fn of(body: &str, work: Work) -> Estimate {
        Estimate::of(&info(body, work), body.len(), false)
    }

    fn is_unclear(body: &str) -> bool {
        unclear(&info(body, Work::Generates), body.as_bytes()).is_err()
    }

    #[test]
    fn an_estimate_is_the_prompt_and_what_was_asked_for_within_reason() {
        let text = "lorem ipsum ".repeat(100);
        for (said, answer, most) in [
            ("", ANSWER_TOKENS_RESERVED, ANSWER_TOKENS_RESERVED_MAX),
            (",\"max_tokens\":7", 7, 7),
            (",\"max_completion_tokens\":9", 9, 9),
            (",\"max_output_tokens\":200000", ANSWER_TOKENS_RESERVED_MAX, 200_000),
            (",\"max_tokens\":5,\"max_completion_tokens\":8", 8, 8),
            (",\"max_tokens\":null", ANSWER_TOKENS_RESERVED, ANSWER_TOKENS_RESERVED_MAX),
            (",\"max_tokens\":99999999999999999999", ANSWER_TOKENS_RESERVED, ANSWER_TOKENS_RESERVED_MAX),
            (",\"max_tokens\":-5", ANSWER_TOKENS_RESERVED, ANSWER_TOKENS_RESERVED_MAX),
        ] {
            let body = format!(r#"{{"messages":[{{"role":"user","content":"{text}"}}]{said}}}"#);
            let estimate = of(&body, Work::Generates);
            assert_eq!((estimate.answer, estimate.most), (answer, most), "{said}");
            assert!((300..330).contains(&estimate.prompt), "{estimate:?}");
        }
        let embedded = of(&format!(r#"{{"input":"{text}","max_tokens":50}}"#), Work::Pools);
        assert!(embedded.answer == 0 && embedded.prompt >= 300, "{embedded:?}");
        let reranked = of(&format!(r#"{{"query":"a","documents":["{text}","{text}"]}}"#), Work::Pools);
        assert!(reranked.prompt >= 600, "{reranked:?}");
        let unread = of(&format!("[\"{text}\"]"), Work::Generates);
        assert!(unread.prompt >= 300, "{unread:?}");
    }

    #[test]
    fn a_picture_is_no_text_and_text_is_no_picture() {
        let base64 = "QUJD".repeat(10_000);
        for part in [
            format!(r#"{{"type":"image_url","image_url":{{"url":"data:image/png;base64,{base64}"}}}}"#),
            format!(r#"{{"type":"input_image","image_url":"data:image/png;base64,{base64}"}}"#),
            format!(r#"{{"type":"input_audio","input_audio":{{"data":"{base64}","format":"wav"}}}}"#),
            format!(
                r#"{{"type":"image","source":{{"type":"base64","media_type":"image/png","data":"{base64}"}}}}"#
            ),
            format!(
                r#"{{"type":"tool_result","content":[{{"type":"image","source":{{"type":"base64","data":"{base64}"}}}}]}}"#
            ),
        ] {
            let body = format!(r#"{{"messages":[{{"role":"user","content":[{part}]}}]}}"#);
            let estimate = of(&body, Work::Generates);
            assert!((30..1_100).contains(&estimate.prompt), "{estimate:?}");
        }
        for part in [
            format!(r#"{{"type":"text","text":"data:image/png;base64,{base64}"}}"#),
            format!(r#"{{"type":"document","source":{{"type":"text","data":"base64 {base64}"}}}}"#),
            format!(r#"{{"type":"document","source":{{"type":"base64","type":"text","data":"{base64}"}}}}"#),
        ] {
            let body = format!(r#"{{"messages":[{{"role":"user","content":[{part}]}}]}}"#);
            assert!(of(&body, Work::Generates).prompt > 10_000, "{}", &part[..60]);
        }
    }

    #[test]
    fn what_can_be_read_in_two_ways_is_seen_however_it_is_written() {
        for body in [
            r#"{"stream":true,"stream_options":{"include_usage":true},"stream_options":{"include_usage":false}}"#,
            r#"{"stream":true,"stream_options":null,"stream_options":{}}"#,
            r#"{"stream":true,"stream_options":{},"\u0073tream_options":{"include_usage":true}}"#,
            r#"{"stream":true,"stream_options":{"include_usage":true,"include_usage":false}}"#,
            r#"{"stream":true,"stream_options":{"include_usage":true,"include_\u0075sage":false}}"#,
            r#"{"stream":true,"stream_options":{"include_usage":false,"include_usage":false}}"#,
            r#"{"stream":true,"stream_options":{"continuous_usage_stats":true,"continuous_usage_stats":false}}"#,
            r#"{"stream":true,"stream_options":{"include_usage":"false"}}"#,
            r#"{"stream":true,"stream_options":{"include_usage":0}}"#,
            r#"{"stream":true,"stream_options":{"include_usage":[]}}"#,
            r#"{"stream":true,"stream_options":{"continuous_usage_stats":1}}"#,
            r#"{"stream":true,"stream_options":[]}"#,
            r#"{"stream":true,"stream_options":"{\"include_usage\":true}"}"#,
            r#"{"stream":true,"stream_options":false}"#,
            r#"{"stream":true,"stream_options":7}"#,
            r#"{"stream":false,"stream":true}"#,
            r#"{"stream":true,"str\u0065am":true}"#,
            r#"{"stream":"true"}"#,
            r#"{"stream":1}"#,
            r#"{"stream":{}}"#,
        ] {
            assert!(is_unclear(body), "{body}");
        }
        for body in [
            "{}",
            r#"{"stream":true}"#,
            r#"{"stream":null,"stream_options":null}"#,
            r#"{"stream":true,"stream_options":{}}"#,
            r#"{"stream":true,"stream_options":{"include_usage":null}}"#,
            r#"{"stream":true,"stream_options":{"include_usage":true,"include_obfuscation":false,"x":[1]}}"#,
            r#"{"stream":true,"stream_options":{"include_usage":false,"continuous_usage_stats":true}}"#,
            r#"{"\u0073tream_options":{"include_\u0075sage":true},"stream":true}"#,
            r#"{"metadata":{"stream":1,"stream_options":[]},"messages":[{"stream":"x"}]}"#,
            "no object",
            "[1]",
        ] {
            assert!(!is_unclear(body), "{body}");
        }
    }
}
