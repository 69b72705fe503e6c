//! Runs of cached blocks: blocks of one chain, one after the other, with the same users. Those that nobody
//! uses are in the order of their release; of each its last block was released first.

use std::{
    ops::{Index, IndexMut},
    sync::Arc,
};

use keyway_wire::block_hash::BlockHash;

/// No run: the end of a list.
pub(super) const NIL: u32 = u32::MAX;

/// All runs of one pool.
#[derive(Debug)]
pub(super) struct Runs {
    all: Vec<Run>,
    /// A place in `all` without a run, and by `after` the others.
    vacant: u32,
    /// Released runs, the next one to be evicted first.
    oldest: u32,
    latest: u32,
    /// Blocks of all released runs together.
    released: u32,
}

#[derive(Debug, Clone)]
pub(super) struct Run {
    /// The first of its names, beside what is looked at with it.
    pub(super) first: BlockHash,
    /// Names of its blocks, and of those of the runs that it was split from.
    names: Arc<[BlockHash]>,
    /// Where its own begin.
    start: u32,
    pub(super) len: u32,
    pub(super) users: u32,
    /// Neighbours among the released runs.
    before: u32,
    after: u32,
    /// Next run of the same first name.
    pub(super) twin: u32,
    /// What followed when it was split last. Means nothing to those that began to use it later.
    pub(super) rest: u32,
}

// === impl Run ===

impl Run {
    /// Blocks that have just been computed, with one user.
    pub(super) fn new(names: &[BlockHash]) -> Self {
        Self {
            first: names[0],
            names: names.into(),
            start: 0,
            len: names.len() as u32,
            users: 1,
            before: NIL,
            after: NIL,
            twin: NIL,
            rest: NIL,
        }
    }

    /// Names of its blocks, at least one.
    pub(super) fn names(&self) -> &[BlockHash] {
        &self.names[self.start as usize..][..self.len as usize]
    }
}

// === impl Runs ===

impl Default for Runs {
    fn default() -> Self {
        Self { all: Vec::new(), vacant: NIL, oldest: NIL, latest: NIL, released: 0 }
    }
}

impl Index<u32> for Runs {
    type Output = Run;

    fn index(&self, run: u32) -> &Run {
        &self.all[run as usize]
    }
}

impl IndexMut<u32> for Runs {
    fn index_mut(&mut self, run: u32) -> &mut Run {
        &mut self.all[run as usize]
    }
}

impl Runs {
    /// Blocks that are cached and that nobody uses.
    pub(super) fn released(&self) -> u32 {
        self.released
    }

    /// The run released longest ago.
    pub(super) fn oldest(&self) -> Option<u32> {
        (self.oldest != NIL).then_some(self.oldest)
    }

    pub(super) fn insert(&mut self, run: Run) -> u32 {
        let at = self.vacant;
        if at == NIL {
            self.all.push(run);
            return self.all.len() as u32 - 1;
        }
        self.vacant = self[at].after;
        self[at] = run;
        at
    }

    /// Forgets a run that is not among the released ones.
    pub(super) fn remove(&mut self, run: u32) {
        let vacant = self.vacant;
        let entry = &mut self[run];
        (entry.names, entry.after) = (Arc::default(), vacant);
        self.vacant = run;
    }

    /// Takes the last `count` blocks of a released run away, but not all.
    pub(super) fn shorten(&mut self, run: u32, count: u32) {
        self[run].len -= count;
        self.released -= count;
    }

    /// Makes two runs of one, with the same users: its first `len` blocks, and the others, whose number is
    /// given.
    pub(super) fn split(&mut self, run: u32, len: u32) -> u32 {
        let front = &mut self[run];
        let mut rest = front.clone();
        (rest.start, rest.len) = (front.start + len, front.len - len);
        rest.first = rest.names[rest.start as usize];
        front.len = len;
        let (users, before) = (front.users, front.before);
        if users == 0 {
            // Its last blocks are evicted first.
            rest.after = run;
        }
        let rest = self.insert(rest);
        self[run].rest = rest;
        if users == 0 {
            self[run].before = rest;
            match before {
                NIL => self.oldest = rest,
                before => self[before].after = rest,
            }
        }
        rest
    }

    /// Nobody uses it any more.
    pub(super) fn link_last(&mut self, run: u32) {
        let latest = self.latest;
        let entry = &mut self[run];
        (entry.before, entry.after) = (latest, NIL);
        self.released += self[run].len;
        match latest {
            NIL => self.oldest = run,
            latest => self[latest].after = run,
        }
        self.latest = run;
    }

    /// It is no longer among the released ones.
    pub(super) fn unlink(&mut self, run: u32) {
        let Run { before, after, len, .. } = self[run];
        match before {
            NIL => self.oldest = after,
            before => self[before].after = after,
        }
        match after {
            NIL => self.latest = before,
            after => self[after].before = before,
        }
        self.released -= len;
    }
}
