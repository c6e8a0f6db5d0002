/* SPDX-License-Identifier: Apache-2.0 */
/* internal.h -- declarations shared by the files that implement options.h. */
#ifndef BALLAST_OPTIONS_INTERNAL_H
#define BALLAST_OPTIONS_INTERNAL_H

#include "options/options.h"

enum { BL_OPTION_KEY_BYTES = 128, BL_OPTION_MAX_TRANSLATED = 32, BL_OPTION_NOTHING = -1 };

/* A value as the user wrote it: one text, or a YAML sequence of texts. */
typedef struct bl_option_value {
    const char *const *items;
    size_t n_items;
    bool is_sequence;
    bool is_null;
    bool is_nested; /* has mappings, which are not kept */
    bool joins;     /* adds to a list */
} bl_option_value;

/* dst = name with dashes turned into underscores; cut when longer than any key. */
void bl_option_normalize(const char *name, char dst[BL_OPTION_KEY_BYTES]);

/* The row of the aliases that this name has in the program that the options are read for; NULL: it
 * is a key or unknown. */
const bl_option_alias *bl_options_find_alias(const bl_options *options, const char *key);

/* Whether names that begin with "key." are known. */
bool bl_options_has_children(const bl_options *options, const char *key);

/* The meaning of a name and a value. */
typedef struct bl_option_meaning {
    const bl_option_alias *alias; /* NULL: the name is a key */
    int64_t index;                /* of the row; BL_OPTION_NOTHING: accepted, nothing to set */
    bool is_ignored; /* of another program: asks for nothing, or nothing that is here */
    /* An alias may replace the items of the value by others, which are here. */
    const char *items[BL_OPTION_MAX_TRANSLATED];
    char texts[BL_OPTION_MAX_TRANSLATED][BL_OPTION_KEY_BYTES];
} bl_option_meaning;

/* The row that `name` means, and by an alias another value for it, which borrows *meaning. `where`
 * begins the errors: "FILE:LINE: " or "--". */
bl_status bl_options_resolve(const bl_options *options, const char *where, const char *name,
                             bl_option_value *value, bl_option_meaning *meaning);

/* A decimal number; neither infinite nor rounded to zero. */
bool bl_option_parse_real(const char *text, double *value);

/* Parses the value into the field and notes the origin. A value from the command line stays when
 * the origin is the file. */
bl_status bl_options_assign(const bl_options *options, const char *where, int64_t index,
                            const bl_option_value *value, bl_option_origin origin);

/* The word at `at` of "a|b|c": its length; *next is where the following one begins, NULL after the
 *   last. */
size_t bl_option_next_name(const char *at, const char **next);

void bl_option_print_names(const char *names, FILE *out); /* "a|b|c" as "a, b, c" */

/* The accepted values, in words: "an integer in [1, 64] or auto". */
void bl_option_print_expected(const bl_option *option, FILE *out);

#endif
