//! Whole simulations of small traces: deterministic, and with the effects that routing by prefix must have.

use std::io::Write as _;

use clap::Parser;

use super::{SimulationReport, simulate};
use crate::args::simulate::SimulateArgs;

#[derive(Parser)]
struct Command {
    #[command(flatten)]
    args: SimulateArgs,
}

/// Conversations whose turns come one after the other: each row continues one of `talks` prompts by a block.
fn trace(talks: u64, turns: u64, gap_ms: u64) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    for i in 0..talks * turns {
        let (talk, turn) = (i % talks, i / talks);
        let ids: Vec<_> = std::iter::once(0).chain((0..=turn * 4 + 3).map(|n| 1 + talk * 1000 + n)).collect();
        let (length, at) = (ids.len() * 512 - 100, i * gap_ms);
        writeln!(
            file,
            r#"{{"timestamp":{at},"input_length":{length},"output_length":40,"hash_ids":{ids:?}}}"#
        )
        .unwrap();
    }
    file
}

fn run(file: &tempfile::NamedTempFile, options: &str) -> SimulationReport {
    let path = file.path().to_str().unwrap();
    let words =
        ["simulate", "--trace", path, "--index-mib", "8"].into_iter().chain(options.split_whitespace());
    simulate(&Command::try_parse_from(words).unwrap().args).unwrap()
}

#[test]
fn the_same_options_give_the_same_figures() {
    let file = trace(12, 8, 150);
    let once = || {
        let report = run(&file, "--workers 4 --policy keyway,random,power-of-two,chwbl --repeat 2 --seed 7");
        serde_json::to_string(&report).unwrap()
    };
    assert_eq!(once(), once());
}

#[test]
fn every_request_is_answered_and_counted() {
    let file = trace(10, 6, 100);
    for run in run(&file, "--workers 3 --repeat 3 --policy prefix,least-loaded").runs {
        assert_eq!((run.requests, run.refused), (180, 0));
        assert_eq!(run.ttft.unwrap().n, 180);
    }
}

#[test]
fn prefix_routing_finds_more_and_answers_sooner_than_round_robin() {
    // Seven talks over four workers: round-robin moves each of them at every turn.
    let report = run(&trace(7, 12, 400), "--workers 4 --policy prefix,round-robin --profile a100-8b");
    let [prefix, round_robin] = &report.runs[..] else { panic!("{report:?}") };
    assert!(prefix.cached > round_robin.cached + 0.2, "{report:?}");
    assert!(prefix.cached <= report.possible);
    assert!(prefix.ttft.unwrap().mean < 0.7 * round_robin.ttft.unwrap().mean, "{report:?}");
}

#[test]
fn what_is_not_cached_takes_time() {
    // Prompts that share only their first block, against the same prompt over and over.
    let (different, same) = (trace(60, 1, 2000), trace(1, 60, 2000));
    let ttft = |file| run(file, "--workers 1 --policy prefix --requests 40").runs[0].ttft.unwrap().mean;
    let (different, same) = (ttft(&different), ttft(&same));
    assert!(different > 50.0 && same > 20.0, "{different} {same}");
    // The 40th turn is 80,000 tokens long, of which 2,048 are new.
    let long = run(&trace(1, 60, 2000), "--workers 1 --policy prefix --requests 40");
    assert!(long.runs[0].cached > 0.9);
}

#[test]
fn more_load_needs_more_workers_and_the_answer_is_a_knee() {
    let file = trace(40, 5, 50);
    let needed = |rate: f64| {
        let report = run(
            &file,
            &format!(
                "--find-workers --policy prefix --slo ttft.p90<500ms --rate {rate} --profile h100-8b --max-workers 64"
            ),
        );
        let Some(workers) = report.found[0].workers else { panic!("{report:#?}") };
        let met = |workers| report.runs.iter().find(|run| run.workers == workers).unwrap().slo_met;
        assert!(met(workers) && (workers == 1 || !met(workers - 1)));
        workers
    };
    let (few, many) = (needed(4.0), needed(40.0));
    assert!(many > few, "{few} {many}");
}

#[test]
fn prompts_that_no_worker_can_hold_are_refused() {
    let report = run(&trace(2, 3, 100), "--workers 2 --policy prefix --kv-blocks 200");
    // Up to 6,556 tokens in 3,200.
    assert!(report.runs[0].refused > 0 && report.runs[0].requests > 0 && !report.runs[0].slo_met);
}

/// Workers whose caches hold two prompts: a router that takes them for endless follows prefixes that are long
/// gone.
#[test]
fn a_router_that_knows_the_caches_size_spreads_what_they_cannot_hold() {
    let file = trace(40, 5, 50);
    let run = |more: &str| {
        let options = format!("--workers 8 --policy prefix --rate 0.5 --profile l4-8b {more}");
        run(&file, &options).runs[0].clone()
    };
    let (blind, knowing) = (run(""), run("--index-knows-capacity"));
    assert!(knowing.max_over_mean < 0.7 * blind.max_over_mean, "{blind:?} {knowing:?}");
    assert!(knowing.ttft.unwrap().mean < blind.ttft.unwrap().mean, "{blind:?} {knowing:?}");
}

/// Half of all prompts begin with the same 40 blocks.
fn one_hot_prefix() -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    for i in 0..1_200_u64 {
        let own = (0..=i * 7 % 5).map(|n| 1_000 + i * 10 + n);
        let shared = (0..if i * 5 % 4 < 2 { 40 } else { 0 }).map(|n| n + 1);
        let ids: Vec<_> = shared.chain(own).collect();
        let (length, at) = (ids.len() * 512 - 100, i * 130);
        writeln!(
            file,
            r#"{{"timestamp":{at},"input_length":{length},"output_length":20,"hash_ids":{ids:?}}}"#
        )
        .unwrap();
    }
    file
}

#[test]
fn a_hot_prefix_is_copied_before_its_holders_queues_are_longer_than_the_copy_takes() {
    let options = "--workers 8 --profile fcfs-6k --index-knows-capacity --policy prefix,least-loaded";
    let report = run(&one_hot_prefix(), options);
    let [prefix, least] = &report.runs[..] else { panic!("{report:?}") };
    assert!(prefix.ttft.unwrap().p99 < 1.02 * least.ttft.unwrap().p99, "{report:?}");
    assert!(prefix.ttft.unwrap().mean < 1.1 * least.ttft.unwrap().mean, "{report:?}");
}

#[test]
fn several_gateways_see_what_the_others_do_by_events_and_gauges_and_are_as_one_if_they_tell_each_other() {
    let file = trace(24, 20, 250);
    let run = |more: &str| {
        let options = format!("--workers 8 --profile fcfs-6k --rate 4 --policy prefix {more}");
        let figures = run(&file, &options).runs[0].clone();
        assert_eq!(figures.requests, 480);
        (figures.cached, figures.ttft.unwrap())
    };
    let one = run("--events");
    let (cached, ttft) = run("--events --gateways 4 --scrape 1s");
    assert!(cached >= 0.98 * one.0 && ttft.p99 < 1.3 * one.1.p99, "{one:?} {cached} {ttft:?}");
    let (cached, ttft) = run("--events --gateways 4 --scrape 1s --peers 50ms");
    assert!(cached >= 0.98 * one.0 && ttft.p99 < 1.1 * one.1.p99, "{one:?} {cached} {ttft:?}");
    // Who cannot see the others' load queues behind it.
    let (cached, ttft) = run("--events --gateways 4");
    assert!(ttft.p99 > 1.5 * one.1.p99, "{one:?} {cached} {ttft:?}");
    // Who sees no events knows a quarter of what the caches hold.
    let (cached, _) = run("--index-knows-capacity --gateways 4 --scrape 1s");
    assert!(cached < 0.9 * one.0, "{one:?} {cached}");
}

#[test]
fn events_need_blocks_of_one_size() {
    let file = trace(1, 1, 100);
    let path = file.path().to_str().unwrap();
    let words = ["simulate", "--trace", path, "--events", "--index-block-tokens", "32"];
    let error = simulate(&Command::try_parse_from(words).unwrap().args).unwrap_err().to_string();
    assert!(error.contains("--index-block-tokens 16"), "{error}");
}
