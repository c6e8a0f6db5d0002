# SPDX-License-Identifier: Apache-2.0
"""The layer's operators, torch.ops.ballast.linear and linear_backward, with fakes and autograd.

A layer is named by its number (Frozen.number), so that graphs hold no objects. The mask's key is a
tensor drawn from torch's CPU generator: torch.utils.checkpoint restores that generator, so that
recomputation draws the same key, and forward and backward share it.
"""
from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from .. import _library as lib
from ._stack import Frozen, tensor_of


def _rows_of(x: Tensor) -> int:
    return x.numel() // x.shape[-1] if x.shape[-1] else 0


def _check(frozen: Frozen, x: Tensor, name: str, width: int) -> None:
    if x.device.type != frozen.stack.where.type:
        raise ValueError(f"{name} is on {x.device}, the layer's base is on {frozen.stack.where}")
    if x.dim() < 1 or x.shape[-1] != width:
        raise ValueError(f"{name} has the shape {tuple(x.shape)}: its last dimension must be {width}")
    allowed = ((torch.float32, torch.bfloat16) if x.device.type == "cpu" else (torch.bfloat16,))
    if x.dtype not in allowed:
        raise ValueError(f"{name} is {x.dtype}: the layer takes "
                         f"{' and '.join(str(t) for t in allowed)}")


def _factor(t: Optional[Tensor], name: str) -> Optional[Tensor]:
    if t is not None and t.dtype != torch.float32:
        raise ValueError(f"{name} is {t.dtype}: LoRA weights are float32")
    return None if t is None else t.contiguous()


def _call(frozen: Frozen, x: Optional[Tensor], T: int, A: Optional[Tensor], B: Optional[Tensor],
          key: Optional[Tensor]) -> lib.Call:
    call = lib.Call(T=T, rows=frozen.rows, cols=frozen.cols, x=tensor_of(x),
                    A=None if A is None else A.data_ptr(), B=None if B is None else B.data_ptr(),
                    has_keys=True)
    if key is None:
        call.skip_dropout = True
    else:
        call.step = int(key)
    return call


@torch.library.custom_op("ballast::linear", mutates_args=())
def linear(x: Tensor, A: Optional[Tensor], B: Optional[Tensor], key: Optional[Tensor], layer: int,
           rows: int) -> Tensor:
    """y (..., rows) = x W^T + bias + s (D x A^T) B^T of layer number `layer`. x (..., cols) in
    float32 or bfloat16 (CUDA: bfloat16), A (r, cols) and B (rows, r) in float32; key (1) of
    dropout's mask, None: no dropout."""
    frozen = Frozen.of(layer)
    _check(frozen, x, "x", frozen.cols)
    dense, A, B = x.contiguous(), _factor(A, "A"), _factor(B, "B")
    y = x.new_empty((*x.shape[:-1], rows))
    call = _call(frozen, dense, _rows_of(x), A, B, key)
    call.y = tensor_of(y)
    if call.T > 0:
        frozen.stack.forward(frozen.index, call)
    return y


@linear.register_fake
def _(x: Tensor, A: Optional[Tensor], B: Optional[Tensor], key: Optional[Tensor], layer: int,
      rows: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], rows))


@torch.library.custom_op("ballast::linear_backward", mutates_args=())
def linear_backward(dy: Tensor, x: Tensor, A: Optional[Tensor], B: Optional[Tensor],
                    key: Optional[Tensor], layer: int, cols: int,
                    needs_dx: bool) -> Tuple[Tensor, Tensor, Tensor]:
    """dx, dA, dB; what was not asked for is empty."""
    frozen = Frozen.of(layer)
    _check(frozen, dy, "dy", frozen.rows)
    dy, A, B = dy.contiguous(), _factor(A, "A"), _factor(B, "B")
    x = x.contiguous()
    T = _rows_of(dy)
    dx = dy.new_empty((*dy.shape[:-1], cols) if needs_dx else (0,))
    dA = dy.new_empty(A.shape if A is not None else (0,), dtype=torch.float32)
    dB = dy.new_empty(B.shape if B is not None else (0,), dtype=torch.float32)
    if T == 0:
        return dx, dA.zero_(), dB.zero_()
    call = _call(frozen, x if A is not None else None, T, A, B, key)
    call.dy = tensor_of(dy)
    if needs_dx:
        call.dx = tensor_of(dx)
    if A is not None:
        call.dA, call.dB = dA.data_ptr(), dB.data_ptr()
    frozen.stack.backward(frozen.index, call)
    return dx, dA, dB


@linear_backward.register_fake
def _(dy: Tensor, x: Tensor, A: Optional[Tensor], B: Optional[Tensor], key: Optional[Tensor],
      layer: int, cols: int, needs_dx: bool) -> Tuple[Tensor, Tensor, Tensor]:
    return (dy.new_empty((*dy.shape[:-1], cols) if needs_dx else (0,)),
            dy.new_empty(A.shape if A is not None else (0,), dtype=torch.float32),
            dy.new_empty(B.shape if B is not None else (0,), dtype=torch.float32))


def _setup(ctx: Any, inputs: Tuple[Any, ...], output: Tensor) -> None:
    x, A, B, key, ctx.layer, _ = inputs
    ctx.cols = x.shape[-1]
    # A frozen layer without LoRA needs no x in its backward.
    ctx.save_for_backward(x if A is not None else x.new_empty((0,)), A, B, key)


def _backward(ctx: Any, dy: Tensor) -> Tuple[Optional[Tensor], ...]:
    x, A, B, key = ctx.saved_tensors
    needs = ctx.needs_input_grad
    dx, dA, dB = linear_backward(dy, x, A, B, key, ctx.layer, ctx.cols, needs[0])
    return (dx if needs[0] else None, dA if needs[1] else None, dB if needs[2] else None, None,
            None, None)


linear.register_autograd(_backward, setup_context=_setup)
