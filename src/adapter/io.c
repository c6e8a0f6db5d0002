/* SPDX-License-Identifier: Apache-2.0 */
/* io.c -- the adapter from PEFT's files, and its gradients into a file, a layer at a time. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "adapter/lora_io.h"
#include "store/safetensors.h"
#include "adapter/internal.h"

bl_status bl_adapter_state_read_peft(bl_adapter_state *s, const bl_model_config *config,
                                     const char *dir)
{
    bl_peft_base base = bl_lora_peft_base(config);
    bl_peft_adapter *adapter = NULL;
    size_t n_bytes = (size_t)s->chunk * sizeof(float);
    float *layer = malloc(n_bytes); /* of one: each factor of it is read once */

    bl_status st = layer ? BL_OK : BL_FAIL(BL_ENOMEM, "%zu bytes of a layer's adapter", n_bytes);
    if (st == BL_OK) st = bl_peft_open(dir, &base, &adapter);
    for (int64_t l = 0; st == BL_OK && l < s->n_layers; l++) {
        st = bl_lora_read_range(s->layout, adapter, l, bl_comm_rank(s->world) * s->chunk, s->chunk,
                                layer);
        if (st == BL_OK) st = bl_staging_upload(s->staging, s->w + l * s->chunk, layer, n_bytes);
    }
    bl_peft_close(adapter);
    free(layer);
    if (st == BL_OK && s->terms)
        st = bl_adapter_terms_read(s->terms, config, dir, s->staging, s->compute);
    return st == BL_OK ? bl_adapter_state_publish(s) : st;
}

/* ---- gradients: layers in the order of PEFT's file, each gathered once ---- */

typedef struct exporter {
    bl_adapter_state *state;
    int64_t layer; /* what state->full[0] holds; -1: nothing */
} exporter;

static bl_status gather_layer(exporter *e, int64_t layer)
{
    bl_adapter_state *s = e->state;
    if (e->layer == layer) return BL_OK;
    e->layer = layer;
    bl_comm_set_label(s->world, "the LoRA gradients of layer", layer);
    BL_TRY(bl_comm_all_gather(s->world, s->communication, s->grad + layer * s->chunk, s->full[0],
                              (size_t)s->chunk * sizeof(float)));
    bl_comm_set_label(s->world, NULL, 0);
    return bl_stream_synchronize(s->communication);
}

static bl_status fill_factor(void *user, int64_t layer, int module, bl_peft_factor factor,
                             float *dst)
{
    exporter *e = user;
    const bl_adapter_state *s = e->state;
    const bl_lora_layout *layout = s->layout;

    if (adapter_is_table(module))
        return adapter_terms_download(s->terms, s->terms->grad, module, factor, s->staging, dst);
    int64_t offset = factor == BL_PEFT_A ? layout->a_offset[module] : layout->b_offset[module];
    int64_t n =
        layout->options.r * (factor == BL_PEFT_A ? layout->a_cols[module] : layout->b_rows[module]);

    BL_TRY(gather_layer(e, layer));
    return bl_staging_download(s->staging, dst, s->full[0] + offset, (size_t)n * sizeof(float));
}

static int compare_numbers_as_text(const void *a, const void *b)
{
    char left[24], right[24];
    snprintf(left, sizeof left, "%lld.", (long long)*(const int64_t *)a);
    snprintf(right, sizeof right, "%lld.", (long long)*(const int64_t *)b);
    return strcmp(left, right);
}

/* The part of the other ranks: the same gathers in the order in which the writer needs them, that
 * of the tensors' names. */
static bl_status follow(exporter *e)
{
    int64_t n = e->state->n_layers, *layers = malloc((size_t)n * sizeof *layers);
    bl_status st = layers ? BL_OK : BL_FAIL(BL_ENOMEM, "a list of layers");
    for (int64_t i = 0; st == BL_OK && i < n; i++) layers[i] = i;
    if (st == BL_OK) qsort(layers, (size_t)n, sizeof *layers, compare_numbers_as_text);
    for (int64_t i = 0; st == BL_OK && i < n; i++) st = gather_layer(e, layers[i]);
    free(layers);
    return st;
}

/* Past the layer's floats the buffer is gradient padding, which must stay zero. */
static bl_status clear_padding(bl_adapter_state *s)
{
    int64_t whole = s->chunk * bl_comm_size(s->world), n = s->layout->n_floats;
    return bl_stream_zero(s->compute, s->full[0] + n, (size_t)(whole - n) * sizeof(float));
}

typedef struct named_factor {
    int64_t layer; /* -1: a tensor of modules_to_save, in `values` */
    int module;
    bl_peft_factor factor;
    const float *values;
    char name[BL_PEFT_NAME_BYTES];
} named_factor;

static bl_status write_all(exporter *e, const char *path, named_factor *list,
                           bl_stored_tensor_spec *specs, size_t n)
{
    const bl_lora_layout *layout = e->state->layout;
    bl_safetensors_writer *writer = NULL;
    bl_status st = BL_OK;
    static const char *const metadata[] = {"content", BL_GRADIENTS_MARK};
    float *block =
        malloc((size_t)bl_max_i64(layout->n_floats, layout->n_table_floats) * sizeof *block);

    if (!block) return BL_FAIL(BL_ENOMEM, "a layer's gradients");
    BL_TRY_GOTO(st, done, bl_safetensors_create(path, specs, n, metadata, 1, &writer));
    for (size_t i = 0; i < n; i++) {
        const named_factor *f = &list[bl_safetensors_writer_order(writer)[i]];
        const bl_stored_tensor_spec *spec = &specs[f - list];
        if (f->layer < 0) {
            int64_t n_values = spec->shape[0] * (spec->n_dims > 1 ? spec->shape[1] : 1);
            BL_TRY_GOTO(st, done,
                        adapter_append_bytes(writer, e->state->staging, f->values,
                                             (size_t)n_values * sizeof(float)));
            continue;
        }
        BL_TRY_GOTO(st, done, fill_factor(e, f->layer, f->module, f->factor, block));
        BL_TRY_GOTO(st, done,
                    bl_safetensors_writer_append(
                        writer, block, (size_t)(spec->shape[0] * spec->shape[1]) * sizeof(float)));
    }
    st = bl_safetensors_writer_commit(writer);
    writer = NULL;
done:
    bl_safetensors_writer_abort(writer);
    free(block);
    return st;
}

/* Appends the gradients of modules_to_save to the list. */
static size_t list_modules(const bl_adapter_state *s, named_factor *list,
                           bl_stored_tensor_spec *specs, size_t n)
{
    int64_t n_tensors = s->modules ? adapter_modules_tensors(s->modules) : 0;

    for (int64_t i = 0; i < n_tensors; i++) {
        bl_arch_tensor t;
        const float *values = adapter_modules_gradient(s->modules, i, &t);
        if (!values) continue;
        list[n] = (named_factor){.layer = -1, .values = values};
        snprintf(list[n].name, sizeof list[n].name, "base_model.model.%s", t.name);
        specs[n] =
            (bl_stored_tensor_spec){list[n].name, BL_F32, t.n_dims, {t.shape[0], t.shape[1]}};
        n++;
    }
    return n;
}

/* Appends a factor to the list. */
static size_t list_factor(const bl_lora_layout *layout, int64_t layer, int module,
                          bl_peft_factor factor, int64_t rows, int64_t cols, named_factor *list,
                          bl_stored_tensor_spec *specs, size_t n)
{
    bl_peft_modules modules = bl_arch_peft_modules(layout->arch);

    list[n] = (named_factor){.layer = layer, .module = module, .factor = factor};
    bl_peft_tensor_name(&modules, layer, module, factor, list[n].name);
    specs[n] = (bl_stored_tensor_spec){list[n].name, BL_F32, 2, {rows, cols}};
    return n + 1;
}

/* Appends the factors of the embedding and the head. */
static size_t list_tables(const bl_lora_layout *layout, named_factor *list,
                          bl_stored_tensor_spec *specs, size_t n)
{
    int64_t r = layout->options.r;

    for (int m = BL_PEFT_EMBEDDING; m <= BL_PEFT_HEAD; m++) {
        if (!layout->options.table[m - BL_PEFT_EMBEDDING]) continue;
        int64_t n_a = adapter_term_floats(layout, m, BL_PEFT_A),
                n_b = adapter_term_floats(layout, m, BL_PEFT_B);
        n = list_factor(layout, 0, m, BL_PEFT_A, r, n_a / r, list, specs, n);
        n = list_factor(layout, 0, m, BL_PEFT_B, n_b / r, r, list, specs, n);
    }
    return n;
}

static bl_status write_gradient_file(exporter *e, const char *path)
{
    const bl_lora_layout *layout = e->state->layout;
    int64_t r = layout->options.r;
    int64_t n_modules = e->state->modules ? adapter_modules_tensors(e->state->modules) : 0;
    size_t most = (size_t)(e->state->n_layers * layout->arch->n_projections * 2 + n_modules +
                           BL_MODEL_TABLES * 2),
           n = 0;
    named_factor *list = calloc(most, sizeof *list);
    bl_stored_tensor_spec *specs = calloc(most, sizeof *specs);
    bl_status st = list && specs ? BL_OK : BL_FAIL(BL_ENOMEM, "the list of gradients");

    for (int64_t l = 0; st == BL_OK && l < e->state->n_layers; l++)
        for (int p = 0; p < layout->arch->n_projections; p++) {
            if (layout->a_offset[p] < 0) continue;
            n = list_factor(layout, l, p, BL_PEFT_A, r, layout->a_cols[p], list, specs, n);
            n = list_factor(layout, l, p, BL_PEFT_B, layout->b_rows[p], r, list, specs, n);
        }
    if (st == BL_OK) n = list_tables(layout, list, specs, n);
    if (st == BL_OK) n = list_modules(e->state, list, specs, n);
    if (st == BL_OK) st = write_all(e, path, list, specs, n);
    free(specs);
    free(list);
    return st;
}

bl_status bl_adapter_state_write_gradients(bl_adapter_state *s, const char *path)
{
    exporter e = {s, -1};
    BL_TRY(bl_stream_synchronize(s->compute)); /* full[0] is then idle, and the gradients final */
    BL_TRY(bl_stream_synchronize(s->communication));
    if (s->trained) return adapter_full_write_gradients(s, path);
    BL_TRY(bl_comm_rank(s->world) == 0 ? write_gradient_file(&e, path) : follow(&e));
    return clear_padding(s);
}
