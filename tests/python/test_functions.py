# SPDX-License-Identifier: Apache-2.0
"""quantize, inspect and plan, in an interpreter without torch, over the demo's model."""
import sys
import tempfile
import unittest
from pathlib import Path

sys.modules["torch"] = None  # an import of it fails here

import ballast  # noqa: E402

MODEL = Path(__file__).resolve().parents[2] / "demo" / "base"


class Functions(unittest.TestCase):
    def test_inspect(self):
        found = ballast.inspect(MODEL)
        self.assertIn("model", str(found).lower())
        with self.assertRaisesRegex(ValueError, "nonexistent"):
            ballast.inspect("/nonexistent/model")

    def test_quantize(self):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "fp8")
            ballast.quantize(MODEL, out)
            self.assertIn("compressed-tensors", (out / "config.json").read_text())
            stored = out / "model.safetensors"
            self.assertLess(stored.stat().st_size,
                            sum(f.stat().st_size for f in MODEL.glob("*.safetensors")))
            self.assertIn("F8_E4M3", str(ballast.inspect(stored)))
            with self.assertRaisesRegex(ValueError, "base_format"):
                ballast.quantize(MODEL, Path(folder, "other"), base_format="int3")

    def test_plan(self):
        found = ballast.plan("llama-3.1-70b", "8xh100")
        self.assertGreater(len(found), 3)
        with self.assertRaisesRegex(ValueError, "9xabacus"):
            ballast.plan("llama-3.1-70b", "9xabacus")
        with self.assertRaisesRegex(ValueError, "lora_q"):
            ballast.plan("llama-3.1-70b", "8xh100", lora_q=4)

    def test_layer_needs_torch(self):
        with self.assertRaises(ImportError):
            import ballast.torch  # noqa: F401


if __name__ == "__main__":
    unittest.main()
