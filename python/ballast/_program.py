# SPDX-License-Identifier: Apache-2.0
"""quantize, inspect and plan: the `ballast` program's commands as functions. They need no torch."""
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Dict, Union

PathLike = Union[str, "os.PathLike[str]"]


def program() -> Path:
    """The `ballast` program: BALLAST_PROGRAM, the package's own, that of a build in the source tree,
    or the one on PATH. RuntimeError when there is none."""
    named = os.environ.get("BALLAST_PROGRAM")
    if named:
        return Path(named)
    here = Path(__file__).resolve().parent
    for candidate in (here / "bin" / "ballast",
                      here.parent.parent / "build" / "release" / "ballast"):
        if candidate.is_file():
            return candidate
    found = shutil.which("ballast")
    if not found:
        raise RuntimeError("the ballast program was not found: set BALLAST_PROGRAM to it")
    return Path(found)


def _run(*arguments: str) -> str:
    done = subprocess.run([str(program()), *arguments], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, universal_newlines=True)
    if done.returncode == 0:
        return done.stdout
    lines = (done.stderr or done.stdout).strip().splitlines()
    text = lines[-1] if lines else f"ballast {arguments[0]} ended with {done.returncode}"
    raise (ValueError if done.returncode in (2, 3, 5) else RuntimeError)(text)


def _options(keys: Dict[str, Any]) -> list:
    return [f"--{key}={str(value).lower() if isinstance(value, bool) else value}"
            for key, value in keys.items()]


def quantize(source: PathLike, destination: PathLike, base_format: str = "fp8_row",
             **keys: Any) -> None:
    """Writes the Hugging Face directory `source` with FP8 projections to `destination`
    (compressed-tensors). keys: options of `ballast quantize`. ValueError: a wrong option or model;
    RuntimeError: memory, disk."""
    _run("quantize", str(source), str(destination), f"--base_format={base_format}",
         *_options(keys))


def inspect(path: PathLike) -> Dict[str, Any]:
    """What `ballast inspect --json` prints of a safetensors file, a model, an adapter or a
    checkpoint. ValueError: it cannot be used, with the reason."""
    return json.loads(_run("inspect", str(path), "--json"))


def plan(model: PathLike, hardware: str = "", **keys: Any) -> Dict[str, Any]:
    """What `ballast plan --json` predicts for a model (a directory, or a name such as
    "llama-3.1-70b") on a machine ("8xh100"; "": this one). keys: options of a run. RuntimeError:
    nothing fits."""
    machine = {"hardware": hardware} if hardware else {}
    return json.loads(_run("plan", *_options({"model": model, **machine, "json": True, **keys})))
