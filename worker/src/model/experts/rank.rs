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

/// Serves as one rank of a group until it fails. Between two messages of rank 0 at most `deadline` may pass.
///
/// # Errors
/// Always: there is no other end.
pub(crate) fn serve_rank(
    fabric: &mut dyn Fabric,
    source: &ModelSource,
    quantize: Quantize,
    compute: &Compute,
    deadline: Duration,
) -> Result<(), RankError> {
    let store = Store::open(source, quantize)?;
    let layers = store.experts();
    let mut banks: Vec<Option<Bank>> = (0..layers.len()).map(|layer| store.empty_bank(layer)).collect();
    let (mut parallel, mut inner) = (Parallel::default(), Inner::default());
    // The first message comes when all ranks have started.
    let mut patience = EXPERT_LOAD_MAX;
    loop {
        let bank = |layer: u32| banks.get(layer as usize).and_then(Option::as_ref);
        let served = parallel.serve(fabric, &mut Held { compute, bank, inner: &mut inner }, patience)?;
        patience = deadline;
        let Served::Note { from } = served else { continue };
        let note = note_in(fabric.inbox(from));
        match Note::of(note) {
            Some(Note::KeepAlive) => {}
            Some(Note::Place) => {
                let nonsense = Cause::Protocol("a placement for another model");
                let Some(placements) = placements(note, fabric.size(), &layers) else {
                    return Err(fabric.fail(from, Phase::Placement, nonsense).into());
                };
                for (layer, placement) in placements.iter().enumerate() {
                    if let (Some(placement), Some(bank)) = (placement, &mut banks[layer]) {
                        store.update(layer, bank, |expert| placement.holds(fabric.rank(), expert))?;
                    }
                }
                fabric.exchange(Phase::Placement, EXPERT_LOAD_MAX)?;
            }
            None => {
                let nonsense = Cause::Protocol("a note of another kind");
                return Err(fabric.fail(from, Phase::Dispatch, nonsense).into());
            }
        }
    }
}
