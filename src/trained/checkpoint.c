/* SPDX-License-Identifier: Apache-2.0 */
/* checkpoint.c -- a rank's file of a checkpoint, without communication: m, v and w of the weights
 * that are sharded, and of those that every rank has whole (replicated_internal.h).
 * trained_array_names has the names of both.
 *
 *   LoRA   m, v, w  F32 [n_layers, c]: row l of rank R's file holds floats [R c, (R+1) c) of layer
 *                   l's flat vector (arch/lora.h), in the order of the layout. The replicated ones,
 *                   F32 [n], are in rank 0's file alone: modules_to_save, then terms of embedding
 *                   and head.
 *   full   m, v     F32 or BF16, w F32: the rank's spans one after the other. The replicated ones,
 *                   F32 [n], trained norms and biases, are in every rank's file. Empty arrays are
 *                   left out.
 *
 * lora_shards.c and full_shards.c read the files: a state of another number of ranks, or of the
 * other order, reads its part from all of them. */
#include <stdio.h>
#include <stdlib.h>

#include "trained/internal.h"
#include "base/files.h"
#include "base/sizes.h"

const char *const trained_array_names[TRAINED_FILE_KINDS][TRAINED_FILE_ARRAYS] = {
    [TRAINED_FILE_LORA] = {"m", "v", "w", "m_modules", "v_modules", "w_modules"},
    [TRAINED_FILE_STACKED] = {"m_stacked", "v_stacked", "w_stacked", "m_modules", "v_modules",
                              "w_modules"},
    [TRAINED_FILE_FULL] = {"m", "v", "w", "m_vectors", "v_vectors", "w_vectors"}};

void bl_trained_shard_name(int rank, int n_ranks, char name[BL_SHARD_NAME_BYTES])
{
    snprintf(name, BL_SHARD_NAME_BYTES, "state-%05d-of-%05d.safetensors", rank, n_ranks);
}

bl_status trained_open_shard(const char *dir, int rank, int n_ranks, bl_safetensors **out)
{
    char name[BL_SHARD_NAME_BYTES], *path = NULL;

    *out = NULL;
    bl_trained_shard_name(rank, n_ranks, name);
    BL_TRY(bl_path_join(dir, name, &path));
    bl_status st = bl_safetensors_open(path, out);
    free(path);
    return st;
}

bl_status trained_check_array(const bl_safetensors *file, const char *name, bl_dtype dtype,
                              int64_t rows, int64_t n)
{
    const bl_stored_tensor *t = bl_safetensors_find(file, name);
    int last = rows > 0 ? 1 : 0;
    char shape[64] = "";

    if (!t && n == 0) return BL_OK;
    if (t && t->dtype == dtype && t->n_dims == last + 1 && t->shape[last] == n &&
        (rows == 0 || t->shape[0] == rows))
        return BL_OK;
    if (rows > 0) snprintf(shape, sizeof shape, "%lld, ", (long long)rows);
    return BL_FAIL(BL_ECHECKPOINT,
                   "%s: tensor %s is not %s [%s%lld], as the tensors that this run trains need it",
                   bl_safetensors_path(file), name, bl_dtype_name(dtype), shape, (long long)n);
}

/* ---- pieces ---- */

static size_t piece_bytes(const bl_staging *staging, size_t n_left)
{
    return (size_t)bl_min_i64((int64_t)staging->n_bytes, (int64_t)n_left);
}

bl_status trained_put_bytes(bl_safetensors_writer *writer, size_t index, int64_t offset,
                            bl_staging *staging, const void *memory, size_t n_bytes)
{
    for (size_t at = 0, n; at < n_bytes; at += n) {
        n = piece_bytes(staging, n_bytes - at);
        BL_TRY(bl_staging_download(staging, staging->bytes, (const char *)memory + at, n));
        BL_TRY(bl_safetensors_writer_put(writer, index, offset + (int64_t)at, staging->bytes, n));
    }
    return BL_OK;
}

bl_status trained_load_bytes(bl_staging *staging, const bl_stored_tensor *t, int64_t offset,
                             size_t n_bytes, void *memory)
{
    for (size_t at = 0, n; at < n_bytes; at += n) {
        n = piece_bytes(staging, n_bytes - at);
        BL_TRY(bl_stored_tensor_read(t, offset + (int64_t)at, n, staging->bytes));
        BL_TRY(bl_staging_upload(staging, (char *)memory + at, staging->bytes, n));
    }
    return BL_OK;
}

/* ---- writing ---- */

/* False: this rank's file has no such array. */
static bool describe(const bl_trained_state *s, int i, bl_stored_tensor_spec *out)
{
    const trained_full *f = s->trained;
    trained_file_kind kind = f                       ? TRAINED_FILE_FULL
                             : s->layout->is_stacked ? TRAINED_FILE_STACKED
                                                     : TRAINED_FILE_LORA;
    const char *name = trained_array_names[kind][i];
    int64_t n = trained_replicated_floats(s->replicated);

    if (i >= TRAINED_FILE_REPLICATED) {
        *out = (bl_stored_tensor_spec){name, BL_F32, 1, {n}};
        return n > 0 && (f || bl_comm_rank(s->world) == 0);
    }
    if (!f) {
        int64_t rows = trained_lora_rows(s->layout, s->n_layers);
        *out = (bl_stored_tensor_spec){name, BL_F32, 1, {s->n_floats}};
        if (rows > 0) *out = (bl_stored_tensor_spec){name, BL_F32, 2, {rows, s->n_floats / rows}};
        return true;
    }
    bl_dtype dtype = i < TRAINED_W ? f->bytes.units.dtype : BL_F32;
    *out = (bl_stored_tensor_spec){name, dtype, 1, {f->spans.file_n}};
    return f->spans.file_n > 0;
}

static bl_status create_file(bl_trained_state *s, const char *path)
{
    bl_stored_tensor_spec specs[TRAINED_FILE_ARRAYS];
    size_t n = 0;

    for (int i = 0; i < TRAINED_FILE_ARRAYS; i++) {
        s->writing.spec[i] = n;
        s->writing.has[i] = describe(s, i, &specs[n]);
        n += s->writing.has[i];
    }
    return bl_safetensors_create(path, specs, n, NULL, 0, &s->writing.writer);
}

static void abort_file(bl_trained_state *s)
{
    bl_safetensors_writer_abort(s->writing.writer);
    s->writing.writer = NULL;
}

/* trained_units_file.first */
static bl_status put_replicated(void *user, bl_staging *staging)
{
    const bl_trained_state *s = user;

    for (int i = TRAINED_FILE_REPLICATED; i < TRAINED_FILE_ARRAYS; i++)
        if (s->writing.has[i])
            BL_TRY(trained_replicated_put(s->replicated, i - TRAINED_FILE_REPLICATED, staging,
                                          s->writing.writer, s->writing.spec[i]));
    return BL_OK;
}

/* trained_units_file.end */
static bl_status end_file(void *user)
{
    bl_trained_state *s = user;

    bl_status st = bl_safetensors_writer_commit(s->writing.writer);
    s->writing.writer = NULL;
    return st == BL_OK ? s->writing.then(s->writing.user) : st;
}

/* LoRA's state is small: it is written at once. */
static bl_status put_lora(bl_trained_state *s)
{
    const float *const arrays[] = {s->m, s->v, s->w};

    for (int i = 0; i < (int)BL_COUNT(arrays); i++)
        BL_TRY(trained_put_bytes(s->writing.writer, s->writing.spec[i], 0, s->staging, arrays[i],
                                 (size_t)s->n_floats * sizeof(float)));
    BL_TRY(put_replicated(s, s->staging));
    return end_file(s);
}

static bl_status begin_units(bl_trained_state *s)
{
    trained_units_file file = {
        .writer = s->writing.writer, .first = put_replicated, .end = end_file, .user = s};

    for (int i = 0; i < TRAINED_FILE_REPLICATED; i++) file.tensor[i] = s->writing.spec[i];
    return trained_units_begin_file(s->trained->units, &file);
}

bl_status bl_trained_state_begin_shard(bl_trained_state *s, const char *path,
                                       bl_status (*then)(void *user), void *user)
{
    BL_TRY(create_file(s, path));
    s->writing.then = then;
    s->writing.user = user;
    bl_status st = s->trained ? begin_units(s) : put_lora(s);
    if (st != BL_OK) bl_trained_state_drop_shard(s);
    return st;
}

bool bl_trained_state_shard_is_done(const bl_trained_state *s)
{
    return !s->trained || trained_units_file_is_done(s->trained->units);
}

bl_trained_shard_progress bl_trained_state_shard_progress(const bl_trained_state *s)
{
    if (!s->trained) return (bl_trained_shard_progress){.has_waiting = false};
    return trained_units_file_progress(s->trained->units);
}

bl_status bl_trained_state_end_shard(bl_trained_state *s)
{
    bl_status st = s->trained ? trained_units_end_file(s->trained->units) : BL_OK;
    abort_file(s);
    return st;
}

void bl_trained_state_drop_shard(bl_trained_state *s)
{
    if (s->trained && s->trained->units) trained_units_drop_file(s->trained->units);
    abort_file(s);
}

bl_stream *bl_trained_state_behind(const bl_trained_state *s)
{
    return s->trained ? trained_units_behind(s->trained->units) : NULL;
}

static bl_status nothing_more(void *user)
{
    (void)user;
    return BL_OK;
}

bl_status bl_trained_state_write_shard(bl_trained_state *s, const char *path)
{
    BL_TRY(bl_trained_state_begin_shard(s, path, nothing_more, NULL));
    return bl_trained_state_end_shard(s);
}

bl_status bl_trained_state_read_shards(bl_trained_state *s, const char *dir, int n_ranks)
{
    return s->trained ? trained_full_read_shards(s, dir, n_ranks)
                      : trained_lora_read_shards(s, dir, n_ranks);
}
