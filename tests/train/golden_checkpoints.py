# SPDX-License-Identifier: Apache-2.0
"""golden_checkpoints.py -- the runs of tests/golden/checkpoints: for test_golden_checkpoints, which repeats them, and
tools/golden/checkpoints/make_golden.py, which made the files with an earlier program.

Each case trains 4 steps and saves after 2 and 4. Committed are its checkpoint of step 2 and the SHA-256 of the files of step 4, of the
run itself and of runs that resume from step 2 with other keys."""
import hashlib
import json
import os
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
GOLDEN = "tests/golden/checkpoints"
STEP = "step-2"
COMMON = {
    "model_name_or_path": GOLDEN + "/model", "train_file": GOLDEN + "/rows.jsonl", "data_format": "tokens", "device": "cpu",
    "max_seq_length": 32, "threads": 1, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "learning_rate": 0.01,
    "weight_decay": 0.1, "max_steps": 4, "save_steps": 2, "logging_steps": 1000, "seed": 7}
LORA = {"base_format": "stored", "lora_r": 2, "lora_dropout": 0.1}
FULL = {"finetuning_type": "full"}
BF16 = {"compute_dtype": "bf16"}
F32 = {"compute_dtype": "fp32"}
BF16_MOMENTS = {"optimizer_state_dtype": "bf16"}
ONE_RANK = {"ranks": 1, "gradient_accumulation_steps": 4, "allow_resume_mismatch": "ranks,gradient_accumulation_steps"}
TWO_RANKS = {"ranks": 2, "gradient_accumulation_steps": 1, "allow_resume_mismatch": "ranks,gradient_accumulation_steps"}
DISK = {"optimizer_tier": "disk", "offload_dir": "OUTPUT/scratch"}

# name: (keys of the run, keys of runs that resume from its step 2)
CASES = {
    "lora": ({**LORA, **BF16, "ranks": 2}, {"one-rank": ONE_RANK}),
    "lora-fp32": ({**LORA, **F32, "ranks": 2}, {"one-rank": ONE_RANK}),
    "modules": ({**LORA, **BF16, "ranks": 2, "lora_target_modules": "q_proj,down_proj", "modules_to_save": "embed_tokens,lm_head,norm"},
                {"one-rank": ONE_RANK}),
    "tables": ({**LORA, **BF16, "ranks": 1, "lora_target_modules": "v_proj,o_proj,embed_tokens,lm_head", "modules_to_save": "norm"},
               {"two-ranks": TWO_RANKS}),
    "full": ({**FULL, **BF16, "ranks": 2, "embedding_learning_rate": 0.002},
             {"one-rank": ONE_RANK, "disk": DISK, "bf16-moments": {**BF16_MOMENTS, "allow_resume_mismatch": "optimizer_state_dtype"}}),
    "full-bf16-moments": ({**FULL, **BF16, **BF16_MOMENTS, **DISK, "ranks": 1},
                          {"two-ranks": TWO_RANKS, "device": {"optimizer_tier": "device"}}),
    "full-some": ({**FULL, **BF16, "ranks": 2, "trainable_modules": "k_proj,down_proj,input_layernorm,embed_tokens"},
                  {"one-rank": ONE_RANK}),
}


def train(program, keys, output):
    command = [program, "train", "--output_dir", output]
    for key, value in {**COMMON, **keys}.items():
        command += ["--" + key, str(value).replace("OUTPUT", output)]
    if "offload_dir" in keys:
        os.makedirs(output + "/scratch", exist_ok=True)
    environment = {**os.environ, "BALLAST_CPU_BF16": "emulated"}  # the same sums on all processors
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        sys.exit("FAILED: %s: exit code %d\n%s" % (" ".join(command), done.returncode, done.stdout))


def resume(program, keys, golden, output):
    """Goes on from a committed checkpoint."""
    shutil.copytree(golden, output + "/checkpoints/" + STEP)
    train(program, {**keys, "resume_from_checkpoint": "true"}, output)


def state_of(folder):
    """What is compared: tensors. manifest.json and config.yaml name the build and keys of it."""
    return sorted(name for name in os.listdir(folder) if name.endswith(".safetensors") or name == "adapter_config.json")


def hashes_of(output):
    folder = output + "/checkpoints/step-4"
    return {name: hashlib.sha256(open(os.path.join(folder, name), "rb").read()).hexdigest() for name in state_of(folder)}


def products_of(folder):
    """The library of fp32 products and its instruction set, on which the bits of an fp32 run depend."""
    with open(folder + "/manifest.json", encoding="utf-8") as file:
        return json.load(file)["state"]["products"]
