//! The pool of runs against one of single blocks.

use keyway_wire::block_hash::{Chain, HashKey};
use proptest::prelude::*;

use super::*;

/// The same pool with nothing clever: single blocks, and a list of the released ones, searched and shifted.
#[derive(Default)]
struct Naive {
    capacity: usize,
    blocks: Vec<NaiveBlock>,
    free: Vec<usize>,
    named: u32,
}

#[derive(Default)]
struct NaiveBlock {
    name: Option<BlockHash>,
    users: u32,
    /// Of two blocks with one name the one that was named last is found.
    named_at: u32,
}

impl Naive {
    fn find(&self, chain: &[BlockHash]) -> Vec<usize> {
        let found = |name: &BlockHash| {
            let blocks = self.blocks.iter().enumerate().filter(|(_, block)| block.name == Some(*name));
            blocks.max_by_key(|(_, block)| block.named_at).map(|(id, _)| id)
        };
        chain.iter().map_while(found).collect()
    }

    fn available(&self) -> usize {
        self.capacity - self.blocks.iter().filter(|block| block.users > 0).count()
    }

    fn names(&self) -> Vec<BlockHash> {
        self.blocks.iter().filter_map(|block| block.name).collect()
    }

    fn claim(&mut self, ids: &[usize]) {
        for &id in ids {
            self.free.retain(|free| *free != id);
            self.blocks[id].users += 1;
        }
    }

    fn take(&mut self, removed: &mut Vec<BlockHash>) -> usize {
        let unnamed = self.free.first().is_some_and(|id| self.blocks[*id].name.is_none());
        if self.blocks.len() < self.capacity && !unnamed {
            self.blocks.push(NaiveBlock { users: 1, ..NaiveBlock::default() });
            return self.blocks.len() - 1;
        }
        let id = self.free.remove(0);
        self.blocks[id].users = 1;
        removed.extend(self.blocks[id].name.take());
        id
    }

    fn name(&mut self, id: usize, name: BlockHash) {
        self.named += 1;
        (self.blocks[id].name, self.blocks[id].named_at) = (Some(name), self.named);
    }

    fn release(&mut self, ids: &[usize]) {
        for &id in ids.iter().rev() {
            let block = &mut self.blocks[id];
            block.users -= 1;
            match (block.users, block.name) {
                (0, Some(_)) => self.free.push(id),
                (0, None) => self.free.insert(0, id),
                _ => {}
            }
        }
    }
}

/// A request of both pools.
#[derive(Default)]
struct Request {
    chain: Vec<BlockHash>,
    held: Held,
    ids: Vec<usize>,
}

/// Both pools, which are asked the same.
struct Both {
    pool: BlockPool,
    naive: Naive,
    requests: Vec<Request>,
}

impl Both {
    fn new(capacity: u32) -> Self {
        let naive = Naive { capacity: capacity as usize, ..Naive::default() };
        Self { pool: BlockPool::new(capacity), naive, requests: Vec::new() }
    }

    /// A request that may use so many leading blocks of those cached, and takes so many more.
    fn admit(&mut self, chain: Vec<BlockHash>, usable: usize, more: u32) {
        let usable = usable.min(chain.len());
        let mut request = Request { ids: self.naive.find(&chain[..usable]), chain, held: Held::default() };
        assert_eq!(self.pool.cached(&request.chain), self.naive.find(&request.chain).len());
        let released = self.pool.find(&request.chain[..usable], &mut request.held);
        assert_eq!(request.held.named() as usize, request.ids.len());
        assert_eq!(
            released as usize,
            request.ids.iter().filter(|id| self.naive.blocks[**id].users == 0).count()
        );
        if released + more > self.pool.available() {
            return;
        }
        self.pool.claim(&request.held);
        self.naive.claim(&request.ids);
        self.requests.push(request);
        self.grow(self.requests.len() - 1, more);
    }

    fn grow(&mut self, at: usize, more: u32) {
        let request = &mut self.requests[at];
        let more = more.min(self.pool.available());
        let (mut got, mut want) = (Vec::new(), Vec::new());
        self.pool.take(&mut request.held, more, |names| got.extend(names.iter().rev().copied()));
        request.ids.extend((0..more).map(|_| self.naive.take(&mut want)));
        assert_eq!(got, want, "removed");
    }

    /// Names so many more blocks of a request, as far as it has some.
    fn name(&mut self, at: usize, count: usize) {
        let request = &mut self.requests[at];
        let named = request.held.named() as usize;
        let full = (named + count).min(request.chain.len()).min(request.ids.len());
        if named < full {
            self.pool.name(&mut request.held, &request.chain[named..full]);
            (named..full).for_each(|i| self.naive.name(request.ids[i], request.chain[i]));
        }
    }

    fn release(&mut self, at: usize) {
        let mut request = self.requests.swap_remove(at);
        self.pool.release(&mut request.held);
        self.naive.release(&request.ids);
    }

    fn check(&self) {
        assert_eq!(self.pool.available() as usize, self.naive.available());
        let (mut got, mut want): (Vec<_>, _) = (self.pool.names().collect(), self.naive.names());
        got.sort_unstable();
        want.sort_unstable();
        want.dedup();
        assert_eq!(got, want);
    }

    /// Evicts all that nobody uses.
    fn drain(&mut self) {
        self.requests.push(Request::default());
        self.grow(self.requests.len() - 1, self.pool.available());
        self.check();
        self.release(self.requests.len() - 1);
    }
}

fn chain(ids: &[u8]) -> Vec<BlockHash> {
    let mut chain = Chain::new(HashKey::new(0), b"");
    ids.iter().map(|id| chain.push(&[*id])).collect()
}

#[derive(Debug, Clone)]
enum Step {
    Admit { ids: Vec<u8>, usable: usize, more: u32, name: usize },
    Grow { at: usize, more: u32, name: usize },
    Release { at: usize },
}

/// Prompts that mostly go on like others for a while.
fn steps(length_max: usize) -> impl Strategy<Value = Vec<Step>> {
    let ids = prop::collection::vec(prop_oneof![8 => Just(0u8), 1 => Just(1u8)], 0..length_max);
    let usable = prop_oneof![Just(usize::MAX), 0..length_max];
    let (more, name) = (0..length_max as u32, 0..length_max);
    let admit = (ids, usable, more.clone(), name.clone());
    let at = 0..100usize;
    let step = prop_oneof![
        4 => admit.prop_map(|(ids, usable, more, name)| Step::Admit { ids, usable, more, name }),
        2 => (at.clone(), more, name).prop_map(|(at, more, name)| Step::Grow { at, more, name }),
        3 => at.prop_map(|at| Step::Release { at }),
    ];
    prop::collection::vec(step, 1..100)
}

fn follow(capacity: u32, steps: Vec<Step>) {
    let mut both = Both::new(capacity);
    for step in steps {
        let requests = both.requests.len();
        match step {
            Step::Admit { ids, usable, more, name } => {
                both.admit(chain(&ids), usable, more);
                if both.requests.len() > requests {
                    both.name(requests, name);
                }
            }
            Step::Grow { at, more, name } if requests > 0 => {
                both.grow(at % requests, more);
                both.name(at % requests, name);
            }
            Step::Release { at } if requests > 0 => both.release(at % requests),
            Step::Grow { .. } | Step::Release { .. } => {}
        }
        both.check();
    }
    both.drain();
    while !both.requests.is_empty() {
        both.release(0);
    }
    both.drain();
    assert_eq!(both.pool.runs.released(), 0);
}

proptest! {
    #[test]
    fn the_pool_equals_the_naive_one(capacity in 1u32..12, steps in steps(5)) {
        follow(capacity, steps);
    }

    #[test]
    fn the_pool_equals_the_naive_one_with_long_chains(capacity in 8u32..80, steps in steps(24)) {
        follow(capacity, steps);
    }
}

#[test]
fn twins_are_removed_one_by_one() {
    let mut pool = BlockPool::new(2);
    let name = chain(&[7]);
    let [mut a, mut b] = [(); 2].map(|()| {
        let mut held = Held::default();
        pool.take(&mut held, 1, |_| ());
        held
    });
    pool.name(&mut a, &name);
    pool.name(&mut b, &name);
    pool.release(&mut a);
    pool.release(&mut b);
    let (mut removed, mut held) = (Vec::new(), Held::default());
    pool.take(&mut held, 1, |names| removed.extend_from_slice(names));
    assert_eq!(pool.cached(&name), 1);
    pool.take(&mut held, 1, |names| removed.extend_from_slice(names));
    assert_eq!((pool.cached(&name), removed), (0, [name[0]; 2].to_vec()));
}

#[test]
fn a_run_is_split_where_a_request_uses_a_part_of_it() {
    let mut pool = BlockPool::new(10);
    let (long, other) = (chain(&[0, 0, 0, 0, 0, 0]), chain(&[0, 0, 1]));
    let mut first = Held::default();
    pool.take(&mut first, 6, |_| ());
    pool.name(&mut first, &long);
    let mut second = Held::default();
    assert_eq!((pool.find(&other, &mut second), second.named()), (0, 2));
    pool.claim(&second);
    pool.take(&mut second, 1, |_| ());
    pool.name(&mut second, &other[2..]);
    // The first one's last blocks, which the second one does not use.
    pool.release(&mut first);
    assert_eq!((pool.available(), pool.cached(&long), pool.cached(&other)), (7, 6, 3));
    let mut removed = Vec::new();
    let mut third = Held::default();
    pool.take(&mut third, 5, |names| removed.extend(names.iter().rev().copied()));
    assert_eq!(removed, [long[5], long[4]]);
    pool.release(&mut second);
    pool.take(&mut third, 5, |names| removed.extend(names.iter().rev().copied()));
    assert_eq!(removed[2..], [long[3], long[2], other[2], long[1], long[0]]);
}
