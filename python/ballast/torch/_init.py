# SPDX-License-Identifier: Apache-2.0
"""init: from_pretrained that reads the frozen matrices row by row into the base.

Inside the context, transformers' from_pretrained builds the model with its parameters on the meta
device. The library reads the rows of each nn.Linear from the safetensors files, each rank its own,
and quantizes them a few at a time; all other parameters (embeddings, norms) are loaded as usual.
"""
import contextlib
import os
from ctypes import byref, c_void_p
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence

import torch
from torch import nn

from .. import _library as lib
from ._config import Base, LoRA, lora_of
from ._convert import assemble, replaceable
from ._stack import Source

_STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class _Files:
    """The tensors of a directory of safetensors files."""

    def __init__(self, directory: Path) -> None:
        from safetensors import safe_open
        self._directory, self._files, self._native = directory, {}, {}
        paths = sorted(directory.glob("*.safetensors"))
        if not paths:
            raise ValueError(f"{directory}: has no safetensors files")
        self._where: Dict[str, Path] = {}
        for path in paths:
            self._files[path] = safe_open(str(path), framework="pt")
            for name in self._files[path].keys():
                self._where[name] = path

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self:
            raise ValueError(f"{self._directory}: lacks {name}")
        return self._files[self._where[name]].get_tensor(name)

    def source(self, name: str, linear: nn.Linear) -> Source:
        """The rows of the matrix `name`.weight, which the library reads itself."""
        weight, shape = f"{name}.weight", [linear.out_features, linear.in_features]
        if weight not in self:
            raise ValueError(f"{self._directory}: lacks {weight}; load the model and use bt.convert")
        path = self._where[weight]
        found = self._files[path].get_slice(weight)
        if list(found.get_shape()) != shape or found.get_dtype() not in _STORED:
            raise ValueError(f"{path}: {weight} is {found.get_dtype()} {list(found.get_shape())}, "
                             f"the model's is {shape} in F32, F16 or BF16")
        if path not in self._native:
            handle = c_void_p()
            lib.check(lib.load().bl_safetensors_open(os.fsencode(path), byref(handle)))
            self._native[path] = handle
        tensor = lib.load().bl_safetensors_find(self._native[path], weight.encode())
        bias = self.tensor(f"{name}.bias") if linear.bias is not None else None
        return Source(shape[0], shape[1], _STORED[found.get_dtype()], native=tensor, bias=bias)

    def close(self) -> None:
        for handle in self._native.values():
            lib.load().bl_safetensors_close(handle)
        self._native.clear()
        self._files.clear()


@contextlib.contextmanager
def _on_meta() -> Iterator[None]:
    """Parameters that modules register are on the meta device; buffers stay."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: Optional[nn.Parameter]) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            module._parameters[name] = nn.Parameter(parameter.detach().to("meta"),
                                                    requires_grad=parameter.requires_grad)
    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _fill(model: nn.Module, files: _Files, dtype: torch.dtype) -> None:
    """Loads parameters that are still on the meta device; shared ones once."""
    places: Dict[int, List[Any]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                full = f"{prefix}.{name}" if prefix else name
                places.setdefault(id(parameter), []).append((full, module, name, parameter))
    for shared in places.values():
        full = next((full for full, *_ in shared if full in files), shared[0][0])
        value, old = files.tensor(full).to(dtype), shared[0][3]
        if value.shape != old.shape:
            raise ValueError(f"{full} has the shape {tuple(value.shape)}, the model's is "
                             f"{tuple(old.shape)}")
        loaded = nn.Parameter(value, requires_grad=False)
        for _, module, name, _ in shared:
            module._parameters[name] = loaded


def _dtype(config: Any, asked: Any) -> torch.dtype:
    import transformers
    if isinstance(asked, torch.dtype):
        return asked
    if isinstance(asked, str) and asked != "auto":
        return getattr(torch, asked)
    if asked is None and int(transformers.__version__.split(".")[0]) < 5:
        return torch.float32
    stored = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    return stored if isinstance(stored, torch.dtype) else torch.float32


def _load(cls: Any, path: Any, base: Base, lora: Optional[LoRA], exclude: Sequence[str],
          keys: Dict[str, Any]) -> nn.Module:
    from transformers import GenerationConfig
    directory = Path(path)
    if not directory.is_dir():
        raise ValueError(f"{path}: is not a directory: bt.init reads a local Hugging Face directory")
    config = keys.pop("config", None) or cls.config_class.from_pretrained(directory)
    asked = keys.pop("dtype", None)
    dtype = _dtype(config, asked if asked is not None else keys.pop("torch_dtype", None))
    attention = keys.pop("attn_implementation", None)
    ignored = {"torch_dtype", "low_cpu_mem_usage", "use_safetensors", "_from_auto", "adapter_kwargs",
               "trust_remote_code", "_commit_hash", "local_files_only"}
    unknown = [name for name, value in keys.items() if name not in ignored and value is not None]
    if unknown:
        raise ValueError(f"from_pretrained({unknown[0]}=...) is not supported inside bt.init: load "
                         "the model and use bt.convert")
    if attention is not None:
        config._attn_implementation = attention
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with _on_meta():
            model = cls(config)
    finally:
        torch.set_default_dtype(before)
    model.tie_weights()
    files = _Files(directory)
    try:
        named = replaceable(model, exclude)
        sources = [files.source(name, linear) for name, linear in named]
        assemble(model, named, sources, base, lora, torch.device("cpu"))
        _fill(model, files, dtype)
    finally:
        files.close()
    config.name_or_path = str(directory)
    if model.can_generate() and (directory / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    return model.eval()


@contextlib.contextmanager
def init(base: Optional[Base] = None, lora: Any = None,
         exclude: Sequence[str] = ()) -> Iterator[None]:
    """Inside it, from_pretrained(directory) of transformers gives a model whose nn.Linear are
    LoraLinear over `base`, as bt.convert makes them, without a whole matrix in memory.

    The directory has safetensors files (F32, F16, BF16) whose tensors have the names of the model's
    parameters. Arguments of from_pretrained that are read: config, dtype, attn_implementation.
    Collective over base.shard_group. ValueError: other arguments, missing tensors, as bt.convert.
    """
    from transformers import PreTrainedModel
    lora, original = lora_of(lora), PreTrainedModel.__dict__["from_pretrained"]

    def from_pretrained(cls: Any, path: Any, *_: Any, **keys: Any) -> nn.Module:
        return _load(cls, path, base or Base(), lora, exclude, keys)

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)
    try:
        yield
    finally:
        PreTrainedModel.from_pretrained = original
