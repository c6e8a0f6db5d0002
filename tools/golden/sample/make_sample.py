#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes tests/golden/sample/cases.json: the probabilities from which transformers draws the next token.

The processors are those that GenerationMixin._get_logits_processor makes, in its order, over logits in float64. Logits are float32 numbers,
some of them negative, without equals. Removed tokens have probability 0.

Made with transformers 5.23.0, torch 2.15: python make_sample.py [OUT]
"""
import json
import os
import sys

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

HERE = os.path.dirname(os.path.abspath(__file__))
OUT = os.path.join(HERE, "..", "..", "..", "tests", "golden", "sample", "cases.json")
VOCAB = 50
OPTIONS = [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"repetition_penalty": 1.3}, {"repetition_penalty": 0.8},
           {"top_k": 1}, {"top_k": 50}, {"top_k": 1000}, {"min_p": 1.0}, {"top_p": 0.001}, {"temperature": 2.0, "top_k": 20, "top_p": 0.8},
           {"temperature": 1.5, "top_p": 0.9, "min_p": 0.1}, {"temperature": 0.5, "top_k": 10, "min_p": 0.05, "repetition_penalty": 1.2},
           {"temperature": 1.2, "top_k": 30, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.1}]


def probabilities(model, options, logits, ids):
    config = GenerationConfig(do_sample=True, **{"top_k": 0, **options})
    model._prepare_special_tokens(config)
    processors = model._get_logits_processor(generation_config=config, input_ids_seq_length=ids.shape[1])
    return torch.softmax(processors(ids, logits.double()), dim=-1)[0]


def main():
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1))
    cases = []
    for options in OPTIONS:
        for _ in range(3):
            logits, ids = 3 * torch.randn(1, VOCAB), torch.randint(0, VOCAB, (1, 12))
            cases.append({"options": options, "logits": logits[0].double().tolist(), "ids": ids[0].tolist(),
                          "probabilities": probabilities(model, options, logits, ids).tolist()})
    with open(sys.argv[1] if len(sys.argv) > 1 else OUT, "w") as file:
        file.write('{"cases": [\n' + ",\n".join(json.dumps(case) for case in cases) + "\n]}\n")


main()
