/* SPDX-License-Identifier: Apache-2.0 */
/* finite.c -- looks for NaN and infinity in device memory, a piece at a time. */
#include "model/finite_internal.h"

#include <math.h>

#include "base/sizes.h"

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
