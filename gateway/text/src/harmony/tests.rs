//! Answers in harmony, well formed and not, with a tokenizer that has gpt-oss's special tokens.

use std::path::Path;
use std::sync::LazyLock;

use proptest::prelude::*;

use super::*;
use crate::TextModel;

static TOKENIZER: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokenizers/gpt_oss");
    TextModel::from_dir(&dir).unwrap().tokenizer
});

fn ids(text: &str) -> Vec<u32> {
    TOKENIZER.encode(text, false).unwrap()
}

fn parser(prompt: &str) -> HarmonyParser {
    let tokens = HarmonyTokens::of(&TOKENIZER).unwrap();
    HarmonyParser::new(Arc::clone(&TOKENIZER), tokens, &ids(prompt)).unwrap()
}

/// Pieces with neighbours of one channel joined, whatever chunks they came in.
fn joined(pieces: impl IntoIterator<Item = HarmonyPiece>) -> Vec<(HarmonyChannel, String)> {
    let mut out: Vec<(HarmonyChannel, String)> = Vec::new();
    for piece in pieces {
        match out.last_mut() {
            Some((channel, text)) if *channel == piece.channel && !begins_call(&piece) => {
                text.push_str(&piece.text);
            }
            _ => out.push((piece.channel, piece.text)),
        }
    }
    out
}

fn begins_call(piece: &HarmonyPiece) -> bool {
    piece.begins && matches!(piece.channel, HarmonyChannel::Call(_))
}

fn parse(prompt: &str, answer: &str) -> Vec<(HarmonyChannel, String)> {
    let mut parser = parser(prompt);
    let mut pieces = Vec::new();
    for id in ids(answer) {
        pieces.extend(parser.push(id).unwrap());
    }
    pieces.extend(parser.finish().unwrap());
    joined(pieces)
}

fn reasoning(text: &str) -> (HarmonyChannel, String) {
    (HarmonyChannel::Reasoning, text.to_owned())
}

fn content(text: &str) -> (HarmonyChannel, String) {
    (HarmonyChannel::Content, text.to_owned())
}

fn call(to: &str, text: &str) -> (HarmonyChannel, String) {
    (HarmonyChannel::Call(to.into()), text.to_owned())
}

const PROMPT: &str =
    "<|start|>system<|message|>Be brief.<|end|><|start|>user<|message|>Hi<|end|><|start|>assistant";

#[test]
fn reasoning_then_the_answer() {
    let answer = "<|channel|>analysis<|message|>They say hi. 😀<|end|>\
        <|start|>assistant<|channel|>final<|message|>Hello,\nGrüße 東京!<|return|>";
    assert_eq!(parse(PROMPT, answer), [reasoning("They say hi. 😀"), content("Hello,\nGrüße 東京!")]);
}

#[test]
fn calls_are_neither_reasoning_nor_content() {
    let answers = [
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\": 1}<|call|>",
        " to=functions.f<|channel|>commentary <|constrain|>json<|message|>{\"a\": 1}<|call|>",
        "<|channel|>commentary to=functions.f json<|message|>{\"a\": 1}<|call|>",
    ];
    for answer in answers {
        assert_eq!(parse(PROMPT, answer), [call("functions.f", "{\"a\": 1}")], "{answer}");
    }
    let python = "<|channel|>analysis to=python code<|message|>1 + 1<|call|>";
    assert_eq!(parse(PROMPT, python), [call("python", "1 + 1")]);
}

#[test]
fn each_call_is_one_of_its_own_even_without_arguments() {
    let one = "<|channel|>commentary to=functions.f<|message|>";
    let answer = format!("{one}{{}}<|end|><|start|>assistant{one}<|end|><|start|>assistant{one}{{}}<|call|>");
    assert_eq!(
        parse(PROMPT, &answer),
        [call("functions.f", "{}"), call("functions.f", ""), call("functions.f", "{}")]
    );
}

#[test]
fn what_is_said_before_a_call_is_content() {
    let answer = "<|channel|>commentary<|message|>I look it up.<|end|>\
        <|start|>assistant<|channel|>commentary to=functions.f<|message|>{}<|call|>";
    assert_eq!(parse(PROMPT, answer), [content("I look it up."), call("functions.f", "{}")]);
}

#[test]
fn messages_for_one_reader_are_set_off() {
    let answer = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>\
        <|start|>assistant<|channel|>final<|message|>c<|return|>";
    assert_eq!(parse(PROMPT, answer), [reasoning("a\nb"), content("c")]);
}

#[test]
fn a_prompt_may_end_inside_a_message() {
    let prompt = format!("{PROMPT}<|channel|>final<|message|>The answer");
    assert_eq!(parse(&prompt, " is 4.<|return|>"), [content(" is 4.")]);
    let prompt = format!("{PROMPT}<|channel|>analysis");
    assert_eq!(parse(&prompt, "<|message|>Hm.<|end|>"), [reasoning("Hm.")]);
    assert_eq!(parse("no format at all", "<|channel|>analysis<|message|>Hm."), [reasoning("Hm.")]);
}

#[test]
fn malformed_answers_lose_nothing() {
    assert_eq!(parse(PROMPT, "Just text.<|return|>"), [content("Just text.")]);
    assert_eq!(parse(PROMPT, "<|channel|>analysis"), [content("analysis")]);
    assert_eq!(parse(PROMPT, "<|message|>No channel.<|end|>after"), [content("No channel.\nafter")]);
    assert_eq!(parse(PROMPT, "<|channel|>strange<|message|>x<|return|>"), [content("x")]);
    assert_eq!(
        parse(PROMPT, "<|channel|>analysis<|message|>a<|channel|>final<|message|>b<|return|>"),
        [reasoning("a"), content("b")]
    );
    assert_eq!(
        parse(PROMPT, "<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b"),
        [reasoning("a"), content("b")]
    );
    let long = "word ".repeat(300);
    assert_eq!(parse(PROMPT, &long), [content(&long)]);
    // A header's role alone is no text.
    assert_eq!(parse(PROMPT, "<|channel|>final<|message|>a<|end|><|start|>assistant"), [content("a")]);
}

/// The same grammar read at once, by cutting the whole list at special tokens.
fn at_once(answer: &[u32]) -> Vec<(HarmonyChannel, String)> {
    let tokens = HarmonyTokens::of(&TOKENIZER).unwrap();
    let cuts = |id: &u32| [tokens.start, tokens.end, tokens.return_, tokens.call].contains(id);
    let mut segments: Vec<(bool, Vec<u32>)> = vec![(true, Vec::new())];
    for id in answer {
        if cuts(id) {
            segments.push((*id == tokens.start, Vec::new()));
            continue;
        }
        let (_, segment) = segments.last_mut().unwrap();
        if *id == tokens.channel && segment.contains(&tokens.message) {
            segments.push((true, vec![*id]));
        } else {
            segment.push(*id);
        }
    }
    let mut out: Vec<(HarmonyChannel, String)> = Vec::new();
    for (started, segment) in segments {
        let message = segment.iter().position(|id| *id == tokens.message);
        let (channel, text) = if let Some(at) = message {
            let channel = tokens.channel_of(&TOKENIZER, &segment[..at]).unwrap();
            (channel, TOKENIZER.decode(&segment[at + 1..]).unwrap())
        } else {
            let text = TOKENIZER.decode(&segment).unwrap();
            (HarmonyChannel::Content, if started && text == "assistant" { String::new() } else { text })
        };
        let call = matches!(channel, HarmonyChannel::Call(_));
        if text.is_empty() && !call {
            continue;
        }
        match out.last_mut() {
            Some((last, before)) if *last == channel && !call => {
                *before = format!("{before}{SEPARATOR}{text}");
            }
            _ => out.push((channel, text)),
        }
    }
    out
}

fn answers() -> impl Strategy<Value = Vec<u32>> {
    let parts = vec![
        "<|start|>",
        "<|channel|>",
        "<|constrain|>",
        "<|message|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "assistant",
        "analysis",
        "final",
        "commentary",
        " to=functions.f",
        "json",
        "Hi",
        " 😀 é",
        "東",
        "\n",
        "<|endoftext|>",
        " ",
        "<|start|>assistant<|channel|>final<|message|>",
        "<|end|><|start|>assistant<|channel|>analysis<|message|>",
    ];
    prop::collection::vec(prop::sample::select(parts), 0..30).prop_map(|parts| {
        // Encoded apart, so that any id may follow any other.
        parts.into_iter().flat_map(ids).take(HEADER_IDS_MAX).collect()
    })
}

proptest! {
    /// However the ids are cut into chunks, also within a header or a character, the result is that of
    /// reading them at once, and nothing is lost.
    #[test]
    fn chunks_do_not_matter(
        answer in answers(), cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
    ) {
        let mut cuts: Vec<usize> = cuts.iter().map(|c| c.index(answer.len() + 1)).collect();
        cuts.extend([0, answer.len()]);
        cuts.sort_unstable();
        let mut parser = parser(PROMPT);
        let mut pieces = Vec::new();
        for cut in cuts.windows(2) {
            pieces.extend(parser.push_all(&answer[cut[0]..cut[1]]).unwrap());
        }
        pieces.extend(parser.finish().unwrap());
        prop_assert!(pieces.iter().all(|piece| !piece.text.is_empty() || begins_call(piece)));
        prop_assert_eq!(joined(pieces), at_once(&answer));
    }
}
