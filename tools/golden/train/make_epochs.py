#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Steps, rows per step, learning rates and epochs of transformers' Trainer -> tests/golden/train/epochs.json.

Usage: make_epochs.py OUTPUT.json      (written with transformers 5.23.0, torch 2.15.0, one process on the CPU)
"""
import json
import sys
import tempfile

import torch
import transformers


class Model(torch.nn.Module):
    """A loss that depends on one weight; it notes the rows of every forward pass."""

    def __init__(self, rows):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.rows = rows

    def forward(self, row, labels=None):
        self.rows.append(len(row))
        return {"loss": (self.weight * row.float().mean()).sum()}


class Log(transformers.TrainerCallback):
    def __init__(self, rows):
        self.rows, self.steps, self.rates = rows, [], []

    def on_step_begin(self, args, state, control, **more):
        self.rows.clear()

    def on_pre_optimizer_step(self, args, state, control, lr_scheduler=None, **more):
        self.steps.append(sum(self.rows))
        self.rates.append(lr_scheduler.get_last_lr()[0])


def run(n_rows, batch, accumulation, epochs, max_steps, schedule, warmup):
    rows = []
    log = Log(rows)
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            output_dir=folder, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation,
            num_train_epochs=epochs, max_steps=max_steps, lr_scheduler_type=schedule, warmup_steps=warmup,
            learning_rate=0.001, report_to=[], save_strategy="no", logging_strategy="no", use_cpu=True,
            disable_tqdm=True, remove_unused_columns=False)
        data = [{"row": torch.tensor(i), "labels": torch.tensor(i)} for i in range(n_rows)]
        transformers.Trainer(model=Model(rows), args=args, train_dataset=data, callbacks=[log]).train()
    return {"rows": n_rows, "batch": batch, "accumulation": accumulation, "epochs": epochs, "max_steps": max_steps,
            "schedule": schedule, "warmup_steps": warmup, "step_rows": log.steps, "rates": log.rates}


CASES = [
    (53, 4, 3, 2, -1, "cosine", 2), (53, 4, 3, 2, -1, "linear", 0), (53, 4, 3, 1.5, -1, "linear", 1),
    (48, 4, 3, 2, -1, "cosine", 0), (5, 4, 3, 3, -1, "linear", 0), (1, 8, 1, 2, -1, "constant", 0),
    (49, 4, 3, 2, -1, "cosine", 3), (53, 4, 3, 1, 12, "cosine", 2), (37, 2, 5, 0.3, -1, "linear", 0),
]
json.dump({"transformers": transformers.__version__, "torch": torch.__version__,
           "cases": [run(*case) for case in CASES]}, open(sys.argv[1], "w"), indent=1)
