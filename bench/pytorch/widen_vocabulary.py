#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""widen_vocabulary.py MODEL_DIR N: appends random rows to embedding and head of a Llama in one F32 file, up to a vocabulary of N.

The new rows have the size (rms) of the old ones. A grown model has the vocabulary of the model it grew from, 512 for stories260K, where
the loss head costs almost nothing; this gives it the head of a production model.
"""
import json
import os
import sys

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '../../tools/golden/train'))
import checkpoint


def widened(weight, n, generator):
    rms = np.sqrt(np.square(weight, dtype=np.float64).mean())
    more = generator.standard_normal((n - weight.shape[0], weight.shape[1]), dtype=np.float32) * np.float32(rms)
    return np.concatenate([weight, more])


def main():
    directory, n = sys.argv[1], int(sys.argv[2])
    config_path, weights_path = os.path.join(directory, 'config.json'), os.path.join(directory, 'model.safetensors')
    with open(config_path) as file:
        config = json.load(file)
    if n < config['vocab_size']:
        raise SystemExit('widen_vocabulary.py: %s: its vocabulary of %d is above %d' % (directory, config['vocab_size'], n))
    config['vocab_size'] = n
    generator, weights = np.random.default_rng(0), checkpoint.read_safetensors(weights_path)
    for name in ('model.embed_tokens.weight', 'lm_head.weight'):
        if name in weights:
            dtype, weight = weights[name]
            if dtype != 'F32':
                raise SystemExit('widen_vocabulary.py: %s: expected F32, got %s' % (name, dtype))
            weights[name] = dtype, widened(weight, n, generator)
    checkpoint.write_safetensors(weights_path, weights)
    with open(config_path, 'w') as file:
        json.dump(config, file, indent=1)


main()
