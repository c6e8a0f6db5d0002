# SPDX-License-Identifier: Apache-2.0
"""Ballast: LoRA over a quantized, sharded, paged base.

`import ballast` needs no torch: quantize, inspect, plan, and sessions, which train adapters under
the caller's loop. `import ballast.torch` is the layer for PyTorch.
"""
from . import _library
from ._program import inspect, plan, program, quantize
from .session import Adapter, Output, Session

__all__ = ["Adapter", "Output", "Session", "inspect", "plan", "program", "quantize"]


def __getattr__(name: str) -> str:
    """__version__: the library's, which is loaded when it is asked. RuntimeError: there is none."""
    if name != "__version__":
        raise AttributeError(f"module 'ballast' has no attribute '{name}'")
    return _library.load().bl_version().decode()
