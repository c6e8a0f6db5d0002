#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes tests/chat/real_golden.json: hashes of ids and labels of published chat data, as transformers renders, tokenizes and masks them
with real models' tokenizers and templates. tests/chat/test_chat_real compares `ballast tokenize` with it.

    BALLAST_TEST_DATA=... BALLAST_REAL_MODEL=... python tools/golden/text/make_chat_real.py

Ids: apply_chat_template. Labels: its assistant mask where the template has {% generation %}; else the tokens that begin between the
rendering of the messages before an answer, with the generation prompt, and the end of the answer's last special token. A template may
end every rendering with the tokenizer's EOS (Phi-3.5), which is then a part of the last answer only.

Made with transformers 5.24.0, tokenizers 0.23.3.
"""
import json
import os
import sys

from transformers import AutoTokenizer, PreTrainedTokenizerFast, __version__

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..', '..')
sys.path.insert(0, os.path.join(ROOT, 'tests', 'chat'))
from real_cases import CASES, hash_row, locate, read_rows  # noqa: E402


def learned_ranges(tokenizer, messages, text):
    """Characters of the answers, with the token that ends each."""
    for i, message in enumerate(messages):
        if message['role'] != 'assistant':
            continue
        before = tokenizer.apply_chat_template(messages[:i], tokenize=False, add_generation_prompt=True)
        answer = tokenizer.apply_chat_template(messages[:i + 1], tokenize=False)
        if not text.startswith(answer):
            answer = answer.removesuffix(tokenizer.eos_token)
        assert text.startswith(before) and text.startswith(answer)
        yield len(before), len(answer.rstrip())


def encode(tokenizer, template, messages):
    if template and '{% generation %}' in template:
        out = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=True, return_dict=True,
                                            return_assistant_tokens_mask=True)
        return out['input_ids'], [i if m else -100 for i, m in zip(out['input_ids'], out['assistant_masks'])]
    if template:
        tokenizer.chat_template = template
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    out = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ranges = list(learned_ranges(tokenizer, messages, text))
    learned = [any(begin <= start < end for begin, end in ranges) for start, _ in out['offset_mapping']]
    assert out['input_ids'] == tokenizer.apply_chat_template(messages)['input_ids']
    return out['input_ids'], [i if m else -100 for i, m in zip(out['input_ids'], learned)]


def main():
    golden = {'transformers': __version__, 'cases': {}}
    for name in CASES:
        model, template, rows = locate(name)
        tokenizer = (PreTrainedTokenizerFast if template else AutoTokenizer).from_pretrained(model)
        text = open(template).read() if template else None
        encoded = [encode(tokenizer, text, row['messages']) for row in read_rows(rows)]
        golden['cases'][name] = {'tokens': sum(len(i) for i, _ in encoded),
                                 'learned': sum(y != -100 for _, labels in encoded for y in labels),
                                 'rows': [hash_row(*e) for e in encoded]}
        print(name, golden['cases'][name]['tokens'], golden['cases'][name]['learned'])
    with open(os.path.join(ROOT, 'tests', 'chat', 'real_golden.json'), 'w') as f:
        json.dump(golden, f, indent=0)
        f.write('\n')


main()
