//! Answers of a given form: a grammar, compiled once for a request by the crate `llguidance`, says before
//! each token which ones may come. Not what the form is for: `api/constraint.rs` words it. What may be
//! compiled is in `grammar/bounds.rs`, and where in `grammar/threads.rs`.
//!
//! A mask costs the engine's thread some ten microseconds to a few milliseconds a token; all of llguidance's
//! work is bounded by counted steps, not by time, so that equal requests end equally.

mod bounds;
mod error;
mod memory;
#[cfg(test)]
mod tests;
mod threads;

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use keyway_text::Tokenizer;
use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::earley::{Parser, SlicedBiasComputer};
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};

pub(crate) use self::bounds::FormBound;
use self::error::NoTable;
pub(crate) use self::error::{FormError, NotCompiled};
use self::memory::{GrammarMemory, Share};
use self::threads::Threads;
use crate::limits::{
    GRAMMAR_BYTES_EACH, GRAMMAR_COMPILE_FUEL_MAX, GRAMMAR_LEXER_FACTOR, GRAMMAR_MEMORY_LEFT,
    GRAMMAR_MEMORY_MAX, GRAMMAR_SIZE_MAX, GRAMMAR_STATES_MAX,
};

/// Characters of an error that a client is told.
const ERROR_CHARS_MAX: usize = 400;

/// A form that an answer must have.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Form {
    /// JSON by a schema, with one blank behind `,` and `:` and no others.
    Json(Value),
    /// A regular expression over the whole answer.
    Regex(String),
    /// A grammar in llguidance's variant of Lark.
    Lark(String),
    /// One that the worker has made of other forms, whose bounds were checked.
    Composed(String),
}

/// Compiles forms for one model's vocabulary, whose table it makes at the first use.
pub(crate) struct GrammarCompiler {
    table: Arc<Table>,
    threads: Arc<Threads>,
    memory: GrammarMemory,
}

/// A model's vocabulary, as llguidance knows it once a form has been asked for.
struct Table {
    tokenizer: Arc<Tokenizer>,
    vocab_size: usize,
    eos_token_ids: Vec<u32>,
    factory: OnceLock<Result<ParserFactory, NoTable>>,
}

/// Where in its grammar an answer is.
#[derive(Clone)]
pub(crate) struct Grammar {
    matcher: Matcher,
    /// Of all choices of a request, which share the lexer.
    taken: Arc<Taken>,
}

/// What a grammar takes of memory.
struct Taken {
    share: Share,
    /// A copy that shares the lexer, to ask how large that is.
    lexer: Mutex<Parser>,
}

/// Why an answer cannot go on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Broken {
    /// Its form cannot be kept; the reason.
    Form(String),
    /// The grammars of all answers take all memory that there is for them.
    Memory,
}

/// What may come next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    More,
    /// Nothing: the answer is complete.
    Nothing,
}

impl fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarCompiler").field("vocab_size", &self.table.vocab_size).finish_non_exhaustive()
    }
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammar").finish_non_exhaustive()
    }
}

/// A schema with the way in which its JSON is set: compact, as models are shown it.
pub(crate) fn set_compactly(schema: Value) -> Value {
    let options = json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "});
    match schema {
        Value::Object(mut fields) => {
            fields.insert("x-guidance".to_owned(), options);
            Value::Object(fields)
        }
        Value::Bool(true) => json!({"x-guidance": options}),
        other => other,
    }
}

// === impl GrammarCompiler ===

impl GrammarCompiler {
    pub(crate) fn new(tokenizer: Arc<Tokenizer>, vocab_size: usize, eos_token_ids: Vec<u32>) -> Self {
        let table = Table { tokenizer, vocab_size, eos_token_ids, factory: OnceLock::new() };
        let memory = GrammarMemory::new(GRAMMAR_MEMORY_MAX, GRAMMAR_MEMORY_LEFT);
        Self { table: Arc::new(table), threads: Arc::default(), memory }
    }

    /// Compiles a form, on another thread than the caller's, which waits.
    pub(crate) fn compile(&self, form: Form) -> Result<Grammar, NotCompiled> {
        bounds::check(&form).map_err(FormError::from)?;
        let (table, memory) = (Arc::clone(&self.table), self.memory.clone());
        self.threads.run(move || table.compile(form, &memory))?
    }
}

/// Refuses parts of a composed form that are over a bound; the error says which.
pub(crate) fn check_parts<'a>(
    form: Option<&Form>,
    schemas: impl IntoIterator<Item = &'a Value>,
) -> Result<(), FormBound> {
    form.map_or(Ok(()), bounds::check)?;
    bounds::check_schemas(schemas)
}

// === impl Table ===

impl Table {
    fn compile(&self, form: Form, memory: &GrammarMemory) -> Result<Grammar, NotCompiled> {
        // Before anything is compiled, so that it is not in vain.
        let share = memory.share(GRAMMAR_BYTES_EACH).ok_or(NotCompiled::Memory)?;
        let form_error = |error: &str| NotCompiled::Form(FormError::Wrong(summary(error)));
        let factory = self.factory.get_or_init(|| self.factory()).as_ref();
        let factory = factory.map_err(|error| FormError::from(error.clone()))?;
        let grammar = match form {
            Form::Json(schema) => TopLevelGrammar::from_json_schema(set_compactly(schema)),
            Form::Regex(regex) => TopLevelGrammar::from_regex(&regex),
            Form::Lark(lark) | Form::Composed(lark) => TopLevelGrammar::from_lark(lark),
        };
        let parser = factory.create_parser(grammar).map_err(|error| form_error(&error.to_string()))?;
        let lexer = Mutex::new(parser.parser.clone());
        let mut matcher = Matcher::new(Ok(parser));
        if let Some(error) = matcher.get_error() {
            return Err(form_error(&error));
        }
        // The first mask finds what compiling leaves for later.
        matcher.compute_mask().map_err(|error| form_error(&error.to_string()))?;
        drop(share);
        let bytes = Taken::bytes(&lexer);
        let share = memory.share(bytes).ok_or(NotCompiled::Memory)?;
        Ok(Grammar { matcher, taken: Arc::new(Taken { share, lexer }) })
    }

    fn factory(&self) -> Result<ParserFactory, NoTable> {
        let eos = self.eos_token_ids.first().copied().unwrap_or(0);
        let words: Vec<Vec<u8>> = (0..self.vocab_size as u32).map(|id| self.word(id)).collect();
        let trie = TokTrie::from(&TokRxInfo::new(self.vocab_size as u32, eos), &words);
        let trie =
            if self.eos_token_ids.is_empty() { trie } else { trie.with_eos_tokens(&self.eos_token_ids) };
        let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = SlicedBiasComputer::general_slices();
        let factory = ParserFactory::new(&environment, InferenceCapabilities::default(), &slices);
        let mut factory = factory.map_err(|error| NoTable(error.to_string()))?;
        factory.quiet();
        *factory.limits_mut() = ParserLimits {
            initial_lexer_fuel: GRAMMAR_COMPILE_FUEL_MAX,
            max_grammar_size: GRAMMAR_SIZE_MAX,
            max_lexer_states: GRAMMAR_STATES_MAX,
            verbose_errors: false,
            ..ParserLimits::default()
        };
        Ok(factory)
    }

    /// A token as the table has it: special ones behind a mark that no text has.
    fn word(&self, id: u32) -> Vec<u8> {
        let bytes = self.tokenizer.token_bytes(id);
        if self.tokenizer.is_special(id) || self.eos_token_ids.contains(&id) {
            [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat()
        } else {
            bytes.to_vec()
        }
    }
}

fn broken(error: &str) -> Broken {
    Broken::Form(summary(error))
}

/// An error on one line, without what is only for llguidance's authors.
fn summary(error: &str) -> String {
    let said = error.split("<backtrace>").next().unwrap_or_default();
    let words: Vec<&str> = said.split_whitespace().collect();
    words.join(" ").chars().take(ERROR_CHARS_MAX).collect()
}

// === impl Taken ===

impl Taken {
    /// Bytes of a grammar by now.
    fn bytes(lexer: &Mutex<Parser>) -> usize {
        let lexer = lexer.lock().unwrap_or_else(PoisonError::into_inner);
        GRAMMAR_BYTES_EACH + GRAMMAR_LEXER_FACTOR * lexer.lexer_stats().num_bytes
    }

    /// Counts it again.
    fn count(&self) -> Result<(), Broken> {
        if self.share.grow_to(Self::bytes(&self.lexer)) { Ok(()) } else { Err(Broken::Memory) }
    }
}

// === impl Grammar ===

impl Grammar {
    /// Leaves only the tokens that may come. `eos` are the ids that end a generation: one may come if all
    /// may.
    pub(crate) fn mask(&mut self, row: &mut [f32], eos: &[u32]) -> Result<(), Broken> {
        let mask = self.matcher.compute_mask_or_eos().map_err(|error| broken(&error.to_string()))?;
        self.taken.count()?;
        let may_end = eos.iter().any(|id| mask.is_allowed(*id));
        for (id, logit) in (0..).zip(row) {
            let may_come = mask.is_allowed(id) || may_end && eos.contains(&id);
            if !may_come {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }

    /// The same as bits, the lowest id first: set if it may come.
    pub(crate) fn mask_bits(&mut self, vocab_size: usize, eos: &[u32]) -> Result<Vec<u32>, Broken> {
        let mask = self.matcher.compute_mask_or_eos().map_err(|error| broken(&error.to_string()))?;
        self.taken.count()?;
        let mut bits = mask.as_slice().to_vec();
        bits.resize(vocab_size.div_ceil(32), 0);
        if eos.iter().any(|id| mask.is_allowed(*id)) {
            for id in eos {
                if let Some(word) = bits.get_mut(*id as usize / 32) {
                    *word |= 1 << (id % 32);
                }
            }
        }
        Ok(bits)
    }

    /// Takes the token that came, none that ends a generation.
    pub(crate) fn accept(&mut self, token: u32) -> Result<Next, Broken> {
        self.matcher.consume_token(token).map_err(|error| broken(&error.to_string()))?;
        Ok(if self.matcher.is_stopped() { Next::Nothing } else { Next::More })
    }
}
