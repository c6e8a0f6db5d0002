#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""make_golden.py PROGRAM -- writes tests/golden/checkpoints with PROGRAM: a model with two layers of eight channels, rows, and of each
case in tests/train/golden_checkpoints.py the checkpoint of step 2 and the hashes of step 4.

The committed files are of a program before LoRA, full fine-tuning and modules_to_save had one state: today's must read and write the
same. Make new files of new cases alone, with a program that passes test_golden_checkpoints."""
import json
import os
import random
import shutil
import struct
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../tests/train"))
import golden_checkpoints as golden  # noqa: E402

HIDDEN, LAYERS, VOCAB, HEADS, KV_HEADS, HEAD, INNER = 8, 2, 32, 2, 1, 4, 16


def shapes():
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for i in range(LAYERS):
        layer = "model.layers.%d." % i
        yield layer + "input_layernorm.weight", (HIDDEN,)
        for name, rows in (("q", HEADS * HEAD), ("k", KV_HEADS * HEAD), ("v", KV_HEADS * HEAD)):
            yield layer + "self_attn.%s_proj.weight" % name, (rows, HIDDEN)
        yield layer + "self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD)
        yield layer + "post_attention_layernorm.weight", (HIDDEN,)
        for name in ("gate", "up"):
            yield layer + "mlp.%s_proj.weight" % name, (INNER, HIDDEN)
        yield layer + "mlp.down_proj.weight", (HIDDEN, INNER)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCAB, HIDDEN)


def write_model(folder):
    random.seed(1)
    header, data = {}, b""
    for name, shape in shapes():
        n = shape[0] * (shape[1] if len(shape) > 1 else 1)
        values = [1 + random.gauss(0, 0.1) if len(shape) == 1 else random.gauss(0, 0.3) for _ in range(n)]
        begin = len(data)
        data += struct.pack("<%df" % n, *values)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    os.makedirs(folder)
    with open(folder + "/model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
              "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD,
              "vocab_size": VOCAB, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
              "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "torch_dtype": "float32"}
    with open(folder + "/config.json", "w", encoding="utf-8") as file:
        json.dump(config, file, indent=1)
        file.write("\n")


def write_rows(path):
    random.seed(2)
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(16):
            ids = [random.randrange(VOCAB) for _ in range(random.randrange(6, 14))]
            file.write(json.dumps({"input_ids": ids, "labels": [-100] + ids[1:]}) + "\n")


def make_case(program, name, work):
    keys, others = golden.CASES[name]
    golden.train(program, keys, work + "/run")
    target = "%s/%s" % (golden.GOLDEN, name)
    shutil.copytree(work + "/run/checkpoints/" + golden.STEP, target)
    expected = {"run": golden.hashes_of(work + "/run")}
    for other, more in others.items():
        golden.resume(program, {**keys, **more}, target, work + "/" + other)
        expected[other] = golden.hashes_of(work + "/" + other)
    with open(target + ".json", "w", encoding="utf-8") as file:
        json.dump(expected, file, indent=1)
        file.write("\n")


def main():
    program = os.path.abspath(sys.argv[1])
    os.chdir(golden.ROOT)
    if not os.path.exists(golden.GOLDEN + "/model"):
        os.makedirs(golden.GOLDEN, exist_ok=True)
        write_model(golden.GOLDEN + "/model")
        write_rows(golden.GOLDEN + "/rows.jsonl")
    for name in golden.CASES:
        if not os.path.exists("%s/%s.json" % (golden.GOLDEN, name)):
            with tempfile.TemporaryDirectory() as work:
                make_case(program, name, work)


main()
