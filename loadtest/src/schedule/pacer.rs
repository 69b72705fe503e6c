//! Which request is due next. Open loop: whatever the schedule says. Closed loop: one as soon as one ends.
//! Users: each at its own even pace, never two at once, with single requests or with the turns of
//! conversations. Sessions: the next turn once the answers before it have ended and its person has thought,
//! or its tools have run. Takes times as arguments and sleeps nowhere.

mod sessions;

use std::{cmp::Reverse, collections::BinaryHeap, collections::VecDeque};

pub use self::sessions::{Sessions, Starts};
use crate::{
    random::{Purpose, Rng},
    schedule::{
        Due,
        flow::{Flow, TurnPlace},
    },
    workload::conversation::{self, Conversations},
};

/// Which requests a closed loop or users send.
#[derive(Debug, Clone, Copy)]
pub struct Extent {
    /// The row of the first request; the others follow in order.
    pub first: usize,
    /// Rows to send, the first among them.
    pub rows: usize,
    /// Nothing is due at or after this time.
    pub until_ns: u64,
}

/// Hands out requests one by one.
#[derive(Debug)]
pub enum Pacer {
    /// A schedule that nothing moves.
    Open(VecDeque<Due>),
    /// A number of requests under way at any time.
    Closed(Closed),
    /// Users who each ask at an even pace.
    Users(Users),
    /// Sessions whose turns follow answers: conversations, or a trace's agents.
    Sessions(Sessions),
    /// Users who each hold one conversation after the other, at an even pace.
    Talkers(Talkers),
}

/// See [`Pacer::Talkers`]. User u's k-th conversation has the number k·users + u; request numbers are those
/// of [`conversation::row`].
#[derive(Debug)]
pub struct Talkers {
    flow: Flow,
    phases_ns: Vec<u64>,
    gap_ns: u64,
    /// Requests that each user has been through.
    asked: Vec<u64>,
    /// Users with no request under way: when their next is due, and its row.
    idle: BinaryHeap<Reverse<(u64, usize)>>,
    /// Conversations that all users together hold, unless `until_ns` comes first.
    count: usize,
    until_ns: u64,
    under_way: usize,
}

/// A number of slots, each of which sends the next row once it is free. See [`Pacer::Closed`].
#[derive(Debug)]
pub struct Closed {
    /// When each free slot became free.
    free: BinaryHeap<Reverse<u64>>,
    /// Requests taken so far.
    next: usize,
    extent: Extent,
    under_way: usize,
}

/// See [`Pacer::Users`]. User u's k-th request has row first + k·users + u.
#[derive(Debug)]
pub struct Users {
    phases_ns: Vec<u64>,
    gap_ns: u64,
    /// Users with no request under way: when their next is due, and its row.
    idle: BinaryHeap<Reverse<(u64, usize)>>,
    extent: Extent,
    under_way: usize,
}

// === impl Pacer ===

impl Pacer {
    /// A closed loop of `slots`.
    pub fn closed(slots: usize, extent: Extent) -> Self {
        Self::Closed(Closed { free: (0..slots).map(|_| Reverse(0)).collect(), next: 0, extent, under_way: 0 })
    }

    /// `users` who each ask every `gap_ns`. Their first requests spread over one gap, in places the seed
    /// chooses.
    pub fn users(users: usize, gap_ns: u64, seed: u64, extent: Extent) -> Self {
        let phases_ns = phases_ns(users, gap_ns, seed);
        let idle = phases_ns.iter().enumerate().map(|(u, &phase)| Reverse((phase, u))).collect();
        Self::Users(Users { phases_ns, gap_ns, idle, extent, under_way: 0 })
    }

    /// `users` who each take a turn every `gap_ns`, in `count` conversations of all of them together. Nothing
    /// is due at or after `until_ns`.
    pub fn talkers(
        conversations: Conversations,
        users: usize,
        gap_ns: u64,
        count: usize,
        until_ns: u64,
    ) -> Self {
        let phases_ns = phases_ns(users, gap_ns, conversations.seed);
        let first = |(u, &phase): (usize, &u64)| Reverse((phase, conversation::row(u, 0)));
        let idle = phases_ns.iter().enumerate().take(count).map(first).collect();
        let asked = vec![0; users];
        Self::Talkers(Talkers {
            flow: Flow::Conversations(conversations),
            phases_ns,
            gap_ns,
            asked,
            idle,
            count,
            until_ns,
            under_way: 0,
        })
    }

    /// `count` sessions of `flow`, which begin as `starts` says. Nothing is due at or after `until_ns`.
    pub fn sessions(flow: Flow, starts: Starts, count: usize, until_ns: u64) -> Self {
        Self::Sessions(Sessions::new(flow, starts, count, until_ns))
    }

    /// The next request. It may change when one ends, unless [`Self::is_fixed`].
    pub fn peek(&self) -> Option<Due> {
        let (due, extent) = match self {
            Self::Open(schedule) => return schedule.front().copied(),
            Self::Sessions(sessions) => return sessions.peek().map(|(due, _)| due),
            Self::Talkers(talkers) => {
                let &Reverse((intended_ns, row)) = talkers.idle.peek()?;
                return (intended_ns < talkers.until_ns).then_some(Due { intended_ns, row });
            }
            Self::Closed(closed) => {
                let &Reverse(intended_ns) = closed.free.peek()?;
                (Due { intended_ns, row: closed.next }, closed.extent)
            }
            Self::Users(users) => {
                let &Reverse((intended_ns, row)) = users.idle.peek()?;
                (Due { intended_ns, row }, users.extent)
            }
        };
        let is_sent = due.row < extent.rows && due.intended_ns < extent.until_ns;
        is_sent.then(|| Due { row: extent.first + due.row, ..due })
    }

    /// Takes the request that `peek` shows: it is on its way.
    pub fn take(&mut self) {
        match self {
            Self::Open(schedule) => {
                schedule.pop_front();
            }
            Self::Closed(closed) => {
                closed.free.pop();
                closed.next += 1;
                closed.under_way += 1;
            }
            Self::Users(users) => {
                users.idle.pop();
                users.under_way += 1;
            }
            Self::Sessions(sessions) => sessions.take(),
            Self::Talkers(talkers) => {
                talkers.idle.pop();
                talkers.under_way += 1;
            }
        }
    }

    /// Says that the request of `row` has ended. A session goes on only if it ended well. Gives the requests
    /// that were due and now are not.
    pub fn ended(&mut self, row: usize, at_ns: u64, well: bool) -> Vec<usize> {
        match self {
            Self::Open(_) => {}
            Self::Closed(closed) => {
                closed.under_way -= 1;
                closed.free.push(Reverse(at_ns));
            }
            Self::Users(users) => {
                users.under_way -= 1;
                let (row, count) = (row - users.extent.first, users.phases_ns.len());
                let (next, user) = (row / count + 1, row % count);
                // The pace is the user's own: a late answer makes the next request late, it does not move it.
                let due_ns = users.phases_ns[user] + users.gap_ns * next as u64;
                if row + count < users.extent.rows {
                    users.idle.push(Reverse((due_ns, row + count)));
                }
            }
            Self::Sessions(sessions) => return sessions.ended(row, at_ns, well),
            Self::Talkers(talkers) => talkers.ended(row, well),
        }
        Vec::new()
    }

    /// Whether the agent of request `row` has a turn after it.
    pub fn goes_on(&self, row: usize) -> bool {
        self.flow().is_some_and(|flow| flow.goes_on(row))
    }

    /// Where request `row` belongs, if it is a turn of a session.
    pub fn place(&self, row: usize) -> Option<TurnPlace> {
        self.flow().map(|flow| flow.place(row))
    }

    fn flow(&self) -> Option<&Flow> {
        match self {
            Self::Sessions(sessions) => Some(&sessions.flow),
            Self::Talkers(talkers) => Some(&talkers.flow),
            Self::Open(_) | Self::Closed(_) | Self::Users(_) => None,
        }
    }

    /// Whether nothing that ends can change what is due.
    pub fn is_fixed(&self) -> bool {
        matches!(self, Self::Open(_))
    }

    /// Whether more may become due once a request under way has ended.
    pub fn is_waiting(&self) -> bool {
        match self {
            Self::Open(_) => false,
            Self::Closed(closed) => closed.under_way > 0 && closed.next < closed.extent.rows,
            Self::Users(users) => users.under_way > 0,
            Self::Sessions(sessions) => sessions.under_way > 0,
            Self::Talkers(talkers) => talkers.under_way > 0,
        }
    }
}

/// Where in the gap each user's first request lies: evenly, at places the seed chooses.
fn phases_ns(users: usize, gap_ns: u64, seed: u64) -> Vec<u64> {
    let place = |u: usize| (u as f64 + Rng::at(seed, Purpose::Phase, u as u64).unit()) / users as f64;
    (0..users).map(|u| (place(u) * gap_ns as f64) as u64).collect()
}

// === impl Talkers ===

impl Talkers {
    fn ended(&mut self, row: usize, well: bool) {
        self.under_way -= 1;
        let session = conversation::split(row).0;
        let (user, users) = (session % self.phases_ns.len(), self.phases_ns.len());
        self.asked[user] += 1;
        let goes_on = well && self.flow.goes_on(row);
        let next = if goes_on { row + 1 } else { conversation::row(session + users, 0) };
        if goes_on || session + users < self.count {
            // As with single requests, a late answer makes the next turn late and moves nothing.
            self.idle.push(Reverse((self.phases_ns[user] + self.gap_ns * self.asked[user], next)));
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Runs `pacer` in virtual time against a server in which every request takes `took(row)` and the rows
    /// `fails` fail; gives each row's intended and real start.
    pub(crate) fn simulate(
        mut pacer: Pacer,
        took: impl Fn(usize) -> u64,
        fails: &[usize],
    ) -> Vec<(usize, u64, u64)> {
        let (mut now, mut sent, mut under_way) = (0, Vec::new(), BinaryHeap::new());
        loop {
            let ends = under_way.peek().map(|&Reverse((at, _))| at);
            match pacer.peek() {
                Some(due) if ends.is_none_or(|end| due.intended_ns.max(now) < end) => {
                    now = now.max(due.intended_ns);
                    pacer.take();
                    sent.push((due.row, due.intended_ns, now));
                    under_way.push(Reverse((now + took(due.row), due.row)));
                }
                peeked => {
                    let Some(Reverse((at, row))) = under_way.pop() else {
                        assert!(peeked.is_none() && !pacer.is_waiting());
                        return sent;
                    };
                    now = at;
                    pacer.ended(row, at, !fails.contains(&row));
                }
            }
        }
    }

    const ALL: Extent = Extent { first: 0, rows: 10, until_ns: u64::MAX };

    #[test]
    fn a_closed_loop_keeps_its_slots_full() {
        let sent = simulate(Pacer::closed(3, ALL), |row| if row == 0 { 100 } else { 10 }, &[]);
        assert_eq!(sent.iter().map(|s| s.0).collect::<Vec<_>>(), (0..10).collect::<Vec<_>>());
        // Slot 0 is held to 100; the other two turn over every 10.
        let starts: Vec<u64> = sent.iter().map(|s| s.1).collect();
        assert_eq!(starts, [0, 0, 0, 10, 10, 20, 20, 30, 30, 40]);
    }

    #[test]
    fn rows_may_begin_anywhere() {
        let extent = Extent { first: 100, rows: 4, until_ns: u64::MAX };
        for pacer in [Pacer::closed(2, extent), Pacer::users(2, 50, 1, extent)] {
            let mut rows: Vec<_> = simulate(pacer, |_| 10, &[]).iter().map(|s| s.0).collect();
            rows.sort_unstable();
            assert_eq!(rows, [100, 101, 102, 103]);
        }
    }

    #[test]
    fn a_closed_loop_ends_in_time() {
        let sent =
            simulate(Pacer::closed(1, Extent { first: 0, rows: usize::MAX, until_ns: 35 }), |_| 10, &[]);
        assert_eq!(sent.len(), 4);
    }

    #[test]
    fn users_keep_their_pace_and_a_late_answer_counts_from_when_the_request_was_due() {
        let sent = simulate(Pacer::users(2, 1000, 5, ALL), |row| if row == 0 { 2500 } else { 10 }, &[]);
        let of = |user: usize| sent.iter().filter(|s| s.0 % 2 == user).copied().collect::<Vec<_>>();
        let (late, even) = (of(0), of(1));
        assert_eq!((late.len(), even.len()), (5, 5));
        for rows in [&late, &even] {
            assert!(rows.windows(2).all(|w| w[1].1 - w[0].1 == 1000), "{rows:?}");
            assert!(rows[0].1 < 1000);
        }
        assert!(even.iter().all(|&(_, intended, real)| intended == real));
        // Rows 2 and 4 were due while row 0 was under way: both go as soon as they may, none is moved.
        assert_eq!(late[1].2, late[0].2 + 2500);
        assert_eq!(late[2].2, late[1].2 + 10);
        assert_eq!(late[3].1, late[3].2);
    }

    #[test]
    fn the_rows_that_users_send_do_not_depend_on_the_server() {
        let rows = |took: u64| {
            let mut rows: Vec<_> =
                simulate(Pacer::users(3, 100, 1, ALL), |_| took, &[]).iter().map(|s| s.0).collect();
            rows.sort_unstable();
            rows
        };
        assert_eq!(rows(1), rows(5000));
        assert_eq!(rows(1), (0..10).collect::<Vec<_>>());
    }

    #[test]
    fn conversations_think_between_turns_and_end_with_a_failure() {
        let flow = |turns: &str| {
            Flow::Conversations(Conversations {
                seed: 1,
                turns: conversation::Turns::Drawn(turns.parse().unwrap()),
                think: "1ms".parse().unwrap(),
            })
        };
        let slots = Starts::Free([Reverse(0), Reverse(0)].into());
        let sent = simulate(Pacer::sessions(flow("3"), slots, 4, u64::MAX), |_| 10, &[2048 + 1]);
        let rows: Vec<_> = sent.iter().map(|s| conversation::split(s.0)).collect();
        // Two at a time. Conversation 2 fails in its second turn, which leaves its slot to nobody: 3 has
        // begun.
        let want = [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (2, 0), (3, 0), (2, 1), (3, 1), (3, 2)];
        assert_eq!(rows, want);
        assert_eq!(sent[2].1, 10 + 1_000_000);

        let starts = Starts::At([0, 500, 5_000_000].into());
        let sent = simulate(Pacer::sessions(flow("2"), starts, 3, 4_000_000), |_| 10, &[]);
        let rows: Vec<_> = sent.iter().map(|s| conversation::split(s.0)).collect();
        assert_eq!(rows, [(0, 0), (1, 0), (0, 1), (1, 1)]);
    }

    #[test]
    fn users_hold_one_conversation_after_the_other_at_their_own_pace() {
        let conversations = Conversations {
            seed: 1,
            turns: conversation::Turns::Drawn("3".parse().unwrap()),
            think: "0s".parse().unwrap(),
        };
        // Conversation 2's second turn fails: its user goes on with the next one.
        let sent = simulate(Pacer::talkers(conversations, 2, 1000, 5, u64::MAX), |_| 10, &[2048 + 1]);
        let of =
            |user: usize| sent.iter().filter(|s| conversation::split(s.0).0 % 2 == user).collect::<Vec<_>>();
        let rows = |user| of(user).iter().map(|s| conversation::split(s.0)).collect::<Vec<_>>();
        assert_eq!(rows(0), [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1), (4, 0), (4, 1), (4, 2)]);
        assert_eq!(rows(1), [(1, 0), (1, 1), (1, 2), (3, 0), (3, 1), (3, 2)]);
        for user in [of(0), of(1)] {
            assert!(user.windows(2).all(|w| w[1].1 - w[0].1 == 1000) && user[0].1 < 1000);
        }
    }

    #[test]
    fn an_open_loop_is_never_moved() {
        let schedule: VecDeque<_> = (0..5).map(|row| Due { intended_ns: row as u64 * 7, row }).collect();
        let sent = simulate(Pacer::Open(schedule), |_| 1_000_000, &[]);
        assert!(sent.iter().enumerate().all(|(i, s)| s.1 == i as u64 * 7 && s.1 == s.2));
    }
}
