/* SPDX-License-Identifier: Apache-2.0 */
/* arguments.h -- the keys of a training that a measurement runs. */
#ifndef BALLAST_BENCH_COMMAND_ARGUMENTS_H
#define BALLAST_BENCH_COMMAND_ARGUMENTS_H

#include "config/config.h"

enum { BL_BENCH_MAX_KEYS = 40, BL_BENCH_VALUE_BYTES = 512 };

/* All zero to begin with. Large: not for a stack. */
typedef struct bl_bench_arguments {
    char text[2 * BL_BENCH_MAX_KEYS][BL_BENCH_VALUE_BYTES];
    int n_words;
} bl_bench_arguments;

/* --key value; a value that is too long is cut. */
void bl_bench_add(bl_bench_arguments *arguments, const char *key, const char *format, ...)
    BL_PRINTF(3, 4);
/* The words, up to 2 * BL_BENCH_MAX_KEYS of them, borrowed from `arguments`: their number. */
int bl_bench_words(bl_bench_arguments *arguments, char **out);
/* As `ballast train` reads them; the errors of bl_train_config_load. The caller's to
 * bl_train_config_free. */
bl_status bl_bench_load(bl_bench_arguments *arguments, bl_train_config **out);

#endif
