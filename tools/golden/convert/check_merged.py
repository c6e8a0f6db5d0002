#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Opens model directories with transformers and prints their losses on rows of tokens; maps their tensors to GGUF names.

usage: check_merged.py DIR TOKENS.jsonl [DIR TOKENS.jsonl ...]

A line for each: DIR, loss (mean over labels, float32 weights as stored, dequantized), and the number of tensors with a GGUF name
("none" without the package gguf); or DIR, "skipped" and the package that is missing: for FP8, compressed-tensors. Exit 1 when
transformers misses a tensor, finds one that it does not know, or a tensor has no GGUF name; 77 without PyTorch and transformers.
"""
import json
import os
import re
import sys

os.environ['HF_HUB_OFFLINE'] = '1'
try:
    import torch
    import transformers
except ImportError as e:
    print('skipped: %s' % e, file=sys.stderr)
    sys.exit(77)

# transformers' model_type to gguf's architecture, where the names differ.
GGUF_NAMES = {'mistral': 'llama', 'seed_oss': 'seed_oss', 'ministral3': 'mistral3'}


def load(directory, config):
    options = {}
    if 'quantization_config' in config:
        import compressed_tensors  # noqa: F401
        options['quantization_config'] = transformers.CompressedTensorsConfig(run_compressed=False)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True, **options)
    wrong = {k: sorted(map(str, v)) for k, v in info.items() if v and k != 'error_msgs'}
    if wrong:
        raise SystemExit('%s: transformers says %s' % (directory, wrong))
    return model.eval()


def row_loss(model, row):
    """Sum over the labels of one row, which predict the next token, and their number."""
    ids, labels = torch.tensor([row['input_ids']]), torch.tensor(row.get('labels', row['input_ids']))
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, :-1].double()
    counted = labels[1:] != -100
    loss = torch.nn.functional.cross_entropy(logits[counted], labels[1:][counted], reduction='sum')
    return loss.item(), int(counted.sum())


def map_names(directory, config):
    """The tensors with a GGUF name, as llama.cpp's converter asks for them. FP8 scales are no tensors there: it multiplies them in."""
    try:
        import gguf
    except ImportError:
        return None
    from safetensors import safe_open
    name = GGUF_NAMES.get(config['model_type'], config['model_type'])
    arch = next(a for a, text in gguf.MODEL_ARCH_NAMES.items() if text.replace('-', '_') == name)
    names = gguf.get_tensor_name_map(arch, config['num_hidden_layers'])
    files = [f for f in os.listdir(directory) if f.endswith('.safetensors')]
    tensors = [t for f in files for t in safe_open(os.path.join(directory, f), 'np').keys()]
    weights = [t for t in tensors if not re.search(r'_scale$', t)]
    unknown = [t for t in weights if names.get_name(t, try_suffixes=('.weight', '.bias')) is None]
    if unknown:
        raise SystemExit('%s: no GGUF name of %s for %s' % (directory, name, unknown))
    return len(weights)


def check(directory, tokens):
    with open(os.path.join(directory, 'config.json')) as f:
        config = json.load(f)
    n_mapped = map_names(directory, config)
    try:
        model = load(directory, config)
    except ImportError as e:
        return 'skipped %s' % e
    with open(tokens) as f:
        sums = [row_loss(model, json.loads(line)) for line in f if line.strip()]
    return '%.12g %s' % (sum(s for s, _ in sums) / sum(n for _, n in sums), 'none' if n_mapped is None else n_mapped)


def main():
    for directory, tokens in zip(sys.argv[1::2], sys.argv[2::2]):
        print(directory, check(directory, tokens), flush=True)


main()
