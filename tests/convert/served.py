# SPDX-License-Identifier: Apache-2.0
"""Shared by test_llama_cpp and test_transformers: a trained model's files by Ballast (adapter, merged and quantized directory), the rows, and
their losses by `ballast eval`, beside those of another engine.

An engine is a test's own file, run as `FILE --serve MODEL ROWS ADAPTER` in the interpreter that has it: for each row of ROWS it prints a JSON
line with the row's ids and its mean loss."""
import json
import os
import subprocess
import sys

N_ROWS = 8
LEAST_EFFECT = 1e-3  # of the adapter on a row's loss


def run(*command, **options):
    result = subprocess.run([str(c) for c in command], capture_output=True, text=True, **options)
    if result.returncode:
        sys.exit('FAILED: %s: exit code %d: %s' % (' '.join(map(str, command)), result.returncode, (result.stdout + result.stderr)[-2000:]))
    return result.stdout


class Case:
    """Files in `work`: tuned (adapter), merged (f32), quantized-FORMAT, rows.jsonl (texts)."""

    def __init__(self, program, root, model, engine, python, work):
        self.program, self.model, self.engine, self.python, self.work = program, model, engine, python, work
        self.rows = self.path('rows.jsonl')
        self.n_failed = 0
        rows = [json.loads(line) for line in open(os.path.join(root, 'demo/validation.jsonl'))][:N_ROWS]
        with open(self.rows, 'w') as file:
            file.writelines(json.dumps({'text': r['prompt'] + r['completion']}) + '\n' for r in rows)
        self.tuned, self.merged = (self.path(n) for n in ('tuned', 'merged'))
        run(program, 'train', os.path.join(root, 'examples/real-model/train.yaml'), '--model_name_or_path', model, '--train_file',
            os.path.join(root, 'demo/train.jsonl'), '--output_dir', self.tuned, '--max_steps', 8, '--warmup_steps', 0, '--eval_strategy', 'no')
        run(program, 'merge', '--model', model, '--adapter', self.tuned, '--output_dir', self.merged, '--base_format', 'f32')

    def quantized(self, base_format):
        run(self.program, 'quantize', self.model, self.path('quantized-' + base_format), '--base_format', base_format)
        return self.path('quantized-' + base_format)

    def path(self, name):
        return os.path.join(self.work, name)

    def losses(self, model, adapter):
        """ballast eval of each row, and the rows' ids."""
        given = run(self.program, 'tokenize', '--tokenizer', model, '--add_special_tokens', 'false', input=open(self.rows).read())
        ids = [json.loads(line)['input_ids'] for line in given.splitlines()]
        losses = []
        for row in ids:
            with open(self.path('one.jsonl'), 'w') as file:
                file.write(json.dumps({'input_ids': row, 'labels': row}) + '\n')
            line = run(self.program, 'eval', '--model', model, '--validation_file', self.path('one.jsonl'), '--data_format', 'tokens',
                       '--base_format', 'stored', '--device', 'cpu', *(['--adapter', adapter] if adapter else []))
            losses.append(json.loads(line)['eval_loss'])
        return ids, losses

    def compare(self, name, served, model, tolerance, served_adapter=None, adapter=None):
        """`served` is what the engine opens, `model` what ballast eval opens."""
        lines = [json.loads(line) for line in run(self.python, self.engine, '--serve', served, self.rows, served_adapter or '').splitlines()]
        ids, losses = self.losses(model, adapter)
        same = [row['ids'] for row in lines] == ids
        worst = max(abs(row['loss'] / loss - 1) for row, loss in zip(lines, losses))
        good = same and len(lines) == N_ROWS and worst < tolerance
        print('%s%s: %d rows, ids %s, worst relative difference of a loss %.1e' %
              ('' if good else 'FAILED: ', name, len(lines), 'equal' if same else 'differ', worst), flush=True)
        self.n_failed += not good
        return losses

    def finish(self, of_base, of_merged):
        if min(abs(a / b - 1) for a, b in zip(of_base, of_merged)) < LEAST_EFFECT:
            print('FAILED: the adapter changes too little to see it')
            self.n_failed += 1
        return self.n_failed != 0


def paths(*names):
    """The values of BALLAST_NAME; without one, the test is skipped."""
    values = [os.environ.get('BALLAST_' + n) for n in names]
    if not all(values):
        print('skip: %s is not set' % ' or '.join('BALLAST_' + n for n, v in zip(names, values) if not v))
        sys.exit(77)
    return values
