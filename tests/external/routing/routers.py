"""The routers that are compared, and how each is started: a name, its command line, and whether prompts are sent to it as
token ids (for those that follow KV events, so that nobody's tokenizer is compared)."""

# As shipped; `tuned` lowers the thresholds below which sglang-router and vllm-router do not balance at all, to what suits
# eight workers with a few requests each.
TUNED = ["--balance-abs-threshold", "4", "--balance-rel-threshold", "1.2", "--cache-threshold", "0.3"]

SGLANG = {
    "sglang-cache-aware": ["--policy", "cache_aware"],
    "sglang-cache-aware-tuned": ["--policy", "cache_aware", *TUNED],
    "sglang-power-of-two": ["--policy", "power_of_two"],
    "sglang-round-robin": ["--policy", "round_robin"],
}
VLLM = {
    "vllm-cache-aware": ["--policy", "cache_aware"],
    "vllm-cache-aware-tuned": ["--policy", "cache_aware", *TUNED],
    "vllm-kv-aware": ["--policy", "kv_aware"],
    "vllm-power-of-two": ["--policy", "power_of_two"],
    "vllm-consistent-hash": ["--policy", "consistent_hash"],
}
KEYWAY = {"keyway-text": "prefix", "keyway-events": "prefix", "keyway-round-robin": "round-robin"}
NAMES = [*KEYWAY, *SGLANG, *VLLM]

# Routers that are told of blocks by the workers.
BY_EVENTS = {"keyway-events", "vllm-kv-aware"}


def command(name, fleet, port, scratch, bin_dir):
    """The command line of one router in front of `fleet`, a list of (url, events, replay)."""
    urls = [url for url, _, _ in fleet]
    if name in KEYWAY:
        config = scratch / f"{name}.toml"
        config.write_text(_keyway(name, fleet, port))
        return [str(bin_dir / "keyway"), "--config", str(config)]
    listen = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(port + 1)]
    if name in SGLANG:
        return [str(scratch / "sglang/bin/sglang-router"), "launch", "--worker-urls", *urls, *listen, *SGLANG[name]]
    options = list(VLLM[name])
    if name in BY_EVENTS:
        options += ["--kv-event-block-size", "16", "--kv-event-model", "mock"]
        for url, events, replay in fleet:
            options += ["--kv-event-source", f"{url}={events}", "--kv-event-replay-source", f"{url}={replay}"]
    return [str(scratch / "vllm/bin/vllm-router"), "--worker-urls", *urls, *listen, *options]


def _keyway(name, fleet, port):
    lines = [f'listen = "127.0.0.1:{port}"', f'admin_listen = "127.0.0.1:{port + 1}"']
    lines.append(f'policy = "{KEYWAY[name]}"')
    for url, events, replay in fleet:
        lines += ["[[worker]]", f'url = "{url}"']
        if name in BY_EVENTS:
            lines += [f'kv_events = "{events}"', f'kv_replay = "{replay}"']
    if name in BY_EVENTS:
        # Prompts come as ids; any tokenizer tells the gateway that the model is one with tokens.
        lines += ["[[model]]", 'name = "mock"', 'tokenizer = "random"']
    return "\n".join(lines) + "\n"
