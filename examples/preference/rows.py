#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rows for examples/preference: bills of lading of demo/, in full and in brief (From and To alone).

usage: rows.py sft ROWS.jsonl OUT           prompt and completion, each second one in brief
       rows.py pairs ROWS.jsonl OUT         the brief bill was chosen, the full one rejected
       rows.py prompts ROWS.jsonl N         the first N prompts, one per line
       rows.py count ROWS.jsonl ANSWERS     how many of the answers of `ballast generate --json` are brief, and right
"""
import json
import sys


def read(path):
    with open(path) as f:
        return [json.loads(line) for line in f if line.strip()]


def brief(bill):
    return '\n'.join(bill.split('\n')[:3])  # it begins with a line feed


def sft(rows):
    return [{'prompt': r['prompt'], 'completion': brief(r['completion']) if i % 2 else r['completion']}
            for i, r in enumerate(rows)]


def pairs(rows):
    return [{'prompt': r['prompt'], 'chosen': brief(r['completion']), 'rejected': r['completion']} for r in rows]


def write(rows, path):
    with open(path, 'w') as f:
        for row in rows:
            f.write(json.dumps(row) + '\n')


def count(rows, answers):
    n_brief = n_right = 0
    for row, answer in zip(rows, answers):
        text = answer['text'].strip()
        n_brief += text.count('\n') == 1
        n_right += text in (row['completion'].strip(), brief(row['completion']).strip())
    print('%d of %d answers are brief, %d are right' % (n_brief, len(answers), n_right))


def main():
    what, path, last = sys.argv[1:4]
    rows = read(path)
    if what == 'sft':
        write(sft(rows), last)
    elif what == 'pairs':
        write(pairs(rows), last)
    elif what == 'prompts':
        for row in rows[:int(last)]:
            print(row['prompt'])
    else:
        count(rows, read(last))


main()
