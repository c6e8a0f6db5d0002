# SPDX-License-Identifier: Apache-2.0
"""The rows of bench/results/compatibility.md: families, RoPE types, tokenizers, and what is rejected."""
import itertools
import os
import sys

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), '..', '..'))
sys.path.insert(0, os.path.join(ROOT, 'tools', 'golden', 'families'))
from make_golden import FALCON_TARGETS, LLAMA_TARGETS, PHI_TARGETS, TOWER_TARGETS, without  # noqa: E402

DTYPES = ('float32', 'bfloat16', 'float16')
POSITIONS, ORIGINAL = 256, 96   # rows of ROW_LENGTHS are on both sides of ORIGINAL, a prompt and its answer below
ROW_LENGTHS = (13, 29, 7, 121)
DECODER = {'hidden_size': 24, 'num_hidden_layers': 2, 'num_attention_heads': 4, 'num_key_value_heads': 2, 'head_dim': 8,
           'intermediate_size': 40, 'max_position_embeddings': POSITIONS}
FALCON = {'hidden_size': 32, 'num_hidden_layers': 2, 'num_attention_heads': 4, 'ffn_hidden_size': 40,
          'max_position_embeddings': POSITIONS}
MULTIPLIERS = {'embedding_multiplier': 6.0, 'residual_multiplier': 0.7, 'attention_multiplier': 0.4, 'logits_scaling': 0.3}

#  title: (class, configuration, LoRA targets)
FAMILIES = {
    'llama': ('Llama', DECODER, LLAMA_TARGETS),
    'llama, biases': ('Llama', {**DECODER, 'attention_bias': True, 'mlp_bias': True}, LLAMA_TARGETS),
    'mistral': ('Mistral', {**DECODER, 'sliding_window': None}, LLAMA_TARGETS),
    'mistral, window': ('Mistral', {**DECODER, 'sliding_window': 9}, LLAMA_TARGETS),
    'ministral3': ('Ministral3', DECODER, LLAMA_TARGETS),
    'mistral3, mistral': ('Mistral3', {**DECODER, 'model_type': 'mistral', 'sliding_window': None}, TOWER_TARGETS),
    'mistral3, ministral3': ('Mistral3', {**DECODER, 'model_type': 'ministral3'}, TOWER_TARGETS),
    'qwen2': ('Qwen2', without(DECODER, 'head_dim') | {'hidden_size': 32}, LLAMA_TARGETS),
    'qwen2, windows': ('Qwen2', {**without(DECODER, 'head_dim'), 'hidden_size': 32, 'use_sliding_window': True,
                                 'sliding_window': 9, 'max_window_layers': 1}, LLAMA_TARGETS),
    'qwen3': ('Qwen3', DECODER, LLAMA_TARGETS),
    'granite': ('Granite', {**without(DECODER, 'head_dim'), 'hidden_size': 32, **MULTIPLIERS}, LLAMA_TARGETS),
    'seed_oss': ('SeedOss', {**DECODER, 'attention_bias': True, 'attention_out_bias': True, 'mlp_bias': True}, LLAMA_TARGETS),
    'olmo2': ('Olmo2', without(DECODER, 'head_dim') | {'hidden_size': 32}, LLAMA_TARGETS),
    'phi3': ('Phi3', without(DECODER, 'head_dim') | {'hidden_size': 32}, PHI_TARGETS),
    'phi3, half of each head rotated': ('Phi3', without(DECODER, 'head_dim') | {'hidden_size': 32, 'sliding_window': 9}, PHI_TARGETS),
    'falcon, two norms': ('Falcon', {**FALCON, 'new_decoder_architecture': True, 'num_kv_heads': 2}, FALCON_TARGETS),
    'falcon, one key head': ('Falcon', {**FALCON, 'multi_query': True}, FALCON_TARGETS),
    'falcon, in sequence': ('Falcon', {**FALCON, 'multi_query': False, 'parallel_attn': False, 'bias': True}, FALCON_TARGETS),
}

PAIRS = DECODER['head_dim'] // 2
ROPES = {
    'default': {},
    'linear': {'factor': 3.0},
    'dynamic': {'factor': 2.0},
    'llama3': {'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0, 'original_max_position_embeddings': ORIGINAL},
    'yarn': {'factor': 8.0, 'original_max_position_embeddings': ORIGINAL, 'beta_fast': 4.0, 'beta_slow': 1.0},
    'longrope': {'factor': POSITIONS / ORIGINAL, 'original_max_position_embeddings': ORIGINAL,
                 'short_factor': [1 + 0.1 * i for i in range(PAIRS)], 'long_factor': [1.5 + i for i in range(PAIRS)]},
}


def ropes_of(family):
    """transformers accepts two types in Phi-3's files."""
    return ('default', 'longrope') if 'phi3' in family else tuple(ROPES)


def rope_parameters(family, rope):
    """As the family's files have them: Ministral 3 scales its queries with every type."""
    parameters = {'rope_type': rope, 'rope_theta': 1e4, **ROPES[rope]}
    if 'half of each head' in family:
        parameters['partial_rotary_factor'] = 0.5
        for key in ('short_factor', 'long_factor'):
            if key in parameters:
                parameters[key] = parameters[key][:PAIRS // 2]
    if 'ministral3' in family:
        parameters |= {'llama_4_scaling_beta': 0.1, 'original_max_position_embeddings': ORIGINAL}
    return parameters


def combinations(tokenizers):
    """(family, rope, dtype, tied, tokenizer): a family with a RoPE type is one line of the page, of each dtype and tying, and of
    each tokenizer once."""
    stored = list(itertools.product(DTYPES, (False, True)))
    for line, (family, rope) in enumerate((f, r) for f in FAMILIES for r in ropes_of(f)):
        for i, (dtype, tied) in enumerate(stored):
            yield family, rope, dtype, tied, tokenizers[(line + i) % len(tokenizers)]


def quick(tokenizers):
    """One combination per family; all RoPE types, dtypes and tokenizers occur."""
    every = list(combinations(tokenizers))
    for i, family in enumerate(FAMILIES):
        of_family = [c for c in every if c[0] == family]
        yield of_family[7 * i % len(of_family)]


# ---- what is rejected: a class of transformers, and keys that its config.json has besides

REJECTED_TYPES = ('ApertusConfig', 'ArceeConfig', 'BloomConfig', 'CohereConfig', 'Cohere2Config', 'DeepseekV3Config', 'Exaone4Config',
                  'FalconMambaConfig', 'GemmaConfig', 'Gemma2Config', 'Gemma3TextConfig', 'GlmConfig', 'Glm4Config',
                  'GPT2Config', 'GPTNeoXConfig', 'GptOssConfig', 'GraniteMoeConfig', 'HunYuanDenseV1Config', 'InternLM3Config',
                  'Llama4TextConfig', 'MambaConfig', 'MiniMaxM2Config', 'MixtralConfig', 'MptConfig',
                  'NemotronConfig', 'OlmoConfig', 'Olmo3Config', 'OPTConfig', 'PhiConfig',
                  'PhimoeConfig', 'Qwen2MoeConfig', 'Qwen3MoeConfig', 'Qwen3NextConfig', 'SmolLM3Config', 'StableLmConfig',
                  'Starcoder2Config')

#  what: (class, keys)
REJECTED_KEYS = {
    'another activation': ('LlamaConfig', {'hidden_act': 'gelu'}),
    'attention dropout': ('LlamaConfig', {'attention_dropout': 0.1}),
    'partial rotary embedding': ('LlamaConfig', {'partial_rotary_factor': 0.5}),
    'an unknown RoPE type': ('LlamaConfig', {'rope_parameters': {'rope_type': 'proportional', 'rope_theta': 1e4}}),
    'an unknown key of RoPE': ('LlamaConfig', {'rope_parameters': {'rope_type': 'default', 'rope_theta': 1e4, 'mrope_section': [1, 1]}}),
    'a chunked attention': ('LlamaConfig', {'attention_chunk_size': 64}),
    'softcapping': ('LlamaConfig', {'final_logit_softcapping': 30.0}),
}

#  what: (quantization_config, the tensors that stand for the weight of a projection: ending, dtype, shape)
REJECTED_FORMATS = {
    'MXFP4': ({'quant_method': 'mxfp4'}, (('_blocks', 'U8', (8, 1, 16)), ('_scales', 'U8', (8, 1)))),
    'bitsandbytes, 4 bits': ({'quant_method': 'bitsandbytes', 'load_in_4bit': True},
                             (('.weight', 'U8', (128, 1)), ('.weight.absmax', 'F32', (4,)), ('.weight.quant_map', 'F32', (16,)))),
    'bitsandbytes, 8 bits': ({'quant_method': 'bitsandbytes', 'load_in_8bit': True},
                             (('.weight', 'I8', (8, 32)), ('.SCB', 'F32', (8,)))),
    'GPTQ': ({'quant_method': 'gptq', 'bits': 4},
             (('.qweight', 'I32', (4, 8)), ('.qzeros', 'I32', (1, 1)), ('.scales', 'F16', (1, 8)), ('.g_idx', 'I32', (32,)))),
    'AWQ': ({'quant_method': 'awq', 'bits': 4},
            (('.qweight', 'I32', (32, 1)), ('.qzeros', 'I32', (1, 1)), ('.scales', 'F16', (1, 8)))),
}
