/* SPDX-License-Identifier: Apache-2.0 */
/* A table of options as text: for a terminal, the reference page, a man page, and the words that a
 * shell completes. */
#include <stdlib.h>
#include <string.h>

#include "options/options.h"
#include "options/internal.h"

enum { HELP_COLUMN = 38, HELP_WIDTH = 104 };

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

/* Purpose, accepted values, and the default, in one line. The caller frees it; NULL: no memory. */
static char *describe(const bl_options *options, const bl_option *option)
{
    const char *default_text = default_or(options, option, "");
    char *text = NULL;
    size_t n_bytes;
    FILE *out = open_memstream(&text, &n_bytes);

    if (!out) return NULL;
    print_purpose(option, out);
    if (option->type == BL_OPTION_INT || option->type == BL_OPTION_REAL ||
        option->type == BL_OPTION_ENUM) {
        fputs("; ", out);
        bl_option_print_expected(option, out);
    }
    if (default_text[0])
        fprintf(out, "; %s%s", strcmp(default_text, "required") == 0 ? "" : "default ",
                default_text);
    fclose(out);
    return text;
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

static void print_help(const bl_options *options, FILE *out)
{
    const char *group = "";

    for (size_t i = 0; i < options->n_options; i++) {
        const bl_option *option = &options->table[i];
        if (!(option->commands & options->command)) continue;
        char *text = describe(options, option);
        if (!text) return;
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

static bool is_text(const char *a, const char *b)
{
    return a && b ? strcmp(a, b) == 0 : a == b;
}

/* Whether two names are read in the same way: they share a row. */
static bool is_read_as(const bl_option_alias *a, const bl_option_alias *b)
{
    return is_text(a->key, b->key) && is_text(a->values, b->values) && is_text(a->hint, b->hint) &&
           is_text(a->needs, b->needs) && is_text(a->tool, b->tool);
}

static bool has_row(const bl_options *options, size_t i)
{
    for (size_t j = 0; j < i; j++)
        if (is_read_as(&options->aliases[j], &options->aliases[i])) return true;
    return false;
}

static void print_aliases(const bl_options *options, FILE *out)
{
    fputs(
        "\n### Names from other programs\n\nNested names have dots. A name that ends in `*` means "
        "all other names with that prefix.\nOf the values, `x=y` means that x becomes y, `x=` that "
        "x sets nothing, `!x` that x is rejected, and\n`x100` a fraction that becomes percent. `*` "
        "is any text. The first that fits holds.\n\n| names | read as, or use instead |\n"
        "| --- | --- |\n",
        out);
    for (size_t i = 0; i < options->n_aliases; i++) {
        const bl_option_alias *alias = &options->aliases[i];
        if (has_row(options, i)) continue;
        fprintf(out, "| `%s`", alias->name);
        for (size_t j = i + 1; j < options->n_aliases; j++)
            if (is_read_as(alias, &options->aliases[j]))
                fprintf(out, ", `%s`", options->aliases[j].name);
        fputs(" | ", out);
        print_alias(alias, out);
        fputs(" |\n", out);
    }
}

static void print_markdown(const bl_options *options, FILE *out)
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

/* ---- man pages ---- */

void bl_options_print_roff(const char *text, FILE *out)
{
    bool starts_line = true;

    for (; *text; text++) {
        if (starts_line && (*text == '.' || *text == '\''))
            fputs("\\&", out); /* would be a request */
        if (*text == '\\')
            fputs("\\e", out);
        else if (*text == '-')
            fputs("\\-", out);
        else
            fputc(*text, out);
        starts_line = *text == '\n';
    }
}

static void print_man(const bl_options *options, FILE *out)
{
    const char *group = "";

    for (size_t i = 0; i < options->n_options; i++) {
        const bl_option *option = &options->table[i];
        if (!(option->commands & options->command)) continue;
        char *text = describe(options, option);
        if (!text) return;
        if (strcmp(group, option->group) != 0) fprintf(out, ".SS %s\n", option->group);
        group = option->group;
        fputs(".TP\n.BR \\-\\-", out);
        bl_options_print_roff(option->key, out);
        fprintf(out, " \" %s\"\n", placeholder(option));
        bl_options_print_roff(text, out);
        fputc('\n', out);
        free(text);
    }
}

/* ---- completion ---- */

static void print_words(const bl_options *options, FILE *out)
{
    for (size_t i = 0; i < options->n_options; i++) {
        const bl_option *option = &options->table[i];
        if (!(option->commands & options->command)) continue;
        const char *values = option->available ? option->available : option->names;
        if (option->type == BL_OPTION_BOOL) values = "true|false";
        fprintf(out, "--%s\t%s\t%s\n", option->key, values ? values : "", option->help);
    }
}

void bl_options_print(const bl_options *options, bl_options_style style, FILE *out)
{
    static void (*const print[])(const bl_options *, FILE *) = {
        [BL_OPTIONS_HELP] = print_help,
        [BL_OPTIONS_MARKDOWN] = print_markdown,
        [BL_OPTIONS_MAN] = print_man,
        [BL_OPTIONS_WORDS] = print_words,
    };
    print[style](options, out);
}
