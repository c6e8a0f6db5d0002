# SPDX-License-Identifier: Apache-2.0
"""LoRA linear layers for PyTorch over a frozen base that is quantized, sharded and paged.

    import ballast.torch as bt
    bt.convert(model, base=bt.Base(format="fp8_row"), lora=bt.LoRA(r=16, alpha=32))

docs/pytorch.md is the guide.
"""
import torch

from .. import _library
from ._adapter import load_adapter, save_adapter
from ._config import Base, LoRA
from ._convert import convert, layers, stats
from ._init import init
from ._linear import LoraLinear

if not torch.cuda.is_initialized():  # CUDA reads the environment when it starts
    _library.load().bl_device_prepare_environment()

__all__ = ["Base", "LoRA", "LoraLinear", "convert", "init", "layers", "load_adapter",
           "save_adapter", "stats"]
