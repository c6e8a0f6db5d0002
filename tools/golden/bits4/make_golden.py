#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes tests/golden/bits4: small random models in 4 bits, their dequantized weights, and float64 results of short LoRA trainings.

Codes, scales and dequantized weights are those of compressed-tensors and bitsandbytes (on the CPU). Scales of integers are
stored in BF16, and dequantized in float32. models/NAME/dequant.json has XXH3-64 of each weight's float32 bytes. The reference
model has these weights in float64. The rest is ../families/make_golden.py.

Made with Python 3.11.7, torch 2.15.0, transformers 5.24.0, compressed-tensors 0.20.1, bitsandbytes 0.50.2, xxhash 4.1.0,
safetensors 0.8.0, peft 0.21.2.

usage: make_golden.py [--out DIR]
"""
import argparse
import json
import os
import sys

import bitsandbytes.functional as bnb
import torch
import transformers
import xxhash
from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme, quant_scheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import save_file
from transformers import BitsAndBytesConfig

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'families'))
import make_golden as families  # noqa: E402
import checkpoint  # noqa: E402
import inputs  # noqa: E402
import reference  # noqa: E402

NARROW = {**families.DECODER, 'num_hidden_layers': 1}
WIDE = {**NARROW, 'hidden_size': 64, 'intermediate_size': 96}
WIDER = {**NARROW, 'hidden_size': 128, 'intermediate_size': 128, 'num_attention_heads': 16, 'num_key_value_heads': 4}

PACKED, NVFP4, MXFP4 = 'pack-quantized', 'nvfp4-pack-quantized', 'mxfp4-pack-quantized'


def integers(strategy, group_size, symmetric):
    return {'weights': QuantizationArgs(num_bits=4, type='int', symmetric=symmetric, strategy=strategy, group_size=group_size)}


def compress(w, scheme, kind):
    """(tensors as stored, float32 weight) of a BF16 weight."""
    args, tensors = scheme.weights, {'weight': w.float()}
    group = args.group_size if args.group_size and args.group_size > 0 else w.shape[1]
    parts = w.float().reshape(w.shape[0], -1, group)
    second = None
    if kind == NVFP4:
        second = generate_gparam(w.float().min().reshape(1), w.float().max().reshape(1))
        tensors['weight_global_scale'] = second
    scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), args, second)
    if kind == PACKED:
        scale = scale.to(torch.bfloat16).float()
        tensors['weight_zero_point'] = zero
    tensors['weight_scale'] = scale
    compressor = BaseCompressor.get_value_from_registry(kind)
    stored = compressor.compress(tensors, scheme)
    if kind == PACKED:
        wide = compressor.decompress(stored, scheme)['weight']
        stored['weight_scale'] = stored['weight_scale'].to(torch.bfloat16)
    else:  # its decompress has bfloat16
        values = unpack_fp4_from_uint8(stored['weight_packed'], *w.shape, dtype=torch.float32)
        wide = dequantize(values, compressor._decompress_scale(stored['weight_scale'], torch.float32), args=args,
                          global_scale=second, dtype=torch.float32)
    if kind == NVFP4:
        stored['input_global_scale'] = torch.tensor([0.5])
    assert wide.dtype == torch.float32
    return stored, wide


def compressed(schemes, **rest):
    """schemes: [(format, targets, scheme)]; the first whose target is part of the name has a weight."""
    groups = [(kind, targets, QuantizationScheme(targets=targets, **s)) for kind, targets, s in schemes]

    def write(name, w):
        for kind, targets, scheme in groups:
            if any(t == 'Linear' or t.split('.*')[1] in name for t in targets):
                return compress(w, scheme, kind)
        return {'weight': w}, None
    config = QuantizationConfig(config_groups={'group_%d' % i: s for i, (_, _, s) in enumerate(groups)}, ignore=['lm_head'],
                                format=groups[0][0] if len(groups) == 1 else 'mixed-precision')
    config = {**json.loads(config.model_dump_json()), 'quantization_status': 'compressed', **rest}
    for (kind, _, _), group in zip(groups, config['config_groups'].values()):
        group['format'] = kind
    return config, write


def nf4(double):
    def write(name, w):
        codes, state = bnb.quantize_4bit(w, blocksize=64, quant_type='nf4', compress_statistics=double)
        stored = {'weight': codes, **{'weight.' + k: v for k, v in state.as_dict(packed=True).items()}}
        absmax = state.absmax
        if double:
            absmax = bnb.dequantize_blockwise(absmax, state.state2) + state.offset
        # The kernel for CPUs of 0.50.2 gives other blocks than were quantized where they cross rows: the library's generic one.
        return stored, _dequantize_4bit_compute(codes.reshape(-1), absmax, state.code, 64, w.shape, torch.float32)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_use_double_quant=double,
                                bnb_4bit_compute_dtype=torch.bfloat16).to_dict()
    return {**config, 'quant_method': 'bitsandbytes'}, write


#  name: (configuration, (quantization_config, tensors of a projection))
CASES = {
    'int4-g32': (WIDE, compressed([(PACKED, ['Linear'], integers('group', 32, True))])),
    'int4-g128-zero': (WIDER, compressed([(PACKED, ['Linear'], integers('group', 128, False))])),
    'int4-channel-zero': (NARROW, compressed([(PACKED, ['Linear'], integers('channel', None, False))])),
    'mxfp4': (WIDE, compressed([(MXFP4, ['Linear'], quant_scheme.MXFP4A16)])),
    'nvfp4': (WIDE, compressed([(NVFP4, ['Linear'], quant_scheme.NVFP4)])),
    'groups': (WIDE, compressed([(PACKED, ['re:.*q_proj.*', 're:.*gate_proj.*'], integers('group', 32, True)),
                                 (NVFP4, ['re:.*v_proj.*', 're:.*up_proj.*'], quant_scheme.NVFP4A16),
                                 (MXFP4, ['re:.*down_proj.*'], quant_scheme.MXFP4A16)])),
    'nf4': (WIDE, nf4(False)),
    'nf4-double': (NARROW, nf4(True)),  # blocks of 64 cross rows of 24
}
TRAINED = ['groups', 'int4-g128-zero', 'nf4-double']


def make_model(settings):
    config = families.config_of('Llama', settings)
    config.architectures = ['LlamaForCausalLM']
    return families.class_of('Llama')._from_config(config, attn_implementation='eager').eval()


def write_checkpoint(directory, name, seed):
    """The float32 weights. Before use_float64: in torch's own dtypes."""
    settings, (quantization, tensors_of) = CASES[name]
    model, tensors, weights, hashes = make_model(settings), {}, {}, {}
    for n, values_of in families.make_weights(model, seed).items():
        w = torch.from_numpy(checkpoint.widen('BF16', checkpoint.bf16_encode(values_of))).to(torch.bfloat16)
        stored, wide = tensors_of(n, w) if checkpoint.is_projection(n) else ({'weight': w}, None)
        prefix = n[:-len('weight')]
        tensors.update({prefix + part: t.contiguous() for part, t in stored.items()})
        weights[n] = w.double() if wide is None else wide.double()
        if wide is not None:
            hashes[n] = xxhash.xxh3_64_hexdigest(wide.contiguous().numpy().tobytes())
    os.makedirs(directory, exist_ok=True)
    save_file(tensors, os.path.join(directory, 'model.safetensors'), {'format': 'pt'})
    config = {k: v for k, v in model.config.to_dict().items() if k not in ('dtype', '_name_or_path')}
    inputs.write_json(os.path.join(directory, 'config.json'), {**config, 'quantization_config': quantization})
    inputs.write_json(os.path.join(directory, 'dequant.json'), hashes)
    return weights


def main():
    root = os.path.abspath(os.path.join(os.path.dirname(__file__), '..', '..', '..'))
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    p.add_argument('--out', default=os.path.join(root, 'tests', 'golden', 'bits4'))
    a = p.parse_args()
    if transformers.__version__ != families.TRANSFORMERS:
        raise SystemExit('made for transformers %s, not %s' % (families.TRANSFORMERS, transformers.__version__))
    weights = {n: write_checkpoint(os.path.join(a.out, 'models', n), n, 3000 + i) for i, n in enumerate(CASES)}
    families.use_float64()
    reference.row_logits = families.logits_of
    rows = families.write_tokens(os.path.join(a.out, 'tokens', 'rows.jsonl'))
    for seed, name in enumerate(TRAINED):
        model = make_model(CASES[name][0]).double()
        with torch.no_grad():
            for n, parameter in model.named_parameters():
                parameter.copy_(weights[name][n])
        families.write_case(a.out, name, 'Llama', model, families.targets_of('Llama'), 3100 + seed, rows, '../bits4/')
    inputs.write_json(os.path.join(a.out, 'index.json'), {'cases': ['../../bits4/cases/' + n for n in TRAINED]})


main()
