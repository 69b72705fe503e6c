"""Requests over HTTP/1 that two servers may read in two ways, each as the bytes that a client sends.

In a case NUMBER stands for its number: what the server behind a proxy saw is told apart by that.
"""

BODY = '{"model":"m","prompt":"x"}'
SIZE = len(BODY)
CHUNKED = f"{SIZE:x}\r\n{BODY}\r\n0\r\n\r\n"
# Sent behind the request itself: where it arrives as a request, the proxy took the end of the case for one.
BEHIND = "GET /v1/behind?n=NUMBER HTTP/1.1\r\nHost: k\r\n\r\n"


def get(fields, version="1.1", target="/v1/case?n=NUMBER", method="GET"):
    """A request without a body, and these lines of fields."""
    return f"{method} {target} HTTP/{version}\r\n{fields}\r\n"


def post(fields, body, version="1.1"):
    """A request with a body, framed by these lines of fields."""
    return f"POST /v1/completions?n=NUMBER HTTP/{version}\r\nHost: k\r\n{fields}\r\n{body}"


def hosts():
    """What names the server."""
    yield "no host", get("")
    yield "no host, HTTP/1.0", get("", "1.0")
    yield "two hosts", get("Host: k\r\nHost: k\r\n")
    yield "two hosts that differ", get("Host: k\r\nHost: other\r\n")
    yield "two hosts, HTTP/1.0", get("Host: k\r\nHost: other\r\n", "1.0")
    odd = ["", " ", "a b", "a\tb", "a@b", "user:word@k", "k/", "k/v1", "http://k", "k?x", "k#x", "k\\x", '"k"', "<k>", "a,b"]
    odd += ["k:", "k:x", "k:80x", "k:-1", "k:+80", "k:99999", "k:80:80", "k::80", ":80", "k: 80", "k:80 x"]
    odd += ["[::1", "::1]", "[]", "[::1]x", "[::1]:x", "[g::1]", "[::1]]", "[1.2.3.4]", "::1", "[v1.x]"]
    odd += ["k..x", ".", ".k", "k.", "%6b", "%", "%zz", "k\x00", "k\x01", "k\x7f", "k\xe9", "k\x0bx", "k;x", "k|x", "k^x", "{k}"]
    for host in odd:
        yield f"host {host!r}", get(f"Host: {host}\r\n")
    yield "host, a colon after a blank", get("Host : k\r\n")
    for target in ("http://k", "http://other", "http://user@k", "http://", "http:///", "http://k:x", "http://a b", "ftp://k"):
        yield f"target {target}, host k", get("Host: k\r\n", target=f"{target}/v1/case?n=NUMBER")
    yield "target http://k, no host", get("", target="http://k/v1/case?n=NUMBER")
    yield "target http://k, host a@b", get("Host: a@b\r\n", target="http://k/v1/case?n=NUMBER")
    yield "target http://k, two hosts", get("Host: k\r\nHost: k\r\n", target="http://k/v1/case?n=NUMBER")


def codings():
    """What says how a body is transferred."""
    several = ["gzip, chunked", "chunked, chunked", "identity, chunked", "chunked, identity", "chunked, gzip", "identity", "gzip"]
    several += ["xchunked", "chunked;q=1", "chunked,", ",chunked", "", '"chunked"', "chun ked", "chunked\x0b", "\x0bchunked"]
    several += ["chunked;", "Chunked", "CHUNKED", "\tchunked\t", "chunkedchunked", "cow", "chunked\x00", "chu\xffnked", ";chunked"]
    for coding in several:
        yield f"coding {coding!r}", post(f"Transfer-Encoding: {coding}\r\n", CHUNKED)
    yield "two codings, chunked twice", post("Transfer-Encoding: chunked\r\n" * 2, CHUNKED)
    yield "two codings, gzip first", post("Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n", CHUNKED)
    yield "two codings, identity last", post("Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n", CHUNKED)
    yield "two codings, one empty", post("Transfer-Encoding:\r\nTransfer-Encoding: chunked\r\n", CHUNKED)
    yield "chunked, HTTP/1.0", post("Transfer-Encoding: chunked\r\n", CHUNKED, "1.0")
    yield "chunked, HTTP/1.0, kept", post("Connection: keep-alive\r\nTransfer-Encoding: chunked\r\n", CHUNKED, "1.0")
    yield "length and chunked", post(f"Content-Length: {SIZE}\r\nTransfer-Encoding: chunked\r\n", CHUNKED)
    yield "chunked and length", post(f"Transfer-Encoding: chunked\r\nContent-Length: {SIZE}\r\n", CHUNKED)
    yield "chunked and a longer length", post("Content-Length: 999\r\nTransfer-Encoding: chunked\r\n", CHUNKED)
    yield "chunked and a bad length", post("Transfer-Encoding: chunked\r\nContent-Length: x\r\n", CHUNKED)
    yield "chunked and an odd coding and length", post("Content-Length: 5\r\nTransfer-Encoding: xchunked\r\n", BODY)
    yield "chunked named by connection", post("Connection: transfer-encoding\r\nTransfer-Encoding: chunked\r\n", CHUNKED)
    yield "chunked with GET", get("Host: k\r\nTransfer-Encoding: chunked\r\n") + "0\r\n\r\n"
    yield "an underscore", post(f"Transfer_Encoding: chunked\r\nContent-Length: {SIZE}\r\n", BODY)


def lengths():
    """What says how long a body is."""
    for length in (f"+{SIZE}", f"-{SIZE}", f"0x{SIZE:x}", f"{SIZE}, {SIZE}", f"{SIZE},", f",{SIZE}", f"{SIZE} {SIZE}", "", "1e1", "x",
                   f"0{SIZE}", f"0000000000000000000000000{SIZE}", "18446744073709551642", "99999999999999999999999", f"{SIZE};",
                   f" {SIZE} ", f"\t{SIZE}", f'"{SIZE}"', f"{SIZE}\x00", f"{SIZE}.0", "\xb2", f"{SIZE}\x0b"):
        yield f"length {length!r}", post(f"Content-Length: {length}\r\n", BODY)
    yield "two lengths, equal", post(f"Content-Length: {SIZE}\r\n" * 2, BODY)
    yield "two lengths, 026 and 26", post(f"Content-Length: 0{SIZE}\r\nContent-Length: {SIZE}\r\n", BODY)
    yield "two lengths that differ", post(f"Content-Length: {SIZE}\r\nContent-Length: 1\r\n", BODY)
    yield "a length folded", post(f"Content-Length: 2\r\n {SIZE}\r\n", BODY)
    yield "a length, a colon after a blank", post(f"Content-Length : {SIZE}\r\n", BODY)
    yield "a length with GET", get(f"Host: k\r\nContent-Length: {SIZE}\r\n") + BODY
    yield "a length named by connection", post(f"Connection: content-length\r\nContent-Length: {SIZE}\r\n", BODY)
    yield "no length", post("", "")


def chunks():
    """Chunks, and what follows the last."""
    sizes = [f"0x{SIZE:x}", f"-{SIZE:x}", f"+{SIZE:x}", f"{SIZE:x} ", f" {SIZE:x}", f"\t{SIZE:x}", f"{SIZE:x}\t", f"{SIZE:x} {SIZE:x}"]
    sizes += [f"000{SIZE:x}", f"{'0' * 20}{SIZE:x}", f"{'0' * 300}{SIZE:x}", f"1{'0' * 16}{SIZE:x}", "f" * 16, "f" * 17, "8" + "0" * 15]
    sizes += ["", "g", ";x", f"{SIZE:x};x", f"{SIZE:x};x=y", f"{SIZE:x} ;x", f'{SIZE:x};x="a;b"', f"{SIZE:x};{'x' * 8000}", f"{SIZE:x},x"]
    sizes += [f"{SIZE:x};\x00", f"{SIZE:x};a\rb", f"{SIZE:x}\r", f"{SIZE:x};a\nb", f"{SIZE:x}\x0b", f"{SIZE:x}=x", f"{SIZE:x}\x00"]
    for size in sizes:
        shown = size if len(size) < 40 else f"{size[:4]}…{len(size)} bytes"
        yield f"chunk size {shown!r}", post("Transfer-Encoding: chunked\r\n", f"{size}\r\n{BODY}\r\n0\r\n\r\n")
    for name, body in (
        ("chunk size ended by LF", f"{SIZE:x}\n{BODY}\r\n0\r\n\r\n"),
        ("chunk ended by LF", f"{SIZE:x}\r\n{BODY}\n0\r\n\r\n"),
        ("chunk ended by CR", f"{SIZE:x}\r\n{BODY}\r0\r\n\r\n"),
        ("chunk longer than said", f"{SIZE:x}\r\n{BODY}x\r\n0\r\n\r\n"),
        ("chunk shorter than said", f"{SIZE + 2:x}\r\n{BODY}\r\n0\r\n\r\n"),
        ("last chunk ended by LF", f"{SIZE:x}\r\n{BODY}\r\n0\n\n"),
        ("last chunk, line ended by LF", f"{SIZE:x}\r\n{BODY}\r\n0\r\n\n"),
        ("last chunk 000", f"{SIZE:x}\r\n{BODY}\r\n000\r\n\r\n"),
        ("last chunk 0;x", f"{SIZE:x}\r\n{BODY}\r\n0;x\r\n\r\n"),
        ("last chunk -0", f"{SIZE:x}\r\n{BODY}\r\n-0\r\n\r\n"),
    ):
        yield name, post("Transfer-Encoding: chunked\r\n", body)
    for trailer in ("X: y", "Content-Length: 5", "Transfer-Encoding: chunked", "Host: other", "Authorization: Bearer t", "Connection: x",
                    "X-Priority: 1", "Cookie: a=b", "no field", "x y: z", ": x", "X : y", " folded", "X: a\x00b", "X: a\rb", "X: a\nY: b",
                    "\n", "Trailer: x", "Expect: 100-continue", "x" * 20000):
        shown = trailer if len(trailer) < 40 else f"{len(trailer)} bytes"
        yield f"trailer {shown!r}", post("Transfer-Encoding: chunked\r\n", f"{SIZE:x}\r\n{BODY}\r\n0\r\n{trailer}\r\n\r\n")


def heads():
    """Lines of a head."""
    plain = get("Host: k\r\n")
    yield "plain", plain
    yield "lines ended by LF", plain.replace("\r\n", "\n")
    yield "lines ended by CR", plain.replace("\r\n", "\r")
    yield "an LF within", get("Host: k\r\nX: y\nZ: z\r\n")
    yield "LF CR", get("Host: k\r\nX: y\n\rZ: z\r\n")
    yield "empty lines before", "\r\n\r\n" + plain
    yield "empty lines of LF before", "\n\n" + plain
    yield "a blank before", " " + plain
    for name, line in (
        ("folded", "X: y\r\n z"), ("folded by a tab", "X: y\r\n\tz"), ("a folded host", "Y: x\r\n Host: other"), ("CR within", "X: a\rb"),
        ("CR CR LF", "X: a\r"), ("NUL in a value", "X: a\x00b"), ("NUL in a name", "X\x00: a"), ("a control byte in a value", "X: a\x01b"),
        ("DEL in a value", "X: a\x7fb"), ("a high byte in a value", "X: \xe9"), ("a high byte in a name", "X\xe9: a"),
        ("a blank before a colon", "X : y"), ("a tab before a colon", "X\t: y"), ("a blank in a name", "X y: z"), ("no colon", "X"),
        ("no name", ": y"), ("a slash in a name", "X/y: z"), ("brackets in a name", "X[y]: z"), ("quotes in a name", '"X": z'),
        ("a blank before the name", " X: y"), ("an empty value", "X:"), ("an at in a name", "X@y: z"),
    ):
        yield name, get(f"Host: k\r\n{line}\r\n")
    yield "the first field folded", "GET /v1/case?n=NUMBER HTTP/1.1\r\n X: y\r\nHost: k\r\n\r\n"
    for name, line in (
        ("two blanks", "GET  /v1/case?n=NUMBER HTTP/1.1"), ("a tab", "GET\t/v1/case?n=NUMBER HTTP/1.1"), ("two words more", "GET /v1/case?n=NUMBER x HTTP/1.1"),
        ("a blank at the end", "GET /v1/case?n=NUMBER HTTP/1.1 "), ("HTTP/1.2", "GET /v1/case?n=NUMBER HTTP/1.2"), ("HTTP/2.0", "GET /v1/case?n=NUMBER HTTP/2.0"),
        ("HTTP/0.9", "GET /v1/case?n=NUMBER HTTP/0.9"), ("HTTP/1.12", "GET /v1/case?n=NUMBER HTTP/1.12"), ("HTTP/01.1", "GET /v1/case?n=NUMBER HTTP/01.1"),
        ("http/1.1", "GET /v1/case?n=NUMBER http/1.1"), ("no version", "GET /v1/case?n=NUMBER"), ("NUL in the target", "GET /v1/\x00case?n=NUMBER HTTP/1.1"),
        ("a high byte in the target", "GET /v1/\xe9case?n=NUMBER HTTP/1.1"), ("a control byte in the target", "GET /v1/\x01case?n=NUMBER HTTP/1.1"),
        ("a fragment", "GET /v1/case?n=NUMBER#x HTTP/1.1"), ("a lower-case method", "get /v1/case?n=NUMBER HTTP/1.1"), ("an odd method", "G@T /v1/case?n=NUMBER HTTP/1.1"),
        ("an unknown method", "BREW /v1/case?n=NUMBER HTTP/1.1"), ("TRACE", "TRACE /v1/case?n=NUMBER HTTP/1.1"), ("CONNECT to a path", "CONNECT /v1/case?n=NUMBER HTTP/1.1"),
        ("CONNECT", "CONNECT k:443 HTTP/1.1"), ("OPTIONS *", "OPTIONS * HTTP/1.1"), ("GET *", "GET * HTTP/1.1"), ("no slash", "GET v1/case?n=NUMBER HTTP/1.1"),
        ("a quoted target", 'GET "/v1/case?n=NUMBER" HTTP/1.1'), ("a backslash", "GET \\v1\\case?n=NUMBER HTTP/1.1"),
    ):
        yield f"line: {name}", f"{line}\r\nHost: k\r\n\r\n"
    yield "upgrade h2c", get("Host: k\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n")
    yield "expect, another", post(f"Expect: 200-ok\r\nContent-Length: {SIZE}\r\n", BODY)


ALL = [(part.__name__, name, text.encode("latin-1")) for part in (hosts, codings, lengths, chunks, heads) for name, text in part()]
