# SPDX-License-Identifier: Apache-2.0
"""A stack of frozen layers of the library, and the devices, streams and communicators under it."""
import contextlib
import ctypes
import functools
import itertools
import os
import secrets
import socket
import threading
import weakref
from ctypes import byref, c_void_p
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch

from .. import _library as lib
from ._config import Base, LoRA

_DTYPES = {getattr(torch, name): code for name, code in lib.DTYPES.items()}
_STORED = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


class Source:
    """Where the rows of a frozen weight (rows, cols) come from.

    read: (begin, end) -> a dense CPU tensor of these rows in `dtype`; or `native`: a tensor of a
    safetensors file, by the library's own handle, which reads rows without torch.
    """

    def __init__(self, rows: int, cols: int, dtype: torch.dtype,
                 read: Optional[Callable[[int, int], torch.Tensor]] = None,
                 native: Optional[int] = None, bias: Optional[torch.Tensor] = None,
                 release: Optional[Callable[[], None]] = None) -> None:
        if dtype not in _STORED:
            raise ValueError(f"a weight of {dtype}: float32, float16 or bfloat16 can be stored")
        self.rows, self.cols, self.dtype = rows, cols, dtype
        self.read, self.native, self.bias, self.release = read, native, bias, release


def _format(base: Base, dtype: torch.dtype) -> int:
    return lib.FORMATS.index(_STORED[dtype] if base.format == "stored" else base.format)


@functools.lru_cache(maxsize=None)
def _parallel_region() -> Optional[Any]:
    """GOMP_parallel of the OpenMP runtime that torch's CPU products use: its threads, which spin
    for milliseconds after each product of torch's, then run the library's loops as well. None:
    torch has none, and the library starts threads of its own."""
    try:
        torch_cpu = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
        loaded = ctypes.CDLL(torch_cpu, mode=os.RTLD_NOLOAD | os.RTLD_LOCAL | os.RTLD_LAZY)
        return ctypes.cast(loaded.GOMP_parallel, lib.PARALLEL)
    except (OSError, AttributeError):
        return None


class _Device:
    """A device of the library and a stream on it."""

    def __init__(self, where: torch.device, threads: int) -> None:
        library = lib.load()
        self.where, self._device, self._streams = where, c_void_p(), {}
        if where.type == "cpu":
            parallel = None if threads else _parallel_region()
            if parallel is None:
                lib.check(library.bl_device_create_cpu(threads or torch.get_num_threads(),
                                                       byref(self._device)))
            else:
                lib.check(library.bl_device_create_cpu_over(torch.get_num_threads(), parallel,
                                                            byref(self._device)))
            stream = c_void_p()  # a caller waits in any case: without a thread of its own
            lib.check(library.bl_stream_create_inline(self._device, byref(stream)))
            self._streams[None] = stream
        elif where.type == "cuda":
            lib.check(library.bl_device_create_cuda(where.index or 0, byref(self._device)))
        else:
            raise ValueError(f"a base on {where}: cpu or cuda")

    @property
    def handle(self) -> c_void_p:
        return self._device

    def stream(self) -> c_void_p:
        """The CPU's stream, or the caller's current CUDA stream, wrapped once."""
        if self.where.type == "cpu":
            return self._streams[None]
        current = torch.cuda.current_stream(self.where).cuda_stream
        if current not in self._streams:
            wrapped = c_void_p()
            lib.check(lib.load().bl_stream_wrap_cuda(self._device, c_void_p(current),
                                                     byref(wrapped)))
            self._streams[current] = wrapped
        return self._streams[current]

    def finish(self, stream: c_void_p) -> None:
        """A CPU's result is there when a call returns, as torch's are."""
        if self.where.type == "cpu":
            lib.check(lib.load().bl_stream_synchronize(stream))

    def close(self) -> None:
        library = lib.load()
        for stream in self._streams.values():
            library.bl_stream_destroy(stream)
        self._streams.clear()
        if self._device:
            library.bl_device_destroy(self._device)
        self._device = c_void_p()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]


def _connect(base: Base, where: torch.device) -> Optional[c_void_p]:
    """The library's own communicator among the processes of base.shard_group, which exchange its
    address over torch.distributed. None: a group of one."""
    if base.shard_group is None:
        return None
    import torch.distributed as dist
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError("Base.shard_group: torch.distributed is not initialized; start with "
                           "torchrun and call torch.distributed.init_process_group, or pass None")
    group = None if base.shard_group == "world" else base.shard_group
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if size == 1:
        return None
    if where.type != "cpu":
        raise RuntimeError("Base.shard_group: on CUDA it is not supported yet; pass None")
    hosts: List[Any] = [None] * size
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    is_one_host = len(set(hosts)) == 1
    offer = [("127.0.0.1" if is_one_host else hosts[0], _free_port(), secrets.token_hex(16))
             if rank == 0 else None]
    dist.broadcast_object_list(offer, src=dist.get_global_rank(group, 0) if group else 0,
                               group=group)
    address, port, secret = offer[0]
    job = lib.Processes(rank=rank, n_ranks=size, address=address.encode(), port=port,
                        secret=secret.encode(), is_one_host=is_one_host,
                        deadline_s=base.deadline_s)
    comm = c_void_p()
    lib.check(lib.load().bl_comm_create_processes(byref(job), byref(comm)))
    return comm


def _numbered(where: torch.device) -> torch.device:
    """cuda is the current CUDA device, so that tensors' devices can be compared with it."""
    if where.type == "cuda" and where.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return where


class Stack:
    """Frozen layers that share one ring. The library takes one thread's call at a time: calls of
    several threads wait for each other, as kernels of one device do. Those of a sharded base are
    rejected: ranks gather in the order of calls, which threads would leave to chance."""

    def __init__(self, base: Base, sources: Sequence[Source], loras: Sequence[Optional[LoRA]],
                 where: torch.device) -> None:
        library = lib.load()
        where = _numbered(where)
        self.base, self.where, self._lock, self._handle = base, where, threading.Lock(), c_void_p()
        self._pid, self._comm, self._device = os.getpid(), None, None
        self._failure: Optional[BaseException] = None
        self._read_layers: List[bool] = [False] * len(sources)
        if base.offload_ratio > 0 and base.tier == "disk" and not os.path.isdir(base.dir or ""):
            raise ValueError(f"Base.dir: {base.dir}: is not a directory")
        specs = (lib.Spec * len(sources))()
        keep: List[Any] = []
        for i, (source, lora) in enumerate(zip(sources, loras)):
            specs[i] = self._spec(i, source, lora, sources, keep)
        self._device = _Device(where, base.threads)
        try:
            self._comm = _connect(base, where)
            options = lib.Options(device=self._device.handle, comm=self._comm,
                                  tier=lib.TIERS.index(base.tier), ratio=base.offload_ratio,
                                  dir=os.fsencode(base.dir) if base.dir else None, pin=base.pin,
                                  ring_depth=base.ring_depth)
            self._last_row = -1
            status = library.bl_linear_stack_create(byref(options), len(sources), specs,
                                                    byref(self._handle))
            if self._failure is not None:
                raise self._failure
            lib.check(status)
        except BaseException:
            self.close()
            raise
        self.layers = [library.bl_linear_stack_layer(self._handle, i) for i in range(len(sources))]
        for source in sources:
            if source.release:
                source.release()

    def _spec(self, index: int, source: Source, lora: Optional[LoRA], sources: Sequence[Source],
              keep: List[Any]) -> lib.Spec:
        spec = lib.Spec(rows=source.rows, cols=source.cols, dtype=_DTYPES[source.dtype],
                        format=_format(self.base, source.dtype))
        if source.native is not None:
            spec.read_rows = ctypes.cast(lib.load().bl_stored_tensor_read_rows, lib.READ_ROWS)
            spec.user = source.native
        else:
            spec.read_rows = lib.READ_ROWS(self._reader(index, sources))
        if source.bias is not None:
            bias = plain(source.bias.to("cpu", torch.float32))
            spec.bias = bias.data_ptr()
            keep.append(bias)
        if lora is not None:
            spec.lora = lib.Lora(r=lora.r, alpha=lora.alpha, use_rslora=lora.use_rslora,
                                 dropout=lora.dropout, is_external=True)
        keep.append(spec.read_rows)
        return spec

    def _reader(self, index: int, sources: Sequence[Source]) -> Callable[..., int]:
        """Rows of layer `index` into the library's buffer. Without page files each row is read
        once and in order of layers, so that a layer that is done can go before the next is read;
        with page files rows are read twice, for their hash and for the file."""
        source, once = sources[index], not (self.base.tier == "disk" and self.base.offload_ratio > 0)

        def read(_user: Any, begin: int, end: int, out: int) -> int:
            try:
                for i in range(index if once else 0):
                    if sources[i].release:
                        sources[i].release()
                        sources[i].release = None
                rows = plain(source.read(begin, end).to("cpu"))
                ctypes.memmove(out, rows.data_ptr(), rows.numel() * rows.element_size())
                return 0
            except BaseException as failure:  # the library cannot carry it
                self._failure = failure
                return 2
        return read

    @property
    def is_open(self) -> bool:
        return bool(self._handle)

    def _check(self, what: str) -> None:
        if not self._handle:
            raise RuntimeError(f"{what} after its base was freed")
        if self._pid != os.getpid():
            raise RuntimeError(f"{what} in a forked process: create the base there")

    @contextlib.contextmanager
    def use(self, what: str = "a layer was called") -> Iterator[None]:
        """The stack for one thread. RuntimeError, which begins with `what`: a base that was freed,
        a forked process, or two threads over a sharded base."""
        self._check(what)  # before the lock, which a fork may have left taken
        if not self._lock.acquire(blocking=self._comm is None):
            raise RuntimeError(f"{what} by two threads at once over a sharded base: call it from "
                               "one, so that all processes gather in the same order")
        try:
            self._check(what)
            yield
        finally:
            self._lock.release()

    def run(self, function: Any, layer: int, call: lib.Call) -> None:
        """One call of the library, within `use`."""
        stream = self._device.stream()
        lib.check(function(self.layers[layer], stream, byref(call)))
        self._device.finish(stream)

    def verify(self) -> None:
        """Checks stored rows against their checksums. ValueError names a damaged layer."""
        with self.use("a base was verified"):
            lib.check(lib.load().bl_linear_stack_verify(self._handle))

    def stats(self) -> Dict[str, Any]:
        """Bytes by tier, calls, gathers and waits of this process."""
        out = lib.Stats(size_bytes=ctypes.sizeof(lib.Stats))
        with self.use("statistics were asked"):
            lib.check(lib.load().bl_linear_stack_get_stats(self._handle, byref(out)))
        memory = {f"{name}_bytes": getattr(out.memory, name) for name, _ in lib.Memory._fields_}
        counts = {name: getattr(out, name)
                  for name, _ in lib.Stats._fields_[2:]}
        return {**memory, **counts}

    def close(self) -> None:
        """Frees the base, once a call of another thread has ended. Layers that are called after it
        raise RuntimeError."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self._free()

    def _free(self) -> None:
        library = lib.load()
        if self._handle:
            library.bl_linear_stack_destroy(self._handle)
            self._handle = c_void_p()
        if self._comm is not None:
            library.bl_comm_destroy(self._comm)
            self._comm = None
        if self._device is not None:
            self._device.close()
            self._device = None

    def __del__(self) -> None:
        try:
            self.close()
        except Exception:  # the interpreter is ending
            pass


class Frozen:
    """One layer of a stack: the state shared by a module and its copies."""
    _numbers = itertools.count(1)
    _all: "weakref.WeakValueDictionary[int, Frozen]" = weakref.WeakValueDictionary()

    def __init__(self, stack: Stack, index: int, source: Source, lora: Optional[LoRA]) -> None:
        self.stack, self.index, self.lora = stack, index, lora
        self.rows, self.cols = source.rows, source.cols
        self.has_bias, self.dtype = source.bias is not None, source.dtype
        self.number = next(self._numbers)
        self._call = lib.Call(size_bytes=ctypes.sizeof(lib.Call), rows=self.rows, cols=self.cols,
                              has_keys=True)
        Frozen._all[self.number] = self

    @staticmethod
    def of(number: int) -> "Frozen":
        frozen = Frozen._all.get(number)
        if frozen is None:
            raise RuntimeError("a layer was called after its base was freed")
        return frozen

    def _fill(self, width: int, t: torch.Tensor, A: Optional[torch.Tensor],
              B: Optional[torch.Tensor], key: Optional[torch.Tensor]) -> lib.Call:
        """The layer's one argument of calls, which Stack.use guards, for the tokens of t."""
        call = self._call
        call.T = t.numel() // width
        call.A, call.B = _address(A), _address(B)
        call.skip_dropout = key is None
        call.step = 0 if key is None else int(key)
        return call

    def forward(self, x: torch.Tensor, A: Optional[torch.Tensor], B: Optional[torch.Tensor],
                key: Optional[torch.Tensor], y: torch.Tensor, skip_bias: bool = False) -> None:
        """y is overwritten. All are contiguous; x has elements."""
        with self.stack.use():
            call = self._fill(self.cols, x, A, B, key)
            call.skip_bias = skip_bias
            _set(call.x, x), _set(call.y, y)
            self.stack.run(lib.load().bl_linear_call_forward, self.index, call)

    def backward(self, dy: torch.Tensor, x: Optional[torch.Tensor], A: Optional[torch.Tensor],
                 B: Optional[torch.Tensor], key: Optional[torch.Tensor],
                 dx: Optional[torch.Tensor], dA: Optional[torch.Tensor],
                 dB: Optional[torch.Tensor]) -> None:
        """dx, dA and dB are overwritten; None: not computed (dA and dB: both or neither)."""
        with self.stack.use():
            call = self._fill(self.rows, dy, A, B, key)
            call.dA, call.dB = _address(dA), _address(dB)
            _set(call.dy, dy), _set(call.x, x), _set(call.dx, dx)
            self.stack.run(lib.load().bl_linear_call_backward, self.index, call)

    def __deepcopy__(self, _memo: Dict[int, Any]) -> "Frozen":
        return self  # frozen: copies of a module share it

    def __reduce__(self) -> Tuple[Any, ...]:
        raise TypeError("a layer's base cannot be pickled: save its adapter (bt.save_adapter)")


def plain(t: torch.Tensor) -> torch.Tensor:
    """t with its values in memory, in order, where its address is read: a view with the negative or
    conjugate bit has other values there."""
    return t.detach().resolve_conj().resolve_neg().contiguous()


def _address(t: Optional[torch.Tensor]) -> Optional[int]:
    return None if t is None else t.data_ptr()


def _set(to: lib.Tensor, t: Optional[torch.Tensor]) -> None:
    to.data = _address(t)
    to.dtype = 0 if t is None else _DTYPES[t.dtype]
