#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Opens 4-bit model directories with transformers, and compares their weights with the same ones dequantized to float32.

usage: check_packed.py PACKED DEQUANTIZED [PACKED DEQUANTIZED ...]

A line for each: PACKED, the number of equal tensors, and that of projections among them; or PACKED, "skipped" and the package
that is missing. transformers dequantizes compressed-tensors' integers in the dtype of their scales, bfloat16: they are compared
as loaded, with rounded values, and, with the library's decompress, in float32. bitsandbytes' weights, as loaded, are dequantized
by its generic code, in float32. Exit 1 when transformers misses a tensor or finds one that it does not know, or a weight
differs; 77 without PyTorch and transformers.
"""
import json
import os
import sys

os.environ['HF_HUB_OFFLINE'] = '1'
try:
    import torch
    import transformers
    from safetensors.torch import load_file
except ImportError as e:
    print('skipped: %s' % e, file=sys.stderr)
    sys.exit(77)


def open_model(directory, config):
    """The model, and a function of its parameters: their values in float32."""
    options = {}
    values = torch.Tensor.float
    if config['quantization_config']['quant_method'] == 'compressed-tensors':
        import compressed_tensors  # noqa: F401
        options['quantization_config'] = transformers.CompressedTensorsConfig(dequantize=True)
    else:
        from bitsandbytes.backends.default.ops import _dequantize_4bit_compute

        def values(p):
            if not hasattr(p, 'quant_state'):
                return p.float()
            s = p.quant_state
            return _dequantize_4bit_compute(p.reshape(-1), s.absmax, s.code, s.blocksize, s.shape, torch.float32)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True, **options)
    wrong = {k: sorted(map(str, v)) for k, v in info.items() if v and k != 'error_msgs'}
    if wrong:
        raise SystemExit('%s: transformers says %s' % (directory, wrong))
    return model, values


def decompress(config, tensors, name):
    """A weight of integers, by the library in float32."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    scheme = QuantizationConfig.model_validate(config).config_groups['group_0']
    parts = {k[len(name) - 6:]: v for k, v in tensors.items() if k.startswith(name)}
    parts['weight_scale'] = parts['weight_scale'].float()
    return BaseCompressor.get_value_from_registry(config['format']).decompress(parts, scheme)['weight']


def check(packed, wide):
    with open(os.path.join(packed, 'config.json')) as f:
        config = json.load(f)
    try:
        model, values = open_model(packed, config)
    except ImportError as e:
        return 'skipped %s' % e
    expected, stored = (load_file(os.path.join(d, 'model.safetensors')) for d in (wide, packed))
    parameters = dict(model.named_parameters())
    is_rounded = config['quantization_config'].get('format') == 'pack-quantized'
    n_quantized = 0
    for name, w in expected.items():
        is_quantized = name not in stored or stored[name].shape != w.shape
        pairs = [(values(parameters[name]).detach(), w.bfloat16().float() if is_rounded else w.float())]
        if is_rounded and is_quantized:
            pairs.append((decompress(config['quantization_config'], stored, name), w))
        n_quantized += is_quantized
        if not all(torch.equal(a, b) for a, b in pairs):
            raise SystemExit('%s: %s differs' % (packed, name))
    return '%d %d' % (len(expected), n_quantized)


for i in range(1, len(sys.argv), 2):
    print(sys.argv[i], check(sys.argv[i], sys.argv[i + 1]), flush=True)
