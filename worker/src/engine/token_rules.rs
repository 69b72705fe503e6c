//! What changes a sequence's row of logits before a token is drawn from it: biases, penalties, tokens that
//! may not come yet. A pure function of the request and of the sequence's own tokens, so that neither batch
//! nor preemption nor a resumption changes a draw. Grammars are `grammar.rs`; the draw is `sampler.rs`.
//!
//! Applied in vLLM's order (`vllm/v1/sample/sampler.py`): biases, penalties, then the sampler's temperature
//! and cuts.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::engine::backend::Rule;

/// A request's wishes about single tokens.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TokenRules {
    pub(crate) penalties: Penalties,
    /// Added to a token's logit.
    pub(crate) logit_bias: Vec<(u32, f32)>,
    /// Tokens to generate at least before one may end the generation.
    pub(crate) min_tokens: usize,
    /// Ids that end the generation, beside the model's own.
    pub(crate) stop_token_ids: Vec<u32>,
}

/// Penalties on tokens that were there before; the neutral ones change nothing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Penalties {
    /// Taken from the logit of each token that was generated (OpenAI).
    pub(crate) presence: f32,
    /// The same, times how often.
    pub(crate) frequency: f32,
    /// Divides the positive, multiplies the negative logits of all tokens of prompt and output (Keskar et al.
    /// 2019, "CTRL", section 4.1, as transformers does it).
    pub(crate) repetition: f32,
}

/// The rules of one sequence and what they need to know of its tokens.
#[derive(Debug)]
pub(crate) struct RuleState {
    rules: TokenRules,
    /// How often each token was generated; empty without penalties.
    generated: HashMap<u32, u32>,
    /// The prompt's tokens; empty without a penalty on repetition.
    prompt: HashSet<u32>,
    /// Whether an id has two biases.
    biased_twice: bool,
}

impl Default for TokenRules {
    fn default() -> Self {
        let penalties = Penalties { presence: 0.0, frequency: 0.0, repetition: 1.0 };
        Self { penalties, logit_bias: Vec::new(), min_tokens: 0, stop_token_ids: Vec::new() }
    }
}

impl Penalties {
    fn is_neutral(self) -> bool {
        self.presence == 0.0 && self.frequency == 0.0 && self.repetition == 1.0
    }
}

// === impl RuleState ===

impl RuleState {
    /// For a sequence whose `output` was generated before, elsewhere.
    pub(crate) fn new(rules: TokenRules, prompt: &[u32], output: &[u32]) -> Self {
        let prompt = if rules.penalties.repetition == 1.0 { &[] } else { prompt };
        let mut biased = HashSet::new();
        let biased_twice = !rules.logit_bias.iter().all(|(id, _)| biased.insert(*id));
        let prompt = prompt.iter().copied().collect();
        let mut state = Self { generated: HashMap::new(), prompt, biased_twice, rules };
        for token in output {
            state.push(*token);
        }
        state
    }

    /// Takes note of a generated token.
    pub(crate) fn push(&mut self, token: u32) {
        if !self.rules.penalties.is_neutral() {
            *self.generated.entry(token).or_default() += 1;
        }
    }

    /// Whether the token ends a generation at this request's wish.
    pub(crate) fn is_stop(&self, token: u32) -> bool {
        self.rules.stop_token_ids.contains(&token)
    }

    /// Whether they change nothing of the row from which the token behind `generated` others is drawn.
    pub(crate) fn is_neutral(&self, generated: usize) -> bool {
        let TokenRules { penalties, logit_bias, min_tokens, stop_token_ids: _ } = &self.rules;
        penalties.is_neutral() && logit_bias.is_empty() && generated >= *min_tokens
    }

    /// Whether some ids may not come yet behind `generated` others.
    pub(crate) fn holds(&self, generated: usize) -> bool {
        generated < self.rules.min_tokens
    }

    /// On repetition, frequency and presence.
    pub(crate) fn penalties(&self) -> [f32; 3] {
        let Penalties { presence, frequency, repetition } = self.rules.penalties;
        [repetition, frequency, presence]
    }

    /// Whether it matters what was generated.
    pub(crate) fn counts(&self) -> bool {
        !self.rules.penalties.is_neutral()
    }

    /// How many rules [`RuleState::list`] has at most; `None` if there is no list that means the same, since
    /// an id has two biases, each of which is added and rounded.
    pub(crate) fn list_len(&self, eos: &[u32], suppressed: &[u32]) -> Option<usize> {
        let TokenRules { logit_bias, stop_token_ids, .. } = &self.rules;
        let ids = self.generated.len() + self.prompt.len() + logit_bias.len() + suppressed.len();
        (!self.biased_twice).then_some(ids + eos.len() + stop_token_ids.len())
    }

    /// The rules as a list, id by id, for a backend that applies them itself. `eos` as for
    /// [`RuleState::apply`]; what is `suppressed` never comes.
    pub(crate) fn list(&self, eos: &[u32], suppressed: &[u32]) -> Vec<Rule> {
        let mut list: BTreeMap<u32, Rule> = BTreeMap::new();
        let mut of = |id: u32, change: &dyn Fn(&mut Rule)| {
            change(list.entry(id).or_insert(Rule { id, ..Rule::default() }));
        };
        for id in suppressed {
            of(*id, &|rule| rule.is_forbidden = true);
        }
        let held: [&[u32]; 2] =
            if self.rules.min_tokens > 0 { [eos, &self.rules.stop_token_ids] } else { [&[], &[]] };
        for id in held.into_iter().flatten() {
            of(*id, &|rule| rule.is_held = true);
        }
        for id in &self.prompt {
            of(*id, &|rule| rule.in_prompt = true);
        }
        for (id, times) in &self.generated {
            of(*id, &|rule| rule.generated = *times);
        }
        for (id, bias) in &self.rules.logit_bias {
            of(*id, &|rule| rule.bias = Some(*bias));
        }
        list.into_values().collect()
    }

    /// Changes the row from which the token behind `generated` others is drawn. `eos` are the ids that end a
    /// generation of this model.
    pub(crate) fn apply(&self, row: &mut [f32], eos: &[u32], generated: usize) {
        if generated < self.rules.min_tokens {
            for id in eos.iter().chain(&self.rules.stop_token_ids) {
                change(row, *id, |_| f32::NEG_INFINITY);
            }
        }
        for (id, bias) in &self.rules.logit_bias {
            change(row, *id, |logit| logit + bias);
        }
        self.penalise(row);
    }

    fn penalise(&self, row: &mut [f32]) {
        let Penalties { presence, frequency, repetition } = self.rules.penalties;
        let repeated = |logit: f32| if logit > 0.0 { logit / repetition } else { logit * repetition };
        for id in self.prompt.iter().filter(|id| !self.generated.contains_key(id)) {
            change(row, *id, repeated);
        }
        for (id, times) in &self.generated {
            change(row, *id, |logit| repeated(logit) - frequency * *times as f32 - presence);
        }
    }
}

fn change(row: &mut [f32], id: u32, to: impl FnOnce(f32) -> f32) {
    if let Some(logit) = row.get_mut(id as usize) {
        *logit = to(*logit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn applied(rules: TokenRules, prompt: &[u32], output: &[u32]) -> Vec<f32> {
        let mut row = vec![2.0, -2.0, 1.0, 0.5, f32::NEG_INFINITY];
        RuleState::new(rules, prompt, output).apply(&mut row, &[3], output.len());
        row
    }

    #[test]
    fn rules_that_ask_for_nothing_change_nothing() {
        let row = applied(TokenRules::default(), &[0, 1, 2, 3, 4], &[0, 1, 4]);
        assert_eq!(row, [2.0, -2.0, 1.0, 0.5, f32::NEG_INFINITY]);
    }

    #[test]
    fn presence_counts_once_and_frequency_each_time_and_neither_the_prompt() {
        let penalties = Penalties { presence: 0.5, frequency: 0.25, repetition: 1.0 };
        let row = applied(TokenRules { penalties, ..TokenRules::default() }, &[2, 2], &[0, 0, 1, 4]);
        assert_eq!(row, [1.0, -2.75, 1.0, 0.5, f32::NEG_INFINITY]);
    }

    #[test]
    fn repetition_moves_prompt_and_output_towards_unlikely_once() {
        let penalties = Penalties { presence: 0.0, frequency: 0.0, repetition: 2.0 };
        let row = applied(TokenRules { penalties, ..TokenRules::default() }, &[0, 4], &[0, 1]);
        assert_eq!(row, [1.0, -4.0, 1.0, 0.5, f32::NEG_INFINITY]);
    }

    #[test]
    fn biases_come_first_and_ends_are_held_back_until_enough() {
        let rules = TokenRules {
            logit_bias: vec![(1, 4.0), (99, 1.0)],
            min_tokens: 2,
            stop_token_ids: vec![2],
            penalties: Penalties { presence: 0.0, frequency: 0.0, repetition: 2.0 },
        };
        let none = f32::NEG_INFINITY;
        assert_eq!(applied(rules.clone(), &[1], &[0]), [1.0, 1.0, none, none, none]);
        assert_eq!(applied(rules, &[1], &[0, 0]), [1.0, 1.0, 1.0, 0.5, none]);
    }

    #[test]
    fn a_resumed_state_is_the_one_that_went_on() {
        let penalties = Penalties { presence: 0.1, frequency: 0.2, repetition: 1.5 };
        let rules = TokenRules { penalties, ..TokenRules::default() };
        let mut went_on = RuleState::new(rules.clone(), &[1, 2], &[]);
        for token in [3, 0, 3] {
            went_on.push(token);
        }
        let mut row = vec![2.0, -2.0, 1.0, 0.5, 0.1];
        went_on.apply(&mut row, &[], 3);
        let mut again = vec![2.0, -2.0, 1.0, 0.5, 0.1];
        RuleState::new(rules, &[1, 2], &[3, 0, 3]).apply(&mut again, &[], 3);
        assert_eq!(row, again);
    }
}
