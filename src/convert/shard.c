/* SPDX-License-Identifier: Apache-2.0 */
/* shard.c -- one file of a model: the plan of its tensors, and those that are copied. */
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "convert/internal.h"
#include "model/rows.h"

enum { COPY_BYTES = 4 << 20 };

bl_status bl_shard_plan_begin(const bl_safetensors *source, bl_shard_plan *out)
{
    size_t n_max = BL_SHARD_PARTS * bl_safetensors_count(source) + 1;

    *out = (bl_shard_plan){.source = source};
    out->specs = calloc(n_max, sizeof *out->specs);
    out->parts = calloc(n_max, sizeof *out->parts);
    return out->specs && out->parts
               ? BL_OK
               : BL_FAIL(BL_ENOMEM, "out of memory: a plan of %zu tensors", n_max);
}

bl_stored_tensor_spec *bl_shard_plan_copy(bl_shard_plan *plan, const bl_stored_tensor *tensor)
{
    bl_stored_tensor_spec *spec = &plan->specs[plan->n_specs];

    plan->parts[plan->n_specs++] = (bl_shard_part){.tensor = tensor};
    *spec = (bl_stored_tensor_spec){
        .name = tensor->name, .dtype = tensor->dtype, .n_dims = tensor->n_dims};
    memcpy(spec->shape, tensor->shape, sizeof spec->shape);
    plan->n_bytes += tensor->n_bytes;
    return spec;
}

bl_status bl_shard_check_matrix(const bl_stored_tensor *tensor)
{
    if (tensor->n_dims == 2) return BL_OK;
    return BL_FAIL(
        BL_EINPUT,
        "tensor %s has the stacked experts of a layer, which are not converted: save the "
        "model with a tensor per expert (transformers: save_original_format=True), or use "
        "base_format of train, eval and generate",
        tensor->name);
}

void bl_shard_plan_free(bl_shard_plan *plan)
{
    for (size_t i = 0; plan->parts && i < plan->n_specs; i++) free(plan->parts[i].name);
    free(plan->parts);
    free(plan->specs);
    *plan = (bl_shard_plan){0};
}

int64_t bl_shard_piece_rows(int64_t cols, int64_t piece_elements)
{
    int64_t rows = piece_elements / bl_max_i64(cols, 1);
    return bl_max_i64(rows - rows % BL_FP8_BLOCK, BL_FP8_BLOCK);
}

/* Rows as they are along the last dimension, whatever the tensor's shape; a scalar is one. */
static bl_stored_tensor as_matrix(const bl_stored_tensor *tensor)
{
    bl_stored_tensor matrix = *tensor;
    int64_t width = (int64_t)bl_dtype_bytes(tensor->dtype);

    matrix.n_dims = 2;
    matrix.shape[1] = tensor->n_dims > 0 ? bl_max_i64(tensor->shape[tensor->n_dims - 1], 1) : 1;
    matrix.shape[0] = tensor->n_bytes / (matrix.shape[1] * width);
    return matrix;
}

bl_status bl_shard_copy_tensor(const bl_stored_tensor *tensor, size_t spec,
                               bl_safetensors_writer *writer)
{
    bl_status st = BL_OK;
    const bl_stored_tensor matrix = as_matrix(tensor);
    int64_t n_rows = matrix.shape[0],
            row_bytes = matrix.shape[1] * (int64_t)bl_dtype_bytes(matrix.dtype),
            step = bl_max_i64(COPY_BYTES / row_bytes, 1);
    bool is_float = tensor->dtype == BL_F32 || tensor->dtype == BL_F16 || tensor->dtype == BL_BF16;
    void *piece = malloc((size_t)(step * row_bytes));

    if (!piece) return BL_FAIL(BL_ENOMEM, "copying %s", tensor->name);
    for (int64_t row = 0, n; st == BL_OK && row < n_rows; row += n) {
        n = bl_min_i64(step, n_rows - row);
        size_t n_bytes = (size_t)(n * row_bytes);
        st = bl_stored_tensor_read(tensor, row * row_bytes, n_bytes, piece);
        if (st == BL_OK && is_float) st = bl_model_check_finite(&matrix, row, row + n, piece);
        if (st == BL_OK)
            st = bl_safetensors_writer_put(writer, spec, row * row_bytes, piece, n_bytes);
    }
    free(piece);
    return st;
}
