#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes tests/golden/families and tests/golden/mixtures: small random models of families other than Llama, and float64 results
of short LoRA trainings.

The files are those of tests/golden/train (../train/README.md), whose reader and comparisons are used; paths in a case are
relative to tests/golden/train, as the tests read them. The model is transformers' own class, the adapter PEFT's.
Everything is computed in float64: where transformers asks for float32 (norms, RoPE, softmax) it gets float64.

Made with Python 3.11.2, torch 2.15.0, transformers 5.24.0, peft, numpy; other versions of transformers are refused.

usage: make_golden.py [--out DIR] [--only CASE ...]
"""
import argparse
import json
import os
import re
import sys

import numpy as np
import torch
import transformers

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'train'))
import checkpoint  # noqa: E402
import inputs  # noqa: E402
import reference  # noqa: E402

TRANSFORMERS = '5.24.0'
VOCAB, R, ALPHA, STEPS = 64, 4, 8, 3
SIZES = {'vocab_size': VOCAB, 'hidden_size': 24, 'num_hidden_layers': 2, 'num_attention_heads': 4, 'bos_token_id': 1,
         'eos_token_id': 2, 'pad_token_id': None, 'max_position_embeddings': 64}
DECODER = {**SIZES, 'intermediate_size': 40, 'num_key_value_heads': 2, 'head_dim': 8}


def without(settings, key):
    return {k: v for k, v in settings.items() if k != key}


LLAMA_TARGETS = ['q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj']
YARN = {'rope_type': 'yarn', 'rope_theta': 1e4, 'factor': 8.0, 'original_max_position_embeddings': 8, 'beta_fast': 4.0,
        'beta_slow': 1.0, 'mscale': 1.0, 'mscale_all_dim': 0.0}
LONGROPE = {'rope_type': 'longrope', 'rope_theta': 1e4, 'original_max_position_embeddings': 16,
            'short_factor': [1.0, 1.1, 1.2, 1.3], 'long_factor': [1.5, 2.0, 3.0, 4.5]}

PHI_TARGETS = ['qkv_proj', 'o_proj', 'gate_up_proj', 'down_proj']

FALCON = {**SIZES, 'num_kv_heads': 2, 'ffn_hidden_size': 40}
FALCON_TARGETS = ['query_key_value', 'dense', 'dense_h_to_4h', 'dense_4h_to_h']

VISION = {'model_type': 'pixtral', 'hidden_size': 16, 'intermediate_size': 16, 'num_hidden_layers': 1, 'num_attention_heads': 2,
          'head_dim': 8, 'image_size': 28, 'patch_size': 14}
TOWER_TARGETS = r'model\.language_model\.layers\.\d+\..*_proj'   # the vision tower has modules of these names, too

#  name: (class, configuration, targets)
CASES = {
    'llama-bias': ('Llama', {**DECODER, 'attention_bias': True, 'mlp_bias': True}, LLAMA_TARGETS),
    'llama-longrope': ('Llama', {**DECODER, 'rope_parameters': LONGROPE}, LLAMA_TARGETS),
    'mistral-window': ('Mistral', {**DECODER, 'sliding_window': 5}, LLAMA_TARGETS),
    'ministral3-beta': ('Ministral3', {**DECODER, 'rope_parameters': {**YARN, 'llama_4_scaling_beta': 0.1}}, LLAMA_TARGETS),
    'qwen2-window': ('Qwen2', {**without(DECODER, 'head_dim'), 'use_sliding_window': True, 'sliding_window': 7,
                               'max_window_layers': 1}, LLAMA_TARGETS),
    'qwen3-tied': ('Qwen3', {**DECODER, 'tie_word_embeddings': True}, LLAMA_TARGETS),
    'seed_oss': ('SeedOss', {**DECODER, 'attention_bias': True, 'attention_out_bias': True}, LLAMA_TARGETS),
    'granite': ('Granite', {**without(DECODER, 'head_dim'), 'num_attention_heads': 3, 'num_key_value_heads': 1,
                            'embedding_multiplier': 6.0, 'residual_multiplier': 0.7, 'attention_multiplier': 0.4,
                            'logits_scaling': 0.3}, LLAMA_TARGETS),
    'falcon-180b': ('Falcon', {**FALCON, 'new_decoder_architecture': True}, FALCON_TARGETS),
    'falcon-one-norm': ('Falcon', {**FALCON, 'new_decoder_architecture': True, 'num_ln_in_parallel_attn': 1, 'bias': True,
                                   'activation': 'gelu_new', 'tie_word_embeddings': False}, FALCON_TARGETS),
    'falcon-7b': ('Falcon', {**without(FALCON, 'ffn_hidden_size'), 'multi_query': True}, FALCON_TARGETS),
    'falcon-sequence': ('Falcon', {**without(FALCON, 'num_kv_heads'), 'multi_query': False, 'parallel_attn': False,
                                   'bias': True}, FALCON_TARGETS),
    'mistral3': ('Mistral3', {**DECODER, 'model_type': 'ministral3', 'rope_parameters': {**YARN, 'llama_4_scaling_beta': 0.1}},
                 TOWER_TARGETS),
    'phi3': ('Phi3', {**without(DECODER, 'head_dim'), 'num_attention_heads': 3, 'num_key_value_heads': 1,
                      'rope_parameters': {'rope_type': 'default', 'rope_theta': 1e4, 'partial_rotary_factor': 0.75}}, PHI_TARGETS),
    'phi3-longrope': ('Phi3', {**without(DECODER, 'head_dim'), 'num_attention_heads': 3, 'num_key_value_heads': 3,
                               'sliding_window': 5, 'original_max_position_embeddings': 16,
                               'rope_parameters': {**LONGROPE, 'short_factor': [1.0, 1.2], 'long_factor': [1.5, 4.5],
                                                   'partial_rotary_factor': 0.5}}, PHI_TARGETS),
    'olmo2': ('Olmo2', {**without(DECODER, 'head_dim'), 'attention_bias': True}, LLAMA_TARGETS),
}

# Mixtures, in tests/golden/mixtures: LoRA on all but the routed experts. Of the MLPs by parameters, since PEFT takes the module
# gate_proj for the experts.
MOE = {**DECODER, 'num_hidden_layers': 3, 'moe_intermediate_size': 16, 'num_experts_per_tok': 2}
ATTENTION_TARGETS = ['q_proj', 'k_proj', 'v_proj', 'o_proj']
DENSE_TARGETS = ['mlp.%s_proj.weight' % m for m in ('gate', 'up', 'down')]
SHARED_TARGETS = ['shared_experts.%s_proj.weight' % m for m in ('gate', 'up', 'down')]
MIXTURES = {
    'qwen3_moe-dense': ('Qwen3Moe', {**MOE, 'num_experts': 6, 'norm_topk_prob': True, 'mlp_only_layers': [0],
                                     'decoder_sparse_step': 1}, ATTENTION_TARGETS + DENSE_TARGETS),
    'glm4_moe-groups': ('Glm4Moe', {**MOE, 'n_routed_experts': 8, 'n_shared_experts': 2, 'first_k_dense_replace': 1, 'n_group': 4,
                                    'topk_group': 2, 'routed_scaling_factor': 1.5, 'norm_topk_prob': False, 'use_qk_norm': False,
                                    'attention_bias': True}, ATTENTION_TARGETS + DENSE_TARGETS + SHARED_TARGETS),
}

CONFIG = {
    'adam_beta1': 0.9, 'adam_beta2': 0.999, 'adam_epsilon': 1e-8, 'base_format': 'stored', 'data_format': 'tokens',
    'gradient_accumulation_steps': 1, 'learning_rate': 2e-3, 'lora_dropout': 0.0, 'lr_scheduler_type': 'constant',
    'max_grad_norm': 1.0, 'max_steps': STEPS, 'packing': 'none', 'per_device_train_batch_size': 2, 'shuffle': False,
    'warmup_steps': 0, 'weight_decay': 0.0}
TOPOLOGIES = [{'ranks': 1, 'per_device_train_batch_size': 2, 'gradient_accumulation_steps': 1},
              {'ranks': 2, 'per_device_train_batch_size': 1, 'gradient_accumulation_steps': 1}]
LENGTHS = (13, 29, 7, 21)


def use_float64():
    """transformers' code from here on has no float32."""
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)


def logits_of(model, row):
    ids = torch.tensor([row['input_ids']])
    return model(input_ids=ids, use_cache=False).logits[0]


def make_weights(model, seed):
    """float32 values by name: a parameter has its own generator, so that another class changes no value."""
    weights = {}
    for i, (name, p) in enumerate(sorted(model.named_parameters())):
        rng = np.random.Generator(np.random.PCG64([seed, i]))
        w = rng.standard_normal(tuple(p.shape))
        if name.endswith('.bias'):
            w *= 0.2
        elif w.ndim == 1:
            w = 1 + 0.2 * w
        elif '.layers.' in name or '.h.' in name:
            w *= 1 / np.sqrt(w.shape[1])
        else:
            w *= 1.2 / np.sqrt(w.shape[1])
        weights[name] = w.astype(np.float32)
    return weights


def config_of(kind, settings):
    if kind != 'Mistral3':
        return getattr(transformers, kind + 'Config')(**settings)
    text = without(settings, 'tie_word_embeddings')
    return transformers.Mistral3Config(text_config=text, vision_config=VISION,
                                       tie_word_embeddings=settings.get('tie_word_embeddings', False))


def class_of(kind):
    return getattr(transformers, kind + ('ForConditionalGeneration' if kind == 'Mistral3' else 'ForCausalLM'))


def targets_of(kind):
    return TOWER_TARGETS if kind == 'Mistral3' else LLAMA_TARGETS


def stored_name(kind, name):
    """Of a parameter, in the files that transformers writes."""
    if kind != 'Mistral3':
        return name
    name = re.sub(r'^lm_head', 'language_model.lm_head', name)
    name = re.sub(r'^model\.language_model', 'language_model.model', name)
    return re.sub(r'^model\.(vision_tower|multi_modal_projector)', r'\1', name)


def published(name, w):
    """The tensors that published checkpoints have in place of all experts of a layer, stacked."""
    if w.ndim != 3:
        return {name: w}
    head = name.rsplit('.', 1)[0]
    if name.endswith('gate_up_proj'):
        half = w.shape[1] // 2
        return {'%s.%d.%s.weight' % (head, e, p): np.ascontiguousarray(w[e, i * half:(i + 1) * half])
                for e in range(w.shape[0]) for i, p in enumerate(('gate_proj', 'up_proj'))}
    return {'%s.%d.down_proj.weight' % (head, e): w[e] for e in range(w.shape[0])}


def write_model(directory, kind, settings, seed):
    """The model, with the weights and config.json that were written."""
    os.makedirs(directory, exist_ok=True)
    config = config_of(kind, settings)
    config.architectures = [class_of(kind).__name__]
    experts = {'experts_implementation': 'eager'} if 'num_experts_per_tok' in settings else {}
    model = class_of(kind)._from_config(config, attn_implementation='eager', **experts).double().eval()
    weights = {n: checkpoint.bf16_encode(w) for n, w in make_weights(model, seed).items()}
    state = {n: torch.from_numpy(checkpoint.widen('BF16', w).astype(np.float64)) for n, w in weights.items()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(state[name])
    for name, p in model.named_buffers():
        if name.endswith('e_score_correction_bias'):   # fp32, and as large as the differences of scores
            rng = np.random.Generator(np.random.PCG64([seed, len(weights)]))
            weights[name] = (0.1 * rng.standard_normal(tuple(p.shape))).astype(np.float32)
            p.copy_(torch.from_numpy(weights[name].astype(np.float64)))
    stored = {m: ('BF16' if v.dtype == np.uint16 else 'F32', v) for n, w in weights.items() for m, v in published(stored_name(kind, n), w).items()}
    checkpoint.write_safetensors(os.path.join(directory, 'model.safetensors'), stored)
    text = {k: v for k, v in config.to_dict().items() if k not in ('dtype', '_name_or_path')}
    inputs.write_json(os.path.join(directory, 'config.json'), text)
    return model


def write_adapter(directory, name, model, targets, seed):
    """A PEFT directory: A as PEFT starts it, B small and not zero."""
    from peft import LoraConfig, get_peft_model
    parameters = [] if isinstance(targets, str) else sorted(t for t in targets if t.endswith('.weight'))
    targets = targets if isinstance(targets, str) else sorted(set(targets) - set(parameters))
    model = get_peft_model(model, LoraConfig(r=R, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=targets,
                                             target_parameters=parameters or None, task_type='CAUSAL_LM'))
    tensors = {}
    for i, (n, p) in enumerate(sorted(reference.lora_parameters(model).items())):
        rng = np.random.Generator(np.random.PCG64([seed, i]))
        value = rng.uniform(-1, 1, tuple(p.shape)) / np.sqrt(p.shape[1]) if 'lora_A' in n else \
            0.05 * rng.standard_normal(tuple(p.shape))
        tensors[n] = value.astype(np.float32)
        with torch.no_grad():
            p.copy_(torch.from_numpy(tensors[n].astype(np.float64)))
    os.makedirs(directory, exist_ok=True)
    checkpoint.write_f32(os.path.join(directory, 'adapter_model.safetensors'), tensors)
    inputs.write_json(os.path.join(directory, 'adapter_config.json'), {
        'base_model_name_or_path': name, 'bias': 'none', 'fan_in_fan_out': False, 'inference_mode': True,
        'init_lora_weights': True, 'lora_alpha': ALPHA, 'lora_dropout': 0.0, 'modules_to_save': None, 'peft_type': 'LORA',
        'r': R, 'target_modules': targets, **({'target_parameters': parameters} if parameters else {}), 'task_type': 'CAUSAL_LM',
        'use_dora': False, 'use_rslora': False})
    return model


def write_tokens(path):
    rng = np.random.Generator(np.random.PCG64(7))
    rows = [{'input_ids': ids, 'labels': [-100] * 3 + ids[3:]}
            for ids in ([int(t) for t in rng.integers(3, VOCAB, n)] for n in LENGTHS)]
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, 'w') as f:
        f.writelines(json.dumps(r, separators=(',', ':')) + '\n' for r in rows)
    return rows


def norm(array):
    return float(np.sqrt((array.astype(np.float64) ** 2).sum()))


def summary(arrays):
    return {n: [norm(a)] + reference.projections(a) for n, a in arrays.items()}


def run_case(out, name, case, seed, rows):
    kind, settings, targets = case
    model = write_model(os.path.join(out, 'models', name), kind, settings, seed)
    write_case(out, name, kind, model, targets, seed, rows, '../%s/' % os.path.basename(out))


def write_case(out, name, about, model, targets, seed, rows, here):
    """Trains the model in float64. here: `out`, relative to tests/golden/train."""
    model = write_adapter(os.path.join(out, 'adapters', name), name, model, targets, seed + 100)
    steps, first = [], {}

    def on_step(step, loss, grad_norm, rate, gradients):
        steps.append({'loss': loss, 'grad_norm': grad_norm, 'learning_rate': rate})
        if step == 0:
            first.update(gradients)

    start = reference.adapter_values(model)
    reference.train(model, rows, 2, CONFIG, on_step)
    final = reference.adapter_values(model)
    expect = {'first_loss': steps[0]['loss'], 'steps': steps, 'gradients': summary(first), 'final_adapter': summary(final),
              'final_adapter_norm': norm(np.concatenate([a.ravel() for a in final.values()])),
              'adapter_change_norm': norm(np.concatenate([(final[n] - start[n]).ravel() for n in final]))}
    if targets == TOWER_TARGETS:
        targets = ['all-linear']
    targets = [t.replace('.weight', '') for t in targets]
    config = {**CONFIG, 'init_adapter': here + 'adapters/' + name, 'train_file': here + 'tokens/rows.jsonl', 'lora_r': R,
              'lora_alpha': ALPHA, 'lora_target_modules': targets}
    os.makedirs(os.path.join(out, 'cases', name), exist_ok=True)
    inputs.write_json(os.path.join(out, 'cases', name, 'case.json'), {
        'name': name, 'about': about, 'model': {'root': 'golden', 'path': here + 'models/' + name}, 'config': config,
        'files': {}, 'topologies': TOPOLOGIES, 'expect': expect})
    print('%-20s loss %.6f -> %.6f, gradient norm %.4f' % (name, steps[0]['loss'], steps[-1]['loss'], steps[0]['grad_norm']),
          flush=True)


def main():
    root = os.path.abspath(os.path.join(os.path.dirname(__file__), '..', '..', '..'))
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    p.add_argument('--out', default=os.path.join(root, 'tests', 'golden'))
    p.add_argument('--only', nargs='+', metavar='CASE')
    a = p.parse_args()
    if transformers.__version__ != TRANSFORMERS:
        raise SystemExit('made for transformers %s, not %s' % (TRANSFORMERS, transformers.__version__))
    use_float64()
    reference.row_logits = logits_of
    for folder, cases, first in (('families', CASES, 1000), ('mixtures', MIXTURES, 2000)):
        out = os.path.join(a.out, folder)
        rows = write_tokens(os.path.join(out, 'tokens', 'rows.jsonl'))
        for seed, name in enumerate(cases, first):
            if not a.only or name in a.only:
                run_case(out, name, cases[name], seed, rows)
        inputs.write_json(os.path.join(out, 'index.json'),
                          {'cases': ['../../%s/cases/%s' % (folder, n) for n in sorted(os.listdir(os.path.join(out, 'cases')))]})


if __name__ == '__main__':
    main()
