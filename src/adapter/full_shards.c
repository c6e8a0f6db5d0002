/* SPDX-License-Identifier: Apache-2.0 */
/* full_shards.c -- checkpoints of a run that trains every weight, a file per rank: m, v (F32 or
 * BF16), w (F32), the rank's rows of all matrices as bl_model_layout_trained places them in fp32,
 * and m_vectors, v_vectors, w_vectors, norms and biases, F32, which all ranks have alike. Another
 * number of ranks, and the writer of the trained model, read the rows out of them; a run with
 * moments of the other dtype converts them. */
#include <stdlib.h>

#include "adapter/internal.h"
#include "base/files.h"
#include "base/sizes.h"

enum { FLOAT = sizeof(float), N_ARRAYS = 3, N_TENSORS = 2 * N_ARRAYS };

/* Rows, in the order of adapter_array, and behind them vectors. */
static const char *const tensor_names[N_TENSORS] = {"m",         "v",         "w",
                                                    "m_vectors", "v_vectors", "w_vectors"};
enum { WEIGHTS = 2, VECTORS = N_ARRAYS };

bl_status bl_adapter_full_checkpoint_bytes(const bl_model_config *config, int n_ranks,
                                           bl_dtype moments, int64_t *n_bytes)
{
    bl_base_layout layout;

    BL_TRY(bl_model_layout_trained(config, n_ranks, &layout));
    int64_t rows = (int64_t)layout.shard_bytes / FLOAT,
            row_bytes = FLOAT + 2 * (int64_t)bl_dtype_bytes(moments);
    *n_bytes = n_ranks * (rows * row_bytes + N_ARRAYS * bl_arch_vector_floats(config) * FLOAT);
    bl_base_layout_free(&layout);
    return BL_OK;
}

static float *vector_array(const adapter_full *f, size_t which)
{
    float *const arrays[N_ARRAYS] = {f->vector_m, f->vector_v, f->vectors};
    return arrays[which];
}

static bl_status append_rows(const bl_adapter_state *s, size_t which, bl_safetensors_writer *writer)
{
    const adapter_full *f = s->trained;

    for (bl_base_walk at = {.layout = f->base_layout}; bl_base_next(&at);)
        BL_TRY(adapter_units_append(f->units, &at, (adapter_array)which, s->staging, writer));
    return BL_OK;
}

bl_status adapter_full_write_shard(bl_adapter_state *s, const char *path)
{
    const adapter_full *f = s->trained;
    bl_stored_tensor_spec specs[N_TENSORS];
    bl_safetensors_writer *writer = NULL;
    bl_status st = BL_OK;

    for (int i = 0; i < N_TENSORS; i++)
        specs[i] = (bl_stored_tensor_spec){
            tensor_names[i],
            i < WEIGHTS ? f->bytes.units.dtype : BL_F32,
            1,
            {i < VECTORS ? (int64_t)f->base_layout->shard_bytes / FLOAT : f->n_vectors}};
    BL_TRY(bl_adapter_full_flush(s));
    BL_TRY(bl_safetensors_create(path, specs, N_TENSORS, NULL, 0, &writer));
    for (int i = 0; i < N_TENSORS; i++) {
        size_t which = bl_safetensors_writer_order(writer)[i];
        BL_TRY_GOTO(st, done,
                    which < VECTORS
                        ? append_rows(s, which, writer)
                        : adapter_append_bytes(writer, s->staging, vector_array(f, which - VECTORS),
                                               (size_t)(f->n_vectors * FLOAT)));
    }
    st = bl_safetensors_writer_commit(writer);
    writer = NULL;
done:
    bl_safetensors_writer_abort(writer);
    return st;
}

/* ---- the files of a checkpoint ---- */

struct bl_adapter_full_reader {
    const bl_model_config *config;
    bl_base_layout layout; /* of the ranks that have written it */
    bl_safetensors **files;
};

/* Of both moments; the first decides. */
static bl_dtype moments_of(const bl_safetensors *file)
{
    const bl_stored_tensor *m = bl_safetensors_find(file, tensor_names[0]);
    return m && m->dtype == BL_BF16 ? BL_BF16 : BL_F32;
}

static bl_status check_file(const bl_adapter_full_reader *r, const bl_safetensors *file)
{
    for (int i = 0; i < N_TENSORS; i++) {
        const bl_stored_tensor *t = bl_safetensors_find(file, tensor_names[i]);
        int64_t n =
            i < VECTORS ? (int64_t)r->layout.shard_bytes / FLOAT : bl_arch_vector_floats(r->config);
        bl_dtype dtype = i < WEIGHTS ? moments_of(file) : BL_F32;
        if (!t || t->dtype != dtype || t->n_dims != 1 || t->shape[0] != n)
            return BL_FAIL(BL_ECHECKPOINT, "%s: tensor %s is not %s [%lld]",
                           bl_safetensors_path(file), tensor_names[i], bl_dtype_name(dtype),
                           (long long)n);
    }
    return BL_OK;
}

static bl_status open_file(bl_adapter_full_reader *r, const char *dir, int rank)
{
    char name[BL_SHARD_NAME_BYTES], *path = NULL;

    bl_adapter_shard_name(rank, r->layout.n_shards, name);
    BL_TRY(bl_path_join(dir, name, &path));
    bl_status st = bl_safetensors_open(path, &r->files[rank]);
    free(path);
    if (st == BL_EINPUT) st = BL_ECHECKPOINT;
    return st == BL_OK ? check_file(r, r->files[rank]) : st;
}

bl_status bl_adapter_full_open(const bl_model_config *config, const char *dir, int n_ranks,
                               bl_adapter_full_reader **out)
{
    bl_adapter_full_reader *r = calloc(1, sizeof *r);

    *out = NULL;
    if (!r) return BL_FAIL(BL_ENOMEM, "%s: the shards of %d ranks", dir, n_ranks);
    r->config = config;
    bl_status st = bl_model_layout_trained(config, n_ranks, &r->layout);
    if (st == BL_OK) r->files = calloc((size_t)n_ranks, sizeof *r->files);
    if (st == BL_OK && !r->files)
        st = BL_FAIL(BL_ENOMEM, "%s: the shards of %d ranks", dir, n_ranks);
    for (int i = 0; st == BL_OK && i < n_ranks; i++) st = open_file(r, dir, i);
    if (st != BL_OK) {
        bl_adapter_full_close(r);
        return st;
    }
    *out = r;
    return BL_OK;
}

void bl_adapter_full_close(bl_adapter_full_reader *r)
{
    if (!r) return;
    for (int i = 0; r->files && i < r->layout.n_shards; i++) bl_safetensors_close(r->files[i]);
    free(r->files);
    bl_base_layout_free(&r->layout);
    free(r);
}

static bl_status as_checkpoint(bl_status st)
{
    return st == BL_EINPUT ? BL_ECHECKPOINT : st;
}

/* ---- the model's tensors ---- */

const bl_base_part *bl_adapter_full_place(const bl_model_config *config,
                                          const bl_base_layout *layout,
                                          const bl_arch_tensor *tensor, int64_t *unit, int64_t *row)
{
    int matrix = 0;

    *row = 0;
    *unit = config->n_layers;
    if (tensor->role == BL_ROLE_PROJECTION) {
        *unit = tensor->layer;
        *row = bl_projection_row(config, tensor->projection);
        matrix = (int)config->arch->projections[tensor->projection].matrix;
    } else if (tensor->role == BL_ROLE_EMBEDDING && !config->tie_word_embeddings) {
        *unit = config->n_layers + 1;
    }
    return &layout->units[*unit].matrix[matrix].part[0];
}

bl_status bl_adapter_full_read(bl_adapter_full_reader *r, const bl_arch_tensor *tensor,
                               int64_t begin, int64_t end, float *dst)
{
    int64_t unit, row;

    if (tensor->role == BL_ROLE_VECTOR) {
        const bl_stored_tensor *t =
            bl_safetensors_find(r->files[0], tensor_names[VECTORS + WEIGHTS]);
        return as_checkpoint(bl_stored_tensor_read(t, (tensor->offset + begin) * FLOAT,
                                                   (size_t)((end - begin) * FLOAT), dst));
    }
    const bl_base_part *part = bl_adapter_full_place(r->config, &r->layout, tensor, &unit, &row);
    for (int64_t at = row + begin, n; at < row + end; at += n) {
        int64_t rank = at / part->shard_rows,
                offset = (int64_t)(r->layout.units[unit].offset + part->shard_offset) +
                         (at - rank * part->shard_rows) * part->row_bytes;
        n = bl_min_i64(row + end, (rank + 1) * part->shard_rows) - at;
        const bl_stored_tensor *t = bl_safetensors_find(r->files[rank], tensor_names[WEIGHTS]);
        BL_TRY(as_checkpoint(bl_stored_tensor_read(t, offset, (size_t)(n * part->row_bytes), dst)));
        dst += n * part->row_bytes / FLOAT;
    }
    return BL_OK;
}

/* ---- resuming ---- */

/* What rank `old` of those that wrote has of a part of this rank's rows. */
static bl_status load_part(const bl_adapter_state *s, const bl_adapter_full_reader *r, int old,
                           const bl_base_walk *at)
{
    const bl_base_part *part = at->part,
                       *from = &r->layout.units[at->idx_unit].matrix[at->idx_matrix].part[0];
    int64_t begin, end, old_begin, old_end, row = part->row_bytes / FLOAT;

    bl_base_part_rows(part, bl_comm_rank(s->world), &begin, &end);
    bl_base_part_rows(from, old, &old_begin, &old_end);
    int64_t first = bl_max_i64(begin, old_begin), last = bl_min_i64(end, old_end);
    int64_t source = (int64_t)(r->layout.units[at->idx_unit].offset + from->shard_offset) / FLOAT +
                     (first - old_begin) * row;

    for (int i = 0; i < VECTORS && first < last; i++)
        BL_TRY(adapter_units_load(
            s->trained->units, at, (adapter_array)i, (first - begin) * row, (last - first) * row,
            bl_safetensors_find(r->files[old], tensor_names[i]), source, s->staging));
    return BL_OK;
}

static bl_status load_all(const bl_adapter_state *s, const bl_adapter_full_reader *r)
{
    for (int old = 0; old < r->layout.n_shards; old++)
        for (bl_base_walk at = {.layout = s->trained->base_layout}; bl_base_next(&at);)
            BL_TRY(load_part(s, r, old, &at));
    for (int i = VECTORS; i < N_TENSORS; i++)
        BL_TRY(adapter_load_bytes(s->staging, bl_safetensors_find(r->files[0], tensor_names[i]), 0,
                                  (size_t)(s->trained->n_vectors * FLOAT),
                                  vector_array(s->trained, (size_t)(i - VECTORS))));
    return BL_OK;
}

bl_status adapter_full_read_shards(bl_adapter_state *s, const char *dir, int n_ranks)
{
    bl_adapter_full_reader *r;

    BL_TRY(bl_adapter_full_open(s->trained->config, dir, n_ranks, &r));
    bl_status st = load_all(s, r);
    bl_adapter_full_close(r);
    if (st != BL_OK) return as_checkpoint(st);
    BL_TRY(adapter_full_round(s));
    return bl_adapter_state_publish(s);
}
