//! Chat templates against transformers: `data/templates.jsonl`, made by `make_template_goldens.py`, holds a
//! template for each construct and what `apply_chat_template` renders for it, or that it refuses.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed helper fails its test")]

use keyway_text::{ChatTemplate, RenderOptions, TextError};
use serde_json::{Map, Value};

const GOLDENS: &str = include_str!("data/templates.jsonl");

fn object(value: &Value) -> Map<String, Value> {
    value.as_object().cloned().unwrap_or_default()
}

/// The rendering of one line, whose fields come before the defaults'.
fn render(line: &Value, head: &Value) -> Result<String, TextError> {
    let field = |name: &str| line.get(name).unwrap_or(&head["defaults"][name]);
    let present = |name: &str| Some(field(name).clone()).filter(|v| !v.is_null());
    let template =
        ChatTemplate::from_source(line["template"].as_str().unwrap_or_default(), object(&head["special"]))?;
    let options = RenderOptions {
        add_generation_prompt: *field("add_generation_prompt") == true,
        continue_final_message: *field("continue_final_message") == true,
        // As transformers takes them.
        fit_contents: false,
        tools: present("tools"),
        documents: present("documents"),
        variables: object(field("variables")),
        now_unix_seconds: head["now"].as_u64(),
        ..RenderOptions::default()
    };
    template.render(field("messages"), &options)
}

#[test]
fn every_construct_renders_as_transformers_renders_it() {
    let mut lines = GOLDENS.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let head = lines.next().unwrap();
    let (mut faults, mut count) = (Vec::new(), 0);
    for line in lines {
        count += 1;
        let fault = match (render(&line, &head), line["text"].as_str()) {
            (Ok(got), Some(want)) if got != want => format!("renders\n  {got:?}\n  not\n  {want:?}"),
            (Ok(got), None) => format!("renders {got:?} instead of refusing"),
            (Err(error), Some(_)) => format!("refuses: {error}"),
            _ => continue,
        };
        faults.push(format!("{}: {}\n  {fault}", line["name"], line["template"]));
    }
    assert!(count > 150, "{count} goldens");
    assert!(faults.is_empty(), "{} of {count}:\n{}", faults.len(), faults.join("\n"));
}
