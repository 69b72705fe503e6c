//! Learns how many bytes of our text make one token on this server, and how many tokens its chat template
//! adds, from two one-token requests of different length. No tokenizer is needed, and no text of the run is
//! sent.

use std::time::Duration;

use bytes::Bytes;
use http::Method;
use serde::{Deserialize, Serialize};

use crate::{
    client::{ClientError, Server, event::Counts},
    limits,
    workload::{
        body::{self, Endpoint},
        prompt::PromptText,
    },
};

/// Bytes of the two probes' prompts. Long enough that a token more or less is under one per cent of their
/// difference, short enough for a model of 4,096 tokens.
const PROBE_BYTES: [usize; 2] = [512, 2048];

/// Bytes of a token in the probes' blocks, before anything is known: what common BPE vocabularies need for
/// our words. Decides only how often a block's first word occurs.
const BYTES_PER_TOKEN_GUESS: usize = 4;

/// The relation of bytes to tokens.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    /// Bytes of prompt text for one more prompt token.
    pub bytes_per_token: f64,
    /// Prompt tokens that are not the text's: the chat template.
    pub overhead_tokens: u64,
    /// `true`: measured on the server; `false`: given by `--bytes-per-token`.
    pub measured: bool,
}

/// Measures `model` with blocks of `block_tokens`.
pub async fn calibrate(
    server: &Server,
    endpoint: Endpoint,
    model: &str,
    seed: u64,
    block_tokens: u32,
    timeout: Duration,
) -> Result<Calibration, ClientError> {
    let block_bytes = (block_tokens as usize * BYTES_PER_TOKEN_GUESS).max(limits::BLOCK_BYTES_MIN);
    let mut tokens = [0; 2];
    for (i, bytes) in PROBE_BYTES.into_iter().enumerate() {
        let body = body::probe(endpoint, model, &probe_text(seed, i as u64, bytes, block_bytes));
        let mut answer = server.json(Method::POST, endpoint.path(), Bytes::from(body), timeout).await?;
        let counts: Option<Counts> = serde_json::from_value(answer["usage"].take()).unwrap_or_default();
        tokens[i] = counts.unwrap_or_default().onto(None).prompt_tokens;
    }
    fit(tokens).ok_or_else(|| ClientError::Answer {
        request: format!("POST {}", endpoint.path()),
        reason: format!(
            "prompts of {} and {} bytes have {} and {} prompt tokens by the answers' `usage`; \
             give the ratio with --bytes-per-token",
            PROBE_BYTES[0], PROBE_BYTES[1], tokens[0], tokens[1]
        ),
    })
}

/// Text like the run's, from blocks that no trace has.
fn probe_text(seed: u64, probe: u64, bytes: usize, block_bytes: usize) -> String {
    let (text, mut out) = (PromptText::new(seed), Vec::with_capacity(bytes));
    for block in 0.. {
        if out.len() == bytes {
            break;
        }
        text.append(u64::MAX - (probe << 20) - block, block_bytes.min(bytes - out.len()), &mut out);
    }
    // Letters and spaces are ASCII.
    out.into_iter().map(char::from).collect()
}

fn fit(tokens: [u64; 2]) -> Option<Calibration> {
    let more_tokens = tokens[1].checked_sub(tokens[0]).filter(|&more| more > 0)?;
    let bytes_per_token = (PROBE_BYTES[1] - PROBE_BYTES[0]) as f64 / more_tokens as f64;
    let overhead = tokens[0] as f64 - PROBE_BYTES[0] as f64 / bytes_per_token;
    Some(Calibration { bytes_per_token, overhead_tokens: overhead.max(0.0).round() as u64, measured: true })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_tokenizer_is_met_exactly() {
        let want = Calibration { bytes_per_token: 1.0, overhead_tokens: 13, measured: true };
        assert_eq!(fit([512 + 13, 2048 + 13]), Some(want));
    }

    #[test]
    fn a_server_that_counts_nothing_is_refused() {
        assert_eq!(fit([0, 0]), None);
        assert_eq!(fit([7, 5]), None);
    }

    #[test]
    fn probes_have_their_lengths_and_share_no_beginning() {
        let (a, b) = (probe_text(1, 0, 512, 64), probe_text(1, 1, 2048, 64));
        assert_eq!((a.len(), b.len()), (512, 2048));
        assert_ne!(a[..8], b[..8]);
    }
}
