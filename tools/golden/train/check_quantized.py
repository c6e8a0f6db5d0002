#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reads what `ballast quantize` wrote with the library that serves it, and compares it with the source.

    check_quantized.py SRC DST

DST is loaded by transformers through compressed-tensors. Checked: every projection is FP8 there; its codes and scales
are those that PyTorch makes from SRC (scale = absmax / 448 in float32, code = E4M3 of w / scale), all of them equal; the
weight that the library decodes is code * scale; the logits of both models on random tokens differ by no more than FP8
weights and activations explain. Prints a line and ends with 0, or says what differs.

Tried with Python 3.11, torch 2.15.0, transformers 5.23.0, compressed-tensors 0.20.0, on the CPU.
"""
import copy
import sys

import torch
from compressed_tensors.compressors.base import decompress_module
from transformers import AutoModelForCausalLM

LOGITS_RMS = 0.1  # of the logits': activations in E4M3 cost 2 to 3 % a product, weights as much; 30 layers: 6.5 % was seen


def scales_of(weight, shape):
    """absmax / 448 of each row or block, float32; 1 where all is zero."""
    rows, cols = weight.shape
    if shape[1] == 1:
        absmax = weight.abs().amax(dim=1, keepdim=True)
    else:
        padded = torch.zeros(shape[0] * 128, shape[1] * 128)
        padded[:rows, :cols] = weight.abs()
        absmax = padded.reshape(shape[0], 128, shape[1], 128).amax(dim=(1, 3))
    scale = absmax / torch.tensor(448.0)
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def spread(scale, rows, cols):
    if scale.shape[1] == 1:
        return scale.expand(rows, cols)
    return scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]


def check_projection(name, source, quantized):
    weight, codes, scale = source.weight.float(), quantized.weight, quantized.weight_scale.float()
    if codes.dtype != torch.float8_e4m3fn:
        sys.exit(f'{name}: {codes.dtype} is no FP8')
    expected = scales_of(weight, scale.shape)
    if not torch.equal(scale, expected):
        sys.exit(f'{name}: {(scale != expected).sum().item()} scales differ')
    wide = spread(expected, *weight.shape)
    if not torch.equal((weight / wide).to(torch.float8_e4m3fn).view(torch.uint8), codes.view(torch.uint8)):
        sys.exit(f'{name}: codes differ')
    decoded = copy.deepcopy(quantized)
    decompress_module(decoded)
    if not torch.equal(decoded.weight.float(), codes.float() * wide):
        sys.exit(f'{name}: the library decodes another weight')
    return weight.numel()


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    quantized = AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.float32)
    modules = dict(quantized.named_modules())
    n_codes = sum(check_projection(name, module, modules[name]) for name, module in source.named_modules()
                  if name.endswith('_proj'))
    torch.manual_seed(0)
    ids = torch.randint(3, source.config.vocab_size, (2, 64))
    with torch.no_grad():
        ours, theirs = source(ids).logits.double(), quantized(ids).logits.double()
    rms = ((ours - theirs).square().mean() / ours.square().mean()).sqrt().item()
    print(f'{n_codes} codes and their scales equal; logits differ by {100 * rms:.2f} % (root mean square)')
    if not rms < LOGITS_RMS:
        sys.exit('more than FP8 explains')


if __name__ == '__main__':
    main()
