//! Reads the body of an OpenAI or Anthropic request: what the mock has to know of it, and nothing of what
//! only a real model would heed (temperature, stop strings, tools' meaning). Answers nothing.

use std::borrow::Cow;

use keyway_wire::{
    block_hash::{BlockHash, Chain, HashKey},
    openai::ErrorBody,
};
use serde::Deserialize;
use serde_json::value::RawValue;

use super::{
    api::Api,
    kv::KvParams,
    prompt::{TOKEN_BYTES, Tokens, Vocabulary},
};

/// What was asked for.
#[derive(Debug)]
pub(super) struct Ask {
    /// In which API's words it was asked, and is answered.
    pub api: Api,
    /// The prompt's tokens, and then the answer's.
    pub tokens: Tokens,
    /// How many of them are the prompt.
    pub prompt_tokens: u32,
    /// Tokens to generate, at least 1: the request's limit, else the mock's default less what the answer has.
    pub output_tokens: u32,
    /// First token of the answer.
    pub first: u32,
    /// Names of the full blocks.
    pub chain: Box<[BlockHash]>,
    /// Why the answer will end.
    pub finish: &'static str,
    /// Whether as a stream.
    pub stream: bool,
    /// Whether the stream ends with a usage chunk.
    pub include_usage: bool,
    /// The tenant's salt; seeds the chain.
    pub salt: Option<String>,
    /// What it says of its prompt's KV.
    pub kv: Option<KvParams>,
    /// Leading tokens of the prompt that have come from another worker.
    pub fetched_tokens: u32,
}

/// What reading depends on.
#[derive(Debug)]
pub(super) struct Reading<'a> {
    /// Name of the model served; a request for another one is refused.
    pub model: &'a str,
    /// Tokens of a KV block.
    pub block_tokens: u32,
    /// Tokens generated for requests that set no limit.
    pub output_tokens: u32,
    /// Tokens of a picture; 0: those of its text.
    pub image_tokens: u32,
    /// What answers are made of.
    pub vocabulary: &'a Vocabulary,
}

#[derive(Deserialize)]
struct Body<'a> {
    model: Option<String>,
    #[serde(borrow)]
    messages: Option<Vec<Message<'a>>>,
    #[serde(borrow)]
    prompt: Option<&'a RawValue>,
    /// What `/v1/responses` has for messages.
    #[serde(borrow)]
    input: Option<&'a RawValue>,
    /// Its system message, and that of `/v1/messages`.
    #[serde(borrow, alias = "system")]
    instructions: Option<&'a RawValue>,
    #[serde(borrow)]
    tools: Option<&'a RawValue>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    max_tokens: Option<u32>,
    #[serde(alias = "max_output_tokens")]
    max_completion_tokens: Option<u32>,
    n: Option<u32>,
    #[serde(default)]
    continue_final_message: bool,
    cache_salt: Option<String>,
    kv_transfer_params: Option<KvParams>,
}

#[derive(Deserialize)]
struct Message<'a> {
    /// Absent in those items of a response's input that are no messages.
    #[serde(borrow, default)]
    role: Cow<'a, str>,
    #[serde(borrow)]
    content: Option<&'a RawValue>,
    #[serde(borrow)]
    tool_calls: Option<&'a RawValue>,
}

/// A part of a content.
#[derive(Deserialize)]
struct Part<'a> {
    #[serde(borrow, rename = "type", default)]
    kind: Cow<'a, str>,
}

#[derive(Deserialize)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
}

#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

/// Reads `body`, sent to `api`; an error is what the client gets.
pub(super) fn read(body: &[u8], api: Api, reading: &Reading<'_>) -> Result<Ask, ErrorBody> {
    let body: Body<'_> = serde_json::from_slice(body)
        .map_err(|error| invalid(&format!("the body is not a request: {error}")))?;
    is_served(body.model.as_deref(), reading)?;
    if body.n.is_some_and(|n| n != 1) {
        return Err(invalid("`n` must be 1: the mock gives one answer").with_param("n"));
    }
    let mut tokens = Tokens::default();
    let said = match api {
        Api::Completions => push_prompt(&body, &mut tokens)?,
        Api::Chat | Api::Responses | Api::Messages => push_chat(&body, (api, reading), &mut tokens)?,
    };
    let limit = body.max_completion_tokens.or(body.max_tokens);
    let output_tokens = limit.unwrap_or(reading.output_tokens.saturating_sub(said)).max(1);
    let prompt_tokens = tokens.len() as u32;
    // An answer that is continued is the one to the prompt without what has been said of it.
    let asked = prompt_tokens - said;
    let seed = tokens.bytes().chunks_exact(TOKEN_BYTES).take(asked as usize).next_back();
    let seed = seed.map_or(0, |token| u32::from(token[0]));
    let first = seed.wrapping_mul(977).wrapping_add(asked).wrapping_add(said);
    tokens.push_answer(reading.vocabulary, first, output_tokens);
    let chain = chain(&tokens, reading.block_tokens, body.cache_salt.as_deref());
    Ok(Ask {
        api,
        tokens,
        prompt_tokens,
        output_tokens,
        first,
        chain,
        finish: if limit.is_some() { "length" } else { "stop" },
        stream: body.stream.unwrap_or(false),
        include_usage: body.stream_options.is_some_and(|options| options.include_usage),
        salt: body.cache_salt,
        kv: body.kv_transfer_params,
        fetched_tokens: 0,
    })
}

/// Refuses a request for another model than the one served.
pub(super) fn is_served(model: Option<&str>, reading: &Reading<'_>) -> Result<(), ErrorBody> {
    let Some(model) = model.filter(|model| *model != reading.model) else { return Ok(()) };
    let message = format!("the model `{model}` does not exist; this server has `{}`", reading.model);
    Err(ErrorBody::new("invalid_request_error", "model_not_found", message).with_param("model"))
}

/// The names of the full blocks of `tokens`.
pub(super) fn chain(tokens: &Tokens, block_tokens: u32, salt: Option<&str>) -> Box<[BlockHash]> {
    let mut chain = Chain::new(HashKey::new(0), salt.unwrap_or_default().as_bytes());
    let block_bytes = block_tokens as usize * TOKEN_BYTES;
    tokens.bytes().chunks_exact(block_bytes).map(|block| chain.push(block)).collect()
}

/// Returns how many of the tokens are of the answer, where the last message is the beginning of it.
fn push_chat(
    body: &Body<'_>,
    (api, reading): (Api, &Reading<'_>),
    tokens: &mut Tokens,
) -> Result<u32, ErrorBody> {
    let push_value = |raw: &RawValue, tokens: &mut Tokens| push_value(raw, reading.image_tokens, tokens);
    let input;
    let messages = if api == Api::Responses {
        input = read_input(body)?;
        &input
    } else {
        body.messages.as_deref().unwrap_or_default()
    };
    let Some((last, before)) = messages.split_last() else {
        let field = if api == Api::Responses { "input" } else { "messages" };
        return Err(invalid(&format!("`{field}` must hold at least one message")).with_param(field));
    };
    // Anthropic's API continues an assistant's last message without being told.
    let continued = body.continue_final_message || api == Api::Messages;
    let said = Some(last).filter(|last| continued && last.role == "assistant");
    let messages = if said.is_some() { before } else { messages };
    if let Some(tools) = body.tools {
        tokens.push_message("tools", |tokens| tokens.push_text(tools.get().as_bytes()));
    }
    if let Some(instructions) = body.instructions {
        tokens.push_message("system", |tokens| push_value(instructions, tokens));
    }
    for message in messages {
        tokens.push_message(&message.role, |tokens| {
            for raw in [message.content, message.tool_calls].into_iter().flatten() {
                push_value(raw, tokens);
            }
        });
    }
    tokens.push_role("assistant");
    let asked = tokens.len();
    if let Some(content) = said.and_then(|said| said.content) {
        push_value(content, tokens);
    }
    Ok((tokens.len() - asked) as u32)
}

/// A response's input: one text of the user's, or a list of messages and other items.
fn read_input<'a>(body: &Body<'a>) -> Result<Vec<Message<'a>>, ErrorBody> {
    let Some(raw) = body.input else { return Ok(Vec::new()) };
    if raw.get().starts_with('"') {
        return Ok(vec![Message { role: "user".into(), content: Some(raw), tool_calls: None }]);
    }
    serde_json::from_str(raw.get())
        .map_err(|error| invalid(&format!("`input` is no list of items: {error}")).with_param("input"))
}

/// A string as its text, a picture as its tokens, anything else (other parts of content) as it stands.
fn push_value(raw: &RawValue, image_tokens: u32, tokens: &mut Tokens) {
    if let Ok(text) = serde_json::from_str::<Text<'_>>(raw.get()) {
        return tokens.push_text(text.0.as_bytes());
    }
    let is_picture = |part: &&RawValue| {
        let part: Result<Part<'_>, _> = serde_json::from_str(part.get());
        image_tokens > 0 && part.is_ok_and(|part| PICTURES.contains(&&*part.kind))
    };
    let parts: Vec<&RawValue> = serde_json::from_str(raw.get()).unwrap_or_default();
    if !parts.iter().any(&is_picture) {
        return tokens.push_text(raw.get().as_bytes());
    }
    for part in parts {
        if is_picture(&part) {
            let name = Chain::new(HashKey::new(0), b"").hash(part.get().as_bytes());
            (0..image_tokens).for_each(|i| tokens.push_id((name as u32).wrapping_add(i)));
        } else {
            tokens.push_text(part.get().as_bytes());
        }
    }
}

/// What parts that are pictures are called: by OpenAI's two APIs, and by Anthropic's.
const PICTURES: [&str; 3] = ["image_url", "input_image", "image"];

fn push_prompt(body: &Body<'_>, tokens: &mut Tokens) -> Result<u32, ErrorBody> {
    let raw = body.prompt.map(RawValue::get).unwrap_or_default();
    if let Ok(Text(text)) = serde_json::from_str(raw) {
        tokens.push_text(text.as_bytes());
    } else if let Ok(ids) = serde_json::from_str::<Vec<u32>>(raw) {
        for id in ids {
            tokens.push_id(id);
        }
    } else {
        return Err(invalid("`prompt` must be one text or one list of token ids").with_param("prompt"));
    }
    if tokens.is_empty() {
        return Err(invalid("`prompt` must not be empty").with_param("prompt"));
    }
    Ok(0)
}

pub(super) fn invalid(message: &str) -> ErrorBody {
    ErrorBody::new("invalid_request_error", "invalid_request", message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(body: &str, api: Api) -> Result<Ask, ErrorBody> {
        let vocabulary = Vocabulary::default();
        let reading = Reading {
            model: "m",
            block_tokens: 4,
            output_tokens: 7,
            image_tokens: 50,
            vocabulary: &vocabulary,
        };
        read(body.as_bytes(), api, &reading)
    }

    fn shared(a: &Ask, b: &Ask) -> usize {
        a.chain.iter().zip(&b.chain).take_while(|(a, b)| a == b).count()
    }

    #[test]
    fn a_chat_request() {
        let body = r#"{"model":"m","messages":[{"role":"user","content":"0123456\u0038"}],"stream":true,
            "stream_options":{"include_usage":true},"max_tokens":3,"temperature":0}"#;
        let ask = ask(body, Api::Chat).unwrap();
        // <|user|> 2, text 3 (nine bytes), <|end|> 2, <|assistant|> 4.
        assert_eq!((ask.prompt_tokens, ask.output_tokens, ask.finish), (10, 3, "length"));
        assert!(ask.stream && ask.include_usage);
        assert_eq!(ask.tokens.len(), 13);
        assert_eq!(ask.chain.len(), 3);
    }

    #[test]
    fn an_answer_is_continued_where_its_beginning_ends() {
        let vocabulary = Vocabulary::default();
        let whole = ask(r#"{"messages":[{"role":"user","content":"why?!"}]}"#, Api::Chat).unwrap();
        let said: Vec<u8> = (0..3).flat_map(|i| *vocabulary.token(whole.first, i)).collect();
        let said = String::from_utf8(said).unwrap();
        let rest = ask(
            &format!(
                r#"{{"messages":[{{"role":"user","content":"why?!"}},{{"role":"assistant","content":"{said}"}}],
                "continue_final_message":true,"add_generation_prompt":false}}"#
            ),
            Api::Chat,
        );
        let rest = rest.unwrap();
        assert_eq!(
            (rest.prompt_tokens, rest.output_tokens),
            (whole.prompt_tokens + 3, whole.output_tokens - 3)
        );
        assert_eq!(rest.tokens, whole.tokens);
    }

    #[test]
    fn prompts_as_text_and_as_ids() {
        assert_eq!(ask(r#"{"prompt":"01234567"}"#, Api::Completions).unwrap().prompt_tokens, 2);
        let ids = ask(r#"{"prompt":[1,2,70000]}"#, Api::Completions).unwrap();
        assert_eq!((ids.prompt_tokens, ids.output_tokens, ids.finish), (3, 7, "stop"));
    }

    #[test]
    fn every_api_s_words_for_a_prompt_are_the_same_tokens() {
        let chat = ask(
            r#"{"messages":[{"role":"system","content":"be kind"},{"role":"user","content":"why?!"}],"max_tokens":3}"#,
            Api::Chat,
        );
        let chat = chat.unwrap();
        for (body, api) in [
            (r#"{"instructions":"be kind","input":"why?!","max_output_tokens":3}"#, Api::Responses),
            (
                r#"{"instructions":"be kind","input":[{"role":"user","content":"why?!"}],"max_output_tokens":3}"#,
                Api::Responses,
            ),
            (
                r#"{"system":"be kind","messages":[{"role":"user","content":"why?!"}],"max_tokens":3}"#,
                Api::Messages,
            ),
        ] {
            let other = ask(body, api).unwrap();
            assert_eq!((&other.tokens, other.output_tokens), (&chat.tokens, 3), "{body}");
        }
        let said = r#"{"messages":[{"role":"user","content":"why?!"},{"role":"assistant","content":" so"}],"max_tokens":3}"#;
        let (said, asked) = (ask(said, Api::Messages).unwrap(), chat);
        assert_eq!(said.prompt_tokens + 7, asked.prompt_tokens + 1, "the last message is continued");
        assert!(ask(r#"{"input":[]}"#, Api::Responses).is_err());
        assert!(ask(r#"{"input":7}"#, Api::Responses).is_err());
    }

    #[test]
    fn a_picture_has_its_tokens_whatever_its_size() {
        let body = |picture: &str| {
            let parts = format!(
                r#"[{{"type":"image_url","image_url":{{"url":"data:image/png;base64,{picture}"}}}},{{"type":"text","text":"what?"}}]"#
            );
            format!(r#"{{"messages":[{{"role":"user","content":{parts}}}]}}"#)
        };
        let [small, large] = [body("QUJD"), body(&"QUJD".repeat(1_000))];
        let [small, large] = [small, large].map(|body| ask(&body, Api::Chat).unwrap());
        // <|user|> 2, the picture 50, the other part 8, <|end|> 2, <|assistant|> 4.
        assert_eq!((small.prompt_tokens, large.prompt_tokens), (66, 66));
        assert_eq!((shared(&small, &large), shared(&small, &small)), (0, small.chain.len()));
    }

    #[test]
    fn a_salt_shares_no_block() {
        let body = |salt: &str| format!(r#"{{"prompt":"{}"{salt}}}"#, "x".repeat(64));
        let plain = ask(&body(""), Api::Completions).unwrap();
        assert_eq!(shared(&plain, &ask(&body(""), Api::Completions).unwrap()), plain.chain.len());
        assert_eq!(shared(&plain, &ask(&body(r#","cache_salt":"t""#), Api::Completions).unwrap()), 0);
    }

    #[test]
    fn mistakes_name_the_field() {
        for (body, api, want) in [
            ("{", Api::Chat, "not a request"),
            (r#"{"model":"x","prompt":"a"}"#, Api::Completions, "does not exist"),
            (r#"{"messages":[]}"#, Api::Chat, "at least one"),
            (r#"{"prompt":["a","b"]}"#, Api::Completions, "one text or one list"),
            (r#"{"prompt":""}"#, Api::Completions, "not be empty"),
            (r#"{"prompt":"a","n":2}"#, Api::Completions, "must be 1"),
        ] {
            let error = ask(body, api).unwrap_err().error.message;
            assert!(error.contains(want), "{error}");
        }
    }
}
