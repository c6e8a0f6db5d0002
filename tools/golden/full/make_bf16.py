#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Losses of PyTorch's mixed-precision trainings of every weight, beside which Ballast's in bf16 are compared with float64.

The cases, rows and optimizer of make_golden.py; weights, gradients and AdamW in fp32, and

  autocast   model and loss under torch.autocast('cpu', dtype=torch.bfloat16), as transformers' Trainer has them with bf16=True:
             the residual stream and the norms stay in fp32
  fsdp       the model computes with a copy of the weights in bf16, activations in bf16, as FSDP's MixedPrecision with
             param_dtype=torch.bfloat16 has them

Each case is trained in fp32, too, which must follow the float64 reference. Made with torch 2.15, transformers 5.24 (`versions`
in the output).

usage: make_bf16.py > ../../../tests/golden/full/bf16.json
"""
import json
import os
import sys

import numpy as np
import torch
import transformers

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, '..', 'families'), os.path.join(HERE, '..', 'train')]
import checkpoint  # noqa: E402
import reference  # noqa: E402
from importlib import util  # noqa: E402

IGNORED = -100


def load(path, name):
    spec = util.spec_from_file_location(name, path)
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def model_of(full, case):
    """In fp32, unmodified classes, attention sdpa."""
    families, directory = full.families, os.path.join(full.ROOT, 'tests', 'golden', 'train', case['model'])
    kind = case['class']
    config = families.class_of(kind).config_class.from_pretrained(directory)
    model = families.class_of(kind)._from_config(config, attn_implementation='sdpa').float().eval()
    stored = checkpoint.read_safetensors(os.path.join(directory, 'model.safetensors'))
    with torch.no_grad():
        for name, p in model.named_parameters():
            key = families.stored_name(kind, name)
            if key not in stored and config.tie_word_embeddings:
                key = 'lm_head.weight'
            p.copy_(torch.from_numpy(checkpoint.widen(*stored[key]).astype(np.float32)))
    return model


def fsdp(model):
    """The model with bf16 casts of its parameters, and of its tied ones once; gradients go to the fp32 ones."""
    copies = {n: p.to(torch.bfloat16) for n, p in model.named_parameters()}
    return lambda **inputs: torch.func.functional_call(model, copies, kwargs=inputs, tie_weights=True)


def loss_of(model, rows, is_half):
    """The mean over the labels of all rows; a row at a time, so that there is no padding."""
    total, n = 0, 0
    for row in rows:
        more = {}
        if 'document_ids' in row:
            positions, mask = reference.attention_inputs(row, torch.bfloat16 if is_half else torch.float32)
            more = {'position_ids': positions, 'attention_mask': mask}
        logits = model(input_ids=torch.tensor([row['input_ids']]), use_cache=False, **more).logits[0, :-1].float()
        labels = torch.tensor(row['labels'][1:])
        if 'document_ids' in row:
            documents = torch.tensor(row['document_ids'])
            labels = torch.where(documents[1:] == documents[:-1], labels, torch.tensor(IGNORED))
        total = total + torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction='sum')
        n += int((labels != IGNORED).sum())
    return total / n


def train(full, case, way):
    config, model = case['config'], model_of(full, case)
    rows = reference.read_rows(os.path.join(full.ROOT, 'tests', 'golden', 'train', case['tokens']))
    parameters = dict(model.named_parameters())
    optimizer = full.optimizer_of(model, parameters, config)
    scheduler = transformers.get_scheduler(config['lr_scheduler_type'], optimizer, num_warmup_steps=config['warmup_steps'],
                                           num_training_steps=config['max_steps'])
    losses = []
    for step in range(config['max_steps']):
        optimizer.zero_grad()
        with torch.autocast('cpu', dtype=torch.bfloat16, enabled=way == 'autocast'):
            called = fsdp(model) if way == 'fsdp' else model
            loss = loss_of(called, reference.step_rows(rows, step, case['batch']), way == 'fsdp')
        loss.backward()
        if config['max_grad_norm'] > 0:
            torch.nn.utils.clip_grad_norm_([p for p in parameters.values() if p.grad is not None], config['max_grad_norm'])
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    return losses


def deviations(losses, expected):
    off = [abs(a / b - 1) for a, b in zip(losses, expected)]
    return off[0], sum(off) / len(off), max(off)


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    full = load(os.path.join(HERE, 'make_golden.py'), 'full_golden')
    cases = {}
    for name, case in full.CASES.items():
        if name in full.FROZEN:
            continue
        with open(os.path.join(full.ROOT, 'tests', 'golden', 'full', 'cases', name, 'case.json')) as file:
            expected = [step['loss'] for step in json.load(file)['expect']['steps']]
        losses = {way: train(full, case, way) for way in ('fp32', 'autocast', 'fsdp')}
        off = {way: deviations(losses[way], expected) for way in losses}
        print('%-22s' % name, '  '.join('%s: first %.1e mean %.1e worst %.1e' % (way, *off[way]) for way in off),
              file=sys.stderr, flush=True)
        assert off['fp32'][0] < 1e-6 and off['fp32'][2] < 1e-5, 'fp32 does not follow the reference: ' + name
        cases[name] = {way: losses[way] for way in ('autocast', 'fsdp')}
    json.dump({'versions': {'torch': torch.__version__, 'transformers': transformers.__version__, 'numpy': np.__version__},
               'cases': cases}, sys.stdout, indent=2)
    print()


if __name__ == '__main__':
    main()
