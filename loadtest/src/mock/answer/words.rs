//! The words of each API: what a stream says before its first token, for each token and at its end, and an
//! answer in one piece. Knows no time and no connection. Shapes as vLLM 0.32 has them, without what no client
//! needs.

use std::io::Write as _;

use super::super::{
    api::Api,
    prompt::{TOKEN_BYTES, Vocabulary},
};

/// What an answer says besides its tokens.
#[derive(Debug)]
pub(in super::super) struct About {
    /// The API in whose words the answer is written.
    pub api: Api,
    /// Number that its id is made of.
    pub id: u64,
    /// When the answer was begun, in seconds since 1970.
    pub created: u64,
    /// Prompt tokens of the request, cached ones included, for its usage counts.
    pub prompt_tokens: u32,
    /// Tokens that will be generated.
    pub output_tokens: u32,
    /// First token of the answer.
    pub first: u32,
    /// Its finish reason in OpenAI's words: `length` if the request set a limit, else `stop`.
    pub finish: &'static str,
    /// Whether a usage chunk follows.
    pub include_usage: bool,
    /// Tokens after which the connection breaks.
    pub cut_after: Option<u32>,
}

/// What the events of one stream have in common.
#[derive(Debug)]
pub(super) struct Words {
    api: Api,
    /// What a chat's or a completion's event begins with.
    head: Vec<u8>,
    /// What every token's event begins with, and ends with before its finish reason or number.
    token: (Vec<u8>, &'static str),
}

// Writing to memory cannot fail: the results of `write!` below say nothing.

impl About {
    fn write_start(&self, object: &str, model: &str, out: &mut Vec<u8>) {
        let prefix = if self.api == Api::Chat { "chatcmpl" } else { "cmpl" };
        let _ = write!(
            out,
            r#"{{"id":"{prefix}-{:016x}","object":"{object}","created":{},"model":{model},"choices":["#,
            self.id, self.created
        );
    }

    fn write_usage(&self, cached: u32, out: &mut Vec<u8>) {
        let (prompt, output) = (self.prompt_tokens, self.output_tokens);
        let total = prompt + output;
        let _ = match self.api {
            Api::Chat | Api::Completions => write!(
                out,
                r#""usage":{{"prompt_tokens":{prompt},"total_tokens":{total},"completion_tokens":{output},"prompt_tokens_details":{{"cached_tokens":{cached}}}}}"#
            ),
            Api::Responses => write!(
                out,
                r#""usage":{{"input_tokens":{prompt},"input_tokens_details":{{"cached_tokens":{cached}}},"output_tokens":{output},"output_tokens_details":{{"reasoning_tokens":0}},"total_tokens":{total}}}"#
            ),
            // Anthropic's input tokens are those that were not cached.
            Api::Messages => write!(
                out,
                r#""usage":{{"input_tokens":{},"cache_read_input_tokens":{cached},"cache_creation_input_tokens":0,"output_tokens":{output}}}"#,
                prompt - cached
            ),
        };
    }

    /// The whole answer as one JSON object. `model` is a JSON string.
    pub(in super::super) fn whole(&self, model: &str, vocabulary: &Vocabulary, cached: u32) -> Vec<u8> {
        let mut out = Vec::with_capacity(512 + self.output_tokens as usize * TOKEN_BYTES);
        let text = |out: &mut Vec<u8>| {
            (0..self.output_tokens).for_each(|i| out.extend_from_slice(vocabulary.token(self.first, i)));
        };
        match self.api {
            Api::Chat | Api::Completions => self.write_choice(model, &text, &mut out),
            Api::Responses => {
                self.write_response(model, "completed", &mut out);
                out.extend_from_slice(br#","output":["#);
                self.write_item(&text, &mut out);
                out.extend_from_slice(b"],");
            }
            Api::Messages => {
                self.write_message(model, &mut out);
                out.extend_from_slice(br#""content":[{"type":"text","text":""#);
                text(&mut out);
                let _ = write!(out, r#""}}],"stop_reason":"{}","stop_sequence":null,"#, self.stop_reason());
            }
        }
        self.write_usage(cached, &mut out);
        out.push(b'}');
        out
    }

    fn write_choice(&self, model: &str, text: &dyn Fn(&mut Vec<u8>), out: &mut Vec<u8>) {
        let chat = self.api == Api::Chat;
        self.write_start(if chat { "chat.completion" } else { "text_completion" }, model, out);
        let (open, close) = if chat {
            (r#"{"index":0,"message":{"role":"assistant","content":""#, r#""}"#)
        } else {
            (r#"{"index":0,"text":""#, r#"""#)
        };
        out.extend_from_slice(open.as_bytes());
        text(out);
        let _ = write!(out, r#"{close},"logprobs":null,"finish_reason":"{}"}}],"#, self.finish);
    }

    /// A response up to its output.
    fn write_response(&self, model: &str, status: &str, out: &mut Vec<u8>) {
        let _ = write!(
            out,
            r#"{{"id":"resp_{:016x}","object":"response","created_at":{},"status":"{status}","model":{model},"error":null,"incomplete_details":null,"parallel_tool_calls":true,"tool_choice":"auto","tools":[]"#,
            self.id, self.created
        );
    }

    /// The one item of a response's output.
    fn write_item(&self, text: &dyn Fn(&mut Vec<u8>), out: &mut Vec<u8>) {
        let _ = write!(
            out,
            r#"{{"id":"msg_{:016x}","type":"message","status":"completed","role":"assistant","content":[{{"type":"output_text","annotations":[],"text":""#,
            self.id
        );
        text(out);
        out.extend_from_slice(br#""}]}"#);
    }

    /// A message up to its content.
    fn write_message(&self, model: &str, out: &mut Vec<u8>) {
        let _ = write!(
            out,
            r#"{{"id":"msg_{:016x}","type":"message","role":"assistant","model":{model},"#,
            self.id
        );
    }

    fn stop_reason(&self) -> &'static str {
        if self.finish == "length" { "max_tokens" } else { "end_turn" }
    }
}

// === impl Words ===

impl Words {
    /// The words of `about`'s stream. `model` is a JSON string.
    pub(super) fn new(about: &About, model: &str) -> Self {
        let (mut head, id) = (b"data: ".to_vec(), about.id);
        let mut token = Vec::new();
        let close = match about.api {
            Api::Chat => {
                about.write_start("chat.completion.chunk", model, &mut head);
                token.extend_from_slice(&head);
                token.extend_from_slice(br#"{"index":0,"delta":{"content":""#);
                r#""},"logprobs":null,"finish_reason":"#
            }
            Api::Completions => {
                about.write_start("text_completion", model, &mut head);
                token.extend_from_slice(&head);
                token.extend_from_slice(br#"{"index":0,"text":""#);
                r#"","logprobs":null,"finish_reason":"#
            }
            Api::Responses => {
                let _ = write!(
                    token,
                    "event: response.output_text.delta\ndata: {{\"type\":\"response.output_text.delta\",\"item_id\":\"msg_{id:016x}\",\"output_index\":0,\"content_index\":0,\"logprobs\":[],\"delta\":\""
                );
                r#"","sequence_number":"#
            }
            Api::Messages => {
                token.extend_from_slice(b"event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"");
                r#""}}"#
            }
        };
        Self { api: about.api, head, token: (token, close) }
    }

    /// Bytes of one token's event, about.
    pub(super) fn token_bytes(&self) -> usize {
        self.token.0.len() + self.token.1.len() + 32
    }

    /// That the answer was begun. Completions have nothing to say there, but some servers do: an empty text.
    pub(super) fn write_opening(&self, about: &About, model: &str, out: &mut Vec<u8>) {
        match self.api {
            Api::Chat => {
                out.extend_from_slice(&self.head);
                out.extend_from_slice(br#"{"index":0,"delta":{"role":"assistant","content":""},"#);
                out.extend_from_slice(b"\"logprobs\":null,\"finish_reason\":null}]}\n\n");
            }
            Api::Completions => {
                out.extend_from_slice(&self.head);
                out.extend_from_slice(
                    b"{\"index\":0,\"text\":\"\",\"logprobs\":null,\"finish_reason\":null}]}\n\n",
                );
            }
            Api::Responses => write_response_opening(about, model, out),
            Api::Messages => {
                out.extend_from_slice(
                    b"event: message_start\ndata: {\"type\":\"message_start\",\"message\":",
                );
                about.write_message(model, out);
                let _ = write!(
                    out,
                    "\"content\":[],\"stop_reason\":null,\"stop_sequence\":null,\"usage\":{{\"input_tokens\":{},\"output_tokens\":0}}}}}}\n\n",
                    about.prompt_tokens
                );
                out.extend_from_slice(b"event: ping\ndata: {\"type\":\"ping\"}\n\n");
            }
        }
    }

    /// Token `i` of the answer; the first opens the item or the block that holds them.
    pub(super) fn write_token(&self, about: &About, vocabulary: &Vocabulary, i: u32, out: &mut Vec<u8>) {
        match self.api {
            Api::Responses if i == 0 => write_item_opening(about.id, out),
            Api::Messages if i == 0 => out.extend_from_slice(b"event: content_block_start\ndata: {\"type\":\"content_block_start\",\"index\":0,\"content_block\":{\"type\":\"text\",\"text\":\"\"}}\n\n"),
            _ => {}
        }
        out.extend_from_slice(&self.token.0);
        out.extend_from_slice(vocabulary.token(about.first, i));
        out.extend_from_slice(self.token.1.as_bytes());
        let last = i + 1 == about.output_tokens;
        let _ = match self.api {
            Api::Chat | Api::Completions if last => write!(out, "\"{}\"}}]}}\n\n", about.finish),
            Api::Chat | Api::Completions => out.write_all(b"null}]}\n\n"),
            Api::Responses => write!(out, "{}}}\n\n", RESPONSE_OPENING_EVENTS + i),
            Api::Messages => out.write_all(b"\n\n"),
        };
    }

    /// What comes after the last token.
    pub(super) fn write_end(
        &self,
        about: &About,
        model: &str,
        vocabulary: &Vocabulary,
        cached: u32,
        out: &mut Vec<u8>,
    ) {
        match self.api {
            Api::Chat | Api::Completions => {
                if about.include_usage {
                    out.extend_from_slice(&self.head);
                    out.extend_from_slice(b"],");
                    about.write_usage(cached, out);
                    out.extend_from_slice(b"}\n\n");
                }
                out.extend_from_slice(b"data: [DONE]\n\n");
            }
            Api::Responses => {
                let _ = write!(
                    out,
                    "event: response.completed\ndata: {{\"type\":\"response.completed\",\"sequence_number\":{},\"response\":",
                    RESPONSE_OPENING_EVENTS + about.output_tokens
                );
                out.extend_from_slice(&about.whole(model, vocabulary, cached));
                out.extend_from_slice(b"}\n\n");
            }
            Api::Messages => {
                out.extend_from_slice(
                    b"event: content_block_stop\ndata: {\"type\":\"content_block_stop\",\"index\":0}\n\n",
                );
                let _ = write!(
                    out,
                    "event: message_delta\ndata: {{\"type\":\"message_delta\",\"delta\":{{\"stop_reason\":\"{}\",\"stop_sequence\":null}},",
                    about.stop_reason()
                );
                about.write_usage(cached, out);
                out.extend_from_slice(b"}\n\nevent: message_stop\ndata: {\"type\":\"message_stop\"}\n\n");
            }
        }
    }
}

/// Events before the first token of a response.
const RESPONSE_OPENING_EVENTS: u32 = 4;

fn write_response_opening(about: &About, model: &str, out: &mut Vec<u8>) {
    for (number, kind) in ["response.created", "response.in_progress"].into_iter().enumerate() {
        let _ = write!(
            out,
            "event: {kind}\ndata: {{\"type\":\"{kind}\",\"sequence_number\":{number},\"response\":"
        );
        about.write_response(model, "in_progress", out);
        out.extend_from_slice(b",\"output\":[],\"usage\":null}}\n\n");
    }
}

fn write_item_opening(id: u64, out: &mut Vec<u8>) {
    let _ = write!(
        out,
        "event: response.output_item.added\ndata: {{\"type\":\"response.output_item.added\",\"sequence_number\":2,\"output_index\":0,\"item\":{{\"id\":\"msg_{id:016x}\",\"type\":\"message\",\"status\":\"in_progress\",\"role\":\"assistant\",\"content\":[]}}}}\n\n"
    );
    let _ = write!(
        out,
        "event: response.content_part.added\ndata: {{\"type\":\"response.content_part.added\",\"sequence_number\":3,\"item_id\":\"msg_{id:016x}\",\"output_index\":0,\"content_index\":0,\"part\":{{\"type\":\"output_text\",\"text\":\"\",\"annotations\":[]}}}}\n\n"
    );
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn about(api: Api) -> About {
        About {
            api,
            id: 7,
            created: 1,
            prompt_tokens: 40,
            output_tokens: 3,
            first: 5,
            finish: "length",
            include_usage: true,
            cut_after: None,
        }
    }

    fn stream(api: Api) -> String {
        let (about, vocabulary, mut out) = (about(api), Vocabulary::default(), Vec::new());
        let words = Words::new(&about, "\"m\"");
        words.write_opening(&about, "\"m\"", &mut out);
        (0..3).for_each(|i| words.write_token(&about, &vocabulary, i, &mut out));
        words.write_end(&about, "\"m\"", &vocabulary, 8, &mut out);
        String::from_utf8(out).unwrap()
    }

    /// The data of each event, whose name is its type where it has one.
    fn events(stream: &str) -> Vec<Value> {
        let one = |event: &str| {
            let (name, data) = event.rsplit_once("data: ").unwrap();
            let data: Value = serde_json::from_str(data).unwrap_or_else(|_| Value::from(data));
            let named = name.strip_prefix("event: ").map(str::trim_end);
            assert_eq!(named, data["type"].as_str(), "{event}");
            data
        };
        stream.strip_suffix("\n\n").unwrap().split("\n\n").map(one).collect()
    }

    #[test]
    fn every_api_says_the_same_text_and_counts() {
        for (api, text, prompt, last) in [
            (Api::Chat, "/choices/0/delta/content", "/usage/prompt_tokens", "[DONE]"),
            (Api::Completions, "/choices/0/text", "/usage/prompt_tokens", "[DONE]"),
            (Api::Responses, "/delta", "/response/usage/input_tokens", "response.completed"),
            (Api::Messages, "/delta/text", "/usage/cache_read_input_tokens", "message_stop"),
        ] {
            let events = events(&stream(api));
            let said: String = events.iter().filter_map(|event| event.pointer(text)?.as_str()).collect();
            assert_eq!(said, " aaf aag aah", "{api:?}");
            let counted = events.iter().filter_map(|event| event.pointer(prompt)?.as_u64()).next_back();
            assert_eq!(counted, Some(if api == Api::Messages { 8 } else { 40 }), "{api:?}");
            let end = events.last().unwrap();
            assert_eq!(end["type"].as_str().or(end.as_str()), Some(last), "{api:?}");
        }
    }

    #[test]
    fn the_events_of_a_response_are_numbered() {
        let numbers: Vec<_> =
            events(&stream(Api::Responses)).iter().map(|event| event["sequence_number"].as_u64()).collect();
        assert_eq!(numbers, (0..8).map(Some).collect::<Vec<_>>());
    }

    #[test]
    fn whole_answers_are_json_with_the_text() {
        for (api, text) in [
            (Api::Chat, "/choices/0/message/content"),
            (Api::Completions, "/choices/0/text"),
            (Api::Responses, "/output/0/content/0/text"),
            (Api::Messages, "/content/0/text"),
        ] {
            let whole = about(api).whole("\"m\"", &Vocabulary::default(), 8);
            let whole: Value = serde_json::from_slice(&whole).unwrap();
            assert_eq!(whole.pointer(text).unwrap(), " aaf aag aah", "{api:?}");
        }
    }
}
