#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the reference itself against independent code: unmodified Hugging Face classes, ml_dtypes' FP8, finite differences.

usage: self_check.py [--data DIR] [--golden DIR]     (the environment of make_golden.py; ml_dtypes, when there, checks E4M3)

The bounds: float32 has a unit roundoff u = 6e-8, and a loss of these models passes through some 30 dependent roundings: 1e-6.
A training run repeats that 20 times through AdamW, whose first steps divide a gradient by its own size: 1e-4.
"""
import argparse
import json
import math
import os

import numpy as np
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import checkpoint
import reference

LOSS_BOUND, GRADIENT_BOUND, RUN_BOUND, DIFFERENCE_BOUND = 1e-6, 2e-5, 1e-4, 1e-7
failures = []


def report(what, value, bound):
    verdict = 'ok' if value <= bound else 'FAILED'
    if value > bound:
        failures.append(what)
    print('%-68s %9.2e (bound %.0e) %s' % (what, value, bound, verdict))


def relative(a, b):
    return abs(a - b) / max(abs(b), 1e-300)


class Golden:
    def __init__(self, directory, data):
        self.directory, self.data = directory, data
        with open(self.path('index.json')) as f:
            self.names = json.load(f)['cases']

    def path(self, *parts):
        return os.path.join(self.directory, *parts)

    def case(self, name):
        with open(self.path('cases', name, 'case.json')) as f:
            return json.load(f)

    def usable(self, case):
        return case['model']['root'] == 'golden' or (case['model']['root'] == 'data' and self.data)

    def load(self, case, dtype):
        root = self.data if case['model']['root'] == 'data' else self.directory
        model = reference.load_llama(os.path.join(root, case['model']['path']), case['config']['base_format'], dtype)
        model = reference.attach_adapter(model, self.path(case['config']['init_adapter'])).to(dtype)
        return model, reference.read_rows(self.path(case['config']['train_file']))

    def batch(self, case):
        t = case['topologies'][0]
        return t['ranks'] * t['per_device_train_batch_size'] * t['gradient_accumulation_steps']


def check_e4m3():
    finite = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
    report('E4M3: codes that do not come back', int((checkpoint.e4m3_encode(checkpoint.e4m3_decode(finite)) != finite).sum()), 0)
    try:
        import ml_dtypes
    except ImportError:
        print('E4M3 against ml_dtypes: skipped, it is not installed')
        return
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.standard_normal(200000) * s for s in (1e-3, 0.02, 1, 100)]
                       + [checkpoint.MIDPOINTS, -checkpoint.MIDPOINTS, checkpoint.MAGNITUDES]).astype(np.float32)
    x = np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf))])
    x = x[np.abs(x) <= 448]                                  # ml_dtypes makes larger values NaN
    theirs = x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    report('E4M3: codes that differ from ml_dtypes, of %d' % len(x), int((checkpoint.e4m3_encode(x) != theirs).sum()), 0)
    report('E4M3: saturation', int((checkpoint.e4m3_encode(np.float32([449, 1e30, -1e30])) != [0x7E, 0x7E, 0xFE]).sum()), 0)


def check_rope(golden):
    with open(golden.path('models', 'tiny-llama3-rope', 'config.json')) as f:
        config = reference.build_config(json.load(f))
    ours, theirs = reference.inverse_frequencies(config), ROPE_INIT_FUNCTIONS['llama3'](config, 'cpu')[0].double()
    report('llama3 frequencies against transformers', float(((ours - theirs) / theirs).abs().max()), LOSS_BOUND)
    theta, scaling = reference.rope_of(config)
    plain = theta ** -(torch.arange(0, config.head_dim, 2).double() / config.head_dim)
    ratio = plain / ours
    kept, divided = (ratio == 1).sum(), ((ratio - scaling['factor']).abs() < 1e-12).sum()
    report('llama3 frequencies: branches that do not occur', int(not (kept > 0 and divided > 0 and kept + divided < len(ratio))), 0)


def huggingface_loss(model, rows):
    """The loss of unmodified Hugging Face code on one right-padded batch, with its own label shift."""
    longest = max(len(r['input_ids']) for r in rows)
    pad = lambda key, value: torch.tensor([r[key] + [value] * (longest - len(r[key])) for r in rows])
    mask = torch.tensor([[1] * len(r['input_ids']) + [0] * (longest - len(r['input_ids'])) for r in rows])
    with torch.no_grad():
        return model(input_ids=pad('input_ids', 0), attention_mask=mask, labels=pad('labels', -100)).loss.item()


def check_unmodified(golden):
    """Float32 runs through the unmodified classes: the first loss by Hugging Face's own formula, gradients, whole trainings."""
    worst = {'loss': (0, ''), 'gradient': (0, ''), 'run': (0, ''), 'adapter': (0, '')}
    for name in golden.names:
        case = golden.case(name)
        if not golden.usable(case):
            continue
        expect, batch = case['expect'], golden.batch(case)
        model, rows = golden.load(case, torch.float32)
        first = reference.step_rows(rows, 0, batch)
        found = {}
        if not any('document_ids' in r or 'weights' in r for r in rows):
            found['loss'] = relative(huggingface_loss(model, first), expect['first_loss'])
        losses, gradients = [], {}

        def on_step(step, loss, norm, rate, g):
            losses.append(loss)
            if step == 0:
                gradients.update(g)

        reference.train(model, rows, batch, case['config'], on_step)
        total = expect['steps'][0]['grad_norm']
        found['gradient'] = max(abs(v - w) / total for n, g in gradients.items()
                                for v, w in zip([math.sqrt((g.astype(np.float64) ** 2).sum())] + reference.projections(g),
                                                expect['gradients'][n]))
        found['run'] = max(relative(l, s['loss']) for l, s in zip(losses, expect['steps']))
        final = reference.adapter_values(model)
        found['adapter'] = max(abs(v - w) / expect['adapter_change_norm'] for n, a in final.items()
                               for v, w in zip([math.sqrt((a.astype(np.float64) ** 2).sum())] + reference.projections(a),
                                               expect['final_adapter'][n]))
        worst = {k: max(worst[k], (found.get(k, 0), name)) for k in worst}
    for key, bound, what in (('loss', LOSS_BOUND, 'first loss, Hugging Face\'s own'), ('gradient', GRADIENT_BOUND, 'gradients'),
                             ('run', RUN_BOUND, 'losses of the whole run'), ('adapter', RUN_BOUND, 'final adapter')):
        report('float32, unmodified classes, %s: %s' % (what, worst[key][1]), worst[key][0], bound)


def check_differences(golden, name):
    """Central differences along the gradient, and along random directions of each tensor."""
    case = golden.case(name)
    model, rows = golden.load(case, torch.float64)
    rows = reference.step_rows(rows, 0, golden.batch(case))
    reference.backward(model, rows)
    rng = np.random.default_rng(0)
    worst, total = 0.0, case['expect']['steps'][0]['grad_norm']
    for p in reference.lora_parameters(model).values():
        direction = torch.from_numpy(rng.standard_normal(tuple(p.shape)))
        direction /= direction.norm()
        values = []
        for h in (1e-4, -2e-4, 1e-4):                        # up, down, back
            with torch.no_grad():
                p += h * direction
            values.append(reference.evaluate(model, rows))
        worst = max(worst, abs((values[0] - values[1]) / 2e-4 - float((p.grad * direction).sum())) / total)
    report('finite differences in all tensors: %s' % name, worst, DIFFERENCE_BOUND)


def check_documents(golden, name):
    """A packed row whose boundaries are masked is the sum of its documents, each run alone."""
    case = golden.case(name)
    model, rows = golden.load(case, torch.float64)
    row, documents = rows[0], []
    for d in sorted(set(row['document_ids'])):
        at = [i for i, e in enumerate(row['document_ids']) if e == d]
        documents.append({k: [row[k][i] for i in at] for k in ('input_ids', 'labels')})
    with torch.no_grad():
        apart = sum(reference.row_loss(model, d).item() for d in documents)
        report('packed = apart: %s' % name, relative(reference.row_loss(model, row).item(), apart), 1e-13)
        merged = reference.row_loss(model, dict(row, document_ids=None)).item()
    report('packed, were the documents to see each other: no difference', int(relative(merged, apart) < 1e-3), 0)


def main():
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    root = os.path.abspath(os.path.join(os.path.dirname(__file__), '..', '..', '..'))
    p.add_argument('--data', default=os.environ.get('BALLAST_TEST_DATA'))
    p.add_argument('--golden', default=os.path.join(root, 'tests', 'golden', 'train'))
    a = p.parse_args()
    torch.set_num_threads(1)
    golden = Golden(a.golden, a.data)
    check_e4m3()
    check_rope(golden)
    check_unmodified(golden)
    reference.float64_llama()                                # from here on everything is float64
    for name in ('tiny-all-linear', 'tiny-weights', 'tiny-packed', 'tiny-llama3-rope', 'tiny-mha-tied', 'fp8-ct-block-auto'):
        check_differences(golden, name)
    check_documents(golden, 'tiny-packed')
    if failures:
        raise SystemExit('%d checks failed' % len(failures))


main()
