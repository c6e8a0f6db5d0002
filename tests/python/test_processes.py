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


def torchrun(n_ranks, *arguments):
    """A job of torchrun on this host: (its exit status, the JSON lines of its ranks, stderr)."""
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone",
                           f"--nproc_per_node={n_ranks}", str(RANK), *arguments],
                          env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=600,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    lines = [json.loads(line) for line in done.stdout.decode().splitlines() if line[:1] == "{"]
    return done.returncode, lines, done.stderr.decode()


def spawn(n_ranks, *arguments):
    """The same processes without torchrun, which would end all when one dies."""
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


class Processes(unittest.TestCase):
    def results(self, n_ranks, *arguments):
        status, lines, error = torchrun(n_ranks, *arguments)
        self.assertEqual((status, len(lines)), (0, n_ranks), error[-2000:])
        return lines

    def test_bits_of_one(self):
        with tempfile.TemporaryDirectory() as pages:
            want = self.results(1, "ALONE", "device", "0", pages)[0]
            self.assertEqual(len(set(want["losses"])), 4)
            for n_ranks, tier in ((2, "device"), (2, "host"), (2, "disk"), (4, "host"),
                                  (4, "disk")):
                with self.subTest(n_ranks=n_ranks, tier=tier):
                    ratio = "0" if tier == "device" else "1"
                    for got in self.results(n_ranks, "SHARDED", tier, ratio, pages):
                        self.assertEqual(got["losses"], want["losses"])
                        here = got["stats"]["frozen_bytes" if tier == "device" else f"{tier}_bytes"]
                        alone = want["stats"]["frozen_bytes"]
                        self.assertLess(here, alone / n_ranks + 16384)  # of pages: whole sectors

    def test_layers_in_different_orders(self):
        """Layers of equal size on ranks that call them in different orders: an error that names
        both, on every rank, instead of another layer's rows."""
        for n_ranks, tier, ratio in ((2, "device", "0"), (3, "host", "1")):
            with self.subTest(n_ranks=n_ranks, tier=tier), tempfile.TemporaryDirectory() as pages:
                for got in self.results(n_ranks, "ORDERS", tier, ratio, pages):
                    self.assertIn("ranks 0 and 1 call different collectives", got["error"])
                    self.assertIn("all_gather of layer 1,", got["error"])
                    self.assertIn("all_gather of layer 2,", got["error"])

    def test_data_parallel(self):
        """DistributedDataParallel around a model over a sharded base: one process's A, B and norm
        after four steps on the whole batch (sums of at most 130 terms in fp32, in another order),
        and the same ones on each rank."""
        with tempfile.TemporaryDirectory() as pages:
            for n_ranks, tier, ratio in ((2, "host", "1"), (3, "device", "0")):
                with self.subTest(n_ranks=n_ranks, tier=tier):
                    lines = self.results(n_ranks, "DDP", tier, ratio, pages)
                    self.assertEqual(len({str(line["weights"]) for line in lines}), 1)
                    self.assertLess(max(line["error"] for line in lines), 1e-5)

    def killed_s(self, folder):
        """When the victim killed itself."""
        return float(Path(folder, "killed").read_text())

    def test_killed_rank(self):
        with tempfile.TemporaryDirectory() as pages:
            ranks = spawn(3, "SHARDED", "host", "1", pages, "1")
            for survivor in (ranks[0], ranks[2]):
                _, error = survivor.communicate(timeout=300)
                self.assertLess(time.time() - self.killed_s(pages), 20)
                self.assertNotEqual(survivor.returncode, 0)
                self.assertIn("RuntimeError", error.decode())
            ranks[1].communicate()

    def test_killed_rank_under_torchrun(self):
        with tempfile.TemporaryDirectory() as pages:
            status, lines, error = torchrun(2, "SHARDED", "host", "1", pages, "1")
            self.assertLess(time.time() - self.killed_s(pages), 20)
            self.assertNotEqual(status, 0)
            self.assertEqual(lines, [])
            self.assertIn("Signal 9 (SIGKILL)", error)


if __name__ == "__main__":
    unittest.main()
