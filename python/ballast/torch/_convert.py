# SPDX-License-Identifier: Apache-2.0
"""convert: the nn.Linear of a model become LoraLinear, in place; stats of all of them."""
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import nn

from ._config import Base, LoRA, lora_of
from ._linear import LoraLinear, linear_source
from ._stack import Frozen, Source, Stack


def layers(model: nn.Module) -> Iterator[Tuple[str, LoraLinear]]:
    """(name, layer) of each LoraLinear of the model."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield name, module


def output_embedding(model: nn.Module) -> Optional[nn.Module]:
    """The output embedding (lm_head), which stays as it is."""
    get = getattr(model, "get_output_embeddings", None)
    return get() if callable(get) else None


def replaceable(model: nn.Module, exclude: Sequence[str]) -> List[Tuple[str, nn.Linear]]:
    """(name, linear) of the nn.Linear that become LoraLinear, each once, in the model's order."""
    head = output_embedding(model)
    found = []
    for name, module in model.named_modules():
        if type(module) is not nn.Linear or module is head:
            continue
        if any(name == e or name.endswith("." + e) for e in exclude):
            continue
        found.append((name, module))
    return found


def place(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def assemble(model: nn.Module, named: Sequence[Tuple[str, nn.Linear]], sources: Sequence[Source],
             base: Base, lora: Optional[LoRA], where: torch.device) -> None:
    """Stores the sources as one stack and puts its layers into the places `named`."""
    if not named:
        raise ValueError("the model has no nn.Linear to convert")
    loras = [lora if lora is not None and lora.matches(name) else None for name, _ in named]
    if lora is not None and not any(loras):
        raise ValueError(f"target_modules {lora.target_modules!r} name no nn.Linear of the model")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    stack = Stack(base, sources, loras, where)
    for i, (name, _) in enumerate(named):
        module = LoraLinear.over(Frozen(stack, i, sources[i], loras[i]))
        place(model, name, module)
    from ._adapter import replace_save_pretrained  # which needs `layers`
    replace_save_pretrained(model)
    keep_gradients(model)


def keep_gradients(model: nn.Module) -> None:
    """With reentrant checkpointing inputs need gradients, as PEFT arranges it."""
    enable = getattr(model, "enable_input_require_grads", None)
    name = "is_activation_checkpointing"  # transformers before 5: is_gradient_checkpointing
    if not hasattr(type(model), name):
        name = "is_gradient_checkpointing"
    if callable(enable) and getattr(model, name, False):
        enable()


def convert(model: nn.Module, base: Optional[Base] = None, lora: Any = None,
            exclude: Sequence[str] = ()) -> nn.Module:
    """Replaces the nn.Linear of `model` in place by LoraLinear over one base, and freezes all other
    parameters. Each nn.Linear's weight is freed once its rows are stored.

    Every nn.Linear but the output embedding and those that `exclude` names is stored in `base`;
    those that lora.target_modules names get a LoRA term. lora: bt.LoRA, peft.LoraConfig, or None.
    Collective over base.shard_group. Returns the model.

    ValueError: nothing to convert, an unsupported setting, a weight that is not finite, a page
    directory; MemoryError; RuntimeError: files, a failed rank. A model whose conversion failed has
    lost weights: load it again.
    """
    lora = lora_of(lora)
    named = replaceable(model, exclude)
    if not named:
        raise ValueError("the model has no nn.Linear to convert")
    for name, linear in named:
        if linear.weight.device.type == "meta":
            raise ValueError(f"{name}: its weight is on the meta device: use bt.init")
    where = named[0][1].weight.device
    assemble(model, named, [linear_source(linear) for _, linear in named], base or Base(), lora,
             where)
    return model


def stats(model: nn.Module) -> Dict[str, Any]:
    """This process's account, summed over the model's bases: bytes by tier (frozen: device memory;
    host, disk), n_forward and n_backward calls, n_gathers of layers and gathered_bytes, n_on_demand
    (not prefetched before their call), n_strays (calls out of the learned order), n_timed and
    wait_s (time that calls waited for their weights)."""
    stacks = {id(m.frozen.stack): m.frozen.stack for _, m in layers(model)}
    total: Dict[str, Any] = {}
    for stack in stacks.values():
        for name, value in stack.stats().items():
            total[name] = total.get(name, 0) + value
    return total
