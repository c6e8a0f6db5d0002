#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes tests/golden/train: inputs and float64 results of short LoRA trainings. README.md describes the files.

Made with Python 3.11.2, torch 1.13.0 (Debian 1.13.1+dfsg-4), transformers 4.45.2, peft 0.13.2, tokenizers 0.20.1,
numpy 1.24.2; other versions are refused unless --any-version is given.

usage: make_golden.py [--data DIR] [--grow PATH/grow_model.py] [--out DIR] [--only CASE ...]
DIR has models/stories260K and its siblings (default $BALLAST_TEST_DATA); grow_model.py is $BALLAST_GROW_MODEL by default.
"""
import argparse
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version

import numpy as np
import torch

import cases
import checkpoint
import inputs
import reference

VERSIONS = {'transformers': '4.45.2', 'peft': '0.13.2', 'tokenizers': '0.20.1', 'numpy': '1.24.2'}
TORCH = '1.13.0'


def check_versions():
    have = {name: version(name) for name in VERSIONS}
    if have != VERSIONS or not torch.__version__.startswith(TORCH):
        raise SystemExit('made for torch %s and %s; here are torch %s and %s (--any-version to go on)'
                         % (TORCH, VERSIONS, torch.__version__, have))


class Inputs:
    """The directory of each model, and the entry in case.json to find it again."""

    def __init__(self, data, grow, out, scratch):
        self.data, self.grow, self.out, self.scratch = data, grow, out, scratch
        self.grown = {}

    def model(self, name):
        """(directory, the entry of case.json)"""
        if name in cases.DATA_MODELS:
            return os.path.join(self.data, 'models', name), {'root': 'data', 'path': 'models/' + name}
        if name in cases.GROWN:
            return self._grown(name)
        return os.path.join(self.out, 'models', name), {'root': 'golden', 'path': 'models/' + name}

    def _grown(self, name):
        if name not in self.grown:
            recipe, directory = cases.GROWN[name], os.path.join(self.scratch, name)
            source = os.path.join(self.data, 'models', recipe['source'])
            subprocess.run([sys.executable, self.grow, source, directory] + recipe['arguments'], check=True,
                           stdout=subprocess.DEVNULL)
            with open(os.path.join(directory, 'model.safetensors'), 'rb') as f:
                digest = hashlib.sha256(f.read()).hexdigest()
            self.grown[name] = directory, {'root': 'grown', 'path': name, 'grow_source': 'models/' + recipe['source'],
                                           'grow_arguments': recipe['arguments'], 'model_sha256': digest}
        return self.grown[name]

    def write(self):
        for name, m in inputs.MODELS.items():
            inputs.write_model(os.path.join(self.out, 'models', name), m)
        for name, (model, targets, r, alpha, seed, more) in cases.ADAPTERS.items():
            if model in cases.GROWN and not self.grow:
                continue
            with open(os.path.join(self.model(model)[0], 'config.json')) as f:
                config = json.load(f)
            inputs.write_adapter(os.path.join(self.out, 'adapters', name), config, model, targets, r, alpha, seed, **more)
        os.makedirs(os.path.join(self.out, 'tokens'), exist_ok=True)
        for name, rows in inputs.token_files(self.data).items():
            inputs.write_tokens(os.path.join(self.out, 'tokens', name + '.jsonl'), rows)


def norm(array):
    return math.sqrt(float((array.astype(np.float64) ** 2).sum()))


def summary(arrays):
    """name -> [norm, projection 0, projection 1]"""
    return {n: [norm(a)] + reference.projections(a) for n, a in arrays.items()}


def run_case(name, case, where):
    """Trains once in float64 and writes cases/NAME."""
    directory, model_entry = where.model(case['model'])
    adapter = os.path.join(where.out, 'adapters', case['adapter'])
    tokens = lambda n: 'tokens/%s.jsonl' % n
    rows = reference.read_rows(os.path.join(where.out, tokens(case['tokens'])))
    config = dict(case['config'])
    validation = config.pop('validation', None)
    batch = config['per_device_train_batch_size'] * config['gradient_accumulation_steps']
    base = reference.load_llama(directory, config['base_format'])
    expect = {}
    if validation:
        held_out = reference.read_rows(os.path.join(where.out, tokens(validation)))
        expect['validation'] = {'base_loss': reference.evaluate(base, held_out), 'steps': {}}
    model = reference.attach_adapter(base, adapter)
    if validation:
        expect['validation']['steps']['0'] = reference.evaluate(model, held_out)

    steps, first = [], {}

    def on_step(step, loss, grad_norm, rate, gradients):
        steps.append({'loss': loss, 'grad_norm': grad_norm, 'learning_rate': rate})
        if step == 0:
            first.update(gradients)
        if validation and (step + 1) % config['eval_steps'] == 0:
            expect['validation']['steps'][str(step + 1)] = reference.evaluate(model, held_out)

    start = reference.adapter_values(model)
    reference.train(model, rows, batch, config, on_step)
    final = reference.adapter_values(model)
    moved = {n: final[n] - start[n] for n in final}
    expect.update(first_loss=steps[0]['loss'], steps=steps, gradients=summary(first), final_adapter=summary(final),
                  final_adapter_norm=norm(np.concatenate([a.ravel() for a in final.values()])),
                  adapter_change_norm=norm(np.concatenate([a.ravel() for a in moved.values()])))

    with open(os.path.join(adapter, 'adapter_config.json')) as f:
        lora = json.load(f)
    config.update(init_adapter='adapters/' + case['adapter'], train_file=tokens(case['tokens']), lora_r=lora['r'],
                  lora_alpha=lora['lora_alpha'], lora_target_modules=lora['target_modules'])
    if validation:
        config['validation_file'] = tokens(validation)
    out = os.path.join(where.out, 'cases', name)
    os.makedirs(out, exist_ok=True)
    files = {}
    for kind, arrays in (('gradients', first), ('final', final)):
        if kind in case['keep']:
            files[kind] = kind + '.safetensors'
            checkpoint.write_f32(os.path.join(out, files[kind]), arrays)
    inputs.write_json(os.path.join(out, 'case.json'), {
        'name': name, 'about': case['about'], 'model': model_entry, 'config': config, 'files': files,
        'topologies': case.get('topologies', [{'ranks': 1, 'per_device_train_batch_size': batch,
                                               'gradient_accumulation_steps': 1}]),
        'expect': expect})
    print('%-24s loss %.6f -> %.6f, gradient norm %.4f' % (name, steps[0]['loss'], steps[-1]['loss'], steps[0]['grad_norm']),
          flush=True)


def prune(out):
    """What a former table made and this one does not."""
    for part, table in (('models', inputs.MODELS), ('adapters', cases.ADAPTERS), ('cases', cases.CASES)):
        for name in set(os.listdir(os.path.join(out, part))) - set(table):
            shutil.rmtree(os.path.join(out, part, name))


def arguments():
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    root = os.path.abspath(os.path.join(os.path.dirname(__file__), '..', '..', '..'))
    p.add_argument('--data', default=os.environ.get('BALLAST_TEST_DATA'), help='default $BALLAST_TEST_DATA')
    p.add_argument('--grow', default=os.environ.get('BALLAST_GROW_MODEL'), help='grow_model.py; default $BALLAST_GROW_MODEL')
    p.add_argument('--out', default=os.path.join(root, 'tests', 'golden', 'train'))
    p.add_argument('--only', nargs='+', metavar='CASE', help='just these cases; the inputs are written anyway')
    p.add_argument('--any-version', action='store_true')
    a = p.parse_args()
    if not a.data:
        p.error('--data or BALLAST_TEST_DATA is needed')
    return a


def main():
    a = arguments()
    if not a.any_version:
        check_versions()
    torch.set_num_threads(1)                                 # one order of every sum: the same file each time
    reference.float64_llama()
    with tempfile.TemporaryDirectory() as scratch:
        where = Inputs(a.data, a.grow, a.out, scratch)
        where.write()
        for name, case in cases.CASES.items():
            if a.only and name not in a.only:
                continue
            if case['model'] in cases.GROWN and not a.grow:
                print('%-24s left as it is: no grow_model.py' % name)
                continue
            run_case(name, case, where)
    prune(a.out)
    inputs.write_json(os.path.join(a.out, 'index.json'), {'cases': sorted(os.listdir(os.path.join(a.out, 'cases')))})


main()
