# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in numpy: safetensors, the E4M3 code, the base formats fp8_row and fp8_block.

Written from the formats' definitions and sharing no code with Ballast, so that agreement means something. Every value is
float32 until the reference widens it, exactly, to float64.

  fp8_row    scale = absmax(row) / 448, code = E4M3(w / scale), value = code * scale; an all-zero row has scale 1
  fp8_block  the same with one scale per 128 x 128 block of each projection

Both divisions and the product are IEEE float32, rounded once each; E4M3 rounds to nearest, ties to the even code, and saturates.
"""
import glob
import json
import os
import struct

import numpy as np

E4M3_MAX = np.float32(448)
BLOCK = 128
PROJECTIONS = ('self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj', 'self_attn.o_proj',
               'mlp.gate_proj', 'mlp.up_proj', 'mlp.down_proj')
SCALE_SUFFIXES = ('_scale', '_scale_inv')
NUMPY = {'F32': np.float32, 'F16': np.float16, 'BF16': np.uint16, 'F8_E4M3': np.uint8}


# ---- number formats

def _e4m3_magnitudes():
    """The 127 finite magnitudes of codes 0x00..0x7E, ascending."""
    code = np.arange(127)
    exponent, mantissa = code >> 3, code & 7
    return np.where(exponent == 0, mantissa * 2.0 ** -9, (8 + mantissa) * 2.0 ** (exponent - 10.0))


MAGNITUDES = _e4m3_magnitudes()
MIDPOINTS = (MAGNITUDES[:-1] + MAGNITUDES[1:]) / 2


def e4m3_encode(x):
    """float32 -> E4M3 codes. A value on a midpoint goes to the even code; above 448 saturates."""
    x = np.asarray(x, np.float32)
    if not np.isfinite(x).all():
        raise ValueError('a value is not finite')
    magnitude = np.abs(x).astype(np.float64)
    below = np.searchsorted(MIDPOINTS, magnitude, side='left')       # a tie stays on the lower code ...
    above = np.searchsorted(MIDPOINTS, magnitude, side='right')      # ... or goes to the upper one
    code = np.where(below % 2 == 0, below, above)
    return (code | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


def e4m3_decode(codes):
    codes = np.asarray(codes, np.uint8)
    if ((codes & 0x7F) == 0x7F).any():
        raise ValueError('a code is NaN')
    magnitude = MAGNITUDES[codes & 0x7F]
    return np.where(codes & 0x80, -magnitude, magnitude).astype(np.float32)


def bf16_encode(x):
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)


def bf16_decode(bits):
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


# ---- scales

def row_scales(w):
    """[out,1]"""
    absmax = np.abs(w).max(axis=1, keepdims=True).astype(np.float32)
    return np.where(absmax == 0, np.float32(1), absmax / E4M3_MAX).astype(np.float32)


def block_scales(w):
    """[ceil(out/128), ceil(in/128)]"""
    rows, cols = (-(-n // BLOCK) for n in w.shape)
    scales = np.ones((rows, cols), np.float32)
    for i in range(rows):
        for j in range(cols):
            block = w[i * BLOCK:(i + 1) * BLOCK, j * BLOCK:(j + 1) * BLOCK]
            absmax = np.abs(block).max().astype(np.float32)
            if absmax != 0:
                scales[i, j] = absmax / E4M3_MAX
    return scales


def spread(scales, shape):
    """Scales of any granularity ([], [1], [out,1], 2-D blocks) as an array that broadcasts over `shape`."""
    scales = np.asarray(scales, np.float32)
    if scales.size == 1:
        return scales.reshape(1, 1)
    if scales.shape == (shape[0], 1):
        return scales
    assert scales.shape == tuple(-(-n // BLOCK) for n in shape), (scales.shape, shape)
    return np.repeat(np.repeat(scales, BLOCK, 0)[:shape[0]], BLOCK, 1)[:, :shape[1]]


def quantize(w, scales):
    return e4m3_encode(np.asarray(w, np.float32) / spread(scales, w.shape))


def dequantize(codes, scales):
    return e4m3_decode(codes) * spread(scales, codes.shape)


def through_format(w, base_format):
    """The float32 values that a weight has once it is held as fp8_row or fp8_block."""
    scales = {'fp8_row': row_scales, 'fp8_block': block_scales}[base_format](w)
    return dequantize(quantize(w, scales), scales)


# ---- safetensors

def read_safetensors(path):
    """name -> (dtype, array); BF16 as uint16 bits, F8_E4M3 as uint8 codes."""
    with open(path, 'rb') as f:
        data = f.read()
    length = struct.unpack('<Q', data[:8])[0]
    header = json.loads(data[8:8 + length])
    header.pop('__metadata__', None)
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry['data_offsets'])
        tensors[name] = (entry['dtype'],
                         np.frombuffer(data[begin:end], NUMPY[entry['dtype']]).reshape(entry['shape']))
    return tensors


def write_safetensors(path, tensors):
    """tensors: name -> (dtype, array of NUMPY[dtype]). Order: widest dtype first, then the name; header padded to 8 bytes."""
    order = sorted(tensors, key=lambda n: (-np.dtype(NUMPY[tensors[n][0]]).itemsize, n))
    header, at = {'__metadata__': {'format': 'pt'}}, 0
    for name in order:
        dtype, array = tensors[name]
        assert array.dtype == NUMPY[dtype], (name, dtype, array.dtype)
        header[name] = {'dtype': dtype, 'shape': list(array.shape), 'data_offsets': [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header, separators=(',', ':')).encode()
    text += b' ' * (-len(text) % 8)
    with open(path, 'wb') as f:
        f.write(struct.pack('<Q', len(text)) + text)
        for name in order:
            f.write(np.ascontiguousarray(tensors[name][1]).tobytes())


def write_f32(path, arrays):
    write_safetensors(path, {n: ('F32', np.ascontiguousarray(a, np.float32)) for n, a in arrays.items()})


def widen(dtype, array):
    return bf16_decode(array) if dtype == 'BF16' else array.astype(np.float32)


# ---- models

def is_projection(name):
    return name.startswith('model.layers.') and name.endswith(tuple(p + '.weight' for p in PROJECTIONS))


def load_model(directory, base_format='stored'):
    """(config, name -> float32 array): the weights that a base held in `base_format` multiplies with.

    `stored` has the checkpoint's weights, its FP8 tensors dequantized; `auto` keeps FP8 tensors and makes fp8_row of the other
    projections; `fp8_row` and `fp8_block` are for checkpoints that are not FP8. Embedding, norms and head are never touched.
    """
    with open(os.path.join(directory, 'config.json')) as f:
        config = json.load(f)
    stored = {}
    for path in sorted(glob.glob(os.path.join(directory, 'model*.safetensors'))):
        stored.update(read_safetensors(path))
    weights = {}
    for name, (dtype, array) in stored.items():
        if not name.endswith('.weight'):
            continue
        if dtype == 'F8_E4M3':
            assert base_format in ('stored', 'auto'), 'an FP8 tensor is never quantized again'
            scale = next(stored[name + s] for s in SCALE_SUFFIXES if name + s in stored)
            weights[name] = dequantize(array, widen(*scale))
        elif base_format == 'stored' or not is_projection(name):
            weights[name] = widen(dtype, array)
        else:
            weights[name] = through_format(widen(dtype, array), 'fp8_row' if base_format == 'auto' else base_format)
    return config, weights
