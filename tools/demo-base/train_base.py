#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains the demo base on make_corpus.py's stories and writes it as a Hugging Face directory.

    train_base.py --output_dir demo/base [--epochs 5] [--threads 2]

The seed is fixed. The bits of the result still depend on the PyTorch build and the number of threads; the committed
demo/base is the reference, and what this script writes elsewhere is equal in quality, not in bytes.
"""

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import llama
import make_corpus

SEED = 7
N_VALIDATION = 200
BATCH_TOKENS = 4096
LEARNING_RATE = 4e-3
WARMUP_STEPS = 60
WEIGHT_DECAY = 0.05
MAX_GRAD_NORM = 1.0
VOCAB_SIZE = 1024
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
LLAMA3_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                r"|\s*[\r\n]+|\s+(?!\S)|\s+")

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
    "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "hidden_act": "silu",
    "bos_token_id": VOCAB_SIZE - 2, "eos_token_id": VOCAB_SIZE - 1, "vocab_size": VOCAB_SIZE,
    "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 16, "rms_norm_eps": 1e-5, "initializer_range": 0.02,
    "max_position_embeddings": 2048, "rope_theta": 10000.0,
    # short enough that all three branches of the rule occur among the 8 frequencies
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 256},
    "tie_word_embeddings": True, "use_cache": True,
}


def train_tokenizer(documents):
    """Llama 3's tokenizer with a small vocabulary; its two special tokens come last."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    # Line by line, so that no token joins a full stop to a newline: a prompt that ends in a full stop then has the
    # same ids alone as in front of a completion that starts a new line.
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE - 2, show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator((line for text in documents for line in text.split("\n")), trainer)
    tokenizer.add_special_tokens([BOS, EOS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))])
    assert tokenizer.token_to_id(EOS) == CONFIG["eos_token_id"]
    return tokenizer


def initial_weights(generator):
    """Normal(0, 0.02); what writes into the residual stream is smaller by sqrt(2 x layers)."""
    weights = {}
    for name, shape in llama.tensor_shapes(CONFIG).items():
        if len(shape) == 1:
            weights[name] = torch.ones(shape)
            continue
        std = CONFIG["initializer_range"]
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            std /= math.sqrt(2 * CONFIG["num_hidden_layers"])
        weights[name] = torch.randn(shape, generator=generator) * std
    return {name: w.requires_grad_() for name, w in weights.items()}


def batches(rows, rng):
    """One epoch: rows of like length together, at most BATCH_TOKENS with padding, in random order."""
    order = sorted(rows, key=lambda row: len(row[0]) + rng.random())
    cut, current = [], []
    for row in order:
        if (len(current) + 1) * len(row[0]) > BATCH_TOKENS:
            cut.append(current)
            current = []
        current.append(row)
    cut.append(current)
    rng.shuffle(cut)
    return cut


def learning_rate(step, n_steps):
    if step < WARMUP_STEPS:
        return LEARNING_RATE * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / (n_steps - WARMUP_STEPS)
    return LEARNING_RATE * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def train(train_rows, validation_rows, n_epochs):
    rng = random.Random(SEED)
    weights = initial_weights(torch.Generator().manual_seed(SEED))
    model = llama.Llama(CONFIG, weights)
    matrices = [w for w in weights.values() if w.dim() == 2]
    vectors = [w for w in weights.values() if w.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": WEIGHT_DECAY},
                                   {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.95))
    plan = [batch for _ in range(n_epochs) for batch in batches(train_rows, rng)]
    started = time.monotonic()
    for step, rows in enumerate(plan):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, len(plan))
        loss = model.loss(*llama.batch_of(rows))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(matrices + vectors, MAX_GRAD_NORM)
        optimizer.step()
        if step % 100 == 0 or step == len(plan) - 1:
            print(f"step {step}/{len(plan)}  loss {loss.item():.4f}"
                  f"  validation {llama.mean_loss(model, validation_rows):.4f}"
                  f"  {time.monotonic() - started:.0f} s", flush=True)
    return {name: w.detach() for name, w in weights.items()}


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_directory(where, tokenizer, weights):
    where.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(where / "tokenizer.json"))
    write_json(where / "tokenizer_config.json", {
        "bos_token": BOS, "eos_token": EOS, "clean_up_tokenization_spaces": False,
        "model_max_length": CONFIG["max_position_embeddings"], "tokenizer_class": "PreTrainedTokenizerFast"})
    write_json(where / "config.json", CONFIG)
    write_json(where / "generation_config.json", {
        "bos_token_id": CONFIG["bos_token_id"], "eos_token_id": CONFIG["eos_token_id"], "do_sample": False})
    llama.save_bf16(where / "model.safetensors", weights)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    documents = make_corpus.make_sets()[0]
    tokenizer = train_tokenizer(documents)
    rows = []
    for encoded in tokenizer.encode_batch(documents):
        ids = encoded.ids + [CONFIG["eos_token_id"]]
        rows.append((ids, ids))
    validation_rows, train_rows = rows[:N_VALIDATION], rows[N_VALIDATION:]
    print(f"{sum(len(text.split()) for text in documents)} words, {sum(len(ids) for ids, _ in rows)} tokens, "
          f"{sum(math.prod(s) for s in llama.tensor_shapes(CONFIG).values())} parameters", flush=True)
    weights = train(train_rows, validation_rows, args.epochs)
    write_directory(args.output_dir, tokenizer, weights)

    config, stored = llama.load_base(args.output_dir)
    for name, held in (("BF16", stored), ("FP8 rows", llama.with_fp8_base(stored))):
        print(f"validation loss, {name}: {llama.mean_loss(llama.Llama(config, held), validation_rows):.4f}")


if __name__ == "__main__":
    main()
