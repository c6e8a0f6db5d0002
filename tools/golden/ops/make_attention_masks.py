#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes tests/ops/attention_masks.h: what each query sees by transformers' own masks.

usage: make_attention_masks.py | clang-format >tests/ops/attention_masks.h

Plain and packed rows (packed: position_ids that begin again, as TRL and transformers' flattening collator give them), and calls
with a DynamicCache that has earlier tokens. Needs torch and transformers; the versions are in the output.
"""
import torch
import transformers
from transformers import DynamicCache, MistralConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

# (window, earlier tokens, lengths of the documents)
CASES = [
    (0, 0, [9]), (0, 0, [1, 4, 7]), (0, 6, [3]),
    (1, 0, [5, 3]), (4, 0, [3]), (4, 0, [4]), (4, 0, [5]), (4, 0, [13]), (12, 0, [9, 5]), (5, 0, [5, 1, 6, 17]),
    (4, 2, [1]), (4, 3, [1]), (4, 4, [1]), (4, 20, [1]), (4, 3, [6]), (4, 9, [5]), (33, 150, [9]),
]


def visible(window, older, lengths):
    config = MistralConfig(sliding_window=window or None, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
                           hidden_size=8, head_dim=8)
    config._attn_implementation = 'eager'
    cache = DynamicCache(config=config) if older else None  # with one, documents are not separated
    if older:
        state = torch.zeros(1, 1, older, 8)
        cache.update(state, state, 0)
    tokens = sum(lengths)
    positions = torch.cat([torch.arange(n) for n in lengths]) + older
    make = create_sliding_window_causal_mask if window else create_causal_mask
    mask = make(config, torch.zeros(1, tokens, 8), None, cache, positions[None])[0, 0] == 0
    first_key = cache.get_mask_sizes(tokens, 0)[1] if older else 0
    ranges = []
    for query, row in enumerate(mask):
        keys = [first_key + key for key, is_seen in enumerate(row.tolist()) if is_seen]
        assert keys == list(range(keys[0], older + query + 1)), (window, older, lengths, query)
        ranges.append(keys[0])
    return ranges


print(f'''/* SPDX-License-Identifier: Apache-2.0 */
/* The first key that each query sees by the masks of transformers {transformers.__version__}; its last is its own.
 * Written by tools/golden/ops/make_attention_masks.py. */
#include <stdint.h>

static const struct mask_case {{
    int64_t window, older, n_documents;
    int32_t cu_seqlens[5], first_key[32];
}} MASKS[] = {{''')
for window, older, lengths in CASES:
    cu_seqlens = ', '.join(str(sum(lengths[:i])) for i in range(len(lengths) + 1))
    keys = ', '.join(map(str, visible(window, older, lengths)))
    print(f'    {{{window}, {older}, {len(lengths)}, {{{cu_seqlens}}}, {{{keys}}}}},')
print('};')
