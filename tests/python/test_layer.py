# SPDX-License-Identifier: Apache-2.0
"""ballast.torch against torch: values, gradients, autograd's modes, dropout, refusals."""
import copy
import pickle
import tempfile
import unittest

import torch
from torch import nn
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
        # The rounded fp32 result: 2^-8 of an element.
        layer = layer_of()
        x = torch.randn(700, 96, dtype=torch.bfloat16)
        self.assert_close(layer(x).float(), layer(x.float()), 2**-8)
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
        with self.assertRaisesRegex(RuntimeError, "after its base was freed"):
            layer(torch.zeros(3, 96))


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


if __name__ == "__main__":
    unittest.main()
