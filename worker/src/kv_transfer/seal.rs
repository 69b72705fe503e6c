//! The fleet's secret, and what is made of it: the proof that the other end has it too, and the tags of all
//! that follows. HMAC-SHA256 (RFC 2104) over both ends' random numbers; nothing is encrypted.

use std::fmt;
use std::path::Path;

use ring::hmac::{self, HMAC_SHA256, Key};
use ring::rand::{SecureRandom as _, SystemRandom};

use super::KvTransferError;
use super::fault::Fault;
use super::room::Mark;
use crate::limits::{KV_KEY_BYTES_MAX, KV_KEY_BYTES_MIN};

/// Bytes of a tag.
pub(super) const TAG: usize = 32;

/// A random number that each end chooses for a connection.
pub(super) type Nonce = [u8; 32];

/// What all workers of a fleet know.
#[derive(Clone)]
pub(super) struct Secret {
    key: Key,
    is_none: bool,
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Secret").field("is_none", &self.is_none).finish_non_exhaustive()
    }
}

/// The random numbers of both ends.
#[derive(Debug, Clone, Copy)]
pub(super) struct Nonces {
    pub(super) importer: Nonce,
    pub(super) exporter: Nonce,
}

/// Tags one direction's frames, in their order.
pub(super) struct Tags {
    key: Key,
    next: u64,
}

/// Which end a key's frames go to.
#[derive(Debug, Clone, Copy)]
pub(super) enum To {
    Exporter,
    Importer,
}

impl Secret {
    /// For workers of one machine: tags then show what was damaged, and no more.
    pub(super) fn none() -> Self {
        Self { key: Key::new(HMAC_SHA256, b""), is_none: true }
    }

    /// The bytes of a file, without white space around them.
    pub(super) fn read(path: &Path) -> Result<Self, KvTransferError> {
        let failed = |source| KvTransferError::KeyFile { path: path.to_owned(), source };
        let bytes = std::fs::read(path).map_err(failed)?;
        let key = bytes.trim_ascii();
        if !(KV_KEY_BYTES_MIN..=KV_KEY_BYTES_MAX).contains(&key.len()) {
            return Err(KvTransferError::KeyLength { path: path.to_owned(), bytes: key.len() });
        }
        Ok(Self { key: Key::new(HMAC_SHA256, key), is_none: false })
    }

    /// Whether there is none.
    pub(super) fn is_none(&self) -> bool {
        self.is_none
    }

    /// The exporter's proof that it has the secret.
    pub(super) fn proof(&self, nonces: &Nonces) -> [u8; TAG] {
        self.derive(b"keyway kv proof", nonces)
    }

    /// Whether that is the exporter's proof; takes equally long whatever it is.
    pub(super) fn is_proof(&self, nonces: &Nonces, proof: &[u8]) -> bool {
        verify(&self.key, &message(b"keyway kv proof", nonces), proof)
    }

    /// What shows that a room is this connection's.
    pub(super) fn mark(&self, nonces: &Nonces) -> Mark {
        self.derive(b"keyway kv room", nonces)
    }

    /// The tags of a connection's frames in one direction.
    pub(super) fn tags(&self, nonces: &Nonces, to: To) -> Tags {
        let purpose: &[u8] = match to {
            To::Exporter => b"keyway kv to exporter",
            To::Importer => b"keyway kv to importer",
        };
        Tags { key: Key::new(HMAC_SHA256, &self.derive(purpose, nonces)), next: 0 }
    }

    fn derive(&self, purpose: &[u8], nonces: &Nonces) -> [u8; TAG] {
        bytes(&hmac::sign(&self.key, &message(purpose, nonces)))
    }
}

impl Tags {
    /// The next frame's tag, of all its parts.
    pub(super) fn tag(&mut self, frame: &[&[u8]]) -> [u8; TAG] {
        let number = self.number();
        let mut context = hmac::Context::with_key(&self.key);
        context.update(&number);
        for part in frame {
            context.update(part);
        }
        bytes(&context.sign())
    }

    /// Whether that is the next frame's tag; takes equally long whatever it is.
    pub(super) fn is_tag(&mut self, frame: &[&[u8]], tag: &[u8]) -> bool {
        let own = self.tag(frame);
        // A MAC of both: equal if they are, and no early end tells where they differ.
        verify(&self.key, &own, hmac::sign(&self.key, tag).as_ref())
    }

    fn number(&mut self) -> [u8; 8] {
        self.next += 1;
        self.next.to_le_bytes()
    }
}

/// So many random bytes.
pub(super) fn random<const N: usize>() -> Result<[u8; N], Fault> {
    let mut bytes = [0; N];
    SystemRandom::new().fill(&mut bytes).map_err(|_| Fault::Unreachable)?;
    Ok(bytes)
}

fn message(purpose: &[u8], nonces: &Nonces) -> Vec<u8> {
    [purpose, &nonces.importer, &nonces.exporter].concat()
}

fn verify(key: &Key, message: &[u8], tag: &[u8]) -> bool {
    hmac::verify(key, message, tag).is_ok()
}

fn bytes(tag: &hmac::Tag) -> [u8; TAG] {
    let mut bytes = [0; TAG];
    bytes.copy_from_slice(tag.as_ref());
    bytes
}
