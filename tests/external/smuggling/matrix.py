"""The same bytes to Keyway, nginx and HAProxy, each before a server that writes down what it saw: a table, and whether Keyway lets
through what both others refuse. Usage: matrix.py --keyway BINARY [--only WORD] [--all]. Exits with 1 where it does."""

import argparse
import contextlib
import re
import socket
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

import cases
import h2_cases
from servers import Proxy

STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
NAMES = ("keyway", "nginx", "haproxy")


def http1(proxy, number, data):
    """Sends a case with another request behind it: the statuses that came, and whether the connection stayed open."""
    fill = lambda text: text.replace(b"NUMBER", str(number).encode())
    came, stays = b"", True
    with socket.create_connection(("127.0.0.1", proxy.port)) as connection:
        connection.settimeout(1.6)
        with contextlib.suppress(OSError):
            connection.sendall(fill(data + cases.BEHIND.encode()))
        try:
            while piece := connection.recv(65536):
                came += piece
            stays = False
        except TimeoutError:
            pass
        except OSError:
            stays = False
    return [status.decode() for status in STATUS.findall(came) if not status.startswith(b"1")], stays


def judged(outcomes, h2):
    """Why Keyway is laxer than both others, if it is. An outcome is (what was answered, whether it stays, what was seen)."""
    ours, *others = (outcomes[name] for name in NAMES)
    if len(ours[2]) > max(len(other[2]) for other in others):
        return "lets through more requests than both"
    refused = lambda outcome: not outcome[2]
    # Over HTTP/2 a stream may be reset alone.
    if not h2 and refused(ours) and ours[1] and not any(other[1] for other in others) and all(map(refused, others)):
        return "keeps a connection that both close"
    danger = lambda outcome: {name for _, _, _, fields in outcome[2] for name, _ in fields if name.startswith("trailer ")}
    if danger(ours) - set().union(*map(danger, others)):
        return "passes trailers that both hold back"
    return None


def cell(outcome):
    statuses, stays, seen = outcome
    framings = "+".join("behind" if "behind" in what else framing.split(" ")[0] for what, framing, _, _ in seen)
    return f"{' '.join(statuses) or 'none'}{'' if stays else ', closed'}{f' [{framings}]' if seen else ''}"


def run(all_cases, send, proxies, options, h2):
    """Every case at all three; the rows of the table."""
    rows, lax = [], 0
    with ThreadPoolExecutor(24) as pool:
        sent = {(name, number): pool.submit(send, proxies[name], number, data)
                for number, (_, _, data) in enumerate(all_cases) for name in NAMES}
    for number, (part, name, _) in enumerate(all_cases):
        outcomes = {proxy: (*sent[proxy, number].result(), proxies[proxy].backend.seen[number]) for proxy in NAMES}
        why = judged(outcomes, h2)
        lax += why is not None
        same = len({bool(outcome[2]) for outcome in outcomes.values()}) == 1
        if options.all or why or not same:
            rows.append((part, name, *(cell(outcomes[proxy]) for proxy in NAMES), f"LAXER: {why}" if why else ""))
    counts = {proxy: sum(bool(proxies[proxy].backend.seen[number]) for number in range(len(all_cases))) for proxy in NAMES}
    return rows, lax, counts


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keyway", required=True, help="the gateway's binary")
    parser.add_argument("--only", default="", help="cases whose name has this word")
    parser.add_argument("--all", action="store_true", help="show the cases of which all three make the same, too")
    options = parser.parse_args()
    laxer = 0
    with tempfile.TemporaryDirectory() as folder:
        for title, every, send, h2 in (("HTTP/1", cases.ALL, http1, False), ("HTTP/2", h2_cases.ALL, h2_cases.send, True)):
            chosen = [case for case in every if options.only in case[1] or options.only in case[0]]
            proxies = {}
            try:
                for name in NAMES:
                    proxies[name] = Proxy(name, folder, options.keyway, h2)
                rows, lax, counts = run(chosen, send, proxies, options, h2)
            finally:
                for proxy in proxies.values():
                    proxy.stop()
            shown = lambda text: text.replace("|", "\\|")
            print(f"\n{title}: {len(chosen)} cases; let through: " + ", ".join(f"{name} {counts[name]}" for name in NAMES))
            print("\n| part | case | keyway | nginx | haproxy | verdict |\n|---|---|---|---|---|---|")
            for row in rows:
                print("| " + " | ".join(map(shown, row)) + " |")
            laxer += lax
    print(f"\nKeyway is laxer than both in {laxer} cases")
    sys.exit(laxer > 0)


if __name__ == "__main__":
    main()
