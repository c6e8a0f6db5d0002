#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whether TensorBoard's reader finds in a directory of event files the scalars that metrics.jsonl has.

Usage: check_events.py EVENTS_DIR METRICS_JSONL      (exit code 77: no TensorBoard)
"""
import json
import sys

try:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
except ImportError:
    print(f"skipped: {sys.executable} has no TensorBoard: pip install tensorboard 'setuptools<81', or set BALLAST_PYTHON")
    sys.exit(77)

TAGS = {"loss": "train/loss", "grad_norm": "train/grad_norm", "learning_rate": "train/learning_rate", "epoch": "train/epoch",
        "tokens_per_s": "train/tokens_per_second", "eval_loss": "eval/loss", "eval_s": "eval/runtime"}

accumulator = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
accumulator.Reload()
found = {tag: {e.step: e.value for e in accumulator.Scalars(tag)} for tag in accumulator.Tags()["scalars"]}
expected = {}
with open(sys.argv[2]) as file:
    for line in map(json.loads, file):
        for key, tag in TAGS.items():
            if key in line:
                expected.setdefault(tag, {})[line["step"]] = line[key]

failed = sorted(found) != sorted(expected)
if failed:
    print(f"tags {sorted(found)}, expected {sorted(expected)}")
for tag, steps in expected.items():
    ours = found.get(tag, {})
    if sorted(ours) != sorted(steps):
        failed = print(f"{tag}: steps {sorted(ours)}, expected {sorted(steps)}") or True
    # metrics.jsonl has 12 digits of losses, 3 decimals of the tokens per second and of the duration; events are float32.
    bad = [s for s in steps if s in ours and abs(ours[s] - steps[s]) > 1e-6 * abs(steps[s]) + (6e-4 if tag[-4:] == "time" else 0)]
    if bad:
        failed = print(f"{tag}: {[(s, ours[s], steps[s]) for s in bad[:3]]}") or True
print(f"{sum(len(s) for s in expected.values())} scalars of {len(expected)} tags")
sys.exit(bool(failed))
