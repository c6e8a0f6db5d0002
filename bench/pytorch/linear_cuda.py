#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""linear_cuda.py [--model llama3.1-405b] [--tokens 4096 ...] [--lora_r 16] [--runs 10] [--device cuda]

PyTorch on the shapes of `ballast bench linear --device cuda`, one JSON line per matrix and pass:
  lora_bf16      y = x W^T + s (x A^T) B^T in bf16, W resident in bf16, as peft computes it (two more GEMMs and an addition)
  lora_fp8       the same with W held as E4M3 codes and a scale a row, decoded to bf16 in every call
  scaled_mm      torch._scaled_mm on E4M3 operands with a scale a row on both, base only: the fastest FP8 product PyTorch has
Backward computes dx, dA and dB. Times are the median of --runs, by CUDA events. Without PyTorch or a GPU it says "skipped" and ends with 77.
--device cpu runs the first two on the CPU, to test this file.
"""
import argparse
import json
import statistics
import sys
import time

MATRICES = {
    "llama3.1-405b": {"qkv": (18432, 16384), "o": (16384, 16384), "gate_up": (106496, 16384), "down": (16384, 53248)},
    "llama3.1-70b": {"qkv": (10240, 8192), "o": (8192, 8192), "gate_up": (57344, 8192), "down": (8192, 28672)},
    "tiny": {"qkv": (96, 64), "o": (64, 64)},
}


def skip(reason):
    print(f"skipped: {reason}", file=sys.stderr)
    sys.exit(77)


try:
    import torch
except ImportError:
    skip("PyTorch is not installed")


class Clock:
    """The seconds of fn(), median of `runs` after two to warm up."""

    def __init__(self, device, runs):
        self.device, self.runs = device, runs

    def __call__(self, fn):
        times = []
        for run in range(self.runs + 2):
            if self.device == "cuda":
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                fn()
                end.record()
                end.synchronize()
                seconds = begin.elapsed_time(end) * 1e-3
            else:
                start = time.perf_counter()
                fn()
                seconds = time.perf_counter() - start
            if run >= 2:
                times.append(seconds)
        return statistics.median(times)


def quantize_rows(w):
    """E4M3 codes and scales with codes * scale[:, None] ~ w; None where this PyTorch has no such type."""
    if not hasattr(torch, "float8_e4m3fn"):
        return None
    scale = (w.abs().amax(dim=1).float() / 448.0).clamp_min(1e-12)
    return (w.float() / scale[:, None]).to(torch.float8_e4m3fn), scale


def lora_step(x, dy, weight, a, b, s, backward):
    """weight: a function that gives W in bf16."""
    w = weight()
    if not backward:
        return torch.nn.functional.linear(x, w) + s * torch.nn.functional.linear(torch.nn.functional.linear(x, a), b)
    dh = s * (dy @ b)
    return dy @ w + dh @ a, dh.t() @ x, (s * dy).t() @ (x @ a.t())


def bench_matrix(args, clock, name, rows, cols, tokens):
    torch.manual_seed(1)
    kind = dict(device=args.device, dtype=torch.bfloat16)
    x, dy = torch.randn(tokens, cols, **kind), torch.randn(tokens, rows, **kind)
    w = torch.randn(rows, cols, **kind) * 0.02
    a, b = torch.randn(args.lora_r, cols, **kind), torch.randn(rows, args.lora_r, **kind)
    codes = quantize_rows(w)

    def report(what, backward, seconds):
        flops = 2.0 * tokens * rows * cols
        print(json.dumps({"bench": "pytorch linear", "what": what, "model": args.model, "matrix": name, "tokens": tokens,
                          "lora_r": args.lora_r, "pass": "backward" if backward else "forward", "seconds": seconds,
                          "tflops": flops / seconds * 1e-12, "torch": torch.__version__}), flush=True)

    for backward in (False, True):
        report("gemm_bf16", backward, clock(lambda: dy @ w if backward else x @ w.t()))
        report("lora_bf16", backward, clock(lambda: lora_step(x, dy, lambda: w, a, b, 2.0, backward)))
        if codes is None:
            continue
        q, scale = codes
        decode = lambda: (q.to(torch.bfloat16) * scale[:, None].to(torch.bfloat16))
        report("lora_fp8", backward, clock(lambda: lora_step(x, dy, decode, a, b, 2.0, backward)))
    if args.device == "cuda" and codes is not None and hasattr(torch, "_scaled_mm"):
        xq, x_scale = quantize_rows(x)
        product = lambda: torch._scaled_mm(xq, codes[0].t(), scale_a=x_scale[:, None], scale_b=codes[1][None, :],
                                           out_dtype=torch.bfloat16, use_fast_accum=False)
        try:
            report("scaled_mm", False, clock(product))
        except RuntimeError as error:
            print(f"skipped: _scaled_mm with a scale a row: {error}", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MATRICES, default="llama3.1-405b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 8192])
    parser.add_argument("--lora_r", type=int, default=16)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        skip("PyTorch sees no GPU")
    with torch.no_grad():
        for tokens in args.tokens:
            for name, (rows, cols) in MATRICES[args.model].items():
                bench_matrix(args, Clock(args.device, args.runs), name, rows, cols, tokens)


if __name__ == "__main__":
    main()
