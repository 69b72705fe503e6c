//! How KV gets from a worker that computed a prompt to one that answers: which engines' contract is spoken
//! with a worker. What is said by each is in `crate::proxy::kv_transfer`.

use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The contract by which a worker's KV is moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum KvTransfer {
    /// vLLM's NIXL connector: the prompt is computed first, and what that worker says goes to the other one.
    Nixl,
    /// vLLM's Mooncake connector: the prompt is computed first, under a name that the gateway gives.
    Mooncake,
    /// SGLang: both workers are asked at once, and meet at the one that computes.
    Sglang,
}

impl KvTransfer {
    /// As it is written.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Nixl => "nixl",
            Self::Mooncake => "mooncake",
            Self::Sglang => "sglang",
        }
    }
}

impl FromStr for KvTransfer {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        [Self::Nixl, Self::Mooncake, Self::Sglang].into_iter().find(|one| one.as_str() == text).ok_or(())
    }
}
