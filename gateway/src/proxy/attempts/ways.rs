//! An attempt at a worker that is for a part of requests: who else computes the prompt, before it or beside
//! it, and what becomes of the attempt where that one does not.

use std::time::Duration;

use http::StatusCode;
use keyway_core::index::WorkerId;

use super::{Attempts, Miss};
use crate::{
    error::Error,
    limits::PREFILL_WORDS_BYTES_MAX,
    proxy::{
        body::Response,
        both_legs::{BothLegs, Failing, Fallen, Partner},
        kv_transfer::sglang::{self, NotComputed},
        prefill_leg::{Handed, PrefillLeg},
        resume::Sent,
    },
    routing::{Choice, Ticket, refusal::Charge},
    usage::hide::UsageFilter,
};

/// How a request goes to a worker.
pub(super) enum Way {
    /// To it alone.
    Alone,
    /// Once another one has computed the prompt.
    After(Handed),
    /// While another one computes it. In a box: few requests go so, and each would have room for it.
    Beside(Box<(BothLegs, Partner)>),
}

impl Attempts<'_> {
    /// How a request goes to a worker for decode.
    pub(super) async fn way_of(&mut self, mut choice: Choice) -> Result<(Choice, Way), Miss> {
        if choice.worker.needs_partner() && self.asked.info.work.is_inference() {
            let legs = BothLegs::of(self.dispatch, self.asked);
            match beside(&legs, &mut choice, (&self.tried, self.dispatch.room_wait)).await {
                Ok(Some(partner)) => return Ok((choice, Way::Beside(Box::new((legs, partner))))),
                Ok(None) => {}
                Err(error) => return Err(self.no_partner(choice, error)),
            }
        }
        let leg = PrefillLeg { dispatch: self.dispatch, asked: self.asked };
        // Such a worker has been dealt with.
        let splits = choice.splits && !choice.worker.needs_partner();
        let handed = if splits { self.after_first_leg(leg, &mut choice).await? } else { None };
        Ok((choice, handed.map_or(Way::Alone, Way::After)))
    }

    /// The chosen worker can compute no prompt, and none is there that could for it. What others have said
    /// before is of more use to the client.
    fn no_partner(&mut self, mut choice: Choice, error: Error) -> Miss {
        if self.tried.is_empty() {
            self.lost = error;
        }
        self.demand = choice.ticket.give_back();
        Miss { why: "no_prefill", may_repeat: false, in_doubt: false, is_local: true }
    }

    /// The worker that was to compute the prompt has not: what it says is taken for the request's own. The
    /// one that was to answer has been left.
    pub(super) fn partner_fell(
        &mut self,
        fallen: Fallen,
        (mut ticket, sent): (Box<Ticket>, &Sent),
    ) -> Result<Response, Miss> {
        let Fallen { mut choice, how } = fallen;
        if let Some(demand) = ticket.give_back() {
            choice.ticket.carry(demand);
        }
        drop(ticket);
        let charge = how.charge().unwrap_or(Charge::Failed);
        let NotComputed { status, said } = match how {
            Failing::Answered(answer) => {
                return self.take(choice, Ok(answer), (UsageFilter::pass_all(), sent));
            }
            Failing::Broke(error) => return Err(self.unanswered(&choice.worker, choice.ticket, error)),
            Failing::Said(said) => said,
        };
        let Choice { worker, mut ticket, .. } = choice;
        let is_request_s = status.is_some_and(|status| status < 500);
        let said = sglang::shortened(&said, PREFILL_WORDS_BYTES_MAX).into_owned();
        self.accuse(&mut ticket, &worker, charge, &said);
        self.lost = Error::PrefillFailed { said, is_request_s };
        self.demand = ticket.give_back();
        let status = status.and_then(|status| StatusCode::from_u16(status).ok());
        Err(self.missed(&worker, charge, status.unwrap_or(StatusCode::BAD_GATEWAY)))
    }

    /// Where the prompt's KV is once another worker has computed it; a miss where the request has broken so
    /// many workers on the way that no further one is asked.
    async fn after_first_leg(
        &mut self,
        leg: PrefillLeg<'_>,
        choice: &mut Choice,
    ) -> Result<Option<Handed>, Miss> {
        let ran = Box::pin(leg.run(choice)).await;
        self.suspect = ran.suspect.or(self.suspect.take());
        if ran.may_go_on {
            return Ok(ran.handed);
        }
        (self.lost, self.demand) = (Error::WorkerLost, choice.ticket.give_back());
        Err(Miss { why: Charge::Lost.as_str(), may_repeat: false, in_doubt: false, is_local: false })
    }
}

/// Who computes the prompt for a worker that can compute none; `None` where the choice is another one now,
/// which can.
async fn beside(
    legs: &BothLegs,
    choice: &mut Choice,
    (tried, wait): (&[WorkerId], Duration),
) -> Result<Option<Partner>, Error> {
    let read = legs.read()?;
    let Some(rooms) = legs.rooms(choice, (read, tried), wait).await? else { return Ok(None) };
    legs.partner((read, rooms), tried).await.map(Some)
}
