/* SPDX-License-Identifier: Apache-2.0 */
/* pattern.h -- regular expressions (PCRE2) over the names of modules and tensors. */
#ifndef BALLAST_STORE_PATTERN_H
#define BALLAST_STORE_PATTERN_H

#include <stdbool.h>

#include "base/status.h"

/* How much of a name the expression must match. */
typedef enum bl_name_pattern_extent {
    BL_PATTERN_WHOLE,     /* all of it, as re.fullmatch */
    BL_PATTERN_COMPONENTS /* one or more neighboring components between dots */
} bl_name_pattern_extent;

typedef struct bl_name_pattern bl_name_pattern;

/* `where`: the key or file that gives it, for errors. Status `refusal`: it is not a regular
 * expression. BL_ENOMEM. */
bl_status bl_name_pattern_create(const char *text, bl_name_pattern_extent extent, bl_status refusal,
                                 const char *where, bl_name_pattern **out);
void bl_name_pattern_destroy(bl_name_pattern *pattern); /* NULL is fine */
/* Status `refusal`: PCRE2 gives up (backtracking). `where` and `refusal` as of create. */
bl_status bl_name_pattern_match(const bl_name_pattern *pattern, const char *name, bool *matches);

#endif
