//! The headers that name a request's session and the agent that started its own, as coding agents send them.
//! Decides nothing about turns.

use http::{HeaderName, HeaderValue};

use crate::schedule::flow::TurnPlace;

/// Which headers name sessions, where they are asked for.
#[derive(Debug, Clone, Default)]
pub struct SessionNames {
    /// Names the agent that takes the turn, such as `x-session-id`.
    pub session: Option<HeaderName>,
    /// Names the agent that started it, such as `x-dynamo-parent-session-id`.
    pub parent: Option<HeaderName>,
    /// What the words of the prompts come from: no other run has the same names, unless its words are.
    pub text_seed: u64,
}

impl SessionNames {
    /// The headers of a turn.
    pub fn headers(&self, place: &TurnPlace) -> Vec<(HeaderName, HeaderValue)> {
        let header = |header: &Option<HeaderName>, agent: Option<u32>| {
            let name = self.name(place.session, agent?);
            Some((header.clone()?, HeaderValue::from_maybe_shared(name).ok()?))
        };
        let headers = [header(&self.session, Some(place.agent)), header(&self.parent, place.parent)];
        headers.into_iter().flatten().collect()
    }

    /// A session's first agent has the session's own name.
    fn name(&self, session: usize, agent: u32) -> String {
        let name = format!("{}-{session}", self.text_seed);
        if agent == 0 { name } else { format!("{name}-{agent}") }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_sub_agent_has_a_name_of_its_own_and_its_parent_s() {
        let names = |session: &str, parent: &str| SessionNames {
            session: session.parse().ok(),
            parent: parent.parse().ok(),
            text_seed: 7,
        };
        let place =
            |agent, parent| TurnPlace { session: 3, agent, parent, turn: 0, turns: 1, wait: Duration::ZERO };
        let shown = |names: SessionNames, place: TurnPlace| {
            let headers = names.headers(&place).into_iter();
            headers.map(|(name, value)| format!("{name}: {}", value.to_str().unwrap())).collect::<Vec<_>>()
        };
        assert_eq!(shown(names("x-s", "x-p"), place(0, None)), ["x-s: 7-3"]);
        assert_eq!(shown(names("x-s", "x-p"), place(2, Some(0))), ["x-s: 7-3-2", "x-p: 7-3"]);
        assert_eq!(shown(names("x-s", ""), place(2, Some(1))), ["x-s: 7-3-2"]);
        assert_eq!(shown(names("", ""), place(2, Some(1))), Vec::<String>::new());
    }
}
