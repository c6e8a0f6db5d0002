# SPDX-License-Identifier: Apache-2.0
"""The layer's operators, torch.ops.ballast.linear and linear_backward, with fakes and autograd.

A layer is named by its number (Frozen.number), so that graphs hold no objects. The mask's key is a
tensor drawn from torch's CPU generator: torch.utils.checkpoint restores that generator, so that
recomputation draws the same key, and forward and backward share it.
"""
from typing import Any, Optional, Tuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._stack import Frozen, plain


_DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16,)}


def _check(frozen: Frozen, x: Tensor, name: str, width: int) -> None:
    where = frozen.stack.where
    if x.device != where:
        raise ValueError(f"{name} is on {x.device}, the layer's base is on {where}")
    if x.dim() < 1 or x.shape[-1] != width:
        raise ValueError(f"{name} has the shape {tuple(x.shape)}: its last dimension must be {width}")
    if x.dtype not in _DTYPES[where.type]:
        raise ValueError(f"{name} is {x.dtype}: the layer takes "
                         f"{' and '.join(str(t) for t in _DTYPES[where.type])}")


def _factors(frozen: Frozen, A: Optional[Tensor],
             B: Optional[Tensor]) -> Tuple[Optional[Tensor], Optional[Tensor]]:
    """A and B as the library reads them: their memory has the shapes of the layer."""
    r = 0 if frozen.lora is None else frozen.lora.r
    if r == 0:
        if A is not None or B is not None:
            raise ValueError("A or B is given to a layer without a LoRA term")
        return None, None
    for t, name, shape in ((A, "A", (r, frozen.cols)), (B, "B", (frozen.rows, r))):
        if t is None or t.shape != shape:
            raise ValueError(f"{name} has the shape {None if t is None else tuple(t.shape)}, the "
                             f"layer's is {shape}")
        if t.dtype != torch.float32:
            raise ValueError(f"{name} is {t.dtype}: LoRA weights are float32")
        if t.device != frozen.stack.where:
            raise ValueError(f"{name} is on {t.device}, the layer's base is on "
                             f"{frozen.stack.where}")
    return plain(A), plain(B)


def _forward(frozen: Frozen, x: Tensor, A: Optional[Tensor], B: Optional[Tensor],
             key: Optional[Tensor]) -> Tensor:
    _check(frozen, x, "x", frozen.cols)
    x, (A, B) = plain(x), _factors(frozen, A, B)
    y = x.new_empty((*x.shape[:-1], frozen.rows))
    if x.numel() > 0:
        frozen.forward(x, A, B, key, y)
    return y


def _pull_back(frozen: Frozen, dy: Tensor, x: Tensor, A: Optional[Tensor], B: Optional[Tensor],
               key: Optional[Tensor], needs_dx: bool) -> Tuple[Optional[Tensor], ...]:
    """dx, dA, dB; None: not asked for."""
    _check(frozen, dy, "dy", frozen.rows)
    dy, (A, B) = plain(dy), _factors(frozen, A, B)
    if A is not None:
        _check(frozen, x, "x", frozen.cols)
        if x.shape[:-1] != dy.shape[:-1]:
            raise ValueError(f"x has the shape {tuple(x.shape)}, dy {tuple(dy.shape)}")
    dx = dy.new_empty((*dy.shape[:-1], frozen.cols)) if needs_dx else None
    dA, dB = (None if t is None else torch.empty_like(t) for t in (A, B))
    if dy.numel() > 0:
        frozen.backward(dy, None if A is None else plain(x), A, B, key, dx, dA, dB)
    else:
        for gradient in (dA, dB):
            if gradient is not None:
                gradient.zero_()
    return dx, dA, dB


@torch.library.custom_op("ballast::linear", mutates_args=())
def linear(x: Tensor, A: Optional[Tensor], B: Optional[Tensor], key: Optional[Tensor], layer: int,
           rows: int) -> Tensor:
    """y (..., rows) = x W^T + bias + s (D x A^T) B^T of layer number `layer`. x (..., cols) in
    float32 or bfloat16 (CUDA: bfloat16), A (r, cols) and B (rows, r) in float32; key (1) of
    dropout's mask, None: no dropout."""
    return _forward(Frozen.of(layer), x, A, B, key)


@linear.register_fake
def _(x: Tensor, A: Optional[Tensor], B: Optional[Tensor], key: Optional[Tensor], layer: int,
      rows: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], rows))


@torch.library.custom_op("ballast::linear_backward", mutates_args=())
def linear_backward(dy: Tensor, x: Tensor, A: Optional[Tensor], B: Optional[Tensor],
                    key: Optional[Tensor], layer: int, cols: int,
                    needs_dx: bool) -> Tuple[Tensor, Tensor, Tensor]:
    """dx, dA, dB; what was not asked for is empty."""
    found = _pull_back(Frozen.of(layer), dy, x, A, B, key, needs_dx)
    return tuple(dy.new_empty((0,), dtype=dtype) if t is None else t
                 for t, dtype in zip(found, (dy.dtype, torch.float32, torch.float32)))


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


def _reject_tangents(*tensors: Optional[Tensor]) -> None:
    """The layer has no forward-mode derivative: without this y would have the tangent zero."""
    for t in tensors:
        if t is not None and forward_ad.unpack_dual(t).tangent is not None:
            raise RuntimeError("LoraLinear has no forward-mode derivative (torch.func.jvp, jacfwd, "
                               "linearize, hessian; torch.autograd.forward_ad): use backward() or "
                               "torch.autograd.grad")


def _reject_forward_mode(operator: torch._ops.OpOverload) -> None:
    """A call of the operator itself: below autograd, which drops tangents without a word, and above
    the transforms of torch.func, which take them off. To see a tangent, autograd is on again."""
    c = torch._C

    def check(keyset: Any, *args: Any) -> Any:
        if forward_ad._current_level >= 0:
            hidden = c._dispatch_tls_local_exclude_set() - c.DispatchKeySet(c.DispatchKey.AutogradCPU)
            with c._ForceDispatchKeyGuard(c._dispatch_tls_local_include_set(), hidden):
                _reject_tangents(*(t for t in args if isinstance(t, Tensor)))
        return operator.redispatch(keyset & c._after_ADInplaceOrView_keyset, *args)

    _library.impl(operator._schema.name.partition("::")[2], check, "ADInplaceOrView", with_keyset=True)


_library = torch.library.Library("ballast", "FRAGMENT")
for _operator in (torch.ops.ballast.linear.default, torch.ops.ballast.linear_backward.default):
    _reject_forward_mode(_operator)


class _Eager(torch.autograd.Function):
    """The same without the dispatcher, which takes longer than a call of a small layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, A: Optional[Tensor], B: Optional[Tensor],
                key: Optional[Tensor], frozen: Frozen) -> Tensor:
        ctx.frozen = frozen
        ctx.save_for_backward(None if A is None else x, A, B, key)
        return _forward(frozen, x, A, B, key)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tuple[Optional[Tensor], ...]:
        (x, A, B, key), frozen, needs = ctx.saved_tensors, ctx.frozen, ctx.needs_input_grad
        if _is_eager(dy) and not torch.is_grad_enabled():
            dx, dA, dB = _pull_back(frozen, dy, x, A, B, key, needs[0])
        else:  # the operator rejects a second derivative
            dx, dA, dB = linear_backward(dy, dy if x is None else x, A, B, key, frozen.number,
                                         frozen.cols, needs[0])
        return (dx if needs[0] else None, dA if needs[1] else None, dB if needs[2] else None, None,
                None)


_EAGER = (Tensor, torch.nn.Parameter)
_n_modes = torch._C._len_torch_dispatch_stack
_is_transformed = torch._C._are_functorch_transforms_active


def _is_eager(x: Tensor) -> bool:
    """Whether nothing looks at calls of x: a compiler, a tracer, a dispatch mode, a transform of
    torch.func or a subclass of Tensor, for which there is the operator."""
    return (not torch.compiler.is_compiling() and type(x) in _EAGER and _n_modes() == 0
            and not _is_transformed() and not torch.jit.is_tracing())


def call(frozen: Frozen, x: Tensor, A: Optional[Tensor], B: Optional[Tensor],
         key: Optional[Tensor]) -> Tensor:
    """y of the layer `frozen`: the operator, or in eager mode what is under it. RuntimeError:
    forward-mode differentiation."""
    if forward_ad._current_level >= 0:
        _reject_tangents(x, A, B)
    if not _is_eager(x) or (A is not None and type(A) not in _EAGER):
        return linear(x, A, B, key, frozen.number, frozen.rows)
    if torch.is_grad_enabled() and (x.requires_grad or (
            A is not None and (A.requires_grad or B.requires_grad))):
        return _Eager.apply(x, A, B, key, frozen)
    return _forward(frozen, x, A, B, key)
