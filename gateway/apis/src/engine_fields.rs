//! Fields that say how an engine is to generate, whichever API a request comes by.

/// Those that engines' chats know as well: OpenAI's, and vLLM's own.
const OF_CHATS: [&str; 33] = [
    "allowed_token_ids",
    "bad_words",
    "cache_salt",
    "chat_template_kwargs",
    "documents",
    "ec_transfer_params",
    "frequency_penalty",
    "ignore_eos",
    "include_reasoning",
    "include_stop_str_in_output",
    "kv_transfer_params",
    "length_penalty",
    "logit_bias",
    "media_io_kwargs",
    "min_p",
    "min_tokens",
    "mm_processor_kwargs",
    "presence_penalty",
    "priority",
    "repetition_detection",
    "repetition_penalty",
    "request_id",
    "seed",
    "session_id",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stop_token_ids",
    "structured_outputs",
    "thinking_token_budget",
    "truncate_prompt_tokens",
    "truncation_side",
    "vllm_xargs",
    "watermarking",
];

/// The name of a field that goes on in a chat as it came, if it is one, or one of those of its API.
pub(crate) fn of_chats(name: &str, of_api: &[&'static str]) -> Option<&'static str> {
    OF_CHATS.iter().chain(of_api).find(|of| **of == name).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_api_has_its_own_beside_those_of_all() {
        let found = ["seed", "top_k", "store"].map(|name| of_chats(name, &["top_k"]));
        assert_eq!(found, [Some("seed"), Some("top_k"), None]);
    }
}
