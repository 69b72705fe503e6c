"""The operators' page in a real browser, offline but for the gateway: it shows the fleet, tenants and where requests go, follows
changes, survives the gateway's restart, explains, drains; no console error, nothing serious for axe-core, in light and dark.
Usage: page.py KEYWAY KEYWAY_LOADTEST CHROMIUM SHOTS [SECONDS]; SHOTS is a folder for pictures, SECONDS how long there is traffic before
the first. Needs PyPI's playwright and axe-playwright-python, and a Chromium."""

import hashlib
import http.client
import json
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

keyway, loadtest, chromium, shots = sys.argv[1:5]
seconds = float(sys.argv[5]) if len(sys.argv) > 5 else 0.0
Path(shots).mkdir(parents=True, exist_ok=True)
# Each model and its workers.
FLEET = {"llama-8b": 3, "qwen-4b": 2}
WORKERS = sum(FLEET.values())
# Each tenant, its limits and its share of the traffic.
TENANTS = {"search": ("", 0.6), "support": ("", 0.33), "trial": ("requests_per_minute = 6", 0.07)}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def started(command, marker):
    process = subprocess.Popen(command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if marker in line:
            # A pipe that nobody reads fills up.
            threading.Thread(target=process.stdout.read, daemon=True).start()
            return process
    sys.exit(f"{command[0]} ended")


def post(url, body, tenant):
    headers = {"content-type": "application/json", "authorization": f"Bearer kw-page-{tenant}"}
    return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=20).read()


def free_ports(count):
    """That many in a row."""
    while True:
        base = free_port()
        try:
            for port in range(base, base + count):
                with socket.socket() as s:
                    s.bind(("127.0.0.1", port))
            return base
        except OSError:
            continue


ports = [free_port() for _ in range(2)]
base = free_ports(WORKERS)
mocks, port, model_of = [], base, {}
for model, workers in FLEET.items():
    mocks.append(started([loadtest, "mock", "--model", model, "--workers", str(workers), "--base-port", str(port), "--time-scale", "5"], "ready on"))
    model_of |= {f"127.0.0.1:{port + i}": model for i in range(workers)}
    port += workers
files = tempfile.TemporaryDirectory()
tenants_file, config_file = Path(files.name) / "tenants.toml", Path(files.name) / "keyway.toml"
table = '[[tenant]]\nname = "{0}"\nkey_sha256 = ["{1}"]\n{2}\n'
tenants_file.write_text("".join(
    table.format(name, hashlib.sha256(f"kw-page-{name}".encode()).hexdigest(), limits) for name, (limits, _) in TENANTS.items()))
config_file.write_text(f"[auth]\ntenants_file = {json.dumps(str(tenants_file))}\n")
flags = [f for worker in model_of for f in ("--worker", f"http://{worker}")]
# Without tenants, and with them.
open_command = [keyway, "--listen", f"127.0.0.1:{ports[0]}", "--admin-listen", f"127.0.0.1:{ports[1]}", *flags]
gateway = started([*open_command, "--config", str(config_file)], "listening on")
api, admin = (f"http://127.0.0.1:{port}" for port in ports)


def until(page, condition, arg=None):
    """Polls from outside: the page's policy forbids the evaluation that Playwright's own waiting needs."""
    for _ in range(300):
        if page.evaluate(condition, arg):
            return
        time.sleep(0.1)
    raise AssertionError(f"never came true: {condition}")


def fail():
    """A request that no worker is for."""
    try:
        post(f"{api}/v1/chat/completions", {"model": "no-such-model", "messages": [{"role": "user", "content": "canary"}]}, "search")
    except urllib.error.HTTPError as error:
        assert error.code == 404, error.code


def ask(model, tenant, document):
    text = f"Document {document}. {'word ' * 300} What is it about?"
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 8, "stream": True,
            "stream_options": {"include_usage": True}}
    post(f"{api}/v1/chat/completions", body, tenant)


def load(n):
    for i in range(n):
        ask(MODEL, "search", i % 7)


def traffic(seed):
    """Requests of all tenants for all models, until the end."""
    draw = random.Random(seed)
    while not ended.is_set():
        [tenant] = draw.choices(list(TENANTS), [share for _, share in TENANTS.values()])
        [model] = draw.choices(list(FLEET), [0.7, 0.3])
        try:
            ask(model, tenant, draw.randrange(40))
        except (OSError, http.client.HTTPException):
            pass  # over a limit, or the gateway restarts
        ended.wait(draw.expovariate(8.0))


def large(browser):
    """A thousand workers and fifty models: as many rows as a person looks at, and how long a refresh takes."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    workers = json.load(urllib.request.urlopen(f"{admin}/workers"))
    many = [{**workers[0], "worker": f"10.0.{i // 250}.{i % 250}:8000", "models": [f"model-{i % 50}"]} for i in range(1000)]
    metrics = urllib.request.urlopen(f"{admin}/metrics").read().decode()
    picks = "".join(f'keyway_picks_total{{reason="{reason}",worker="{w["worker"]}"}} {i}\n' for i, w in enumerate(many) for reason in ("prefix", "load"))
    hour = json.load(urllib.request.urlopen(f"{admin}/history"))
    samples = range(360)
    series = {"requests": [i % 90 for i in samples], "failed": [i % 3 for i in samples], "ttft_p50_s": [0.05] * 360, "ttft_p90_s": [0.2] * 360,
              "hit_rate": [0.5] * 360}
    tenant = {"requests": series["requests"], "refused": series["failed"], "prompt_tokens": [997 * i for i in samples]}
    sent = [{"models": w["models"][0], "worker": w["worker"], "minute": i % 90, "hour": 7 * i} for i, w in enumerate(many)]
    hour |= {"tenants": [{"tenant": "all", **tenant}, *({"tenant": f"tenant-{i}", **tenant} for i in range(32))], "traffic": sent}
    hour |= {"at": [1.0 * i for i in samples], "in_flight": list(samples), "waiting": [0] * 360,
             "models": [{"model": "all", **series}, *({"model": f"model-{i}", **series} for i in range(50))]}
    for path, body in (("workers", json.dumps(many)), ("metrics", metrics + picks), ("history", json.dumps(hour))):
        page.route(f"{admin}/{path}", lambda route, _, body=body: route.fulfill(body=body, content_type="text/plain"))
    page.goto(admin)
    until(page, "() => document.querySelectorAll('#workers tr').length >= 200")
    assert page.locator("#workers tr").count() == 200 and page.inner_text("#shown") == "200 of 1000 shown"
    page.fill("#filter", "model-7")
    assert page.locator("#workers tr").count() == 20
    page.fill("#filter", "")
    # As many rows a side as can be read, and nobody is forgotten.
    until(page, "() => document.querySelectorAll('#flow svg rect').length === 24")
    told = page.evaluate("() => [...document.querySelectorAll('#flow text')].map((t) => t.firstChild.data)")
    assert "39 others" in told and "977 others" in told, told
    total = page.evaluate("() => [...document.querySelectorAll('#flows td:nth-child(3)')].reduce((sum, cell) => sum + Number(cell.textContent), 0)")
    assert total == sum(row["minute"] for row in sent), total
    draw = "async () => { const texts = await Promise.all(['/metrics', '/workers', '/history'].map(async (p) => (await fetch(p)).text()));" \
        " const began = performance.now(); showWorkers(JSON.parse(texts[1]), parse(texts[0])); hour = { ...JSON.parse(texts[2]), read: Date.now() / 1000 }; showHour(); showTraffic(); return performance.now() - began; }"
    took = sorted(page.evaluate(draw) for _ in range(5))
    print(f"1000 workers and 50 models are read and drawn in {took[2]:.0f} ms, the median of five")
    assert took[0] < 100, took
    page.close()


def shows_tenants(page):
    until(page, "() => document.querySelectorAll('#tenant-charts figure').length === 3")
    until(page, "() => [...document.querySelectorAll('#tenant option')].map((o) => o.value).join() === 'all,search,support,trial'")
    until(page, "() => hour.tenants.find((t) => t.tenant === 'trial').refused.some((n) => n > 0)")
    page.select_option("#tenant", "trial")
    until(page, "() => !document.querySelector('#tenant-charts svg[aria-label^=Over]').getAttribute('aria-label').includes('at most 0.0')")
    page.select_option("#tenant", "all")


def shows_flows(page):
    """The picture, and the table that has the same in words, are what was sent to each worker."""
    page.select_option("#span", "hour")
    until(page, "workers => new Set(hour.traffic.map((row) => row.worker)).size === workers", WORKERS)
    until(page, "workers => document.querySelectorAll('#flow svg path').length === workers", WORKERS)
    # Read in one go, as the page goes on.
    sent, shown = page.evaluate("() => { showTraffic(); return [hour.traffic.map((row) => [row.models, row.worker, row.hour]),"
                                " [...document.querySelectorAll('#flows tr')].map((row) => [...row.cells].slice(0, 3).map((cell) => cell.textContent))]; }")
    assert sorted(sent) == sorted([model, worker, int(n)] for model, worker, n in shown), (sent, shown)
    assert {worker: model for model, worker, _ in sent} == model_of, sent
    page.focus("#span")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.locator("#flows tr").first.is_visible(), "the table opens by keyboard"
    page.keyboard.press("Enter")
    page.select_option("#span", "minute")


def fits(page):
    """The picture has been drawn anew for the page's width."""
    until(page, "() => { const svg = document.querySelector('#flow svg');"
                " return Math.abs(svg.getBoundingClientRect().width - svg.viewBox.baseVal.width) < 2; }")


MODEL = next(iter(FLEET))
ended = threading.Event()
for seed in range(4):
    threading.Thread(target=traffic, args=(seed,), daemon=True).start()
try:
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        faults, elsewhere = [], []
        for scheme in ("light", "dark"):
            page = browser.new_page(color_scheme=scheme, viewport={"width": 1280, "height": 900})
            page.on("console", lambda m: faults.append(m.text) if m.type == "error" else None)
            page.on("pageerror", lambda e: faults.append(str(e)))
            page.on("request", lambda r: None if r.url.startswith((admin, "data:")) else elsewhere.append(r.url))
            page.goto(admin)
            until(page, "workers => document.querySelectorAll('#workers tr').length === workers", WORKERS)
            until(page, "workers => document.querySelectorAll('#workers .ready').length === workers", WORKERS)
            load(30)
            before = page.inner_text("#when")
            until(page, "before => document.querySelector('#when').innerText !== before", before)
            until(page, "() => [...document.querySelectorAll('#cards dd')].some(d => d.innerText.endsWith('%'))")
            until(page, "models => document.querySelectorAll('#scale section').length === models", len(FLEET))
            # The last hour has a sample each 10 s.
            until(page, "() => document.querySelectorAll('#charts figure').length === 4")
            until(page, "() => document.querySelector('#charts path').getAttribute('d').length > 4")
            until(page, "name => [...document.querySelectorAll('#model option')].some(o => o.value === name)", MODEL)
            shows_tenants(page)
            shows_flows(page)
            fail()
            until(page, "() => document.querySelector('#mishaps').innerText.includes('model_not_found')")
            assert "canary" not in page.content(), "what a client asks for is not shown"
            # Sorted and filtered.
            names = "() => [...document.querySelectorAll('#workers th')].map(t => t.innerText)"
            assert len(page.evaluate(names)) == WORKERS
            page.click("[data-sort=worker] button")
            page.click("[data-sort=worker] button")
            assert page.evaluate(names) == sorted(page.evaluate(names), reverse=True)
            page.fill("#filter", f":{base + 1} ready")
            assert page.evaluate(names) == [f"127.0.0.1:{base + 1}"]
            page.fill("#filter", "")
            page.fill("#body", "{no")
            page.click("#explain button")
            assert page.inner_text("#explained").startswith("This is no JSON")
            page.fill("#body", json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}))
            # By keyboard alone: to the form, and sent.
            page.focus("#body")
            page.keyboard.press("Tab")
            page.keyboard.press("Tab")
            page.keyboard.press("Enter")
            page.wait_for_selector("#explained table")
            assert page.locator("#explained tbody tr").count() == FLEET[MODEL]
            time.sleep(seconds if scheme == "light" else 0.0)
            page.screenshot(path=f"{shots}/page-{scheme}.png", full_page=True)
            if scheme == "light":
                page.set_viewport_size({"width": 1600, "height": 900})
                fits(page)
                page.screenshot(path=f"{shots}/page-{scheme}-wide.png", full_page=True)
                page.set_viewport_size({"width": 1280, "height": 900})
            found = Axe().run(page).response["violations"]
            serious = [(v["id"], v["nodes"][0]["html"]) for v in found if v["impact"] in ("serious", "critical")]
            assert not serious, serious
            page.set_viewport_size({"width": 390, "height": 800})
            wide = page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
            assert not wide, "the page is wider than a telephone"
            fits(page)
            page.screenshot(path=f"{shots}/page-{scheme}-narrow.png", full_page=True)
            page.set_viewport_size({"width": 1280, "height": 900})
            assert not faults, faults
            if scheme == "dark":
                name = f"127.0.0.1:{base}"
                page.click(f"button[data-worker='{name}']")
                until(page, "() => [...document.querySelectorAll('[data-worker]')].some(b => b.innerText === 'Drain now')")
                assert page.locator("#workers .draining").count() == 0, "a drain asks first"
                page.click(f"button[data-worker='{name}']")
                page.wait_for_selector("#workers .draining")
                page.click(f"button[data-worker='{name}']")
                until(page, "workers => document.querySelectorAll('#workers .ready').length === workers", WORKERS)
                # The gateway restarts: the page says so, and goes on by itself.
                gateway.terminate()
                gateway.wait()
                until(page, "() => document.querySelector('#lost').innerText !== ''")
                gateway = started(open_command, "listening on")
                until(page, "() => document.querySelector('#lost').innerText === ''")
                until(page, "workers => document.querySelectorAll('#workers .ready').length === workers", WORKERS)
                until(page, "() => document.querySelector('#tenant-part').hidden")
                refused = [f for f in faults if not re.search("ERR_CONNECTION|Failed to load resource", f)]
                assert not refused, refused
            page.close()
        assert not elsewhere, elsewhere
        large(browser)
        browser.close()
    print("page: all well")
finally:
    ended.set()
    gateway.kill()
    for mock in mocks:
        mock.kill()
