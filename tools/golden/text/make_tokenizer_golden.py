#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes tests/tokenizer/tokenizer_golden.json: what Hugging Face's `tokenizers` makes of 100,000 random strings.

    python3 -m venv /tmp/venv && /tmp/venv/bin/pip install tokenizers==0.21.4
    BALLAST_TEST_DATA=... /tmp/venv/bin/python tools/golden/text/make_tokenizer_golden.py

For tokenizers that are not in the committed file, by hand (no DIR: all below tokenizers/ and models-families/):

    BALLAST_TEST_DATA=... /tmp/venv/bin/python tools/golden/text/make_tokenizer_golden.py --out FILE [DIR ...]
    BALLAST_TEST_DATA=... build/release/bin/test_tokenizer_golden FILE

The file holds the pieces that strings are drawn from and, for each tokenizer, two hashes a block of 100 strings: of the ids
and of the decoded texts. tests/tokenizer/test_tokenizer_golden.c draws the same strings; draw_string() there is the twin of the
one here.
"""
import argparse
import json
import os
import pathlib
import re
import sys

from tokenizers import Tokenizer, __version__

TOKENIZERS = {
    "llama3": "tokenizers/llama3/tokenizer.json",
    "llama2": "tokenizers/llama2/tokenizer.json",
    "stories260K": "models/stories260K/tokenizer.json",
    "llama2-tf5": "tokenizers/llama2-tf5/tokenizer.json",
    "metaspace-always-shape": "tokenizers/metaspace-always-shape/tokenizer.json",
}
N_STRINGS = 100_000
BLOCK = 100
SEED = 20240723
MASK = (1 << 64) - 1

PIECES = (
    # English, code, contractions in every case, and the long s that folds to s
    "the of and to in is that it was for Hello World language model training weights gradient un anti ing ness tokenization "
    "Supercalifragilisticexpialidocious camelCase snake_case int main(void){ return 0;} #include <stdio.h> https://example.org/?q=1&r=2 "
    "'s 't 're 've 'm 'll 'd 'S 'T 'RE 'VE 'M 'LL 'D 'Re 'lL '\u017f \u017f s' \u2019s \u2019re I'm you'LL we'Ve x'\u017fy".split()
    + [" ", " ", " ", " ", "  ", "   ", "    ", "        ", "\t", "\n", "\n\n", "\r\n", "\r", "\v", "\f", " \n", "\n ", " \t "]
    + ["\x85", "\xa0", "\u1680", "\u2000", "\u2003", "\u2009", "\u200a", "\u2028", "\u2029", "\u202f", "\u205f", "\u3000"]
    + ["\u200b", "\u200c", "\u200d", "\u2060", "\ufeff", "\u00ad", "\u180e", "\x00", "\x01", "\x1b", "\x7f", "\x1c", "\x1f"]
    + ["\u2581", "\u2581\u2581", " \u2581", "\u2581 ", "\u0120", "\u010a", "<0x0A>", "<0xE2>", "<0x00>", "\ufffd"]
    # accents, composed and not, other scripts, digits of several scripts
    + "café cafe\u0301 naïve Ünïcödé straße ŒUVRE ǅ \u0130stanbul ı ﬁ ﬃ Å \u212b a\u030a e\u0301\u0323 \u0301 \u0300\u0301 ǹ ŉ ß ẞ".split()
    + "Привет мир Ελλάδα שלום مرحبا العربية नमस्ते हिन्दी বাংলা தமிழ் ไทย ภาษาไทย 한국어 안녕하세요 \u1100\u1161\u11a8 日本語 こんにちは カタカナ ｶﾞ 中文字符 你好，世界 。 「引用」 繁體".split()
    + "0 1 12 123 1234 12345 1234567890 3.14159 1,000,000 ٠١٢٣ ۴۵۶ १२३ ๑๒๓ １２３ ² ½ Ⅷ ⅷ ① 〇 一二三 𝟘𝟙𝟚".split()
    # emoji, joined, flagged and toned; symbols, mathematical letters
    + "😀 🚀🚀 👩‍👩‍👧‍👦 👍🏽 🇩🇪 ❤️ ☃ ✓ → ≤ ∑ € £ © ™ 𝒜 𝔘𝔫𝔦 𐍈 🜁 Ⓐ ⓐ 🅰 ⁂ … — – “ ” „ ‚ ‰ ‱".split()
    + "! ? . , ; : - _ ( ) [ ] { } < > / \\ | @ # $ % ^ & * + = ~ ` \" ' '' ''' ... ---- ==== **** //// <!-- --> #### :) ;-) << >> <| |> </ /> <<<".split()
    # special tokens, whole, broken and run into others
    + ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"]
    + ["<|eot_id", "|eot_id|>", "<|<|eot_id|>|>", "<|reserved_special_token_0|>", "<|reserved_special_token_99|>"]
    + ["<s>", "</s>", "<unk>", "<s", "s>", "<<s>>", "<s></s>", "<S>", "[INST]", "[/INST]", "<<SYS>>"]
)


class Random:
    """splitmix64 (Steele, Lea, Flood 2014)."""

    def __init__(self, seed):
        self.state = seed & MASK

    def next(self):
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    def below(self, n):
        return self.next() % n


def draw_scalar(random, end):
    code = random.below(end - 0x800)
    return chr(code if code < 0xD800 else code + 0x800)  # the surrogates are no characters


def draw_piece(random, pieces):
    kind = random.below(16)
    if kind < 10:
        return pieces[random.below(len(pieces))]
    if kind == 10:
        return chr(0x20 + random.below(0x5F))
    if kind == 11:
        return draw_scalar(random, 0x10000)
    if kind == 12:
        return draw_scalar(random, 0x110000)
    if kind == 13:
        return chr(0x61 + random.below(26))
    if kind == 14:
        return pieces[random.below(len(pieces))] * (1 + random.below(6))
    return chr(0x80 + random.below(0x780))


def draw_string(index, pieces):
    """The string, whether its special tokens are parsed, whether BOS is added."""
    random = Random(SEED * 1_000_003 + index)
    mode = random.below(4)
    n_pieces = 1 + random.below(400 if random.below(100) == 0 else 24)
    return "".join(draw_piece(random, pieces) for _ in range(n_pieces)), bool(mode & 1), bool(mode & 2)


class Reference:
    """Hugging Face's tokenizer, which parses special tokens, and one which does not."""

    def __init__(self, path):
        self.parse, self.plain = Tokenizer.from_file(str(path)), Tokenizer.from_file(str(path))
        config = json.loads(path.read_text())
        if config["model"].get("type") == "Unigram":
            self.plain = self.without_specials(config)
        self.plain.encode_special_tokens = True

    @staticmethod
    def without_specials(config):
        """Unigram finds special tokens in text by itself. Ballast's does not: their texts become ones that no text has."""
        vocab = config["model"]["vocab"]
        for token in config["added_tokens"]:
            if not token["special"]:
                continue
            token["content"] = f"\U0010fffe special {token['id']}"
            if token["id"] < len(vocab):
                vocab[token["id"]][0] = token["content"]
        return Tokenizer.from_str(json.dumps(config))

    def encode(self, text, parse, add):
        return (self.parse if parse else self.plain).encode(text, add_special_tokens=add).ids

    def decode(self, ids, skip):
        return self.parse.decode(ids, skip_special_tokens=skip)


def fnv1a(data, state=0xCBF29CE484222325):
    for byte in data:
        state = ((state ^ byte) * 0x100000001B3) & MASK
    return state


def hash_block(reference, pieces, first):
    ids_hash = text_hash = 0xCBF29CE484222325
    for index in range(first, first + BLOCK):
        text, parse, add = draw_string(index, pieces)
        ids = reference.encode(text, parse, add)
        ids_hash = fnv1a(b"".join(i.to_bytes(4, "little") for i in ids + [0xFFFFFFFF]), ids_hash)
        text_hash = fnv1a(reference.decode(ids, parse).encode() + b"\xff", text_hash)
    return f"{ids_hash:016x}{text_hash:016x}"


def hash_strings(path, pieces):
    reference = Reference(path)
    examples = [reference.encode(*draw_string(index, pieces)) for index in range(3)]
    return {"first_ids": examples, "blocks": [hash_block(reference, pieces, first) for first in range(0, N_STRINGS, BLOCK)]}


def added_pieces(path):
    """The added tokens, whole and broken."""
    texts = [token["content"] for token in json.loads(path.read_text())["added_tokens"]]
    texts = texts[:20] + texts[-20:]
    return texts + [text[: len(text) // 2] for text in texts] + [" " + text for text in texts[:10]]


def main():
    data = pathlib.Path(os.environ["BALLAST_TEST_DATA"])
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("dir", nargs="*")
    arguments = parser.parse_args()
    golden = {
        "made_by": "tools/golden/text/make_tokenizer_golden.py, tokenizers " + __version__,
        "seed": SEED, "n_strings": N_STRINGS, "block": BLOCK, "pieces": PIECES, "tokenizers": {},
    }
    tokenizers = TOKENIZERS
    if arguments.out:
        paths = [data / path / "tokenizer.json" for path in arguments.dir]
        paths = paths or sorted([*data.glob("tokenizers/*/tokenizer.json"), *data.glob("models-families/*/tokenizer.json")])
        tokenizers = {path.parent.name: str(path.relative_to(data)) for path in paths}
    for name, path in tokenizers.items():
        own = {"pieces": PIECES + added_pieces(data / path)} if arguments.out else {}
        golden["tokenizers"][name] = {"path": path, **own, **hash_strings(data / path, own.get("pieces", PIECES))}
        print(name, file=sys.stderr)
    out = arguments.out or pathlib.Path(__file__).resolve().parents[3] / "tests/tokenizer/tokenizer_golden.json"
    text = json.dumps(golden, ensure_ascii=True, separators=(",", ":"))
    out.write_text(re.sub('("[0-9a-f]{32}"),', "\\1,\n", text) + "\n")


if __name__ == "__main__":
    main()
