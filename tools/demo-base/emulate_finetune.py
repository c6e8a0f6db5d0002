#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What `ballast train demo/demo.yaml` should come to, said in PyTorch: LoRA over the FP8 rows of the demo base.

    emulate_finetune.py demo/demo.yaml [--key value ...]     from the repository root

Prints the loss, the share of validation rows that come out right, and three generations, before and after.
Not a bit-for-bit reference: the order of the rows and the draws of A are its own.
"""

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer

import llama

N_SHOWN = 3
N_NEW = 40      # a bill is shorter and ends by itself


def read_flat_yaml(path):
    """`key: value` lines, as demo.yaml has them; values stay text."""
    lines = (line.split("#")[0].strip() for line in Path(path).read_text().splitlines())
    return dict(line.split(": ", 1) for line in lines if line)


def read_rows(path, tokenizer, eos):
    """[(prompt ids, completion ids)]; the prompt starts with BOS, the completion ends with EOS."""
    table = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return [(tokenizer.encode(row["prompt"]).ids,
             tokenizer.encode(row["completion"], add_special_tokens=False).ids + [eos]) for row in table]


def masked(rows):
    """[(ids, labels)]: the loss counts completions only."""
    return [(prompt + answer, [llama.IGNORED_LABEL] * len(prompt) + answer) for prompt, answer in rows]


def new_lora(config, weights, rank, seed):
    generator = torch.Generator().manual_seed(seed)
    lora = {}
    for layer in range(config["num_hidden_layers"]):
        for projection in llama.PROJECTIONS:
            name = f"model.layers.{layer}.{projection}"
            n_out, n_in = weights[name + ".weight"].shape
            a = (torch.rand(rank, n_in, generator=generator) * 2 - 1) / math.sqrt(n_in)
            lora[name] = (a.requires_grad_(), torch.zeros(n_out, rank, requires_grad=True))
    return lora


def batches(rows, n_rows, rng):
    """Full batches without end; a batch may run on into the next epoch."""
    queue = []
    while True:
        while len(queue) < n_rows:
            queue += rng.sample(rows, len(rows))
        yield queue[:n_rows]
        queue = queue[n_rows:]


def train(model, rows, options):
    parameters = [matrix for pair in model.lora.values() for matrix in pair]
    n_steps, n_warmup, peak = int(options["max_steps"]), int(options["warmup_steps"]), float(options["learning_rate"])
    optimizer = torch.optim.AdamW(parameters, lr=peak, weight_decay=float(options["weight_decay"]))
    n_rows = (int(options["per_device_train_batch_size"]) * int(options["gradient_accumulation_steps"])
              * int(options["ranks"]))
    source = batches(rows, n_rows, random.Random(int(options["seed"])))
    for step in range(n_steps):
        progress = (step - n_warmup) / (n_steps - n_warmup)
        share = step / n_warmup if step < n_warmup else 0.5 * (1 + math.cos(math.pi * progress))
        optimizer.param_groups[0]["lr"] = peak * share
        loss = model.loss(*llama.batch_of(next(source)))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, float(options["max_grad_norm"]))
        optimizer.step()
        if step % int(options["logging_steps"]) == 0 or step == n_steps - 1:
            print(f"step {step}  loss {loss.item():.4f}", flush=True)


def report(title, model, validation, tokenizer, eos):
    answers = [model.greedy(prompt, N_NEW, eos) for prompt, _ in validation]
    n_right = sum(answer == wanted for answer, (_, wanted) in zip(answers, validation))
    print(f"\n== {title}: validation loss {llama.mean_loss(model, masked(validation)):.4f}, "
          f"right bills {n_right} of {len(validation)}")
    for answer, (prompt, _) in list(zip(answers, validation))[:N_SHOWN]:
        print(f"[{tokenizer.decode(prompt)}]{tokenizer.decode(answer)}\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    path, overrides = parser.parse_known_args()
    options = read_flat_yaml(path.config)
    options.update(zip((key.lstrip("-") for key in overrides[::2]), overrides[1::2]))
    torch.set_num_threads(int(options["ranks"]) * int(options["threads"]))

    base = options["model_name_or_path"]
    config, weights = llama.load_base(base)
    tokenizer = Tokenizer.from_file(f"{base}/tokenizer.json")
    eos = config["eos_token_id"]
    train_rows, validation = (read_rows(options[key], tokenizer, eos) for key in ("train_file", "validation_file"))
    print(f"{len(train_rows)} rows of {min(len(p + a) for p, a in train_rows)} to "
          f"{max(len(p + a) for p, a in train_rows)} tokens")

    held = llama.with_fp8_base(weights)
    rank = int(options["lora_r"])
    report("base, FP8 rows", llama.Llama(config, held), validation, tokenizer, eos)
    model = llama.Llama(config, held, new_lora(config, held, rank, int(options["seed"])),
                        float(options["lora_alpha"]) / rank)
    started = time.monotonic()
    train(model, masked(train_rows), options)
    print(f"{time.monotonic() - started:.0f} s")
    report("with the adapter", model, validation, tokenizer, eos)


if __name__ == "__main__":
    main()
