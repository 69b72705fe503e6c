//! What each leg is sent, byte for byte, and what is read of the answer of the one that computes.

use proptest::prelude::*;
use serde_json::{Value as Json, json};

use super::*;

const AT: Meeting<'_> = Meeting { host: "10.0.0.1", port: 8998, room: 7, prefill_rank: None };

fn bodies(meeting: Meeting<'_>, body: &str) -> (String, String) {
    let (prefill, decode) = meeting.bodies(&Bytes::copy_from_slice(body.as_bytes()));
    let text = |bytes: Bytes| String::from_utf8(bytes.to_vec()).unwrap();
    (text(prefill), text(decode))
}

#[test]
fn both_legs_have_the_client_s_body_and_meet_in_one_room() {
    let body = r#"{ "model":"m","messages":[{"role":"user","content":"ä"}],"stream":true,"max_tokens":9 }"#;
    let want = r#"{"bootstrap_host":"10.0.0.1","bootstrap_port":8998,"bootstrap_room":7, "model":"m","messages":[{"role":"user","content":"ä"}],"stream":true,"max_tokens":9 }"#;
    assert_eq!(bodies(AT, body), (want.to_owned(), want.to_owned()));
    let meeting = Meeting { host: "[::1]", port: 9000, room: (1 << 63) - 1, prefill_rank: Some(3) };
    let met = r#""bootstrap_host":"[::1]","bootstrap_port":9000,"bootstrap_room":9223372036854775807"#;
    assert_eq!(
        bodies(meeting, "{}"),
        (format!("{{{met}}}"), format!("{{{met},\"disagg_prefill_dp_rank\":3}}"))
    );
}

#[test]
fn a_client_chooses_no_room_and_no_host() {
    let body = r#"{"bootstrap_room":7,"a":1,"bootstrap_host":"evil","bootstrap\u005fport":1,"disagg_prefill_dp_rank":2}"#;
    let want = r#"{"bootstrap_host":"10.0.0.1","bootstrap_port":8998,"bootstrap_room":7,"a":1}"#;
    assert_eq!(bodies(AT, body), (want.to_owned(), want.to_owned()));
}

#[test]
fn there_is_a_room_for_each_answer() {
    let rooms = |body: &str| LegsAsked::of(body.as_bytes()).map(|asked| asked.rooms);
    for (body, want) in [
        (r#"{"messages":[]}"#, 1),
        (r#"{"prompt":"a","n":3}"#, 3),
        (r#"{"prompt":["a","b"],"n":3}"#, 6),
        (r#"{"prompt":[1,2,3]}"#, 1),
        (r#"{"prompt":[[1],[2],[3]]}"#, 3),
        (r#"{"prompt":[]}"#, 1),
        (r#"{"text":["a","b"],"sampling_params":{"temperature":0,"n":2}}"#, 4),
        (r#"{"n":null}"#, 1),
        (r#"{"n":0}"#, 1),
        (r#"{"n":99999999999}"#, 1),
    ] {
        assert_eq!(rooms(body), Some(want), "{body}");
    }
    let probabilities = |body: &str| LegsAsked::of(body.as_bytes()).unwrap().prompt_logprobs;
    assert!(
        probabilities(r#"{"echo":true,"logprobs":1}"#)
            && probabilities(r#"{"return_logprob":true,"logprob_start_len":0}"#)
    );
    assert!(
        !probabilities(r#"{"echo":true,"logprobs":null}"#) && !probabilities(r#"{"return_logprob":true}"#)
    );
    assert_eq!((rooms("[]"), rooms("{"), rooms(r#"{"a":1"#)), (None, None, None));
    for _ in 0..1000 {
        assert!(new_room(u32::MAX) < (1 << 63) - u64::from(u32::MAX));
    }
}

#[test]
fn how_the_prompt_went_is_read_from_an_answer_or_its_events() {
    let usage =
        r#""usage":{"prompt_tokens":9,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":4}}"#;
    let whole = format!(r#"{{"choices":[{{"finish_reason":"length"}}],{usage}}}"#);
    let cached = |said: Option<Usage>| said.and_then(|usage| usage.cached_tokens());
    assert_eq!(cached(read_prefill(false, whole.as_bytes()).unwrap()), Some(4));
    let events = format!(
        "data: {{\"choices\":[{{\"finish_reason\":null}}],\"usage\":null}}\n\ndata: {{\"choices\":[],{usage}}}\n\ndata: [DONE]\n\n"
    );
    assert_eq!(cached(read_prefill(true, events.as_bytes()).unwrap()), Some(4));
    let generate = r#"{"text":"a","meta_info":{"finish_reason":{"type":"length","length":1}}}"#;
    assert!(read_prefill(false, generate.as_bytes()).unwrap().is_none());
    assert!(read_prefill(false, format!(" [{generate}]").as_bytes()).unwrap().is_none());
    assert!(read_prefill(false, b"[").is_err());
    for (is_stream, body, status, said) in [
        (false, r#"{"error":{"message":"too long","code":400}}"#.to_owned(), Some(400), "too long"),
        (false, r#"{"object":"error","message":"no","type":"x","code":503}"#.to_owned(), Some(503), "no"),
        (false, r#"{"choices":[{"finish_reason":"abort"}]}"#.to_owned(), None, "it does not say why"),
        (
            false,
            r#"{"meta_info":{"finish_reason":{"type":"abort","message":"m","status_code":500}}}"#.to_owned(),
            Some(500),
            "m",
        ),
        (true, format!("{events}data: {{\"error\":\"gone\"}}\n\n"), None, "gone"),
        (true, "data: {\"error\":{\"code\":\"x\"}}\n\n".to_owned(), None, "it does not say why"),
        (true, "data: [DONE]\n\n".to_owned(), None, "its answer cannot be read"),
        (true, String::new(), None, "its answer cannot be read"),
        (false, "<html>".to_owned(), None, "its answer cannot be read"),
    ] {
        let failed = NotComputed { status, said: said.to_owned() };
        assert_eq!(read_prefill(is_stream, body.as_bytes()).unwrap_err(), failed, "{body}");
    }
}

#[test]
fn words_for_a_client_end_somewhere() {
    assert_eq!((&*shortened("äää", 9), &*shortened("äää", 3), &*shortened("", 0)), ("äää", "ä…", ""));
    assert!(
        says_failure(b"data: {\"error\":{}}\n\n") && !says_failure(b"data: {\"choices\":[{\"error\":1}]}")
    );
}

proptest! {
    /// Whatever the body is: both legs say the same, with one word on where they meet.
    #[test]
    fn any_body_goes_to_both(fields in prop::collection::btree_map("[a-z]{1,6}|bootstrap_room", "\\PC{0,12}", 0..5), room: u64) {
        let room = room >> 1;
        let body = Bytes::from(json!(fields).to_string());
        let (prefill, decode) = Meeting { room, ..AT }.bodies(&body);
        prop_assert_eq!(&prefill, &decode);
        let both: Json = serde_json::from_slice(&prefill).unwrap();
        prop_assert_eq!(both["bootstrap_room"].as_u64(), Some(room));
        prop_assert_eq!(both.as_object().unwrap().len(), 3 + fields.keys().filter(|name| *name != "bootstrap_room").count());
    }

    #[test]
    fn any_answer_can_be_judged(body: Vec<u8>, text in "(data: )?\\PC{0,40}\n\n", is_stream: bool) {
        let _ = (read_prefill(is_stream, &body), read_prefill(is_stream, text.as_bytes()));
    }
}
