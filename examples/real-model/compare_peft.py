#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Ballast's runs of examples/real-model/run against transformers and PEFT in fp32, over the same weights.

    compare_peft.py tokens --model DIR --data FILE --rows ROWS.jsonl
        Tokenizes FILE with transformers and compares it with ROWS, what `ballast tokenize --json` printed.
    compare_peft.py train --model DIR --base_format F --rows ROWS.jsonl --skip N --start DIR --peft OUT.jsonl
        Trains with PEFT from the adapter of --start on the rows after the first --skip; --max_steps and others as in train.yaml.
    compare_peft.py losses --run DIR --peft OUT.jsonl
        Compares loss and gradient norm of each step of that run with metrics.jsonl of --run.
    compare_peft.py adapter --model DIR --base_format F --rows ROWS.jsonl --run DIR --ballast PROGRAM
        Loads the adapter of --run with PeftModel.from_pretrained. Compares the loss of ROWS, and log-probabilities of the likeliest
        next tokens, with `ballast eval`.

The base of fp8_row is the checkpoint after tools/golden/train/checkpoint.py rounded its projections, which shares no code with Ballast.
Exit code 1 when a relative difference is above --tolerance. Tried with torch 2.15.0, transformers 5.23.0, peft 0.21.2.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, '../../tools/golden/train'))
import checkpoint
import reference
import rows as data_rows

# Sums of fp32 in another order: 1.4e-7 was seen over 40 steps of other models. A run amplifies such differences from step to step.
TOLERANCE = 1e-5
# Of a log-probability, absolute: fp32 rounds a logit of 20 by 2e-6, and 30 layers by more; 9e-6 was seen.
LOG_P_TOLERANCE = 1e-4


def load_base(a):
    """transformers' model in fp32 with the weights that a base in a.base_format multiplies with."""
    model = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32, attn_implementation='eager')
    model.config.use_cache = False
    if a.base_format != 'stored':
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if checkpoint.is_projection(name):
                    parameter.copy_(torch.from_numpy(checkpoint.through_format(parameter.numpy(), a.base_format)))
    return model.eval()


def relative(x, y):
    return abs(x - y) / abs(y)


def finish(what, worst, a):
    print('%s: largest relative difference %.2g (tolerance %g)' % (what, worst, a.tolerance))
    if not worst <= a.tolerance:
        raise SystemExit('%s: above the tolerance' % what)


def compare_tokens(a):
    tokenizer = AutoTokenizer.from_pretrained(a.model)
    theirs = data_rows.read(a.data)
    ours = reference.read_rows(a.rows)
    different = 0
    for row, expected in zip(theirs, ours):
        prompt, answer = (tokenizer(text, add_special_tokens=False).input_ids for text in data_rows.prompt_and_answer(row))
        ids = prompt + answer + [tokenizer.eos_token_id]
        n = len(expected['input_ids'])  # truncated at max_seq_length
        different += ids[:n] != expected['input_ids'] or ([-100] * len(prompt) + ids[len(prompt):])[:n] != expected['labels']
    print('tokens: %d of %d rows differ from transformers' % (different, len(ours)))
    if different or not ours:
        raise SystemExit('tokens: rows differ')


def read_metrics(path):
    with open(path) as file:
        lines = [json.loads(line) for line in file]
    return {line['step']: line for line in lines if 'loss' in line}


def train(a):
    """PEFT's own run, a line of JSON per step."""
    model = reference.attach_adapter(load_base(a), a.start)
    config = {'learning_rate': a.learning_rate, 'adam_epsilon': 1e-8, 'adam_beta1': 0.9, 'adam_beta2': 0.999, 'weight_decay': 0.0,
              'lr_scheduler_type': 'cosine', 'warmup_steps': a.warmup_steps, 'max_steps': a.max_steps, 'max_grad_norm': 1.0}
    with open(a.peft, 'w') as file:
        def on_step(index, loss, norm, rate, gradients):
            file.write(json.dumps({'step': index + 1, 'loss': loss, 'grad_norm': norm, 'learning_rate': rate}) + '\n')
            file.flush()

        reference.train(model, reference.read_rows(a.rows)[a.skip:], a.batch, config, on_step)


def compare_losses(a):
    ours = read_metrics(os.path.join(a.run, 'metrics.jsonl'))
    theirs = read_metrics(a.peft)
    if set(ours) != set(theirs):
        raise SystemExit('losses: %d steps of Ballast, %d of PEFT' % (len(ours), len(theirs)))
    for step, line in ours.items():
        if abs(line['learning_rate'] - theirs[step]['learning_rate']) > 1e-15:
            raise SystemExit('losses: step %d has another learning rate' % step)
    worst = {key: max(relative(ours[step][key], theirs[step][key]) for step in ours) for key in ('loss', 'grad_norm')}
    print('gradient norm of %d steps: largest relative difference %.2g' % (len(ours), worst['grad_norm']))
    finish('loss of %d steps' % len(ours), worst['loss'], a)


def ballast_eval(a, rows):
    """(loss, labels) that `ballast eval` prints for these rows."""
    with tempfile.NamedTemporaryFile('w', suffix='.jsonl') as file:
        for row in rows:
            file.write(json.dumps(row) + '\n')
        file.flush()
        done = subprocess.run([a.ballast, 'eval', '--model', a.model, '--adapter', a.run, '--validation_file', file.name, '--data_format',
                               'tokens', '--base_format', a.base_format, '--threads', str(torch.get_num_threads())],
                              stdout=subprocess.PIPE, check=True)
    line = json.loads(done.stdout)
    return line['eval_loss'], line['label_tokens']


def compare_adapter(a):
    model = PeftModel.from_pretrained(load_base(a), a.run).eval()
    rows = reference.read_rows(a.rows)
    theirs = reference.evaluate(model, rows)
    ours, labels = ballast_eval(a, rows)
    print('validation loss over %d labels: PEFT %.9f, Ballast %.9f' % (labels, theirs, ours))
    finish('adapter: validation loss', relative(ours, theirs), a)
    worst = 0.0
    for row in rows[:a.contexts]:
        context = [i for i, label in zip(row['input_ids'], row['labels']) if label == -100]
        with torch.no_grad():
            logits = reference.row_logits(model, {'input_ids': context})[-1].double()
        log_p = torch.log_softmax(logits, dim=-1)
        for token in log_p.topk(a.top).indices.tolist():
            probe = {'input_ids': context + [token], 'labels': [-100] * len(context) + [token]}
            ours, _ = ballast_eval(a, [probe])
            print('context of %d tokens, next token %d: log p, PEFT %.9f, Ballast %.9f' % (len(context), token, log_p[token], -ours))
            worst = max(worst, abs(-ours - log_p[token].item()))
    print('adapter: largest difference of a log-probability %.2g (tolerance %g)' % (worst, LOG_P_TOLERANCE))
    if not worst <= LOG_P_TOLERANCE:
        raise SystemExit('adapter: above the tolerance')


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('what', choices=('tokens', 'train', 'losses', 'adapter'))
    p.add_argument('--model')
    p.add_argument('--rows', help='JSON lines of `ballast tokenize --json`, the whole data set')
    p.add_argument('--skip', type=int, default=0, help='rows held out for validation, the first of the file')
    p.add_argument('--data', help='the data set itself')
    p.add_argument('--base_format', default='stored', choices=('stored', 'fp8_row'))
    p.add_argument('--run', help="Ballast's output_dir")
    p.add_argument('--start', help='the adapter before the first step')
    p.add_argument('--batch', type=int, default=2)
    p.add_argument('--peft', help="PEFT's losses")
    p.add_argument('--max_steps', type=int, default=200)
    p.add_argument('--warmup_steps', type=int, default=10)
    p.add_argument('--learning_rate', type=float, default=2e-4)
    p.add_argument('--ballast', help='the program')
    p.add_argument('--contexts', type=int, default=4)
    p.add_argument('--top', type=int, default=4)
    p.add_argument('--tolerance', type=float, default=TOLERANCE)
    p.add_argument('--threads', type=int, default=len(os.sched_getaffinity(0)))
    return p.parse_args()


def main():
    os.environ['HF_HUB_OFFLINE'] = '1'
    a = arguments()
    torch.set_num_threads(a.threads)
    {'tokens': compare_tokens, 'train': train, 'losses': compare_losses, 'adapter': compare_adapter}[a.what](a)


if __name__ == '__main__':
    main()
