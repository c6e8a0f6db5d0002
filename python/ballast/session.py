# SPDX-License-Identifier: Apache-2.0
"""Sessions: a loaded base, and adapters over it that a loop of the caller's trains.

A thin layer over train/session.h, which has the equations. Calls release the GIL; each waits until its request has
run. Those named *_async return a future instead; an adapter's calls run in the order in which they were made.
"""
import atexit
import ctypes
import os
import sys
import threading
import weakref
from array import array
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import byref, c_char_p, c_double, c_int, c_int32, c_int64, c_void_p
from types import TracebackType
from typing import (Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Type,
                    TypeVar, Union)

from . import _library
from ._library import SessionLoss, SessionResult, SessionRow, SessionSampling, SessionStats, SessionStep

PathLike = Union[str, "os.PathLike[str]"]
Row = Mapping[str, Any]
T = TypeVar("T")

_LOSSES = {"cross_entropy": 0, "importance_sampling": 1}
_CUSTOM = 2
_INTEGERS, _REALS = ("input_ids", "targets"), ("weights", "logprobs", "advantages")
_in_fn = threading.local()  # of the thread that runs the function of a custom loss


class Output(NamedTuple):
    """Of a call with gradients: the loss; the sum of weights and the number of the tokens that it is of; log p of
    each row's targets, 0 without one."""
    loss: float
    weight_sum: float
    n_targets: int
    logprobs: List[Any]


# ---- arrays in and out ----

def _values(what: str, x: Any, real: bool) -> "array[Any]":
    """x as int32 or float32: a torch tensor, a NumPy array, another buffer, or a sequence of numbers."""
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        x = x.float() if real else x
    dims = getattr(x, "ndim", 1)
    if dims != 1:
        raise ValueError(f"{what} has {dims} dimensions: 1 is needed")
    if not real and "float" in str(getattr(x, "dtype", "")):
        raise TypeError(f"{what} has dtype {x.dtype}: integers are needed")
    items = x.tolist() if hasattr(x, "tolist") else x
    if isinstance(items, (str, bytes, Mapping)):
        raise TypeError(f"{what} is {type(x).__name__}: an array of numbers is needed")
    try:
        return array("f" if real else "i", items)
    except TypeError:
        raise TypeError(f"{what}: an array of {'numbers' if real else 'integers'} is needed, "
                        f"not {type(x).__name__}") from None
    except OverflowError:
        raise ValueError(f"{what}: a number is out of range") from None


def _row(index: int, row: Row, keep: List[Any]) -> SessionRow:
    if not isinstance(row, Mapping):
        raise TypeError(f"rows[{index}] is {type(row).__name__}: a dict of arrays is needed")
    unknown = sorted(set(map(str, row)) - set(_INTEGERS) - set(_REALS))
    if unknown:
        raise ValueError(f"rows[{index}]: unknown key {unknown[0]!r}")
    out = SessionRow()
    for name in _INTEGERS + _REALS:
        what = f"rows[{index}][{name!r}]"
        if row.get(name) is None:
            if name in _INTEGERS:
                raise ValueError(f"{what} is not given")
            continue
        values = _values(what, row[name], name in _REALS)
        if name == "input_ids":
            out.n = len(values)
        elif len(values) != out.n:
            raise ValueError(f"{what} has {len(values)} elements, input_ids {out.n}")
        keep.append(values)
        setattr(out, name, values.buffer_info()[0] if len(values) else None)
    return out


class _Rows:
    """Rows as C has them, with memory for their log-probabilities."""

    def __init__(self, rows: Sequence[Row]):
        if isinstance(rows, (Mapping, str, bytes)) or not hasattr(rows, "__len__"):
            raise TypeError(f"rows is {type(rows).__name__}: a list of dicts is needed")
        if len(rows) == 0:
            raise ValueError("rows is empty")
        self.keep: List[Any] = []
        self.n = len(rows)
        self.rows = (SessionRow * self.n)(*[_row(i, row, self.keep) for i, row in enumerate(rows)])
        self.logprobs = [array("f", bytes(4 * row.n)) for row in self.rows]
        self.pointers = (c_void_p * self.n)(*[x.buffer_info()[0] if len(x) else None for x in self.logprobs])

    def results(self) -> List[Any]:
        return [_out(x) for x in self.logprobs]


def _out(x: "array[Any]") -> Any:
    """A NumPy array where NumPy is installed, else the array itself."""
    try:
        import numpy
    except ImportError:
        return x
    return numpy.frombuffer(x, dtype=numpy.float32)


# ---- the function of a custom loss ----

def _floats(address: int, n: int) -> "array[Any]":
    out = array("f")
    out.frombytes(ctypes.string_at(address, 4 * n))
    return out


class _Function:
    """fn as C calls it; its exception is raised again after the call."""

    def __init__(self, fn: Callable[[List[Any]], Any], rows: _Rows, arrays: str):
        self.fn, self.rows, self.arrays = fn, rows, arrays
        self.error: Optional[BaseException] = None
        self.pointer = _library.SESSION_FN(self.call)

    def call(self, _user: int, logp: Any, gradient: Any, loss: Any) -> int:
        _in_fn.is_true = True
        try:
            lengths = [row.n for row in self.rows.rows]
            given = [_floats(logp[i], n) for i, n in enumerate(lengths)]
            value, gradients = self.differentiate(given)
            if len(gradients) != len(lengths):
                raise ValueError(f"fn returned gradients of {len(gradients)} rows, of {len(lengths)}")
            for i, n in enumerate(lengths):
                values = _values(f"fn: gradient of row {i}", gradients[i], True)
                if len(values) != n:
                    raise ValueError(f"fn: gradient of row {i} has {len(values)} elements, the row {n}")
                ctypes.memmove(gradient[i], values.buffer_info()[0], 4 * n)
            loss[0] = float(value)
            return 0
        except BaseException as error:  # noqa: B902: raised again by raise_error
            self.error = error
            return 1
        finally:
            _in_fn.is_true = False

    def differentiate(self, given: "List[array[Any]]") -> Tuple[Any, Sequence[Any]]:
        if self.arrays == "torch":
            import torch
            inputs = [torch.tensor(x.tolist(), dtype=torch.float32, requires_grad=True) for x in given]
            value = self.fn(inputs)
            if not isinstance(value, torch.Tensor) or value.numel() != 1:
                raise TypeError("fn: with arrays='torch' it returns a scalar tensor")
            value.backward()
            return value.item(), [x.grad if x.grad is not None else torch.zeros_like(x) for x in inputs]
        result = self.fn([_out(x) for x in given])
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError("fn: with arrays='numpy' it returns (loss, [its gradient by log p of each row])")
        return result

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error


# ---- handles that end while no call uses them ----

class _Handle:
    """A pointer of the library's. close waits for the calls that use it; later ones are errors."""

    def __init__(self, name: str, pointer: int):
        self.name, self.pointer, self.pid = name, pointer, os.getpid()
        self.n_users, self.is_closed = 0, False
        self.changed = threading.Condition()

    def __enter__(self) -> int:
        if os.getpid() != self.pid:
            raise ValueError(f"{self.name}: process {self.pid} opened it before a fork")
        if getattr(_in_fn, "is_true", False):
            raise ValueError(f"{self.name}: called by fn, for which the session waits")
        with self.changed:
            if self.is_closed:
                raise ValueError(f"{self.name} is closed")
            self.n_users += 1
        return self.pointer

    def __exit__(self, *_: object) -> None:
        with self.changed:
            self.n_users -= 1
            self.changed.notify_all()

    def close(self, free: Callable[[int], None]) -> None:
        if os.getpid() != self.pid or self.is_closed:
            return
        if getattr(_in_fn, "is_true", False):
            raise ValueError(f"{self.name}: close was called by fn, for which the session waits")
        with self.changed:
            if self.is_closed:
                return
            self.is_closed = True
            self.changed.wait_for(lambda: self.n_users == 0)
        free(self.pointer)


def _keys(**keys: Any) -> Any:
    texts = []
    for key, value in keys.items():
        if value is None:
            continue
        if isinstance(value, bool):
            text = str(value).lower()
        elif isinstance(value, (list, tuple)):
            text = ",".join(map(str, value))
        elif isinstance(value, (str, int, float, os.PathLike)):
            text = os.fspath(value) if isinstance(value, os.PathLike) else str(value)
        else:
            raise TypeError(f"{key} is {type(value).__name__}: a text, number or bool is needed")
        if "\0" in text:
            raise ValueError(f"{key}: it has a NUL")
        texts.append(f"{key}={text}".encode())
    return (c_char_p * len(texts))(*texts), len(texts)


def _path(name: str, path: PathLike) -> bytes:
    try:
        text = os.fsencode(path)
    except TypeError:
        raise TypeError(f"{name} is {type(path).__name__}: a path is needed") from None
    if not text or b"\0" in text:
        raise ValueError(f"{name}: {path!r} is not a path")
    return text


def _number(name: str, value: Any, kind: Type[Any] = float) -> Any:
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        number = kind(value)
        if kind is int and (number != value or not -2**63 <= number < 2**63):
            raise ValueError
        return number
    except (TypeError, ValueError, OverflowError):
        word = "an integer" if kind is int else "a number"
        raise TypeError(f"{name}: {value!r} is not {word}") from None


class Adapter:
    """An adapter of a session (Session.create_lora, Session.load)."""

    def __init__(self, session: "Session", pointer: int):
        self._session = session
        self._handle = _Handle("adapter", pointer)
        self._pool: Optional[ThreadPoolExecutor] = None
        self._pool_lock = threading.Lock()

    # ---- calls, in their order ----

    def _later(self, call: Callable[[], T]) -> "Future[T]":
        with self._pool_lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, "ballast-adapter")
            return self._pool.submit(call)

    def _now(self, call: Callable[[], T]) -> T:
        """After the adapter's calls that are not done."""
        if self._pool is None or getattr(_in_fn, "is_true", False):
            return call()
        return self._later(call).result()

    def _call(self, function: str, *arguments: Any) -> None:
        with self._session._handle, self._handle as pointer:
            library = _library.load_session()
            _library.check(getattr(library, function)(pointer, *arguments), library)

    # ---- forward_backward ----

    def _forward_backward(self, rows: _Rows, loss: SessionLoss) -> Output:
        result = SessionResult()
        self._call("bl_session_forward_backward", rows.rows, rows.n, byref(loss), rows.pointers, byref(result))
        return Output(result.loss, result.weight_sum, result.n_targets, rows.results())

    @staticmethod
    def _loss(loss: str, reduction: str) -> SessionLoss:
        if loss not in _LOSSES:
            raise ValueError(f"loss: {loss!r} is not one of {', '.join(_LOSSES)}")
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction: {reduction!r} is not one of mean, sum")
        return SessionLoss(kind=_LOSSES[loss], is_sum=reduction == "sum")

    def forward_backward(self, rows: Sequence[Row], loss: str = "cross_entropy",
                         reduction: str = "mean") -> Output:
        """Adds the gradient of the loss to the adapter's."""
        given, how = _Rows(rows), self._loss(loss, reduction)
        return self._now(lambda: self._forward_backward(given, how))

    def forward_backward_async(self, rows: Sequence[Row], loss: str = "cross_entropy",
                               reduction: str = "mean") -> "Future[Output]":
        given, how = _Rows(rows), self._loss(loss, reduction)
        return self._later(lambda: self._forward_backward(given, how))

    def _custom(self, rows: Sequence[Row], fn: Callable[[List[Any]], Any],
                arrays: Optional[str]) -> Callable[[], Output]:
        if not callable(fn):
            raise TypeError(f"fn is {type(fn).__name__}: a function is needed")
        kind = arrays if arrays is not None else "torch" if sys.modules.get("torch") else "numpy"
        if kind not in ("torch", "numpy"):
            raise ValueError(f"arrays: {arrays!r} is not one of torch, numpy")
        given = _Rows(rows)

        def call() -> Output:
            function = _Function(fn, given, kind)
            loss = SessionLoss(kind=_CUSTOM, fn=function.pointer)
            try:
                return self._forward_backward(given, loss)
            except Exception:
                function.raise_error()
                raise
        return call

    def forward_backward_custom(self, rows: Sequence[Row], fn: Callable[[List[Any]], Any],
                                arrays: Optional[str] = None) -> Output:
        """Adds the gradient of a loss of the caller's. arrays "torch" (the default once torch is imported): fn
        takes a list of tensors, log p of each row, and returns a scalar tensor, which is differentiated. "numpy": fn
        returns (loss, [its gradient by each row's log p])."""
        return self._now(self._custom(rows, fn, arrays))

    def forward_backward_custom_async(self, rows: Sequence[Row], fn: Callable[[List[Any]], Any],
                                      arrays: Optional[str] = None) -> "Future[Output]":
        return self._later(self._custom(rows, fn, arrays))

    # ---- forward ----

    def _forward(self, rows: _Rows) -> List[Any]:
        self._call("bl_session_forward", rows.rows, rows.n, rows.pointers)
        return rows.results()

    def forward(self, rows: Sequence[Row]) -> List[Any]:
        """log p of each row's targets, without dropout; 0 without one."""
        given = _Rows(rows)
        return self._now(lambda: self._forward(given))

    def forward_async(self, rows: Sequence[Row]) -> "Future[List[Any]]":
        given = _Rows(rows)
        return self._later(lambda: self._forward(given))

    # ---- optim_step ----

    @staticmethod
    def _step(lr: float, betas: Sequence[float], eps: float, weight_decay: float,
              max_grad_norm: float) -> SessionStep:
        if isinstance(betas, (str, bytes)) or not hasattr(betas, "__len__") or len(betas) != 2:
            raise ValueError(f"betas: {betas!r} is not a pair of numbers")
        return SessionStep(_number("lr", lr), _number("betas[0]", betas[0]), _number("betas[1]", betas[1]),
                           _number("eps", eps), _number("weight_decay", weight_decay),
                           _number("max_grad_norm", max_grad_norm))

    def _optim_step(self, step: SessionStep) -> float:
        norm = c_double()
        self._call("bl_session_optim_step", byref(step), byref(norm))
        return norm.value

    def optim_step(self, lr: float, betas: Sequence[float] = (0.9, 0.999), eps: float = 1e-8,
                   weight_decay: float = 0.0, max_grad_norm: float = 1.0) -> float:
        """An update by AdamW with the gradients since the last one; their norm before clipping."""
        step = self._step(lr, betas, eps, weight_decay, max_grad_norm)
        return self._now(lambda: self._optim_step(step))

    def optim_step_async(self, lr: float, betas: Sequence[float] = (0.9, 0.999), eps: float = 1e-8,
                         weight_decay: float = 0.0, max_grad_norm: float = 1.0) -> "Future[float]":
        step = self._step(lr, betas, eps, weight_decay, max_grad_norm)
        return self._later(lambda: self._optim_step(step))

    # ---- sample ----

    def _sample(self, prompt: "array[Any]", options: SessionSampling, n_most: int) -> List[int]:
        ids, n = (c_int32 * max(1, min(n_most, 1 << 20)))(), c_int64()
        self._call("bl_session_sample", prompt.buffer_info()[0] if prompt else None, len(prompt), byref(options),
                   n_most, ids, byref(n))
        return list(ids[:n.value])

    def _sampling(self, prompt: Any, max_tokens: int, temperature: float, top_k: int, top_p: float,
                  seed: int) -> Callable[[], Any]:
        is_text, n_most = isinstance(prompt, str), _number("max_tokens", max_tokens, int)
        ids = _values("prompt", self._session.encode(prompt) if is_text else prompt, False)
        if _number("seed", seed, int) < 0:
            raise ValueError(f"seed: {seed} is negative")
        options = SessionSampling(_number("temperature", temperature), _number("top_k", top_k, int),
                                  _number("top_p", top_p), seed)
        if is_text:
            return lambda: self._session.decode(self._sample(ids, options, n_most))
        return lambda: self._sample(ids, options, n_most)

    def sample(self, prompt: Any, max_tokens: int = 64, temperature: float = 1.0, top_k: int = 0,
               top_p: float = 1.0, seed: int = 0) -> Any:
        """The text that continues a text; of token ids, a list of those that continue them, without the end-of-text
        id."""
        return self._now(self._sampling(prompt, max_tokens, temperature, top_k, top_p, seed))

    def sample_async(self, prompt: Any, max_tokens: int = 64, temperature: float = 1.0, top_k: int = 0,
                     top_p: float = 1.0, seed: int = 0) -> "Future[Any]":
        return self._later(self._sampling(prompt, max_tokens, temperature, top_k, top_p, seed))

    # ---- files ----

    def save_weights(self, dir: PathLike) -> None:
        """A PEFT adapter."""
        path = _path("dir", dir)
        self._now(lambda: self._call("bl_session_save_weights", path))

    def save_state(self, dir: PathLike) -> None:
        """dir/step-N: weights, moments and keys, for Session.load."""
        path = _path("dir", dir)
        self._now(lambda: self._call("bl_session_save_state", path))

    def close(self) -> None:
        """Frees the adapter, after the calls that are not done."""
        if self._handle.is_closed or os.getpid() != self._handle.pid:
            return
        if self._pool is not None and not getattr(_in_fn, "is_true", False):
            self._pool.shutdown()
            self._pool = None
        try:
            with self._session._handle:
                self._handle.close(_library.load_session().bl_session_drop)
        except ValueError:
            if not self._session._handle.is_closed:
                raise


_open_sessions: "weakref.WeakSet[Session]" = weakref.WeakSet()


class Session:
    """A base, loaded once: Session("SmolLM2", base_format="fp8_row", offload_tier="disk", offload_dir="pages").
    keys: those of `ballast train` that docs/python.md lists."""

    def __init__(self, model: PathLike, **keys: Any):
        pointer = c_void_p()
        library = _library.load_session()
        words, n = _keys(model_name_or_path=_path("model", model).decode(), **keys)
        _library.check(library.bl_session_open(words, n, byref(pointer)), library)
        assert pointer.value is not None
        self._handle = _Handle("session", pointer.value)
        _open_sessions.add(self)

    def _make(self, function: str, *arguments: Any) -> Adapter:
        pointer = c_void_p()
        library = _library.load_session()
        with self._handle as session:
            _library.check(getattr(library, function)(session, *arguments, byref(pointer)), library)
        assert pointer.value is not None
        return Adapter(self, pointer.value)

    def create_lora(self, r: Optional[int] = None, alpha: Optional[float] = None,
                    targets: Union[str, Sequence[str], None] = None, seed: Optional[int] = None,
                    dropout: Optional[float] = None, use_rslora: Optional[bool] = None,
                    init_adapter: Optional[PathLike] = None) -> Adapter:
        """A fresh adapter, or that of init_adapter, a PEFT directory. Defaults: those of the keys lora_r, lora_alpha,
        lora_target_modules, seed, lora_dropout and use_rslora."""
        words, n = _keys(lora_r=r, lora_alpha=alpha, lora_target_modules=targets, seed=seed, lora_dropout=dropout,
                         use_rslora=use_rslora, init_adapter=init_adapter)
        return self._make("bl_session_create_lora", words, n)

    def load(self, dir: PathLike) -> Adapter:
        """The newest state that Adapter.save_state has written there."""
        return self._make("bl_session_load", _path("dir", dir))

    def encode(self, text: str) -> List[int]:
        """Token ids of a text, with those that the tokenizer puts before one."""
        if not isinstance(text, str):
            raise TypeError(f"text is {type(text).__name__}: a str is needed")
        data, n, library = text.encode(), c_int64(), _library.load_session()
        ids = (c_int32 * (len(data) + 64))()
        with self._handle as session:
            _library.check(library.bl_session_encode(session, data, len(data), ids, len(ids), byref(n)), library)
        return list(ids[:n.value])

    def decode(self, ids: Any) -> str:
        """The text of token ids, without special tokens."""
        values, n, library = _values("ids", ids, False), c_int64(), _library.load_session()
        pointer = values.buffer_info()[0] if values else None
        text = ctypes.create_string_buffer(1)
        with self._handle as session:
            while True:
                _library.check(library.bl_session_decode(session, pointer, len(values), text, len(text), byref(n)),
                               library)
                if n.value <= len(text):
                    return text.raw[:n.value].decode(errors="replace")
                text = ctypes.create_string_buffer(n.value)

    def stats(self) -> Dict[str, int]:
        """n_passes: passes over the layers so far; n_waiting: requests that wait for one."""
        out = SessionStats()
        library = _library.load_session()
        with self._handle as session:
            _library.check(library.bl_session_get_stats(session, byref(out)), library)
        return {"n_passes": out.n_passes, "n_waiting": out.n_waiting}

    def close(self) -> None:
        """Frees the base and all adapters, after the calls that run; futures that have not begun fail."""
        self._handle.close(_library.load_session().bl_session_close)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self.close()


@atexit.register
def _close_all() -> None:
    for session in list(_open_sessions):
        session.close()
