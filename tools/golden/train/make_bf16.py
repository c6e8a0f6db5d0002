#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Losses of PyTorch's bf16 trainings, beside which Ballast's are compared with the float64 reference.

usage: make_bf16.py > ../../../tests/golden/train/bf16.json

For each case below: the model and its products in bf16, attention sdpa, LoRA as PEFT makes it for such a model (its weights, gradients
and AdamW in fp32, its terms in bf16 under no autocast: PEFT casts their input), rows, batches and optimizer of the case's file. The
loss is the mean cross-entropy over the labels, from logits cast to fp32, as transformers takes it. Made with torch 2.15, transformers
5.23, peft 0.21 (`versions` in the output).
"""
import json
import os
import sys

import numpy
import peft
import torch
import transformers

HERE = os.path.dirname(os.path.abspath(__file__))
GOLDEN = os.path.join(HERE, '../../../tests/golden/train')
CASES = ('tiny-all-linear', 'tiny-mha-tied')


def load_adapter(model, directory):
    from safetensors.numpy import load_file
    with open(os.path.join(directory, 'adapter_config.json')) as file:
        config = json.load(file)
    model = peft.get_peft_model(model, peft.LoraConfig(
        r=config['r'], lora_alpha=config['lora_alpha'], lora_dropout=0.0, target_modules=config['target_modules'],
        task_type='CAUSAL_LM'))
    tensors = load_file(os.path.join(directory, 'adapter_model.safetensors'))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad:
                assert p.dtype == torch.float32, 'PEFT keeps adapters of a bf16 model in fp32'
                p.copy_(torch.from_numpy(tensors.pop(name.replace('.default.', '.'))))
    assert not tensors
    return model


def loss_of(model, rows):
    """The mean over the labels of all rows; a row at a time, so that there is no padding."""
    total, n = 0, 0
    for row in rows:
        logits = model(input_ids=torch.tensor([row['input_ids']])).logits[0, :-1].float()
        labels = torch.tensor(row['labels'][1:])
        total = total + torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction='sum')
        n += int((labels != -100).sum())
    return total / n


def train(name, dtype):
    with open(os.path.join(GOLDEN, 'cases', name, 'case.json')) as file:
        case = json.load(file)
    c = case['config']
    model = transformers.AutoModelForCausalLM.from_pretrained(
        os.path.join(GOLDEN, case['model']['path']), dtype=dtype, attn_implementation='sdpa')
    model = load_adapter(model, os.path.join(GOLDEN, c['init_adapter'])).eval()
    with open(os.path.join(GOLDEN, c['train_file'])) as file:
        rows = [json.loads(line) for line in file if line.strip()]
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=c['learning_rate'], betas=(c['adam_beta1'], c['adam_beta2']), eps=c['adam_epsilon'],
                                  weight_decay=c['weight_decay'])
    batch, losses = c['per_device_train_batch_size'], []
    for step in range(c['max_steps']):
        chosen = [rows[(step * batch + i) % len(rows)] for i in range(batch)]
        optimizer.zero_grad()
        loss = loss_of(model, chosen)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, c['max_grad_norm'])
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, [step['loss'] for step in case['expect']['steps']]


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    cases = {}
    for name in CASES:
        plain, reference = train(name, torch.float32)
        worst = max(abs(a / b - 1) for a, b in zip(plain, reference))
        assert worst < 1e-4, 'fp32 does not follow the reference: %s, %g' % (name, worst)
        cases[name] = {'losses': train(name, torch.bfloat16)[0]}
    json.dump({'versions': {'torch': torch.__version__, 'transformers': transformers.__version__, 'peft': peft.__version__,
                            'numpy': numpy.__version__}, 'cases': cases}, sys.stdout, indent=2)
    print()


main()
