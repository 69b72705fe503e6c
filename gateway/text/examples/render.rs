//! Renders chat templates for comparison with other engines: reads one JSON object a line from standard
//! input, `{"template": SOURCE, "special": {"bos_token": …}, "messages": […], "tools": …, "documents": …,
//! "now": SECONDS, "add_generation_prompt": …, "continue_final_message": …, "variables": {…}}`, and prints
//! one a line: `{"text": …}`, or `{"error": …}`.

use std::collections::HashMap;
use std::io::{BufRead as _, Write as _};

use keyway_text::{ChatTemplate, RenderOptions, TextError};
use serde_json::{Value, json};

fn main() -> std::io::Result<()> {
    let mut compiled: HashMap<String, Result<ChatTemplate, TextError>> = HashMap::new();
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let job: Value = serde_json::from_str(&line?)?;
        let source = job["template"].as_str().unwrap_or_default();
        let special = job["special"].as_object().cloned().unwrap_or_default();
        let key = format!("{source}\0{}", job["special"]);
        let template = compiled.entry(key).or_insert_with(|| ChatTemplate::from_source(source, special));
        let rendered = template.as_ref().map_err(ToString::to_string).and_then(|template| {
            template.render(&job["messages"], &options(&job)).map_err(|e| e.to_string())
        });
        let answer = match rendered {
            Ok(text) => json!({ "text": text }),
            Err(error) => json!({ "error": error }),
        };
        writeln!(out, "{answer}")?;
    }
    Ok(())
}

fn options(job: &Value) -> RenderOptions {
    let optional = |name: &str| job.get(name).filter(|v| !v.is_null()).cloned();
    RenderOptions {
        add_generation_prompt: job["add_generation_prompt"] == true,
        continue_final_message: job["continue_final_message"] == true,
        // As transformers takes them.
        fit_contents: false,
        tools: optional("tools"),
        documents: optional("documents"),
        variables: optional("variables").and_then(|v| v.as_object().cloned()).unwrap_or_default(),
        now_unix_seconds: job["now"].as_u64(),
        ..RenderOptions::default()
    }
}
