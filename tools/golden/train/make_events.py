#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""An event file by TensorBoard's own messages and writer -> tests/golden/train/events.tfevents.

Usage: make_events.py OUTPUT      (written with tensorboard 2.21.0, protobuf 7.36.2)

test_train_tensorboard writes the same events with Ballast and compares the bytes.
"""
import sys

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.record_writer import RecordWriter


def event(step, wall_s, **scalars):
    values = [summary_pb2.Summary.Value(tag=tag.replace("__", "/"), simple_value=value) for tag, value in scalars.items()]
    return event_pb2.Event(wall_time=wall_s, step=step, summary=summary_pb2.Summary(value=values))


start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
events = [
    event_pb2.Event(wall_time=1.75e9, file_version="brain.Event:2"),
    event_pb2.Event(wall_time=1.75e9, step=301, session_log=start),
    event(301, 1.75e9 + 0.5, train__loss=2.25, train__grad_norm=0.1, train__learning_rate=2e-4),
    event(2**40, 1.75e9 + 1, eval__loss=float("nan"), eval__runtime=0.0),
    event(0, 1.75e9, train__zero=-1e30),
    event(7, 1.75e9, **{f"train__{'x' * 33}{i}": i for i in range(8)}),  # tags of 40 bytes
]
with open(sys.argv[1], "wb") as file:
    writer = RecordWriter(file)
    for e in events:
        writer.write(e.SerializeToString())
    writer.flush()
