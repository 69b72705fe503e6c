//! Whatever becomes of requests, in whichever order: what counts them at any moment is how many there are,
//! and 0 in the end. A request is here all that counts one: its tenant's visit, its place in the gateway, and
//! its ticket (which carries its demand), or its wait for one.

use std::{
    io::Write as _,
    num::NonZeroUsize,
    pin::Pin,
    task::{Context, Poll},
};

use http::HeaderMap;
use keyway_core::{index::WorkerId, pick::Policy, waiting_room::RoomRules};
use keyway_wire::block_hash::HashKey;
use prometheus::IntGauge;
use proptest::prelude::*;

use super::*;
use crate::{
    access::{
        admission::{Admission, Permit},
        tenants::{HeldBy, Tenants, Visit, hex, key_hash},
    },
    client::Client,
    clock::{self, Clock},
    config::{BudgetUnits, ScaleConfig, TenantRules},
    error::Error,
    fleet::{Fleet, ejection::Ejections},
    metrics::{Metrics, TenantMetrics},
    party::Stage,
    prompt::request::{self, KeyerConfig, RequestInfo},
    routing::Choice,
    scale::autoscale::Autoscale,
};

/// Requests that the gateway and each tenant take at once.
const PLACES: usize = 5;
const OF_A_TENANT: usize = 3;
const TENANTS: [&str; 2] = ["alice", "bob"];
const WORKERS: u32 = 3;

/// A gateway's parts that count.
struct Parts {
    router: Arc<Router>,
    scale: Arc<Autoscale>,
    admission: Admission,
    in_flight: IntGauge,
    tenants: Arc<Tenants>,
    _file: tempfile::NamedTempFile,
}

type Choosing = Pin<Box<dyn Future<Output = Result<Choice, Error>> + Send>>;

/// One request, from its first permit on.
struct Asked {
    info: Arc<RequestInfo>,
    tried: Vec<WorkerId>,
    choosing: Option<Choosing>,
    choice: Option<Choice>,
    demand: Option<Demand>,
    _permit: Permit,
    _visit: Visit,
}

fn keyer() -> KeyerConfig {
    KeyerConfig { key: HashKey::new(1), block_bytes: NonZeroUsize::new(64).unwrap() }
}

impl Parts {
    /// `waits`: each worker is sent one request at a time, and the others wait.
    fn new(waits: bool) -> Self {
        let clock = Clock::start();
        let metrics = Arc::new(Metrics::new().unwrap());
        let configs: Vec<_> =
            (1..=WORKERS).map(|i| format!("http://127.0.0.1:{i}").parse().unwrap()).collect();
        let fleet = Arc::new(Fleet::new(&configs, Duration::ZERO, &Ejections::new(clock, None)));
        let up = |worker: &Arc<Worker>| worker.with_health(|health| health.on_probe(true, Duration::ZERO));
        fleet.all().iter().for_each(up);
        let router = Router::new(fleet, Arc::clone(&metrics), clock, Policy::Prefix, keyer(), 1 << 20);
        let rules = RoomRules { horizon_ms: 0.0, ..RoomRules::default() };
        let router = Arc::new(router.with_room(waits.then_some(rules)));
        // What the first one holds is only what it announces.
        router.index().with(|index| index.set_exact(router.fleet().all()[0].id, true));
        let table = |name: &str| {
            let key = hex(&key_hash(name.as_bytes()));
            format!("[[tenant]]\nname = {name:?}\nkey_sha256 = [{key:?}]\nmax_in_flight = {OF_A_TENANT}\n")
        };
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(TENANTS.map(table).concat().as_bytes()).unwrap();
        let counted = TenantMetrics::alone();
        let (path, key) = (file.path().to_owned(), HashKey::new(7));
        let in_flight = IntGauge::new("g", "g").unwrap();
        Self {
            scale: Autoscale::new(ScaleConfig::try_from(&toml::from_str("").unwrap()).unwrap(), metrics),
            admission: Admission::new(PLACES, IntGauge::new("a", "a").unwrap(), in_flight.clone()),
            tenants: Tenants::load(
                path,
                TenantRules { isolate: true, steering: Vec::new(), budgets: BudgetUnits::default() },
                key,
                clock,
                counted,
                HeldBy::default(),
            )
            .unwrap(),
            router,
            in_flight,
            _file: file,
        }
    }

    fn visit(&self, tenant: &str) -> Result<Visit, Error> {
        let key = format!("Bearer {tenant}").parse().unwrap();
        let mut headers = HeaderMap::from_iter([(http::header::AUTHORIZATION, key)]);
        let admitted = self.tenants.admit(&mut headers, true);
        admitted.map_err(|refused| refused.error)
    }

    fn place(&self) -> Option<Permit> {
        self.admission.admit(Stage::Serving, &Client::alone(), None).ok()
    }

    /// A request comes in, if it may.
    fn ask(&self, tenant: &str, prompt: u8) -> Option<Asked> {
        let visit = self.visit(tenant).ok()?;
        let permit = self.place()?;
        let text = format!("prompt {} ", prompt % 4).repeat(200);
        let body = format!(r#"{{"model":"m","prompt":"{text}","stream":true}}"#);
        let info = Arc::new(request::read(body.as_bytes(), keyer()));
        let demand = Some(self.scale.enter(&self.router, &info, self.router.now()));
        let mut asked = Asked {
            info,
            tried: Vec::new(),
            choosing: None,
            choice: None,
            demand,
            _permit: permit,
            _visit: visit,
        };
        asked.choose(&self.router);
        Some(asked)
    }

    /// Milliseconds to a first token, as foretold where one more request would go.
    fn predicted_ms(&self) -> f64 {
        let (asked, router) = (self.ask(TENANTS[1], 0).unwrap(), &self.router);
        let setting = router.setting(&asked.info, &[]).unwrap();
        drop(asked);
        let (candidates, pick) = router.preview(&setting).unwrap();
        setting.predicted_ttft_ms(router.now(), &setting.workers[pick.index], &candidates[pick.index])
    }

    fn holding(&self) -> i64 {
        self.router.metrics().holding.get()
    }

    /// Each count of a worker beside its series.
    fn at_workers(&self) -> (u64, u64) {
        let (mut requests, mut tokens) = (0, 0);
        for worker in self.router.fleet().all().iter() {
            let series = worker.series(self.router.metrics());
            assert_eq!(worker.load.requests() as i64, series.in_flight.get());
            assert_eq!(worker.load.waiting_prefill_tokens() as i64, series.waiting_prefill_tokens.get());
            requests += worker.load.requests();
            tokens += worker.load.waiting_prefill_tokens();
        }
        (requests, tokens)
    }

    /// Nobody is here any more.
    async fn is_empty(&self) {
        assert_eq!((self.at_workers(), self.holding(), self.in_flight.get()), ((0, 0), 0, 0));
        for tenant in TENANTS {
            let visits: Vec<_> = (0..=OF_A_TENANT).map(|_| self.visit(tenant)).collect();
            assert_eq!(visits.iter().filter(|visit| visit.is_ok()).count(), OF_A_TENANT, "{tenant}");
        }
        let permits: Vec<_> = (0..=PLACES).map(|_| self.place()).collect();
        assert_eq!(permits.iter().filter(|permit| permit.is_some()).count(), PLACES);
        // What a worker is expected to hold lingers for its events, and then no more.
        clock::sleep(crate::limits::EXPECTED_LINGER + Duration::from_millis(1)).await;
        self.router.index.finish_lingering(self.router.now());
        assert_eq!(self.router.index().with(|index| index.expected()), 0);
    }
}

impl Asked {
    fn choose(&mut self, router: &Arc<Router>) {
        let (router, info, tried) = (Arc::clone(router), Arc::clone(&self.info), self.tried.clone());
        self.choosing = Some(Box::pin(async move { router.choose(&info, &tried).await }));
        self.poll();
    }

    /// Takes its choice, if that is made. Returns whether it may go on.
    fn poll(&mut self) -> bool {
        let Some(choosing) = &mut self.choosing else { return true };
        let Poll::Ready(chosen) = choosing.as_mut().poll(&mut Context::from_waker(std::task::Waker::noop()))
        else {
            return true;
        };
        self.choosing = None;
        self.took(chosen)
    }

    fn took(&mut self, chosen: Result<Choice, Error>) -> bool {
        self.choice = chosen.ok();
        if let (Some(choice), Some(demand)) = (&mut self.choice, self.demand.take()) {
            choice.ticket.carry(demand);
        }
        self.choice.is_some()
    }

    /// As `dispatch.rs` does when no answer came.
    fn try_another(&mut self, router: &Arc<Router>) {
        if let Some(mut choice) = self.choice.take() {
            self.demand = choice.ticket.give_back();
            self.tried.push(choice.worker.id);
            drop(choice);
            self.choose(router);
        }
    }

    /// What may happen to a request whose worker is known.
    fn meets(&mut self, event: u8, router: &Arc<Router>) {
        let Some(Choice { worker, ticket, .. }) = &mut self.choice else { return };
        match event % 10 {
            0 => {
                let now = ticket.router().now();
                ticket.first_token(now);
            }
            1 => {
                let now = ticket.router().now();
                ticket.stream_began(now);
            }
            2 => ticket.answered(u64::from(event)),
            3 => ticket.still_answering(ticket.router().now()),
            4 => ticket.judge(Verdict::Good),
            5 => ticket.judge(Verdict::Bad),
            6 => router.worker_failed(&Arc::clone(worker)),
            7 if !ticket.began => ticket.computes_elsewhere(),
            8 if !ticket.began => ticket.is_asked_alone(),
            _ => self.try_another(router),
        }
    }
}

/// What happens next; `usize` says to which request.
#[derive(Debug, Clone)]
enum Step {
    Ask(bool, u8),
    Look(usize),
    Meet(usize, u8),
    /// The answer ends, the client leaves, or the head fails: it is dropped.
    Drop(usize),
    Pass(u16),
    /// A worker is up again.
    Up(u8),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (any::<bool>(), any::<u8>()).prop_map(|(who, prompt)| Step::Ask(who, prompt)),
        3 => any::<usize>().prop_map(Step::Look),
        8 => (any::<usize>(), any::<u8>()).prop_map(|(which, event)| Step::Meet(which, event)),
        3 => any::<usize>().prop_map(Step::Drop),
        1 => (0_u16..3_000).prop_map(Step::Pass),
        2 => any::<u8>().prop_map(Step::Up),
    ]
}

impl Parts {
    async fn does(&self, step: Step, here: &mut Vec<Asked>) {
        let at = |which: usize, here: &[Asked]| (!here.is_empty()).then(|| which % here.len());
        match step {
            Step::Ask(who, prompt) => here.extend(self.ask(TENANTS[usize::from(who)], prompt)),
            Step::Look(which) => {
                if let Some(at) = at(which, here)
                    && !here[at].poll()
                {
                    here.swap_remove(at);
                }
            }
            Step::Meet(which, event) => {
                if let Some(at) = at(which, here) {
                    here[at].meets(event, &self.router);
                }
            }
            Step::Drop(which) => drop(at(which, here).map(|at| here.swap_remove(at))),
            Step::Pass(ms) => clock::sleep(Duration::from_millis(ms.into())).await,
            Step::Up(which) => {
                let workers = self.router.fleet().all();
                let worker = &workers[usize::from(which) % workers.len()];
                worker.with_health(|health| health.on_probe(true, self.router.now()));
                self.router.fleet_changed();
            }
        }
    }

    /// What counts them is how many there are.
    fn agrees_with(&self, here: &[Asked]) {
        assert_eq!(self.in_flight.get(), here.len() as i64);
        let at_workers = here.iter().filter(|asked| asked.choice.is_some()).count();
        let undecided = here.iter().filter(|asked| asked.choosing.is_some()).count();
        let (requests, _) = self.at_workers();
        let (requests, held) = (requests as usize, self.holding() as usize);
        // Who was begun or refused and has not looked yet is in neither.
        assert!(requests >= at_workers && requests + held <= at_workers + undecided, "{requests} {held}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn any_order_of_events_counts_what_is_there_and_leaves_nothing(
        waits in any::<bool>(),
        steps in prop::collection::vec(step(), 0..120),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        runtime.unwrap().block_on(async {
            let parts = Parts::new(waits);
            let mut here = Vec::new();
            for step in steps {
                parts.does(step, &mut here).await;
                parts.agrees_with(&here);
            }
            drop(here);
            parts.is_empty().await;
        });
    }
}

/// A worker may be for another part of requests by the time that it is asked.
#[tokio::test(start_paused = true)]
async fn the_prompt_of_who_is_asked_alone_waits_there() {
    let parts = Parts::new(false);
    let mut asked = parts.ask(TENANTS[0], 0).unwrap();
    let ticket = &mut asked.choice.as_mut().unwrap().ticket;
    let tokens = parts.at_workers().1;
    assert!(tokens > 0);
    ticket.computes_elsewhere();
    assert_eq!(parts.at_workers(), (1, 0));
    for _ in 0..2 {
        ticket.is_asked_alone();
        assert_eq!(parts.at_workers(), (1, tokens));
    }
    drop(asked);
    parts.is_empty().await;
}

/// By whichever way its answer comes to begin; and one that never does leaves nothing there.
#[tokio::test(start_paused = true)]
async fn a_prompt_that_is_computed_elsewhere_is_there_once_its_kv_is() {
    for way in 0..4 {
        let parts = Parts::new(false);
        let (router, asked) = (Arc::clone(&parts.router), parts.ask(TENANTS[0], 0).unwrap());
        let worker = Arc::clone(&asked.choice.as_ref().unwrap().worker);
        drop(asked);
        let held = || router.index.with(|index| index.resident(worker.id));
        assert_eq!(held(), 0);
        let placement = router.index.with(|index| index.place(worker.id, &[]));
        let sending = Sending { at: router.now(), uncached_tokens: 64, splits: true, streams: true, kind: 0 };
        let chain = Arc::new((1..=4).map(BlockHash).collect());
        let coming = Coming { owner: Owner::NOBODY, worker: worker.id, chain, block_tokens: 16.0 };
        let mut ticket = Ticket::start(Arc::clone(&router), Arc::clone(&worker), placement, sending)
            .placing_later(Some(coming));
        assert_eq!(held(), 0, "it is on its way");
        match way {
            0 => ticket.hand_over(WorkerId(9), 0, router.now()),
            1 => ticket.is_asked_alone(),
            2 => ticket.hand_over_beside(0),
            _ => {
                drop(ticket);
                assert_eq!(held(), 0);
                continue;
            }
        }
        ticket.first_token(router.now());
        assert_eq!(held(), 4, "{way}");
    }
}

/// A price for each running request would make it longer than without the cached prompt.
#[tokio::test(start_paused = true)]
async fn answers_under_way_are_no_time_to_first_token_before_a_worker_has_told() {
    let parts = Parts::new(false);
    let router = &parts.router;
    let idle = parts.predicted_ms();
    let mut under_way: Vec<_> = (0..OF_A_TENANT).map(|_| parts.ask(TENANTS[0], 0).unwrap()).collect();
    for asked in &mut under_way {
        asked.choice.as_mut().unwrap().ticket.first_token(router.now());
    }
    let busy = parts.predicted_ms();
    assert!(busy <= idle, "{busy} for {idle}");
}

/// By queue and speed alone it would be some milliseconds.
#[tokio::test(start_paused = true)]
async fn a_first_token_is_predicted_by_what_earlier_ones_took() {
    let parts = Parts::new(false);
    let router = &parts.router;
    assert!(parts.predicted_ms() < 100.0);
    for n in 0..120 {
        let mut asked = parts.ask(TENANTS[0], n).unwrap();
        clock::sleep(Duration::from_millis(700)).await;
        asked.choice.as_mut().unwrap().ticket.stream_began(router.now());
    }
    let ms = parts.predicted_ms();
    assert!((650.0..750.0).contains(&ms), "{ms}");
    let truth = &router.metrics().caches.truth;
    let (mut measured_s, mut off_s) = (0.0, 0.0);
    for worker in router.fleet().all().iter() {
        let name = worker.name.as_str();
        measured_s += truth.ttft.with_label_values(&[name]).get();
        off_s += ["over", "under"]
            .map(|direction| truth.ttft_error.with_label_values(&[name, direction]).get())
            .iter()
            .sum::<f64>();
    }
    // The first sixteen of each worker are not foretold.
    assert!(measured_s >= 0.7 * (120.0 - 16.0 * f64::from(WORKERS)) - 0.1, "{measured_s}");
    assert!(off_s < 0.1 * measured_s, "{off_s} of {measured_s}");
}

/// One client's requests, one after the other, each left at a point of chance.
async fn client(parts: Arc<Parts>, seed: u64, requests: usize) -> usize {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut chosen = 0;
    for _ in 0..requests {
        let Some(mut asked) = parts.ask(TENANTS[random.usize(..2)], random.u8(..)) else {
            tokio::task::yield_now().await;
            continue;
        };
        for _ in 0..random.usize(..8) {
            if random.u8(..4) == 0 {
                tokio::task::yield_now().await;
            }
            if !asked.poll() {
                break;
            }
            // No worker stays down, so that somebody is always chosen.
            let event = random.u8(..10);
            asked.meets(if event == 6 { 0 } else { event }, &parts.router);
        }
        chosen += usize::from(asked.choice.is_some());
    }
    chosen
}

#[test]
fn many_threads_at_once_leave_nothing_either() {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_time().build().unwrap();
    for waits in [false, true] {
        runtime.block_on(async {
            let parts = Arc::new(Parts::new(waits));
            let task = |seed| tokio::spawn(client(Arc::clone(&parts), seed, 2_000));
            let tasks: Vec<_> = (0..8).map(task).collect();
            let mut chosen = 0;
            for task in tasks {
                chosen += task.await.unwrap();
            }
            assert!(chosen > 1_000, "{chosen}");
            parts.is_empty().await;
        });
    }
}
