//! KV that goes from one worker of the fleet to another, as requests ask for it: in the words of vLLM's
//! NIXL connector (`do_remote_decode`, `do_remote_prefill`) and of its tier of peers
//! (`remote_kv_source`). It takes the time that the links need. What a prompt that was computed for
//! another leaves stays cached as any.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak},
    time::Duration,
};

use keyway_core::Transfer;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{request::Ask, worker::Worker};
use crate::{
    engine_model::{Links, Nanos},
    limits::MOCK_KEPT_MAX,
};

/// What a request says of its prompt's KV.
#[derive(Debug, Default, Deserialize)]
pub(super) struct KvParams {
    /// It shall be kept for another worker.
    #[serde(default)]
    do_remote_decode: bool,
    /// It is kept by another worker, under this name.
    #[serde(default)]
    do_remote_prefill: bool,
    remote_request_id: Option<String>,
    /// Another worker may have some of it.
    remote_kv_source: Option<KvSource>,
}

#[derive(Debug, Deserialize)]
struct KvSource {
    remote_port: u16,
}

/// Moves KV between the workers of a fleet.
#[derive(Debug)]
pub(super) struct KvMover {
    transfer: Transfer,
    fleet: OnceLock<Vec<(u16, Weak<Worker>)>>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    links: Links,
    /// Prompts that were computed for others: by whom, and how many tokens.
    kept: HashMap<u64, (usize, u32)>,
    named: u64,
}

impl KvParams {
    /// Whether the answer says where the KV is.
    pub(super) fn keeps(&self) -> bool {
        self.do_remote_decode && !self.do_remote_prefill
    }
}

impl KvMover {
    /// Between so many workers, each transfer taking so long.
    pub(super) fn new(workers: usize, transfer: Transfer) -> Self {
        let state = State { links: Links::new(workers), kept: HashMap::new(), named: 0 };
        Self { transfer, fleet: OnceLock::new(), state: Mutex::new(state) }
    }

    /// The workers, each with the port by which others name it; said once.
    pub(super) fn introduce(&self, fleet: impl Iterator<Item = (u16, Arc<Worker>)>) {
        // The second word would be the same.
        let _ = self.fleet.set(fleet.map(|(port, worker)| (port, Arc::downgrade(&worker))).collect());
    }

    /// The port by which others name a worker.
    pub(super) fn port_of(&self, number: usize) -> Option<u16> {
        self.fleet.get()?.get(number).map(|(port, _)| *port)
    }

    /// Waits until what a request is to fetch is there; how many leading tokens of its prompt that makes.
    pub(super) async fn fetch(&self, to: &Worker, ask: &Ask) -> u32 {
        let Some(params) = &ask.kv else { return 0 };
        let Some((from, there)) = self.source(params, ask) else { return 0 };
        let here = to.held_tokens(&ask.chain);
        if there <= here {
            return 0;
        }
        let lacks = u64::from(there - here);
        let arrives = self.state().links.take(to.now(), (from, to.number), lacks, self.transfer);
        tokio::time::sleep(to.until(arrives)).await;
        there
    }

    /// Which worker has how many tokens of a prompt that is to be fetched.
    fn source(&self, params: &KvParams, ask: &Ask) -> Option<(usize, u32)> {
        if let Some(KvSource { remote_port }) = params.remote_kv_source {
            let (_, worker) = self.fleet.get()?.iter().find(|(port, _)| *port == remote_port)?;
            let worker = worker.upgrade()?;
            return Some((worker.number, worker.held_tokens(&ask.chain)));
        }
        let name = params.remote_request_id.as_deref().filter(|_| params.do_remote_prefill)?;
        let (from, tokens) = self.state().kept.remove(&u64::from_str_radix(name, 16).ok()?)?;
        (tokens == ask.prompt_tokens).then_some((from, tokens))
    }

    /// Keeps a prompt that was computed for another worker; what that one is to be told.
    pub(super) fn keep(&self, worker: &Worker, prompt_tokens: u32) -> Value {
        let mut state = self.state();
        state.named += 1;
        let name = state.named;
        state.kept.insert(name, (worker.number, prompt_tokens));
        // The oldest first: names go up.
        if let Some(old) = name.checked_sub(MOCK_KEPT_MAX) {
            state.kept.remove(&old);
        }
        json!({
            "do_remote_prefill": true, "do_remote_decode": false, "remote_request_id": format!("{name:x}"),
            "remote_engine_id": format!("mock-{}", worker.number), "remote_host": "127.0.0.1",
            "remote_port": self.port_of(worker.number), "remote_num_tokens": prompt_tokens,
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Worker {
    /// How long it is until then.
    fn until(&self, at: Nanos) -> Duration {
        self.wall(at).saturating_sub(self.since_start())
    }
}
