//! Keys, limits and reloading of tenants.

use std::io::Write as _;

use http::HeaderValue;
use proptest::prelude::*;

use super::*;
use crate::config::BudgetUnits;

fn table(name: &str, key: &str, limits: &str) -> String {
    format!("[[tenant]]\nname = {name:?}\nkey_sha256 = [\"{}\"]\n{limits}\n", hex(&key_hash(key.as_bytes())))
}

fn load(text: &str) -> (Arc<Tenants>, tempfile::NamedTempFile) {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    let counted = TenantMetrics::alone();
    let path = file.path().to_owned();
    (
        Tenants::load(
            path,
            TenantRules { isolate: true, steering: Vec::new(), budgets: BudgetUnits::default() },
            HashKey::new(7),
            Clock::start(),
            counted,
            HeldBy::default(),
        )
        .unwrap(),
        file,
    )
}

/// As a worker that says only their sum.
fn tokens(prompt: u64) -> Tokens {
    Tokens { prompt, ..Tokens::default() }
}

fn with(name: &'static str, value: &str) -> HeaderMap {
    HeaderMap::from_iter([(HeaderName::from_static(name), HeaderValue::from_str(value).unwrap())])
}

fn key(key: &str) -> HeaderMap {
    with("authorization", &format!("Bearer {key}"))
}

#[test]
fn a_key_opens_by_either_header_and_goes_no_further() {
    let (tenants, _file) = load(&(table("a", "ka", "") + &table("b", "kb", "")));
    for (mut headers, name) in
        [(key("ka"), "a"), (with("authorization", "bearer  kb"), "b"), (with("x-api-key", "kb"), "b")]
    {
        assert_eq!(tenants.admit(&mut headers, true).unwrap().tenant().name(), name);
        assert!(headers.is_empty());
    }
    let hash = hex(&key_hash(b"ka"));
    for mut headers in [HeaderMap::new(), key("kc"), key(&hash), key(""), with("authorization", "Basic ka")] {
        let refused = tenants.admit(&mut headers, true).unwrap_err();
        assert!(refused.error == Error::BadKey && refused.visit.is_none());
    }
}

#[tokio::test(start_paused = true)]
async fn limits_are_the_tenant_s_own_and_say_when_to_come_back() {
    let limits = "max_in_flight = 2\nrequests_per_minute = 60.0\ntokens_per_minute = 600.0";
    let (tenants, _file) = load(&(table("a", "ka", limits) + &table("b", "kb", "")));
    let ask = || tenants.admit(&mut key("ka"), true).map_err(|refused| refused.error);
    let held = [ask().unwrap(), ask().unwrap()];
    assert!(matches!(ask(), Err(Error::TenantLimit { limit, .. }) if limit.contains("in_flight")));
    assert!(tenants.admit(&mut key("kb"), true).is_ok(), "others are not held up");
    held[0].reserve(estimate(50, 10)).unwrap();
    held[0].settle(Used::Tokens(tokens(600)));
    drop(held);
    let Err(Error::TenantLimit { limit, retry_after }) = ask() else { panic!("600 of 100 tokens are owed") };
    assert!(limit.contains("tokens"));
    assert_eq!(retry_after.as_secs(), 50, "500 owed and one more, at 10 a second");
    tokio::time::advance(retry_after).await;
    // Ten seconds' worth may come at once.
    let passed = (0..20).map_while(|_| ask().ok()).count();
    assert_eq!(passed, 10);
    tokio::time::advance(Duration::from_secs(1)).await;
    assert!(ask().is_ok());
}

#[test]
fn a_refusal_says_whose_it_is_and_takes_no_place() {
    let (tenants, _file) = load(&table("a", "ka", "max_in_flight = 1"));
    let held = tenants.admit(&mut key("ka"), true).unwrap();
    let refused = tenants.admit(&mut key("ka"), true).unwrap_err();
    assert_eq!(refused.visit.as_ref().map(|visit| visit.tenant().name()), Some("a"));
    drop(refused);
    assert!(tenants.admit(&mut key("ka"), true).is_err(), "the first is still there");
    drop(held);
    assert!(tenants.admit(&mut key("ka"), true).is_ok());
}

#[test]
fn a_tenant_s_blocks_stay_its_own_when_the_file_is_read_again_and_nobody_s_where_all_share() {
    let (tenants, file) = load(&(table("a", "ka", "") + &table("b", "kb", "")));
    let owner = |tenants: &Tenants, of: &str| tenants.admit(&mut key(of), true).unwrap().index_owner();
    let [a, b] = ["ka", "kb"].map(|of| owner(&tenants, of));
    assert!(a != b && a != Owner::NOBODY && b != Owner::NOBODY);
    let others: String = (0..40).map(|i| table(&format!("new {i}"), &format!("k{i}"), "")).collect();
    std::fs::write(&file, others + &table("b", "kb", "max_in_flight = 5") + &table("a", "ka", "")).unwrap();
    let again = tenants.moved(file.path().to_owned(), tenants.rules.clone()).unwrap();
    assert_eq!(["ka", "kb"].map(|of| owner(&again, of)), [a, b]);
    let all: std::collections::HashSet<_> = (0..40).map(|i| owner(&again, &format!("k{i}"))).collect();
    assert!(all.len() == 40 && !all.contains(&a) && !all.contains(&b));
    let shared = TenantRules { isolate: false, ..tenants.rules.clone() };
    let shared = tenants.moved(file.path().to_owned(), shared).unwrap();
    assert_eq!(owner(&shared, "ka"), Owner::NOBODY);
}

fn estimate(prompt: u64, answer: u64) -> Estimate {
    Estimate { prompt, answer, most: 10 * answer }
}

/// Tokens that are left of a tenant's limit, or owed, by what its next request is told.
fn left(tenant: &Tenant) -> f64 {
    let mut left = tenant.left.lock();
    let limit = left.tokens.as_mut().unwrap();
    let standing = limit.standing(Judge::Store, tenant.clock.now());
    standing.per_minute / 6.0 - standing.full_in.as_secs_f64() * standing.per_minute / 60.0
}

#[tokio::test(start_paused = true)]
async fn a_request_is_charged_once_whatever_way_it_ends() {
    let (tenants, _file) = load(&table("a", "ka", "tokens_per_minute = 6000.0"));
    type End = fn(&Visit);
    let ends: [(&str, End, f64); 8] = [
        ("refused before a worker", |_| {}, 0.0),
        ("left before an answer", Visit::asks, 100.0),
        ("failed", |visit| visit.settle(Used::Nothing), 0.0),
        ("its usage", |visit| visit.settle(Used::Tokens(tokens(70))), 70.0),
        ("more than was set aside", |visit| visit.settle(Used::Tokens(tokens(700))), 700.0),
        ("what passed", |visit| visit.settle(Used::Passed(11)), 111.0),
        ("all it may have", |visit| visit.settle(Used::Most), 300.0),
        (
            "twice",
            |visit| {
                visit.settle(Used::Tokens(tokens(5)));
                visit.settle(Used::Tokens(tokens(50)));
            },
            5.0,
        ),
    ];
    for (how, end, used) in ends {
        for asked in [false, true] {
            if asked && used == 0.0 && how.contains("before") {
                continue;
            }
            tokio::time::advance(Duration::from_secs(60)).await;
            let visit = tenants.admit(&mut key("ka"), true).unwrap();
            visit.reserve(estimate(100, 20)).unwrap();
            assert!((left(visit.tenant()) - 880.0).abs() < 0.01, "{how}: 120 of 1,000 are set aside");
            if asked {
                visit.asks();
            }
            let tenant = Arc::clone(&tenants.current.read().by_name["a"]);
            end(&visit);
            drop(visit);
            assert!((left(&tenant) - (1_000.0 - used)).abs() < 0.01, "{how}: {} are left", left(&tenant));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_set_aside_for_some_is_not_there_for_others() {
    let (tenants, _file) = load(&table("a", "ka", "tokens_per_minute = 6000.0"));
    let visits: Vec<Visit> = (0..20).map(|_| tenants.admit(&mut key("ka"), true).unwrap()).collect();
    let in_flight: Vec<_> = visits.iter().map_while(|visit| visit.reserve(estimate(200, 100)).ok()).collect();
    assert_eq!(in_flight.len(), 4, "1,000 tokens are there, and the last one may overdraw them");
    assert!(tenants.admit(&mut key("ka"), true).is_err(), "nothing is left for one more");
    let counted = |outcome: &str| tenants.counted.requests.with_label_values(&["a", outcome]).get();
    assert_eq!((counted("admitted"), counted("rate_limit_exceeded")), (20, 2));
    drop(visits);
    assert_eq!(left(tenants.admit(&mut key("ka"), true).unwrap().tenant()).round(), 1_000.0);
    // More than the whole limit can be asked for.
    let visit = tenants.admit(&mut key("ka"), true).unwrap();
    assert!(visit.reserve(estimate(100_000, 1_000)).is_ok());
}

#[tokio::test(start_paused = true)]
async fn what_passes_beyond_is_taken_while_it_passes() {
    let (tenants, _file) = load(&table("a", "ka", "tokens_per_minute = 6000.0"));
    let visit = tenants.admit(&mut key("ka"), true).unwrap();
    visit.reserve(estimate(100, 20)).unwrap();
    visit.passes(20);
    assert_eq!(left(visit.tenant()).round(), 880.0);
    visit.passes(1_000);
    assert!(
        tenants.admit(&mut key("ka"), true).is_err(),
        "nobody waits for its end to see that nothing is left"
    );
    visit.settle(Used::Passed(1_000));
    assert_eq!(left(visit.tenant()).round(), -100.0);
    visit.passes(5_000);
    assert_eq!(left(visit.tenant()).round(), -100.0, "it is over");
}

#[test]
fn without_a_limit_of_tokens_nothing_is_set_aside() {
    let (tenants, _file) = load(&table("a", "ka", "requests_per_minute = 6.0"));
    let visit = tenants.admit(&mut key("ka"), true).unwrap();
    assert!(!visit.is_metered());
    visit.reserve(estimate(100, 20)).unwrap();
    visit.settle(Used::Tokens(tokens(1_000_000)));
    assert!(
        tenants
            .admit(&mut key("ka"), true)
            .is_err_and(|refused| refused.error.to_string().contains("requests"))
    );
}

fn told(tenants: &Tenants, path: &str) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for name in [
        "x-ratelimit-limit-tokens",
        "x-ratelimit-remaining-requests",
        "anthropic-ratelimit-tokens-limit",
        "anthropic-ratelimit-requests-reset",
        "anthropic-ratelimit-output-tokens-remaining",
    ] {
        headers.append(HeaderName::from_static(name), HeaderValue::from_static("the worker's"));
        headers.append(HeaderName::from_static(name), HeaderValue::from_static("the worker's other"));
    }
    tenants.current.read().by_name["a"].tell(path, &mut headers);
    headers
}

#[tokio::test(start_paused = true)]
async fn an_answer_says_how_its_tenant_s_limits_stand_and_not_its_worker_s() {
    let limits = "requests_per_minute = 60.0\ntokens_per_minute = 6000.0";
    let (tenants, _file) = load(&table("a", "ka", limits));
    let visit = tenants.admit(&mut key("ka"), true).unwrap();
    visit.reserve(estimate(180, 20)).unwrap();
    let headers = told(&tenants, "/v1/chat/completions");
    let said: Vec<_> = ["limit", "remaining", "reset"]
        .iter()
        .flat_map(|what| {
            ["requests", "tokens"].map(|of| headers[&format!("x-ratelimit-{what}-{of}")].to_str().unwrap())
        })
        .collect();
    assert_eq!(said, ["60", "6000", "9", "800", "1s", "2s"]);
    assert_eq!(headers.len(), 6, "{headers:?}");
    let headers = told(&tenants, "/v1/messages");
    let of = |name: &str| headers[&format!("anthropic-ratelimit-{name}")].to_str().unwrap();
    assert_eq!(
        [of("requests-limit"), of("requests-remaining"), of("tokens-limit"), of("tokens-remaining")],
        ["60", "9", "6000", "800"]
    );
    assert!(of("requests-reset").ends_with('Z') && of("tokens-reset").contains('T'));
    assert_eq!(headers.len(), 6, "{headers:?}");
    visit.settle(Used::Tokens(tokens(5_000)));
    assert_eq!(
        told(&tenants, "/v1/embeddings")["x-ratelimit-remaining-tokens"],
        "0",
        "what is owed is not less than none"
    );
    assert_eq!(told(&tenants, "/v1/embeddings")["x-ratelimit-reset-tokens"], "50s");
}

#[test]
fn what_a_worker_says_of_limits_that_a_tenant_has_not_stays() {
    let (tenants, _file) = load(&table("a", "ka", "requests_per_minute = 60.0"));
    let headers = told(&tenants, "/v1/chat/completions");
    assert_eq!(headers["x-ratelimit-limit-tokens"], "the worker's");
    assert_eq!(headers["x-ratelimit-limit-requests"], "60");
    assert!(!headers.contains_key("anthropic-ratelimit-requests-reset"));
    let (tenants, _file) = load(&table("a", "ka", "max_in_flight = 6"));
    assert_eq!(told(&tenants, "/v1/chat/completions").len(), 10);
}

proptest! {
    /// Requests that begin, pass, end and leave in any order, over a minute.
    #[test]
    fn nothing_set_aside_is_lost_and_nothing_used_is_free(
        steps in prop::collection::vec((0_u8..6, 0_u64..3_000, any::<prop::sample::Index>()), 1..80),
    ) {
        let (tenants, _file) = load(&table("a", "ka", "tokens_per_minute = 6000000.0"));
        let tenant = Arc::clone(&tenants.current.read().by_name["a"]);
        let (mut visits, mut used) = (Vec::<(Visit, u64)>::new(), 0);
        for (what, amount, which) in steps {
            if what == 0 || visits.is_empty() {
                let visit = tenants.admit(&mut key("ka"), true).unwrap();
                visit.reserve(estimate(amount, amount / 2)).unwrap();
                visit.asks();
                visits.push((visit, amount));
                continue;
            }
            let at = which.index(visits.len());
            if what == 1 {
                visits[at].0.passes(amount);
                continue;
            }
            let (visit, prompt) = visits.swap_remove(at);
            used += match what {
                2 => { visit.settle(Used::Nothing); 0 }
                3 => { visit.settle(Used::Tokens(tokens(amount))); amount }
                4 => { visit.settle(Used::Passed(amount)); prompt + amount }
                _ => prompt,
            };
        }
        for (visit, _) in visits.drain(..) {
            visit.settle(Used::Nothing);
        }
        // What comes back meanwhile, at 100 a millisecond, and no more.
        let left = left(&tenant);
        prop_assert!(left >= 1e6 - used as f64 - 1.0 && left <= 1e6 + 1.0);
        let refill = tenant.clock.now().as_secs_f64() * 1e5;
        prop_assert!(left <= 1e6 - used as f64 + refill + 1.0, "{left} of {used}, {refill} came");
    }
}

#[tokio::test(start_paused = true)]
async fn a_changed_file_is_taken_over_whole_or_not_at_all() {
    let (tenants, file) = load(&table("a", "ka", "requests_per_minute = 6.0"));
    assert!(tenants.admit(&mut key("ka"), true).is_ok());
    let write = |text: &str| {
        std::fs::write(file.path(), text).unwrap();
        file::read(file.path(), BudgetUnits::default()).map(|parsed| tenants.take_over(parsed))
    };
    // A new key; what was used of the limit stays used.
    write(&(table("a", "ka2", "requests_per_minute = 6.0") + &table("b", "kb", ""))).unwrap();
    let refused = |of: &str| tenants.admit(&mut key(of), true).unwrap_err().error;
    assert_eq!(refused("ka"), Error::BadKey);
    assert!(matches!(refused("ka2"), Error::TenantLimit { .. }));
    assert!(tenants.admit(&mut key("kb"), true).is_ok());
    assert!(write("[[tenant]]\nname = \"c\"").is_err());
    assert!(tenants.admit(&mut key("kb"), true).is_ok());
}

#[test]
fn a_tenant_is_not_in_flight_after_its_requests() {
    let (tenants, _file) = load(&table("a", "ka", "max_in_flight = 1"));
    for _ in 0..3 {
        let visit = tenants.admit(&mut key("ka"), true).unwrap();
        assert!(tenants.admit(&mut key("ka"), true).is_err());
        drop(visit);
    }
}

#[test]
fn totals_are_of_all_who_have_asked() {
    let text = table("a", "ka", "max_in_flight = 1") + &table("b", "kb", "") + &table("c", "kc", "");
    let (tenants, file) = load(&text);
    assert!(tenants.totals().is_empty());
    let first = tenants.admit(&mut key("ka"), true).unwrap();
    assert!(tenants.admit(&mut key("ka"), true).is_err());
    let second = tenants.admit(&mut key("kb"), true).unwrap();
    first.owes(100, 7);
    second.owes(20, 0);
    second.owes(3, 0);
    let of = |tenant: &str, admitted, refused, prompt_tokens| TenantTotals {
        tenant: tenant.to_owned(),
        admitted,
        refused,
        prompt_tokens,
    };
    assert_eq!(tenants.totals(), [of("a", 1, 1, 100), of("b", 1, 0, 23)]);
    // Its requests stay counted when it has gone.
    std::fs::write(file.path(), table("b", "kb", "")).unwrap();
    *tenants.seen.lock() = None;
    tenants.look();
    assert_eq!(tenants.totals(), [of("a", 1, 1, 0), of("b", 1, 0, 23)]);
}
