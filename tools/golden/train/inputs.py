# SPDX-License-Identifier: Apache-2.0
"""The inputs of the cases: tiny checkpoints of every stored kind, start adapters, token rows. All from fixed seeds."""
import json
import os

import numpy as np
from tokenizers import Tokenizer

import checkpoint

VOCAB = 96
LLAMA3_ROPE = {'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
               'original_max_position_embeddings': 64}

GQA = dict(hidden=24, inter=132, layers=2, heads=6, kv=2, head_dim=4)
MODELS = {
    'tiny-gqa': dict(GQA, dtype='BF16', seed=1),
    'tiny-mha-tied': dict(hidden=24, inter=40, layers=2, heads=3, kv=3, head_dim=8, dtype='F32', seed=2, tied=True),
    # Wavelengths of head_dim 16 at theta 10000: 6.3 (kept), 20 and 63 (between), 199 and more (divided by the factor).
    'tiny-llama3-rope': dict(hidden=24, inter=40, layers=2, heads=4, kv=1, head_dim=16, dtype='BF16', seed=3,
                             rope_scaling=LLAMA3_ROPE),
    'tiny-fp8-fbgemm': dict(hidden=24, inter=40, layers=3, heads=6, kv=2, head_dim=4, dtype='BF16', seed=4, fp8='fbgemm'),
    'tiny-fp8-ct-tensor': dict(GQA, dtype='BF16', seed=5, fp8='ct-tensor'),
    'tiny-fp8-ct-channel': dict(GQA, dtype='BF16', seed=6, fp8='ct-channel'),
    'tiny-fp8-ct-block': dict(GQA, dtype='BF16', seed=7, fp8='ct-block'),
    'tiny-fp8-deepseek': dict(GQA, dtype='BF16', seed=8, fp8='deepseek'),
    'tiny-fp8-autofp8': dict(GQA, dtype='BF16', seed=9, fp8='autofp8'),
}
# Left in BF16 although the checkpoint is FP8: one part of a fused matrix, so that its parts have two formats.
CT_IGNORED = ['lm_head', 'model.layers.0.self_attn.k_proj', 'model.layers.1.mlp.up_proj']

STORIES = (
    'Once upon a time, there was a small boat that lived by the sea. The boat had a red sail and a happy face.',
    'Ben had a big box. He put his bear, his ball and his hat in the box. Then he sat in the box too and said, "I am a toy!"',
    'The rain did not stop. Mom made soup and they all looked out of the window. "I like the rain," said Anna.',
    'One day, a little bird saw a shiny stone. She wanted to give it to her friend. But the stone was too heavy.',
    'Sam was sad because his kite was in the tree. A tall man came and helped him. Sam said thank you and ran home to show his dad.',
    'There was a cat named Moss. Moss liked to sleep on the warm stones. When the sun went away, Moss went away too.',
    'Lucy and her brother made a cake. It was not a good cake, but they ate it and laughed.',
    'A frog and a duck had a race. The frog jumped and the duck swam. In the end they were both first, and they played all day.',
    'The old dog could not run, but he could still find things. He found a shoe, a spoon and a very small mouse.',
    'Tom wanted to see the moon. He waited and waited. When the moon came, it was big and bright and Tom was asleep.',
)


# ---- checkpoints

def _config(m):
    config = {
        'architectures': ['LlamaForCausalLM'], 'attention_bias': False, 'attention_dropout': 0.0, 'bos_token_id': 1,
        'eos_token_id': 2, 'head_dim': m['head_dim'], 'hidden_act': 'silu', 'hidden_size': m['hidden'],
        'initializer_range': 0.02, 'intermediate_size': m['inter'], 'max_position_embeddings': 512, 'mlp_bias': False,
        'model_type': 'llama', 'num_attention_heads': m['heads'], 'num_hidden_layers': m['layers'],
        'num_key_value_heads': m['kv'], 'rms_norm_eps': 1e-5, 'rope_scaling': m.get('rope_scaling'), 'rope_theta': 10000.0,
        'tie_word_embeddings': m.get('tied', False), 'torch_dtype': 'float32' if m['dtype'] == 'F32' else 'bfloat16',
        'use_cache': True, 'vocab_size': VOCAB}
    if m.get('fp8'):
        config['quantization_config'] = _quantization_config(m)
    return config


def _quantization_config(m):
    if m['fp8'] == 'fbgemm':
        kept = ['model.layers.%d.%s' % (l, p) for l in range(m['layers']) for p in checkpoint.PROJECTIONS
                if not _is_fp8(m, 'model.layers.%d.%s.weight' % (l, p))]
        return {'quant_method': 'fbgemm_fp8', 'activation_scale_ub': 1200.0, 'modules_to_not_convert': kept + ['lm_head']}
    if m['fp8'] == 'deepseek':
        return {'quant_method': 'fp8', 'fmt': 'e4m3', 'activation_scheme': 'dynamic', 'weight_block_size': [128, 128]}
    if m['fp8'] == 'autofp8':
        return {'quant_method': 'fp8', 'activation_scheme': 'static', 'ignored_layers': ['lm_head']}
    strategy = m['fp8'][3:]
    weights = {'num_bits': 8, 'type': 'float', 'strategy': strategy, 'symmetric': True, 'dynamic': False,
               'block_structure': [128, 128] if strategy == 'block' else None}
    return {'quant_method': 'compressed-tensors', 'format': 'float-quantized', 'quantization_status': 'compressed',
            'ignore': CT_IGNORED,
            'config_groups': {'group_0': {'targets': ['Linear'], 'weights': weights, 'input_activations': None}}}


def _is_fp8(m, name):
    kind = m.get('fp8')
    if not kind or not checkpoint.is_projection(name):
        return False
    if kind == 'fbgemm':                       # as Meta's 405B: the MLP of all layers but the first and the last
        return '.mlp.' in name and not name.startswith(('model.layers.0.', 'model.layers.%d.' % (m['layers'] - 1)))
    return not kind.startswith('ct-') or name[:-len('.weight')] not in CT_IGNORED


def _fp8_tensors(kind, name, w, rng):
    """One FP8 projection with its scale, named, shaped and typed as the tools of that kind write it."""
    tensor_scale = np.array([np.abs(w).max() / checkpoint.E4M3_MAX], np.float32)
    if kind == 'fbgemm':
        return _coded(name, w, '_scale', 'F32', checkpoint.row_scales(w))
    if kind == 'deepseek':
        return _coded(name, w, '_scale_inv', 'F32', checkpoint.block_scales(w))
    if kind == 'autofp8':
        scalar = np.float32(rng.uniform(0.5, 2)).reshape(())
        return {**_coded(name, w, '_scale', 'F32', tensor_scale.reshape(())), name[:-len('weight')] + 'input_scale': ('F32', scalar)}
    scales = {'ct-tensor': tensor_scale, 'ct-channel': checkpoint.row_scales(w), 'ct-block': checkpoint.block_scales(w)}[kind]
    return _coded(name, w, '_scale', 'BF16', scales)


def _coded(name, w, suffix, dtype, scales):
    scale = (dtype, checkpoint.bf16_encode(scales) if dtype == 'BF16' else scales.astype(np.float32))
    return {name: ('F8_E4M3', checkpoint.quantize(w, checkpoint.widen(*scale))), name + suffix: scale}


def model_shapes(m):
    hidden, q, kv = m['hidden'], m['heads'] * m['head_dim'], m['kv'] * m['head_dim']
    projections = dict(zip(checkpoint.PROJECTIONS, ((q, hidden), (kv, hidden), (kv, hidden), (hidden, q),
                                                    (m['inter'], hidden), (m['inter'], hidden), (hidden, m['inter']))))
    # A tied checkpoint may hold its one embedding under either name: this one takes the rarer.
    shapes = {'lm_head.weight': (VOCAB, hidden), 'model.norm.weight': (hidden,)}
    if not m.get('tied'):
        shapes['model.embed_tokens.weight'] = (VOCAB, hidden)
    for l in range(m['layers']):
        prefix = 'model.layers.%d.' % l
        shapes.update({prefix + n + '.weight': s for n, s in projections.items()})
        shapes.update({prefix + n + '.weight': (hidden,) for n in ('input_layernorm', 'post_attention_layernorm')})
    return shapes


def write_model(directory, m):
    os.makedirs(directory, exist_ok=True)
    rng = np.random.Generator(np.random.PCG64(m['seed']))
    tensors = {}
    for name, shape in model_shapes(m).items():
        w = rng.standard_normal(shape)
        if len(shape) == 1:
            w = 1 + 0.2 * w
        elif name.startswith('model.layers.'):
            # Rows of different sizes, so that a scale taken from the wrong row shows.
            w *= np.exp(0.5 * rng.standard_normal((shape[0], 1))) / np.sqrt(shape[1])
        else:
            w *= 1.2 / np.sqrt(shape[1])
        w = w.astype(np.float32)
        if _is_fp8(m, name):
            tensors.update(_fp8_tensors(m['fp8'], name, w, rng))
        else:
            tensors[name] = (m['dtype'], checkpoint.bf16_encode(w) if m['dtype'] == 'BF16' else w)
    checkpoint.write_safetensors(os.path.join(directory, 'model.safetensors'), tensors)
    write_json(os.path.join(directory, 'config.json'), _config(m))


def _lines(value, indent):
    """JSON with sorted keys, and a container of nothing but scalars on one line."""
    parts = value.values() if isinstance(value, dict) else value
    if not isinstance(value, (dict, list)) or not any(isinstance(v, (dict, list)) for v in parts):
        return json.dumps(value, sort_keys=True)
    inner, outer = '\n' + ' ' * (indent + 2), '\n' + ' ' * indent
    if isinstance(value, list):
        return '[' + inner + (',' + inner).join(_lines(v, indent + 2) for v in value) + outer + ']'
    return '{' + inner + (',' + inner).join('%s: %s' % (json.dumps(k), _lines(value[k], indent + 2))
                                           for k in sorted(value)) + outer + '}'


def write_json(path, value):
    """Numbers have as many digits as float64 needs to come back unchanged (at most 17)."""
    with open(path, 'w') as f:
        f.write(_lines(value, 0) + '\n')


# ---- start adapters

def write_adapter(directory, config, base_name, targets, r, alpha, seed, rslora=False):
    """A PEFT directory for a model of this config.json: A as PEFT starts it, B small and not zero."""
    os.makedirs(directory, exist_ok=True)
    rng = np.random.Generator(np.random.PCG64(seed))
    head_dim = config.get('head_dim') or config['hidden_size'] // config['num_attention_heads']
    hidden, inter = config['hidden_size'], config['intermediate_size']
    q, kv = config['num_attention_heads'] * head_dim, config['num_key_value_heads'] * head_dim
    sizes = dict(zip(checkpoint.PROJECTIONS, ((q, hidden), (kv, hidden), (kv, hidden), (hidden, q),
                                              (inter, hidden), (inter, hidden), (hidden, inter))))
    tensors = {}
    for l in range(config['num_hidden_layers']):
        for name, (n_out, n_in) in sizes.items():
            if name.split('.')[1] not in targets:
                continue
            module = 'base_model.model.model.layers.%d.%s.' % (l, name)
            bound = 1 / np.sqrt(n_in)
            tensors[module + 'lora_A.weight'] = rng.uniform(-bound, bound, (r, n_in))
            tensors[module + 'lora_B.weight'] = 0.05 * rng.standard_normal((n_out, r))
    checkpoint.write_f32(os.path.join(directory, 'adapter_model.safetensors'), tensors)
    write_json(os.path.join(directory, 'adapter_config.json'), {
        'alpha_pattern': {}, 'auto_mapping': None, 'base_model_name_or_path': base_name, 'bias': 'none',
        'fan_in_fan_out': False, 'inference_mode': True, 'init_lora_weights': True, 'layer_replication': None,
        'layers_pattern': None, 'layers_to_transform': None, 'loftq_config': {}, 'lora_alpha': alpha, 'lora_dropout': 0.0,
        'megatron_config': None, 'megatron_core': 'megatron.core', 'modules_to_save': None, 'peft_type': 'LORA', 'r': r,
        'rank_pattern': {}, 'revision': None, 'target_modules': sorted(targets), 'task_type': 'CAUSAL_LM',
        'use_dora': False, 'use_rslora': rslora})


# ---- token rows

def _sequence(rng, length):
    """A noisy linear walk through the vocabulary: something for an adapter to learn."""
    ids, token = [], int(rng.integers(3, VOCAB))
    for _ in range(length):
        ids.append(token)
        token = 3 + (7 * token + 11) % (VOCAB - 3) if rng.random() < 0.7 else int(rng.integers(3, VOCAB))
    return ids


def _row(ids, n_masked):
    """The first n_masked labels are -100, as a prompt's are."""
    return {'input_ids': ids, 'labels': [-100] * n_masked + ids[n_masked:]}


def _tiny_rows(seed, n, lengths):
    rng = np.random.Generator(np.random.PCG64(seed))
    rows = []
    for _ in range(n):
        ids = _sequence(rng, int(rng.integers(*lengths)))
        rows.append(_row(ids, int(rng.integers(0, len(ids) // 2))))
    return rows


def _joined(rows, mask_first):
    """Rows packed into one, documents kept apart. mask_first: -100 on each document's first token, as a packer writes it;
    otherwise the labels are as given, and a document's last position is asked for the next one's first token."""
    out = {'input_ids': [], 'labels': [], 'document_ids': []}
    for document, row in enumerate(rows):
        labels = list(row['labels'])
        if mask_first:
            labels[0] = -100
        out['input_ids'] += row['input_ids']
        out['labels'] += labels
        out['document_ids'] += [document] * len(labels)
    return out


def _packed(rows, sizes):
    out, at = [], 0
    for i, size in enumerate(sizes):
        out.append(_joined(rows[at:at + size], mask_first=i != 1))
        at += size
    return out


def _weighted(rows, seed):
    """Weights of 0 to 2, a quarter of them 0; the last row keeps weight 1 throughout by having no weights."""
    rng = np.random.Generator(np.random.PCG64(seed))
    out = []
    for row in rows:
        n = len(row['labels'])
        weights = np.abs(np.round(rng.uniform(-0.5, 2, n), 3)) * (rng.random(n) > 0.25)
        out.append(dict(row, weights=[float(w) for w in weights]))
    out[-1].pop('weights')
    return out


def _story_rows(data):
    tokenizer = Tokenizer.from_file(os.path.join(data, 'models', 'stories260K', 'tokenizer.json'))
    rows = []
    for i, text in enumerate(STORIES):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        rows.append(_row([1] + ids, 1 + 3 * i))
    return rows


def token_files(data):
    """name -> rows"""
    stories, tiny = _story_rows(data), _tiny_rows(21, 5, (6, 30))
    many = _tiny_rows(22, 19, (4, 24))                       # 19 rows, 8 a step: steps cross the epochs' ends
    return {
        'stories': stories[:5], 'stories-more': stories, 'stories-validation': stories[7:],
        'stories-packed': _packed(stories, (3, 2, 4)), 'stories-weights': _weighted(stories[:5], 31),
        'tiny': tiny, 'tiny-more': many, 'tiny-validation': _tiny_rows(23, 4, (8, 30)),
        'tiny-packed': _packed(_tiny_rows(24, 10, (3, 20)), (3, 2, 4, 1)), 'tiny-weights': _weighted(_tiny_rows(25, 5, (6, 30)), 32),
        'tiny-long': _tiny_rows(26, 3, (90, 140)),
    }


def write_tokens(path, rows):
    with open(path, 'w') as f:
        for row in rows:
            f.write(json.dumps(row, separators=(',', ':')) + '\n')
