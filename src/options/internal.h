/* SPDX-License-Identifier: Apache-2.0 */
/* internal.h -- what the files behind options.h share. */
#ifndef BALLAST_OPTIONS_INTERNAL_H
#define BALLAST_OPTIONS_INTERNAL_H

#include "options/options.h"

enum { BL_OPTION_KEY_BYTES = 128, BL_OPTION_NOTHING = -1 };

/* A value as the user wrote it: one text, or a YAML sequence of texts. */
typedef struct bl_option_value {
    const char *const *items;
    size_t n_items;
    bool is_sequence;
    bool is_null;
} bl_option_value;

/* dst = name with dashes turned into underscores; cut when longer than any key. */
void bl_option_normalise(const char *name, char dst[BL_OPTION_KEY_BYTES]);

const bl_option_alias *bl_options_find_alias(const bl_options *options, const char *key);

/* An alias may replace the value by another text, which lies here. */
typedef struct bl_option_translation {
    char text[BL_OPTION_KEY_BYTES];
    const char *item;
} bl_option_translation;

/* The row that `name` means, and by an alias another value for it, which borrows *translation. *index =
 * BL_OPTION_NOTHING: accepted, nothing to set. `where` begins the errors: "FILE:LINE: " or "--". */
bl_status bl_options_resolve(const bl_options *options, const char *where, const char *name,
                             bl_option_value *value, bl_option_translation *translation,
                             int64_t *index);

/* Parses the value into the field and notes the origin. What came from the line stays when the origin is the
 * file. */
bl_status bl_options_assign(const bl_options *options, const char *where, int64_t index,
                            const bl_option_value *value, bl_option_origin origin);

/* The word at `at` of "a|b|c": its length; *next is where the following one begins, NULL after the last. */
size_t bl_option_next_name(const char *at, const char **next);

void bl_option_print_names(const char *names, FILE *out); /* "a|b|c" as "a, b, c" */

/* What the option accepts, in words: "an integer in [1, 64] or auto". */
void bl_option_print_expected(const bl_option *option, FILE *out);

#endif
