#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a Hugging Face model on Alpaca rows over a quantized, paged base, with HF's Trainer.

    python finetune.py MODEL ROWS.json OUT [--format fp8_row] [--offload_ratio 1 --tier disk --dir D]
    torchrun --nproc-per-node 2 finetune.py MODEL ROWS.json OUT --shard

The adapter in OUT is PEFT's: peft.PeftModel.from_pretrained(model, OUT) reads it.
"""
import argparse
import json
import os

import torch
from torch.distributed import init_process_group
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import ballast.torch as bt

PROMPT = "### Instruction:\n{instruction}\n\n{input}\n\n### Response:\n"


def encode(tokenizer, row, length):
    """Token ids and labels: only the response is trained."""
    prompt = tokenizer(PROMPT.format(**{"input": "", **row}))["input_ids"]
    answer = tokenizer(row["output"], add_special_tokens=False)["input_ids"]
    ids = (prompt + answer + [tokenizer.eos_token_id])[:length]
    labels = ([-100] * len(prompt) + ids[len(prompt):])[:length]
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("rows")
    parser.add_argument("out")
    parser.add_argument("--format", default="fp8_row")
    parser.add_argument("--offload_ratio", type=float, default=0)
    parser.add_argument("--tier", default="host")
    parser.add_argument("--dir")
    parser.add_argument("--shard", action="store_true", help="shard the base over torchrun's processes")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--length", type=int, default=512)
    args = parser.parse_args()

    if args.shard:
        init_process_group("gloo")
    base = bt.Base(format=args.format, offload_ratio=args.offload_ratio, tier=args.tier,
                   dir=args.dir, shard_group="world" if args.shard else None)
    with bt.init(base=base, lora=bt.LoRA(r=16, alpha=32)):
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    with open(args.rows) as file:
        rows = [encode(tokenizer, row, args.length) for row in json.load(file)]
    rows = [row for row in rows if (row["labels"] >= 0).any()]
    trainer = Trainer(model=model, train_dataset=rows, args=TrainingArguments(
        output_dir=args.out, max_steps=args.steps, per_device_train_batch_size=1,
        gradient_accumulation_steps=2, learning_rate=2e-4, logging_steps=1, save_strategy="no",
        report_to=[], use_cpu=not torch.cuda.is_available()))
    trainer.train()
    if trainer.is_world_process_zero():
        bt.save_adapter(model, args.out)
        print(bt.stats(model))


if __name__ == "__main__":
    main()
