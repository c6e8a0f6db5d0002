# SPDX-License-Identifier: Apache-2.0
"""Small models of transformers, trained by its Trainer over ballast.torch and over PEFT."""
import copy
import tempfile
import unittest

import torch

try:
    import peft
    import transformers
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
except ImportError as missing:
    raise unittest.SkipTest(f"transformers and peft: {missing}")

import ballast.torch as bt

LORA = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
SIZES = dict(vocab_size=200, hidden_size=48, intermediate_size=80, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
KINDS = ("Llama", "Qwen3", "Mistral", "Qwen2")  # Qwen2 has biases


def model_of(kind):
    keys = dict(SIZES, head_dim=12) if kind == "Qwen3" else SIZES
    torch.manual_seed(3)
    config = getattr(transformers, kind + "Config")(**keys)
    model = getattr(transformers, kind + "ForCausalLM")(config)
    for module in model.modules():  # PEFT sees the same biases only if they are not zero
        if getattr(module, "bias", None) is not None:
            torch.nn.init.normal_(module.bias, std=0.1)
    return model


def peft_over(converted, plain):
    """PEFT over the dequantized base, with the same first A."""
    for name, layer in bt.layers(converted):
        plain.get_submodule(name).weight.data.copy_(layer.dequantize())
    model = peft.get_peft_model(plain, LORA)
    for name, layer in bt.layers(converted):
        module = model.base_model.model.get_submodule(name)
        module.lora_A["default"].weight.data.copy_(layer.lora_A.weight)
    return model


def train(model, steps=20, **keys):
    torch.manual_seed(4)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 200, (steps * 4, 24))]
    raw = []  # of micro-batches
    with tempfile.TemporaryDirectory() as out:
        trainer = Trainer(model=model, train_dataset=rows,
                          args=TrainingArguments(
                              output_dir=out, max_steps=steps, per_device_train_batch_size=2,
                              gradient_accumulation_steps=2, learning_rate=1e-3, logging_steps=1,
                              save_strategy="no", report_to=[], use_cpu=True, seed=7,
                              disable_tqdm=True, **keys))
        step = trainer.training_step

        def training_step(*args, **kwargs):
            raw.append(step(*args, **kwargs).item())
            return torch.tensor(raw[-1])
        trainer.training_step = training_step
        trainer.train()
    return raw


class Models(unittest.TestCase):
    def assert_losses(self, got, want):
        self.assertEqual(len(got), len(want))
        worst = max(abs(a - b) / abs(b) for a, b in zip(got, want))
        self.assertLessEqual(worst, 1e-5)

    def test_trainer_as_peft(self):
        for kind in KINDS:
            with self.subTest(kind=kind):
                converted = bt.convert(model_of(kind), lora=LORA)
                plain = peft_over(converted, model_of(kind))
                got = train(converted)
                self.assert_losses(got, train(plain))
                self.assertLess(got[-1], got[0])

    def test_checkpointing(self):
        converted = bt.convert(model_of("Llama"), lora=LORA)
        plain = peft_over(converted, model_of("Llama"))
        want = train(plain, steps=4)
        for reentrant in (False, True):
            model = copy.deepcopy(converted)
            got = train(model, steps=4, gradient_checkpointing=True,
                        gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            self.assert_losses(got, want)

    def test_init_as_convert_and_peft_reads(self):
        for kind in ("Llama", "Qwen2"):
            with self.subTest(kind=kind), tempfile.TemporaryDirectory() as folder:
                model_of(kind).to(torch.bfloat16).save_pretrained(folder + "/model")
                load = lambda: AutoModelForCausalLM.from_pretrained(  # noqa: E731
                    folder + "/model", dtype=torch.float32)
                torch.manual_seed(9)
                converted = bt.convert(load(), lora=LORA)
                torch.manual_seed(9)
                with bt.init(lora=LORA):
                    initialized = load()
                ids = torch.randint(0, 200, (2, 20))
                self.assertTrue(torch.equal(converted(ids).logits, initialized(ids).logits))
                train(initialized, steps=3)
                bt.save_adapter(initialized, folder + "/adapter")
                initialized.eval()
                plain = load()
                for name, layer in bt.layers(initialized):
                    plain.get_submodule(name).weight.data.copy_(layer.dequantize())
                read = peft.PeftModel.from_pretrained(plain, folder + "/adapter").eval()
                want, got = read(ids).logits, initialized(ids).logits
                self.assertLessEqual(((got - want).abs().max() / want.abs().max()).item(), 1e-5)
                other = bt.convert(load(), lora=LORA)
                read.save_pretrained(folder + "/saved")
                bt.load_adapter(other, folder + "/saved")
                self.assertTrue(torch.equal(other.eval()(ids).logits, got))

    def test_refused_settings(self):
        with self.assertRaisesRegex(ValueError, "use_dora=True is not supported"):
            bt.convert(model_of("Llama"),
                       lora=peft.LoraConfig(use_dora=True, target_modules="all-linear"))
        with self.assertRaisesRegex(ValueError, "is not a directory"), bt.init(lora=LORA):
            transformers.LlamaForCausalLM.from_pretrained("/nonexistent/model")


if __name__ == "__main__":
    unittest.main()
