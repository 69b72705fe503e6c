//! Prompts that come as token ids, which need no tokenizer: completions' (`prompt`), those of SGLang's
//! `/generate` (`input_ids`) and of vLLM's `/inference/v1/generate` (`token_ids`).

use crate::{json::Value, limits::PROMPT_IDS_BYTES_MAX, prompt::token_keyer::TokenPrompt};

/// The ids of a prompt, or of the first of several; `None` where it is none, or longer than what is kept.
pub(super) fn read(prompt: Value<'_>) -> Option<TokenPrompt> {
    let raw = prompt.raw();
    let within = raw.strip_prefix('[')?.trim_start();
    if raw.len() > PROMPT_IDS_BYTES_MAX {
        return None;
    }
    let (ids, total) = if within.starts_with('[') {
        let prompts: Vec<Vec<u32>> = serde_json::from_str(raw).ok()?;
        let total = prompts.iter().map(Vec::len).sum();
        (prompts.into_iter().next()?, total)
    } else if within.starts_with(|first: char| first.is_ascii_digit()) {
        let ids: Vec<u32> = serde_json::from_str(raw).ok()?;
        let total = ids.len();
        (ids, total)
    } else {
        return None;
    };
    (total > 0).then_some(TokenPrompt { ids, total: total as u64 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(raw: &str) -> Option<(Vec<u32>, u64)> {
        read(Value::found(raw)).map(|prompt| (prompt.ids, prompt.total))
    }

    #[test]
    fn ids_of_one_prompt_and_of_several() {
        assert_eq!(of("[1, 2,4294967295]"), Some((vec![1, 2, u32::MAX], 3)));
        assert_eq!(of("[ [1,2], [3,4,5] ]"), Some((vec![1, 2], 5)));
        for raw in [
            "[]",
            "[[]]",
            "[\"a\"]",
            "[1.5]",
            "[-1]",
            "[4294967296]",
            "[1,\"a\"]",
            "\"1\"",
            "7",
            "[[1],2]",
            "[1",
        ] {
            assert_eq!(of(raw), None, "{raw}");
        }
        assert_eq!(of(&format!("[1{}]", ",1".repeat(PROMPT_IDS_BYTES_MAX / 2))), None);
    }
}
