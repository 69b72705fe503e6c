//! How much of a chain each worker holds. As residency is prefix-closed, the sets of holders shrink along the
//! chain, and equal numbers of holders mean equal sets: the search is a bisection by counts, and workers are
//! told apart only where a count says that some of them stop there. Changes nothing.

use keyway_wire::block_hash::BlockHash;
use keyway_wire::spans::Spans;
use smallvec::{SmallVec, smallvec};

use super::crowds::PlaceSet;
use super::forks::Guess;
use super::holders::TOGETHER;
use super::{PrefixIndex, WorkerId};

/// A group with no more than this share of all workers is asked one by one who holds a block: listing its
/// holders asks about every worker.
const LISTED_SHARE: usize = 4;

/// A worker that holds the beginning of a chain.
#[derive(Clone, Copy)]
struct Found {
    place: u16,
    /// Leading names of the chain whose spans it holds.
    names: u32,
}

/// The chain that is searched for, and where its holders are guessed to part.
struct Search<'a> {
    chain: &'a [BlockHash],
    guess: Guess<'a>,
}

/// A length that was looked at, and how many hold so much.
type Look = (usize, usize);

/// How often the holders of some blocks are believed to part further on.
#[derive(Clone, Copy)]
enum Parting {
    /// Once at most; and this length was looked at.
    Seen(Look),
    Once,
    Often,
}

/// Those who hold some of a chain, without an allocation where they are few.
type Holding = SmallVec<[Found; 32]>;

/// How much of one chain each worker holds.
#[derive(Debug)]
pub struct Lengths<'a> {
    index: &'a PrefixIndex,
    by_place: SmallVec<[u32; 32]>,
}

impl Lengths<'_> {
    /// Leading blocks that this worker holds.
    pub fn of(&self, worker: WorkerId) -> u32 {
        self.index.workers.get(worker).map_or(0, |place| self.by_place[usize::from(place)])
    }
}

impl PrefixIndex {
    /// Brings what a search for this chain looks at first into the processor's cache. It waits for nothing,
    /// so it is worth its while where there is something else to do before the search.
    pub fn approach(&self, chain: &[BlockHash]) {
        if let (Some(&root), Some(&last)) = (chain.first(), chain.last()) {
            self.held.approach(self.forks.of(root).sides(chain).chain([last]));
        }
    }

    /// How many leading blocks of what `chain` names each worker holds, to ask for many of them. What an
    /// exact worker is computing counts as held.
    ///
    /// Takes O(log blocks) searches for each distinct length and O(holders of the first block) for each time
    /// that they are halved, so O(holders × log lengths) however many hold the prompt.
    pub fn lengths(&self, chain: &[BlockHash]) -> Lengths<'_> {
        let (mut by_place, spans) = (smallvec![0; self.workers.places()], Spans::of(chain));
        for found in &self.find(chain) {
            by_place[usize::from(found.place)] = spans.blocks(found.names as usize) as u32;
        }
        Lengths { index: self, by_place }
    }

    /// [`PrefixIndex::lengths`] of those that hold the first block, in no particular order.
    pub fn matched(&self, chain: &[BlockHash]) -> Vec<(WorkerId, u32)> {
        let mut matched = Vec::new();
        self.each_match(chain, |worker, blocks| matched.push((worker, blocks)));
        matched
    }

    /// Says of each of those that hold the first block how many blocks it holds; those of one length come one
    /// after the other.
    pub(crate) fn each_match(&self, chain: &[BlockHash], mut says: impl FnMut(WorkerId, u32)) {
        let spans = Spans::of(chain);
        for found in &self.find(chain) {
            says(self.workers[found.place].id, spans.blocks(found.names as usize) as u32);
        }
    }

    /// The workers that hold the first block, those of one length side by side.
    fn find(&self, chain: &[BlockHash]) -> Holding {
        let (Some(&root), Some(&last)) = (chain.first(), chain.last()) else { return Holding::new() };
        let of = |place| Found { place, names: 1 };
        let [of_root, of_last] = self.held.spots([root, last]);
        // Put in where it stays: it is large to be moved.
        let mut found = Holding::new();
        if let Some(spot) = of_root {
            let holders = self.held.count(spot);
            found.reserve(holders);
            if holders == self.workers.len() {
                // All of them, as with a system prompt: no need to find each.
                found.extend(self.workers.iter().map(|(_, place)| of(place)));
            } else if self.held.with_crowd(spot, |places| found.extend(places.iter().map(of))).is_none() {
                found
                    .extend(self.held.list(spot).into_iter().map(|held| of(self.held.cells.worker_of(held))));
            }
            // Who has been sent the very same prompt before holds all of it.
            let whole = of_last.map_or(0, |last| self.held.count(last));
            let search = Search { chain, guess: self.forks.of(root) };
            self.search(&search, &mut found, (1, chain.len() + 1), 0, Parting::Seen((chain.len(), whole)));
        }
        self.expect(chain, &mut found);
        if self.any_checkpoints {
            found.retain(|found| found.names > 0);
        }
        found
    }

    /// Finds the lengths of a group of workers, all of whom hold `held` blocks and none `lost`; so many
    /// `others` hold `lost` blocks too.
    fn search(
        &self,
        search: &Search<'_>,
        mut group: &mut [Found],
        (mut held, mut lost): (usize, usize),
        mut others: usize,
        mut parting: Parting,
    ) {
        while lost - held > 1 && !group.is_empty() {
            let all = group.len() + others;
            let looks = self.look(search, (held, lost), parting);
            let stops = narrow(&looks, (&mut held, &mut lost), (others, all));
            parting = match parting {
                Parting::Seen(_) => Parting::Once,
                Parting::Once if stops.is_none() => Parting::Once,
                Parting::Once | Parting::Often => Parting::Often,
            };
            if let Some((middle, count)) = stops {
                let stop = self.divide(search.chain[middle - 1], count, group);
                let (less, more) = group.split_at_mut(stop);
                self.search(search, more, (middle, lost), others, Parting::Often);
                others += more.len();
                (group, lost) = (less, middle);
            }
        }
        // Who holds all of it says nothing of where others part.
        if held < search.chain.len() && !group.is_empty() {
            search.guess.was(held);
        }
        for found in group {
            found.names = held as u32;
        }
    }

    /// Looks at lengths between `held` and `lost`, in order: on both sides of where holders parted last time,
    /// as mostly they do again, or else in the middle. Two take hardly longer than one, but of many lengths
    /// each is looked at anyway.
    fn look(&self, search: &Search<'_>, (held, lost): (usize, usize), parting: Parting) -> [Look; 2] {
        if let Parting::Seen(look) = parting {
            return [look; 2];
        }
        let block = |length: usize| search.chain[length - 1];
        let guess = search.guess.between(held, lost);
        if let (Parting::Often, None) = (parting, guess) {
            let middle = usize::midpoint(held, lost);
            let [count] = self.counts([block(middle)]);
            return [(middle, count); 2];
        }
        let thirds = || [1, 2].map(|part| held + ((lost - held) * part / 3).max(1));
        let lengths = guess.unwrap_or_else(thirds);
        let counts = self.counts(lengths.map(block));
        [(lengths[0], counts[0]), (lengths[1], counts[1])]
    }

    /// How many workers hold each of these blocks.
    fn counts<const N: usize>(&self, blocks: [BlockHash; N]) -> [usize; N] {
        self.held.spots(blocks).map(|spot| spot.map_or(0, |spot| self.held.count(spot)))
    }

    /// Puts those of the group that do not hold the block in front; says how many they are. The block's
    /// `count` holders are listed if they are few enough to lie together, or the group is large; else each of
    /// the group is searched for.
    fn divide(&self, block: BlockHash, count: usize, group: &mut [Found]) -> usize {
        let is_listed = count <= TOGETHER || group.len() > self.workers.places() / LISTED_SHARE;
        if count > group.len() || !is_listed {
            return partition(group, |found| self.held.find(block, found.place).is_some());
        }
        let Some(spot) = self.held.spot(block) else { return group.len() };
        if let Some(less) =
            self.held.with_crowd(spot, |places| partition(group, |found| places.has(found.place)))
        {
            return less;
        }
        let mut holders = PlaceSet::new(self.workers.places());
        self.held.list(spot).into_iter().for_each(|held| holders.add(self.held.cells.worker_of(held)));
        partition(group, |found| holders.has(found.place))
    }

    /// Adds what exact workers are computing. Groups of one length lie side by side, so that there are few
    /// searches.
    fn expect(&self, chain: &[BlockHash], found: &mut Holding) {
        if self.any_checkpoints {
            for found in found.iter_mut().filter(|found| self.workers[found.place].by_checkpoints) {
                found.names = self.up_to_checkpoint(chain, found.place, found.names);
            }
        }
        if self.expected.is_empty() {
            return;
        }
        let run = |place, held: u32| {
            if self.workers[place].by_checkpoints {
                return if held == 0 { self.up_to_checkpoint(chain, place, 0) } else { held };
            }
            let more = chain[held as usize..].iter().take_while(|block| self.expected.has(**block, place));
            held + more.count() as u32
        };
        for group in found.chunk_by_mut(|a, b| a.names == b.names) {
            let next = chain.get(group[0].names as usize);
            if next.is_some_and(|next| self.expected.places(*next).next().is_some()) {
                for found in group {
                    found.names = run(found.place, found.names);
                }
            }
        }
        // Those that hold nothing of it yet.
        let new = self.expected.places(chain[0]).filter(|&place| self.held.find(chain[0], place).is_none());
        found.extend(new.map(|place| Found { place, names: run(place, 0) }));
    }
}

/// Narrows lengths that all hold, and no more than the `others` do, by what was looked at. Says where only
/// some of the rest hold so much.
fn narrow(
    looks: &[Look],
    (held, lost): (&mut usize, &mut usize),
    (others, all): (usize, usize),
) -> Option<Look> {
    let mut stops = None;
    for &(length, count) in looks {
        if count >= all {
            (*held, stops) = (length, None);
        } else if count <= others {
            *lost = length;
            break; // So do those behind it, unless two hashes collide.
        } else {
            stops = Some((length, count));
        }
    }
    stops
}

/// Puts those of the group in front of which `holds` is false; says how many they are.
fn partition(group: &mut [Found], holds: impl Fn(&Found) -> bool) -> usize {
    let mut without = 0;
    for i in 0..group.len() {
        if !holds(&group[i]) {
            group.swap(i, without);
            without += 1;
        }
    }
    without
}
