//! A request on its way to its tokens, in slices of about a millisecond, so that jobs can take turns. What of
//! it takes memory is asked for first.

use std::{sync::Arc, vec};

use bytes::Bytes;
use keyway_text::{
    Encoding, TextError,
    memory::{self, TOKENIZE_BYTES_EACH},
};

use super::{Known, Model, PromptMemory, TokenPrompt, memory::Share};
use crate::{
    limits::{TOKENIZE_SLICE_BYTES, TOKENIZE_SLICE_PIECES},
    prompt::text::{self, Prompt, PromptApi, Unknown},
};

/// Memory that a rendered text takes for each of its bytes, while it becomes tokens that are known: itself,
/// where it is cut, and ids of four bytes in a list that grows.
const TEXT_BYTES_EACH: usize = 16;

/// One request that becomes tokens, slice by slice.
#[derive(Debug)]
pub(super) struct Job {
    model: Arc<Model>,
    api: PromptApi,
    body: Bytes,
    /// Tokens that any worker has room for at most, where that is known.
    context: Option<usize>,
    /// None for a short one.
    memory: Option<Share>,
    /// Its prompts that are still to do; `None` before it was read.
    rest: Option<vec::IntoIter<Prompt>>,
    /// Bytes of all their texts and ids.
    bytes: usize,
    /// The one at hand.
    encoding: Option<Encoding>,
    done: Option<TokenPrompt>,
    /// Whether that is the prompt's beginning alone.
    beginning: bool,
}

impl Job {
    pub(super) fn new(model: Arc<Model>, api: PromptApi, body: Bytes) -> Self {
        Self {
            model,
            api,
            body,
            context: None,
            memory: None,
            rest: None,
            bytes: 0,
            encoding: None,
            done: None,
            beginning: false,
        }
    }

    /// With no more tokens than a worker has room for, and in this memory.
    pub(super) fn bounded(mut self, context: Option<u64>, memory: &PromptMemory) -> Self {
        self.context = context.and_then(|tokens| tokens.try_into().ok());
        self.memory = Some(memory.share());
        self
    }

    /// Does all of it.
    pub(super) fn whole(mut self) -> Result<Known, Unknown> {
        loop {
            if let Some(tokens) = self.slice()? {
                return Ok(tokens);
            }
        }
    }

    /// Does one slice; the tokens, after the last.
    pub(super) fn slice(&mut self) -> Result<Option<Known>, Unknown> {
        let done = self.step();
        if !matches!(done, Ok(None)) {
            // Who has the result need not wait until the thread has put the job away.
            (self.rest, self.encoding, self.memory) = (None, None, None);
        }
        done
    }

    fn step(&mut self) -> Result<Option<Known>, Unknown> {
        let Some(rest) = &mut self.rest else {
            self.read()?;
            return Ok(None);
        };
        let tokenizer = &self.model.tokenizer;
        let ids = match self.encoding.take() {
            Some(mut encoding) => {
                let slice = tokenizer.go_on(&mut encoding, TOKENIZE_SLICE_PIECES, TOKENIZE_SLICE_BYTES);
                let Some(encoded) = slice.map_err(|_: TextError| Unknown::Failed)? else {
                    self.encoding = Some(encoding);
                    return Ok(None);
                };
                encoded.ids
            }
            None => match rest.next() {
                Some(Prompt::Ids(ids)) => ids,
                Some(Prompt::Text { text, add_special }) => {
                    return self.begin(text, add_special).map(|()| None);
                }
                Some(Prompt::Beginning(text)) => {
                    self.beginning = true;
                    return self.begin(text, false).map(|()| None);
                }
                None => {
                    let done = self.done.take().ok_or(Unknown::Unsupported)?;
                    let known =
                        if self.beginning { Known::Beginning(done.ids.into()) } else { Known::Whole(done) };
                    return Ok(Some(known));
                }
            },
        };
        let tokens = ids.len() as u64;
        let done = self.done.get_or_insert(TokenPrompt { ids, total: 0 });
        done.total += tokens;
        Ok(None)
    }

    /// Takes a text at hand.
    fn begin(&mut self, text: String, add_special: bool) -> Result<(), Unknown> {
        let tokenizer = &self.model.tokenizer;
        let encoding = tokenizer.begin(text, add_special);
        if let Some(memory) = &mut self.memory {
            let new = tokenizer.longest_new_piece(&encoding);
            memory.needs(self.bytes * TEXT_BYTES_EACH + new * TOKENIZE_BYTES_EACH)?;
        }
        self.encoding = Some(encoding);
        Ok(())
    }

    /// The body to its prompts.
    fn read(&mut self) -> Result<(), Unknown> {
        if let Some(memory) = &mut self.memory {
            memory.needs(memory::to_render(&self.body))?;
        }
        let prompts = text::read(self.api, &self.body, &self.model.text.template)?;
        if prompts.iter().any(|prompt| self.is_too_long(prompt)) {
            return Err(Unknown::TooLong);
        }
        self.bytes = prompts.iter().map(Prompt::bytes).sum();
        if let Some(memory) = &mut self.memory {
            memory.needs(self.bytes * TEXT_BYTES_EACH)?;
        }
        self.rest = Some(prompts.into_iter());
        Ok(())
    }

    /// Whether a prompt certainly has more tokens than any worker has room for.
    fn is_too_long(&self, prompt: &Prompt) -> bool {
        let Some(context) = self.context else { return false };
        match prompt {
            Prompt::Text { text, .. } | Prompt::Beginning(text) => {
                self.model.text.tokenizer.comes_to(text, context.saturating_add(1))
            }
            Prompt::Ids(ids) => ids.len() > context,
        }
    }
}
