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
fn a_trace_comes_at_its_own_times_unless_it_is_replayed_live() {
    // Each row goes on from one that it does not wait for: 8 turns of a talk come within 8 ms.
    let file = trace(1, 8, 1);
    let finished = |options: &str| {
        let run = run(&file, &format!("--workers 1 --policy prefix {options}")).runs.remove(0);
        (run.sessions.is_some(), run.e2e.unwrap().max)
    };
    let ((told, late), (told_live, soon)) = (finished(""), finished("--live"));
    assert_eq!((told, told_live), (false, true));
    assert!(late > 2.0 * soon, "turns that wait for answers queue behind none: {late} {soon}");
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
fn several_gateways_without_events_are_as_one_if_they_tell_each_other_what_they_place() {
    let file = trace(24, 20, 250);
    let run = |more: &str| {
        let options = format!(
            "--workers 8 --profile fcfs-6k --rate 4 --policy prefix --index-knows-capacity --scrape 1s {more}"
        );
        let figures = run(&file, &options).runs[0].clone();
        assert_eq!(figures.requests, 480);
        (figures.cached, figures.ttft.unwrap())
    };
    let one = run("");
    for gateways in [4, 8] {
        let (cached, ttft) = run(&format!("--gateways {gateways} --peers 50ms"));
        assert!(cached >= 0.98 * one.0 && ttft.p99 <= 1.1 * one.1.p99, "{one:?} {cached} {ttft:?}");
    }
    let (cached, _) = run("--gateways 4 --peers 50ms --no-told-placements");
    assert!(cached < 0.9 * one.0, "{one:?} {cached}");
    // What is late or lost is missed for a while, not for good.
    let (cached, _) = run("--gateways 4 --peers 50ms --peers-lag 1s --peers-loss 0.05");
    assert!(cached >= 0.95 * one.0, "{one:?} {cached}");
}

#[test]
fn events_need_blocks_of_one_size() {
    let file = trace(1, 1, 100);
    let path = file.path().to_str().unwrap();
    let words = ["simulate", "--trace", path, "--events", "--index-block-tokens", "32"];
    let error = simulate(&Command::try_parse_from(words).unwrap().args).unwrap_err().to_string();
    assert!(error.contains("--index-block-tokens 16"), "{error}");
}

/// Sessions of agents, so many at once, before caches that hold some 29 of them.
fn agents(options: &str) -> SimulationReport {
    let fleet = "--workers 4 --profile fcfs-6k --kv-blocks 4096 --engine-speed 10 --index-knows-capacity";
    let fleet =
        if options.contains("--kv-blocks") { fleet.replace("--kv-blocks 4096", "") } else { fleet.into() };
    let words = format!("simulate --index-mib 8 --policy prefix --think-time exp(200ms) {fleet} {options}");
    simulate(&Command::try_parse_from(words.split_whitespace()).unwrap().args).unwrap()
}

fn sessions(report: &SimulationReport) -> &super::SessionFigures {
    report.runs[0].sessions.as_ref().unwrap()
}

#[test]
fn sessions_that_do_not_all_fit_take_turns_and_no_turn_waits_longer_than_it_may() {
    let with = agents("--agents 240 --sessions 58 --prefix-groups 240");
    let without = agents("--agents 240 --sessions 58 --prefix-groups 240 --no-pauses");
    let (paused, free) = (sessions(&with), sessions(&without));
    assert_eq!((with.runs[0].requests, paused.ended, free.ended), (4_800, 240, 240));
    let pauses = paused.paused.unwrap();
    // The bound, and some time until a worker can begin.
    assert!(pauses.n > 100 && pauses.max < 62_000.0 && free.paused.is_none(), "{pauses:?}");
    assert!(paused.requests_per_s > 1.7 * free.requests_per_s, "{paused:?} {free:?}");
    assert!(paused.of_possible > 0.85 && free.of_possible < 0.2, "{paused:?} {free:?}");
    let (job, free_job) = (paused.job.unwrap(), free.job.unwrap());
    assert!(job.p50 < free_job.p50 && job.p99 < free_job.p99, "{job:?} {free_job:?}");
}

#[test]
fn where_all_fit_pauses_change_nothing_to_speak_of() {
    let of = |options: &str| {
        let report = agents(&format!("--agents 60 --sessions 14 --prefix-groups 60 {options}"));
        let figures = sessions(&report);
        (figures.requests_per_s, figures.of_possible)
    };
    let (with, without) = (of(""), of("--no-pauses"));
    assert!(with.0 > 0.98 * without.0 && with.1 > 0.98 && without.1 > 0.98, "{with:?} {without:?}");
}

#[test]
fn a_turn_finds_the_answer_before_it_where_answers_are_kept() {
    let of = |options: &str| {
        let report =
            agents(&format!("--agents 60 --sessions 14 --isl 64 --osl 640 --kv-blocks 32768 {options}"));
        let later = sessions(&report).later_turns.unwrap();
        assert_eq!(later.requests, 60 * 19);
        assert!(later.cached <= later.possible, "{later:?}");
        later
    };
    let (kept, computed_again) = (of("--cache-answers"), of(""));
    assert!(kept.same_worker > 0.95 && computed_again.same_worker > 0.95, "{kept:?} {computed_again:?}");
    // A turn adds 64 tokens to some 9,000, and an answer has ten times as many.
    assert!(kept.cached > 0.98 && computed_again.cached < 0.95, "{kept:?} {computed_again:?}");
}

#[test]
fn agents_give_the_same_figures_each_time_and_no_better_ones_than_are_possible() {
    let options = "--agents 60 --sessions 20 --spawns 0.3 --session-names --optimum --repeat 2";
    let report = agents(options);
    let figures = sessions(&report);
    assert_eq!(figures.ended, 120);
    let (optimum, of_optimum) = (figures.optimum.unwrap(), figures.of_optimum.unwrap());
    assert!(figures.cached <= figures.possible && of_optimum <= 1.0 && optimum < 1.0, "{figures:?}");
    let again = agents(options);
    assert_eq!(serde_json::to_string(&report).unwrap(), serde_json::to_string(&again).unwrap());
}

#[test]
fn sessions_of_a_trace_that_tells_none_are_refused() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    writeln!(file, "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44").unwrap();
    let path = file.path().to_str().unwrap();
    for option in ["--live", "--sessions 3", "--session-names", "--optimum", "--hindsight 5"] {
        let words = ["simulate", "--trace", path].into_iter().chain(option.split(' '));
        let error = simulate(&Command::try_parse_from(words).unwrap().args).unwrap_err().to_string();
        let name = option.split(' ').next().unwrap();
        assert!(error.contains("--agents") && error.contains(name), "{error}");
    }
}

#[test]
fn a_session_goes_on_though_its_prompts_are_too_long_for_any_worker() {
    // The fifth turn has more than the 4,800 tokens of a cache.
    let report = agents("--agents 6 --sessions 2 --turns 8 --kv-blocks 300");
    let run = &report.runs[0];
    assert!(run.refused > 0 && run.requests + run.refused == 48, "{run:?}");
    assert_eq!(sessions(&report).ended, 6);
}

/// One long prompt after the other, none of which is like another.
fn long_prompts(n: u64, gap_ms: u64) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    for i in 0..n {
        let ids: Vec<u64> = (0..12).map(|block| i * 100 + block).collect();
        let (length, at) = (ids.len() * 512 - 100, i * gap_ms);
        writeln!(
            file,
            r#"{{"timestamp":{at},"input_length":{length},"output_length":200,"hash_ids":{ids:?}}}"#
        )
        .unwrap();
    }
    file
}

#[test]
fn a_prompt_is_computed_elsewhere_where_that_keeps_answers_going() {
    let file = long_prompts(120, 1_300);
    let figures = |options: &str| {
        let fleet = format!("--workers 3 --profile fcfs-6k --policy prefix --itl {options}");
        run(&file, &fleet).runs.remove(0)
    };
    let (auto, always) = (figures("--prefill 1"), figures("--prefill 1 --split always"));
    let (never, whole) = (figures("--prefill 1 --split never"), figures(""));
    assert_eq!((always.split, never.split, whole.split), (120, 0, 0));
    assert!(auto.split > 20 && auto.split <= 120, "{}", auto.split);
    for run in [&auto, &always, &never, &whole] {
        assert_eq!((run.requests, run.cached), (120, 0.0), "a prompt's tokens are counted once");
    }
    let p99 = |of: &super::Figures| of.itl.unwrap().p99;
    assert!(p99(&always) < p99(&never), "{} {}", p99(&always), p99(&never));
    let mean = |of: &super::Figures| of.e2e.unwrap().mean;
    assert!(
        mean(&auto) < 1.02 * mean(&always).min(mean(&never)),
        "{} {} {}",
        mean(&auto),
        mean(&always),
        mean(&never)
    );
    // A network much slower than the workers compute: once that was seen, they do it themselves.
    let (slow, always) =
        (figures("--prefill 1 --kv-gbit 0.3"), figures("--prefill 1 --kv-gbit 0.3 --split always"));
    assert!(slow.split < 60 && mean(&slow) < 0.5 * mean(&always), "{} {}", slow.split, mean(&slow));
}

#[test]
fn no_request_waits_for_workers_for_prefill_that_cannot_compute_all_prompts() {
    // A prompt takes a second. One worker computes them for three that answer.
    let figures = |gap_ms: u64| {
        let fleet = "--workers 4 --profile fcfs-6k --policy prefix --itl --prefill 1";
        run(&long_prompts(300, gap_ms), fleet).runs.remove(0)
    };
    let (able, unable) = (figures(1_500), figures(400));
    assert!(able.split > 100 && able.itl.unwrap().p99 < 25.0, "{} {:?}", able.split, able.itl);
    let mean_ms = unable.ttft.unwrap().mean;
    assert!(mean_ms < 2_000.0, "{mean_ms}");
}

#[test]
fn a_prefix_is_fetched_where_its_holder_is_busy() {
    // Ninety conversations begin one after the other; every fourth goes on at once, and some have one home.
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let first = (0..90_u64).map(|talk| (talk * 2_500, talk, 30));
    let second = (0..90_u64).step_by(4).map(|talk| (300_000 + talk, talk, 34));
    for (at, talk, blocks) in first.chain(second) {
        let ids: Vec<u64> = (0..blocks).map(|block| talk * 1_000 + block).collect();
        let length = blocks * 512 - 100;
        writeln!(
            file,
            r#"{{"timestamp":{at},"input_length":{length},"output_length":100,"hash_ids":{ids:?}}}"#
        )
        .unwrap();
    }
    let figures = |options: &str| {
        let fleet = "--workers 8 --profile fcfs-6k --kv-blocks 32000 --index-knows-capacity --policy prefix";
        run(&file, &format!("{fleet} {options}")).runs.remove(0)
    };
    let (without, with) = (figures(""), figures("--pull"));
    assert_eq!((without.pulled, without.moved_tokens), (0, 0));
    assert!(with.pulled > 0 && with.moved_tokens > 0);
    assert!(with.cached >= without.cached, "{} {}", with.cached, without.cached);
    let mean = |of: &super::Figures| of.ttft.unwrap().mean;
    assert!(mean(&with) < mean(&without), "{} {}", mean(&with), mean(&without));
    // A network slower than the workers compute moves nothing.
    assert_eq!(figures("--pull --kv-gbit 1").pulled, 0);
}
