/* SPDX-License-Identifier: Apache-2.0 */
/* hf_model.h -- a Hugging Face model folder: one view over its shards, and of its FP8 weights with
 * their scales.
 *
 * Read are model.safetensors, or else model.safetensors.index.json and the shards it names, and of
 * config.json the quantization_config. An open model is read-only and serves any number of
 * threads. */
#ifndef BALLAST_STORE_HF_MODEL_H
#define BALLAST_STORE_HF_MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "store/safetensors.h"

typedef struct bl_hf_model bl_hf_model;

/* Opens and checks the folder. BL_EINPUT lists all at once: shards that are missing or bad
 * (store/safetensors.h), tensors the index names but the shard lacks, tensors in two shards, shard
 * names that leave the folder; or names the quantization method that is not read. *out is closed
 * with bl_hf_close. */
bl_status bl_hf_open(const char *dir, bl_hf_model **out);
void bl_hf_close(bl_hf_model *model); /* NULL is fine */

size_t bl_hf_file_count(const bl_hf_model *model);
const bl_safetensors *bl_hf_file(const bl_hf_model *model,
                                 size_t index); /* in the order of their names */
size_t bl_hf_count(const bl_hf_model *model);
const bl_stored_tensor *bl_hf_at(const bl_hf_model *model,
                                 size_t index); /* in the order of their names */
/* NULL: no such tensor. The tensor is the model's; read it with bl_stored_tensor_read (any
 * thread). */
const bl_stored_tensor *bl_hf_find(const bl_hf_model *model, const char *name);

/* ---- weights: a matrix and, when it is FP8, its scales ----
 * value = code * scale in every kind of checkpoint, also where the scale's name ends in _inv:
 *   Meta fbgemm_fp8         X.weight_scale [rows, 1]
 *   compressed-tensors      X.weight_scale [1], [rows, 1], a grid of blocks, or [rows, cols / 32]
 *                           of U8 (E8M0, MXFP8)
 *   "fp8"                   X.weight_scale_inv, a grid of blocks (DeepSeek) or [] (Mistral);
 *                           X.weight_scale [] or [1] (AutoFP8)
 *   Model Optimizer, Quark  X.weight_scale [], [rows] or a grid
 * The stored dtype decides whether a weight is FP8, the scale's shape which weights share one. The
 * size of blocks is config.json's where it has one, else the power of two that fits. */
typedef enum bl_scale_kind {
    BL_SCALE_NONE,
    BL_SCALE_TENSOR,
    BL_SCALE_ROW,   /* whole rows share a scale */
    BL_SCALE_BLOCK, /* blocks of 128 x 128, or of a multiple of that */
    BL_SCALE_GRID,  /* other blocks */
    BL_SCALE_MX,    /* other blocks, whose scales are powers of two (E8M0) */
    BL_SCALE_COUNT
} bl_scale_kind;

enum { BL_SCALE_BLOCK_SIZE = 128 }; /* rows and columns of a block */

typedef struct bl_hf_weight {
    const bl_stored_tensor *codes; /* F32, F16, BF16 or F8_E4M3, [rows, cols] */
    const bl_stored_tensor *scale; /* NULL unless F8_E4M3; F32, BF16, F16, F8_E8M0 or U8 (E8M0) */
    bl_scale_kind scale_kind;
    int64_t rows, cols;
    /* Scale [i][j] is that of rows [i block_rows, (i + 1) block_rows) and columns alike. All 0
     * without a scale. */
    int64_t scale_rows, scale_cols;
    int64_t block_rows, block_cols;
} bl_hf_weight;

/* Describes the 2-D weight `name` ("...q_proj.weight"). BL_EINPUT: absent, not 2-D, another dtype,
 * FP8 without a scale or with two, a scale whose shape or dtype does not fit, or blocks of another
 * size than config.json's. */
bl_status bl_hf_get_weight(const bl_hf_model *model, const char *name, bl_hf_weight *out);

/* dst[scale_rows * scale_cols], row-major, as float (exact). BL_EINPUT for a scale that is not
 * finite and positive. */
bl_status bl_hf_read_scales(const bl_hf_weight *weight, float *dst);

/* ---- the tensors a model must have ---- */

typedef struct bl_hf_expected {
    const char *name;
    int n_dims;
    int64_t shape[BL_TENSOR_MAX_DIMS];
    /* Allowed ones, BL_DTYPE_BIT(...) or-ed; an FP8 weight is checked with bl_hf_get_weight too. */
    uint32_t dtypes;
    bool optional; /* may be absent */
} bl_hf_expected;

/* Compares the model with the whole list. BL_EINPUT lists every missing, extra, wrong-shape and
 * wrong-dtype tensor. Not extra: the scales of FP8 weights, and tensors that inference adds
 * (input_scale, activation_scale, weight_zero_point, k_scale, rotary_emb.inv_freq and others), and
 * names that begin with one of `skipped`, NULL-terminated (NULL: none). */
bl_status bl_hf_check(const bl_hf_model *model, const bl_hf_expected *expected, size_t n_expected,
                      const char *const *skipped);

/* Tensors whose names begin with one of `skipped` (NULL: none), and their bytes. */
size_t bl_hf_count_skipped(const bl_hf_model *model, const char *const *skipped, int64_t *n_bytes);

#endif
