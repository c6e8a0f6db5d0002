/* SPDX-License-Identifier: Apache-2.0 */
/* rows.h -- checks the model's tensors, and reads rows of them ahead of their use into the format
 * in which they are kept: for load_base.c and for convert/. */
#ifndef BALLAST_MODEL_ROWS_H
#define BALLAST_MODEL_ROWS_H

#include "device/staging.h"
#include "model/weights.h"

/* BL_EINPUT lists all that is wrong: exactly the tensors of the configuration must be there, with
 * their shapes. */
bl_status bl_model_check_tensors(const bl_model_config *config, const bl_hf_model *model);

/* The weight of a projection's tensor, (rows of output channels, input channels). */
bl_status bl_model_stored_weight(const bl_model_config *config, const bl_hf_model *model,
                                 const bl_arch_tensor *tensor, bl_hf_weight *out);

/* Makes weights->pages, of a model without files on a device made of rates. */
bl_status bl_model_place_base(bl_model_weights *weights, int shard, const bl_placement *placement);
/* Makes weights->pages, sealed, and fills this rank's part of weights->scales. */
bl_status bl_model_load_base(bl_model_weights *weights, bl_comm *shard_group,
                             const bl_placement *placement, bl_staging *staging);

/* Rows [begin, end) of a weight, to be kept in `format`: whole groups of it. */
typedef struct bl_row_job {
    bl_hf_weight weight;
    bl_format format;
    int64_t begin, end;
    void *codes;
    void *scales;        /* of the whole projection; those of the rows are written */
    bool largest_scales; /* as bl_model's */
} bl_row_job;

/* transposed.c: of a weight with n_transposed, the rows of one of its matrices, and the first row
 * of the one that has `row`. */
static inline int64_t bl_row_matrix_rows(const bl_hf_weight *weight)
{
    return weight->rows / weight->n_transposed;
}
static inline int64_t bl_row_matrix_of(const bl_hf_weight *weight, int64_t row)
{
    return row / bl_row_matrix_rows(weight) * bl_row_matrix_rows(weight);
}
/* to (n_rows, n_cols) = the transpose of from (n_cols, n_rows), whose rows are `stride` elements
 * apart; of `width` bytes, 2 or 4. */
void bl_rows_transpose(bl_pool *pool, size_t width, int64_t n_rows, int64_t n_cols, int64_t stride,
                       const void *from, void *to);

/* packed.c: whether checkpoints of the kind may be held in the format as they are stored. */
bool bl_model_format_is_of(bl_format format, bl_scale_kind kind);
/* The format that has a weight's codes, groups and scales as they are stored; false: none has them
 * (zero points, other groups, scales of another dtype). */
bool bl_model_packed_format(const bl_hf_weight *weight, bl_format *out);
/* BL_EUSAGE: the rows of a weight are not whole groups of the format; neither a shard nor a segment
 * may end inside one. */
bl_status bl_model_check_groups(bl_format format, const char *name, int64_t cols);
/* The scales of a job in the format of bl_model_packed_format. values: all, of
 * bl_hf_read_scales. BL_EIO, BL_ENOMEM. */
bl_status bl_row_job_place_scales(const bl_row_job *job, const float *values);

uint64_t bl_model_tensor_seed(const char *name); /* of checksums of its rows */

/* Carries out jobs in their order while the rows of the next ones are being read. */
typedef struct bl_row_loader bl_row_loader;

/* The model's files, opened for readers: in the order of bl_hf_file. `direct`: past the page cache.
 * BL_EINPUT, too, when one was replaced since its header was read. */
bl_status bl_model_open_io_files(const bl_hf_model *model, bool direct, bl_io_files **out);

/* All is borrowed until the loader is destroyed. n_readers: loaders at work on this host at a time,
 * which share the depth of the queue and the memory for it. The loader `reports` its progress, and
 * its rate when it took long. */
bl_status bl_row_loader_create(const bl_hf_model *model, bl_io_files *files, bl_io_engine engine,
                               int n_readers, bl_pool *pool, const bl_row_job *jobs, size_t n_jobs,
                               bool reports, bl_row_loader **out);
/* The next job; BL_EINTERNAL after the last. *checksum (NULL: none is made): a sum modulo 2^64 over
 * the job's rows of XXH3-64 of a row's stored bytes, seeded by tensor and row, and over the scales
 * that the job sets: over all rows of a tensor the same however they are dealt out to jobs. */
bl_status bl_row_loader_next(bl_row_loader *loader, uint64_t *checksum);
void bl_row_loader_destroy(bl_row_loader *loader); /* NULL is fine */

/* Rows [begin, end) of a stored tensor, `bytes`: BL_EINPUT names the first place that is NaN or
 * infinite. */
bl_status bl_model_check_finite(const bl_stored_tensor *tensor, int64_t begin, int64_t end,
                                const void *bytes);

#endif
