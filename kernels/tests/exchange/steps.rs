//! What a rank's launches do, one operation at a time: as `peer.cuh` says, and in the order in which its
//! lines stand there.

use super::group::{AGAIN, At, Fault, Group, Place, Rank, Search};
use super::program::Op;

impl Group {
    /// `Peer::has_failed`.
    fn has_failed(&mut self, search: &Search<'_>, rank: usize) -> Result<bool, Fault> {
        let told = self.fault_told(search, rank);
        if told == 0 {
            return Ok(false);
        }
        if self.memory[search.slot(Place::FaultRound { at: rank as u8 })] == 0 {
            return Err(Fault::NoRound { rank });
        }
        self.ranks[rank].fault = told;
        if self.ranks.iter().all(|rank| rank.is_again || (!rank.has_stopped && !search.stops)) {
            return Err(Fault::Failed { rank });
        }
        Ok(true)
    }

    /// `peer_reset`: the rank's own flags and fault, and its state.
    pub(super) fn reset(&mut self, search: &Search<'_>, rank: usize) {
        let at = rank as u8;
        let flags = [0, 1].into_iter().flat_map(|phase| [(phase, 0), (phase, 1)]);
        let flags = flags.flat_map(|(phase, half)| {
            search.everyone().map(move |from| Place::Flag { at, phase, half, from })
        });
        for place in flags.chain([Place::FaultRound { at }, Place::Fault { at }]) {
            self.memory[search.slot(place)] = 0;
        }
        let Rank { rounds, done, fault, step, blocks, has_stopped, is_again } = &mut self.ranks[rank];
        (*rounds, *done, *fault, *step, *has_stopped, *is_again) = ([1; 4], [0; 4], 0, None, false, true);
        for block in blocks {
            block.at = At::Done;
        }
        self.order.clear();
    }

    pub(super) fn run(&mut self, search: &Search<'_>, rank: usize, block: usize) -> Result<(), Fault> {
        let Some(step) = self.ranks[rank].step.map(usize::from) else { return Ok(()) };
        let next = match self.ranks[rank].blocks[block].at {
            At::First if Search::sends(step) => {
                if self.has_failed(search, rank)? {
                    At::Done
                } else {
                    At::Body
                }
            }
            // Told of a fault while it waits, it accuses nobody.
            At::First if self.missing(search, rank, step).next().is_some() => {
                self.has_failed(search, rank)?;
                At::Done
            }
            At::First => At::Body,
            At::Body => self.body(search, rank, block, step)?,
            At::End(op) => self.end(search, rank, block, step, op)?,
            At::Accuse(op, whom) => self.accuse(search, rank, block, step, op, whom)?,
            At::Done => At::Done,
        };
        self.ranks[rank].blocks[block].at = next;
        if self.ranks[rank].blocks.iter().all(|block| block.at == At::Done) {
            self.ranks[rank].step = None;
        }
        Ok(())
    }

    /// What a rank writes to its own mailbox its later launches see; to others' it comes late.
    fn write(&mut self, search: &Search<'_>, rank: usize, block: usize, at: u8, place: Place, value: u8) {
        if usize::from(at) == rank {
            self.memory[search.slot(place)] = value;
        } else {
            self.ranks[rank].blocks[block].pending.push((place, value));
        }
    }

    /// A block's part of all messages, written or read.
    fn body(&mut self, search: &Search<'_>, rank: usize, block: usize, step: usize) -> Result<At, Fault> {
        let round = self.ranks[rank].rounds[step];
        let value = round + if self.ranks[rank].is_again { AGAIN } else { 0 };
        let (phase, half, own) = ((step / 2) as u8, round % 2, rank as u8);
        for other in search.everyone() {
            if Search::sends(step) {
                let place = Place::Message { at: other, phase, half, from: own, block: block as u8 };
                self.write(search, rank, block, other, place, value);
                continue;
            }
            // Each block reads what any block wrote.
            for block in 0..search.blocks as u8 {
                let place = Place::Message { at: own, phase, half, from: other, block };
                if self.memory[search.slot(place)] != value {
                    return Err(Fault::Wrong { rank, from: other.into() });
                }
            }
        }
        Ok(At::End(0))
    }

    /// `Peer::end`.
    fn end(
        &mut self,
        search: &Search<'_>,
        rank: usize,
        block: usize,
        step: usize,
        op: u8,
    ) -> Result<At, Fault> {
        let ops = &search.program.end;
        let Some(now) = ops.get(usize::from(op)) else { return Ok(At::Done) };
        let round = self.ranks[rank].rounds[step];
        match now {
            Op::Count => {
                self.ranks[rank].done[step] += 1;
                if usize::from(self.ranks[rank].done[step]) < search.blocks {
                    return Ok(At::Done);
                }
            }
            Op::UnlessFailed if !Search::sends(step) || self.has_failed(search, rank)? => {
                let flags = ops.iter().position(|op| *op == Op::Flags);
                return Ok(At::End(flags.map_or(op, |flags| flags as u8) + 1));
            }
            Op::Flags => {
                let (phase, half, from) = ((step / 2) as u8, round % 2, rank as u8);
                for at in search.everyone() {
                    self.write(search, rank, block, at, Place::Flag { at, phase, half, from }, round);
                }
            }
            Op::Zero => self.ranks[rank].done[step] = 0,
            Op::Advance => self.ranks[rank].rounds[step] = round + 1,
            _ => {}
        }
        Ok(At::End(op + 1))
    }

    /// `Peer::accuse`.
    fn accuse(
        &mut self,
        search: &Search<'_>,
        rank: usize,
        block: usize,
        step: usize,
        op: u8,
        whom: u8,
    ) -> Result<At, Fault> {
        let Some(now) = search.program.accuse.get(usize::from(op)) else {
            self.ranks[rank].fault = whom + 1;
            return Ok(At::Done);
        };
        let round = self.ranks[rank].rounds[step];
        match now {
            Op::UnlessFailed if self.has_failed(search, rank)? => return Ok(At::Done),
            Op::TellRound => {
                for at in search.everyone() {
                    self.write(search, rank, block, at, Place::FaultRound { at }, round);
                }
            }
            Op::TellFault => {
                for at in search.everyone() {
                    self.write(search, rank, block, at, Place::Fault { at }, whom + 1);
                }
            }
            _ => {}
        }
        Ok(At::Accuse(op + 1, whom))
    }
}
