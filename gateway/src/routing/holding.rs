//! Requests that wait until a worker can begin on them: [`keyway_core::waiting_room`] with the gateway's workers behind
//! it. Whoever comes enters the room and mostly leaves it at once; the others are begun when a first token comes, a
//! request ends, a worker comes back, or the room's own clock says so.
//!
//! Locks are taken in the order room, index. What is begun is handed out after both are open again: a client that is
//! gone drops its choice, whose ticket asks the room for the next one.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use keyway_core::{
    consider,
    index::{PrefixIndex, WorkerId},
    pick::{Candidate, Pick, Turn},
    quote,
    waiting_room::{Ahead, Desk, Place, Quote, WaitingRoom},
};
use parking_lot::MutexGuard;
use tokio::sync::oneshot;

use super::{Choice, Router, Setting, Ticket};
use crate::{clock, error::Error, request::RequestInfo};

/// A request that waits.
#[derive(Debug)]
pub(super) struct Held {
    setting: Setting,
    streams: bool,
    model: Option<String>,
    entered: Duration,
    begin: oneshot::Sender<Choice>,
}

/// Where a request would begin: candidates as they were weighed, the pick among them, and whose they are.
struct Plan {
    candidates: Vec<Candidate>,
    pick: Pick,
    /// The place of each candidate among the setting's workers.
    worker_of: Vec<usize>,
}

/// The room's desk: quotes from the index, begins with a ticket.
struct Counter<'a> {
    router: &'a Arc<Router>,
    index: MutexGuard<'a, PrefixIndex>,
    now: Duration,
    begun: Vec<(oneshot::Sender<Choice>, Choice)>,
}

/// Takes a request out of the room when its client leaves.
struct LeaveOnDrop<'a> {
    router: &'a Arc<Router>,
    place: Place,
}

impl Drop for LeaveOnDrop<'_> {
    fn drop(&mut self) {
        let held = self.router.room.lock().leave(self.place);
        if held.is_some() {
            self.router.pump();
        }
    }
}

impl Router {
    /// Waits for a worker that was not `tried` yet, and records the placement there.
    pub async fn choose(
        self: &Arc<Self>,
        request: &RequestInfo,
        tried: &[WorkerId],
    ) -> Result<Choice, Error> {
        let (begun, _leave) = self.enter(request, tried)?;
        begun.await.map_err(|_| Error::NoWorker)
    }

    /// Enters the room, and begins what can begin now: this request, mostly.
    fn enter(
        self: &Arc<Self>,
        request: &RequestInfo,
        tried: &[WorkerId],
    ) -> Result<(oneshot::Receiver<Choice>, LeaveOnDrop<'_>), Error> {
        let setting = self.setting(request, tried)?;
        let (begin, begun) = oneshot::channel();
        let entered = self.now();
        let held = Held { setting, streams: request.stream, model: request.model.clone(), entered, begin };
        self.finish_lingering();
        let mut room = self.room.lock();
        let own_ms = if room.is_empty() { 0.0 } else { self.counter().own_ms(&held) };
        let place = room.enter(entered, own_ms, held);
        hand_out(self.release(room));
        Ok((begun, LeaveOnDrop { router: self, place }))
    }

    /// Begins whatever can begin now.
    pub(super) fn pump(self: &Arc<Self>) {
        // Almost always nobody waits.
        if self.holding.load(Ordering::Acquire) > 0 {
            hand_out(self.release(self.room.lock()));
        }
    }

    fn counter(self: &Arc<Self>) -> Counter<'_> {
        Counter { router: self, index: self.index.lock(), now: self.now(), begun: Vec::new() }
    }

    fn release(
        self: &Arc<Self>,
        mut room: MutexGuard<'_, WaitingRoom<Held>>,
    ) -> Vec<(oneshot::Sender<Choice>, Choice)> {
        let mut counter = self.counter();
        room.release(counter.now, &mut counter);
        let (now, begun) = (counter.now, std::mem::take(&mut counter.begun));
        drop(counter);
        self.holding.store(room.len(), Ordering::Release);
        self.metrics.holding.set(room.len() as i64);
        self.set_alarm(now, room.wake());
        begun
    }

    /// Looks at the room again at `wake`, unless an alarm is set for an earlier time.
    fn set_alarm(self: &Arc<Self>, now: Duration, wake: Option<Duration>) {
        let Some(wake) = wake else { return };
        let mut alarm = self.alarm.lock();
        // A runtime that is gone has nobody waiting for an answer.
        let (true, Ok(runtime)) = (alarm.is_none_or(|at| wake < at), tokio::runtime::Handle::try_current())
        else {
            return;
        };
        *alarm = Some(wake);
        let router = Arc::downgrade(self);
        runtime.spawn(async move {
            clock::sleep(wake.saturating_sub(now)).await;
            if let Some(router) = router.upgrade() {
                let mut alarm = router.alarm.lock();
                if *alarm == Some(wake) {
                    *alarm = None;
                }
                drop(alarm);
                router.pump();
            }
        });
    }
}

fn hand_out(begun: Vec<(oneshot::Sender<Choice>, Choice)>) {
    for (begin, choice) in begun {
        // Nobody there: the client left, and the choice is undone as it is dropped.
        drop(begin.send(choice));
    }
}

impl Counter<'_> {
    fn own_ms(&mut self, held: &Held) -> f64 {
        self.quote(held, &Ahead::default()).map_or(0.0, |(quote, _)| quote.own_ms)
    }

    fn plan(&self, held: &Held, ahead: &Ahead) -> Option<Plan> {
        let setting = &held.setting;
        let turn =
            Turn { counter: self.router.turn.fetch_add(1, Ordering::Relaxed), random: fastrand::u64(..) };
        let views = setting.request_views();
        let all = setting.candidates(self.now);
        // Who went down while it waited is no candidate any more.
        let worker_of: Vec<usize> = (0..all.len()).filter(|&i| setting.workers[i].routable()).collect();
        let mut candidates: Vec<Candidate> = worker_of.iter().map(|&i| all[i]).collect();
        let view_of: Vec<usize> = worker_of.iter().map(|&i| setting.view_of[i]).collect();
        let seen = (&views[..], &view_of[..]);
        let pick = consider(self.router.policy, seen, &mut candidates, ahead, &turn, &self.index)?;
        Some(Plan { candidates, pick, worker_of })
    }
}

impl Desk<Held> for Counter<'_> {
    type Plan = Plan;

    fn quote(&mut self, held: &Held, ahead: &Ahead) -> Option<(Quote, Plan)> {
        let plan = self.plan(held, ahead)?;
        let chosen = &plan.candidates[plan.pick.index];
        let (router, prompt_tokens) = (self.router, held.setting.prompt_tokens);
        let quote = quote(router.policy, router.holds, prompt_tokens, chosen, &plan.pick);
        Some((quote, plan))
    }

    fn begin(&mut self, held: Held, plan: Option<Plan>) {
        // Without a plan nobody is ready; dropping its end of the channel says so.
        let Some(Plan { candidates, pick, worker_of }) = plan else { return };
        let (router, setting) = (self.router, &held.setting);
        let chosen = worker_of[pick.index];
        let worker = Arc::clone(&setting.workers[chosen]);
        let view = &setting.views[setting.view_of[chosen]];
        let placement = self.index.place(candidates[pick.index].worker, &view.chain);
        // The load counts before the locks open, so that two requests of a burst never see the same queue.
        let ticket = Ticket::start(
            Arc::clone(router),
            Arc::clone(&worker),
            placement,
            pick.uncached_tokens,
            held.streams,
        );
        if let Some(log) = &router.decision_log {
            let workers = worker_of.iter().map(|&i| &setting.workers[i]);
            log.choice(held.model.as_deref(), setting, view, workers.zip(&candidates), &pick, &worker.name);
        }
        let waited = self.now.saturating_sub(held.entered);
        router.metrics.hold.observe(waited.as_secs_f64());
        router.metrics.picks.with_label_values(&[worker.name.as_str(), pick.reason.as_str()]).inc();
        self.begun.push((held.begin, Choice { worker, pick, ticket }));
    }
}
