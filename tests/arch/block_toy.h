/* SPDX-License-Identifier: Apache-2.0 */
/* block_toy.h -- test_block's models: a layer of random weights, with and without what families
 * add, and a micro-batch of three documents. */
#ifndef BALLAST_TESTS_BLOCK_TOY_H
#define BALLAST_TESTS_BLOCK_TOY_H

#include "ops_test.h"

#include "arch/block.h"
#include "arch/list_internal.h"
#include "arch/llama.h"
#include "arch/rope.h"
#include "model/weights.h"
#include "ops/philox.h"
#include "arch/rope.h"

enum { LAYERS = 2, LAYER = 1, T_ALL = 12, DOCUMENTS = 3 };

static const int32_t document_starts[DOCUMENTS + 1] = {0, 5, 6, T_ALL};

typedef struct block_case {
    const char *name;
    int64_t hidden, inter, n_heads, n_kv_heads, head_dim;
    int64_t r;           /* 0: no adapter */
    const char *targets; /* a letter each: q k v o g u d */
    float dropout;
    unsigned biases;            /* of bl_model_config */
    bool has_head_norms;        /* of q and k */
    int64_t window;             /* of LAYER; 0: none */
    double residual, attention; /* multipliers; 0: none */
    double query_beta;
    int64_t rotary_dim; /* of bl_model_config */
    bool is_olmo;       /* norms of outputs, and of all of q and k */
    int n_layer_norms;  /* > 0: Falcon's layer; of its targets, q k v o are all */
    bool is_sequence;   /* with two of them, one after the other */
    bl_activation activation;
} block_case;

static const block_case cases[] = {
    {"grouped heads, wider than hidden", 24, 40, 4, 2, 8, 3, "qkvogud", 0, .biases = 0},
    {"with dropout", 24, 40, 4, 2, 8, 3, "qkvogud", 0.2f, .biases = 0},
    {"one key/value head, inter narrower than hidden", 22, 12, 3, 1, 6, 2, "vou", 0.2f,
     .biases = 0},
    {"as many key/value heads", 16, 24, 2, 2, 8, 1, "qd", 0, .biases = 0},
    {"no adapter", 16, 24, 4, 1, 4, 0, "", 0, .biases = 0},
    {"biases of q, k, v", 24, 40, 4, 2, 8, 3, "qkvogud", 0, .biases = 1u << BL_QKV},
    {"all biases, norms of heads", 22, 12, 3, 1, 6, 2, "qkvogud", 0.2f, .biases = 15,
     .has_head_norms = true},
    {"a window, multipliers", 24, 40, 4, 2, 8, 3, "qkvogud", 0.2f, .window = 3, .residual = 0.7,
     .attention = 0.4},
    {"a part of each head rotated", 24, 40, 4, 2, 8, 3, "qkvogud", 0.2f, .rotary_dim = 6},
    {"norms of outputs", 24, 40, 4, 2, 8, 3, "qkvogud", 0.2f, .biases = 3, .is_olmo = true},
    {"norms of outputs, no adapter", 22, 12, 3, 1, 6, 0, "", 0, .is_olmo = true},
    {"queries by position", 16, 24, 2, 2, 8, 1, "qd", 0, .query_beta = 0.3},
    {"parallel, two LayerNorms", 24, 40, 4, 2, 8, 3, "qkvo", 0.2f, .n_layer_norms = 2,
     .activation = BL_GELU},
    {"parallel, one LayerNorm, one key head", 22, 12, 3, 1, 6, 2, "ko", 0, .biases = 15,
     .n_layer_norms = 1, .activation = BL_GELU_BY_TANH, .attention = 0.4},
    {"parallel with a multiplier, no adapter", 16, 24, 4, 4, 4, 0, "", 0, .n_layer_norms = 2,
     .activation = BL_GELU, .residual = 0.7},
    {"LayerNorms in sequence", 16, 24, 2, 2, 8, 1, "qv", 0, .n_layer_norms = 2, .is_sequence = true,
     .activation = BL_GELU},
};

/* A model of random weights and a micro-batch of three documents. */
typedef struct toy {
    const block_case *c;
    test_device d;
    bl_arch arch;
    bl_model_config config;
    bl_block_dims dims;
    bl_base_layout layout;
    void *shards;
    bl_base *base;
    float *tables, *norms, *lora_weights;
    bl_lora_layout lora;
    bl_block block;
    int32_t position[T_ALL], cu_seqlens[DOCUMENTS + 1];
    int64_t sample[T_ALL];
    bl_micro_batch batch;
    float *x, *d_out;
} toy;

static void create_base(toy *m)
{
    bl_format formats[LAYERS * BL_PROJECTIONS];
    for (int i = 0; i < LAYERS * BL_PROJECTIONS; i++) formats[i] = BL_FORMAT_F32;
    assert_int_equal(bl_model_layout(&m->config, formats, BL_F32, BL_DEVICE_CPU, 1, &m->layout),
                     BL_OK);
    m->shards = test_random_floats((int64_t)(m->layout.shard_bytes / sizeof(float)), 3);
    float *weights = m->shards;
    for (size_t i = 0; i < m->layout.shard_bytes / sizeof(float); i++) weights[i] *= 0.5f;
    assert_int_equal(bl_base_create_resident(&m->layout, m->shards, &m->base), BL_OK);
}

static void create_lora(toy *m)
{
    static const char letters[] = "qkvogud";
    bl_lora_options options = {
        .r = m->c->r, .alpha = 2.0 * (double)m->c->r, .dropout = (double)m->c->dropout};
    for (int p = 0; p < m->arch.n_projections; p++)
        options.target[p] = strchr(m->c->targets, letters[p]) != NULL;
    bl_lora_layout_init(&m->config, m->c->r ? &options : NULL, &m->lora);
    m->lora_weights = test_random_floats(m->lora.n_floats, 4);
    for (int64_t i = 0; i < m->lora.n_floats; i++) m->lora_weights[i] *= 0.3f;
}

static bl_arch arch_of(const block_case *c)
{
    bl_arch arch = c->has_head_norms ? bl_arch_qwen3 : bl_arch_llama;

    if (c->is_olmo) return bl_arch_olmo2;
    if (c->n_layer_norms == 0) return arch;
    arch = bl_arch_falcon;
    arch.is_parallel = !c->is_sequence;
    if (c->n_layer_norms == 1)
        arch.vectors[BL_MLP_NORM].name = arch.vectors[BL_MLP_NORM_BIAS].name = NULL;
    return arch;
}

static void create_toy(const block_case *c, toy *m)
{
    double inverse[64];

    *m = (toy){.c = c, .d = test_device_create(2), .arch = arch_of(c)};
    m->config =
        (bl_model_config){.arch = &m->arch,
                          .activation = c->activation,
                          .biases = c->biases,
                          .windows = {.tokens = c->window, .layers = {c->window ? 1u << LAYER : 0}},
                          .residual_multiplier = c->residual,
                          .attention_multiplier = c->attention,
                          .query_beta = c->query_beta,
                          .rope_original_max_positions = 2,
                          .vocab_size = 8,
                          .hidden_size = c->hidden,
                          .intermediate_size = c->inter,
                          .n_layers = LAYERS,
                          .n_heads = c->n_heads,
                          .n_kv_heads = c->n_kv_heads,
                          .head_dim = c->head_dim,
                          .rotary_dim = c->rotary_dim,
                          .rms_norm_eps = 1e-5,
                          .tie_word_embeddings = true,
                          .rope_theta = 100.0};
    m->dims = bl_block_dims_of(&m->config, BL_LAYER_DENSE, BL_DEVICE_CPU, BL_F32);
    int64_t n_table = T_ALL * c->head_dim / 2;
    m->tables = test_floats(4 * n_table);
    float *queries = m->tables + 2 * n_table;
    bl_model_rope_inv_freq(&m->config, false, inverse);
    bl_model_rope_fill(&m->config, inverse, false, 0, T_ALL, m->tables, m->tables + n_table);
    bl_model_rope_fill(&m->config, inverse, true, 0, T_ALL, queries, queries + n_table);
    m->dims.rope = (bl_block_rope){.cos_table = m->tables, .sin_table = m->tables + n_table};
    if (bl_model_rope_has_queries(&m->config)) {
        m->dims.rope.query_cos_table = queries;
        m->dims.rope.query_sin_table = queries + n_table;
    }
    create_base(m);
    create_lora(m);
    int64_t n_floats = bl_arch_layer_floats(&m->config, BL_LAYER_DENSE);
    m->norms = test_random_floats(n_floats, 5);
    for (int64_t i = 0; i < bl_arch_vector_offset(&m->config, BL_LAYER_DENSE, BL_LAYER_VECTORS);
         i++)
        m->norms[i] += 1.5f;
    m->block = (bl_block){.dims = &m->dims,
                          .base = m->base,
                          .layer = LAYER,
                          .vectors = m->norms,
                          .lora = &m->lora,
                          .lora_weights = bl_tensor_f32(m->lora_weights),
                          .dropout = {.p = c->dropout, .seed = 11, .step = 5}};
    for (int t = 0; t < T_ALL; t++) {
        m->position[t] = t % 6;
        m->sample[t] = t / 6;
    }
    memcpy(m->cu_seqlens, document_starts, sizeof document_starts);
    m->batch = (bl_micro_batch){.T = T_ALL,
                                .n_documents = DOCUMENTS,
                                .position = m->position,
                                .sample = m->sample,
                                .cu_seqlens = m->cu_seqlens};
    m->x = test_random_floats(T_ALL * c->hidden, 6);
    m->d_out = test_random_floats(T_ALL * c->hidden, 7);
}

static void free_toy(toy *m)
{
    bl_base_destroy(m->base);
    bl_base_layout_free(&m->layout);
    free(m->shards), free(m->tables), free(m->norms), free(m->lora_weights), free(m->x),
        free(m->d_out);
    test_device_destroy(m->d);
}

#endif
