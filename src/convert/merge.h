/* SPDX-License-Identifier: Apache-2.0 */
/* merge.h -- a Hugging Face directory and LoRA adapters in, one model out.
 *
 *   merged = round(W + sum_i w_i s_i B_i A_i)      s = alpha / r, or alpha / sqrt(r)
 *
 * for every projection that an adapter targets; the sum is fp32 and is rounded once. W is the
 * stored weight, or code * scale of a quantized checkpoint. Everything else is copied, except that
 * with a format with scales all projections are quantized, and that with another one none is.
 *
 * FP8 and 4-bit codes are rounded to nearest, or stochastically: up with the probability that the
 * distance to the lower code is of the gap, from Philox (ops/philox.h) with counter {column / 4,
 * row, hash of the tensor's name}, word column % 4, and the seed as key: no thread and no shard
 * changes a bit.
 *
 * The directory is written as convert/quantize.h says; ballast_merge.json is its manifest and has,
 * for each matrix, how much of the delta d arrived: kept = <merged - W, d> / <d, d>, and error =
 * |merged - W - d| / |d|, with merged dequantized. */
#ifndef BALLAST_CONVERT_MERGE_H
#define BALLAST_CONVERT_MERGE_H

#include "base/pool.h"
#include "fp8/fp8.h"
#include "io/reader.h"

typedef enum bl_merge_format {
    BL_MERGE_AUTO, /* of the checkpoint; BF16 for one in FP8 or 4 bits */
    BL_MERGE_BF16,
    BL_MERGE_F16,
    BL_MERGE_F32,
    BL_MERGE_FP8_ROW, /* from here on as BL_FORMATS_MADE */
    BL_MERGE_FP8_BLOCK,
    BL_MERGE_MXFP4,
    BL_MERGE_INT4_G32,
    BL_MERGE_INT4_G128,
    BL_MERGE_NF4
} bl_merge_format;

typedef enum bl_merge_rounding {
    BL_MERGE_ROUNDING_AUTO, /* stochastic where the checkpoint is in that format */
    BL_MERGE_NEAREST,
    BL_MERGE_STOCHASTIC
} bl_merge_rounding;

typedef enum bl_merge_scales {
    BL_MERGE_SCALES_NEW, /* of the sum */
    BL_MERGE_SCALES_BASE /* of W: the checkpoint's own where it is in that format */
} bl_merge_scales;

typedef struct bl_merge_adapter {
    const char *dir;
    double weight;
} bl_merge_adapter;

typedef struct bl_merge_options {
    const char *source, *target; /* directories; the target is made */
    const bl_merge_adapter *adapters;
    size_t n_adapters; /* at least 1 */
    bl_merge_format format;
    bl_merge_rounding rounding;
    bl_merge_scales scales;
    uint64_t seed; /* of stochastic rounding */
    bl_io_engine io_engine;
    bl_pool *pool;
} bl_merge_options;

typedef struct bl_merge_result {
    int64_t n_files, n_kept;               /* shards; those found finished */
    int64_t n_bytes_read, n_bytes_written; /* of the shards made now */
    int64_t n_matrices;                    /* that an adapter changes */
    double kept, error;                    /* of all matrices together; NaN: the delta is zero */
    double delta;                          /* |d| / |W| of them */
} bl_merge_result;

/* A merge that keeps less of the delta logs a warning. */
#define BL_MERGE_MIN_KEPT 0.9

/* Errors as bl_model_quantize, those of store/peft.h for an adapter, and BL_ENUMERICS: an adapter
 * or a sum is not finite. */
bl_status bl_model_merge(const bl_merge_options *options, bl_merge_result *out);

#endif
