# SPDX-License-Identifier: Apache-2.0
"""Adapters as PEFT writes and reads them: adapter_config.json and adapter_model.safetensors."""
import json
import os
from pathlib import Path
from typing import Any, Dict, Union

import torch
from torch import nn

from ._convert import layers

PathLike = Union[str, "os.PathLike[str]"]
_PREFIX = "base_model.model."


def _terms(model: nn.Module) -> Dict[str, Any]:
    return {name: layer for name, layer in layers(model) if layer.lora_A is not None}


def save_adapter(model: nn.Module, directory: PathLike) -> None:
    """Writes the LoRA weights as a PEFT adapter; peft.PeftModel.from_pretrained and `ballast` read
    it. In a job, call it on one rank. ValueError: the model has no LoRA layers."""
    from safetensors.torch import save_file
    terms = _terms(model)
    if not terms:
        raise ValueError("the model has no LoRA layers")
    loras = {layer.frozen.lora for layer in terms.values()}
    if len(loras) > 1:
        raise ValueError("the model's LoRA layers differ in r, alpha, dropout or use_rslora")
    lora = loras.pop()
    out = Path(directory)
    out.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, layer in terms.items():
        for part in ("lora_A", "lora_B"):
            weight = getattr(layer, part).weight.detach().to("cpu").contiguous()
            tensors[f"{_PREFIX}{name}.{part}.weight"] = weight
    save_file(tensors, str(out / "adapter_model.safetensors"), metadata={"format": "pt"})
    source = getattr(getattr(model, "config", None), "_name_or_path", None)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": lora.r, "lora_alpha": lora.alpha,
              "lora_dropout": lora.dropout, "use_rslora": lora.use_rslora, "bias": "none",
              "target_modules": _targets(model, terms), "base_model_name_or_path": source,
              "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True}
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _targets(model: nn.Module, terms: Dict[str, Any]) -> list:
    """Last parts of names where they name exactly the layers with LoRA, else whole names."""
    short = sorted({name.rpartition(".")[2] for name in terms})
    named = [name for name, module in model.named_modules()
             if name.rpartition(".")[2] in short and not list(module.children())
             or name in terms]
    return short if set(named) == set(terms) else sorted(terms)


def load_adapter(model: nn.Module, directory: PathLike) -> None:
    """Reads LoRA weights from a PEFT adapter (save_adapter's, or PEFT's) into the model's layers.
    ValueError: other layers, shapes or settings than the model's, by name."""
    from safetensors.torch import load_file
    path = Path(directory)
    config = json.loads((path / "adapter_config.json").read_text())
    tensors, terms = load_file(str(path / "adapter_model.safetensors")), _terms(model)
    for name, layer in terms.items():
        lora = layer.frozen.lora
        found = (config.get("r"), float(config.get("lora_alpha", 0)),
                 bool(config.get("use_rslora", False)))
        if found != (lora.r, float(lora.alpha), lora.use_rslora):
            raise ValueError(f"{path}: r, lora_alpha, use_rslora are {found}, {name} has "
                             f"{(lora.r, float(lora.alpha), lora.use_rslora)}")
        for part in ("lora_A", "lora_B"):
            key, weight = f"{_PREFIX}{name}.{part}.weight", getattr(layer, part).weight
            value = tensors.pop(key, None)
            if value is None:
                raise ValueError(f"{path}: lacks {key}")
            if value.shape != weight.shape:
                raise ValueError(f"{path}: {key} has the shape {tuple(value.shape)}, the model's "
                                 f"is {tuple(weight.shape)}")
            with torch.no_grad():
                weight.copy_(value)
    if tensors:
        raise ValueError(f"{path}: {next(iter(tensors))} is not a LoRA weight of the model")
