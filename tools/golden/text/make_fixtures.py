#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes tests/tokenizer/fixtures/: small tokenizer.json files, one a kind of model, and golden.json, what Hugging Face's `tokenizers`
makes of a list of texts with them.

    python3 -m venv /tmp/venv && /tmp/venv/bin/pip install tokenizers==0.23.3
    /tmp/venv/bin/python tools/golden/text/make_fixtures.py
"""
import json
import pathlib

from make_tokenizer_golden import Reference
from tokenizers import __version__

OUT = pathlib.Path(__file__).resolve().parents[3] / "tests/tokenizer/fixtures"

TEXTS = [
    "", " ", "  ", "a", " a", "a ", "ab", "abab", "abc abc", "hello hello", " hello\n\nhello ", "hellohello", "a  b   c    ", "\n", "\t\r\n x",
    "it's I'LL we'\u017f", "1234567 12 1", "caf\u00e9 cafe\u0301 \u00e9\u00e9", "\ufb01x \u2460 \uff21", "\u4f60\u597d", "\U0001f600\U0001f600", "zq zzq qz qqq",
    "<|end|>", "a<|end|>b", "<|end|><|end|> hello", "<|end", "a <mask> b", "a<mask>b", "<mask>", " <mask>  <mask>\u3000x", "\u00e9<mask>",
    "a <trim> b", "a\u2003<trim>\u2003b", "<trim><trim>", "<trim>  <trim>", "NORM norm", "ab<word>ab <word> <word>", "<word>\u0301", "_<word>", "-<word>-",
    "hello<|end|> <mask> abc<trim> hello", "\u2581a\u2581", "<0x41><0x0A>", "ab\x00c", "abcabcabcab hello hello abc" * 3,
    "the-final--countdown-", "--a-", "ab, ab;; (hello) 123ab45,6", "\u0661\u0662 x\u00b2 \u2460\u3002\uff01", "ABC \u0130H\u00c9LLO \u1c89", "xy x\ny", "#___ #_____",
    "\u00e9<word>", "xyz\u0085xyz", "a\u00a0b\u3000c", "hhe lllo", "<unk>", "q<unk>q", "\u2460<|end|>\u00bd", " hello hello  hello", "xy1xy1 xy xyy1", "<trim>! <trim>!x", "<0x41>ab <0x41>a", "b a", "xb c a", "b b b", "c ab c a",
]  # fmt: skip


def alphabet():
    """GPT-2's byte alphabet."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in keep]
    return {**{b: chr(b) for b in keep}, **{b: chr(256 + i) for i, b in enumerate(others)}}


def added(next_id, specs):
    tokens = []
    for content, flags in specs:
        token = {"id": next_id, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
        token.update(dict.fromkeys(flags.split(), True))
        tokens.append(token)
        next_id += 1
    return tokens


def build(alphabet_tokens, merges, pairs=False, extra=(), **model):
    vocab = {}
    for token in [*extra, *alphabet_tokens, *(a + b for a, b in merges)]:
        vocab.setdefault(token, len(vocab))
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": False, "byte_fallback": False, **model,
        "vocab": vocab, "merges": [list(m) for m in merges] if pairs else [" ".join(m) for m in merges],
    }  # fmt: skip


def template(before, after):
    special = lambda name: {"SpecialToken": {"id": name, "type_id": 0}}  # noqa: E731
    names = {**before, **after}
    single = [*map(special, before), {"Sequence": {"id": "A", "type_id": 0}}, *map(special, after)]
    return {
        "type": "TemplateProcessing", "single": single, "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {n: {"id": n, "ids": [i], "tokens": [n]} for n, i in names.items()},
    }  # fmt: skip


def file(model, added_tokens, normalizer=None, pre=None, post=None, decoder=None):
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added_tokens, "normalizer": normalizer,
        "pre_tokenizer": pre, "post_processor": post, "decoder": decoder, "model": model,
    }  # fmt: skip


HELLO = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o")]
RULES = [("<|end|>", "special"), ("<mask>", "lstrip rstrip"), ("<trim>", "rstrip special"), ("<word>", "single_word"), ("NORM", "normalized")]
RULES += [("<trim>!", ""), ("<0x41>ab", "")]  # one that another begins, one that begins as a byte token
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(add_prefix_space, use_regex):
    return {"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": True, "use_regex": use_regex}


def replace(pattern, content):
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def sequence(key, *steps):
    return {"type": "Sequence", key: list(steps)}


def fixtures():
    byte = alphabet()
    space = byte[32]
    merges = [("a", "b"), ("ab", "c"), (space, "a"), (space, "h"), *HELLO, (space, "hello"), (space, space), (byte[0xC3], byte[0xA9]), ("1", "2")]
    model = build(byte.values(), merges)
    yield "byte_level", file(model, added(len(model["vocab"]), RULES), {"type": "NFC"}, byte_level(True, True), None, byte_level(True, True))

    # As Llama 3: whole pieces first, one of them a special token's text; some bytes have no token.
    few = [c for b, c in byte.items() if b < 0xF0]
    model = build(few, merges, pairs=True, extra=["<|end|>", "xyz", space + "hellohello"], ignore_merges=True)
    tokens = added(0, RULES[:1]) + added(len(model["vocab"]), [("<|begin|>", "special"), *RULES[1:]])
    split = {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False}
    begin = {"<|begin|>": len(model["vocab"])}
    post = sequence("processors", byte_level(True, True), template(begin, {"<|end|>": 0}))
    yield "byte_level_split", file(model, tokens, None, sequence("pretokenizers", split, byte_level(False, False)), post, byte_level(True, True))

    # As Llama 2, once with merges that allow a cut at spaces and once with one that does not.
    chars = [*"\u2581abchelo123xy\u00e9<>", "\u4f60"]
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    metaspace = sequence("normalizers", {"type": "Prepend", "prepend": "\u2581"}, replace(" ", "\u2581"))
    decoder = sequence(
        "decoders", replace("\u2581", " "), {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    )
    words = [("y", "1"), ("x", "y"), ("x", "y1"), ("\u2581", "a"), ("a", "b"), ("\u2581a", "b"), ("ab", "c"), ("\u2581", "\u2581"), *HELLO, ("\u2581", "hello"), ("\u2581\u2581", "hello")]
    specials = [("<unk>", "special"), ("<s>", "special")]
    for name, more in (("fallback", []), ("fallback_across", [("b", "\u2581"), ("c", "\u2581a")])):
        model = build([*chars], words + more, extra=["<unk>", "<s>", *bytes_], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        tokens = added(0, specials) + added(len(model["vocab"]), RULES)
        yield name, file(model, tokens, metaspace, None, template({"<s>": 1}, {}), decoder)

    # As transformers 5 saves Llama 2's again, with merges that allow a cut and with one that does not; the other schemes, with and
    # without a cut before each replacement; behind another step.
    def mark(scheme, split):
        return {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": split}

    cut = {"type": "Split", "pattern": {"Regex": "l+"}, "behavior": "Isolated", "invert": False}
    for name, pre, more, decode in (
        ("metaspace", mark("first", False), [], decoder),
        ("metaspace_across", mark("first", False), [("b", "\u2581"), ("c", "\u2581a")], decoder),
        ("metaspace_first_split", mark("first", True), [], mark("first", True)),
        ("metaspace_always", mark("always", False), [("b", "\u2581")], mark("always", False)),
        ("metaspace_always_split", mark("always", True), [("b", "\u2581")], mark("always", True)),
        ("metaspace_never", mark("never", False), [], mark("never", False)),
        ("metaspace_never_split", mark("never", True), [], sequence("decoders", mark("never", True), {"type": "ByteFallback"})),
        ("metaspace_steps", sequence("pretokenizers", cut, mark("first", True), cut), [], mark("first", True)),
        ("metaspace_steps_always", sequence("pretokenizers", cut, mark("always", False)), [], None),
    ):
        model = build([*chars], words + more, extra=["<unk>", "<s>", *bytes_], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        tokens = added(0, specials) + added(len(model["vocab"]), RULES)
        yield name, file(model, tokens, None, pre, template({"<s>": 1}, {}), decode)

    # As transformers 5 converts sentencepiece's file: Metaspace puts no second mark before a space that begins the text.
    model = build([*chars], words + [("b", "\u2581")], extra=["<unk>", "<s>", *bytes_], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokens = added(0, specials) + added(len(model["vocab"]), RULES)
    marks = sequence("normalizers", replace(" ", "\u2581"), regex_replace("\\A\u2581", "\u2581\u2581"))
    yield "sentencepiece", file(model, tokens, marks, mark("always", False), template({"<s>": 1}, {}), decoder)

    # Byte tokens for ASCII only: other characters become unk, fused or not.
    for name, fuse in (("unk_fused", True), ("unk", False)):
        model = build([*chars], words, extra=["<unk>", *bytes_[:128]], unk_token="<unk>", fuse_unk=fuse, byte_fallback=fuse)
        tokens = added(0, specials[:1]) + added(len(model["vocab"]), RULES)
        yield name, file(model, tokens, None if name == "unk" else metaspace)

    # Compatibility forms, a replacement of several characters, strip.
    model = build([*chars, "f", "i", "A"], [("f", "i"), *words], unk_token="a")
    normalizer = sequence("normalizers", {"type": "NFKC"}, replace("llo", "l"), {"type": "Prepend", "prepend": "xy"})
    strip = {"type": "Strip", "content": "a", "start": 2, "stop": 0}  # with a stop, tokenizers 0.21.4 panics on short strings
    decoder = sequence("decoders", replace("he", "e\u00e9"), strip, {"type": "Fuse"})
    yield "nfkc", file(model, added(len(model["vocab"]), RULES), normalizer, None, None, decoder)
    yield "nfd", file(model, added(len(model["vocab"]), RULES), {"type": "NFD"}, byte_level(False, False))


def split(pattern, behavior, invert=False):
    kind = "Regex" if pattern.startswith("/") else "String"
    return {"type": "Split", "pattern": {kind: pattern.lstrip("/")}, "behavior": behavior, "invert": invert}


def regex_replace(pattern, content):
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def unigram(scores, byte_fallback):
    bytes_ = [[f"<0x{b:02X}>", -20.0] for b in range(256)] if byte_fallback else []
    vocab = [["<unk>", 0.0], ["</s>", 0.0], *bytes_, *map(list, scores.items())]
    return {"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": byte_fallback}


def family_fixtures():
    """Components of other families than Llama."""
    byte = alphabet()
    space = byte[32]
    merges = [("a", "b"), ("ab", "c"), (space, "a"), (space, "h"), *HELLO, (space, "hello"), (space, space), ("1", "2"), ("12", "3"), ("-", "-")]
    merges += [("x", "y"), (",", space), ("-", "a")]
    model = build(byte.values(), merges, continuing_subword_prefix="", end_of_word_suffix="")
    tokens = added(len(model["vocab"]), RULES)
    digits = {"type": "Digits", "individual_digits": True}
    bytes_ = byte_level(False, False)
    for name, steps in (
        ("digits", [digits, byte_level(False, True)]),
        # As Falcon: steps behind ByteLevel see the byte alphabet, where U+00B2 is a digit.
        ("punctuation", [{"type": "Punctuation", "behavior": "Contiguous"}, byte_level(False, True), {**digits, "individual_digits": False},
                         split("/[0-9][0-9][0-9]", "Isolated")]),
        ("split_removed", [split("/\\s+", "Removed"), {"type": "Punctuation", "behavior": "MergedWithPrevious"}, bytes_]),
        ("split_previous", [split("-", "MergedWithPrevious"), split("/^x|b$", "Isolated"), bytes_]),
        ("split_next", [split("-", "MergedWithNext"), bytes_]),
        ("split_contiguous", [split("/[^\\w\\s]", "Contiguous"), split("/\\d{2}", "Isolated"), bytes_]),
        ("split_invert", [split("/\\w+|\\W", "Removed", True), split("/[a-z]+", "MergedWithNext", True), split("/l", "Contiguous", True), bytes_]),
        ("whitespace", [{"type": "Whitespace"}, {"type": "Sequence", "pretokenizers": [bytes_]}]),
        ("whitespace_split", [{"type": "WhitespaceSplit"}, {"type": "CharDelimiterSplit", "delimiter": "-"}, {"type": "Punctuation"}, bytes_]),
    ):
        yield name, file(model, tokens, None, sequence("pretokenizers", *steps), None, byte_level(True, True))
    lower = sequence("normalizers", {"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"}, regex_replace("[\\u200b ]{2,}", " "),
                     {"type": "Strip", "strip_left": True, "strip_right": True}, {"type": "Prepend", "prepend": " "})
    yield "lowercase", file(model, tokens, lower, bytes_, None, byte_level(True, True))
    yield "byte_normalizer", file(model, tokens, {"type": "ByteLevel"}, None, None, byte_level(True, True))
    # Byte tokens behind ByteLevel: of characters of the alphabet, not of the text's bytes.
    model = build([c for b, c in byte.items() if b < 0x80], merges, extra=["<unk>", *(f"<0x{b:02X}>" for b in range(0xE0))], unk_token="<unk>", byte_fallback=True)
    yield "byte_level_fallback", file(model, added(0, [("<unk>", "special")]), None, byte_level(True, True), None, byte_level(True, True))

    # As Gemma.
    specials = [("<unk>", "special"), ("<s>", "special")]
    words = [("\u2581", "\u2581"), ("a", "b"), ("\u2581", "a"), ("ab", "c"), *HELLO]
    names = [f"<0x{b:02X}>" for b in range(256)]
    model = build(["\u2581", *"abchelo123xy<>\n"], words, extra=["<unk>", "<s>", *names], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    decoder = sequence("decoders", regex_replace("\u2581", " "), {"type": "ByteFallback"}, {"type": "Fuse"})
    yield "gemma", file(model, added(0, specials) + added(len(model["vocab"]), RULES), replace(" ", "\u2581"), split(" ", "MergedWithPrevious"),
                        template({"<s>": 1}, {}), decoder)

    # Symbols with a prefix inside words and a suffix at their ends, with and without byte tokens.
    for fallback in (False, True):
        letters = [p + c + s for c in "abchelo" for p, s in (("", ""), ("##", ""), ("##", "</w>"), ("", "</w>"))]
        merges = [("a", "##b"), ("ab", "##c</w>"), ("h", "##e"), ("##l", "##l"), ("he", "##ll"), ("hell", "##o</w>"), ("##b", "##a")]
        vocab = {token: i for i, token in enumerate(["<unk>", *(names if fallback else []), *letters, "ab", "abc</w>", "he", "##ll", "hell", "hello</w>", "##ba"])}
        model = {"type": "BPE", "unk_token": "<unk>", "continuing_subword_prefix": "##", "end_of_word_suffix": "</w>", "fuse_unk": fallback,
                 "byte_fallback": fallback, "vocab": vocab, "merges": [" ".join(m) for m in merges]}
        yield "affixes_fallback" if fallback else "affixes", file(
            model, added(0, specials[:1]) + added(len(vocab), RULES), None, {"type": "Whitespace"}, None, {"type": "BPEDecoder", "suffix": "</w>"})

    # Unigram: equal sums, unknown runs that spell a token, byte tokens.
    scores = {"\u2581": -2.0, "a": -3.0, "b": -3.5, "ab": -4.0, "\u2581a": -4.5, "abc": -9.0, "c": -5.0, "hello": -6.0, "h": -4.0, "e": -4.0, "l": -4.0,
              "o": -4.0, "he": -8.0, "ll": -7.5, "\u2581hello": -8.0, "1": -5.0, "12": -9.5, "zq": -60.0, "\u4f60": -9.0, "qqq": -61.0,
              # Sums that are equal except for rounding, and for how the library reads 16 digits.
              "#": -12.291323856929843, "_": -8.259449177302212, "__": -9.03886097278472}
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    nfkc = sequence("normalizers", {"type": "NFKC"}, regex_replace(" {2,}", " "))
    for name, fallback, normalizer, pre in (("unigram", False, nfkc, metaspace), ("unigram_fallback", True, replace(" ", "\u2581"), None)):
        model = unigram(scores, fallback)
        yield name, file(model, added(0, [("<unk>", "special"), ("</s>", "special")]) + added(len(model["vocab"]), RULES), normalizer, pre,
                         template({}, {"</s>": 1}), metaspace)


def main():
    OUT.mkdir(exist_ok=True)
    golden = {"made_by": "tools/golden/text/make_fixtures.py, tokenizers " + __version__, "texts": TEXTS, "fixtures": {}}
    for name, content in [*fixtures(), *family_fixtures()]:
        path = OUT / f"{name}.json"
        path.write_text(json.dumps(content, ensure_ascii=True, indent=0) + "\n")
        reference = Reference(path)
        cases = []
        for parse in (False, True):
            for text in TEXTS:
                ids = reference.encode(text, parse, add=parse)
                cases.append({"ids": ids, "text": reference.decode(ids, skip=parse)})
        golden["fixtures"][name] = cases
    text = json.dumps(golden, ensure_ascii=True, separators=(",", ":")).replace('},{', '},\n{')
    (OUT / "golden.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
