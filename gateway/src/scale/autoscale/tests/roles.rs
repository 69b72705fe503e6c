//! Where workers have roles, a request is a demand for prefill and then one for decode, never for both, and
//! for nothing when it is gone. Where they have none, nothing is said of roles.

use proptest::prelude::*;

use super::*;
use crate::demand::Pool;

const PREFILL: &str = "http://127.0.0.1:1;role=prefill";
const DECODE: &str = "http://127.0.0.1:2;role=decode";
const BOTH: &str = "http://127.0.0.1:3";

/// Workers of a model, all of them ready, looked at once.
fn fleet(workers: &[&str], toml: &str) -> (Arc<Autoscale>, Arc<Router>) {
    let (scale, router) = setup_with(workers, toml);
    for at in 0..workers.len() {
        ready_at(&router, at, &["m"]);
    }
    scale.tick(&router);
    (scale, router)
}

fn pool(scale: &Autoscale) -> Arc<Pool> {
    Arc::clone(&scale.pools.read()["m"])
}

/// Waiting, running, tokens sent, tokens held: of workers for prefill, for decode, and for both.
fn by_role(scale: &Autoscale) -> [(u64, u64, f64, f64); 3] {
    [Role::Prefill, Role::Decode, Role::Both].map(|role| {
        let pool = pool(scale);
        let state = pool.of(role);
        (state.waiting, state.running, state.sent_tokens, state.held_tokens)
    })
}

const NOTHING: (u64, u64, f64, f64) = (0, 0, 0.0, 0.0);

fn roles(scale: &Autoscale) -> Vec<Option<Role>> {
    scale.rows().into_iter().map(|row| row.role).collect()
}

#[tokio::test(start_paused = true)]
async fn without_roles_all_is_said_as_it_was() {
    let (scale, router) = fleet(&[BOTH], "");
    let row = concat!(
        r#"[{"model":"m","desired":1,"reason":"minimum","ready":1,"starting":0,"min":1,"max":64,"prefill":0.0,"#,
        r#""backlog":0.0,"decode":0.0,"kv":0.0,"need":0.0,"correction":1.0,"guard":0,"peak":0,"#,
        r#""uncached_tokens_per_s":0.0,"backlog_tokens":0.0,"prefill_tokens_per_s":8000.0,"ttft_p90_s":null,"#,
        r#""ttft_slo_s":2.0,"itl_p90_s":null,"itl_slo_s":null,"first_waiting":0}]"#
    );
    assert_eq!(serde_json::to_string(&scale.rows()).unwrap(), row);
    let mut demand = scale.enter(&router, &request("m"), router.now());
    demand.sent(60, Role::Both);
    // A first leg is told of where there are workers for decode alone.
    demand.computes_elsewhere();
    demand.hand_over(10, router.now());
    assert_eq!(state(&scale, "m"), (1, 0, false, 60.0, 0.0));
    drop(demand);
    scale.tick(&router);
    let text = String::from_utf8(scale.metrics.render()).unwrap();
    for line in [
        "keyway_desired_workers{model=\"m\"} 1\n",
        "keyway_scale_term_workers{model=\"m\",term=\"prefill\"} ",
        "keyway_scale_workers{model=\"m\",state=\"ready\"} 1\n",
        "keyway_scale_bound_workers{bound=\"max\",model=\"m\"} 64\n",
    ] {
        assert!(text.contains(line), "{line}\n{text}");
    }
    assert!(!text.contains("role="), "{text}");
}

#[tokio::test]
async fn a_prompt_is_a_demand_for_prefill_and_then_one_for_decode() {
    let (scale, router) = fleet(&[PREFILL, DECODE], "");
    assert_eq!(roles(&scale), [Some(Role::Prefill), Some(Role::Decode)]);
    let mut demand = scale.enter(&router, &request("m"), router.now());
    let prompt = router.prompt_tokens(&request("m"));
    assert_eq!(by_role(&scale), [NOTHING, (1, 0, 0.0, 0.0), NOTHING]);
    let unsent = |role| pool(&scale).of(role).unsent_tokens;
    let all = [Role::Prefill, Role::Decode, Role::Both];
    assert_eq!(all.map(unsent), [prompt as f64; 3], "who computes it is not known");
    demand.sent(90, Role::Decode);
    assert_eq!(all.map(unsent), [0.0; 3]);
    assert_eq!(by_role(&scale), [NOTHING, (1, 0, 90.0, 0.0), NOTHING]);
    demand.computes_elsewhere();
    demand.computes_elsewhere();
    assert_eq!(by_role(&scale), [(1, 0, 90.0, 0.0), NOTHING, NOTHING]);
    demand.hand_over(20, router.now());
    demand.hand_over(20, router.now());
    assert_eq!(by_role(&scale), [NOTHING, (1, 0, 0.0, 0.0), NOTHING], "it waits for its first token there");
    demand.first_token(router.now());
    assert_eq!(by_role(&scale), [NOTHING, (0, 1, 0.0, 90.0), NOTHING], "which holds what it has fetched");
    drop(demand);
    assert_eq!(by_role(&scale), [NOTHING; 3]);
}

#[tokio::test]
async fn each_role_learns_what_comes_to_it() {
    let (scale, router) = fleet(&[PREFILL, DECODE], "");
    let prompt = router.prompt_tokens(&request("m"));
    for i in 0..800 {
        let mut demand = scale.enter(&router, &request("m"), router.now());
        demand.sent(prompt, Role::Decode);
        // Of four three are computed elsewhere, a half of which is cached there.
        if i % 4 > 0 {
            demand.computes_elsewhere();
            demand.hand_over(prompt / 2, router.now());
        }
        demand.first_token(router.now());
        if i % 50 == 0 {
            scale.tick(&router);
        }
    }
    scale.tick(&router);
    let seen = |role| pool(&scale).of(role).last.unwrap().0;
    let (prefill, decode) = (seen(Role::Prefill), seen(Role::Decode));
    let ratio = prefill.uncached_tokens_per_s / decode.uncached_tokens_per_s;
    assert!((1.2..1.8).contains(&ratio), "three halves to one: {ratio}");
    let mean = prefill.mean_uncached_tokens / prompt as f64;
    assert!((0.4..0.6).contains(&mean), "of those that come there: {mean}");
    assert_eq!((seen(Role::Prefill).ready, seen(Role::Decode).ready), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_long_prompt_asks_for_a_first_worker_for_prefill() {
    let tables =
        "[[model]]\nname = \"m\"\nrole = \"prefill\"\nmin = 0\n[[model]]\nname = \"m\"\nrole = \"decode\"";
    let (scale, router) = fleet(&[DECODE], tables);
    let desired =
        || -> Vec<_> { scale.rows().iter().map(|row| (row.role.unwrap().as_str(), row.desired)).collect() };
    assert_eq!(desired(), [("prefill", 0), ("decode", 1)]);
    let mut short = scale.enter(&router, &request("m"), router.now());
    short.sent(100, Role::Decode);
    scale.tick(&router);
    assert_eq!(desired(), [("prefill", 0), ("decode", 1)]);
    let mut long = scale.enter(&router, &request("m"), router.now());
    long.sent(5_000, Role::Decode);
    assert_eq!(by_role(&scale), [(1, 0, 5_000.0, 0.0), (1, 0, 100.0, 0.0), NOTHING]);
    scale.tick(&router);
    assert_eq!(desired(), [("prefill", 1), ("decode", 1)]);
    long.first_token(router.now());
    short.first_token(router.now());
    assert_eq!(by_role(&scale), [NOTHING, (0, 2, 0.0, 5_100.0), NOTHING]);

    // And once none has come for a while, the last one may go, whatever else comes.
    let mut wanted = Vec::new();
    for _ in 0..500 {
        tokio::time::advance(Duration::from_secs(1)).await;
        let mut short = scale.enter(&router, &request("m"), router.now());
        short.sent(100, Role::Decode);
        short.first_token(router.now());
        scale.tick(&router);
        wanted.push(desired()[0].1);
    }
    assert_eq!((wanted[0], wanted[499]), (1, 0), "{wanted:?}");
}

#[tokio::test(start_paused = true)]
async fn the_time_to_first_token_is_split_where_the_prompt_is_handed_over() {
    let (scale, router) = fleet(&[PREFILL, DECODE], "ttft_slo_seconds = 4.0");
    let mut asked = request("m");
    asked.stream = true;
    let mut streams: Vec<_> = (0..20).map(|_| scale.enter(&router, &asked, router.now())).collect();
    for stream in &mut streams {
        stream.sent(100, Role::Decode);
        stream.computes_elsewhere();
    }
    let wait = |seconds| tokio::time::sleep(Duration::from_secs(seconds));
    wait(3).await;
    for stream in &mut streams {
        stream.hand_over(0, router.now());
    }
    wait(1).await;
    for stream in &mut streams {
        stream.stream_began(router.now());
        stream.first_token(router.now());
    }
    wait(5).await;
    scale.tick(&router);
    let p90 = |role| pool(&scale).of(role).last.unwrap().0.ttft_p90_s.unwrap();
    let (prefill, decode) = (p90(Role::Prefill), p90(Role::Decode));
    assert!((2.9..3.1).contains(&prefill) && (0.9..1.1).contains(&decode), "{prefill} {decode}");
}

#[tokio::test]
async fn a_model_whose_workers_come_to_have_roles_has_series_by_role_alone() {
    let (scale, router) = fleet(&[BOTH], "");
    let mut before = scale.enter(&router, &request("m"), router.now());
    before.sent(50, Role::Both);
    let prefill = router.fleet().add(&PREFILL.parse().unwrap(), router.now());
    make_ready(&prefill, &["m"], router.now());
    scale.tick(&router);
    assert_eq!(roles(&scale), [Some(Role::Prefill), Some(Role::Both)]);
    let text = String::from_utf8(scale.metrics.render()).unwrap();
    let of_scale = |line: &&str| line.starts_with("keyway_scale_") || line.starts_with("keyway_desired");
    let whole: Vec<_> = text.lines().filter(of_scale).filter(|line| !line.contains("role=")).collect();
    assert!(whole.is_empty(), "{whole:?}");
    assert!(text.contains("keyway_desired_workers{model=\"m\",role=\"both\"} 1"), "{text}");
    // Who came before is counted to its end where it was.
    before.first_token(router.now());
    assert_eq!(by_role(&scale)[2], (0, 1, 0.0, 50.0));
    drop(before);
    let mut after = scale.enter(&router, &request("m"), router.now());
    assert_eq!(by_role(&scale), [NOTHING, NOTHING, (1, 0, 0.0, 0.0)], "those for both answer");
    after.sent(50, Role::Both);
    after.first_token(router.now());
    assert_eq!(by_role(&scale)[2], (0, 1, 0.0, 50.0));
    drop(after);
    assert_eq!(by_role(&scale), [NOTHING; 3]);
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Sent(u64, Role),
    Elsewhere,
    HandOver(u64),
    Began,
    FirstToken,
    Ended,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let role = prop_oneof![Just(Role::Decode), Just(Role::Both), Just(Role::Prefill)];
    let step = prop_oneof![
        (0..9_000_u64, role).prop_map(|(tokens, role)| Step::Sent(tokens, role)),
        Just(Step::Elsewhere),
        (0..200_u64).prop_map(Step::HandOver),
        Just(Step::Began),
        Just(Step::FirstToken),
        Just(Step::Ended),
    ];
    proptest::collection::vec(step, 0..12)
}

proptest! {
    #[test]
    fn whatever_becomes_of_requests_none_counts_twice_or_after_its_end(
        requests in proptest::collection::vec(steps(), 1..6), prefill in any::<bool>(), streams in any::<bool>()
    ) {
        let workers: &[&str] = if prefill { &[PREFILL, DECODE, BOTH] } else { &[DECODE, BOTH] };
        let (scale, router) = fleet(workers, "");
        let mut asked = request("m");
        asked.stream = streams;
        let mut open = Vec::new();
        for steps in &requests {
            let mut demand = scale.enter(&router, &asked, router.now());
            for step in steps {
                match *step {
                    Step::Sent(tokens, role) => demand.sent(tokens, role),
                    Step::Elsewhere => demand.computes_elsewhere(),
                    Step::HandOver(cached) => demand.hand_over(cached, router.now()),
                    Step::Began => demand.stream_began(router.now()),
                    Step::FirstToken => demand.first_token(router.now()),
                    Step::Ended => demand.ended(router.now()),
                }
            }
            open.push(demand);
            let counted: u64 = by_role(&scale).iter().map(|(waiting, running, ..)| waiting + running).sum();
            prop_assert_eq!(counted, open.len() as u64);
        }
        scale.tick(&router);
        drop(open);
        prop_assert_eq!(by_role(&scale), [NOTHING; 3]);
        for role in [Role::Prefill, Role::Decode, Role::Both] {
            prop_assert_eq!(pool(&scale).of(role).unsent_tokens, 0.0);
        }
    }
}
