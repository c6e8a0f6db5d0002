# SPDX-License-Identifier: Apache-2.0
"""Processes of torchrun over one sharded base: the bits of one that has all of it; a killed rank."""
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

try:
    import torch  # noqa: F401
except ImportError as missing:
    raise unittest.SkipTest(str(missing))

RANK = Path(__file__).with_name("sharded.py")


def start(n_ranks, *arguments):
    """The processes of a job, as torchrun starts them."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    ranks = []
    for rank in range(n_ranks):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(n_ranks), "OMP_NUM_THREADS": "1",
               "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}
        ranks.append(subprocess.Popen([sys.executable, str(RANK), *arguments], env=env,
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    return ranks


def results(ranks):
    out = []
    for rank in ranks:
        text, error = rank.communicate(timeout=300)
        if rank.returncode != 0:
            raise AssertionError(error.decode()[-2000:])
        out.append(json.loads(text))
    return out


class Processes(unittest.TestCase):
    def test_bits_of_one(self):
        with tempfile.TemporaryDirectory() as pages:
            want = results(start(1, "ALONE", "device", "0", pages))[0]
            self.assertEqual(len(set(want["losses"])), 4)
            for n_ranks, tier in ((2, "device"), (2, "host"), (2, "disk"), (4, "disk")):
                with self.subTest(n_ranks=n_ranks, tier=tier):
                    ratio = "0" if tier == "device" else "1"
                    for got in results(start(n_ranks, "SHARDED", tier, ratio, pages)):
                        self.assertEqual(got["losses"], want["losses"])
                        here = got["stats"]["frozen_bytes" if tier == "device" else f"{tier}_bytes"]
                        alone = want["stats"]["frozen_bytes"]
                        self.assertLess(here, alone / n_ranks + 16384)  # of pages: whole sectors

    def test_killed_rank(self):
        with tempfile.TemporaryDirectory() as pages:
            ranks = start(2, "SHARDED", "host", "1", pages, "1")
            ranks[1].wait(timeout=300)
            killed = time.time()
            _, error = ranks[0].communicate(timeout=60)
            self.assertLess(time.time() - killed, 20)
            self.assertNotEqual(ranks[0].returncode, 0)
            self.assertIn("RuntimeError", error.decode())


if __name__ == "__main__":
    unittest.main()
