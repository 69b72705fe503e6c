"""Holds a running worker with the built-in model to Hugging Face's own code: equal answers to every question, greedily.

    keyway-worker --listen 127.0.0.1:8000 &
    python check.py [--url http://127.0.0.1:8000]

Prints how many answers are equal, how many are right, and each difference; exits with 1 if there is one.
"""

import argparse
import json
import sys
import urllib.request

import torch
import transformers

import data


def worker_answer(url, question):
    body = json.dumps({"messages": [{"role": "user", "content": question}]}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def reference_answers(questions):
    """What transformers generates from the directory's files, in float32."""
    folder = data.HERE / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for question in questions:
        messages = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        out = model.generate(**ids, do_sample=False, max_new_tokens=128)
        yield tokenizer.decode(out[0, ids["input_ids"].shape[1]:], skip_special_tokens=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--held-out", action="store_true", help="ask the held-out questions instead")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="ask only every N-th question")
    args = parser.parse_args()
    asked = [(q, e.answer) for e in data.entries() for q in (e.held_out if args.held_out else [e.question])]
    asked = asked[:: args.every]
    equal = right = 0
    for (question, answer), reference in zip(asked, reference_answers([q for q, _ in asked])):
        said = worker_answer(args.url, question)
        equal, right = equal + (said == reference), right + (said == answer)
        if said != reference:
            print(f"{question}\n  worker:       {said}\n  transformers: {reference}")
    print(f"{len(asked)} questions: {equal} answers equal to transformers', {right} word for word right")
    sys.exit(equal != len(asked))


if __name__ == "__main__":
    main()
