#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""grow.py model SRC DST --hidden N --inter N --layers N --heads N --kv N      a larger Llama with the logits of SRC
grow.py adapter SRC GROWN SMALL_ADAPTER ADAPTER [--r N]                     the same first LoRA adapter for SRC and for GROWN

The grown model is SRC with zeros around it, so that its size is real and its loss is known:

  hidden    x' = [x, 0]. The mean of squares shrinks by h/H: norm weights are multiplied by sqrt(h/H), and eps by h/H
  heads     further groups of heads, as wide as those of SRC, have q = k = v = 0, and o ignores them
  inter     further channels have gate = up = 0, and down ignores them
  layers    further layers have o = down = 0: they add nothing to the residual stream

All values are those of SRC, in its dtype, except norm weights, which are F32. So logits differ by the order of sums and, of norm weights, by
rounding to F32: a few 1e-7 relative in fp32. FP8 codes and scales per row are those of SRC, since zeros change no maximum.

A grown LoRA term is A' = [A, 0] and B' = [B; 0], in further layers A' = B' = 0. Zeros get no gradient: further channels are zero, and what
reads them ignores them. So training the grown model gives the small model's losses, as far as the order of sums allows.

Needs Python only. Reads and writes row by row: memory is that of a few rows, the bytes on disk are those of the grown model."""
import argparse
import array
import json
import math
import mmap
import os
import random
import struct
import sys

ITEM_BYTES = {'F32': 4, 'F16': 2, 'BF16': 2}
SHARD_BYTES = 2 << 30
LAYER = 'model.layers.%d.'
NORMS = 'input_layernorm', 'post_attention_layernorm'
# The axes (out, in) of a layer's projections.
PROJECTIONS = {'self_attn.q_proj': ('heads', 'hidden'), 'self_attn.k_proj': ('kv', 'hidden'), 'self_attn.v_proj': ('kv', 'hidden'),
               'self_attn.o_proj': ('hidden', 'heads'), 'mlp.gate_proj': ('inter', 'hidden'), 'mlp.up_proj': ('inter', 'hidden'),
               'mlp.down_proj': ('hidden', 'inter')}
PREFIX = 'base_model.model.'


class Shape:
    """Sizes of a Llama, from its config.json."""

    def __init__(self, directory):
        with open(os.path.join(directory, 'config.json')) as file:
            c = self.config = json.load(file)
        if c['model_type'] != 'llama' or c.get('attention_bias') or c.get('mlp_bias') or 'quantization_config' in c:
            sys.exit('grow.py: %s: only an unquantized Llama without biases can be grown' % directory)
        self.layers, self.n_heads, self.n_kv = c['num_hidden_layers'], c['num_attention_heads'], c['num_key_value_heads']
        self.head_dim = c.get('head_dim') or c['hidden_size'] // self.n_heads
        self.size = {'hidden': c['hidden_size'], 'inter': c['intermediate_size'], 'heads': self.n_heads * self.head_dim,
                     'kv': self.n_kv * self.head_dim, 'vocab': c['vocab_size']}


def check(small, big):
    """Every size must have room for the small one's."""
    bad = [a for a in small.size if big.size[a] < small.size[a]]
    if big.layers < small.layers:
        bad.append('layers')
    if bad:
        sys.exit('grow.py: smaller than the source: %s' % ', '.join(bad))
    if big.n_heads * small.n_kv != small.n_heads * big.n_kv or big.head_dim != small.head_dim:
        sys.exit('grow.py: a group must have %d heads of %d, as in the source' % (small.n_heads // small.n_kv, small.head_dim))


class Source:
    """The tensors of a directory of safetensors files."""

    def __init__(self, directory):
        self.tensors = {}
        for name in sorted(os.listdir(directory)):
            if not name.endswith('.safetensors'):
                continue
            with open(os.path.join(directory, name), 'rb') as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            length = struct.unpack('<Q', data[:8])[0]
            header = json.loads(data[8:8 + length])
            header.pop('__metadata__', None)
            for key, entry in header.items():
                begin, end = (8 + length + at for at in entry['data_offsets'])
                self.tensors[key] = entry['dtype'], entry['shape'], data, begin, end

    def row(self, name, i):
        dtype, shape, data, begin, _ = self.tensors[name]
        n_bytes = shape[-1] * ITEM_BYTES[dtype]
        return data[begin + i * n_bytes:begin + (i + 1) * n_bytes]

    def floats(self, name):
        dtype, _, data, begin, end = self.tensors[name]
        if dtype == 'F16':
            return struct.unpack('<%de' % ((end - begin) // 2), data[begin:end])
        if dtype == 'BF16':
            return struct.unpack('<%df' % ((end - begin) // 2), b''.join(b'\0\0' + data[i:i + 2] for i in range(begin, end, 2)))
        return struct.unpack('<%df' % ((end - begin) // 4), data[begin:end])


def placed(rows, n_rows, row_bytes):
    """`rows`, each filled up with zeros to row_bytes, and rows of zeros up to n_rows."""
    n = 0
    for n, row in enumerate(rows, 1):
        yield row + bytes(row_bytes - len(row))
    zeros = bytes(row_bytes)
    for _ in range(n_rows - n):
        yield zeros


class Tensor:
    def __init__(self, name, dtype, shape, rows):
        self.name, self.dtype, self.shape, self.rows = name, dtype, shape, rows
        self.n_bytes = ITEM_BYTES[dtype] * math.prod(shape)


def matrix(source, like, name, axes, big, present=True):
    """The tensor `like` of the source, under `name`; zeros if it is not present."""
    dtype, shape = source.tensors[like][:2]
    n_rows, n_cols = (big.size[a] for a in axes)
    rows = (source.row(like, i) for i in range(shape[0] if present else 0))
    return Tensor(name, dtype, [n_rows, n_cols], placed(rows, n_rows, n_cols * ITEM_BYTES[dtype]))


def norm(source, like, name, small, big):
    n, size = small.size['hidden'], big.size['hidden']
    values = [w * math.sqrt(n / size) for w in source.floats(like)]
    return Tensor(name, 'F32', [size], iter([struct.pack('<%df' % size, *values, *[1.0] * (size - n))]))


def model_tensors(source, small, big):
    for name in 'model.embed_tokens.weight', 'lm_head.weight':
        if name in source.tensors:
            yield matrix(source, name, name, ('vocab', 'hidden'), big)
    yield norm(source, 'model.norm.weight', 'model.norm.weight', small, big)
    for layer in range(big.layers):
        present = layer < small.layers
        to, like = LAYER % layer, LAYER % (layer if present else 0)
        for name in NORMS:
            yield norm(source, like + name + '.weight', to + name + '.weight', small, big)
        for name, axes in PROJECTIONS.items():
            yield matrix(source, like + name + '.weight', to + name + '.weight', axes, big, present)


def write_file(path, tensors):
    header, at = {'__metadata__': {'format': 'pt'}}, 0
    for t in tensors:
        header[t.name] = {'dtype': t.dtype, 'shape': t.shape, 'data_offsets': [at, at + t.n_bytes]}
        at += t.n_bytes
    text = json.dumps(header, separators=(',', ':')).encode()
    text += b' ' * (-len(text) % 8)
    with open(path, 'wb') as file:
        file.write(struct.pack('<Q', len(text)) + text)
        for t in tensors:
            for row in t.rows:
                file.write(row)


def grow_model(a):
    small, big = Shape(a.src), Shape(a.src)
    c = big.config
    big.n_heads, big.n_kv, big.layers = a.heads, a.kv, a.layers
    big.size.update(hidden=a.hidden, inter=a.inter, heads=a.heads * big.head_dim, kv=a.kv * big.head_dim)
    check(small, big)
    c.update(hidden_size=a.hidden, intermediate_size=a.inter, num_hidden_layers=a.layers, num_attention_heads=a.heads,
             num_key_value_heads=a.kv, head_dim=big.head_dim, rms_norm_eps=c['rms_norm_eps'] * small.size['hidden'] / a.hidden)
    os.makedirs(a.dst)
    shards = [[]]
    for t in model_tensors(Source(a.src), small, big):
        if shards[-1] and sum(s.n_bytes for s in shards[-1]) + t.n_bytes > SHARD_BYTES:
            shards.append([])
        shards[-1].append(t)
    total, weight_map = sum(t.n_bytes for s in shards for t in s), {}
    for i, tensors in enumerate(shards):
        name = 'model-%05d-of-%05d.safetensors' % (i + 1, len(shards))
        weight_map.update((t.name, name) for t in tensors)
        write_file(os.path.join(a.dst, name), tensors)
    write_json(a.dst, 'model.safetensors.index.json', {'metadata': {'total_size': total}, 'weight_map': weight_map})
    for name in os.listdir(a.src):
        if name.endswith(('.json', '.jinja', '.txt', '.model')) and name not in ('config.json', 'model.safetensors.index.json'):
            with open(os.path.join(a.src, name), 'rb') as source, open(os.path.join(a.dst, name), 'wb') as copy:
                copy.write(source.read())
    write_json(a.dst, 'config.json', c)
    print('%s: %.2f B parameters, %.2f GB in %d files' %
          (a.dst, sum(math.prod(t.shape) for s in shards for t in s) / 1e9, total / 1e9, len(shards)))


def write_json(directory, name, value):
    with open(os.path.join(directory, name), 'w') as file:
        json.dump(value, file, indent=1)


def adapter_tensors(shape, r, values):
    """values[layer, name]: the rows of A of the small model; none in further layers."""
    for layer in range(shape.layers):
        for name, (out, into) in PROJECTIONS.items():
            base, n_out, n_in = PREFIX + LAYER % layer + name, shape.size[out], shape.size[into]
            yield Tensor(base + '.lora_A.weight', 'F32', [r, n_in], placed(values.get((layer, name), []), r, 4 * n_in))
            yield Tensor(base + '.lora_B.weight', 'F32', [n_out, r], iter([bytes(4 * n_out * r)]))


def grow_adapter(a):
    small, big = Shape(a.src), Shape(a.dir)
    draw, values = random.Random(0), {}
    for layer in range(small.layers):  # A uniform within 1/sqrt(in), B = 0, as PEFT begins
        for name, (_, into) in PROJECTIONS.items():
            bound = 1 / math.sqrt(small.size[into])
            values[layer, name] = [array.array('f', (draw.uniform(-bound, bound) for _ in range(small.size[into]))).tobytes() for _ in range(a.r)]
    config = {'peft_type': 'LORA', 'task_type': 'CAUSAL_LM', 'r': a.r, 'lora_alpha': 2 * a.r, 'lora_dropout': 0.0, 'bias': 'none',
              'target_modules': [name.split('.')[1] for name in PROJECTIONS]}
    for shape, directory in ((small, a.small), (big, a.dst)):
        os.makedirs(directory)
        write_json(directory, 'adapter_config.json', config)
        write_file(os.path.join(directory, 'adapter_model.safetensors'), list(adapter_tensors(shape, a.r, values)))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = p.add_subparsers(required=True)
    m = sub.add_parser('model')
    m.add_argument('src')
    m.add_argument('dst')
    for name in 'hidden', 'inter', 'layers', 'heads', 'kv':
        m.add_argument('--' + name, type=int, required=True)
    m.set_defaults(run=grow_model)
    b = sub.add_parser('adapter')
    b.add_argument('src', help='the small model')
    b.add_argument('dir', help='the grown model')
    b.add_argument('small', help="the small model's adapter, written")
    b.add_argument('dst', help="the grown model's adapter, written")
    b.add_argument('--r', type=int, default=16)
    b.set_defaults(run=grow_adapter)
    a = p.parse_args()
    if os.path.exists(a.dst):
        sys.exit('grow.py: %s exists' % a.dst)
    a.run(a)


if __name__ == '__main__':
    main()
