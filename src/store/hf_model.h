/* SPDX-License-Identifier: Apache-2.0 */
/* hf_model.h -- a Hugging Face model directory: one view over its shards, and of its quantized
 * weights with their scales.
 *
 * Reads model.safetensors, or else model.safetensors.index.json and the shards it names, of
 * config.json the quantization_config, and Model Optimizer's hf_quant_config.json. An open model is
 * read-only and serves any number of threads. */
#ifndef BALLAST_STORE_HF_MODEL_H
#define BALLAST_STORE_HF_MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "store/safetensors.h"

typedef struct bl_hf_model bl_hf_model;

/* Opens and checks the directory. BL_EINPUT lists all at once: shards that are missing or bad
 * (store/safetensors.h), tensors the index names but the shard lacks, tensors in two shards, shard
 * names that leave the directory; or names the quantization method that is not read. *out is closed
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

/* ---- weights: a matrix and, when it is quantized, its scales ----
 * FP8: value = code * scale in every kind of checkpoint, also where the scale's name ends in _inv:
 *   Meta fbgemm_fp8         X.weight_scale [rows, 1]
 *   compressed-tensors      X.weight_scale [1], [rows, 1], a grid of blocks, or [rows, cols / 32]
 *                           of U8 (E8M0, MXFP8)
 *   "fp8"                   X.weight_scale_inv, a grid of blocks (DeepSeek) or [] (Mistral);
 *                           X.weight_scale [] or [1] (AutoFP8)
 *   Model Optimizer, Quark  X.weight_scale [], [rows] or a grid
 * 4 bits, two codes per byte: value = (book[code] - zero point) * scale in fp32, with
 *   compressed-tensors      X.weight_packed: I32, 8 codes each (INT4), X.weight_scale,
 *                           X.weight_shape, X.weight_zero_point; or U8 (MXFP4:
 *                           scales in E8M0; NVFP4: E4M3, divided by X.weight_global_scale)
 *   gpt-oss                 X_blocks, X_scales (MXFP4) of n matrices: X [n, rows, cols]
 *   Model Optimizer         X.weight of U8 (NVFP4), X.weight_scale times X.weight_scale_2
 *   bitsandbytes            X.weight.quant_state.bitsandbytes__nf4 and the tensors beside it
 * X.weight names the matrix in all of them. The stored dtype decides whether a weight is FP8, the
 * scale's shape which weights share one. The
 * size of blocks is config.json's where it has one, of several the one that fits the scale's shape,
 * else the power of two that fits. */
typedef enum bl_scale_kind {
    BL_SCALE_NONE,
    BL_SCALE_TENSOR,
    BL_SCALE_ROW,   /* whole rows share a scale */
    BL_SCALE_BLOCK, /* blocks of 128 x 128, or of a multiple of that */
    BL_SCALE_GRID,  /* other blocks */
    BL_SCALE_MX,    /* other blocks, whose scales are powers of two (E8M0) */
    BL_SCALE_INT4,  /* from here on codes of 4 bits, bl_hf_weight.packed: integers */
    BL_SCALE_MXFP4, /* E2M1, blocks of 1 x 32, powers of two */
    BL_SCALE_NVFP4, /* E2M1, blocks of 1 x 16 */
    BL_SCALE_NF4,   /* a book of 16 values, blocks along the rows */
    BL_SCALE_COUNT
} bl_scale_kind;

/* No format of a frozen matrix has its blocks: its weights are decoded while they are loaded. */
static inline bool bl_scale_is_decoded(bl_scale_kind kind)
{
    return kind >= BL_SCALE_GRID;
}
/* Decoded weights have few enough digits for bf16: scales are powers of two. */
static inline bool bl_scale_fits_bf16(bl_scale_kind kind)
{
    return kind == BL_SCALE_MX || kind == BL_SCALE_MXFP4;
}

enum { BL_SCALE_BLOCK_SIZE = 128 }; /* rows and columns of a block */

/* Codes of 4 bits, and the stored tensors that make their scales. */
typedef struct bl_hf_packed {
    /* "X.weight", U8, [rows, cols]; of gpt-oss "X", [n, rows, cols]; n_bytes and offset as
     * stored */
    bl_stored_tensor codes;
    bl_scale_kind kind;
    float book[16];
    bool is_high_first; /* a byte's first code is in its high bits */
    /* blocks of `group` weights: of a row; or is_flat: of all rows one after the other */
    int64_t group;
    bool is_flat;
    const bl_stored_tensor *scale, *zero_point; /* as below */
    /* NULL: none. NVFP4: multiplies the scales, or divides them. NF4: multiplies blocks of
     * nested_group values nested_map[scale], to which nested_offset is added. */
    const bl_stored_tensor *second, *nested_map;
    bool divides;
    int64_t nested_group;
    float nested_offset;
    const bl_stored_tensor *other[3]; /* the stored codes, and more that was read */
} bl_hf_packed;

typedef struct bl_hf_weight {
    const bl_stored_tensor *codes; /* F32, F16, BF16, F8_E4M3 or, packed, U8 */
    const bl_hf_packed *packed;    /* the model's; NULL: codes of whole bytes */
    const bl_stored_tensor *scale; /* NULL unless quantized; of FP8: F32, BF16, F16, F8_E8M0 or U8
                                      (E8M0) */
    /* NULL: none. Of FP8 codes bl_hf_read_scales rejects others than 0. */
    const bl_stored_tensor *zero_point;
    bl_scale_kind scale_kind;
    int64_t rows, cols;
    /* The rows are those of so many matrices, each stored with its columns as rows; 0: stored as
     * they are. */
    int64_t n_transposed;
    /* Scale [i][j] is that of rows [i block_rows, (i + 1) block_rows) and columns alike; where
     * packed is_flat with 1 x n scales, those of weight row * cols + col. All 0 without a scale. */
    int64_t scale_rows, scale_cols;
    int64_t block_rows, block_cols;
} bl_hf_weight;

/* Describes the 2-D weight `name` ("...q_proj.weight"), or a stack of matrices, 3-D and not FP8, as
 * one with the rows of all. BL_EINPUT: absent, of other dimensions, another dtype,
 * FP8 without a scale or with two, a scale whose shape or dtype does not fit, or blocks of another
 * size than config.json's. */
bl_status bl_hf_get_weight(const bl_hf_model *model, const char *name, bl_hf_weight *out);

/* Of a stack that is stored as (n, cols, rows): the weight with its matrices transposed. Nothing
 * where the weight is packed, whose rows are stored as rows. */
void bl_hf_transpose(bl_hf_weight *weight);

/* dst[scale_rows * scale_cols], row-major, as float: exact, or of several levels the fp32 result.
 * BL_EINPUT for a scale that is not finite and positive (of 4 bits: or 0; of NF4: any sign), and
 * for a zero point of FP8 codes that is not 0. */
bl_status bl_hf_read_scales(const bl_hf_weight *weight, float *dst);
/* dst[scale_rows * scale_cols], of a packed weight with zero points. */
bl_status bl_hf_read_zero_points(const bl_hf_weight *weight, float *dst);

/* The weight that is stored under `name`, [rows, cols], also one of 4 bits; else as bl_hf_find. */
const bl_stored_tensor *bl_hf_find_weight(const bl_hf_model *model, const char *name);
/* `tensor` of this model as a model has it: the codes of 4 bits as a weight; NULL: the scale or
 * another part of one; else itself. */
const bl_stored_tensor *bl_hf_resolve(const bl_hf_model *model, const bl_stored_tensor *tensor);
/* The weight of 4 bits of which a stored tensor is a part; NULL: of none. */
const bl_stored_tensor *bl_hf_weight_of_part(const bl_hf_model *model,
                                             const bl_stored_tensor *tensor);
/* The weight whose codes are tensor `index`, FP8 or 4 bits; NULL: it is none. */
const bl_stored_tensor *bl_hf_quantized_at(const bl_hf_model *model, size_t index);

/* ---- the tensors a model must have ---- */

typedef struct bl_hf_expected {
    const char *name;
    int n_dims;
    int64_t shape[BL_TENSOR_MAX_DIMS];
    /* Allowed ones, BL_DTYPE_BIT(...) or-ed; where F8_E4M3 is, 4 bits are. A quantized weight is
     * checked with bl_hf_get_weight too. */
    uint32_t dtypes;
    bool optional; /* may be absent */
} bl_hf_expected;

/* Compares the model with the whole list. BL_EINPUT lists every missing, extra, wrong-shape and
 * wrong-dtype tensor, and quantized weights of modules that quantization_config leaves unquantized.
 * Not extra: the scales and zero points of quantized weights; tensors that inference adds
 * (input_scale, activation_scale, k_scale, rotary_emb.inv_freq and others); names that begin with
 * one of `skipped`, NULL-terminated (NULL: none). */
bl_status bl_hf_check(const bl_hf_model *model, const bl_hf_expected *expected, size_t n_expected,
                      const char *const *skipped);

/* Tensors whose names begin with one of `skipped` (NULL: none), and their bytes. */
size_t bl_hf_count_skipped(const bl_hf_model *model, const char *const *skipped, int64_t *n_bytes);

#endif
