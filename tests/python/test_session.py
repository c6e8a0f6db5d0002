# SPDX-License-Identifier: Apache-2.0
"""Sessions: the bits of `ballast train`, tenants in any order, states after a kill, DPO, misuses, type hints."""
import concurrent.futures
import hashlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path

import ballast

SOURCE = Path(__file__).resolve().parents[2]
GOLDEN = SOURCE / "tests" / "golden"
MODEL = GOLDEN / "train" / "models" / "tiny-gqa"
TOKENS = GOLDEN / "train" / "tokens" / "tiny-more.jsonl"
PAIRS = GOLDEN / "preference" / "tokens" / "pairs.jsonl"
BASE = {"device": "cpu", "threads": 1, "max_seq_length": 64, "base_format": "fp8_row"}
STEPS, ROWS = 4, 3
# Of four tenants: what create_lora has of each.
TENANTS = ({"r": 8, "seed": 1}, {"r": 4, "seed": 2, "targets": ["q_proj", "down_proj"]},
           {"r": 16, "alpha": 4, "seed": 3, "dropout": 0.1}, {"r": 2, "seed": 4})


def row_of(tokens):
    ids, labels = tokens["input_ids"], tokens.get("labels", tokens["input_ids"])
    return {"input_ids": ids, "targets": labels[1:] + [-100]}


def read_rows(path=TOKENS):
    return [row_of(json.loads(line)) for line in path.read_text().splitlines()]


def train(output, **keys):
    """`ballast train` on the rows in their order, STEPS steps of ROWS rows."""
    keys = {"model_name_or_path": MODEL, "train_file": TOKENS, "output_dir": output, "data_format": "tokens",
            "shuffle": False, "max_steps": STEPS, "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": ROWS, "learning_rate": 0.01, "lr_scheduler_type": "constant", **BASE, **keys}
    words = [f"--{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in keys.items()]
    subprocess.run([str(ballast.program()), "train", *words], check=True, stderr=subprocess.DEVNULL)


def train_tenant(output, r=8, alpha=8, seed=42, dropout=0, targets=("all-linear",)):
    train(output, lora_r=r, lora_alpha=alpha, seed=seed, lora_dropout=dropout, lora_target_modules=",".join(targets))
    return digest(output)


def digest(folder):
    return hashlib.md5(Path(folder, "adapter_model.safetensors").read_bytes()).hexdigest()


def step(adapter, rows, index, lr=0.01):
    out = adapter.forward_backward(rows[index * ROWS:(index + 1) * ROWS])
    adapter.optim_step(lr)
    return out


class Case(unittest.TestCase):
    def setUp(self):
        work = tempfile.TemporaryDirectory()
        self.addCleanup(work.cleanup)
        self.work = Path(work.name)
        self.rows = read_rows()

    def session(self, **keys):
        session = ballast.Session(MODEL, **{**BASE, **keys})
        self.addCleanup(session.close)
        return session


class Bits(Case):
    def test_steps_and_outputs(self):
        train(self.work / "train")
        losses = [json.loads(line)["loss"] for line in (self.work / "train" / "metrics.jsonl").read_text().splitlines()
                  if "grad_norm" in line]
        session = self.session()
        adapter = session.create_lora(r=8, alpha=8, seed=42)
        for i in range(STEPS):
            before = adapter.forward(self.rows[i * ROWS:(i + 1) * ROWS])
            out = step(adapter, self.rows, i)
            self.assertAlmostEqual(out.loss, losses[i], delta=1e-10)
            self.assertEqual([list(x) for x in out.logprobs], [list(x) for x in before])
            total = -sum(sum(map(float, x)) for x in out.logprobs)
            self.assertAlmostEqual(total / out.n_targets, out.loss, delta=1e-5)
            self.assertEqual(out.weight_sum, out.n_targets)
        adapter.save_weights(self.work / "weights")
        self.assertEqual(digest(self.work / "weights"), digest(self.work / "train"))

    def test_sums_of_calls(self):
        """Gradients add up: a sum over two calls has the bits of one call."""
        session = self.session()
        for name, calls in (("one", [self.rows[:4]]), ("two", [self.rows[:1], self.rows[1:4]])):
            adapter = session.create_lora(dropout=0.2)
            for rows in calls:
                adapter.forward_backward(rows, reduction="sum")
            adapter.optim_step(lr=0.01)
            adapter.save_weights(self.work / name)
        self.assertEqual(digest(self.work / "one"), digest(self.work / "two"))

    def test_importance_sampling(self):
        """Its gradient is that of a custom loss with the same formula; on policy that of cross entropy with weights."""
        rows = [dict(row, advantages=[0.5 - 0.1 * t for t in range(len(row["input_ids"]))]) for row in self.rows[:2]]
        session = self.session()
        policy = session.create_lora()
        q = policy.forward(rows_without(rows, "advantages"))
        sampled = [dict(row, logprobs=[x + 0.1 for x in map(float, q[i])]) for i, row in enumerate(rows)]
        out = policy.forward_backward(sampled, loss="importance_sampling", reduction="sum")
        expected = -sum(math.exp(-0.1) * row["advantages"][t] for row in rows for t in range(len(row["targets"]))
                        if row["targets"][t] >= 0)
        self.assertAlmostEqual(out.loss, expected, delta=1e-5)
        norm = policy.optim_step(lr=0)

        def ratio(logp):
            terms = [[-math.exp(x - s) * a for x, s, a in zip(map(float, p), row["logprobs"], row["advantages"])]
                     for p, row in zip(logp, sampled)]
            masked = [[g if t >= 0 else 0.0 for g, t in zip(g, row["targets"])] for g, row in zip(terms, sampled)]
            return sum(map(sum, masked)), masked
        custom = policy.forward_backward_custom(rows_without(rows, "advantages"), ratio, arrays="numpy")
        self.assertAlmostEqual(custom.loss, out.loss, delta=1e-5)
        self.assertAlmostEqual(policy.optim_step(lr=0), norm, delta=1e-6 * norm)
        weighted = [{**row, "weights": [math.exp(-0.1) * a for a in row["advantages"]]} for row in rows]
        policy.forward_backward(rows_without(weighted, "advantages"), reduction="sum")
        self.assertAlmostEqual(policy.optim_step(lr=0), norm, delta=1e-6 * norm)


def rows_without(rows, key):
    return [{name: value for name, value in row.items() if name != key} for row in rows]


class Tenants(Case):
    def one_order(self, session, rng, expected):
        adapters = [session.create_lora(**keys) for keys in TENANTS]
        todo = [[] for _ in adapters]
        for i in range(STEPS):
            for tenant, calls in enumerate(todo):
                rows = self.rows[i * ROWS:(i + 1) * ROWS]
                calls.append(lambda a=adapters[tenant], rows=rows: a.forward_backward_async(rows))
                # The last one's weights become too large after some step, and its losses NaN.
                lr = 1e30 if tenant == 3 else 0.01
                calls.append(lambda a=adapters[tenant], lr=lr: a.optim_step_async(lr))
        futures = [[] for _ in adapters]
        while any(todo):
            tenant = rng.choice([i for i, calls in enumerate(todo) if calls])
            futures[tenant].append(todo[tenant].pop(0)())
            if rng.random() < 0.3:
                concurrent.futures.wait(futures[tenant])
        concurrent.futures.wait([f for some in futures for f in some])
        self.assertIn("loss", " ".join(str(f.exception()) for f in futures[3] if f.exception()))
        for tenant in range(3):
            for future in futures[tenant]:
                future.result()
            folder = self.work / f"tenant-{tenant}"
            adapters[tenant].save_weights(folder)
            self.assertEqual(digest(folder), expected[tenant])
        for adapter in adapters:
            adapter.close()

    def test_20_orders(self):
        expected = [train_tenant(self.work / f"train-{i}", **keys) for i, keys in enumerate(TENANTS[:3])]
        for keys in ({}, {"offload_tier": "disk", "offload_ratio": 1, "offload_dir": self.work / "pages"}):
            session = self.session(**keys)
            for seed in range(10):
                with self.subTest(seed=seed, **keys):
                    self.one_order(session, random.Random(seed), expected)
            session.close()

    def test_waiting_requests_share_a_pass(self):
        session = self.session()
        first, second, third = [session.create_lora(seed=i) for i in range(3)]
        futures = []

        def fn(logp):  # while the session waits for it, two requests come
            futures.extend(a.forward_backward_async(self.rows[:2]) for a in (second, third))
            while peek["n_waiting"] < 2:
                time.sleep(0.002)
            return 0.0, [[0.0] * len(p) for p in logp]
        peek = Peek(session)
        first.forward_backward_custom(self.rows[:1], fn, arrays="numpy")
        concurrent.futures.wait(futures)
        self.assertEqual([f.exception() for f in futures], [None, None])
        self.assertEqual(peek["n_passes"], 2)

    def test_numpy_and_torch(self):
        session = self.session()
        plain = session.create_lora().forward(self.rows[:2])
        for module, convert in (("numpy", "array"), ("torch", "tensor")):
            try:
                make = getattr(__import__(module), convert)
            except ImportError:
                print(f"not tested: {module} is not installed")
                continue
            rows = [{key: make(value) for key, value in row.items()} for row in self.rows[:2]]
            found = session.create_lora().forward(rows)
            self.assertEqual([list(map(float, x)) for x in found], [list(map(float, x)) for x in plain])


class Peek(dict):
    """A session's numbers, also for a function that it waits for."""

    def __init__(self, session):
        super().__init__()
        self.pointer = session._handle.pointer

    def __missing__(self, key):
        out = ballast._library.SessionStats()
        library = ballast._library.load_session()
        ballast._library.check(library.bl_session_get_stats(self.pointer, out), library)
        return getattr(out, key)


class States(Case):
    CHILD = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from test_session import BASE, MODEL, ballast, read_rows, step
session = ballast.Session(MODEL, **BASE)
adapter = session.create_lora(r=8, dropout=0.1, seed=7)
rows = read_rows()
for i in range(4):
    step(adapter, rows, i)
    if i == 1:
        adapter.save_state(sys.argv[1])
os.kill(os.getpid(), signal.SIGKILL)
"""

    def test_resumes_after_a_kill(self):
        folder = Path(__file__).parent
        done = subprocess.run([sys.executable, "-c", self.CHILD, str(self.work / "state"), str(folder)],
                              stderr=subprocess.PIPE)
        self.assertEqual(done.returncode, -signal.SIGKILL, done.stderr.decode())
        session = self.session()
        whole, resumed = session.create_lora(r=8, dropout=0.1, seed=7), session.load(self.work / "state")
        for i in range(5):
            step(whole, self.rows, i)
        for i in range(2, 5):
            step(resumed, self.rows, i)
        for name, adapter in (("whole", whole), ("resumed", resumed)):
            adapter.save_weights(self.work / name)
        self.assertEqual(digest(self.work / "whole"), digest(self.work / "resumed"))
        resumed.save_state(self.work / "state")
        with self.assertRaisesRegex(RuntimeError, "base_format: fp8_row -> fp8_block"):
            self.session(base_format="fp8_block").load(self.work / "state")
        next((self.work / "state" / "step-2").glob("state-*")).unlink()
        session.load(self.work / "state").close()  # step-5
        resumed.forward_backward(self.rows[:1])
        with self.assertRaisesRegex(ValueError, "1 forward_backward calls wait for optim_step"):
            resumed.save_state(self.work / "state")

    def test_adapters_go_both_ways(self):
        """A written adapter starts another one, and its samples are those of `ballast generate`."""
        session = self.session()
        one = session.create_lora(r=4, seed=3)
        step(one, self.rows, 0, lr=0.5)
        one.save_weights(self.work / "one")
        other = session.create_lora(init_adapter=self.work / "one")
        self.assertEqual([list(x) for x in one.forward(self.rows[:2])], [list(x) for x in other.forward(self.rows[:2])])
        prompt = self.rows[0]["input_ids"][:5]
        found = subprocess.run([str(ballast.program()), "generate", "--model", str(MODEL), "--adapter",
                                str(self.work / "one"), "--input_ids", ",".join(map(str, prompt)), "--json",
                                "--max_new_tokens", "8", "--base_format", "fp8_row", "--device", "cpu",
                                "--temperature", "1", "--seed", "5"], check=True, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL)
        self.assertEqual(one.sample(prompt, max_tokens=8, temperature=1, seed=5), json.loads(found.stdout)["ids"])
        paged = self.session(offload_tier="disk", offload_ratio=1, offload_dir=self.work / "pages")
        again = paged.create_lora(init_adapter=self.work / "one")
        self.assertEqual(again.sample(prompt, max_tokens=8, temperature=1, seed=5), json.loads(found.stdout)["ids"])
        self.assertEqual([list(x) for x in again.forward(self.rows[:2])], [list(x) for x in one.forward(self.rows[:2])])


    def test_text(self):
        session = ballast.Session(SOURCE / "demo" / "base", device="cpu", threads=1, max_seq_length=32)
        self.addCleanup(session.close)
        adapter = session.create_lora()
        ids = session.encode("The cat")
        self.assertIn("The cat", session.decode(ids))
        text = adapter.sample("The cat", max_tokens=6, seed=2)
        self.assertEqual(text, session.decode(adapter.sample(ids, max_tokens=6, seed=2)))
        with self.assertRaisesRegex(ValueError, r"ids\[1\]"):
            session.decode([1, 10**6])
        with self.assertRaisesRegex(TypeError, "text"):
            session.encode(5)


class Dpo(Case):
    def test_equals_loss_type_sigmoid(self):
        beta, n_pairs, n_steps = 0.2, 4, 3
        train(self.work / "train", train_file=PAIRS, data_format="preference", loss_type="sigmoid", beta=beta,
              per_device_train_batch_size=n_pairs, gradient_accumulation_steps=1, max_steps=n_steps,
              max_seq_length=64)
        losses = [json.loads(line)["loss"] for line in (self.work / "train" / "metrics.jsonl").read_text().splitlines()
                  if "grad_norm" in line]
        pairs = [json.loads(line) for line in PAIRS.read_text().splitlines()]
        session = self.session(per_device_train_batch_size=2 * n_pairs)
        policy = session.create_lora(r=8, alpha=8, seed=42)
        rows = [row_of(pair[side]) for pair in pairs[:n_pairs * n_steps] for side in ("chosen", "rejected")]
        reference = [sum(map(float, x)) for x in policy.forward(rows)]  # B is 0
        for i in range(n_steps):
            first = 2 * n_pairs * i

            def dpo(logp):
                loss, gradient = 0.0, []
                for k in range(0, len(logp), 2):
                    ratio = [sum(map(float, logp[k + j])) - reference[first + k + j] for j in (0, 1)]
                    x = beta * (ratio[0] - ratio[1])
                    loss += math.log1p(math.exp(-x)) / n_pairs
                    slope = beta / (1 + math.exp(x)) / n_pairs
                    gradient += [[-slope] * len(logp[k]), [slope] * len(logp[k + 1])]
                return loss, gradient
            out = policy.forward_backward_custom(rows[first:first + 2 * n_pairs], dpo, arrays="numpy")
            policy.optim_step(lr=0.01)
            self.assertAlmostEqual(out.loss, losses[i], delta=1e-6)


class Trl(Case):
    def test_grpo_gradients(self):
        """The gradient of importance_sampling is that of TRL's GRPOTrainer (loss_type bnpo: a mean over tokens) on the
        same samples; each tensor within 1e-5 of its norm (fp32 against fp32)."""
        try:
            import torch
            from datasets import Dataset
            from peft import PeftModel
            from safetensors.torch import load_file
            from transformers import AutoModelForCausalLM, AutoTokenizer
            from trl import GRPOConfig, GRPOTrainer
        except ImportError as error:
            self.skipTest(str(error))
        model, prompt, length, scale = SOURCE / "demo" / "base", [5, 11, 23], 8, 1e3
        session = ballast.Session(model, device="cpu", threads=1, max_seq_length=32, base_format="stored",
                                  per_device_train_batch_size=4)
        self.addCleanup(session.close)
        policy = session.create_lora(r=4, alpha=8, seed=1)
        policy.forward_backward([{"input_ids": [1, 2, 3], "targets": [2, 3, 4]}])
        policy.optim_step(lr=0.05)  # B is not 0 any more
        policy.save_weights(self.work / "before")
        answers = [policy.sample(prompt, max_tokens=length, seed=i) for i in range(4)]
        advantages = [1.5, -0.5, -1.25, 0.25]
        rows = [{"input_ids": (prompt + answer)[:-1], "targets": [-100] * (len(prompt) - 1) + answer}
                for answer in answers]
        for row, q, advantage in zip(rows, policy.forward(rows), advantages):
            row.update(logprobs=q, advantages=[advantage] * len(q))
        out = policy.forward_backward(rows, loss="importance_sampling")
        # w - scale g: AdamW without moments, with an eps far above |g|.
        policy.optim_step(lr=scale * 1e18, betas=(0, 0), eps=1e18, max_grad_norm=0)
        policy.save_weights(self.work / "after")

        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        peft = PeftModel.from_pretrained(base, self.work / "before", is_trainable=True)
        config = GRPOConfig(output_dir=str(self.work / "trl"), loss_type="bnpo", beta=0.0, use_cpu=True, bf16=False,
                            report_to=[], per_device_train_batch_size=4, num_generations=4,
                            max_completion_length=length, gradient_checkpointing=False, disable_dropout=True)
        trainer = GRPOTrainer(model=peft, reward_funcs=[lambda completions, **_: [0.0] * len(completions)], args=config,
                              train_dataset=Dataset.from_dict({"prompt": ["a"] * 4}), processing_class=tokenizer)
        trainer.current_gradient_accumulation_steps = 1
        padded = torch.zeros(4, length, dtype=torch.long)
        mask = torch.zeros(4, length, dtype=torch.long)
        for i, answer in enumerate(answers):
            padded[i, :len(answer)] = torch.tensor(answer)
            mask[i, :len(answer)] = 1
        prompts = torch.tensor([prompt] * 4)
        loss = trainer._compute_loss(trainer.model, {
            "prompt_ids": prompts, "prompt_mask": torch.ones_like(prompts), "completion_ids": padded,
            "completion_mask": mask, "advantages": torch.tensor(advantages), "num_items_in_batch": mask.sum()})
        loss.backward()
        self.assertAlmostEqual(out.loss, loss.item(), delta=1e-5)
        before, after = (load_file(self.work / name / "adapter_model.safetensors") for name in ("before", "after"))
        wanted = {name.replace(".default", ""): p.grad for name, p in trainer.model.named_parameters()
                  if p.requires_grad}
        worst = 0.0
        for name, tensor in before.items():
            gradient = (tensor - after[name]) / scale
            worst = max(worst, float((gradient - wanted[name]).norm() / wanted[name].norm()))
        self.assertEqual(len(before), len(wanted))
        self.assertLess(worst, 1e-5)


class Misuses(Case):
    """Each is an exception that names the argument; the session works afterwards."""

    def expect(self, kinds, pattern, call, *arguments, **keys):
        with self.subTest(pattern=pattern):
            with self.assertRaisesRegex(kinds, pattern):
                call(*arguments, **keys)
        self.n_misuses += 1

    def setUp(self):
        super().setUp()
        self.n_misuses = 0

    def opening(self):
        wrong = (({"ranks": 2}, "ranks"), ({"device": "cuda"}, "cuda"), ({"device": "tpu"}, "device"),
                 ({"base_format": "int3"}, "base_format"), ({"max_seq_length": 1}, "max_seq_length"),
                 ({"threads": 0}, "threads"), ({"lora_r": 8}, "lora_r"), ({"output_dir": "x"}, "output_dir"),
                 ({"nonsense": 1}, "nonsense"), ({"offload_tier": "disk"}, "offload_dir"),
                 ({"offload_ratio": 2}, "offload_ratio"), ({"visit_tokens": 0}, "visit_tokens"),
                 ({"compute_dtype": "fp8"}, "compute_dtype"), ({"ring_depth": 0}, "ring_depth"),
                 ({"train_file": "x"}, "train_file"), ({"per_device_train_batch_size": 0}, "per_device_train_batch"))
        for keys, pattern in wrong:
            self.expect((ValueError, RuntimeError), pattern, ballast.Session, MODEL, **{**BASE, **keys})
        self.expect(TypeError, "threads", ballast.Session, MODEL, **{**BASE, "threads": object()})
        self.expect(ValueError, "nowhere", ballast.Session, self.work / "nowhere", **BASE)
        self.expect(TypeError, "model", ballast.Session, 3, **BASE)
        self.expect(ValueError, "model", ballast.Session, "", **BASE)
        self.expect(ValueError, "model", ballast.Session, "a\0b", **BASE)

    def creating(self, session):
        for keys, pattern in (({"r": 0}, "lora_r"), ({"r": "many"}, "lora_r"), ({"r": 2.5}, "lora_r"),
                              ({"alpha": -1}, "lora_alpha"), ({"targets": "nothing"}, "nothing"),
                              ({"targets": ["q_proj", "q_proj"]}, "q_proj"), ({"seed": -1}, "seed"),
                              ({"dropout": 1.5}, "lora_dropout"), ({"use_rslora": "perhaps"}, "use_rslora"),
                              ({"init_adapter": self.work / "nowhere"}, "nowhere"), ({"targets": []}, "lora_target")):
            self.expect(ValueError, pattern, session.create_lora, **keys)
        self.expect(TypeError, "lora_r", session.create_lora, r=object())
        self.expect(RuntimeError, "nowhere", session.load, self.work / "nowhere")
        self.expect(TypeError, "dir", session.load, 5)
        self.expect(ValueError, "dir", session.load, "")

    def rows_of(self, adapter):
        good = self.rows[0]
        n = len(good["input_ids"])
        call = adapter.forward_backward
        for rows, pattern in ((None, "rows"), (5, "rows"), ("text", "rows"), (good, "rows"), ([5], r"rows\[0\]"),
                              ([good, None], r"rows\[1\]"), ([{**good, "targets": "abc"}], "targets"),
                              ([{**good, "input_ids": [1.5] * n}], "input_ids"),
                              ([{**good, "weights": ["a"] * n}], "weights"),
                              ([{**good, "input_ids": [[1]] * n}], "input_ids"),
                              ([{**good, "input_ids": {1: 2}}], "input_ids"), ([{**good, "weights": 1.0}], "weights")):
            self.expect(TypeError, pattern, call, rows)
        for change, pattern in (({"input_ids": []}, "targets|tokens"), ({"targets": [1]}, "targets"),
                                ({"input_ids": None}, "input_ids"), ({"targets": None}, "targets"),
                                ({"weights": [1.0]}, "weights"), ({"weights": [math.nan] * n}, "weights"),
                                ({"weights": [math.inf] * n}, "weights"), ({"weights": [1e39] * n}, "weights"),
                                ({"weights": [0] * n}, "rows"), ({"targets": [-100] * n}, "rows"),
                                ({"input_ids": [-1] * n}, "input_ids"), ({"input_ids": [10**6] * n}, "input_ids"),
                                ({"input_ids": [2**40] * n}, "input_ids"), ({"targets": [-1] * n}, "targets"),
                                ({"targets": [10**6] * n}, "targets"), ({"label": [1] * n}, "label"),
                                ({"logprobs": [0.0] * n}, "logprobs"), ({"advantages": [0.0] * n}, "advantages")):
            self.expect(ValueError, pattern, call, [{**good, **change}])
        long = {"input_ids": [1] * 65, "targets": [1] * 65}
        self.expect(ValueError, "max_seq_length", call, [long])
        self.expect(ValueError, "empty", call, [])
        self.expect(ValueError, "loss", call, [good], loss="hinge")
        self.expect(ValueError, "reduction", call, [good], reduction="max")
        self.expect(ValueError, "logprobs", call, [good], loss="importance_sampling")
        self.expect(ValueError, "advantages", call, [{**good, "logprobs": [0.0] * n}], loss="importance_sampling")
        self.expect(ValueError, "input_ids", adapter.forward, [{"targets": [1]}])
        self.expect(TypeError, "rows", adapter.forward, 3)
        self.expect(ValueError, "targets", adapter.forward_async, [{"input_ids": [1]}])

    def functions(self, session, adapter):
        call, rows = adapter.forward_backward_custom, self.rows[:2]
        zeros = [[0.0] * len(row["targets"]) for row in rows]
        self.expect(TypeError, "fn", call, rows, None)
        self.expect(ValueError, "arrays", call, rows, len, arrays="jax")
        for value, kinds, pattern in ((None, TypeError, "fn"), (0.0, TypeError, "fn"), ((0.0,), TypeError, "fn"),
                                      ((0.0, zeros[:1]), ValueError, "fn"), ((0.0, [[0.0]] * 2), ValueError, "row 0"),
                                      ((0.0, ["ab"] * 2), TypeError, "row 0"), (("x", zeros), ValueError, "x"),
                                      ((math.nan, zeros), RuntimeError, "loss"),
                                      ((0.0, [[math.inf] * len(z) for z in zeros]), RuntimeError, "gradient")):
            self.expect(kinds, pattern, call, rows, lambda logp, value=value: value, arrays="numpy")

        def raises(logp):
            raise KeyError("mine")
        self.expect(KeyError, "mine", call, rows, raises, arrays="numpy")
        for inner in (lambda: adapter.forward(rows), lambda: session.create_lora(), session.close, adapter.close,
                      lambda: adapter.optim_step(0.1), session.stats, lambda: adapter.save_weights(self.work / "x")):
            self.expect(ValueError, "fn", call, rows, lambda logp, inner=inner: inner(), arrays="numpy")
        many = self.rows * 3
        self.expect(RuntimeError, "visit_tokens", call, many[:40], lambda logp: (0.0, []), arrays="numpy")

    def steps(self, adapter):
        self.expect(ValueError, "forward_backward", adapter.optim_step, 0.1)
        adapter.forward_backward(self.rows[:1])
        for keys, pattern in (({"lr": -1}, "lr"), ({"lr": math.nan}, "lr"), ({"lr": math.inf}, "lr"),
                              ({"betas": 3}, "betas"), ({"betas": (0.9,)}, "betas"), ({"betas": (1.0, 0.9)}, "betas"),
                              ({"betas": (0.9, -1)}, "betas"), ({"eps": -1}, "eps"),
                              ({"weight_decay": math.nan}, "weight_decay"), ({"max_grad_norm": -1}, "max_grad_norm")):
            self.expect(ValueError, pattern, adapter.optim_step, **{"lr": 0.1, **keys})
        for keys in ({"lr": "fast"}, {"lr": None}, {"eps": "x"}, {"max_grad_norm": None}):
            self.expect(TypeError, next(iter(keys)), adapter.optim_step, **{"lr": 0.1, **keys})
        adapter.optim_step(0.0)

    def samples(self, adapter):
        for keys, pattern in (({"prompt": []}, "prompt"), ({"prompt": [10**6]}, "prompt"), ({"prompt": [-1]}, "prompt"),
                              ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 64}, "max_tokens"),
                              ({"temperature": -1}, "temperature"), ({"temperature": math.nan}, "temperature"),
                              ({"top_k": -1}, "top_k"), ({"top_p": 2}, "top_p"), ({"seed": -1}, "seed")):
            self.expect(ValueError, pattern, adapter.sample, **{"prompt": [1, 2], "max_tokens": 4, **keys})
        for keys in ({"prompt": b"text"}, {"prompt": [0.5]}, {"max_tokens": 1.5}, {"temperature": "hot"}, {"top_k": "x"}):
            self.expect(TypeError, next(iter(keys)), adapter.sample, **{"prompt": [1, 2], "max_tokens": 4, **keys})
        self.expect(ValueError, "tokenizer.json", adapter.sample, "text")
        self.expect(TypeError, "dir", adapter.save_weights, None)
        self.expect(ValueError, "dir", adapter.save_state, "")
        (self.work / "file").write_text("")
        self.expect((ValueError, RuntimeError), "file", adapter.save_weights, self.work / "file")
        self.expect((ValueError, RuntimeError), "file", adapter.save_state, self.work / "file" / "below")

    def test_arguments(self):
        session = self.session()
        adapter = session.create_lora()
        self.opening()
        self.creating(session)
        self.rows_of(adapter)
        self.functions(session, adapter)
        self.steps(adapter)
        self.samples(adapter)
        self.assertGreater(self.n_misuses, 100)
        # After all of it: the bits of an adapter that has seen none.
        other = self.session().create_lora()
        for a in (adapter, other):
            a.close()
        again, fresh = session.create_lora(), self.session().create_lora()
        self.assertEqual(step(again, self.rows, 0).loss, step(fresh, self.rows, 0).loss)

    def test_closed(self):
        session = self.session()
        adapter, other = session.create_lora(), session.create_lora()
        adapter.close()
        adapter.close()
        self.expect(ValueError, "adapter is closed", adapter.forward, self.rows[:1])
        future = other.forward_async(self.rows[:1])
        self.assertEqual(len(future.result()), 1)
        session.close()
        session.close()
        for call in (lambda: other.forward(self.rows[:1]), lambda: other.optim_step(0.1), session.create_lora,
                     session.stats, lambda: session.load(self.work), lambda: other.sample([1])):
            self.expect(ValueError, "session is closed", call)
        other.close()

    def test_threads(self):
        """Many threads on one adapter, and a close among them: each call ends well or names the closed session."""
        session = self.session()
        adapter = session.create_lora()
        ended = []

        def work():
            try:
                for _ in range(50):
                    adapter.forward(self.rows[:2])
                ended.append(None)
            except ValueError as error:
                ended.append(str(error))
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        adapter.forward(self.rows[:1])
        session.close()
        for thread in threads:
            thread.join()
        self.assertEqual(set(ended) - {None, "session is closed"}, set())
        self.assertEqual(len(ended), 8)

    def child(self, code):
        lines = ["import os, sys, threading", f"sys.path.insert(0, {str(Path(__file__).parent)!r})",
                 "from test_session import BASE, MODEL, ballast, read_rows",
                 "session = ballast.Session(MODEL, **BASE)", "adapter, rows = session.create_lora(), read_rows()[:2]"]
        return subprocess.run([sys.executable, "-c", "\n".join(lines + [code])], stderr=subprocess.PIPE,
                              stdout=subprocess.PIPE, timeout=300)

    def test_fork(self):
        done = self.child("""
adapter.forward(rows)
pid = os.fork()
if pid == 0:
    for call in (lambda: adapter.forward(rows), session.create_lora, session.stats):
        try:
            call()
        except ValueError as error:
            assert "fork" in str(error), error
        else:
            os._exit(3)
    adapter.close()
    session.close()
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
adapter.forward(rows)
""")
        self.assertEqual(done.returncode, 0, done.stderr.decode())

    def test_interpreter_exit(self):
        for code in ("adapter.forward(rows)", "adapter.forward_backward_async(rows)", "del session, adapter",
                     "threading.Thread(target=lambda: [adapter.forward(rows) for _ in range(20)], daemon=True).start()",
                     "raise SystemExit(0)", "x = [adapter]; x.append(x)"):
            with self.subTest(code=code):
                done = self.child(code)
                self.assertEqual(done.returncode, 0, done.stderr.decode())


class Example(unittest.TestCase):
    def test_grpo(self):
        """The reward of the example rises: from 0.4, that of the base, to more than 0.7 in 12 steps."""
        done = subprocess.run([sys.executable, str(SOURCE / "examples" / "python" / "grpo.py"),
                               str(SOURCE / "demo" / "base"), "12"], check=True, stdout=subprocess.PIPE)
        rewards = [float(line.split()[-1]) for line in done.stdout.decode().splitlines()]
        self.assertEqual(len(rewards), 12)
        self.assertLess(rewards[0], 0.6)
        self.assertGreater(sum(rewards[-3:]) / 3, 0.7)


class Types(unittest.TestCase):
    def test_mypy(self):
        if subprocess.run([sys.executable, "-c", "import mypy"], stderr=subprocess.DEVNULL).returncode != 0:
            self.skipTest("mypy is not installed")
        done = subprocess.run([sys.executable, "-m", "mypy", "--strict", "--no-incremental", "--cache-dir=/dev/null",
                               "--follow-imports=silent", "--ignore-missing-imports",
                               str(SOURCE / "python" / "ballast" / "session.py")],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=SOURCE / "python")
        self.assertEqual(done.returncode, 0, done.stdout.decode())


if __name__ == "__main__":
    unittest.main()
