//! What routing reads of a body: the prompt's prefix, its conversation, and the fields that say where it
//! goes.

use super::*;

fn info(body: &str) -> RequestInfo {
    let config = KeyerConfig { key: HashKey::new(1), block_bytes: NonZeroUsize::new(16).unwrap() };
    read(body.as_bytes(), config)
}

fn shared(a: &str, b: &str) -> usize {
    let (a, b) = (info(a).chain.blocks, info(b).chain.blocks);
    a.iter().zip(b.iter()).take_while(|(x, y)| x == y).count()
}

#[test]
fn a_follow_up_turn_keeps_the_earlier_turns_prefix() {
    let first = r#"{"model":"m","messages":[{"role":"user","content":"tell me about whales, at some length please"}]}"#;
    let second = r#"{"model":"m","messages":[{"role":"user","content":"tell me about whales, at some length please"},{"role":"assistant","content":"no"},{"role":"user","content":"why"}]}"#;
    let first_blocks = info(first).chain.blocks.len();
    assert!(first_blocks >= 4);
    assert!(shared(first, second) >= first_blocks - 1);
}

#[test]
fn escapes_spacing_and_field_order_outside_the_prompt_do_not_matter() {
    let plain =
        r#"{"model":"m","messages":[{"role":"user","content":"éééééééééééééééééééé"}],"stream":true}"#;
    let escaped = "{ \"stream\" : true, \"x\":[1], \"messages\": [ {\"role\":\"user\", \"content\":\"\\u00e9éééééééééééééééééé\\u00e9\"} ], \"model\":\"m\"}";
    let blocks = info(plain).chain.blocks.len();
    assert!(blocks > 1);
    assert_eq!(shared(plain, escaped), blocks);
    assert!(info(escaped).stream);
}

#[test]
fn tools_system_text_and_model_are_part_of_the_prefix() {
    let body = |model: &str, tools: &str| {
        format!(
            r#"{{"model":"{model}","tools":{tools},"messages":[{{"role":"user","content":"0123456789abcdef0123456789abcdef"}}]}}"#
        )
    };
    assert_eq!(shared(&body("m", "[1]"), &body("m", "[2]")), 0);
    assert_eq!(shared(&body("m", "[1]"), &body("n", "[1]")), 0);
}

#[test]
fn a_tenant_s_salt_separates_its_prompts() {
    let body = |salt: &str| format!(r#"{{"prompt":"0123456789abcdef0123456789abcdef","cache_salt":{salt}}}"#);
    assert_eq!(shared(&body("\"a\""), &body("\"b\"")), 0);
    assert_eq!(shared(&body("\"\\u0061\""), &body("\"a\"")), 2);
    assert_eq!(shared(&body("null"), r#"{"prompt":"0123456789abcdef0123456789abcdef"}"#), 2);
}

#[test]
fn a_name_that_no_model_has_is_shortened() {
    let model = |name: &str| info(&format!(r#"{{"model":"{name}"}}"#)).model.unwrap();
    assert_eq!(model(&"m".repeat(512)), "m".repeat(512));
    assert_eq!(model(&"é".repeat(300_000)), format!("{}…", "é".repeat(256)));
}

#[test]
fn the_last_of_a_repeated_key_counts() {
    assert_eq!(info(r#"{"model":"a","model":"b"}"#).model.as_deref(), Some("b"));
}

#[test]
fn a_byte_of_the_canonical_text_is_found_in_its_field() {
    let body = r#"{"model":"m","tools":[1,2],"system":"be","prompt":"last","messages":[{"role":"system","content":"kind"},
        {"role":"user","content":[{"type":"text"}],"name":"x"}]}"#;
    let total = info(body).chain.total_bytes;
    let name = |place: Place<'_>, role: Option<&str>| format!("{place:?} {}", role.unwrap_or("-"));
    let names: Vec<_> =
        (0..total).map(|at| locate(body.as_bytes(), &Ignored::default(), at, name).unwrap()).collect();
    assert!(locate(body.as_bytes(), &Ignored::default(), total, name).is_none());
    let mut fields: Vec<&str> = names.iter().map(|(name, _)| name.as_str()).collect();
    fields.dedup();
    let message = |index, field, role| format!("Message {{ index: {index}, field: \"{field}\" }} {role}");
    let want = [
        "Model -".to_owned(),
        "System -".to_owned(),
        "Tools -".to_owned(),
        message(0, "role", "-"),
        message(0, "role", "system"),
        message(0, "content", "system"),
        message(0, "", "system"),
        message(1, "role", "-"),
        message(1, "role", "user"),
        message(1, "content", "user"),
        message(1, "name", "user"),
        message(1, "", "user"),
        "Prompt -".to_owned(),
    ];
    assert_eq!(fields, want);
    assert_eq!(names[1], ("Model -".to_owned(), 1));
    assert_eq!(
        info(body).talk.settled_bytes,
        names.iter().position(|n| n.0.contains("index: 1")).unwrap() as u64
    );
}

#[test]
fn conversations_are_told_apart_by_how_they_open() {
    let talk = |system: &str, first: &str, rest: &str| {
        let first = first.repeat(20);
        info(&format!(
            r#"{{"messages":[{{"role":"system","content":"{system}"}},{{"role":"user","content":"{first}"}}{rest}]}}"#
        ))
        .talk
    };
    let more = r#",{"role":"assistant","content":"yes"},{"role":"user","content":"and another long one, long one, long one, long one"}"#;
    let opening = talk("a", "one ", "").opening;
    assert!(opening.is_some() && opening == talk("b", "one ", more).opening);
    assert_ne!(opening, talk("a", "two ", "").opening);
    assert_eq!(info(r#"{"messages":[{"role":"user","content":"hi"}]}"#).talk.opening, None);
    // Of a long one its beginning, its end and its length are looked at.
    let long = |begin: &str, filling: &str, end: &str| {
        talk("a", &format!("{begin}{}{end}", filling.repeat(OPENING_PART_BYTES)), "").opening
    };
    assert_eq!(long("x", "ab", "y"), long("x", "ab", "y"));
    for other in [long("z", "ab", "y"), long("x", "ab", "z"), long("x", "abc", "y")] {
        assert_ne!(long("x", "ab", "y"), other);
    }
    assert_ne!(info(r#"{"prompt_cache_key":"k","prompt":"x"}"#).talk.cache_key, 0);
}

#[test]
fn text_prompts_token_prompts_and_input_lists_are_hashed() {
    for body in [
        r#"{"prompt":"0123456789abcdef0123456789abcdef"}"#,
        r#"{"prompt":[1000,1001,1002,1003,1004,1005,1006,1007]}"#,
        r#"{"input":"0123456789abcdef0123456789abcdef"}"#,
        r#"{"input":[{"role":"user","content":"0123456789abcdef0123456789abcdef"}]}"#,
    ] {
        assert!(!info(body).chain.blocks.is_empty(), "{body}");
    }
}

#[test]
fn what_is_not_a_json_object_has_no_prefix() {
    for body in ["", "[]", "nonsense", "{\"model\":", "{\"model\":3}", "\u{feff}{}", "{\"messages\":3}"] {
        assert_eq!(info(body).model, None, "{body}");
    }
}

#[test]
fn answers_that_do_not_tell_what_was_cached_are_known_by_their_requests() {
    let text = "0123456789abcdef0123456789abcdef";
    for (field, untold) in [
        (r#""n":1,"best_of":1"#, None),
        (r#""n":3"#, Some(Untold::Samples)),
        (r#""best_of":2"#, Some(Untold::Samples)),
        (r#""prompt_logprobs":null,"truncate_prompt_tokens":null"#, None),
        (r#""prompt_logprobs":0"#, Some(Untold::PromptLogprobs)),
        (r#""echo":true"#, None),
        (r#""echo":true,"logprobs":1"#, Some(Untold::PromptLogprobs)),
        (r#""logprobs":true"#, None),
        (r#""truncate_prompt_tokens":96,"n":3"#, Some(Untold::Truncated)),
    ] {
        let info = info(&format!(r#"{{"prompt":"{text}",{field}}}"#));
        assert_eq!(info.untold, untold, "{field}");
        let finds_nothing = untold.is_some_and(Untold::finds_nothing);
        assert_eq!(info.chain.blocks.is_empty(), finds_nothing, "{field}");
        assert!(info.chain.total_bytes > 0, "{field}: it is computed all the same");
    }
    for (prompt, untold) in [
        (format!("[{}]", vec!["7"; 99].join(",")), None),
        (format!(r#"["{text}"]"#), None),
        (format!(r#" [ "{text}" , "b" ]"#), Some(Untold::Batch)),
        ("[[1,2],[3]]".to_owned(), Some(Untold::Batch)),
        ("[]".to_owned(), None),
    ] {
        assert_eq!(info(&format!(r#"{{"prompt":{prompt}}}"#)).untold, untold, "{prompt}");
    }
}
