# SPDX-License-Identifier: Apache-2.0
"""The table of cases. A case = a model, a start adapter, token rows and hyper-parameters; make_golden.py runs each.

keep: which whole tensors are committed beside the norms and projections: 'gradients' of the first step, the 'final' adapter.
"""
from checkpoint import PROJECTIONS

ATTENTION = ['q_proj', 'k_proj', 'v_proj', 'o_proj']
MLP = ['gate_proj', 'up_proj', 'down_proj']
ALL = ATTENTION + MLP

DEFAULTS = {
    'adam_beta1': 0.9, 'adam_beta2': 0.999, 'adam_epsilon': 1e-8, 'base_format': 'stored', 'data_format': 'tokens',
    'gradient_accumulation_steps': 1, 'learning_rate': 2e-3, 'lora_dropout': 0.0, 'lr_scheduler_type': 'constant',
    'max_grad_norm': 1.0, 'max_steps': 20, 'packing': 'none', 'per_device_train_batch_size': 2, 'shuffle': False,
    'warmup_steps': 0, 'weight_decay': 0.0}

DATA_MODELS = ('stories260K', 'stories260K-bf16', 'stories260K-bf16-sharded')
# `grow_model.py SOURCE DST` with these; the weights are as good as any, what counts is the larger, rounder shape.
GROWN = {'grown-2m': {'source': 'stories260K',
                      'arguments': ['--hidden', '192', '--inter', '512', '--layers', '5', '--heads', '12', '--kv', '6',
                                    '--head-dim', '16', '--dense', '--noise', '0.13']}}

#  name: (model, target modules, r, alpha, seed, more)
ADAPTERS = {
    'stories-all-linear': ('stories260K', ALL, 4, 8, 101, {}),
    'grown-2m-q-v-down': ('grown-2m', ['q_proj', 'v_proj', 'down_proj'], 2, 4, 102, {}),
    'tiny-gqa-all-linear': ('tiny-gqa', ALL, 4, 8, 110, {}),
    'tiny-gqa-attention': ('tiny-gqa', ATTENTION, 4, 8, 111, {}),
    'tiny-gqa-mlp': ('tiny-gqa', MLP, 4, 8, 112, {}),
    'tiny-gqa-rslora': ('tiny-gqa', ALL, 4, 6, 113, {'rslora': True}),
    'tiny-mha-tied-all-linear': ('tiny-mha-tied', ALL, 3, 8, 114, {}),
    'tiny-llama3-rope-all-linear': ('tiny-llama3-rope', ALL, 4, 8, 115, {}),
    'tiny-fbgemm-all-linear': ('tiny-fp8-fbgemm', ALL, 2, 4, 116, {}),
}
ADAPTERS.update({'tiny-gqa-' + t: ('tiny-gqa', [t], 4, 8, 120 + i, {}) for i, t in enumerate(ALL)})


def _topologies(batch):
    """(ranks, per-device batch, accumulation) with the same sequences in each step."""
    return [{'ranks': r, 'per_device_train_batch_size': b, 'gradient_accumulation_steps': batch // (r * b)}
            for r in (1, 2, 4, 8) for b in (1, 2, 4, 8) if batch % (r * b) == 0]


def _case(about, model, adapter, tokens, keep=(), batch=None, **config):
    case = {'about': about, 'model': model, 'adapter': adapter, 'tokens': tokens, 'keep': keep,
            'config': {**DEFAULTS, **config}}
    if batch:
        case['topologies'] = _topologies(batch)
        case['config'].update(per_device_train_batch_size=batch)
    return case


def _stories(about, model='stories260K', tokens='stories', **more):
    return _case(about, model, 'stories-all-linear', tokens, **more)


def _tiny(about, adapter='tiny-gqa-all-linear', tokens='tiny', model='tiny-gqa', **more):
    return _case(about, model, adapter, tokens, **{'learning_rate': 5e-3, **more})


BOTH = ('gradients', 'final')
CASES = {
    'stories-stored': _stories('the real model as stored, F32'),
    'stories-fp8-row': _stories('quantized at load, a scale a row', base_format='fp8_row'),
    'stories-fp8-block': _stories('quantized at load, a scale a 128 x 128 block of each projection', base_format='fp8_block'),
    'stories-auto': _stories('auto on a model without FP8 tensors is fp8_row', base_format='auto', max_steps=2),
    'stories-bf16-fp8-row': _stories('from BF16 weights', 'stories260K-bf16', base_format='fp8_row', max_steps=10),
    'stories-bf16-sharded': _stories('several files behind an index', 'stories260K-bf16-sharded', max_steps=4),
    'stories-packed': _stories('documents kept apart within a row', tokens='stories-packed'),
    'stories-weights': _stories('per-token weights', tokens='stories-weights'),
    'stories-validation': _stories('validation before, during and after', tokens='stories', eval_strategy='steps', eval_steps=5,
                                   validation='stories-validation'),
    'stories-ranks': _stories('8 sequences a step, over ranks and accumulation', tokens='stories-more', batch=8,
                              base_format='fp8_row', max_steps=8),
    'stories-cosine-clip': _stories('warmup, cosine, weight decay, clipping at work', lr_scheduler_type='cosine', warmup_steps=4,
                                    weight_decay=0.1, max_grad_norm=0.2, learning_rate=1e-2),
    'grown-2m-fp8-row': _case('a grown model, a scale a row', 'grown-2m', 'grown-2m-q-v-down', 'stories', base_format='fp8_row',
                              max_steps=10),
    'grown-2m-fp8-block': _case('a grown model, blocks that tile and blocks that do not', 'grown-2m', 'grown-2m-q-v-down',
                                'stories', base_format='fp8_block', max_steps=10),
    'tiny-attention': _tiny('q, k, v, o', 'tiny-gqa-attention', keep=('gradients',)),
    'tiny-mlp': _tiny('gate, up, down', 'tiny-gqa-mlp', keep=('gradients',)),
    'tiny-all-linear': _tiny('grouped query heads, all seven', keep=BOTH),
    'tiny-rslora': _tiny('scale alpha / sqrt(r)', 'tiny-gqa-rslora'),
    'tiny-mha-tied': _tiny('one head per kv head; tied, stored under lm_head only', 'tiny-mha-tied-all-linear',
                           model='tiny-mha-tied', keep=BOTH),
    'tiny-llama3-rope': _tiny('scaled rotary frequencies, rows past the original context; head_dim is not hidden / heads; one kv head',
                              'tiny-llama3-rope-all-linear', 'tiny-long', 'tiny-llama3-rope', keep=('gradients',),
                              per_device_train_batch_size=1),
    'tiny-fp8-row': _tiny('a scale a row', base_format='fp8_row'),
    'tiny-fp8-block': _tiny('blocks with a remainder of 4', base_format='fp8_block'),
    'tiny-packed': _tiny('documents kept apart; the second row asks across the boundary', tokens='tiny-packed',
                         keep=('gradients',)),
    'tiny-weights': _tiny('per-token weights; the last row has none', tokens='tiny-weights', keep=('gradients',)),
    'tiny-ranks': _tiny('8 sequences a step, over ranks and accumulation; one row has no label', tokens='tiny-more', batch=8),
    'tiny-constant': _tiny('constant, no clipping', max_grad_norm=0.0),
    'tiny-constant-warmup': _tiny('constant after a warmup', lr_scheduler_type='constant_with_warmup', warmup_steps=5),
    'tiny-linear': _tiny('linear to 0 after a warmup', lr_scheduler_type='linear', warmup_steps=3),
    'tiny-cosine-clip': _tiny('warmup, cosine, weight decay, clipping at work', lr_scheduler_type='cosine', warmup_steps=4,
                              weight_decay=0.1, max_grad_norm=0.2, learning_rate=2e-2, keep=('final',)),
    'tiny-adam': _tiny('other betas and epsilon', adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-3, weight_decay=0.05),
    'tiny-validation': _tiny('validation before, during and after', eval_strategy='steps', eval_steps=5,
                             validation='tiny-validation'),
    'fp8-fbgemm': _tiny('Meta: rows, F32; only the middle layer\'s MLP is FP8', 'tiny-fbgemm-all-linear', model='tiny-fp8-fbgemm',
                        max_steps=5),
    'fp8-fbgemm-auto': _tiny('the same, BF16 projections made fp8_row', 'tiny-fbgemm-all-linear', model='tiny-fp8-fbgemm',
                             base_format='auto', max_steps=5),
    'fp8-ct-channel-auto': _tiny('compressed-tensors, rows; BF16 projections made fp8_row', model='tiny-fp8-ct-channel',
                                 base_format='auto', max_steps=5),
    'fp8-ct-block-auto': _tiny('compressed-tensors, blocks; a fused matrix of two formats', model='tiny-fp8-ct-block',
                               base_format='auto', max_steps=5),
}
CASES.update({'tiny-' + p.split('.')[1]: _tiny('one target alone', 'tiny-gqa-' + p.split('.')[1], keep=('gradients',), max_steps=5)
              for p in PROJECTIONS})
CASES.update({'fp8-' + kind: _tiny(about, model='tiny-fp8-' + kind, max_steps=5) for kind, about in (
    ('ct-tensor', 'compressed-tensors, one BF16 scale a tensor'), ('ct-channel', 'compressed-tensors, BF16 scales a row'),
    ('ct-block', 'compressed-tensors, BF16 scales a block'), ('deepseek', 'weight_scale_inv, F32 scales a block'),
    ('autofp8', 'a scalar weight_scale, and an input_scale to ignore'))})
