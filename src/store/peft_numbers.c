/* SPDX-License-Identifier: Apache-2.0 */
/* peft_numbers.c -- numbers by names of modules, and the version that wrote an adapter. */
#include "store/peft_numbers.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/files.h"
#include "base/json.h"

bl_status bl_peft_numbers_read(const char *file, const json_t *root, const char *key,
                               bl_peft_numbers *out)
{
    const json_t *object = NULL;
    const char *name;
    json_t *value;

    *out = (bl_peft_numbers){0};
    BL_TRY(bl_json_get_object(file, root, key, BL_JSON_OPTIONAL, &object));
    if (!object) return BL_OK;
    out->item = calloc(json_object_size(object) + 1, sizeof *out->item);
    if (!out->item) return BL_FAIL(BL_ENOMEM, "%s: key %s", file, key);
    json_object_foreach((json_t *)object, name, value)
    {
        bl_peft_number *item = &out->item[out->n];
        char *text = NULL;
        BL_TRY(bl_json_get_real(file, object, name, BL_JSON_REQUIRED, 0, 1e9, &item->value));
        BL_TRY(bl_text_format(&text, "(.*\\.)?(%s)", name));
        bl_status st =
            bl_name_pattern_create(text, BL_PATTERN_WHOLE, BL_EINPUT, file, &item->pattern);
        free(text);
        BL_TRY(st);
        out->n++;
    }
    return BL_OK;
}

void bl_peft_numbers_free(bl_peft_numbers *numbers)
{
    for (size_t i = 0; i < numbers->n; i++) bl_name_pattern_destroy(numbers->item[i].pattern);
    free(numbers->item);
    *numbers = (bl_peft_numbers){0};
}

bl_status bl_peft_numbers_choose(const bl_peft_numbers *numbers, const char *name, double *value)
{
    for (size_t i = 0; i < numbers->n; i++) {
        bool matches;
        BL_TRY(bl_name_pattern_match(numbers->item[i].pattern, name, &matches));
        if (!matches) continue;
        *value = numbers->item[i].value;
        return BL_OK;
    }
    return BL_OK;
}

bool bl_peft_version(const json_t *root, int version[3])
{
    const char *text = bl_json_text(json_object_get(root, "peft_version"));

    version[2] = 0;
    return text && sscanf(text, "%d.%d.%d", &version[0], &version[1], &version[2]) >= 2;
}
