//! Rooms of several gateways before the same workers, in virtual time: each owner comes to a room of its own.

use super::*;
use crate::waiting_room::OwnerWord;

/// Two rooms, each with an owner of its own that asks for more than the workers can do: what each owner is
/// served in forty seconds, as a share. `every`: how often the rooms tell each other; `None`: never.
fn shares(of_owners: [Share; 2], every: Option<Duration>) -> [f64; 2] {
    let rules =
        RoomRules { horizon_ms: HORIZON_MS, max_wait: Duration::from_secs(9_999), ..RoomRules::default() };
    let mut rooms = [WaitingRoom::new(rules), WaitingRoom::new(rules)];
    let mut floor = Floor::empty();
    let mut told: [Vec<OwnerWord>; 2] = Default::default();
    let (mut next_word, mut random) = (Duration::ZERO, uniform(11));
    for tick in 0..20_000_u64 {
        floor.now = Duration::from_millis(2 * tick);
        // Forty a second are done; fifty come to each room.
        if tick % 10 == 0 {
            for (room, share) in rooms.iter_mut().zip(of_owners) {
                room.enter_as(floor.now, Some(OWN_MS), share, (share, floor.now));
            }
        }
        if let Some(every) = every.filter(|_| floor.now >= next_word) {
            next_word = floor.now + every;
            for (from, to) in [(0, 1), (1, 0)] {
                let words = rooms[from].words(floor.now);
                let new = |word: &OwnerWord| {
                    let before = told[from].iter().find(|before| before.owner == word.owner);
                    (*word, word.had - before.map_or(0.0, |before| before.had))
                };
                let heard: Vec<_> = words.iter().map(new).collect();
                rooms[to].hear(floor.now, every, &heard);
                told[from] = words;
            }
        }
        // Either may be the first to look.
        let first = usize::from(random() < 0.5);
        for i in [first, 1 - first] {
            rooms[i].release(floor.now, &mut floor);
        }
    }
    let all = floor.begun.len() as f64;
    of_owners.map(|share| floor.begun.iter().filter(|(owner, ..)| *owner == share.owner).count() as f64 / all)
}

const WORD: Option<Duration> = Some(Duration::from_millis(50));

#[test]
fn weights_hold_over_rooms_that_tell_each_other() {
    let owners = [Share { weight: 3.0, ..of(1, TOKENS) }, of(2, TOKENS)];
    let (told, untold) = (shares(owners, WORD), shares(owners, None));
    assert!((told[0] - 0.75).abs() < 0.05, "{told:?}");
    assert!((untold[0] - 0.5).abs() < 0.1, "{untold:?}");
    let alike = shares([of(1, TOKENS), of(2, TOKENS)], WORD);
    assert!((alike[0] - 0.5).abs() < 0.05, "{alike:?}");
    // Words that are late do not turn it round.
    let late = shares(owners, Some(Duration::from_secs(1)));
    assert!(late[0] > 0.65 && late[0] < 0.85, "{late:?}");
}

#[test]
fn priorities_hold_over_rooms_that_tell_each_other() {
    let owners = [of(1, TOKENS), Share { priority: 1, ..of(2, TOKENS) }];
    let (told, untold) = (shares(owners, WORD), shares(owners, None));
    assert!(told[1] > 0.95, "{told:?}");
    assert!((untold[1] - 0.5).abs() < 0.1, "{untold:?}");
    // However seldom a room speaks, as often as others may ask it to.
    let seldom = shares(owners, Some(Duration::from_secs(1)));
    assert!(seldom[1] > 0.9, "{seldom:?}");
}

/// What was heard is not told on, and ends.
#[test]
fn a_word_is_as_old_as_it_is() {
    let rules = RoomRules { horizon_ms: HORIZON_MS, ..RoomRules::default() };
    let (mut first, mut second) = (WaitingRoom::<()>::new(rules), WaitingRoom::<()>::new(rules));
    let at = |ms: u64| Duration::from_millis(ms);
    let share = Share { priority: 2, ..of(7, 10.0) };
    assert_eq!(first.words(at(0)), []);
    first.enter_as(at(5), Some(OWN_MS), share, ());
    let words = first.words(at(5));
    assert_eq!(words, [OwnerWord { owner: 7, had: 0.0, priority: 2, waits: Some(2) }]);
    let every = Duration::from_millis(50);
    second.hear(at(6), every, &[(words[0], 40.0)]);
    assert_eq!(second.words(at(6)), [], "what others said is theirs to say");
    assert_eq!(second.fair.of(7), 40.0);
    let lower = of(8, 1.0);
    assert!(second.fair.yields_elsewhere(&lower, at(250)) && !second.fair.yields_elsewhere(&share, at(250)));
    assert!(!second.fair.yields_elsewhere(&lower, at(257)));
    assert!(!second.fair.yields_elsewhere(&Share { priority: i32::MAX, ..lower }, at(250)));
    // What makes no sense changes nothing.
    for more in [f64::NAN, f64::INFINITY, -5.0] {
        second.hear(at(7), every, &[(OwnerWord { waits: None, ..words[0] }, more)]);
        assert_eq!(second.fair.of(7), 40.0);
    }
    assert_eq!(first.words(at(20_000)), [], "it is not about any more");
    // One owner without a name, all of whose requests are alike, is no news.
    let mut alone = WaitingRoom::<()>::new(rules);
    alone.enter_as(at(5), Some(OWN_MS), of(0, 10.0), ());
    assert_eq!(alone.words(at(5)), []);
    alone.enter_as(at(5), Some(OWN_MS), Share { priority: 1, ..of(0, 10.0) }, ());
    assert_eq!(alone.words(at(5)).len(), 1);
}
