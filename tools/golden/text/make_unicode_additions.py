#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes src/tokenizer/unicode_additions.h: the characters that Hugging Face's regex engine (Oniguruma, Unicode 16) has in the
general categories L, N, M, P and S and Unicode 14, PCRE2 10.42's version, has not.

    python3.11 -m venv /tmp/venv && /tmp/venv/bin/pip install tokenizers==0.21.4     (Python 3.11 knows Unicode 14)
    /tmp/venv/bin/python tools/golden/text/make_unicode_additions.py
"""
import pathlib
import unicodedata

from tokenizers import Regex
from tokenizers.pre_tokenizers import Split


def additions(category):
    split = Split(Regex(r"\p{%s}+" % category), "removed")
    ranges = []
    for code in range(0x110000):
        if 0xD800 <= code < 0xE000 or unicodedata.category(chr(code))[0] == category or split.pre_tokenize_str(chr(code)):
            continue
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return [r"\\x{%X}" % a + (r"-\\x{%X}" % b if b > a else "") for a, b in ranges]


def main():
    assert unicodedata.unidata_version.startswith("14.")
    lines = [
        "/* SPDX-License-Identifier: Apache-2.0 */",
        "/* unicode_additions.h -- ranges, as the inside of a PCRE2 class, that the general categories gained between Unicode 14",
        " * (PCRE2 10.42) and 16 (the Oniguruma of Hugging Face's tokenizers 0.21). Harmless to a newer PCRE2, which has them.",
        " * Made by tools/golden/text/make_unicode_additions.py. */",
        "#ifndef BALLAST_TEXT_UNICODE_ADDITIONS_H",
        "#define BALLAST_TEXT_UNICODE_ADDITIONS_H",
    ]
    for category in "LNMPS":
        rows, row = [], ""
        for item in additions(category):
            if len(row) + len(item) > 96:
                rows.append(row)
                row = ""
            row += item
        rows.append(row)
        lines += ["", f"#define BL_UNICODE_ADDITIONS_{category} \\"]
        lines += [f'    "{row}"' + (" \\" if i + 1 < len(rows) else "") for i, row in enumerate(rows)]
    lines += ["", "#endif", ""]
    out = pathlib.Path(__file__).resolve().parents[3] / "src/tokenizer/unicode_additions.h"
    out.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
