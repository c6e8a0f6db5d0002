/* SPDX-License-Identifier: Apache-2.0 */
/* peft_experts.c -- the tensors of an adapter that have the LoRA factors of routed experts, in each
 * layout of bl_peft_layout. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "store/peft_experts_internal.h"

bool bl_peft_is_routed(const bl_peft_modules *modules, int module)
{
    return module >= modules->n && module < modules->n + modules->n_routed;
}

void bl_peft_nest(bl_peft_modules *modules, uint32_t targets)
{
    uint32_t routed = targets & bl_peft_all_routed(modules);
    modules->is_nested = (routed & (routed - 1)) != 0;
}

int64_t bl_peft_rank(const bl_peft_config *config, int module)
{
    int64_t own = module < BL_PEFT_MAX_MODULES ? config->own_r[module] : 0;
    return own > 0 ? own : config->r;
}

int store_peft_count_pieces(const bl_peft_modules *modules, int module)
{
    return modules->routed[module - modules->n].piece[1] ? 2 : 1;
}

/* ---- names and shapes ---- */

size_t store_peft_count_tensors(const bl_peft_config *config, const bl_peft_base *base, int module)
{
    if (config->layout != BL_PEFT_PER_EXPERT) return 2;
    return 2 * (size_t)base->n_experts * (size_t)store_peft_count_pieces(&base->modules, module);
}

peft_expert_tensor store_peft_expert_tensor_at(const bl_peft_config *config,
                                               const bl_peft_base *base, int64_t layer, int module,
                                               size_t k)
{
    size_t n_pieces = (size_t)store_peft_count_pieces(&base->modules, module);
    peft_expert_tensor t = {layer, module, (bl_peft_factor)(k % 2), -1, 0};

    if (config->layout != BL_PEFT_PER_EXPERT) return t;
    t.piece = (int)(k / 2 % n_pieces);
    t.expert = (int64_t)(k / 2 / n_pieces);
    return t;
}

/* Where the wrappers of several parameters nest, the first one's is inside. */
void store_peft_expert_tensor_name(const bl_peft_modules *modules, const peft_expert_tensor *t,
                                   char name[BL_PEFT_NAME_BYTES])
{
    const bl_peft_routed *routed = &modules->routed[t->module - modules->n];
    char letter = t->factor == BL_PEFT_A ? 'A' : 'B';
    int n_path = (int)(bl_peft_last_name(routed->parameter) - routed->parameter) - 1;

    if (t->expert >= 0)
        snprintf(name, BL_PEFT_NAME_BYTES,
                 "base_model.model.%s.%" PRId64 ".%s.%" PRId64 ".%s.lora_%c.weight",
                 modules->layers, t->layer, routed->experts, t->expert, routed->piece[t->piece],
                 letter);
    else
        snprintf(name, BL_PEFT_NAME_BYTES, "base_model.model.%s.%" PRId64 ".%.*s%s.lora_%c.weight",
                 modules->layers, t->layer, n_path, routed->parameter,
                 modules->is_nested && t->module == modules->n ? ".base_layer" : "", letter);
}

/* r of a pair in the file. */
static int64_t file_rank(const bl_peft_config *config, const bl_peft_base *base, int module)
{
    int64_t r = bl_peft_rank(config, module);
    return config->is_divided ? r / store_peft_count_pieces(&base->modules, module) : r;
}

void store_peft_expert_tensor_shape(const bl_peft_config *config, const bl_peft_base *base,
                                    const peft_expert_tensor *t, int64_t shape[2])
{
    int64_t in = base->in_features[t->module], out = base->out_features[t->module], experts = 1,
            r = file_rank(config, base, t->module);
    bool is_a = t->factor == BL_PEFT_A;

    if (config->layout == BL_PEFT_PER_EXPERT)
        out /= store_peft_count_pieces(&base->modules, t->module);
    else
        experts = base->n_experts;
    if (config->layout == BL_PEFT_FIRST_AXIS) {
        int64_t swapped = in;
        in = out;
        out = swapped;
    }
    shape[0] = is_a ? experts * r : out;
    shape[1] = is_a ? in : experts * r;
}

int64_t store_peft_expert_values(const bl_peft_config *config, const bl_peft_base *base, int module,
                                 bl_peft_factor factor)
{
    int64_t width = factor == BL_PEFT_A ? base->in_features[module] : base->out_features[module];
    return base->n_experts * bl_peft_rank(config, module) * width;
}

/* ---- between the layouts ---- */

/* Where column j experts + e of row `row` is in memory: (experts n, r), or with is_transposed
 * (experts r, n). */
static int64_t place_of(int64_t n, int64_t r, bool is_transposed, int64_t row, int64_t j, int64_t e)
{
    return is_transposed ? (e * r + j) * n + row : (e * n + row) * r + j;
}

void bl_peft_stack_b(int64_t n_experts, int64_t out, int64_t r, const float *b, float *stacked)
{
    for (int64_t row = 0; row < out; row++)
        for (int64_t j = 0; j < r; j++)
            for (int64_t e = 0; e < n_experts; e++)
                *stacked++ = b[place_of(out, r, false, row, j, e)];
}

/* The other way. */
static void unstack(int64_t n_experts, int64_t n, int64_t r, bool is_transposed,
                    const float *stacked, float *dst)
{
    for (int64_t row = 0; row < n; row++)
        for (int64_t j = 0; j < r; j++)
            for (int64_t e = 0; e < n_experts; e++)
                dst[place_of(n, r, is_transposed, row, j, e)] = *stacked++;
}

static const bl_stored_tensor *find_tensor(const bl_safetensors *file, const bl_peft_base *base,
                                           const peft_expert_tensor *t)
{
    char name[BL_PEFT_NAME_BYTES];

    store_peft_expert_tensor_name(&base->modules, t, name);
    return bl_safetensors_find(file, name);
}

static bl_status read_tensor(const bl_safetensors *file, const bl_peft_base *base,
                             const peft_expert_tensor *t, float *dst)
{
    const bl_stored_tensor *stored = find_tensor(file, base, t);

    if (!stored)
        return BL_FAIL(BL_EINTERNAL, "%s: experts of layer %" PRId64, bl_safetensors_path(file),
                       t->layer);
    return bl_stored_tensor_read_f32(stored, dst);
}

/* The factor that begins with experts is in order; the other's columns are not. */
static bl_status read_stacked(const bl_safetensors *file, const bl_peft_config *config,
                              const bl_peft_base *base, peft_expert_tensor t, float *dst,
                              float *scratch)
{
    bool is_first = config->layout == BL_PEFT_FIRST_AXIS, is_a = t.factor == BL_PEFT_A;
    int64_t r = bl_peft_rank(config, t.module), E = base->n_experts,
            n = is_a ? base->in_features[t.module] : base->out_features[t.module];

    if (is_first) t.factor = is_a ? BL_PEFT_B : BL_PEFT_A;
    if (!is_first && is_a) return read_tensor(file, base, &t, dst);
    BL_TRY(read_tensor(file, base, &t, scratch));
    if (!is_first || is_a) {
        unstack(E, n, r, is_a, scratch, dst);
        return BL_OK;
    }
    for (int64_t e = 0; e < E; e++) /* rows of an expert, transposed */
        for (int64_t j = 0; j < r; j++)
            for (int64_t row = 0; row < n; row++)
                dst[(e * n + row) * r + j] = scratch[(e * r + j) * n + row];
    return BL_OK;
}

/* Rows of B's piece, beside which are 0 where each piece has its own A. */
static void place_piece(int64_t rows, int64_t r, int64_t r_all, int64_t column, const float *piece,
                        float *dst)
{
    for (int64_t row = 0; row < rows; row++) {
        memset(dst + row * r_all, 0, (size_t)r_all * sizeof *dst);
        memcpy(dst + row * r_all + column, piece + row * r, (size_t)r * sizeof *dst);
    }
}

/* One expert's factor, piece by piece. */
static bl_status read_expert(const bl_safetensors *file, const bl_peft_config *config,
                             const bl_peft_base *base, peft_expert_tensor t, float *dst,
                             float *scratch)
{
    int n_pieces = store_peft_count_pieces(&base->modules, t.module);
    int64_t r_all = bl_peft_rank(config, t.module), r = file_rank(config, base, t.module),
            in = base->in_features[t.module], rows = base->out_features[t.module] / n_pieces;
    char name[BL_PEFT_NAME_BYTES];

    for (t.piece = 0; t.piece < n_pieces; t.piece++) {
        BL_TRY(read_tensor(file, base, &t, scratch));
        if (t.factor == BL_PEFT_B) {
            place_piece(rows, r, r_all, config->is_divided ? t.piece * r : 0, scratch,
                        dst + t.piece * rows * r_all);
        } else if (config->is_divided || t.piece == 0) {
            memcpy(dst + t.piece * r * in, scratch, (size_t)(r * in) * sizeof *dst);
        } else if (memcmp(dst, scratch, (size_t)(r * in) * sizeof *dst) != 0) {
            store_peft_expert_tensor_name(&base->modules, &t, name);
            return BL_FAIL(
                BL_EINPUT,
                "%s: %s is not that of %s: in expert 0 of the first layer both are equal, which "
                "must be so in all experts or in none",
                bl_safetensors_path(file), name,
                base->modules.routed[t.module - base->modules.n].piece[0]);
        }
    }
    return BL_OK;
}

bl_status store_peft_read_experts(const bl_safetensors *file, const bl_peft_config *config,
                                  const bl_peft_base *base, int64_t layer, int module,
                                  bl_peft_factor factor, float *dst)
{
    int64_t n = store_peft_expert_values(config, base, module, factor);
    peft_expert_tensor t = {layer, module, factor, -1, 0};
    float *scratch = malloc((size_t)n * sizeof *scratch);
    bl_status st = BL_OK;

    if (!scratch) return BL_FAIL(BL_ENOMEM, "%" PRId64 " LoRA weights of experts", n);
    if (config->layout != BL_PEFT_PER_EXPERT)
        st = read_stacked(file, config, base, t, dst, scratch);
    for (t.expert = 0;
         config->layout == BL_PEFT_PER_EXPERT && st == BL_OK && t.expert < base->n_experts;
         t.expert++)
        st = read_expert(file, config, base, t, dst + t.expert * (n / base->n_experts), scratch);
    free(scratch);
    return st;
}

const float *store_peft_pick_expert(const bl_peft_config *config, const bl_peft_base *base,
                                    const peft_expert_tensor *t, const float *factor,
                                    float *scratch)
{
    int64_t r = bl_peft_rank(config, t->module), out = base->out_features[t->module];

    if (config->layout == BL_PEFT_PER_EXPERT) {
        if (t->factor == BL_PEFT_A) return factor + t->expert * r * base->in_features[t->module];
        return factor + (t->expert * out +
                         t->piece * out / store_peft_count_pieces(&base->modules, t->module)) *
                            r;
    }
    if (t->factor == BL_PEFT_A) return factor;
    bl_peft_stack_b(base->n_experts, out, r, factor, scratch);
    return scratch;
}

/* ---- from a file ---- */

const bl_stored_tensor *store_peft_find_experts(const bl_safetensors *file,
                                                const bl_peft_modules *modules, int64_t n_layers,
                                                peft_expert_tensor *t)
{
    char name[BL_PEFT_NAME_BYTES];
    const bl_stored_tensor *found = NULL;

    for (t->layer = 0; t->layer < n_layers && !found; t->layer += !found) {
        store_peft_expert_tensor_name(modules, t, name);
        found = bl_safetensors_find(file, name);
    }
    return found;
}

bool store_peft_has_experts(const bl_safetensors *file, const bl_peft_modules *modules,
                            int64_t layer, int module)
{
    char name[BL_PEFT_NAME_BYTES];

    for (int64_t expert = -1; expert <= 0; expert++) {
        peft_expert_tensor t = {layer, module, BL_PEFT_A, expert, 0};
        store_peft_expert_tensor_name(modules, &t, name);
        if (bl_safetensors_find(file, name)) return true;
    }
    return false;
}

void store_peft_choose_axis(const bl_safetensors *file, const bl_peft_base *base,
                            bl_peft_config *config)
{
    const bl_peft_modules *modules = &base->modules;

    for (int m = modules->n; m < modules->n + modules->n_routed; m++) {
        peft_expert_tensor t = {0, m, BL_PEFT_A, -1, 0};
        const bl_stored_tensor *a = store_peft_find_experts(file, modules, base->n_layers, &t);
        int64_t in = base->in_features[m], out = base->out_features[m];
        if (!(config->targets >> m & 1) || !a || a->n_dims != 2 || in == out) continue;
        config->layout = a->shape[1] == out ? BL_PEFT_FIRST_AXIS : BL_PEFT_STACKED;
        return;
    }
}

void store_peft_measure_experts(const bl_safetensors *file, const bl_peft_config *config,
                                bl_peft_base *base)
{
    const bl_peft_modules *modules = &base->modules;
    bool is_apart = config->layout == BL_PEFT_PER_EXPERT;

    for (int m = modules->n; m < modules->n + modules->n_routed; m++) {
        peft_expert_tensor t = {0, m, BL_PEFT_A, is_apart ? 0 : -1, 0};
        const bl_stored_tensor *a = store_peft_find_experts(file, modules, base->n_layers, &t);
        t.factor = BL_PEFT_B;
        const bl_stored_tensor *b = find_tensor(file, base, &t);
        if (!a || !b || a->n_dims != 2 || b->n_dims != 2) continue;
        base->in_features[m] = a->shape[1];
        base->out_features[m] = b->shape[0] * (is_apart ? store_peft_count_pieces(modules, m) : 1);
        base->n_experts = a->shape[0] / bl_peft_rank(config, m);
        for (base->n_experts = is_apart ? 0 : base->n_experts;
             is_apart && find_tensor(file, base, &t); t.expert++)
            base->n_experts++;
    }
}
