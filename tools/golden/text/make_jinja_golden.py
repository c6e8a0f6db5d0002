#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""make_jinja_golden.py [OUT]: what transformers' chat template environment writes for small templates,
as tests/jinja/jinja_golden.json. Made with transformers 5.23.0 and jinja2 3.1.6.

A case is a template, its variables, and the text, or null where rendering is an error."""
import datetime
import json
import sys

import jinja2
import transformers
from transformers.utils import chat_template_utils

VARIABLES = {
    "messages": [{"role": "user", "content": " Hé\tllo \n", "n": 1}, {"role": "assistant", "content": "b", "n": 2},
                 {"role": "user", "content": "", "n": 3}],
    "args": {"city": "São \"P\" <b>&'\\ \n\t\u0001 \U0001f3d6", "n": 3, "x": 0.1, "y": 1e-07, "z": -0.0, "w": 1e15,
             "v": 123456.789, "t": True, "f": False, "none": None, "list": [1, [2.5, "a"], {}],
             "obj": {"k": [], "é": {"d": 1e16}}},
    "tool": {"items": 5, "get": "x", "name": "t", "type": ["string", "null"]},
    "numbers": [3, 1, 2], "words": ["b", "A", "c", "a"], "text": "one two  three", "none": None, "empty": [], "zero": 0,
    "add_generation_prompt": True, "think": "<think>\nx\n</think>\n\ny", "uni": "ß İ ǆ é 你好", "lines": "a\nb\r\nc\n",
}

BLOCKS = """
a{% if true %}b{% endif %}c
a {% if true %} b {% endif %} c
a\\n  {% if true %}\\n  b\\n  {% endif %}\\n  c\\n
a\\n  {%- if true -%}\\n  b\\n  {%- endif -%}\\n  c\\n\\n
a\\n  {%+ if true +%}\\n  b\\n  {%+ endif %}\\nc
x {{- 1 -}} y
x\\n  {{ 1 }}\\n y
a{# c #}b
a\\n   {# c #}\\nb{#- d -#} e
{% raw %}{{ x }} {% if %}{% endraw %}!
 {%- raw -%} {{ x }} {%- endraw -%} !
{% for x in numbers %}{{ x }}{% if not loop.last %},{% endif %}{% endfor %}
{% for x in numbers if x > 1 %}{{ loop.index }}/{{ loop.length }}:{{ x }} {% else %}none{% endfor %}
{% for x in empty %}a{% else %}none{% endfor %}
{% for k, v in args.items() %}{{ k }}={{ v }};{% endfor %}
{% for c in "añb" %}[{{ c }}]{% endfor %}
{% for x in numbers %}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.previtem is defined }}{{ loop.nextitem }}{{ loop.cycle("a", "b") }}{% endfor %}
{% for x in [1, 1, 2] %}{{ loop.changed(x) }}{% endfor %}
{% for x in numbers %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% if x == 2 %}{% break %}{% endif %}{% endfor %}
{% for x in numbers %}{% for y in numbers %}{% if y == 1 %}{% break %}{% endif %}{{ x }}{{ y }} {% endfor %}{% endfor %}
{% set x = 1 %}{% for y in numbers %}{% set x = x + y %}{{ x }}{% endfor %}{{ x }}
{% set ns = namespace(x=1, a=none) %}{% for y in numbers %}{% set ns.x = ns.x + y %}{% endfor %}{{ ns.x }}{{ ns.a }}{{ ns.b is defined }}{{ ns["x"] }}
{% if zero %}{% set q = 1 %}{% endif %}{{ q is defined }}{% if true %}{% set q = 2 %}{% endif %}{{ q }}
{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set c = (a, b) %}{{ c }}
{% set x %}in {{ numbers[0] }}{% endset %}[{{ x }}]{% set y | upper | trim %} abc {% endset %}[{{ y }}]
{% macro m(a, b=2, c=a) %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ m(1) }} {{ m(1, c=3) }} {{ m() }} {{ m(b=5, a=4) }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(x=2) }}
{% macro m(n) %}{{ n }}{% if n > 0 %}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(3) }}
{% macro m() %}{{ later }}{% endmacro %}{% set later = 1 %}{{ m() }}
{% macro m() %}[{{ caller() }}]{% endmacro %}{% call m() %}in{% endcall %}
{% macro m(a, b) %}{{ a }}{{ b }}{% endmacro %}{{ m(*[1, 2]) }}{{ [m][0](*(3, 4)) }}
{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}{{ a is defined }}
{% filter upper %}a{{ "b" }}{% endfilter %}
{% generation %}a{% set z = 1 %}{% endgeneration %}{{ z is defined }}
{% if "a" %}1{% elif x %}2{% else %}3{% endif %}{% if none %}1{% elif zero %}2{% else %}3{% endif %}
{{ raise_exception("no") }}
{% if %}x{% endif %}
{{ 1
{% for x in 5 %}{% endfor %}
{% set none.x = 1 %}
{{ strftime_now("%d %b %Y %H:%M") }}
""".strip("\n").split("\n")

EXPRESSIONS = r"""
1 + 2 * 3 - 4 // 3 % 2
-7 // 2, -7 % 3, 7 % -3, 7 / 2, 2 ** 10, 2 ** -1, -2 ** 2
7.5 // 2, -7.5 % 2, 1e3, 1.5e-7, 1_000
1 / 0
"a" + 1
"a" ~ 1 ~ none ~ true ~ 1.0 ~ undefined
"ab" * 3, 2 * "x"
[1] + [2, 3], (1,) + (2,)
1 < 2 < 3, 1 < 3 < 2, 1 == 1.0 == true, "a" < "b", [1, 2] < [1, 3]
1 < "a"
not 1 == 2, not false and true, 1 or 2, 0 or "", "" and 1, none or empty
1 in numbers, 5 not in numbers, "ne" in text, "role" in messages[0], 1 in undefined
1 in "a"
1 in none
"a" if zero else "b", "a" if zero, ("x" if 1 else "y") ~ "z"
messages[0].role, messages[0]["content"], messages[-1].n, messages[9] is defined, messages.0.n
messages[0].nope.nope
nope.nope
nope, nope is defined, nope is undefined, nope == nope2, nope | length, nope | list, nope | trim
nope + 1
nope()
none.x, none["x"], (1).x, "abc".x
tool.items is defined, tool["items"], tool.get is callable, tool["get"], tool.name, tool.pop is defined, tool["keys"] is defined
tool.pop("name")
numbers.append(1)
"abcde"[1], "abcde"[-1], "abcde"[1:3], "abcde"[::-1], "abcde"[::2], "añb"[1:], "abc"[5:], "abcde"[-3:-1], "abcde"[3:1:-1], ""[::-1]
numbers[::-1], numbers[:1], numbers[1:], numbers[-2:], numbers[10:], (1, 2, 3)[::-2]
args.none[1:]
args, [args]
args.city, args.x, args.y, args.z, args.w, args.v, args.obj
args | tojson, args | tojson(indent=2), args | tojson(ensure_ascii=true), args | tojson(indent="--"), args | tojson(sort_keys=true), args | tojson(separators=(",", ":")), empty | tojson(indent=4)
"</script>'&" | tojson, {1: 2, none: 3, true: 4} | tojson, (1, 2) | tojson, 1.0 | tojson
nope | tojson
"  a b ".strip(), "xxaxx".strip("x"), "xya".lstrip("yx"), "a\n\n".rstrip("\n"), "　a ".strip()
text.split(), text.split(" "), text.split(" ", 1), text.split("t"), "a,b,c".rsplit(",", 1), "".split(), "".split("x"), " a ".split(none, 1)
text.split("")
think.split("</think>")[-1].lstrip("\n"), think.split("</think>")[0].split("<think>")[-1].strip("\n")
lines.splitlines(), lines.splitlines(true)
text.startswith("one"), text.endswith(("x", "ee")), text.startswith(("a", "b")), text.removeprefix("one"), text.removesuffix("three")
text.replace("o", "0"), text.replace("o", "0", 1), "abc".replace("", "-"), text | replace("t", "T"), 121 | replace(1, "x"), "aaa" | replace("a", "b", 2)
text.upper(), "ABC".lower(), "hello wOrld-foo (bar".title(), "hELLO".capitalize(), "hello wOrld-foo (bar" | title, "hELLO w" | capitalize, uni | upper, uni | lower
text.find("two"), text.find("x"), "añbñ".rfind("ñ"), text.index("two"), "aaa".count("a"), "abc".count("")
text.index("nope")
", ".join(words), words | join(", "), numbers | join, messages | join("|", attribute="role"), [1, none, true] | join("/")
"".join(numbers)
"12".isdecimal(), "ab".isalpha(), " ".isspace(), "AB".isupper(), "ab".islower(), "".isalpha(), "é".isascii()
text | length, numbers | count, args | length, "ñ" | length, range(4) | length, args.items() | length
numbers | select("odd") | length
5 | length
numbers | first, numbers | last, empty | first, "abc" | first, "abc" | last, args | first
numbers | sort, numbers | sort(reverse=true), words | sort, words | sort(case_sensitive=true), messages | sort(attribute="content") | map(attribute="n") | list
numbers | reverse | list, "abc" | reverse, numbers | reverse is iterable
words | unique | list, ["a", "b", "a", "B"] | unique | join, words | map("upper") | list, messages | map(attribute="content") | join("."), messages | map(attribute="zip", default="-") | list
messages | selectattr("role", "equalto", "user") | list | length, messages | selectattr("n", "gt", 1) | map(attribute="n") | list, messages | rejectattr("role", "eq", "user") | first, messages | selectattr("nope") | list, messages | selectattr("role", "defined") | list | length, numbers | select("in", [1, 2]) | list, numbers | reject("odd") | list, (messages | selectattr("nope")) is true, ("a" if messages | selectattr("nope") else "b")
messages | selectattr("role", "==", "user") | first
{"b": 1, "A": 2} | dictsort, {"b": 1, "a": 2} | dictsort(false, "value"), {"b": 1} | items | list, args | list, args.keys() | list, args.get("x"), args.get("q"), args.get("q", 5), {"a": 1}.values() | list, {"a": 1}.items()
numbers | sum, messages | sum(attribute="n"), numbers | min, numbers | max, empty | max, numbers | map("string") | list
nope | default("d"), "" | default("d"), "" | default("d", true), none | default("d"), nope | d, zero | default(1, boolean=true)
"12" | int, "12.7" | int, "x" | int, "x" | int(5), 3.9 | int, true | int, none | int, " 7 " | int, "1.5" | float, "x" | float, 2 | float, -3 | abs, 2.567 | round(1), 2.5 | round, 3 | round, 2.1 | round(0, "ceil")
nope | int
"a<b" | safe, "a<b" | safe + "<", "a" ~ ("<" | safe) ~ "<", "<" | escape, ("a<" | safe).upper()
"a\nb\n\nc" | indent(2), "a\nb" | indent(2, true), "a\n\nb" | indent(1, false, true)
1 is number, 1.5 is number, true is number, true is integer, 1 is integer, 1.0 is float, "a" is string, none is none, nope is none, args is mapping, numbers is sequence, "a" is sequence, args is sequence, args.items() is sequence, numbers is iterable, 1 is iterable, true is true, 1 is true, false is false, true is boolean, 3 is odd, 4 is even, 9 is divisibleby 3, 1 is eq 1, 2 is gt 1, 1 is in [1], none is sameas none, "a" is lower, "A" is upper, range is callable, nope is iterable, nope is sequence, nope is mapping
none is not none, text is not string, 1 is not defined
1 is defined and 2 is not none or false
-1 | abs, - 5 | string, (-5) | string
range(3) | list, range(1, 6, 2) | list, range(5, 0, -2) | list, range(3)[1], dict(a=1, b=2), dict([("x", 1)])
[1, 2.0, "a'b", 'a"b', 'a\'b"c', none, true, (1,), (), {}, {"a": [1]}, "\n\t\\ é 😀 \u200b"]
1e22 > 1, 1e16, 1.5e300, 123456789.123456789, 0.1 + 0.2, 100.0, 1e-5, 0.0001, 5e-324
'a' 'b' "c", 'it''s', "\x41\u00e9\101\q"
{"a": 1, "b": {"c": 2}}.b.c, {"a": 1, "a": 2}, [] == (), {} == {}, {"a": 1} == {"a": 1.0}
messages[0] == messages[0], messages == none, "a" == 1, "1" in [1]
text | nope
text is nope
text.center is defined, text.nope is defined
""".strip("\n").split("\n")


def render(template):
    frozen = datetime.datetime(2026, 7, 4, 9, 5, 7)

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return frozen

    chat_template_utils.datetime = Clock
    try:
        return chat_template_utils._compile_jinja_template(template).render(**VARIABLES)
    except Exception:
        return None


def main():
    templates = [text.replace("\\n", "\n") for text in BLOCKS]
    for text in EXPRESSIONS:
        templates.append("{{ (" + text + ") }}")
    cases = [{"template": text, "rendered": render(text)} for text in templates]
    document = {"made_with": f"transformers {transformers.__version__}, jinja2 {jinja2.__version__}",
                "variables": VARIABLES, "cases": cases}
    with open(sys.argv[1] if len(sys.argv) > 1 else "tests/jinja/jinja_golden.json", "w", encoding="utf-8") as file:
        json.dump(document, file, ensure_ascii=False, indent=0)
        file.write("\n")


if __name__ == "__main__":
    main()
