/* SPDX-License-Identifier: Apache-2.0 */
/* format.c -- the descriptors of the formats of frozen matrices, and the sizes that follow from
 * them. */
#include "fp8/format.h"

#include "base/sizes.h"

#define STORED(text, type, n_bits)                                                                 \
    {                                                                                              \
        .name = (text), .bits = (n_bits), .dtype = (type), .group_rows = 1, .group_cols = 1        \
    }

#define E4M3(text, rows, cols, at)                                                                 \
    {                                                                                              \
        .name = (text), .bits = 8, .dtype = BL_F8_E4M3, .group_rows = (rows),                      \
        .group_cols = (cols), .home = (at), .scale_dtype = BL_F32                                  \
    }

#define PACKED(text, order, cols, scale, table)                                                    \
    .name = (text), .bits = 4, .dtype = BL_U8, .layout = (order), .group_rows = 1,                 \
    .group_cols = (cols), .home = BL_SCALES_PAGED, .scale_dtype = (scale), .values = (table)

/* E2M1 of "OCP Microscaling Formats (MX) Specification", revision 1.0, table 5. */
static const float e2m1_values[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                      -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

static const float int4_values[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};

/* The quantiles of NF4: Dettmers et al. 2023, arXiv:2305.14314, appendix E. */
static const float nf4_values[16] = {
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};

static const bl_format_descriptor formats[BL_FORMAT_COUNT] = {
    [BL_FORMAT_FP8_ROW] = E4M3("fp8_row", 1, 0, BL_SCALES_WHOLE),
    [BL_FORMAT_FP8_BLOCK] = E4M3("fp8_block", BL_FP8_BLOCK, BL_FP8_BLOCK, BL_SCALES_PAGED),
    [BL_FORMAT_F32] = STORED("f32", BL_F32, 32),
    [BL_FORMAT_F16] = STORED("f16", BL_F16, 16),
    [BL_FORMAT_BF16] = STORED("bf16", BL_BF16, 16),
    [BL_FORMAT_MXFP4] = {PACKED("mxfp4", BL_CODES_LOW_FIRST, 32, BL_F8_E8M0, e2m1_values)},
    [BL_FORMAT_INT4_G32] = {PACKED("int4_g32", BL_CODES_LOW_FIRST, 32, BL_BF16, int4_values)},
    [BL_FORMAT_INT4_G128] = {PACKED("int4_g128", BL_CODES_LOW_FIRST, 128, BL_BF16, int4_values)},
    [BL_FORMAT_NF4] = {PACKED("nf4", BL_CODES_HIGH_FIRST, 64, BL_F32, nf4_values)},
    [BL_FORMAT_NVFP4] = {PACKED("nvfp4", BL_CODES_LOW_FIRST, 16, BL_F8_E4M3, e2m1_values),
                         .has_divisor = true},
};

const bl_format_descriptor *bl_format_describe(bl_format format)
{
    return &formats[format];
}

/* n / divisor, rounded up, for any n >= 0. */
static int64_t divide_up(int64_t n, int64_t divisor)
{
    return n / divisor + (n % divisor > 0);
}

/* The bytes of n packed numbers; false: too many. */
static bool pack(int64_t n, int bits, int64_t *n_bytes)
{
    /* No product of n and bits: it may not fit where the bytes do. */
    return !bl_mul_i64_overflows(n / 8, bits, n_bytes) &&
           !__builtin_add_overflow(*n_bytes, divide_up(n % 8 * bits, 8), n_bytes);
}

static int64_t groups_across(const bl_format_descriptor *f, int64_t cols)
{
    return f->home == BL_SCALES_NONE ? 0 : f->group_cols == 0 ? 1 : divide_up(cols, f->group_cols);
}

static bool measure_scales(const bl_format_descriptor *f, int64_t rows, int64_t cols,
                           bl_format_bytes *out)
{
    int64_t width = (int64_t)bl_dtype_bytes(f->scale_dtype), scales, points, all,
            divisor = f->has_divisor ? (int64_t)sizeof(float) : 0;

    out->scale_rows = divide_up(rows, f->group_rows);
    out->scale_cols = groups_across(f, cols);
    if (bl_mul_i64_overflows(out->scale_cols, width, &scales) ||
        !pack(out->scale_cols, f->zero_point_bits, &points) ||
        __builtin_add_overflow(scales, points, &out->scale_row) ||
        out->scale_row > INT64_MAX - 2 * (int64_t)sizeof(float))
        return false;
    /* The divisor and the next row's scales are aligned. */
    out->scale_row = bl_round_up(out->scale_row, divisor ? divisor : width) + divisor;
    if (bl_mul_i64_overflows(out->scale_rows, out->scale_row, &all)) return false;
    out->scales = (size_t)all;
    return true;
}

bool bl_format_measure(const bl_format_descriptor *f, int64_t rows, int64_t cols,
                       bl_format_bytes *out)
{
    int64_t codes;

    *out = (bl_format_bytes){0};
    if (rows < 0 || cols < 0 || !pack(cols, f->bits, &out->row) ||
        bl_mul_i64_overflows(rows, out->row, &codes))
        return false;
    out->codes = (size_t)codes;
    return f->home == BL_SCALES_NONE || measure_scales(f, rows, cols, out);
}

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

bl_format bl_format_in(const char *names, int index)
{
    for (; index > 0; index--) names += strcspn(names, "|") + 1;
    for (int i = 0; i < BL_FORMAT_COUNT; i++)
        if (strlen(formats[i].name) == strcspn(names, "|") &&
            !strncmp(names, formats[i].name, strcspn(names, "|")))
            return (bl_format)i;
    return BL_FORMAT_COUNT;
}

bool bl_format_from_dtype(bl_dtype dtype, bl_format *out)
{
    for (int i = 0; i < BL_FORMAT_COUNT; i++)
        if (formats[i].home == BL_SCALES_NONE && formats[i].dtype == dtype) {
            *out = (bl_format)i;
            return true;
        }
    return false;
}

bool bl_format_has_scales(bl_format format)
{
    return formats[format].home != BL_SCALES_NONE;
}

bool bl_format_is_packed(bl_format format)
{
    return formats[format].values != NULL;
}

int64_t bl_format_row_bytes(bl_format format, int64_t cols)
{
    int64_t n_bytes;

    return pack(cols, formats[format].bits, &n_bytes) ? n_bytes : INT64_MAX;
}

int64_t bl_format_scale_index(bl_format format, int64_t row, int64_t cols)
{
    return row / formats[format].group_rows * groups_across(&formats[format], cols);
}

bool bl_format_sizes(bl_format format, int64_t rows, int64_t cols, size_t *codes_bytes,
                     size_t *n_scales)
{
    bl_format_bytes n;

    if (!bl_format_measure(&formats[format], rows, cols, &n)) return false;
    *codes_bytes = n.codes;
    *n_scales = (size_t)(n.scale_rows * n.scale_cols);
    return true;
}
