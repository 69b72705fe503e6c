"""CPU per request and per event of a proxy alone on one core, everything else on another. See run.sh."""

import argparse
import json
import math
import os
import pathlib
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).parent
# --unbound: anything anywhere.
CORES = {"proxy": {0}, "others": {1}}
BACKENDS, PROXY, ADMIN, STREAMS = (9100, 9101), 9110, 9111, 9120
EVENTS = 64
NGINX = """
worker_processes {processes}; daemon off; pid {dir}/pid; error_log {dir}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_body_buffer_size 128k; client_body_temp_path {dir}/body; proxy_temp_path {dir}/proxy;
  fastcgi_temp_path {dir}/f; uwsgi_temp_path {dir}/u; scgi_temp_path {dir}/s;
  keepalive_requests 1000000;
  upstream workers {{ {servers} keepalive 128; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{ proxy_pass http://workers; proxy_http_version 1.1; proxy_set_header Connection "";
                  proxy_buffering off; }}
  }}
}}
"""
# A backend that has its answer ready, so that the proxy, alone on its core, is what has most to do. Its usage is that of the
# prompts of `unary.lua`, all of them in the cache; any other path gets the same, but for what routers read before they begin.
PLAIN = """
worker_processes 1; daemon off; pid {dir}/pid; error_log {dir}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_body_buffer_size 128k; client_body_temp_path {dir}/body; proxy_temp_path {dir}/proxy;
  fastcgi_temp_path {dir}/f; uwsgi_temp_path {dir}/u; scgi_temp_path {dir}/s;
  keepalive_requests 1000000000; default_type application/json;
  map $content_length $usage {{
    "~^[0-9]{{1,4}}$" '"prompt_tokens":274,"completion_tokens":1,"total_tokens":275,"prompt_tokens_details":{{"cached_tokens":256}}';
    default '"prompt_tokens":8210,"completion_tokens":1,"total_tokens":8211,"prompt_tokens_details":{{"cached_tokens":8192}}';
  }}
  server {{
    {listen}
    location = /v1/models {{ return 200 '{{"object":"list","data":[{{"id":"mock","object":"model","created":1,"owned_by":"mock"}}]}}'; }}
    location = /metrics {{ return 404; }}
    location / {{ return 200 '{{"id":"chatcmpl-0123456789abcdef","object":"chat.completion","created":1764000000,"model":"mock","choices":[{{"index":0,"message":{{"role":"assistant","content":" abc"}},"logprobs":null,"finish_reason":"length"}}],"usage":{{$usage}}}}'; }}
  }}
}}
"""
# As NGINX, for bytes of connections, whatever they say; its buffer is as large as the other's.
STREAM_MODULE = pathlib.Path("/usr/lib/nginx/modules/ngx_stream_module.so")
NGINX_TCP = """
worker_processes {processes}; daemon off; pid {dir}/pid; error_log {dir}/error.log;
load_module {module};
events {{ worker_connections 4096; }}
stream {{
  upstream workers {{ {servers} }}
  server {{ listen 127.0.0.1:{port}; tcp_nodelay on; proxy_buffer_size 128k; proxy_pass workers; }}
}}
"""


def spawn(command, whose, **kwargs):
    log = open(kwargs.pop("log", os.devnull), "wb")
    return subprocess.Popen([str(part) for part in command], stdout=log, stderr=log, start_new_session=True,
                            preexec_fn=lambda: os.sched_setaffinity(0, CORES[whose]), **kwargs)


def stop(process):
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    except ProcessLookupError:
        pass


def await_port(port, path="/v1/models", seconds=60):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            with socket.create_connection(("127.0.0.1", port), 1) as sock:
                sock.settimeout(2)
                sock.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
                if b" 200 " in sock.recv(4096)[:20]:
                    return
        except OSError:
            pass
        time.sleep(0.1)
    sys.exit(f"nothing answers {path} on port {port}")


def members(root):
    """The process and everything it started."""
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        found.append(pid)
        for task in pathlib.Path(f"/proc/{pid}/task").glob("*"):
            try:
                todo += [int(child) for child in (task / "children").read_text().split()]
            except OSError:
                pass
    return found


def cpu_ns(root):
    total = 0
    for pid in members(root):
        for task in pathlib.Path(f"/proc/{pid}/task").glob("*"):
            try:
                total += int((task / "schedstat").read_text().split()[0])
            except OSError:
                pass
    return total


def rss_mb(root):
    total = 0
    for pid in members(root):
        for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                total += int(line.split()[1]) / 1024
    return total


class Proxies:
    """How each is started in front of given backends."""

    def __init__(self, args, scratch, port=PROXY):
        self.args, self.scratch, self.port = args, scratch, port
        self.admin = port + ADMIN - PROXY

    def start(self, name, backends):
        urls = [f"http://127.0.0.1:{port}" for port in backends]
        log = self.scratch / f"{name}.log"
        process = spawn(getattr(self, name.replace("-", "_"))(urls), "proxy", log=log)
        await_port(self.port)
        time.sleep(1.0)
        return process

    def nginx(self, urls, conf=NGINX, name="nginx"):
        folder = self.scratch / name
        folder.mkdir(exist_ok=True)
        servers = " ".join(f"server {url[7:]};" for url in urls)
        (folder / "conf").write_text(conf.format(dir=folder, servers=servers, port=self.port, processes=len(CORES["proxy"]),
                                                 module=STREAM_MODULE))
        return ["nginx", "-c", folder / "conf", "-p", folder, "-e", folder / "error.log"]

    def nginx_tcp(self, urls):
        if not STREAM_MODULE.exists():
            sys.exit(f"{STREAM_MODULE} is missing: apt-get install libnginx-mod-stream")
        return self.nginx(urls, NGINX_TCP, "nginx-tcp")

    def keyway(self, urls, binary=None):
        workers = [part for url in urls for part in ("--worker", url)]
        # The log of requests is what the others, at their defaults, do not write.
        return ["env", "RUST_LOG=warn", binary or self.args.keyway, "--listen", f"127.0.0.1:{self.port}", "--admin-listen",
                f"127.0.0.1:{self.admin}", *self.args.keyway_args.split(), *workers]

    def base(self, urls):
        return self.keyway(urls, self.args.base)

    def sglang_router(self, urls):
        return [self.args.venv / "bin/python", "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port",
                self.port, "--policy", "cache_aware", "--log-level", "warn", "--prometheus-port", self.admin, "--worker-urls",
                *urls]

    def vllm_router(self, urls):
        return [self.args.venv / "bin/vllm-router", "--host", "127.0.0.1", "--port", self.port, "--policy", "cache_aware",
                "--log-level", "warning", "--prometheus-port", self.admin, "--worker-urls", *urls]


def unary(port, size, seconds, new_prompts=False):
    environment = dict(os.environ, PROMPT_BYTES=str(size))
    if new_prompts:
        environment["NEW_PROMPTS"] = str(time.monotonic_ns() // 1000 % 10**12)
    command = ["taskset", "-c", ",".join(map(str, CORES["others"])), "wrk", "-t1", "-c16", f"-d{seconds}s", "-s", HERE / "unary.lua",
               f"http://127.0.0.1:{port}"]
    done = subprocess.run([str(part) for part in command], env=environment, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert not result["errors"], result
    return result


BODY = json.dumps({"model": "mock", "stream": True, "max_tokens": EVENTS,
                   "messages": [{"role": "user", "content": "a prompt of some words, " * 40}]}).encode()
REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n" \
    b"content-length: %d\r\n\r\n%s" % (len(BODY), BODY)
END = b"0\r\n\r\n"


class Stream:
    """One connection that asks for stream after stream."""

    def __init__(self, port):
        self.port, self.sock = port, None
        self.connect()

    def connect(self):
        if self.sock:
            self.sock.close()
        self.sock = socket.create_connection(("127.0.0.1", self.port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self):
        self.tail, self.began = b"", time.monotonic()
        self.sock.sendall(REQUEST)


def streams(port, connections, seconds):
    """Streams one after the other on each connection; events, and each stream's time to its first byte."""
    poll, open_streams, ttft, events, broken = select.epoll(), {}, [], 0, 0

    def ask(stream):
        open_streams[stream.sock.fileno()] = stream
        stream.ask()

    for _ in range(connections):
        stream = Stream(port)
        poll.register(stream.sock.fileno(), select.EPOLLIN)
        # Each begins in a phase of its own.
        time.sleep(0.0047 if connections > 1 else 0)
        ask(stream)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for fd, _ in poll.poll(0.1):
            stream = open_streams[fd]
            data = stream.sock.recv(1 << 16)
            if not data:
                # Some proxies close a connection now and then; what does it all the time is not measured.
                broken += 1
                assert broken <= connections, f"{broken} connections were closed"
                del open_streams[fd]
                stream.connect()
                poll.register(stream.sock.fileno(), select.EPOLLIN)
                ask(stream)
                continue
            if stream.began is not None and b"data: " in data:
                ttft.append(time.monotonic() - stream.began)
                stream.began = None
            events += data.count(b"data: {")
            stream.tail = (stream.tail + data)[-5:]
            if stream.tail == END:
                ask(stream)
    for stream in open_streams.values():
        stream.sock.close()
    return {"events": events, "ttft_us": 1e6 * statistics.median(ttft)}


def first_event_us(stream):
    """One stream, from the request to the first bytes that hold an event."""
    stream.ask()
    took, data = None, b""
    while not data.endswith(END):
        data += stream.sock.recv(1 << 16)
        if took is None and b"data: " in data:
            took = 1e6 * (time.monotonic() - stream.began)
    return took


def first_events(args, scratch):
    """Times to the first event on one connection, of each proxy and without any, all of them started and asked in turn: so
    what disturbs the machine disturbs each alike, and differences within a round say something."""
    names = args.proxies.split(",")
    ports = [STREAMS + 10 * (1 + i) for i in range(len(names))]
    processes, took = [], {name: [] for name in [None, *names]}
    try:
        for name, port in zip(names, ports):
            processes.append(Proxies(args, scratch, port).start(name, [STREAMS + 1]))
        asked = {name: Stream(port) for name, port in zip([None, *names], [STREAMS + 1, *ports])}
        for stream in list(asked.values()) * 20:
            first_event_us(stream)
        until = time.monotonic() + args.seconds * args.repeats
        while time.monotonic() < until:
            for name, stream in asked.items():
                took[name].append(first_event_us(stream))
    finally:
        for process in processes:
            stop(process)
    return took


def unary_backend(args, scratch):
    """What the unary requests end at."""
    if args.backend == "mock":
        return [args.loadtest, "mock", "--profile", "instant", "--workers", len(BACKENDS), "--base-port", BACKENDS[0], "--threads", "1"]
    folder = scratch / "plain"
    folder.mkdir()
    listen = " ".join(f"listen 127.0.0.1:{port};" for port in BACKENDS)
    (folder / "conf").write_text(PLAIN.format(dir=folder, listen=listen))
    return ["nginx", "-c", folder / "conf", "-p", folder, "-e", folder / "error.log"]


def measured(process, work):
    before = cpu_ns(process.pid)
    result = work()
    result["cpu_us"] = (cpu_ns(process.pid) - before) / 1e3
    return result


def measure_proxy(proxies, name, args, rows):
    row = rows.setdefault(name, {"unary_1k": [], "unary_32k": [], "event": [], "ttft_us": [], "rate": [], "p99_us": [],
                                 "stream_ttft_us": [], "busy": []})
    if args.only not in ("streams", "ttft"):
        process = proxies.start(name, BACKENDS)
        try:
            unary(PROXY, 1024, 1, args.new_prompts)
            for size, key in ((1024, "unary_1k"), (32768, "unary_32k")):
                result = measured(process, lambda size=size: unary(PROXY, size, args.seconds, args.new_prompts))
                row[key].append(result["cpu_us"] / result["requests"])
                row["busy"].append(100 * result["cpu_us"] / 1e6 / result["seconds"])
                if size == 1024:
                    row["rate"].append(result["requests"] / result["seconds"])
                    row["p99_us"].append(result["p99_us"])
            row["rss_mb"] = rss_mb(process.pid)
        finally:
            stop(process)
    if args.only not in ("unary", "ttft"):
        process = proxies.start(name, [STREAMS])
        try:
            streams(PROXY, 64, 0.5)
            result = measured(process, lambda: streams(PROXY, 64, args.seconds))
            row["event"].append(result["cpu_us"] / result["events"])
            row["stream_ttft_us"].append(result["ttft_us"])
        finally:
            stop(process)


def table(rows):
    median = lambda values: statistics.median(values) if values else float("nan")
    lines = ["| proxy | unary 1 KB µs | unary 32 KB µs | event µs | TTFT added µs | 64 streams' TTFT µs "
             "| requests/s | p99 µs | core busy % | RSS MB |", "|---|---|---|---|---|---|---|---|---|---|"]
    for name, row in rows.items():
        lines.append(f"| {name} | {median(row['unary_1k']):.1f} | {median(row['unary_32k']):.1f} | "
                     f"{median(row['event']):.2f} | {median(row['ttft_us']):.0f} | "
                     f"{median(row['stream_ttft_us']):.0f} | {median(row['rate']):.0f} | {median(row['p99_us']):.0f} | {median(row['busy']):.0f} | "
                     f"{row.get('rss_mb', float('nan')):.0f} |")
    return "\n".join(lines)


def over(rows):
    """What each proxy adds to the first event beyond the first of them: quartiles over the rounds."""
    first, *others = rows
    for name in others:
        more = [a - b for a, b in zip(rows[name]["ttft_us"], rows[first]["ttft_us"])]
        low, middle, high = statistics.quantiles(more, n=4)
        print(f"first event, {name} over {first}: {middle:.0f} us (quartiles {low:.0f} and {high:.0f}, {len(more)} rounds)")


def beside_base(rows):
    """What `keyway` takes more than `base`, in pairs of one round: medians wander with the machine, pairs less so."""
    if not {"base", "keyway"} <= rows.keys():
        return
    for key, what in (("unary_1k", "unary 1 KB"), ("unary_32k", "unary 32 KB"), ("event", "event")):
        pairs = [math.log(own / base) for own, base in zip(rows["keyway"][key], rows["base"][key])]
        if len(pairs) > 1:
            more, error = statistics.mean(pairs), statistics.stdev(pairs) / len(pairs) ** 0.5
            print(f"{what}, keyway over base: {100 * math.expm1(more):+.1f} % (standard error {100 * error:.1f}, {len(pairs)} pairs)")


def main():
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("--keyway", required=True)
    parse.add_argument("--base", help="another build of keyway, as the row `base`")
    parse.add_argument("--keyway-args", default="")
    parse.add_argument("--loadtest", required=True)
    parse.add_argument("--venv", type=pathlib.Path)
    parse.add_argument("--proxies", default="nginx,keyway,sglang-router,vllm-router")
    parse.add_argument("--only", choices=["unary", "streams", "ttft"])
    parse.add_argument("--new-prompts", action="store_true", help="half of each prompt is new, instead of 256 in turn")
    parse.add_argument("--backend", choices=["plain", "mock"], default="plain")
    parse.add_argument("--repeats", type=int, default=3)
    parse.add_argument("--seconds", type=int, default=3)
    parse.add_argument("--unbound", action="store_true", help="no process is bound to a core, and proxies use all")
    args = parse.parse_args()
    if args.unbound:
        CORES.update(dict.fromkeys(CORES, os.sched_getaffinity(0)))
    os.sched_setaffinity(0, CORES["others"])
    # Who is ended early says what it has.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    scratch = pathlib.Path(tempfile.mkdtemp())
    backends = [spawn(unary_backend(args, scratch), "others"),
                spawn([sys.executable, HERE / "stream_backend.py", "--port", STREAMS], "others"),
                spawn([sys.executable, HERE / "stream_backend.py", "--port", STREAMS + 1, "--events", "2", "--gap-ms",
                       "1"], "others")]
    rows = {}
    try:
        for port in (*BACKENDS, STREAMS, STREAMS + 1):
            await_port(port)
        # In turn, so that what disturbs the machine disturbs each.
        for _ in range(args.repeats):
            for name in args.proxies.split(","):
                measure_proxy(Proxies(args, scratch), name, args, rows)
        if args.only in (None, "ttft"):
            took = first_events(args, scratch)
            for name in args.proxies.split(","):
                rows[name]["ttft_us"] = [own - direct for own, direct in zip(took[name], took[None])]
            over(rows)
    finally:
        for backend in backends:
            stop(backend)
        shutil.rmtree(scratch, ignore_errors=True)
        print(table(rows))
        beside_base(rows)


if __name__ == "__main__":
    main()
