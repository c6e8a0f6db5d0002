/* SPDX-License-Identifier: Apache-2.0 */
/* full_shards.c -- checkpoints of full fine-tuning, a file per rank: m, v (F32 or BF16), w (F32),
 * the rank's spans one after the other, and m_vectors, v_vectors, w_vectors, the trained norms and
 * biases, F32, which all ranks have alike; three of them are missing where nothing of the kind is
 * trained. Another number of ranks, and the writer of the trained model, read the rows out of them;
 * a run with moments of the other dtype converts them. */
#include <stdlib.h>

#include "adapter/internal.h"
#include "base/files.h"
#include "base/sizes.h"

enum { FLOAT = sizeof(float), N_ARRAYS = 3, N_TENSORS = 2 * N_ARRAYS };

/* Rows, in the order of adapter_array, and behind them vectors. */
static const char *const tensor_names[N_TENSORS] = {"m",         "v",         "w",
                                                    "m_vectors", "v_vectors", "w_vectors"};
enum { WEIGHTS = 2, VECTORS = N_ARRAYS };

static int64_t vector_floats(const bl_trained_set *set)
{
    int64_t n = 0;

    for (int64_t i = 0; i < set->n_ranges; i++) n += set->range[i].n;
    return n;
}

/* Elements of tensor i in the file of the spans' rank; 0: the file does not have the tensor. */
static int64_t elements_of(const adapter_spans *spans, int i)
{
    return i < VECTORS ? spans->file_n : vector_floats(spans->set);
}

static bl_status add_rank_bytes(const bl_base_layout *layout, const bl_trained_set *set, int rank,
                                bl_dtype moments, int64_t *n_bytes)
{
    int64_t row_bytes = FLOAT + 2 * (int64_t)bl_dtype_bytes(moments);
    adapter_spans spans;

    BL_TRY(adapter_spans_create(layout, set, rank, &spans));
    *n_bytes += spans.file_n * row_bytes + N_ARRAYS * vector_floats(set) * FLOAT;
    adapter_spans_free(&spans);
    return BL_OK;
}

bl_status bl_adapter_full_checkpoint_bytes(const bl_model_config *config, const bl_trained_set *set,
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

/* Array `which` of range i of the vectors, which has `before` trained ones before it. */
static float *vector_array(const adapter_full *f, size_t which, int64_t i, int64_t before)
{
    float *const moments[] = {f->vector_m, f->vector_v};
    return which == WEIGHTS ? f->vectors + f->set->range[i].begin : moments[which] + before;
}

/* ---- writing ---- */

/* adapter_units_file.first: norms and biases. All ranks have and write the same ones. */
static bl_status put_vectors(void *user, bl_staging *staging)
{
    const adapter_full *f = user;

    for (size_t which = 0; which < N_ARRAYS; which++)
        for (int64_t i = 0, before = 0; i < f->set->n_ranges; before += f->set->range[i++].n) {
            const char *memory = (const char *)vector_array(f, which, i, before);
            int64_t total = f->set->range[i].n * FLOAT;
            for (int64_t at = 0, n; at < total; at += n) {
                n = bl_min_i64((int64_t)staging->n_bytes, total - at);
                BL_TRY(bl_staging_download(staging, staging->bytes, memory + at, (size_t)n));
                BL_TRY(bl_safetensors_writer_put(f->writing.writer,
                                                 f->writing.spec[VECTORS + which],
                                                 before * FLOAT + at, staging->bytes, (size_t)n));
            }
        }
    return BL_OK;
}

/* adapter_units_file.end */
static bl_status end_shard(void *user)
{
    adapter_full *f = user;

    bl_status st = bl_safetensors_writer_commit(f->writing.writer);
    f->writing.writer = NULL;
    return st == BL_OK ? f->writing.then(f->writing.user) : st;
}

static bl_status create_shard(adapter_full *f, const char *path)
{
    bl_stored_tensor_spec specs[N_TENSORS];
    size_t n = 0;

    for (int i = 0; i < N_TENSORS; i++) {
        int64_t n_elements = elements_of(&f->spans, i);
        bl_dtype dtype = i < WEIGHTS ? f->bytes.units.dtype : BL_F32;
        f->writing.spec[i] = n;
        if (n_elements == 0) continue;
        specs[n++] = (bl_stored_tensor_spec){tensor_names[i], dtype, 1, {n_elements}};
    }
    return bl_safetensors_create(path, specs, n, NULL, 0, &f->writing.writer);
}

bl_status bl_adapter_full_begin_shard(bl_adapter_state *s, const char *path,
                                      bl_status (*then)(void *user), void *user)
{
    adapter_full *f = s->trained;

    _Static_assert(sizeof f->writing.spec / sizeof *f->writing.spec == N_TENSORS, "one per tensor");
    BL_TRY(create_shard(f, path));
    f->writing.then = then;
    f->writing.user = user;
    adapter_units_file file = {
        .writer = f->writing.writer, .first = put_vectors, .end = end_shard, .user = f};
    for (int i = 0; i < VECTORS; i++) file.tensor[i] = f->writing.spec[i];
    bl_status st = adapter_units_begin_file(f->units, &file);
    if (st != BL_OK) bl_adapter_full_drop_shard(s);
    return st;
}

bool bl_adapter_full_shard_is_done(const bl_adapter_state *s)
{
    return adapter_units_file_is_done(s->trained->units);
}

bl_adapter_shard_progress bl_adapter_full_shard_progress(const bl_adapter_state *s)
{
    return adapter_units_file_progress(s->trained->units);
}

static void abort_shard(adapter_full *f)
{
    bl_safetensors_writer_abort(f->writing.writer);
    f->writing.writer = NULL;
}

bl_status bl_adapter_full_end_shard(bl_adapter_state *s)
{
    bl_status st = adapter_units_end_file(s->trained->units);
    abort_shard(s->trained);
    return st;
}

void bl_adapter_full_drop_shard(bl_adapter_state *s)
{
    if (s->trained->units) adapter_units_drop_file(s->trained->units);
    abort_shard(s->trained);
}

bl_stream *bl_adapter_full_behind(const bl_adapter_state *s)
{
    return adapter_units_behind(s->trained->units);
}

static bl_status nothing_more(void *user)
{
    (void)user;
    return BL_OK;
}

bl_status adapter_full_write_shard(bl_adapter_state *s, const char *path)
{
    BL_TRY(bl_adapter_full_begin_shard(s, path, nothing_more, NULL));
    return bl_adapter_full_end_shard(s);
}

/* ---- the files of a checkpoint ---- */

struct bl_adapter_full_reader {
    const bl_model_config *config;
    const bl_trained_set *set;
    bl_base_layout layout; /* of the ranks that have written it */
    bl_safetensors **files;
    adapter_spans *spans; /* [ranks]: of their files */
};

/* Of both moments; the first decides. */
static bl_dtype moments_of(const bl_safetensors *file)
{
    const bl_stored_tensor *m = bl_safetensors_find(file, tensor_names[0]);
    return m && m->dtype == BL_BF16 ? BL_BF16 : BL_F32;
}

static bl_status check_file(const bl_safetensors *file, const adapter_spans *spans)
{
    for (int i = 0; i < N_TENSORS; i++) {
        const bl_stored_tensor *t = bl_safetensors_find(file, tensor_names[i]);
        bl_dtype dtype = i < WEIGHTS ? moments_of(file) : BL_F32;
        int64_t n = elements_of(spans, i);
        bool is_right = t ? t->dtype == dtype && t->n_dims == 1 && t->shape[0] == n : n == 0;
        if (!is_right)
            return BL_FAIL(BL_ECHECKPOINT,
                           "%s: tensor %s is not %s [%lld], as the tensors that this run trains "
                           "need it",
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
    if (st == BL_OK) st = adapter_spans_create(&r->layout, r->set, rank, &r->spans[rank]);
    return st == BL_OK ? check_file(r->files[rank], &r->spans[rank]) : st;
}

static bl_status open_files(bl_adapter_full_reader *r, const char *dir, int n_ranks)
{
    BL_TRY(bl_model_layout_trained(r->config, n_ranks, &r->layout));
    r->files = calloc((size_t)n_ranks, sizeof *r->files);
    r->spans = calloc((size_t)n_ranks, sizeof *r->spans);
    if (!r->files || !r->spans)
        return BL_FAIL(BL_ENOMEM, "%s: the shards of %d ranks", dir, n_ranks);
    for (int i = 0; i < n_ranks; i++) BL_TRY(open_file(r, dir, i));
    return BL_OK;
}

bl_status bl_adapter_full_open(const bl_model_config *config, const bl_trained_set *set,
                               const char *dir, int n_ranks, bl_adapter_full_reader **out)
{
    bl_adapter_full_reader *r = calloc(1, sizeof *r);

    *out = NULL;
    if (!r) return BL_FAIL(BL_ENOMEM, "%s: the shards of %d ranks", dir, n_ranks);
    r->config = config;
    r->set = set;
    bl_status st = open_files(r, dir, n_ranks);
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
    for (int i = 0; r->spans && i < r->layout.n_shards; i++) adapter_spans_free(&r->spans[i]);
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

void adapter_full_place(const bl_model_config *config, const bl_arch_tensor *tensor, int64_t *unit,
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

/* Trained floats of vectors before this one. */
static int64_t trained_before(const bl_trained_set *set, int64_t offset)
{
    int64_t n = 0;

    for (int64_t i = 0; i < set->n_ranges && set->range[i].begin < offset; i++)
        n += bl_min_i64(set->range[i].n, offset - set->range[i].begin);
    return n;
}

static bl_status read_rows(const bl_adapter_full_reader *r, const bl_arch_tensor *tensor,
                           int64_t begin, int64_t end, float *dst)
{
    int64_t unit, row;
    int matrix;

    adapter_full_place(r->config, tensor, &unit, &matrix, &row);
    int64_t shard_rows = r->layout.units[unit].matrix[matrix].part[0].shard_rows,
            row_bytes = r->layout.units[unit].matrix[matrix].part[0].row_bytes;
    for (int64_t at = row + begin, n; at < row + end; at += n) {
        int64_t rank = at / shard_rows;
        const adapter_span *span = adapter_span_at(&r->spans[rank], unit, matrix, at);
        const bl_stored_tensor *t = bl_safetensors_find(r->files[rank], tensor_names[WEIGHTS]);
        if (!span) return BL_FAIL(BL_EINTERNAL, "%s is read, and frozen", tensor->name);
        n = bl_min_i64(row + end, span->row + span->n_rows) - at;
        BL_TRY(bl_stored_tensor_read(t, span->file_first * FLOAT + (at - span->row) * row_bytes,
                                     (size_t)(n * row_bytes), dst));
        dst += n * row_bytes / FLOAT;
    }
    return BL_OK;
}

bl_status bl_adapter_full_read(bl_adapter_full_reader *r, const bl_arch_tensor *tensor,
                               int64_t begin, int64_t end, float *dst)
{
    if (tensor->role != BL_ROLE_VECTOR) return as_checkpoint(read_rows(r, tensor, begin, end, dst));
    const bl_stored_tensor *t = bl_safetensors_find(r->files[0], tensor_names[VECTORS + WEIGHTS]);
    int64_t first = trained_before(r->set, tensor->offset) + begin;
    if (!t) return BL_FAIL(BL_EINTERNAL, "%s is read, and frozen", tensor->name);
    return as_checkpoint(
        bl_stored_tensor_read(t, first * FLOAT, (size_t)((end - begin) * FLOAT), dst));
}

/* ---- resuming ---- */

/* The rows of a span that a span of rank `old` of those that wrote has, too. */
static bl_status load_common(const bl_adapter_state *s, const bl_adapter_full_reader *r, int old,
                             const adapter_span *span, const adapter_span *from)
{
    int64_t cols = span->at.part->row_bytes / FLOAT, first = bl_max_i64(span->row, from->row),
            last = bl_min_i64(bl_min_i64(span->row + span->n_rows, from->row + from->n_rows),
                              span->at.part->rows);
    int64_t source = from->file_first + (first - from->row) * cols;

    for (int i = 0; i < VECTORS && first < last; i++)
        BL_TRY(adapter_units_load(s->trained->units, span, (adapter_array)i,
                                  (first - span->row) * cols, (last - first) * cols,
                                  bl_safetensors_find(r->files[old], tensor_names[i]), source,
                                  s->staging));
    return BL_OK;
}

static bl_status load_span(const bl_adapter_state *s, const bl_adapter_full_reader *r, int old,
                           const adapter_span *span)
{
    const adapter_spans *spans = &r->spans[old];
    int64_t unit = span->at.idx_unit;

    for (int64_t i = spans->first[unit]; i < spans->first[unit + 1]; i++)
        if (spans->span[i].at.idx_matrix == span->at.idx_matrix && spans->span[i].idx == span->idx)
            BL_TRY(load_common(s, r, old, span, &spans->span[i]));
    return BL_OK;
}

static bl_status load_vectors(const bl_adapter_state *s, const bl_safetensors *file)
{
    const adapter_full *f = s->trained;

    for (int which = 0; which < N_ARRAYS; which++)
        for (int64_t i = 0, before = 0; i < f->set->n_ranges; before += f->set->range[i++].n)
            BL_TRY(adapter_load_bytes(s->staging,
                                      bl_safetensors_find(file, tensor_names[VECTORS + which]),
                                      before * FLOAT, (size_t)(f->set->range[i].n * FLOAT),
                                      vector_array(f, (size_t)which, i, before)));
    return BL_OK;
}

static bl_status load_all(const bl_adapter_state *s, const bl_adapter_full_reader *r)
{
    const adapter_spans *spans = &s->trained->spans;

    for (int old = 0; old < r->layout.n_shards; old++)
        for (int64_t i = 0; i < spans->n; i++) BL_TRY(load_span(s, r, old, &spans->span[i]));
    return load_vectors(s, r->files[0]);
}

bl_status adapter_full_read_shards(bl_adapter_state *s, const char *dir, int n_ranks)
{
    bl_adapter_full_reader *r;

    BL_TRY(bl_adapter_full_open(s->trained->config, s->trained->set, dir, n_ranks, &r));
    bl_status st = load_all(s, r);
    bl_adapter_full_close(r);
    if (st != BL_OK) return as_checkpoint(st);
    BL_TRY(adapter_full_round(s));
    return bl_adapter_state_publish(s);
}
