#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""make_peft_merged.py BASE ADAPTER TARGET DTYPE [STACKED] -- PEFT's own merge: transformers loads BASE in DTYPE, PEFT merges ADAPTER
(merge_and_unload), and save_pretrained writes TARGET, with STACKED in transformers 5's names of experts. Ends with 77 without the
packages (PyTorch, transformers, peft)."""
import sys

try:
    import torch
    import transformers
    from peft import PeftModel
except ImportError as error:
    print(f'skipped: {error}')
    sys.exit(77)

base, adapter, target, dtype = sys.argv[1:5]
transformers.utils.logging.set_verbosity_error()
model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, dtype))
merged = PeftModel.from_pretrained(model, adapter).merge_and_unload()
options = {'save_original_format': False} if len(sys.argv) > 5 else {}
merged.save_pretrained(target, **options)
