//! The queue of blocks without holders: a doubly linked list over block numbers, every operation O(1), no
//! allocation. It knows nothing of caching; the order is its user's.

use super::BlockId;

const NONE: BlockId = BlockId::MAX;

/// Links of one block; meaningful while it is in the list.
#[derive(Debug, Clone, Copy)]
struct Links {
    prev: BlockId,
    next: BlockId,
}

#[derive(Debug)]
pub(super) struct FreeList {
    links: Vec<Links>,
    head: BlockId,
    tail: BlockId,
    len: usize,
}

impl FreeList {
    /// A list of all block numbers, the lowest first.
    pub(super) fn full(num_blocks: usize) -> Self {
        let links = vec![Links { prev: NONE, next: NONE }; num_blocks];
        let mut list = Self { links, head: NONE, tail: NONE, len: 0 };
        for block in 0..num_blocks {
            list.push_back(block as BlockId);
        }
        list
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn push_back(&mut self, block: BlockId) {
        self.links[block as usize] = Links { prev: self.tail, next: NONE };
        match self.tail {
            NONE => self.head = block,
            tail => self.links[tail as usize].next = block,
        }
        self.tail = block;
        self.len += 1;
    }

    pub(super) fn push_front(&mut self, block: BlockId) {
        self.links[block as usize] = Links { prev: NONE, next: self.head };
        match self.head {
            NONE => self.tail = block,
            head => self.links[head as usize].prev = block,
        }
        self.head = block;
        self.len += 1;
    }

    pub(super) fn pop_front(&mut self) -> Option<BlockId> {
        let head = self.head;
        (head != NONE).then(|| {
            self.remove(head);
            head
        })
    }

    /// Takes out `block`, which must be in the list.
    pub(super) fn remove(&mut self, block: BlockId) {
        let Links { prev, next } = self.links[block as usize];
        match prev {
            NONE => self.head = next,
            prev => self.links[prev as usize].next = next,
        }
        match next {
            NONE => self.tail = prev,
            next => self.links[next as usize].prev = prev,
        }
        self.len -= 1;
    }

    /// From the next one given out to the last.
    pub(super) fn iter(&self) -> impl Iterator<Item = BlockId> {
        // Bounded by `len`, so that a broken link cannot loop forever.
        let next = |block: BlockId| (block != NONE).then_some(block);
        std::iter::successors(next(self.head), move |b| next(self.links[*b as usize].next)).take(self.len + 1)
    }
}
