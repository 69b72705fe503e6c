"""The server that writes down what it is asked, and the three proxies before it, each on a port that the system chose."""

import contextlib
import pathlib
import re
import socket
import subprocess
import threading
import time
from collections import defaultdict

LINE = re.compile(rb"^(\S+) (\S+) HTTP/1\.[01]$")
NUMBER = re.compile(r"[?&]n=(\d+)")


def free_port():
    """A port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Backend:
    """Answers every request with 200, and keeps what came: by number, method, path, framing, body and the names of its fields."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = self.listener.getsockname()[1]
        self.seen = defaultdict(list)
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            threading.Thread(target=self.serve, args=(self.listener.accept()[0],), daemon=True).start()

    def serve(self, connection):
        with connection, connection.makefile("rb") as lines, contextlib.suppress(OSError, ValueError):
            while self.request(connection, lines):
                pass

    def request(self, connection, lines):
        """Reads a request and answers it. One that does not come whole counts for none."""
        match = LINE.match(lines.readline().rstrip(b"\r\n"))
        if not match:
            return False
        fields = read_fields(lines)
        known, body, framing = dict(fields), b"", "none"
        if "transfer-encoding" in known:
            framing = f"coding {known['transfer-encoding']}"
            while size := int(read_line(lines).split(b";")[0], 16):
                body += lines.read(size)
                read_line(lines)
            fields += [(f"trailer {name}", value) for name, value in read_fields(lines)]
        elif "content-length" in known:
            framing = f"length {known['content-length']}"
            body = lines.read(int(known["content-length"]))
            if len(body) < int(known["content-length"]):
                return False
        method, target = match[1].decode("latin-1"), match[2].decode("latin-1")
        if number := NUMBER.search(target):
            self.seen[int(number[1])].append((f"{method} {target.partition('?')[0]}", framing, body, tuple(fields)))
        answer = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(answer)}\r\n\r\n".encode()
        connection.sendall(head + (b"" if method == "HEAD" else answer))
        return True


def read_line(lines):
    line = lines.readline()
    if not line.endswith(b"\n"):
        raise ValueError("the connection ended within a request")
    return line.rstrip(b"\r\n")


def read_fields(lines):
    """Names, in lower case, and values, up to the empty line."""
    fields = []
    while (line := read_line(lines)) != b"":
        name, _, value = line.partition(b":")
        fields.append((name.lower().decode("latin-1"), value.strip().decode("latin-1")))
    return fields


def nginx(folder, port, backend, h2):
    folders = " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    config = folder / "nginx.conf"
    config.write_text(f"""daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/nginx.log;
events {{ worker_connections 512; }}
http {{ {folders} access_log off; client_header_timeout 1s; client_body_timeout 1s; keepalive_timeout 5s;
  upstream behind {{ server 127.0.0.1:{backend}; keepalive 16; }}
  server {{ listen 127.0.0.1:{port}{" http2" if h2 else ""};
    location / {{ proxy_pass http://behind; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_next_upstream off;
      proxy_request_buffering off; }} }} }}
""")
    return ["nginx", "-e", f"{folder}/nginx.log", "-c", str(config)]


def haproxy(folder, port, backend, h2):
    config = folder / "haproxy.cfg"
    config.write_text(f"""global
  nbthread 1
defaults
  mode http
  timeout connect 5s
  timeout client 1s
  timeout server 5s
  timeout http-request 1s
  timeout http-keep-alive 5s
frontend front
  bind 127.0.0.1:{port}{" proto h2" if h2 else ""}
  default_backend behind
backend behind
  http-reuse safe
  server behind 127.0.0.1:{backend}
""")
    return ["haproxy", "-db", "-f", str(config)]


def keyway(folder, port, backend, binary):
    config = folder / "keyway.toml"
    config.write_text("[limits]\nbody_idle_ms = 500\nheader_read_ms = 1000\n")
    return [binary, "--config", str(config), "--listen", f"127.0.0.1:{port}", "--admin-listen", f"127.0.0.1:{free_port()}",
            "--worker", f"http://127.0.0.1:{backend}"]


class Proxy:
    """One of the three, with a server of its own behind it."""

    def __init__(self, name, folder, binary, h2=False):
        self.name, self.backend, self.port = name, Backend(), free_port()
        folder = pathlib.Path(folder) / f"{name}{'-h2' if h2 else ''}"
        folder.mkdir()
        command = {
            "keyway": lambda: keyway(folder, self.port, self.backend.port, binary),
            "nginx": lambda: nginx(folder, self.port, self.backend.port, h2),
            "haproxy": lambda: haproxy(folder, self.port, self.backend.port, h2),
        }[name]()
        with open(folder / "out.log", "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self.wait(folder)

    def wait(self, folder):
        for _ in range(400):
            if self.process.poll() is not None:
                raise SystemExit(f"{self.name} ended at once: {(folder / 'out.log').read_text(errors='replace')}")
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                break
            except OSError:
                time.sleep(0.05)
        # A gateway asks its worker before it sends it anything.
        time.sleep(1)

    def stop(self):
        self.process.terminate()
        self.process.wait(10)
