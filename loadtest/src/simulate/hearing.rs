//! How gateways of a simulated fleet hear of each other's placements: by the words of the gateway's own core,
//! some of which may be late or lost.

use std::time::Duration;

use keyway_core::{
    WorkerId,
    index::Placement,
    told::{Heard, PlacementLog, Told, Word, words},
};
use keyway_wire::block_hash::BlockHash;

use super::{fleet::Run, gateway::Gateway};
use crate::{args::simulate::FleetArgs, engine_model::Nanos, random::splitmix};

/// Bytes of a gateway's log, and of a line, as the gateway has them.
const LOG_BYTES: usize = 8 << 20;
const LINE_BYTES: usize = 256 << 10;

/// What becomes of words on their way.
#[derive(Debug, Clone, Copy)]
pub(super) struct Hearing {
    /// Share of them that is lost.
    loss: f64,
    lag_ns: Nanos,
}

/// What one gateway tells and hears.
#[derive(Debug)]
pub(super) struct Telling {
    log: PlacementLog,
    /// Of each gateway: what was heard of it, and where to read on in its log.
    others: Vec<(Heard, u64)>,
}

impl Hearing {
    /// As the command line says; `None`: gateways tell no placements.
    pub(super) fn of(args: &FleetArgs) -> Option<Self> {
        let tells = args.peers.is_some() && !args.no_told_placements;
        tells.then_some(Self {
            loss: args.peers_loss.unwrap_or(0.0),
            lag_ns: args.peers_lag.map_or(0, |lag| lag.as_nanos() as Nanos),
        })
    }
}

impl Telling {
    /// Of one among so many gateways.
    pub(super) fn new(gateways: usize) -> Self {
        let others = (0..gateways).map(|_| (Heard::default(), 0)).collect();
        Self { log: PlacementLog::new(LOG_BYTES), others }
    }
}

impl Gateway {
    /// Records that a worker is sent this chain, and tells it.
    pub(super) fn place(
        &mut self,
        at: Nanos,
        worker: usize,
        chain: &[BlockHash],
    ) -> (Placement, Option<Told>) {
        let placement = self.index.place(WorkerId(worker as u32), chain);
        let told = self.telling.as_mut().and_then(|telling| {
            telling.log.placed(Duration::from_nanos(at), keyway_core::Owner::NOBODY, chain, &placement)
        });
        (placement, told)
    }

    /// A worker has begun to answer.
    pub(super) fn tell_of_answer(&mut self, at: Nanos, told: Option<Told>) {
        if let (Some(telling), Some(told)) = (&mut self.telling, told) {
            telling.log.closed(Duration::from_nanos(at), told, true);
        }
    }

    /// A worker refused a request.
    pub(super) fn withdraw(&mut self, at: Nanos, placement: Placement, told: Option<Told>) {
        self.index.withdraw(placement);
        if let (Some(telling), Some(told)) = (&mut self.telling, told) {
            telling.log.closed(Duration::from_nanos(at), told, false);
        }
    }
}

impl Run<'_> {
    /// A gateway hears what the others have placed.
    pub(super) fn hear_placements(&mut self, gateway: usize, at: Nanos) {
        for other in (0..self.gateways.len()).filter(|other| *other != gateway) {
            self.hear_placements_of(gateway, other, at);
        }
    }

    /// The same of one of them.
    pub(super) fn hear_placements_of(&mut self, gateway: usize, other: usize, at: Nanos) {
        let Some(Hearing { loss, lag_ns }) = self.setup.told else { return };
        let until = Duration::from_nanos(at.saturating_sub(lag_ns));
        let next = self.gateways[gateway].telling.as_ref().map_or(0, |telling| telling.others[other].1);
        let log = self.gateways[other].telling.as_ref().map(|telling| &telling.log);
        let Some(said) = log.map(|log| log.read(next, until, LINE_BYTES)) else { return };
        let Gateway { index, telling, .. } = &mut self.gateways[gateway];
        let Some(telling) = telling else { return };
        let (heard, next) = &mut telling.others[other];
        *next = said.next;
        for (nth, word) in words(&said.bytes).flatten().enumerate() {
            let drawn = splitmix(at ^ splitmix((gateway as u64) << 32 | (other as u64) << 48 | nth as u64));
            if drawn as f64 / (u64::MAX as f64) < loss {
                continue;
            }
            let worker = match &word {
                Word::Placed { worker, .. } => Some(*worker),
                Word::Closed { .. } => None,
            };
            heard.take(index, &word, worker);
        }
    }
}
