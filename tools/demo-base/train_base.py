#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains the demo base on make_corpus.py's text, in two phases, and writes it as a Hugging Face directory.

    train_base.py stories  --output_dir STORIES_DIR [--threads 2]
    train_base.py passages --start_from STORIES_DIR --output_dir demo/base [--threads 1]

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
# Each phase: {set: documents}, epochs, tokens per step, peak learning rate.
PHASES = {
    "stories": ({"stories": make_corpus.N_STORIES}, 4, 4096, 4e-3),
    "passages": ({"stories": 1000, "passages": make_corpus.N_PASSAGES}, 2, 2048, 2e-3),
}
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
    return weights


def batches(rows, n_tokens, rng):
    """One epoch: rows of like length together, at most n_tokens with padding, in random order."""
    order = sorted(rows, key=lambda row: len(row[0]) + rng.random())
    cut, current = [], []
    for row in order:
        if (len(current) + 1) * len(row[0]) > n_tokens:
            cut.append(current)
            current = []
        current.append(row)
    cut.append(current)
    rng.shuffle(cut)
    return cut


def learning_rate_share(step, n_steps):
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / (n_steps - WARMUP_STEPS)
    return (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def train(weights, train_rows, validation_rows, phase):
    _, n_epochs, n_tokens, peak = PHASES[phase]
    rng = random.Random(SEED)
    for weight in weights.values():
        weight.requires_grad_()
    model = llama.Llama(CONFIG, weights)
    matrices = [w for w in weights.values() if w.dim() == 2]
    vectors = [w for w in weights.values() if w.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": WEIGHT_DECAY},
                                   {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.95))
    plan = [batch for _ in range(n_epochs) for batch in batches(train_rows, n_tokens, rng)]
    started = time.monotonic()
    for step, rows in enumerate(plan):
        for group in optimizer.param_groups:
            group["lr"] = peak * learning_rate_share(step, len(plan))
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


def rows_of(documents, tokenizer):
    """[(ids, labels)]: BOS, the document, EOS; every token counts."""
    sequences = [encoded.ids + [CONFIG["eos_token_id"]] for encoded in tokenizer.encode_batch(documents)]
    return [(ids, ids) for ids in sequences]


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
    parser.add_argument("phase", choices=list(PHASES))
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--start_from", type=Path, help="a directory of the earlier phase; none: random weights")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    stories, passages, _, _ = make_corpus.make_sets()
    if args.start_from:
        tokenizer = Tokenizer.from_file(str(args.start_from / "tokenizer.json"))
        weights = llama.load_base(args.start_from)[1]
    else:
        tokenizer = train_tokenizer(stories)
        weights = initial_weights(torch.Generator().manual_seed(SEED))
    rows = {name: rows_of(documents, tokenizer) for name, documents in (("stories", stories), ("passages", passages))}
    validation = {name: table[:N_VALIDATION] for name, table in rows.items()}
    train_rows = [row for name, n in PHASES[args.phase][0].items() for row in rows[name][N_VALIDATION:n]]
    print(f"{sum(len(ids) for ids, _ in train_rows)} tokens, {sum(w.numel() for w in weights.values())} parameters",
          flush=True)
    write_directory(args.output_dir, tokenizer, train(weights, train_rows, validation[args.phase], args.phase))

    config, stored = llama.load_base(args.output_dir)
    for title, held in (("BF16", stored), ("FP8 rows", llama.with_fp8_base(stored))):
        losses = ", ".join(f"{name} {llama.mean_loss(llama.Llama(config, held), table):.4f}"
                           for name, table in validation.items())
        print(f"validation loss, {title}: {losses}")


if __name__ == "__main__":
    main()
