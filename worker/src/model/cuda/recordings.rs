//! Recordings of decode steps, by their form: what was launched twice is recorded and from then on started at
//! once.

use std::collections::HashMap;

use keyway_kernels::cuda::Device;

use crate::limits::RECORDINGS_MAX;

/// What is known of a form of steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Met {
    /// Nothing: perhaps it comes only once.
    Never,
    /// It came before and has no recording yet.
    Before,
    /// The device's number of its recording.
    Recorded(u64),
}

/// Forms that were met.
#[derive(Debug, Default)]
pub(super) struct Recordings {
    known: HashMap<Vec<usize>, Met>,
    /// How often buffers had moved when these were recorded: recordings name buffers.
    moves: u64,
}

impl Recordings {
    /// What is known of a step's form, which is noted; all is forgotten once a buffer has moved, or if it is
    /// too much.
    pub(super) fn meet(&mut self, device: &mut dyn Device, moves: u64, form: &[usize]) -> Met {
        if self.moves != moves || (self.known.len() >= RECORDINGS_MAX && !self.known.contains_key(form)) {
            for (_, met) in self.known.drain() {
                if let Met::Recorded(recording) = met {
                    device.forget(recording);
                }
            }
            self.moves = moves;
        }
        let met = self.known.get(form).copied().unwrap_or(Met::Never);
        if met == Met::Never {
            self.known.insert(form.to_vec(), Met::Before);
        }
        met
    }

    /// Notes the recording of a form.
    pub(super) fn add(&mut self, form: Vec<usize>, recording: u64) {
        self.known.insert(form, Met::Recorded(recording));
    }
}
