/* SPDX-License-Identifier: Apache-2.0 */
/* shards.c -- the state of each rank in a file: m, v, w, F32 [n_layers, c]. Row l of rank
 * R's holds floats [R c, (R+1) c) of layer l's flat vector (arch/lora.h). Of a stacked layout the
 * tensors are m_stacked, v_stacked, w_stacked. Another number of ranks, and ranks with the other
 * layout, read their parts out of them. */
#include <stdio.h>
#include <stdlib.h>

#include "base/files.h"
#include "base/sizes.h"
#include "store/safetensors.h"
#include "adapter/internal.h"

enum { N_ARRAYS = BL_CHECKPOINT_ARRAYS };

static const char *const array_names[2][N_ARRAYS] = {{"m", "v", "w"},
                                                     {"m_stacked", "v_stacked", "w_stacked"}};

static float *state_array(const bl_adapter_state *s, int which)
{
    return which == 0 ? s->m : which == 1 ? s->v : s->w;
}

int64_t bl_adapter_checkpoint_bytes(const bl_lora_layout *layout, int64_t n_layers)
{
    return BL_CHECKPOINT_ARRAYS * n_layers * layout->n_floats * (int64_t)sizeof(float);
}

void bl_adapter_shard_name(int rank, int n_ranks, char name[BL_SHARD_NAME_BYTES])
{
    snprintf(name, BL_SHARD_NAME_BYTES, "state-%05d-of-%05d.safetensors", rank, n_ranks);
}

/* ---- writing ---- */

/* Shard by shard through the staging buffer. */
static bl_status append_array(bl_safetensors_writer *writer, const bl_adapter_state *s, int which)
{
    size_t total = (size_t)(s->n_layers * s->chunk) * sizeof(float), n;

    for (size_t at = 0; at < total; at += n) {
        n = (size_t)bl_min_i64((int64_t)s->staging->n_bytes, (int64_t)(total - at));
        BL_TRY(bl_staging_download(s->staging, s->staging->bytes,
                                   (const char *)state_array(s, which) + at, n));
        BL_TRY(bl_safetensors_writer_append(writer, s->staging->bytes, n));
    }
    return BL_OK;
}

bl_status bl_adapter_state_write_shard(bl_adapter_state *s, const char *path)
{
    bl_stored_tensor_spec specs[N_ARRAYS];
    bl_safetensors_writer *writer = NULL;
    bl_status st = BL_OK;

    for (int i = 0; i < N_ARRAYS; i++)
        specs[i] = (bl_stored_tensor_spec){
            array_names[s->layout->is_stacked][i], BL_F32, 2, {s->n_layers, s->chunk}};
    BL_TRY(bl_safetensors_create(path, specs, N_ARRAYS, NULL, 0, &writer));
    for (int i = 0; i < N_ARRAYS; i++)
        BL_TRY_GOTO(st, done, append_array(writer, s, (int)bl_safetensors_writer_order(writer)[i]));
    st = bl_safetensors_writer_commit(writer);
    writer = NULL;
done:
    bl_safetensors_writer_abort(writer);
    return st;
}

/* ---- reading ---- */

/* Bytes [offset, offset + n_bytes) of a tensor's to device memory. */
static bl_status load_bytes(bl_staging *staging, const bl_stored_tensor *t, int64_t offset,
                            size_t n_bytes, char *memory)
{
    for (size_t at = 0, n; at < n_bytes; at += n) {
        n = (size_t)bl_min_i64((int64_t)staging->n_bytes, (int64_t)(n_bytes - at));
        BL_TRY(bl_stored_tensor_read(t, offset + (int64_t)at, n, staging->bytes));
        BL_TRY(bl_staging_upload(staging, memory + at, staging->bytes, n));
    }
    return BL_OK;
}

/* A file of the shards that are read: rank `rank`'s, of `chunk` floats per layer in the order of
 * `layout`. */
typedef struct source {
    const bl_safetensors *file;
    int rank;
    int64_t chunk;
    bl_lora_layout layout;
} source;

/* Of the n floats that begin at `from` in the file's order and at `to` in this state's: those that
 * both the file's rank and this one hold. */
static bl_status load_piece(const bl_adapter_state *s, const source *in, int64_t from, int64_t to,
                            int64_t n)
{
    int64_t begin = bl_comm_rank(s->world) * s->chunk, old_begin = in->rank * in->chunk;
    /* Counted from the piece's start. */
    int64_t first = bl_max_i64(bl_max_i64(0, begin - to), old_begin - from),
            last = bl_min_i64(bl_min_i64(n, begin + s->chunk - to), old_begin + in->chunk - from);

    for (int i = 0; i < N_ARRAYS && first < last; i++) {
        const bl_stored_tensor *t =
            bl_safetensors_find(in->file, array_names[in->layout.is_stacked][i]);
        for (int64_t l = 0; l < s->n_layers; l++)
            BL_TRY(load_bytes(s->staging, t,
                              (l * in->chunk + from + first - old_begin) * (int64_t)sizeof(float),
                              (size_t)(last - first) * sizeof(float),
                              (char *)(state_array(s, i) + l * s->chunk + to + first - begin)));
    }
    return BL_OK;
}

/* In one order a layer's vector is one piece, padding included; else each factor is. */
static bl_status load_from(const bl_adapter_state *s, const source *in)
{
    const bl_lora_layout *old = &in->layout, *now = s->layout;
    int64_t r = now->options.r;

    if (old->is_stacked == now->is_stacked)
        return load_piece(s, in, 0, 0, INT64_MAX / (int64_t)sizeof(float));
    for (int p = 0; p < now->arch->n_projections; p++) {
        if (now->a_offset[p] < 0) continue;
        BL_TRY(load_piece(s, in, old->a_offset[p], now->a_offset[p], r * now->a_cols[p]));
        BL_TRY(load_piece(s, in, old->b_offset[p], now->b_offset[p], r * now->b_rows[p]));
    }
    return BL_OK;
}

/* Which order the file is in, and that its tensors have the shapes for it. */
static bl_status check_file(const bl_adapter_state *s, source *in)
{
    bool is_stacked = bl_safetensors_find(in->file, array_names[true][0]) != NULL;

    in->layout = *s->layout;
    bl_lora_layout_stack(&in->layout, is_stacked);
    for (int i = 0; i < N_ARRAYS; i++) {
        const char *name = array_names[is_stacked][i];
        const bl_stored_tensor *t = bl_safetensors_find(in->file, name);
        if (!t || t->dtype != BL_F32 || t->n_dims != 2 || t->shape[0] != s->n_layers ||
            t->shape[1] != in->chunk)
            return BL_FAIL(BL_ECHECKPOINT, "%s: tensor %s is not F32 [%lld, %lld]",
                           bl_safetensors_path(in->file), name, (long long)s->n_layers,
                           (long long)in->chunk);
    }
    return BL_OK;
}

static bl_status load_file(const bl_adapter_state *s, const char *dir, int old, int n_old)
{
    char name[BL_SHARD_NAME_BYTES], *path = NULL;
    bl_safetensors *file = NULL;

    bl_adapter_shard_name(old, n_old, name);
    BL_TRY(bl_path_join(dir, name, &path));
    bl_status st = bl_safetensors_open(path, &file);
    source in = {.file = file, .rank = old, .chunk = bl_ceil_div(s->layout->n_floats, n_old)};
    if (st == BL_OK) st = check_file(s, &in);
    if (st == BL_OK) st = load_from(s, &in);
    bl_safetensors_close(file);
    free(path);
    return st == BL_EINPUT ? BL_ECHECKPOINT : st;
}

/* Past the end of the flat vector another rank count has padding where this one has none. */
static bl_status clear_past_end(bl_adapter_state *s)
{
    int64_t begin = bl_comm_rank(s->world) * s->chunk,
            real = bl_min_i64(s->chunk, bl_max_i64(0, s->layout->n_floats - begin));

    for (int i = 0; i < N_ARRAYS; i++)
        for (int64_t l = 0; l < s->n_layers; l++)
            BL_TRY(bl_stream_zero(s->compute, state_array(s, i) + l * s->chunk + real,
                                  (size_t)(s->chunk - real) * sizeof(float)));
    return bl_stream_synchronize(s->compute);
}

bl_status bl_adapter_state_read_shards(bl_adapter_state *s, const char *dir, int n_ranks)
{
    for (int old = 0; old < n_ranks; old++) BL_TRY(load_file(s, dir, old, n_ranks));
    BL_TRY(clear_past_end(s));
    return bl_adapter_state_publish(s);
}
