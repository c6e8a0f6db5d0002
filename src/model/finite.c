/* SPDX-License-Identifier: Apache-2.0 */
/* finite.c -- looks for NaN and infinity: in device memory, a piece at a time, and in rows as they
 * are stored. */
#include "model/finite_internal.h"

#include <math.h>

#include "base/sizes.h"
#include "model/rows.h"

bool model_all_finite(bl_staging *staging, bl_tensor x, int64_t n)
{
    float values[256];
    bl_tensor piece = bl_tensor_of(staging->bytes, x.dtype);
    int64_t most = (int64_t)(staging->n_bytes / bl_dtype_bytes(x.dtype));

    for (int64_t first = 0, n_piece; first < n; first += n_piece) {
        n_piece = bl_min_i64(most, n - first);
        if (bl_staging_download(staging, staging->bytes, bl_tensor_at(x, first).data,
                                bl_tensor_bytes(x, n_piece)) != BL_OK)
            return true;
        for (int64_t begin = 0, count; begin < n_piece; begin += count) {
            count = bl_min_i64(BL_COUNT(values), n_piece - begin);
            bl_dtype_to_f32(x.dtype, bl_tensor_at(piece, begin).data, values, (size_t)count);
            for (int64_t i = 0; i < count; i++)
                if (!isfinite(values[i])) return false;
        }
    }
    return true;
}

static bool is_finite(bl_dtype dtype, const unsigned char *at)
{
    uint32_t word;
    switch (dtype) {
    case BL_F32:
        memcpy(&word, at, 4);
        return (word & 0x7f800000u) != 0x7f800000u;
    case BL_BF16:
        return (at[1] & 0x7fu) != 0x7fu || !(at[0] & 0x80u);
    case BL_F16:
        return (at[1] & 0x7cu) != 0x7cu;
    default:
        return (at[0] & 0x7fu) != 0x7fu; /* E4M3's NaN */
    }
}

bl_status bl_model_check_finite(const bl_stored_tensor *t, int64_t begin, int64_t end,
                                const void *bytes)
{
    int64_t cols = t->shape[t->n_dims - 1], width = (int64_t)bl_dtype_bytes(t->dtype);
    const unsigned char *at = bytes;

    for (int64_t row = begin; row < end; row++)
        for (int64_t col = 0; col < cols; col++, at += width)
            if (!is_finite(t->dtype, at))
                return BL_FAIL(BL_EINPUT, "%s: tensor %s: row %lld, column %lld is not finite",
                               bl_safetensors_path(t->file), t->name, (long long)row,
                               (long long)col);
    return BL_OK;
}
