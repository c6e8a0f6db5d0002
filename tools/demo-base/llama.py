# SPDX-License-Identifier: Apache-2.0
"""A Llama in plain PyTorch, as small as it can be said, and its files. For the demo's scripts only.

It is a second opinion on the equations: it shares no code with Ballast or with transformers, runs in float32 or
float64, and can hold its seven projections as FP8 rows (values, not codes).
"""

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F

PROJECTIONS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
               "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
FP8_MAX = 448.0
IGNORED_LABEL = -100


def tensor_shapes(config):
    """{Hugging Face name: shape} of a tied checkpoint."""
    hidden, inter = config["hidden_size"], config["intermediate_size"]
    n_q, n_kv = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    in_layer = {"self_attn.q_proj": (n_q, hidden), "self_attn.k_proj": (n_kv, hidden),
                "self_attn.v_proj": (n_kv, hidden), "self_attn.o_proj": (hidden, n_q),
                "mlp.gate_proj": (inter, hidden), "mlp.up_proj": (inter, hidden), "mlp.down_proj": (hidden, inter),
                "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in in_layer.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    return shapes


def rope_frequencies(config):
    """Inverse frequencies (head_dim / 2) in float64, with Llama 3.1's scaling."""
    half, scaling = config["head_dim"] // 2, config["rope_scaling"]
    context, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    frequencies = []
    for i in range(half):
        inv = config["rope_theta"] ** (-i / half)
        wavelength = 2 * math.pi / inv
        if wavelength > context / low:
            inv /= factor
        elif wavelength >= context / high:
            smooth = (context / wavelength - low) / (high - low)
            inv = (1 - smooth) * inv / factor + smooth * inv
        frequencies.append(inv)
    return torch.tensor(frequencies, dtype=torch.float64)


def rotate(x, cos, sin):
    """RoPE on (..., T, head_dim); pairs are (i, i + head_dim / 2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Llama:
    """Weights are a dict of tensors by Hugging Face name; lora maps a projection's name to (A, B)."""

    def __init__(self, config, weights, lora=None, lora_scale=1.0):
        self.config, self.weights, self.lora, self.lora_scale = config, weights, lora or {}, lora_scale
        self.frequencies = rope_frequencies(config)

    def norm(self, x, name):
        variance = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(variance + self.config["rms_norm_eps"]) * self.weights[name + ".weight"]

    def linear(self, x, name):
        y = F.linear(x, self.weights[name + ".weight"])
        if name in self.lora:
            a, b = self.lora[name]
            y = y + self.lora_scale * F.linear(F.linear(x, a), b)
        return y

    def attention(self, x, prefix, cos, sin, mask):
        n_rows, n_tokens, _ = x.shape
        dim = self.config["head_dim"]
        q, k, v = (self.linear(x, f"{prefix}.self_attn.{p}_proj").view(n_rows, n_tokens, -1, dim).transpose(1, 2)
                   for p in "qkv")
        n_share = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(n_share, dim=1) for t in (rotate(k, cos, sin), v))
        scores = rotate(q, cos, sin) @ k.transpose(2, 3) / math.sqrt(dim) + mask
        out = (scores.softmax(-1) @ v).transpose(1, 2).reshape(n_rows, n_tokens, -1)
        return self.linear(out, f"{prefix}.self_attn.o_proj")

    def logits(self, ids):
        """ids (rows, T) -> logits (rows, T, vocabulary)."""
        embedding = self.weights["model.embed_tokens.weight"]
        n_tokens, dtype = ids.shape[1], embedding.dtype
        angles = torch.arange(n_tokens, dtype=torch.float64)[:, None] * self.frequencies
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        mask = torch.full((n_tokens, n_tokens), -math.inf, dtype=dtype).triu(1)
        x = F.embedding(ids, embedding)
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}"
            x = x + self.attention(self.norm(x, f"{prefix}.input_layernorm"), prefix, cos, sin, mask)
            h = self.norm(x, f"{prefix}.post_attention_layernorm")
            gate, up = self.linear(h, f"{prefix}.mlp.gate_proj"), self.linear(h, f"{prefix}.mlp.up_proj")
            x = x + self.linear(F.silu(gate) * up, f"{prefix}.mlp.down_proj")
        return F.linear(self.norm(x, "model.norm"), embedding)

    def loss(self, ids, labels, reduction="mean"):
        """Cross-entropy of labels[t+1] given ids[..t]; IGNORED_LABEL does not count."""
        logits = self.logits(ids)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED_LABEL,
                               reduction=reduction)

    def greedy(self, ids, n_new, eos):
        """Up to n_new token ids that follow the list ids, the last of them eos if it came."""
        new = []
        with torch.no_grad():
            while len(new) < n_new and eos not in new:
                new.append(int(self.logits(torch.tensor([ids + new]))[0, -1].argmax()))
        return new


def batch_of(rows):
    """[(ids, labels)] -> two padded tensors. Padding needs no mask: it follows every token that counts."""
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full_like(ids, IGNORED_LABEL)
    for i, (row_ids, row_labels) in enumerate(rows):
        ids[i, :len(row_ids)] = torch.tensor(row_ids)
        labels[i, :len(row_labels)] = torch.tensor(row_labels)
    return ids, labels


def mean_loss(model, rows, n_at_once=32):
    """Mean over all counted labels of all rows."""
    total, n_labels = 0.0, 0
    with torch.no_grad():
        for i in range(0, len(rows), n_at_once):
            ids, labels = batch_of(rows[i:i + n_at_once])
            total += model.loss(ids, labels, reduction="sum").item()
            n_labels += (labels[:, 1:] != IGNORED_LABEL).sum().item()
    return total / n_labels


def fp8_rows(weight):
    """The float32 values that `base_format: fp8_row` holds: E4M3 of w / scale, times scale, scale = absmax / 448."""
    weight = weight.float()
    scale = weight.abs().amax(1, keepdim=True) / FP8_MAX
    scale[scale == 0] = 1.0
    ratio = weight / scale
    exponent = torch.frexp(ratio)[1].clamp(min=-5)     # ratio = m 2^e, 0.5 <= |m| < 1; subnormals share e = -5
    step = torch.ldexp(torch.ones_like(ratio), exponent - 4)
    return (torch.round(ratio / step) * step).clamp(-FP8_MAX, FP8_MAX) * scale


def with_fp8_base(weights):
    return {name: fp8_rows(w) if any(p in name for p in PROJECTIONS) else w for name, w in weights.items()}


def save_bf16(path, weights):
    """Writes a safetensors file, tensors in name order, BF16."""
    header, offset, payload = {"__metadata__": {"format": "pt"}}, 0, []
    for name in sorted(weights):
        data = weights[name].bfloat16().contiguous().view(torch.int16).numpy().tobytes()
        header[name] = {"dtype": "BF16", "shape": list(weights[name].shape),
                        "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
        payload.append(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    Path(path).write_bytes(len(text).to_bytes(8, "little") + text + b"".join(payload))


def load_bf16(path, dtype):
    """Reads what save_bf16 wrote."""
    raw = Path(path).read_bytes()
    n_header = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:8 + n_header])
    header.pop("__metadata__")
    weights = {}
    for name, entry in header.items():
        begin, end = (8 + n_header + offset for offset in entry["data_offsets"])
        bits = torch.frombuffer(bytearray(raw[begin:end]), dtype=torch.bfloat16)
        weights[name] = bits.view(entry["shape"]).to(dtype)
    return weights


def load_base(directory, dtype=torch.float32):
    """(config, weights) of a directory that train_base.py wrote."""
    directory = Path(directory)
    config = json.loads((directory / "config.json").read_text())
    return config, load_bf16(directory / "model.safetensors", dtype)
