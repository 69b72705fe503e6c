//! Asks each worker how much it has to do, so that what other gateways (or clients that go past this one)
//! send there counts in a choice. Engines name their gauges differently; the table of names is here. What is
//! others' and how it ages is `keyway_core::others`' business, the size of caches `scrape.rs`'.

use std::{sync::Arc, time::Duration};

use keyway_core::{EngineLoad, health::PROBE_INTERVAL};

use crate::{
    clock,
    fleet::{Worker, scrape},
    limits::{LOAD_PUSH_ASKED_EVERY, MAX_SCRAPE_BYTES},
    routing::Router,
    upstream::Upstream,
    watch::{load_push, probe},
};

/// Gauges of requests in the batch: vLLM, SGLang, its `/v1/loads`, keyway-worker.
const RUNNING: [&str; 4] = [
    "vllm:num_requests_running",
    "sglang:num_running_reqs",
    "sglang_num_running_reqs",
    "keyway_worker_requests_running",
];
/// Gauges of requests that wait for a place in it.
const WAITING: [&str; 4] = [
    "vllm:num_requests_waiting",
    "sglang:num_queue_reqs",
    "sglang_num_waiting_reqs",
    "keyway_worker_requests_waiting",
];
/// End of the name of a gauge of prompt tokens that wait, cached ones left out: keyway-worker's and, in
/// `/v1/loads`, SGLang's.
const WAITING_TOKENS: &str = "num_waiting_uncached_tokens";

/// The page that every engine has.
const METRICS: &str = "/metrics";
/// SGLang's own page for load balancers, which counts prompt tokens that wait, as its metrics do not
/// (`python/sglang/srt/entrypoints/v1_loads.py`).
const LOADS: &str = "/v1/loads?include=core&format=prometheus";

/// An engine that counts tokens is asked so much more often while others send there. Between two looks
/// several gateways take the same worker to be free, and tokens say how long that was true; a count of
/// requests does not, however fresh.
const OFTENER_FOR_TOKENS: u32 = 4;

/// How long a worker that others send to is asked often after they were last seen.
const OTHERS_MEMORY: Duration = Duration::from_secs(60);

/// Asks one worker for ever: every `every` while others send to it too, or oftener where it counts tokens;
/// else as often as it is probed.
pub async fn watch(worker: Arc<Worker>, router: Arc<Router>, upstream: Upstream, every: Duration) {
    let mut others_until = Duration::ZERO;
    let mut page = Page::default();
    let mut push_asked: Option<Duration> = None;
    loop {
        let mut counts_tokens = false;
        if worker.routable() {
            let is_due = push_asked.is_none_or(|then| router.now() >= then + LOAD_PUSH_ASKED_EVERY);
            if page.is_sglang() && is_due {
                push_asked = Some(router.now());
                if let Some(place) = load_push::place(&worker, &upstream).await
                    && load_push::follow(&place, &worker, &router).await
                {
                    // It may have begun anew.
                    push_asked = None;
                }
            }
            let asked = worker.load.own();
            if let Some(load) = page.read(&worker, &upstream).await {
                worker.load.engine_says(router.now(), load, asked);
                router.load_changed();
                if worker.load.beyond_gateways(router.now()) > 0.0 {
                    others_until = router.now() + OTHERS_MEMORY;
                }
                counts_tokens = load.waiting_tokens.is_some();
            }
        } else {
            // Whatever comes back may be another engine.
            (page, push_asked) = (Page::default(), None);
        }
        let soon = !worker.routable() || router.now() < others_until;
        clock::sleep(pause(every, soon, counts_tokens)).await;
    }
}

fn pause(every: Duration, soon: bool, counts_tokens: bool) -> Duration {
    match (soon, counts_tokens) {
        (false, _) => every.max(PROBE_INTERVAL),
        (true, true) => every / OFTENER_FOR_TOKENS,
        (true, false) => every,
    }
}

/// Where an engine tells its load.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Page {
    /// On [`METRICS`]; whether [`LOADS`] tells more is not known.
    #[default]
    Unknown,
    /// On [`METRICS`] alone: it is no SGLang.
    Metrics,
    /// The same, of an SGLang that has no other.
    OlderSglang,
    /// On [`LOADS`] of an SGLang, which counts the prompt tokens that wait.
    Loads,
}

impl Page {
    fn is_sglang(self) -> bool {
        matches!(self, Self::Loads | Self::OlderSglang)
    }

    /// Looks once; nothing where the engine does not say.
    async fn read(&mut self, worker: &Worker, upstream: &Upstream) -> Option<EngineLoad> {
        if *self == Self::Loads {
            if let Some((load, _)) = look(worker, upstream, LOADS).await {
                return Some(load);
            }
            *self = Self::Unknown;
        }
        let (load, page) = look(worker, upstream, METRICS).await?;
        if *self == Self::Unknown {
            let is_sglang = page.starts_with("sglang:") || page.contains("\nsglang:");
            *self = if is_sglang { Self::OlderSglang } else { Self::Metrics };
            let may_tell_more = is_sglang && load.waiting_tokens.is_none();
            if let Some((better, _)) = if may_tell_more { look(worker, upstream, LOADS).await } else { None }
                && better.waiting_tokens.is_some()
            {
                *self = Self::Loads;
                return Some(better);
            }
        }
        Some(load)
    }
}

async fn look(worker: &Worker, upstream: &Upstream, path: &'static str) -> Option<(EngineLoad, String)> {
    let page = probe::get(worker, upstream, path, MAX_SCRAPE_BYTES).await?;
    let page = String::from_utf8_lossy(&page).into_owned();
    let rank = worker.rank().map(|rank| scrape::rank_on(&page, rank));
    Some((engine_load(&page, rank)?, page))
}

/// Reads a page in Prometheus' text format; `None` where it does not say how many requests run. Where the
/// worker is one data-parallel rank of several behind its address, only that one counts; else they add up.
pub fn engine_load(page: &str, rank: Option<u32>) -> Option<EngineLoad> {
    // Whose names the page has: keyway-worker says everything twice, under its own and under vLLM's.
    let (mut running, mut waiting, mut tokens) = ([None; RUNNING.len()], [None; WAITING.len()], None);
    for line in page.lines().filter(|line| !line.starts_with('#')) {
        let (name, rest) = line.split_at(line.find(['{', ' ']).unwrap_or(line.len()));
        let sum = if let Some(engine) = RUNNING.iter().position(|known| *known == name) {
            &mut running[engine]
        } else if let Some(engine) = WAITING.iter().position(|known| *known == name) {
            &mut waiting[engine]
        } else if name.ends_with(WAITING_TOKENS) {
            &mut tokens
        } else {
            continue;
        };
        if rank.is_some_and(|rank| is_of_another(rest, rank)) {
            continue;
        }
        let value = rest.rsplit(' ').next().and_then(|value| value.parse::<f64>().ok());
        // A negative one becomes 0, one without bounds the largest.
        *sum = value.filter(|value| !value.is_nan()).map(|value| sum.unwrap_or(0) + value as u64).or(*sum);
    }
    let first = |sums: &[Option<u64>]| sums.iter().flatten().next().copied();
    Some(EngineLoad {
        running: first(&running)?,
        waiting: first(&waiting).unwrap_or(0),
        waiting_tokens: tokens,
    })
}

/// Whether the labels name another rank: vLLM's `engine`, SGLang's `dp_rank`.
fn is_of_another(labels: &str, rank: u32) -> bool {
    ["engine=\"", "dp_rank=\""].into_iter().any(|label| {
        let named = labels.split_once(label).and_then(|(_, rest)| rest.split_once('"'));
        named.and_then(|(named, _)| named.parse().ok()).is_some_and(|named: u32| named != rank)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_engine_s_names_are_known() {
        let vllm = "# TYPE vllm:num_requests_running gauge\n\
                    vllm:num_requests_running{engine=\"0\",model_name=\"m\"} 3.0\n\
                    vllm:num_requests_running{engine=\"1\",model_name=\"m\"} 2.0\n\
                    vllm:num_requests_waiting{engine=\"0\",model_name=\"m\"} 4.0\n\
                    vllm:num_requests_waiting_by_reason{reason=\"capacity\"} 9.0\n";
        let of = |running, waiting, waiting_tokens| Some(EngineLoad { running, waiting, waiting_tokens });
        assert_eq!(engine_load(vllm, None), of(5, 4, None));
        assert_eq!(engine_load(vllm, Some(1)), of(2, 0, None));
        let sglang = "sglang:num_running_reqs{model_name=\"m\"} 7\nsglang:num_queue_reqs{model_name=\"m\"} 1\n\
                      sglang:token_usage 0.5\n";
        assert_eq!(engine_load(sglang, None), of(7, 1, None));
        let loads = "sglang_num_running_reqs{dp_rank=\"0\"} 7\nsglang_num_waiting_reqs{dp_rank=\"0\"} 1\n\
                     sglang_num_waiting_uncached_tokens{dp_rank=\"0\"} 4096\n\
                     sglang_num_waiting_uncached_tokens{dp_rank=\"1\"} 4\n";
        assert_eq!(engine_load(loads, None), of(7, 1, Some(4_100)));
        assert_eq!(engine_load(loads, Some(0)), of(7, 1, Some(4_096)));
        let keyway = "keyway_worker_requests_running 2\nkeyway_worker_requests_waiting 0\n\
                      keyway_worker_num_waiting_uncached_tokens 70\n";
        assert_eq!(engine_load(keyway, Some(3)), of(2, 0, Some(70)));
    }

    #[test]
    fn tokens_are_asked_for_oftener_where_others_send() {
        let second = Duration::from_secs(1);
        let pauses = [(false, true), (false, false), (true, false), (true, true)];
        let pauses = pauses.map(|(soon, counts_tokens)| pause(second, soon, counts_tokens).as_millis());
        assert_eq!(pauses, [PROBE_INTERVAL.as_millis(), PROBE_INTERVAL.as_millis(), 1_000, 250]);
    }

    #[test]
    fn what_a_page_says_under_two_names_counts_once() {
        let both = "keyway_worker_requests_running 2\nkeyway_worker_requests_waiting 1\n\
                    vllm:num_requests_running{engine=\"0\"} 2\nvllm:num_requests_waiting{engine=\"0\"} 1\n";
        let once = EngineLoad { running: 2, waiting: 1, waiting_tokens: None };
        assert_eq!(engine_load(both, None), Some(once));
    }

    #[test]
    fn what_is_not_said_is_not_made_up() {
        assert_eq!(engine_load("", None), None);
        assert_eq!(engine_load("vllm:num_requests_waiting 3", None), None);
        assert_eq!(engine_load("vllm:num_requests_running NaN", None), None);
        let odd = engine_load("vllm:num_requests_running -1\nvllm:num_requests_waiting x", None);
        assert_eq!(odd, Some(EngineLoad::default()));
    }
}
