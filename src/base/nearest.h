/* SPDX-License-Identifier: Apache-2.0 */
/* nearest.h -- the known name that a misspelled one means. */
#ifndef BALLAST_BASE_NEAREST_H
#define BALLAST_BASE_NEAREST_H

#include <stddef.h>

/* The name nearest to `word`, if it is near enough to be a misspelling: at most one letter in eight
 * is wrong, missing, added or swapped with the next one, or one in all. NULL otherwise, also for
 * words of 128 bytes and more; longer names are never the nearest. names[n_names]. */
const char *bl_text_nearest(const char *word, const char *const *names, size_t n_names);

#endif
