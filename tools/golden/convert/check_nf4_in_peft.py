#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the loss and the gradients of a first step over an NF4 base with those of PEFT and bitsandbytes, in float32.

usage: check_nf4_in_peft.py MODEL ADAPTER ROWS.jsonl GRADIENTS.safetensors LOSS

MODEL: of `ballast quantize`, from float32 projections. ROWS: input_ids and labels. GRADIENTS and LOSS: of `ballast train` with
init_adapter ADAPTER, dump_gradients and all rows in one micro-batch. Prints the relative difference of the losses and the largest
one of a gradient tensor, by its norm. Exit 1 when they are above 1e-6 and 1e-5; 77 without the packages.
"""
import json
import os
import sys

os.environ['HF_HUB_OFFLINE'] = '1'
try:
    import bitsandbytes
    import peft
    import torch
    import transformers
    from safetensors.torch import load_file
except ImportError as e:
    print('skipped: %s' % e, file=sys.stderr)
    sys.exit(77)

model_dir, adapter, rows, gradients, loss = sys.argv[1:]
model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
for p in model.parameters():
    if not hasattr(p, 'quant_state'):
        p.data = p.data.float()
for module in model.modules():
    if isinstance(module, bitsandbytes.nn.Linear4bit):
        module.compute_dtype = torch.float32
model = peft.PeftModel.from_pretrained(model, adapter, is_trainable=True).train()  # in eval mode its CPU kernel has bfloat16

with open(rows) as f:
    rows = [json.loads(line) for line in f if line.strip()]
n_labels = sum(x != -100 for r in rows for x in r['labels'][1:])
theirs = 0
for r in rows:
    logits = model(input_ids=torch.tensor([r['input_ids']])).logits[0, :-1]
    part = torch.nn.functional.cross_entropy(logits, torch.tensor(r['labels'][1:]), reduction='sum') / n_labels
    part.backward()
    theirs += part.item()
ours = load_file(gradients)
wanted = {n.replace('.default', ''): p.grad for n, p in model.named_parameters() if p.grad is not None}
if set(wanted) != set(ours):
    raise SystemExit('other tensors: %s' % sorted(set(wanted) ^ set(ours)))
worst = max(((ours[n] - g).norm() / g.norm()).item() for n, g in wanted.items())
difference = abs(float(loss) / theirs - 1)
print('%d gradients: losses %.9g and %.9g differ by %.1e, gradients by at most %.1e' % (len(ours), float(loss), theirs, difference, worst))
sys.exit(not (difference < 1e-6 and worst < 1e-5))
