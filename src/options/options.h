/* SPDX-License-Identifier: Apache-2.0 */
/* options.h -- a table of options, and all that is derived from it: reading a YAML file and a
 * command line, --help, the reference page in docs/, and the file that records a run's options.
 *
 * An option is a row of a constant table and a field of a struct of the caller's. Its key is the
 * YAML key and, after two dashes, the command-line option; dashes and underscores are the same in
 * both. A value that cannot be used exactly as written is rejected with the place, the key, the
 * value and the allowed values; nothing is rounded, ignored or guessed.
 *
 * Values are written alike in YAML and on the command line:
 *   string, path  any UTF-8 text; "~/" at the start of a path is the user's home
 *   int           decimal digits, no leading zero
 *   real          decimal, an exponent is fine: 2e-5
 *   bool          true false yes no on off, in any case
 *   enum          one of its names; `false` means the name "no" or "none"
 *   list          names: a YAML sequence, also "[a, b]" on a command line, or separated by commas
 * An unquoted null, ~ or nothing in YAML means `null_text` or, without one, the default. A value
 * from the command line wins over the file's, whichever is read first. A key that is given twice,
 * in a file or on a command line, is an error.
 *
 * Errors are BL_EUSAGE (also for a file that is not there), BL_EIO or BL_ENOMEM. One thread per
 * set. */
#ifndef BALLAST_OPTIONS_OPTIONS_H
#define BALLAST_OPTIONS_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "base/status.h"

typedef struct bl_string_list {
    char **items;
    int64_t n_items;
} bl_string_list;

/* The type of the field an option fills. Strings and lists belong to the struct: bl_options_clear
 * frees them. */
typedef enum bl_option_type {
    BL_OPTION_STRING, /* char *; NULL when the default is null */
    BL_OPTION_PATH,   /* char *; the same */
    BL_OPTION_INT,    /* int64_t */
    BL_OPTION_REAL,   /* double */
    BL_OPTION_BOOL,   /* bool */
    BL_OPTION_ENUM,   /* a C enum: the position in `names` */
    BL_OPTION_LIST    /* bl_string_list */
} bl_option_type;

/* The effect of another value of the option on a run's results: decides whether a run may be
 * resumed with it. */
typedef enum bl_option_effect {
    BL_EFFECT_NONE,   /* none: speed, place, reports */
    BL_EFFECT_RESULT, /* other numbers */
    BL_EFFECT_SOURCE  /* names an input: the content decides, not the name */
} bl_option_effect;

/* Stored in an int or real field whose option `has_auto` when the value is the word auto. */
enum { BL_OPTION_AUTO = -1 };

typedef struct bl_option {
    const char *key;   /* lower case, underscores */
    const char *group; /* heading; options of a group are adjacent in the table */
    const char *help;  /* one line, no full stop */
    const char *default_text;
    const char *names; /* enum: "none|full|auto", in the order of the C enum */
    /* NULL, or the only values this version knows: "auto|cpu"; "null" for none but the default. */
    const char *available;
    double min, max; /* int and real: inclusive; integers are exact up to 2^53 */
    size_t offset;   /* of the field */
    bl_option_type type;
    bl_option_effect effect;
    unsigned commands;    /* bits: the commands it belongs to */
    unsigned required_by; /* bits: the commands that do not run without it */
    bool has_auto;
    bool is_model;         /* path: may be a name in the Hugging Face cache (base/hub.h) */
    const char *null_text; /* the value that null means; NULL: the default */
    const char *true_name; /* enum: the name that true means; NULL: none */
    const char
        *fraction_key; /* int: the key that a value between 0 and 1 sets instead; NULL: none */
} bl_option;

/* A name that people paste from another program. With a key it is read as that option; without one
 * it is rejected with the hint. A hint is the key to use or, with "!" before it, why there is none.
 *
 * Nested keys have dots: "optimizer.lr"; the items of a sequence of mappings do not count:
 * "datasets.path". A name that ends in "*" is that of all names that begin so and have no other
 * row; it has no key.
 *
 * `values` are rules, separated by blanks, of which the first that fits the value holds; no rule
 * fits: the value is rejected with the hint. NULL accepts every value. Patterns are those of
 * fnmatch.
 *   pattern=text  becomes that text; nothing after the sign: accepted, sets nothing
 *   pattern       accepted as it is
 *   !pattern      rejected
 *   x100          a number in [0, 1), times 100 */
typedef struct bl_option_alias {
    const char *name;
    const char *key;
    const char *values;
    const char *hint;
    const char
        *tool; /* only in a file of this program, or of its trainer "TOOL-..."; it hides a key
                  of that name. NULL: anywhere */
    /* As of bl_option; with "!" before it null is rejected for that reason. NULL: as of the key. */
    const char *null_text;
    const char *needs; /* a key that must be given, too; NULL: none */
    bool joins;        /* may follow other names of its key: adds to a list, else replaces */
} bl_option_alias;

typedef enum bl_option_origin { BL_FROM_DEFAULT, BL_FROM_FILE, BL_FROM_LINE } bl_option_origin;

/* The findings of reading. Zero-initialized; bl_options_report_clear frees it. */
typedef struct bl_options_report {
    bl_string_list given;    /* "name=value" in the file's order, nested names with dots, the items
                                of a sequence with commas; "name" alone: null, or nested */
    bl_string_list rejected; /* of the file: "PATH:LINE: key: reason" */
    bl_string_list ignored;  /* names of other programs that set nothing */
    bl_string_list same;     /* names of other programs with a value that is Ballast's behavior */
} bl_options_report;

/* A file read for one of several runs that differ in some keys: where an int, real, bool or enum is
 * expected, a sequence has the values of that key, of which one is taken. Zero-initialized
 * except `choice`; bl_string_list_clear frees `chosen`. */
enum { BL_OPTIONS_MAX_SWEPT = 8 };
typedef struct bl_options_sweep {
    int64_t choice[BL_OPTIONS_MAX_SWEPT]; /* of the keys in the file's order: which value to take */
    int n_keys;                           /* found, with more than one value */
    const bl_option *key[BL_OPTIONS_MAX_SWEPT];
    int64_t n_values[BL_OPTIONS_MAX_SWEPT];
    bl_string_list chosen; /* the text of each key's value */
} bl_options_sweep;

/* A table and the struct it fills. Plain data, borrowed: the caller keeps all of it alive. */
typedef struct bl_options {
    const bl_option *table;
    size_t n_options;
    const bl_option_alias *aliases; /* may be NULL */
    size_t n_aliases;
    const char *tool;          /* the program whose file is read; NULL: Ballast's own */
    bl_options_report *report; /* bl_options_read_yaml needs it */
    /* NULL: a sequence is a list's alone. A key that the command line sets is not swept: read the
     * line first. */
    bl_options_sweep *sweep;
    /* The bit of the command that reads: an option of other commands is rejected on its command
     * line. */
    unsigned command;
    void *values;     /* the struct */
    uint8_t *origins; /* [n_options] bl_option_origin */
} bl_options;

/* Fills the struct with the defaults. `values` need not be initialized; bl_options_clear it, also
 * after a failure. */
bl_status bl_options_init(const bl_options *options);
/* Frees strings and lists and sets them to NULL. */
void bl_options_clear(const bl_options *options);

/* Reads a YAML mapping. Keys of other commands are checked and kept: one file serves every command.
 * Keys that cannot be used are listed in the report, and the others are read. BL_EUSAGE: the file
 * cannot be read to its end. */
bl_status bl_options_read_yaml(const bl_options *options, const char *path);
void bl_options_report_clear(bl_options_report *report);

/* Reads "--key value" and "--key=value"; a bool alone is true. argv has no program and no command
 * name. Other words go to words[*n_words < max_words] (borrowed from argv); one too many is an
 * error. After "--" everything is a word. */
bl_status bl_options_read_line(const bl_options *options, int argc, char *const *argv,
                               int max_words, const char **words, int *n_words);

/* Adds the items of "[a, b]", a YAML sequence of texts, as a command line has it. `name` is the
 * option's, for errors: BL_EUSAGE. */
bl_status bl_options_read_list(const char *name, const char *text, bl_string_list *items);

/* Gives row `index` the value that the same table's `from` has, as if a file had set it; `from` may
 * be any struct of the table. */
bl_status bl_options_copy(const bl_options *options, const void *from, size_t index);

/* As if a file had `text` for row `index`, which replaces what a file gave. BL_EUSAGE. */
bl_status bl_options_set(const bl_options *options, size_t index, const char *text);

/* Rejects a struct that lacks options that its command requires; names all of them. */
bl_status bl_options_check_required(const bl_options *options);

/* The row of that key; NULL: none. */
const bl_option *bl_options_find(const bl_options *options, const char *key);
bl_option_origin bl_options_origin(const bl_options *options,
                                   const char *key); /* the key must exist */

/* The field of a row as YAML text that reads back as the same value. The caller frees *text. */
bl_status bl_option_format(const bl_option *option, const void *values, char **text);

/* Every key of the table with its value, atomically; bl_options_read_yaml gives the same struct
 * back. `comment` (may be NULL) is the first line. */
bl_status bl_options_write_yaml(const bl_options *options, const char *path, const char *comment);

typedef enum bl_options_style {
    BL_OPTIONS_HELP,     /* for a terminal, by group */
    BL_OPTIONS_MARKDOWN, /* a table per group, "### Group", and one of the aliases */
    BL_OPTIONS_MAN,      /* requests of roff's man macros, ".SS Group" */
    /* "--key TAB values TAB purpose" per line; the values are names with | between them, or
     * nothing */
    BL_OPTIONS_WORDS
} bl_options_style;

/* The options of options->command. */
void bl_options_print(const bl_options *options, bl_options_style style, FILE *out);

/* Text that roff prints as it is. */
void bl_options_print_roff(const char *text, FILE *out);

/* Adds a copy of the text. BL_ENOMEM. */
bl_status bl_string_list_add(bl_string_list *list, const char *text);
void bl_string_list_clear(bl_string_list *list);

/* true, yes, on or false, no, off in any case; false: none of them. */
bool bl_text_parse_bool(const char *text, bool *value);

#endif
