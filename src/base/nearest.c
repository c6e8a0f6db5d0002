/* SPDX-License-Identifier: Apache-2.0 */
/* nearest.c -- edit distances of short words. */
#include "base/nearest.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum { MAX_WORD_BYTES = 128 };

/* Of the words' edit distances, the one in which a swap of two neighbors is one edit, too. */
static size_t edit_distance(const char *a, const char *b)
{
    size_t rows[3][MAX_WORD_BYTES], *above = rows[0], *row = rows[1], *next = rows[2];
    size_t n_b = strlen(b);

    if (n_b >= MAX_WORD_BYTES) return SIZE_MAX;
    for (size_t j = 0; j <= n_b; j++) row[j] = j;
    for (size_t i = 1; a[i - 1]; i++) {
        next[0] = i;
        for (size_t j = 1; j <= n_b; j++) {
            bool is_swap = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
            next[j] = row[j - 1] + (a[i - 1] != b[j - 1]);
            if (row[j] + 1 < next[j]) next[j] = row[j] + 1;
            if (next[j - 1] + 1 < next[j]) next[j] = next[j - 1] + 1;
            if (is_swap && above[j - 2] + 1 < next[j]) next[j] = above[j - 2] + 1;
        }
        size_t *last = above;
        above = row;
        row = next;
        next = last;
    }
    return row[n_b];
}

const char *bl_text_nearest(const char *word, const char *const *names, size_t n_names)
{
    const size_t LETTERS_PER_ERROR = 8;
    const char *nearest = NULL;
    size_t least = SIZE_MAX, n_letters = strlen(word);

    if (n_letters >= MAX_WORD_BYTES) return NULL;
    for (size_t i = 0; i < n_names; i++) {
        size_t distance = edit_distance(word, names[i]);
        if (distance < least) {
            least = distance;
            nearest = names[i];
        }
    }
    size_t limit = n_letters < LETTERS_PER_ERROR ? 1 : n_letters / LETTERS_PER_ERROR;
    return least <= limit ? nearest : NULL;
}
