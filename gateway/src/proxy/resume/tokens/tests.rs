//! A stream cut at any event and gone on with elsewhere is, to its client, the stream that was never cut.

use std::sync::Arc;

use prometheus::IntGauge;
use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::proxy::resume::memory::Memory;

fn history(bytes: usize) -> TokenHistory {
    let memory = Arc::new(Memory::new(bytes, IntGauge::new("g", "g").unwrap()));
    TokenHistory::new(memory.reserve(0).unwrap())
}

/// What a worker streams of an output whose ids have these texts (some none yet), in front of a count of
/// tokens; asked by the extension. `name` is the answer's id.
fn worker(texts: &[&str], asked: &RequestExtension, name: &str) -> Vec<String> {
    let from = asked.output_ids.as_ref().map_or(0, Vec::len);
    assert!(asked.output_ids.iter().flatten().copied().eq(0..from as u32), "the ids are the output's");
    assert!(from < texts.len(), "a complete output is refused");
    let given: usize = texts[..from].iter().map(|text| text.len()).sum();
    assert_eq!(asked.emitted_bytes, given as u64, "the client has what the ids gave");
    let event = |choices: serde_json::Value, ids: &[usize]| {
        let chunk = json!({"id": name, "created": from, "choices": choices, "keyway": {"ids": ids}});
        format!("data: {chunk}\n\n")
    };
    let mut events = Vec::new();
    if asked.output_ids.is_none() {
        events.push(event(
            json!([{"delta": {"role": "assistant", "content": ""}, "finish_reason": null}]),
            &[],
        ));
    }
    let mut untold = Vec::new();
    for (id, text) in texts.iter().enumerate().skip(from) {
        untold.push(id);
        let last = id + 1 == texts.len();
        if last || !text.is_empty() {
            let finish = last.then_some("stop");
            let delta = json!([{"delta": {"content": text}, "finish_reason": finish}]);
            events.push(event(delta, &std::mem::take(&mut untold)));
        }
    }
    events.push(event(json!([]), &[]));
    events.push("data: [DONE]\n\n".to_owned());
    events
}

fn told(history: &mut TokenHistory, events: &[String]) -> String {
    String::from_utf8(history.tell(&events.concat().into()).to_vec()).unwrap()
}

proptest! {
    #[test]
    fn a_cut_anywhere_and_again_anywhere_is_not_seen(
        texts in prop::collection::vec(prop::sample::select(vec!["a", "é", "", "日本"]), 1..12),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..4),
    ) {
        let first = worker(&texts, &RequestExtension::default(), "first");
        let unbroken = told(&mut history(1 << 20), &first);
        let mut history = history(1 << 20);
        let mut seen = String::new();
        let mut events = first;
        for (i, cut) in cuts.iter().enumerate() {
            let cut = cut.index(events.len());
            seen.push_str(&told(&mut history, &events[..cut]));
            let asked = history.rest(Some(7)).unwrap();
            prop_assert_eq!(asked.seed, Some(7));
            // Nothing seen yet: the answer's name is the next worker's.
            let name = if history.has_begun() { format!("other{i}") } else { "first".to_owned() };
            events = worker(&texts, &asked, &name);
            history.goes_on();
        }
        seen.push_str(&told(&mut history, &events));
        prop_assert!(!seen.contains("keyway"));
        prop_assert_eq!(seen, unbroken);
    }
}

#[test]
fn an_error_passes_and_is_no_part_of_the_account() {
    let events = worker(&["a", "b"], &RequestExtension::default(), "x")[..2].to_vec();
    let error = "data: {\"error\":{\"code\":\"invalid_grammar\"}}\n\n".to_owned();
    let mut history = history(1 << 20);
    told(&mut history, &events);
    assert_eq!(told(&mut history, std::slice::from_ref(&error)), error);
    assert_eq!(history.rest(None).unwrap().output_ids, Some(vec![0]));
}

#[test]
fn line_ends_and_lines_of_any_kind_make_no_difference() {
    let texts = ["a", "", "b", "c"];
    let plain = worker(&texts, &RequestExtension::default(), "x");
    let whole = told(&mut history(1 << 20), &plain);
    for (from, to) in
        [("\n\n", "\r\n\r\n"), ("\n\n", "\r\r"), ("data: ", "data:"), ("data: ", ": note\nevent: x\ndata: ")]
    {
        let other: Vec<String> = plain.iter().map(|event| event.replace(from, to)).collect();
        let mut history = history(1 << 20);
        let seen = told(&mut history, &other[..3]);
        assert!(!seen.is_empty() && whole.replace(from, to).starts_with(&seen), "{to:?}: {seen}");
        assert_eq!(history.rest(None).unwrap().output_ids, Some(vec![0, 1, 2]), "{to:?}");
    }
}

#[test]
fn a_stream_without_an_account_of_itself_passes_and_is_not_resumed() {
    for odd in [
        "data: {\"id\":\"x\",\"choices\":[]}\n\n",
        "data: {\"id\":\n\n",
        "data: {\"id\":\"x\"}\r\n\r\ndata: {}\r\n\r\n",
    ] {
        let mut history = history(1 << 20);
        assert_eq!(history.tell(&Bytes::from(odd)), odd);
        assert_eq!(history.rest(None), Err(Obstacle::Unreadable), "{odd:?}");
    }
}

#[test]
fn what_has_no_room_streams_on() {
    let texts = vec!["a"; IDS_STEP + 2];
    let events = worker(&texts, &RequestExtension::default(), "x");
    let mut history = history(IDS_STEP * size_of::<u32>());
    told(&mut history, &events[..=IDS_STEP]);
    assert!(history.rest(None).is_ok());
    let last = told(&mut history, &events[IDS_STEP + 1..]);
    assert!(last.contains("[DONE]") && history.ids.capacity() == 0);
    assert_eq!(history.rest(None), Err(Obstacle::Memory));
}
