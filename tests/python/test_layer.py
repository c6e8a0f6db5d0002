# SPDX-License-Identifier: Apache-2.0
"""ballast.torch against torch: values, gradients, autograd's modes, dropout, refusals."""
import copy
import json
import os
import pickle
import tempfile
import threading
import unittest
from unittest import mock

import torch
from torch import nn
from torch.utils import flop_counter
from torch.utils.checkpoint import checkpoint

import ballast.torch as bt

TOLERANCE = 1e-6  # relative to the largest element: fp32 sums of at most 200 terms


def linear_of(rows=160, cols=96, bias=True, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(cols, rows, bias=bias)


def layer_of(format="fp8_row", dropout=0.0, bias=True, **keys):
    layer = bt.LoraLinear.from_linear(linear_of(bias=bias), base=bt.Base(format=format, **keys),
                                      lora=bt.LoRA(r=4, alpha=8, dropout=dropout))
    nn.init.normal_(layer.lora_B.weight)
    return layer


def layer_with(layer, A=None, B=None):
    """A copy with another A or B, as a user may assign."""
    other = copy.deepcopy(layer)
    for factor, value in ((other.lora_A, A), (other.lora_B, B)):
        if value is not None:
            factor.weight = nn.Parameter(value.detach())
    return other


class Reference(nn.Module):
    """PEFT's LoRA linear over the same weights."""

    def __init__(self, layer, weight, bias):
        super().__init__()
        self.W, self.bias, self.scale = weight, bias, layer.frozen.lora.scale
        self.A = nn.Parameter(layer.lora_A.weight.detach().clone())
        self.B = nn.Parameter(layer.lora_B.weight.detach().clone())

    def forward(self, x):
        y = nn.functional.linear(x, self.W, self.bias)
        return y + self.scale * nn.functional.linear(nn.functional.linear(x, self.A), self.B)


class Layer(unittest.TestCase):
    def assert_close(self, got, want, tolerance=TOLERANCE):
        self.assertEqual(got.shape, want.shape)
        error = ((got - want).abs().max() / want.abs().max()).item()
        self.assertLessEqual(error, tolerance)

    def run_pair(self, layer, reference, x, dy, tolerance=TOLERANCE):
        mine, theirs = (x.clone().requires_grad_() for _ in range(2))
        y, want = layer(mine), reference(theirs)
        y.backward(dy), want.backward(dy)
        self.assert_close(y, want, tolerance)
        self.assert_close(mine.grad, theirs.grad, tolerance)
        self.assert_close(layer.lora_A.weight.grad, reference.A.grad, tolerance)
        self.assert_close(layer.lora_B.weight.grad, reference.B.grad, tolerance)

    def test_formats(self):
        for format in ("stored", "f32", "bf16", "f16", "fp8_row", "fp8_block"):
            for bias in (True, False):
                with self.subTest(format=format, bias=bias):
                    linear = linear_of(bias=bias)
                    layer = layer_of(format, bias=bias)
                    W = layer.dequantize()
                    if format in ("stored", "f32"):
                        self.assertTrue(torch.equal(W, linear.weight))
                    reference = Reference(layer, W, linear.bias.detach() if bias else None)
                    self.run_pair(layer, reference, torch.randn(3, 7, 96), torch.randn(3, 7, 160))

    def test_bf16(self):
        # A, x A^T, B, the LoRA term, y and y with the bias are rounded, by 2^-9 of a value each; on
        # a processor without bf16 products y alone is.
        layer = layer_of()
        x = torch.randn(700, 96, dtype=torch.bfloat16)
        self.assert_close(layer(x).float(), layer(x.float()), 6 * 2**-9)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            self.assertEqual(layer(x.float()).dtype, torch.bfloat16)

    def test_accumulates_and_serves_twice(self):
        layer = layer_of()
        reference = Reference(layer, layer.dequantize(), linear_of().bias.detach())
        x, dy = torch.randn(5, 96), torch.randn(5, 160)
        for module in (layer, reference):
            for _ in range(2):
                (module(x) + module(2 * x)).backward(dy)
        self.assert_close(layer.lora_A.weight.grad, reference.A.grad)
        self.assert_close(layer.lora_B.weight.grad, reference.B.grad)

    def test_checkpoint_and_dropout(self):
        layer = layer_of(dropout=0.4)
        x, dy = torch.randn(6, 96), torch.randn(6, 160)
        results = []
        for run in (lambda x: layer(x), lambda x: checkpoint(layer, x, use_reentrant=True),
                    lambda x: checkpoint(layer, x, use_reentrant=False)):
            layer.zero_grad()
            torch.manual_seed(5)
            mine = x.clone().requires_grad_()
            y = run(mine)
            y.backward(dy)
            results.append((y, mine.grad, layer.lora_A.weight.grad.clone(),
                            layer.lora_B.weight.grad.clone()))
        for result in results[1:]:
            for a, b in zip(results[0], result):
                self.assertTrue(torch.equal(a, b))
        self.assertFalse(torch.equal(layer(x), layer(x)))  # another mask
        layer.eval()
        self.assertTrue(torch.equal(layer(x), layer(x)))

    def test_compile(self):
        layer = layer_of()
        model = torch.compile(lambda x: layer(x).relu().sum(), backend="aot_eager", fullgraph=True)
        x = torch.randn(6, 96, requires_grad=True)
        model(x).backward()
        got, x.grad = x.grad, None
        layer(x).relu().sum().backward()
        self.assertTrue(torch.equal(got, x.grad))

    def test_opcheck(self):
        layer = layer_of()
        x = torch.randn(4, 96, requires_grad=True)
        torch.library.opcheck(torch.ops.ballast.linear.default,
                              (x, layer.lora_A.weight, layer.lora_B.weight, None,
                               layer.frozen.number, 160))

    def test_operator_and_eager_call_agree(self):
        layer = layer_of()
        A, B, x = layer.lora_A.weight, layer.lora_B.weight, torch.randn(4, 96, requires_grad=True)
        results = []
        for y in (layer(x), torch.ops.ballast.linear(x, A, B, None, layer.frozen.number, 160)):
            results.append((y, *torch.autograd.grad(y.square().sum(), (x, A, B))))
        for got, want in zip(*results):
            self.assertTrue(torch.equal(got, want))
        with flop_counter.FlopCounterMode(display=False):  # a dispatch mode
            self.assertTrue(torch.equal(layer(x), results[0][0]))

    def test_second_derivative_is_rejected(self):
        layer = layer_of()
        x = torch.randn(4, 96, requires_grad=True)
        dx, = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        with self.assertRaises(RuntimeError):
            dx.sum().backward()

    def test_forward_mode_is_rejected(self):
        """Without the check each tangent is zero."""
        layer, x = layer_of(), torch.randn(3, 96)
        frozen = bt.LoraLinear.from_linear(linear_of(), base=bt.Base(format="fp8_row"))
        factors = {name: p.detach() for name, p in layer.named_parameters()}
        func, ad = torch.func, torch.autograd.forward_ad
        a, b, dy = layer.lora_A.weight.detach(), layer.lora_B.weight.detach(), torch.randn(3, 160)

        def operator(x, A=a):
            return torch.ops.ballast.linear(x, A, b, None, layer.frozen.number, 160)

        def dual(module):
            with ad.dual_level():
                return ad.unpack_dual(module(ad.make_dual(x, torch.ones_like(x)))).tangent
        calls = {
            "jvp": lambda: func.jvp(layer, (x,), (x,)),
            "jvp without LoRA": lambda: func.jvp(frozen, (x,), (x,)),
            "jvp of A and B": lambda: func.jvp(lambda f: func.functional_call(layer, f, (x,)),
                                               (factors,), (factors,)),
            "jacfwd": lambda: func.jacfwd(layer)(x),
            "vmap of jvp": lambda: torch.vmap(lambda t: func.jvp(layer, (t,), (t,))[1])(x),
            "linearize": lambda: func.linearize(layer, x)[1](x),
            "no_grad": lambda: torch.no_grad()(lambda: func.jvp(layer, (x,), (x,)))(),
            "dual": lambda: dual(layer),
            "dual without LoRA": lambda: dual(frozen),
            "dual, no_grad": lambda: torch.no_grad()(lambda: dual(layer))(),
            "operator": lambda: func.jvp(operator, (x,), (x,)),
            "operator, jvp of A": lambda: func.jvp(lambda A: operator(x, A), (a,), (a,)),
            "operator, jacfwd": lambda: func.jacfwd(operator)(x),
            "operator, dual": lambda: dual(operator),
            "operator, jvp of its backward": lambda: func.jvp(
                lambda dy: torch.ops.ballast.linear_backward(dy, x, a, b, None, layer.frozen.number, 96, True)[0], (dy,), (dy,)),
        }
        for name, call in calls.items():
            with self.subTest(name), self.assertRaisesRegex(RuntimeError, "no forward-mode"):
                call()
        for call in (lambda: func.hessian(lambda t: layer(t).sum())(x),
                     lambda: func.jvp(torch.vmap(layer), (x,), (x,))):
            self.assertRaises(RuntimeError, call)
        with ad.dual_level():  # of another tensor
            self.assertTrue(torch.equal(layer(x), layer(x.clone())))
            self.assertTrue(torch.equal(operator(x), layer(x)))
        y, tangent = func.jvp(lambda t: operator(x) * t, (torch.ones(160),), (torch.ones(160),))
        self.assertTrue(torch.equal(y, tangent))
        y, tangent = func.jvp(lambda t: layer(x) * t, (torch.ones(160),), (torch.ones(160),))
        self.assertTrue(torch.equal(y, tangent))

    def test_negative_views(self):
        """Views with torch's negative bit: their memory has the other sign."""
        def neg(t):
            return torch._neg_view(t.detach())
        plain, layer = linear_of(), layer_of()
        x, dy = torch.randn(3, 96), torch.randn(3, 160)
        self.assertTrue(torch.equal(layer(neg(x)), layer(-x)))
        other = layer_with(layer, neg(layer.lora_A.weight), neg(layer.lora_B.weight))
        self.assert_close(other(x), layer(x))
        self.assertTrue(torch.equal(
            torch.ops.ballast.linear(neg(x), layer.lora_A.weight, layer.lora_B.weight, None,
                                     layer.frozen.number, 160), layer(-x)))
        found = []
        for x_here, dy_here in ((x, dy), (neg(-x), neg(-dy))):
            leaf = x_here.clone().requires_grad_() if not x_here.is_neg() else x_here.requires_grad_()
            layer.zero_grad()
            layer(leaf).backward(dy_here)
            found.append([leaf.grad, *(p.grad.clone() for p in layer.parameters())])
        for a, b in zip(*found):
            self.assertTrue(torch.equal(a, b))
        negative = linear_of()
        negative.weight, negative.bias = (nn.Parameter(neg(-p.detach())) for p in plain.parameters())
        self.assertTrue(negative.weight.is_neg())
        want = bt.LoraLinear.from_linear(plain, base=bt.Base(format="fp8_row"))(x)
        got = bt.LoraLinear.from_linear(negative, base=bt.Base(format="fp8_row"))(x)
        self.assertTrue(torch.equal(got, want))

    def test_threads(self):
        layer, x = layer_of(), torch.randn(4, 96)
        want, got = layer(x), []
        threads = [threading.Thread(target=lambda: got.append([layer(x) for _ in range(50)]))
                   for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(sum(torch.equal(y, want) for ys in got for y in ys), 200)

    def test_threads_train(self):
        # Forward and backward in four threads: each has the gradients of its own copy of A and B.
        layer, x, dy = layer_of(), torch.randn(4, 96), torch.randn(4, 160)
        copies, failures = [copy.deepcopy(layer) for _ in range(5)], []

        def run(module):
            try:
                for _ in range(20):
                    module(x).backward(dy)
            except Exception as failure:
                failures.append(failure)
        run(copies[0])
        threads = [threading.Thread(target=run, args=(module,)) for module in copies[1:]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])
        for module in copies[1:]:
            for a, b in zip(module.parameters(), copies[0].parameters()):
                self.assertTrue(torch.equal(a.grad, b.grad))

    def test_products_run_on_the_threads_of_torch(self):
        """A base without `threads` starts none for its products; bits do not depend on whose
        threads run them."""
        x, layers, found, started = torch.randn(600, 96), [], [], []
        with mock.patch.object(torch, "get_num_threads", lambda: 3):
            layers.append(layer_of())
            layers[0](x)  # the runtime's three threads are there
            for keys in ({}, {"threads": 3}, {"threads": 1}):
                before = len(os.listdir("/proc/self/task"))
                layer = layer_of(**keys)
                started.append(len(os.listdir("/proc/self/task")) - before)
                layers.append(layer)
                torch.manual_seed(2)
                nn.init.normal_(layer.lora_A.weight)
                found.append(layer(x).detach())
        self.assertEqual([n - started[2] for n in started], [0, 2, 0])
        self.assertTrue(torch.equal(found[0], found[1]) and torch.equal(found[0], found[2]))

    def test_fork(self):
        # A child has none of the base's threads, and its lock as another thread left it.
        layer, x = layer_of(), torch.randn(4, 96)
        stack = layer.frozen.stack
        calls = (lambda: layer(x), lambda: bt.stats(layer), stack.verify)
        with stack.use():
            child = os.fork()
            if child == 0:
                said = []
                for call in calls:
                    try:
                        call()
                    except RuntimeError as failure:
                        said.append("forked process" in str(failure))
                stack.close()
                os._exit(0 if said == [True, True, True] else 1)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        layer(x)

    def test_other_devices_and_shapes(self):
        layer, x = layer_of(), torch.randn(4, 96)
        A, B, n = layer.lora_A.weight, layer.lora_B.weight, layer.frozen.number
        plain = bt.LoraLinear(96, 160)
        for text, call in (
                ("x is on meta, the layer's base is on cpu", lambda: layer(x.to("meta"))),
                ("A is on meta", lambda: layer_with(layer, A=A.to("meta"))(x)),
                (r"A has the shape \(3, 96\), the layer's is \(4, 96\)",
                 lambda: layer_with(layer, A=torch.zeros(3, 96))(x)),
                (r"B has the shape \(160, 5\)", lambda: layer_with(layer, B=torch.zeros(160, 5))(x)),
                ("B is torch.bfloat16", lambda: layer_with(layer, B=B.bfloat16())(x)),
                ("A has the shape None", lambda: torch.ops.ballast.linear(x, None, B, None, n, 160)),
                ("without a LoRA term",
                 lambda: torch.ops.ballast.linear(x, A, B, None, plain.frozen.number,
                                                         160)),
                (r"x has the shape \(3, 96\), dy \(4, 160\)",
                 lambda: torch.ops.ballast.linear_backward(torch.randn(4, 160), x[:3], A, B, None, n,
                                                           96, True))):
            with self.assertRaisesRegex((ValueError, RuntimeError), text):
                call()

    def test_no_grad_and_empty(self):
        layer = layer_of()
        with torch.no_grad():
            self.assertFalse(layer(torch.randn(2, 96)).requires_grad)
        y = layer(torch.zeros(0, 96))
        self.assertEqual(y.shape, (0, 160))
        y.sum().backward()
        self.assertEqual(layer.lora_A.weight.grad.abs().sum(), 0)

    def test_frozen_and_direct(self):
        layer = bt.LoraLinear(96, 160, base=bt.Base(format="fp8_block"))
        self.assertEqual(list(layer.parameters()), [])
        x = torch.randn(4, 96, requires_grad=True)
        layer(x).sum().backward()
        self.assert_close(x.grad, layer.dequantize().sum(0).expand(4, 96))

    def test_state_and_copies(self):
        layer = layer_of()
        self.assertEqual(sorted(layer.state_dict()), ["lora_A.weight", "lora_B.weight"])
        other = copy.deepcopy(layer)
        x = torch.randn(2, 96)
        self.assertTrue(torch.equal(layer(x), other(x)))
        nn.init.zeros_(other.lora_B.weight)
        self.assertFalse(torch.equal(layer(x), other(x)))
        with self.assertRaisesRegex(TypeError, "cannot be pickled"):
            pickle.dumps(layer)

    def test_refusals(self):
        layer = layer_of()
        for change in (lambda: layer.half(), lambda: layer.to(torch.bfloat16),
                       lambda: layer.to("meta")):
            with self.assertRaisesRegex(TypeError, "LoraLinear cannot"):
                change()
        with self.assertRaisesRegex(ValueError, "its last dimension must be 96"):
            layer(torch.zeros(3, 95))
        with self.assertRaisesRegex(ValueError, "x is torch.float16"):
            layer(torch.zeros(3, 96, dtype=torch.float16))
        with self.assertRaisesRegex(ValueError, "Base.format is 'int4'"):
            bt.Base(format="int4")
        with self.assertRaisesRegex(ValueError, "is not a directory"):
            layer_of(offload_ratio=1, tier="disk", dir="/nonexistent")
        bad = linear_of()
        bad.weight.data[3, 4] = float("nan")
        with self.assertRaisesRegex(ValueError, "row 3"):
            bt.LoraLinear.from_linear(bad)
        layer.frozen.stack.close()
        for call in (lambda: layer(torch.zeros(3, 96)), layer.dequantize,
                     lambda: bt.stats(layer), layer.frozen.stack.verify):
            with self.assertRaisesRegex(RuntimeError, "after its base was freed"):
                call()
        layer.frozen.stack.close()


class Stacks(unittest.TestCase):
    def model(self):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(),
                             nn.Linear(128, 32))

    def losses(self, base, steps=4):
        model = bt.convert(self.model(), base=base, lora=bt.LoRA(r=4))
        torch.manual_seed(2)
        x = torch.randn(16, 64)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, bt.stats(model)

    def test_tiers_have_the_same_bits(self):
        want, stats = self.losses(bt.Base())
        self.assertGreater(stats["frozen_bytes"], 0)
        self.assertEqual(stats["gathered_bytes"], 0)  # lent, not loaded
        got, stats = self.losses(bt.Base(offload_ratio=1, tier="host"))
        self.assertEqual(got, want)
        self.assertGreater(stats["host_bytes"], 0)
        with tempfile.TemporaryDirectory() as pages:
            for _ in range(2):  # written, and used again
                got, stats = self.losses(bt.Base(offload_ratio=1, tier="disk", dir=pages))
                self.assertEqual(got, want)
                self.assertGreater(stats["disk_bytes"], 0)
        self.assertEqual(stats["n_forward"], 12)
        self.assertEqual(stats["n_on_demand"], 1)  # the first call's
        self.assertEqual(stats["n_strays"], 0)

    def test_weights_are_freed(self):
        model = self.model()
        linears = [m for m in model if isinstance(m, nn.Linear)]
        bt.convert(model, lora=bt.LoRA(r=4, target_modules=["0", "4"]))
        self.assertTrue(all(linear.weight is None for linear in linears))
        self.assertIsNone(model[2].lora_A)
        with self.assertRaisesRegex(ValueError, "no nn.Linear to convert"):
            bt.convert(model)

    def test_adapters(self):
        model = bt.convert(self.model(), lora=bt.LoRA(r=4))
        nn.init.normal_(model[2].lora_B.weight)
        other = bt.convert(self.model(), lora=bt.LoRA(r=4))
        x = torch.randn(2, 64)
        with tempfile.TemporaryDirectory() as folder:
            bt.save_adapter(model, folder)
            bt.load_adapter(other, folder)
            self.assertTrue(torch.equal(model(x), other(x)))
            wrong = bt.convert(self.model(), lora=bt.LoRA(r=8))
            with self.assertRaisesRegex(ValueError, "r, lora_alpha, use_rslora"):
                bt.load_adapter(wrong, folder)
            path = os.path.join(folder, "adapter_config.json")
            with open(path) as file:
                config = json.load(file)
            for key, value in (("alora_invocation_tokens", [5, 6]), ("use_dora", True), ("rank_pattern", {"0": 8}),
                               ("peft_type", "LOHA"), ("bias", "all"), ("later_key", 0.5)):
                with open(path, "w") as file:
                    json.dump({**config, key: value}, file)
                with self.subTest(key), self.assertRaisesRegex(ValueError, f"adapter_config.json: key {key}: "):
                    bt.load_adapter(other, folder)
            with open(path, "w") as file:
                json.dump({**config, "use_dora": False, "revision": "main", "later_key": None, "task_type": "FEATURE_EXTRACTION",
                           "layers_to_transform": [0, 1], "exclude_modules": ["4.x"]}, file)
            bt.load_adapter(other, folder)


if __name__ == "__main__":
    unittest.main()
