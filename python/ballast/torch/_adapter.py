# SPDX-License-Identifier: Apache-2.0
"""Adapters as PEFT writes and reads them: adapter_config.json and adapter_model.safetensors; and what
transformers' save_pretrained writes of a converted model."""
import json
import os
import types
import warnings
from pathlib import Path
from typing import Any, Dict, List, Optional, Union

import torch
from torch import nn

from .. import _library as lib
from ._convert import layers

PathLike = Union[str, "os.PathLike[str]"]
_PREFIX = "base_model.model."


def _terms(model: nn.Module) -> Dict[str, Any]:
    return {name: layer for name, layer in layers(model) if layer.lora_A is not None}


def save_adapter(model: nn.Module, directory: PathLike) -> None:
    """Writes the LoRA weights as a PEFT adapter; peft.PeftModel.from_pretrained and `ballast` read
    it. In a job, call it on one rank. ValueError: the model has no LoRA layers, or other parameters
    that are trained."""
    from safetensors.torch import save_file
    terms = _terms(model)
    if not terms:
        raise ValueError("the model has no LoRA layers")
    others = _trained_others(model)
    if others:
        raise ValueError(f"{others[0]} is trained, and an adapter holds LoRA weights alone: freeze it "
                         "(requires_grad_(False)) or save model.state_dict()")
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


def _trained_others(model: nn.Module) -> List[str]:
    of_terms = {id(p) for layer in _terms(model).values() for p in layer.parameters()}
    return [name for name, p in model.named_parameters()
            if p.requires_grad and id(p) not in of_terms]


def _own_tensors(state: Dict[str, Any]) -> Dict[str, torch.Tensor]:
    """Each tensor once, as safetensors stores them: of tied parameters the first."""
    found: Dict[Any, torch.Tensor] = {}
    names: Dict[str, torch.Tensor] = {}
    for name, t in state.items():
        key = (t.device, t.data_ptr(), t.shape, t.stride(), t.dtype)
        if key in found and t.numel() > 0:
            continue
        found[key] = t
        t = t.detach().to("cpu").contiguous()
        names[name] = t if t.untyped_storage().nbytes() == t.numel() * t.element_size() else t.clone()
    return names


def _save_pretrained(model: nn.Module, save_directory: PathLike, is_main_process: bool = True,
                     state_dict: Optional[Dict[str, Any]] = None, push_to_hub: bool = False,
                     **_: Any) -> None:
    """save_pretrained of a converted model: the PEFT adapter, which from_pretrained loads over the
    model that adapter_config.json names, and model.safetensors: all parameters but the base, from
    which Trainer resumes. There is no config.json, without which that file does not pass for a model:
    it lacks the projections. ValueError: push_to_hub, or a directory that holds a model."""
    from safetensors.torch import save_file
    out = Path(save_directory)
    if push_to_hub:
        raise ValueError("push_to_hub: save_pretrained of a converted model writes an adapter: upload "
                         "its directory (huggingface_hub.upload_folder)")
    if not is_main_process:
        return
    if (out / "config.json").exists():
        raise ValueError(f"{out} holds a model (config.json): save the adapter of a converted model in "
                         "another directory")
    out.mkdir(parents=True, exist_ok=True)
    state = model.state_dict() if state_dict is None else state_dict
    save_file(_own_tensors(state), str(out / "model.safetensors"), metadata={"format": "pt"})
    others = _trained_others(model)
    if _terms(model) and not others:
        save_adapter(model, out)
    else:
        what = f"{others[0]} is trained, too" if others else "the model has no LoRA layers"
        warnings.warn(f"{out}: no adapter, {what}: model.safetensors has all parameters but the "
                      "frozen base (load it by load_state_dict into the converted model)")


def replace_save_pretrained(model: nn.Module) -> None:
    """A converted model, and each transformers model in it, writes its adapter by save_pretrained:
    transformers' own writes a model without the frozen base, which loads with random projections."""
    for module in model.modules():
        if callable(getattr(type(module), "save_pretrained", None)):
            module.save_pretrained = types.MethodType(_save_pretrained, module)


def _targets(model: nn.Module, terms: Dict[str, Any]) -> list:
    """Last parts of names where they name exactly the layers with LoRA, else whole names."""
    short = sorted({name.rpartition(".")[2] for name in terms})
    named = [name for name, module in model.named_modules()
             if name.rpartition(".")[2] in short and not list(module.children())
             or name in terms]
    return short if set(named) == set(terms) else sorted(terms)


def load_adapter(model: nn.Module, directory: PathLike) -> None:
    """Reads LoRA weights from a PEFT adapter (save_adapter's, or PEFT's) into the model's layers.
    ValueError: other layers, shapes or settings than the model's, or a kind of adapter that is not
    plain LoRA (aLoRA, DoRA, a rank per layer, ...), by name."""
    from safetensors.torch import load_file
    path = Path(directory)
    lib.check(lib.load().bl_peft_check_keys(os.fsencode(path)))
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
