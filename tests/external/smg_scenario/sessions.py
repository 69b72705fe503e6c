"""Writes the sessions of SMG's own comparison of gateways, in the format of agents that `simulate` reads.

The distributions are those of `scripts/generate_sim/profiles/local-medium.json` of smg-project/smg, drawn as its
`crates/sim_loadgen` does: lengths by a piecewise linear distribution, half of the sessions with a second turn
unless that is longer than the model's window, which comes some seconds after the first one's answer."""

import argparse
import json
import random

WINDOW = 24_576
SYSTEM = 2_048
SUFFIX = 512
PROMPTS = [(0.0, 256), (0.216, 5_000), (0.530, 10_000), (0.994, 20_000), (1.0, WINDOW)]
ANSWERS = [(0.0, 256), (0.351, 1_000), (0.513, 2_000), (0.998, 5_000), (1.0, 6_144)]


def drawn(points, u):
    """The value below which a share `u` lies."""
    for (low, a), (high, b) in zip(points, points[1:]):
        if u <= high:
            return max(1, round(a + (b - a) * (u - low) / (high - low)))
    return points[-1][1]


def session(number, begins_ms, dice, arguments):
    prompt = max(drawn(PROMPTS, dice.random()), SYSTEM + 1)
    answer = drawn(ANSWERS, dice.random())
    turns = [{"adds": prompt - SYSTEM, "generates": answer}]
    goes_on, think_s = dice.random() < arguments.second_turns, dice.expovariate(1 / arguments.think_seconds)
    if goes_on and prompt + answer + SUFFIX <= WINDOW:
        turns[0]["tools_ms"] = round(think_s * 1e3)
        turns.append({"adds": SUFFIX, "generates": drawn(ANSWERS, dice.random())})
    return {"session": f"s{number}", "begins_ms": begins_ms, "starts_with": [["system", SYSTEM]], "turns": turns}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--rate", type=float, default=611.0, help="sessions a second")
    parser.add_argument("--second-turns", type=float, default=0.5, help="share of sessions")
    parser.add_argument("--think-seconds", type=float, default=3.0, help="mean time before a second turn")
    parser.add_argument("--seed", type=int, default=42)
    arguments = parser.parse_args()
    dice, at, number = random.Random(arguments.seed), 0.0, 0
    while True:
        at += dice.expovariate(arguments.rate)
        if at >= arguments.seconds:
            return
        print(json.dumps(session(number, round(at * 1e3), dice, arguments)))
        number += 1


if __name__ == "__main__":
    main()
