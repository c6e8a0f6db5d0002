/* SPDX-License-Identifier: Apache-2.0 */
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

bl_status bl_bench_load(bl_bench_arguments *a, bl_train_config **out)
{
    /* What is measured is in this process. */
    char *words[2 * BL_BENCH_MAX_KEYS + 2] = {(char *)"--rank_processes", (char *)"false"};

    for (int i = 0; i < a->n_words; i++) words[2 + i] = a->text[i];
    return bl_train_config_load(BL_CONFIG_TRAIN, NULL, 2 + a->n_words, words, out);
}
