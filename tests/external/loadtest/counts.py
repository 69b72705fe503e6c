"""Compares what another load tester counted with what the mock counted. Usage: counts.py aiperf|guidellm RESULT METRICS_URL"""

import json
import sys
import urllib.request

tool, path, url = sys.argv[1:]
result = json.load(open(path))

served: dict[str, float] = {}
for line in urllib.request.urlopen(url, timeout=5).read().decode().splitlines():
    if line and not line.startswith("#"):
        name, value = line.rsplit(" ", 1)
        served[name.split("{")[0]] = served.get(name.split("{")[0], 0) + float(value)

if tool == "aiperf":
    theirs = {
        "requests": result["completed_request_count"]["avg"],
        "prompt": result["total_usage_prompt_tokens"]["avg"],
        "generated": result["total_usage_completion_tokens"]["avg"],
        "failed": len(result.get("error_summary") or []),
    }
else:
    # Its summary leaves out requests at the edges of the run; its list of requests has them all.
    benchmark = result["benchmarks"][0]
    made, done = benchmark["scheduler_metrics"]["requests_made"], benchmark["requests"]["successful"]
    theirs = {
        "requests": made["successful"],
        "prompt": sum(request["prompt_tokens"] for request in done),
        "generated": sum(request["output_tokens"] for request in done),
        "failed": made["errored"] + made["incomplete"],
    }
ours = {
    "requests": served["vllm:request_success_total"],
    "prompt": served["vllm:prompt_tokens_total"],
    "generated": served["vllm:generation_tokens_total"],
    "failed": 0,
}
print(", ".join(f"{name} {theirs[name]:.0f} of {ours[name]:.0f}" for name in ours))
sys.exit(any(theirs[name] != ours[name] for name in ours) or theirs["requests"] == 0)
