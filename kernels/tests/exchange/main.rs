//! The exchange of `peer.cuh` between ranks, in every order that its memory allows: no rank reads a message
//! that is not there, none waits for ever, and after a rank has stopped the group can begin anew.
//!
//! What steps do, and in which order, is read from the source, so that a fence which is missing there is
//! missing here. Ranks take turns in any order after each operation; what one writes reaches the others'
//! mailboxes late and in any order, until a fence.
#![allow(clippy::expect_used, clippy::panic, reason = "helpers of tests fail the test by panicking")]

mod group;
mod program;
mod steps;

use group::{Fault, Group, Search};
use program::Program;

const SOURCE: &str = include_str!("../../src/peer.cuh");

/// A group: its ranks, the blocks of each launch, and the rounds that it takes.
type Size = (usize, usize, u8);

/// What may happen beside rounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Course {
    Smooth,
    /// The last rank stops, is missed, and all begin anew.
    Stop,
    /// The same, but ranks begin anew without waiting for each other's launches.
    EarlyReset,
}

/// All states that groups of these sizes can come to.
fn search(source: &str, course: Course, sizes: &[Size]) -> Result<usize, Fault> {
    let program = Program::read(source);
    let (stops, resets_early) = (course != Course::Smooth, course == Course::EarlyReset);
    sizes.iter().try_fold(0, |states, &(ranks, blocks, rounds)| {
        let search = Search { program: &program, ranks, blocks, rounds, stops, resets_early };
        let own = Group::explore(&search)?;
        println!("{course:?}, {ranks} ranks, {blocks} blocks, {rounds} rounds: {own} states");
        Ok(states + own)
    })
}

/// Three rounds use a half of each mailbox twice.
#[test]
fn messages_are_there_when_they_are_read_and_nobody_waits_for_ever() {
    let states = search(SOURCE, Course::Smooth, &[(2, 2, 3), (3, 1, 2)]).expect("no fault");
    assert!(states > 100_000, "{states} states are not all");
}

#[test]
fn a_rank_that_stops_is_missed_and_the_group_begins_anew() {
    let states = search(SOURCE, Course::Stop, &[(2, 1, 2), (2, 2, 1)]).expect("no fault");
    assert!(states > 50_000, "{states} states are not all");
}

#[test]
#[ignore = "half a minute"]
fn the_same_of_three_ranks() {
    let states = search(SOURCE, Course::Smooth, &[(3, 1, 3)]).expect("no fault");
    assert!(states > 1_000_000, "{states} states are not all");
    let states = search(SOURCE, Course::Stop, &[(3, 1, 1)]).expect("no fault");
    assert!(states > 1_000_000, "{states} states are not all");
}

/// The source with a line less, or with lines in another order, in the function of this name.
fn changed(function: &str, lines: &str, by: &str) -> String {
    let at = SOURCE.find(function).expect("the function is there");
    let (before, rest) = SOURCE.split_at(at);
    assert!(rest.contains(lines), "{function} has no {lines}");
    format!("{before}{}", rest.replacen(lines, by, 1))
}

#[test]
fn what_is_missing_in_the_source_is_found() {
    let sizes = [(2, 2, 2)];
    let end = "void end(Step step";
    let no_fence_of_blocks = changed(end, "if (SENDS) fence_system();", "");
    let found = search(&no_fence_of_blocks, Course::Smooth, &sizes);
    assert!(matches!(found, Err(Fault::Wrong { .. })), "{found:?}");
    let flag =
        "for (uint32_t to = 0; to < layout.ranks; ++to) store_relaxed(flag(to, phase, round, rank), round);";
    let flags_before_the_fences = changed(end, flag, "").replacen(
        "if (SENDS) fence_system();",
        &["if (SENDS && !has_failed()) {", flag, "}", "if (SENDS) fence_system();"].join("\n"),
        1,
    );
    let found = search(&flags_before_the_fences, Course::Smooth, &sizes);
    assert!(matches!(found, Err(Fault::Wrong { .. })), "{found:?}");
    let no_fence_before_a_fault = changed("void accuse(", "fence_system();", "");
    let found = search(&no_fence_before_a_fault, Course::Stop, &[(3, 1, 1)]);
    assert!(matches!(found, Err(Fault::NoRound { .. })), "{found:?}");
}

/// A rank that names the one that it misses itself names one that waits for the rank that stopped.
#[test]
fn naming_a_rank_that_waits_itself_is_found() {
    let names_its_own = SOURCE.replacen("accuse(at_fault(lowest, phase, round),", "accuse(lowest,", 1);
    let found = search(&names_its_own, Course::Stop, &[(3, 1, 1)]);
    assert!(matches!(found, Err(Fault::Blames { .. })), "{found:?}");
}

#[test]
fn beginning_anew_too_early_is_found() {
    let found = search(SOURCE, Course::EarlyReset, &[(2, 1, 1)]);
    assert!(found.is_err(), "{found:?}");
}

#[test]
#[should_panic(expected = "a line that is not known")]
fn a_line_that_is_not_known_is_an_error() {
    Program::read(&changed("void end(Step step", "state->done[step] = 0;", "state->done[step] = 1;"));
}
