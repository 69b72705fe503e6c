"""The operators' page in a real browser, offline but for the gateway: it shows the fleet, follows changes, survives the gateway's
restart, explains, drains; no console error, nothing serious for axe-core, in light and dark.
Usage: page.py KEYWAY KEYWAY_LOADTEST CHROMIUM SHOTS; needs PyPI's playwright and axe-playwright-python, and a Chromium."""

import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

keyway, loadtest, chromium, shots = sys.argv[1:5]
Path(shots).mkdir(parents=True, exist_ok=True)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def started(command, marker):
    process = subprocess.Popen(command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if marker in line:
            return process
    sys.exit(f"{command[0]} ended")


def post(url, body, kind="application/json"):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": kind})
    return urllib.request.urlopen(request).read()


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
base = free_ports(3)
mock = started([loadtest, "mock", "--workers", "3", "--base-port", str(base), "--time-scale", "5"], "ready on")
flags = [f for i in range(3) for f in ("--worker", f"http://127.0.0.1:{base + i}")]
gateway_command = [keyway, "--listen", f"127.0.0.1:{ports[0]}", "--admin-listen", f"127.0.0.1:{ports[1]}", *flags]
gateway = started(gateway_command, "listening on")
api, admin = (f"http://127.0.0.1:{port}" for port in ports)


def until(page, condition, arg=None):
    """Polls from outside: the page's policy forbids the evaluation that Playwright's own waiting needs."""
    for _ in range(300):
        if page.evaluate(condition, arg):
            return
        time.sleep(0.1)
    raise AssertionError(f"never came true: {condition}")


def model_name():
    return json.load(urllib.request.urlopen(f"{api}/v1/models"))["data"][0]["id"]


def fail():
    """A request that no worker is for."""
    try:
        post(f"{api}/v1/chat/completions", {"model": "no-such-model", "messages": [{"role": "user", "content": "canary"}]})
    except urllib.error.HTTPError as error:
        assert error.code == 404, error.code


def load(n):
    model = model_name()
    for i in range(n):
        text = f"A beginning that all share. {'word ' * 300} {i % 5}"
        body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 8, "stream": True,
                "stream_options": {"include_usage": True}}
        post(f"{api}/v1/chat/completions", body)


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
    draw = "async () => { const texts = await Promise.all(['/metrics', '/workers'].map(async (p) => (await fetch(p)).text()));" \
        " const began = performance.now(); showWorkers(JSON.parse(texts[1]), parse(texts[0])); showHour(); return performance.now() - began; }"
    took = sorted(page.evaluate(draw) for _ in range(5))
    print(f"1000 workers and 50 models are read and drawn in {took[2]:.0f} ms, the median of five")
    page.close()


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
            until(page, "() => document.querySelectorAll('#workers tr').length === 3")
            until(page, "() => document.querySelectorAll('#workers .ready').length === 3")
            load(30)
            before = page.inner_text("#when")
            until(page, "before => document.querySelector('#when').innerText !== before", before)
            until(page, "() => [...document.querySelectorAll('#cards dd')].some(d => d.innerText.endsWith('%'))")
            until(page, "() => document.querySelectorAll('#scale section').length === 1")
            # The last hour has a sample each 10 s.
            until(page, "() => document.querySelectorAll('#charts figure').length === 4")
            until(page, "() => document.querySelector('#charts path').getAttribute('d').length > 4")
            until(page, "name => [...document.querySelectorAll('#model option')].some(o => o.value === name)", model_name())
            fail()
            until(page, "() => document.querySelector('#mishaps').innerText.includes('model_not_found')")
            assert "canary" not in page.content(), "what a client asks for is not shown"
            # Sorted and filtered.
            names = "() => [...document.querySelectorAll('#workers th')].map(t => t.innerText)"
            assert len(page.evaluate(names)) == 3
            page.click("[data-sort=worker] button")
            page.click("[data-sort=worker] button")
            assert page.evaluate(names) == sorted(page.evaluate(names), reverse=True)
            page.fill("#filter", f":{base + 1} ready")
            assert page.evaluate(names) == [f"127.0.0.1:{base + 1}"]
            page.fill("#filter", "")
            page.fill("#body", "{no")
            page.click("#explain button")
            assert page.inner_text("#explained").startswith("This is no JSON")
            page.fill("#body", json.dumps({"model": model_name(), "messages": [{"role": "user", "content": "Hello"}]}))
            # By keyboard alone: to the form, and sent.
            page.focus("#body")
            page.keyboard.press("Tab")
            page.keyboard.press("Tab")
            page.keyboard.press("Enter")
            page.wait_for_selector("#explained table")
            assert page.locator("#explained tbody tr").count() == 3
            page.screenshot(path=f"{shots}/page-{scheme}.png", full_page=True)
            if scheme == "light":
                page.set_viewport_size({"width": 1600, "height": 900})
                page.screenshot(path=f"{shots}/page-{scheme}-wide.png", full_page=True)
                page.set_viewport_size({"width": 1280, "height": 900})
            found = Axe().run(page).response["violations"]
            serious = [(v["id"], v["nodes"][0]["html"]) for v in found if v["impact"] in ("serious", "critical")]
            assert not serious, serious
            page.set_viewport_size({"width": 390, "height": 800})
            wide = page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
            assert not wide, "the page is wider than a telephone"
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
                until(page, "() => document.querySelectorAll('#workers .ready').length === 3")
                # The gateway restarts: the page says so, and goes on by itself.
                gateway.terminate()
                gateway.wait()
                until(page, "() => document.querySelector('#lost').innerText !== ''")
                gateway = started(gateway_command, "listening on")
                until(page, "() => document.querySelector('#lost').innerText === ''")
                until(page, "() => document.querySelectorAll('#workers .ready').length === 3")
                refused = [f for f in faults if not re.search("ERR_CONNECTION|Failed to load resource", f)]
                assert not refused, refused
            page.close()
        assert not elsewhere, elsewhere
        large(browser)
        browser.close()
    print("page: all well")
finally:
    gateway.kill()
    mock.kill()
