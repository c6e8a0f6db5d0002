# SPDX-License-Identifier: Apache-2.0
"""names.py OUT -- writes tests/present/names.json: keys with a value that is not the default, as the classes of transformers, PEFT and TRL
declare them, and the versions of these. Needs all three."""
import dataclasses
import enum
import importlib
import inspect
import json
import pkgutil
import sys

import peft
import transformers
import trl
from transformers import TrainingArguments, PreTrainedConfig

def value_for(default):
    if isinstance(default, bool): return not default
    if isinstance(default, int): return default + 3
    if isinstance(default, float): return default * 2 + 0.25
    if isinstance(default, str): return default + "x" if default else "text"
    if isinstance(default, (list, tuple)): return ["a"]
    if isinstance(default, dict): return {"a": 1}
    return 7

def jsonable(v):
    try: json.dumps(v, allow_nan=False); return True
    except (TypeError, ValueError): return False

out = {}
def add(kind, name, default):
    if name.startswith("_") or not isinstance(name, str): return
    v = value_for(default)
    if jsonable(v): out.setdefault(kind, {}).setdefault(name, v)

def fields(cls, kind):
    for f in dataclasses.fields(cls):
        d = f.default if f.default is not dataclasses.MISSING else (f.default_factory() if f.default_factory is not dataclasses.MISSING else None)
        if isinstance(d, enum.Enum): d = d.value
        add(kind, f.name, d)

for _, c in sorted(vars(peft).items()):
    if inspect.isclass(c) and issubclass(c, peft.PeftConfig): fields(c, "adapter_config.json")
for name in [n for n in dir(trl) if n.endswith("Config")]:
    c = getattr(trl, name)
    if dataclasses.is_dataclass(c): fields(c, "trl")
fields(TrainingArguments, "trl")
import transformers.models as models
n = 0
for m in pkgutil.iter_modules(models.__path__):
    try: mod = importlib.import_module(f"transformers.models.{m.name}.configuration_{m.name}")
    except Exception: continue
    for _, c in sorted(vars(mod).items()):
        if inspect.isclass(c) and issubclass(c, PreTrainedConfig) and c.__module__ == mod.__name__:
            n += 1
            if dataclasses.is_dataclass(c): fields(c, "config.json")
            for k, p in inspect.signature(c.__init__).parameters.items():
                if k not in ("self", "kwargs", "args"): add("config.json", k, None if p.default is p.empty else p.default)
for k, v in transformers.GenerationConfig().to_dict().items(): add("generation_config.json", k, v)
print(n, {k: len(v) for k, v in out.items()}, file=sys.stderr)
json.dump({"versions": {"transformers": transformers.__version__, "peft": peft.__version__, "trl": trl.__version__}, **{k: dict(sorted(v.items())) for k, v in out.items()}}, open(sys.argv[1], "w"), indent=0)
