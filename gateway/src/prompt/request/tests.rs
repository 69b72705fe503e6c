//! What routing reads of a body: the prompt's prefix, its conversation, and the fields that say where it
//! goes.

use keyway_wire::spans::Spans;

use super::{canonical::OPENING_PART_BYTES, *};

fn info(body: &str) -> RequestInfo {
    let config = KeyerConfig { key: HashKey::new(1), block_bytes: NonZeroUsize::new(16).unwrap() };
    read(body.as_bytes(), config)
}

/// Blocks that have the same names.
fn shared(a: &str, b: &str) -> usize {
    let (a, b) = (info(a).chain.names, info(b).chain.names);
    Spans::OfText.blocks(a.iter().zip(b.iter()).take_while(|(x, y)| x == y).count())
}

fn blocks(body: &str) -> usize {
    Spans::OfText.blocks(info(body).chain.names.len())
}

#[test]
fn a_follow_up_turn_keeps_the_earlier_turns_prefix() {
    let first = r#"{"model":"m","messages":[{"role":"user","content":"tell me about whales, at some length please"}]}"#;
    let second = r#"{"model":"m","messages":[{"role":"user","content":"tell me about whales, at some length please"},{"role":"assistant","content":"no"},{"role":"user","content":"why"}]}"#;
    let first_blocks = blocks(first);
    assert!(first_blocks >= 4);
    assert!(shared(first, second) >= first_blocks - 1);
}

#[test]
fn escapes_spacing_and_field_order_outside_the_prompt_do_not_matter() {
    let plain =
        r#"{"model":"m","messages":[{"role":"user","content":"éééééééééééééééééééé"}],"stream":true}"#;
    let escaped = "{ \"stream\" : true, \"x\":[1], \"messages\": [ {\"role\":\"user\", \"content\":\"\\u00e9éééééééééééééééééé\\u00e9\"} ], \"model\":\"m\"}";
    let blocks = blocks(plain);
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
    let name = |place: PromptField<'_>, role: Option<&str>| format!("{place:?} {}", role.unwrap_or("-"));
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
    assert_eq!([talk("a", "one ", "").goes_on, talk("a", "one ", more).goes_on], [false, true]);
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
fn text_prompts_and_input_lists_are_hashed() {
    for body in [
        r#"{"prompt":"0123456789abcdef0123456789abcdef"}"#,
        r#"{"input":"0123456789abcdef0123456789abcdef"}"#,
        r#"{"input":[{"role":"user","content":"0123456789abcdef0123456789abcdef"}]}"#,
    ] {
        assert!(!info(body).chain.names.is_empty(), "{body}");
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
        assert_eq!(info.chain.names.is_empty(), finds_nothing, "{field}");
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

/// A question about a picture of so many bytes, and a text behind it.
fn about_picture(fill: char, bytes: usize, question: &str) -> String {
    let base64 = fill.to_string().repeat(bytes);
    format!(
        r#"{{"model":"m","messages":[{{"role":"system","content":"{}"}},{{"role":"user","content":[
        {{"type":"image_url","image_url":{{"url":"data:image/png;base64,{base64}"}}}},{{"type":"text","text":"{question}"}}]}}]}}"#,
        "be kind, ".repeat(20)
    )
}

#[test]
fn a_picture_is_one_item_whatever_its_bytes() {
    let question = "what is in this picture, and what is behind it?";
    let (small, large) =
        (info(&about_picture('A', 400, question)), info(&about_picture('A', 1 << 20, question)));
    assert_eq!(small.chain.total_bytes, large.chain.total_bytes);
    assert!(large.chain.total_bytes < 5_000, "{}", large.chain.total_bytes);
    let [item] = large.media.all() else { panic!("{:?}", large.media) };
    assert_eq!((item.count, item.bytes, item.tokens), (1, 4_000, 1_000));
    assert!(item.raw_bytes > 1 << 20);
    // The same one again is found, with all behind it; another one is not, nor is the same one behind another
    // text.
    let of = |fill: char, question: &str| about_picture(fill, 4_000, question);
    let all = blocks(&of('A', question));
    assert_eq!(shared(&of('A', question), &of('A', question)), all);
    let before = shared(&of('A', question), &of('B', question));
    assert!((10..20).contains(&before), "{before} of {all}");
    // Long enough to have names of its own.
    let (long, other) = (question.repeat(20), "and what else? ".repeat(70));
    let behind = shared(&of('A', &long), &of('A', &other));
    let all = blocks(&of('A', &long));
    assert!((before + 240..before + 290).contains(&behind) && behind + 32 < all, "{behind} of {all}");
}

#[test]
fn pictures_tell_conversations_apart_where_their_words_do_not() {
    let opening = |fill: char| info(&about_picture(fill, 400, "what is this?")).talk.opening;
    assert_eq!(opening('A'), opening('A'));
    assert_ne!(opening('A'), opening('B'));
    assert!(opening('A').is_some());
}

#[test]
fn a_place_behind_a_picture_is_found_in_its_field() {
    let body = about_picture('A', 4_000, "what is this?");
    let info = info(&body);
    let item = info.media.all()[0];
    let name = |place: PromptField<'_>, role: Option<&str>| format!("{place:?} {}", role.unwrap_or("-"));
    let at = |at: u64| locate(body.as_bytes(), &Ignored::default(), at, name).unwrap();
    let (field, place) = at(item.at);
    assert_eq!(field, "Message { index: 1, field: \"content\" } user");
    for more in [1, item.bytes - 1, item.bytes, item.bytes + 20] {
        assert_eq!(at(item.at + more), (field.clone(), place + more));
    }
}

#[test]
fn ids_are_the_prompt_s_tokens_and_no_text() {
    for (body, total, max_tokens) in [
        (r#"{"model":"m","token_ids":[5,6,7],"sampling_params":{"max_tokens":9}}"#, 3, 9),
        (r#"{"model":"m","input_ids":[[5,6,7],[8]],"sampling_params":{"max_new_tokens":4}}"#, 4, 4),
        (r#"{"model":"m","prompt":[5,6,7],"max_tokens":2}"#, 3, 2),
    ] {
        let info = info(body);
        let tokens = info.tokens.unwrap();
        assert_eq!(
            (&tokens.ids[..], tokens.total, info.max_tokens),
            (&[5, 6, 7][..], total, max_tokens),
            "{body}"
        );
        assert_eq!(info.chain.total_bytes, 0, "{body}");
    }
    // What an engine does not find by its beginning is of some length, and of no blocks.
    let looked_into = info(r#"{"token_ids":[5,6,7],"sampling_params":{"prompt_logprobs":1}}"#);
    assert_eq!(looked_into.tokens.map(|tokens| (tokens.ids.len(), tokens.total)), Some((0, 3)));
    for by_text in [
        r#"{"token_ids":[5,6,7],"features":{"mm_hashes":{}}}"#,
        r#"{"input_ids":[5,6,7],"image_data":["x"]}"#,
        r#"{"input_ids":[5,6,"x"]}"#,
        r#"{"text":"a text","text_format":1}"#,
    ] {
        let info = info(by_text);
        assert!(info.tokens.is_none() && info.chain.total_bytes > 5, "{by_text}");
    }
    // Whichever of several an engine takes, a few ids do not make a long prompt short.
    let long = "a long text ".repeat(50);
    for beside in [
        format!(r#"{{"messages":[{{"role":"user","content":"{long}"}}],"prompt":[1]}}"#),
        format!(r#"{{"messages":[{{"role":"user","content":"{long}"}}],"token_ids":[1]}}"#),
        format!(r#"{{"prompt":"{long}","input_ids":[1]}}"#),
        format!(r#"{{"text":"{long}","input_ids":[1]}}"#),
        format!(r#"{{"input":"{long}","token_ids":[1]}}"#),
        format!(r#"{{"system":"{long}","prompt":[1]}}"#),
        format!(r#"{{"tools":["{long}"],"prompt":[1]}}"#),
        format!(r#"{{"token_ids":[1],"prompt":[{}7]}}"#, "7,".repeat(400)),
    ] {
        let info = info(&beside);
        assert!(info.tokens.is_none() && info.chain.total_bytes > 600, "{}", &beside[..60]);
    }
    let response = r#"{"model":"m","input":"hi","text":{"format":{"type":"text"}}}"#;
    assert_eq!(info(response).chain, info(r#"{"model":"m","input":"hi"}"#).chain);
}

#[test]
fn an_agent_s_next_turn_repeats_its_last_whatever_is_billed_and_wherever_its_mark_is() {
    use serde_json::json;
    let block = |text: &str| json!({ "type": "text", "text": text.repeat(20) });
    let marked = |text: &str| {
        let mut block = block(text);
        block["cache_control"] = json!({ "type": "ephemeral" });
        block
    };
    let billed = |cch: &str| {
        let line = format!("x-anthropic-billing-header: cc_version=2.1; cch={cch};");
        json!([{ "type": "text", "text": line }, marked("You write programs. ")])
    };
    let first = json!({ "model": "m", "system": billed("1f"), "messages": [
        { "role": "user", "content": [block("Read this. "), marked("And that. ")] },
    ] });
    let second = json!({ "model": "m", "system": billed("8e"), "messages": [
        { "role": "user", "content": [block("Read this. "), block("And that. ")] },
        { "role": "assistant", "content": [block("I have. ")] },
        { "role": "user", "content": [marked("Go on. ")] },
    ] });
    let (first, second) = (first.to_string(), second.to_string());
    let whole = blocks(&first);
    assert!(whole > 40 && shared(&first, &second) + 1 >= whole, "{} of {whole}", shared(&first, &second));
    assert_eq!(info(&first).talk.opening, info(&second).talk.opening);
}
