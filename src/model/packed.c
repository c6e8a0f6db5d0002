/* SPDX-License-Identifier: Apache-2.0 */
/* packed.c -- weights of 4 bits that a format holds as the checkpoint stores them. */
#include "fp8/packed.h"

#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "model/rows.h"

/* A format's layout of codes is that of the checkpoints of its kind. */
static const struct {
    bl_format format;
    bl_scale_kind kind;
} kinds[] = {{BL_FORMAT_MXFP4, BL_SCALE_MXFP4},
             {BL_FORMAT_INT4_G32, BL_SCALE_INT4},
             {BL_FORMAT_INT4_G128, BL_SCALE_INT4},
             {BL_FORMAT_NF4, BL_SCALE_NF4},
             {BL_FORMAT_NVFP4, BL_SCALE_NVFP4}};

bool bl_model_format_is_of(bl_format format, bl_scale_kind kind)
{
    for (size_t i = 0; i < BL_COUNT(kinds); i++)
        if (kinds[i].format == format && kinds[i].kind == kind) return true;
    return false;
}

/* NF4's scales are computed, of one level or two. */
static bool holds_scales(const bl_format_descriptor *f, const bl_hf_weight *w)
{
    bl_dtype stored = w->scale->dtype == BL_U8 ? BL_F8_E8M0 : w->scale->dtype;

    if (f->has_divisor && !w->packed->divides) return false;
    return w->scale_kind == BL_SCALE_NF4 || stored == f->scale_dtype;
}

bool bl_model_packed_format(const bl_hf_weight *w, bl_format *out)
{
    if (!w->packed || w->packed->is_flat || w->zero_point || w->scale_rows != w->rows) return false;
    for (size_t i = 0; i < BL_COUNT(kinds); i++) {
        const bl_format_descriptor *f = bl_format_describe(kinds[i].format);
        if (kinds[i].kind != w->scale_kind || f->group_cols != w->block_cols ||
            !bl_packed_fits(kinds[i].format, w->cols) || !holds_scales(f, w) ||
            memcmp(f->values, w->packed->book, sizeof w->packed->book) != 0)
            continue;
        *out = kinds[i].format;
        return true;
    }
    return false;
}

bl_status bl_model_check_groups(bl_format format, const char *name, int64_t cols)
{
    if (bl_packed_fits(format, cols)) return BL_OK;
    return BL_FAIL(BL_EUSAGE,
                   "base_format %s: the rows of %s have %lld weights, which are not whole groups "
                   "of %lld; use %s",
                   bl_format_name(format), name, (long long)cols,
                   (long long)bl_format_describe(format)->group_cols,
                   cols % 32 == 0 ? "mxfp4 or int4_g32" : "fp8_row");
}

bl_status bl_row_job_place_scales(const bl_row_job *job, const float *values)
{
    const bl_hf_weight *w = &job->weight;
    const bl_format_descriptor *f = bl_format_describe(job->format);
    int64_t row = w->scale_cols * (int64_t)bl_dtype_bytes(f->scale_dtype),
            n_bytes = (job->end - job->begin) * row;
    float divisor = 0;
    bl_format_bytes before;

    if (!bl_format_measure(f, job->begin, w->cols, &before))
        return BL_FAIL(BL_EINTERNAL, "the size of scales overflows");
    char *from = malloc((size_t)n_bytes + 1), *to = (char *)job->scales + before.scales;
    bl_status st = from ? BL_OK : BL_FAIL(BL_ENOMEM, "out of memory: scales of %s", w->codes->name);
    if (st == BL_OK && f->scale_dtype == BL_F32)
        memcpy(from, values + job->begin * w->scale_cols, (size_t)n_bytes);
    else if (st == BL_OK)
        st = bl_stored_tensor_read(w->scale, job->begin * row, (size_t)n_bytes, from);
    if (st == BL_OK && f->has_divisor) st = bl_stored_tensor_read_f32(w->packed->second, &divisor);
    for (int64_t r = 0; st == BL_OK && r < job->end - job->begin; r++, to += before.scale_row) {
        memset(to, 0, (size_t)before.scale_row);
        memcpy(to, from + r * row, (size_t)row);
        if (f->has_divisor)
            memcpy(to + before.scale_row - (int64_t)sizeof divisor, &divisor, sizeof divisor);
    }
    free(from);
    return st;
}
