//! Blocks that one event says together are known as if it had said them one by one.

use super::*;

/// What an event says: of a prompt, the blocks from one on, and how many.
#[derive(Debug, Clone)]
struct Said {
    prompt: Prefix,
    from: usize,
    stores: bool,
    elsewhere: bool,
    /// Of a removal: from the last block on.
    backwards: bool,
}

fn said() -> impl Strategy<Value = Said> {
    let prompt = prop::collection::vec(0_u32..2, 1..9);
    (prompt, 0_usize..9, prop::bool::weighted(0.6), prop::bool::weighted(0.1), prop::bool::weighted(0.7))
        .prop_map(|(prompt, from, stores, elsewhere, backwards)| {
            let from = from % prompt.len();
            Said { prompt, from, stores, elsewhere, backwards }
        })
}

impl Said {
    /// One event for each of these blocks, in order.
    fn one_by_one(&self) -> Vec<KvEvent> {
        let lens = self.from + 1..=self.prompt.len();
        let lens: Vec<usize> =
            if self.backwards && !self.stores { lens.rev().collect() } else { lens.collect() };
        let events = lens.into_iter().map(|len| {
            let prefix = &self.prompt[..len];
            let event = if self.stores { Engine::stored(prefix) } else { remove(Engine::hash(prefix)) };
            if self.elsewhere { elsewhere(event) } else { event }
        });
        events.collect()
    }

    /// The same in one event.
    fn together(&self) -> KvEvent {
        let mut events = self.one_by_one().into_iter();
        let mut all = events.next().unwrap();
        for event in events {
            match (&mut all, event) {
                (KvEvent::BlockStored(all), KvEvent::BlockStored(event)) => {
                    all.block_hashes.extend(event.block_hashes);
                    all.token_ids.extend(event.token_ids);
                }
                (KvEvent::BlockRemoved(all), KvEvent::BlockRemoved(event)) => {
                    all.block_hashes.extend(event.block_hashes);
                }
                _ => unreachable!("all are of one kind"),
            }
        }
        all
    }
}

/// The blocks that the worker holds under each of its names, of a prompt.
fn held(worker: &Simple, prompt: &[u32]) -> Vec<[bool; 2]> {
    let tokens: Vec<u32> = prompt.iter().flat_map(|id| [*id, 0]).collect();
    let chain = space(b"").chain(key(), &tokens);
    let index = worker.index.index();
    chain.iter().map(|block| [WORKER, ANY_TIER].map(|worker| index.holds(worker, *block))).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn many_blocks_at_once_are_as_one_by_one(
        all in prop::collection::vec(said(), 1..40),
        steps in 1_usize..9,
    ) {
        let (mut many, mut single) = (Simple::with_tiers(), Simple::with_tiers());
        (many.index.steps, single.index.steps) = (steps, steps);
        for said in &all {
            many.events(vec![said.together()]);
            single.events(said.one_by_one());
            prop_assert_eq!(many.feed.stats(), single.feed.stats());
            prop_assert_eq!(many.feed.blocks.len(), single.feed.blocks.len());
            for said in &all {
                prop_assert_eq!(held(&many, &said.prompt), held(&single, &said.prompt), "{:?}", said);
            }
            let lens = [&many, &single].map(|worker| worker.index.index().len());
            prop_assert_eq!(lens[0], lens[1]);
        }
    }
}
