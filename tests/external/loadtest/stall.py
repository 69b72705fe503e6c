"""What three clients saw of a stall of 2 s at a fixed rate. Usage: stall.py OPEN.json HELD.json OHA.json

OPEN and HELD are runs of keyway-loadtest, the latter with at most 32 requests under way; OHA is oha's own JSON with
--latency-correction and 32 connections. What a person would have waited must be the same in all of them, within 10 %; the
time from sending must hide most of the stall where requests were held back."""

import json
import sys

open_loop, held, oha = (json.load(open(path)) for path in sys.argv[1:])
ms = {
    "response, nothing held back": open_loop["response"]["e2e"]["p99"],
    "response, at most 32 under way": held["response"]["e2e"]["p99"],
    "oha, corrected, 32 connections": oha["latencyPercentiles"]["p99"] * 1e3,
}
print("p99, ms: " + "; ".join(f"{name} {value:.0f}" for name, value in ms.items()))
print(f"p90, ms: {open_loop['response']['e2e']['p90']:.0f}; {held['response']['e2e']['p90']:.0f}; "
      f"{oha['latencyPercentiles']['p90'] * 1e3:.0f}")
hidden = held["service"]["e2e"]["p90"]
print(f"from sending, at most 32 under way: p90 {hidden:.1f} ms")
reference = ms["oha, corrected, 32 connections"]
agree = all(abs(value / reference - 1) < 0.1 for value in ms.values())
sys.exit(not (agree and reference > 1500 and hidden < 500))
