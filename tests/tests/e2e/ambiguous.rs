//! Requests that two readers of HTTP may frame differently, and odd ones that all must frame alike. What a
//! gateway makes of them alone is `smuggling.rs`; together with other proxies, `chains.rs`.

use keyway_tests::openai::chat;

/// What hides behind an ambiguous request: it must reach nobody. Whoever answers it closes.
pub(crate) const HIDDEN: &str = "GET /v1/smuggled HTTP/1.1\r\nhost: k\r\nconnection: close\r\n\r\n";

/// A chat request with these headers, which frame its body.
pub(crate) fn with_headers(headers: &str, body: &str) -> String {
    format!("POST /v1/chat/completions HTTP/1.1\r\nhost: k\r\n{headers}\r\n\r\n{body}")
}

/// The body of every odd request.
pub(crate) fn odd_body() -> String {
    String::from_utf8(chat("an odd one")).expect("text")
}

/// Requests that must be refused.
pub(crate) fn ambiguous() -> Vec<String> {
    let mut corpus = lengths();
    corpus.extend(codings());
    corpus.extend(chunks());
    corpus.extend(heads());
    corpus.extend(hosts());
    corpus.extend(both());
    corpus
}

/// Requests of which it is not clear which server they are for.
fn hosts() -> Vec<String> {
    let line =
        |target: &str, fields: &str| format!("GET {target}/v1/chat/completions HTTP/1.1\r\n{fields}\r\n");
    let odd = [
        "",
        " ",
        "a b",
        "a\tb",
        "a@b",
        "user:word@k",
        "k/",
        "k/v1",
        "http://k",
        "k?x",
        "k#x",
        "k\\x",
        "\"k\"",
        "<k>",
        "k|x",
        "k:x",
        "k:-1",
        "k:+80",
        "k:65536",
        "k:80:80",
        ":80",
        "k: 80",
        "k:80 x",
        "[::1",
        "::1]",
        "[]",
        "[::1]x",
        "[::1]:x",
        "[g::1]",
        "[1.2.3.4]",
        "::1",
        "k..x",
        ".",
        "%",
        "%zz",
        "k\0",
        "k\u{1}",
        "k\u{7f}",
        "k\u{e9}",
        "k\u{b}x",
        "k, k",
    ];
    let mut requests: Vec<String> = odd.iter().map(|host| line("", &format!("host: {host}\r\n"))).collect();
    for (target, fields) in [
        ("", ""),
        ("", "host: k\r\nhost: k\r\n"),
        ("", "host: k\r\nx: y\r\nHost: other\r\n"),
        ("", "host : k\r\n"),
        ("", "x: y\r\n host: k\r\n"),
        ("http://k", ""),
        ("http://k", "host: k\r\nhost: k\r\n"),
        ("http://k", "host: a@b\r\n"),
        ("http://k:x", "host: k\r\n"),
        ("http://user@k", "host: k\r\n"),
        ("http://k..x", "host: k\r\n"),
    ] {
        requests.push(line(target, fields));
    }
    requests
}

fn lengths() -> Vec<String> {
    let lengths = [
        "+2",
        "-2",
        "2, 3",
        "0x2",
        "2 2",
        "",
        "1e0",
        "2;",
        "18446744073709551618",
        "\u{b2}",
        "2\t3",
        "2,",
        "2, 2",
        ",2",
    ];
    let mut requests: Vec<String> =
        lengths.iter().map(|length| with_headers(&format!("content-length: {length}"), "{}")).collect();
    for headers in [
        "content-length: 2\r\ncontent-length: 3",
        "content-length: 2\r\ncontent-length: 2",
        "Content-Length:2\r\nx: y\r\ncontent-length: 02",
        "content-length : 2",
        "content-length\t: 2",
        "content-length: 2\r\n 3",
    ] {
        requests.push(with_headers(headers, "{}"));
    }
    requests
}

fn codings() -> Vec<String> {
    let codings = [
        "transfer-encoding: gzip, chunked",
        "transfer-encoding: chunked, chunked",
        "transfer-encoding: identity, chunked",
        "transfer-encoding: ,chunked",
        "transfer-encoding: chunked,",
        "transfer-encoding: identity",
        "transfer-encoding:",
        "transfer-encoding: chunked;q=1",
        "transfer-encoding: chunked\r\ntransfer-encoding: chunked",
        "transfer-encoding: gzip\r\nx: y\r\ntransfer-encoding: chunked",
        "transfer-encoding:\r\ntransfer-encoding: chunked",
        "transfer-encoding: xchunked",
        "transfer-encoding: chunked, identity",
        "transfer-encoding: chunked, gzip",
        "transfer-encoding : chunked",
        "transfer-encoding: chunked\r\ntransfer-encoding: gzip",
        "transfer-encoding: \"chunked\"",
        "transfer-encoding: \u{b}chunked",
        "x: y\r\n transfer-encoding: chunked",
        "transfer-encoding: chun\0ked",
        " transfer-encoding: chunked",
        "transfer-encoding\0: chunked",
    ];
    codings.iter().map(|coding| with_headers(coding, "2\r\n{}\r\n0\r\n\r\n")).collect()
}

fn chunks() -> Vec<String> {
    let sizes = ["+2", "-2", "0x2", "2 2", "g", "", "10000000000000002", "2\n", ";2", "2\r\r", "2;\nx"];
    let mut bodies: Vec<String> = sizes.iter().map(|size| format!("{size}\r\n{{}}\r\n0\r\n\r\n")).collect();
    // More than was said, an end of a chunk that is none, and an end of the body that is none.
    bodies.extend(
        ["2\r\n{}x\r\n0\r\n\r\n", "2\r\n{}\n0\r\n\r\n", "2\r\n{}\r\n0\r\nx y\r\n\r\n"].map(str::to_owned),
    );
    bodies.iter().map(|body| with_headers("transfer-encoding: chunked", body)).collect()
}

fn heads() -> Vec<String> {
    let lines = [
        "POST /v1/chat/completions  HTTP/1.1\r\nhost: k\r\n\r\n",
        "POST /v1/chat/completions HTTP/1.1 x\r\nhost: k\r\n\r\n",
        "POST /v1/chat/completions HTTP/2.0\r\nhost: k\r\n\r\n",
        "POST /v1/chat/completions HTTP/1.12\r\nhost: k\r\n\r\n",
        "POST /v1/chat/\0completions HTTP/1.1\r\nhost: k\r\n\r\n",
        "PO ST /v1/chat/completions HTTP/1.1\r\nhost: k\r\n\r\n",
        "POST /v1/chat/completions HTTP/1.1\r\n: x\r\nhost: k\r\n\r\n",
        "POST /v1/chat/completions HTTP/1.1\r\nhost: k\r\nx: a\rb\r\n\r\n",
        "POST /v1/chat/completions HTTP/1.1\r\nhost k\r\n\r\n",
        "POST /v1/chat/completions HTTP/1.1\r\nhost: k\r\nx y: z\r\n\r\n",
        "POST /v1/chat/completions HTTP/1.1\r\nhost: k\r\nx\r\n\r\n",
        "POST /v1/chat/completions HTTP/1.1\rhost: k\r\n\r\n",
    ];
    lines.map(str::to_owned).to_vec()
}

/// Requests with a length and chunks, of which others read the one or the other, and such in HTTP/1.0, which
/// has no chunks.
fn both() -> Vec<String> {
    let two = [
        "transfer-encoding: chunked\r\ncontent-length: 2",
        "content-length: 12\r\ntransfer-encoding: chunked",
        "Transfer-Encoding:chunked\r\nx: y\r\nContent-Length:12",
        "transfer-encoding: chunked\r\ncontent-length: x",
        "transfer-encoding: chunked\r\ncontent-length:",
        "content-length: 12\r\ncontent-length: 12\r\ntransfer-encoding: chunked",
        "connection: content-length\r\ncontent-length: 12\r\ntransfer-encoding: chunked",
        "connection: transfer-encoding\r\ncontent-length: 12\r\ntransfer-encoding: chunked",
        "expect: 100-continue\r\ncontent-length: 12\r\ntransfer-encoding: chunked",
    ];
    let mut requests: Vec<String> =
        two.iter().map(|headers| with_headers(headers, "2\r\n{}\r\n0\r\n\r\n")).collect();
    requests.push(with_headers("content-length: 4\r\ntransfer-encoding: chunked", "0\r\n\r\n"));
    for kept in ["", "connection: keep-alive\r\n"] {
        let old = with_headers(&format!("{kept}transfer-encoding: chunked"), "2\r\n{}\r\n0\r\n\r\n");
        requests.push(old.replacen("HTTP/1.1", "HTTP/1.0", 1));
    }
    requests
}

/// Requests that are unusual and clear: one request with [`odd_body`], and what stands behind it is another.
pub(crate) fn odd() -> Vec<String> {
    let body = odd_body();
    let length = body.len();
    let mut requests: Vec<String> = odd_heads(length).iter().map(|head| with_headers(head, &body)).collect();
    let plain = with_headers(&format!("content-length: {length}"), &body);
    requests.push(format!("\r\n{plain}"));
    // The target counts, whatever the host.
    requests.extend(["http://k/v1/", "http://other:80/v1/"].map(|target| plain.replacen("/v1/", target, 1)));
    let hosts = ["K", "k:", "k:8080", "a-b_c.d.", "127.0.0.1:80", "[::1]:80", "[fe80::1%25eth0]", "%6b"];
    requests.extend(hosts.map(|host| plain.replacen("host: k", &format!("host: {host}"), 1)));
    for chunked in [
        format!("{length:x};name=value\r\n{body}\r\n0\r\n\r\n"),
        format!("{length:x};name=\"a;b\"\r\n{body}\r\n0;last\r\n\r\n"),
        format!("000{length:X}\r\n{body}\r\n000\r\n\r\n"),
        format!("{length:x}\r\n{body}\r\n0\r\ncontent-length: 5\r\nx-trailer: y\r\n\r\n"),
        format!(
            "{length:x}\r\n{body}\r\n0\r\nhost: other\r\ntransfer-encoding: x\r\nauthorization: Bearer y\r\n\r\n"
        ),
        body.split("")
            .filter(|one| !one.is_empty())
            .flat_map(|one| ["1\r\n", one, "\r\n"])
            .collect::<String>()
            + "0\r\n\r\n",
    ] {
        requests.push(with_headers("transfer-encoding: chunked", &chunked));
    }
    for coding in
        ["Transfer-Encoding: CHUNKED", "transfer-encoding:\tchunked \t", "transfer-encoding:chunked"]
    {
        requests.push(with_headers(coding, &format!("{length:x}\r\n{body}\r\n0\r\n\r\n")));
    }
    let named = "connection: transfer-encoding\r\ntransfer-encoding: chunked";
    requests.push(with_headers(named, &format!("{length:x}\r\n{body}\r\n0\r\n\r\n")));
    requests
}

fn odd_heads(length: usize) -> Vec<String> {
    vec![
        format!("CONTENT-length:{length}  "),
        format!("content-length: 000{length}"),
        format!("content_length: 5\r\ncontent-length: {length}"),
        format!("x-transfer-encoding: chunked\r\ncontent-length: {length}"),
        format!("connection: content-length\r\ncontent-length: {length}"),
        format!("te: trailers\r\nconnection: te\r\ncontent-length: {length}"),
        format!("upgrade: h2c\r\nconnection: upgrade\r\ncontent-length: {length}"),
        format!("expect: 100-continue\r\ncontent-length: {length}"),
        format!("x:\r\ny: \u{e9}\r\ncontent-length: {length}"),
    ]
}
