//! Prints how long tokenisation takes: `cargo run --release -p keyway-text --example speed [tokenizer.json]`.

use std::time::Instant;

use keyway_text::{Decoder, TextError, TextModel, Tokenizer};

fn main() -> Result<(), TextError> {
    let tokenizer = match std::env::args().nth(1) {
        Some(path) => Tokenizer::from_file(path.as_ref())?,
        None => TextModel::builtin().tokenizer.as_ref().clone(),
    };
    let prose = "The quick brown fox jumps over the lazy dog, again and again. ";
    for (name, unit) in [("prose", prose), ("one word", "a"), ("blanks", " "), ("accents", "é")] {
        for bytes in [4_000, 64_000, 1_000_000] {
            let text = unit.repeat(bytes / unit.len());
            let start = Instant::now();
            let ids = tokenizer.encode(&text, false)?;
            println!("encode {name:9} {bytes:8} bytes {:8} ids {:?}", ids.len(), start.elapsed());
        }
    }
    let ids = tokenizer.encode(&prose.repeat(1000), false)?;
    let mut decoder = Decoder::new(std::sync::Arc::new(tokenizer), &[])?;
    let start = Instant::now();
    for id in &ids {
        decoder.push(*id)?;
    }
    println!("decode one by one {:?} per id", start.elapsed() / ids.len() as u32);
    Ok(())
}
