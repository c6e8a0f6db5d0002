/* SPDX-License-Identifier: Apache-2.0 */
/* peft.c -- LoRA weights between PEFT files and flat vectors, or a state. */
#include "trained/peft.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "trained/internal.h"
#include "base/sizes.h"
#include "device/staging.h"
#include "ops/ops.h"

void bl_lora_options_of_peft(const bl_peft_config *peft, bl_lora_options *out)
{
    *out = (bl_lora_options){.r = peft->r,
                             .alpha = peft->alpha,
                             .use_rslora = peft->use_rslora,
                             .dropout = peft->dropout};
    for (int p = 0; p < BL_MAX_PROJECTIONS; p++) {
        out->target[p] = (peft->targets >> p & 1u) != 0;
        out->own_r[p] = peft->own_r[p];
        out->own_alpha[p] = peft->own_alpha[p];
    }
    for (int t = 0; t < BL_MODEL_TABLES; t++)
        out->table[t] = (peft->targets >> (BL_PEFT_EMBEDDING + t) & 1u) != 0;
}

bl_peft_config bl_lora_peft_config(const bl_lora_options *options)
{
    bl_peft_config peft = {.r = options->r,
                           .alpha = options->alpha,
                           .dropout = options->dropout,
                           .use_rslora = options->use_rslora,
                           .layout = options->layout};
    for (int p = 0; p < BL_MAX_PROJECTIONS; p++) {
        if (options->target[p]) peft.targets |= 1u << p;
        peft.own_r[p] = options->own_r[p];
        peft.own_alpha[p] = options->own_alpha[p];
    }
    for (int t = 0; t < BL_MODEL_TABLES; t++)
        if (options->table[t]) peft.targets |= 1u << (BL_PEFT_EMBEDDING + t);
    return peft;
}

/* bl_peft_base.other */
static bool other_tensor(const void *user, int64_t i, bl_peft_other *out)
{
    const bl_model_config *config = user;

    if (i >= bl_arch_tensor_count(config)) return false;
    bl_arch_tensor t = bl_arch_tensor_at(config, i);
    *out = (bl_peft_other){.n_dims = t.n_dims, .shape = {t.shape[0], t.shape[1]}};
    if (t.role != BL_ROLE_PROJECTION && !bl_arch_is_bias(config, &t))
        snprintf(out->name, sizeof out->name, "%s", t.name);
    return true;
}

bl_peft_base bl_lora_peft_base(const bl_model_config *config)
{
    bl_peft_base base = {.modules = bl_model_peft_modules(config),
                         .n_layers = config->n_layers,
                         .n_experts = config->n_experts,
                         .vocab = config->vocab_size,
                         .hidden = config->hidden_size,
                         .other = other_tensor,
                         .other_user = config};
    for (int p = 0; p < config->arch->n_projections; p++) {
        bl_projection_shape(config, p, &base.out_features[p], &base.in_features[p]);
        if (bl_arch_is_routed(config->arch, p))
            base.out_features[p] /= bl_max_i64(1, config->n_experts);
    }
    return base;
}

/* The part of one factor, which begins at `offset` of the flat vector, in [begin, begin +
 * count). */
static bl_status read_factor(const bl_peft_adapter *adapter, int64_t layer, int projection,
                             bl_peft_factor factor, int64_t offset, int64_t n, int64_t begin,
                             int64_t count, float *out)
{
    int64_t first = bl_max_i64(begin, offset), last = bl_min_i64(begin + count, offset + n);
    if (first >= last) return BL_OK;
    float *whole = malloc((size_t)n * sizeof *whole);
    if (!whole) return BL_FAIL(BL_ENOMEM, "%lld LoRA weights", (long long)n);
    bl_status st = bl_peft_read(adapter, layer, projection, factor, whole);
    for (int64_t i = first; st == BL_OK && i < last; i++) out[i - begin] = whole[i - offset];
    free(whole);
    return st;
}

/* Floats [begin, begin + count) of layer `layer`'s flat vector from an open adapter, as float, to
 * out; past n_floats: 0. */
static bl_status read_range(const bl_lora_layout *layout, const bl_peft_adapter *adapter,
                            int64_t layer, int64_t begin, int64_t count, float *out)
{
    for (int64_t i = 0; i < count; i++) out[i] = 0.0f;
    for (int p = 0; p < layout->arch->n_projections; p++) {
        if (!bl_lora_has(layout, layer, p)) continue;
        BL_TRY(read_factor(adapter, layer, p, BL_PEFT_A, layout->a_offset[p],
                           bl_lora_factor_floats(layout, p, BL_PEFT_A), begin, count, out));
        BL_TRY(read_factor(adapter, layer, p, BL_PEFT_B, layout->b_offset[p],
                           bl_lora_factor_floats(layout, p, BL_PEFT_B), begin, count, out));
    }
    return BL_OK;
}

void bl_lora_layout_order_for(bl_dtype act, bl_lora_layout *layout)
{
    bl_lora_layout_stack(layout, act != BL_F32);
}

/* In place. */
static void round_to_bf16(float *values, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        uint16_t bits = bl_f32_to_bf16(values[i]);
        memcpy((char *)values + i * (int64_t)sizeof bits, &bits, sizeof bits);
    }
}

static bl_status read_layers(const bl_lora_layout *layout, const bl_peft_adapter *adapter,
                             int64_t n_layers, bl_staging *staging, bl_tensor weights)
{
    bl_status st = BL_OK;
    float *layer = malloc((size_t)layout->n_floats * sizeof *layer);

    if (!layer)
        return BL_FAIL(BL_ENOMEM, "%lld floats of a layer's adapter", (long long)layout->n_floats);
    for (int64_t l = 0; st == BL_OK && l < n_layers; l++) {
        int64_t n = bl_lora_layer_floats(layout, l), before = bl_lora_floats_before(layout, l);
        st = read_range(layout, adapter, l, 0, n, layer);
        if (st != BL_OK) break;
        if (weights.dtype == BL_BF16) round_to_bf16(layer, n);
        st = bl_staging_upload(staging, bl_tensor_at(weights, before).data, layer,
                               bl_tensor_bytes(weights, n));
    }
    free(layer);
    return st;
}

bl_status bl_lora_read_all(const char *dir, const bl_model_config *config, bl_device *device,
                           bl_lora_layout *layout, bl_tensor *weights)
{
    bl_peft_base base = bl_lora_peft_base(config);
    bl_peft_adapter *adapter = NULL;
    bl_lora_options options;
    bl_staging *staging = NULL;
    bl_status st = BL_OK;

    *weights = bl_tensor_of(NULL, bl_device_act(device));
    BL_TRY(bl_peft_open(dir, &base, &adapter));
    bl_lora_options_of_peft(bl_peft_get_config(adapter), &options);
    bl_lora_layout_init(config, &options, layout);
    bl_lora_layout_order_for(weights->dtype, layout);
    BL_TRY_GOTO(
        st, done,
        bl_device_alloc(device, BL_SPACE_DEVICE,
                        bl_tensor_bytes(*weights, bl_lora_floats_before(layout, config->n_layers)),
                        "LoRA weights", &weights->data));
    BL_TRY_GOTO(st, done,
                bl_staging_create(device, BL_STAGING_BYTES, "staging of LoRA weights", &staging));
    st = read_layers(layout, adapter, config->n_layers, staging, *weights);
done:
    bl_staging_destroy(staging);
    if (st != BL_OK) {
        bl_device_free(device, BL_SPACE_DEVICE, weights->data);
        weights->data = NULL;
    }
    bl_peft_close(adapter);
    return st;
}

bl_status bl_trained_state_read_peft(bl_trained_state *s, const bl_model_config *config,
                                     const char *dir)
{
    bl_peft_base base = bl_lora_peft_base(config);
    bl_peft_adapter *adapter = NULL;
    float *layer = malloc((size_t)s->bytes.part); /* of one: each factor of it is read once */

    bl_status st =
        layer ? BL_OK
              : BL_FAIL(BL_ENOMEM, "%lld bytes of a layer's adapter", (long long)s->bytes.part);
    if (st == BL_OK) st = bl_peft_open(dir, &base, &adapter);
    for (int64_t l = 0; st == BL_OK && l < s->n_layers; l++) {
        int64_t n = trained_chunk(s, l);
        st = read_range(s->layout, adapter, l, bl_comm_rank(s->world) * n, n, layer);
        if (st == BL_OK)
            st = bl_staging_upload(s->staging, s->w + trained_chunks_before(s, l), layer,
                                   (size_t)n * sizeof *layer);
    }
    bl_peft_close(adapter);
    free(layer);
    if (st == BL_OK && s->terms)
        st = bl_adapter_terms_read(s->terms, config, dir, s->staging, s->compute);
    return st == BL_OK ? bl_trained_state_publish(s) : st;
}
