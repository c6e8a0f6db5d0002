#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains the golden model with each preference loss in TRL and in Ballast, both in fp32, and compares the losses per step.

TRL's trainers get the rows as tokens: their own tokenization is passed over, everything else is theirs (collator, truncation,
mismatched answers, losses, PEFT reference, optimizer). With --rows MODEL_DIR ROWS.jsonl ADAPTER_DIR a model and conversations
take the place of the golden ones, and TRL tokenizes them. pairs_of_messages.py makes ROWS; a training of one step with --learning_rate 0
makes ADAPTER_DIR. On a CPU TRL takes about 10 s per step of SmolLM2-135M.

Made with trl 1.16.0, transformers 5.23.0, peft 0.21.2, torch 2.15.0. ORPO and SimPO are TRL's experimental trainers.

usage: compare_trl.py --program ballast [--only LOSS ...] [--rows MODEL_DIR ROWS.jsonl ADAPTER_DIR] [--steps N] [--out FILE]
"""
import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import warnings

warnings.filterwarnings('ignore')
os.environ.setdefault('TRL_EXPERIMENTAL_SILENCE', '1')
os.environ.setdefault('HF_HUB_OFFLINE', '1')

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from peft import PeftModel  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, TrainerCallback  # noqa: E402

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import make_golden as golden  # noqa: E402

#  loss of Ballast: (keys, arguments of TRL)
LOSSES = {
    'sigmoid': ({}, {'loss_type': ['sigmoid']}),
    'sigmoid-ld': ({'ld_alpha': 0.3}, {'loss_type': ['sigmoid'], 'ld_alpha': 0.3}),
    'hinge': ({}, {'loss_type': ['hinge']}),
    'ipo': ({}, {'loss_type': ['ipo']}),
    'sigmoid_norm': ({}, {'loss_type': ['sigmoid_norm']}),
    'robust': ({'label_smoothing': 0.2}, {'loss_type': ['robust'], 'label_smoothing': 0.2}),
    'apo_zero': ({}, {'loss_type': ['apo_zero']}),
    'apo_down': ({}, {'loss_type': ['apo_down']}),
    'sigmoid,sft': ({'loss_weights': '1,0.25'}, {'loss_type': ['sigmoid', 'sft'], 'loss_weights': [1.0, 0.25]}),
    'orpo': ({}, {}),
    'simpo': ({'simpo_gamma': 1.0, 'label_smoothing': 0.1},
              {'loss_type': 'simpo', 'simpo_gamma': 1.0, 'label_smoothing': 0.1, 'cpo_alpha': 0.0}),
    'simpo,sft': ({'loss_weights': '1,1'}, {'loss_type': 'simpo', 'cpo_alpha': 1.0}),
    'kto': ({'desirable_weight': 1.5}, {'desirable_weight': 1.5}),
}
METRICS = ('rewards/chosen', 'rewards/rejected', 'rewards/margins', 'rewards/accuracies', 'logps/chosen', 'logps/rejected', 'kl')


class Log(TrainerCallback):
    def __init__(self):
        self.steps = []

    def on_log(self, args, state, control, logs=None, **more):
        if 'loss' in logs:
            self.steps.append(dict(logs))


def split_labels(side):
    """(prompt, answer): the labels say where it begins."""
    n = next(t for t, label in enumerate(side['labels']) if label != golden.IGNORED)
    return side['input_ids'][:n], side['input_ids'][n:]


def pair_row(row):
    prompt, chosen = split_labels(row['chosen'])
    return {'prompt_ids': prompt, 'chosen_ids': chosen, 'rejected_ids': split_labels(row['rejected'])[1]}


def label_row(row):
    prompt, answer = split_labels(row)
    return {'prompt_ids': prompt, 'completion_ids': answer, 'label': row['label']}


def orpo_row(row):
    out = {'prompt': '', 'chosen': '', 'rejected': '', 'prompt_input_ids': split_labels(row['chosen'])[0]}
    out['prompt_attention_mask'] = [1] * len(out['prompt_input_ids'])
    for k in ('chosen', 'rejected'):
        side = golden.cut(row[k])
        out.update({k + '_input_ids': side['input_ids'], k + '_labels': side['labels'],
                    k + '_attention_mask': [1] * len(side['input_ids'])})
    return out


def trainer_of(loss, from_tokens):
    """(class, configuration class) whose tokenization is passed over."""
    if loss == 'kto':
        from trl import KTOConfig, KTOTrainer

        class Trainer(KTOTrainer):
            def _prepare_dataset(self, dataset, processing_class, args, name):
                def rotate(rows):
                    rows['KL_completion_ids'] = rows['completion_ids'][-1:] + rows['completion_ids'][:-1]
                    return rows
                return dataset.map(rotate, batched=True, batch_size=args.per_device_train_batch_size)
        return (Trainer if from_tokens else KTOTrainer), KTOConfig
    if loss.startswith('orpo') or loss.startswith('simpo'):
        if loss.startswith('orpo'):
            from trl.experimental.orpo import ORPOConfig as Config, ORPOTrainer as Base
        else:
            from trl.experimental.cpo import CPOConfig as Config, CPOTrainer as Base

        class Trainer(Base):
            def tokenize_row(self, feature, model=None):
                return {k: v for k, v in feature.items() if k.endswith(('_ids', '_mask', '_labels'))}
        return (Trainer if from_tokens else Base), Config
    from trl import DPOConfig, DPOTrainer

    class Trainer(DPOTrainer):
        def _prepare_dataset(self, dataset, *more):
            return dataset
    return (Trainer if from_tokens else DPOTrainer), DPOConfig


def tiny_tokenizer():
    from tokenizers import Tokenizer, models
    vocabulary = {'t%d' % i: i for i in range(golden.VOCAB)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token='t0')), bos_token='t1',
                                   eos_token='t2', pad_token='t2')


def run_trl(loss, arguments, case, scratch):
    cls, config = trainer_of(loss, case['rows'] is None)
    model = AutoModelForCausalLM.from_pretrained(case['model'], dtype=torch.float32, attn_implementation='eager')
    model = PeftModel.from_pretrained(model, case['adapter'], is_trainable=True)
    for p in model.parameters():
        p.data = p.data.float()
    tokenizer = AutoTokenizer.from_pretrained(case['model']) if case['rows'] else tiny_tokenizer()
    args = config(output_dir=scratch, max_steps=case['steps'], per_device_train_batch_size=case['per_device'],
                  gradient_accumulation_steps=case['accumulation'], learning_rate=case['learning_rate'],
                  lr_scheduler_type='constant', max_length=case['max_length'], beta=case['beta'], logging_steps=1, bf16=False,
                  gradient_checkpointing=False, save_strategy='no', report_to='none', train_sampling_strategy='sequential',
                  use_cpu=True, disable_tqdm=True, remove_unused_columns=False, dataloader_drop_last=False, **arguments)
    log = Log()
    with contextlib.redirect_stdout(io.StringIO()):
        cls(model=model, args=args, train_dataset=Dataset.from_list(case['data'](loss)), processing_class=tokenizer,
            callbacks=[log]).train()
    return log.steps


def run_ballast(program, loss, keys, case, scratch):
    out = os.path.join(scratch, 'ballast')
    rows = case['file'](loss)
    command = [program, 'train', '--model_name_or_path', case['model'], '--init_adapter', case['adapter'], '--output_dir', out,
               '--train_file', rows, '--loss_type', loss.replace('-ld', ''), '--max_steps', case['steps'],
               '--per_device_train_batch_size', case['per_device'], '--gradient_accumulation_steps', case['accumulation'],
               '--learning_rate', case['learning_rate'], '--lr_scheduler_type', 'constant', '--shuffle', 'false',
               '--max_seq_length', case['max_length'], '--base_format', 'stored', '--beta', case['beta'], '--epoch_end', 'continue',
               '--save_strategy', 'no', '--device', 'cpu', '--ranks', 1, '--threads', case['threads'],
               '--overwrite_output_dir', 'true']
    for k, v in keys.items():
        command += ['--' + k, v]
    subprocess.run([str(c) for c in command], check=True, stderr=subprocess.DEVNULL)
    with open(os.path.join(out, 'metrics.jsonl')) as f:
        return [json.loads(line) for line in f if '"loss"' in line]


def difference(a, b, key):
    """Of the steps that have it in both, relative to what is larger than 1. None: no step has."""
    both = [(x[key], y[key]) for x, y in zip(a, b) if key in x and key in y]
    return max(abs(x - y) / max(1.0, abs(y)) for x, y in both) if both else None


def golden_case(a):
    per_device, accumulation = 2, 4
    pairs = golden.usable(golden.pairs())
    pairs = [{'chosen': c, 'rejected': r} for c, r in pairs]
    labels = golden.usable(golden.labeled())
    scratch = tempfile.mkdtemp()

    def rows_of(loss):
        return labels if loss == 'kto' else pairs

    def file(loss):
        path = os.path.join(scratch, 'rows-%s.jsonl' % ('labels' if loss == 'kto' else 'pairs'))
        golden.inputs.write_tokens(path, rows_of(loss))
        return path

    def data(loss):
        n = a.steps * per_device * accumulation
        rows = [rows_of(loss)[i % len(rows_of(loss))] for i in range(n)]
        make = label_row if loss == 'kto' else orpo_row if loss.startswith(('orpo', 'simpo')) else pair_row
        return [make(r) for r in rows]
    return {'model': os.path.join(golden.GOLDEN, 'models', golden.MODEL),
            'adapter': os.path.join(golden.GOLDEN, 'adapters', golden.ADAPTER), 'rows': None, 'file': file, 'data': data,
            'per_device': per_device, 'accumulation': accumulation, 'learning_rate': 3e-4, 'beta': 0.2,
            'max_length': golden.MAX_LENGTH, 'steps': a.steps, 'threads': 1}


def rows_case(a):
    model, path, adapter = a.rows
    with open(path) as f:
        rows = [json.loads(line) for line in f]
    return {'model': model, 'adapter': adapter, 'rows': path, 'file': lambda loss: path,
            'data': lambda loss: [rows[i % len(rows)] for i in range(a.steps)], 'per_device': 1, 'accumulation': 1,
            'learning_rate': 1e-5, 'beta': 0.1, 'max_length': 256, 'steps': a.steps, 'threads': 2}


def main():
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    p.add_argument('--program', required=True)
    p.add_argument('--only', nargs='+', metavar='LOSS')
    p.add_argument('--rows', nargs=3, metavar=('MODEL_DIR', 'ROWS', 'ADAPTER_DIR'))
    p.add_argument('--steps', type=int, default=20)
    p.add_argument('--out', help='both runs, as JSON')
    a = p.parse_args()
    case, worst, results = (rows_case if a.rows else golden_case)(a), 0.0, {}
    for loss, (keys, arguments) in LOSSES.items():
        if loss not in (a.only or (['sigmoid'] if a.rows else LOSSES)):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            theirs = run_trl(loss, arguments, case, scratch)
            ours = run_ballast(a.program, loss, keys, case, scratch)
        assert len(theirs) == len(ours) == a.steps, (len(theirs), len(ours))
        errors = {k: difference(ours, theirs, k) for k in ('loss', 'grad_norm') + METRICS}
        print('%-14s %s' % (loss, '  '.join('%s %.1e' % (k, e) for k, e in errors.items() if e is not None)), flush=True)
        worst = max(worst, errors['loss'])
        results[loss] = {'trl': theirs, 'ballast': ours}
    if a.out:
        with open(a.out, 'w') as f:
            json.dump(results, f)
    if worst > 1e-5:
        raise SystemExit('losses differ by %.1e' % worst)


if __name__ == '__main__':
    main()
