//! A request comes into the room, and leaves it with a worker or with its client.

use std::sync::{Arc, atomic::Ordering};

use keyway_core::{
    index::WorkerId,
    waiting_room::{Place, Share},
};
use tokio::sync::oneshot;

use super::{Decided, Decisions, Held, hand_out, pauses};
use crate::{
    error::Error,
    prompt::request::RequestInfo,
    routing::{Choice, Router, setting::Leg},
};

/// What becomes of a request that comes.
enum Entered<'a> {
    Decided(Decided),
    Waits(oneshot::Receiver<Decided>, LeaveOnDrop<'a>),
}

/// Takes a request out of the room when its client leaves.
struct LeaveOnDrop<'a> {
    router: &'a Arc<Router>,
    place: Place,
}

impl Drop for LeaveOnDrop<'_> {
    fn drop(&mut self) {
        let held = self.router.holding.room.lock().leave(self.place);
        if let Some(held) = held {
            self.router.holding.turn_leaves(&held);
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
        self.choose_for(request, tried, Leg::Answer).await
    }

    /// [`Router::choose`], of a worker that is to compute the prompt itself.
    pub async fn choose_whole(
        self: &Arc<Self>,
        request: &RequestInfo,
        tried: &[WorkerId],
    ) -> Result<Choice, Error> {
        self.choose_for(request, tried, Leg::Whole).await
    }

    /// Waits for a worker that computes a request's prompt for another one, which answers.
    pub async fn choose_prefill(
        self: &Arc<Self>,
        request: &RequestInfo,
        tried: &[WorkerId],
    ) -> Result<Choice, Error> {
        self.choose_for(request, tried, Leg::Prefill).await
    }

    async fn choose_for(
        self: &Arc<Self>,
        request: &RequestInfo,
        tried: &[WorkerId],
        leg: Leg,
    ) -> Result<Choice, Error> {
        match self.enter(request, tried, leg)? {
            Entered::Decided(decided) => decided,
            Entered::Waits(begun, _leave) => begun.await.unwrap_or(Err(Error::NoWorker)),
        }
    }

    /// Enters the room, and begins what can begin now: this request, mostly.
    fn enter(
        self: &Arc<Self>,
        request: &RequestInfo,
        tried: &[WorkerId],
        leg: Leg,
    ) -> Result<Entered<'_>, Error> {
        let known_fleet = self.holding.fleet_changes.load(Ordering::Acquire);
        let setting = self.setting_for(request, tried, leg)?;
        let prefill = if leg == Leg::Answer { self.prefill_setting(request) } else { None };
        let share = Share { tokens: setting.prompt_tokens as f64, ..request.share };
        let mut room = self.holding.room.lock();
        let entered = self.now();
        let (index_owner, streams) = (request.index_owner, request.stream);
        let model = self.decision_log.as_ref().and_then(|_| request.model.clone());
        // A session's KV is where its turns are answered.
        let turn = pauses::turn_of(request).filter(|_| leg != Leg::Prefill);
        let opens = request.talk.opening.filter(|_| turn.is_none() && leg != Leg::Prefill);
        let mut held = Box::new(Held {
            setting,
            prefill,
            moves_kv: request.moves_kv,
            index_owner,
            streams,
            turn,
            opens,
            model,
            tried: Vec::new(),
            entered,
            begin: None,
        });
        self.index.finish_lingering(entered);
        room.admit(entered, &share).map_err(|retry_after| Error::TooBusy { retry_after })?;
        if self.tell_of_the_fleet(&mut room) != known_fleet {
            held.setting.look_again(&self.fleet, request.model.as_deref(), tried);
        }
        let mut counter = self.counter(&room, entered);
        // The candidates' loads are read while memory answers.
        held.setting.views.iter().for_each(|view| counter.index.approach(&view.chain));
        counter.note_new(&mut held);
        let own_ms = if room.is_empty() { None } else { counter.own_ms(&held) };
        let place = room.enter_as(entered, own_ms, share, held);
        let (Decisions { begun: others, own }, mut room) = counter.release(room);
        drop(counter);
        let mut waits = None;
        if let Some(held) = room.request_mut(place) {
            let (begin, begun) = oneshot::channel();
            held.begin = Some(begin);
            (held.model, held.tried) = (request.model.clone(), tried.to_vec());
            waits = Some(begun);
        }
        drop(room);
        hand_out(others);
        Ok(match waits {
            Some(begun) => Entered::Waits(begun, LeaveOnDrop { router: self, place }),
            None => Entered::Decided(own.unwrap_or(Err(Error::NoWorker))),
        })
    }
}
