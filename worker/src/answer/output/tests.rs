//! What is shown does not depend on where a stream was broken off.

use std::path::Path;

use keyway_text::{HarmonyTokens, TextModel};
use proptest::prelude::*;

use super::*;
use crate::answer::answer_format::{AnswerFormat, CallFormat, Function};

fn output(stops: &[String]) -> TextOutput {
    TextOutput::new(&TextModel::builtin(), &[104, 105], stops.to_vec()).unwrap()
}

/// A small tokenizer with gpt-oss's special tokens, read as gpt-oss's.
pub(crate) fn gpt_oss() -> TextModel {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../gateway/text/tests/data/tokenizers/gpt_oss");
    let mut text = TextModel::from_dir(&dir).unwrap();
    text.harmony = HarmonyTokens::of(&text.tokenizer);
    assert!(text.harmony.is_some());
    text
}

/// The text shown of `ids`, the last of which reaches `max_tokens`, and how many were taken.
fn take(output: &mut TextOutput, ids: &[u32]) -> String {
    take_both(output, ids).content
}

fn event(token: u32, finish: Option<FinishReason>) -> TokenEvent {
    TokenEvent { token, cached_tokens: 0, score: None, finish }
}

fn take_both(output: &mut TextOutput, ids: &[u32]) -> Shown {
    let mut text = Shown::default();
    for (i, id) in ids.iter().enumerate() {
        let finish = (i + 1 == ids.len()).then_some(FinishReason::Length);
        text.append(output.push(&event(*id, finish)).unwrap());
        if output.finish.is_some() {
            break;
        }
    }
    text
}

proptest! {
    /// Cut after any token, also inside a character or a stop string, with all or only some of the text
    /// shown.
    #[test]
    fn a_resumed_output_shows_what_was_missing(
        text in "[abé€😀]{1,20}", garbage in prop::collection::vec(0xC0u32..0x100, 0..3),
        stops in prop::collection::vec("[abé€]{2,4}", 0..3), shown_less in 0usize..3,
    ) {
        let ids: Vec<u32> = text.bytes().map(u32::from).chain(garbage).collect();
        let mut unbroken = output(&stops);
        let all = take(&mut unbroken, &ids);
        for cut in 0..unbroken.completion_tokens {
            let mut broken = output(&stops);
            let mut shown = String::new();
            for id in &ids[..cut] {
                shown.push_str(&broken.push(&event(*id, None)).unwrap().content);
            }
            let kept = shown.char_indices().rev().nth(shown_less).map_or(shown.len(), |(at, _)| at);
            shown.truncate(kept);
            let mut resumed = output(&stops);
            resumed.resume(&ids[..cut], shown.len()).unwrap();
            shown.push_str(&take(&mut resumed, &ids[cut..]));
            prop_assert_eq!(&shown, &all);
            prop_assert_eq!(resumed.completion_tokens, unbroken.completion_tokens);
            prop_assert_eq!(resumed.finish, unbroken.finish);
        }
    }

    /// The same for gpt-oss: `emitted` counts both fields' bytes, in the order in which they came.
    #[test]
    fn a_resumed_format_shows_what_was_missing(
        parts in prop::collection::vec(prop::sample::select(vec![
            "<|start|>assistant<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|end|>", "hm é",
            "ab\u{1f600}", "ST", "OP", "<|start|>assistant<|channel|>commentary to=functions.f<|message|>", "x",
        ]), 1..12),
    ) {
        let text = gpt_oss();
        let ids = text.tokenizer.encode(&parts.concat(), false).unwrap();
        let options = ReadOptions { format: AnswerFormat::Harmony, ..ReadOptions::default() };
        let stops = StopStrings { texts: vec!["STOP".to_owned()], ..StopStrings::default() };
        let output = || TextOutput::with(&text, &[], stops.clone(), &options).unwrap();
        let mut unbroken = output();
        let all = take_both(&mut unbroken, &ids);
        for cut in 0..unbroken.completion_tokens {
            let mut broken = output();
            let mut shown = Shown::default();
            for id in &ids[..cut] {
                shown.append(broken.push(&event(*id, None)).unwrap());
            }
            let mut resumed = output();
            resumed.resume(&ids[..cut], shown.reasoning.len() + shown.content.len()).unwrap();
            shown.append(take_both(&mut resumed, &ids[cut..]));
            prop_assert_eq!(&shown, &all);
            prop_assert_eq!(resumed.finish, unbroken.finish);
        }
    }

    /// Calls too: the client has as much of them as the ids gave, and no more comes twice.
    #[test]
    fn a_resumed_call_goes_on_where_it_broke_off(
        parts in prop::collection::vec(prop::sample::select(vec![
            "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"é\", \"b\": [1, 2]}}</tool_call>",
            "<tool_call>{\"name\": \"g\", \"arguments\": {}}</tool_call>", "\n", "well", "<tool", "}",
        ]), 1..6),
    ) {
        let function = |name: &str| Function { name: name.to_owned(), parameters: serde_json::json!({}) };
        let options = ReadOptions {
            calls: CallFormat::Hermes,
            functions: [function("f"), function("g")].into(),
            ..ReadOptions::default()
        };
        let text = TextModel::builtin();
        let output = || TextOutput::with(&text, &[104], StopStrings::default(), &options).unwrap();
        let ids = text.tokenizer.encode(&parts.concat(), false).unwrap();
        let all = take_both(&mut output(), &ids);
        for cut in 0..ids.len() {
            let mut broken = output();
            let mut shown = Shown::default();
            for id in &ids[..cut] {
                shown.append(broken.push(&event(*id, None)).unwrap());
            }
            let mut resumed = output();
            resumed.resume(&ids[..cut], shown.content.len()).unwrap();
            prop_assert_eq!(resumed.has_calls, !shown.calls.is_empty());
            shown.append(take_both(&mut resumed, &ids[cut..]));
            prop_assert_eq!(&shown, &all);
        }
    }
}
