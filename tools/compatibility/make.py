#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes bench/results/compatibility.md: models as transformers writes them, in Ballast and in transformers and PEFT with float64.

usage: make.py [--ballast PROGRAM] [--processes N] [--check] [--only FAMILY] [--results FILE]

--results keeps what was computed in FILE, a line per model: a run that was interrupted, or runs of one family each (--only), are
completed by a run over all families. FILE is of one program: remove it when the program changed.
--check writes nothing: it runs one combination per family and every rejection, and compares with the page. Exit 77: a library is
missing, or the page is of another version of transformers.

Made with Python 3.11.2, torch 2.15.0, transformers 5.24.0, peft 0.21.2, tokenizers 0.23.3.
"""
import argparse
import collections
import contextlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings

os.environ['HF_HUB_OFFLINE'] = '1'
try:
    import numpy as np
    import peft
    import tokenizers
    import torch
    import transformers
    from safetensors.numpy import save_file
except ImportError as e:
    print('skipped: %s' % e)
    sys.exit(77)

import cases
from cases import FAMILIES, ROOT, ROPES
import make_golden
import reference
import checkpoint
import tokenizers_of

PAGE = os.path.join(ROOT, 'bench', 'results', 'compatibility.md')
LOSS, GRADIENT, TIE = 1e-6, 1e-4, 1e-4
NEW_TOKENS = 16
PROMPT = "The License's 2 works,\n caf\u00e9"
Result = collections.namedtuple('Result', 'family rope dtype tied tokenizer loss gradient n_equal n_greedy problem')


# ---- a model, as transformers writes it

@contextlib.contextmanager
def float64():
    """transformers' code has no float32 inside."""
    kept = torch.float32, torch.float, torch.Tensor.float, torch.get_default_dtype()
    make_golden.use_float64()
    yield
    torch.float32, torch.float, torch.Tensor.float = kept[:3]
    torch.set_default_dtype(kept[3])


def write_model(directory, family, rope, dtype, tied, tokenizer, seed):
    kind, settings, _ = FAMILIES[family]
    tokens = tokenizers_of.make(tokenizer)
    config = make_golden.config_of(kind, {
        **settings, 'vocab_size': len(tokens), 'bos_token_id': tokens.bos_token_id, 'eos_token_id': tokens.eos_token_id,
        'pad_token_id': None, 'tie_word_embeddings': tied, 'rope_parameters': cases.rope_parameters(family, rope)})
    model = make_golden.class_of(kind)(config)
    with torch.no_grad():
        values = make_golden.make_weights(model, seed)
        for name, p in model.named_parameters():
            p.copy_(torch.from_numpy(values[name]))
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    tokens.save_pretrained(directory)
    return tokens


def load_float64(directory, kind):
    """The model of the written files."""
    config = transformers.AutoConfig.from_pretrained(directory)
    model = make_golden.class_of(kind)._from_config(config, attn_implementation='eager', dtype=torch.float64)
    stored = checkpoint.read_safetensors(os.path.join(directory, 'model.safetensors'))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.from_numpy(checkpoint.widen(*stored[make_golden.stored_name(kind, name)]).astype(np.float64)))
    return model.double().eval()


def write_rows(path, vocab, seed):
    rng = np.random.Generator(np.random.PCG64(seed))
    rows = [{'input_ids': ids, 'labels': [-100] * 3 + ids[3:]}
            for ids in ([int(t) for t in rng.integers(3, vocab, n)] for n in cases.ROW_LENGTHS)]
    with open(path, 'w') as f:
        f.writelines(json.dumps(r) + '\n' for r in rows)
    return rows


def greedy(model, ids):
    """The tokens up to the end token, or up to a near tie, where float32 may choose the other one."""
    out = []
    for _ in range(NEW_TOKENS):
        logits = make_golden.logits_of(model, {'input_ids': ids + out})[-1]
        top = torch.topk(logits, 2)
        if top.values[0] - top.values[1] < TIE * logits.abs().max():
            break
        out.append(int(top.indices[0]))
        if out[-1] == model.config.get_text_config().eos_token_id:
            break
    return out


# ---- Ballast

def ballast(*words):
    run = subprocess.run([ballast.program, *words], capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError('exit code %d: %s' % (run.returncode, run.stderr.strip().splitlines()[-1]))
    return run.stdout


def train_step(directory, targets):
    """The loss and the LoRA gradients of one step over all rows."""
    out, dump = os.path.join(directory, 'out'), os.path.join(directory, 'gradients.safetensors')
    ballast('train', '--model_name_or_path', directory, '--output_dir', out, '--train_file', os.path.join(directory, 'rows.jsonl'),
            '--data_format', 'tokens', '--base_format', 'stored', '--init_adapter', os.path.join(directory, 'adapter'),
            '--per_device_train_batch_size', str(len(cases.ROW_LENGTHS)), '--max_seq_length', str(cases.POSITIONS), '--max_steps', '1',
            '--save_steps', '0', '--max_grad_norm', '0', '--device', 'cpu', '--threads', '1', '--dump_gradients', dump)
    with open(os.path.join(out, 'metrics.jsonl')) as f:
        loss = next(r['loss'] for r in map(json.loads, f) if 'loss' in r)
    return loss, {n: checkpoint.widen(*t) for n, t in checkpoint.read_safetensors(dump).items()}


def generate(directory):
    return json.loads(ballast('generate', '--model', directory, '--prompt', PROMPT, '--max_new_tokens', str(NEW_TOKENS),
                              '--base_format', 'stored', '--device', 'cpu', '--threads', '1', '--json'))


# ---- a combination

def compare(directory, combination, seed):
    family, rope, dtype, tied, tokenizer = combination
    targets = FAMILIES[family][2]
    tokens = write_model(directory, family, rope, dtype, tied, tokenizer, seed)
    rows = write_rows(os.path.join(directory, 'rows.jsonl'), len(tokens), seed)
    with float64():
        model = load_float64(directory, FAMILIES[family][0])
        prompt = tokens(PROMPT)['input_ids']
        with torch.no_grad():
            expected = greedy(model, prompt)
        model = make_golden.write_adapter(os.path.join(directory, 'adapter'), directory, model, targets, seed)
        expected_loss = reference.backward(model, rows)
        expected_gradients = {n: p.grad.numpy() for n, p in reference.lora_parameters(model).items()}
    answer = generate(directory)
    if answer['prompt_ids'] != prompt:
        raise RuntimeError('other tokens of the prompt: %s, not %s' % (answer['prompt_ids'], prompt))
    ids = answer['ids'] + [answer['stop_id']] * (answer['stop_id'] is not None)
    same = [a == b for a, b in zip(ids, expected)]
    loss, gradients = train_step(directory, targets)
    if set(gradients) != set(expected_gradients):
        raise RuntimeError('other gradients: %s' % sorted(set(gradients) ^ set(expected_gradients))[:2])
    worst = max(np.linalg.norm(gradients[n] - g) / np.linalg.norm(g) for n, g in expected_gradients.items())
    return abs(loss / expected_loss - 1), worst, sum(same), len(expected)


def run_combination(job):
    seed, combination = job
    with tempfile.TemporaryDirectory(prefix='ballast-compatibility-') as directory:
        try:
            loss, gradient, n_equal, n_greedy = compare(directory, combination, seed)
        except Exception as e:  # a row of the page has to say it
            return Result(*combination, 0, 0, 0, 0, '%s: %s' % (type(e).__name__, e))
    problems = ['loss'] * (not loss <= LOSS) + ['gradients'] * (not gradient <= GRADIENT) + ['tokens'] * (n_equal < n_greedy)
    return Result(*combination, loss, gradient, n_equal, n_greedy, ', '.join(problems))


def prepare(program):
    """A process's settings."""
    ballast.program = program
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter('ignore')
    reference.row_logits = make_golden.logits_of


def run_all(jobs, program, processes):
    with multiprocessing.get_context('fork').Pool(processes, prepare, (program,)) as pool:
        for i, result in enumerate(pool.imap(run_combination, jobs)):
            if result.problem:
                print('FAILED: %s' % (result,), flush=True)
            elif i % 20 == 0:
                print('%d of %d' % (i + 1, len(jobs)), flush=True)
            yield result


def read_results(path):
    """Those without a problem, by their combinations."""
    if not path or not os.path.exists(path):
        return {}
    with open(path) as f:
        results = [Result(*json.loads(line)) for line in f]
    return {r[:5]: r for r in results if not r.problem}


def run_missing(jobs, program, processes, path):
    """The results of all jobs, in their order; the new ones are added to the file."""
    known = read_results(path)
    missing = [j for j in jobs if j[1] not in known]
    with open(path or os.devnull, 'a') as f:
        for result in run_all(missing, program, processes):
            f.write(json.dumps(result) + '\n')
            f.flush()
            known[result[:5]] = result
    return [known[combination] for _, combination in jobs]


# ---- what is rejected

PREFIX = 'ballast: error: '


def error_of(directory):
    run = subprocess.run([ballast.program, 'generate', '--model', directory, '--input_ids', '1', '--json', '--device', 'cpu'],
                         capture_output=True, text=True)
    lines = [line for line in run.stderr.splitlines() if line.startswith(PREFIX)]
    if run.returncode != 3 or len(lines) != 1:
        raise SystemExit('%s: not rejected by one line: exit code %d: %s' % (directory, run.returncode, run.stderr))
    return lines[0][len(PREFIX):].replace(directory, 'MODEL')


def write_config(directory, kind, keys):
    os.makedirs(directory)
    config = getattr(transformers, kind)(**({} if kind != 'LlamaConfig' else {**cases.DECODER, 'vocab_size': 64}))
    text = {**config.to_dict(), 'architectures': [kind.replace('TextConfig', 'Config').replace('Config', 'ForCausalLM')], **keys}
    with open(os.path.join(directory, 'config.json'), 'w') as f:
        json.dump(text, f, default=str)
    return text


def write_packed(directory, what):
    """A Llama, one projection of which is stored in another format."""
    settings, tensors = cases.REJECTED_FORMATS[what]
    write_config(directory, 'LlamaConfig', {'quantization_config': settings})
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**cases.DECODER, vocab_size=64))
    stored = {n: p.detach().numpy() for n, p in model.named_parameters()}
    name = 'model.layers.1.mlp.up_proj'
    del stored[name + '.weight']
    types = {'U8': np.uint8, 'I8': np.int8, 'I32': np.int32, 'F16': np.float16, 'F32': np.float32}
    stored |= {name + ending: np.zeros(shape, types[dtype]) for ending, dtype, shape in tensors}
    save_file(stored, os.path.join(directory, 'model.safetensors'))


def rejected_types(root):
    """The types of models, and their error, which differs in the type only."""
    types, errors = [], set()
    for kind in cases.REJECTED_TYPES:
        directory = os.path.join(root, kind)
        types.append(write_config(directory, kind, {})['model_type'])
        errors.add(error_of(directory).replace('"%s"' % types[-1], '"TYPE"'))
    if len(errors) != 1:
        raise SystemExit('several errors: %s' % errors)
    return ', '.join('`%s`' % t for t in types), errors.pop()


def rejection_lines():
    with tempfile.TemporaryDirectory(prefix='ballast-compatibility-') as root:
        rows = [rejected_types(root)]
        for what, (kind, keys) in cases.REJECTED_KEYS.items():
            write_config(os.path.join(root, what), kind, keys)
            rows.append((what, error_of(os.path.join(root, what))))
        for what in cases.REJECTED_FORMATS:
            write_packed(os.path.join(root, what), what)
            rows.append((what, error_of(os.path.join(root, what))))
    return ['| %s | `%s` |' % (what, error.replace('|', '\\|')) for what, error in rows]


# ---- the page

def versions():
    return 'transformers %s, PEFT %s, torch %s, tokenizers %s' % (
        transformers.__version__, peft.__version__, torch.__version__.split('+')[0], tokenizers.__version__)


def result_lines(results):
    lines, group = [], collections.defaultdict(list)
    for r in results:
        group[r.family, r.rope].append(r)
    for (family, rope), rows in group.items():
        losses = ['%.1e' % max(r.loss for r in rows if r.dtype == d) for d in cases.DTYPES]
        lines.append('| %s | %s | %s | %.1e | %d of %d |' % (
            family, rope, ' | '.join(losses), max(r.gradient for r in rows), sum(r.n_equal for r in rows),
            sum(r.n_greedy for r in rows)))
    return lines


def page(results):
    worst = max(results, key=lambda r: r.loss), max(results, key=lambda r: r.gradient)
    return PAGE_TEXT.format(
        versions=versions(), n=len(results), loss='%.1e' % worst[0].loss, gradient='%.1e' % worst[1].gradient,
        shapes='\n'.join('- %s' % s for s in tokenizers_of.SHAPES), results='\n'.join(result_lines(results)),
        rejections='\n'.join(rejection_lines()), new=NEW_TOKENS, positions=cases.POSITIONS)


PAGE_TEXT = """# Compatibility

`tools/compatibility/make.py` makes this page; a test runs a part of it again. Small random models,
written by transformers' `save_pretrained`, run in Ballast and in transformers and PEFT in float64.
Versions: {versions}.

```
python3 tools/compatibility/make.py --ballast build/release/ballast
```

## Models

{n} models: each family with each RoPE type, in three dtypes, with tied and untied embeddings. Of a
family and a RoPE type, the six models have the six tokenizers:

{shapes}

The columns are the worst of a line's models:

- loss: relative error of the loss of one training step (limit 1e-6); fp32, bf16 and fp16 are the
  dtypes of the checkpoint. `base_format: stored`
- gradients: relative error of the first step's gradient of a LoRA weight (limit 1e-4)
- greedy tokens: equal tokens of up to {new} per model after a text prompt, whose tokens are equal,
  too. Counting stops where float64's two largest logits are within 1e-4 of the largest

Over all lines: loss {loss}, gradients {gradient}. Sequences are shorter than the {positions}
positions of the models; `longrope` has rows on both sides of its limit.

| family | RoPE | loss, fp32 | loss, bf16 | loss, fp16 | gradients | greedy tokens |
| --- | --- | --- | --- | --- | --- | --- |
{results}

## Rejections

Each is one line with the key or the tensor, exit code 3. MODEL is the model's directory. Other
types of models are rejected like those of the first row.

| what | error |
| --- | --- |
{rejections}
"""


def check(results):
    """The page's families and its rejections are today's."""
    with open(PAGE) as f:
        text = f.read()
    if ('transformers %s,' % transformers.__version__) not in text:
        print('skipped: bench/results/compatibility.md is not of transformers %s' % transformers.__version__)
        sys.exit(77)
    bad = [r for r in results if r.problem]
    missing = [r.family for r in results if not re.search(r'^\| %s \|' % re.escape(r.family), text, re.M)]
    changed = [line for line in rejection_lines() if line not in text]
    for line in missing + changed:
        print('FAILED: not on the page: %s' % line)
    return not (bad or missing or changed)


def main():
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    p.add_argument('--ballast', default=os.path.join(ROOT, 'build', 'release', 'ballast'))
    p.add_argument('--processes', type=int, default=2)
    p.add_argument('--check', action='store_true')
    p.add_argument('--only', metavar='FAMILY')
    p.add_argument('--results', metavar='FILE')
    a = p.parse_args()
    start = time.monotonic()
    prepare(os.path.abspath(a.ballast))
    shapes = list(tokenizers_of.SHAPES)
    chosen = cases.quick(shapes) if a.check else cases.combinations(shapes)
    jobs = [j for j in enumerate(chosen) if not a.only or j[1][0] == a.only]
    results = run_missing(jobs, ballast.program, a.processes, a.results)
    failed = [r for r in results if r.problem]
    print('%d models, %d failed, %.0f s' % (len(results), len(failed), time.monotonic() - start), flush=True)
    if a.check:
        sys.exit(not check(results))
    if not a.only and not failed:
        with open(PAGE, 'w') as f:
            f.write(page(results))
    sys.exit(bool(failed))


if __name__ == '__main__':
    main()
