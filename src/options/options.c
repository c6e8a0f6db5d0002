/* SPDX-License-Identifier: Apache-2.0 */
/* The values of options: which row a name means, parsing a text into its field, and writing the
 * field back as text. */
#include "options/options.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/files.h"
#include "base/hub.h"
#include "base/log.h"
#include "base/sizes.h"
#include "options/internal.h"

/* Integers beyond this are not exact in the table's min and max; a bound there reads as "no bound",
 * and an error for a value beyond it names it. */
static const double UNBOUNDED = 9007199254740992.0;

/* ---- texts ---- */

bool bl_text_parse_bool(const char *text, bool *value)
{
    static const char *const words[] = {"false", "no", "off", "true", "yes", "on"};
    for (size_t i = 0; i < BL_COUNT(words); i++) {
        if (strcasecmp(text, words[i]) == 0) {
            *value = i >= 3;
            return true;
        }
    }
    return false;
}

static bool is_utf8(const char *text)
{
    const unsigned char *at = (const unsigned char *)text;
    while (*at) {
        int n_more = *at < 0x80                  ? 0
                     : *at >= 0xc2 && *at < 0xe0 ? 1
                     : (*at & 0xf0) == 0xe0      ? 2
                     : *at >= 0xf0 && *at < 0xf5 ? 3
                                                 : -1;
        if (n_more < 0) return false;
        unsigned first = at[0], second = at[n_more > 0];
        if ((first == 0xe0 && second < 0xa0) || (first == 0xed && second > 0x9f))
            return false; /* overlong, surrogate */
        if ((first == 0xf0 && second < 0x90) || (first == 0xf4 && second > 0x8f))
            return false; /* overlong, > 10FFFF */
        for (at++; n_more > 0; n_more--, at++) {
            if ((*at & 0xc0) != 0x80) return false;
        }
    }
    return true;
}

static const char *skip_digits(const char *at)
{
    while (*at >= '0' && *at <= '9') at++;
    return at;
}

static bool parse_int(const char *text, int64_t *value)
{
    const char *digits = text + (*text == '-' || *text == '+');
    const char *end = skip_digits(digits);
    errno = 0;
    if (end == digits || *end) return false;
    if (digits[0] == '0' && digits[1]) return false; /* YAML 1.1 reads 010 as 8, 1.2 as 10 */
    *value = strtoll(text, NULL, 10);
    return errno == 0;
}

bool bl_option_parse_real(const char *text, double *value)
{
    const char *at = text + (*text == '-' || *text == '+');
    const char *fraction = skip_digits(at);
    int64_t n_digits = fraction - at;
    at = fraction;
    if (*at == '.') {
        fraction = skip_digits(at + 1);
        n_digits += fraction - (at + 1);
        at = fraction;
    }
    if (n_digits == 0) return false;
    if (*at == 'e' || *at == 'E') {
        at += 1 + (at[1] == '-' || at[1] == '+');
        const char *end = skip_digits(at);
        if (end == at) return false;
        at = end;
    }
    if (*at) return false;
    errno = 0;
    *value = strtod(text, NULL);
    return errno == 0; /* neither infinite nor rounded to zero */
}

static bool parse_enum(const char *names, const char *text, int *value)
{
    bool truth, text_is_bool = bl_text_parse_bool(text, &truth);
    int index = 0;

    for (const char *at = names, *next; at; at = next, index++) {
        size_t length = bl_option_next_name(at, &next);
        bool same = strlen(text) == length && strncasecmp(at, text, length) == 0;
        bool is_off = (length == 2 && strncmp(at, "no", 2) == 0) ||
                      (length == 4 && strncmp(at, "none", 4) == 0) ||
                      (length == 5 && strncmp(at, "false", 5) == 0);
        if (same || (is_off && text_is_bool && !truth)) {
            *value = index;
            return true;
        }
    }
    return false;
}

/* ---- fields ---- */

void bl_option_print_names(const char *names, FILE *out)
{
    for (const char *at = names, *next; at; at = next) {
        size_t length = bl_option_next_name(at, &next);
        fprintf(out, "%.*s%s", (int)length, at, next ? ", " : "");
    }
}

void bl_option_print_expected(const bl_option *option, FILE *out)
{
    bool is_int = option->type == BL_OPTION_INT;
    switch (option->type) {
    case BL_OPTION_STRING:
        fputs("text", out);
        break;
    case BL_OPTION_PATH:
        fputs("a path", out);
        break;
    case BL_OPTION_LIST:
        fputs("names", out);
        break;
    case BL_OPTION_BOOL:
        fputs("true or false", out);
        break;
    case BL_OPTION_ENUM:
        fputs("one of ", out);
        bl_option_print_names(option->names, out);
        break;
    case BL_OPTION_INT:
    case BL_OPTION_REAL:
        fputs(is_int ? "an integer" : "a number", out);
        if (option->max < UNBOUNDED) {
            fprintf(out, is_int ? " in [%.0f, %.0f]" : " in [%g, %g]", option->min, option->max);
        } else {
            fprintf(out, is_int ? " of at least %.0f" : " of at least %g", option->min);
        }
        if (option->has_auto) fputs(" or auto", out);
        break;
    }
}

static bl_status fail_value(const bl_option *option, const char *where, const char *got)
{
    char *expected = NULL;
    size_t n_bytes;
    FILE *out = open_memstream(&expected, &n_bytes);
    if (!out) return BL_FAIL(BL_ENOMEM, "%s%s: the text of an error", where, option->key);
    bl_option_print_expected(option, out);
    fclose(out);
    bl_status st =
        BL_FAIL(BL_EUSAGE, "%s%s: expected %s, got %s", where, option->key, expected, got);
    free(expected);
    return st;
}

/* Whether `text` is an integer above the option's maximum, be it outside int64. */
static bool is_above(const bl_option *option, const char *text)
{
    int64_t integer;

    if (parse_int(text, &integer)) return integer > (int64_t)option->max;
    return errno == ERANGE && *text != '-';
}

static bl_status fail_text(const bl_option *option, const char *where, const char *text)
{
    char quoted[BL_OPTION_KEY_BYTES];
    snprintf(quoted, sizeof quoted, "'%.100s'%s", text, strlen(text) > 100 ? "..." : "");
    if (option->type == BL_OPTION_INT && option->max >= UNBOUNDED && is_above(option, text))
        return BL_FAIL(BL_EUSAGE, "%s%s: expected an integer in [%.0f, %.0f], got %s", where,
                       option->key, option->min, option->max, quoted);
    return fail_value(option, where, quoted);
}

static void *field(const bl_option *option, const void *values)
{
    return (char *)values + option->offset;
}

bl_status bl_string_list_add(bl_string_list *list, const char *text)
{
    char **items = realloc(list->items, ((size_t)list->n_items + 1) * sizeof *items);
    if (items) list->items = items;
    char *copy = items ? strdup(text) : NULL;
    if (!copy) return BL_FAIL(BL_ENOMEM, "list of texts");
    list->items[list->n_items++] = copy;
    return BL_OK;
}

void bl_string_list_clear(bl_string_list *list)
{
    for (int64_t i = 0; i < list->n_items; i++) free(list->items[i]);
    free(list->items);
    *list = (bl_string_list){0};
}

static void free_field(const bl_option *option, void *values)
{
    if (option->type == BL_OPTION_STRING || option->type == BL_OPTION_PATH) {
        char **text = field(option, values);
        free(*text);
        *text = NULL;
    } else if (option->type == BL_OPTION_LIST) {
        bl_string_list_clear(field(option, values));
    }
}

static bl_status set_string(const bl_option *option, void *values, const char *where,
                            const char *text)
{
    if (!is_utf8(text)) return BL_FAIL(BL_EUSAGE, "%s%s: not valid UTF-8", where, option->key);
    if (!text[0]) return BL_FAIL(BL_EUSAGE, "%s%s: is empty", where, option->key);
    char *copy = strdup(text);
    if (!copy) return BL_FAIL(BL_ENOMEM, "%s%s: %zu bytes", where, option->key, strlen(text));
    free_field(option, values);
    *(char **)field(option, values) = copy;
    return BL_OK;
}

/* "~/a" in the user's home; a model's name on the Hugging Face Hub as its place in the cache.
 * *out: to be freed; NULL: `text` as it is. */
static bl_status expand_path(const bl_option *option, const char *text, char **out)
{
    const char *home = getenv("HOME");

    *out = NULL;
    if (text[0] == '~' && text[1] == '/' && home && *home)
        return bl_text_format(out, "%s%s", home, text + 1);
    if (!option->is_model) return BL_OK;
    BL_TRY(bl_hub_find_cached(text, out));
    if (*out) bl_log_info("%s: %s, in the Hugging Face cache", text, *out);
    return BL_OK;
}

static bl_status set_path(const bl_option *option, void *values, const char *where,
                          const char *text)
{
    char *expanded;

    BL_TRY(expand_path(option, text, &expanded));
    bl_status st = set_string(option, values, where, expanded ? expanded : text);
    free(expanded);
    return st;
}

static bl_status add_item(bl_string_list *list, const char *where, const bl_option *option,
                          const char *text, size_t n_bytes)
{
    for (; n_bytes > 0 && text[0] == ' '; n_bytes--) text++;
    while (n_bytes > 0 && text[n_bytes - 1] == ' ') n_bytes--;
    if (n_bytes == 0) return BL_FAIL(BL_EUSAGE, "%s%s: a name is empty", where, option->key);
    char *name = strndup(text, n_bytes);
    if (!name) return BL_FAIL(BL_ENOMEM, "%s%s: list of names", where, option->key);
    bl_status st = is_utf8(name) ? bl_string_list_add(list, name)
                                 : BL_FAIL(BL_EUSAGE, "%s%s: not valid UTF-8", where, option->key);
    free(name);
    return st;
}

static bl_status set_list(const bl_option *option, void *values, const char *where,
                          const bl_option_value *value)
{
    bl_string_list *list = field(option, values);

    if (!value->joins) free_field(option, values);
    for (size_t i = 0; i < value->n_items; i++) {
        const char *text = value->items[i];
        size_t length = value->is_sequence ? strlen(text) : strcspn(text, ",");
        BL_TRY(add_item(list, where, option, text, length));
        for (text += length; *text; text += length) {
            length = strcspn(++text, ",");
            BL_TRY(add_item(list, where, option, text, length));
        }
    }
    return list->n_items > 0 ? BL_OK : BL_FAIL(BL_EUSAGE, "%s%s: is empty", where, option->key);
}

static bl_status set_number(const bl_option *option, void *values, const char *where,
                            const char *text)
{
    bool is_int = option->type == BL_OPTION_INT;
    int64_t integer = BL_OPTION_AUTO;
    double real = BL_OPTION_AUTO;

    if (!option->has_auto || strcasecmp(text, "auto") != 0) {
        if (is_int ? !parse_int(text, &integer) : !bl_option_parse_real(text, &real))
            return fail_text(option, where, text);
        bool fits = is_int ? integer >= (int64_t)option->min && integer <= (int64_t)option->max
                           : real >= option->min && real <= option->max;
        if (!fits) return fail_text(option, where, text);
    }
    if (is_int)
        *(int64_t *)field(option, values) = integer;
    else
        *(double *)field(option, values) = real;
    return BL_OK;
}

static bl_status set_field(const bl_option *option, void *values, const char *where,
                           const bl_option_value *value)
{
    if (option->type == BL_OPTION_LIST) return set_list(option, values, where, value);
    if (value->is_sequence) return fail_value(option, where, "a sequence");

    const char *text = value->items[0];
    switch (option->type) {
    case BL_OPTION_STRING:
        return set_string(option, values, where, text);
    case BL_OPTION_PATH:
        return set_path(option, values, where, text);
    case BL_OPTION_INT:
    case BL_OPTION_REAL:
        return set_number(option, values, where, text);
    case BL_OPTION_BOOL: {
        bool truth;
        if (!bl_text_parse_bool(text, &truth)) return fail_text(option, where, text);
        *(bool *)field(option, values) = truth;
        return BL_OK;
    }
    case BL_OPTION_ENUM: {
        int number;
        bool truth;
        if (option->true_name && bl_text_parse_bool(text, &truth) && truth)
            text = option->true_name;
        if (!parse_enum(option->names, text, &number)) return fail_text(option, where, text);
        memcpy(field(option, values), &number, sizeof number);
        return BL_OK;
    }
    case BL_OPTION_LIST:
        break;
    }
    return BL_OK;
}

static bl_status set_default(const bl_option *option, void *values)
{
    if (!option->default_text) {
        free_field(option, values);
        return BL_OK;
    }
    const bl_option_value value = {.items = &option->default_text, .n_items = 1};
    return set_field(option, values, "the default of ", &value);
}

/* "auto|cpu" as "auto or cpu", in at most n_bytes. */
static void write_names(const char *names, char *out, size_t n_bytes)
{
    size_t used = 0;

    out[0] = '\0';
    for (const char *at = names, *next; at && used < n_bytes; at = next) {
        size_t length = bl_option_next_name(at, &next);
        used += (size_t)snprintf(out + used, n_bytes - used, "%s%.*s", at == names ? "" : " or ",
                                 (int)length, at);
    }
}

/* Rejects a value of a feature that this version does not have. */
static bl_status check_available(const bl_option *option, const void *values, const char *where)
{
    char *text, names[128];
    bool known = false;

    if (!option->available) return BL_OK;
    BL_TRY(bl_option_format(option, values, &text));
    size_t quote = text[0] == '\'';
    size_t n_bytes = strlen(text) - 2 * quote;
    for (const char *at = option->available, *next; at && !known; at = next) {
        size_t length = bl_option_next_name(at, &next);
        known = length == n_bytes && strncmp(at, text + quote, length) == 0;
    }
    bl_status st = BL_OK;
    if (!known && strcmp(option->available, "null") == 0) {
        st = BL_FAIL(BL_EUSAGE, "%s%s: not supported yet", where, option->key);
    } else if (!known) {
        write_names(option->available, names, sizeof names);
        st = BL_FAIL(BL_EUSAGE, "%s%s: %s is not supported yet; use %s", where, option->key, text,
                     names);
    }
    free(text);
    return st;
}

bl_status bl_options_assign(const bl_options *options, const char *where, int64_t index,
                            const bl_option_value *value, bl_option_origin origin)
{
    const bl_option *option = &options->table[index];
    bool is_line = origin == BL_FROM_LINE;

    if (is_line && !(option->commands & options->command)) {
        return BL_FAIL(BL_EUSAGE, "%s%s: not an option of this command", where, option->key);
    }
    if (!is_line && options->origins[index] == BL_FROM_LINE) return BL_OK;
    if (value->is_null) {
        if (is_line) options->origins[index] = BL_FROM_LINE;
        return set_default(option, options->values);
    }
    bl_option_value own = *value;
    own.joins = value->joins && options->origins[index] == origin;
    BL_TRY(set_field(option, options->values, where, &own));
    BL_TRY(check_available(option, options->values, where));
    options->origins[index] = (uint8_t)origin;
    return BL_OK;
}

bl_status bl_options_set(const bl_options *options, size_t index, const char *text)
{
    const bl_option_value value = {.items = &text, .n_items = 1};
    return bl_options_assign(options, "", (int64_t)index, &value, BL_FROM_FILE);
}

bl_status bl_options_init(const bl_options *options)
{
    for (size_t i = 0; i < options->n_options; i++) {
        const bl_option *option = &options->table[i];
        options->origins[i] = BL_FROM_DEFAULT;
        if (option->type == BL_OPTION_LIST)
            *(bl_string_list *)field(option, options->values) = (bl_string_list){0};
        if (option->type <= BL_OPTION_PATH) *(char **)field(option, options->values) = NULL;
    }
    for (size_t i = 0; i < options->n_options; i++)
        BL_TRY(set_default(&options->table[i], options->values));
    return BL_OK;
}

void bl_options_clear(const bl_options *options)
{
    for (size_t i = 0; i < options->n_options; i++) free_field(&options->table[i], options->values);
}

bl_status bl_options_copy(const bl_options *options, const void *from, size_t index)
{
    const bl_option *option = &options->table[index];
    void *to = field(option, options->values);
    const void *value = field(option, from);

    options->origins[index] = BL_FROM_FILE;
    switch (option->type) {
    case BL_OPTION_STRING:
    case BL_OPTION_PATH: {
        const char *text = *(char *const *)value;
        free_field(option, options->values);
        if (text && !(*(char **)to = strdup(text)))
            return BL_FAIL(BL_ENOMEM, "%s: a copy of its text", option->key);
        return BL_OK;
    }
    case BL_OPTION_LIST: {
        const bl_string_list *list = value;
        free_field(option, options->values);
        for (int64_t i = 0; i < list->n_items; i++) BL_TRY(bl_string_list_add(to, list->items[i]));
        return BL_OK;
    }
    case BL_OPTION_INT:
        *(int64_t *)to = *(const int64_t *)value;
        return BL_OK;
    case BL_OPTION_REAL:
        *(double *)to = *(const double *)value;
        return BL_OK;
    case BL_OPTION_BOOL:
        *(bool *)to = *(const bool *)value;
        return BL_OK;
    case BL_OPTION_ENUM:
        memcpy(to, value, sizeof(int));
        return BL_OK;
    }
    return BL_OK;
}

bl_status bl_options_check_required(const bl_options *options)
{
    char names[512] = "", *last = names;
    size_t used = 0;
    int n = 0;

    for (size_t i = 0; i < options->n_options; i++) {
        const bl_option *option = &options->table[i];
        if (!(option->required_by & options->command) || *(char **)field(option, options->values))
            continue;
        last = names + used;
        used += (size_t)snprintf(last, sizeof names - used, "%s%s", n ? ", " : "", option->key);
        if (used >= sizeof names) break;
        n++;
    }
    if (n == 0) return BL_OK;
    if (n == 1) return BL_FAIL(BL_EUSAGE, "%s is not given", names);
    return BL_FAIL(BL_EUSAGE, "%.*s and %s are not given", (int)(last - names), names, last + 2);
}
