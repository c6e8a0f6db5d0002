/* SPDX-License-Identifier: Apache-2.0 */
/* prepared.c -- a fixed place per matrix for what products derive from it, forgotten at the end of
 * a visit. */
#include "linear/prepared.h"

#include "base/sizes.h"

enum { ALIGNMENT_BYTES = 256 };

void bl_linear_prepared_measure(bl_device_kind kind, const bl_base_layout *layout, int64_t n_units,
                                bl_matmul_mode mode, const uint8_t *bf16_matrices,
                                bl_linear_prepared *out)
{
    *out = (bl_linear_prepared){.unit = -1};
    for (int64_t u = 0; u < n_units; u++)
        for (int m = 0; m < layout->units[u].n_matrices; m++) {
            bl_matmul_weight_args args = {.mode = mode,
                                          .weight = layout->units[u].matrix[m].weight};
            bool is_exception =
                mode == BL_MATMUL_FP8 && bf16_matrices && bf16_matrices[u] >> m & 1u;
            size_t n_bytes = is_exception ? 0 : bl_matmul_prepared_bytes(kind, &args);
            n_bytes = (size_t)bl_round_up((int64_t)n_bytes, ALIGNMENT_BYTES);
            if (n_bytes > out->matrix[m].memory_bytes) out->matrix[m].memory_bytes = n_bytes;
        }
}

size_t bl_linear_prepared_bytes(const bl_linear_prepared *prepared)
{
    size_t n_bytes = 0;
    for (int m = 0; m < BL_BASE_MATRICES; m++) n_bytes += prepared->matrix[m].memory_bytes;
    return n_bytes;
}

void bl_linear_prepared_place(bl_linear_prepared *prepared, void *memory)
{
    char *next = memory;
    for (int m = 0; m < BL_BASE_MATRICES; m++) {
        prepared->matrix[m].memory = next;
        next += prepared->matrix[m].memory_bytes;
    }
    bl_linear_prepared_forget(prepared);
}

bl_matmul_prepared *bl_linear_prepared_at(bl_linear_prepared *prepared, int64_t unit, int matrix)
{
    if (prepared->unit != unit) bl_linear_prepared_forget(prepared);
    prepared->unit = unit;
    return prepared->matrix[matrix].memory_bytes > 0 ? &prepared->matrix[matrix] : NULL;
}

void bl_linear_prepared_forget(bl_linear_prepared *prepared)
{
    prepared->unit = -1;
    for (int m = 0; m < BL_BASE_MATRICES; m++) prepared->matrix[m].made = 0;
}
