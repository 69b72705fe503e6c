//! Prompts that one engine computes and another goes on from: with the same tokens, wherever it had begun
//! itself; and holds that end in every way, with nothing left.

use std::sync::mpsc::{Receiver, Sender};

use tokio::sync::oneshot;

use super::*;
use crate::engine::block_manager::CacheChange;
use crate::engine::holds::{Asked, Begun, BlockKv, Hold, HoldError, Holder, Imported};

/// An engine, and the way to it.
struct Held {
    engine: Engine,
    inbox: Sender<Message>,
    receiver: Receiver<Message>,
}

impl Held {
    fn new(setup: Setup) -> Self {
        let (inbox, receiver) = channel();
        Self { engine: engine(setup), inbox, receiver }
    }

    fn add(&mut self, request: GenerationRequest) -> Generation {
        let keeper = request.keep.then(|| Holder(self.inbox.clone()));
        let slots = Arc::new(Semaphore::new(1));
        let (mut sequence, generation) =
            Sequence::new(request, slots.try_acquire_owned().unwrap(), Instant::now());
        sequence.keeper = keeper;
        self.engine.scheduler.add(sequence);
        generation
    }

    /// What reached it is done.
    fn receive(&mut self) {
        while let Ok(message) = self.receiver.try_recv() {
            self.engine.receive(message);
        }
        self.engine.scheduler.check().unwrap();
    }

    /// Runs everything to its end; the events of this one.
    fn events(&mut self, mut generation: Generation) -> Vec<Event> {
        self.receive();
        while !self.engine.is_idle() {
            step(&mut self.engine);
            self.receive();
        }
        let mut context = Context::from_waker(std::task::Waker::noop());
        let next = || match generation.poll_next(&mut context) {
            Poll::Ready(event) => event,
            Poll::Pending => panic!("the generation ended without its last event"),
        };
        std::iter::from_fn(next).collect()
    }

    /// Computes a prompt for another engine.
    fn prefill(&mut self, request: &GenerationRequest) -> Option<Arc<Hold>> {
        let generation = self.add(GenerationRequest { max_tokens: 1, keep: true, ..request.clone() });
        let mut events = self.events(generation);
        assert!(matches!(events.pop(), Some(Event::Token(_))), "the token comes last");
        match events.pop() {
            Some(Event::Kept(hold)) => Some(hold),
            None => None,
            other => panic!("{other:?}"),
        }
    }

    fn ask<T>(&mut self, asked: impl FnOnce(oneshot::Sender<T>) -> Asked) -> T {
        let (reply, mut answer) = oneshot::channel();
        self.engine.hold(asked(reply));
        self.engine.scheduler.check().unwrap();
        answer.try_recv().unwrap()
    }

    fn begin(&mut self, tokens: &[u32], salt: &Arc<[u8]>) -> Option<Begun> {
        let (tokens, salt, holder) = (tokens.to_vec(), Arc::clone(salt), Holder(self.inbox.clone()));
        self.ask(|reply| Asked::Begin { tokens, salt, holder, reply })
    }

    fn copy(&mut self, hold: &Hold, places: std::ops::Range<usize>) -> Result<Vec<BlockKv>, HoldError> {
        self.ask(|reply| Asked::Copy { id: hold.id(), places, reply })
    }

    fn adopt(&mut self, hold: &Hold, blocks: Vec<BlockKv>) -> Result<(), HoldError> {
        self.ask(|reply| Asked::Adopt { id: hold.id(), blocks, reply })
    }

    /// Takes in what another engine holds, all of it or the first so many blocks.
    fn import(&mut self, from: &mut Self, kept: &Hold, most: usize) -> Imported {
        let salt = Arc::from(kept.salt());
        let Begun { hold, first, local_tokens } = self.begin(kept.tokens(), &salt).unwrap();
        let end = kept.tokens().len() / self.engine.backend.block_size();
        for place in (first..end).take(most) {
            let blocks = from.copy(kept, place..place + 1).unwrap();
            self.adopt(&hold, blocks).unwrap();
        }
        Imported::new(hold, local_tokens)
    }

    fn used(&self) -> usize {
        self.engine.scheduler.blocks().used_blocks()
    }
}

fn tokens_of(events: Vec<Event>) -> Vec<TokenEvent> {
    events.into_iter().filter_map(token).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn what_another_engine_computed_is_gone_on_from(
        prompt in prop::collection::vec(0u32..2, 1..60),
        warm in prop::collection::vec(0u32..2, 0..60),
        most in 0usize..20,
        block_size in 1usize..9,
        chunk in 1usize..30,
        groups in groups(),
    ) {
        let limits = StepLimits { max_batched_tokens: chunk, max_running: 1 };
        let setup = Setup { groups, block_size, limits, ..ROOMY };
        let wanted = GenerationRequest { salt: Arc::from(&b"s"[..]), ..request(&prompt, 8, 0.8) };
        let expected = run(setup, std::slice::from_ref(&wanted)).remove(0);
        let (mut first, mut second) = (Held::new(setup), Held::new(setup));
        // Something is cached there already, perhaps a part of the prompt.
        if !warm.is_empty() {
            let other = second.add(GenerationRequest { prompt: warm, ..wanted.clone() });
            second.events(other);
        }
        let kept = first.prefill(&wanted).unwrap();
        let whole = (prompt.len() - 1) / block_size;
        prop_assert_eq!(kept.tokens().len(), whole * block_size);
        let imported = second.import(&mut first, &kept, most);
        drop(kept);
        first.receive();
        prop_assert_eq!(first.used(), 0, "nothing is held once it was fetched");
        let local = imported.local_tokens;
        let generation = second.add(GenerationRequest { imported: Some(imported), ..wanted });
        let events = tokens_of(second.events(generation));
        prop_assert_eq!(second.used(), 0);
        prop_assert_eq!(events[0].cached_tokens, local, "what came is not counted as cached");
        let all_came = most >= whole;
        let external = second.engine.metrics.external_tokens.get() as usize;
        if all_came {
            prop_assert_eq!(external, whole * block_size - local);
        }
        prop_assert!(external <= whole * block_size);
        prop_assert_eq!(second.engine.metrics.external_wanted_tokens.get() as usize, prompt.len() - local);
        prop_assert_eq!(events.iter().map(|event| event.token).collect::<Vec<_>>(), expected);
    }
}

/// The backend of the second engine sees only what did not come.
#[test]
fn the_last_block_alone_is_computed_behind_what_came() {
    for groups in [FULL, HYBRID] {
        let setup = Setup { groups, ..ROOMY };
        let wanted = GenerationRequest { ignore_eos: true, ..request(&[5; 41], 3, 0.0) };
        let mut first = Held::new(setup);
        let backend = Remembering::new(setup.block_size, setup.num_blocks, groups);
        let computed = Arc::clone(&backend.computed);
        let mut second = Held { engine: engine_with(setup, Box::new(backend)), ..Held::new(setup) };
        let kept = first.prefill(&wanted).unwrap();
        let imported = second.import(&mut first, &kept, 10);
        let generation = second.add(GenerationRequest { imported: Some(imported), ..wanted });
        second.events(generation);
        assert_eq!(computed.load(std::sync::atomic::Ordering::Relaxed), 1 + 2);
    }
}

#[test]
fn what_came_is_announced_and_found_by_others_with_the_same_salt_alone() {
    let wanted = GenerationRequest { salt: Arc::from(&b"s"[..]), ..request(&[7; 21], 1, 0.0) };
    let (mut first, mut second) = (Held::new(ROOMY), Held::new(ROOMY));
    second.engine.scheduler.record_changes();
    let kept = first.prefill(&wanted).unwrap();
    let imported = second.import(&mut first, &kept, 9);
    let resident = second.engine.scheduler.blocks().resident();
    assert_eq!(resident.len(), 5);
    assert!(
        resident.iter().all(|stored| matches!(stored, CacheChange::Stored { salt, .. } if **salt == *b"s"))
    );
    drop(imported);
    let cached = |second: &mut Held, request: GenerationRequest| {
        let generation = second.add(request);
        tokens_of(second.events(generation))[0].cached_tokens
    };
    assert_eq!(cached(&mut second, GenerationRequest { salt: Arc::from([]), ..wanted.clone() }), 0);
    assert_eq!(cached(&mut second, wanted), 20);
}

#[test]
fn a_client_that_leaves_leaves_nothing_behind() {
    let mut first = Held::new(ROOMY);
    let wanted = GenerationRequest { keep: true, ..request(&[7; 21], 1, 0.0) };
    // Before the prompt is computed, and behind it, with the events unread.
    for steps in 0..2 {
        let generation = first.add(wanted.clone());
        for _ in 0..steps {
            step(&mut first.engine);
        }
        assert_eq!(first.used() > 0, steps > 0);
        drop(generation);
        while !first.engine.is_idle() {
            step(&mut first.engine);
        }
        first.receive();
        assert_eq!((first.used(), first.engine.metrics.kv_blocks_held.get()), (0, 0));
    }
}

#[test]
fn so_much_is_held_and_no_more() {
    let mut first = Held::new(Setup { num_blocks: 40, ..ROOMY });
    let prompt = |i: u32| request(&[i + 10; 21], 1, 0.0);
    let kept: Vec<_> = (0..6).map(|i| first.prefill(&prompt(i))).collect();
    let held: Vec<bool> = kept.iter().map(Option::is_some).collect();
    assert_eq!(held, [true, true, true, true, false, false], "half of the blocks may be held");
    assert_eq!((first.used(), first.engine.metrics.kv_blocks_held.get()), (20, 20));
    assert!(first.begin(&[7; 4], &Arc::from([])).is_none(), "nor for what comes");
    drop(kept);
    first.receive();
    assert_eq!(first.used(), 0);
    assert!(first.prefill(&prompt(7)).is_some());
}

/// Sequences that run, and one that could not begin, take the blocks of holds, the oldest first.
#[test]
fn holds_yield_to_sequences() {
    let mut first = Held::new(Setup { num_blocks: 40, ..ROOMY });
    let kept: Vec<_> = (0..4).filter_map(|i| first.prefill(&request(&[i + 10; 21], 1, 0.0))).collect();
    assert_eq!((kept.len(), first.used()), (4, 20));
    // 30 blocks: two holds must go, and a third as it grows.
    let long = GenerationRequest { ignore_eos: true, ..request(&[9; 120], 21, 0.0) };
    let generation = first.add(long.clone());
    assert_eq!(tokens_of(first.events(generation)).len(), 21);
    let gone: Vec<bool> = kept.iter().map(|hold| first.copy(hold, 0..1).is_err()).collect();
    assert_eq!(gone, [true, true, true, false]);
    assert_eq!(first.copy(&kept[0], 0..1), Err(HoldError::Gone));
    drop(kept);
    first.receive();
    assert_eq!(first.used(), 0);
    assert_eq!(first.engine.metrics.preemptions.get(), 0);
}

#[test]
fn what_does_not_come_in_order_or_in_size_is_refused() {
    let (mut first, mut second) = (Held::new(ROOMY), Held::new(ROOMY));
    let kept = first.prefill(&request(&[7; 21], 1, 0.0)).unwrap();
    let blocks = first.copy(&kept, 0..5).unwrap();
    let Begun { hold, .. } = second.begin(kept.tokens(), &Arc::from([])).unwrap();
    assert_eq!(second.adopt(&hold, vec![blocks[1].clone()]), Err(HoldError::NoRoom), "the second first");
    let foreign = BlockKv { group: 1, ..blocks[0].clone() };
    assert_eq!(second.adopt(&hold, vec![foreign]), Err(HoldError::NoRoom), "of a group that is not there");
    let short = BlockKv { bytes: vec![0; 3], ..blocks[0].clone() };
    assert_eq!(second.adopt(&hold, vec![short]), Err(HoldError::NoCopies));
    assert_eq!(second.used(), 0, "the block was given back");
    let beyond = BlockKv { place: 5, ..blocks[0].clone() };
    assert_eq!(second.adopt(&hold, [&blocks[..], &[beyond]].concat()), Err(HoldError::NoRoom));
    assert_eq!(second.used(), 5, "what came before it is there");
    drop(hold);
    second.receive();
    assert_eq!(second.used(), 0);
}

#[test]
fn a_step_that_fails_forgets_what_is_held() {
    let mut first = Held::new(ROOMY);
    let kept = first.prefill(&request(&[7; 21], 1, 0.0)).unwrap();
    first.engine.scheduler.fail_all("on purpose");
    assert_eq!(first.copy(&kept, 0..1), Err(HoldError::Gone));
    drop(kept);
    first.receive();
    assert_eq!(first.used(), 0);
}
