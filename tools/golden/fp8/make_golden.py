#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes tests/golden/fp8: small random models as FP8 checkpoints of today's kinds, and float64 results of short LoRA trainings.

Codes and scales are made by transformers' Fp8Quantize and compressed-tensors' MXFP8 compressor where these write the kind.
The reference model has float64 weights, code * scale. The rest is ../families/make_golden.py.

Made with Python 3.11.2, torch 2.15.0, transformers 5.24.0, compressed-tensors 0.20.0, safetensors 0.8.0, peft 0.21.2.

Layouts: mistralai/Devstral-2-123B-Instruct-2512 (scalar weight_scale_inv, activation_scale, lm_head in BF16);
deepseek-ai/DeepSeek-V3.1 (scale_fmt ue8m0) with F8_E8M0 scales as transformers' FP8Linear has them; NVIDIA Model Optimizer's
exports (scalar weight_scale, one per row [rows], blocks [rows / n, 1, cols / n, 1]).

usage: make_golden.py [--out DIR]
"""
import argparse
import os
import sys
import types

import torch
import transformers
from compressed_tensors.compressors.mxfp8.base import MXFP8QuantizationCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.quant_scheme import MXFP8
from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Quantize

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'families'))
import make_golden as families  # noqa: E402
import checkpoint  # noqa: E402
import inputs  # noqa: E402
import reference  # noqa: E402

DECODER = {**families.DECODER, 'intermediate_size': 136}
WIDE = {**DECODER, 'hidden_size': 64, 'intermediate_size': 160}  # groups of 32
FP8 = {'quant_method': 'fp8', 'activation_scheme': 'dynamic', 'modules_to_not_convert': ['lm_head']}
MXFP8_ARGS = {'num_bits': 8, 'type': 'float', 'strategy': 'group', 'group_size': 32, 'symmetric': True, 'dynamic': False,
              'scale_dtype': 'torch.uint8'}


def pad(w, rows, cols):
    return torch.nn.functional.pad(w, (0, -w.shape[1] % cols, 0, -w.shape[0] % rows))


def by_transformers(w, block, scale_fmt='float'):
    """(codes, scales) of blocks; those at the edges are padded with zeros."""
    block = block or tuple(w.shape)
    config = types.SimpleNamespace(weight_block_size=block, scale_fmt=scale_fmt)
    done = Fp8Quantize(types.SimpleNamespace(quantization_config=config)).convert({'w.weight': pad(w, *block)})
    return done['w.weight'][:w.shape[0], :w.shape[1]].contiguous(), done['w.weight_scale_inv']


def static(name, w):
    """As Devstral 2: scalars for weights and activations."""
    codes, scale = by_transformers(w, None)
    return {'weight': codes, 'weight_scale_inv': scale.reshape(()), 'activation_scale': torch.tensor(0.125)}


def blocks(size, scale_fmt='float'):
    def write(name, w):
        codes, scale = by_transformers(w, size, scale_fmt)
        return {'weight': codes, 'weight_scale_inv': scale}
    return write


def mxfp8(name, w):
    """By compressed-tensors, whose scales are U8."""
    absmax = w.float().reshape(w.shape[0], -1, 32).abs().amax(-1)
    scale = 2.0 ** (generate_mx_scales(absmax, 8) - 127)
    scheme = QuantizationScheme(targets=['Linear'], **MXFP8)
    return MXFP8QuantizationCompressor.compress({'weight': w.float(), 'weight_scale': scale}, scheme)


def mixed(name, w):
    """As Model Optimizer, each projection in another way; k stays BF16."""
    rows, cols = w.shape
    kinds = {'q_proj': ((rows, cols), ()), 'v_proj': ((1, cols), (rows,)), 'o_proj': ((1, cols), (rows,)),
             'gate_proj': ((128, 128), (-(-rows // 128), 1, 1, 1)), 'down_proj': ((128, 128), (1, 1, -(-cols // 128), 1)),
             'up_proj': ((rows, cols), (1,))}
    kind = name.split('.')[-2]
    if kind not in kinds or name.startswith('model.layers.1.mlp.gate'):
        return {'weight': w}
    codes, scale = by_transformers(w, kinds[kind][0])
    return {'weight': codes, 'weight_scale': scale.reshape(kinds[kind][1]), 'input_scale': torch.tensor(0.5)}


#  name: (class, configuration, quantization_config, tensors of a projection)
CASES = {
    'static': ('Ministral3', {**DECODER, 'rope_parameters': {**families.YARN, 'llama_4_scaling_beta': 0.0}},
               {**FP8, 'activation_scheme': 'static', 'weight_block_size': None, 'dequantize': False}, static),
    'e8m0-128': ('Llama', DECODER, {**FP8, 'weight_block_size': [128, 128], 'scale_fmt': 'ue8m0'}, blocks((128, 128), 'ue8m0')),
    'e8m0-16x8': ('Llama', DECODER, {**FP8, 'weight_block_size': [16, 8], 'scale_fmt': 'ue8m0'}, blocks((16, 8), 'ue8m0')),
    'blocks-48x20': ('Qwen3', DECODER, {**FP8, 'weight_block_size': [48, 20]}, blocks((48, 20))),
    'ct-mxfp8': ('Llama', WIDE, {'quant_method': 'compressed-tensors', 'format': 'mxfp8-quantized', 'ignore': ['lm_head'],
                                 'config_groups': {'group_0': {'targets': ['Linear'], 'weights': MXFP8_ARGS}}}, mxfp8),
    'mixed': ('Mistral', {**DECODER, 'sliding_window': None}, {'quant_method': 'modelopt', 'quant_algo': 'FP8'}, mixed),
    'static-tower': ('Mistral3', {**DECODER, 'model_type': 'ministral3',
                                  'rope_parameters': {**families.YARN, 'llama_4_scaling_beta': 0.0}},
                     {**FP8, 'modules_to_not_convert': ['vision_tower', 'multi_modal_projector', 'lm_head'],
                      'activation_scheme': 'static', 'weight_block_size': None, 'dequantize': False}, static),
}


def make_model(kind, settings):
    config = families.config_of(kind, settings)
    config.architectures = [families.class_of(kind).__name__]
    return families.class_of(kind)._from_config(config, attn_implementation='eager').eval()


def is_converted(name):
    return checkpoint.is_projection(name.replace('model.language_model.', 'model.'))


def write_checkpoint(directory, name, seed):
    """Before use_float64: in torch's own dtypes."""
    kind, settings, quantization, tensors_of = CASES[name]
    model, tensors = make_model(kind, settings), {}
    for n, values_of in families.make_weights(model, seed).items():
        w = torch.from_numpy(checkpoint.widen('BF16', checkpoint.bf16_encode(values_of))).to(torch.bfloat16)
        stored = families.stored_name(kind, n)
        if is_converted(n):
            tensors.update({stored[:-len('weight')] + part: t for part, t in tensors_of(n, w).items()})
        else:
            tensors[stored] = w
    os.makedirs(directory, exist_ok=True)
    save_file(tensors, os.path.join(directory, 'model.safetensors'), {'format': 'pt'})
    config = {k: v for k, v in model.config.to_dict().items() if k not in ('dtype', '_name_or_path')}
    inputs.write_json(os.path.join(directory, 'config.json'), {**config, 'quantization_config': quantization})


def spread(scale, shape, size):
    """The scale of each weight; size: of a block, (rows, cols)."""
    if scale.ndim == 4:
        scale = scale[:, 0, :, 0]
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if scale.shape[0] == shape[0] and (scale.ndim == 1 or scale.shape[1] == 1):
        return scale.reshape(-1, 1)
    return scale.repeat_interleave(size[0], 0)[:shape[0]].repeat_interleave(size[1], 1)[:, :shape[1]]


def values(directory, quantization):
    """float64 values of all weights: code * scale."""
    tensors, weights = load_file(os.path.join(directory, 'model.safetensors')), {}
    size = quantization.get('weight_block_size') or ((1, 32) if 'config_groups' in quantization else (128, 128))
    for n, t in tensors.items():
        scale = tensors.get(n + '_scale', tensors.get(n + '_scale_inv'))
        if n.endswith(('_scale', '_scale_inv')):
            continue
        weights[n] = t.double()
        if scale is not None:
            wide = 2.0 ** (scale.double() - 127) if scale.dtype == torch.uint8 else scale.double()
            weights[n] = t.double() * spread(wide, t.shape, size)
    return weights


def main():
    root = os.path.abspath(os.path.join(os.path.dirname(__file__), '..', '..', '..'))
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    p.add_argument('--out', default=os.path.join(root, 'tests', 'golden', 'fp8'))
    a = p.parse_args()
    if transformers.__version__ != families.TRANSFORMERS:
        raise SystemExit('made for transformers %s, not %s' % (families.TRANSFORMERS, transformers.__version__))
    weights = {}
    for seed, name in enumerate(CASES):
        directory = os.path.join(a.out, 'models', name)
        write_checkpoint(directory, name, 2000 + seed)
        weights[name] = values(directory, CASES[name][2])
    families.use_float64()
    reference.row_logits = families.logits_of
    rows = families.write_tokens(os.path.join(a.out, 'tokens', 'rows.jsonl'))
    for seed, (name, (kind, settings, _, _)) in enumerate(CASES.items()):
        model = make_model(kind, settings).double()
        with torch.no_grad():
            for n, parameter in model.named_parameters():
                parameter.copy_(weights[name][families.stored_name(kind, n)])
        families.write_case(a.out, name, kind, model, families.targets_of(kind), 2100 + seed, rows, '../fp8/')
    inputs.write_json(os.path.join(a.out, 'index.json'), {'cases': ['../../fp8/cases/' + n for n in sorted(CASES)]})


main()
