/* SPDX-License-Identifier: Apache-2.0 */
/* peft_write.c -- writes an adapter. */
#include <stdio.h>
#include <stdlib.h>

#include "base/files.h"
#include "base/sizes.h"
#include "store/peft_experts_internal.h"

enum { ROUND_PIECE = 1 << 14, SAVED_PIECE = 1 << 20 };

static bl_status write_factor(bl_safetensors_writer *writer, bl_dtype dtype, const float *values,
                              size_t n_values)
{
    uint16_t halves[ROUND_PIECE];

    if (dtype == BL_F32)
        return bl_safetensors_writer_append(writer, values, n_values * sizeof *values);
    while (n_values > 0) {
        size_t n = n_values < ROUND_PIECE ? n_values : ROUND_PIECE;
        for (size_t i = 0; i < n; i++) halves[i] = bl_f32_to_bf16(values[i]);
        BL_TRY(bl_safetensors_writer_append(writer, halves, n * sizeof *halves));
        values += n;
        n_values -= n;
    }
    return BL_OK;
}

/* The functions that provide the values of a file. */
typedef struct filler {
    bl_peft_fill_fn factor;
    bl_peft_fill_saved_fn saved;
    void *arg;
} filler;

static size_t count_values(const bl_stored_tensor_spec *spec)
{
    return (size_t)(spec->shape[0] * (spec->n_dims > 1 ? spec->shape[1] : 1));
}

/* Writes a tensor of modules_to_save, piece by piece. */
static bl_status write_saved(bl_safetensors_writer *writer, bl_dtype dtype,
                             const bl_stored_tensor_spec *spec, const filler *fill, float *values)
{
    int64_t n_values = (int64_t)count_values(spec);

    for (int64_t begin = 0, n; begin < n_values; begin += n) {
        n = bl_min_i64(SAVED_PIECE, n_values - begin);
        BL_TRY(fill->saved(fill->arg, spec->name + sizeof PEFT_PREFIX - 1, begin, n, values));
        BL_TRY(write_factor(writer, dtype, values, (size_t)n));
    }
    return BL_OK;
}

/* The factors of a layer's routed experts that have been filled. */
typedef struct expert_factors {
    const bl_peft_config *config;
    const bl_peft_base *base;
    int64_t layer;
    float *values[BL_PEFT_MAX_ROUTED][2], *scratch;
} expert_factors;

static void forget_experts(expert_factors *experts)
{
    for (int i = 0; i < BL_PEFT_MAX_ROUTED; i++)
        for (int f = 0; f < 2; f++) {
            free(experts->values[i][f]);
            experts->values[i][f] = NULL;
        }
    free(experts->scratch);
    experts->scratch = NULL;
}

/* A tensor of routed experts. */
static bl_status write_expert(bl_safetensors_writer *writer, bl_dtype dtype,
                              const peft_factor_id *id, size_t n_values, const filler *fill,
                              expert_factors *experts)
{
    const bl_peft_base *base = experts->base;
    size_t n = (size_t)store_peft_expert_values(experts->config, base, id->module, id->factor);

    if (experts->layer != id->layer) forget_experts(experts);
    experts->layer = id->layer;
    float **factor = &experts->values[id->module - base->modules.n][id->factor];
    if (!*factor) {
        *factor = malloc(n * sizeof **factor);
        if (!*factor) return BL_FAIL(BL_ENOMEM, "experts' factors of %zu values", n);
        BL_TRY(fill->factor(fill->arg, id->layer, id->module, id->factor, *factor));
    }
    free(experts->scratch);
    experts->scratch = malloc(n * sizeof(float));
    if (!experts->scratch) return BL_FAIL(BL_ENOMEM, "experts' factors of %zu values", n);
    return write_factor(
        writer, dtype,
        store_peft_pick_expert(experts->config, base, &id->expert, *factor, experts->scratch),
        n_values);
}

static bl_status write_tensors(bl_safetensors_writer *writer, const peft_factors *list,
                               bl_dtype dtype, const filler *fill, expert_factors *experts)
{
    bl_status st = BL_OK;
    const size_t *order = bl_safetensors_writer_order(writer);
    size_t max_values = 1;

    for (size_t i = 0; i < list->n; i++) {
        size_t n_values = count_values(&list->specs[i]);
        if (list->ids[i].is_saved && n_values > SAVED_PIECE) n_values = SAVED_PIECE;
        if (n_values > max_values) max_values = n_values;
    }
    float *values = calloc(max_values, sizeof *values);
    if (!values) return BL_FAIL(BL_ENOMEM, "an adapter's factor of %zu values", max_values);
    for (size_t i = 0; i < list->n; i++) {
        const peft_factor_id *id = &list->ids[order[i]];
        const bl_stored_tensor_spec *spec = &list->specs[order[i]];
        if (id->is_saved) {
            BL_TRY_GOTO(st, done, write_saved(writer, dtype, spec, fill, values));
            continue;
        }
        if (bl_peft_is_routed(&experts->base->modules, id->module)) {
            BL_TRY_GOTO(st, done,
                        write_expert(writer, dtype, id, count_values(spec), fill, experts));
            continue;
        }
        BL_TRY_GOTO(st, done, fill->factor(fill->arg, id->layer, id->module, id->factor, values));
        BL_TRY_GOTO(st, done, write_factor(writer, dtype, values, count_values(spec)));
    }
done:
    forget_experts(experts);
    free(values);
    return st;
}

bl_status bl_peft_write(const char *dir, const bl_peft_config *config, const bl_peft_base *base,
                        const char *base_name, bl_dtype dtype, bl_peft_fill_fn fill,
                        bl_peft_fill_saved_fn fill_saved, void *arg)
{
    static const char *const metadata[] = {"format", "pt"};
    bl_status st = BL_OK;
    peft_factors list = {0};
    char *path = NULL;
    bl_safetensors_writer *writer = NULL;
    bl_peft_base nested = *base;
    expert_factors experts = {.config = config, .base = &nested};

    bl_peft_nest(&nested.modules, config->targets);
    if (dtype != BL_F32 && dtype != BL_BF16)
        return BL_FAIL(BL_EINTERNAL, "an adapter of %s", bl_dtype_name(dtype));
    BL_TRY_GOTO(st, done, bl_path_join(dir, BL_PEFT_MODEL_NAME, &path));
    BL_TRY_GOTO(st, done, store_peft_list_factors(dir, config, &nested, dtype, &list));
    BL_TRY_GOTO(st, done, bl_safetensors_create(path, list.specs, list.n, metadata, 1, &writer));
    BL_TRY_GOTO(st, done,
                write_tensors(writer, &list, dtype, &(filler){fill, fill_saved, arg}, &experts));
    st = bl_safetensors_writer_commit(writer);
    writer = NULL;
    if (st == BL_OK) st = bl_peft_write_config(dir, &base->modules, config, base_name);
done:
    bl_safetensors_writer_abort(writer);
    store_peft_factors_free(&list);
    free(path);
    return st;
}
