/* SPDX-License-Identifier: Apache-2.0 */
/* The pre-tokenizer's regexes: Oniguruma's in tokenizer.json, PCRE2's here.
 *
 * Only syntax that both engines read alike is let through, with these rewrites: Oniguruma's \s is
 * White_Space, PCRE2's \s lacks U+0085; \d is \p{Nd}; \w has marks, too, and what else is
 * alphabetic; general categories get the characters of a newer Unicode version
 * (unicode_additions.c); ^ and $ are at lines (Ruby's syntax), \A and \z at the text's ends; \uHHHH
 * is a character. Refused: \b (another character set), scripts (PCRE2 takes script extensions),
 * \p{C} and \p{Cn} (what Unicode assigns leaves them), nested classes, free-standing options, {,n}
 * and }+. In (?i:...), what Oniguruma folds to or from several characters, or by its own Unicode
 * version: properties, text beyond ASCII, and ss, st, ff, fi, fl. */
#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/sizes.h"
#include "tokenizer/internal.h"

#define SPACE_SET "\\x{9}-\\x{d}\\x{85}\\p{Z}"

typedef struct translation {
    const char *at; /* the unread rest */
    bl_bytes out;
    bool in_class;
    bool in_caseless; /* inside (?i:...) */
    bool has_property;
} translation;

static bl_status refuse(const translation *t, const char *what)
{
    return BL_FAIL(BL_EINPUT, "regex: %s is not supported (at \"%.20s\")", what, t->at);
}

static bl_status emit(translation *t, const char *text, size_t n_read)
{
    t->at += n_read;
    return bl_bytes_append(&t->out, text, strlen(text));
}

static bl_status copy(translation *t, size_t n_bytes)
{
    bl_status st = bl_bytes_append(&t->out, t->at, n_bytes);
    t->at += n_bytes;
    return st;
}

static bl_status emit_ranges(translation *t, const bl_unicode_range *range, size_t n)
{
    char text[32];

    for (size_t i = 0; i < n; i++) {
        snprintf(text, sizeof text, "\\x{%" PRIX32 "}-\\x{%" PRIX32 "}", range[i].first,
                 range[i].last);
        BL_TRY(emit(t, text, 0));
    }
    return BL_OK;
}

static bool is_part_of(const char *category, const char *name)
{
    return category[0] == name[0] && (!name[1] || category[1] == name[1]);
}

/* The inside of a class: PCRE2's category and the characters it lacks, or all characters of the
 * category where PCRE2 has more. */
static bl_status emit_category(translation *t, const char *name)
{
    char property[8];

    t->has_property = true;
    snprintf(property, sizeof property, "\\p{%s}", name);
    for (size_t i = 0; i < bl_n_unicode_additions; i++) {
        const bl_unicode_addition *a = &bl_unicode_additions[i];
        if (a->all && !strcmp(a->category, name)) return emit_ranges(t, a->all, a->n_all);
    }
    BL_TRY(emit(t, property, 0));
    for (size_t i = 0; i < bl_n_unicode_additions; i++) {
        const bl_unicode_addition *a = &bl_unicode_additions[i];
        if (is_part_of(a->category, name)) BL_TRY(emit_ranges(t, a->added, a->n_added));
    }
    return BL_OK;
}

static bl_status translate_property(translation *t)
{
    const char *rest = t->at + 3;
    char name[3] = "";
    bool negated = t->at[1] == 'P';

    if (t->at[2] != '{' || !rest[0] || !strchr("LMNPSZC", rest[0]))
        return refuse(t, "a property other than a general category");
    name[0] = rest[0];
    if (islower((unsigned char)rest[1])) name[1] = rest[1];
    size_t length = strlen(name);
    if (rest[length] != '}') return refuse(t, "a property other than a general category");
    if (!strcmp(name, "C") || !strcmp(name, "Cn"))
        return refuse(t, "a category of unassigned characters");
    if (t->in_caseless) return refuse(t, "a property where case is ignored");
    if (t->in_class && negated) return refuse(t, "a negated property in a class");
    t->at += 3 + length + 1;
    if (t->in_class) return emit_category(t, name);
    BL_TRY(emit(t, negated ? "[^" : "[", 0));
    BL_TRY(emit_category(t, name));
    return emit(t, "]", 0);
}

/* What Oniguruma's \w has beyond the categories: the superscripts and fractions of Latin-1, and
 * Other_Alphabetic's circled and squared letters. */
#define MORE_WORD                                                                                  \
    "\\x{b2}\\x{b3}\\x{b9}\\x{bc}-\\x{be}\\x{24b6}-\\x{24e9}\\x{1f130}-\\x{1f149}"                 \
    "\\x{1f150}-\\x{1f169}\\x{1f170}-\\x{1f189}"

static bl_status emit_words(translation *t)
{
    static const char *const categories[] = {"L", "M", "Nd", "Nl", "Pc"};

    for (size_t i = 0; i < BL_COUNT(categories); i++) BL_TRY(emit_category(t, categories[i]));
    return emit(t, MORE_WORD, 0);
}

/* \d, \w and \W. */
static bl_status translate_class(translation *t)
{
    char c = t->at[1];

    if (t->in_caseless && c != 'd') return refuse(t, "this escape where case is ignored");
    if (t->in_class && c == 'W') return refuse(t, "\\W in a class");
    t->at += 2;
    if (!t->in_class) BL_TRY(emit(t, c == 'W' ? "[^" : "[", 0));
    BL_TRY(c == 'd' ? emit_category(t, "Nd") : emit_words(t));
    return t->in_class ? BL_OK : emit(t, "]", 0);
}

/* \uHHHH. */
static bl_status translate_code(translation *t)
{
    char text[16];

    for (size_t i = 2; i < 6; i++)
        if (!isxdigit((unsigned char)t->at[i])) return refuse(t, "this escape");
    if (t->in_caseless) return refuse(t, "this escape where case is ignored");
    snprintf(text, sizeof text, "\\x{%.4s}", t->at + 2);
    return emit(t, text, 6);
}

static bl_status translate_escape(translation *t)
{
    char c = t->at[1];

    switch (c) {
    case 's':
        return emit(t, t->in_class ? SPACE_SET : "[" SPACE_SET "]", 2);
    case 'S':
        return t->in_class ? refuse(t, "\\S in a class") : emit(t, "[^" SPACE_SET "]", 2);
    case 'd':
    case 'w':
    case 'W':
        return translate_class(t);
    case 'u':
        return translate_code(t);
    case 'p':
    case 'P':
        return translate_property(t);
    case 'r':
    case 'n':
    case 't':
        return copy(t, 2);
    case 'A':
    case 'z':
        return t->in_class ? refuse(t, "this escape in a class") : copy(t, 2);
    default:
        return ispunct((unsigned char)c) ? copy(t, 2) : refuse(t, "this escape");
    }
}

static bl_status translate_in_class(translation *t)
{
    if (t->at[0] == ']') t->in_class = false;
    if (t->at[0] == '[' || !strncmp(t->at, "&&", 2)) return refuse(t, "a class in a class");
    return copy(t, 1);
}

static bl_status translate_group(translation *t)
{
    static const char *const known[] = {"(?:", "(?i:", "(?!", "(?=", "(?<!", "(?<=", "(?>"};

    if (t->in_caseless) return refuse(t, "a group where case is ignored");
    if (t->at[1] == '*') return refuse(t, "a verb");
    if (t->at[1] != '?') return copy(t, 1);
    for (size_t i = 0; i < BL_COUNT(known); i++) {
        if (strncmp(t->at, known[i], strlen(known[i])) != 0) continue;
        t->in_caseless = known[i][2] == 'i';
        return copy(t, strlen(known[i]));
    }
    return refuse(t, "this kind of group");
}

/* What ignores case is ASCII without the letters that are one character in some script. */
static bl_status check_caseless(const translation *t)
{
    static const char *const folded[] = {"ss", "st", "ff", "fi", "fl"};

    if ((unsigned char)t->at[0] >= 0x80)
        return refuse(t, "a character beyond ASCII where case is ignored");
    if (t->in_class) return BL_OK;
    if (t->at[0] == '{') return refuse(t, "a counted repetition where case is ignored");
    for (size_t i = 0; i < BL_COUNT(folded); i++)
        if (tolower((unsigned char)t->at[0]) == folded[i][0] &&
            tolower((unsigned char)t->at[1]) == folded[i][1])
            return refuse(t, "a pair of letters that is one character in Unicode, where case is "
                             "ignored,");
    return BL_OK;
}

static bl_status translate_next(translation *t)
{
    if (t->in_caseless) BL_TRY(check_caseless(t));
    if (t->at[0] == '\\') return translate_escape(t);
    if (t->in_class) return translate_in_class(t);
    if (t->at[0] == '[') {
        t->in_class = true;
        BL_TRY(copy(t, t->at[1] == '^' ? 2 : 1));
        return t->at[0] == ']' ? refuse(t, "']' first in a class") : BL_OK;
    }
    if (t->at[0] == '(') return translate_group(t);
    if (t->at[0] == ')') t->in_caseless = false; /* it has no groups in it */
    if (t->at[0] == '^' || t->at[0] == '$')
        return emit(t, t->at[0] == '^' ? "(?m:^)" : "(?m:$)", 1);
    if (!strncmp(t->at, "{,", 2) || !strncmp(t->at, "}+", 2)) return refuse(t, "this repetition");
    return copy(t, 1);
}

/* (*LF): the dot takes all but \n, however PCRE2 was built. */
static bl_status translate(translation *t)
{
    BL_TRY(emit(t, "(*LF)", 0));
    while (*t->at) BL_TRY(translate_next(t));
    return bl_bytes_append(&t->out, "", 1);
}

/* Older than the additions: characters lack. Newer than the reference: it has some that the
 * reference lacks. */
static bl_status check_unicode_version(void)
{
    enum { ADDED_TO = 14, REFERENCE = 16 };
    char version[32] = "";

    pcre2_config(PCRE2_CONFIG_UNICODE_VERSION, version);
    int major = atoi(version);
    if (major < ADDED_TO)
        return BL_FAIL(BL_EINPUT, "regex: PCRE2 has Unicode %s; at least %d is needed", version,
                       ADDED_TO);
    if (major > REFERENCE)
        bl_log_warning("PCRE2 has Unicode %s, Hugging Face's tokenizers %d: characters that are "
                       "new since may get other ids",
                       version, REFERENCE);
    return BL_OK;
}

bl_status bl_regex_compile(const char *pattern, pcre2_code **out)
{
    enum { MAX_PATTERN_BYTES = 4096 };
    translation t = {.at = pattern};
    PCRE2_UCHAR reason[128];
    PCRE2_SIZE offset;
    uint32_t may_be_empty = 0;
    int code;

    *out = NULL;
    if (strlen(pattern) > MAX_PATTERN_BYTES)
        return BL_FAIL(BL_EINPUT, "regex: more than %d bytes", MAX_PATTERN_BYTES);
    bl_status st = translate(&t);
    if (st == BL_OK && t.has_property) st = check_unicode_version();
    if (st != BL_OK) goto done;
    *out = pcre2_compile((PCRE2_SPTR)t.out.data, t.out.n - 1,
                         PCRE2_UTF | PCRE2_UCP | PCRE2_USE_OFFSET_LIMIT, &code, &offset, NULL);
    if (!*out) {
        pcre2_get_error_message(code, reason, sizeof reason);
        st = BL_FAIL(BL_EINPUT, "regex \"%.80s\": %s", pattern, (const char *)reason);
        goto done;
    }
    pcre2_pattern_info(*out, PCRE2_INFO_MATCHEMPTY, &may_be_empty);
    if (may_be_empty) {
        st = BL_FAIL(BL_EINPUT, "regex \"%.80s\" may match nothing", pattern);
        pcre2_code_free(*out);
        *out = NULL;
        goto done;
    }
    /* Without a JIT in the library matching is only slower. */
    pcre2_jit_compile(*out, PCRE2_JIT_COMPLETE);
done:
    bl_bytes_free(&t.out);
    return st;
}
