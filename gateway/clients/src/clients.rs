//! The connections of a listener: how many there are, and of each address; which have been idle for longest,
//! should another client want to come in; who is told to end.

use std::{
    cmp::Reverse,
    collections::{HashMap, hash_map::Entry},
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    sync::Notify,
    time::{self, Instant},
};

use crate::{
    client::{Client, Leave, subscriber},
    limits::{ROOM_LOOK, ROOM_SHARE},
    party::{Party, SHARE, Stage},
};

/// All that are open.
#[derive(Debug, Default)]
pub struct Clients {
    open: Mutex<Open>,
    /// A place was given back, or there are more.
    pub freed: Notify,
}

#[derive(Debug, Default)]
struct Open {
    next: u64,
    all: HashMap<u64, Arc<Client>>,
    addresses: HashMap<IpAddr, Address>,
}

#[derive(Debug, Default)]
struct Address {
    party: Arc<Party>,
    connections: usize,
    /// Of these, those that were told to end for others of this address.
    leaving: usize,
}

/// A connection's place; given back on drop.
#[derive(Debug)]
pub struct Place {
    clients: Arc<Clients>,
    number: u64,
    address: IpAddr,
    /// The connection that holds the place: what is served on it, and whether it is to end.
    pub client: Arc<Client>,
}

impl Clients {
    /// A place for a connection from this address, where there are less than so many. An address that has its
    /// share gives one of its own for it that has been idle for long, if there is any: what it asks for is
    /// bounded by itself.
    pub fn place(self: &Arc<Self>, from: IpAddr, bound: usize) -> Option<Place> {
        let address = subscriber(from);
        let mut open = self.open.lock();
        let free = bound.saturating_sub(open.all.len());
        if free == 0 {
            return None;
        }
        open.keep_to_share(address, free);
        Some(self.take(&mut open, address))
    }

    /// A place for a connection from this address, once there is one among as many as `bound` says.
    pub async fn wait_for_place(self: &Arc<Self>, from: IpAddr, bound: impl Fn() -> usize) -> Place {
        loop {
            // A place that is given back in between leaves a permit.
            let freed = self.freed.notified();
            if let Some(place) = self.place(from, bound()) {
                return place;
            }
            self.make_room();
            // Others may come to be idle.
            let _ = time::timeout(ROOM_LOOK, freed).await;
        }
    }

    /// A place, whatever there is.
    pub fn any_place(self: &Arc<Self>, from: IpAddr) -> Place {
        self.take(&mut self.open.lock(), subscriber(from))
    }

    fn take(self: &Arc<Self>, open: &mut Open, address: IpAddr) -> Place {
        let of_address = open.addresses.entry(address).or_default();
        of_address.connections += 1;
        let client = Client::new(Arc::clone(&of_address.party));
        open.next += 1;
        open.all.insert(open.next, Arc::clone(&client));
        Place { clients: Arc::clone(self), number: open.next, address, client }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.open.lock().all.len()
    }

    /// Tells all to end once they are served.
    pub fn drain(&self) {
        self.open.lock().all.values().for_each(|client| client.leave(Leave::Drained));
    }

    /// Tells all to end, served or not.
    pub fn cut(&self) {
        self.open.lock().all.values().for_each(|client| client.leave(Leave::Cut));
    }

    /// Tells those to end that have asked for nothing for so long.
    pub fn end_idle(&self, limit: Duration) {
        let now = Instant::now();
        let open = self.open.lock();
        let arrives = |client: &Client| client.connection().has(Stage::Arriving) > 0;
        let idle =
            |client: &&Arc<Client>| !client.leaves() && client.idle(now) >= Some(limit) && !arrives(client);
        open.all.values().filter(idle).for_each(|client| client.leave(Leave::Idle));
    }

    /// Tells some to end, those first that have been idle for longest: nothing of what they have asked is
    /// being answered. Where some of those before are still about to, they are enough.
    pub fn make_room(&self) {
        let open = self.open.lock();
        if !open.all.values().any(|client| client.leaves() && !client.is_served()) {
            replace(open.all.values());
        }
    }
}

impl Open {
    fn keep_to_share(&mut self, address: IpAddr, free: usize) {
        let Some(address) = self.addresses.get_mut(&address) else { return };
        let has = address.connections.saturating_sub(address.leaving);
        if has >= free.saturating_mul(SHARE) {
            let own = self.all.values().filter(|client| client.is_from(&address.party) && !client.leaves());
            address.leaving += replace(own);
        }
    }
}

/// Tells some of these to end that have been idle for longest; how many.
fn replace<'a>(all: impl Iterator<Item = &'a Arc<Client>>) -> usize {
    let now = Instant::now();
    let mut idle: Vec<_> = all.filter_map(|client| Some((client.idle(now)?, client))).collect();
    let wanted = (idle.len() / ROOM_SHARE).max(1).min(idle.len());
    if wanted > 0 {
        idle.select_nth_unstable_by_key(wanted - 1, |(idle, _)| Reverse(*idle));
    }
    idle.iter().take(wanted).for_each(|(_, client)| client.leave(Leave::Replaced));
    wanted
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut open = self.clients.open.lock();
        open.all.remove(&self.number);
        if let Entry::Occupied(mut address) = open.addresses.entry(self.address) {
            address.get_mut().connections -= 1;
            if self.client.leaves() {
                address.get_mut().leaving = address.get().leaving.saturating_sub(1);
            }
            if address.get().connections == 0 {
                address.remove();
            }
        }
        drop(open);
        self.clients.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    #[tokio::test(start_paused = true)]
    async fn who_has_been_idle_for_longest_makes_room() {
        let clients = Arc::new(Clients::default());
        let mut places = Vec::new();
        for last in 0..4 {
            places.push(clients.place(ip(last), 4).unwrap());
            time::sleep(Duration::from_secs(1)).await;
        }
        assert!(clients.place(ip(9), 4).is_none());
        // The first is served, the second has just asked for something that has not come whole.
        assert!(places[0].client.connection().take(Stage::Serving, 9, 1));
        assert!(places[1].client.connection().take(Stage::Arriving, 9, 1));
        places[1].client.asks(Instant::now());
        clients.make_room();
        let leave = |places: &[Place]| places.iter().map(|place| place.client.leaves()).collect::<Vec<_>>();
        assert_eq!(leave(&places), [false, false, true, false]);
        clients.make_room();
        assert_eq!(leave(&places), [false, false, true, false], "it has not gone yet");
        drop(places.remove(2));
        time::sleep(Duration::from_secs(1)).await;
        let _ninth = clients.place(ip(9), 4).unwrap();
        time::sleep(Duration::from_secs(1)).await;
        (0..3).for_each(|_| clients.make_room());
        assert_eq!(leave(&places), [false, false, true]);
        drop(places.pop());
        clients.make_room();
        assert_eq!(leave(&places), [false, true], "what never comes whole is no reason to stay");
        assert_eq!(clients.count(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn only_who_asks_for_nothing_is_idle() {
        let clients = Arc::new(Clients::default());
        let places: Vec<Place> = (0..3).map(|last| clients.any_place(ip(last))).collect();
        assert!(places[0].client.connection().take(Stage::Serving, 9, 1));
        assert!(places[1].client.connection().take(Stage::Arriving, 9, 1));
        time::sleep(Duration::from_secs(9)).await;
        clients.end_idle(Duration::from_secs(10));
        assert!(places.iter().all(|place| !place.client.leaves()));
        time::sleep(Duration::from_secs(1)).await;
        clients.end_idle(Duration::from_secs(10));
        let leave: Vec<bool> = places.iter().map(|place| place.client.leaves()).collect();
        assert_eq!(leave, [false, false, true]);
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_that_has_its_share_gives_its_own_for_more() {
        let clients = Arc::new(Clients::default());
        let mut greedy: Vec<Place> = (0..80).map(|_| clients.place(ip(1), 90).unwrap()).collect();
        let leaving = |greedy: &[Place]| greedy.iter().filter(|place| place.client.leaves()).count();
        assert_eq!(leaving(&greedy), 0);
        for more in 1..=5 {
            greedy.push(clients.place(ip(1), 90).unwrap());
            assert_eq!(leaving(&greedy), more);
        }
        greedy.retain(|place| !place.client.leaves());
        // Where all are served there is none to give.
        assert!(greedy.iter().all(|place| place.client.connection().take(Stage::Serving, 9, 1)));
        greedy.push(clients.place(ip(1), 90).unwrap());
        assert_eq!(leaving(&greedy), 0);
        let other = clients.place(ip(2), 90).unwrap();
        assert_eq!((clients.count(), clients.open.lock().addresses.len()), (82, 2));
        drop((greedy, other));
        assert_eq!((clients.count(), clients.open.lock().addresses.len()), (0, 0));
    }
}
