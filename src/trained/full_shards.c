/* SPDX-License-Identifier: Apache-2.0 */
/* full_shards.c -- reads the files of checkpoint.c for full fine-tuning: a rank's rows of the files
 * of any number of ranks, with moments of either dtype; and the rows of the trained model in
 * them. */
#include <stdlib.h>

#include "trained/internal.h"
#include "base/sizes.h"

enum { FLOAT = sizeof(float), N_ARRAYS = TRAINED_FILE_REPLICATED };

static const char *const *const names = trained_array_names[TRAINED_FILE_FULL];

/* Elements of array i in the file of the spans' rank; 0: the file does not have it. */
static int64_t elements_of(const trained_spans *spans, int i)
{
    return i < N_ARRAYS ? spans->file_n : trained_vector_floats(spans->set);
}

static bl_status add_rank_bytes(const bl_base_layout *layout, const bl_trained_set *set, int rank,
                                bl_dtype moments, int64_t *n_bytes)
{
    int64_t row_bytes = FLOAT + 2 * (int64_t)bl_dtype_bytes(moments);
    trained_spans spans;

    BL_TRY(trained_spans_create(layout, set, rank, &spans));
    *n_bytes += spans.file_n * row_bytes + N_ARRAYS * trained_vector_floats(set) * FLOAT;
    trained_spans_free(&spans);
    return BL_OK;
}

bl_status bl_trained_full_checkpoint_bytes(const bl_model_config *config, const bl_trained_set *set,
                                           int n_ranks, bl_dtype moments, int64_t *n_bytes)
{
    bl_base_layout layout;
    bl_status st = BL_OK;

    *n_bytes = 0;
    BL_TRY(bl_model_layout_trained(config, n_ranks, &layout));
    for (int i = 0; i < n_ranks && st == BL_OK; i++)
        st = add_rank_bytes(&layout, set, i, moments, n_bytes);
    bl_base_layout_free(&layout);
    return st;
}

/* ---- the files of a checkpoint ---- */

struct bl_trained_full_reader {
    const bl_model_config *config;
    const bl_trained_set *set;
    bl_base_layout layout; /* of the ranks that have written it */
    bl_safetensors **files;
    trained_spans *spans; /* [ranks]: of their files */
};

/* Of both moments; the first decides. */
static bl_dtype moments_of(const bl_safetensors *file)
{
    const bl_stored_tensor *m = bl_safetensors_find(file, names[TRAINED_M]);
    return m && m->dtype == BL_BF16 ? BL_BF16 : BL_F32;
}

static bl_status check_file(const bl_safetensors *file, const trained_spans *spans)
{
    for (int i = 0; i < TRAINED_FILE_ARRAYS; i++)
        BL_TRY(trained_check_array(file, names[i], i < TRAINED_W ? moments_of(file) : BL_F32, 0,
                                   elements_of(spans, i)));
    return BL_OK;
}

static bl_status open_file(bl_trained_full_reader *r, const char *dir, int rank)
{
    bl_status st = trained_open_shard(dir, rank, r->layout.n_shards, &r->files[rank]);
    if (st == BL_EINPUT) st = BL_ECHECKPOINT;
    if (st == BL_OK) st = trained_spans_create(&r->layout, r->set, rank, &r->spans[rank]);
    return st == BL_OK ? check_file(r->files[rank], &r->spans[rank]) : st;
}

static bl_status open_files(bl_trained_full_reader *r, const char *dir, int n_ranks)
{
    BL_TRY(bl_model_layout_trained(r->config, n_ranks, &r->layout));
    r->files = calloc((size_t)n_ranks, sizeof *r->files);
    r->spans = calloc((size_t)n_ranks, sizeof *r->spans);
    if (!r->files || !r->spans)
        return BL_FAIL(BL_ENOMEM, "%s: the shards of %d ranks", dir, n_ranks);
    for (int i = 0; i < n_ranks; i++) BL_TRY(open_file(r, dir, i));
    return BL_OK;
}

bl_status bl_trained_full_open(const bl_model_config *config, const bl_trained_set *set,
                               const char *dir, int n_ranks, bl_trained_full_reader **out)
{
    bl_trained_full_reader *r = calloc(1, sizeof *r);

    *out = NULL;
    if (!r) return BL_FAIL(BL_ENOMEM, "%s: the shards of %d ranks", dir, n_ranks);
    r->config = config;
    r->set = set;
    bl_status st = open_files(r, dir, n_ranks);
    if (st != BL_OK) {
        bl_trained_full_close(r);
        return st;
    }
    *out = r;
    return BL_OK;
}

void bl_trained_full_close(bl_trained_full_reader *r)
{
    if (!r) return;
    for (int i = 0; r->files && i < r->layout.n_shards; i++) bl_safetensors_close(r->files[i]);
    for (int i = 0; r->spans && i < r->layout.n_shards; i++) trained_spans_free(&r->spans[i]);
    free(r->files);
    free(r->spans);
    bl_base_layout_free(&r->layout);
    free(r);
}

static bl_status as_checkpoint(bl_status st)
{
    return st == BL_EINPUT ? BL_ECHECKPOINT : st;
}

/* ---- the model's tensors ---- */

void trained_full_place(const bl_model_config *config, const bl_arch_tensor *tensor, int64_t *unit,
                        int *matrix, int64_t *row)
{
    *row = 0;
    *matrix = 0;
    *unit = config->n_layers;
    if (tensor->role == BL_ROLE_PROJECTION) {
        *unit = tensor->layer;
        *row = bl_projection_row(config, tensor->projection);
        *matrix = (int)config->arch->projections[tensor->projection].matrix;
    } else if (tensor->role == BL_ROLE_EMBEDDING && !config->tie_word_embeddings) {
        *unit = config->n_layers + 1;
    }
}

static bl_status read_rows(const bl_trained_full_reader *r, const bl_arch_tensor *tensor,
                           int64_t begin, int64_t end, float *dst)
{
    int64_t unit, row;
    int matrix;

    trained_full_place(r->config, tensor, &unit, &matrix, &row);
    int64_t shard_rows = r->layout.units[unit].matrix[matrix].part[0].shard_rows,
            row_bytes = r->layout.units[unit].matrix[matrix].part[0].row_bytes;
    for (int64_t at = row + begin, n; at < row + end; at += n) {
        int64_t rank = at / shard_rows;
        const trained_span *span = trained_span_at(&r->spans[rank], unit, matrix, at);
        const bl_stored_tensor *t = bl_safetensors_find(r->files[rank], names[TRAINED_W]);
        if (!span)
            return BL_FAIL(BL_EINTERNAL, "%s is frozen: no checkpoint file has it", tensor->name);
        n = bl_min_i64(row + end, span->row + span->n_rows) - at;
        BL_TRY(bl_stored_tensor_read(t, span->file_first * FLOAT + (at - span->row) * row_bytes,
                                     (size_t)(n * row_bytes), dst));
        dst += n * row_bytes / FLOAT;
    }
    return BL_OK;
}

bl_status bl_trained_full_read(bl_trained_full_reader *r, const bl_arch_tensor *tensor,
                               int64_t begin, int64_t end, float *dst)
{
    if (tensor->role != BL_ROLE_VECTOR) return as_checkpoint(read_rows(r, tensor, begin, end, dst));
    const bl_stored_tensor *t = bl_safetensors_find(r->files[0], names[N_ARRAYS + REPLICATED_W]);
    int64_t first = trained_modules_before(r->config, r->set, tensor) + begin;
    if (!t) return BL_FAIL(BL_EINTERNAL, "%s is frozen: no checkpoint file has it", tensor->name);
    return as_checkpoint(
        bl_stored_tensor_read(t, first * FLOAT, (size_t)((end - begin) * FLOAT), dst));
}

/* ---- resuming ---- */

/* The rows of a span that a span of rank `old` of those that wrote has, too. */
static bl_status load_common(const bl_trained_state *s, const bl_trained_full_reader *r, int old,
                             const trained_span *span, const trained_span *from)
{
    int64_t cols = span->at.part->row_bytes / FLOAT, first = bl_max_i64(span->row, from->row),
            last = bl_min_i64(bl_min_i64(span->row + span->n_rows, from->row + from->n_rows),
                              span->at.part->rows);
    int64_t source = from->file_first + (first - from->row) * cols;

    for (int i = 0; i < N_ARRAYS && first < last; i++)
        BL_TRY(trained_units_load(s->trained->units, span, (trained_array)i,
                                  (first - span->row) * cols, (last - first) * cols,
                                  bl_safetensors_find(r->files[old], names[i]), source,
                                  s->staging));
    return BL_OK;
}

static bl_status load_span(const bl_trained_state *s, const bl_trained_full_reader *r, int old,
                           const trained_span *span)
{
    const trained_spans *spans = &r->spans[old];
    int64_t unit = span->at.idx_unit;

    for (int64_t i = spans->first[unit]; i < spans->first[unit + 1]; i++)
        if (spans->span[i].at.idx_matrix == span->at.idx_matrix && spans->span[i].idx == span->idx)
            BL_TRY(load_common(s, r, old, span, &spans->span[i]));
    return BL_OK;
}

static bl_status load_vectors(const bl_trained_state *s, const bl_safetensors *file)
{
    for (int i = 0; i < REPLICATED_ARRAYS; i++)
        BL_TRY(trained_replicated_load(s->replicated, i, s->staging,
                                       bl_safetensors_find(file, names[N_ARRAYS + i])));
    return BL_OK;
}

static bl_status load_all(const bl_trained_state *s, const bl_trained_full_reader *r)
{
    const trained_spans *spans = &s->trained->spans;

    for (int old = 0; old < r->layout.n_shards; old++)
        for (int64_t i = 0; i < spans->n; i++) BL_TRY(load_span(s, r, old, &spans->span[i]));
    return load_vectors(s, r->files[0]);
}

bl_status trained_full_read_shards(bl_trained_state *s, const char *dir, int n_ranks)
{
    bl_trained_full_reader *r;

    BL_TRY(bl_trained_full_open(s->trained->config, s->trained->set, dir, n_ranks, &r));
    bl_status st = load_all(s, r);
    bl_trained_full_close(r);
    if (st != BL_OK) return as_checkpoint(st);
    BL_TRY(trained_units_round(s->trained->units));
    return bl_trained_state_publish(s);
}
