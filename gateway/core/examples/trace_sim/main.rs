//! Replays a request trace over simulated workers and prints what each policy makes of it: the cached share of
//! the prompt tokens (and against one pooled LRU cache of the same total size), the time to the first token,
//! and how unevenly the prompts fell. Everything is virtual time and fixed seeds: the same table every time.

mod engine;
mod fleet;
mod trace;

use std::process::ExitCode;

use keyway_core::{CostModel, Policy};

use engine::Cache;
use fleet::{Outcome, Setup, replay};
use trace::Row;

const USAGE: &str = "usage: trace_sim TRACE.jsonl [--workers 4] [--minutes 20] [--cache-share 0.6] \
                     [--utilisation 0.5] [--own-factor 1,2,4,6] [--running-tokens 256] [--equal-share 0.0625] \
                     [--equal-blocks 1] [--block-tokens 512]\n\
                     TRACE.jsonl: Mooncake's format. --cache-share: all caches together, against the \
                     distinct blocks of the trace. A list tries each value.";

/// The command line: every list is tried in all combinations.
struct Args {
    trace: String,
    minutes: u64,
    block_tokens: u64,
    workers: Vec<f64>,
    cache_share: Vec<f64>,
    utilisation: Vec<f64>,
    models: Vec<CostModel>,
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("trace_sim: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), String> {
    let args = parse(std::env::args().skip(1).collect())?;
    let text = std::fs::read_to_string(&args.trace)
        .map_err(|error| format!("cannot read {}: {error}", args.trace))?;
    let rows = trace::read(&text, args.minutes, args.block_tokens)?;
    let distinct = trace::distinct_blocks(&rows);
    println!("{} requests, {distinct} distinct blocks of {} tokens", rows.len(), args.block_tokens);
    for &workers in &args.workers {
        for &share in &args.cache_share {
            for &utilisation in &args.utilisation {
                table(&rows, &args, workers as usize, (share * distinct as f64) as usize, utilisation);
            }
        }
    }
    Ok(())
}

/// Prints one table: a fleet under every policy.
fn table(rows: &[Row], args: &Args, workers: usize, pooled_blocks: usize, utilisation: f64) {
    let mut pool = Cache::new(pooled_blocks);
    let cached: u64 = rows
        .iter()
        .map(|row| engine::cached_tokens(row, pool.use_chain(&row.chain), args.block_tokens))
        .sum();
    let prompt: u64 = rows.iter().map(|row| row.prompt_tokens).sum();
    let seconds = rows[rows.len() - 1].arrival_us as f64 / 1e6;
    let rate = (prompt - cached) as f64 / (seconds * utilisation * workers as f64);
    let pooled = cached as f64 / prompt as f64;
    println!(
        "\n{workers} workers x {} blocks, {rate:.0} prefill tokens/s each ({:.0} % busy if caches were pooled; \
         pooled LRU caches {:.2} %)",
        pooled_blocks / workers,
        utilisation * 100.0,
        pooled * 100.0
    );
    println!(
        "{:<40} {:>8} {:>9} {:>8} {:>8} {:>8} {:>9}",
        "policy", "cached", "of pooled", "mean s", "p50 s", "p99 s", "max/mean"
    );
    let setup = Setup {
        workers,
        cache_blocks: pooled_blocks / workers,
        block_tokens: args.block_tokens,
        capacity_known: true,
        rate,
        policy: Policy::Prefix,
        model: CostModel::default(),
    };
    for policy in Policy::ALL.into_iter().filter(|&policy| policy != Policy::Prefix) {
        line(policy.as_str(), &replay(rows, Setup { policy, ..setup }), pooled);
    }
    for &model in &args.models {
        for capacity_known in [true, false] {
            let name = format!(
                "prefix own={} run={} eq={}/{}b{}",
                model.own_factor,
                model.tokens_per_running,
                model.equal_share,
                model.equal_blocks,
                if capacity_known { "" } else { " size?" }
            );
            line(&name, &replay(rows, Setup { capacity_known, model, ..setup }), pooled);
        }
    }
}

fn line(name: &str, outcome: &Outcome, pooled: f64) {
    println!(
        "{name:<40} {:>7.2}% {:>8.1}% {:>8.3} {:>8.3} {:>8.3} {:>9.3}",
        outcome.cached_ratio() * 100.0,
        outcome.cached_ratio() / pooled * 100.0,
        outcome.ttft_mean(),
        outcome.ttft_quantile(0.5),
        outcome.ttft_quantile(0.99),
        outcome.imbalance()
    );
}

fn parse(args: Vec<String>) -> Result<Args, String> {
    let mut trace = None;
    let default = CostModel::default();
    let (mut minutes, mut block_tokens) = (20.0, 512.0);
    let (mut workers, mut cache_share, mut utilisation) = (vec![4.0], vec![0.6, 0.25], vec![0.5]);
    let (mut own, mut running) = (vec![1.0, 2.0, 4.0, 6.0], vec![default.tokens_per_running]);
    let (mut share, mut blocks) = (vec![default.equal_share], vec![default.equal_blocks]);
    let mut args = args.into_iter();
    while let Some(arg) = args.next() {
        if !arg.starts_with("--") {
            trace = Some(arg);
            continue;
        }
        let values = args.next().ok_or_else(|| format!("{arg} needs a value\n{USAGE}"))?;
        let values = values.split(',').map(|value| value.parse().ok().filter(|value: &f64| *value >= 0.0));
        let values: Vec<f64> =
            values.collect::<Option<_>>().ok_or_else(|| format!("{arg}: not a number\n{USAGE}"))?;
        match arg.as_str() {
            "--workers" => workers = values,
            "--minutes" => minutes = values[0],
            "--block-tokens" => block_tokens = values[0],
            "--cache-share" => cache_share = values,
            "--utilisation" => utilisation = values,
            "--own-factor" => own = values,
            "--running-tokens" => running = values,
            "--equal-share" => share = values,
            "--equal-blocks" => blocks = values,
            _ => return Err(format!("unknown option {arg}\n{USAGE}")),
        }
    }
    if workers.iter().any(|count| !(1.0..=1000.0).contains(count)) || utilisation.contains(&0.0) {
        return Err(format!("--workers takes 1 to 1000, --utilisation more than 0\n{USAGE}"));
    }
    if block_tokens < 1.0 || block_tokens.fract() != 0.0 || 512.0 % block_tokens != 0.0 {
        return Err(format!("--block-tokens must divide 512\n{USAGE}"));
    }
    let mut models = Vec::new();
    for &own_factor in &own {
        for &tokens_per_running in &running {
            for &equal_share in &share {
                for &equal_blocks in &blocks {
                    models.push(CostModel { own_factor, tokens_per_running, equal_share, equal_blocks });
                }
            }
        }
    }
    let trace = trace.ok_or(USAGE)?;
    Ok(Args {
        trace,
        minutes: minutes as u64,
        block_tokens: block_tokens as u64,
        workers,
        cache_share,
        utilisation,
        models,
    })
}
