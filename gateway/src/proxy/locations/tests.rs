//! Links of every kind, and what becomes of them.

use proptest::prelude::*;

use super::*;

fn led(header: &str, value: &str, worker: &str) -> String {
    let mut headers = HeaderMap::new();
    headers.insert(HeaderName::try_from(header).unwrap(), HeaderValue::from_str(value).unwrap());
    lead_back(&mut headers, &worker.parse().unwrap());
    headers[header].to_str().unwrap().to_owned()
}

fn location(value: &str, worker: &str) -> String {
    led("location", value, worker)
}

#[test]
fn a_link_to_the_worker_becomes_a_path_however_it_is_written() {
    for (link, worker, path) in [
        ("http://w:8000/v1/chat/completions", "http://w:8000", "/v1/chat/completions"),
        ("http://w:8000/v1/x?a=b&c=http://y/#top", "http://w:8000", "/v1/x?a=b&c=http://y/#top"),
        ("HTTP://W.Example:8000/v1/x", "http://w.example:8000/", "/v1/x"),
        ("http://w.example.:8000/v1/x", "http://w.example:8000", "/v1/x"),
        ("//w:8000/v1/x", "http://w:8000", "/v1/x"),
        ("https://w:8000/v1/x", "http://w:8000", "/v1/x"),
        ("wss://w:8000/v1/x", "http://w:8000", "/v1/x"),
        ("http://user:pass@w:8000/v1/x", "http://w:8000", "/v1/x"),
        ("http://u@v@w:8000/v1/x", "http://w:8000", "/v1/x"),
        ("http:\\\\w:8000\\v1", "http://w:8000", "/v1"),
        ("http://w:8000", "http://w:8000", "/"),
        ("http://w:8000?a=b", "http://w:8000", "/?a=b"),
        ("http://w:8000#x", "http://w:8000", "/#x"),
        // Ports that need not be said.
        ("http://w/v1/x", "http://w:80", "/v1/x"),
        ("http://w:80/v1/x", "http://w", "/v1/x"),
        ("https://w:443/v1/x", "https://w", "/v1/x"),
        ("http://w/v1/x", "https://w", "/v1/x"),
        ("//w/v1/x", "https://w:443", "/v1/x"),
        ("https://w/v1/x", "http://w:443", "/v1/x"),
        // Addresses.
        ("http://[::1]:8000/v1/x", "http://[::1]:8000", "/v1/x"),
        ("http://[0:0:0:0:0:0:0:1]:8000/v1/x", "http://[::1]:8000", "/v1/x"),
        ("http://[FD00::A]/v1/x", "http://[fd00::a]:80", "/v1/x"),
        // With the path of its URL, and where it does not know that path.
        ("http://w:8000/engine/v1/x", "http://w:8000/engine", "/v1/x"),
        ("http://w:8000/engine/v1/x", "http://w:8000/engine/", "/v1/x"),
        ("http://w:8000/engine", "http://w:8000/engine", "/"),
        ("http://w:8000/engine?q", "http://w:8000/engine", "/?q"),
        ("http://w:8000/engines/x", "http://w:8000/engine", "/engines/x"),
        ("http://w:8000/v1/x", "http://w:8000/engine", "/v1/x"),
        ("/engine/v1/x", "http://w:8000/engine", "/v1/x"),
        // Nobody else's host comes of a path.
        ("http://w:8000//evil.example/x", "http://w:8000", "/.//evil.example/x"),
        ("http://w:8000/\\evil.example/x", "http://w:8000", "/./\\evil.example/x"),
        ("/engine//evil.example/x", "http://w:8000/engine", "/.//evil.example/x"),
    ] {
        assert_eq!(location(link, worker), path, "{link} from {worker}");
    }
}

#[test]
fn a_link_to_elsewhere_stays_as_it_is() {
    for (link, worker) in [
        ("https://elsewhere.example/v1/x", "http://w:8000"),
        ("http://w:8001/v1/x", "http://w:8000"),
        ("http://w/v1/x", "http://w:8000"),
        ("http://w:8000.example/v1/x", "http://w:8000"),
        ("http://w:8000@elsewhere.example/v1/x", "http://w:8000"),
        ("http://w.example:8000/v1/x", "http://w:8000"),
        ("http://notw:8000/v1/x", "http://w:8000"),
        ("http://[::1]:8000/v1/x", "http://[::2]:8000"),
        ("ftp://w:8000/v1/x", "http://w:8000"),
        ("mailto:someone@w:8000", "http://w:8000"),
        ("/v1/x", "http://w:8000"),
        ("/v1/x", "http://w:8000/engine"),
        ("/engines/x", "http://w:8000/engine"),
        ("../x?y", "http://w:8000"),
        ("?next=http://w:8000/", "http://w:8000"),
        ("x:y", "http://w:8000"),
        ("", "http://w:8000"),
        (":", "http://w:8000"),
        ("http:", "http://w:8000"),
        ("//", "http://w:8000"),
    ] {
        assert_eq!(location(link, worker), link, "{link} from {worker}");
    }
}

#[test]
fn every_header_that_links_is_looked_at_and_no_other() {
    let worker = "http://w:8000";
    assert_eq!(led("content-location", "http://w:8000/v1/files/f", worker), "/v1/files/f");
    assert_eq!(led("x-location", "http://w:8000/v1/files/f", worker), "http://w:8000/v1/files/f");
    for (value, want) in [
        ("5; url=http://w:8000/v1/x", "5; url=/v1/x"),
        ("0;URL='http://w:8000/v1/x'", "0;URL='/v1/x'"),
        ("0; Url=\"//w:8000/v1/x\" x", "0; Url=\"/v1/x\" x"),
        ("5; url=http://e:8000/v1/x", "5; url=http://e:8000/v1/x"),
        ("5", "5"),
    ] {
        assert_eq!(led("refresh", value, worker), want, "{value}");
    }
    for (value, want) in [
        ("<http://w:8000/v1/x?after=2>; rel=\"next\"", "</v1/x?after=2>; rel=\"next\""),
        ("<//w:8000/a>; rel=a, <http://e/b>, <http://w:8000/c>", "</a>; rel=a, <http://e/b>, </c>"),
        ("<http://w:8000/a", "<http://w:8000/a"),
        ("</a>; rel=a", "</a>; rel=a"),
    ] {
        assert_eq!(led("link", value, worker), want, "{value}");
    }
}

#[test]
fn each_of_several_is_led_back() {
    let mut headers = HeaderMap::new();
    for link in ["<http://w:8000/a>", "<http://e/b>", "<http://w:8000/c>"] {
        headers.append(LINK, HeaderValue::from_static(link));
    }
    lead_back(&mut headers, &"http://w:8000".parse().unwrap());
    let links: Vec<_> = headers.get_all(LINK).iter().collect();
    assert_eq!(links, ["</a>", "<http://e/b>", "</c>"]);
}

proptest! {
    #[test]
    fn the_worker_s_address_never_leaves_and_what_does_names_no_host(
        scheme in prop::sample::select(vec!["http:", "https:", "HTTP:", ""]),
        user in prop::sample::select(vec!["", "u@", "u:p@"]),
        path in "(/[a-z/\\\\.]{0,12})?",
        query in "(\\?[a-z=&]{0,8})?",
        prefix in prop::sample::select(vec!["", "/engine"]),
    ) {
        let worker = format!("http://worker-7.internal:8000{prefix}");
        let link = format!("{scheme}//{user}worker-7.internal:8000{prefix}{path}{query}");
        let led = location(&link, &worker);
        prop_assert!(!led.contains("worker-7"), "{led}");
        prop_assert!(led.starts_with('/') && !led[1..].starts_with(['/', '\\']), "{led}");
        prop_assert!(led.ends_with(&format!("{path}{query}")), "{led}");
    }

    #[test]
    fn no_value_of_a_header_is_too_odd(value in "[ -~]{0,40}", header in prop::sample::select(vec!["location", "link", "refresh"])) {
        let _ = led(header, &value, "http://w:8000/engine");
    }
}
