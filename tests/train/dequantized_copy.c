/* SPDX-License-Identifier: Apache-2.0 */
/* dequantized_copy FORMAT largest|least_squares SRC DST: a model.safetensors in fp32, whose
 * projections have the values that they have in the format; other tensors keep theirs. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "fp8/fp8.h"
#include "fp8/packed.h"
#include "store/safetensors.h"

enum { MAX_TENSORS = 256 };

static bl_status dequantized(bl_pool *pool, bl_format format, bool least_squares,
                             const bl_stored_tensor *t, float *values)
{
    bl_format_bytes n;
    int64_t rows = t->shape[0], cols = t->shape[1];

    if (!bl_format_measure(bl_format_describe(format), rows, cols, &n)) return BL_EINTERNAL;
    uint8_t *codes = malloc(n.codes + 1);
    void *scales = malloc(n.scales + 1);
    bl_status st = codes && scales ? bl_packed_quantize(pool, format, least_squares, BL_F32, values,
                                                        0, rows, cols, codes, scales)
                                   : BL_ENOMEM;
    if (st == BL_OK) bl_fp8_dequantize(pool, format, codes, scales, rows, cols, values);
    free(codes), free(scales);
    return st;
}

static bl_status copy(bl_pool *pool, bl_format format, bool least_squares, const char *src,
                      const char *dst)
{
    static const char *const metadata[] = {"format", "pt"};
    bl_stored_tensor_spec specs[MAX_TENSORS];
    bl_safetensors *in;
    bl_safetensors_writer *out;

    BL_TRY(bl_safetensors_open(src, &in));
    size_t n = bl_safetensors_count(in);
    if (n > MAX_TENSORS) return BL_ELIMIT;
    for (size_t i = 0; i < n; i++) {
        const bl_stored_tensor *t = bl_safetensors_at(in, i);
        specs[i] = (bl_stored_tensor_spec){.name = t->name, .dtype = BL_F32, .n_dims = t->n_dims};
        memcpy(specs[i].shape, t->shape, sizeof t->shape);
    }
    BL_TRY(bl_safetensors_create(dst, specs, n, metadata, 1, &out));
    for (size_t i = 0; i < n; i++) {
        const bl_stored_tensor *t = bl_safetensors_at(in, i);
        size_t n_values = (size_t)t->n_bytes / bl_dtype_bytes(t->dtype);
        float *values = malloc(n_values * sizeof *values + 1);
        if (!values) return BL_ENOMEM;
        BL_TRY(bl_stored_tensor_read_f32(t, values));
        if (strstr(t->name, "_proj.weight"))
            BL_TRY(dequantized(pool, format, least_squares, t, values));
        BL_TRY(bl_safetensors_writer_put(out, i, 0, values, n_values * sizeof *values));
        free(values);
    }
    bl_safetensors_close(in);
    return bl_safetensors_writer_commit(out);
}

int main(int argc, char **argv)
{
    bl_format format;
    bl_pool *pool;

    if (argc != 5 || !bl_format_parse(argv[1], &format) || bl_pool_create(1, &pool) != BL_OK)
        return 2;
    bl_status st = copy(pool, format, strcmp(argv[2], "largest") != 0, argv[3], argv[4]);
    if (st != BL_OK) fprintf(stderr, "dequantized_copy: %s\n", bl_error_text());
    bl_pool_destroy(pool);
    return st == BL_OK ? 0 : 1;
}
