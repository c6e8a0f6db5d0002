/* SPDX-License-Identifier: Apache-2.0 */
/* adapter.c -- an adapter's factors from one layout of routed experts to another. */
#include "convert/adapter.h"

#include <stdlib.h>
#include <string.h>

#include "arch/config.h"
#include "base/files.h"
#include "base/json.h"
#include "trained/peft.h"

static const char CONFIG_NAME[] = "adapter_config.json";

/* base_model_name_or_path; NULL: none. The caller frees *out. */
static bl_status read_base_name(const char *source, char **out)
{
    char *file = NULL;
    json_t *root = NULL;

    *out = NULL;
    BL_TRY(bl_peft_load_any_keys(source, &file, &root));
    const char *text = bl_json_text(json_object_get(root, "base_model_name_or_path"));
    if (text) *out = strdup(text);
    bl_status st = text && !*out ? BL_FAIL(BL_ENOMEM, "a name") : BL_OK;
    json_decref(root);
    free(file);
    return st;
}

static bl_status load_base(const char *source, const char *model, const char *named,
                           bl_model_config *out)
{
    const char *dir = model ? model : named;

    if (!dir || !*dir)
        return BL_FAIL(BL_EUSAGE, "%s: its base is not known: give --model DIR", source);
    bl_status st = bl_model_config_load(dir, out);
    return st == BL_OK || model
               ? st
               : bl_error_prefix(st, "the base that %s names (--model gives another)", source);
}

/* An adapter is never replaced. */
static bl_status create_target(const char *target)
{
    char *path = NULL;

    BL_TRY(bl_dir_create(target));
    BL_TRY(bl_path_join(target, CONFIG_NAME, &path));
    bl_status st = bl_file_exists(path)
                       ? BL_FAIL(BL_EUSAGE, "%s has an adapter: give a new directory", target)
                       : BL_OK;
    free(path);
    return st;
}

static bl_status fill_factor(void *adapter, int64_t layer, int module, bl_peft_factor factor,
                             float *dst)
{
    return bl_peft_read(adapter, layer, module, factor, dst);
}

static bl_status fill_saved(void *adapter, const char *tensor, int64_t begin, int64_t n, float *dst)
{
    return bl_peft_read_saved(adapter, tensor, begin, n, dst);
}

bl_status bl_adapter_convert(const char *source, const char *target, const char *model,
                             bl_peft_layout layout)
{
    char *named = NULL;
    bl_peft_adapter *adapter = NULL;
    bl_model_config config;
    bl_status st;

    BL_TRY(read_base_name(source, &named));
    BL_TRY_GOTO(st, done, load_base(source, model, named, &config));
    bl_peft_base base = bl_lora_peft_base(&config);
    BL_TRY_GOTO(st, done, bl_peft_open(source, &base, &adapter));
    BL_TRY_GOTO(st, done, create_target(target));
    bl_peft_config written = *bl_peft_get_config(adapter);
    written.layout = layout;
    written.is_divided = false;
    st = bl_peft_write(target, &written, &base, named, BL_F32, fill_factor, fill_saved, adapter);
done:
    bl_peft_close(adapter);
    free(named);
    return st;
}
