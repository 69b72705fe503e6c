//! The layer over ranks against the dense loop, bit for bit, over every transport; and ranks that misbehave.

use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::check::{same_bits, values};
use crate::elementwise::silu_mul;
use crate::fabric::tests::{each, groups};
use crate::matmul::{self, PackedMatrix, WeightType};
use crate::moe::{Grouping, combine};

const PATIENCE: Duration = Duration::from_secs(30);
const WIDTH: usize = 48;
const INNER: usize = 24;
const LAYER: u32 = 3;

/// Gated networks; only those that a mask names are held.
struct Networks {
    compute: Compute,
    gate_up: Vec<PackedMatrix>,
    down: Vec<PackedMatrix>,
    held: Vec<bool>,
}

impl Networks {
    fn new(experts: usize, held: impl Fn(usize) -> bool) -> Self {
        let matrix = |outputs: usize, inputs: usize, seed: usize| {
            let w = values(seed as u64, outputs * inputs);
            PackedMatrix::pack(outputs, inputs, WeightType::F32, |n, row| {
                row.copy_from_slice(&w[n * inputs..][..inputs]);
            })
        };
        Self {
            compute: Compute::single(),
            gate_up: (0..experts).map(|e| matrix(2 * INNER, WIDTH, 2 * e + 1)).collect(),
            down: (0..experts).map(|e| matrix(WIDTH, INNER, 2 * e + 2)).collect(),
            held: (0..experts).map(held).collect(),
        }
    }
}

impl Experts for Networks {
    fn shape(&self, layer: u32) -> Option<(usize, usize)> {
        (layer == LAYER).then_some((WIDTH, self.held.len()))
    }

    fn holds(&self, _: u32, expert: usize) -> bool {
        self.held[expert]
    }

    fn run(&mut self, _: u32, expert: usize, x: &[f32], out: &mut [f32]) {
        assert!(self.held[expert], "an expert that is not held was asked");
        let rows = x.len() / WIDTH;
        let (mut gate_up, mut gated) = (vec![0.0; rows * 2 * INNER], vec![0.0; rows * INNER]);
        matmul::cpu(&self.compute, x, &self.gate_up[expert], &mut gate_up);
        silu_mul(&self.compute, &gate_up, INNER, &mut gated);
        matmul::cpu(&self.compute, &gated, &self.down[expert], out);
    }
}

/// The tokens of one rank.
#[derive(Debug, Clone)]
struct Batch {
    x: Vec<f32>,
    ids: Vec<u32>,
    weights: Vec<f32>,
}

impl Batch {
    fn new(seed: usize, tokens: usize, top: usize, id: impl Fn(usize) -> usize) -> Self {
        Self {
            x: values(seed as u64 + 100, tokens * WIDTH),
            ids: (0..tokens * top).map(|slot| id(slot) as u32).collect(),
            weights: values(seed as u64 + 200, tokens * top),
        }
    }

    fn tokens(&self, top: usize) -> LayerTokens<'_> {
        LayerTokens { layer: LAYER, top, x: &self.x, ids: &self.ids, weights: &self.weights }
    }

    /// The layer as one rank computes it alone, token by token, expert by expert.
    fn dense(&self, top: usize, experts: usize) -> Vec<f32> {
        let mut networks = Networks::new(experts, |_| true);
        let mut grouping = Grouping::default();
        grouping.group(&self.ids, experts);
        let mut rows = vec![f32::NAN; self.ids.len() * WIDTH];
        for (slot, id) in self.ids.iter().enumerate() {
            let place = grouping.places[slot] as usize * WIDTH;
            let x = &self.x[slot / top * WIDTH..][..WIDTH];
            networks.run(LAYER, *id as usize, x, &mut rows[place..place + WIDTH]);
        }
        let mut out = vec![f32::NAN; self.x.len()];
        combine(&Compute::single(), &rows, &grouping.places, &self.weights, top, &mut out);
        out
    }
}

/// Every rank's outputs are those of the dense loop, over every transport; twice, for what is left of the
/// first time.
fn check(placement: &Placement, top: usize, batches: &[Batch]) {
    let (ranks, experts) = (placement.ranks(), placement.experts());
    let expected: Vec<Vec<f32>> = batches.iter().map(|batch| batch.dense(top, experts)).collect();
    let most = batches.iter().map(|batch| batch.ids.len() / top).max().unwrap_or(0);
    for (name, group) in groups(ranks, capacity_for(most, experts, top, WIDTH)) {
        each(group, |mut fabric| {
            let rank = fabric.rank();
            let mut networks = Networks::new(experts, |expert| placement.holds(rank, expert));
            let (mut parallel, batch) = (Parallel::default(), &batches[rank]);
            for _ in 0..2 {
                let mut out = vec![f32::NAN; batch.x.len()];
                let (tokens, compute) = (batch.tokens(top), Compute::single());
                let done = parallel.run(
                    &compute,
                    &mut *fabric,
                    placement,
                    tokens,
                    &mut networks,
                    &mut out,
                    PATIENCE,
                );
                done.unwrap();
                assert!(same_bits(&out, &expected[rank]), "{name}, {ranks} ranks, rank {rank}");
            }
        });
    }
}

#[test]
fn every_routing_gives_the_bits_of_the_dense_loop_over_every_transport() {
    let (experts, tokens) = (8, 21);
    for ranks in [1, 2, 4] {
        let placement = Placement::even(experts, ranks);
        let routings: [(usize, &dyn Fn(usize) -> usize); 5] = [
            (2, &|slot| slot * 5 % 8),                                    // uniform
            (2, &|slot| if slot % 5 == 4 { slot % 8 } else { slot % 2 }), // skewed
            (1, &|_| 6),                                                  // all to one expert
            (3, &|slot| slot % 3),                                        // ranks without rows
            (8, &|slot| slot % 8),                                        // k = E
        ];
        for (top, id) in routings {
            let batches: Vec<Batch> = (0..ranks).map(|rank| Batch::new(rank, tokens, top, id)).collect();
            check(&placement, top, &batches);
            // Tokens on some ranks only, one of them with a single one; then on none.
            let few = |rank: usize| [0, tokens, 1][(rank + 1) % 3];
            let batches: Vec<Batch> = (0..ranks).map(|rank| Batch::new(rank, few(rank), top, id)).collect();
            check(&placement, top, &batches);
            let none: Vec<Batch> = (0..ranks).map(|rank| Batch::new(rank, 0, top, id)).collect();
            check(&placement, top, &none);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(25))]

    /// Redundant experts included.
    #[test]
    fn no_placement_changes_a_bit(
        masks in prop::collection::vec(1..8_u32, 6),
        ids in prop::collection::vec(prop::collection::vec(0..6_usize, 0..90), 3),
        top in 1..4_usize,
    ) {
        let placement = Placement::from_holders(3, masks).unwrap();
        let batch = |(rank, ids): (usize, &Vec<usize>)| Batch::new(rank, ids.len() / top, top, |slot| ids[slot]);
        check(&placement, top, &ids.iter().enumerate().map(batch).collect::<Vec<_>>());
    }
}

#[test]
fn who_serves_learns_the_layer_and_notes_reach_everybody() {
    let (placement, top) = (Placement::even(8, 3), 2);
    let batch = Batch::new(1, 9, top, |slot| slot * 3 % 8);
    let expected = batch.dense(top, 8);
    for (name, group) in groups(3, capacity_for(9, 8, top, WIDTH)) {
        each(group, |mut fabric| {
            let rank = fabric.rank();
            let mut networks = Networks::new(8, |expert| placement.holds(rank, expert));
            let mut parallel = Parallel::default();
            if rank > 0 {
                for _ in 0..2 {
                    let served = parallel.serve(&mut *fabric, &mut networks, PATIENCE).unwrap();
                    assert!(matches!(served, Served::Layer { layer: LAYER, rows } if rows > 0), "{name}");
                }
                let served = parallel.serve(&mut *fabric, &mut networks, PATIENCE).unwrap();
                assert_eq!(served, Served::Note { from: 0 }, "{name}");
                assert_eq!(note_in(fabric.inbox(0)), [5, 6]);
                return;
            }
            for _ in 0..2 {
                let mut out = vec![f32::NAN; batch.x.len()];
                let (tokens, compute) = (batch.tokens(top), Compute::single());
                parallel
                    .run(&compute, &mut *fabric, &placement, tokens, &mut networks, &mut out, PATIENCE)
                    .unwrap();
                assert!(same_bits(&out, &expected), "{name}");
                assert_eq!(parallel.rows_by_rank().sum::<usize>(), 18);
            }
            write_note(&mut *fabric, &[5, 6]).unwrap();
            fabric.exchange(Phase::Dispatch, PATIENCE).unwrap();
        });
    }
}

#[test]
fn the_capacity_for_tokens_takes_them_all_in_one_message() {
    for (tokens, experts, top, width) in [(1, 8, 2, 48), (100, 8, 8, 48), (512, 128, 8, 2048), (3, 4, 4, 2)] {
        let capacity = capacity_for(tokens, experts, top, width);
        assert!(tokens_max(capacity, experts, top, width) >= tokens);
        assert_eq!(tokens_max(0, experts, top, width), 0);
    }
}

#[test]
fn nonsense_is_an_error_that_names_who_sent_it() {
    let experts = 4;
    let cases: [(&[u32], &str); 8] = [
        (&[9, 0, 0, 0], "another kind"),
        (&[1, LAYER, 0], "another kind"),
        (&[1, LAYER + 1, 0, 0], "without experts"),
        (&[1, LAYER, 0, 7], "cut"),
        (&[1, LAYER, 0, 1, 3, 1], "not here"),
        (&[1, LAYER, 0, 1, u32::MAX, 1], "not here"),
        (&[1, LAYER, u32::MAX, 1, 0, u32::MAX], "cut"),
        (&[1, LAYER, 0, 1, 0, 1, 0], "no token"),
    ];
    for (words, expected) in cases {
        for (name, mut group) in groups(2, 1000) {
            let (mut one, mut zero) = (group.pop().unwrap(), group.pop().unwrap());
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    one.outbox(0, words.len()).unwrap().copy_from_slice(words);
                    one.exchange(Phase::Dispatch, PATIENCE).unwrap();
                    one
                });
                let mut networks = Networks::new(experts, |expert| expert < 2);
                let error = Parallel::default().serve(&mut *zero, &mut networks, PATIENCE).unwrap_err();
                assert_eq!((error.rank, error.exchange), (1, 1), "{name}");
                assert!(error.to_string().contains(expected), "{name}: {error}");
                assert_eq!(zero.exchange(Phase::Dispatch, PATIENCE).unwrap_err(), error, "{name}");
            });
        }
    }
}

#[test]
fn rows_that_do_not_come_back_are_an_error() {
    let placement = Placement::even(4, 2);
    for (name, mut group) in groups(2, 1000) {
        let (mut one, mut zero) = (group.pop().unwrap(), group.pop().unwrap());
        std::thread::scope(|scope| {
            scope.spawn(move || {
                one.exchange(Phase::Dispatch, PATIENCE).unwrap();
                one.outbox(0, WIDTH).unwrap().fill(0);
                one.exchange(Phase::Combine, PATIENCE).unwrap();
                one
            });
            let mut networks = Networks::new(4, |expert| expert < 2);
            let batch = Batch::new(0, 2, 2, |slot| slot);
            let (mut out, compute) = (vec![0.0; batch.x.len()], Compute::single());
            let error = Parallel::default()
                .run(&compute, &mut *zero, &placement, batch.tokens(2), &mut networks, &mut out, PATIENCE)
                .unwrap_err();
            assert_eq!((error.rank, error.layer, error.phase), (1, Some(LAYER), Phase::Combine), "{name}");
            assert!(error.to_string().contains("another number of rows"), "{name}: {error}");
        });
    }
}
