#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The opponent: LoRA fine-tuning speed of PyTorch + transformers + PEFT on an fp32 or bf16 base, with or without activation checkpointing.

usage: lora_bench.py MODEL_DIR [--batch 1] [--sequence 512] [--steps 5] [--warmup 2] [--r 16] [--threads N] [--device cpu|cuda]
                     [--rows FILE.jsonl] [--full]

A step is forward, backward (with activation checkpointing it recomputes the forward), clipping and AdamW on random tokens, all labels
counted; --full trains every parameter instead, with torch's fused AdamW: weights, gradients and moments are fp32, and --dtype bfloat16
computes under autocast. --rows takes the tokens from there instead ({"input_ids": [...]}, in order). Prints one JSON line: tokens_per_s
is that of the median step. README.md says how to compare, and how to have an idle machine's number.
"""
import argparse
import json
import math
import os
import platform
import resource
import statistics
import time

os.environ['HF_HUB_OFFLINE'] = '1'
import peft
import torch
import transformers
from transformers import AutoModelForCausalLM

TARGETS = ['q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj']


def load(a):
    key = 'dtype' if int(transformers.__version__.split('.')[0]) >= 5 else 'torch_dtype'
    model = AutoModelForCausalLM.from_pretrained(a.model, attn_implementation=a.attention, **{key: torch.float32 if a.full else getattr(torch, a.dtype)})
    model.config.use_cache = False
    model = model.to(a.device)
    if not a.full:
        model = peft.get_peft_model(model, peft.LoraConfig(r=a.r, lora_alpha=2 * a.r, lora_dropout=0.0,
                                                           target_modules=TARGETS, task_type='CAUSAL_LM'))
    if a.checkpointing != 'off':
        reentrant = a.checkpointing == 'reentrant'
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': reentrant})
        model.enable_input_require_grads()
    return model.train()


def sizes(model):
    """Parameters of the projections, of the head, and those that are trained."""
    base = model.get_base_model() if hasattr(model, 'get_base_model') else model
    named = list(base.named_parameters())
    ends = tuple(t + '.base_layer.weight' for t in TARGETS) + tuple(t + '.weight' for t in TARGETS)
    projections = sum(p.numel() for n, p in named if n.endswith(ends))
    return projections, base.get_output_embeddings().weight.numel(), sum(p.numel() for _, p in named if p.requires_grad)


def read_rows(a):
    if not a.rows:
        return None
    with open(a.rows) as file:
        return [json.loads(line)['input_ids'] for line in file]


def timed_steps(model, a):
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=a.full or None)
    generator = torch.Generator().manual_seed(0)
    seconds, cpu_seconds, losses = [], [], []
    rows = read_rows(a)
    for step in range(a.warmup + a.steps):
        ids = torch.randint(model.config.vocab_size, (a.batch, a.sequence), generator=generator)
        if rows:
            ids = torch.tensor(rows[step * a.batch:(step + 1) * a.batch])
        ids = ids.to(a.device)
        start, cpu_start = time.perf_counter(), time.process_time()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(a.device, torch.bfloat16, enabled=a.full and a.dtype == 'bfloat16'):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(loss.item())                           # waits for the device, too
        if a.device == 'cuda':
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
    if not all(map(math.isfinite, losses)) or not all(p.grad is not None for p in parameters):
        raise SystemExit('a loss is not finite, or a tensor got no gradient: nothing was measured')
    return seconds[a.warmup:], cpu_seconds[a.warmup:], losses


def arguments():
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    p.add_argument('model', metavar='MODEL_DIR')
    p.add_argument('--batch', type=int, default=1)
    p.add_argument('--sequence', type=int, default=512)
    p.add_argument('--steps', type=int, default=5)
    p.add_argument('--warmup', type=int, default=2)
    p.add_argument('--r', type=int, default=16)
    p.add_argument('--full', action='store_true', help='every parameter is trained')
    p.add_argument('--threads', type=int, default=len(os.sched_getaffinity(0)), help='of PyTorch itself; default: all cores')
    p.add_argument('--rows', help='JSON lines with input_ids, at least batch x (warmup + steps) of them; default: random tokens')
    p.add_argument('--device', default='cpu')
    p.add_argument('--dtype', default='float32', choices=('float32', 'bfloat16'))
    p.add_argument('--attention', default='eager', choices=('eager', 'sdpa'), help='sdpa needs torch 2.1.1 or newer')
    p.add_argument('--checkpointing', default='reentrant', choices=('non_reentrant', 'reentrant', 'off'))
    return p.parse_args()


def main():
    a = arguments()
    load_before = os.getloadavg()[0]
    torch.set_num_threads(a.threads)
    model = load(a)
    projections, head, adapter = sizes(model)
    seconds, cpu_seconds, losses = timed_steps(model, a)
    tokens, median = a.batch * a.sequence, statistics.median(seconds)
    # Frozen weights: forward and dx, 2 FLOPs a parameter each, trained ones have dW, too; checkpointing runs the projections
    # forward a second time.
    flops = tokens * (projections * (4 if a.checkpointing == 'off' else 6) + head * 4 + (2 * (projections + head) if a.full else 0))
    print(json.dumps({
        'bench': 'pytorch-full' if a.full else 'pytorch-lora', 'model': os.path.basename(os.path.normpath(a.model)), 'tokens_per_s': tokens / median,
        'cpu_s_median': statistics.median(cpu_seconds), 'step_s_median': median, 'step_s_min': min(seconds), 'step_s_max': max(seconds), 'steps': a.steps, 'warmup': a.warmup,
        'base_matmul_gflops': flops / median / 1e9, 'batch': a.batch, 'sequence': a.sequence, 'r': a.r, 'dtype': a.dtype,
        'device': a.device, 'threads': torch.get_num_threads(), 'attention': a.attention, 'checkpointing': a.checkpointing,
        'projection_parameters': projections, 'head_parameters': head, 'adapter_parameters': adapter,
        'adapter_dtype': str(next(p.dtype for p in model.parameters() if p.requires_grad)).split('.')[-1],
        'first_loss': losses[0], 'last_loss': losses[-1],
        'peak_rss_mib': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        'load_average_before': load_before, 'machine': platform.machine(), 'cores': len(os.sched_getaffinity(0)),
        'versions': {'torch': torch.__version__, 'transformers': transformers.__version__, 'peft': peft.__version__}}))


main()
