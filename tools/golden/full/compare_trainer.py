#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains every weight of a model with transformers' own Trainer in float32 and with Ballast, and compares the losses.

Rows of random tokens of several lengths, in file order; AdamW with weight decay, clipping and accumulation. Then the model
that Ballast wrote is loaded by transformers, and its loss over the rows compared with that of Trainer's model.

usage: compare_trainer.py BALLAST MODEL_DIR WORK_DIR [STEPS] [--ballast_key value ...]
"""
import json
import os
import subprocess
import sys

import torch
import transformers

STEPS, ACCUMULATION, RATE, DECAY, CLIP = 10, 2, 2e-5, 0.1, 1.0
LENGTHS = (96, 40, 128, 72, 64, 24)


class InOrder(transformers.Trainer):
    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Losses(transformers.TrainerCallback):
    def __init__(self):
        self.losses = []

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


def collate(rows):
    longest = max(len(r['input_ids']) for r in rows)

    def pad(key, value):
        return torch.tensor([r[key] + [value] * (longest - len(r[key])) for r in rows])
    mask = torch.tensor([[1] * len(r['input_ids']) + [0] * (longest - len(r['input_ids'])) for r in rows])
    return {'input_ids': pad('input_ids', 0), 'labels': pad('labels', -100), 'attention_mask': mask}


def train_with_transformers(directory, rows, steps, work):
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation='eager')
    arguments = transformers.TrainingArguments(
        output_dir=os.path.join(work, 'trainer'), per_device_train_batch_size=1, gradient_accumulation_steps=ACCUMULATION,
        max_steps=steps, learning_rate=RATE, lr_scheduler_type='constant', weight_decay=DECAY, max_grad_norm=CLIP,
        logging_steps=1, save_strategy='no', report_to=[], use_cpu=True, bf16=False, optim='adamw_torch', disable_tqdm=True,
        logging_nan_inf_filter=False)
    losses = Losses()
    InOrder(model=model, args=arguments, train_dataset=rows, data_collator=collate, callbacks=[losses]).train()
    return model.eval(), losses.losses


def train_with_ballast(program, directory, path, steps, work, keys):
    output = os.path.join(work, 'ballast')
    subprocess.run([program, 'train', '--model_name_or_path', directory, '--train_file', path, '--data_format', 'tokens',
                    '--output_dir', output, '--overwrite_output_dir', 'true', '--finetuning_type', 'full', '--device', 'cpu',
                    '--max_steps', str(steps), '--learning_rate', str(RATE), '--lr_scheduler_type', 'constant',
                    '--weight_decay', str(DECAY), '--max_grad_norm', str(CLIP), '--per_device_train_batch_size', '1',
                    '--gradient_accumulation_steps', str(ACCUMULATION), '--shuffle', 'false', '--epoch_end', 'continue',
                    '--max_seq_length', '512', '--model_dtype', 'f32', *keys], check=True)
    with open(os.path.join(output, 'metrics.jsonl')) as f:
        lines = [json.loads(line) for line in f]
    return [(line['loss'], line['grad_norm']) for line in lines if 'grad_norm' in line]


def loss_of(model, rows):
    with torch.no_grad():
        return sum(model(**collate([r])).loss.item() for r in rows) / len(rows)


def main():
    program, directory, work = sys.argv[1:4]
    rest = sys.argv[4:]
    steps = int(rest.pop(0)) if rest and rest[0].isdigit() else STEPS
    vocabulary = transformers.AutoConfig.from_pretrained(directory).vocab_size
    os.makedirs(work, exist_ok=True)
    rows = make_rows(vocabulary, steps * ACCUMULATION)
    path = os.path.join(work, 'rows.jsonl')
    with open(path, 'w') as f:
        f.writelines(json.dumps(r) + '\n' for r in rows)
    ours = train_with_ballast(program, directory, path, steps, work, rest)
    model, theirs = train_with_transformers(directory, rows, steps, work)
    worst = 0
    for step, ((a, norm_a), (b, norm_b)) in enumerate(zip(ours, theirs, strict=True)):
        worst = max(worst, abs(a / b - 1))
        print('step %3d  loss %.7f  Trainer %.7f  off by %.1e  gradient norm %.5f, %.5f' % (
            step + 1, a, b, abs(a / b - 1), norm_a, norm_b))
    written = transformers.AutoModelForCausalLM.from_pretrained(os.path.join(work, 'ballast', 'model'), dtype=torch.float32,
                                                               attn_implementation='eager').eval()
    print('largest difference of a loss: %.1e; loss of the written model %.6f, of Trainer\'s %.6f' % (
        worst, loss_of(written, rows), loss_of(model, rows)))


if __name__ == '__main__':
    main()
