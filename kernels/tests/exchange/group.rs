//! A group of ranks and all states that it can come to. A rank's launches follow each other; the blocks of
//! one run at once. What a block writes waits until it reaches a mailbox; of one place the older write comes
//! first.

use std::collections::HashSet;
use std::hash::{Hash as _, Hasher as _};

use xxhash_rust::xxh3::Xxh3;

use super::program::{Op, Program};

/// After a fault, once the group has begun anew.
const ROUNDS_AFTER: u8 = 1;
/// Makes what is written after a fault other values; flags are rounds alone.
pub(super) const AGAIN: u8 = 100;

const DISPATCH_SEND: usize = 0;
const DISPATCH_RECEIVE: usize = 1;
const COMBINE_SEND: usize = 2;
const COMBINE_RECEIVE: usize = 3;

/// What must not happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// A rank read a message that was another round's, or not there.
    Wrong { rank: usize, from: usize },
    /// A rank was told of a fault, but not of its round.
    NoRound { rank: usize },
    /// A rank failed though none had stopped.
    Failed { rank: usize },
    /// A rank can go no further.
    Stuck { rank: usize },
    /// Ranks name others as the one that stayed away.
    Disagree { rank: usize },
    /// A rank names another than the one that stopped.
    Blames { rank: usize },
}

/// A word or a message of a mailbox. `half`: of what is there twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Place {
    Message { at: u8, phase: u8, half: u8, from: u8, block: u8 },
    Flag { at: u8, phase: u8, half: u8, from: u8 },
    FaultRound { at: u8 },
    Fault { at: u8 },
}

/// Where a block stands in its launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum At {
    /// Before it begins, or has waited.
    First,
    /// Before it writes or reads its part of the messages.
    Body,
    /// Before this operation of `Peer::end`.
    End(u8),
    /// Before this operation of `Peer::accuse`, of a rank that stays away.
    Accuse(u8, u8),
    Done,
}

#[derive(Debug, Clone, Hash)]
pub(super) struct Block {
    pub(super) at: At,
    pub(super) pending: Vec<(Place, u8)>,
}

#[derive(Debug, Clone, Hash)]
pub(super) struct Rank {
    pub(super) rounds: [u8; 4],
    pub(super) done: [u8; 4],
    /// 0, or the number of the rank that stays away, and 1.
    pub(super) fault: u8,
    pub(super) step: Option<u8>,
    pub(super) blocks: Vec<Block>,
    pub(super) has_stopped: bool,
    /// Whether it has begun anew.
    pub(super) is_again: bool,
}

/// One state of a group.
#[derive(Debug, Clone, Hash)]
pub(crate) struct Group {
    pub(super) memory: Vec<u8>,
    pub(super) ranks: Vec<Rank>,
    /// Ranks by when they were launched last, where deadlines matter.
    pub(super) order: Vec<u8>,
}

#[derive(Debug, Clone, Copy)]
enum Move {
    Launch(usize, usize),
    Run(usize, usize),
    /// A write reaches its mailbox.
    Arrive(usize, usize, usize),
    /// A write of a rank that stopped never does.
    Lose(usize, usize, usize),
    Stop(usize),
    TimeOut(usize, usize),
    /// One rank begins anew, or all do.
    Reset(Option<usize>),
}

/// What is searched.
#[derive(Debug)]
pub(crate) struct Search<'a> {
    pub(crate) program: &'a Program,
    pub(crate) ranks: usize,
    pub(crate) blocks: usize,
    /// Rounds that each rank takes; with three a half of a mailbox is used twice.
    pub(crate) rounds: u8,
    /// Whether the last rank may stop at any moment, is missed, and comes back.
    pub(crate) stops: bool,
    /// Whether ranks begin anew as soon as they know of a fault, not when all launches have ended.
    pub(crate) resets_early: bool,
}

impl Search<'_> {
    pub(super) fn slot(&self, place: Place) -> usize {
        let (ranks, blocks) = (self.ranks, self.blocks);
        let of = |at: u8, phase: u8, half: u8, from: u8| {
            ((usize::from(at) * 2 + usize::from(phase)) * 2 + usize::from(half)) * ranks + usize::from(from)
        };
        let flags = 4 * ranks * ranks;
        match place {
            Place::Flag { at, phase, half, from } => of(at, phase, half, from),
            Place::Message { at, phase, half, from, block } => {
                flags + of(at, phase, half, from) * blocks + usize::from(block)
            }
            Place::FaultRound { at } => flags * (1 + blocks) + usize::from(at),
            Place::Fault { at } => flags * (1 + blocks) + ranks + usize::from(at),
        }
    }

    pub(super) fn sends(step: usize) -> bool {
        step == DISPATCH_SEND || step == COMBINE_SEND
    }

    pub(super) fn everyone(&self) -> impl Iterator<Item = u8> + use<> {
        0..self.ranks as u8
    }
}

impl Group {
    fn new(search: &Search<'_>) -> Self {
        let blocks = vec![Block { at: At::Done, pending: Vec::new() }; search.blocks];
        let (has_stopped, is_again) = (false, false);
        let rank = Rank { rounds: [1; 4], done: [0; 4], fault: 0, step: None, blocks, has_stopped, is_again };
        let words = 4 * search.ranks * search.ranks * (1 + search.blocks) + 2 * search.ranks;
        Self { memory: vec![0; words], ranks: vec![rank; search.ranks], order: Vec::new() }
    }

    /// Goes through all states; how many there are, or the first fault that is found.
    pub(crate) fn explore(search: &Search<'_>) -> Result<usize, Fault> {
        let (mut seen, mut open) = (HashSet::new(), vec![Self::new(search)]);
        while let Some(state) = open.pop() {
            let mut hasher = Xxh3::new();
            state.hash(&mut hasher);
            let low = hasher.finish();
            low.hash(&mut hasher);
            if !seen.insert((low, hasher.finish())) {
                continue;
            }
            let moves = state.only_own(search).map_or_else(|| state.moves(search), |one| vec![one]);
            if moves.is_empty() {
                state.check_end(search.rounds)?;
            }
            for one in moves {
                let mut next = state.clone();
                next.make(search, one)?;
                open.push(next);
            }
        }
        Ok(seen.len())
    }

    fn flag(&self, search: &Search<'_>, at: usize, phase: usize, from: u8) -> u8 {
        let half = self.ranks[at].rounds[2 * phase + 1] % 2;
        self.memory[search.slot(Place::Flag { at: at as u8, phase: phase as u8, half, from })]
    }

    /// The ranks whose message of the receiving step's round is not here.
    pub(super) fn missing(&self, search: &Search<'_>, rank: usize, step: usize) -> impl Iterator<Item = u8> {
        let round = self.ranks[rank].rounds[step];
        search.everyone().filter(move |from| self.flag(search, rank, step / 2, *from) != round)
    }

    pub(super) fn fault_told(&self, search: &Search<'_>, rank: usize) -> u8 {
        self.memory[search.slot(Place::Fault { at: rank as u8 })]
    }

    /// `Peer::at_fault`.
    fn at_fault(&self, search: &Search<'_>, rank: usize, mut whom: u8, mut phase: usize) -> u8 {
        let mut round = self.ranks[rank].rounds[2 * phase + 1];
        for _ in 0..2 {
            round -= u8::from(phase == 0);
            phase = 1 - phase;
            let flag = |at: u8, from: u8| {
                self.memory[search.slot(Place::Flag { at, phase: phase as u8, half: round % 2, from })]
            };
            if round == 0 || flag(rank as u8, rank as u8) != round {
                break;
            }
            match search.everyone().find(|from| flag(whom, *from) != round) {
                Some(from) => whom = from,
                None => break,
            }
        }
        whom
    }

    fn can_launch(&self, rounds_before: u8, rank: usize, step: usize) -> bool {
        let Rank { rounds, fault, .. } = &self.ranks[rank];
        let last = if self.ranks[rank].is_again { ROUNDS_AFTER } else { rounds_before };
        let [next, arrived, sent, finished] = *rounds;
        *fault == 0
            && match step {
                DISPATCH_SEND => next <= last && (next == finished || next == finished + 1),
                DISPATCH_RECEIVE => arrived < next && arrived == finished,
                COMBINE_SEND => sent < arrived,
                _ => finished < sent,
            }
    }

    fn is_blocked(&self, search: &Search<'_>, rank: usize, block: usize) -> bool {
        let Rank { step, blocks, .. } = &self.ranks[rank];
        let Some(step) = step.map(usize::from) else { return true };
        let Block { at, pending } = &blocks[block];
        let fence = |op: Option<&Op>| match op {
            Some(Op::Fence { of_senders }) => !of_senders || Search::sends(step),
            _ => false,
        };
        match *at {
            At::Done => true,
            At::First if Search::sends(step) => false,
            At::First => {
                self.missing(search, rank, step).next().is_some() && self.fault_told(search, rank) == 0
            }
            At::Body => false,
            At::End(op) => !pending.is_empty() && fence(search.program.end.get(usize::from(op))),
            At::Accuse(op, _) => !pending.is_empty() && fence(search.program.accuse.get(usize::from(op))),
        }
    }

    fn is_idle(&self, rank: usize) -> bool {
        self.ranks[rank].step.is_none() || self.ranks[rank].has_stopped
    }

    fn moves(&self, search: &Search<'_>) -> Vec<Move> {
        let mut moves = Vec::new();
        // While some begin anew, those that have wait for the others.
        let begin =
            self.ranks.iter().any(|rank| rank.is_again) && self.ranks.iter().any(|rank| !rank.is_again);
        for (number, rank) in self.ranks.iter().enumerate() {
            for (block, Block { pending, .. }) in rank.blocks.iter().enumerate() {
                for (i, (place, _)) in pending.iter().enumerate() {
                    if pending[..i].iter().all(|(earlier, _)| earlier != place) {
                        moves.push(Move::Arrive(number, block, i));
                        if rank.has_stopped {
                            moves.push(Move::Lose(number, block, i));
                        }
                    }
                }
                if !rank.has_stopped && !self.is_blocked(search, number, block) {
                    moves.push(Move::Run(number, block));
                }
            }
            let waits = begin && rank.is_again;
            if rank.step.is_none() && !rank.has_stopped && !waits {
                moves.extend(
                    (0..4)
                        .filter(|s| self.can_launch(search.rounds, number, *s))
                        .map(|s| Move::Launch(number, s)),
                );
            }
            let knows = rank.fault != 0 || rank.has_stopped;
            if search.resets_early && knows && !rank.is_again && self.is_idle(number) {
                moves.push(Move::Reset(Some(number)));
            }
        }
        let quiet = moves.is_empty();
        let nobody_stopped = self.ranks.iter().all(|rank| !rank.has_stopped && !rank.is_again);
        let last = self.ranks.len() - 1;
        if search.stops && nobody_stopped && self.ranks[last].step.is_some() {
            moves.push(Move::Stop(last));
        }
        if quiet && !nobody_stopped {
            moves.extend(self.when_nothing_moves(search.rounds));
        }
        moves
    }

    /// A move that changes nothing which another rank, or another block, could see or hinder: no order of it
    /// and theirs matters, so that it may as well come first.
    fn only_own(&self, search: &Search<'_>) -> Option<Move> {
        let may_fail = search.stops;
        for (number, rank) in self.ranks.iter().enumerate().filter(|(_, rank)| !rank.has_stopped) {
            let Some(step) = rank.step.map(usize::from) else { continue };
            for (block, Block { at, pending }) in rank.blocks.iter().enumerate() {
                let is_own = match at {
                    At::First => !may_fail && !self.is_blocked(search, number, block),
                    At::Body => Search::sends(step) && !may_fail,
                    At::End(op) => match search.program.end.get(usize::from(*op)) {
                        Some(Op::Fence { .. }) => {
                            pending.is_empty() || !self.is_blocked(search, number, block)
                        }
                        Some(Op::UnlessFailed) => !may_fail || !Search::sends(step),
                        Some(Op::Flags) => !may_fail,
                        Some(Op::Count) => rank.blocks.len() == 1,
                        _ => true,
                    },
                    At::Accuse(..) | At::Done => false,
                };
                if is_own {
                    return Some(Move::Run(number, block));
                }
            }
        }
        None
    }

    /// Who has waited longest gives up; or, if nobody waits any more, all begin anew.
    fn when_nothing_moves(&self, rounds: u8) -> Option<Move> {
        let waiting = |rank: &u8| {
            let Rank { blocks, has_stopped, step, .. } = &self.ranks[usize::from(*rank)];
            let block = blocks.iter().position(|block| block.at == At::First);
            block.filter(|_| !has_stopped && step.is_some()).map(|block| Move::TimeOut((*rank).into(), block))
        };
        let ended =
            |rank: &Rank| rank.has_stopped || rank.fault != 0 || rank.rounds[COMBINE_RECEIVE] > rounds;
        let has_stopped = self.ranks.iter().any(|rank| rank.has_stopped);
        let again = has_stopped && self.ranks.iter().all(ended);
        self.order.iter().find_map(waiting).or_else(|| again.then_some(Move::Reset(None)))
    }

    fn make(&mut self, search: &Search<'_>, one: Move) -> Result<(), Fault> {
        match one {
            Move::Launch(rank, step) => {
                self.ranks[rank].step = Some(step as u8);
                for block in &mut self.ranks[rank].blocks {
                    block.at = At::First;
                }
                if search.stops {
                    self.order.retain(|other| usize::from(*other) != rank);
                    self.order.push(rank as u8);
                }
            }
            Move::Run(rank, block) => self.run(search, rank, block)?,
            Move::Arrive(rank, block, i) => {
                let (place, value) = self.ranks[rank].blocks[block].pending.remove(i);
                self.memory[search.slot(place)] = value;
            }
            Move::Lose(rank, block, i) => {
                self.ranks[rank].blocks[block].pending.remove(i);
            }
            Move::Stop(rank) => self.ranks[rank].has_stopped = true,
            Move::TimeOut(rank, block) => {
                let step = self.ranks[rank].step.map_or(0, usize::from);
                let mut whom = self.missing(search, rank, step).next().unwrap_or(0);
                if search.program.follows {
                    whom = self.at_fault(search, rank, whom, step / 2);
                }
                self.ranks[rank].blocks[block].at = At::Accuse(0, whom);
            }
            Move::Reset(Some(rank)) => self.reset(search, rank),
            Move::Reset(None) => {
                self.check_names()?;
                for rank in 0..search.ranks {
                    self.reset(search, rank);
                }
            }
        }
        Ok(())
    }

    /// Whether all that failed name the same rank, and it is the one that stopped.
    fn check_names(&self) -> Result<(), Fault> {
        let named = |rank: &&Rank| !rank.has_stopped && rank.fault != 0;
        let first = self.ranks.iter().find(named).map(|rank| rank.fault);
        let other = self.ranks.iter().position(|rank| named(&rank) && Some(rank.fault) != first);
        other.map_or(Ok(()), |rank| Err(Fault::Disagree { rank }))?;
        let stopped = |fault: u8| self.ranks[usize::from(fault) - 1].has_stopped;
        let wrong = self.ranks.iter().position(|rank| named(&rank) && !stopped(rank.fault));
        wrong.map_or(Ok(()), |rank| Err(Fault::Blames { rank }))
    }

    /// Where nothing can happen any more, every rank has taken all of its rounds.
    fn check_end(&self, rounds: u8) -> Result<(), Fault> {
        let unfinished = |rank: &Rank| {
            let last = if rank.is_again { ROUNDS_AFTER } else { rounds };
            rank.rounds[COMBINE_RECEIVE] <= last || rank.has_stopped
        };
        self.ranks.iter().position(unfinished).map_or(Ok(()), |rank| Err(Fault::Stuck { rank }))
    }
}
