#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes tests/tokenizer/fixtures/chat.json and chat_spm.json, two small tokenizers, and tests/chat/chat_golden.json: ids and labels of
conversations as Hugging Face's transformers renders and tokenizes them, and rows concatenated as its examples do it.

    python3 -m venv /tmp/venv && /tmp/venv/bin/pip install transformers==4.52.4 tokenizers==0.21.4 jinja2==3.1.6
    BALLAST_TEST_DATA=... /tmp/venv/bin/python tools/golden/text/make_chat_golden.py

Rendering: PreTrainedTokenizerFast.apply_chat_template with the models' jinja texts. Masks, as TRL makes them: the same texts with a
mark before and after the assistant's text ({% generation %} in TRL); a token is learned if it begins between the marks.
Special tokens spelled in a message are hidden from the renderer and tokenized as text; where there are none, the ids are asserted
to be apply_chat_template's own."""
import json
import os
import pathlib
import random
import re

from transformers import PreTrainedTokenizerFast, __version__

from make_fixtures import HELLO, SPLIT, added, alphabet, build, byte_level, file, replace, sequence, template

ROOT = pathlib.Path(__file__).resolve().parents[3] / "tests"
DATA = pathlib.Path(os.environ["BALLAST_TEST_DATA"])
START, END, HIDDEN = "\ue000", "\ue001", 0xE100

LLAMA3 = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+"
    " message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}{% endfor %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}"
    "{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
)
SAID3 = "message['content'] | trim + '<|eot_id|>'"
SAID = {  # the assistant's text, in the jinja text
    "llama3": SAID3, "llama3.1": SAID3, "llama3.2": SAID3, "chatml": "message['content'] + '<|im_end|>'",
    "llama2": "' '  + content.strip() + ' ' + eos_token",
}  # fmt: skip
JINJA = {
    "llama2": LLAMA2, "llama3": LLAMA3, "chatml": CHATML,
    "llama3.1": (DATA / "suites/chat-templates/meta-llama-Llama-3.1-8B-Instruct.jinja").read_text(),
    "llama3.2": (DATA / "suites/chat-templates/meta-llama-Llama-3.2-3B-Instruct.jinja").read_text(),
}  # fmt: skip


def marked(name):
    said, jinja = SAID[name], JINJA[name]
    assert jinja.count(said) == 1
    who = "(%r if message['role'] == 'assistant' else '')"
    return jinja.replace(said, f"{who % START} + {said} + {who % END}")


def make_tokenizers():
    byte = alphabet()
    space = byte[32]
    words = [("u", "s"), ("e", "r"), ("us", "er"), (space, "a"), (space, "h"), *HELLO, (space, "hello"), (byte[10], byte[10])]
    model = build(byte.values(), words, ignore_merges=True)
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>"]
    specials = added(len(model["vocab"]), [(n, "special") for n in names])
    split = {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False}
    pre = sequence("pretokenizers", split, byte_level(False, False))
    post = template({names[0]: specials[0]["id"]}, {})
    (ROOT / "tokenizer/fixtures/chat.json").write_text(json.dumps(file(model, specials, None, pre, post, byte_level(True, True)), indent=0) + "\n")

    metaspace = sequence("normalizers", {"type": "Prepend", "prepend": "\u2581"}, replace(" ", "\u2581"))
    decoder = sequence("decoders", replace("\u2581", " "), {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0})
    chars = [*"\u2581abcdefghilnorstuINST[]/<>SY"]
    words = [("\u2581", "["), ("I", "N"), ("S", "T"), ("IN", "ST"), ("\u2581[", "INST"), ("\u2581", "a"), *HELLO, ("\u2581", "hello"), ("\u2581", "\u2581")]
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    model = build(chars, words, extra=["<unk>", "<s>", "</s>", *bytes_], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    specials = added(0, [("<unk>", "special"), ("<s>", "special"), ("</s>", "special")])
    (ROOT / "tokenizer/fixtures/chat_spm.json").write_text(json.dumps(file(model, specials, metaspace, None, template({"<s>": 1}, {}), decoder), indent=0) + "\n")


def load(path):
    llama2 = "spm" in path.name or "llama2" in str(path)
    bos, eos = ("<s>", "</s>") if llama2 else ("<|begin_of_text|>", "<|end_of_text|>")
    return PreTrainedTokenizerFast(tokenizer_file=str(path), bos_token=bos, eos_token=eos)


def encode(tokenizer, name, messages, date):
    """Ids and labels of a conversation."""
    specials = sorted(tokenizer.all_special_tokens + [t.content for t in tokenizer.added_tokens_decoder.values() if t.special], key=len, reverse=True)
    specials = list(dict.fromkeys(specials))
    pattern = "(" + "|".join(map(re.escape, specials)) + ")"
    hide = lambda text: re.sub(pattern, lambda m: chr(HIDDEN + specials.index(m[0])), text)  # noqa: E731
    show = lambda text: "".join(specials[ord(c) - HIDDEN] if 0 <= ord(c) - HIDDEN < len(specials) else c for c in text)  # noqa: E731
    safe = [{**m, "content": hide(m["content"])} for m in messages]
    render = lambda jinja: tokenizer.apply_chat_template(safe, chat_template=jinja, tokenize=False, date_string=date)  # noqa: E731
    text = render(marked(name))
    assert text.replace(START, "").replace(END, "") == render(JINJA[name])

    backend, ids, labels, learn = tokenizer.backend_tokenizer, [], [], False
    backend.encode_special_tokens = True
    for part in re.split(pattern, text):
        plain = show(part.replace(START, "").replace(END, ""))
        learned = []  # by character of `plain`
        for c in part:
            if c in (START, END):
                learn = c == START
            else:
                learned += [learn] * len(show(c))
        if part in specials:
            ids.append(backend.token_to_id(part))
            labels.append(ids[-1] if learn else -100)
            continue
        encoding = backend.encode(plain, add_special_tokens=False)
        ids += encoding.ids
        labels += [i if learned[o[0]] else -100 for i, o in zip(encoding.ids, encoding.offsets)]
    backend.encode_special_tokens = False
    if safe == messages:
        assert ids == tokenizer.apply_chat_template(messages, chat_template=JINJA[name], tokenize=True, date_string=date)
    return ids, labels


def turns(*contents, roles=("user", "assistant")):
    return [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]


def system(text):
    return [{"role": "system", "content": text}]


CONVERSATIONS = [
    turns("hello", "hello a"),
    turns("hello", "a", "hello hello", "user\n\nhello"),
    system("be a hello") + turns("hello?", "a."),
    system("  be \n") + turns("\n\n hello \t", "  a\n\n\n", "\u00a0x\u3000", "\x1cy\x1f\u2028"),
    system("") + turns("hello", "a"),
    turns("<|eot_id|>hello<|begin_of_text|>", "<|start_header_id|>user<|end_header_id|>", "<s>[INST]</s> <<SYS>>", "a</s><|im_end|>\n"),
    turns("caf\u00e9 \u4f60\u597d", "\U0001f600\U0001f600 e\u0301"),
    turns("hello", "a", "hello, once more"),
    turns("a" * 300, " ".join(["hello"] * 100)),
    system("<</SYS>>\n\n[/INST] a </s>") + turns("\r\nhello\r\n", "[/INST] <0x41> \u2581a\u2581"),
]
# What Llama 2's template refuses.
FREE = [
    turns("a", "hello", roles=("assistant", "user")) + system("later") + turns("hello", "a"),
    turns("hello", "hello", "a", roles=("user", "user")) + turns("hello", "a", roles=("assistant", "assistant")),
]
PAIRS = [("chat", "llama3", None), ("chat", "llama3.1", None), ("chat", "llama3.1", "01 Dec 2025"), ("chat", "llama3.2", "09 Jan 2026"),
         ("chat", "chatml", None), ("chat_spm", "llama2", None)]  # fmt: skip
DATASETS = ["rasbt_messages_1100.jsonl", "fastchat_messages.jsonl", "gsm8k_messages_1000.jsonl"]
REAL = [("tokenizers/llama3", "llama3", None), ("tokenizers/llama3", "llama3.1", None), ("tokenizers/llama3", "llama3.2", "01 Dec 2025"),
        ("tokenizers/llama2", "llama2", None)]  # fmt: skip
BLOCK_ROWS = 100


def fnv1a(values, state):
    for value in values:
        for b in (value & 0xFFFFFFFF).to_bytes(4, "little"):
            state = (state ^ b) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return state


def hash_rows(tokenizer, name, date, rows):
    blocks = []
    for i, row in enumerate(rows):
        if i % BLOCK_ROWS == 0:
            blocks.append(0xCBF29CE484222325)
        ids, labels = encode(tokenizer, name, row["messages"], date)
        blocks[-1] = fnv1a(labels, fnv1a(ids, fnv1a([len(ids)], blocks[-1])))
    return [f"{b:016x}" for b in blocks]


def concatenate(samples, length):
    """optimum-habana's run_lora_clm.py concatenate_data and, for one batch, run_clm.py's group_texts."""
    rows = {}
    for key in ("input_ids", "labels"):
        stream = [item for sample in samples for item in sample[key]]
        rows[key] = [stream[i * length : (i + 1) * length] for i in range(len(stream) // length)]
    return [{key: rows[key][i] for key in rows} for i in range(len(rows["input_ids"]))]


def packing_cases():
    rng = random.Random(7)
    for n, length in ((40, 16), (3, 8), (25, 64)):
        samples = []
        for _ in range(n):
            ids = [rng.randrange(1000) for _ in range(rng.randrange(2, 17 if length > 8 else 9))]
            masked = rng.randrange(len(ids))
            samples.append({"input_ids": ids, "labels": [-100] * masked + ids[masked:]})
        yield {"length": length, "samples": samples, "rows": concatenate(samples, length)}


def main():
    make_tokenizers()
    cases, files = [], []
    for fixture, name, date in PAIRS:
        tokenizer = load(ROOT / f"tokenizer/fixtures/{fixture}.json")
        for messages in CONVERSATIONS + ([] if name == "llama2" else FREE):
            ids, labels = encode(tokenizer, name, messages, date or "26 Jul 2024")
            cases.append({"tokenizer": fixture, "template": name, "date": date, "messages": messages, "ids": ids, "labels": labels})
    for folder, name, date in REAL:
        tokenizer = load(DATA / folder / "tokenizer.json")
        for data in DATASETS:
            rows = [json.loads(line) for line in (DATA / "datasets" / data).open()]
            blocks = hash_rows(tokenizer, name, date or "26 Jul 2024", rows)
            files.append({"tokenizer": folder, "template": name, "date": date, "data": data, "rows": len(rows), "blocks": blocks})
    golden = {"made_by": f"tools/golden/text/make_chat_golden.py, transformers {__version__}", "cases": cases, "block_rows": BLOCK_ROWS,
              "files": files, "packing": list(packing_cases())}  # fmt: skip
    text = json.dumps(golden, ensure_ascii=True, separators=(",", ":")).replace("},{", "},\n{")
    (ROOT / "chat/chat_golden.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
