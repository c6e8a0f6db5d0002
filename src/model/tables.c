/* SPDX-License-Identifier: Apache-2.0 */
/* tables.c -- an adapter's embedding and head in place of the model's, in fp32. Products on a GPU
 * use a bf16 copy of the head: a conversion in each product would read all of it twice per chunk
 * of tokens. */
#include "base/sizes.h"
#include "device/staging.h"
#include "model/weights.h"
#include "ops/elementwise.h"

enum { FLOAT = sizeof(float) };

static int64_t table_elements(const bl_model_weights *w)
{
    return w->model->config.vocab_size * w->model->config.hidden_size;
}

bool bl_model_copies_head(bl_device_kind kind)
{
    return kind == BL_DEVICE_CUDA;
}

/* A tied table may be stored under either name. */
static const bl_stored_tensor *find_table(const bl_model_weights *w, bl_model_table which)
{
    const bl_arch *arch = w->model->config.arch;
    const char *modules[] = {which == BL_TABLE_HEAD ? arch->head : arch->embedding,
                             which == BL_TABLE_HEAD ? arch->embedding : arch->head};
    char name[BL_TENSOR_NAME_BYTES];

    bl_arch_module_tensor(modules[0], name);
    if (!bl_hf_find(w->model->files, name)) bl_arch_module_tensor(modules[1], name);
    return bl_hf_find(w->model->files, name);
}

static bl_status fill_table(const bl_model_weights *w, const bl_stored_tensor *stored, float *table)
{
    int64_t n_floats = table_elements(w);
    bl_staging *staging;
    bl_status st = BL_OK;

    BL_TRY(bl_staging_create(w->device, BL_STAGING_BYTES, "staging of a table", &staging));
    int64_t most = (int64_t)staging->n_bytes / FLOAT;
    for (int64_t begin = 0, n; begin < n_floats && st == BL_OK; begin += n) {
        n = bl_min_i64(most, n_floats - begin);
        st = bl_stored_tensor_read_floats(stored, begin, n, staging->bytes);
        if (st == BL_OK)
            st = bl_staging_upload(staging, table + begin, staging->bytes, (size_t)n * FLOAT);
    }
    bl_staging_destroy(staging);
    return st;
}

static bl_status place_head(bl_model_weights *w)
{
    const bl_model_config *c = &w->model->config;
    bl_weight_segment segment = {
        .format = BL_FORMAT_F32, .codes = w->tables[BL_TABLE_HEAD], .rows = c->vocab_size};

    if (bl_model_copies_head(w->dims.kind)) {
        BL_TRY(bl_device_alloc(w->device, BL_SPACE_DEVICE,
                               (size_t)table_elements(w) * bl_dtype_bytes(BL_BF16),
                               "the adapter's head in bf16", &w->head_copy));
        segment.format = BL_FORMAT_BF16;
        segment.codes = w->head_copy;
    }
    w->tied_head = (bl_weight){
        .rows = c->vocab_size, .cols = c->hidden_size, .n_segments = 1, .segment = {segment}};
    return BL_OK;
}

bl_status bl_model_replace_table(bl_model_weights *w, bl_model_table which)
{
    BL_TRY(
        bl_device_alloc(w->device, BL_SPACE_DEVICE, (size_t)table_elements(w) * FLOAT,
                        which == BL_TABLE_HEAD ? "the adapter's head" : "the adapter's embedding",
                        (void **)&w->tables[which]));
    if (w->model->files) /* a device made of rates has no values */
        BL_TRY(fill_table(w, find_table(w, which), w->tables[which]));
    return which == BL_TABLE_HEAD ? place_head(w) : BL_OK;
}

bl_status bl_model_round_head(const bl_model_weights *w, bl_stream *stream)
{
    if (!w->head_copy) return BL_OK;
    return bl_cast(stream, &(bl_cast_args){.n = table_elements(w),
                                           .x = bl_tensor_f32(w->tables[BL_TABLE_HEAD]),
                                           .y = bl_tensor_of(w->head_copy, BL_BF16)});
}
