//! Requests' bodies to prompts, for comparison with engines: reads one JSON object a line from standard
//! input, `{"template": SOURCE, "special": {"bos_token": …}, "path": "/v1/messages", "body": {…}}`, and
//! prints one a line: `{"text": …}`, `{"beginning": …}` where something in it is no text, or `{"error": …}`.

use std::collections::HashMap;
use std::io::{BufRead as _, Write as _};

use keyway_text::{ChatTemplate, Conversation, ConversationError, PromptText, TextError};
use serde_json::{Value, json};

const BYTES_MAX: usize = 16 << 20;

fn main() -> std::io::Result<()> {
    let mut compiled: HashMap<String, Result<ChatTemplate, TextError>> = HashMap::new();
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let job: Value = serde_json::from_str(&line?)?;
        let source = job["template"].as_str().unwrap_or_default();
        let special = job["special"].as_object().cloned().unwrap_or_default();
        let template =
            compiled.entry(source.to_owned()).or_insert_with(|| ChatTemplate::from_source(source, special));
        let prompt = template.as_ref().map_err(ToString::to_string).and_then(|template| {
            prompt(job["path"].as_str(), &job["body"], template).map_err(|error| error.to_string())
        });
        let answer = match prompt {
            Ok(PromptText::Whole { text, .. }) => json!({ "text": text }),
            Ok(PromptText::Beginning(text)) => json!({ "beginning": text }),
            Err(error) => json!({ "error": error }),
        };
        writeln!(out, "{answer}")?;
    }
    Ok(())
}

fn prompt(
    path: Option<&str>,
    body: &Value,
    template: &ChatTemplate,
) -> Result<PromptText, ConversationError> {
    let body = body.to_string();
    let conversation = match path {
        Some("/v1/messages") => Conversation::from_messages(body.as_bytes(), template),
        Some("/v1/responses") => Conversation::from_responses(body.as_bytes()),
        _ => Conversation::from_chat(body.as_bytes()),
    }?;
    conversation.render(template, BYTES_MAX)
}
