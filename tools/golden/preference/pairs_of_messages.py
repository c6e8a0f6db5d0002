#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Preference rows from conversations with one answer each: the row's answer was chosen, another row's rejected.

usage: pairs_of_messages.py MESSAGES.jsonl N OUT.jsonl      the N shortest rows, each with the answer of the next one
"""
import json
import sys


def main():
    path, n, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    with open(path, encoding='utf-8') as f:
        rows = [json.loads(line)['messages'] for line in f if line.strip()]
    rows = [r for r in rows if [m['role'] == 'assistant' for m in r] == [False] * (len(r) - 1) + [True]]
    rows = sorted(rows, key=lambda r: len(json.dumps(r)))[:n]
    if len(rows) < max(n, 2):
        raise SystemExit('%s has %d rows that end with their only answer, not %d' % (path, len(rows), n))
    with open(out, 'w', encoding='utf-8') as f:
        for row, other in zip(rows, rows[1:] + rows[:1]):
            pair = {'prompt': row[:-1], 'chosen': row[-1:], 'rejected': other[-1:]}
            f.write(json.dumps(pair, ensure_ascii=False) + '\n')


main()
