/* SPDX-License-Identifier: Apache-2.0 */
/* shards.c -- the state of each rank in a file: m, v, w, F32 [n_layers, c]. Row l of rank R's file
 * holds floats [R c, (R+1) c) of layer l's flat vector (arch/lora.h). In a stacked layout the
 * tensors are m_stacked, v_stacked, w_stacked. Rank 0's file also has the state of modules_to_save
 * and then of LoRA terms of the embedding and the head: m_modules, v_modules, w_modules, F32 [n].
 * Runs with another number of ranks or the other layout
 * read their parts from all files, as does the writer of the checkpoint's PEFT adapter. */
#include <stdio.h>
#include <stdlib.h>

#include "base/files.h"
#include "base/sizes.h"
#include "adapter/lora_io.h"
#include "store/safetensors.h"
#include "adapter/internal.h"

enum { N_ARRAYS = 3, WEIGHTS = 2 };

static const char *const array_names[2][N_ARRAYS] = {{"m", "v", "w"},
                                                     {"m_stacked", "v_stacked", "w_stacked"}};

static float *state_array(const bl_adapter_state *s, int which)
{
    return which == 0 ? s->m : which == 1 ? s->v : s->w;
}

int64_t bl_adapter_checkpoint_bytes(const bl_lora_layout *layout, const bl_model_config *config,
                                    const bl_trained_set *modules)
{
    int64_t n = config->n_layers * layout->n_floats;

    n += adapter_modules_floats(config, modules) + layout->n_table_floats;
    return (N_ARRAYS + 1) * n * (int64_t)sizeof(float);
}

void bl_adapter_shard_name(int rank, int n_ranks, char name[BL_SHARD_NAME_BYTES])
{
    snprintf(name, BL_SHARD_NAME_BYTES, "state-%05d-of-%05d.safetensors", rank, n_ranks);
}

/* ---- writing ---- */

bl_status adapter_append_bytes(bl_safetensors_writer *writer, bl_staging *staging,
                               const void *memory, size_t n_bytes)
{
    for (size_t at = 0, n; at < n_bytes; at += n) {
        n = (size_t)bl_min_i64((int64_t)staging->n_bytes, (int64_t)(n_bytes - at));
        BL_TRY(bl_staging_download(staging, staging->bytes, (const char *)memory + at, n));
        BL_TRY(bl_safetensors_writer_append(writer, staging->bytes, n));
    }
    return BL_OK;
}

/* Array i of the file: first the arrays of LoRA, then those of modules_to_save. */
static bl_status append_array(const bl_adapter_state *s, size_t i, bl_safetensors_writer *writer)
{
    if (i < N_ARRAYS)
        return adapter_append_bytes(writer, s->staging, state_array(s, (int)i),
                                    (size_t)s->n_floats * sizeof(float));
    return adapter_modules_append(s->modules, (adapter_module_array)(i - N_ARRAYS), s->staging,
                                  writer);
}

bl_status bl_adapter_state_write_shard(bl_adapter_state *s, const char *path)
{
    bl_stored_tensor_spec specs[N_ARRAYS + MODULES_ARRAYS];
    bl_safetensors_writer *writer = NULL;
    bl_status st = BL_OK;
    size_t n = N_ARRAYS;

    if (s->trained) return adapter_full_write_shard(s, path);
    for (int i = 0; i < N_ARRAYS; i++)
        specs[i] = (bl_stored_tensor_spec){
            array_names[s->layout->is_stacked][i], BL_F32, 2, {s->n_layers, s->chunk}};
    for (int i = 0; s->modules && bl_comm_rank(s->world) == 0 && i < MODULES_ARRAYS; i++)
        specs[n++] = (bl_stored_tensor_spec){
            adapter_module_names[i], BL_F32, 1, {adapter_modules_count(s->modules)}};
    BL_TRY(bl_safetensors_create(path, specs, n, NULL, 0, &writer));
    for (size_t i = 0; i < n; i++)
        BL_TRY_GOTO(st, done, append_array(s, bl_safetensors_writer_order(writer)[i], writer));
    st = bl_safetensors_writer_commit(writer);
    writer = NULL;
done:
    bl_safetensors_writer_abort(writer);
    return st;
}

/* ---- reading ---- */

bl_status adapter_load_bytes(bl_staging *staging, const bl_stored_tensor *t, int64_t offset,
                             size_t n_bytes, void *memory)
{
    for (size_t at = 0, n; at < n_bytes; at += n) {
        n = (size_t)bl_min_i64((int64_t)staging->n_bytes, (int64_t)(n_bytes - at));
        BL_TRY(bl_stored_tensor_read(t, offset + (int64_t)at, n, staging->bytes));
        BL_TRY(bl_staging_upload(staging, (char *)memory + at, staging->bytes, n));
    }
    return BL_OK;
}

/* A file of the shards that are read: rank `rank`'s, of `chunk` floats per layer in the order of
 * `layout`. */
typedef struct source {
    bl_safetensors *file;
    int rank;
    int64_t chunk;
    bl_lora_layout layout;
} source;

/* Which order the file is in, and that its tensors have the shapes for it. */
static bl_status check_file(source *in, int64_t n_layers)
{
    bool is_stacked = bl_safetensors_find(in->file, array_names[true][0]) != NULL;

    bl_lora_layout_stack(&in->layout, is_stacked);
    for (int i = 0; i < N_ARRAYS; i++) {
        const char *name = array_names[is_stacked][i];
        const bl_stored_tensor *t = bl_safetensors_find(in->file, name);
        if (!t || t->dtype != BL_F32 || t->n_dims != 2 || t->shape[0] != n_layers ||
            t->shape[1] != in->chunk)
            return BL_FAIL(BL_ECHECKPOINT, "%s: tensor %s is not F32 [%lld, %lld]",
                           bl_safetensors_path(in->file), name, (long long)n_layers,
                           (long long)in->chunk);
    }
    return BL_OK;
}

/* out->file is to be closed after a failure, too. */
static bl_status open_source(const bl_lora_layout *layout, int64_t n_layers, const char *dir,
                             int rank, int n_ranks, source *out)
{
    char name[BL_SHARD_NAME_BYTES], *path = NULL;

    *out =
        (source){.rank = rank, .chunk = bl_ceil_div(layout->n_floats, n_ranks), .layout = *layout};
    bl_adapter_shard_name(rank, n_ranks, name);
    BL_TRY(bl_path_join(dir, name, &path));
    bl_status st = bl_safetensors_open(path, &out->file);
    free(path);
    return st == BL_OK ? check_file(out, n_layers) : st;
}

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
            BL_TRY(adapter_load_bytes(
                s->staging, t, (l * in->chunk + from + first - old_begin) * (int64_t)sizeof(float),
                (size_t)(last - first) * sizeof(float),
                state_array(s, i) + l * s->chunk + to + first - begin));
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

static bl_status load_file(const bl_adapter_state *s, const char *dir, int old, int n_old)
{
    source in;

    bl_status st = open_source(s->layout, s->n_layers, dir, old, n_old, &in);
    if (st == BL_OK) st = load_from(s, &in);
    if (st == BL_OK && old == 0 && s->modules)
        st = adapter_modules_load(s->modules, in.file, s->staging);
    bl_safetensors_close(in.file);
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
    if (s->trained) return adapter_full_read_shards(s, dir, n_ranks);
    for (int old = 0; old < n_ranks; old++) BL_TRY(load_file(s, dir, old, n_ranks));
    BL_TRY(clear_past_end(s));
    return bl_adapter_state_publish(s);
}

/* ---- the adapter in a checkpoint ---- */

/* The checkpoint files that an adapter is made from. */
typedef struct export_sources {
    source *ranks;
    const bl_model_config *config;
    const bl_trained_set *modules; /* may be empty */
} export_sources;

/* Floats [begin, begin + n) of the arrays in rank 0's file. */
static bl_status read_whole(const export_sources *from, int64_t begin, int64_t n, float *dst)
{
    const bl_safetensors *file = from->ranks[0].file;
    const bl_stored_tensor *w = bl_safetensors_find(file, adapter_module_names[MODULES_W]);

    if (!w || w->dtype != BL_F32)
        return BL_FAIL(BL_EINPUT, "%s: it has no tensor %s", bl_safetensors_path(file),
                       adapter_module_names[MODULES_W]);
    return bl_stored_tensor_read(w, begin * (int64_t)sizeof(float), (size_t)n * sizeof(float), dst);
}

/* adapter_term_read_fn: the tables' vector is behind the modules. */
static bl_status read_terms(void *user, int64_t begin, int64_t n, float *dst)
{
    const export_sources *from = user;
    return read_whole(from, adapter_modules_floats(from->config, from->modules) + begin, n, dst);
}

static bl_status read_table_factor(export_sources *from, int module, bl_peft_factor factor,
                                   float *dst)
{
    int64_t n =
        bl_max_i64(BL_STAGING_BYTES / (int64_t)sizeof(float), from->ranks->layout.options.r);
    float *piece = malloc((size_t)n * sizeof *piece);

    if (!piece) return BL_FAIL(BL_ENOMEM, "%lld floats of a factor", (long long)n);
    bl_status st =
        adapter_term_to_peft(&from->ranks->layout, module, factor, read_terms, from, piece, n, dst);
    free(piece);
    return st;
}

/* Reads a factor from the shards that hold its floats. */
static bl_status read_factor(void *user, int64_t layer, int module, bl_peft_factor factor,
                             float *dst)
{
    const source *sources = ((const export_sources *)user)->ranks;
    const bl_lora_layout *layout = &sources->layout;

    if (adapter_is_table(module)) return read_table_factor(user, module, factor, dst);
    int64_t r = layout->options.r, chunk = sources->chunk,
            begin = factor == BL_PEFT_A ? layout->a_offset[module] : layout->b_offset[module],
            end =
                begin + r * (factor == BL_PEFT_A ? layout->a_cols[module] : layout->b_rows[module]);

    for (int64_t at = begin, n; at < end; at += n, dst += n) {
        const source *in = &sources[at / chunk];
        const bl_stored_tensor *w =
            bl_safetensors_find(in->file, array_names[in->layout.is_stacked][WEIGHTS]);
        n = bl_min_i64(end, (in->rank + 1) * chunk) - at;
        BL_TRY(bl_stored_tensor_read(w, (layer * chunk + at % chunk) * (int64_t)sizeof(float),
                                     (size_t)n * sizeof(float), dst));
    }
    return BL_OK;
}

/* bl_peft_fill_saved_fn: from rank 0's file. */
static bl_status read_module(void *user, const char *tensor, int64_t begin, int64_t n, float *dst)
{
    const export_sources *from = user;
    bl_arch_tensor t;

    if (!bl_trained_find(from->config, from->modules, tensor, &t))
        return BL_FAIL(BL_EINTERNAL, "%s is not trained", tensor);
    return read_whole(from, adapter_modules_before(from->config, from->modules, &t) + begin, n,
                      dst);
}

bl_status bl_adapter_export_shards(const bl_lora_layout *layout, const bl_saved_modules *modules,
                                   const bl_model_config *config, const char *shards, int n_ranks,
                                   const char *dir, const char *base_model, bool bf16)
{
    bl_peft_config peft = bl_lora_peft_config(&layout->options);
    bl_peft_base base = bl_lora_peft_base(config);
    source *sources = calloc((size_t)n_ranks, sizeof *sources);
    export_sources from = {sources, config, &modules->set};
    bl_status st = BL_OK;

    peft.saved = modules->names;
    if (!sources) return BL_FAIL(BL_ENOMEM, "%s: the shards of %d ranks", shards, n_ranks);
    for (int i = 0; st == BL_OK && i < n_ranks; i++)
        st = open_source(layout, config->n_layers, shards, i, n_ranks, &sources[i]);
    if (st == BL_OK)
        st = bl_peft_write(dir, &peft, &base, base_model, bf16 ? BL_BF16 : BL_F32, read_factor,
                           read_module, &from);
    if (st == BL_EINPUT) st = BL_ECHECKPOINT;
    for (int i = 0; i < n_ranks; i++) bl_safetensors_close(sources[i].file);
    free(sources);
    return st;
}
