# SPDX-License-Identifier: Apache-2.0
"""LoraLinear: the module in the place of nn.Linear."""
import math
from typing import Any, Callable, Optional

import torch
from torch import Tensor, nn

from . import _ops
from ._config import Base, LoRA, lora_of
from ._stack import Frozen, Source, Stack


class Factor(nn.Module):
    """A or B: a matrix by the name that PEFT's files give it, `weight`, in float32."""

    def __init__(self, rows: int, cols: int, device: Optional[torch.device] = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, cols, dtype=torch.float32, device=device))

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]} x {self.weight.shape[1]}"


def linear_source(linear: nn.Linear) -> Source:
    """The rows of an nn.Linear, which loses its weight once they are stored."""
    weight = linear.weight.detach()

    def release() -> None:
        linear._parameters["weight"] = None
        held.clear()
    held = [weight]
    source = Source(weight.shape[0], weight.shape[1], weight.dtype,
                    read=lambda begin, end: held[0][begin:end], bias=linear.bias, release=release)
    return source


class LoraLinear(nn.Module):
    """y (..., out_features) = x W^T + bias + s (D x A^T) B^T over a frozen base of the library.

    x (..., in_features): float32 or bfloat16 on the CPU, bfloat16 on CUDA; y has its dtype. The
    parameters are lora_A.weight (r, in_features) and lora_B.weight (out_features, r), float32.
    Without `lora` the layer has none. W and the bias are in the base: not parameters, not in
    state_dict. Copies (copy.deepcopy) share them.

    LoraLinear(in_features, out_features, ...) draws W as nn.Linear does; from_linear takes it from
    one; bt.convert replaces the nn.Linear of a model, which then share one ring.
    ValueError: a wrong shape, dtype or device. RuntimeError: a base that was freed, or a failed
    rank. TypeError: a change of dtype or device (.half(), .to()).
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True,
                 base: Optional[Base] = None, lora: Any = None,
                 device: Any = None, dtype: Optional[torch.dtype] = None) -> None:
        linear = nn.Linear(in_features, out_features, bias=bias, dtype=dtype)
        where = torch.device(device if device is not None else "cpu")
        source, lora = linear_source(linear), lora_of(lora)
        stack = Stack(base or Base(), [source], [lora], where)
        self._take(Frozen(stack, 0, source, lora))

    def _take(self, frozen: Frozen) -> None:
        super().__init__()
        self.frozen = frozen
        self.in_features, self.out_features = frozen.cols, frozen.rows
        self.lora_A: Optional[Factor] = None
        self.lora_B: Optional[Factor] = None
        if frozen.lora is not None:
            where = frozen.stack.where
            self.lora_A = Factor(frozen.lora.r, frozen.cols, where)
            self.lora_B = Factor(frozen.rows, frozen.lora.r, where)
            nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))

    @classmethod
    def over(cls, frozen: Frozen) -> "LoraLinear":
        """The module of a stack's layer."""
        module = cls.__new__(cls)
        module._take(frozen)
        return module

    @classmethod
    def from_linear(cls, linear: nn.Linear, base: Optional[Base] = None,
                    lora: Any = None) -> "LoraLinear":
        """The layer over the weights of `linear`, which is left without its weight. A stack of one
        layer stays gathered: to offload or shard several, bt.convert gives them one ring."""
        source, lora = linear_source(linear), lora_of(lora)
        stack = Stack(base or Base(), [source], [lora], linear.weight.device)
        return cls.over(Frozen(stack, 0, source, lora))

    def forward(self, x: Tensor) -> Tensor:
        frozen, A, B, key = self.frozen, None, None, None
        kind = frozen.stack.where.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        if self.lora_A is not None:
            A, B = self.lora_A.weight, self.lora_B.weight
            if self.training and frozen.lora.dropout > 0:
                key = torch.randint(1 << 62, (1,), dtype=torch.int64)
        return _ops.call(frozen, x, A, B, key)

    def dequantize(self) -> Tensor:
        """W (out_features, in_features) in float32, as the base computes with it, without LoRA.
        Collective in a shard group."""
        frozen = self.frozen
        where = frozen.stack.where
        dtype = torch.float32 if where.type == "cpu" else torch.bfloat16
        out = torch.empty(frozen.rows, frozen.cols, device=where)
        zeros = [None if factor is None else torch.zeros_like(factor.weight)
                 for factor in (self.lora_A, self.lora_B)]
        for begin in range(0, frozen.cols, 512):  # products with columns of the identity are exact
            n = min(512, frozen.cols - begin)
            x = torch.zeros(n, frozen.cols, dtype=dtype, device=where)
            x[torch.arange(n), torch.arange(begin, begin + n)] = 1
            y = torch.empty(n, frozen.rows, dtype=dtype, device=where)
            frozen.forward(x, *zeros, None, y, skip_bias=True)
            out[:, begin:begin + n] = y.t()
        return out

    @property
    def weight(self) -> Tensor:
        """W's shape and dtype, on the meta device: its values are in the base (dequantize)."""
        return torch.empty(self.out_features, self.in_features, dtype=self.frozen.dtype,
                           device="meta")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LoraLinear":
        where = self.frozen.stack.where
        probe = fn(torch.zeros(1, dtype=torch.float32, device=where))
        if probe.dtype != torch.float32:
            raise TypeError(f"LoraLinear cannot become {probe.dtype}: its base is quantized and its "
                            "LoRA weights are float32; cast x, or use torch.autocast")
        if probe.device != where:
            raise TypeError(f"LoraLinear cannot move to {probe.device}: its base is on {where}; "
                            "convert the model there")
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        base, lora = self.frozen.stack.base, self.frozen.lora
        text = f"in_features={self.in_features}, out_features={self.out_features}, {base.format}"
        return text + (f", r={lora.r}" if lora else "") + (", bias" if self.frozen.has_bias else "")
