"""Frames of HTTP/2 that a server must refuse, or read as every other does: each case is what a client sends on stream 1 behind its
preface, as a function of the case's number."""

import contextlib
import socket

from hpack import Encoder
from hyperframe import frame

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
BODY = b'{"model":"m","prompt":"x"}'
SETTINGS, ACK = 4, 1


def block(fields):
    return Encoder().encode(fields, huffman=False)


def request(number, *fields, leave=(), method="GET", path=None, first=()):
    """A request's fields: its pseudo fields without those to leave out, then these."""
    pseudo = [(":method", method), (":scheme", "http"), (":authority", "k"), (":path", path or f"/v1/case?n={number}")]
    return [*first, *(field for field in pseudo if field[0] not in leave), *fields]


def headers(fields, flags=("END_HEADERS", "END_STREAM"), stream=1, data=None):
    return frame.HeadersFrame(stream, data=block(fields) if data is None else data, flags=list(flags)).serialize()


def data(payload=BODY, flags=("END_STREAM",), stream=1):
    return frame.DataFrame(stream, data=payload, flags=list(flags)).serialize()


def raw(kind, flags, stream, payload=b""):
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def names():
    """What names the server, and the pseudo fields."""
    yield "plain", lambda n: headers(request(n))
    yield "no :authority, no host", lambda n: headers(request(n, leave=[":authority"]))
    yield "host alone", lambda n: headers(request(n, ("host", "k"), leave=[":authority"]))
    yield "host as :authority", lambda n: headers(request(n, ("host", "k")))
    yield "host as :authority, upper case", lambda n: headers(request(n, ("host", "K")))
    yield "host differs from :authority", lambda n: headers(request(n, ("host", "other")))
    yield "two hosts", lambda n: headers(request(n, ("host", "k"), ("host", "k"), leave=[":authority"]))
    yield "two hosts that differ", lambda n: headers(request(n, ("host", "k"), ("host", "other"), leave=[":authority"]))
    for authority in ("", "a b", "a@b", "k/", "k:x", "k:99999", "[::1", "[]", "k\x00", "k\r\nx: y", "k..x", "a,b", "::1", "k?x", "k#x"):
        fields = lambda n, authority=authority: request(n, leave=[":authority"], first=[(":authority", authority)])
        yield f":authority {authority!r}", lambda n, fields=fields: headers(fields(n))
        yield f"host {authority!r}", lambda n, host=authority: headers(request(n, ("host", host), leave=[":authority"]))
    for missing in (":method", ":scheme", ":path"):
        yield f"no {missing}", lambda n, missing=missing: headers(request(n, leave=[missing]))
    for twice in (":method", ":scheme", ":path", ":authority"):
        yield f"two {twice}", lambda n, twice=twice: headers(request(n, first=[f for f in request(n) if f[0] == twice]))
    yield "an unknown pseudo field", lambda n: headers(request(n, first=[(":x", "y")]))
    yield ":status", lambda n: headers(request(n, first=[(":status", "200")]))
    yield ":protocol", lambda n: headers(request(n, first=[(":protocol", "websocket")]))
    yield "a pseudo field behind others", lambda n: headers([("x", "y"), *request(n)])
    for path in ("", "v1/case", "*", "/v1/ca se", "/v1/\x00case", "/v1/\r\ncase", "/v1/case#x", "http://other/v1/case"):
        yield f":path {path!r}", lambda n, path=path: headers(request(n, leave=[":path"], first=[(":path", path and f"{path}?n={n}")]))
    for method in ("", "G T", "GET\r\n", "get", "TRACE", "BREW"):
        yield f":method {method!r}", lambda n, method=method: headers(request(n, leave=[":method"], first=[(":method", method)]))
    yield "CONNECT", lambda n: headers([(":method", "CONNECT"), (":authority", "k:443")], flags=["END_HEADERS"])
    yield "CONNECT with a path", lambda n: headers(request(n, method="CONNECT"))
    for scheme in ("", "ht tp", "ftp", "http://"):
        yield f":scheme {scheme!r}", lambda n, scheme=scheme: headers(request(n, leave=[":scheme"], first=[(":scheme", scheme)]))


def fields():
    """Fields that belong to one connection, or that HTTP/1 writes in another way."""
    odd = [("connection", "close"), ("connection", "x"), ("keep-alive", "5"), ("proxy-connection", "x"), ("transfer-encoding", "chunked")]
    odd += [("transfer-encoding", ""), ("upgrade", "h2c"), ("te", "gzip"), ("te", "trailers"), ("te", "trailers, gzip"), ("X", "y"), ("xY", "z")]
    odd += [("", "y"), ("x y", "z"), ("x:", "z"), ("x\x00", "z"), ("x\r\ny", "z"), ("x\xe9", "z"), ("x", "a\x00b"), ("x", "a\rb"), ("x", "a\nb")]
    odd += [("x", "a\r\nhost: other"), ("x", " a"), ("x", "a "), ("x", "\ta"), ("x", "a\x01b"), ("x", "a\x7fb"), ("x/y", "z"), ("x_y", "z")]
    for name, value in odd:
        yield f"field {name!r} {value!r}", lambda n, name=name, value=value: headers(request(n, (name, value)))
    for length in ("26", "25", "27", "+26", "0x1a", "", "x", "26, 26", "026", "-1", " 26", "99999999999999999999"):
        yield f"length {length!r}", lambda n, length=length: (
            headers(request(n, ("content-length", length), method="POST", path=f"/v1/completions?n={n}"), ["END_HEADERS"]) + data())
    yield "two lengths, equal", lambda n: headers(request(n, *[("content-length", "26")] * 2, method="POST"), ["END_HEADERS"]) + data()
    yield "two lengths", lambda n: (
        headers(request(n, ("content-length", "26"), ("content-length", "2"), method="POST"), ["END_HEADERS"]) + data())
    yield "a length without a body", lambda n: headers(request(n, ("content-length", "5"), method="POST"))
    for name, value in (("x", "y"), (":path", "/x"), ("content-length", "5"), ("transfer-encoding", "chunked"), ("connection", "x"), ("X", "y"),
                        ("host", "other"), ("x", "a\r\nb"), ("authorization", "Bearer t")):
        yield f"trailer {name!r} {value!r}", lambda n, name=name, value=value: (
            headers(request(n, method="POST"), ["END_HEADERS"]) + data(flags=()) + headers([(name, value)]))
    yield "trailers that do not end", lambda n: (
        headers(request(n, method="POST"), ["END_HEADERS"]) + data(flags=()) + headers([("x", "y")], ["END_HEADERS"]) + data())


def frames():
    """Frames where they must not be, or of a form that they must not have (RFC 9113, sections 4 to 6)."""
    open_post = lambda n: headers(request(n, method="POST"), ["END_HEADERS"])
    yield "DATA on stream 0", lambda n: open_post(n) + raw(0, 0, 0, BODY)
    yield "DATA on a stream that is idle", lambda n: data(stream=5) + headers(request(n))
    yield "DATA behind the end", lambda n: open_post(n) + data() + data()
    yield "DATA padded by more than it has", lambda n: open_post(n) + raw(0, 9, 1, b"\xffxx")
    yield "DATA too large", lambda n: open_post(n) + raw(0, 1, 1, b"x" * 16385)
    yield "HEADERS on stream 0", lambda n: raw(1, 5, 0, block(request(n)))
    yield "HEADERS on an even stream", lambda n: headers(request(n), stream=2)
    yield "HEADERS on a lower stream", lambda n: headers(request(n), stream=5) + headers(request(n), stream=3)
    yield "HEADERS that depend on themselves", lambda n: raw(1, 0x25, 1, b"\0\0\0\1\x10" + block(request(n)))
    yield "HEADERS padded by more than it has", lambda n: raw(1, 13, 1, b"\xff" + block(request(n)))
    yield "HEADERS that cannot be unpacked", lambda n: headers(None, data=b"\xff\xff\xff\xff\xff\xff")
    yield "a table larger than allowed", lambda n: headers(None, data=b"\x3f\xff\xff\x7f" + block(request(n)))
    yield "an index that is none", lambda n: headers(None, data=b"\xff\x80\x01" + block(request(n)))
    yield "CONTINUATION alone", lambda n: raw(9, 4, 1, block(request(n)))
    yield "a frame within a head", lambda n: headers(request(n), ["END_STREAM"]) + raw(6, 0, 0, b"8 bytes.") + raw(9, 4, 1)
    yield "CONTINUATION of another stream", lambda n: headers(request(n), ["END_STREAM"]) + raw(9, 4, 3)
    yield "a head in two frames", lambda n: (lambda whole: raw(1, 1, 1, whole[:5]) + raw(9, 4, 1, whole[5:]))(block(request(n)))
    yield "RST_STREAM of a stream that is idle", lambda n: raw(3, 0, 7, b"\0\0\0\x08") + headers(request(n))
    yield "RST_STREAM of another size", lambda n: open_post(n) + raw(3, 0, 1, b"\0\0\0")
    yield "SETTINGS on a stream", lambda n: raw(4, 0, 1) + headers(request(n))
    yield "SETTINGS of another size", lambda n: raw(4, 0, 0, b"\0\0\0") + headers(request(n))
    yield "SETTINGS acknowledged with a payload", lambda n: raw(4, 1, 0, b"\0\3\0\0\0\1") + headers(request(n))
    yield "SETTINGS: push 2", lambda n: raw(4, 0, 0, b"\0\2\0\0\0\2") + headers(request(n))
    yield "SETTINGS: a window too large", lambda n: raw(4, 0, 0, b"\0\4\x80\0\0\0") + headers(request(n))
    yield "SETTINGS: frames too small", lambda n: raw(4, 0, 0, b"\0\5\0\0\0\1") + headers(request(n))
    yield "PUSH_PROMISE", lambda n: raw(5, 4, 1, b"\0\0\0\2" + block(request(n)))
    yield "PING on a stream", lambda n: raw(6, 0, 1, b"8 bytes.") + headers(request(n))
    yield "PING of another size", lambda n: raw(6, 0, 0, b"7 bytes") + headers(request(n))
    yield "GOAWAY on a stream", lambda n: raw(7, 0, 1, b"\0" * 8) + headers(request(n))
    yield "WINDOW_UPDATE by 0", lambda n: raw(8, 0, 0, b"\0\0\0\0") + headers(request(n))
    yield "WINDOW_UPDATE beyond all", lambda n: raw(8, 0, 0, b"\x7f\xff\xff\xff") * 2 + headers(request(n))
    yield "WINDOW_UPDATE of a stream that is idle", lambda n: raw(8, 0, 7, b"\0\0\0\1") + headers(request(n))
    yield "WINDOW_UPDATE of another size", lambda n: raw(8, 0, 0, b"\0\0\1") + headers(request(n))
    yield "PRIORITY on stream 0", lambda n: raw(2, 0, 0, b"\0\0\0\1\1") + headers(request(n))
    yield "PRIORITY of another size", lambda n: raw(2, 0, 1, b"\0\0\0\1") + headers(request(n))
    yield "a type that is not known", lambda n: raw(0x77, 0, 0, b"x") + headers(request(n))
    yield "the reserved bit", lambda n: raw(1, 5, 1 | 1 << 31, block(request(n)))


def told(came):
    """What frames the server answered with, in words, and whether it said that it goes."""
    said, goes = [], False
    while len(came) >= 9:
        length, kind = int.from_bytes(came[:3], "big"), came[3]
        payload, came = came[9:9 + length], came[9 + length:]
        if kind == 1:
            # The status is the first field, in most cases of the static table.
            said.append({0x88: "200", 0x89: "204", 0x8c: "400", 0x8d: "404", 0x8e: "500"}.get(payload[:1] and payload[0], "answer"))
        elif kind == 3:
            said.append(f"reset {int.from_bytes(payload[:4], 'big')}")
        elif kind == 7:
            code = int.from_bytes(payload[4:8], "big")
            goes = True
            said += [f"goaway {code}"] if code else []
    return said, goes


def send(proxy, number, case):
    came, stays = b"", True
    with socket.create_connection(("127.0.0.1", proxy.port)) as connection:
        connection.settimeout(1.6)
        with contextlib.suppress(OSError):
            connection.sendall(PREFACE + raw(SETTINGS, 0, 0) + case(number) + raw(SETTINGS, ACK, 0))
        try:
            while piece := connection.recv(65536):
                came += piece
            stays = False
        except TimeoutError:
            pass
        except OSError:
            stays = False
    said, goes = told(came)
    # A server that only refuses a stream keeps the connection, as it may.
    return said, stays and not goes


ALL = [(part.__name__, name, case) for part in (names, fields, frames) for name, case in part()]
