//! Prints what the scheduler and its block bookkeeping cost per step, one line a case: `cargo bench -p
//! keyway-worker`. Times only mean something on a quiet machine.

use std::time::Duration;

use keyway_worker::backend::CacheGroup;
use keyway_worker::bench::{Case, SchedulerBench};

/// Measured, after a tenth of them for the processor's caches.
const STEPS: usize = 1000;

fn main() {
    let full = vec![CacheGroup::Full];
    let hybrid = vec![CacheGroup::Full, CacheGroup::SlidingWindow { window: 128 }];
    for running in [256, 2048] {
        for (name, groups) in [("full", &full), ("full + window", &hybrid)] {
            let decode = Case {
                running,
                prompt: 900,
                shared: 0,
                output: 2 * STEPS,
                budget: 4096,
                groups: groups.clone(),
            };
            run(&format!("decode, {name}"), decode);
            // A sequence ends every few steps and a newcomer's prompt is computed beside the others' decodes.
            let mixed = Case {
                running,
                prompt: 1000,
                shared: 800,
                output: 100,
                budget: 4096,
                groups: groups.clone(),
            };
            run(&format!("mixed, {name}"), mixed);
        }
    }
}

fn run(name: &str, case: Case) {
    let running = case.running;
    let mut bench = SchedulerBench::new(case);
    while bench.running() < running {
        bench.step();
    }
    let mut times: Vec<Duration> = Vec::with_capacity(STEPS);
    let mut tokens = 0;
    for _ in 0..STEPS / 10 {
        bench.step();
    }
    for _ in 0..STEPS {
        let (time, planned) = bench.step();
        times.push(time);
        tokens += planned;
    }
    times.sort_unstable();
    let us = |share: usize| times[times.len() * share / 1000].as_secs_f64() * 1e6;
    println!(
        "{running:5} running, {name:21} p50 {:7.1} us, p99 {:7.1} us a step of {} tokens",
        us(500),
        us(990),
        tokens / times.len()
    );
}
