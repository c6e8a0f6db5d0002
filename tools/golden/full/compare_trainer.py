#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains every weight of a model with transformers' own Trainer in float32 and with Ballast, and compares the losses.

Rows of random tokens of several lengths, or those of an Alpaca file, in file order; AdamW with weight decay, clipping and
accumulation. Each program is a process of its own: its tokens per second (median step), its CPU seconds and its peak memory.
Then the model that Ballast wrote is loaded by transformers, and its loss over some rows compared with that of Trainer's model.
With --trainable_modules or --freeze among Ballast's keys the other parameters have requires_grad=False.

usage: compare_trainer.py BALLAST MODEL_DIR WORK_DIR [STEPS] [--alpaca FILE] [--float64 N] [--ballast_key value ...]

--float64 N: the first N steps also in float64, by a loop of PyTorch's operations here (every weight trained).
"""
import json
import os
import re
import statistics
import subprocess
import sys
import time

import torch
import transformers

STEPS, ACCUMULATION, RATE, DECAY, CLIP = 10, 2, 2e-5, 0.1, 1.0
LENGTHS = (96, 40, 128, 72, 64, 24)
LONGEST = 160  # tokens of an Alpaca row
EVALUATED = 20  # rows


class InOrder(transformers.Trainer):
    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Losses(transformers.TrainerCallback):
    def __init__(self):
        self.losses, self.seconds = [], []

    def on_step_begin(self, *_, **__):
        self.began = time.perf_counter()

    def on_step_end(self, *_, **__):
        self.seconds.append(time.perf_counter() - self.began)

    def on_log(self, args, state, control, logs=None, **_):
        if 'loss' in logs:
            self.losses.append((logs['loss'], float(logs['grad_norm'])))


def make_rows(vocabulary, n):
    generator = torch.Generator().manual_seed(1)
    rows = []
    for i in range(n):
        ids = torch.randint(3, vocabulary, (LENGTHS[i % len(LENGTHS)],), generator=generator).tolist()
        rows.append({'input_ids': ids, 'labels': [-100] * 4 + ids[4:]})
    return rows


def read_alpaca(path, directory, n):
    """The first n rows of at most LONGEST tokens; the answer carries loss."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    rows = []
    with open(path) as f:
        for row in json.load(f):
            asked = row['instruction'] + ('\n\n' + row['input'] if row['input'] else '')
            prompt = tokenizer('### Instruction:\n%s\n\n### Response:\n' % asked)['input_ids']
            ids = prompt + tokenizer(row['output'])['input_ids'] + [tokenizer.eos_token_id]
            if len(ids) <= LONGEST and len(rows) < n:
                rows.append({'input_ids': ids, 'labels': [-100] * len(prompt) + ids[len(prompt):]})
    return rows


def collate(rows):
    longest = max(len(r['input_ids']) for r in rows)

    def pad(key, value):
        return torch.tensor([r[key] + [value] * (longest - len(r[key])) for r in rows])
    mask = torch.tensor([[1] * len(r['input_ids']) + [0] * (longest - len(r['input_ids'])) for r in rows])
    return {'input_ids': pad('input_ids', 0), 'labels': pad('labels', -100), 'attention_mask': mask}


def load(directory):
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation='eager')


def patterns_of(keys, key):
    return keys[keys.index(key) + 1].split(',') if key in keys else []


def freeze(model, keys):
    """As Ballast's keys: an expression matches whole parts of a name between dots."""
    trainable, frozen = patterns_of(keys, '--trainable_modules') or ['.*'], patterns_of(keys, '--freeze')
    n = 0

    def matches(patterns, name):
        parts = name.split('.')
        return any(re.fullmatch(p, '.'.join(parts[i:k])) for p in patterns
                   for i in range(len(parts)) for k in range(i + 1, len(parts) + 1))
    for name, p in model.named_parameters():
        p.requires_grad_(matches(trainable, name) and not matches(frozen, name))
        n += p.numel() if p.requires_grad else 0
    print('Trainer trains %.4g M of %.4g M weights' % (n * 1e-6, sum(p.numel() for p in model.parameters()) * 1e-6))


def train_with_transformers(directory, path, steps, work, keys):
    """In a process of its own: writes the model, and the losses and seconds of its steps, into work/trainer."""
    rows = read_rows(path)
    output = os.path.join(work, 'trainer')
    model = load(directory)
    freeze(model, keys)
    arguments = transformers.TrainingArguments(
        output_dir=output, per_device_train_batch_size=1, gradient_accumulation_steps=ACCUMULATION,
        max_steps=steps, learning_rate=RATE, lr_scheduler_type='constant', weight_decay=DECAY, max_grad_norm=CLIP,
        logging_steps=1, save_strategy='no', report_to=[], use_cpu=True, bf16=False, optim='adamw_torch', disable_tqdm=True,
        logging_nan_inf_filter=False)
    losses = Losses()
    InOrder(model=model, args=arguments, train_dataset=rows, data_collator=collate, callbacks=[losses]).train()
    os.makedirs(output, exist_ok=True)
    model.save_pretrained(output)
    with open(os.path.join(output, 'steps.json'), 'w') as f:
        json.dump({'losses': losses.losses, 'seconds': losses.seconds}, f)


def run(words):
    """Its CPU seconds and peak bytes."""
    child = subprocess.Popen(words)
    _, status, used = os.wait4(child.pid, 0)
    if status != 0:
        sys.exit('%s: status %d' % (words[0], status))
    return used.ru_utime + used.ru_stime, used.ru_maxrss * 1024


def run_trainer(directory, path, steps, work, keys):
    used = run([sys.executable, os.path.abspath(__file__), '--trainer', directory, path, str(steps), work, *keys])
    with open(os.path.join(work, 'trainer', 'steps.json')) as f:
        done = json.load(f)
    return done['losses'], done['seconds'], used


def run_ballast(program, directory, path, steps, work, keys):
    output = os.path.join(work, 'ballast')
    used = run([program, 'train', '--model_name_or_path', directory, '--train_file', path, '--data_format', 'tokens',
                '--output_dir', output, '--overwrite_output_dir', 'true', '--finetuning_type', 'full', '--device', 'cpu',
                '--max_steps', str(steps), '--learning_rate', str(RATE), '--lr_scheduler_type', 'constant',
                '--weight_decay', str(DECAY), '--max_grad_norm', str(CLIP), '--per_device_train_batch_size', '1',
                '--gradient_accumulation_steps', str(ACCUMULATION), '--shuffle', 'false', '--epoch_end', 'continue',
                '--max_seq_length', '512', '--model_dtype', 'f32', *keys])
    with open(os.path.join(output, 'metrics.jsonl')) as f:
        lines = [line for line in map(json.loads, f) if 'grad_norm' in line]
    return [(line['loss'], line['grad_norm']) for line in lines], [line['step_s'] for line in lines], used


def read_rows(path):
    with open(path) as f:
        return [json.loads(line) for line in f]


def loss_of(model, rows):
    with torch.no_grad():
        return sum(model(**collate([r])).loss.item() for r in rows) / len(rows)


def report(name, rows, seconds, used):
    """Tokens per second of the median step: steps have other numbers of tokens."""
    speeds = [sum(len(r['input_ids']) for r in rows[i * ACCUMULATION:(i + 1) * ACCUMULATION]) / s for i, s in enumerate(seconds)]
    print('%-8s %.1f tokens/s (median step), %.0f CPU seconds, peak %.2f GB' % (
        name, statistics.median(speeds), used[0], used[1] / 1e9))


def train_in_float64(directory, rows, steps):
    """The losses of the first steps."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation='eager')
    decayed = set(transformers.Trainer.get_decay_parameter_names(None, model))
    groups = [{'params': [p for name, p in model.named_parameters() if (name in decayed) == has_decay],
               'weight_decay': DECAY if has_decay else 0} for has_decay in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    losses = []
    for step in range(steps):
        batch = rows[step * ACCUMULATION:(step + 1) * ACCUMULATION]
        n_labels = sum(label != -100 for row in batch for label in row['labels'][1:])
        losses.append(0)
        for row in map(collate, ([r] for r in batch)):
            logits = model(input_ids=row['input_ids']).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, row['labels'][0, 1:], reduction='sum') / n_labels
            loss.backward()
            losses[-1] += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def main():
    if sys.argv[1] == '--trainer':
        directory, path, steps, work = sys.argv[2:6]
        return train_with_transformers(directory, path, int(steps), work, sys.argv[6:])
    program, directory, work = sys.argv[1:4]
    rest = sys.argv[4:]
    steps = int(rest.pop(0)) if rest and rest[0].isdigit() else STEPS
    n = steps * ACCUMULATION
    os.makedirs(work, exist_ok=True)
    if rest and rest[0] == '--alpaca':
        rows = read_alpaca(rest[1], directory, n)
        rest = rest[2:]
    else:
        rows = make_rows(transformers.AutoConfig.from_pretrained(directory).vocab_size, n)
    n_exact = 0
    if rest and rest[0] == '--float64':
        n_exact = int(rest[1])
        rest = rest[2:]
    path = os.path.join(work, 'rows.jsonl')
    with open(path, 'w') as f:
        f.writelines(json.dumps(r) + '\n' for r in rows)
    ours, our_seconds, our_use = run_ballast(program, directory, path, steps, work, rest)
    theirs, their_seconds, their_use = run_trainer(directory, path, steps, work, rest)
    worst = 0
    for step, ((a, norm_a), (b, norm_b)) in enumerate(zip(ours, theirs, strict=True)):
        worst = max(worst, abs(a / b - 1))
        print('step %3d  loss %.7f  Trainer %.7f  off by %.1e  gradient norm %.5f, %.5f' % (
            step + 1, a, b, abs(a / b - 1), norm_a, norm_b))
    for step, exact in enumerate(train_in_float64(directory, rows, n_exact)):
        print('step %3d  float64 %.9f  Ballast off by %.1e, Trainer by %.1e' % (
            step + 1, exact, abs(ours[step][0] / exact - 1), abs(theirs[step][0] / exact - 1)))
    report('Ballast', rows, our_seconds, our_use)
    report('Trainer', rows, their_seconds, their_use)
    ours, theirs = (load(os.path.join(work, d)).eval() for d in ('ballast/model', 'trainer'))
    print('largest difference of a loss: %.1e; loss of the written model %.6f, of Trainer\'s %.6f' % (
        worst, loss_of(ours, rows[:EVALUATED]), loss_of(theirs, rows[:EVALUATED])))


if __name__ == '__main__':
    main()
