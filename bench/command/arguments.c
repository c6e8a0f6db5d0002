/* SPDX-License-Identifier: Apache-2.0 */
/* arguments.c -- a measurement's command line as the keys of a training: words are collected, then
 * read as `ballast train` reads them. */
#include "bench/command/arguments.h"

#include <stdarg.h>
#include <stdio.h>

void bl_bench_add(bl_bench_arguments *a, const char *key, const char *format, ...)
{
    va_list list;

    snprintf(a->text[a->n_words++], BL_BENCH_VALUE_BYTES, "--%s", key);
    va_start(list, format);
    vsnprintf(a->text[a->n_words++], BL_BENCH_VALUE_BYTES, format, list);
    va_end(list);
}

int bl_bench_words(bl_bench_arguments *a, char **out)
{
    for (int i = 0; i < a->n_words; i++) out[i] = a->text[i];
    return a->n_words;
}

bl_status bl_bench_load(bl_bench_arguments *a, bl_train_config **out)
{
    /* The measurement runs in this process. */
    char *words[2 * BL_BENCH_MAX_KEYS + 2] = {(char *)"--rank_processes", (char *)"false"};

    int n_words = 2 + bl_bench_words(a, words + 2);
    return bl_train_config_load(BL_CONFIG_TRAIN, NULL, n_words, words, out);
}
