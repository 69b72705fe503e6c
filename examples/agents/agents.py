#!/usr/bin/env python3
"""Agents of one team, each with a growing history: prints for every step how much of its prompt was cached."""

import argparse
import concurrent.futures

import openai

INSTRUCTIONS = "You are one of a team that keeps a fleet of inference servers running. " + " ".join(
    f"Rule {i}: look at the numbers of server {i} before you change it." for i in range(24))


def agent(client, model, name, steps):
    """Takes the steps of one agent, one after the other; yields of each the tokens of its prompt, and of those the cached ones."""
    history = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": f"You are agent {name}. Begin."}]
    for step in range(steps):
        answer = client.chat.completions.create(model=model, messages=history, max_tokens=16, prompt_cache_key=f"agent-{name}")
        usage = answer.usage
        cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
        yield usage.prompt_tokens, cached or 0
        # What a tool would have said.
        observation = " ".join(f"server {i}: {(step + i) % 7} requests wait." for i in range(8))
        history += [{"role": "assistant", "content": answer.choices[0].message.content or "..."},
                    {"role": "user", "content": f"Observation {step}: {observation}"}]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8080/v1", help="base URL [%(default)s]")
    parser.add_argument("--key", default="none", help="API key, where the gateway asks for one")
    parser.add_argument("--agents", type=int, default=4, help="[%(default)s]")
    parser.add_argument("--steps", type=int, default=4, help="[%(default)s]")
    args = parser.parse_args()
    client = openai.OpenAI(base_url=args.url, api_key=args.key)
    model = client.models.list().data[0].id
    with concurrent.futures.ThreadPoolExecutor(args.agents) as pool:
        runs = list(pool.map(lambda name: list(agent(client, model, name, args.steps)), range(args.agents)))
    for name, steps in enumerate(runs):
        for step, (prompt, cached) in enumerate(steps):
            print(f"agent {name}, step {step}: {cached} of {prompt} prompt tokens cached")
    later = [numbers for steps in runs for numbers in steps[1:]]
    share = sum(cached for _, cached in later) / max(1, sum(prompt for prompt, _ in later))
    print(f"after the first steps: {share:.0%} cached")


if __name__ == "__main__":
    main()
