#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes tests/tokenizer/declared_golden.json: tokens that are declared outside tokenizer.json, and the ids that transformers gives.

    python3 -m venv /tmp/venv && /tmp/venv/bin/pip install transformers==5.24.0 tokenizers==0.23.3
    /tmp/venv/bin/python tools/golden/text/make_declared_golden.py

A case is the files of a directory and texts; "named" are transformers' special_tokens_map, "warns" is in Ballast's warnings, all of
which "" excludes. "reason" instead of ids: Ballast rejects it, since the ids in the files are not those that transformers gives, or
since transformers fails."""
import json
import pathlib
import tempfile

from transformers import PreTrainedTokenizerFast, __version__

OUT = pathlib.Path(__file__).resolve().parents[3] / "tests/tokenizer/declared_golden.json"
VOCAB = {"<unk>": 0, "<s>": 1, "</s>": 2} | {c: 3 + i for i, c in enumerate("abcdefghijklmnopqrstuvwxyz_<|>/ ")}
N = len(VOCAB)


def token(content, **flags):
    return {"content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True} | flags


def added(id, content, **flags):
    return {"id": id} | token(content, **flags)


def tokenizer(tokens, normalizer=None, unigram=False):
    model = {"type": "Unigram", "unk_id": 0, "vocab": [[text, -1.0] for text in VOCAB]} if unigram else {
        "type": "BPE", "unk_token": "<unk>", "vocab": VOCAB, "merges": []}
    return {"version": "1.0", "added_tokens": tokens, "normalizer": normalizer, "pre_tokenizer": None, "post_processor": None,
            "decoder": None, "model": model}


def case(name, texts=("a <|im|> b</s>",), tokens=(added(1, "<s>"),), normalizer=None, reason=None, warns="", padding=None, unigram=False, **files):
    return {"name": name, "texts": list(texts), "reason": reason, "warns": warns,
            "files": {"tokenizer.json": tokenizer(list(tokens), normalizer, unigram) | ({"padding": PADDING | {"pad_token": padding}} if padding else {})} | {k + ".json": v for k, v in files.items()}}


PADDING = {"strategy": {"Fixed": 90}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 3, "pad_type_id": 0}
TYPED = {"__type": "AddedToken"}
PREPEND = {"type": "Prepend", "prepend": "_"}
CASES = [
    case("decoder", tokenizer_config={"added_tokens_decoder": {str(N): token("<|im|>")}}),
    case("decoder, unsorted", ("<|q|><|im|>",), tokenizer_config={
        "added_tokens_decoder": {str(N + 1): token("<|im|>"), str(N): token("<|q|>")}}),
    case("decoder of the vocabulary", tokenizer_config={"added_tokens_decoder": {"2": token("</s>")}}),
    case("decoder, flags", ("a <|im|> b", "a<|im|>b", "x </s> y"), tokenizer_config={
        "added_tokens_decoder": {"2": token("</s>", rstrip=True), str(N): token("<|im|>", lstrip=True, rstrip=True)}}),
    case("decoder, other flags than tokenizer.json", ("a <s> b",), tokenizer_config={
        "added_tokens_decoder": {"1": token("<s>", lstrip=True)}}),
    case("decoder, single word", ("a<|im|>b", "a <|im|> b"), tokenizer_config={
        "added_tokens_decoder": {str(N): token("<|im|>", single_word=True)}}),
    case("decoder, normalized", ("a<|im|>", "<|im|>"), normalizer=PREPEND, tokenizer_config={
        "added_tokens_decoder": {str(N): token("<|im|>", special=False, normalized=True)}}),
    case("decoder hides the other files", warns="special_tokens_map.json: ignored, as tokenizer_config.json counts: pad_token", tokenizer_config={"added_tokens_decoder": {}}, added_tokens={"<|im|>": N},
         special_tokens_map={"pad_token": "<|im|>"}),
    case("decoder, other id", reason="<|im|> has id 99, but tokenizer.json makes it", tokenizer_config={
        "added_tokens_decoder": {"99": token("<|im|>")}}),
    case("decoder, a gap", reason="<|im|> has id", tokenizer_config={
        "added_tokens_decoder": {str(N): token("<|q|>"), str(N + 2): token("<|im|>")}}),
    case("decoder, the id of another", reason="<|im|> has id 1, but tokenizer.json makes it", tokenizer_config={
        "added_tokens_decoder": {"1": token("<|im|>")}}),
    case("decoder, a text", reason="added_tokens_decoder", tokenizer_config={"added_tokens_decoder": {str(N): "<|im|>"}}),
    case("added_tokens", added_tokens={"<|im|>": N}),
    case("added_tokens, unsorted", ("<|q|><|im|>",), added_tokens={"<|im|>": N + 1, "<|q|>": N}),
    case("added_tokens, normalized", ("a<|im|>", "<|im|>"), normalizer=PREPEND, added_tokens={"<|im|>": N}),
    case("added_tokens, special", ("a<|im|>", "<|im|>"), normalizer=PREPEND, added_tokens={"<|im|>": N},
         special_tokens_map={"additional_special_tokens": ["<|im|>"]}),
    case("added_tokens, other id", reason="<|im|> has id 99", added_tokens={"<|im|>": 99}),
    case("map", special_tokens_map={"pad_token": "<|im|>", "eos_token": "</s>"}),
    case("map, an object", ("a <|im|> b",), special_tokens_map={"pad_token": token("<|im|>", lstrip=True)}),
    case("decoder, the map repeats it", tokenizer_config={"added_tokens_decoder": {str(N): token("<|im|>")}, "pad_token": "<|im|>"},
         special_tokens_map={"pad_token": token("<|im|>"), "additional_special_tokens": ["<|im|>"]}),
    case("map before config", warns="tokenizer_config.json: ignored, as special_tokens_map.json counts: pad_token", tokenizer_config={"pad_token": "<|q|>"}, special_tokens_map={"pad_token": "<|im|>"}),
    case("map, several", ("<|im|><|q|></s>",), special_tokens_map={"additional_special_tokens": ["<|im|>", "<|q|>"]}),
    case("map, a model's token", ("<|q|><|im|>",), special_tokens_map={"image_token": "<|im|>", "pad_token": "<|q|>"}),
    case("map, a model's token of the config", ("<|q|><|im|>",), warns="special_tokens_map.json: ignored, as tokenizer_config.json counts: image_token",
         tokenizer_config={"image_token": "<|im|>"}, special_tokens_map={"image_token": "<|q|>"}),
    case("map, extra behind the config's", ("<|im|><|q|></s>",), tokenizer_config={"additional_special_tokens": ["<|q|>"]},
         special_tokens_map={"extra_special_tokens": ["<|im|>"]}),
    case("map, several behind the config's", ("<|im|><|q|></s>",), warns="counts: additional_special_tokens",
         tokenizer_config={"additional_special_tokens": ["<|q|>"]}, special_tokens_map={"additional_special_tokens": ["<|im|>"]}),
    case("map, several behind named ones", ("<|im|><|q|></s>",), tokenizer_config={"extra_special_tokens": {"image_token": "<|q|>"}},
         special_tokens_map={"additional_special_tokens": ["<|im|>"]}),
    case("map, named extra", special_tokens_map={"extra_special_tokens": {"image_token": "<|im|>"}}),
    case("map, an unknown key", warns="special_tokens_map.json: ignored, as no such keys are known: unknown_key", special_tokens_map={"unknown_key": 1}),
    case("config, several", ("<|im|><|q|></s>",), tokenizer_config={"additional_special_tokens": ["<|im|>", "<|q|>"]}),
    case("config, extra first", ("<|im|><|q|></s>",), tokenizer_config={
        "extra_special_tokens": ["<|im|>"], "additional_special_tokens": ["<|q|>"]}),
    case("config, typed", ("a <|im|> b",), tokenizer_config={"extra_special_tokens": [TYPED | token("<|im|>", lstrip=True)]}),
    case("config, named extra", tokenizer_config={"extra_special_tokens": {"image_token": "<|im|>"}}),
    case("config, a model's token", ("<|q|><|im|>",), tokenizer_config={"image_token": "<|im|>", "pad_token": "<|q|>"}),
    case("config, named before extra", ("<|q|><|im|>",), tokenizer_config={
        "additional_special_tokens": ["<|im|>"], "pad_token": "<|q|>", "unk_token": "<unk>"}),
    case("config, of the vocabulary", ("a</s>",), tokenizer_config={"eos_token": "</s>", "bos_token": "<s>"}),
    case("config, null", tokenizer_config={"pad_token": None, "additional_special_tokens": None, "extra_special_tokens": []}),
    case("padding's token", padding="<|im|>"),
    case("padding's token and the config's", ("<|q|><|im|>",), padding="<|im|>", tokenizer_config={"pad_token": "<|q|>"}),
    case("config, a number", reason="expected a list of tokens", tokenizer_config={"additional_special_tokens": 3}),
    case("config, split_special_tokens", reason="split_special_tokens", tokenizer_config={"split_special_tokens": True}),
    case("behind tokenizer.json's", ("<|x|><|im|>",), tokens=(added(1, "<s>"), added(N, "<|x|>")), tokenizer_config={
        "added_tokens_decoder": {"1": token("<s>"), str(N): token("<|x|>"), str(N + 1): token("<|im|>")}}),
    case("config without effect", tokenizer_config={
        "add_bos_token": True, "add_eos_token": True, "add_prefix_space": False, "legacy": False, "model_max_length": 8,
        "clean_up_tokenization_spaces": True, "do_lower_case": False, "truncation_side": "left", "padding_side": "left"}),
    case("config against tokenizer.json", warns="tokenizer_config.json: ignored, as tokenizer.json counts: add_prefix_space, do_lower_case",
         tokenizer_config={"add_prefix_space": True, "do_lower_case": True, "strip_accents": False}),
    case("config, clean-up of Unigram", unigram=True, warns="as tokenizer.json counts: clean_up_tokenization_spaces",
         tokenizer_config={"clean_up_tokenization_spaces": True}),
    case("ids of the same tokens", tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"}, generation_config={"bos_token_id": 1, "eos_token_id": [2, 5]},
         config={"bos_token_id": 1, "eos_token_id": 5}),
    case("ids of other tokens", warns="config.json: ignored, as tokenizer_config.json and generation_config.json count: bos_token_id, eos_token_id",
         tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"}, generation_config={"bos_token_id": 1}, config={"bos_token_id": 5, "eos_token_id": [2, 5]}),
    case("another BOS id", warns="generation_config.json count: bos_token_id", tokenizer_config={"bos_token": "<s>"}, generation_config={"bos_token_id": 5}),
    case("config against the normalizer", normalizer=PREPEND, warns="as tokenizer.json counts: add_prefix_space",
         tokenizer_config={"add_prefix_space": False}),
]


def run(entry):
    with tempfile.TemporaryDirectory() as folder:
        for name, value in entry["files"].items():
            (pathlib.Path(folder) / name).write_text(json.dumps(value))
        t = PreTrainedTokenizerFast.from_pretrained(folder)
        entry["named"] = t.special_tokens_map
        return [t(text, add_special_tokens=False, padding=False)["input_ids"] for text in entry["texts"]]


for entry in CASES:
    if entry["reason"] is None:
        entry["ids"] = run(entry)
lines = ",\n".join(json.dumps(entry) for entry in CASES)
OUT.write_text(f'{{"by": "transformers {__version__}", "cases": [\n{lines}\n]}}\n')
