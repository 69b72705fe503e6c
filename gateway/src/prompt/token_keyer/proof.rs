//! Whether prompts' tokens here are those that engines have. An engine may render a request in another way:
//! with defaults of its own for the template, or as an API of another maker's. Its blocks then bear other
//! names than the prompt's here, and the request is better looked up by its text. What tells is the answer:
//! so many tokens had the prompt, so many of them were found.

use parking_lot::Mutex;

use crate::limits::{PROOF_ANSWERS, PROOF_TRY_EVERY};

/// What answers have said of one API's prompts for one model.
#[derive(Debug, Default)]
pub struct Proof(Mutex<Seen>);

#[derive(Debug, Default)]
struct Seen {
    /// Answers since it was last judged, and those by which the tokens are others.
    answers: u32,
    failed: u32,
    is_doubted: bool,
    /// Requests while it was doubted.
    asked: u32,
}

/// What an answer said of the tokens that its prompt was looked up by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proved {
    /// Another number, and more was found cached than these tokens foretold.
    OtherTokens,
    /// They served.
    Right,
}

impl Proof {
    /// Whether the next request goes by its tokens: always, unless most answers said that they are others;
    /// then now and then, to see whether they still are.
    pub fn may_be_used(&self) -> bool {
        let mut seen = self.0.lock();
        if !seen.is_doubted {
            return true;
        }
        seen.asked += 1;
        seen.asked.is_multiple_of(PROOF_TRY_EVERY)
    }

    /// Takes what an answer said. Returns whether requests go by their text from now on.
    pub fn came_out(&self, proved: Proved) -> bool {
        let mut seen = self.0.lock();
        seen.answers += 1;
        seen.failed += u32::from(proved == Proved::OtherTokens);
        let needed = if seen.is_doubted { PROOF_ANSWERS / 4 } else { PROOF_ANSWERS };
        if seen.answers < needed {
            return false;
        }
        let (before, now) = (seen.is_doubted, 2 * seen.failed > seen.answers);
        *seen = Seen { is_doubted: now, ..Seen::default() };
        now && !before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_that_are_others_are_left_and_tried_again() {
        let proof = Proof::default();
        let said = |proved, times: u32| (0..times).filter(|_| proof.came_out(proved)).count();
        assert_eq!(said(Proved::Right, PROOF_ANSWERS), 0);
        assert_eq!(said(Proved::OtherTokens, PROOF_ANSWERS - 1), 0);
        assert!(proof.may_be_used());
        assert!(proof.came_out(Proved::OtherTokens), "told once");
        let used = |times: u32| (0..times).filter(|_| proof.may_be_used()).count();
        assert_eq!(used(5 * PROOF_TRY_EVERY), 5);
        // The tries fail too.
        assert_eq!(said(Proved::OtherTokens, PROOF_ANSWERS), 0);
        assert_eq!(used(PROOF_TRY_EVERY), 1);
        // The engine was started anew with other flags.
        assert_eq!(said(Proved::Right, PROOF_ANSWERS / 4), 0);
        assert_eq!(used(10), 10);
    }
}
