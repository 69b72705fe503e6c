//! Who holds the runs that many workers hold, of the few such runs that were asked about lately: a bit
//! for each worker's place. To list a thousand holders of a system prompt from the table takes as long as all
//! else of a choice together; this is read in a moment, and kept as holders come and go.

use smallvec::{SmallVec, smallvec};

/// Holders from which on a run has a crowd.
pub(super) const CROWD_MIN: usize = 32;
/// Crowds at a time: of a thousand workers in 2 KB together, of as many as an index may know in 128 KB.
const CROWDS: usize = 16;

/// The holders of at most so many runs as there are places here.
pub(super) struct Crowds([Option<Crowd>; CROWDS]);

struct Crowd {
    run: u32,
    places: PlaceSet,
}

/// A set of workers' places.
pub(super) struct PlaceSet(SmallVec<[u64; 4]>);

impl Crowds {
    pub(super) const fn new() -> Self {
        Self([const { None }; CROWDS])
    }

    /// Of this run, if they are known.
    pub(super) fn of(&self, run: u32) -> Option<&PlaceSet> {
        let crowd = self.0[at(run)].as_ref().filter(|crowd| crowd.run == run)?;
        Some(&crowd.places)
    }

    /// Keeps them, in place of those of another run.
    pub(super) fn keep(&mut self, run: u32, places: PlaceSet) {
        self.0[at(run)] = Some(Crowd { run, places });
    }

    /// One more holds this run.
    pub(super) fn came(&mut self, run: u32, place: u16) {
        if let Some(crowd) = self.crowd(run) {
            crowd.places.add(place);
        }
    }

    /// One no longer holds this run, which so many still do.
    pub(super) fn left(&mut self, run: u32, place: u16, holders: usize) {
        if let Some(crowd) = self.crowd(run) {
            crowd.places.take(place);
            if holders < CROWD_MIN / 2 {
                self.0[at(run)] = None;
            }
        }
    }

    fn crowd(&mut self, run: u32) -> Option<&mut Crowd> {
        self.0[at(run)].as_mut().filter(|crowd| crowd.run == run)
    }
}

/// Runs' numbers follow each other, but those that are asked about stand apart.
fn at(run: u32) -> usize {
    (run.wrapping_mul(0x9E37_79B9) >> 16) as usize % CROWDS
}

impl PlaceSet {
    /// None of so many places.
    pub(super) fn new(places: usize) -> Self {
        Self(smallvec![0; places.div_ceil(64)])
    }

    pub(super) fn add(&mut self, place: u16) {
        let word = usize::from(place / 64);
        if self.0.len() <= word {
            self.0.resize(word + 1, 0);
        }
        self.0[word] |= 1 << (place % 64);
    }

    fn take(&mut self, place: u16) {
        if let Some(word) = self.0.get_mut(usize::from(place / 64)) {
            *word &= !(1 << (place % 64));
        }
    }

    pub(super) fn has(&self, place: u16) -> bool {
        self.0.get(usize::from(place / 64)).is_some_and(|word| word & 1 << (place % 64) != 0)
    }

    /// Those in it, from the first on.
    pub(super) fn iter(&self) -> impl Iterator<Item = u16> {
        (0_u16..).step_by(64).zip(&self.0).flat_map(|(first, word)| {
            let some = |word: u64| (word != 0).then_some(word);
            let bits = std::iter::successors(some(*word), move |word| some(word & (word - 1)));
            bits.map(move |word| first + word.trailing_zeros() as u16)
        })
    }
}
