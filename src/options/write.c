/* SPDX-License-Identifier: Apache-2.0 */
/* Output from a table: values as YAML, --help and the reference page. */
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/files.h"
#include "options/options.h"
#include "options/internal.h"

enum { HELP_COLUMN = 38, HELP_WIDTH = 104 };

/* ---- YAML ---- */

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

/* ---- help ---- */

static const char *placeholder(const bl_option *option)
{
    static const char *const words[] = {"TEXT", "PATH", "INT", "REAL", "[BOOL]", "NAME", "NAMES"};
    return words[option->type];
}

/* The help of the option, and the values that this version supports if not all. */
static void print_purpose(const bl_option *option, FILE *out)
{
    fputs(option->help, out);
    if (!option->available) return;
    bool is_absent = strcmp(option->available, "null") == 0;
    fputs(is_absent ? "; not supported yet" : "; supported: ", out);
    if (!is_absent) bl_option_print_names(option->available, out);
}

static const char *default_or(const bl_options *options, const bl_option *option, const char *none)
{
    unsigned commands = option->commands & options->command;
    if ((option->required_by & commands) == commands) return "required";
    return option->default_text ? option->default_text : none;
}

/* Purpose, accepted values, and the default, in one line. */
static void describe(const bl_options *options, const bl_option *option, FILE *out)
{
    const char *text = default_or(options, option, "");

    print_purpose(option, out);
    if (option->type == BL_OPTION_INT || option->type == BL_OPTION_REAL ||
        option->type == BL_OPTION_ENUM) {
        fputs("; ", out);
        bl_option_print_expected(option, out);
    }
    if (text[0]) fprintf(out, "; %s%s", strcmp(text, "required") == 0 ? "" : "default ", text);
}

/* Breaks the text at blanks to fit between HELP_COLUMN and HELP_WIDTH. `column`: of the cursor. */
static void print_wrapped(FILE *out, const char *text, int column)
{
    if (column >= HELP_COLUMN) {
        fputc('\n', out);
        column = 0;
    }
    fprintf(out, "%*s", HELP_COLUMN - column, "");
    column = HELP_COLUMN;
    while (*text) {
        int length = (int)strcspn(text, " ");
        if (column > HELP_COLUMN && column + 1 + length > HELP_WIDTH) {
            fprintf(out, "\n%*s", HELP_COLUMN, "");
            column = HELP_COLUMN;
        }
        column += fprintf(out, "%s%.*s", column > HELP_COLUMN ? " " : "", length, text);
        text += length + (text[length] == ' ');
    }
    fputc('\n', out);
}

void bl_options_print_help(const bl_options *options, FILE *out)
{
    const char *group = "";

    for (size_t i = 0; i < options->n_options; i++) {
        const bl_option *option = &options->table[i];
        char *text = NULL;
        size_t n_bytes;
        if (!(option->commands & options->command)) continue;
        FILE *line = open_memstream(&text, &n_bytes);
        if (!line) return;
        describe(options, option, line);
        fclose(line);
        if (strcmp(group, option->group) != 0) fprintf(out, "\n%s:\n", option->group);
        group = option->group;
        int column = fprintf(out, "  --%s %s ", option->key, placeholder(option));
        print_wrapped(out, text, column);
        free(text);
    }
}

static void print_alias(const bl_option_alias *alias, FILE *out)
{
    bool is_ignored = alias->values && strcmp(alias->values, "*=") == 0;
    const char *why = alias->hint ? alias->hint : "";

    if (alias->key)
        fprintf(out, "`%s`", alias->key);
    else if (is_ignored)
        fputs("accepted, no effect", out);
    else
        fprintf(out, why[0] == '!' ? "rejected: %s" : "rejected: use %s", why + (why[0] == '!'));
    if (alias->values && !is_ignored) fprintf(out, " (values: `%s`)", alias->values);
    if (alias->needs) fprintf(out, "; needs `%s`: %s", alias->needs, why);
    if (alias->tool) fprintf(out, "; in files of %s", alias->tool);
}

static void print_aliases(const bl_options *options, FILE *out)
{
    fputs(
        "\n### Names from other programs\n\nNested names have dots. A name that ends in `*` stands "
        "for all that begin so.\nOf the values, `x=y` means that x becomes y, `x=` that x sets "
        "nothing, `!x` that x is rejected, and\n`x100` a fraction that becomes percent. `*` is any "
        "text. The first that fits holds.\n\n| name | read as, or use instead |\n| --- | --- |\n",
        out);
    for (size_t i = 0; i < options->n_aliases; i++) {
        const bl_option_alias *alias = &options->aliases[i];
        fprintf(out, "| `%s` | ", alias->name);
        print_alias(alias, out);
        fputs(" |\n", out);
    }
}

void bl_options_print_markdown(const bl_options *options, FILE *out)
{
    const char *group = "";

    for (size_t i = 0; i < options->n_options; i++) {
        const bl_option *option = &options->table[i];
        if (!(option->commands & options->command)) continue;
        if (strcmp(group, option->group) != 0) {
            fprintf(
                out,
                "\n### %s\n\n| key | value | default | what it does |\n| --- | --- | --- | --- |\n",
                option->group);
        }
        group = option->group;
        fprintf(out, "| `%s` | ", option->key);
        bl_option_print_expected(option, out);
        fprintf(out, " | %s | ", default_or(options, option, "none"));
        print_purpose(option, out);
        fputs(" |\n", out);
    }
    if (options->n_aliases > 0) print_aliases(options, out);
}
