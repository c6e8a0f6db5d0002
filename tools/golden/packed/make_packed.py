#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes tests/golden/packed/cases.json: rows of weights in 4-bit formats, quantized with NumPy alone.

Every scale of the rule is tried by its definition, codes are searched among all 16 values in float64, and errors are summed in
float64. Bytes are in hexadecimal. Made with Python 3.11.2, NumPy 2.4.6.

usage: make_packed.py [--out DIR]
"""
import argparse
import json
import os

import numpy as np

E2M1 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6], np.float64)
NF4 = np.array([-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
                -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
                0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0], np.float32)
GROUP = {'mxfp4': 32, 'int4_g32': 32, 'int4_g128': 128, 'nf4': 64}
F32 = np.float32


def bf16(x):
    """Float32 rounded to bf16, ties to even."""
    bits = np.array(x, F32).view(np.uint32)
    return ((bits + np.uint32(0x7fff) + (bits >> np.uint32(16) & np.uint32(1))) & np.uint32(0xffff0000)).view(F32)


def nearest(x, values):
    """Index of the nearest of the ascending values, ties to the even index."""
    distance = np.abs(np.asarray(x, np.float64)[:, None] - values)
    least = distance.min(1, keepdims=True)
    tied = distance == least
    first, last = tied.argmax(1), len(values) - 1 - tied[:, ::-1].argmax(1)
    return np.where(first % 2 == 0, first, last)


def encode(kind, w, scale):
    """(codes, values) of a group; the quotient is float32's."""
    with np.errstate(over='ignore'):
        q = w / scale
    if kind == 'mxfp4':
        code = nearest(np.abs(q), E2M1)
        negative = np.signbit(q)
        value = np.where(negative, -E2M1[code], E2M1[code])
        return code + 8 * negative, (value.astype(F32) * scale).astype(F32)
    code = nearest(q, np.arange(-8, 8, dtype=np.float64))
    return code, ((code - 8).astype(F32) * scale).astype(F32)


def scales_of(kind, m, least_squares):
    """(bytes, float32) of every scale that is tried, the rule's own first."""
    if kind == 'mxfp4':
        e = int(np.floor(np.log2(np.float64(m)))) - 2 + 127
        tried = [e, e + 1, e - 1] if least_squares else [e]
        tried = [min(max(t, 0), 252) for t in tried]  # 6 * 2^125 is finite
        return [(bytes([t]), F32(np.ldexp(1.0, t - 127))) for t in tried]
    quotients = [7.5] + [7 + i / 4 for i in range(16)] if least_squares else [7.5]
    found = [bf16(F32(m) / F32(q)) for q in quotients]
    below = np.uint32(0x7dff0000).view(F32)  # the largest one of which eight times is finite
    found = [min(s, below) if s > 0 else np.uint32(0x10000).view(F32) for s in found]
    return [(np.array(s, F32).view(np.uint32).item().to_bytes(4, 'little')[2:], F32(s)) for s in found]


def quantize_group(kind, w, least_squares):
    m = np.abs(w).max()
    if kind == 'nf4':
        scale = m if m > 0 else F32(1)
        with np.errstate(over='ignore'):
            reciprocal = F32(1) / scale
        x = np.clip(w * reciprocal if np.isfinite(reciprocal) else w / scale, F32(-1), F32(1))
        code = np.abs(x[:, None] - NF4).argmin(1)
        return code, scale.astype(F32).tobytes()
    if m == 0:
        return encode(kind, w, F32(1))[0], b'\x7f' if kind == 'mxfp4' else b'\x80\x3f'
    best = None
    for stored, scale in scales_of(kind, m, least_squares):
        code, value = encode(kind, w, scale)
        error = ((w.astype(np.float64) - value.astype(np.float64)) ** 2).sum()
        if best is None or error < best[0]:
            best = (error, code, stored)
    return best[1:]


def quantize(kind, w, least_squares):
    codes, scales = b'', b''
    for row in w:
        for group in row.reshape(-1, GROUP[kind]):
            code, scale = quantize_group(kind, group, least_squares)
            code = code.astype(np.uint8)
            low, high = (code[1::2], code[::2]) if kind == 'nf4' else (code[::2], code[1::2])
            codes += (low | high << 4).tobytes()
            scales += scale
    return codes, scales


def inputs(rng, cols):
    """Rows of many kinds: normal, heavy tails, one large weight, zeros, ties, the least and the largest numbers."""
    rows = [rng.standard_normal(cols) * 0.02, rng.standard_t(2, cols), np.where(np.arange(cols) % 37 == 5, 90.0, rng.standard_normal(cols)),
            np.where(np.arange(cols) < cols // 2, 0.0, rng.standard_normal(cols)), np.where(np.arange(cols) % 2, -0.0, 0.0),
            rng.integers(-28, 29, cols) / 4.0, rng.standard_normal(cols) * 1e-44, rng.standard_normal(cols) * 1e-39,
            rng.uniform(-1, 1, cols) * 3.3e38, rng.standard_normal(cols) * 2.0 ** rng.integers(-20, 20, cols)]
    return np.array(rows, np.float64).astype(F32)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--out', default=os.path.join(os.path.dirname(os.path.abspath(__file__)), '../../../tests/golden/packed'))
    out = parser.parse_args().out
    rng = np.random.default_rng(20261128)
    cases = []
    w = inputs(rng, 256)
    for kind in GROUP:
        for least_squares in (True, False):
            codes, scales = quantize(kind, w, least_squares)
            cases.append({'format': kind, 'least_squares': least_squares, 'codes': codes.hex(), 'scales': scales.hex()})
    os.makedirs(out, exist_ok=True)
    with open(os.path.join(out, 'cases.json'), 'w', encoding='utf-8') as file:
        json.dump({'rows': len(w), 'cols': w.shape[1], 'weights': w.tobytes().hex(), 'cases': cases}, file, indent=1)
        file.write('\n')


main()
