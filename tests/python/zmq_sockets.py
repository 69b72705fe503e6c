"""Talks to keyway-zmq's sockets with libzmq alone, in the ways that KV events do not need.

Usage: zmq_sockets.py EVENTS REPLAY. Every few milliseconds EVENTS publishes [topic, number] under the topics a, b and c;
REPLAY answers a question with its last frame, twice. Exits non-zero, with a traceback, when an expectation fails.
"""

import sys

import zmq
from kv_event_reader import receive
from zmq.utils.monitor import recv_monitor_message

HEARTBEAT_MS = 20


def connected(context: zmq.Context, kind: int, endpoint: str) -> tuple[zmq.Socket, zmq.Socket]:
    """A socket that pings often and soon misses an answer; and what happens to it."""
    socket = context.socket(kind)
    socket.linger = 0
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 500)
    socket.setsockopt(zmq.HEARTBEAT_TTL, 1000)
    socket.setsockopt(zmq.ROUTING_ID, b"it has a name")
    monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    socket.connect(endpoint)
    return socket, monitor


def stayed(monitor: zmq.Socket) -> None:
    """It was connected once and for all."""
    events = []
    while monitor.poll(0):
        events.append(recv_monitor_message(monitor)["event"])
    assert events == [zmq.EVENT_HANDSHAKE_SUCCEEDED], events


def topics(socket: zmq.Socket, wanted: set[bytes]) -> None:
    """Receives until nothing but these topics has come for a while, and each of them."""
    streak: list[bytes] = []
    while len(streak) < 30 or set(streak) != wanted:
        topic, number = receive(socket)
        assert number.isdigit(), number
        streak = [*streak, topic] if topic in wanted else []


def main(events: str, replay: str) -> None:
    context = zmq.Context()
    sub, sub_life = connected(context, zmq.SUB, events)
    for topic in (b"a", b"b", b"b"):
        sub.setsockopt(zmq.SUBSCRIBE, topic)
    topics(sub, {b"a", b"b"})
    # libzmq counts subscriptions itself: the socket hears of the last cancellation.
    sub.setsockopt(zmq.UNSUBSCRIBE, b"b")
    topics(sub, {b"a", b"b"})
    sub.setsockopt(zmq.UNSUBSCRIBE, b"b")
    topics(sub, {b"a"})
    # One that passes on what others subscribe to.
    xsub, xsub_life = connected(context, zmq.XSUB, events)
    xsub.send(b"\x01c")
    topics(xsub, {b"c"})

    req, req_life = connected(context, zmq.REQ, replay)
    req.send(b"what")
    assert receive(req) == [b"what"]
    dealer, dealer_life = connected(context, zmq.DEALER, replay)
    for question in (b"one", b"two"):
        dealer.send_multipart([b"", question])
    assert [receive(dealer) for _ in range(4)] == [[b"", b"one"]] * 2 + [[b"", b"two"]] * 2

    # As long as some heartbeats, with nothing else to say.
    assert not dealer.poll(40 * HEARTBEAT_MS)
    topics(sub, {b"a"})
    for life in (sub_life, xsub_life, req_life, dealer_life):
        stayed(life)
    # A question that is too long costs its asker the connection, and is asked again by nobody.
    dealer.send_multipart([b"", bytes(1 << 20)])
    while recv_monitor_message(dealer_life)["event"] != zmq.EVENT_DISCONNECTED:
        pass
    req.send(b"still there")
    assert receive(req) == [b"still there"]


if __name__ == "__main__":
    main(*sys.argv[1:])
