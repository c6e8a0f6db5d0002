#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes tests/golden/train/best.json: sequences of validation losses, and what transformers makes of them.

Each loss is an evaluation after one more step. EarlyStoppingCallback.on_evaluate sees it first, then Trainer._determine_best_metric, as in
Trainer._maybe_log_save_evaluate. `step` and `loss` are the best ones and `stale` is the callback's counter after the last evaluation, which is
the one that ended the run, or the last of the sequence. The losses have two digits, so some are equal and some differ by the threshold.

Made with transformers 5.23.0: python make_best.py [OUT]
"""
import json
import os
import random
import sys
from types import SimpleNamespace

import transformers
from transformers import EarlyStoppingCallback, Trainer, TrainerControl, TrainerState
from transformers.trainer_utils import SaveStrategy

HERE = os.path.dirname(os.path.abspath(__file__))
OUT = os.path.join(HERE, "..", "..", "..", "tests", "golden", "train", "best.json")


def run(losses, patience, threshold):
    args = SimpleNamespace(metric_for_best_model="loss", greater_is_better=False, save_strategy=SaveStrategy.STEPS)
    trainer = SimpleNamespace(args=args, state=TrainerState())
    control = TrainerControl()
    callback = EarlyStoppingCallback(early_stopping_patience=patience, early_stopping_threshold=threshold)
    for step, loss in enumerate(losses, 1):
        trainer.state.global_step = step
        metrics = {"eval_loss": loss}
        callback.on_evaluate(args, trainer.state, control, metrics)
        Trainer._determine_best_metric(trainer, metrics, None)
        if control.should_training_stop:
            break
    return {"losses": losses, "patience": patience, "threshold": threshold, "evaluations": step, "step": trainer.state.best_global_step,
            "loss": trainer.state.best_metric, "stale": callback.early_stopping_patience_counter}


def main():
    draw = random.Random(7)
    cases = []
    for i in range(48):
        losses, loss = [], 2.0
        for _ in range(12):
            losses.append(round(loss, 2))
            loss += draw.choice([-0.25, -0.06, -0.05, 0.0, 0.05, 0.1])
        cases.append(run(losses, 1 + i % 4, [0.0, 0.0625, 0.25][i // 4 % 3]))
    with open(sys.argv[1] if len(sys.argv) > 1 else OUT, "w") as f:
        json.dump({"transformers": transformers.__version__, "cases": cases}, f)
        f.write("\n")


if __name__ == "__main__":
    main()
