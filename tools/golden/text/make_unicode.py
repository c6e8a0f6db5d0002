#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes src/tokenizer/unicode_additions.c, unicode_classes.c and tests/tokenizer/unicode_golden.json: what Hugging Face's `tokenizers` means by
Unicode (its regex engine Oniguruma and Rust's regex: Unicode 16; its normalizer: Unicode 9; Rust itself: 17), where PCRE2 10.42 (Unicode 14, as
Python 3.11) and utf8proc 2.8 (Unicode 15, Debian's libutf8proc2) know less or more.

    python3.11 -m venv /tmp/venv && /tmp/venv/bin/pip install tokenizers==0.23.3
    /tmp/venv/bin/python tools/golden/text/make_unicode.py && clang-format -i src/tokenizer/unicode_{additions,classes}.c

The golden file holds every range of code points with its general category, and, for each regex below, a hash of the ids of each
block of 16,384 code points: tests/tokenizer/test_unicode.c builds the same tokenizer and the same texts.
"""
import ctypes
import json
import pathlib
import unicodedata

from tokenizers import AddedToken, Regex, Tokenizer, __version__, models, normalizers
from tokenizers.pre_tokenizers import Digits, Punctuation, Split

ROOT = pathlib.Path(__file__).resolve().parents[3]
ALL = [code for code in range(0x110000) if not 0xD800 <= code < 0xE000]
CATEGORIES = "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Co Cn".split()
BLOCK = 16384

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
O200K_END = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
REGEXES = {
    "llama3": LLAMA3,
    "qwen2": LLAMA3.replace("{1,3}", ""),
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "o200k": O200K_WORD + "*" + O200K_END + r"+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|" + O200K_WORD + "+" + O200K_END
    + r"*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|" + O200K_REST,
    "tekken": O200K_WORD + "*" + O200K_END + "+|" + O200K_WORD + "+" + O200K_END + r"*|\p{N}|" + O200K_REST,
    "deepseek": r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    + "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    "marks": r"[\p{Mn}\p{Nl}]+|\P{Mn}\P{Lu}|[^\p{Ll}\p{Mc}\d]{2}|\d",
    "words": r"\w+|[^\w\s]+|\W",
    "letters of any case": "(?i:[a-z]+|'k| S)|(?i:x-?[^s]| t)|.",
}


def members(regex):
    """The code points that the regex matches."""
    split, found = Split(Regex(regex), "removed"), set()
    for i in range(0, len(ALL), 4096):
        block = ALL[i : i + 4096]
        rest = {ord(c) for piece, _ in split.pre_tokenize_str("".join(map(chr, block))) for c in piece}
        found.update(code for code in block if code not in rest)
    return found


def ranges(codes):
    found = []
    for code in sorted(codes):
        if found and found[-1][1] == code - 1:
            found[-1][1] = code
        else:
            found.append([code, code])
    return found


def words():
    """The code points beside which an added token with single_word is none."""
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.add_tokens([AddedToken("TT", single_word=True)])
    return {code for code in ALL if tokenizer.encode(chr(code) + "TT").ids[-1:] != [1]}


UTF8PROC = ctypes.CDLL("libutf8proc.so.2")
UTF8PROC.utf8proc_map.restype = ctypes.c_ssize_t
UTF8PROC.utf8proc_map.argtypes = [ctypes.c_char_p, ctypes.c_ssize_t, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int]
FREE = ctypes.CDLL(None).free
FREE.argtypes = [ctypes.c_void_p]
STABLE, COMPAT, COMPOSE, DECOMPOSE = 2, 4, 8, 16
FORMS = {"NFC": STABLE | COMPOSE, "NFD": STABLE | DECOMPOSE, "NFKC": STABLE | COMPOSE | COMPAT, "NFKD": STABLE | DECOMPOSE | COMPAT}


def map_form(text, form):
    """What src/tokenizer/pretokenize.c has from utf8proc."""
    raw, out = text.encode(), ctypes.c_void_p()
    n = UTF8PROC.utf8proc_map(raw, len(raw), ctypes.byref(out), FORMS[form])
    found = ctypes.string_at(out.value, n).decode()
    FREE(out)
    return found


def differs(text, forms=FORMS):
    return any(getattr(normalizers, form)().normalize_str(text) != map_form(text, form) for form in forms)


def unnormalized():
    """The code points that the library's normalizer has no data of and utf8proc has: decompositions, or a combining class."""
    found = set()
    for code in ALL:
        c = chr(code)
        if any(map(differs, [c, "a\u0345" + c, "a" + c + "\u0334", "a" + c + "\u0323\u0301"])):
            found.add(code)
        pair = map_form(c, "NFD")
        if len(pair) == 2 and differs(pair, ["NFC"]):
            found.add(ord(pair[1]))
    return found


def build_tokenizer(regex):
    """Byte-level; (b, "a") merges for every byte b, then (" ", b): the ids show where a text was split."""
    alphabet = [chr(b) if 33 <= b <= 126 or 161 <= b <= 255 and b != 173 else None for b in range(256)]
    free = iter(range(256, 512))
    alphabet = [c or chr(next(free)) for c in alphabet]
    merges = [(c, "a") for c in alphabet] + [(alphabet[32], c) for c in alphabet if c != "a"]
    vocab = {text: i for i, text in enumerate(alphabet + [a + b for a, b in merges])}
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": vocab, "merges": [f"{a} {b}" for a, b in merges]}
    return Tokenizer.from_str(json.dumps({
        "version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytes_]}, "model": model,
    }))


def hash_ids(ids):
    state = 0xCBF29CE484222325
    for i in ids:
        state = (state ^ i) * 0x100000001B3 & (1 << 64) - 1
    return state


def hashes(regex):
    tokenizer, found = build_tokenizer(regex), []
    for first in range(0, 0x110000, BLOCK):
        text = "".join(". X" + chr(code) + "a" for code in range(first, first + BLOCK) if not 0xD800 <= code < 0xE000)
        found.append("%016x" % hash_ids(tokenizer.encode(text, add_special_tokens=False).ids))
    return found


def write_array(name, items):
    body = ", ".join("{0x%X, 0x%X}" % tuple(item) for item in items)
    return f"static const bl_unicode_range {name}[] = {{{body}}};\n"


def write_source(now):
    lines = [
        "/* SPDX-License-Identifier: Apache-2.0 */",
        "/* What the general categories have in Unicode 16, that of tokenizers' regex engines, and not in",
        " * Unicode 14, that of PCRE2 10.42 and utf8proc 2.8; made by tools/golden/text/make_unicode.py with",
        f" * tokenizers {__version__}. */",
        '#include "base/sizes.h"', '#include "tokenizer/internal.h"', "",
    ]
    rows = []
    for name in CATEGORIES:
        old = {code for code in ALL if unicodedata.category(chr(code)) == name}
        added, lost = ranges(now[name] - old), old - now[name]
        whole = ranges(now[name]) if lost and name != "Cn" else []
        assert name in ("Mn", "Cn") or not lost
        if name == "Cn" or not added:
            continue
        lines.append(write_array(f"more_{name}", added))
        if whole:
            lines.append(write_array(f"all_{name}", whole))
        rows.append('{"%s", more_%s, BL_COUNT(more_%s), %s},'
                    % (name, name, name, f"all_{name}, BL_COUNT(all_{name})" if whole else "NULL, 0"))
    lines += ["const bl_unicode_addition bl_unicode_additions[] = {", *rows, "};",
              "const size_t bl_n_unicode_additions = BL_COUNT(bl_unicode_additions);", "",
              "/* The normalizer's data are older, Unicode 9: it leaves these as they are, and composes nothing with",
              " * them. */",
              write_array("unnormalized", ranges(unnormalized())),
              "const bl_unicode_range *const bl_unicode_unnormalized = unnormalized;",
              "const size_t bl_n_unicode_unnormalized = BL_COUNT(unnormalized);", ""]
    (ROOT / "src/tokenizer/unicode_additions.c").write_text("\n".join(lines))


def matches(step):
    """The code points that a pre-tokenizer cuts out of a text."""
    return {code for code in ALL if len(step.pre_tokenize_str("\ue000" + chr(code) + "\ue000")) > 1}


def write_classes():
    accents = normalizers.StripAccents()
    classes = {
        "numeric": matches(Digits(individual_digits=True)), "punctuation": matches(Punctuation()),
        "accents": {code for code in ALL if accents.normalize_str(chr(code)) == ""},
    }
    lines = [
        "/* SPDX-License-Identifier: Apache-2.0 */",
        "/* The characters of the pre-tokenizers Digits and Punctuation and of the normalizers StripAccents",
        " * and Lowercase, each by the Unicode version of its library; made by",
        f" * tools/golden/text/make_unicode.py with tokenizers {__version__}. */",
        '#include "base/sizes.h"', '#include "tokenizer/internal.h"', "",
    ]
    for name, codes in classes.items():
        lines.append(write_array(f"{name}", ranges(codes)))
        lines.append(f"const bl_unicode_class bl_unicode_{name} = {{{name}, BL_COUNT({name})}};\n")
    lowercase, rows = normalizers.Lowercase(), []
    for code in ALL:
        lower = lowercase.normalize_str(chr(code))
        if len(lower) > 1 or ord(lower) == UTF8PROC.utf8proc_tolower(code):
            assert len(lower) == 1 or code == 0x130  # in the code: two characters
            continue
        if rows and rows[-1][1] == code - 1 and rows[-1][2] == ord(lower) - code:
            rows[-1][1] = code
        else:
            rows.append([code, code, ord(lower) - code])
    body = ", ".join("{0x%X, 0x%X, %d}" % tuple(row) for row in rows)
    lines += [f"const bl_unicode_lowering bl_unicode_lowerings[] = {{{body}}};",
              "const size_t bl_n_unicode_lowerings = BL_COUNT(bl_unicode_lowerings);", ""]
    (ROOT / "src/tokenizer/unicode_classes.c").write_text("\n".join(lines))


def main():
    assert unicodedata.unidata_version.startswith("14.")
    now = {name: members(r"\p{%s}" % name) for name in CATEGORIES}
    assert sum(map(len, now.values())) == len(ALL)
    write_source(now)
    write_classes()
    rows = sorted([first, last, name] for name in CATEGORIES for first, last in ranges(now[name]))
    golden = {
        "tokenizers": __version__,
        "block": BLOCK,
        "words": ranges(words()),
        "normalized": {form: "%016x" % hash_ids(b for code in ALL for b in getattr(normalizers, form)().normalize_str(
            "e" + chr(code) + "\u0323\u0301").encode()) for form in ("NFC", "NFD", "NFKC", "NFKD")},
        "regexes": [{"name": name, "regex": regex, "hashes": hashes(regex)} for name, regex in REGEXES.items()],
        "categories": {name: [[a, b] for a, b, n in rows if n == name] for name in CATEGORIES},
    }
    text = json.dumps(golden, ensure_ascii=True, separators=(",", ":")).replace('"categories"', '\n"categories"')
    for key in [*(f'"{name}":[' for name in CATEGORIES), '{"name"', '"words"', '"normalized"', '"regexes"']:
        text = text.replace(key, "\n" + key)
    (ROOT / "tests/tokenizer/unicode_golden.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
