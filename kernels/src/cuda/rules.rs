//! Launches `rules.cu`: what changes a row of logits before a token is drawn from it. What the rules mean is
//! `worker/src/engine/token_rules.rs`' business.

use super::constants::rules;
use super::{Kernel, Launch, Slice};

/// Words of a [`Rule`], and of the header that a list begins with.
pub const RULE_WORDS: usize = rules::RULE_WORDS;
/// Words that a row's [`RowRules`] take on the device; the last one is padding.
pub const ROW_WORDS: usize = rules::ROW_WORDS;

/// What a row's rules say of one id.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Rule {
    /// The token id that it is about.
    pub id: u32,
    /// How often it was generated.
    pub generated: u32,
    /// Whether it stood in the prompt.
    pub in_prompt: bool,
    /// Added to its logit.
    pub bias: Option<f32>,
    /// Whether it may not come while the row holds some back.
    pub is_held: bool,
    /// Whether it never may.
    pub is_forbidden: bool,
}

impl Rule {
    fn words(&self) -> [u32; RULE_WORDS] {
        let Self { id, generated, in_prompt, bias, is_held, is_forbidden } = *self;
        let flags = [
            (in_prompt, rules::IN_PROMPT),
            (bias.is_some(), rules::BIASED),
            (is_held, rules::HELD),
            (is_forbidden, rules::NEVER),
        ];
        let flags = flags.iter().map(|(flag, bit)| if *flag { *bit } else { 0 }).sum();
        [id, generated, flags, bias.unwrap_or(0.0).to_bits()]
    }
}

/// A list as the kernel reads it: with room for `most` rules, none but for those given. Each id comes once.
///
/// # Panics
/// If there are more than `most`.
pub fn list(rules: &[Rule], most: usize) -> Vec<u32> {
    assert!(rules.len() <= most, "rules: a list is too short");
    let header = [rules.len() as u32, most as u32, 0, 0];
    header.into_iter().chain(rules.iter().flat_map(Rule::words)).collect()
}

/// Words of a list with room for `most` rules.
pub fn list_words(most: usize) -> usize {
    (1 + most) * RULE_WORDS
}

/// What changes one row's logits before its token is drawn: where its list and mask lie, and its penalties.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct RowRules {
    /// At which multiple of [`RULE_WORDS`] its list begins.
    pub list: Option<usize>,
    /// The token that the list takes first: at which place it stands.
    pub token: Option<usize>,
    /// At which word its mask begins.
    pub mask: Option<usize>,
    /// Whether what is held may not come.
    pub holds: bool,
    /// Divides the positive, multiplies the negative logits of what stood in the prompt or was generated.
    pub repetition: f32,
    /// Taken from the logits of what was generated, for each time.
    pub frequency: f32,
    /// Taken from the logits of what was generated, once however often that was.
    pub presence: f32,
}

impl RowRules {
    /// As the kernel reads them.
    pub fn words(&self) -> [u32; ROW_WORDS] {
        let Self { list, token, mask, holds, repetition, frequency, presence } = *self;
        let [list, token, mask] = [list, token, mask].map(|at| at.map_or(rules::NONE, |at| at as u32));
        let [r, f, p] = [repetition, frequency, presence].map(f32::to_bits);
        [list, token, mask, holds.into(), r, f, p, 0]
    }
}

/// Changes `logits` `[rows, vocabulary]`. `rows` are [`RowRules::words`], one row's after another's; `lists`
/// begin at multiples of [`RULE_WORDS`], made by [`list`]; of `masks` each row's has a bit for each id, the
/// lowest first, set if it may come; `tokens` are what lists take. `None` if there are no rows. Where lists,
/// masks and tokens lie is not checked here.
///
/// # Panics
/// If shapes disagree.
pub fn launch(
    logits: Slice<f32>,
    vocabulary: usize,
    rows: Slice<u32>,
    lists: Slice<u32>,
    masks: Slice<u32>,
    tokens: Slice<u32>,
) -> Option<Launch> {
    let count = rows.len / ROW_WORDS;
    assert!(
        rows.len == count * ROW_WORDS && logits.len == count * vocabulary && vocabulary < 1 << 24,
        "rules: shapes disagree"
    );
    (count > 0).then(|| Launch {
        kernel: Kernel::apply_rules,
        grid: [count as u32, 1, 1],
        cluster: 1,
        threads: rules::THREADS as u32,
        shared_bytes: rules::SCRATCH_BYTES as u32,
        arguments: vec![
            logits.into(),
            rows.into(),
            lists.into(),
            masks.into(),
            tokens.into(),
            vocabulary.into(),
        ],
    })
}
