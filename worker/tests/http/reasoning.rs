//! Thoughts apart from the answer, whole and streamed. What the model says is given as the beginning of an
//! output, for the built-in model thinks nothing.

use serde_json::json;

use crate::client::{chat, options, post, with};
use keyway_worker::{ReasoningFormat, WorkerOptions, start};

const CHAT: &str = "/v1/chat/completions";

#[tokio::test]
async fn thoughts_come_in_a_field_of_their_own() {
    for (format, said, thought) in [
        (ReasoningFormat::Think, "<think>\nHm, é.\n</think>\n\nYes", "Hm, é."),
        (ReasoningFormat::ThinkOpen, "Hm.</think>Yes", "Hm."),
        (ReasoningFormat::None, "<think>Hm.</think>Yes", ""),
    ] {
        let worker = start(WorkerOptions { reasoning_format: Some(format), ..options() }).await.unwrap();
        let ids: Vec<u8> = said.bytes().collect();
        let answer = if thought.is_empty() { said } else { "Yes" };
        let body = with(chat("Well?", ids.len() + 1), json!({"keyway": {"output_ids": ids}}));
        let whole = post(worker.addr(), CHAT, &body).await.json();
        let message = &whole["choices"][0]["message"];
        assert_eq!(message["reasoning_content"].as_str().unwrap_or_default(), thought);
        assert!(message["content"].as_str().unwrap().starts_with(answer), "{message}");

        let streamed = post(worker.addr(), CHAT, &with(body, json!({"stream": true}))).await.events();
        let joined = |field: &str| -> String {
            streamed.iter().filter_map(|e| e["choices"][0]["delta"][field].as_str()).collect()
        };
        assert_eq!(joined("reasoning_content"), thought);
        assert_eq!(message["content"], joined("content"));
        worker.shutdown().await;
    }
}
