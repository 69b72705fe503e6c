//! The index as a feed has it: for moments, between which others have it.

use std::cell::RefCell;
use std::future::{Future, ready};
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use crate::index::PrefixIndex;

/// Blocks that are stored, dropped or looked at in one moment: each takes up to a microsecond where memory is
/// slow.
const MOMENT_STEPS: usize = 256;

/// An index that others use too.
pub trait Moments {
    /// Lends the index; all others wait meanwhile, so what is done must be short.
    fn moment<T>(&self, f: impl FnOnce(&mut PrefixIndex) -> T) -> T;

    /// Blocks that may be stored, dropped or looked at in a moment.
    fn steps(&self) -> usize {
        MOMENT_STEPS
    }

    /// Completes when others have had their turn.
    fn between(&self) -> impl Future<Output = ()> + Send;
}

/// An index that only one feed uses: tests and benchmarks have one.
#[derive(Debug)]
pub struct Alone(pub RefCell<PrefixIndex>);

impl Alone {
    /// Takes an index for itself, so that each moment borrows it without waiting.
    pub fn new(index: PrefixIndex) -> Self {
        Self(RefCell::new(index))
    }

    /// The outcome of what a feed does with it, which has no other user to wait for.
    pub fn run<T>(&self, future: impl Future<Output = T>) -> T {
        let mut future = pin!(future);
        loop {
            if let Poll::Ready(outcome) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                return outcome;
            }
        }
    }
}

impl Moments for Alone {
    fn moment<T>(&self, f: impl FnOnce(&mut PrefixIndex) -> T) -> T {
        f(&mut self.0.borrow_mut())
    }

    fn between(&self) -> impl Future<Output = ()> + Send {
        ready(())
    }
}
