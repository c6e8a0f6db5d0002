#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes tests/golden/full: float64 results of short trainings of every weight, or of some tensors.

The models are those of tests/golden/families and tests/golden/train, built by transformers' own classes and computed in
float64 throughout (../families/make_golden.py). AdamW and clipping are torch's, the schedule is transformers', and which
parameters have no weight decay is what transformers' Trainer says of the model. Frozen parameters have requires_grad=False;
which they are is said twice, as Ballast's patterns and as a function of a parameter's name. The files have the form of
tests/golden/train (../train/README.md); names of tensors are those of the model's files.

Made with Python 3.11.2, torch 2.15.0, transformers 5.24.0, numpy; other versions of transformers are refused.

usage: make_golden.py [--out DIR] [--only CASE ...]
"""
import argparse
import json
import math
import os
import sys

import numpy as np
import torch
import transformers

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, '..', 'families'), os.path.join(HERE, '..', 'train')]
import checkpoint  # noqa: E402
import inputs  # noqa: E402
import make_golden as families  # noqa: E402
import reference  # noqa: E402

ROOT = os.path.abspath(os.path.join(HERE, '..', '..', '..'))
CONFIG = {
    'adam_beta1': 0.9, 'adam_beta2': 0.999, 'adam_epsilon': 1e-8, 'data_format': 'tokens', 'finetuning_type': 'full',
    'learning_rate': 5e-4, 'lr_scheduler_type': 'constant', 'max_grad_norm': 1.0, 'max_steps': 20, 'packing': 'none',
    'shuffle': False, 'warmup_steps': 0, 'weight_decay': 0.1}
ROWS = '../families/tokens/rows.jsonl'


def topologies(batch, ranks):
    """Sequences of one step over ranks, micro-batches and their accumulation."""
    return [{'ranks': r, 'per_device_train_batch_size': b, 'gradient_accumulation_steps': batch // (r * b)}
            for r in ranks for b in (1, 2, 4) if batch % (r * b) == 0]


def tiny(model, **more):
    return {'model': 'models/' + model, 'class': 'Llama', 'tokens': 'tokens/tiny-more.jsonl', 'batch': 4, 'ranks': (1, 2, 4),
            'config': {**CONFIG, **more}}


def family(name):
    return {'model': '../families/models/' + name, 'class': families.CASES[name][0], 'tokens': ROWS, 'batch': 2,
            'ranks': (1, 2), 'config': CONFIG}


def some(case, trains, trainable=(), freeze=()):
    """trains: of a tensor's name, whether it is trained."""
    keys = {k: list(v) for k, v in (('trainable_modules', trainable), ('freeze', freeze)) if v}
    return {**case, 'config': {**case['config'], **keys}, 'trains': trains}


def of_last_layers(layers, *modules):
    return lambda n: any(n.startswith('model.layers.%d.' % i) for i in layers) or n in ['%s.weight' % m for m in modules]


TABLES = ('model.embed_tokens.weight', 'lm_head.weight')
FROZEN = {
    'frozen-all-but-last-layer': some(tiny('tiny-gqa'), of_last_layers((1,), 'lm_head', 'model.norm'),
                                      ('model.layers.(1|2[4-9])', 'norm', 'lm_head')),
    'frozen-all-but-norms': some(tiny('tiny-gqa'), lambda n: 'norm' in n, ('.*norm',)),
    'frozen-all-but-head': some(tiny('tiny-gqa'), lambda n: n == 'lm_head.weight', ('lm_head',)),
    'frozen-all-but-embedding': some(tiny('tiny-gqa'), lambda n: n == 'model.embed_tokens.weight', ('embed_tokens',)),
    'frozen-all-but-q-v': some(tiny('tiny-gqa'), lambda n: 'q_proj' in n or 'v_proj' in n, ('q_proj', 'v_proj')),
    'frozen-tables-and-down': some(tiny('tiny-gqa'), lambda n: n not in TABLES and 'down_proj' not in n, (),
                                   ('embed_tokens', 'lm_head', 'mlp.down_proj')),
    'frozen-tied-table': some(tiny('tiny-mha-tied'), lambda n: n not in TABLES, (), ('lm_head',)),
    'frozen-all-but-tied-table': some(tiny('tiny-mha-tied'), lambda n: n in TABLES, ('lm_head',)),
    'frozen-all-but-biases': some(family('qwen2-window'), lambda n: n.endswith('.bias'), ('bias',)),
    'frozen-all-but-last-mlp': some(family('olmo2'), lambda n: n.startswith('model.layers.1.mlp.'), ('layers.1.mlp',)),
    'frozen-all-but-layernorms': some(family('falcon-one-norm'), lambda n: n.split('.')[-2] in ('input_layernorm', 'ln_f'),
                                      ('input_layernorm', 'ln_f')),
}
CASES = {
    **FROZEN,
    'tiny-gqa': tiny('tiny-gqa'),
    'tiny-gqa-no-clip': tiny('tiny-gqa', max_grad_norm=0, weight_decay=0.0),
    'tiny-gqa-cosine': tiny('tiny-gqa', lr_scheduler_type='cosine', warmup_steps=4, max_grad_norm=0.3),
    'tiny-gqa-packed': {**tiny('tiny-gqa'), 'tokens': 'tokens/tiny-packed.jsonl'},
    'tiny-mha-tied': tiny('tiny-mha-tied'),
    'tiny-mha-tied-no-clip': tiny('tiny-mha-tied', max_grad_norm=0, weight_decay=0.0),
    'tiny-gqa-embedding-rate': tiny('tiny-gqa', embedding_learning_rate=1e-4),
    'tiny-mha-tied-embedding-rate': tiny('tiny-mha-tied', embedding_learning_rate=2e-3, lr_scheduler_type='cosine', warmup_steps=4),
    'tiny-llama3-rope': tiny('tiny-llama3-rope'),
    **{name: family(name) for name in families.CASES},
}


def load_model(case):
    """The model in float64, and the name in its files of each parameter."""
    directory = os.path.join(ROOT, 'tests', 'golden', 'train', case['model'])
    kind = case['class']
    config = families.class_of(kind).config_class.from_pretrained(directory)
    model = families.class_of(kind)._from_config(config, attn_implementation='eager').double().eval()
    stored = checkpoint.read_safetensors(os.path.join(directory, 'model.safetensors'))
    names = {}
    with torch.no_grad():
        for name, p in model.named_parameters():
            names[name] = families.stored_name(kind, name)
            if names[name] not in stored and config.tie_word_embeddings:
                names[name] = 'lm_head.weight'
            p.copy_(torch.from_numpy(checkpoint.widen(*stored[names[name]]).astype(np.float64)))
    # Ballast names a tied table after the embedding.
    return model, {n: 'model.embed_tokens.weight' if s == 'lm_head.weight' and config.tie_word_embeddings else s
                   for n, s in names.items()}


def logits_of(model, row):
    ids = torch.tensor([row['input_ids']])
    if 'document_ids' not in row:
        return model(input_ids=ids, use_cache=False).logits[0]
    positions, mask = reference.attention_inputs(row, torch.float64)
    return model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[0]


def optimizer_of(model, parameters, config):
    decayed = set(transformers.Trainer.get_decay_parameter_names(None, model))
    tables = {n for n in parameters if 'embed' in n or 'lm_head' in n}
    groups = [{'params': [p for n, p in parameters.items() if n in decayed - tables], 'weight_decay': config['weight_decay']},
              {'params': [p for n, p in parameters.items() if n not in decayed], 'weight_decay': 0.0},
              {'params': [p for n, p in parameters.items() if n in tables], 'weight_decay': config['weight_decay'],
               'lr': config.get('embedding_learning_rate', config['learning_rate'])}]
    return torch.optim.AdamW(groups, lr=config['learning_rate'], eps=config['adam_epsilon'],
                             betas=(config['adam_beta1'], config['adam_beta2']))


def freeze(model, names, trains):
    for name, p in model.named_parameters():
        p.requires_grad_(name in names and trains(names[name]))


def train(model, names, rows, batch, config, trains):
    """The entries of case.json's expect."""
    freeze(model, names, trains)
    reference.backward(model, reference.step_rows(rows, 0, batch))
    parameters = {n: p for n, p in model.named_parameters() if p.grad is not None}  # not those of a vision tower
    optimizer = optimizer_of(model, parameters, config)
    scheduler = transformers.get_scheduler(config['lr_scheduler_type'], optimizer, num_warmup_steps=config['warmup_steps'],
                                           num_training_steps=config['max_steps'])
    start = {n: p.detach().numpy().copy() for n, p in parameters.items()}
    steps, first = [], None
    for step in range(config['max_steps']):
        optimizer.zero_grad()
        loss = reference.backward(model, reference.step_rows(rows, step, batch))
        if first is None:
            first = {names[n]: p.grad.numpy().copy() for n, p in parameters.items()}
        norm = math.sqrt(sum(float((p.grad ** 2).sum()) for p in parameters.values()))
        if config['max_grad_norm'] > 0:
            torch.nn.utils.clip_grad_norm_(parameters.values(), config['max_grad_norm'])
        steps.append({'loss': loss, 'grad_norm': norm, 'learning_rate': scheduler.get_last_lr()[0]})
        optimizer.step()
        scheduler.step()
    final = {n: p.detach().numpy() for n, p in parameters.items()}
    return {'first_loss': steps[0]['loss'], 'steps': steps, 'gradients': families.summary(first),
            'final_weights': families.summary({names[n]: a for n, a in final.items()}),
            'weights_change_norm': families.norm(np.concatenate([(final[n] - start[n]).ravel() for n in final]))}


def run_case(out, name):
    case = CASES[name]
    model, names = load_model(case)
    rows = reference.read_rows(os.path.join(ROOT, 'tests', 'golden', 'train', case['tokens']))
    expect = train(model, names, rows, case['batch'], case['config'], case.get('trains', lambda _: True))
    os.makedirs(os.path.join(out, 'cases', name), exist_ok=True)
    inputs.write_json(os.path.join(out, 'cases', name, 'case.json'), {
        'name': name, 'about': case['class'], 'model': {'root': 'golden', 'path': case['model']},
        'config': {**case['config'], 'train_file': case['tokens']}, 'files': {},
        'topologies': topologies(case['batch'], case['ranks']), 'expect': expect})
    print('%-22s loss %.6f -> %.6f, gradient norm %.4f' % (
        name, expect['first_loss'], expect['steps'][-1]['loss'], expect['steps'][0]['grad_norm']), flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    p.add_argument('--out', default=os.path.join(ROOT, 'tests', 'golden', 'full'))
    p.add_argument('--only', nargs='+', metavar='CASE')
    a = p.parse_args()
    if transformers.__version__ != families.TRANSFORMERS:
        raise SystemExit('made for transformers %s, not %s' % (families.TRANSFORMERS, transformers.__version__))
    families.use_float64()
    reference.row_logits = logits_of
    for name in CASES:
        if not a.only or name in a.only:
            run_case(a.out, name)
    written = sorted(os.listdir(os.path.join(a.out, 'cases')))
    for file, names in (('index', [n for n in written if n not in FROZEN]), ('frozen', [n for n in written if n in FROZEN])):
        inputs.write_json(os.path.join(a.out, file + '.json'), {'cases': ['../../full/cases/' + n for n in names]})


if __name__ == '__main__':
    main()
