//! Keeps to the schedule: a thread of its own makes each body ahead of its time, sleeps until it is due, and
//! hands it over. In an open loop it waits for no answer; it never moves what is due, and when late, sends at
//! once.
//!
//! A thread, because a runtime's timers round to the millisecond and share their thread with the answers.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Receiver, Sender as EndSender, channel},
    },
    thread::{self, Thread},
    time::Duration,
};

use bytes::Bytes;
use tokio::{
    runtime::Handle,
    sync::{Semaphore, mpsc::UnboundedSender},
};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::{
    client::{
        PreparedRequest,
        exchange::{Session, exchange},
        lanes::{Lanes, Work},
        names::SessionNames,
        record::{Exchange, Failure, FailureClass, Outcome, Record},
    },
    oracle::{Oracle, Reusable},
    schedule::{Due, flow::TurnPlace, pacer::Pacer},
    sums::{Adder, Sums},
    workload::{
        Ask, Workload,
        body::Bodies,
        conversation::{History, Reply},
    },
};

/// The sender's orders. It ends after the last request, or when told to stop.
#[derive(Debug)]
pub struct Sender {
    /// Makes the blocks and the lengths of each request from its number.
    pub workload: Workload,
    /// Says which request is due next, and when.
    pub pacer: Pacer,
    /// Wraps each prompt as the JSON body of the chosen endpoint.
    pub bodies: Bodies,
    /// Judges each prompt in the order of sending.
    pub oracle: Oracle,
    /// Prompt tokens of the server's own in each prompt: its chat template.
    pub overhead_tokens: u64,
    /// The server, path, time limit and clock that all requests share.
    pub session: Arc<Session>,
    /// How requests name the sessions that they belong to.
    pub names: SessionNames,
    /// Requests at most under way; the rest wait or are dropped.
    pub places: Option<Places>,
    /// Which requests only warm up.
    pub warmup: Warmup,
    /// Takes one record a request: it holds at most as many as there are requests.
    pub records: UnboundedSender<Record>,
    /// How far it is.
    pub control: Arc<Control>,
}

/// A bound on requests under way.
#[derive(Debug, Clone)]
pub struct Places {
    /// One permit a place; first come, first served.
    pub free: Arc<Semaphore>,
    /// Drop a request that finds none, instead of letting it wait.
    pub drop: bool,
}

/// The requests at the start that no figure counts.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Warmup {
    /// The first so many.
    pub requests: u64,
    /// Those due before this time.
    pub until: Duration,
}

/// What the sender's thread shares with the run.
#[derive(Debug, Default)]
pub struct Control {
    /// Requests sent so far.
    pub sent: AtomicU64,
    /// Set it and unpark the thread: nothing more is sent.
    pub stop: AtomicBool,
}

/// What the sender made and sent, known when its thread has ended.
#[derive(Debug, Clone, Copy)]
pub struct SentSums {
    /// Tokens and blocks of every request made, those that a stop kept back among them.
    pub sums: Sums,
    /// When the last was due, in nanoseconds.
    pub last_due_ns: u64,
    /// Sum, modulo 2^64, of the xxh3 of each body, seeded with the request's number: equal for equal bytes,
    /// in whatever order users and slots sent them.
    pub body_hash: u64,
}

/// A request ready to go.
struct Ready {
    request: PreparedRequest,
    place: Option<TurnPlace>,
    reusable: Reusable,
    wanted_prompt_tokens: u64,
}

/// Why the wait for a request's due time ended.
enum Woken {
    Due,
    /// Something else is due first.
    Changed,
    Stopped,
}

/// A request to be sent now.
struct Job {
    due: Due,
    warmup: bool,
    ready: Ready,
}

/// What all requests end in.
struct Exchanging {
    session: Arc<Session>,
    places: Option<Places>,
    records: UnboundedSender<Record>,
    bell: Option<Bell>,
}

impl Work for Exchanging {
    type Job = Job;

    async fn run(&self, job: Job, free: impl FnOnce() + Send) {
        let Job { due: Due { row, intended_ns }, warmup, ready } = job;
        let Ready { request, place, reusable, wanted_prompt_tokens } = ready;
        let (mut exchange, queued_ns) = placed(&self.session, request, self.places.as_ref()).await;
        let (at_ns, text) = (exchange.end_ns, std::mem::take(&mut exchange.text));
        let tokens = exchange.usage.as_ref().map_or(0, |usage| usage.completion_tokens);
        let reply = (exchange.outcome == Outcome::Ok).then_some(Reply { text, tokens });
        // The run drops its end of the channel only when it is over, and then no record is wanted.
        let _ = self.records.send(Record {
            row,
            intended_ns,
            queued_ns,
            warmup,
            place,
            wanted_prompt_tokens,
            reusable,
            exchange,
        });
        free();
        if let Some(bell) = &self.bell {
            bell.ring(Ending { row, at_ns, reply }).await;
        }
    }
}

/// Tells the sender's thread that a request has ended.
struct Bell {
    ended: EndSender<Ending>,
    thread: Thread,
    /// Somebody is about to ring.
    rung: Arc<AtomicBool>,
}

impl Bell {
    /// Tells of an ending. Requests that end together wake the thread once: to wake it takes as long as all
    /// else that ends a request.
    async fn ring(&self, ending: Ending) {
        // The thread ends before its requests do when it is told to stop.
        let _ = self.ended.send(ending);
        if !self.rung.swap(true, Ordering::AcqRel) {
            // Until all that is ready to go on has done so.
            tokio::task::yield_now().await;
            self.rung.swap(false, Ordering::AcqRel);
            self.thread.unpark();
        }
    }
}

/// How a request ended, for those that come after it.
struct Ending {
    row: usize,
    at_ns: u64,
    /// None if it failed.
    reply: Option<Reply>,
}

/// What was said so far, by session and agent.
type Histories = HashMap<(usize, u32), History>;

/// Requests made ahead of their time, by their numbers.
type Prepared = HashMap<usize, Ready>;

impl Sender {
    /// Sends each request when it is due, in this thread, until none is left or `control.stop` is set.
    pub fn run(mut self, runtime: &Handle) -> SentSums {
        let (ended, mut endings) = channel();
        let bell =
            (!self.pacer.is_fixed()).then(|| Bell { ended, thread: thread::current(), rung: Arc::default() });
        let exchanging = Exchanging {
            session: Arc::clone(&self.session),
            places: self.places.clone(),
            records: self.records.clone(),
            bell,
        };
        let lanes = Lanes::new(exchanging);
        let mut histories = Histories::new();
        // Only a loop that reacts to answers ever holds more than one.
        let mut ready = Prepared::new();
        let (mut adder, mut sent) =
            (Adder::default(), SentSums { sums: Sums::default(), last_due_ns: 0, body_hash: 0 });
        loop {
            let Some(due) = self.pacer.peek() else {
                if !self.pacer.is_waiting() || self.control.stop.load(Ordering::Acquire) {
                    break;
                }
                thread::park();
                self.hear(&mut endings, &mut histories, &mut ready);
                continue;
            };
            let next =
                ready.remove(&due.row).unwrap_or_else(|| self.make(due.row, &mut adder, &mut histories));
            match self.wait_until(due, &mut endings, &mut histories, &mut ready) {
                Woken::Stopped => break,
                Woken::Changed => {
                    ready.insert(due.row, next);
                }
                Woken::Due => {
                    self.pacer.take();
                    sent.body_hash =
                        sent.body_hash.wrapping_add(xxh3_64_with_seed(&next.request.body, due.row as u64));
                    sent.last_due_ns = sent.last_due_ns.max(due.intended_ns);
                    lanes.give(self.job(due, next), runtime);
                }
            }
        }
        SentSums { sums: adder.sums(), ..sent }
    }

    fn make(&mut self, row: usize, adder: &mut Adder, histories: &mut Histories) -> Ready {
        if !self.session.endpoint.generates() {
            return self.make_texts(row, adder);
        }
        let ask = self.workload.ask(row);
        adder.add(&ask);
        let place = self.pacer.place(row);
        let mut history = place
            .filter(|_| self.workload.carries_answers())
            .map(|place| histories.entry((place.session, place.agent)).or_default());
        let body = Bytes::from(self.bodies.make(&ask, history.as_deref_mut()));
        let blocks = history.map_or(ask.blocks, |history| history.blocks.clone());
        let tokens: u64 = blocks.iter().map(|block| u64::from(block.tokens)).sum();
        let wanted_prompt_tokens = tokens + self.overhead_tokens;
        let headers = place.map_or_else(Vec::new, |place| self.names.headers(&place));
        let request = PreparedRequest { body, headers };
        Ready { request, place, reusable: self.oracle.ask(blocks.into_iter()), wanted_prompt_tokens }
    }

    /// A request for embeddings: its texts are requests of the workload, and nothing is to be generated.
    fn make_texts(&mut self, row: usize, adder: &mut Adder) -> Ready {
        let texts = self.session.texts as usize;
        let of_text = |nth: usize| Ask { output_tokens: 0, ..self.workload.ask(row * texts + nth) };
        let asks: Vec<Ask> = (0..texts).map(of_text).collect();
        let request = PreparedRequest { body: self.bodies.make_texts(&asks).into(), headers: Vec::new() };
        let (mut reusable, mut wanted_prompt_tokens) = (Reusable::default(), 0);
        for ask in asks {
            adder.add(&ask);
            wanted_prompt_tokens += ask.prompt_tokens() + self.overhead_tokens;
            reusable += self.oracle.ask(ask.blocks.into_iter());
        }
        Ready { request, place: self.pacer.place(row), reusable, wanted_prompt_tokens }
    }

    fn job(&self, due: Due, ready: Ready) -> Job {
        let order = self.control.sent.fetch_add(1, Ordering::Relaxed);
        let intended_ns = due.intended_ns;
        let warmup = order < self.warmup.requests || u128::from(intended_ns) < self.warmup.until.as_nanos();
        Job { due, warmup, ready }
    }

    /// Sleeps until `due`, or until something else must be done.
    fn wait_until(
        &mut self,
        due: Due,
        endings: &mut Receiver<Ending>,
        histories: &mut Histories,
        ready: &mut Prepared,
    ) -> Woken {
        loop {
            if self.control.stop.load(Ordering::Acquire) {
                return Woken::Stopped;
            }
            self.hear(endings, histories, ready);
            if self.pacer.peek() != Some(due) {
                return Woken::Changed;
            }
            let left = Duration::from_nanos(due.intended_ns.saturating_sub(self.session.clock.now_ns()));
            let left = left.max(self.session.clock.until_zero());
            if left.is_zero() {
                return Woken::Due;
            }
            thread::park_timeout(left);
        }
    }

    fn hear(&mut self, endings: &mut Receiver<Ending>, histories: &mut Histories, ready: &mut Prepared) {
        for Ending { row, at_ns, reply } in endings.try_iter() {
            for dropped in self.pacer.ended(row, at_ns, reply.is_some()) {
                ready.remove(&dropped);
            }
            let Some(place) = self.pacer.place(row) else { continue };
            let agent = (place.session, place.agent);
            let goes_on = self.pacer.goes_on(row);
            match (reply, histories.get_mut(&agent)) {
                (Some(reply), Some(history)) if goes_on => {
                    history.add_reply(row, &reply);
                    self.oracle.hold(history.blocks.iter().copied());
                }
                (Some(_), _) => drop(histories.remove(&agent)),
                // Nobody in the session goes on.
                (None, _) => histories.retain(|(session, _), _| *session != place.session),
            }
        }
    }
}

/// The exchange, once there is a place for it; and the time that took, in nanoseconds.
async fn placed(session: &Session, request: PreparedRequest, places: Option<&Places>) -> (Exchange, u64) {
    let Some(Places { free, drop }) = places else {
        return (exchange(session, request).await, 0);
    };
    let (clock, mut stop) = (session.clock, session.stop.clone());
    let begun_ns = clock.now_ns();
    let place = if *drop {
        free.try_acquire().map_err(|_| {
            let message = "--max-concurrency requests were under way".into();
            Outcome::Failed(Failure { class: FailureClass::Dropped, message })
        })
    } else {
        tokio::select! {
            place = free.acquire() => place.map_err(|_| Outcome::Cancelled),
            _ = stop.wait_for(|stop| *stop) => Err(Outcome::Cancelled),
        }
    };
    let queued_ns = clock.now_ns() - begun_ns;
    match place {
        Ok(_held_to_the_end) => (exchange(session, request).await, queued_ns),
        Err(outcome) => (Exchange { outcome, ..Exchange::begun(clock.now_ns()) }, queued_ns),
    }
}
