/* SPDX-License-Identifier: Apache-2.0 */
/* Output from a table: values as YAML. */
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/files.h"
#include "options/options.h"
#include "options/internal.h"

/* Whether every YAML reader takes the unquoted text as this same string. */
static bool is_plain(const char *text, size_t n_bytes)
{
    static const char safe[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./-";
    char word[8];
    bool truth;
    bool starts_well = strchr("0123456789.-", text[0]) == NULL;

    if (!starts_well || strspn(text, safe) < n_bytes) return false;
    if (n_bytes >= sizeof word) return true;
    snprintf(word, sizeof word, "%.*s", (int)n_bytes, text);
    return n_bytes > 1 && strcasecmp(word, "null") != 0 && !bl_text_parse_bool(word, &truth);
}

static void write_text(FILE *out, const char *text, size_t n_bytes)
{
    bool has_control = false;
    for (size_t i = 0; i < n_bytes; i++)
        has_control |= (unsigned char)text[i] < 0x20 || text[i] == 0x7f;
    if (is_plain(text, n_bytes)) {
        fprintf(out, "%.*s", (int)n_bytes, text);
        return;
    }
    fputc(has_control ? '"' : '\'', out);
    for (size_t i = 0; i < n_bytes; i++) {
        unsigned char c = (unsigned char)text[i];
        if (has_control && (c < 0x20 || c == 0x7f))
            fprintf(out, "\\x%02x", c);
        else if (has_control && (c == '"' || c == '\\'))
            fprintf(out, "\\%c", c);
        else if (!has_control && c == '\'')
            fputs("''", out);
        else
            fputc(c, out);
    }
    fputc(has_control ? '"' : '\'', out);
}

/* The shortest text that reads back as the same double, with a point where YAML 1.1 needs one to
 * see a number. */
static void write_real(FILE *out, double value)
{
    char text[64];
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, value);
        if (strtod(text, NULL) == value) break;
    }
    char *exponent = strchr(text, 'e');
    if (exponent && !strchr(text, '.'))
        fprintf(out, "%.*s.0%s", (int)(exponent - text), text, exponent);
    else
        fputs(text, out);
}

static void write_enum(FILE *out, const bl_option *option, const void *field)
{
    int number;
    const char *at = option->names, *next;
    memcpy(&number, field, sizeof number);
    size_t length = bl_option_next_name(at, &next);
    for (; number > 0 && next; number--) {
        at = next;
        length = bl_option_next_name(at, &next);
    }
    write_text(out, at, length);
}

static void write_list(FILE *out, const bl_string_list *list)
{
    if (list->n_items == 0) { /* an empty sequence would be rejected */
        fputs("null", out);
        return;
    }
    fputc('[', out);
    for (int64_t i = 0; i < list->n_items; i++) {
        fputs(i ? ", " : "", out);
        write_text(out, list->items[i], strlen(list->items[i]));
    }
    fputc(']', out);
}

static void write_value(FILE *out, const bl_option *option, const void *values)
{
    const void *field = (const char *)values + option->offset;
    switch (option->type) {
    case BL_OPTION_STRING:
    case BL_OPTION_PATH: {
        const char *text = *(char *const *)field;
        if (text)
            write_text(out, text, strlen(text));
        else
            fputs("null", out);
        break;
    }
    case BL_OPTION_INT: {
        int64_t integer = *(const int64_t *)field;
        if (option->has_auto && integer == BL_OPTION_AUTO)
            fputs("auto", out);
        else
            fprintf(out, "%lld", (long long)integer);
        break;
    }
    case BL_OPTION_REAL: {
        double real = *(const double *)field;
        if (option->has_auto && real == BL_OPTION_AUTO)
            fputs("auto", out);
        else
            write_real(out, real);
        break;
    }
    case BL_OPTION_BOOL:
        fputs(*(const bool *)field ? "true" : "false", out);
        break;
    case BL_OPTION_ENUM:
        write_enum(out, option, field);
        break;
    case BL_OPTION_LIST:
        write_list(out, field);
        break;
    }
}

bl_status bl_option_format(const bl_option *option, const void *values, char **text)
{
    size_t n_bytes;
    FILE *out = open_memstream(text, &n_bytes);
    if (!out) return BL_FAIL(BL_ENOMEM, "%s: the text of its value", option->key);
    write_value(out, option, values);
    if (fclose(out) == 0) return BL_OK;
    free(*text);
    *text = NULL;
    return BL_FAIL(BL_ENOMEM, "%s: the text of its value", option->key);
}

bl_status bl_options_write_yaml(const bl_options *options, const char *path, const char *comment)
{
    char *text = NULL;
    size_t n_bytes;
    const char *group = "";
    FILE *out = open_memstream(&text, &n_bytes);

    if (!out) return BL_FAIL(BL_ENOMEM, "%s: its text", path);
    if (comment) fprintf(out, "# %s\n", comment);
    for (size_t i = 0; i < options->n_options; i++) {
        const bl_option *option = &options->table[i];
        if (strcmp(group, option->group) != 0) fprintf(out, "\n# %s\n", option->group);
        group = option->group;
        fprintf(out, "%s: ", option->key);
        write_value(out, option, options->values);
        fputc('\n', out);
    }
    bl_status st = fclose(out) ? BL_FAIL(BL_ENOMEM, "%s: its text", path)
                               : bl_file_write_atomic(path, text, n_bytes);
    free(text);
    return st;
}
