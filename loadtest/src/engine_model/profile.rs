//! What an engine is and what one of its steps costs. Schedules nothing; the named profiles are in
//! `hardware.rs`.

/// One step's work, as the scheduler put it together.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StepWork {
    /// Tokens computed as prompt: of prompts, and of preempted requests those computed again.
    pub prefill_tokens: u64,
    /// Sum over those tokens of the tokens each attends to.
    pub prefill_pairs: f64,
    /// Sequences that decode one token.
    pub decodes: u64,
    /// Sum of their context lengths, in tokens.
    pub decode_context: u64,
    /// Sequences in the step, of either kind.
    pub sequences: u64,
}

/// How long a step takes, in nanoseconds of engine time.
///
/// ```text
/// step + max(weights, token * tokens) + attention * pairs + kv_read * decode_context + sequence * sequences
/// ```
///
/// The roofline of a decoder (Williams et al., CACM 2009): the linear layers either wait for the weights
/// (decoding) or for the arithmetic (prefill); attention over a prompt is arithmetic and grows with the
/// square of its length; attention of a decoding sequence reads its whole KV, so decoding slows as the batch
/// and its contexts grow.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepCost {
    /// Launches, scheduling, tensor-parallel synchronisation: paid by every step.
    pub step_ns: f64,
    /// Reading all weights once.
    pub weights_ns: f64,
    /// Linear layers of one token.
    pub token_ns: f64,
    /// Attention of one prompt token to one token before it.
    pub attention_ns: f64,
    /// Reading one token's KV for a decoding sequence.
    pub kv_read_ns: f64,
    /// Sampling and detokenising one sequence.
    pub sequence_ns: f64,
}

/// An engine: its speed and its bounds.
#[derive(Debug, Clone, PartialEq)]
pub struct Profile {
    /// As it is chosen on the command line.
    pub name: &'static str,
    /// One line for people.
    pub about: &'static str,
    /// Tokens of one KV block.
    pub block_tokens: u32,
    /// KV blocks of one engine, for running requests and cached prefixes together.
    pub kv_blocks: u32,
    /// Most tokens in one step (vLLM's `max_num_batched_tokens`).
    pub token_budget: u32,
    /// Most sequences running at once (vLLM's `max_num_seqs`).
    pub running_max: u32,
    /// What a step costs.
    pub cost: StepCost,
}

impl StepCost {
    /// No time at all.
    pub const ZERO: Self = Self {
        step_ns: 0.0,
        weights_ns: 0.0,
        token_ns: 0.0,
        attention_ns: 0.0,
        kv_read_ns: 0.0,
        sequence_ns: 0.0,
    };

    /// Nanoseconds that a step with this work takes.
    pub fn of(&self, work: &StepWork) -> f64 {
        let tokens = (work.prefill_tokens + work.decodes) as f64;
        self.step_ns
            + self.weights_ns.max(self.token_ns * tokens)
            + self.attention_ns * work.prefill_pairs
            + self.kv_read_ns * work.decode_context as f64
            + self.sequence_ns * work.sequences as f64
    }
}

impl Profile {
    /// Tokens of KV that fit.
    pub fn kv_tokens(&self) -> u64 {
        u64::from(self.kv_blocks) * u64::from(self.block_tokens)
    }

    /// Prompt tokens a second of one prompt of `tokens` on an idle engine: what a calibration would measure.
    pub fn prefill_rate(&self, tokens: u32) -> f64 {
        let (mut done, mut ns) = (0, 0.0);
        while done < tokens {
            let n = (tokens - done).min(self.token_budget);
            ns += self.cost.of(&StepWork {
                prefill_tokens: n.into(),
                prefill_pairs: pairs(done, n),
                sequences: 1,
                ..StepWork::default()
            });
            done += n;
        }
        f64::from(tokens) * 1e9 / ns
    }
}

/// Pairs of (token, token it attends to) when `n` tokens come after `done` others: each sees all before it
/// and itself.
pub(super) fn pairs(done: u32, n: u32) -> f64 {
    let (done, n) = (f64::from(done), f64::from(n));
    n * done + n * (n + 1.0) / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;

    const COST: StepCost = StepCost {
        step_ns: 10.0,
        weights_ns: 100.0,
        token_ns: 2.0,
        attention_ns: 0.5,
        kv_read_ns: 0.1,
        sequence_ns: 3.0,
    };

    #[test]
    fn the_formula_by_hand() {
        let decode = StepWork { decodes: 4, decode_context: 400, sequences: 4, ..StepWork::default() };
        assert_eq!(COST.of(&decode), 10.0 + 100.0 + 40.0 + 12.0);
        let prefill = StepWork {
            prefill_tokens: 100,
            prefill_pairs: pairs(0, 100),
            sequences: 1,
            ..StepWork::default()
        };
        assert_eq!(COST.of(&prefill), 10.0 + 200.0 + 0.5 * 5050.0 + 3.0);
    }

    #[test]
    fn pairs_of_chunks_sum_to_those_of_the_whole() {
        assert_eq!(pairs(0, 300), pairs(0, 100) + pairs(100, 200));
        assert_eq!(pairs(0, 3), 6.0);
    }
}
