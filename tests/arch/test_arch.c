/* SPDX-License-Identifier: Apache-2.0 */
/* Values derived from an entry of the table: tensors, shapes, names, FLOPs; of Llama's, and of one
 * that has other names, fewer projections and fewer vectors. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "arch/config.h"
#include "arch/llama.h"
#include "arch/lora.h"
#include "arch/table.h"
#include "base/sizes.h"

/* A layer of four matrices, one projection each, and one vector. */
static const bl_projection other_projections[] = {
    {"attention.in", BL_QKV, BL_EXTENT_INTER, BL_EXTENT_HIDDEN},
    {"attention.out", BL_OUT, BL_EXTENT_HIDDEN, BL_EXTENT_Q},
    {"mlp.in", BL_GATE_UP, BL_EXTENT_INTER, BL_EXTENT_HIDDEN},
    {"mlp.out", BL_MLP_DOWN, BL_EXTENT_HIDDEN, BL_EXTENT_INTER},
};

static const bl_arch other = {.layers = "transformer.h",
                              .final_norm = "transformer.ln_f",
                              .embedding = "transformer.wte",
                              .head = "head",
                              .projections = other_projections,
                              .n_projections = BL_COUNT(other_projections),
                              .vectors = {[BL_MLP_NORM] = {"ln.weight", BL_EXTENT_HIDDEN}}};

static bl_model_config config_of(const bl_arch *arch)
{
    return (bl_model_config){.arch = arch,
                             .vocab_size = 10,
                             .hidden_size = 8,
                             .intermediate_size = 12,
                             .n_layers = 2,
                             .n_heads = 3,
                             .n_kv_heads = 1,
                             .head_dim = 2};
}

typedef struct expected {
    const char *name;
    bl_tensor_role role;
    int64_t rows, cols; /* cols 0: a vector, from `offset` on */
    int64_t offset;
} expected;

static void check_tensors(const bl_model_config *c, const expected *list, size_t n)
{
    assert_int_equal(bl_arch_tensor_count(c), n);
    for (size_t i = 0; i < n; i++) {
        bl_arch_tensor t = bl_arch_tensor_at(c, (int64_t)i);
        assert_string_equal(t.name, list[i].name);
        assert_int_equal(t.role, list[i].role);
        assert_int_equal(t.n_dims, list[i].cols ? 2 : 1);
        assert_int_equal(t.shape[0], list[i].rows);
        assert_int_equal(t.shape[1], list[i].cols);
        assert_int_equal(t.offset, list[i].offset);
    }
}

static void test_tensors(void **state)
{
    static const expected of_other[] = {
        {"transformer.h.0.attention.in.weight", BL_ROLE_PROJECTION, 12, 8, 0},
        {"transformer.h.0.attention.out.weight", BL_ROLE_PROJECTION, 8, 6, 0},
        {"transformer.h.0.mlp.in.weight", BL_ROLE_PROJECTION, 12, 8, 0},
        {"transformer.h.0.mlp.out.weight", BL_ROLE_PROJECTION, 8, 12, 0},
        {"transformer.h.0.ln.weight", BL_ROLE_VECTOR, 8, 0, 0},
        {"transformer.h.1.attention.in.weight", BL_ROLE_PROJECTION, 12, 8, 0},
        {"transformer.h.1.attention.out.weight", BL_ROLE_PROJECTION, 8, 6, 0},
        {"transformer.h.1.mlp.in.weight", BL_ROLE_PROJECTION, 12, 8, 0},
        {"transformer.h.1.mlp.out.weight", BL_ROLE_PROJECTION, 8, 12, 0},
        {"transformer.h.1.ln.weight", BL_ROLE_VECTOR, 8, 0, 8},
        {"transformer.ln_f.weight", BL_ROLE_VECTOR, 8, 0, 16},
        {"transformer.wte.weight", BL_ROLE_EMBEDDING, 10, 8, 0},
        {"head.weight", BL_ROLE_HEAD, 10, 8, 0},
    };
    static const expected of_llama[] = {
        {"model.layers.0.self_attn.q_proj.weight", BL_ROLE_PROJECTION, 6, 8, 0},
        {"model.layers.0.self_attn.k_proj.weight", BL_ROLE_PROJECTION, 2, 8, 0},
        {"model.layers.0.self_attn.v_proj.weight", BL_ROLE_PROJECTION, 2, 8, 0},
        {"model.layers.0.self_attn.o_proj.weight", BL_ROLE_PROJECTION, 8, 6, 0},
        {"model.layers.0.mlp.gate_proj.weight", BL_ROLE_PROJECTION, 12, 8, 0},
        {"model.layers.0.mlp.up_proj.weight", BL_ROLE_PROJECTION, 12, 8, 0},
        {"model.layers.0.mlp.down_proj.weight", BL_ROLE_PROJECTION, 8, 12, 0},
        {"model.layers.0.input_layernorm.weight", BL_ROLE_VECTOR, 8, 0, 0},
        {"model.layers.0.post_attention_layernorm.weight", BL_ROLE_VECTOR, 8, 0, 8},
        {"model.norm.weight", BL_ROLE_VECTOR, 8, 0, 16},
        {"model.embed_tokens.weight", BL_ROLE_EMBEDDING, 10, 8, 0},
        {"lm_head.weight", BL_ROLE_HEAD, 10, 8, 0},
    };
    static const expected of_biases[] = {
        {"transformer.h.0.attention.in.weight", BL_ROLE_PROJECTION, 12, 8, 0},
        {"transformer.h.0.attention.out.weight", BL_ROLE_PROJECTION, 8, 6, 0},
        {"transformer.h.0.mlp.in.weight", BL_ROLE_PROJECTION, 12, 8, 0},
        {"transformer.h.0.mlp.out.weight", BL_ROLE_PROJECTION, 8, 12, 0},
        {"transformer.h.0.ln.weight", BL_ROLE_VECTOR, 8, 0, 0},
        {"transformer.h.0.attention.in.bias", BL_ROLE_VECTOR, 12, 0, 8},
        {"transformer.h.0.mlp.out.bias", BL_ROLE_VECTOR, 8, 0, 20},
        {"transformer.ln_f.weight", BL_ROLE_VECTOR, 8, 0, 28},
        {"transformer.wte.weight", BL_ROLE_EMBEDDING, 10, 8, 0},
        {"head.weight", BL_ROLE_HEAD, 10, 8, 0},
    };
    bl_model_config c = config_of(&other), llama = config_of(&bl_arch_llama), biased = c;
    (void)state;

    biased.n_layers = 1;
    biased.biases = 1u << BL_QKV | 1u << BL_MLP_DOWN;
    check_tensors(&biased, of_biases, BL_COUNT(of_biases));
    assert_int_equal(bl_arch_bias_offset(&biased, BL_LAYER_DENSE, BL_QKV), 8);
    assert_int_equal(bl_arch_bias_offset(&biased, BL_LAYER_DENSE, BL_OUT), -1);
    assert_int_equal(bl_arch_bias_offset(&biased, BL_LAYER_DENSE, BL_MLP_DOWN), 20);
    check_tensors(&c, of_other, BL_COUNT(of_other));
    llama.n_layers = 1;
    check_tensors(&llama, of_llama, BL_COUNT(of_llama));
    assert_int_equal(bl_arch_vector_floats(&c), 24);
    assert_int_equal(bl_model_config_n_params(&c), 2 * (96 + 48 + 96 + 96 + 8) + 8 + 80 + 80);
    c.tie_word_embeddings = true;
    assert_int_equal(bl_model_config_n_params(&c), 2 * (96 + 48 + 96 + 96 + 8) + 8 + 80);
}

static void test_projections(void **state)
{
    static const char *const none[] = {
        "transformer.h.0.ln.weight", "head.weight", "transformer.h.mlp.in.weight",
        "transformer.h.0.mlp.in.weight_scale", "model.layers.0.mlp.in.weight"};
    bl_model_config llama = config_of(&bl_arch_llama);
    int64_t layer;
    (void)state;

    assert_ptr_equal(bl_arch_segment(&other, BL_LAYER_DENSE, BL_MLP_DOWN, 0),
                     &other_projections[3]);
    assert_null(bl_arch_segment(&other, BL_LAYER_DENSE, BL_QKV, 1));
    assert_ptr_equal(bl_arch_segment(&bl_arch_llama, BL_LAYER_DENSE, BL_QKV, 2),
                     &bl_llama_projections[BL_V]);
    assert_int_equal(bl_projection_row(&llama, BL_V), 8);
    assert_string_equal(bl_projection_name(&other_projections[2]), "in");
    assert_int_equal(bl_arch_find_projection(&other, "transformer.h.11.mlp.in.weight", &layer), 2);
    assert_int_equal(layer, 11);
    for (size_t i = 0; i < BL_COUNT(none); i++)
        assert_int_equal(bl_arch_find_projection(&other, none[i], &layer), -1);
}

/* Tensors of routed experts by name, their rows in the layer's matrix, and which of them LoRA may
 * target: none. */
static void test_experts(void **state)
{
    static const struct {
        const char *name;
        int64_t row;
    } published[] = {{"model.layers.1.block_sparse_moe.experts.0.w1.weight", 0},
                     {"model.layers.1.block_sparse_moe.experts.0.w3.weight", 14336},
                     {"model.layers.1.block_sparse_moe.experts.1.w1.weight", 2 * 14336},
                     {"model.layers.1.block_sparse_moe.experts.7.w3.weight", 15 * 14336}};
    bl_model_config c;
    int64_t layer;
    (void)state;

    assert_int_equal(bl_model_config_preset("mixtral-8x7b", &c), BL_OK);
    for (size_t i = 0; i < BL_COUNT(published); i++) {
        bl_arch_tensor t = bl_arch_stored_at(&c, 1, 4, published[i].row + 14335);
        assert_string_equal(t.name, published[i].name);
        assert_int_equal(t.row, published[i].row);
        assert_true(t.n_dims == 2 && t.shape[0] == 14336 && t.shape[1] == 4096);
        assert_int_equal(bl_arch_find_projection(c.arch, t.name, &layer), 4);
        assert_int_equal(layer, 1);
    }
    assert_int_equal(bl_arch_find_projection(
                         c.arch, "model.layers.1.block_sparse_moe.experts.0.w4.weight", &layer),
                     -1);
    assert_int_equal(
        bl_arch_find_projection(c.arch, "model.layers.1.block_sparse_moe.gate.weight", &layer), -1);
    int64_t n = bl_arch_tensor_count(&c), per_layer = 4 + 3 * 8 + 3;
    assert_int_equal(n, 32 * per_layer + 3);
    bl_arch_tensor router = bl_arch_tensor_at(&c, per_layer - 1);
    assert_string_equal(router.name, "model.layers.0.block_sparse_moe.gate.weight");
    assert_true(router.n_dims == 2 && router.shape[0] == 8 && router.shape[1] == 4096);
    assert_int_equal(bl_arch_peft_modules(c.arch).n, 4);
    c.arch = c.arch->stacked;
    bl_arch_tensor stack = bl_arch_tensor_at(&c, 5);
    assert_string_equal(stack.name, "model.layers.0.mlp.experts.down_proj");
    assert_true(stack.n_dims == 3 && stack.shape[0] == 8 && stack.shape[1] == 4096 &&
                stack.shape[2] == 14336);
    assert_int_equal(bl_arch_find_projection(c.arch, stack.name, &layer), 5);
    assert_int_equal(bl_arch_tensor_elements(&stack), 8LL * 4096 * 14336);
    /* q and o; k and v; two of eight experts of three matrices; the router */
    assert_true(bl_arch_active_weights(&c, BL_LAYER_EXPERTS) ==
                4096.0 * (2 * 4096 + 2 * 1024 + 2 * 3 * 14336 + 8));
}

/* Stacks of matrices with input channels first, and their biases. */
/* Of auto: as many as weigh no more than q, k, v and o together, at least one. */
static void test_expert_groups(void **state)
{
    static const struct {
        const char *name;
        int64_t group;
    } chosen[] = {{"mixtral-8x7b", 1}, {"qwen3-30b-a3b", 4}};
    bl_model_config c;
    (void)state;

    for (size_t i = 0; i < BL_COUNT(chosen); i++) {
        assert_int_equal(bl_model_config_preset(chosen[i].name, &c), BL_OK);
        assert_int_equal(bl_arch_expert_group(&c), chosen[i].group);
        assert_int_equal(bl_arch_set_expert_group(&c, 3), BL_OK);
        assert_int_equal(bl_arch_expert_group(&c), 3);
        assert_int_equal(bl_arch_set_expert_group(&c, 1000), BL_OK);
        assert_int_equal(bl_arch_expert_group(&c), c.n_experts);
        assert_int_equal(bl_arch_set_expert_group(&c, -1), BL_OK);
        assert_int_equal(bl_arch_expert_group(&c), chosen[i].group);
    }
    c = config_of(&bl_arch_llama);
    assert_int_equal(bl_arch_expert_group(&c), 0);
    assert_int_equal(bl_arch_set_expert_group(&c, -1), BL_OK);
    assert_int_equal(bl_arch_set_expert_group(&c, 1), BL_EUSAGE);
}

static void test_transposed_experts(void **state)
{
    static const char *const names[] = {"model.layers.0.mlp.experts.gate_up_proj",
                                        "model.layers.0.mlp.experts.down_proj",
                                        "model.layers.0.input_layernorm.weight",
                                        "model.layers.0.post_attention_layernorm.weight",
                                        "model.layers.0.mlp.router.weight",
                                        "model.layers.0.mlp.router.bias",
                                        "model.layers.0.self_attn.sinks",
                                        "model.layers.0.self_attn.q_proj.bias",
                                        "model.layers.0.self_attn.k_proj.bias",
                                        "model.layers.0.self_attn.v_proj.bias",
                                        "model.layers.0.self_attn.o_proj.bias",
                                        "model.layers.0.mlp.experts.gate_up_proj_bias",
                                        "model.layers.0.mlp.experts.down_proj_bias"};
    static const int64_t shapes[][3] = {{32, 2880, 5760},
                                        {32, 2880, 2880},
                                        {2880},
                                        {2880},
                                        {32, 2880},
                                        {32},
                                        {64},
                                        {4096},
                                        {512},
                                        {512},
                                        {2880},
                                        {32, 5760},
                                        {32, 2880}};
    bl_model_config c;
    int64_t layer;
    (void)state;

    assert_int_equal(bl_model_config_preset("gpt-oss-20b", &c), BL_OK);
    for (size_t i = 0; i < BL_COUNT(names); i++) {
        bl_arch_tensor t = bl_arch_tensor_at(&c, 4 + (int64_t)i);
        assert_string_equal(t.name, names[i]);
        for (int d = 0; d < t.n_dims; d++) assert_int_equal(t.shape[d], shapes[i][d]);
        assert_true(t.n_dims == 3 || shapes[i][t.n_dims] == 0);
        assert_int_equal(bl_arch_is_bias(&c, &t), i >= 7);
    }
    assert_string_equal(bl_arch_tensor_at(&c, 4 + BL_COUNT(names)).name,
                        "model.layers.1.self_attn.q_proj.weight");
    assert_int_equal(bl_arch_find_projection(c.arch, names[0], &layer), 4);
    assert_int_equal(bl_arch_find_projection(c.arch, names[11], &layer), -1);
    assert_int_equal(bl_arch_bias_offset(&c, BL_LAYER_EXPERTS, BL_EXPERTS_DOWN) -
                         bl_arch_bias_offset(&c, BL_LAYER_EXPERTS, BL_EXPERTS_GATE_UP),
                     32 * 5760);
}

/* Layers that differ: Qwen3-MoE with layer 1 of 3 dense. Tensors, vectors and LoRA follow. */
static void test_kinds_of_layers(void **state)
{
    enum { R = 2, ATTENTION = 4, NORMS = 4, HIDDEN = 2048, INTER = 6144, HEADS = 4096, KV = 512 };
    bl_lora_options options = {.r = R, .alpha = R};
    bl_lora_layout layout;
    bl_model_config c;
    (void)state;

    assert_int_equal(bl_model_config_preset("qwen3-30b-a3b", &c), BL_OK);
    assert_true(bl_model_peft_modules(&c).absent == 7u << ATTENTION);
    c.n_layers = 3;
    bl_model_set_dense(&c, 1);
    assert_int_equal(bl_model_layers_of(&c, BL_LAYER_EXPERTS), 2);
    int64_t n_sparse = ATTENTION + 3 * 128 + NORMS + 1, n_dense = ATTENTION + 3 + NORMS;
    assert_int_equal(bl_arch_tensor_count(&c), 2 * n_sparse + n_dense + 3);
    bl_arch_tensor up = bl_arch_tensor_at(&c, n_sparse + 5),
                   norm = bl_arch_tensor_at(&c, n_sparse + ATTENTION + 3),
                   last = bl_arch_tensor_at(&c, 2 * n_sparse + n_dense - 1);
    assert_string_equal(up.name, "model.layers.1.mlp.up_proj.weight");
    assert_string_equal(norm.name, "model.layers.1.input_layernorm.weight");
    assert_string_equal(last.name, "model.layers.2.mlp.gate.weight");
    int64_t norms = 2 * HIDDEN + 2 * 128, router = 128 * HIDDEN;
    assert_int_equal(norm.offset, norms + router);
    assert_int_equal(bl_arch_vectors_before(&c, 2), 2 * norms + router);
    assert_int_equal(bl_arch_vector_floats(&c), 3 * norms + 2 * router + HIDDEN);
    assert_true(bl_arch_layer_weights(&c, BL_LAYER_DENSE) ==
                HIDDEN * (2LL * HEADS + 2 * KV + 3 * INTER));
    assert_int_equal(bl_model_peft_modules(&c).absent, 0);

    for (int p = 0; p < c.arch->n_projections; p++) options.target[p] = p < ATTENTION + 3;
    bl_lora_layout_init(&c, &options, &layout);
    int64_t attention = R * (2 * (HIDDEN + HEADS) + 2 * (HIDDEN + KV)),
            mlp = R * 3 * (HIDDEN + INTER);
    assert_int_equal(bl_lora_layer_floats(&layout, 0), attention);
    assert_int_equal(bl_lora_layer_floats(&layout, 1), attention + mlp);
    assert_int_equal(bl_lora_n_weights(&layout, 3), 3 * attention + mlp);
    assert_int_equal(bl_lora_chunks_before(&layout, 2, 7),
                     bl_ceil_div(attention, 7) + bl_ceil_div(attention + mlp, 7));
    assert_true(bl_lora_has(&layout, 1, ATTENTION) && !bl_lora_has(&layout, 2, ATTENTION));
    bl_lora_layout_stack(&layout, true);
    assert_int_equal(bl_lora_floats_before(&layout, 3), 3 * attention + mlp);
    assert_int_equal(layout.a_offset[ATTENTION], attention);
}

/* LoRA's vector has the entry's projections and no others. */
static void test_lora(void **state)
{
    bl_model_config c = config_of(&other);
    bl_lora_options options = {.r = 2, .alpha = 2, .target = {true, true, true, true}};
    bl_lora_layout layout;
    bl_lora_linear linear = {.n_parts = 0};
    bl_peft_modules modules = bl_arch_peft_modules(&other);
    char name[BL_PEFT_NAME_BYTES];
    (void)state;

    bl_lora_layout_init(&c, &options, &layout);
    assert_int_equal(layout.n_floats, 2 * (12 + 8 + 8 + 6 + 12 + 8 + 8 + 12));
    bl_lora_layout_bind(&layout, BL_LAYER_DENSE, BL_GATE_UP, bl_tensor_of(NULL, BL_F32), NULL,
                        &linear);
    assert_int_equal(linear.n_parts, 1);
    bl_peft_tensor_name(&modules, 1, 2, BL_PEFT_B, name);
    assert_string_equal(name, "base_model.model.transformer.h.1.mlp.in.lora_B.weight");
}

/* Per token and layer 4 per weight, 6 per LoRA weight, and attention; the head for the labels. */
static void test_flops(void **state)
{
    bl_model_config c = config_of(&other);
    double weights = 96 + 48 + 96 + 96, attention = 6 * 6 * 5;
    (void)state;

    assert_true(bl_arch_step_flops(&c, 2 * 7, 0, 100, 5, 3) ==
                100 * 2 * (4 * weights + 6 * 7 + attention) + 3 * 4 * 10 * 8);
    /* A window of 2 in layer 1: 2 - 4 / 10 keys in place of 5 / 2. */
    c.windows = (bl_windows){.tokens = 2, .layers = {1u << 1}};
    assert_true(fabs(bl_arch_step_flops(&c, 2 * 7, 0, 100, 5, 3) -
                     (100 * (2 * (4 * weights + 6 * 7) + attention + attention * 1.6 / 2.5) +
                      3 * 4 * 10 * 8)) < 1e-6);
}

/* What is asked before the model is known. */
static void test_table(void **state)
{
    const char *names[BL_MAX_PROJECTIONS];
    int64_t layer;
    (void)state;

    assert_ptr_equal(bl_arch_at(0), &bl_arch_llama);
    assert_ptr_equal(bl_arch_find_target("layers.3.mlp.up_proj", &layer),
                     &bl_llama_projections[BL_UP]);
    assert_int_equal(layer, 3);
    assert_null(bl_arch_find_target("mlp.in", &layer));
    assert_true(bl_arch_find_layer("model.layers.12", &layer));
    assert_int_equal(layer, 12);
    assert_false(bl_arch_find_layer("12", &layer));
    assert_int_equal(bl_arch_target_names(names, BL_PROJECTIONS), BL_PROJECTIONS);
    assert_string_equal(names[BL_O], "o_proj");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tensors),       cmocka_unit_test(test_experts),
        cmocka_unit_test(test_expert_groups), cmocka_unit_test(test_transposed_experts),
        cmocka_unit_test(test_projections),   cmocka_unit_test(test_kinds_of_layers),
        cmocka_unit_test(test_lora),          cmocka_unit_test(test_flops),
        cmocka_unit_test(test_table)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
