# SPDX-License-Identifier: Apache-2.0
"""Ballast: LoRA over a quantized, sharded, paged base.

`import ballast` needs no torch: quantize, inspect and plan. `import ballast.torch` is the layer for
PyTorch.
"""
from ._program import inspect, plan, program, quantize

__version__ = "0.1.0"
__all__ = ["inspect", "plan", "program", "quantize", "__version__"]
