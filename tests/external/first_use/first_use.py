"""What newcomers did, and what the programs say to it now. Each row is a function: it does something with the programs, and returns the
command as a person would type it, what came of it, and whether that is as it should be. See README.md."""

import argparse
import http.client
import http.server
import json
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

ROWS = []


def row(name):
    def add(function):
        ROWS.append((name, function))
        return function

    return add


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def ask(port, method, path, body=None, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, json.dumps(body) if body is not None else None, {"content-type": "application/json", **(headers or {})})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, dict(answer.getheaders())


class Odd(http.server.BaseHTTPRequestHandler):
    """A server that is no engine, in one of several ways: `kind` of its server."""

    def do_GET(self):
        kind = self.server.kind
        if self.path == "/health" and kind != "absent":
            return self.say(200, "")
        answers = {"key": (401, '{"error":"no key"}'), "absent": (404, "nothing here"), "page": (200, "<html>hello</html>"),
                   "empty": (200, '{"object":"list","data":[]}')}
        self.say(*answers[kind])

    def say(self, status, text):
        self.send_response(status)
        self.send_header("content-type", "text/html" if text.startswith("<") else "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


def odd(kind):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Odd)
    server.kind = kind
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


class Programs:
    def __init__(self, bins, scratch):
        self.bins, self.scratch, self.running = bins, scratch, []

    def run(self, program, *arguments, shell="", timeout=90, env=None):
        """Runs to the end; its exit code and all that it printed."""
        command = [str(self.bins / program), *map(str, arguments)]
        if shell:
            quoted = " ".join(f"'{part}'" for part in command)
            command = ["bash", "-c", f"set -o pipefail; {quoted} {shell}"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout, env=env, check=False)
        return done.returncode, done.stdout.decode(errors="replace")

    def start(self, program, *arguments, await_text="", seconds=20):
        """Runs beside; its process and the file of what it prints. Waits until that has a text, or for the seconds."""
        log = self.scratch / f"{program}-{len(self.running)}.log"
        process = subprocess.Popen([str(self.bins / program), *map(str, arguments)], stdout=log.open("w"), stderr=subprocess.STDOUT)
        self.running.append(process)
        until = time.monotonic() + seconds
        while time.monotonic() < until and process.poll() is None:
            if await_text and await_text in log.read_text():
                break
            time.sleep(0.1)
        return process, log

    def stop(self):
        for process in self.running:
            process.kill()
            process.wait()
        self.running.clear()

    def gateway(self, *arguments, await_text="listening", seconds=20):
        port, admin = free_port(), free_port()
        process, log = self.start("keyway", "--listen", f"127.0.0.1:{port}", "--admin-listen", f"127.0.0.1:{admin}", *arguments,
                                  await_text=await_text, seconds=seconds)
        return process, log, port, admin

    def mock(self, *arguments):
        port = free_port()
        self.start("keyway-loadtest", "mock", "--base-port", port, "--workers", 1, *arguments, await_text=str(port))
        until = time.monotonic() + 10
        while time.monotonic() < until:
            try:
                if ask(port, "GET", "/health")[0] == 200:
                    break
            except OSError:
                time.sleep(0.1)
        return f"http://127.0.0.1:{port}", port


def cut(text, most=160):
    """Its first lines, as a cell of a table shows them."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    text = " ".join(line.strip() for line in text.strip().splitlines() if line.strip())
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z\s+", "", text)
    return text if len(text) <= most else text[: most - 1] + "…"


def has(text, *words):
    return all(re.search(word, text, re.I) for word in words)


@row("six workers, each wrong in another way")
def misconfigured(programs):
    no_tls = odd("empty").replace("http://", "https://")
    urls = [odd("key"), odd("absent"), odd("page"), odd("empty"), no_tls, "http://no-such-host.invalid:8000"]
    process, log, _, admin = programs.gateway(*[part for url in urls for part in ("--worker", url)], await_text="no text has this", seconds=15)
    lines = [line for line in log.read_text().splitlines() if " WARN " in line and "worker" in line]
    rows = json.loads(ask(admin, "GET", "/workers")[1])
    named = sum("trouble" in json.dumps(one) or "last_error" in json.dumps(one) for one in rows)
    causes = sorted({match[1] for line in lines if (match := re.search(r'cause="?(\w+)', line))})
    return ("keyway --worker … six times", f"{len(lines)} warnings, causes {', '.join(causes)}; {named} of 6 explained in /workers",
            len(lines) >= 6 and named == 6 and process.poll() is None)


@row("a worker's port that nobody listens at")
def refused(programs):
    _, log, _, _ = programs.gateway("--worker", "http://127.0.0.1:1", await_text=" WARN ", seconds=15)
    warned = [line for line in log.read_text().splitlines() if " WARN " in line]
    return "keyway --worker http://127.0.0.1:1", cut(warned[0] if warned else "no warning"), bool(warned) and "127.0.0.1:1" in warned[0]


@row("the base URL of an OpenAI client, with /v1")
def with_v1(programs):
    url, _ = programs.mock()
    _, log, port, admin = programs.gateway("--worker", f"{url}/v1", await_text="ready=true")
    status = ask(port, "POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2})[0]
    told = [line for line in log.read_text().splitlines() if "/v1" in line]
    return "keyway --worker http://HOST:PORT/v1", f"{status}; {cut(told[0]) if told else 'not told'}", status == 200 and bool(told)


@row("an unknown model, while one worker has never answered")
def unknown_model(programs):
    url, _ = programs.mock("--model", "mock")
    _, _, port, _ = programs.gateway("--worker", url, "--worker", "http://127.0.0.1:1", await_text="ready=true")
    time.sleep(6)
    status, text, _ = ask(port, "POST", "/v1/chat/completions", {"model": "nope", "messages": [{"role": "user", "content": "hi"}]})
    return '{"model":"nope"}', f"{status} {cut(text)}", status == 404 and "mock" in text


@row("a sweep over a server that keeps its caches")
def sweep(programs):
    url, _ = programs.mock()
    code, text = programs.run("keyway-loadtest", "sweep", "--url", url, "--rates", "4,8,16", "--requests", 40, "--isl", 500, "--osl", 8,
                              "--ui", "none", "-o", programs.scratch / "sweep")
    shares = []
    for point in sorted((programs.scratch / "sweep").glob("*/run.json")):
        shares.append(json.loads(point.read_text())["cache"]["achieved"])
    return "keyway-loadtest sweep --rates 4,8,16 --requests 40 --isl 500", f"cached {', '.join(f'{share:.3f}' for share in shares)}; exit {code}", \
        len(shares) == 3 and max(shares) < 0.05 and code in (0, 3)


@row("the same run twice, compared")
def twice(programs):
    url, _ = programs.mock()
    for name in "ab":
        programs.run("keyway-loadtest", "run", "--url", url, "--rate", 5, "--duration", "8s", "--seed", 7, "--osl", 8, "--ui", "none",
                     "-o", programs.scratch / name)
    code, text = programs.run("keyway-loadtest", "compare", programs.scratch / "a", programs.scratch / "b")
    false = re.findall(r"^\S+.*\b(better|worse)\s*$", text, re.M)
    cached = re.search(r"^cached\s.*$", text, re.M)
    return "run --seed 7, twice; compare", f"{len(false)} verdicts; {cut(cached[0]) if cached else ''}", code == 0 and not false


def of_other_tools(programs, *arguments):
    url, _ = programs.mock("--time-scale", 20)
    code, text = programs.run("keyway-loadtest", "run", "--url", url, "--ui", "none", *arguments)
    verdict = re.search(r"^verdict.*$", text, re.M)
    shown = " ".join(str(part) for part in arguments)
    return f"run --url U {shown}".strip(), f"exit {code}; {cut(verdict[0] if verdict else text)}", code in (0, 3) and verdict is not None


@row("the shortest run")
def shortest(programs):
    return of_other_tools(programs)


@row("vllm bench serve's default rate")
def rate_inf(programs):
    return of_other_tools(programs, "--request-rate", "inf", "--num-prompts", 40)


@row("vllm bench serve's backend and endpoint")
def backend(programs):
    return of_other_tools(programs, "--backend", "vllm", "--endpoint", "/v1/completions", "--num-prompts", 20)


@row("a tokenizer, which nothing here needs")
def tokenizer(programs):
    return of_other_tools(programs, "--tokenizer", "Qwen/Qwen3-8B", "--num-prompts", 20)


@row("ShareGPT by its number of prompts")
def sharegpt(programs):
    file = programs.scratch / "sharegpt.json"
    talk = [{"from": "human", "value": "What is a KV cache?"}, {"from": "gpt", "value": "Keys and values that were computed."}]
    file.write_text(json.dumps([{"id": str(i), "conversations": talk} for i in range(30)]))
    return of_other_tools(programs, "--dataset-name", "sharegpt", "--dataset-path", file, "--num-prompts", 20)


@row("an address without http://")
def address(programs):
    _, port = programs.mock("--time-scale", 20)
    code, text = programs.run("keyway-loadtest", "run", "--url", f"127.0.0.1:{port}", "--requests", 20, "--concurrency", 2, "--ui", "none")
    return "run --url 127.0.0.1:8000", f"exit {code}", code in (0, 3)


@row("config check, read again")
def check(programs):
    code, text = programs.run("keyway", "config", "check", "--worker", "http://127.0.0.1:8000")
    file = programs.scratch / "again.toml"
    file.write_text(text)
    again, _ = programs.run("keyway", "config", "check", "--config", file)
    return "keyway config check > again.toml; keyway config check --config again.toml", f"exit {code}, {again}; {cut(text, 80)}", code == again == 0


@row("config check --probe")
def probe(programs):
    url, _ = programs.mock()
    code, text = programs.run("keyway", "config", "check", "--probe", "--worker", url, "--worker", "http://127.0.0.1:1")
    return "keyway config check --probe", f"exit {code}; {cut(text[-400:])}", code != 0 and "127.0.0.1:1" in text


@row("a pipe that ends early")
def pipe(programs):
    said = []
    for arguments in (["config", "check"], ["completions", "bash"], ["--help"]):
        code, text = programs.run("keyway", *arguments, shell="| head -1")
        said.append((code, "panicked" in text))
    return "keyway config check | head -1, completions, --help", f"exit {', '.join(str(code) for code, _ in said)}; no panic", \
        not any(panicked for _, panicked in said)


@row("a preflight of a browser")
def preflight(programs):
    url, _ = programs.mock()
    config = programs.scratch / "cors.toml"
    config.write_text('[cors]\nallow_origins = ["https://chat.example"]\n')
    _, _, port, _ = programs.gateway("--config", config, "--worker", url, await_text="ready=true")
    origin = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    status, _, headers = ask(port, "OPTIONS", "/v1/chat/completions", None, origin)
    models = ask(port, "GET", "/v1/models", None, {"origin": "https://chat.example"})[2]
    allowed = {name.lower(): value for name, value in models.items()}.get("access-control-allow-origin")
    return "OPTIONS /v1/chat/completions; GET /v1/models", f"{status}; {allowed}", status in (200, 204) and allowed == "https://chat.example"


@row("JSON logs from the first line")
def json_log(programs):
    process, log, _, _ = programs.gateway("--log-format", "json", await_text="ready", seconds=30)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    process.wait(20)
    lines = log.read_text().splitlines()
    wrong = [line for line in lines if not line.startswith("{")]
    return "keyway --log-format json", f"{len(lines)} lines, {len(wrong)} that are no JSON", len(lines) > 2 and not wrong


@row("the operators' port beside Prometheus")
def admin_port(programs):
    code, text = programs.run("keyway", "--help")
    found = re.search(r"--admin-listen.*?default: (\S+?)\]", text, re.S)
    recipe = (pathlib.Path(__file__).parents[3] / "deploy/README.md").read_text()
    apart = "web.listen-address" in recipe or (found and not found[1].endswith(":9090"))
    return "keyway --help; deploy/README.md", f"{found[1] if found else '?'}; Prometheus elsewhere: {'yes' if apart else 'no'}", bool(apart)


@row("a port that is taken")
def taken(programs):
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        began = time.monotonic()
        code, text = programs.run("keyway", "--listen", f"127.0.0.1:{one.getsockname()[1]}")
        last = text.strip().splitlines()[-1]
        return "keyway --listen 127.0.0.1:TAKEN", f"exit {code}; {cut(last)}", code not in (0, 101) and has(text, "in use", "--listen") and time.monotonic() - began < 5


@row("addresses as people write them")
def listens(programs):
    url, _ = programs.mock()
    served = []
    port, admin = free_port(), free_port()
    programs.start("keyway", "--listen", f"localhost:{port}", "--admin-listen", f"localhost:{admin}", "--worker", url, await_text="ready=true")
    served.append(ask(port, "GET", "/v1/models")[0])
    # Whom all of the machine's addresses let in is for a person to say.
    told = [programs.run("keyway", "--listen", written)[1] for written in (":8080", "8080")]
    helped = all(has(text, "127.0.0.1:8080", "0.0.0.0:8080") for text in told)
    return "keyway --listen localhost:8080, :8080, 8080", f"{served[0]}; {cut(told[0])}", served == [200] and helped


@row("a word too much")
def serve(programs):
    code, text = programs.run("keyway", "serve")
    return "keyway serve", f"exit {code}; {cut(text)}", code == 2 and has(text, "serve")


@row("a wrong value where there are few")
def policy(programs):
    code, text = programs.run("keyway", "--policy", "prefx")
    return "keyway --policy prefx", f"exit {code}; {cut(text)}", code in (1, 2) and has(text, "prefix", "round-robin")


@row("a key for a tenant")
def new_key(programs):
    code, text = programs.run("keyway", "new-key", "--name", "team-a")
    return "keyway new-key --name team-a", cut(text), code == 0 and has(text, r"\[\[tenant\]\]", "team-a", "key_sha256")


@row("names of tables that are almost right")
def meant(programs):
    file = programs.scratch / "typo.toml"
    file.write_text('[[workers]]\nurl = "http://127.0.0.1:8000"\n')
    code, text = programs.run("keyway", "config", "check", "--config", file)
    return "[[workers]]", f"exit {code}; {cut(text)}", code in (1, 2) and has(text, "did you mean", "worker")


@row("Ctrl-C while a stream runs")
def interrupted(programs):
    url, _ = programs.mock("--profile", "fcfs-6k")
    process, log, port, _ = programs.gateway("--worker", url, await_text="ready=true")
    with socket.create_connection(("127.0.0.1", port)) as client:
        body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4000, "stream": True})
        client.sendall(f"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
        client.recv(100)
        process.send_signal(signal.SIGINT)
        time.sleep(1)
        told = [line for line in log.read_text().splitlines() if "drain" in line or "again" in line]
        process.send_signal(signal.SIGINT)
        process.wait(10)
    return "Ctrl-C, then again", f"{cut(told[0]) if told else 'nothing'}; ended by the second", bool(told) and has(told[0], "within_s", "second signal")


@row("a refusal for its rate names the tenant")
def limited(programs):
    url, _ = programs.mock()
    text = programs.run("keyway", "new-key", "--name", "team-a")[1]
    key = re.search(r"^key\s+(\S+)", text, re.M) or re.search(r"(kw-\S+|sk-\S+)", text)
    table = text[text.index("[[tenant]]"):].split("\n\n")[0]
    tenants, config = programs.scratch / "tenants.toml", programs.scratch / "auth.toml"
    tenants.write_text(table + "\nrequests_per_minute = 1\n")
    config.write_text(f'[auth]\ntenants_file = "{tenants}"\n')
    _, log, port, _ = programs.gateway("--config", config, "--worker", url, await_text="ready=true")
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    statuses = [ask(port, "POST", "/v1/chat/completions", body, {"authorization": f"Bearer {key[1]}"})[0] for _ in range(4)]
    time.sleep(0.5)
    lines = [line for line in log.read_text().splitlines() if "429" in line]
    return "requests_per_minute = 1", f"{statuses}; {cut(lines[0]) if lines else 'no line'}", 429 in statuses and bool(lines) and "team-a" in lines[0]


def main():
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("--bins", type=pathlib.Path, required=True)
    parse.add_argument("--only", action="append", default=[])
    parse.add_argument("--table", action="store_true")
    args = parse.parse_args()
    wrong = 0
    if args.table:
        print("| what | command | what it says now | of help |\n|---|---|---|---|")
    for name, function in ROWS:
        if args.only and not any(word in name for word in args.only):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            programs = Programs(args.bins, pathlib.Path(scratch))
            try:
                command, said, holds = function(programs)
            except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, TypeError) as error:
                command, said, holds = "", f"{type(error).__name__}: {error}", False
            finally:
                programs.stop()
        wrong += not holds
        if args.table:
            escaped = lambda text: text.replace("|", chr(92) + "|")
            print(f"| {name} | `{escaped(command)}` | {escaped(said)} | {'yes' if holds else '**no**'} |", flush=True)
        else:
            print(f"{'ok ' if holds else 'NOT'} {name}\n      $ {command}\n      {said}", flush=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
