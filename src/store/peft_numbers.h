/* SPDX-License-Identifier: Apache-2.0 */
/* peft_numbers.h -- rank_pattern and alpha_pattern of adapter_config.json: numbers by the names of
 * modules. */
#ifndef BALLAST_STORE_PEFT_NUMBERS_H
#define BALLAST_STORE_PEFT_NUMBERS_H

#include <jansson.h>

#include "base/status.h"
#include "store/pattern.h"

typedef struct bl_peft_number {
    bl_name_pattern *pattern;
    double value;
} bl_peft_number;

typedef struct bl_peft_numbers {
    size_t n;
    bl_peft_number *item;
} bl_peft_numbers;

/* The object under `key`, whose keys are names or expressions for the ends of names (peft
 * get_pattern_key); absent: no items. The caller frees *out, after an error, too. BL_EINPUT,
 * BL_ENOMEM. */
bl_status bl_peft_numbers_read(const char *file, const json_t *root, const char *key,
                               bl_peft_numbers *out);
void bl_peft_numbers_free(bl_peft_numbers *numbers); /* zeros are fine */
/* *value = the first number whose pattern has the name; else it stays. */
bl_status bl_peft_numbers_choose(const bl_peft_numbers *numbers, const char *name, double *value);

/* Major, minor and patch of peft_version; false: none is given. */
bool bl_peft_version(const json_t *root, int version[3]);

#endif
