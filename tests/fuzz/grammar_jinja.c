/* SPDX-License-Identifier: Apache-2.0 */
/* A mutator of templates for fuzz_jinja, next to libFuzzer's mutations of
 * bytes: writes templates by a grammar, and puts statements of it into
 * templates. Mutated bytes rarely give a loop around a namespace; values that
 * grow in one, and code that walks over them, need most of the limits. */
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "fuzz.h"

size_t LLVMFuzzerMutate(uint8_t *bytes, size_t n_bytes, size_t max_bytes);
size_t LLVMFuzzerCustomMutator(uint8_t *bytes, size_t n_bytes, size_t max_bytes, unsigned seed);

/* $x in a text is one of the texts of symbol x. The first needs no further
 * level. */
enum { MAX_TEXTS = 32, MAX_LEVELS = 7, MAX_WRITTEN = 4096 };

typedef struct symbol {
    char name;
    const char *text[MAX_TEXTS];
} symbol;

static const symbol grammar[] = {
    /* a template */
    {'T',
     {"{{ $e }}", "$S$S", "$S$S$S$S", "$N$g{{ $w }}", "$N$g{{ $w }}{{ $w }}", "$N$g$g{{ $w }}$S",
      "$N$S$S$S", "$N$S$g$S{{ $w }}"}},
    {'N',
     {"{% set ns = namespace(x=[], y=[]) %}", "{% set ns = namespace(x={}, y={}) %}",
      "{% set ns = namespace(x=(), y=[]) %}", "{% set ns = namespace(x=$l, y=$l) %}"}},
    /* a loop that may be long, and is cheap */
    {'g',
     {"{% for i in range($n) %}{% set ns.$k = $b %}{% endfor %}",
      "{% for i in range($n) %}{% set ns.x = $b %}{% set ns.y = $b %}{% endfor "
      "%}",
      "{% for i in range($n) %}{% set ns.$k = $b %}{% set v = $b %}{% endfor "
      "%}",
      "{% macro m(a, b=1) %}{% set ns.$k = $b %}{% if a > 0 %}{{ m(a - 1) }}{% "
      "endif %}"
      "{% endmacro %}{{ m($n) }}"}},
    {'n', {"2", "0", "9", "100", "255", "257", "1000", "30000", "30000", "30000"}},
    /* statements */
    {'S',
     {"{{ $e }}",
      "{% set $v = $e %}",
      "{% set ns.$k = $b %}",
      "{% set v, w = $e, $e %}",
      "{% for $v in $i %}$S{% endfor %}",
      "{% for $v in $i %}$S{% else %}$S{% endfor %}",
      "{% for $v in $i if $e %}{{ $v }}$S{% endfor %}",
      "{% for $v, i in $i %}{{ $v }}{% endfor %}",
      "{% for $v in $i %}{{ loop.$L }}$S{% if $e %}{% break %}{% endif %}{% "
      "endfor %}",
      "{%- if $e -%} $S {%- elif $e %}$S{% else %}{% set ns.$k = $b %}{% endif "
      "%}",
      "{% macro m(a, b=$e) %}{{ a }}$S{% if b %}{{ m(a, b=false) }}{% endif "
      "%}{% endmacro %}",
      "{{ m($e) }}",
      "{{ m($e, b=$e) }}",
      "{% macro c(a) %}{{ caller() }}$S{% endmacro %}",
      "{% call c($e) %}$S{% endcall %}",
      "{% filter $f %}$S{% endfilter %}",
      "{% set $v %}$S{% endset %}",
      "{% generation %}$S{% endgeneration %}",
      "{% with $v = $e %}$S{% endwith %}",
      "{{ $w }}",
      "$S$S",
      "{% raw %}{{ {% endraw %}",
      "<|im_start|>{{ messages[0].role }}\n"}},
    {'L',
     {"index", "first", "last", "length", "revindex", "previtem", "nextitem", "changed($e)",
      "cycle($e, $e)"}},
    /* what a loop reads */
    {'i',
     {"[1, 2]", "messages", "$l", "range(3)", "range(5, 0, -2)", "[$e, $e]", "{'a': $e}.items()",
      "[($e, $e)]", "ns.$k", "'a\xc3\xa9'", "$e | list", "(v, w)", "($e)[:9]"}},
    /* values around values */
    {'b',
     {"[ns.$k]", "(ns.$k,)", "{'a': ns.$k}", "dict(a=ns.$k)", "dict([('a', ns.$k)])",
      "[] + [ns.$k]", "[ns.$k][:]", "[ns.$k, ns]", "{'a': ns.$k}.items()", "[ns.$k] | $q | list",
      "{ns.$k: ns.$k}", "(ns.$k, ns.$k.count)", "namespace(z=ns)", "[ns.$k | map('list') | list]",
      "ns.$k | list", "$e"}},
    {'k', {"x", "x", "x", "y"}},
    /* all that walks over values */
    {'w',
     {"ns.$k == ns.$k", "ns.$k $o ns.$k", "ns.x $o ns.y", "ns.$k in [ns.$k]", "[ns.x, ns.y] | $q",
      "[ns.x].index(ns.y)", "[ns.x].count(ns.y)", "{ns.x: 1}[ns.y]", "ns.$k | $f", "ns.$k",
      "ns.$k | tojson", "ns.$k is $t", "[ns.x, ns.y] | $q | $q | list", "ns.x ~ ns.y",
      "[ns.x] | select('eq', ns.y) | list", "[[ns.x]] | sum(start=[])", "ns.$k | length"}},
    /* expressions */
    {'e',
     {"$p",
      "$l",
      "$v",
      "($e $o $e)",
      "$e | $f",
      "$e | $q",
      "$e is $t",
      "not $e",
      "-$e",
      "($e and $e)",
      "($e or $e)",
      "($e if $e else $e)",
      "$v[$e]",
      "$v.content",
      "($e)[$p:$p:$p]",
      "$e ~ $e",
      "ns.$k + [$p]",
      "ns.$k ~ $p",
      "ns.$k * 2",
      "$e.$m",
      "$w",
      "(1 < $e < 3)",
      "messages[$p]",
      "$b",
      "namespace(x=$e)",
      "dict(a=$e)",
      "range($e)",
      "m($e)",
      "[m][0](*$l)",
      "strftime_now($e)"}},
    {'p',
     {"1", "0", "-1", "2.5", "'a'", "'\xc3\xa9 b'", "''", "none", "true", "false",
      "9223372036854775807", "undefined", "'a' * 3", "1e308", "'<|im_end|>'"}},
    {'l',
     {"[]", "()", "{}", "[1, 'a', none]", "[$e]", "($e, $e)", "{'a': $e}", "{$e: $e, 'b': $e}",
      "[$e, $e, $e]"}},
    {'v', {"v", "w", "messages", "ns", "ns.x", "ns.y", "tools"}},
    {'o', {"==", "!=", "<", ">=", "in", "not in", "+", "-", "*", "/", "//", "%", "**", "~"}},
    {'f', {"string",     "tojson",      "trim",
           "length",     "upper",       "lower",
           "title",      "int",         "float",
           "abs",        "default($e)", "replace($e, $e)",
           "indent($p)", "round(2)",    "escape",
           "safe",       "items",       "tojson(indent=$p, sort_keys=true)",
           "capitalize", "dictsort",    "trim($e)"}},
    {'q',
     {"list", "first", "last", "sort", "unique", "max", "min", "sum", "reverse", "map('$f')",
      "join($e)", "select('$t')", "reject", "map(attribute='content')",
      "selectattr('role', 'equalto', $e)", "sort(reverse=true, attribute=$p)", "select('eq', $e)",
      "groupby('a')"}},
    {'t',
     {"defined", "none", "string", "mapping", "sequence", "iterable", "number", "callable",
      "eq($e)", "in $l", "lt $e", "not undefined"}},
    {'m',
     {"items()", "get($e)", "get($e, $e)", "split($p)", "strip($p)", "upper()", "keys() | list",
      "values()", "startswith($e)", "replace($p, $p)", "count($e)", "index($e)", "find($p)",
      "join($l)", "x", "splitlines()", "copy()", "rsplit($p, 1)"}},
};

typedef struct writer {
    char text[MAX_WRITTEN];
    size_t n;
    uint64_t state;
} writer;

static size_t draw(writer *w, size_t n)
{
    w->state = w->state * 6364136223846793005u + 1442695040888963407u;
    return (size_t)(w->state >> 33) % n;
}

static const char *choose(writer *w, char name, int level)
{
    for (size_t i = 0; i < sizeof grammar / sizeof grammar[0]; i++) {
        size_t n = 0;
        if (grammar[i].name != name) continue;
        while (n < MAX_TEXTS && grammar[i].text[n]) n++;
        return grammar[i].text[level < MAX_LEVELS ? draw(w, n) : 0];
    }
    fprintf(stderr, "fuzz: the grammar has no $%c\n", name);
    __builtin_trap();
}

static void expand(writer *w, const char *text, int level)
{
    for (; *text && w->n < sizeof w->text; text++) {
        if (*text == '$')
            expand(w, choose(w, *++text, level), level + 1);
        else
            w->text[w->n++] = *text;
    }
}

/* Where a tag of the template begins, or its end. */
static size_t find_place(writer *w, const uint8_t *bytes, size_t n_bytes)
{
    size_t start = draw(w, n_bytes + 1);

    for (size_t i = start; i + 1 < n_bytes; i++)
        if (bytes[i] == '{' && (bytes[i + 1] == '{' || bytes[i + 1] == '%')) return i;
    return n_bytes;
}

size_t LLVMFuzzerCustomMutator(uint8_t *bytes, size_t n_bytes, size_t max_bytes, unsigned seed)
{
    enum { BYTES, WHOLE, STATEMENT, N_KINDS };
    writer w = {.state = seed};
    fuzz_input input = {.bytes = bytes, .n_bytes = n_bytes};
    size_t n_template = fuzz_next(&input).n_bytes;

    draw(&w, 1);
    size_t kind = draw(&w, N_KINDS), from = 0, to = n_template;
    if (kind == STATEMENT) from = to = find_place(&w, bytes, n_template);
    if (kind != BYTES) expand(&w, kind == WHOLE ? "$T" : "$S", 0);
    if (kind == BYTES || w.n == sizeof w.text || n_bytes - (to - from) + w.n > max_bytes)
        return LLVMFuzzerMutate(bytes, n_bytes, max_bytes);
    memmove(bytes + from + w.n, bytes + to, n_bytes - to);
    memcpy(bytes + from, w.text, w.n);
    return n_bytes - (to - from) + w.n;
}
