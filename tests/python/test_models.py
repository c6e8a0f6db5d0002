# SPDX-License-Identifier: Apache-2.0
"""Small models of transformers, trained by its Trainer over ballast.torch, over PEFT and by `ballast
train`."""
import copy
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import torch

try:
    import peft
    import transformers
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
except ImportError as missing:
    raise unittest.SkipTest(f"transformers and peft: {missing}")

import ballast
import ballast.torch as bt

SOURCE = Path(__file__).resolve().parents[2]
torch.set_num_threads(1)  # OpenMP's threads spin: on a loaded machine two take minutes
LORA = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
SIZES = dict(vocab_size=200, hidden_size=48, intermediate_size=80, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
MORE = {"Qwen3": {"head_dim": 12}, "Mistral": {"sliding_window": 9}}  # shorter than the rows
KINDS = ("Llama", "Qwen3", "Mistral", "Qwen2")  # Qwen2 has biases


def model_of(kind):
    keys = dict(SIZES, **MORE.get(kind, {}))
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


def rows_of(steps):
    """Random tokens, the same four rows in each step, so that they are learned."""
    torch.manual_seed(4)
    return torch.randint(0, 200, (4, 24)).repeat(steps, 1)


def train(model, steps=20, **keys):
    rows = [{"input_ids": ids, "labels": ids} for ids in rows_of(steps)]
    raw = []  # of micro-batches, whose sum is the step's loss
    with tempfile.TemporaryDirectory() as out:
        trainer = Trainer(model=model, train_dataset=rows,
                          args=TrainingArguments(
                              output_dir=out, max_steps=steps, per_device_train_batch_size=2,
                              gradient_accumulation_steps=2, learning_rate=1e-2, logging_steps=1,
                              save_strategy="no", report_to=[], use_cpu=True, seed=7,
                              disable_tqdm=True, **keys))
        trainer._get_train_sampler = SequentialSampler
        step = trainer.training_step

        def training_step(*args, **kwargs):
            raw.append(step(*args, **kwargs).item())
            return torch.tensor(raw[-1])
        trainer.training_step = training_step
        trainer.train()
    return raw


def ballast_train(folder, steps=20):
    """Losses of the program's run over folder/model from the adapter folder/first on: the rows,
    their order and the settings of train()."""
    with open(folder + "/rows.jsonl", "w") as file:
        for ids in rows_of(steps).tolist():
            file.write(json.dumps({"input_ids": ids, "labels": ids}) + "\n")
    subprocess.run(
        [str(ballast.program()), "train", f"--model_name_or_path={folder}/model",
         f"--init_adapter={folder}/first", f"--train_file={folder}/rows.jsonl",
         "--data_format=tokens", "--shuffle=false", "--base_format=fp8_row", f"--max_steps={steps}",
         "--per_device_train_batch_size=2", "--gradient_accumulation_steps=2",
         "--learning_rate=1e-2", f"--output_dir={folder}/out"],
        check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with open(folder + "/out/metrics.jsonl") as file:
        return [line["loss"] for line in map(json.loads, file) if "loss" in line]


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

    def test_trainer_as_ballast_train(self):
        for kind in ("Llama", "Qwen3", "Mistral"):
            with self.subTest(kind=kind), tempfile.TemporaryDirectory() as folder:
                model = model_of(kind)
                model.save_pretrained(folder + "/model")
                converted = bt.convert(model, lora=LORA)
                bt.save_adapter(converted, folder + "/first")
                want = ballast_train(folder)
                raw = train(converted)
                self.assert_losses([a + b for a, b in zip(raw[::2], raw[1::2])], want)
                self.assertLess(want[-1], 0.95 * want[0])

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

    def test_save_pretrained(self):
        """Trainer's checkpoints and save_pretrained load over the base, resume exactly, and never load
        as a model with random projections."""
        rows = [{"input_ids": ids, "labels": ids} for ids in rows_of(8)]
        with tempfile.TemporaryDirectory() as folder:
            model_of("Llama").save_pretrained(folder + "/base")

            def convert():
                model = AutoModelForCausalLM.from_pretrained(folder + "/base")
                torch.manual_seed(5)
                return bt.convert(model, base=bt.Base(format="stored"), lora=LORA)

            def run(model, name, **keys):
                trainer = Trainer(model=model, train_dataset=rows, args=TrainingArguments(
                    output_dir=f"{folder}/{name}", max_steps=4, save_steps=2, learning_rate=1e-2,
                    per_device_train_batch_size=2, logging_steps=1, report_to=[], use_cpu=True,
                    seed=7, disable_tqdm=True))
                trainer.train(**keys)
                return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            model, checkpoint = convert(), folder + "/run/checkpoint-2"
            losses = run(model, "run")
            self.assertEqual(run(convert(), "again", resume_from_checkpoint=checkpoint)[-2:],
                             losses[-2:])
            ids, model = rows_of(1), model.eval()
            for save in (model.save_pretrained, copy.deepcopy(model).save_pretrained):
                save(folder + "/saved")
                for path in (folder + "/saved", folder + "/run/checkpoint-4"):
                    self.assertFalse(Path(path, "config.json").exists())
                    for kind in (AutoModelForCausalLM, transformers.LlamaForCausalLM):
                        read = kind.from_pretrained(path).eval()
                        want, got = model(ids).logits, read(ids).logits
                        error = ((got - want).abs().max() / want.abs().max()).item()
                        self.assertLessEqual(error, 1e-5)
            with self.assertRaisesRegex(ValueError, "holds a model"):
                model.save_pretrained(folder + "/base")
            with self.assertRaisesRegex(ValueError, "push_to_hub"):
                model.save_pretrained(folder + "/hub", push_to_hub=True)
            model.model.save_pretrained(folder + "/inner")
            self.assertTrue(Path(folder, "inner", "adapter_config.json").exists())
            model.model.norm.weight.requires_grad_(True)  # an adapter has no place for it
            with self.assertWarnsRegex(UserWarning, "model.norm.weight is trained"):
                model.save_pretrained(folder + "/norm")
            self.assertRaises((ValueError, OSError), AutoModelForCausalLM.from_pretrained,
                              folder + "/norm")
            with self.assertRaisesRegex(ValueError, "model.norm.weight is trained"):
                bt.save_adapter(model, folder + "/adapter")

    def test_refused_settings(self):
        with self.assertRaisesRegex(ValueError, "use_dora=True is not supported"):
            bt.convert(model_of("Llama"),
                       lora=peft.LoraConfig(use_dora=True, target_modules="all-linear"))
        with self.assertRaisesRegex(ValueError, "is not a directory"), bt.init(lora=LORA):
            transformers.LlamaForCausalLM.from_pretrained("/nonexistent/model")


class Example(unittest.TestCase):
    """examples/pytorch/finetune.py over the demo's model: alone over page files, and under torchrun
    over a sharded base."""

    def test_finetune(self):
        example, model = SOURCE / "examples" / "pytorch" / "finetune.py", SOURCE / "demo" / "base"
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "rows.json").write_text(json.dumps(
                [{"instruction": "Add.", "input": f"2, {i}", "output": str(2 + i)}
                 for i in range(20)]))
            common = [str(example), str(model), folder + "/rows.json"]
            keys = ["--steps", "2", "--length", "64", "--offload_ratio", "1"]
            jobs = {"alone": [*common, folder + "/alone", *keys, "--tier", "disk", "--dir", folder],
                    "torchrun": ["-m", "torch.distributed.run", "--standalone",
                                 "--nproc_per_node=2", *common, folder + "/torchrun", *keys,
                                 "--shard"]}
            ids = torch.randint(0, 200, (2, 20))
            for name, job in jobs.items():
                with self.subTest(name=name):
                    done = subprocess.run([sys.executable, *job], stdout=subprocess.DEVNULL,
                                          stderr=subprocess.PIPE, timeout=600,
                                          env={**os.environ, "OMP_NUM_THREADS": "1"})
                    self.assertEqual(done.returncode, 0, done.stderr.decode()[-2000:])
                    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
                    base = plain(ids).logits
                    read = peft.PeftModel.from_pretrained(plain, f"{folder}/{name}").eval()
                    self.assertFalse(torch.equal(read(ids).logits, base))


if __name__ == "__main__":
    unittest.main()
