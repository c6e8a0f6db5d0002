# SPDX-License-Identifier: Apache-2.0
"""A rank of test_processes.py: trains a model over a sharded base and prints its losses, exactly.
ORDERS: calls layers of equal size in an order of its own and prints the error. DDP: trains under
DistributedDataParallel on its share of a batch, compares with one process that has the batch.

usage: torchrun ... sharded.py ALONE|SHARDED|ORDERS|DDP TIER RATIO DIR [VICTIM]
"""
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import ballast.torch as bt

group, tier, ratio, folder = sys.argv[1:5]
victim = int(sys.argv[5]) if len(sys.argv) > 5 else -1
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)


def call_in_an_own_order():
    """What rank 1 and the others raise, where it calls layer 2 and they call layer 1."""
    layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
    base = bt.Base(format="fp8_row", tier=tier, offload_ratio=float(ratio), dir=folder, threads=1,
                   shard_group="world", ring_depth=1)
    bt.convert(layers, base=base, lora=bt.LoRA(r=4))
    try:
        for index in (0, 2, 1, 3) if rank == 1 else (0, 1, 2, 3):
            layers[index](torch.ones(3, 32))
    except RuntimeError as failure:
        return str(failure)
    return "none"


def train_in_parallel():
    """The largest relative difference of A and B after four steps, and what they are here: on its
    rows of the batch over the sharded base under DDP, and on all rows over a base of its own."""
    def make(shard_group):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(70, 130), nn.LayerNorm(130), nn.ReLU(), nn.Linear(130, 8))
        bt.convert(model, base=bt.Base(format="fp8_row", tier=tier, offload_ratio=float(ratio),
                                       dir=folder, threads=1, shard_group=shard_group),
                   lora=bt.LoRA(r=4))
        model[1].requires_grad_(True)  # trained beside A and B
        return model

    def train(model, rows):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            optimizer.step()

    batch, size = torch.randn(12, 70), dist.get_world_size()
    mine, alone = make("world"), make(None)
    train(nn.parallel.DistributedDataParallel(mine), batch[rank::size])
    train(alone, batch)
    pairs = [(p, q) for p, q in zip(mine.parameters(), alone.parameters()) if p.requires_grad]
    return {"error": max(((p - q).norm() / q.norm()).item() for p, q in pairs),
            "weights": [p.detach().sum().item().hex() for p, _ in pairs]}


if group == "DDP":
    os.write(1, (json.dumps(train_in_parallel()) + "\n").encode())
    dist.barrier()
    sys.exit(0)
if group == "ORDERS":
    os.write(1, (json.dumps({"error": call_in_an_own_order()}) + "\n").encode())
    dist.barrier()
    sys.exit(0)
model = nn.Sequential(nn.Linear(70, 130), nn.ReLU(), nn.Linear(130, 90), nn.ReLU(), nn.Linear(90, 8))
base = bt.Base(format="fp8_block", tier=tier, offload_ratio=float(ratio), dir=folder, threads=1,
               shard_group="world" if group == "SHARDED" else None)
bt.convert(model, base=base, lora=bt.LoRA(r=4, dropout=0.1))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
x, losses = torch.randn(12, 70), []
for step in range(4):
    if rank == victim and step == 2:
        Path(folder, "killed").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item().hex())


def call_from_two_threads(stack):
    """What a thread's call raises during the other's, over a sharded base."""
    raised = []

    def call():
        try:
            model(x)
        except RuntimeError as failure:
            raised.append(str(failure))
    with stack.use():
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    return raised


stack = model[0].frozen.stack
if group == "SHARDED" and dist.get_world_size() > 1:
    raised = call_from_two_threads(stack)
    assert len(raised) == 1 and "two threads at once" in raised[0], raised
line = json.dumps({"losses": losses, "stats": bt.stats(model)}) + "\n"
os.write(1, line.encode())  # whole: ranks share torchrun's pipe
dist.barrier()
stack.close()
