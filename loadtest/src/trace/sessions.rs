//! Puts sessions together turn by turn, and all of them into one trace: rows in order of time, each with its
//! link. Reads no file and makes no text.

use std::time::Duration;

use super::{Row, links::Link};

/// Who takes a turn.
#[derive(Debug, Clone, Copy)]
pub(super) struct Agent {
    /// Its number in the session; 0 is the one that the person speaks to.
    pub(super) number: u32,
    /// Who started it.
    pub(super) parent: Option<u32>,
}

/// The turns of one session, each behind those that it goes on from.
#[derive(Debug, Default)]
pub(super) struct SessionTurns {
    /// Their links name turns of this session until it is part of a trace.
    turns: Vec<(Row, Link)>,
    /// How many turns each agent has taken.
    taken: Vec<u32>,
}

impl Agent {
    /// The one that the person speaks to.
    pub(super) const FIRST: Self = Self { number: 0, parent: None };
}

// === impl SessionTurns ===

impl SessionTurns {
    /// Adds a turn that goes on from the answers of the turns `after`, and gives its number in the session.
    /// A session has one beginning: a later turn that names none goes on from the first.
    pub(super) fn push(&mut self, agent: Agent, mut row: Row, mut after: Vec<u32>, wait: Duration) -> u32 {
        let number = self.turns.len() as u32;
        if after.is_empty() && number > 0 {
            after.push(0);
        }
        // A recording may date a turn before what it goes on from.
        let latest_ms = after.iter().map(|&turn| self.turns[turn as usize].0.timestamp_ms).max();
        row.timestamp_ms = row.timestamp_ms.max(latest_ms.unwrap_or(0));
        if self.taken.len() <= agent.number as usize {
            self.taken.resize(agent.number as usize + 1, 0);
        }
        let taken = &mut self.taken[agent.number as usize];
        let (session, turn) = (0, *taken);
        *taken += 1;
        let Agent { number: agent, parent } = agent;
        self.turns.push((row, Link { session, agent, parent, turn, after: after.into(), wait }));
        number
    }

    /// When its last turn is due, in milliseconds.
    pub(super) fn last_ms(&self) -> u64 {
        self.turns.iter().map(|(row, _)| row.timestamp_ms).max().unwrap_or(0)
    }

    /// Lets it begin later.
    pub(super) fn delay(&mut self, ms: u64) {
        self.turns.iter_mut().for_each(|(row, _)| row.timestamp_ms += ms);
    }
}

/// All turns in order of time; of equal times in the order in which they were added.
pub(super) fn together(sessions: Vec<SessionTurns>) -> (Vec<Row>, Vec<Link>) {
    let mut begins = Vec::with_capacity(sessions.len());
    let mut turns: Vec<(usize, Row, Link)> = Vec::new();
    for (session, added) in sessions.into_iter().enumerate() {
        begins.push(turns.len());
        for (row, link) in added.turns {
            turns.push((turns.len(), row, Link { session: session as u32, ..link }));
        }
    }
    turns.sort_by_key(|(_, row, _)| row.timestamp_ms);
    let mut places = vec![0; turns.len()];
    for (place, (added, ..)) in turns.iter().enumerate() {
        places[*added] = place as u32;
    }
    let placed = |session: u32, turn: u32| places[begins[session as usize] + turn as usize];
    turns
        .into_iter()
        .map(|(_, row, link)| {
            let after = link.after.iter().map(|&turn| placed(link.session, turn)).collect();
            (row, Link { after, ..link })
        })
        .unzip()
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::{HashMap, HashSet};

    use super::*;

    /// What holds of the links of every trace.
    pub(crate) fn assert_links_hold(rows: &[Row], links: &[Link]) {
        assert_eq!(rows.len(), links.len());
        assert!(rows.is_sorted_by_key(|row| row.timestamp_ms));
        let (mut begun, mut turns) = (HashSet::new(), HashMap::<(u32, u32), u32>::new());
        for (i, link) in links.iter().enumerate() {
            // Earlier rows alone are named, so there is no circle.
            assert!(link.after.iter().all(|&row| (row as usize) < i), "{i}: {link:?}");
            assert!(link.after.iter().all(|&row| links[row as usize].session == link.session));
            assert_eq!(
                begun.insert(link.session),
                link.after.is_empty(),
                "one first turn a session: {link:?}"
            );
            let next = turns.entry((link.session, link.agent)).or_default();
            assert_eq!(link.turn, *next, "{i}: {link:?}");
            *next += 1;
            if link.turn > 0 {
                let is_before = |&row: &u32| {
                    let before = &links[row as usize];
                    (before.agent, before.turn + 1) == (link.agent, link.turn)
                };
                assert_eq!(link.after.iter().filter(|row| is_before(row)).count(), 1, "{i}: {link:?}");
            }
            assert!(link.parent.is_none_or(|parent| parent < link.agent), "{link:?}");
        }
    }

    fn row(timestamp_ms: u64) -> Row {
        Row { timestamp_ms, input_tokens: 1, output_tokens: 1, blocks: Box::default() }
    }

    #[test]
    fn turns_of_all_sessions_are_in_order_of_time_and_name_the_rows_before_them() {
        let mut sessions = [SessionTurns::default(), SessionTurns::default()];
        for (session, begin) in sessions.iter_mut().zip([5, 0]) {
            let first = session.push(Agent::FIRST, row(begin), vec![], Duration::ZERO);
            // Dated before what it goes on from.
            let second = session.push(Agent::FIRST, row(0), vec![first], Duration::ZERO);
            session.push(Agent { number: 1, parent: Some(0) }, row(9), vec![], Duration::ZERO);
            session.push(Agent::FIRST, row(20), vec![second, 2], Duration::ZERO);
        }
        sessions[1].delay(1);
        assert_eq!(sessions[1].last_ms(), 21);
        let (rows, links) = together(sessions.into());
        assert_links_hold(&rows, &links);
        let shown: Vec<_> =
            rows.iter().zip(&links).map(|(r, l)| (r.timestamp_ms, l.session, &*l.after)).collect();
        let want: [(u64, u32, &[u32]); 8] = [
            (1, 1, &[]),
            (1, 1, &[0]),
            (5, 0, &[]),
            (5, 0, &[2]),
            (9, 0, &[2]),
            (10, 1, &[0]),
            (20, 0, &[3, 4]),
            (21, 1, &[1, 5]),
        ];
        assert_eq!(shown, want);
    }
}
