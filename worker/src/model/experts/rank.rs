//! A rank other than 0: it does what rank 0's messages say. It holds experts, and where rank 0 says so runs
//! attention for requests of its own too (`joint.rs`). It knows no requests; it serves until the group fails.
//! Then rank 0 starts another process or, over TCP, this one joins the group again.

use std::time::Duration;

use keyway_kernels::compute::Compute;
use keyway_kernels::fabric::{Cause, Fabric, FabricError, Phase};
use keyway_kernels::moe::Placement;
use keyway_kernels::moe::parallel::{Parallel, Served, note_in};

use super::note::{Attention, Note, Place};
use super::store::keep_held;
use super::{Bank, Exchange, Held, Spread, Store};
use crate::limits::EXPERT_LOAD_MAX;
use crate::model::feed_forward::Inner;
use crate::model::{CpuBackend, LoadedModel, ModelError, ModelSource, Quantize};

/// Why a rank ended.
#[derive(Debug, thiserror::Error)]
pub enum RankError {
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
    source: ModelSource,
    quantize: Quantize,
    store: Store,
    /// By layer, how many experts it has.
    layers: Vec<usize>,
    banks: Vec<Option<Bank>>,
    /// The whole model with its share of the experts, once it runs attention.
    whole: Option<(Attention, CpuBackend)>,
}

impl ExpertRank {
    /// Opens a model's checkpoint; what it needs of it is loaded when rank 0 says what.
    pub(crate) fn open(source: &ModelSource, quantize: Quantize) -> Result<Self, ModelError> {
        let store = Store::open(source, quantize)?;
        let layers = store.experts();
        let banks = (0..layers.len()).map(|layer| store.empty_bank(layer)).collect();
        Ok(Self { source: source.clone(), quantize, store, layers, banks, whole: None })
    }

    /// Serves as one rank of a group until it fails. Between two messages of rank 0 at most `deadline` may
    /// pass.
    ///
    /// # Errors
    /// Always: there is no other end.
    pub(crate) fn serve(
        &mut self,
        mut fabric: Box<dyn Fabric>,
        compute: &Compute,
        deadline: Duration,
    ) -> Result<(), RankError> {
        let (mut parallel, mut inner) = (Parallel::default(), Inner::default());
        // The first message comes when all ranks have started.
        let mut patience = EXPERT_LOAD_MAX;
        loop {
            let bank = |layer: u32| self.banks.get(layer as usize).and_then(Option::as_ref);
            let mut held = Held { compute, bank, inner: &mut inner };
            let served = parallel.serve(&mut *fabric, &mut held, patience)?;
            patience = deadline;
            let Served::Note { from } = served else { continue };
            let note = note_in(fabric.inbox(from));
            match Note::of(note) {
                Some(Note::KeepAlive) => {}
                Some(Note::Place) => {
                    let place = Place::read(note, fabric.size(), &self.layers, self.store.fingerprint());
                    match place {
                        None => return Err(nonsense(&mut *fabric, from, "a placement for another model")),
                        Some(Place { attention: None, placements }) => {
                            self.hold(&placements, fabric.rank())?;
                            fabric.exchange(Phase::Placement, EXPERT_LOAD_MAX)?;
                        }
                        Some(Place { attention: Some(attention), placements }) => {
                            let exchange = Exchange::new(placements, deadline, compute.clone());
                            return self.attend(fabric, exchange, attention, compute);
                        }
                    }
                }
                Some(Note::Step) | None => {
                    return Err(nonsense(&mut *fabric, from, "a note of another kind"));
                }
            }
        }
    }

    /// Loads what it shall hold of the experts, which is all it serves with.
    fn hold(&mut self, placements: &[Option<Placement>], rank: usize) -> Result<(), ModelError> {
        for (layer, placement) in placements.iter().enumerate() {
            if let (Some(placement), Some(bank)) = (placement, &mut self.banks[layer]) {
                let held = |expert| placement.holds(rank, expert);
                bank.keep(held);
                self.store.load(layer, bank, held)?;
            }
        }
        Ok(())
    }

    /// Runs attention too: loads the model, and takes part in every step.
    fn attend(
        &mut self,
        mut fabric: Box<dyn Fabric>,
        mut exchange: Exchange,
        attention: Attention,
        compute: &Compute,
    ) -> Result<(), RankError> {
        let (rank, size, placements) = (fabric.rank(), fabric.size(), &exchange.placements);
        let Self { source, quantize, store, layers, whole, .. } = self;
        let (_, backend) = match whole {
            Some(kept) if kept.0 == attention => {
                keep_held(&mut kept.1.decoder.weights, placements, rank);
                store.load_held(&mut kept.1.decoder.weights, placements, rank)?;
                kept
            }
            _ => {
                let model = LoadedModel::load_held(source, *quantize, placements, rank)?;
                if model.attention(attention.kv) != attention {
                    return Err(nonsense(&mut *fabric, 0, "a placement for other weights"));
                }
                whole.insert((attention, model.into_backend(attention.kv)?.with_compute(compute.clone())))
            }
        };
        fabric.exchange(Phase::Placement, EXPERT_LOAD_MAX)?;
        exchange.fabric = Some(fabric);
        backend.join(exchange);
        let ended = backend.serve(|backend, note| {
            let Some(Spread::Rank(exchange)) = &mut backend.buffers.feed_forward.group else { return Ok(()) };
            let Some(fabric) = &mut exchange.fabric else { return Ok(()) };
            let Some(place) = Place::read(note, size, layers, store.fingerprint()) else {
                return Err(nonsense(&mut **fabric, 0, "a placement for another model"));
            };
            keep_held(&mut backend.decoder.weights, &place.placements, rank);
            store.load_held(&mut backend.decoder.weights, &place.placements, rank)?;
            exchange.placements = place.placements;
            Ok(fabric.exchange(Phase::Placement, EXPERT_LOAD_MAX)?)
        });
        backend.buffers.feed_forward.group = None;
        ended
    }
}

/// Ends the group because of what a rank sent.
fn nonsense(fabric: &mut dyn Fabric, from: usize, what: &'static str) -> RankError {
    fabric.fail(from, Phase::Placement, Cause::Protocol(what)).into()
}
