//! Turns of a connection's task. In one of them hyper asks an answer's body for more several times at each
//! event. What has said that there is nothing yet has its waker by then: the task gets another turn once
//! there is something, so until then it is not asked again.

use std::{cell::Cell, task::Poll};

thread_local! {
    /// The number of the turn that is being taken on this thread, among its connection's; 0 where none is.
    static TURN: Cell<u64> = const { Cell::new(0) };
}

/// Does all that a connection has to do in a turn of this number.
pub(crate) fn take<T>(number: u64, work: impl FnOnce() -> T) -> T {
    let _over = Over;
    TURN.set(number);
    work()
}

/// Ends the turn, by a panic too: what other tasks ask on this thread must not be taken for asked already.
struct Over;

impl Drop for Over {
    fn drop(&mut self) {
        TURN.set(0);
    }
}

/// What is asked in one connection's turns alone, or outside of all of them.
#[derive(Debug, Default)]
pub struct Asked {
    /// The last turn in which there was nothing yet.
    waits_in: u64,
}

impl Asked {
    /// Asks, unless there was nothing yet in this very turn.
    #[inline]
    pub fn poll<T>(&mut self, ask: impl FnOnce() -> Poll<T>) -> Poll<T> {
        let turn = TURN.get();
        if turn > 0 && turn == self.waits_in {
            return Poll::Pending;
        }
        let said = ask();
        if said.is_pending() {
            self.waits_in = turn;
        }
        said
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_nothing_yet_is_asked_once_in_a_turn() {
        let mut asked = Asked::default();
        let mut times = |says: Poll<()>, often: usize| {
            let mut times = 0;
            for _ in 0..often {
                let said = asked.poll(|| {
                    times += 1;
                    says
                });
                assert!(said.is_pending() || says.is_ready());
            }
            times
        };
        assert_eq!(take(1, || times(Poll::Pending, 3)), 1);
        assert_eq!(take(2, || times(Poll::Ready(()), 3)), 3);
        assert_eq!(take(3, || times(Poll::Ready(()), 1) + times(Poll::Pending, 3)), 2);
        assert_eq!(times(Poll::Pending, 3), 3, "another task asks, whose turns are not counted");
        assert_eq!(take(4, || times(Poll::Pending, 3)), 1);
    }

    #[test]
    fn a_turn_that_ends_in_a_panic_is_over() {
        let panics = std::panic::catch_unwind(|| take(1, || panic!("a bug")));
        assert!(panics.is_err());
        let mut asked = Asked::default();
        let mut times = 0;
        for _ in 0..3 {
            let said = asked.poll(|| {
                times += 1;
                Poll::<()>::Pending
            });
            assert!(said.is_pending());
        }
        assert_eq!(times, 3);
    }
}
