//! Keeps to the schedule: a thread of its own makes each body ahead of its time, sleeps until it is due, and hands
//! it over. It waits for no answer and never moves the schedule; when late, it sends at once.
//!
//! A thread, because a runtime's timers round to the millisecond and share their thread with the answers.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use bytes::Bytes;
use tokio::{runtime::Handle, sync::mpsc::UnboundedSender};
use xxhash_rust::xxh3::Xxh3;

use crate::{
    body::Bodies,
    exchange::{Session, exchange},
    oracle::Oracle,
    record::Record,
    schedule::Due,
    trace::Trace,
};

/// The sender's orders. It ends after the last request, or when told to stop.
#[derive(Debug)]
pub struct Sender {
    /// What to replay.
    pub trace: Trace,
    /// When.
    pub schedule: Vec<Due>,
    /// In which words.
    pub bodies: Bodies,
    /// Judges each prompt in the order of the schedule.
    pub oracle: Oracle,
    /// Prompt tokens of the server's chat template.
    pub overhead_tokens: u64,
    /// Where to.
    pub session: Session,
    /// Takes one record a request: it holds at most as many as there are requests.
    pub records: UnboundedSender<Record>,
    /// How far it is.
    pub control: Arc<Control>,
}

/// What the sender's thread shares with the run.
#[derive(Debug, Default)]
pub struct Control {
    /// Requests sent so far.
    pub sent: AtomicU64,
    /// Set it and unpark the thread: nothing more is sent.
    pub stop: AtomicBool,
}

impl Sender {
    /// Sends everything; gives the hash of all bodies sent, in order (xxh3, 64 bits).
    pub fn run(mut self, runtime: &Handle) -> u64 {
        let mut hash = Xxh3::new();
        for Due { intended_ns, row: index } in std::mem::take(&mut self.schedule) {
            let row = &self.trace.rows[index];
            let body = Bytes::from(self.bodies.make(index, row));
            let reusable = self.oracle.ask(self.bodies.scale.blocks(index, row));
            let wanted_prompt_tokens = self.bodies.scale.prompt_tokens(row) + self.overhead_tokens;
            if !self.wait_until(self.session.clock.zero + Duration::from_nanos(intended_ns)) {
                break;
            }
            let (session, records, sent) = (self.session.clone(), self.records.clone(), body.clone());
            runtime.spawn(async move {
                let exchange = exchange(session, sent).await;
                // The run drops its end only when it ends, and then nobody asks.
                let _ = records.send(Record {
                    row: index,
                    intended_ns,
                    wanted_prompt_tokens,
                    reusable,
                    exchange,
                });
            });
            self.control.sent.fetch_add(1, Ordering::Relaxed);
            hash.update(&body);
        }
        hash.digest()
    }

    /// Sleeps; `false`: told to stop.
    fn wait_until(&self, due: Instant) -> bool {
        loop {
            if self.control.stop.load(Ordering::Acquire) {
                return false;
            }
            let left = due.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            thread::park_timeout(left);
        }
    }
}
