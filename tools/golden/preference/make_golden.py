#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes tests/golden/preference: preference rows and float64 results of short LoRA trainings with each loss.

The files are those of tests/golden/train (../train/README.md), whose model and adapter are used; a step has the metrics of
preferences, too. The losses are written here anew, from the papers' equations (docs/preference.md), and differentiated by
autograd; compare_trl.py holds the same cases against TRL.

Made with Python 3.11.2, torch 2.15.0, transformers 5.23.0, peft 0.21.2, numpy.

usage: make_golden.py [--out DIR] [--only CASE ...]
"""
import argparse
import json
import math
import os
import sys

import numpy as np
import torch

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.abspath(os.path.join(HERE, '..', '..', '..'))
sys.path.insert(0, os.path.join(HERE, '..', 'train'))
import checkpoint  # noqa: E402
import inputs  # noqa: E402
import reference  # noqa: E402

GOLDEN = os.path.join(ROOT, 'tests', 'golden', 'train')
MODEL, ADAPTER, VOCAB = 'tiny-gqa', 'tiny-gqa-all-linear', 96
IGNORED, MAX_LENGTH, N_ROWS = -100, 24, 12

CONFIG = {'adam_beta1': 0.9, 'adam_beta2': 0.999, 'adam_epsilon': 1e-8, 'base_format': 'stored', 'learning_rate': 3e-4,
          'lr_scheduler_type': 'constant', 'max_grad_norm': 1.0, 'max_steps': 20, 'shuffle': False, 'weight_decay': 0.0,
          'max_seq_length': MAX_LENGTH, 'epoch_end': 'continue', 'beta': 0.2}


def layouts(per_device, n_micro, any_size=False):
    """(ranks, per-device batch, accumulation) of the same rows; any_size: the loss is a mean over rows, however divided."""
    rows = per_device * n_micro
    out = [(r, b, rows // (r * b)) for b in range(1, rows + 1) for r in (1, 2, 4, 8)
           if rows % (r * b) == 0 and (any_size or b == per_device)]
    return [{'ranks': r, 'per_device_train_batch_size': b, 'gradient_accumulation_steps': a} for r, b, a in out]


def case(about, losses, any_size=True, kl_ranks=None, tokens='pairs', **config):
    one = [{'ranks': kl_ranks, 'per_device_train_batch_size': 2, 'gradient_accumulation_steps': 4 // kl_ranks}] if kl_ranks \
        else layouts(2, 4, any_size)
    return {'about': about, 'losses': losses, 'topologies': one, 'kl_ranks': kl_ranks or 1, 'tokens': tokens, 'config': config}


CASES = {
    'sigmoid': case('DPO', ['sigmoid']),
    'sigmoid-ld': case('LD-DPO: tokens beyond the shorter answer count less', ['sigmoid'], ld_alpha=0.3),
    'hinge': case('SLiC', ['hinge']),
    'ipo': case('IPO, per token', ['ipo']),
    'sigmoid_norm': case('DPO of means', ['sigmoid_norm'], beta=2.0),
    'robust': case('labels that may be wrong', ['robust'], label_smoothing=0.2),
    'apo_zero': case('APO, up and down', ['apo_zero']),
    'apo_down': case('APO, down', ['apo_down']),
    'sigmoid-sft': case('two losses with weights', ['sigmoid', 'sft'], any_size=False, loss_weights=['1', '0.25']),
    'orpo': case('no reference; prompts carry loss, too', ['orpo'], any_size=False),
    'simpo': case('no reference, means', ['simpo'], beta=2.0, simpo_gamma=1.0, label_smoothing=0.1),
    'holes': case('tokens without labels inside of answers', ['sigmoid_norm'], beta=2.0, tokens='holes'),
    'kto': case('answers with labels, one rank', ['kto'], kl_ranks=1, tokens='labels', desirable_weight=1.5),
    'kto-ranks': case('the same, whose divergence is a mean over two ranks', ['kto'], kl_ranks=2, tokens='labels',
                      desirable_weight=1.5),
}


# ---- rows

def answer(rng, prompt, n, hole=False):
    ids = prompt + rng.integers(3, VOCAB, n).tolist()
    labels = [IGNORED] * len(prompt) + ids[len(prompt):]
    if hole:
        labels[len(prompt) + 1] = IGNORED
    return {'input_ids': ids, 'labels': labels}


def pairs(holes=False):
    """Prompts and answers of many lengths: one answer is cut at MAX_LENGTH, one prompt is empty, and one row's prompt fills
    MAX_LENGTH: it is left out. holes: answers have a token without a label, which TRL's rows cannot have."""
    rng, rows = np.random.default_rng(7), []
    for i in range(N_ROWS + 1):
        n_prompt = MAX_LENGTH if i == 4 else 0 if i == 7 else int(rng.integers(1, 12))
        prompt = rng.integers(3, VOCAB, n_prompt).tolist()
        sizes = [int(n) for n in rng.integers(3, 10, 2)]
        if i == 2:
            sizes[0] = MAX_LENGTH
        rows.append({'chosen': answer(rng, prompt, sizes[0], holes), 'rejected': answer(rng, prompt, sizes[1])})
    return rows


def labeled():
    rng, rows = np.random.default_rng(8), []
    for i in range(N_ROWS):
        prompt = rng.integers(3, VOCAB, int(rng.integers(1, 12))).tolist()
        rows.append({**answer(rng, prompt, MAX_LENGTH if i == 3 else int(rng.integers(3, 10))), 'label': bool(rng.integers(0, 2))})
    return rows


def cut(a):
    return {**a, 'input_ids': a['input_ids'][:MAX_LENGTH], 'labels': a['labels'][:MAX_LENGTH]}


def usable(rows):
    """As they are trained on: cut, and without those that have nothing left to learn."""
    out = []
    for row in rows:
        sides = [cut(row[k]) for k in ('chosen', 'rejected')] if 'chosen' in row else [cut(row)]
        if all(any(label != IGNORED for label in s['labels'][1:]) for s in sides):
            out.append(sides if 'chosen' in row else {**sides[0], 'label': row['label']})
    return out


# ---- the model

def use_float64():
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)


def build_model():
    from transformers import LlamaConfig, LlamaForCausalLM
    directory = os.path.join(GOLDEN, 'models', MODEL)
    model = LlamaForCausalLM._from_config(LlamaConfig.from_pretrained(directory), attn_implementation='eager').double().eval()
    _, weights = checkpoint.load_model(directory, 'stored')
    model.load_state_dict({n: torch.from_numpy(w.astype(np.float64)) for n, w in weights.items()}, strict=True)
    return model


def token_logps(model, ids):
    """log p of token t + 1, for t = 0 .. n - 2."""
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


class Answer:
    """One side with the policy's log-probabilities and those of the reference."""

    def __init__(self, side, policy, ref):
        self.all = token_logps(policy, side['input_ids'])
        self.mask = torch.tensor([label != IGNORED for label in side['labels'][1:]])
        self.logp = self.all[self.mask]
        with torch.no_grad():
            self.ref = token_logps(ref, side['input_ids'])[self.mask]
        self.n = len(self.logp) + (side['labels'][0] != IGNORED)

    def ratio(self, shared=None, alpha=1.0):
        """(sum of the policy's log-probabilities, its difference from the reference's)"""
        factor = torch.ones(len(self.logp))
        if shared is not None:
            factor[shared:] = alpha
        s = (factor * self.logp).sum()
        return s, s - (factor * self.ref).sum()


# ---- losses

def log_sigmoid(x):
    return -torch.logaddexp(torch.zeros_like(x), -x)


def pair_losses(name, p, c, d):
    """The loss of one pair by its two answers; sft and orpo's likelihood are the micro-batch's."""
    beta, e = p['beta'], p['label_smoothing']
    shared = min(len(c.logp), len(d.logp))
    (_, x), (_, y) = (a.ratio(shared, p['ld_alpha']) for a in (c, d))
    m, k = c.logp.mean(), d.logp.mean()
    margin = beta * (x - y)
    return {
        'sigmoid': lambda: -log_sigmoid(margin),
        'hinge': lambda: torch.relu(1 - margin),
        'ipo': lambda: (x / c.n - y / d.n - 1 / (2 * beta)) ** 2,
        'sigmoid_norm': lambda: -log_sigmoid(beta * (x / c.n - y / d.n)),
        'robust': lambda: (-(1 - e) * log_sigmoid(margin) + e * log_sigmoid(-margin)) / (1 - 2 * e),
        'apo_zero': lambda: 1 - torch.sigmoid(beta * x) + torch.sigmoid(beta * y),
        'apo_down': lambda: torch.sigmoid(beta * x) + 1 - torch.sigmoid(margin),
        'simpo': lambda: -(1 - e) * log_sigmoid(beta * (m - k) - p['simpo_gamma'])
        - e * log_sigmoid(p['simpo_gamma'] - beta * (m - k)),
        'orpo': lambda: -beta * log_sigmoid(m - torch.log1p(-torch.exp(m)) - k + torch.log1p(-torch.exp(k))),
        'sft': lambda: torch.zeros(()),
    }[name]()


def likelihood(name, sides):
    """The mean over tokens of a micro-batch's chosen answers."""
    if name == 'sft':
        return -torch.cat([c.logp for c, _ in sides]).mean()
    if name == 'orpo':
        return -torch.cat([c.all for c, _ in sides]).mean()
    return 0.0


def micro_of_pairs(p, rows, policy, ref):
    """(loss, metrics of each pair)"""
    sides = [[Answer(s, policy, ref) for s in row] for row in rows]
    loss, metrics = 0.0, []
    for name, weight in p['terms']:
        loss = loss + weight * (torch.stack([pair_losses(name, p, c, d) for c, d in sides]).mean() + likelihood(name, sides))
    for c, d in sides:
        if p['has_reference']:
            shared = min(len(c.logp), len(d.logp))
            (s, x), (t, y) = (a.ratio(shared, p['ld_alpha']) for a in (c, d))
        else:
            s, t = x, y = c.logp.mean(), d.logp.mean()
        metrics.append({'rewards/chosen': p['beta'] * x.item(), 'rewards/rejected': p['beta'] * y.item(),
                        'rewards/accuracies': float(x > y), 'rewards/margins': p['beta'] * (x - y).item(),
                        'logps/chosen': s.item(), 'logps/rejected': t.item()})
    return loss, metrics


def step_of_pairs(p, micros, policy, ref):
    results = [micro_of_pairs(p, rows, policy, ref) for rows in micros]
    metrics = [m for _, ms in results for m in ms]
    return sum(loss for loss, _ in results) / len(micros), {k: sum(m[k] for m in metrics) / len(metrics) for k in metrics[0]}


def mismatched(rows):
    """Each prompt with the answer of the row before it, as the rows were cut."""
    def n_prompt(row):
        return next(t for t, label in enumerate(row['labels']) if label != IGNORED)
    out = []
    for i, row in enumerate(rows):
        other = rows[i - 1]
        n, rest = n_prompt(row), other['input_ids'][n_prompt(other):]
        out.append(cut({'input_ids': row['input_ids'][:n] + rest, 'labels': [IGNORED] * n + rest}))
    return out


def step_of_labels(p, micros, policy, ref):
    """kto: the divergence is a mean over the micro-batches that the ranks have at the same time."""
    beta, losses, kls = p['beta'], [], []
    sums = {True: [], False: []}
    for first in range(0, len(micros), p['kl_ranks']):
        together = micros[first:first + p['kl_ranks']]
        with torch.no_grad():
            means = [torch.stack([Answer(r, policy, ref).ratio()[1] for r in mismatched(rows)]).mean() for rows in together]
        kl = torch.stack(means).mean().clamp(min=0)
        for rows in together:
            kls.append(kl.item())
            per_row = []
            for row in rows:
                s, r = Answer(row, policy, ref).ratio()
                sums[row['label']].append((beta * r.item(), s.item()))
                per_row.append(p['desirable_weight'] * (1 - torch.sigmoid(beta * (r - kl))) if row['label'] else
                               p['undesirable_weight'] * (1 - torch.sigmoid(beta * (kl - r))))
            losses.append(torch.stack(per_row).mean())
    metrics = {'kl': sum(kls) / len(kls)}
    for label, name in ((True, 'chosen'), (False, 'rejected')):
        if sums[label]:
            metrics['rewards/' + name], metrics['logps/' + name] = np.mean(sums[label], axis=0).tolist()
    if sums[True] and sums[False]:
        metrics['rewards/margins'] = metrics['rewards/chosen'] - metrics['rewards/rejected']
    return sum(losses) / len(losses), metrics


# ---- a case

def parameters_of(c):
    weights = [float(w) for w in c['config'].get('loss_weights', ['1'] * len(c['losses']))]
    return {'beta': CONFIG['beta'], 'label_smoothing': 0.0, 'ld_alpha': 1.0, 'simpo_gamma': 0.5, 'desirable_weight': 1.0,
            'undesirable_weight': 1.0, **c['config'], 'terms': list(zip(c['losses'], weights)), 'kl_ranks': c['kl_ranks'],
            'has_reference': not set(c['losses']) & {'orpo', 'simpo'}}


def micros_of(rows, c, step):
    t = c['topologies'][-1] if c['kl_ranks'] > 1 else next(
        t for t in c['topologies'] if t['ranks'] == 1 and t['per_device_train_batch_size'] == 2)
    n = 8
    at = [rows[i % len(rows)] for i in range(step * n, (step + 1) * n)]
    return [at[i:i + t['per_device_train_batch_size']] for i in range(0, n, t['per_device_train_batch_size'])]


def train(c, rows, policy, ref, on_step):
    p, config = parameters_of(c), CONFIG
    parameters = reference.lora_parameters(policy)
    optimizer = torch.optim.AdamW(parameters.values(), lr=config['learning_rate'], eps=config['adam_epsilon'],
                                  betas=(config['adam_beta1'], config['adam_beta2']), weight_decay=0.0)
    of_step = step_of_labels if c['tokens'] == 'labels' else step_of_pairs
    for step in range(config['max_steps']):
        optimizer.zero_grad()
        loss, metrics = of_step(p, micros_of(rows, c, step), policy, ref)
        loss.backward()
        gradients = {n: g.grad.numpy().copy() for n, g in parameters.items()}
        norm = math.sqrt(sum(float((g * g).sum()) for g in gradients.values()))
        torch.nn.utils.clip_grad_norm_(parameters.values(), config['max_grad_norm'])
        optimizer.step()
        on_step(step, {'loss': loss.item(), 'grad_norm': norm, 'learning_rate': config['learning_rate'], **metrics}, gradients)


def norm_of(array):
    return math.sqrt(float((array.astype(np.float64) ** 2).sum()))


def summary(arrays):
    return {n: [norm_of(a)] + reference.projections(a) for n, a in arrays.items()}


def run_case(name, c, out, rows):
    adapter = os.path.join(GOLDEN, 'adapters', ADAPTER)
    policy = reference.attach_adapter(build_model(), adapter)
    ref = reference.attach_adapter(build_model(), adapter)
    steps, first = [], {}

    def on_step(step, metrics, gradients):
        steps.append(metrics)
        if step == 0:
            first.update(gradients)

    start = reference.adapter_values(policy)
    train(c, rows, policy, ref, on_step)
    final = reference.adapter_values(policy)
    moved = np.concatenate([(final[n] - start[n]).ravel() for n in final])
    with open(os.path.join(adapter, 'adapter_config.json')) as f:
        lora = json.load(f)
    settings = {**CONFIG, **c['config'], 'loss_type': c['losses'], 'init_adapter': 'adapters/' + ADAPTER,
                'train_file': '../preference/tokens/%s.jsonl' % c['tokens'], 'lora_r': lora['r'],
                'lora_alpha': lora['lora_alpha'], 'lora_target_modules': lora['target_modules']}
    directory = os.path.join(out, 'cases', name)
    os.makedirs(directory, exist_ok=True)
    inputs.write_json(os.path.join(directory, 'case.json'), {
        'name': 'preference ' + name, 'about': c['about'], 'model': {'root': 'golden', 'path': 'models/' + MODEL},
        'config': settings, 'files': {}, 'topologies': c['topologies'],
        'expect': {'first_loss': steps[0]['loss'], 'steps': steps, 'gradients': summary(first), 'final_adapter': summary(final),
                   'adapter_change_norm': norm_of(moved)}})
    print('%-14s loss %.6f -> %.6f, gradient norm %.4f' % (name, steps[0]['loss'], steps[-1]['loss'], steps[0]['grad_norm']),
          flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    p.add_argument('--out', default=os.path.join(ROOT, 'tests', 'golden', 'preference'))
    p.add_argument('--only', nargs='+', metavar='CASE')
    a = p.parse_args()
    use_float64()
    os.makedirs(os.path.join(a.out, 'tokens'), exist_ok=True)
    made = {'pairs': pairs(), 'holes': pairs(holes=True), 'labels': labeled()}
    for name, rows in made.items():
        inputs.write_tokens(os.path.join(a.out, 'tokens', name + '.jsonl'), rows)
    for name, c in CASES.items():
        if not a.only or name in a.only:
            run_case(name, c, a.out, usable(made[c['tokens']]))
    inputs.write_json(os.path.join(a.out, 'index.json'),
                      {'cases': ['../../preference/cases/' + n for n in sorted(os.listdir(os.path.join(a.out, 'cases')))]})


if __name__ == '__main__':
    main()
