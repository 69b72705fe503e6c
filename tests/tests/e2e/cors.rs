//! Hazard: a page in a browser cannot use the API, cannot read why it failed, or one may that must not (the
//! Fetch standard, CORS).

use keyway_tests::cluster::config_file;
use keyway_tests::openai::{CHAT, chat};
use keyway_tests::{Client, Cluster, Response};

const PAGE: &str = "https://chat.example";

async fn ask(cluster: &Cluster, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Response {
    let mut client = Client::connect(cluster.addr()).await;
    client.request(method, path, headers, body).await;
    client.response().await
}

/// What the answer says of who may read it.
fn told(answer: &Response) -> Vec<(&str, &str)> {
    let of_cors = |name: &str| name.starts_with("access-control-") || name == "vary";
    let headers = answer.head.headers.iter().filter(|(name, _)| of_cors(name));
    let mut told: Vec<_> = headers.map(|(name, value)| (name.as_str(), value.as_str())).collect();
    told.sort_unstable();
    told
}

const PREFLIGHT: [(&str, &str); 3] = [
    ("origin", PAGE),
    ("access-control-request-method", "POST"),
    ("access-control-request-headers", "authorization,content-type,x-stainless-os"),
];

#[tokio::test]
async fn a_preflight_needs_no_key_and_no_worker() {
    let tenants = config_file(&format!("[[tenant]]\nname = \"a\"\nkey_sha256 = [\"{}\"]\n", "0".repeat(64)));
    let config =
        format!("[cors]\nallow_origins = [\"{PAGE}\"]\n[auth]\ntenants_file = {:?}\n", tenants.path());
    let cluster = Cluster::builder().fakes(1).config(&config).start().await;
    for path in [CHAT, "/v1/models", "/v1/files/f", "/nowhere"] {
        let answer = ask(&cluster, "OPTIONS", path, &PREFLIGHT, b"").await;
        assert_eq!((answer.status(), answer.body.len()), (204, 0), "{path}");
        assert_eq!(
            told(&answer),
            [
                ("access-control-allow-headers", "authorization,content-type,x-stainless-os"),
                ("access-control-allow-methods", "GET, POST, PUT, PATCH, DELETE"),
                ("access-control-allow-origin", PAGE),
                ("access-control-max-age", "600"),
                ("vary", "access-control-request-headers"),
                ("vary", "origin"),
            ],
            "{path}"
        );
        assert!(answer.header("x-request-id").is_some());
    }
    // The request itself does, and the page can read why it failed.
    let answer = ask(&cluster, "POST", CHAT, &[("origin", PAGE)], &chat("no key")).await;
    assert_eq!((answer.status(), answer.header("access-control-allow-origin")), (401, Some(PAGE)));
    let elsewhere = [("origin", "https://elsewhere.example"), PREFLIGHT[1], PREFLIGHT[2]];
    let answer = ask(&cluster, "OPTIONS", CHAT, &elsewhere, b"").await;
    assert_eq!(told(&answer), [("vary", "access-control-request-headers"), ("vary", "origin")]);
    assert_eq!(cluster.fakes[0].request_count(), 0);
}

#[tokio::test]
async fn every_answer_says_who_may_read_it_the_gateway_s_errors_too() {
    let config = format!(
        "[cors]\nallow_origins = [\"{PAGE}\"]\nallow_credentials = true\nexpose_headers = [\"x-request-id\"]\n"
    );
    let cluster = Cluster::builder().fakes(1).config(&config).start().await;
    let long = "x".repeat(9_000);
    let (unknown, long) = ("/nowhere".to_owned(), format!("/v1/{long}"));
    let told_of = async |origin: &str| {
        let mut all = Vec::new();
        for (method, path) in
            [("POST", CHAT), ("GET", "/v1/models"), ("GET", "/health"), ("GET", &unknown), ("GET", &long)]
        {
            let body = if method == "POST" { chat("hi") } else { Vec::new() };
            let answer = ask(&cluster, method, path, &[("origin", origin)], &body).await;
            let told: Vec<_> = told(&answer).iter().map(|(name, value)| format!("{name}: {value}")).collect();
            all.push((answer.status(), told));
        }
        all
    };
    let allowed = [
        "access-control-allow-credentials: true".to_owned(),
        format!("access-control-allow-origin: {PAGE}"),
        "access-control-expose-headers: x-request-id".to_owned(),
        "vary: origin".to_owned(),
    ];
    for ((status, told), want) in told_of(PAGE).await.into_iter().zip([200, 200, 200, 404, 414]) {
        assert_eq!((status, told), (want, allowed.to_vec()));
    }
    for (_, told) in told_of("https://chat.example.evil").await {
        assert_eq!(told, ["vary: origin"]);
    }
    // What cannot be served, for whatever reason.
    cluster.fakes[0].stop().await;
    let answer = ask(&cluster, "POST", CHAT, &[("origin", PAGE)], &chat("nobody there")).await;
    assert!(answer.status() >= 500);
    assert_eq!(answer.header("access-control-allow-origin"), Some(PAGE));
}

#[tokio::test]
async fn what_a_worker_says_of_it_is_replaced_where_it_is_configured_and_passes_where_not() {
    let said = [
        ("access-control-allow-origin", "https://of.worker"),
        ("access-control-allow-credentials", "true"),
        ("vary", "accept-encoding"),
    ];
    for (config, want) in [
        (
            "",
            [
                ("access-control-allow-credentials", "true"),
                ("access-control-allow-origin", "https://of.worker"),
                ("vary", "accept-encoding"),
            ],
        ),
        (
            "[cors]\nallow_origins = \"*\"\nexpose_headers = [\"x-a\"]\n",
            [
                ("access-control-allow-origin", "*"),
                ("access-control-expose-headers", "x-a"),
                ("vary", "accept-encoding"),
            ],
        ),
    ] {
        let cluster = Cluster::builder().fakes(1).config(config).start().await;
        cluster.fakes[0].manual();
        let worker = async { cluster.fakes[0].call().await.respond(200, &said, b"{}").await };
        let (answer, ()) = tokio::join!(ask(&cluster, "POST", CHAT, &[("origin", PAGE)], b"{}"), worker);
        assert_eq!(told(&answer), want, "{config:?}");
    }
    // Without a word of it in the configuration a preflight is the worker's to answer.
    let cluster = Cluster::of_fakes(1, "prefix").await;
    assert_eq!(ask(&cluster, "OPTIONS", CHAT, &PREFLIGHT, b"").await.status(), 200);
    assert_eq!(cluster.fakes[0].requests()[0].target(), ("OPTIONS", CHAT));
}
