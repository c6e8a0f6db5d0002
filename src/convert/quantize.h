/* SPDX-License-Identifier: Apache-2.0 */
/* quantize.h -- a Hugging Face directory in, the same model with FP8 or 4-bit projections out.
 *
 * The projections of each layer become codes and scales, with the bits that training from the
 * source with that base_format uses, stored as convert/layout.c says; everything else is copied.
 * config.json gets a quantization_config of compressed-tensors or bitsandbytes (lm_head ignored),
 * as other programs and store/hf_model.h read it. The manifest has for each projection the sums
 * `error` = |Q - W|^2 and `base` = |W|^2, Q dequantized.
 *
 * A shard of the source becomes a shard of the same name, written piece by piece and put in place
 * whole; ballast_quantize.json in the target names the finished ones with their checksums. Run
 * again after an interruption, finished shards are verified and kept. config.json is written last:
 * without it the directory is not a model. */
#ifndef BALLAST_CONVERT_QUANTIZE_H
#define BALLAST_CONVERT_QUANTIZE_H

#include "base/pool.h"
#include "fp8/fp8.h"
#include "io/reader.h"

enum { BL_QUANTIZE_KINDS = 16, BL_QUANTIZE_KIND_BYTES = 48 };

typedef struct bl_quantize_options {
    const char *source, *target; /* directories; the target is made */
    bl_format format;            /* of BL_FORMATS_MADE; convert/dequantize.h: others */
    bool largest_scales;         /* as bl_row_job's */
    bl_io_engine io_engine;
    bl_pool *pool;
} bl_quantize_options;

typedef struct bl_quantize_result {
    int64_t n_files, n_kept;               /* shards; those found finished */
    int64_t n_bytes_read, n_bytes_written; /* of the shards made now */
    /* Projections of one kind ("q_proj"), in the architecture's order, then all together (""): of
     * bl_model_quantize. error: |Q - W| / |W| */
    int n_kinds;
    struct {
        char name[BL_QUANTIZE_KIND_BYTES];
        int64_t n_matrices;
        double error;
    } kinds[BL_QUANTIZE_KINDS];
} bl_quantize_result;

/* BL_EINPUT: the source is of an unsupported family, is FP8, or has a weight that is not finite.
 * BL_EUSAGE: the target is the source, holds something else, or was begun from another source or in
 * another format. BL_ELIMIT: not enough space for the rest. */
bl_status bl_model_quantize(const bl_quantize_options *options, bl_quantize_result *out);

#endif
