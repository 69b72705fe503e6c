//! Requests that two readers of HTTP may frame differently, and odd ones that all must frame alike. What a gateway makes of
//! them alone is `smuggling.rs`; together with other proxies, `chains.rs`.

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
    corpus
}

fn lengths() -> Vec<String> {
    let lengths =
        ["+2", "-2", "2, 3", "0x2", "2 2", "", "1e0", "2;", "18446744073709551618", "\u{b2}", "2\t3", "2,"];
    let mut requests: Vec<String> =
        lengths.iter().map(|length| with_headers(&format!("content-length: {length}"), "{}")).collect();
    for headers in [
        "content-length: 2\r\ncontent-length: 3",
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

/// Requests with a length and chunks, of which the chunks count (RFC 9112 §6.1) and after which the connection ends.
pub(crate) fn both() -> Vec<String> {
    let two = [
        "transfer-encoding: chunked\r\ncontent-length: 2",
        "content-length: 12\r\ntransfer-encoding: chunked",
    ];
    let mut requests: Vec<String> =
        two.iter().map(|headers| with_headers(headers, "2\r\n{}\r\n0\r\n\r\n")).collect();
    requests.push(with_headers("content-length: 4\r\ntransfer-encoding: chunked", "0\r\n\r\n"));
    requests
}

/// Requests that are unusual and clear: one request with [`odd_body`], and what stands behind it is another.
pub(crate) fn odd() -> Vec<String> {
    let body = odd_body();
    let length = body.len();
    let mut requests: Vec<String> = odd_heads(length).iter().map(|head| with_headers(head, &body)).collect();
    let plain = with_headers(&format!("content-length: {length}"), &body);
    requests.push(format!("\r\n{plain}"));
    requests.push(plain.replacen("/v1/", "http://k/v1/", 1));
    for chunked in [
        format!("{length:x};name=value\r\n{body}\r\n0\r\n\r\n"),
        format!("{length:x};name=\"a;b\"\r\n{body}\r\n0;last\r\n\r\n"),
        format!("000{length:X}\r\n{body}\r\n000\r\n\r\n"),
        format!("{length:x}\r\n{body}\r\n0\r\ncontent-length: 5\r\nx-trailer: y\r\n\r\n"),
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
        format!("content-length: {length}\r\ncontent-length: {length}"),
        format!("content_length: 5\r\ncontent-length: {length}"),
        format!("x-transfer-encoding: chunked\r\ncontent-length: {length}"),
        format!("connection: content-length\r\ncontent-length: {length}"),
        format!("te: trailers\r\nconnection: te\r\ncontent-length: {length}"),
        format!("upgrade: h2c\r\nconnection: upgrade\r\ncontent-length: {length}"),
        format!("expect: 100-continue\r\ncontent-length: {length}"),
        format!("x:\r\ny: \u{e9}\r\ncontent-length: {length}"),
    ]
}
