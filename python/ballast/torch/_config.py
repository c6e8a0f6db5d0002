# SPDX-License-Identifier: Apache-2.0
"""How the base is stored and which LoRA terms train: Base and LoRA."""
import math
import re
from dataclasses import dataclass
from typing import Any, Optional, Sequence, Union

from .._library import FORMATS, TIERS


@dataclass(frozen=True)
class Base:
    """How frozen weights are stored.

    format: "fp8_row", "fp8_block" (a scale per row, or per block of 128 x 128), "f32", "f16",
        "bf16", or "stored": the weights' own dtype.
    offload_ratio, tier, dir: part of each rank's bytes, in whole layers, that is stored in host
        memory or page files ("host", "disk"); `dir` is the directory of page files and must exist.
    shard_group: None: every process stores all rows. "world", or a torch.distributed group: each
        of its processes stores 1/n of the rows of every matrix, and calls gather them.
    ring_depth: layers gathered at a time, the current one included; 0: 2.
    threads: CPU threads of products, the base's own; 0: those of torch's OpenMP runtime, as many
        as torch.get_num_threads().
    pin: pin the host tier's memory.
    deadline_s: how long a rank waits for another inside one gather; 0: without limit.
    """
    format: str = "fp8_row"
    offload_ratio: float = 0.0
    tier: str = "host"
    dir: Optional[str] = None
    shard_group: Any = None
    ring_depth: int = 0
    threads: int = 0
    pin: bool = False
    deadline_s: float = 600.0

    def __post_init__(self) -> None:
        if self.format not in FORMATS + ("stored",):
            raise ValueError(f"Base.format is {self.format!r}: stored, {', '.join(FORMATS)}")
        if self.tier not in TIERS:
            raise ValueError(f"Base.tier is {self.tier!r}: {', '.join(TIERS)}")
        if not 0 <= self.offload_ratio <= 1:
            raise ValueError(f"Base.offload_ratio is {self.offload_ratio}: not in [0, 1]")
        if self.tier == "disk" and self.offload_ratio > 0 and not self.dir:
            raise ValueError("Base.tier is disk: dir, the directory of page files, is missing")


@dataclass(frozen=True)
class LoRA:
    """The trained term s (D x A^T) B^T with s = alpha / r, or alpha / sqrt(r) with use_rslora.

    target_modules: "all-linear" (all but the output embedding), names of modules (their last part,
    or dotted ends), or a regular expression of whole names.
    """
    r: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    use_rslora: bool = False
    target_modules: Union[str, Sequence[str]] = "all-linear"

    def __post_init__(self) -> None:
        if self.r < 1:
            raise ValueError(f"LoRA.r is {self.r}: at least 1")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"LoRA.dropout is {self.dropout}: not in [0, 1)")

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    def matches(self, name: str) -> bool:
        """Whether the module `name` gets a LoRA term."""
        if self.target_modules == "all-linear":
            return True
        if isinstance(self.target_modules, str):
            return re.fullmatch(self.target_modules, name) is not None
        return any(name == target or name.endswith("." + target)
                   for target in self.target_modules)


# What of PEFT's LoraConfig would change results and is not computed here, with its neutral values.
_REFUSED = {"use_dora": (False,), "bias": ("none",), "modules_to_save": (None, []),
            "rank_pattern": ({}, None), "alpha_pattern": ({}, None),
            "layers_to_transform": (None,), "layers_pattern": (None,), "exclude_modules": (None,),
            "layer_replication": (None,), "target_parameters": (None,), "lora_bias": (False,),
            "trainable_token_indices": (None,), "use_qalora": (False,),
            "init_lora_weights": (True,), "fan_in_fan_out": (False,)}


def lora_of(config: Any) -> Optional[LoRA]:
    """A LoRA from a LoRA, a peft.LoraConfig or None. ValueError: a setting that is not supported."""
    if config is None or isinstance(config, LoRA):
        return config
    if not hasattr(config, "lora_alpha"):
        raise ValueError(f"lora is a {type(config).__name__}: pass bt.LoRA or peft.LoraConfig")
    for key, neutral in _REFUSED.items():
        value = getattr(config, key, neutral[0])
        if value not in neutral:
            raise ValueError(f"LoraConfig.{key}={value!r} is not supported: leave it out")
    targets = config.target_modules
    if targets is None:
        raise ValueError("LoraConfig.target_modules is missing: name them, or 'all-linear'")
    return LoRA(r=config.r, alpha=float(config.lora_alpha), dropout=float(config.lora_dropout),
                use_rslora=bool(config.use_rslora),
                target_modules=targets if isinstance(targets, str) else tuple(sorted(targets)))
