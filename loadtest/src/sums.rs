//! Tokens and blocks of what is asked, added up: of a schedule before it is sent, or of what was sent.

use std::collections::HashSet;

use serde::Serialize;

use crate::{
    schedule::Due,
    trace::Trace,
    workload::{self, Ask, scale::Scale},
};

/// Sums over the rows of a schedule or slice.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Sums {
    /// Prompt tokens, scaled, templates not counted; of conversations what each turn adds.
    pub prompt_tokens: u64,
    /// Tokens to generate, scaled.
    pub output_tokens: u64,
    /// Blocks of all prompts.
    pub blocks: u64,
    /// Different blocks among them.
    pub distinct_blocks: u64,
}

/// Adds up requests one by one, and tells new blocks from those seen before.
#[derive(Debug, Default)]
pub struct Adder {
    sums: Sums,
    /// Ids of blocks that several requests may have.
    seen: HashSet<u64>,
}

impl Adder {
    /// Adds the tokens and blocks of one request; of a conversation those of its newest turn.
    pub fn add(&mut self, ask: &Ask) {
        self.sums.prompt_tokens += ask.prompt_tokens();
        self.sums.output_tokens += ask.output_tokens;
        self.sums.blocks += ask.blocks.len() as u64;
        for block in &ask.blocks {
            let is_new = workload::is_unshared(block.id) || self.seen.insert(block.id);
            self.sums.distinct_blocks += u64::from(is_new);
        }
    }

    /// The sums so far.
    pub fn sums(&self) -> Sums {
        self.sums
    }
}

/// Adds up the rows that `schedule` names.
pub fn sums(trace: &Trace, schedule: &[Due], scale: Scale) -> Sums {
    let mut adder = Adder::default();
    for due in schedule {
        adder.add(&workload::trace_ask(trace, scale, due.row));
    }
    adder.sums()
}
