//! Keys, limits and reloading of tenants.

use std::io::Write as _;

use http::HeaderValue;
use prometheus::Opts;

use super::*;

fn table(name: &str, key: &str, limits: &str) -> String {
    format!("[[tenant]]\nname = {name:?}\nkey_sha256 = [\"{}\"]\n{limits}\n", hex(&key_hash(key.as_bytes())))
}

fn load(text: &str) -> (Arc<Tenants>, tempfile::NamedTempFile) {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    let counted = IntCounterVec::new(Opts::new("c", "c"), &["tenant", "outcome"]).unwrap();
    let path = file.path().to_owned();
    (
        Tenants::load(
            path,
            TenantRules { isolate: true, steering: Arc::default() },
            HashKey::new(7),
            Clock::start(),
            counted,
        )
        .unwrap(),
        file,
    )
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
        assert_eq!(tenants.admit(&mut headers).unwrap().tenant().name(), name);
        assert!(headers.is_empty());
    }
    let hash = hex(&key_hash(b"ka"));
    for mut headers in [HeaderMap::new(), key("kc"), key(&hash), key(""), with("authorization", "Basic ka")] {
        assert_eq!(tenants.admit(&mut headers).unwrap_err(), Error::BadKey);
    }
}

#[tokio::test(start_paused = true)]
async fn limits_are_the_tenant_s_own_and_say_when_to_come_back() {
    let limits = "max_in_flight = 2\nrequests_per_minute = 60.0\ntokens_per_minute = 600.0";
    let (tenants, _file) = load(&(table("a", "ka", limits) + &table("b", "kb", "")));
    let ask = || tenants.admit(&mut key("ka"));
    let held = [ask().unwrap(), ask().unwrap()];
    assert!(matches!(ask(), Err(Error::TenantLimit { limit, .. }) if limit.contains("in_flight")));
    assert!(tenants.admit(&mut key("kb")).is_ok(), "others are not held up");
    let usage = Usage { prompt_tokens: 500, completion_tokens: 100, ..Usage::default() };
    held[0].charge(&usage);
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

#[tokio::test(start_paused = true)]
async fn a_changed_file_is_taken_over_whole_or_not_at_all() {
    let (tenants, file) = load(&table("a", "ka", "requests_per_minute = 6.0"));
    assert!(tenants.admit(&mut key("ka")).is_ok());
    let write = |text: &str| {
        std::fs::write(file.path(), text).unwrap();
        file::read(file.path()).map(|parsed| tenants.take_over(parsed))
    };
    // A new key; what was used of the limit stays used.
    write(&(table("a", "ka2", "requests_per_minute = 6.0") + &table("b", "kb", ""))).unwrap();
    assert_eq!(tenants.admit(&mut key("ka")).unwrap_err(), Error::BadKey);
    assert!(matches!(tenants.admit(&mut key("ka2")), Err(Error::TenantLimit { .. })));
    assert!(tenants.admit(&mut key("kb")).is_ok());
    assert!(write("[[tenant]]\nname = \"c\"").is_err());
    assert!(tenants.admit(&mut key("kb")).is_ok());
}

#[test]
fn a_tenant_is_not_in_flight_after_its_requests() {
    let (tenants, _file) = load(&table("a", "ka", "max_in_flight = 1"));
    for _ in 0..3 {
        let visit = tenants.admit(&mut key("ka")).unwrap();
        assert!(tenants.admit(&mut key("ka")).is_err());
        drop(visit);
    }
}
