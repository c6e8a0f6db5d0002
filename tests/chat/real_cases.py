# SPDX-License-Identifier: Apache-2.0
"""real_cases.py -- the cases of test_chat_real and of the script that makes its golden file."""
import hashlib
import json
import os

N_ROWS = 200
MESSAGES = 'rasbt_messages_1100.jsonl'

#  name: tokenizer (below BALLAST_TEST_DATA/tokenizers; None: the model of BALLAST_REAL_MODEL), template (below .../templates; None: the
#  model's own), rows (below .../datasets)
CASES = {
    'SmolLM2, its own template': (None, None, MESSAGES),
    'Phi-3, TRL': ('phi3', 'trl-phi3_training.jinja', MESSAGES),
    'Phi-3, TRL, several turns': ('phi3-tf5', 'trl-phi3_training.jinja', 'fastchat_messages.jsonl'),
    'Phi-3.5, its own template, several turns': ('phi3-tf5', 'microsoft-Phi-3.5-mini-instruct.jinja', 'fastchat_messages.jsonl'),
    'Qwen3, TRL': ('qwen3', 'trl-qwen3_instruct_2507_training.jinja', MESSAGES),
    'Qwen3, TRL, Qwen2.5 template, several turns': ('qwen3', 'trl-qwen2_5_training.jinja', 'fastchat_messages.jsonl'),
}


def locate(name):
    """Paths of the tokenizer's directory, of the template (None: the model's own) and of the rows. Raises KeyError, the variable."""
    tokenizer, template, rows = CASES[name]
    data = os.environ['BALLAST_TEST_DATA']
    return (os.path.join(data, 'tokenizers', tokenizer) if tokenizer else os.environ['BALLAST_REAL_MODEL'],
            os.path.join(data, 'templates', template) if template else None, os.path.join(data, 'datasets', rows))


def read_rows(path):
    with open(path) as f:
        return [json.loads(line) for _, line in zip(range(N_ROWS), f)]


def hash_row(ids, labels):
    return hashlib.sha256(json.dumps([ids, labels]).encode()).hexdigest()[:16]
