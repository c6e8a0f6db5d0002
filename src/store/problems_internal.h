/* SPDX-License-Identifier: Apache-2.0 */
/* problems_internal.h -- collects all problems of an input, so that one error names them all
 * (internal to store/). */
#ifndef BALLAST_STORE_PROBLEMS_INTERNAL_H
#define BALLAST_STORE_PROBLEMS_INTERNAL_H

#include <stdbool.h>

#include "base/status.h"

enum { BL_PROBLEMS_TEXT_BYTES = 768 }; /* leaves room for the subject within BL_ERROR_TEXT_BYTES */

typedef struct bl_problems {
    size_t n;         /* all that were added */
    size_t n_in_text; /* those that fitted into `text`, joined by "; " */
    size_t length;
    char text[BL_PROBLEMS_TEXT_BYTES];
} bl_problems;

void bl_problems_add(bl_problems *problems, const char *format, ...) BL_PRINTF(2, 3);

/* BL_OK when there are none, else BL_EINPUT "subject: a; b; c (and 4 more)". */
bl_status bl_problems_report(const bl_problems *problems, const char *subject);

/* Text of a hostile file that would break the one-line rule, or the terminal, if an error showed
 * it. */
bool bl_has_controls(const char *text);

#endif
