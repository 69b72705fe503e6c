//! A rank other than 0: it holds experts, nothing else, and does what rank 0's messages say. It knows no requests and
//! no KV; it ends when the group fails, and whoever started it starts it anew.

use std::time::Duration;

use keyway_kernels::compute::Compute;
use keyway_kernels::fabric::{Cause, Fabric, FabricError, Phase};
use keyway_kernels::moe::parallel::{Parallel, Served, note_in};

use super::group::{Note, placements};
use super::{Bank, Held, Store};
use crate::limits::EXPERT_LOAD_MAX;
use crate::model::feed_forward::Inner;
use crate::model::{ModelError, ModelSource, Quantize};

/// Why a rank ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RankError {
    /// Another rank failed, or rank 0 is gone.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// The experts cannot be loaded.
    #[error(transparent)]
    Model(#[from] ModelError),
}

/// A rank's experts, which it keeps from one group to the next.
#[derive(Debug)]
pub(crate) struct ExpertRank {
    store: Store,
    /// By layer, how many experts it has.
    layers: Vec<usize>,
    banks: Vec<Option<Bank>>,
}

impl ExpertRank {
    /// Opens a model's checkpoint; experts are loaded when rank 0 says which.
    pub(crate) fn open(source: &ModelSource, quantize: Quantize) -> Result<Self, ModelError> {
        let store = Store::open(source, quantize)?;
        let layers = store.experts();
        let banks = (0..layers.len()).map(|layer| store.empty_bank(layer)).collect();
        Ok(Self { store, layers, banks })
    }

    /// Serves as one rank of a group until it fails. Between two messages of rank 0 at most `deadline` may pass.
    ///
    /// # Errors
    /// Always: there is no other end.
    pub(crate) fn serve(
        &mut self,
        fabric: &mut dyn Fabric,
        compute: &Compute,
        deadline: Duration,
    ) -> Result<(), RankError> {
        let (mut parallel, mut inner) = (Parallel::default(), Inner::default());
        // The first message comes when all ranks have started.
        let mut patience = EXPERT_LOAD_MAX;
        loop {
            let bank = |layer: u32| self.banks.get(layer as usize).and_then(Option::as_ref);
            let mut held = Held { compute, bank, inner: &mut inner };
            let served = parallel.serve(fabric, &mut held, patience)?;
            patience = deadline;
            let Served::Note { from } = served else { continue };
            match Note::of(note_in(fabric.inbox(from))) {
                Some(Note::KeepAlive) => {}
                Some(Note::Place) => self.place(fabric, from)?,
                None => {
                    let nonsense = Cause::Protocol("a note of another kind");
                    return Err(fabric.fail(from, Phase::Dispatch, nonsense).into());
                }
            }
        }
    }

    /// Loads what rank `from` says that this rank shall hold.
    fn place(&mut self, fabric: &mut dyn Fabric, from: usize) -> Result<(), RankError> {
        let note = note_in(fabric.inbox(from));
        let Some(placements) = placements(note, fabric.size(), &self.layers, self.store.fingerprint()) else {
            let nonsense = Cause::Protocol("a placement for another model");
            return Err(fabric.fail(from, Phase::Placement, nonsense).into());
        };
        for (layer, placement) in placements.iter().enumerate() {
            if let (Some(placement), Some(bank)) = (placement, &mut self.banks[layer]) {
                let held = |expert| placement.holds(fabric.rank(), expert);
                bank.keep(held);
                self.store.load(layer, bank, held)?;
            }
        }
        Ok(fabric.exchange(Phase::Placement, EXPERT_LOAD_MAX)?)
    }
}
