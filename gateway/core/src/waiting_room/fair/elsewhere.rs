//! Several rooms before the same workers: what each tells the others of its owners, and what that changes.
//!
//! A room tells what it has served of each owner, since it began and for its weight; others add what is
//! new of that to what they have served themselves. So whoever has had less goes first in every room, and
//! workers are kept for it by the rooms where it does not wait. And a room tells which priorities wait;
//! lower ones elsewhere then leave workers to them. All of it is as old as a word takes, and ends with
//! the words.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use super::{Account, Fair, OWNERS_MAX, Share, is_about};
use crate::waiting_room::WaitingRoom;

/// For how many words' time a priority is taken to wait after it was said: some of them may be late.
const WAITS_FOR: u32 = 5;

/// What a room tells of one owner.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OwnerWord {
    /// The owner's number, the same in all rooms.
    pub owner: u32,
    /// Tokens that the room has served of it, for its weight, since the room began.
    pub had: f64,
    /// The highest priority of its requests that came of late.
    pub priority: i32,
    /// The highest priority of its requests that wait.
    pub waits: Option<i32>,
}

impl Fair {
    /// What is told of the owners that are about; `waiting` are the requests that wait.
    pub(crate) fn words(&self, waiting: impl Iterator<Item = Share>, now: Duration) -> Vec<OwnerWord> {
        let mut waits: BTreeMap<u32, i32> = BTreeMap::new();
        for Share { owner, priority, .. } in waiting {
            let highest = waits.entry(owner).or_insert(priority);
            *highest = priority.max(*highest);
        }
        let word = |(&owner, account): (&u32, &Account)| {
            let here = account.here.filter(|here| is_about(here.came, now))?;
            let waits = waits.get(&owner).copied();
            Some(OwnerWord { owner, had: account.own, priority: here.highest.0, waits })
        };
        let words: Vec<_> = self.owners.iter().filter_map(word).collect();
        // Where all requests are one owner's and alike there is no order to keep.
        if words.iter().all(|word| word.owner == 0 && word.priority == 0) { Vec::new() } else { words }
    }

    /// Another room, which speaks once in `every`, has said this; each with the tokens that it has served
    /// of the owner since its last word.
    pub(crate) fn hear(
        &mut self,
        (words, every): (&[(OwnerWord, f64)], Duration),
        waiting: impl Iterator<Item = Share>,
        (now, credit): (Duration, f64),
    ) {
        let waiting: BTreeSet<u32> = waiting.map(|share| share.owner).collect();
        let least = waiting.iter().map(|owner| self.of(*owner)).fold(f64::INFINITY, f64::min);
        for (word, more) in words {
            let share = Share { owner: word.owner, priority: word.priority, ..Share::default() };
            self.comes(&share, (!waiting.contains(&word.owner)).then_some(least), (now, credit));
            if more.is_finite() && *more > 0.0 {
                let account = self.owners.entry(word.owner).or_default();
                account.served += more;
                self.last = account.served;
            }
            if let Some(priority) = word.waits {
                let until = self.waits_elsewhere.entry(priority).or_default();
                *until = (now + every * WAITS_FOR).max(*until);
            }
        }
        self.waits_elsewhere.retain(|_, until| *until >= now);
        if self.owners.len() > OWNERS_MAX {
            self.owners.retain(|owner, account| waiting.contains(owner) || is_about(account.came, now));
        }
    }

    /// Whether a request of a higher priority waits in another room.
    pub(super) fn yields_elsewhere(&self, share: &Share, now: Duration) -> bool {
        if self.waits_elsewhere.is_empty() {
            return false;
        }
        let higher = share.priority.checked_add(1).map(|next| self.waits_elsewhere.range(next..));
        higher.into_iter().flatten().any(|(_, until)| *until >= now)
    }
}

impl<R> WaitingRoom<R> {
    /// What other rooms before the same workers are to be told of the owners here.
    pub fn words(&self, now: Duration) -> Vec<OwnerWord> {
        self.fair.words(self.waiting.iter().map(|entry| entry.share), now)
    }

    /// Another room has said this of owners, each with the tokens that it has served of it since its last
    /// word.
    /// It speaks once in `every`.
    pub fn hear(&mut self, now: Duration, every: Duration, words: &[(OwnerWord, f64)]) {
        let credit = self.outflow.credit();
        self.fair.hear((words, every), self.waiting.iter().map(|entry| entry.share), (now, credit));
    }
}
