#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes demo/golden.json: float64 results of the committed BF16 weights, for tests without outside data.

    make_golden.py demo [--against_transformers]

For each prompt: its ids (with BOS), the mean NLL of ids[1:], the five largest logits behind the last id, the greedy
continuation, and the smallest lead of a greedy winner over the runner-up, which says how much error the continuation
bears. --against_transformers also computes all of it with Hugging Face's code and fails where the two differ.
"""

import argparse
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer

import llama

N_NEW = 24
N_TOP = 5
TOLERANCE = 1e-5    # transformers norms in float32 whatever the weights are
PROMPTS = [
    "Captain Clara Webb took the brig Silver Tern out of Greyhaven at first light. The ship carried",
    "On the third day a thick fog lay on the water. \"Ring the bell,\" said",
    # not in the stories: digits, capitals, contractions, runs of spaces, newlines, two- to four-byte UTF-8
    "We'll SHIP 12345 tons\n\n  of Tee \u2014 \u00e4pfel,\t\u6d77 \U0001f6a2; it's  late.\n",
]


def measure(logits_of, ids, eos):
    with torch.no_grad():
        logits = logits_of(torch.tensor([ids]))[0]
        mean_nll = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])).item()
        top = torch.topk(logits[-1], N_TOP)
        greedy, lead = [], float("inf")
        while len(greedy) < N_NEW and eos not in greedy:
            best = torch.topk(logits_of(torch.tensor([ids + greedy]))[0, -1], 2)
            lead = min(lead, (best.values[0] - best.values[1]).item())
            greedy.append(int(best.indices[0]))
    return {"ids": ids, "mean_nll": mean_nll, "top_ids": top.indices.tolist(), "top_logits": top.values.tolist(),
            "greedy": greedy, "greedy_min_lead": lead}


def transformers_logits(directory):
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(directory, torch_dtype=torch.float64,
                                                 attn_implementation="eager").eval()
    return lambda ids: model(ids).logits


def check(ours, theirs):
    for key in ("ids", "top_ids", "greedy"):
        assert ours[key] == theirs[key], (key, ours[key], theirs[key])
    for a, b in zip([ours["mean_nll"], *ours["top_logits"]], [theirs["mean_nll"], *theirs["top_logits"]]):
        print(f"difference {abs(a - b):.1e}")
        assert abs(a - b) <= TOLERANCE * max(1, abs(a)), (a, b)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demo_dir", type=Path)
    parser.add_argument("--against_transformers", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    base = args.demo_dir / "base"
    config, weights = llama.load_base(base, torch.float64)
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    model = llama.Llama(config, weights)

    cases = []
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt).ids
        assert tokenizer.decode(ids) == prompt
        case = measure(model.logits, ids, config["eos_token_id"])
        if args.against_transformers:
            check(case, measure(transformers_logits(base), ids, config["eos_token_id"]))
        cases.append({"prompt": prompt, **case, "greedy_text": tokenizer.decode(case["greedy"])})
    about = "demo/base (BF16 weights) in float64; ids include BOS; mean_nll over ids[1:]. tools/demo-base/make_golden.py"
    lines = [json.dumps(case) for case in cases]
    (args.demo_dir / "golden.json").write_text(
        json.dumps({"about": about})[:-1] + ",\n \"cases\": [\n" + ",\n".join(lines) + "\n]}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
