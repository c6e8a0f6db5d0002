/* SPDX-License-Identifier: Apache-2.0 */
/* internal.h -- what all conversions use: the work on a directory (directory.c), on the shards of
 * its model (shard.c), and the tensors of a projection in a format with scales (layout.c). */
#ifndef BALLAST_CONVERT_INTERNAL_H
#define BALLAST_CONVERT_INTERNAL_H

#include <jansson.h>

#include "arch/arch.h"
#include "base/files.h"
#include "convert/quantize.h"
#include "store/hf_model.h"

#define BL_QUANTIZE_MANIFEST   "ballast_quantize.json"
#define BL_MERGE_MANIFEST      "ballast_merge.json"
#define BL_DEQUANTIZE_MANIFEST "ballast_dequantize.json"
#define BL_TRAIN_MANIFEST      "ballast_train.json"

typedef enum bl_shard_role {
    BL_SHARD_VALUES, /* a tensor as it is stored, or the values of a matrix */
    BL_SHARD_CODES,  /* the next spec is BL_SHARD_SCALES, constants follow */
    BL_SHARD_SCALES,
    BL_SHARD_CONSTANT
} bl_shard_role;

/* Specs of one tensor of the source at most: NF4's. */
enum { BL_SHARD_PARTS = 4 };

typedef struct bl_shard_part {
    bl_shard_role role;
    const bl_stored_tensor *tensor; /* of the source; of a packed weight its codes */
    char *name;                     /* the spec's; NULL: the source's */
} bl_shard_part;

/* The target of one shard of the source: one spec for each tensor, several for a projection in a
 * format with scales. */
typedef struct bl_shard_plan {
    const bl_safetensors *source;
    bl_stored_tensor_spec *specs;
    bl_shard_part *parts; /* of the specs */
    size_t n_specs;
    int64_t n_bytes; /* of the data */
} bl_shard_plan;

/* ---- directory.c ---- */

typedef bl_status (*bl_shard_plan_fn)(void *user, const bl_safetensors *source, bl_shard_plan *out);

/* A directory made from another one, shard by shard. The first group is set before
 * bl_conversion_open, the second by it. */
typedef struct bl_conversion {
    const char *source, *target, *manifest_name;
    const char *done;   /* "quantized", for messages */
    json_t *settings;   /* of the manifest: a resumed run has the same; owned */
    bool hashes_source; /* the bytes of the source are compared on resume */
    void *user;
    /* Writes shard `index` to `path`; may add notes to its entry of the manifest. */
    bl_status (*write_shard)(void *user, size_t index, const char *path, json_t *entry);
    bl_status (*change_config)(void *user, const char *path, json_t *config);
    /* The text of README.md, malloc'ed; NULL: the source's is copied. */
    bl_status (*write_readme)(void *user, const json_t *manifest, char **text);

    bl_model_config config; /* of the source */
    bl_hf_model *model;
    bl_io_files *files; /* the model's, opened for readers */
    size_t n_shards;
    bl_shard_plan *plans;

    json_t *manifest;
    bl_dir_lock *lock; /* of the target */
    bl_quantize_result result;
} bl_conversion;

bl_status bl_conversion_open(bl_conversion *c, bl_shard_plan_fn plan);
bl_status bl_conversion_run(bl_conversion *c);
void bl_conversion_close(bl_conversion *c);

/* ---- shard.c ---- */

bl_status bl_shard_plan_begin(const bl_safetensors *source, bl_shard_plan *out);
/* Adds a tensor as it is stored. */
bl_stored_tensor_spec *bl_shard_plan_copy(bl_shard_plan *plan, const bl_stored_tensor *tensor);
/* BL_EINPUT: the experts of a layer in one tensor, which is copied but never converted. */
bl_status bl_shard_check_matrix(const bl_stored_tensor *tensor);
void bl_shard_plan_free(bl_shard_plan *plan);

/* Rows of a matrix that are worked on at a time: whole blocks. */
int64_t bl_shard_piece_rows(int64_t cols, int64_t piece_elements);
/* The tensor's bytes to the writer's tensor `spec`. BL_EINPUT names a float that is not finite. */
bl_status bl_shard_copy_tensor(const bl_stored_tensor *tensor, size_t spec,
                               bl_safetensors_writer *writer);

/* ---- layout.c: of formats with scales ---- */

/* Adds a matrix in `format`. BL_EUSAGE: its rows are not whole groups. */
bl_status bl_shard_plan_format(bl_shard_plan *plan, const bl_stored_tensor *tensor,
                               bl_format format);
/* Writes the constants of the matrix whose codes are the plan's spec `codes`. */
bl_status bl_shard_write_constants(const bl_shard_plan *plan, size_t codes, bl_format format,
                                   bl_safetensors_writer *writer);
/* quantization_config of config.json; NULL: out of memory. */
json_t *bl_quantization_config(bl_format format, const bl_arch *arch);
/* "bfloat16" */
const char *bl_torch_dtype_name(bl_dtype dtype);

#endif
