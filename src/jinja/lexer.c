/* SPDX-License-Identifier: Apache-2.0 */
/* Cuts a template into tokens, as jinja2's lexer does with trim_blocks and lstrip_blocks: a newline
 * behind a block or comment is dropped, and so is white space before one at the start of a line. */
#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "jinja/internal.h"
#include "tokenizer/text.h"

enum { MAX_BRACKETS = BL_JINJA_MAX_NESTING };

typedef struct lexer {
    bl_jinja *template;
    const char *text;
    size_t n, at;
    int line;
    bool line_starts; /* what precedes `at` ended a line */
    jinja_token *token;
    size_t n_tokens, capacity;
} lexer;

static bl_status add_token(lexer *l, jinja_token_kind kind, const char *text, size_t n_bytes)
{
    if (l->n_tokens == l->capacity) {
        size_t capacity = 2 * l->capacity + 256;
        jinja_token *grown;
        BL_TRY(jinja_new(&l->template->arena, capacity * sizeof *grown, &grown));
        if (l->n_tokens) memcpy(grown, l->token, l->n_tokens * sizeof *grown);
        l->token = grown;
        l->capacity = capacity;
    }
    l->token[l->n_tokens++] =
        (jinja_token){.kind = kind, .line = l->line, .text = text, .n_bytes = n_bytes};
    return BL_OK;
}

static bl_status add_copy(lexer *l, jinja_token_kind kind, const char *text, size_t n_bytes)
{
    char *copy;

    BL_TRY(jinja_new(&l->template->arena, n_bytes + 1, &copy));
    memcpy(copy, text, n_bytes);
    return add_token(l, kind, copy, n_bytes);
}

static void advance(lexer *l, size_t n_bytes)
{
    for (size_t i = 0; i < n_bytes; i++) l->line += l->text[l->at + i] == '\n';
    l->at += n_bytes;
}

static bool starts(const lexer *l, size_t at, const char *text)
{
    size_t n = strlen(text);
    return at <= l->n && l->n - at >= n && !memcmp(l->text + at, text, n);
}

static size_t blanks_at(const lexer *l, size_t at)
{
    size_t start = at, length;

    while (at < l->n && jinja_is_blank(bl_utf8_decode(l->text + at, l->n - at, &length)))
        at += length;
    return at - start;
}

/* ---- the ends of tags ---- */

/* Bytes of the end of a block or comment, `close` is "%}" or "#}"; 0: it is not there. */
static size_t tag_end(const lexer *l, size_t at, const char *close)
{
    if (starts(l, at, "+") && starts(l, at + 1, close)) return 3;
    if (starts(l, at, "-") && starts(l, at + 1, close)) return 3 + blanks_at(l, at + 3);
    if (!starts(l, at, close)) return 0;
    return 2 + (at + 2 < l->n && l->text[at + 2] == '\n');
}

static void pass_end(lexer *l, size_t n_bytes)
{
    advance(l, n_bytes);
    l->line_starts = l->text[l->at - 1] == '\n';
}

/* ---- tokens in tags ---- */

static size_t digits_at(const lexer *l, size_t at, bool hex)
{
    size_t start = at;

    while (at < l->n &&
           (hex ? isxdigit((unsigned char)l->text[at]) : isdigit((unsigned char)l->text[at])))
        if (++at + 1 < l->n && l->text[at] == '_' && isdigit((unsigned char)l->text[at + 1])) at++;
    return at - start;
}

static bl_status lex_number(lexer *l)
{
    size_t whole = digits_at(l, l->at, false), end = l->at + whole;
    bool is_real = false;
    char digits[64];
    size_t n = 0;

    if (l->text[l->at] == '0' && l->at + 1 < l->n && strchr("xXoObB", l->text[l->at + 1]))
        return jinja_fail_at(l->template, l->line, "a number that is not decimal");
    if (end + 1 < l->n && l->text[end] == '.' && isdigit((unsigned char)l->text[end + 1]) &&
        !(l->at > 0 && l->text[l->at - 1] == '.')) {
        is_real = true;
        end += 1 + digits_at(l, end + 1, false);
    }
    if (end + 1 < l->n && (l->text[end] == 'e' || l->text[end] == 'E')) {
        size_t sign = l->text[end + 1] == '+' || l->text[end + 1] == '-';
        size_t exponent = digits_at(l, end + 1 + sign, false);
        is_real = is_real || exponent;
        if (exponent) end += 1 + sign + exponent;
    }
    for (size_t i = l->at; i < end && n + 1 < sizeof digits; i++)
        if (l->text[i] != '_') digits[n++] = l->text[i];
    digits[n] = '\0';
    errno = 0;
    BL_TRY(add_copy(l, is_real ? TOKEN_REAL : TOKEN_INT, l->text + l->at, end - l->at));
    l->token[l->n_tokens - 1].number =
        is_real ? jinja_real(strtod(digits, NULL)) : jinja_int(strtoll(digits, NULL, 10));
    if (errno && !is_real)
        return jinja_fail_at(l->template, l->line, "%s: a number out of range", digits);
    advance(l, end - l->at);
    return BL_OK;
}

/* The code of \ooo, \xhh, \uhhhh, \Uhhhhhhhh at text[0], behind the backslash; *n gets its bytes.
 */
static bool read_code(const char *text, size_t n_left, uint32_t *code, size_t *n)
{
    size_t n_digits = text[0] == 'x' ? 2 : text[0] == 'u' ? 4 : 8;
    char digits[9] = "", *end;

    if (text[0] >= '0' && text[0] <= '7') {
        *code = 0;
        for (*n = 0; *n < 3 && *n < n_left && text[*n] >= '0' && text[*n] <= '7'; ++*n)
            *code = *code * 8 + (uint32_t)(text[*n] - '0');
        return true;
    }
    if (n_left < 1 + n_digits) return false;
    memcpy(digits, text + 1, n_digits);
    for (size_t i = 0; i < n_digits; i++)
        if (!isxdigit((unsigned char)digits[i])) return false;
    *code = (uint32_t)strtoul(digits, &end, 16);
    *n = 1 + n_digits;
    return *code < 0x110000 && (*code < 0xd800 || *code > 0xdfff);
}

/* Appends the value of the escape after a backslash; *n gets its bytes. */
static bl_status add_escape(lexer *l, jinja_buffer *out, const char *text, size_t n_left, size_t *n)
{
    static const char letters[] = "n\nt\tr\rb\bf\fv\va\a\\\\''\"\"";
    jinja_arena *arena = &l->template->arena;
    uint32_t code;

    *n = 1;
    if (text[0] == '\n') return BL_OK;
    for (size_t i = 0; letters[i]; i += 2)
        if (letters[i] == text[0]) return jinja_append(arena, out, &letters[i + 1], 1);
    if (text[0] == 'N') return jinja_fail_at(l->template, l->line, "escape \\N in a string");
    if (!strchr("xuU01234567", text[0])) return jinja_append(arena, out, text - 1, 2);
    if (!read_code(text, n_left, &code, n))
        return jinja_fail_at(l->template, l->line, "an escape \\%c in a string without its digits",
                             text[0]);
    return jinja_append_code(arena, out, code);
}

static bl_status lex_string(lexer *l)
{
    size_t start = l->at + 1, end = start;
    jinja_buffer out = {0};

    while (end < l->n && l->text[end] != l->text[l->at])
        end += l->text[end] == '\\' && end + 1 < l->n ? 2 : 1;
    if (end >= l->n) return jinja_fail_at(l->template, l->line, "a string without its end");
    for (size_t i = start, n; i < end; i += n) {
        const char *backslash = memchr(l->text + i, '\\', end - i);
        n = backslash ? (size_t)(backslash - l->text) - i : end - i;
        BL_TRY(jinja_append(&l->template->arena, &out, l->text + i, n));
        if (!backslash) continue;
        i += n + 1;
        BL_TRY(add_escape(l, &out, l->text + i, end - i, &n));
    }
    BL_TRY(add_copy(l, TOKEN_STRING, out.n ? out.text : "", out.n));
    advance(l, end + 1 - l->at);
    return BL_OK;
}

static bool is_name_byte(char byte, bool first)
{
    return byte == '_' || (unsigned char)byte >= 0x80 || isalpha((unsigned char)byte) ||
           (!first && isdigit((unsigned char)byte));
}

static bl_status lex_operator(lexer *l, char *brackets, size_t *n_brackets)
{
    static const char *const operators[] = {"//", "**", "==", "!=", ">=", "<=", "+", "-", "/",
                                            "*",  "%",  "~",  "[",  "]",  "(",  ")", "{", "}",
                                            ">",  "<",  "=",  ".",  ":",  "|",  ",", ";"};
    const char *found = NULL;

    for (size_t i = 0; i < BL_COUNT(operators) && !found; i++)
        if (starts(l, l->at, operators[i])) found = operators[i];
    if (!found)
        return jinja_fail_at(l->template, l->line, "unexpected character '%c'", l->text[l->at]);
    if (strchr("([{", found[0])) {
        if (*n_brackets == MAX_BRACKETS)
            return jinja_fail_at(l->template, l->line, "more than %d open brackets", MAX_BRACKETS);
        brackets[(*n_brackets)++] = found[0] == '(' ? ')' : found[0] == '[' ? ']' : '}';
    } else if (strchr(")]}", found[0])) {
        if (!*n_brackets || brackets[--*n_brackets] != found[0])
            return jinja_fail_at(l->template, l->line, "unexpected '%s'", found);
    }
    BL_TRY(add_token(l, TOKEN_OPERATOR, found, strlen(found)));
    advance(l, strlen(found));
    return BL_OK;
}

/* Tokens up to the end of a block or of a {{ }}. */
static bl_status lex_tag(lexer *l, bool is_block)
{
    char brackets[MAX_BRACKETS];
    size_t n_brackets = 0;

    while (l->at < l->n) {
        size_t end = 0, name = l->at;
        if (!n_brackets && is_block) end = tag_end(l, l->at, "%}");
        if (!n_brackets && !is_block && starts(l, l->at, "-}}")) end = 3 + blanks_at(l, l->at + 3);
        if (!n_brackets && !is_block && starts(l, l->at, "}}")) end = 2;
        if (end) {
            BL_TRY(add_token(l, is_block ? TOKEN_BLOCK_END : TOKEN_PRINT_END, "", 0));
            pass_end(l, end);
            return BL_OK;
        }
        size_t n_blank = blanks_at(l, l->at);
        if (n_blank) {
            advance(l, n_blank);
            continue;
        }
        if (isdigit((unsigned char)l->text[l->at])) {
            BL_TRY(lex_number(l));
        } else if (is_name_byte(l->text[l->at], true)) {
            while (name < l->n && is_name_byte(l->text[name], false)) name++;
            BL_TRY(add_copy(l, TOKEN_NAME, l->text + l->at, name - l->at));
            advance(l, name - l->at);
        } else if (l->text[l->at] == '\'' || l->text[l->at] == '"') {
            BL_TRY(lex_string(l));
        } else {
            BL_TRY(lex_operator(l, brackets, &n_brackets));
        }
    }
    return jinja_fail_at(l->template, l->line, "unexpected end of the template in a tag");
}

/* ---- text between tags ---- */

/* Text up to a tag whose sign is '-', '+' or nothing. */
static bl_status add_text(lexer *l, size_t end, char sign, bool is_print)
{
    jinja_value text = jinja_text(l->text + l->at, end - l->at);

    if (sign == '-') {
        jinja_strip(&text, false, true);
    } else if (sign != '+' && !is_print) { /* lstrip_blocks */
        const char *newline = text.n_bytes ? memrchr(text.text, '\n', text.n_bytes) : NULL;
        size_t line = newline ? (size_t)(newline + 1 - text.text) : 0;
        jinja_value rest = jinja_text(text.text + line, text.n_bytes - line);
        jinja_strip(&rest, false, true);
        if ((line || l->line_starts) && !rest.n_bytes) text.n_bytes = line;
    }
    if (text.n_bytes) BL_TRY(add_token(l, TOKEN_TEXT, text.text, text.n_bytes));
    advance(l, end - l->at);
    return BL_OK;
}

/* Bytes of the word in a tag with nothing else, from behind "{%", up to where the tag's end begins;
 * 0: another tag. */
static size_t lone_word(const lexer *l, size_t at, const char *word)
{
    size_t start = at;

    at += starts(l, at, "-") || starts(l, at, "+");
    at += blanks_at(l, at);
    if (!starts(l, at, word)) return 0;
    at += strlen(word);
    at += blanks_at(l, at);
    return starts(l, at, "%}") || starts(l, at, "-%}") || starts(l, at, "+%}") ? at - start : 0;
}

/* Behind the "{%" of a raw block. */
static bl_status lex_raw(lexer *l, size_t n_word)
{
    size_t end, word = 0;

    advance(l, n_word);
    pass_end(l, starts(l, l->at, "-") ? 3 + blanks_at(l, l->at + 3) : 2);
    for (end = l->at; end < l->n; end++)
        if (starts(l, end, "{%") && (word = lone_word(l, end + 2, "endraw"))) break;
    if (end >= l->n) return jinja_fail_at(l->template, l->line, "raw without endraw");
    BL_TRY(add_text(l, end, l->text[end + 2], false));
    advance(l, 2 + word);
    pass_end(l, tag_end(l, l->at, "%}"));
    return BL_OK;
}

static bl_status lex_comment(lexer *l)
{
    int line = l->line;

    for (size_t n; l->at < l->n; advance(l, 1))
        if ((n = tag_end(l, l->at, "#}"))) {
            pass_end(l, n);
            return BL_OK;
        }
    return jinja_fail_at(l->template, line, "a comment without its end");
}

static size_t next_tag(const lexer *l)
{
    size_t at = l->at;

    while (at < l->n && !starts(l, at, "{%") && !starts(l, at, "{{") && !starts(l, at, "{#")) at++;
    return at;
}

static bl_status lex_all(lexer *l)
{
    while (l->at < l->n) {
        size_t tag = next_tag(l), word;
        if (tag == l->n) {
            BL_TRY(add_token(l, TOKEN_TEXT, l->text + l->at, l->n - l->at));
            advance(l, l->n - l->at);
            break;
        }
        char kind = l->text[tag + 1], sign = tag + 2 < l->n ? l->text[tag + 2] : '\0';
        BL_TRY(add_text(l, tag, sign, kind == '{'));
        advance(l, 2);
        if (kind == '%' && (word = lone_word(l, l->at, "raw"))) {
            BL_TRY(lex_raw(l, word));
            continue;
        }
        advance(l, sign == '-' || sign == '+');
        if (kind == '#') {
            BL_TRY(lex_comment(l));
            continue;
        }
        BL_TRY(add_token(l, kind == '%' ? TOKEN_BLOCK_BEGIN : TOKEN_PRINT_BEGIN, "", 0));
        BL_TRY(lex_tag(l, kind == '%'));
    }
    return add_token(l, TOKEN_END, "", 0);
}

bl_status jinja_lex(bl_jinja *template, const char *text, size_t n_bytes, jinja_token **out)
{
    lexer l = {.template = template, .line = 1, .line_starts = true};
    char *copy;

    BL_TRY(jinja_new(&template->arena, n_bytes + 1, &copy));
    for (size_t i = 0; i < n_bytes; i++) { /* every line ends with \n */
        if (text[i] == '\r' && i + 1 < n_bytes && text[i + 1] == '\n') continue;
        copy[l.n++] = text[i] == '\r' ? '\n' : text[i];
    }
    l.n -= l.n > 0 && copy[l.n - 1] == '\n'; /* keep_trailing_newline is off */
    l.text = copy;
    BL_TRY(lex_all(&l));
    *out = l.token;
    return BL_OK;
}
