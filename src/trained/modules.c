/* SPDX-License-Identifier: Apache-2.0 */
/* modules.c -- modules_to_save of an adapter: selects their tensors by its configuration, and
 * reads their values from its file into the weights. */
#include <stdlib.h>

#include "trained/peft.h"
#include "trained/modules.h"
#include "trained/replicated_internal.h"
#include "base/files.h"
#include "base/sizes.h"

enum { FLOAT = sizeof(float) };

void bl_saved_modules_free(bl_saved_modules *modules)
{
    bl_trained_free(&modules->set);
    *modules = (bl_saved_modules){.names = {0}};
}

bool bl_saved_modules_have_table(const bl_saved_modules *modules)
{
    const bl_trained_set *set = &modules->set;
    return set->unit && (trained_set_has_table(set, BL_TABLE_EMBEDDING) ||
                         trained_set_has_table(set, BL_TABLE_HEAD));
}

bl_status bl_saved_modules_of_peft(const bl_peft_config *peft, const bl_model_config *config,
                                   const char *dir, bl_saved_modules *out)
{
    const char *names[BL_PEFT_MAX_SAVED];
    char *where;

    *out = (bl_saved_modules){.names = peft->saved};
    if (peft->saved.n == 0) return BL_OK;
    if (config->arch->peft_layers)
        return BL_FAIL(BL_EINPUT, "%s: modules_to_save is not supported for %s", dir,
                       config->arch->title);
    for (int i = 0; i < peft->saved.n; i++) names[i] = peft->saved.name[i];
    BL_TRY(bl_text_format(&where, "%s/adapter_config.json: key modules_to_save", dir));
    bl_status st =
        bl_trained_choose_modules(config, names, peft->saved.n, BL_EINPUT, where, &out->set);
    free(where);
    return st;
}

bl_status bl_adapter_modules_prepare(bl_model_weights *weights, const bl_trained_set *set)
{
    for (int t = 0; t < BL_MODEL_TABLES; t++)
        if (trained_set_has_table(set, (bl_model_table)t))
            BL_TRY(bl_model_replace_table(weights, (bl_model_table)t));
    return BL_OK;
}

static float *memory_of(const bl_model_weights *weights, const bl_arch_tensor *tensor)
{
    if (tensor->role == BL_ROLE_VECTOR) return weights->vectors + tensor->offset;
    return weights->tables[tensor->role == BL_ROLE_HEAD ? BL_TABLE_HEAD : BL_TABLE_EMBEDDING];
}

static bl_status read_tensor(const bl_peft_adapter *adapter, const bl_arch_tensor *tensor,
                             bl_staging *staging, float *dst)
{
    int64_t n_floats = tensor->shape[0] * (tensor->n_dims > 1 ? tensor->shape[1] : 1),
            most = (int64_t)(staging->n_bytes / FLOAT);

    for (int64_t begin = 0, n; begin < n_floats; begin += n) {
        n = bl_min_i64(most, n_floats - begin);
        BL_TRY(bl_peft_read_saved(adapter, tensor->name, begin, n, staging->bytes));
        BL_TRY(bl_staging_upload(staging, dst + begin, staging->bytes, (size_t)n * FLOAT));
    }
    return BL_OK;
}

static bl_status read_all(bl_model_weights *weights, const bl_trained_set *set,
                          const bl_peft_adapter *adapter)
{
    const bl_model_config *config = &weights->model->config;
    int64_t n = bl_arch_tensor_count(config);
    bl_staging *staging;
    bl_status st = BL_OK;

    BL_TRY(bl_staging_create(weights->device, BL_STAGING_BYTES, "staging of modules_to_save",
                             &staging));
    for (int64_t i = 0; i < n && st == BL_OK; i++) {
        bl_arch_tensor t = bl_arch_tensor_at(config, i);
        if (set->tensor[i]) st = read_tensor(adapter, &t, staging, memory_of(weights, &t));
    }
    bl_staging_destroy(staging);
    return st;
}

bl_status bl_adapter_modules_read(bl_model_weights *weights, const bl_trained_set *set,
                                  const char *dir, bl_stream *stream)
{
    bl_peft_base base = bl_lora_peft_base(&weights->model->config);
    bl_peft_adapter *adapter;

    BL_TRY(bl_peft_open(dir, &base, &adapter));
    bl_status st = read_all(weights, set, adapter);
    bl_peft_close(adapter);
    return st == BL_OK ? bl_model_round_head(weights, stream) : st;
}

bl_status bl_adapter_modules_use(bl_model_weights *weights, const char *dir, bl_stream *stream,
                                 bool *has)
{
    const bl_model_config *config = &weights->model->config;
    bl_peft_modules modules = bl_model_peft_modules(config);
    bl_saved_modules saved;
    bl_peft_config peft;

    *has = false;
    BL_TRY(bl_peft_load_config(dir, &modules, config->n_layers, &peft));
    if (peft.saved.n == 0) return BL_OK;
    *has = true;
    BL_TRY(bl_saved_modules_of_peft(&peft, config, dir, &saved));
    bl_status st = bl_adapter_modules_prepare(weights, &saved.set);
    if (st == BL_OK) st = bl_adapter_modules_read(weights, &saved.set, dir, stream);
    bl_saved_modules_free(&saved);
    return st;
}
