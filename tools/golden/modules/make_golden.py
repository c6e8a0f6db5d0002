#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes tests/golden/modules: float64 results of short LoRA trainings with PEFT's modules_to_save, and with LoRA terms of the
embedding and the head.

The models are those of tests/golden/train and of tests/golden/families. PEFT makes the adapter that each training starts from, and saves it (adapters/):
the files are as PEFT writes them, with the base weights of a targeted embedding or head. LoRA weights are random, and modules_to_save differ from the base, so that reading them
counts. AdamW, clipping and schedule as in ../full; which parameters have no weight decay is what transformers' Trainer says.

Made with Python 3.11.2, torch 2.15.0, transformers 5.24.0, peft 0.21.2; other versions of transformers are refused.

usage: make_golden.py [--out DIR] [--only CASE ...]
"""
import argparse
import importlib.util
import math
import os
import re
import shutil

import numpy as np
import torch
import transformers
from peft import LoraConfig, get_peft_model

HERE = os.path.dirname(os.path.abspath(__file__))
spec = importlib.util.spec_from_file_location('full_golden', os.path.join(HERE, '..', 'full', 'make_golden.py'))
full = importlib.util.module_from_spec(spec)
spec.loader.exec_module(full)
reference, families, inputs = full.reference, full.families, full.inputs

CONFIG = {k: v for k, v in full.CONFIG.items() if k not in ('finetuning_type', 'max_steps')}
CONFIG.update({'learning_rate': 5e-3, 'max_steps': 20, 'base_format': 'stored'})
FLOAT32 = torch.from_numpy(np.zeros(1, np.float32)).dtype  # torch.float32 will be float64 (families.use_float64)
R, ALPHA, TARGETS = 4, 8, ['q_proj', 'v_proj', 'down_proj']
FALCON = ['query_key_value', 'dense_4h_to_h']
TABLES = ['embed_tokens', 'lm_head']
# base, modules_to_save, targets (absent: TARGETS), other keys of LoraConfig. A base of FAMILIES is one of tests/golden/families.
FAMILIES = ('falcon-one-norm', 'granite', 'olmo2', 'qwen3-tied')
CASES = {
    'norms': ('tiny-gqa', ['norm']),
    'final-norm': ('tiny-llama3-rope', ['model.norm']),
    'tables': ('tiny-gqa', ['embed_tokens', 'lm_head']),
    'head-and-norms': ('tiny-gqa', ['lm_head', 'layernorm']),
    'tied-embedding': ('tiny-mha-tied', ['embed_tokens']),
    'tied-tables': ('tiny-mha-tied', ['embed_tokens', 'lm_head', 'model.norm']),
    'falcon-layernorms': ('falcon-one-norm', ['layernorm', 'ln_f', 'word_embeddings'], FALCON),
    'granite-tables': ('granite', ['embed_tokens', 'lm_head'], TARGETS),
    'olmo2-norms': ('olmo2', ['norm', 'lm_head'], TARGETS),
    'qwen3-norms': ('qwen3-tied', ['norm', 'embed_tokens'], TARGETS),
    'terms': ('tiny-gqa', None, TARGETS + TABLES),
    'terms-of-head': ('tiny-gqa', None, ['q_proj', 'lm_head'], {'use_rslora': True}),
    'terms-of-embedding': ('tiny-gqa', None, '.*(v_proj|embed_tokens)'),
    'terms-beside-modules': ('tiny-gqa', ['norm', 'lm_head'], ['q_proj'] + TABLES),
    'tied-terms': ('tiny-mha-tied', None, TARGETS + TABLES),
    'falcon-terms': ('falcon-one-norm', None, FALCON + ['word_embeddings', 'lm_head']),
    'granite-terms': ('granite', None, TARGETS + TABLES),
    'qwen3-terms': ('qwen3-tied', ['norm'], TARGETS + ['lm_head']),
}


def file_name(name):
    return re.sub(r'\.default$', '', name.replace('.modules_to_save.default.', '.').replace('.default.', '.'))


def trained(model):
    return {file_name(n): p for n, p in model.named_parameters() if p.requires_grad}


def make_adapter(model, saved, targets, more, directory, seed):
    """Written by PEFT in float32."""
    model = get_peft_model(model.to(FLOAT32), LoraConfig(r=R, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=targets,
                                                     modules_to_save=saved, task_type='CAUSAL_LM', **more)).to(FLOAT32)
    for i, (n, p) in enumerate(sorted(trained(model).items())):
        rng = np.random.Generator(np.random.PCG64([seed, i]))
        with torch.no_grad():
            if 'lora_A' in n:
                value = rng.uniform(-1, 1, tuple(p.shape)) / np.sqrt(p.shape[1])
            else:
                value = 0.05 * rng.standard_normal(tuple(p.shape)) + (0 if 'lora_' in n else p.numpy())
            p.copy_(torch.from_numpy(value.astype(np.float32)))
    shutil.rmtree(directory, ignore_errors=True)
    model.save_pretrained(directory)
    os.remove(os.path.join(directory, 'README.md'))
    return model.double().eval()


def train(model, rows, batch, config):
    parameters = trained(model)
    decayed = {file_name(n) for n in transformers.Trainer.get_decay_parameter_names(None, model)}
    groups = [{'params': [p for n, p in parameters.items() if (n in decayed) == d], 'weight_decay': config['weight_decay'] if d else 0.0}
              for d in (True, False)]
    optimizer = torch.optim.AdamW([g for g in groups if g['params']], lr=config['learning_rate'], eps=config['adam_epsilon'],
                                  betas=(config['adam_beta1'], config['adam_beta2']))
    start = {n: p.detach().numpy().copy() for n, p in parameters.items()}
    steps, first = [], None
    for step in range(config['max_steps']):
        optimizer.zero_grad()
        loss = reference.backward(model, reference.step_rows(rows, step, batch))
        if first is None:
            first = {n: p.grad.numpy().copy() for n, p in parameters.items()}
        norm = math.sqrt(sum(float((p.grad ** 2).sum()) for p in parameters.values()))
        if config['max_grad_norm'] > 0:
            torch.nn.utils.clip_grad_norm_(parameters.values(), config['max_grad_norm'])
        steps.append({'loss': loss, 'grad_norm': norm, 'learning_rate': config['learning_rate']})
        optimizer.step()
    final = {n: p.detach().numpy() for n, p in parameters.items()}
    return {'first_loss': steps[0]['loss'], 'steps': steps, 'gradients': families.summary(first),
            'final_adapter': families.summary(final),
            'final_adapter_norm': families.norm(np.concatenate([a.ravel() for a in final.values()])),
            'adapter_change_norm': families.norm(np.concatenate([(final[n] - start[n]).ravel() for n in final]))}


def about(saved, targets):
    """What is trained besides projections."""
    tables = [t for t in TABLES + ['word_embeddings'] if t in targets]
    terms = ['terms of ' + t for t in tables if t not in (saved or [])]
    return ', '.join((saved or []) + terms)


def run_case(out, name, seed):
    base, saved, targets, more = CASES[name] + (TARGETS, {})[len(CASES[name]) - 2:]
    case = full.family(base) if base in FAMILIES else full.tiny(base)
    model = make_adapter(full.load_model(case)[0], saved, targets, more, os.path.join(out, 'adapters', name), seed)
    rows = reference.read_rows(os.path.join(full.ROOT, 'tests', 'golden', 'train', case['tokens']))
    expect = train(model, rows, case['batch'], CONFIG)
    config = {**CONFIG, 'init_adapter': '../modules/adapters/' + name, 'train_file': case['tokens']}
    os.makedirs(os.path.join(out, 'cases', name), exist_ok=True)
    inputs.write_json(os.path.join(out, 'cases', name, 'case.json'), {
        'name': name, 'about': about(saved, targets), 'model': {'root': 'golden', 'path': case['model']}, 'config': config, 'files': {},
        'topologies': full.topologies(case['batch'], case['ranks']), 'expect': expect})
    print('%-16s loss %.6f -> %.6f, gradient norm %.4f' % (
        name, expect['first_loss'], expect['steps'][-1]['loss'], expect['steps'][0]['grad_norm']), flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    p.add_argument('--out', default=os.path.join(full.ROOT, 'tests', 'golden', 'modules'))
    p.add_argument('--only', nargs='+', metavar='CASE')
    a = p.parse_args()
    if transformers.__version__ != families.TRANSFORMERS:
        raise SystemExit('made for transformers %s, not %s' % (families.TRANSFORMERS, transformers.__version__))
    families.use_float64()
    reference.row_logits = full.logits_of
    for seed, name in enumerate(CASES):
        if not a.only or name in a.only:
            run_case(a.out, name, 3000 + seed)
    inputs.write_json(os.path.join(a.out, 'index.json'),
                      {'cases': ['../../modules/cases/' + n for n in sorted(os.listdir(os.path.join(a.out, 'cases')))]})


if __name__ == '__main__':
    main()
