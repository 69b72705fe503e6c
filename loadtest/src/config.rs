//! The record of a run's options that run.json keeps, and the fingerprint by which runs are comparable. Reads
//! no command line and decides nothing.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::{
    args::run::{Overload, RunArgs, WorkloadKind},
    load::{PREFIX_LEN, arrival, is_recorded, kind},
    schedule::arrivals::Arrival,
    workload::{body::Endpoint, live::Answers},
};

/// The options that decided a run. Never a key.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[expect(missing_docs, reason = "each field is the option of its name")]
#[serde(default)]
pub struct Config {
    pub url: String,
    pub model: String,
    pub endpoint: Endpoint,
    pub workload: String,
    pub trace: Option<String>,
    pub slice: Option<String>,
    pub scale_len: Option<f64>,
    pub isl: Option<String>,
    pub osl: Option<String>,
    /// `None`: one text a request, as every other API has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub texts: Option<u32>,
    pub file: Option<String>,
    pub turns: Option<String>,
    pub think_time: Option<String>,
    pub conversations: Option<u32>,
    pub prefix_groups: Option<usize>,
    pub prefix_len: Option<u32>,
    pub prefix_depth: Option<usize>,
    pub zipf: Option<f64>,
    pub time_scale: Option<f64>,
    /// `None`: of a run that did not wait for a trace's answers, or a version that could not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub live: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub answers: Option<Answers>,
    pub rate: Option<f64>,
    pub rate_shape: Option<String>,
    pub arrival: Option<Arrival>,
    pub burstiness: Option<f64>,
    pub concurrency: Option<u32>,
    pub users: Option<u32>,
    pub user_rate: Option<f64>,
    pub max_concurrency: Option<u32>,
    pub overload: Option<String>,
    pub spread_bursts: bool,
    pub duration_s: Option<f64>,
    pub requests: Option<usize>,
    pub warmup_requests: u64,
    pub warmup_s: f64,
    pub seed: u64,
    /// `None`: of a version that knew one seed only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text_seed: Option<u64>,
    pub ignore_eos: bool,
    pub extra_body: Option<String>,
    /// `None`: requests bore none, or it is of a version that sent none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session_header: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parent_header: Option<String>,
    pub timeout_s: f64,
    pub oracle_blocks: Option<usize>,
    /// Processes whose runs were merged; `None` for one by itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub processes: Option<u32>,
}

// === impl Config ===

impl Default for Config {
    /// Nothing chosen: what an older report leaves out.
    fn default() -> Self {
        Self {
            url: String::new(),
            model: String::new(),
            endpoint: Endpoint::Chat,
            workload: String::new(),
            trace: None,
            slice: None,
            scale_len: None,
            isl: None,
            osl: None,
            texts: None,
            file: None,
            turns: None,
            think_time: None,
            conversations: None,
            prefix_groups: None,
            prefix_len: None,
            prefix_depth: None,
            zipf: None,
            time_scale: None,
            live: None,
            answers: None,
            rate: None,
            rate_shape: None,
            arrival: None,
            burstiness: None,
            concurrency: None,
            users: None,
            user_rate: None,
            max_concurrency: None,
            overload: None,
            spread_bursts: false,
            duration_s: None,
            requests: None,
            warmup_requests: 0,
            warmup_s: 0.0,
            seed: 0,
            text_seed: None,
            ignore_eos: true,
            extra_body: None,
            session_header: None,
            parent_header: None,
            timeout_s: 0.0,
            oracle_blocks: None,
            processes: None,
        }
    }
}

impl Config {
    /// The options in `args`, for `model` and the run's seed of words. What does not apply to the workload is
    /// left out.
    pub fn new(args: &RunArgs, model: String, text_seed: u64) -> Self {
        let (workload, schedule) = (&args.workload, &args.schedule);
        let kind = kind(workload);
        let trace = kind == WorkloadKind::Trace;
        let generates = args.server.endpoint().generates();
        let is_talk = matches!(kind, WorkloadKind::MultiTurn | WorkloadKind::Sharegpt);
        let tree = kind == WorkloadKind::SharedPrefix
            || (kind == WorkloadKind::MultiTurn && workload.prefix_len.is_some());
        let begins_by_rate = schedule.live && schedule.rate.is_some();
        let closed = schedule.concurrency.is_some() || schedule.users.is_some();
        let recorded = trace && is_recorded(schedule) && !closed && !begins_by_rate;
        let open = schedule.concurrency.is_none() && schedule.users.is_none();
        let arrival = (open && !recorded).then(|| arrival(schedule).ok()).flatten();
        let seconds = |time: Duration| time.as_secs_f64();
        let warmup = schedule.warmup.unwrap_or_default();
        Self {
            url: args.server.url(),
            model,
            endpoint: args.server.endpoint(),
            workload: name(kind).into(),
            trace: workload.trace.as_ref().map(|path| path.display().to_string()),
            slice: trace.then(|| workload.slice.slice.to_string()),
            scale_len: trace.then_some(workload.slice.scale_len),
            isl: (!trace && workload.file.is_none()).then(|| workload.isl().to_string()),
            osl: (!trace && kind != WorkloadKind::Sharegpt && generates).then(|| workload.osl().to_string()),
            texts: (workload.texts > 1).then_some(workload.texts),
            file: workload.file.as_ref().map(|path| path.display().to_string()),
            turns: workload.turns.filter(|_| is_talk).map(|turns| turns.to_string()),
            think_time: is_talk.then(|| workload.think_time.to_string()),
            conversations: workload.conversations,
            prefix_groups: tree.then_some(workload.prefix_groups),
            prefix_len: tree.then(|| workload.prefix_len.unwrap_or(PREFIX_LEN)),
            prefix_depth: tree.then_some(workload.prefix_depth),
            zipf: tree.then_some(workload.zipf),
            time_scale: (schedule.live || (recorded && schedule.rate.is_none()))
                .then_some(schedule.time_scale.unwrap_or(1.0)),
            live: schedule.live.then_some(true),
            answers: schedule.live.then_some(workload.answers),
            rate: schedule.rate,
            rate_shape: schedule.rate_shape.as_ref().map(ToString::to_string),
            arrival,
            burstiness: schedule.burstiness,
            concurrency: schedule.concurrency,
            users: schedule.users,
            user_rate: schedule.user_rate,
            max_concurrency: schedule.max_concurrency,
            overload: schedule.max_concurrency.map(|_| match schedule.overload {
                Overload::Queue => "queue".into(),
                Overload::Drop => "drop".into(),
            }),
            spread_bursts: schedule.spread_bursts,
            duration_s: schedule.duration.map(seconds),
            requests: schedule.requests.map(|n| n as usize),
            warmup_requests: warmup.requests,
            warmup_s: seconds(warmup.until),
            seed: workload.seed,
            text_seed: Some(text_seed),
            ignore_eos: workload.ignore_eos && generates,
            extra_body: args.server.extra_body.clone(),
            session_header: args.server.session_header.as_ref().map(ToString::to_string),
            parent_header: args.server.parent_header.as_ref().map(ToString::to_string),
            timeout_s: seconds(args.server.timeout),
            oracle_blocks: workload.oracle_blocks.map(|n| n as usize),
            processes: None,
        }
    }

    /// A hash of everything that makes two runs comparable: the workload and how fast it was offered, but not
    /// to whom, nor the seeds. `file_hash` stands for the trace or the prompts, wherever their file lies.
    pub fn fingerprint(&self, file_hash: u64) -> String {
        let comparable = Self {
            url: String::new(),
            model: String::new(),
            trace: self.trace.as_ref().map(|_| format!("{file_hash:016x}")),
            file: self.file.as_ref().map(|_| format!("{file_hash:016x}")),
            seed: 0,
            text_seed: None,
            timeout_s: 0.0,
            oracle_blocks: None,
            ..self.clone()
        };
        format!("{:016x}", xxh3_64(serde_json::to_string(&comparable).unwrap_or_default().as_bytes()))
    }

    /// The workload and its pace in a few words.
    pub fn describe(&self) -> String {
        let mut words = vec![self.trace.clone().unwrap_or_else(|| self.workload.clone())];
        words.extend(self.live.map(|_| match self.answers {
            Some(Answers::Live) => "live, with the server's own answers".into(),
            _ => "live".into(),
        }));
        let mut add =
            |name: &str, value: Option<String>| words.extend(value.map(|value| format!("{name} {value}")));
        let text = |value: Option<f64>| value.map(|value| value.to_string());
        add("prompt", self.isl.clone());
        add("output", self.osl.clone());
        add("texts", self.texts.map(|n| n.to_string()));
        add("of", self.file.clone());
        add("turns", self.turns.clone());
        add("prefixes", self.prefix_groups.map(|n| n.to_string()));
        add("rate", text(self.rate));
        add("rate", self.rate_shape.clone());
        add("concurrency", self.concurrency.map(|n| n.to_string()));
        add("users", self.users.map(|n| n.to_string()));
        add("user rate", text(self.user_rate));
        add("processes", self.processes.map(|n| n.to_string()));
        add("speed", text(self.time_scale.filter(|speed| *speed != 1.0)));
        words.join(", ")
    }
}

fn name(kind: WorkloadKind) -> &'static str {
    match kind {
        WorkloadKind::Trace => "trace",
        WorkloadKind::Random => "random",
        WorkloadKind::SharedPrefix => "shared-prefix",
        WorkloadKind::MultiTurn => "multi-turn",
        WorkloadKind::Sharegpt => "sharegpt",
        WorkloadKind::Custom => "custom",
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::{Args, Command};

    fn args(line: &str) -> RunArgs {
        let line = format!("keyway-loadtest run --url http://h {line}");
        let Command::Run(args) = Args::try_parse_from(line.split_whitespace()).unwrap().command else {
            unreachable!()
        };
        *args
    }

    #[test]
    fn the_fingerprint_is_of_the_workload_and_its_pace_alone() {
        let of = |line: &str| Config::new(&args(line), "m".into(), line.len() as u64).fingerprint(0);
        let base = of("--rate 5 --requests 9");
        assert_eq!(base, of("--rate 5 --requests 9 --seed 7 --timeout 3s --oracle-blocks 5"));
        for other in ["--rate 6 --requests 9", "--rate 5 --requests 8", "--rate 5 --requests 9 --isl 7"] {
            assert_ne!(base, of(other), "{other}");
        }
        let trace = Config { trace: Some("a".into()), ..Config::default() };
        let moved = Config { trace: Some("b/a".into()), ..Config::default() };
        assert_eq!(trace.fingerprint(1), moved.fingerprint(1));
        assert_ne!(trace.fingerprint(1), trace.fingerprint(2));
    }
}
