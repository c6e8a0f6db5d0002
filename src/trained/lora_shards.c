/* SPDX-License-Identifier: Apache-2.0 */
/* lora_shards.c -- reads the files of checkpoint.c for LoRA: a rank's part of any number of ranks'
 * files, in either order of a layout; and the PEFT adapter in them. */
#include <stdlib.h>

#include "trained/internal.h"
#include "trained/peft.h"
#include "base/sizes.h"
#include "store/safetensors.h"

enum { N_ARRAYS = TRAINED_FILE_REPLICATED };

static const char *array_name(const bl_lora_layout *layout, int i)
{
    return trained_array_names[layout->is_stacked ? TRAINED_FILE_STACKED : TRAINED_FILE_LORA][i];
}

static float *state_array(const bl_trained_state *s, int which)
{
    return which == 0 ? s->m : which == 1 ? s->v : s->w;
}

int64_t bl_adapter_checkpoint_bytes(const bl_lora_layout *layout, const bl_model_config *config,
                                    const bl_trained_set *modules)
{
    int64_t n = bl_lora_floats_before(layout, config->n_layers);

    n += trained_modules_floats(config, modules) + layout->n_table_floats;
    return (N_ARRAYS + 1) * n * (int64_t)sizeof(float);
}

int64_t trained_lora_rows(const bl_lora_layout *layout, int64_t n_layers)
{
    return bl_lora_floats_before(layout, n_layers) == n_layers * layout->n_floats ? n_layers : 0;
}

/* A file of the shards that are read: that of `rank` of n_ranks, in the order of `layout`. */
typedef struct source {
    bl_safetensors *file;
    int rank, n_ranks;
    bl_lora_layout layout;
} source;

/* Finds the file's order of weights, and checks that its tensors have the shapes for it. */
static bl_status check_file(source *in, int64_t n_layers)
{
    bool is_stacked =
        bl_safetensors_find(in->file, trained_array_names[TRAINED_FILE_STACKED][0]) != NULL;

    bl_lora_layout_stack(&in->layout, is_stacked);
    int64_t rows = trained_lora_rows(&in->layout, n_layers),
            n = bl_lora_chunks_before(&in->layout, n_layers, in->n_ranks);
    for (int i = 0; i < N_ARRAYS; i++)
        BL_TRY(trained_check_array(in->file, array_name(&in->layout, i), BL_F32, rows,
                                   rows > 0 ? n / rows : n));
    return BL_OK;
}

/* out->file is to be closed after a failure, too. */
static bl_status open_source(const bl_lora_layout *layout, int64_t n_layers, const char *dir,
                             int rank, int n_ranks, source *out)
{
    *out = (source){.rank = rank, .n_ranks = n_ranks, .layout = *layout};
    BL_TRY(trained_open_shard(dir, rank, n_ranks, &out->file));
    return check_file(out, n_layers);
}

/* Loads, of the n floats of layer l that begin at `from` in the file's order and at `to` in this
 * state's, those that both the file's rank and this one hold. */
static bl_status load_piece(const bl_trained_state *s, const source *in, int64_t l, int64_t from,
                            int64_t to, int64_t n)
{
    int64_t chunk = trained_chunk(s, l), begin = bl_comm_rank(s->world) * chunk,
            old = bl_lora_chunk(&in->layout, l, in->n_ranks), old_begin = in->rank * old,
            old_before = bl_lora_chunks_before(&in->layout, l, in->n_ranks);
    /* Counted from the piece's start. */
    int64_t first = bl_max_i64(bl_max_i64(0, begin - to), old_begin - from),
            last = bl_min_i64(bl_min_i64(n, begin + chunk - to), old_begin + old - from);

    for (int i = 0; i < N_ARRAYS && first < last; i++) {
        const bl_stored_tensor *t = bl_safetensors_find(in->file, array_name(&in->layout, i));
        BL_TRY(trained_load_bytes(
            s->staging, t, (old_before + from + first - old_begin) * (int64_t)sizeof(float),
            (size_t)(last - first) * sizeof(float),
            state_array(s, i) + trained_chunks_before(s, l) + to + first - begin));
    }
    return BL_OK;
}

/* If file and state have one order, a layer's vector is one piece, padding included; else each
 * factor is. */
static bl_status load_layer(const bl_trained_state *s, const source *in, int64_t l)
{
    const bl_lora_layout *old = &in->layout, *now = s->layout;

    if (old->is_stacked == now->is_stacked)
        return load_piece(s, in, l, 0, 0, INT64_MAX / (int64_t)sizeof(float));
    for (int p = 0; p < now->arch->n_projections; p++) {
        if (!bl_lora_has(now, l, p)) continue;
        BL_TRY(load_piece(s, in, l, old->a_offset[p], now->a_offset[p],
                          bl_lora_factor_floats(now, p, BL_PEFT_A)));
        BL_TRY(load_piece(s, in, l, old->b_offset[p], now->b_offset[p],
                          bl_lora_factor_floats(now, p, BL_PEFT_B)));
    }
    return BL_OK;
}

static bl_status load_from(const bl_trained_state *s, const source *in)
{
    for (int64_t l = 0; l < s->n_layers; l++) BL_TRY(load_layer(s, in, l));
    return BL_OK;
}

static bl_status load_replicated(const bl_trained_state *s, const bl_safetensors *file)
{
    int64_t n = trained_replicated_floats(s->replicated);

    for (int i = TRAINED_FILE_REPLICATED; n > 0 && i < TRAINED_FILE_ARRAYS; i++) {
        const char *name = array_name(s->layout, i);
        BL_TRY(trained_check_array(file, name, BL_F32, 0, n));
        BL_TRY(trained_replicated_load(s->replicated, i - TRAINED_FILE_REPLICATED, s->staging,
                                       bl_safetensors_find(file, name)));
    }
    return BL_OK;
}

static bl_status load_file(const bl_trained_state *s, const char *dir, int old, int n_old)
{
    source in;

    bl_status st = open_source(s->layout, s->n_layers, dir, old, n_old, &in);
    if (st == BL_OK) st = load_from(s, &in);
    if (st == BL_OK && old == 0) st = load_replicated(s, in.file);
    bl_safetensors_close(in.file);
    return st == BL_EINPUT ? BL_ECHECKPOINT : st;
}

/* Past the end of the flat vector another rank count has padding where this one has none. */
static bl_status clear_past_end(bl_trained_state *s)
{
    for (int64_t l = 0; l < s->n_layers; l++) {
        int64_t chunk = trained_chunk(s, l), begin = bl_comm_rank(s->world) * chunk,
                real = bl_min_i64(chunk, bl_max_i64(0, bl_lora_layer_floats(s->layout, l) - begin));
        for (int i = 0; i < N_ARRAYS; i++)
            BL_TRY(bl_stream_zero(s->compute,
                                  state_array(s, i) + trained_chunks_before(s, l) + real,
                                  (size_t)(chunk - real) * sizeof(float)));
    }
    return bl_stream_synchronize(s->compute);
}

bl_status trained_lora_read_shards(bl_trained_state *s, const char *dir, int n_ranks)
{
    for (int old = 0; old < n_ranks; old++) BL_TRY(load_file(s, dir, old, n_ranks));
    BL_TRY(clear_past_end(s));
    return bl_trained_state_publish(s);
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
    const char *name = array_name(&from->ranks->layout, TRAINED_FILE_REPLICATED + REPLICATED_W);
    const bl_stored_tensor *w = bl_safetensors_find(file, name);

    if (!w || w->dtype != BL_F32)
        return BL_FAIL(BL_EINPUT, "%s: tensor %s is missing", bl_safetensors_path(file), name);
    return bl_stored_tensor_read(w, begin * (int64_t)sizeof(float), (size_t)n * sizeof(float), dst);
}

/* trained_term_read_fn: the tables' vector is behind the modules. */
static bl_status read_terms(void *user, int64_t begin, int64_t n, float *dst)
{
    const export_sources *from = user;
    return read_whole(from, trained_modules_floats(from->config, from->modules) + begin, n, dst);
}

static bl_status read_table_factor(export_sources *from, int module, bl_peft_factor factor,
                                   float *dst)
{
    int64_t n =
        bl_max_i64(BL_STAGING_BYTES / (int64_t)sizeof(float), from->ranks->layout.options.r);
    float *piece = malloc((size_t)n * sizeof *piece);

    if (!piece) return BL_FAIL(BL_ENOMEM, "%lld floats of a factor", (long long)n);
    bl_status st =
        trained_term_to_peft(&from->ranks->layout, module, factor, read_terms, from, piece, n, dst);
    free(piece);
    return st;
}

/* Reads a factor from the shards that hold its floats. */
static bl_status read_factor(void *user, int64_t layer, int module, bl_peft_factor factor,
                             float *dst)
{
    const source *sources = ((const export_sources *)user)->ranks;
    const bl_lora_layout *layout = &sources->layout;

    if (trained_is_table(module)) return read_table_factor(user, module, factor, dst);
    int64_t chunk = bl_lora_chunk(layout, layer, sources->n_ranks),
            before = bl_lora_chunks_before(layout, layer, sources->n_ranks),
            begin = factor == BL_PEFT_A ? layout->a_offset[module] : layout->b_offset[module],
            end = begin + bl_lora_factor_floats(layout, module, factor);

    for (int64_t at = begin, n; at < end; at += n, dst += n) {
        const source *in = &sources[at / chunk];
        const bl_stored_tensor *w =
            bl_safetensors_find(in->file, array_name(&in->layout, TRAINED_W));
        n = bl_min_i64(end, (in->rank + 1) * chunk) - at;
        BL_TRY(bl_stored_tensor_read(w, (before + at % chunk) * (int64_t)sizeof(float),
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
    return read_whole(from, trained_modules_before(from->config, from->modules, &t) + begin, n,
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
