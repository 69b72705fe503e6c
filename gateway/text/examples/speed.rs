//! Prints how long tokenisation and chat templates take:
//! `cargo run --release -p keyway-text --example speed [CHECKPOINT_DIR]`.
#![allow(clippy::disallowed_methods, reason = "it measures")]

use std::time::Instant;

use keyway_text::{Decoder, RenderOptions, TextError, TextModel};
use serde_json::json;

fn main() -> Result<(), TextError> {
    let model = match std::env::args().nth(1) {
        Some(path) => TextModel::from_dir(path.as_ref())?,
        None => TextModel::builtin(),
    };
    let tokenizer = &model.tokenizer;
    let prose = "The quick brown fox jumps over the lazy dog, again and again. ";
    for (name, unit) in [("prose", prose), ("one word", "a"), ("blanks", " "), ("accents", "é")] {
        for bytes in [4_000, 64_000, 1_000_000] {
            let text = unit.repeat(bytes / unit.len());
            let start = Instant::now();
            let ids = tokenizer.encode(&text, false)?;
            println!("encode {name:9} {bytes:8} bytes {:8} ids {:?}", ids.len(), start.elapsed());
        }
    }
    for (name, text) in [("prose", prose), ("accents", "é ü ñ "), ("emoji", "😀 👩‍👩‍👧 ")] {
        let ids = tokenizer.encode(&text.repeat(1000), false)?;
        let mut decoder = Decoder::new(model.tokenizer.clone(), &[])?;
        let start = Instant::now();
        for id in &ids {
            decoder.push(*id)?;
        }
        println!("decode {name:9} one by one {:?} per id", start.elapsed() / ids.len() as u32);
    }
    for (turns, text) in
        [(1, prose.to_owned()), (100, prose.to_owned()), (1000, prose.to_owned()), (10, prose.repeat(1000))]
    {
        let turn = [json!({"role": "user", "content": text}), json!({"role": "assistant", "content": text})];
        let mut messages: Vec<_> = std::iter::repeat_n(&turn, turns).flatten().cloned().collect();
        messages.push(turn[0].clone());
        let messages = json!(messages);
        let rounds = 1 + 2000 / turns as u32;
        let start = Instant::now();
        let mut bytes = 0;
        for _ in 0..rounds {
            bytes = model.template.render(&messages, &RenderOptions::default())?.len();
        }
        println!("render {turns:5} turns {bytes:8} bytes {:?}", start.elapsed() / rounds);
    }
    Ok(())
}
