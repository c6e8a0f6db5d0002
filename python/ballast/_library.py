# SPDX-License-Identifier: Apache-2.0
"""The shared libraries, through ctypes: their structs, their functions and their errors.

libballast is the file that the environment variable BALLAST_LIBRARY names, else the package's own
(a wheel), else that of a build in the source tree (build/release); libballast_session is beside it.
Structs mirror linear/layer.h, job/processes.h, device/tensor.h and train/session.h; tests/python
compares their sizes and offsets with C's.
"""
import ctypes
import os
from pathlib import Path
from typing import Any, Dict, Optional
from ctypes import (POINTER, Structure, c_bool, c_char_p, c_double, c_float, c_int, c_int32, c_int64,
                    c_size_t, c_uint, c_uint16, c_uint64, c_void_p)

ABI = "0.2"  # MAJOR.MINOR of the library: its SONAME

DTYPES = {"float16": 8, "bfloat16": 9, "float32": 12}  # bl_dtype
FORMATS = ("fp8_row", "fp8_block", "f32", "f16", "bf16")  # bl_format, in order
TIERS = ("device", "host", "disk")  # bl_tier, in order

PARALLEL = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_uint, c_uint)  # bl_parallel_fn
READ_ROWS = ctypes.CFUNCTYPE(c_int, c_void_p, c_int64, c_int64, c_void_p)


class Tensor(Structure):
    _fields_ = [("data", c_void_p), ("dtype", c_int)]


class Lora(Structure):
    _fields_ = [("r", c_int64), ("alpha", c_double), ("use_rslora", c_bool), ("dropout", c_double),
                ("is_external", c_bool)]


class Spec(Structure):
    _fields_ = [("rows", c_int64), ("cols", c_int64), ("format", c_int), ("dtype", c_int),
                ("weight", c_void_p), ("read_rows", READ_ROWS), ("user", c_void_p), ("mode", c_int),
                ("lora", Lora), ("bias", c_void_p)]


class Options(Structure):
    _fields_ = [("device", c_void_p), ("comm", c_void_p), ("tier", c_int), ("ratio", c_double),
                ("dir", c_char_p), ("key", c_uint64), ("pin", c_bool), ("ring_depth", c_int),
                ("max_tokens", c_int64), ("seed", c_uint64), ("forward_only", c_bool)]


class Call(Structure):
    _fields_ = [("size_bytes", c_size_t), ("T", c_int64), ("rows", c_int64), ("cols", c_int64),
                ("x", Tensor), ("y", Tensor), ("dy", Tensor), ("dx", Tensor),
                ("A", c_void_p), ("B", c_void_p), ("dA", c_void_p), ("dB", c_void_p),
                ("accumulate", c_bool), ("skip_dropout", c_bool), ("skip_bias", c_bool),
                ("has_keys", c_bool),
                ("step", c_uint64), ("sample", c_void_p), ("position", c_void_p)]


class Memory(Structure):
    _fields_ = [(name, c_size_t)
                for name in ("frozen", "ring", "scales", "lora", "work", "host", "reader", "disk")]


class Stats(Structure):
    _fields_ = [("size_bytes", c_size_t), ("memory", Memory), ("n_forward", c_int64),
                ("n_backward", c_int64), ("n_gathers", c_int64), ("gathered_bytes", c_size_t),
                ("n_on_demand", c_int64), ("n_strays", c_int64), ("n_timed", c_int64),
                ("wait_s", c_double)]


class Processes(Structure):
    _fields_ = [("rank", c_int), ("n_ranks", c_int), ("address", c_char_p), ("port", c_uint16),
                ("secret", c_char_p), ("is_one_host", c_bool), ("meet_s", c_double),
                ("deadline_s", c_double)]


SESSION_FN = ctypes.CFUNCTYPE(c_int, c_void_p, POINTER(c_void_p), POINTER(c_void_p),
                              POINTER(c_double))  # bl_session_loss_fn


class SessionRow(Structure):
    _fields_ = [("n", c_int64), ("input_ids", c_void_p), ("targets", c_void_p),
                ("weights", c_void_p), ("logprobs", c_void_p), ("advantages", c_void_p)]


class SessionLoss(Structure):
    _fields_ = [("kind", c_int), ("is_sum", c_bool), ("fn", SESSION_FN), ("user", c_void_p)]


class SessionResult(Structure):
    _fields_ = [("loss", c_double), ("weight_sum", c_double), ("n_targets", c_int64)]


class SessionStep(Structure):
    _fields_ = [(name, c_double)
                for name in ("lr", "beta1", "beta2", "eps", "weight_decay", "max_grad_norm")]


class SessionSampling(Structure):
    _fields_ = [("temperature", c_double), ("top_k", c_int64), ("top_p", c_double),
                ("seed", c_uint64)]


class SessionStats(Structure):
    _fields_ = [("n_passes", c_int64), ("n_waiting", c_int64)]


# name: (result, arguments); a result of int is a bl_status
_STATUS = c_int
_FUNCTIONS = {
    "bl_version": (c_char_p, []),
    "bl_error_text": (c_char_p, []),
    "bl_status_name": (c_char_p, [c_int]),
    "bl_device_create_cpu": (_STATUS, [c_int, POINTER(c_void_p)]),
    "bl_device_create_cpu_over": (_STATUS, [c_int, PARALLEL, POINTER(c_void_p)]),
    "bl_device_prepare_environment": (None, []),
    "bl_device_create_cuda": (_STATUS, [c_int, POINTER(c_void_p)]),
    "bl_device_destroy": (None, [c_void_p]),
    "bl_device_bytes": (c_size_t, [c_void_p]),
    "bl_stream_create_inline": (_STATUS, [c_void_p, POINTER(c_void_p)]),
    "bl_stream_wrap_cuda": (_STATUS, [c_void_p, c_void_p, POINTER(c_void_p)]),
    "bl_stream_synchronize": (_STATUS, [c_void_p]),
    "bl_stream_destroy": (None, [c_void_p]),
    "bl_comm_create_processes": (_STATUS, [POINTER(Processes), POINTER(c_void_p)]),
    "bl_comm_destroy": (None, [c_void_p]),
    "bl_linear_stack_plan": (_STATUS, [POINTER(Options), c_int64, POINTER(Spec), POINTER(Memory)]),
    "bl_linear_stack_create": (_STATUS,
                               [POINTER(Options), c_int64, POINTER(Spec), POINTER(c_void_p)]),
    "bl_linear_stack_destroy": (None, [c_void_p]),
    "bl_linear_stack_layer": (c_void_p, [c_void_p, c_int64]),
    "bl_linear_stack_verify": (_STATUS, [c_void_p]),
    "bl_linear_stack_get_stats": (_STATUS, [c_void_p, POINTER(Stats)]),
    "bl_linear_call_forward": (_STATUS, [c_void_p, c_void_p, POINTER(Call)]),
    "bl_linear_call_backward": (_STATUS, [c_void_p, c_void_p, POINTER(Call)]),
    "bl_safetensors_open": (_STATUS, [c_char_p, POINTER(c_void_p)]),
    "bl_safetensors_close": (None, [c_void_p]),
    "bl_safetensors_find": (c_void_p, [c_void_p, c_char_p]),
    "bl_peft_check_keys": (_STATUS, [c_char_p]),
    "bl_stored_tensor_read_rows": (_STATUS, [c_void_p, c_int64, c_int64, c_void_p]),
}

_COMMON = ("bl_version", "bl_error_text", "bl_status_name")
_KEYS = POINTER(c_char_p)
_SESSION_FUNCTIONS = {
    **{name: _FUNCTIONS[name] for name in _COMMON},
    "bl_session_open": (_STATUS, [_KEYS, c_int, POINTER(c_void_p)]),
    "bl_session_close": (None, [c_void_p]),
    "bl_session_create_lora": (_STATUS, [c_void_p, _KEYS, c_int, POINTER(c_void_p)]),
    "bl_session_load": (_STATUS, [c_void_p, c_char_p, POINTER(c_void_p)]),
    "bl_session_drop": (None, [c_void_p]),
    "bl_session_forward_backward": (_STATUS, [c_void_p, POINTER(SessionRow), c_int64,
                                              POINTER(SessionLoss), POINTER(c_void_p),
                                              POINTER(SessionResult)]),
    "bl_session_forward": (_STATUS, [c_void_p, POINTER(SessionRow), c_int64, POINTER(c_void_p)]),
    "bl_session_optim_step": (_STATUS, [c_void_p, POINTER(SessionStep), POINTER(c_double)]),
    "bl_session_sample": (_STATUS, [c_void_p, c_void_p, c_int64, POINTER(SessionSampling), c_int64,
                                    POINTER(c_int32), POINTER(c_int64)]),
    "bl_session_encode": (_STATUS, [c_void_p, c_char_p, c_size_t, POINTER(c_int32), c_int64,
                                    POINTER(c_int64)]),
    "bl_session_decode": (_STATUS, [c_void_p, c_void_p, c_int64, c_char_p, c_int64,
                                    POINTER(c_int64)]),
    "bl_session_save_weights": (_STATUS, [c_void_p, c_char_p]),
    "bl_session_save_state": (_STATUS, [c_void_p, c_char_p]),
    "bl_session_get_stats": (_STATUS, [c_void_p, POINTER(SessionStats)]),
}

_EUSAGE, _EINPUT, _ENOMEM = 1, 2, 4
_library: Optional[ctypes.CDLL] = None
_session_library: Optional[ctypes.CDLL] = None


def path() -> Path:
    """The file of the shared library. RuntimeError when there is none."""
    named = os.environ.get("BALLAST_LIBRARY")
    if named:
        return Path(named)
    here = Path(__file__).resolve().parent
    for candidate in (here / "lib" / f"libballast.so.{ABI}",
                      here.parent.parent / "build" / "release" / f"libballast.so.{ABI}"):
        if candidate.exists():
            return candidate
    raise RuntimeError(f"libballast.so.{ABI} is not in the package: set BALLAST_LIBRARY to it")


def _open(file: Path, functions: Dict[str, Any]) -> ctypes.CDLL:
    """The library with its functions declared. RuntimeError: none, or of another version."""
    try:
        library = ctypes.CDLL(str(file))
    except OSError as error:
        raise RuntimeError(f"{file}: {error}") from None
    for name, (result, arguments) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    version = library.bl_version().decode()
    if not version.startswith(ABI + "."):
        raise RuntimeError(f"{file} has version {version}, this package needs {ABI}")
    return library


def load() -> ctypes.CDLL:
    """libballast. RuntimeError: none, or of another version."""
    global _library
    if _library is None:
        _library = _open(path(), _FUNCTIONS)
    return _library


def load_session() -> ctypes.CDLL:
    """libballast_session, which is beside it. RuntimeError: none, or of another version."""
    global _session_library
    if _session_library is None:
        _session_library = _open(path().with_name(f"libballast_session.so.{ABI}"),
                                 _SESSION_FUNCTIONS)
    return _session_library


def check(status: int, library: Optional[ctypes.CDLL] = None) -> None:
    """Raises the library's error (of libballast, if none is given): its one-line text as ValueError
    (usage, input), MemoryError or RuntimeError."""
    if status == 0:
        return
    text = (library or load()).bl_error_text().decode(errors="replace")
    if status in (_EUSAGE, _EINPUT):
        raise ValueError(text)
    raise MemoryError(text) if status == _ENOMEM else RuntimeError(text)
