/* SPDX-License-Identifier: Apache-2.0 */
/* identity.c -- the frozen model's fingerprint, known before all of it is read. */
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/sizes.h"
#include "base/xxh3.h"
#include "model/weights.h"

enum { PROBE_BYTES = 4096, WHOLE = 8 };

/* Bytes [at, at + PROBE_BYTES), or what of them there is. */
static bl_status add_block(XXH3_state_t *hash, const bl_stored_tensor *t, int64_t at)
{
    char block[PROBE_BYTES];
    size_t n = (size_t)bl_min_i64(PROBE_BYTES, t->n_bytes - at);

    BL_TRY(bl_stored_tensor_read(t, at, n, block));
    XXH3_64bits_update(hash, block, n);
    return BL_OK;
}

/* Every `stride`-th block, the first and the last. */
static bl_status add_tensor(XXH3_state_t *hash, const bl_stored_tensor *t, int64_t stride)
{
    int64_t n_blocks = bl_ceil_div(t->n_bytes, PROBE_BYTES);

    XXH3_64bits_update(hash, t->name, strlen(t->name) + 1);
    XXH3_64bits_update(hash, bl_dtype_name(t->dtype), strlen(bl_dtype_name(t->dtype)));
    XXH3_64bits_update(hash, t->shape, (size_t)t->n_dims * sizeof t->shape[0]);
    for (int64_t b = 0; b < n_blocks - 1; b += stride) BL_TRY(add_block(hash, t, b * PROBE_BYTES));
    return t->n_bytes > 0 ? add_block(hash, t, bl_max_i64(0, t->n_bytes - PROBE_BYTES)) : BL_OK;
}

static bl_status add_config(XXH3_state_t *hash, const bl_model_config *config)
{
    json_t *described;

    BL_TRY(bl_model_config_describe(config, &described));
    char *text = json_dumps(described, JSON_COMPACT | JSON_SORT_KEYS);
    json_decref(described);
    if (!text) return BL_FAIL(BL_ENOMEM, "the model's fingerprint");
    XXH3_64bits_update(hash, text, strlen(text));
    free(text);
    return BL_OK;
}

bl_status bl_model_fingerprint(const bl_model *model, int64_t probe_bytes, uint64_t *fingerprint)
{
    XXH3_state_t *hash = XXH3_createState();
    bl_status st = hash ? BL_OK : BL_FAIL(BL_ENOMEM, "the model's fingerprint");
    int64_t total = 0;

    if (hash) XXH3_64bits_reset(hash);
    if (st == BL_OK) st = add_config(hash, &model->config);
    for (size_t i = 0; i < bl_hf_count(model->files); i++)
        total += bl_hf_at(model->files, i)->n_bytes;
    int64_t stride = probe_bytes == 0               ? INT64_MAX / PROBE_BYTES
                     : total <= WHOLE * probe_bytes ? 1
                                                    : bl_ceil_div(total, probe_bytes);
    for (size_t i = 0; st == BL_OK && i < bl_hf_count(model->files); i++)
        st = add_tensor(hash, bl_hf_at(model->files, i), stride);
    if (st == BL_OK) *fingerprint = XXH3_64bits_digest(hash);
    XXH3_freeState(hash);
    return st;
}
