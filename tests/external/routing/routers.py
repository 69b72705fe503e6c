"""The routers that are compared, and how each is started: a name, its command line, and whether prompts are sent to it as
token ids (for those that follow KV events, so that nobody's tokenizer is compared)."""

# As shipped; `tuned` lowers the thresholds below which sglang-router, smg and vllm-router do not balance at all, to what suits
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
SMG = {
    "smg-cache-aware": ["--policy", "cache_aware"],
    "smg-cache-aware-tuned": ["--policy", "cache_aware", *TUNED],
    "smg-prefix-hash": ["--policy", "prefix_hash"],
    "smg-least-load": ["--policy", "least_load"],
}
KEYWAY = {
    "keyway-text": "prefix",
    "keyway-text-x4": "prefix",
    "keyway-text-x8": "prefix",
    "keyway-events": "prefix",
    "keyway-events-x4": "prefix",
    "keyway-events-x4-tokens": "prefix",
    "keyway-events-x4-requests": "prefix",
    "keyway-round-robin": "round-robin",
}
NAMES = [*KEYWAY, *SGLANG, *SMG, *VLLM]

# How many of it there are at once, each request going to any one of them; else one.
TOGETHER = {
    "keyway-text-x4": 4,
    "keyway-text-x8": 8,
    "keyway-events-x4": 4,
    "keyway-events-x4-tokens": 4,
    "keyway-events-x4-requests": 4,
}

# Routers that are told of blocks by the workers.
BY_EVENTS = {"keyway-events", *(name for name in TOGETHER if "events" in name), "vllm-kv-aware"}

# Routers that go by a session that the client names, and know nothing of prompts.
BY_SESSION = {"vllm-consistent-hash"}

# Those that tell each other what they have at each worker, and without events what they have placed.
PEERS = {"keyway-text-x4", "keyway-text-x8", "keyway-events-x4"}

# Whose names the workers' gauges have: SGLang's count the prompt tokens that wait, vLLM's requests alone.
GAUGES = {"keyway-events-x4-tokens": "sglang"}

# Seconds of the trace from one look at a worker's gauges to the next; four of it where they count tokens.
LOOK_S = 1.0

# Seconds of the trace from one word of a gateway's peers to the next.
PEERS_S = 0.05


def command(name, fleet, block, port, peers, args, files):
    """The command line of one router in front of `fleet`, a list of (url, events, replay) whose caches have blocks of `block` tokens,
    beside those at the ports `peers`; its files are named `files`."""
    urls = [url for url, _, _ in fleet]
    if name in KEYWAY:
        config = args.scratch / f"{files}.toml"
        # As gateways that share workers do: so they agree where a new prefix begins.
        key = args.scratch / "hash.key"
        key.write_text("one key for all")
        config.write_text(_keyway(name, fleet, port, peers, args.speed, key))
        return [str(args.bin_dir / "keyway"), "--config", str(config)]
    listen = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(port + 1)]
    if name in SGLANG:
        return [str(args.scratch / "sglang/bin/sglang-router"), "launch", "--worker-urls", *urls, *listen, *SGLANG[name]]
    if name in SMG:
        command = [str(args.scratch / "smg/bin/smg"), "launch", "--worker-urls", *urls, *listen, "--log-level", "warn"]
        return [*command, "--backend", "vllm", *SMG[name]]
    options = list(VLLM[name])
    if name in BY_EVENTS:
        options += ["--kv-event-block-size", str(block), "--kv-event-model", "mock"]
        for url, events, replay in fleet:
            options += ["--kv-event-source", f"{url}={events}", "--kv-event-replay-source", f"{url}={replay}"]
    return [str(args.scratch / "vllm/bin/vllm-router"), "--worker-urls", *urls, *listen, *options]


def _keyway(name, fleet, port, peers, speed, key):
    lines = [f'listen = "127.0.0.1:{port}"', f'admin_listen = "127.0.0.1:{port + 1}"']
    lines.append(f'policy = "{KEYWAY[name]}"')
    lines += ["[routing]", "expose = true"]
    if name in TOGETHER:
        lines += [f"load_scrape_ms = {1000 * LOOK_S / speed:.0f}", f'hash_key_file = "{key}"']
    if name in PEERS:
        # Its own address is among them, as where a name has those of all.
        urls = [f"http://127.0.0.1:{peer + 1}" for peer in peers]
        lines += ["[peers]", f"urls = {urls}", f"every_ms = {max(10, 1000 * PEERS_S / speed):.0f}"]
    for url, events, replay in fleet:
        lines += ["[[worker]]", f'url = "{url}"']
        if name in BY_EVENTS:
            lines += [f'kv_events = "{events}"', f'kv_replay = "{replay}"']
    if name in BY_EVENTS:
        # Prompts come as ids; any tokenizer tells the gateway that the model is one with tokens.
        lines += ["[[model]]", 'name = "mock"', 'tokenizer = "random"']
    return "\n".join(lines) + "\n"
