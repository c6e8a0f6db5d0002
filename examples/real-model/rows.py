# SPDX-License-Identifier: Apache-2.0
"""Rows of data_format alpaca or prompt_completion (docs/data.md), in JSON lines or a JSON array.

usage: rows.py split FILE DIR         writes DIR/validation.jsonl, the first rows (a tenth, at most 50), and DIR/train.jsonl, the others
       rows.py prompts FILE COUNT     prints the prompts of the first rows, each followed by a NUL
"""
import json
import os
import sys

WITH_INPUT = ('Below is an instruction that describes a task, paired with an input that provides further context. '
              'Write a response that appropriately completes the request.\n\n'
              '### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:')
WITHOUT_INPUT = ('Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n'
                 '### Instruction:\n{instruction}\n\n### Response:')


def read(path):
    with open(path, encoding='utf-8') as file:
        text = file.read()
    if text.lstrip().startswith('['):
        return json.loads(text)
    return [json.loads(line) for line in text.split('\n') if line.strip()]


def prompt_and_answer(row):
    if 'prompt' in row and 'completion' in row:
        return row['prompt'], row['completion']
    if 'instruction' in row and 'output' in row:
        template = WITH_INPUT if row.get('input') else WITHOUT_INPUT
        return template.format(instruction=row['instruction'], input=row.get('input')), row['output']
    raise SystemExit('rows.py: expected rows of alpaca or prompt_completion, got the keys %s' % ', '.join(row))


def write(path, rows):
    with open(path, 'w', encoding='utf-8') as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + '\n' for row in rows)


def main():
    if len(sys.argv) == 4 and sys.argv[1] == 'split':
        rows = [row for row in read(sys.argv[2]) if prompt_and_answer(row)[1].strip()]  # the program rejects empty answers
        held_out = min(50, len(rows) // 10)
        write(os.path.join(sys.argv[3], 'validation.jsonl'), rows[:held_out])
        write(os.path.join(sys.argv[3], 'train.jsonl'), rows[held_out:])
    elif len(sys.argv) == 4 and sys.argv[1] == 'prompts':
        for row in read(sys.argv[2])[:int(sys.argv[3])]:
            sys.stdout.write(prompt_and_answer(row)[0] + '\0')
    else:
        raise SystemExit(__doc__)


if __name__ == '__main__':
    main()
