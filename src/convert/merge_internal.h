/* SPDX-License-Identifier: Apache-2.0 */
/* merge_internal.h -- between merge.c, for the adapters and the directory, dequantize.c, for a
 * directory without adapters, merge_shard.c, for one file, and merge_round.c, for some rows of a
 * matrix. */
#ifndef BALLAST_CONVERT_MERGE_INTERNAL_H
#define BALLAST_CONVERT_MERGE_INTERNAL_H

#include "trained/modules.h"
#include "convert/internal.h"
#include "convert/merge.h"
#include "ops/philox.h"

/* Sums over elements of a matrix: d the delta, e = merged - W - d. */
typedef struct bl_merge_sums {
    double dot, delta, error, base; /* <merged - W, d>, <d, d>, <e, e>, <W, W> */
} bl_merge_sums;

/* Adds n elements to *sums. delta NULL: zeros. */
void bl_merge_sums_of(const float *base, const float *delta, const float *merged, int64_t n,
                      bl_merge_sums *sums);
void bl_merge_sums_add(bl_merge_sums *sums, const bl_merge_sums *more);

/* An adapter and its factor in the sum. */
typedef struct bl_merge_term {
    bl_peft_adapter *adapter;
    double scale;                        /* weight alpha / r, or weight alpha / sqrt(r) */
    double scale_of[BL_MAX_PROJECTIONS]; /* the same of a projection */
    bl_saved_modules modules;            /* replace those of the model */
} bl_merge_term;

typedef struct bl_merge {
    const bl_merge_options *options;
    bl_conversion conversion;
    bl_merge_term *terms; /* [options->n_adapters] */
    /* BL_FORMAT_COUNT: of the checkpoint; BF16 for its quantized projections */
    bl_format format;
    bool is_quantized_source;
    bool is_stochastic;
    bool largest_scales; /* of bl_packed_quantize */
} bl_merge;

/* The factors of a layer's routed experts, of all adapters: A (experts r, cols), B (rows, r),
 * scaled; rows: of all experts. Zeros: nothing is read. */
typedef struct bl_merge_experts {
    int64_t layer;
    int module;
    int64_t r, rows, cols, n_experts;
    float *a, *b;
} bl_merge_experts;

/* Reads those that are not there. */
bl_status bl_merge_read_experts(const bl_merge *merge, int64_t layer, int module,
                                bl_merge_experts *experts);
void bl_merge_experts_free(bl_merge_experts *experts);
/* delta (rows, cols): that of rows from `row` on. */
bl_status bl_merge_experts_delta(bl_pool *pool, const bl_merge_experts *experts, int64_t row,
                                 int64_t rows, float *delta);
/* BL_ENUMERIC: values of a factor of an adapter that are not finite. */
bl_status bl_merge_check_factor(const bl_merge *merge, size_t adapter, int64_t layer,
                                const float *values, int64_t n);

/* The format in which the loader returns rows: FP8 with scales per row or block, a packed one that
 * has the stored codes and scales, other values as they are. */
bl_format bl_merge_loaded_format(const bl_hf_weight *weight);

/* Whether quantized weights are copied as they are stored: those of a merge in the checkpoint's own
 * formats, where all of them are of routed experts in 4 bits. */
bool bl_merge_keeps_experts(const bl_merge *merge);

bl_status bl_merge_plan_shard(void *merge, const bl_safetensors *source, bl_shard_plan *out);
bl_status bl_merge_write_shard(void *merge, size_t index, const char *path, json_t *entry);

/* merge.c: a directory in another format, without adapters and with the source's README. `check`
 * rejects sources. */
bl_status bl_merge_without_adapters(const bl_quantize_options *options, const char *manifest,
                                    const char *done, bl_status (*check)(bl_merge *),
                                    bl_quantize_result *out);

/* Rows [row_begin, row_begin + rows) of a matrix; whole blocks unless they are its last. */
typedef struct bl_merge_piece {
    bl_format stored, format; /* of the source, of the target */
    const void *codes;        /* of the source: these rows */
    const void *scales;       /* of these rows */
    int64_t row_begin, rows, cols;
    const float *delta; /* [rows, cols]; NULL: none */
    bool is_stochastic, keeps_scales, largest_scales;
    bl_philox_key key;
    uint64_t tensor_hash;
    float *base;         /* [rows, cols], scratch */
    void *out;           /* of these rows */
    void *out_scales;    /* of these rows */
    bl_merge_sums *sums; /* [bl_merge_strips], scratch */
} bl_merge_piece;

int64_t bl_merge_strips(bl_format format, int64_t rows);

/* Sets out and out_scales, and adds to *sums. */
void bl_merge_round(bl_pool *pool, const bl_merge_piece *piece, bl_merge_sums *sums);

#endif
