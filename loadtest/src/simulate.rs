//! `keyway-loadtest simulate`: a trace on a fleet that does not exist, in virtual time, routed by the
//! gateway's own core over the engines that `mock` serves. It compares policies, and finds how many workers
//! an SLO needs. Sends nothing.
//!
//! Next: `simulate/fleet.rs`, the run itself.

mod at_once;
mod contender;
mod counting;
mod find;
mod fleet;
mod gateway;
mod hearing;
mod hindsight;
mod optimum;
mod outcome;
mod pauses;
mod prompts;
mod render;
mod report;
mod routing;
mod sessions;
#[cfg(test)]
mod tests;
mod ticker;
mod transit;
mod turns;

use std::process::ExitCode;

use keyway_core::Policy;

use self::{
    fleet::{FleetSetup, Workload, replay},
    hearing::Hearing,
    sessions::Judged,
    transit::Legs,
    turns::TurnGraph,
};
pub use self::{
    outcome::Figures,
    report::{SimulationReport, WorkersNeeded},
    sessions::SessionFigures,
};
use crate::{
    args::{contender::Contender, simulate::SimulateArgs},
    engine_model::Nanos,
    error::Error,
    oracle::Oracle,
    schedule::{self, Due, Pace, Timing},
    stdout, sums,
    trace::Trace,
    workload::scale::Scale,
};

/// Simulates and prints; exit code 0 whatever the figures are.
pub fn run(args: &SimulateArgs) -> Result<ExitCode, Error> {
    let report = simulate(args)?;
    if args.json {
        // Numbers and names always serialise.
        stdout::print(&format!("{}\n", serde_json::to_string_pretty(&report).unwrap_or_default()))
    } else {
        stdout::print(&render::render(&report))
    }
}

/// Simulates what `args` ask for.
pub fn simulate(args: &SimulateArgs) -> Result<SimulationReport, Error> {
    let workload = workload(args)?;
    let profile = args.fleet.engine.profile()?;
    if args.fleet.events && args.fleet.index_block_tokens != profile.block_tokens {
        let wanted = format!(
            "--events: add --index-block-tokens {}, as the workers' blocks have",
            profile.block_tokens
        );
        return Err(Error::Usage(wanted));
    }
    if args.legs.prefill > 0 && args.legs.prefill >= args.fleet.workers {
        let wanted = "--prefill: leave at least one of --workers to answer".to_owned();
        return Err(Error::Usage(wanted));
    }
    let setup = |policy: Contender, workers: usize| FleetSetup {
        workers,
        profile: profile.clone(),
        policy,
        index_bytes: (args.fleet.index_mib as usize) << 20,
        index_block_tokens: args.fleet.index_block_tokens,
        index_by_text: args.fleet.index_by_text,
        index_knows_capacity: args.fleet.index_knows_capacity,
        hold: !args.fleet.no_hold,
        pauses: !args.fleet.no_pauses,
        names_sessions: args.sessions.names,
        judged: Judged { optimum: args.sessions.optimum, hindsight: args.sessions.hindsight },
        engine_speed: args.fleet.engine_speed,
        hash_seed: args.fleet.hash_seed,
        gateways: usize::from(args.fleet.gateways),
        events: args.fleet.events,
        gauges_count_tokens: args.fleet.gauges_count_tokens,
        scrape_ns: args.fleet.scrape.map(|every| every.as_nanos() as Nanos),
        peers_ns: args.fleet.peers.map(|every| every.as_nanos() as Nanos),
        legs: Legs {
            prefill: usize::from(args.legs.prefill),
            splitting: args.legs.splitting(),
            from_tokens: args.legs.split_from,
            pulls: args.legs.pull,
            transfer: args.legs.kv.transfer(),
        },
        itl: args.legs.itl,
        told: Hearing::of(&args.fleet),
    };
    let figures = |policy: Contender, workers: usize| {
        replay(&workload, &setup(policy, workers)).figures(policy.as_str(), &workload.slo)
    };
    let (mut runs, mut found) = (Vec::new(), Vec::new());
    for &policy in &args.fleet.policy {
        if args.find_workers {
            let workers_max = usize::from(args.max_workers);
            let workers = find::fewest(workers_max, |workers| {
                runs.push(figures(policy, workers));
                runs.last().is_some_and(|run| run.slo_met)
            });
            found.push(WorkersNeeded { policy: policy.to_string(), workers, workers_max });
        } else {
            runs.push(figures(policy, usize::from(args.fleet.workers)));
        }
    }
    Ok(report(args, &workload, &setup(Contender::Ours(Policy::Prefix), 1), runs, found))
}

fn workload(args: &SimulateArgs) -> Result<Workload, Error> {
    let mut trace = match &args.trace {
        Some(path) => Trace::load(path)?,
        None => args.sessions.agents(args.seed)?.trace(),
    };
    if let (Some(option), None) = (args.sessions.of_sessions(), &trace.links) {
        let wanted =
            format!("{option}: the trace does not tell sessions apart; leave it out, or use --agents");
        return Err(Error::Usage(wanted));
    }
    if !args.sessions.is_live() {
        trace.links = None;
    }
    let timing = Timing {
        slice: args.slice.slice,
        pace: args.rate.map_or(Pace::TimeScale(args.time_scale), Pace::Rate),
        spread_bursts: args.spread_bursts,
        seed: args.seed,
        duration: None,
        requests: args.requests.map(|n| n as usize),
    };
    let schedule = schedule::plan(&trace, &timing)?;
    let copy_ns = length_ns(&schedule);
    let scale = Scale::of(args.slice.scale_len, trace.block_tokens);
    let (copies, seed, slo) = (u64::from(args.repeat), args.seed, args.slo.clone());
    // With --rate nothing says how fast a tool's time passes.
    let speed = args.rate.map_or(args.time_scale, |_| 1.0);
    let graph = trace.links.as_ref().map(|links| TurnGraph::new(links, &schedule, speed));
    let at_once = args.sessions.at_once.map(|sessions| sessions as usize);
    let caches_answers = args.sessions.cache_answers;
    Ok(Workload { trace, schedule, scale, copies, copy_ns, seed, slo, graph, at_once, caches_answers })
}

/// How long the schedule takes: to its last arrival, and one mean gap.
fn length_ns(schedule: &[Due]) -> u64 {
    let last = schedule.last().map_or(0, |due| due.intended_ns);
    last + last / (schedule.len() as u64 - 1).max(1)
}

fn report(
    args: &SimulateArgs,
    workload: &Workload,
    setup: &FleetSetup,
    runs: Vec<Figures>,
    found: Vec<WorkersNeeded>,
) -> SimulationReport {
    let Workload { trace, schedule, scale, copies, copy_ns, seed, slo, .. } = workload;
    let sums = sums::sums(trace, schedule, *scale);
    let requests = schedule.len() as u64 * copies;
    let mut oracle = Oracle::new(scale.block_tokens(), None);
    let possible: u64 =
        schedule.iter().map(|due| oracle.ask(scale.blocks(due.row, &trace.rows[due.row])).unbounded).sum();
    SimulationReport {
        format: "keyway-loadtest/simulate/1",
        version: env!("CARGO_PKG_VERSION"),
        trace: args.trace.as_ref().map_or_else(|| "agents".to_owned(), |path| path.display().to_string()),
        requests,
        rate_per_s: if *copy_ns > 0 { requests as f64 / ((copy_ns * copies) as f64 / 1e9) } else { 0.0 },
        prompt_tokens: sums.prompt_tokens * copies,
        output_tokens: sums.output_tokens * copies,
        possible: possible as f64 / sums.prompt_tokens.max(1) as f64,
        profile: setup.profile.name.to_owned(),
        kv_blocks: setup.profile.kv_blocks,
        block_tokens: setup.profile.block_tokens,
        seed: *seed,
        slo: slo.to_string(),
        runs,
        found,
    }
}
