#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Loads an adapter that Ballast wrote with PEFT's own PeftModel.from_pretrained and prints its loss in float64.

usage: check_adapter_in_peft.py ADAPTER_DIR BASE_DIR TOKENS.jsonl [--base_format stored|auto|fp8_row|fp8_block]

One JSON line: loss (the adapter's), base_loss, labels, tensors. Exit 1 when a tensor is missing, unknown, of another shape, or not
the value that the file has; 77 when PyTorch, transformers or peft is missing.
"""
import argparse
import json
import os
import sys

os.environ['HF_HUB_OFFLINE'] = '1'
try:
    import torch
    import reference
    from peft import PeftModel
except ImportError as e:
    print('skipped: %s' % e, file=sys.stderr)
    sys.exit(77)


def check_tensors(model, directory):
    """PEFT ignores tensors it does not know, and leaves those it misses as they start: look at each value."""
    _, stored = reference.read_adapter(directory)
    loaded = {n.replace('.modules_to_save.default.', '.').replace('.default.', '.').removesuffix('.default'): p
              for n, p in model.named_parameters() if '.lora_' in n or '.modules_to_save.' in n}
    if set(loaded) != set(stored):
        raise SystemExit('%s: only in PEFT or only in the file: %s' % (directory, sorted(set(loaded) ^ set(stored))))
    for name, value in stored.items():
        if tuple(loaded[name].shape) != value.shape or not torch.equal(loaded[name], torch.from_numpy(value.copy()).double()):
            raise SystemExit('%s: PEFT holds other values in %s' % (directory, name))
    return len(stored)


def main():
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    p.add_argument('adapter')
    p.add_argument('base')
    p.add_argument('tokens')
    p.add_argument('--base_format', default='stored', choices=('stored', 'auto', 'fp8_row', 'fp8_block'))
    a = p.parse_args()
    reference.float64_llama()
    rows = reference.read_rows(a.tokens)
    base = reference.load_llama(a.base, a.base_format)
    base_loss = reference.evaluate(base, rows)
    model = PeftModel.from_pretrained(base, a.adapter).double().eval()
    n_tensors = check_tensors(model, a.adapter)
    print(json.dumps({'loss': reference.evaluate(model, rows), 'base_loss': base_loss,
                      'labels': sum(reference.row_labels(r) for r in rows), 'tensors': n_tensors}))


main()
