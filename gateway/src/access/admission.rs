//! How many requests may be in the gateway: those whose bodies are on their way, and those that have come
//! whole, each with places of their own, so that bodies that never end keep no client out that has something
//! to ask. The permit lives in the answer's body, not only until its head: a stream holds its place for as
//! long as it streams. Over the limit a request is refused at once, never queued; so is one whose connection,
//! address or tenant has its share (`party.rs`).

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

use prometheus::IntGauge;

use crate::{
    access::tenants::Visit,
    client::Client,
    error::Error,
    party::{Party, SHARE, SHARE_OF_CONNECTION, Stage},
};

/// Counts the requests in the gateway at each stage, up to one limit for each; clones count together.
#[derive(Debug, Clone)]
pub struct Admission(Arc<Places>);

#[derive(Debug)]
struct Places {
    limit: AtomicUsize,
    taken: [AtomicUsize; 2],
    gauges: [IntGauge; 2],
}

impl Admission {
    /// At most `limit` requests at once at each stage, counted in `arriving` and `serving`.
    pub fn new(limit: usize, arriving: IntGauge, serving: IntGauge) -> Self {
        let (taken, gauges) = (Default::default(), [arriving, serving]);
        Self(Arc::new(Places { limit: limit.into(), taken, gauges }))
    }

    /// Another limit from now on; who is in stays.
    pub fn set_limit(&self, limit: usize) {
        self.0.limit.store(limit, Relaxed);
    }

    /// An error where a request that came whole now would be refused, whosever it is.
    pub fn may_come(&self) -> Result<(), Error> {
        let limit = self.0.limit.load(Relaxed);
        let full = self.0.taken[Stage::Serving as usize].load(Relaxed) >= limit;
        if full { Err(Error::Overloaded { limit }) } else { Ok(()) }
    }

    /// A permit for a request of this client and tenant, or the refusal.
    pub fn admit(
        &self,
        stage: Stage,
        client: &Arc<Client>,
        visit: Option<Arc<Visit>>,
    ) -> Result<Permit, Error> {
        let limit = self.0.limit.load(Relaxed);
        let taken = &self.0.taken[stage as usize];
        let taken = taken
            .fetch_update(Relaxed, Relaxed, |taken| (taken < limit).then_some(taken + 1))
            .map_err(|_| Error::Overloaded { limit })?;
        self.0.gauges[stage as usize].inc();
        let mut permit =
            Permit { places: Arc::clone(&self.0), stage, client: Arc::clone(client), visit, parties: 0 };
        permit.take_of_each(limit - taken)?;
        Ok(permit)
    }
}

/// Whose a request is, and what they may have of what is shared: its tenant's, who may come by the same proxy
/// as others, or where tenants are not known its address's; and its connection's.
pub(crate) fn parties<'a>(
    client: &'a Client,
    visit: Option<&'a Visit>,
) -> [(&'a Party, &'static str, usize); 2] {
    let whose = match visit {
        Some(visit) => (visit.tenant().party(), "tenant", SHARE),
        None => (client.address(), "address", SHARE),
    };
    [whose, (client.connection(), "connection", SHARE_OF_CONNECTION)]
}

/// One request's place; given back on drop.
#[derive(Debug)]
pub struct Permit {
    places: Arc<Places>,
    stage: Stage,
    client: Arc<Client>,
    visit: Option<Arc<Visit>>,
    /// Those of its parties that have it among theirs.
    parties: usize,
}

impl Permit {
    fn parties(&self) -> [(&Party, &'static str, usize); 2] {
        parties(&self.client, self.visit.as_deref())
    }

    fn take_of_each(&mut self, free: usize) -> Result<(), Error> {
        let mut taken = 0;
        let refused = self.parties().into_iter().find_map(|(party, of, share)| {
            let refused = !party.take(self.stage, free, share);
            taken += usize::from(!refused);
            refused.then(|| Error::ShareTaken { of, has: party.has(self.stage) })
        });
        self.parties = taken;
        refused.map_or(Ok(()), Err)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        for (party, ..) in self.parties().into_iter().take(self.parties) {
            party.give(self.stage);
        }
        self.client.rests();
        self.places.taken[self.stage as usize].fetch_sub(1, Relaxed);
        self.places.gauges[self.stage as usize].dec();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admission(limit: usize) -> (Admission, [IntGauge; 2]) {
        let gauges = ["arriving", "serving"].map(|name| IntGauge::new(name, name).unwrap());
        let [arriving, serving] = gauges.clone();
        (Admission::new(limit, arriving, serving), gauges)
    }

    impl Admission {
        fn serve(&self, client: &Arc<Client>) -> Result<Permit, Error> {
            self.admit(Stage::Serving, client, None)
        }
    }

    #[test]
    fn a_permit_is_held_until_dropped() {
        let (admission, gauges) = admission(1);
        let client = Client::alone();
        let held = admission.serve(&client).unwrap();
        assert_eq!(admission.serve(&client).unwrap_err(), Error::Overloaded { limit: 1 });
        assert_eq!(admission.may_come().unwrap_err(), Error::Overloaded { limit: 1 });
        // Who is on the way takes nothing of those who have come, and the other way round.
        let arriving = admission.admit(Stage::Arriving, &client, None).unwrap();
        assert_eq!(gauges.each_ref().map(IntGauge::get), [1, 1]);
        drop(held);
        assert!(admission.may_come().is_ok() && admission.serve(&client).is_ok());
        drop(arriving);
        assert_eq!(gauges.map(|gauge| gauge.get()), [0, 0]);
    }

    #[test]
    fn a_lower_limit_waits_for_those_above_it_to_leave() {
        let (admission, _) = admission(3);
        let client = Client::alone();
        let mut held: Vec<_> = (0..3).map(|_| admission.serve(&client).unwrap()).collect();
        admission.set_limit(2);
        held.pop();
        assert_eq!(admission.serve(&client).unwrap_err(), Error::Overloaded { limit: 2 });
        held.pop();
        assert!(admission.serve(&client).is_ok());
        admission.set_limit(4);
        held.extend((0..3).map(|_| admission.serve(&client).unwrap()));
        assert!(admission.serve(&client).is_err());
    }

    #[test]
    fn one_party_leaves_something_to_the_others() {
        let (admission, gauges) = admission(90);
        let address = Arc::default();
        let [greedy, same, other] =
            [Client::new(Arc::clone(&address)), Client::new(address), Client::alone()];
        let take = |client| (0..100).map_while(|_| admission.serve(client).ok()).collect::<Vec<_>>();
        let held = [take(&greedy), take(&same), take(&other)];
        assert_eq!(held.each_ref().map(Vec::len), [72, 8, 8]);
        let refused = [&greedy, &same, &other].map(|client| admission.serve(client).unwrap_err());
        let taken = |of, has| Error::ShareTaken { of, has };
        assert_eq!(refused, [taken("address", 80), taken("address", 80), taken("connection", 8)]);
        // A refusal leaves nothing behind.
        assert_eq!((gauges[1].get(), greedy.address().has(Stage::Serving)), (88, 80));
        drop(held);
        assert_eq!(gauges[1].get(), 0);
        for client in [greedy, same, other] {
            assert_eq!(client.address().has(Stage::Serving) + client.connection().has(Stage::Serving), 0);
        }
    }
}
