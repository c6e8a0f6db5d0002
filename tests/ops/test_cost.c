/* SPDX-License-Identifier: Apache-2.0 */
/* Costs of ops: FLOPs and bytes against the formulas of docs/internals/plan.md, the single cost of
 * a frozen matrix, and seconds from rates. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "ops/cost.h"

enum { T = 96, N = 256, K = 512 };

static const bl_cost_setting gpu = {.kind = BL_DEVICE_CUDA,
                                    .document_tokens = 64,
                                    .label_part = 0.5},
                             cpu = {
                                 .kind = BL_DEVICE_CPU, .document_tokens = 64, .label_part = 0.5};

static bl_tensor act(const bl_cost_setting *s)
{
    return bl_tensor_of(s, s->kind == BL_DEVICE_CUDA ? BL_BF16 : BL_F32);
}

static bl_matmul_weight_args product(const bl_cost_setting *s, bl_matmul_mode mode, bool forward,
                                     bl_format format)
{
    return (bl_matmul_weight_args){
        .forward = forward,
        .mode = mode,
        .beta = 1,
        .T = T,
        .in = act(s),
        .weight = {
            .rows = N, .cols = K, .n_segments = 1, .segment = {{.format = format, .rows = N}}}};
}

static void assert_kernel(const bl_cost *cost, int i, bl_cost_rate rate, double flops, double bytes)
{
    assert_in_range(cost->n, i + 1, BL_COST_KERNELS);
    assert_int_equal(cost->kernel[i].rate, rate);
    assert_float_equal(cost->kernel[i].flops, flops, 0);
    assert_float_equal(cost->kernel[i].bytes, bytes, 0);
}

static void a_product_moves_its_operands(void **state)
{
    bl_matmul_weight_args dense = product(&gpu, BL_MATMUL_BF16, true, BL_FORMAT_BF16),
                          stored = product(&cpu, BL_MATMUL_BF16, true, BL_FORMAT_FP8_ROW);
    (void)state;
    bl_cost cost = bl_cost_matmul_weight(&gpu, &dense);
    assert_int_equal(cost.n, 1);
    assert_kernel(&cost, 0, BL_COST_GEMM, 2.0 * T * N * K, 2 * (N * K + T * K + 2 * T * N));
    dense.beta = 0; /* y is written only */
    cost = bl_cost_matmul_weight(&gpu, &dense);
    assert_kernel(&cost, 0, BL_COST_GEMM, 2.0 * T * N * K, 2 * (N * K + T * K + T * N));
    cost = bl_cost_matmul_weight(&cpu, &stored); /* codes are read as they are */
    assert_int_equal(cost.n, 1);
    assert_kernel(&cost, 0, BL_COST_GEMM, 2.0 * T * N * K, N * K + 4 * (T * K + 2 * T * N));
}

/* As the product itself: `made` decides, and a place that is too small is as none. */
static void a_matrix_is_prepared_once(void **state)
{
    bl_matmul_prepared prepared = {.memory_bytes = SIZE_MAX}, small = {.memory_bytes = 1};
    bl_matmul_weight_args y = product(&gpu, BL_MATMUL_BF16, true, BL_FORMAT_FP8_ROW),
                          dx = product(&gpu, BL_MATMUL_FP8, false, BL_FORMAT_FP8_ROW);
    (void)state;
    for (int use = 0; use < 2; use++) { /* without `prepared`: each time */
        bl_cost cost = bl_cost_matmul_weight(&gpu, &y);
        assert_int_equal(cost.n, 2);
        assert_kernel(&cost, 0, BL_COST_PREPARE, 0, 3 * N * K);
    }
    y.prepared = &small;
    assert_int_equal(bl_cost_matmul_weight(&gpu, &y).n, 2);
    assert_int_equal(bl_cost_matmul_weight(&gpu, &y).n, 2);
    y.prepared = &prepared;
    assert_int_equal(bl_cost_matmul_weight(&gpu, &y).n, 2);
    assert_int_equal(bl_cost_matmul_weight(&gpu, &y).n, 1);
    prepared.made = 0;
    dx.prepared = &prepared; /* codes transposed; dy quantized; the product */
    bl_cost cost = bl_cost_matmul_weight(&gpu, &dx);
    assert_int_equal(cost.n, 3);
    assert_kernel(&cost, 0, BL_COST_PREPARE, 0, 2 * N * K);
    assert_kernel(&cost, 1, BL_COST_MEMORY, 0, 3 * T * N);
    assert_kernel(&cost, 2, BL_COST_FP8_GEMM, 2.0 * T * N * K, N * K + T * N + 2 * 2 * T * K);
    assert_int_equal(bl_cost_matmul_weight(&gpu, &dx).n, 2);
    for (int sums = BL_SUMS_FULL; sums <= BL_SUMS_FAST; sums++) {
        dx.sums = (bl_matmul_sums)sums;
        cost = bl_cost_matmul_weight(&gpu, &dx);
        assert_int_equal(cost.kernel[1].rate,
                         sums == BL_SUMS_FAST ? BL_COST_FP8_FAST_GEMM : BL_COST_FP8_GEMM);
    }
}

/* A product's addend is read. */
static void an_addend_is_read(void **state)
{
    bl_matmul_args a = {.M = T, .N = N, .K = 8, .beta = 1, .a = act(&gpu)};
    (void)state;
    bl_cost in_place = bl_cost_matmul(&gpu, &a);
    a.addend = act(&gpu);
    bl_cost apart = bl_cost_matmul(&gpu, &a);
    assert_kernel(&in_place, 0, BL_COST_LORA, 2.0 * T * N * 8, 2 * (T * 8 + 8 * N + T * N));
    assert_kernel(&apart, 0, BL_COST_LORA, 2.0 * T * N * 8, 2 * (T * 8 + 8 * N + 2 * T * N));
}

/* Segments of several formats are dequantized, each from its stored format. */
static void a_mixed_matrix_is_dequantized(void **state)
{
    bl_matmul_weight_args y = product(&gpu, BL_MATMUL_FP8, true, BL_FORMAT_FP8_ROW);
    (void)state;
    y.weight.n_segments = 2;
    y.weight.segment[0].rows = N / 2;
    y.weight.segment[1] = (bl_weight_segment){.format = BL_FORMAT_BF16, .rows = N / 2};
    bl_cost cost = bl_cost_matmul_weight(&gpu, &y);
    assert_int_equal(cost.n, 2);
    assert_kernel(&cost, 0, BL_COST_PREPARE, 0, N * K / 2 + N * K + 2 * N * K);
    assert_kernel(&cost, 1, BL_COST_GEMM, 2.0 * T * N * K, 2 * (N * K + T * K + 2 * T * N));
}

static void attention_and_head_know_the_data(void **state)
{
    enum { HEADS = 8, KV = 2, D = 16, Q = HEADS * D, QKV = Q + 2 * KV * D, V = 1000 };
    bl_attention_backward_args a = {
        .T = T, .n_heads = HEADS, .n_kv_heads = KV, .d = D, .q = act(&gpu)};
    bl_loss_head_args head = {.T = T, .H = K, .V = V, .x = act(&gpu), .dx = act(&gpu)};
    (void)state;
    head.head = (bl_weight){
        .rows = V, .cols = K, .n_segments = 1, .segment = {{.format = BL_FORMAT_BF16, .rows = V}}};
    bl_cost cost = bl_cost_attention_backward(&gpu, &a);
    assert_kernel(&cost, 0, BL_COST_ATTENTION_BACKWARD, 5.0 * T * 64 * Q, 2 * T * 2 * (Q + QKV));
    a.window = 16;
    cost = bl_cost_attention_backward(&gpu, &a); /* 16 - 16^2 / (2 64) keys */
    assert_kernel(&cost, 0, BL_COST_ATTENTION_BACKWARD, 10.0 * T * (16 - 2) * Q,
                  2 * T * 2 * (Q + QKV));
    a.window = 64; /* no less than all */
    cost = bl_cost_attention_backward(&gpu, &a);
    assert_kernel(&cost, 0, BL_COST_ATTENTION_BACKWARD, 5.0 * T * 64 * Q, 2 * T * 2 * (Q + QKV));
    cost = bl_cost_loss_head(&gpu, &head); /* half of the tokens have labels */
    assert_int_equal(cost.n, 3);
    assert_kernel(&cost, 1, BL_COST_HEAD, 2.0 * T / 2 * V * K, 2 * (V * K + T / 2 * (V + K)));
    assert_kernel(&cost, 2, BL_COST_MEMORY, 0, T / 2 * V * (3 * 4 + 2));
    head.dx = (bl_tensor){0};
    assert_int_equal(bl_cost_loss_head(&gpu, &head).n, 2);
}

static void the_slowest_limit_decides(void **state)
{
    bl_rates r = {.gemm_flops_per_s = 100, .memory_bytes_per_s = 10, .launch_s = 1};
    bl_cost_kernel k = {.rate = BL_COST_LORA, .flops = 1000, .bytes = 50};
    (void)state;
    assert_float_equal(bl_cost_seconds(&k, &r), 10, 1e-12); /* as gemm */
    r.lora_flops_per_s = 500;
    assert_float_equal(bl_cost_seconds(&k, &r), 5, 1e-12);
    k.flops = k.bytes = 1;
    assert_float_equal(bl_cost_seconds(&k, &r), 1, 1e-12);
    k = (bl_cost_kernel){.rate = BL_COST_OPTIMIZER, .bytes = 50};
    r.optimizer_bytes_per_s = 5;
    assert_float_equal(bl_cost_seconds(&k, &r), 10, 1e-12);
    r.decode_weights_per_s = 4; /* three bytes per weight */
    k = (bl_cost_kernel){.rate = BL_COST_PREPARE, .bytes = 60};
    assert_float_equal(bl_cost_seconds(&k, &r), 5, 1e-12);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_addend_is_read),
        cmocka_unit_test(a_product_moves_its_operands),
        cmocka_unit_test(a_matrix_is_prepared_once),
        cmocka_unit_test(a_mixed_matrix_is_dequantized),
        cmocka_unit_test(attention_and_head_know_the_data),
        cmocka_unit_test(the_slowest_limit_decides),
    };
    return cmocka_run_group_tests_name("cost", tests, NULL, NULL);
}
