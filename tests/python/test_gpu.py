# SPDX-License-Identifier: Apache-2.0
"""The layer on the emulated GPU through ctypes alone, as ballast.torch calls it: a stream and
memory of the CUDA runtime's, wrapped and borrowed; bf16 tensors, fp32 A and B; against the CPU.

BALLAST_LIBRARY is emulator/libballast_emulated.so, which has the CUDA runtime's functions, too.

Tolerance: x, dy and W are values that bf16 holds, A and B are fp32 and rounded to bf16 on the GPU,
as y and dx are: e <= sqrt(8/3) 2^-8 = 0.64 % of the root mean square, as the head of
tests/linear/test_linear_cuda.c derives; 1.3 % is asked for.
"""
import array
import ctypes
import math
import mmap
import random
import struct
import unittest
from ctypes import byref, c_int, c_size_t, c_uint, c_void_p

from ballast import _library as lib

T, N, K, R = 24, 96, 64, 4
ERROR = 0.013
COPY = 4  # cudaMemcpyDefault
STAGING_BYTES = 1 << 20
PIN = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped


def upper_half(value):
    """bf16 by truncation: exact for values that bf16 holds."""
    return struct.unpack("<I", struct.pack("<f", value))[0] >> 16


def from_upper_half(half):
    return struct.unpack("<f", struct.pack("<I", half << 16))[0]


def normal(n, seed):
    random.seed(seed)
    return [from_upper_half(upper_half(random.gauss(0, 1))) for _ in range(n)]


def to_bytes(values, dtype):
    if dtype == "float32":
        return array.array("f", values).tobytes()
    return array.array("H", map(upper_half, values)).tobytes()


def from_bytes(data, dtype):
    if dtype == "float32":
        return list(array.array("f", data))
    return [from_upper_half(half) for half in array.array("H", data)]


RUNTIME = {"cudaSetDevice": [c_int], "cudaStreamCreateWithFlags": [c_void_p, c_uint],
           "cudaStreamSynchronize": [c_void_p], "cudaStreamDestroy": [c_void_p],
           "cudaMalloc": [c_void_p, c_size_t], "cudaFree": [c_void_p],
           "cudaHostRegister": [c_void_p, c_size_t, c_uint], "cudaHostUnregister": [c_void_p],
           "cudaMemcpyAsync": [c_void_p, c_void_p, c_size_t, c_int, c_void_p]}


class Cuda:
    """A stream and memory of the runtime's, and the library's device and stream over them."""
    dtype = "bfloat16"

    def __init__(self):
        library = lib.load()
        for name, arguments in RUNTIME.items():
            getattr(library, name).argtypes = arguments
        self.device, self.stream, self.foreign = c_void_p(), c_void_p(), c_void_p()
        self.memory, self.mapping = [], mmap.mmap(-1, STAGING_BYTES)
        self.staging = (ctypes.c_char * STAGING_BYTES).from_buffer(self.mapping)  # pinned
        self.call("cudaSetDevice", 0)
        self.call("cudaHostRegister", byref(self.staging), STAGING_BYTES, PIN)
        self.call("cudaStreamCreateWithFlags", byref(self.foreign), 1)  # cudaStreamNonBlocking
        lib.check(library.bl_device_create_cuda(0, byref(self.device)))
        lib.check(library.bl_stream_wrap_cuda(self.device, self.foreign, byref(self.stream)))

    def call(self, name, *arguments):
        status = getattr(lib.load(), name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name}: CUDA error {status}")

    def put(self, values, dtype):
        """The address of the values in device memory; a number: of as many NaN."""
        data = to_bytes([math.nan] * values if isinstance(values, int) else values, dtype)
        memory = c_void_p()
        self.call("cudaMalloc", byref(memory), len(data))
        self.memory.append(memory)
        ctypes.memmove(self.staging, data, len(data))
        self.call("cudaMemcpyAsync", memory, byref(self.staging), len(data), COPY, self.foreign)
        self.call("cudaStreamSynchronize", self.foreign)
        return memory.value

    def get(self, address, n, dtype):
        """Behind what the library has queued on the caller's stream, which alone is waited for."""
        n_bytes = n * (4 if dtype == "float32" else 2)
        self.call("cudaMemcpyAsync", byref(self.staging), address, n_bytes, COPY, self.foreign)
        self.call("cudaStreamSynchronize", self.foreign)
        return from_bytes(ctypes.string_at(self.staging, n_bytes), dtype)

    def close(self):
        library = lib.load()
        library.bl_stream_destroy(self.stream)
        library.bl_device_destroy(self.device)
        for memory in self.memory:
            self.call("cudaFree", memory)
        self.call("cudaHostUnregister", byref(self.staging))
        self.call("cudaStreamDestroy", self.foreign)  # the caller's: the wrapper leaves it


class Cpu:
    dtype = "float32"

    def __init__(self):
        self.device, self.stream, self.kept = c_void_p(), c_void_p(), []
        lib.check(lib.load().bl_device_create_cpu(1, byref(self.device)))
        lib.check(lib.load().bl_stream_create_inline(self.device, byref(self.stream)))

    def put(self, values, dtype):
        data = to_bytes([math.nan] * values if isinstance(values, int) else values, dtype)
        self.kept.append(ctypes.create_string_buffer(data))
        return ctypes.addressof(self.kept[-1])

    def get(self, address, n, dtype):
        lib.check(lib.load().bl_stream_synchronize(self.stream))
        return from_bytes(ctypes.string_at(address, n * (4 if dtype == "float32" else 2)), dtype)

    def close(self):
        lib.load().bl_stream_destroy(self.stream)
        lib.load().bl_device_destroy(self.device)


INPUTS = {"x": normal(T * K, 1), "dy": normal(T * N, 2), "A": [v / 8 for v in normal(R * K, 3)],
          "B": [v / 8 for v in normal(N * R, 4)]}
WEIGHT, BIAS = normal(N * K, 5), normal(N, 6)


def run(machine, format, tier):
    """y, dx, dA, dB of one forward and two backward passes, the second added to dA and dB."""
    library, stack = lib.load(), c_void_p()
    weight, bias = (ctypes.create_string_buffer(to_bytes(v, "float32")) for v in (WEIGHT, BIAS))
    spec = lib.Spec(rows=N, cols=K, format=lib.FORMATS.index(format), dtype=lib.DTYPES["float32"],
                    weight=ctypes.addressof(weight), bias=ctypes.addressof(bias),
                    lora=lib.Lora(r=R, alpha=2 * R, is_external=True))
    options = lib.Options(device=machine.device, tier=lib.TIERS.index(tier),
                          ratio=0 if tier == "device" else 1, pin=True)
    lib.check(library.bl_linear_stack_create(byref(options), 1, byref(spec), byref(stack)))
    sizes = {"y": T * N, "dx": T * K, "dA": R * K, "dB": N * R}
    dtypes = {name: "float32" if name in ("A", "B", "dA", "dB") else machine.dtype
              for name in (*INPUTS, *sizes)}
    at = {name: machine.put(values, dtypes[name])
          for name, values in (*INPUTS.items(), *sizes.items())}
    call = lib.Call(size_bytes=ctypes.sizeof(lib.Call), T=T, rows=N, cols=K, A=at["A"], B=at["B"],
                    dA=at["dA"], dB=at["dB"])
    for name in ("x", "y", "dy", "dx"):
        setattr(call, name, lib.Tensor(data=at[name], dtype=lib.DTYPES[machine.dtype]))
    layer = library.bl_linear_stack_layer(stack, 0)
    lib.check(library.bl_linear_call_forward(layer, machine.stream, byref(call)))
    for call.accumulate in (False, True):
        lib.check(library.bl_linear_call_backward(layer, machine.stream, byref(call)))
    found = {name: machine.get(at[name], n, dtypes[name]) for name, n in sizes.items()}
    library.bl_linear_stack_destroy(stack)
    return found


class Gpu(unittest.TestCase):
    def test_as_the_cpu(self):
        cuda, cpu = Cuda(), Cpu()
        for format in ("fp8_row", "fp8_block", "bf16"):
            for tier in ("device", "host"):
                with self.subTest(format=format, tier=tier):
                    got, want = run(cuda, format, tier), run(cpu, format, tier)
                    for name in want:
                        error = math.dist(got[name], want[name]) / math.hypot(*want[name])
                        self.assertLess(error, ERROR, name)
                        self.assertGreater(error, 0, name)  # bf16 has been computed
        cpu.close()
        cuda.close()

    def test_other_dtypes_are_rejected(self):
        cuda, stack = Cuda(), c_void_p()
        weight = ctypes.create_string_buffer(to_bytes(WEIGHT, "float32"))
        spec = lib.Spec(rows=N, cols=K, dtype=lib.DTYPES["float32"],
                        weight=ctypes.addressof(weight))
        lib.check(lib.load().bl_linear_stack_create(byref(lib.Options(device=cuda.device)), 1,
                                                    byref(spec), byref(stack)))
        x, y = (lib.Tensor(cuda.put(T * width, "float32"), lib.DTYPES["float32"])
                for width in (K, N))
        call = lib.Call(size_bytes=ctypes.sizeof(lib.Call), T=T, x=x, y=y)
        layer = lib.load().bl_linear_stack_layer(stack, 0)
        with self.assertRaisesRegex(ValueError, "x is F32, this device takes BF16"):
            lib.check(lib.load().bl_linear_call_forward(layer, cuda.stream, byref(call)))
        with self.assertRaisesRegex(ValueError, "call is NULL"):
            lib.check(lib.load().bl_linear_call_forward(layer, cuda.stream, None))
        lib.load().bl_linear_stack_destroy(stack)
        cuda.close()


if __name__ == "__main__":
    unittest.main()
