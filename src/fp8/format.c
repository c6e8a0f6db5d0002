/* SPDX-License-Identifier: Apache-2.0 */
/* format.c -- names, sizes and stored forms of the formats of frozen matrices. */
#include "fp8/fp8.h"

#include "base/sizes.h"

static const struct {
    const char *name;
    size_t code_bytes;
} formats[BL_FORMAT_COUNT] = {
    [BL_FORMAT_FP8_ROW] = {"fp8_row", 1}, [BL_FORMAT_FP8_BLOCK] = {"fp8_block", 1},
    [BL_FORMAT_F32] = {"f32", 4},         [BL_FORMAT_F16] = {"f16", 2},
    [BL_FORMAT_BF16] = {"bf16", 2},
};

const char *bl_format_name(bl_format format)
{
    return formats[format].name;
}

bool bl_format_parse(const char *name, bl_format *out)
{
    for (int i = 0; i < BL_FORMAT_COUNT; i++)
        if (strcmp(formats[i].name, name) == 0) {
            *out = (bl_format)i;
            return true;
        }
    return false;
}

bool bl_format_from_dtype(bl_dtype dtype, bl_format *out)
{
    switch (dtype) {
    case BL_F32:
        *out = BL_FORMAT_F32;
        return true;
    case BL_F16:
        *out = BL_FORMAT_F16;
        return true;
    case BL_BF16:
        *out = BL_FORMAT_BF16;
        return true;
    default:
        return false;
    }
}

size_t bl_format_code_bytes(bl_format format)
{
    return formats[format].code_bytes;
}

bool bl_format_is_fp8(bl_format format)
{
    return format == BL_FORMAT_FP8_ROW || format == BL_FORMAT_FP8_BLOCK;
}

bool bl_format_sizes(bl_format format, int64_t rows, int64_t cols, size_t *codes_bytes,
                     size_t *n_scales)
{
    size_t n_codes;
    if (rows < 0 || cols < 0 || bl_mul_overflows((size_t)rows, (size_t)cols, &n_codes))
        return false;
    *n_scales = 0;
    if (format == BL_FORMAT_FP8_ROW) *n_scales = (size_t)rows;
    if (format == BL_FORMAT_FP8_BLOCK)
        *n_scales =
            (size_t)bl_ceil_div(rows, BL_FP8_BLOCK) * (size_t)bl_ceil_div(cols, BL_FP8_BLOCK);
    return !bl_mul_overflows(n_codes, formats[format].code_bytes, codes_bytes);
}
