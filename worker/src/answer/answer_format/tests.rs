//! Thoughts and calls in whole and in pieces.

use proptest::prelude::*;

use super::*;

/// What is found of a text that comes in `pieces`, neighbouring pieces of a call joined.
fn calls(format: CallFormat, pieces: &[&str]) -> (String, Vec<(String, String)>) {
    let parameters = serde_json::json!({"properties": {"n": {"type": "integer"}, "s": {"type": "string"}}});
    let mut reader =
        CallReader::new(format, &Arc::from([Function { name: "f".to_owned(), parameters }])).unwrap();
    let (mut content, mut calls) = (String::new(), Vec::<(String, String)>::new());
    let mut note = |found: Found| {
        content.push_str(&found.content);
        for CallDelta { index, name, arguments } in found.calls {
            if let Some(name) = name {
                assert_eq!(index, calls.len(), "calls begin in order");
                calls.push((name, String::new()));
            }
            calls[index].1.push_str(&arguments);
        }
    };
    for piece in pieces {
        let mut found = Found::default();
        reader.push(piece, &mut found);
        note(found);
    }
    let mut found = Found::default();
    reader.finish(&mut found);
    note(found);
    (content, calls)
}

fn check(format: CallFormat, text: &str, content: &str, expected: &[(&str, &str)]) {
    let (said, found) = calls(format, &[text]);
    let found: Vec<(&str, &str)> = found.iter().map(|(n, a)| (n.as_str(), a.as_str())).collect();
    assert_eq!((said.as_str(), found.as_slice()), (content, expected), "{text}");
}

#[test]
fn hermes_calls_stand_among_text() {
    use CallFormat::Hermes;
    let one = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"}</tool_call>\"}}\n</tool_call>";
    let told = ("f", "{\"a\": \"}</tool_call>\"}");
    check(Hermes, one, "", &[told]);
    check(Hermes, &format!("I look.\n\n{one}\n{one}\n"), "I look.", &[told, told]);
    check(Hermes, "no call <tool", "no call <tool", &[]);
    check(Hermes, "text \n", "text \n", &[]);
    check(Hermes, &format!("{one} and more"), "and more", &[told]);
}

#[test]
fn a_call_may_have_its_parts_in_any_order_and_as_text() {
    use CallFormat::Hermes;
    let call = |object: &str| format!("<tool_call>{object}</tool_call>");
    check(
        Hermes,
        &call("{\"arguments\": {\"a\": [1, {}]}, \"name\": \"f\"}"),
        "",
        &[("f", "{\"a\": [1, {}]}")],
    );
    check(Hermes, &call("{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": 1}\"}"), "", &[("f", "{\"a\": 1}")]);
    check(Hermes, &call("{\"name\": \"f\", \"arguments\": null}"), "", &[("f", "{}")]);
    check(Hermes, &call("{\"name\": \"f\"}"), "", &[("f", "{}")]);
    check(Hermes, &call("{\"type\": \"function\", \"name\": \"f\", \"parameters\": {}}"), "", &[("f", "{}")]);
}

#[test]
fn what_is_no_call_is_text_and_half_a_call_is_nothing() {
    use CallFormat::Hermes;
    check(Hermes, "<tool_call>{\"colour\": 1}</tool_call>", "<tool_call>{\"colour\": 1}</tool_call>", &[]);
    check(Hermes, "<tool_call>hm</tool_call> x", "<tool_call>hm</tool_call> x", &[]);
    check(Hermes, "a <tool_call>{\"na", "a", &[]);
    check(Hermes, "a <tool_call>{\"name\": \"f\", \"argum", "a", &[]);
    check(Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": {\"a", "", &[("f", "{\"a")]);
}

#[test]
fn plain_json_calls_are_the_whole_answer() {
    use CallFormat::Json;
    check(Json, "{\"name\": \"f\", \"parameters\": {\"a\": 1}}", "", &[("f", "{\"a\": 1}")]);
    let two = " <|python_tag|>{\"name\": \"f\", \"parameters\": {}}; {\"name\": \"g\", \"parameters\": {\"b\": 2}}\n";
    check(Json, two, "", &[("f", "{}"), ("g", "{\"b\": 2}")]);
    check(Json, "Hello {\"name\": \"f\"}", "Hello {\"name\": \"f\"}", &[]);
    check(Json, " {\"answer\": 42}", " {\"answer\": 42}", &[]);
    check(Json, "{\"na", "", &[]);
    check(Json, " \n", " \n", &[]);
}

#[test]
fn qwen_xml_calls_have_the_types_of_the_schema() {
    use CallFormat::QwenXml;
    let call = "Hm.\n<tool_call>\n<function=f>\n<parameter=n>\n7\n</parameter>\n<parameter=s>\n8\n9\n</parameter>\n\
        <parameter=x>\n1\n</parameter>\n</function>\n</tool_call>";
    check(QwenXml, call, "Hm.", &[("f", r#"{"n":7,"s":"8\n9","x":"1"}"#)]);
    check(QwenXml, "<tool_call>\n<function=f>\n</function>\n</tool_call>", "", &[("f", "{}")]);
    check(QwenXml, "<tool_call>x</tool_call>", "<tool_call>x</tool_call>", &[]);
    check(QwenXml, "a <tool_call>\n<function=f>", "a", &[]);
}

fn thoughts(open: bool, pieces: &[&str]) -> (String, String) {
    let mut splitter = ThinkSplitter::new(open);
    let (mut thought, mut said) = (String::new(), String::new());
    for piece in pieces {
        let (more, text) = splitter.push(piece);
        thought.push_str(&more);
        said.push_str(&text);
    }
    let (more, text) = splitter.finish();
    (thought + &more, said + &text)
}

#[test]
fn thoughts_are_apart_from_the_answer() {
    let split = |open, text: &str| thoughts(open, &[text]);
    let both = |a: &str, b: &str| (a.to_owned(), b.to_owned());
    assert_eq!(split(false, "<think>\nHm \n ha.\n</think>\n\nHello. "), both("Hm \n ha.", "Hello. "));
    assert_eq!(split(true, "Hm.\n</think>\n\nHello."), both("Hm.", "Hello."));
    assert_eq!(split(false, "\n <think> "), both("", ""));
    assert_eq!(split(false, "Hello <think>x</think>"), both("", "Hello <think>x</think>"));
    assert_eq!(split(false, "<think>\n\n</think>\n\nHi"), both("", "Hi"));
    assert_eq!(split(true, "cut off </thi"), both("cut off </thi", ""));
    assert_eq!(split(false, "\n<thi"), both("", "\n<thi"));
    assert!(ThinkSplitter::is_open("<|im_start|>assistant\n<think>\n"));
    assert!(!ThinkSplitter::is_open("<think>\n\n</think>\n\n"));
}

fn text() -> impl Strategy<Value = String> {
    let parts = vec![
        "<tool_call>",
        "</tool_call>",
        "{\"name\": \"f\", \"arguments\": {\"a\": \"é}\"}}",
        "\n",
        " ",
        "{",
        "}",
        "\"",
        "\\",
        "<think>",
        "</think>",
        "<function=f>",
        "</function>",
        "<parameter=n>1</parameter>",
        "tool",
        "😀",
        "<",
        "{\"name\": \"g\", \"parameters\": {}}",
        ";",
        "<|python_tag|>",
        "\"name\"",
        ":",
        "\"arguments\"",
    ];
    prop::collection::vec(prop::sample::select(parts), 0..14).prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// However the text is cut into pieces, what is found is what is found at once; and it is never a call's
    /// beginning.
    #[test]
    fn cutting_does_not_matter(
        text in text(), cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
    ) {
        let boundaries: Vec<usize> = text.char_indices().map(|(i, _)| i).chain([text.len()]).collect();
        let mut cuts: Vec<usize> = cuts.iter().map(|c| boundaries[c.index(boundaries.len())]).collect();
        cuts.extend([0, text.len()]);
        cuts.sort_unstable();
        let pieces: Vec<&str> = cuts.windows(2).map(|w| &text[w[0]..w[1]]).collect();
        let singly: Vec<String> = text.chars().map(String::from).collect();
        let singly: Vec<&str> = singly.iter().map(String::as_str).collect();
        for format in [CallFormat::Hermes, CallFormat::Json, CallFormat::QwenXml] {
            let whole = calls(format, &[&text]);
            prop_assert_eq!(&calls(format, &pieces), &whole);
            prop_assert_eq!(&calls(format, &singly), &whole);
        }
        for open in [false, true] {
            let whole = thoughts(open, &[&text]);
            prop_assert_eq!(&thoughts(open, &pieces), &whole);
            prop_assert_eq!(&thoughts(open, &singly), &whole);
        }
    }
}
