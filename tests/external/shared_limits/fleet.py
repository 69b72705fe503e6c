"""Eight gateways, the store that they share, and a worker that says what it is told of its tokens: for limits.py."""

import asyncio
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time

# A tenant for each thing that is asked. The last one's limits are never near.
TENANTS = {
    "requests": "requests_per_minute = 600.0",
    "tokens": "tokens_per_minute = 60000.0",
    "calm": "requests_per_minute = 600.0",
    "slots": "max_in_flight = 16",
    "far": "requests_per_minute = 6000000.0\ntokens_per_minute = 6000000000.0\nmax_in_flight = 10000",
}
PASSWORD = "a-password-of-the-store"


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Worker:
    """Answers chats with the tokens that their prompt asks for, after the time that it asks for."""

    def __init__(self):
        self.now, self.most, self.tokens = 0, 0, 0

    async def start(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]

    async def serve(self, reader, writer):
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                length = re.search(r"content-length: (\d+)", head, re.I)
                body = await reader.readexactly(int(length[1])) if length else b""
                answer = await self.answer(head.split(" ")[1], body)
                text = json.dumps(answer).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
                             b"content-length: %d\r\n\r\n" % len(text) + text)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def answer(self, path, body):
        if not body:
            return {"object": "list", "data": [{"id": "m", "object": "model"}]} if path == "/v1/models" else {}
        told = re.search(rb"use (\d+) tokens in (\d+) ms, of the limit (\w+)", body)
        tokens, millis = int(told[1]), int(told[2])
        if told[3] == b"slots":
            self.now += 1
            self.most = max(self.most, self.now)
        if millis:
            await asyncio.sleep(millis / 1000)
        if told[3] == b"slots":
            self.now -= 1
        self.tokens += tokens if told[3] == b"tokens" else 0
        message = {"role": "assistant", "content": "x"}
        usage = {"prompt_tokens": 10, "completion_tokens": tokens - 10, "total_tokens": tokens}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return {"id": "c", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage}


class Fleet:
    def __init__(self, args, worker):
        self.args, self.worker, self.children = args, worker, []
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="keyway-shared-limits-"))
        self.store_port = free_port()
        self.store = None
        key = lambda name: hashlib.sha256(name.encode()).hexdigest()
        tables = [f'[[tenant]]\nname = "{name}"\nkey_sha256 = ["{key(name)}"]\n{limits}\n' for name, limits in TENANTS.items()]
        (self.folder / "tenants.toml").write_text("".join(tables))
        if args.tls:
            self.make_certificates()

    def make_certificates(self):
        """An authority, and what it signed for both ends."""
        run = lambda *command: subprocess.run(["openssl", *command], cwd=self.folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        run("req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority", "-days", "2")
        (self.folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\nbasicConstraints=CA:FALSE\n")
        for name in ("server", "client"):
            run("req", *new, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
            run("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-out", f"{name}.pem", "-days", "2",
                "-extfile", "names")

    def start_store(self):
        command = [self.args.server, "--save", "", "--appendonly", "no", "--dir", str(self.folder), "--port"]
        if self.args.tls:
            files = [f"--tls-{option}-file={self.folder}/{name}" for option, name in
                     (("cert", "server.pem"), ("key", "server.key"), ("ca-cert", "ca.pem"))]
            files = [part for file in files for part in file.split("=")]
            command += ["0", "--tls-port", str(self.store_port), "--tls-auth-clients", "yes", *files, "--requirepass", PASSWORD]
        else:
            command.append(str(self.store_port))
        self.store = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        end = time.monotonic() + 10
        while time.monotonic() < end:
            try:
                return socket.create_connection(("127.0.0.1", self.store_port)).close()
            except OSError:
                time.sleep(0.02)
        raise SystemExit(f"{self.args.server} does not listen")

    def start_gateway(self, with_store):
        name = f"gateway-{len(self.children)}"
        text = f"worker = ['http://127.0.0.1:{self.worker.port}']\nlisten = '127.0.0.1:0'\nadmin_listen = '127.0.0.1:0'\n"
        text += f"[auth]\ntenants_file = '{self.folder}/tenants.toml'\n"
        if with_store:
            at = f"rediss://:{PASSWORD}@localhost" if self.args.tls else "redis://127.0.0.1"
            text += f"[store]\nurl = '{at}:{self.store_port}'\ngateways = {self.args.gateways}\n"
        if with_store and self.args.tls:
            text += "[store.tls]\n" + "".join(f"{key}_file = '{self.folder}/{name}'\n" for key, name in
                                             (("ca", "ca.pem"), ("cert", "client.pem"), ("key", "client.key")))
        (self.folder / f"{name}.toml").write_text(text)
        log = open(self.folder / f"{name}.log", "w")
        child = subprocess.Popen([self.args.keyway, "--config", str(self.folder / f"{name}.toml")], stderr=log, stdout=log)
        self.children.append(child)
        return name, child

    async def listening(self, name):
        """Where it serves clients and operators, once it does; it waits for its worker and its store."""
        for _ in range(600):
            text = re.sub(r"\x1b\[[0-9;]*m", "", (self.folder / f"{name}.log").read_text())
            clients = re.search(r"listening on http://127\.0\.0\.1:(\d+)", text)
            admin = re.search(r"admin on http://127\.0\.0\.1:(\d+)", text)
            if clients and admin:
                for _ in range(200):
                    if (await get(int(admin[1]), "/readyz"))[0] == 200:
                        return int(clients[1]), int(admin[1])
                    await asyncio.sleep(0.05)
            await asyncio.sleep(0.05)
        raise SystemExit(f"{name} does not listen: {self.folder}")

    def end(self):
        for child in self.children + [self.store]:
            if child and child.poll() is None:
                os.kill(child.pid, signal.SIGCONT)
                child.kill()
                child.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


async def exchange(connection, head, body=b""):
    reader, writer = connection
    writer.write(head.encode() + body)
    await writer.drain()
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    length = re.search(r"content-length: (\d+)", head, re.I)
    if length:
        body = await reader.readexactly(int(length[1]))
    else:
        body = await reader.read()
    return int(head.split(" ")[1]), body


async def get(port, path):
    connection = await asyncio.open_connection("127.0.0.1", port)
    try:
        return await exchange(connection, f"GET {path} HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n")
    finally:
        connection[1].close()


async def metric(port, name):
    text = (await get(port, "/metrics"))[1].decode()
    return sum(float(line.split()[-1]) for line in text.splitlines() if re.match(name + r"[ {]", line))


async def ask(port, tenant, tokens=20, millis=0, connection=None):
    """A chat of this tenant: its status and seconds."""
    text = f"use {tokens} tokens in {millis} ms, of the limit {tenant}"
    body = json.dumps({"model": "m", "max_tokens": max(tokens - 10, 1), "messages": [{"role": "user", "content": text}]}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\nauthorization: Bearer {tenant}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    begun = time.perf_counter()
    own = connection or await asyncio.open_connection("127.0.0.1", port)
    try:
        status = (await asyncio.wait_for(exchange(own, head, body), 30))[0]
    finally:
        if not connection:
            own[1].close()
    return status, time.perf_counter() - begun
