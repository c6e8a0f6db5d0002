# SPDX-License-Identifier: Apache-2.0
"""The float64 reference: Hugging Face's Llama, PEFT's LoRA, torch's AdamW and clipping, Hugging Face's schedules.

Hugging Face's Llama computes in float32 whatever its weights are in four places: RMSNorm, rotary angles, the softmax of the
attention, and logits.float(). float64_llama() replaces these with the same formulas in float64; self_check.py holds the
result against the unmodified classes.
"""
import json
import math
import os

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, get_scheduler
from transformers.models.llama import modeling_llama

import checkpoint

IGNORED = -100
CONFIG_KEYS = ('vocab_size', 'hidden_size', 'intermediate_size', 'num_hidden_layers', 'num_attention_heads',
               'num_key_value_heads', 'head_dim', 'max_position_embeddings', 'rms_norm_eps', 'rope_theta', 'rope_scaling',
               'tie_word_embeddings')


# ---- the model

def rope_of(config):
    """theta and scaling (None: plain RoPE); transformers 5 has both in rope_parameters."""
    if hasattr(config, 'rope_theta'):
        return config.rope_theta, config.rope_scaling
    parameters = config.rope_parameters
    return parameters['rope_theta'], None if parameters['rope_type'] == 'default' else parameters


def inverse_frequencies(config):
    """theta^(-2i/d) in float64, with the three branches of Llama 3.1's scaling."""
    d = config.head_dim
    theta, scaling = rope_of(config)
    inv = theta ** -(torch.arange(0, d, 2, dtype=torch.float64) / d)
    if not scaling:
        return inv
    assert scaling['rope_type'] == 'llama3', scaling
    factor, lo, hi = scaling['factor'], scaling['low_freq_factor'], scaling['high_freq_factor']
    original = scaling['original_max_position_embeddings']
    wavelength = 2 * math.pi / inv
    s = (original / wavelength - lo) / (hi - lo)
    between = (1 - s) * inv / factor + s * inv
    return torch.where(wavelength > original / lo, inv / factor, torch.where(wavelength < original / hi, inv, between))


def _norm_forward(self, x):
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def _rotary_forward(self, x, position_ids):
    angle = position_ids[:, :, None].double() * inverse_frequencies(self.config)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


_softmax = torch.nn.functional.softmax


def _softmax_in_input_dtype(x, dim=None, _stacklevel=3, dtype=None):
    return _softmax(x, dim=dim)


def float64_llama():
    """Makes every Llama built or run from here on compute in float64 throughout."""
    modeling_llama.LlamaRMSNorm.forward = _norm_forward
    modeling_llama.LlamaRotaryEmbedding.forward = _rotary_forward
    torch.nn.functional.softmax = _softmax_in_input_dtype
    torch.set_default_dtype(torch.float64)


def build_config(config):
    """What Hugging Face needs of a config.json; the quantization is left out, since the weights come dequantized."""
    settings = {k: config[k] for k in CONFIG_KEYS if config.get(k) is not None}
    settings.setdefault('head_dim', config['hidden_size'] // config['num_attention_heads'])
    return LlamaConfig(attn_implementation='eager', use_cache=False, **settings)


def build_llama(config, weights, dtype=torch.float64):
    """A LlamaForCausalLM with exactly these weights; a tied model may hold its embedding under either name."""
    model = LlamaForCausalLM(build_config(config))
    state = {n: torch.from_numpy(w.copy()) for n, w in weights.items()}
    if config.get('tie_word_embeddings'):
        either = state.get('model.embed_tokens.weight', state.get('lm_head.weight'))
        state['model.embed_tokens.weight'] = state['lm_head.weight'] = either
    model = model.to(dtype)
    model.load_state_dict(state, strict=True)
    return model.eval()


def load_llama(directory, base_format, dtype=torch.float64):
    return build_llama(*checkpoint.load_model(directory, base_format), dtype)


# ---- the adapter

def read_adapter(directory):
    with open(os.path.join(directory, 'adapter_config.json')) as f:
        config = json.load(f)
    tensors = checkpoint.read_safetensors(os.path.join(directory, 'adapter_model.safetensors'))
    return config, {n: checkpoint.widen(*t) for n, t in tensors.items()}


def attach_adapter(model, directory):
    """PEFT's own LoRA around `model`, holding the adapter's values; refuses a missing or an unknown tensor."""
    config, tensors = read_adapter(directory)
    model = get_peft_model(model, LoraConfig(r=config['r'], lora_alpha=config['lora_alpha'], lora_dropout=0.0,
                                             target_modules=config['target_modules'],
                                             use_rslora=config.get('use_rslora', False), task_type='CAUSAL_LM'))
    parameters = lora_parameters(model)
    if set(parameters) != set(tensors):
        raise SystemExit('%s: keys do not match: %s' % (directory, sorted(set(parameters) ^ set(tensors))[:4]))
    with torch.no_grad():
        for name, p in parameters.items():
            if tuple(p.shape) != tensors[name].shape:
                raise SystemExit('%s: %s has the shape %s, not %s' % (directory, name, tensors[name].shape, tuple(p.shape)))
            p.copy_(torch.from_numpy(tensors[name].copy()))
    return model


def lora_parameters(model):
    """Name in an adapter file -> parameter."""
    return {n.replace('.default.', '.'): p for n, p in model.named_parameters() if p.requires_grad}


# ---- the loss

def read_rows(path):
    with open(path) as f:
        return [json.loads(line) for line in f if line.strip()]


def attention_inputs(row, dtype):
    """Position ids, and the additive mask: causal, and block-diagonal over documents."""
    n = len(row['input_ids'])
    document = torch.tensor(row.get('document_ids') or [0] * n)
    first = torch.tensor([int((document == d).nonzero()[0]) for d in document])
    allowed = torch.ones(n, n).tril().bool() & (document[:, None] == document[None, :])
    mask = torch.zeros(n, n, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)
    return (torch.arange(n) - first)[None], mask[None, None]


def row_logits(model, row):
    base = model.get_base_model() if hasattr(model, 'get_base_model') else model
    positions, mask = attention_inputs(row, base.lm_head.weight.dtype)
    hidden = base.model(input_ids=torch.tensor([row['input_ids']]), attention_mask=mask, position_ids=positions,
                        use_cache=False)[0]
    return base.lm_head(hidden)[0]


def row_loss(model, row):
    """The sum of w_t * -log p(label_t): position t predicts labels[t+1], whose weight is weights[t+1]."""
    labels = torch.tensor(row['labels'][1:])
    weights = torch.tensor(row.get('weights') or [1.0] * len(row['labels']), dtype=torch.float64)[1:]
    kept = labels != IGNORED
    logp = torch.log_softmax(row_logits(model, row)[:-1].double(), dim=-1)
    return -(weights[kept] * logp[kept.nonzero()[:, 0], labels[kept]]).sum()


def row_labels(row):
    """How many labels count: not masked, not the row's first, and of a weight other than 0."""
    weights = row.get('weights') or [1.0] * len(row['labels'])
    return sum(y != IGNORED and w != 0 for y, w in zip(row['labels'][1:], weights[1:]))


def evaluate(model, rows):
    with torch.no_grad():
        return sum(row_loss(model, r).item() for r in rows) / sum(row_labels(r) for r in rows)


# ---- training

def step_rows(rows, step, batch):
    """The rows of a step (from 0), in file order, running on into the next epoch."""
    return [rows[i % len(rows)] for i in range(step * batch, (step + 1) * batch)]


def backward(model, rows):
    """Fills the gradients and returns the loss of one optimizer step."""
    labels, total = sum(row_labels(r) for r in rows), 0.0
    for row in rows:
        loss = row_loss(model, row) / labels
        total += loss.item()
        loss.backward()
    return total


def train(model, rows, batch, config, on_step):
    """Runs config['max_steps'] steps; on_step(index, loss, norm before clipping, learning rate used, gradients)."""
    parameters = lora_parameters(model)
    optimizer = torch.optim.AdamW(parameters.values(), lr=config['learning_rate'], eps=config['adam_epsilon'],
                                  betas=(config['adam_beta1'], config['adam_beta2']), weight_decay=config['weight_decay'])
    scheduler = get_scheduler(config['lr_scheduler_type'], optimizer, num_warmup_steps=config['warmup_steps'],
                              num_training_steps=config['max_steps'])
    for step in range(config['max_steps']):
        optimizer.zero_grad()
        loss = backward(model, step_rows(rows, step, batch))
        gradients = {n: p.grad.numpy().copy() for n, p in parameters.items()}
        norm = math.sqrt(sum(float((g * g).sum()) for g in gradients.values()))
        if config['max_grad_norm'] > 0:
            torch.nn.utils.clip_grad_norm_(parameters.values(), config['max_grad_norm'])
        rate = scheduler.get_last_lr()[0]
        optimizer.step()
        scheduler.step()
        on_step(step, loss, norm, rate, gradients)


def adapter_values(model):
    return {n: p.detach().numpy().copy() for n, p in lora_parameters(model).items()}


def projections(array, n=2):
    """Sums of the elements under n fixed patterns of signs and sizes, which a permuted or partly wrong tensor changes.

    Element i (from 0, row-major), pattern k: h = (i+1)*2654435761 + (k+1)*2246822519; h ^= h>>15; h *= 2246822519; h ^= h>>13, in
    uint32; weight = h / 2^31 - 1.
    """
    i = np.arange(1, array.size + 1, dtype=np.uint64)
    flat, out, mask = array.reshape(-1).astype(np.float64), [], np.uint64(0xFFFFFFFF)
    for k in range(1, n + 1):
        h = (i * np.uint64(2654435761) + np.uint64(k * 2246822519)) & mask
        h ^= h >> np.uint64(15)
        h = (h * np.uint64(2246822519)) & mask
        h ^= h >> np.uint64(13)
        out.append(float((flat * (h.astype(np.float64) / 2 ** 31 - 1)).sum()))
    return out
