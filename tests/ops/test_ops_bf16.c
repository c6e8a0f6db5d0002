/* SPDX-License-Identifier: Apache-2.0 */
/* Ops on bf16 compute what they compute on fp32 (which other tests compare with formulas in double)
 * and round it once: every element is bit for bit the rounded fp32 result of the same inputs, for
 * any number of threads. Attention, the loss head and products, whose sums differ, have
 * separate tests. */
#include "half_test.h"

#include "ops/elementwise.h"
#include "ops/experts.h"
#include "ops/norm.h"
#include "ops/rope.h"

enum { N_TENSORS = 3 };

/* An op on up to three activations, the last of which it writes. */
typedef struct op_case {
    const char *name;
    int64_t n[N_TENSORS]; /* elements; 0: none */
    bl_status (*run)(bl_stream *stream, const struct op_case *c, const bl_tensor *t);
    int64_t T, H;
    int flag;
    float *stats; /* w, rstd, mean: H and T floats each */
} op_case;

static bl_status run_swiglu(bl_stream *s, const op_case *c, const bl_tensor *t)
{
    return bl_swiglu_forward(
        s, &(bl_swiglu_forward_args){.T = c->T, .I = c->H, .gate_up = t[0], .h = t[2]});
}

static bl_status run_swiglu_backward(bl_stream *s, const op_case *c, const bl_tensor *t)
{
    return bl_swiglu_backward(
        s,
        &(bl_swiglu_backward_args){
            .T = c->T, .I = c->H, .gate_up = t[0], .dh = t[1], .d_gate_up = c->flag ? t[0] : t[2]});
}

static bl_status run_clamped(bl_stream *s, const op_case *c, const bl_tensor *t)
{
    return bl_swiglu_clamped_forward(
        s, &(bl_swiglu_clamped_forward_args){c->T, c->H, 1.702f, 0.5f, t[0], t[2], {0}});
}

static bl_status run_clamped_backward(bl_stream *s, const op_case *c, const bl_tensor *t)
{
    return bl_swiglu_clamped_backward(
        s, &(bl_swiglu_clamped_backward_args){
               c->T, c->H, 1.702f, 0.5f, t[0], t[1], c->flag ? t[0] : t[2], {0}});
}

/* One expert. */
static bl_status run_expert_bias(bl_stream *s, const op_case *c, const bl_tensor *t)
{
    static int32_t first[2];
    first[1] = (int32_t)c->T;
    return bl_add_expert_bias(
        s, &(bl_add_expert_bias_args){
               .routing = {.T = c->T, .n_experts = 1, .top_k = 1, .first = first},
               .N = c->H,
               .bias = c->stats,
               .rows = t[2]});
}

static bl_status run_gelu(bl_stream *s, const op_case *c, const bl_tensor *t)
{
    return bl_gelu_forward(
        s, &(bl_gelu_forward_args){
               .n = c->T * c->H, .form = (bl_gelu_form)c->flag, .u = t[0], .h = t[2]});
}

static bl_status run_gelu_backward(bl_stream *s, const op_case *c, const bl_tensor *t)
{
    return bl_gelu_backward(
        s, &(bl_gelu_backward_args){
               .n = c->T * c->H, .form = (bl_gelu_form)c->flag, .u = t[0], .dh = t[1], .du = t[2]});
}

static bl_status run_add(bl_stream *s, const op_case *c, const bl_tensor *t)
{
    return bl_add(
        s, &(bl_add_args){
               .n = c->T * c->H, .a = t[0], .b = t[1], .y = t[2], .without_workers = c->flag != 0});
}

static bl_status run_add_bias(bl_stream *s, const op_case *c, const bl_tensor *t)
{
    return bl_add_bias(s, &(bl_add_bias_args){.T = c->T, .N = c->H, .bias = c->stats, .y = t[2]});
}

static bl_status run_scale(bl_stream *s, const op_case *c, const bl_tensor *t)
{
    return bl_scale(s, &(bl_scale_args){.n = c->T * c->H, .scale = 0.7f, .x = t[0], .y = t[2]});
}

static bl_status run_dropout(bl_stream *s, const op_case *c, const bl_tensor *t)
{
    static const int64_t sample[64] = {3, 1};
    static const int32_t position[64] = {0, 5};
    return bl_dropout(s, &(bl_dropout_args){.T = c->T,
                                            .C = c->H,
                                            .p = c->flag ? 0.3f : 0.0f,
                                            .sample = sample,
                                            .position = position,
                                            .x = t[0],
                                            .y = t[2]});
}

static bl_status run_rmsnorm(bl_stream *s, const op_case *c, const bl_tensor *t)
{
    return bl_rmsnorm_forward(s, &(bl_rmsnorm_forward_args){.T = c->T,
                                                            .H = c->H,
                                                            .eps = 1e-5,
                                                            .x = t[0],
                                                            .y = t[2],
                                                            .w = c->stats,
                                                            .rstd = c->stats + c->H});
}

static bl_status run_rmsnorm_backward(bl_stream *s, const op_case *c, const bl_tensor *t)
{
    return bl_rmsnorm_backward(s, &(bl_rmsnorm_backward_args){.T = c->T,
                                                              .H = c->H,
                                                              .accumulate = c->flag,
                                                              .x = t[0],
                                                              .dy = t[1],
                                                              .dx = t[2],
                                                              .w = c->stats,
                                                              .rstd = c->stats + c->H});
}

static bl_status run_layernorm(bl_stream *s, const op_case *c, const bl_tensor *t)
{
    return bl_layernorm_forward(s, &(bl_layernorm_forward_args){.T = c->T,
                                                                .H = c->H,
                                                                .eps = 1e-5,
                                                                .x = t[0],
                                                                .y = t[2],
                                                                .w = c->stats,
                                                                .b = c->stats,
                                                                .mean = c->stats + c->H + c->T,
                                                                .rstd = c->stats + c->H});
}

static bl_status run_layernorm_backward(bl_stream *s, const op_case *c, const bl_tensor *t)
{
    return bl_layernorm_backward(s, &(bl_layernorm_backward_args){.T = c->T,
                                                                  .H = c->H,
                                                                  .accumulate = c->flag,
                                                                  .x = t[0],
                                                                  .dy = t[1],
                                                                  .dx = t[2],
                                                                  .w = c->stats,
                                                                  .mean = c->stats + c->H + c->T,
                                                                  .rstd = c->stats + c->H});
}

static bl_status run_rope(bl_stream *s, const op_case *c, const bl_tensor *t)
{
    static int32_t ends[2];
    ends[1] = (int32_t)c->T;
    return bl_rope(s, &(bl_rope_args){.T = c->T,
                                      .n_heads = 1,
                                      .d = c->H / 2 * 2,
                                      .row_stride = c->H,
                                      .n_documents = 1,
                                      .direction = 1,
                                      .cu_seqlens = ends,
                                      .cos_table = c->stats,
                                      .sin_table = c->stats + 1,
                                      .x = t[2]});
}

static bl_status run_embedding(bl_stream *s, const op_case *c, const bl_tensor *t)
{
    static const int32_t ids[64] = {1, 0, 1};
    return bl_embedding(
        s, &(bl_embedding_args){
               .T = c->T, .H = c->H, .ids = ids, .table = bl_tensor_f32(c->stats), .y = t[2]});
}

/* The op on fp32 and on bf16, from the same numbers. */
static void check_op(const op_case *c, int threads)
{
    test_device d = test_device_create(threads);
    bl_tensor wide[N_TENSORS] = {0}, half[N_TENSORS] = {0};

    for (int i = 0; i < N_TENSORS; i++) {
        float *x = test_random_floats(c->n[i], 31 + (uint64_t)i);
        test_round_floats(x, c->n[i]);
        wide[i] = bl_tensor_f32(x);
        half[i] = bl_tensor_of(test_rounded(x, c->n[i]), BL_BF16);
    }
    assert_int_equal(c->run(d.stream, c, wide), BL_OK);
    assert_int_equal(c->run(d.stream, c, half), BL_OK);
    test_finish(d);
    for (int i = 0; i < N_TENSORS; i++)
        for (int64_t k = 0; k < c->n[i]; k++) {
            uint16_t want = bl_f32_to_bf16(((float *)wide[i].data)[k]),
                     got = ((uint16_t *)half[i].data)[k];
            if (want == got) continue;
            print_error("%s, %lld x %lld, %d threads: tensor %d [%lld]: %04x, not %04x\n", c->name,
                        (long long)c->T, (long long)c->H, threads, i, (long long)k, got, want);
            fail();
        }
    for (int i = 0; i < N_TENSORS; i++) free(wide[i].data), free(half[i].data);
    test_device_destroy(d);
}

static void ops_round_what_they_compute_in_fp32(void **state)
{
    static const int64_t shapes[][2] = {{1, 2}, {3, 30}, {2, 511}, {5, 1025}, {40, 700}};
    (void)state;
    for (size_t k = 0; k < BL_COUNT(shapes); k++) {
        int64_t T = shapes[k][0], H = shapes[k][1], n = T * H;
        float *stats = test_random_floats(2 * H + (2 + H) * T + 2, 9);
        const op_case cases[] = {
            {"swiglu", {2 * n, 0, n}, run_swiglu, T, H, 0, stats},
            {"swiglu backward", {2 * n, n, 2 * n}, run_swiglu_backward, T, H, 0, stats},
            {"swiglu backward in place", {2 * n, n, n}, run_swiglu_backward, T, H, 1, stats},
            {"swiglu clamped", {2 * n, 0, n}, run_clamped, T, H, 0, stats},
            {"swiglu clamped backward", {2 * n, n, 2 * n}, run_clamped_backward, T, H, 0, stats},
            {"swiglu clamped in place", {2 * n, n, n}, run_clamped_backward, T, H, 1, stats},
            {"expert bias", {0, 0, n}, run_expert_bias, T, H, 0, stats},
            {"gelu", {n, 0, n}, run_gelu, T, H, BL_GELU_ERF, stats},
            {"gelu tanh", {n, 0, n}, run_gelu, T, H, BL_GELU_TANH, stats},
            {"gelu backward", {n, n, n}, run_gelu_backward, T, H, BL_GELU_ERF, stats},
            {"gelu tanh backward", {n, n, n}, run_gelu_backward, T, H, BL_GELU_TANH, stats},
            {"add", {n, n, n}, run_add, T, H, 0, stats},
            {"add without workers", {n, n, n}, run_add, T, H, 1, stats},
            {"add bias", {0, 0, n}, run_add_bias, T, H, 0, stats},
            {"scale", {n, 0, n}, run_scale, T, H, 0, stats},
            {"dropout 0", {n, 0, n}, run_dropout, T, H, 0, stats},
            {"dropout", {n, 0, n}, run_dropout, T, H, 1, stats},
            {"rmsnorm", {n, 0, n}, run_rmsnorm, T, H, 0, stats},
            {"rmsnorm backward", {n, n, n}, run_rmsnorm_backward, T, H, 0, stats},
            {"rmsnorm backward, added", {n, n, n}, run_rmsnorm_backward, T, H, 1, stats},
            {"layernorm", {n, 0, n}, run_layernorm, T, H, 0, stats},
            {"layernorm backward", {n, n, n}, run_layernorm_backward, T, H, 0, stats},
            {"layernorm backward, added", {n, n, n}, run_layernorm_backward, T, H, 1, stats},
            {"rope", {0, 0, n}, run_rope, T, H, 0, stats},
            {"embedding", {0, 0, n}, run_embedding, T, H, 0, stats},
        };
        for (size_t i = 0; i < BL_COUNT(cases); i++)
            for (int threads = 1; threads <= 3; threads++) check_op(&cases[i], threads);
        free(stats);
    }
}

/* Every kind of number, at every place in a vector. */
static void casts_round_to_nearest_even(void **state)
{
    static const uint32_t patterns[] = {0,          0x80000000, 0x3f800000, 0x3f808000, 0x3f818000,
                                        0x3f807fff, 0x3f808001, 0x7f7fffff, 0x7f800000, 0xff800000,
                                        0x7f800001, 0xffc00000, 0x7fffffff, 1,          0x00008000,
                                        0x00018000, 0x007fffff, 0x80008001, 0x477ff000};
    enum { N = 16 * (int)BL_COUNT(patterns) + 5 };
    float x[N], wide[N];
    uint16_t y[N];
    test_device d = test_device_create(2);

    (void)state;
    for (int i = 0; i < N; i++) memcpy(&x[i], &patterns[i % (int)BL_COUNT(patterns)], sizeof x[i]);
    bl_tensor narrow = bl_tensor_of(y, BL_BF16);
    assert_int_equal(bl_cast(d.stream, &(bl_cast_args){.n = N, .x = bl_tensor_f32(x), .y = narrow}),
                     BL_OK);
    assert_int_equal(
        bl_cast(d.stream, &(bl_cast_args){.n = N, .x = narrow, .y = bl_tensor_f32(wide)}), BL_OK);
    test_finish(d);
    for (int i = 0; i < N; i++) {
        float want = bl_bf16_to_f32(y[i]);
        assert_int_equal(y[i], bl_f32_to_bf16(x[i]));
        assert_memory_equal(&wide[i], &want, sizeof want);
    }
    test_device_destroy(d);
}

static void dtypes_that_do_not_fit_are_refused(void **state)
{
    float x[8] = {0};
    test_device d = test_device_create(1);
    bl_tensor f32 = bl_tensor_f32(x), bf16 = bl_tensor_of(x, BL_BF16),
              f16 = bl_tensor_of(x, BL_F16);

    (void)state;
    assert_int_equal(bl_add(d.stream, &(bl_add_args){.n = 1, .a = f32, .b = bf16, .y = f32}),
                     BL_EINTERNAL);
    assert_int_equal(bl_scale(d.stream, &(bl_scale_args){.n = 1, .x = f16, .y = f16}),
                     BL_EINTERNAL);
    assert_int_equal(bl_device_set_act(d.device, BL_F16), BL_EUSAGE);
    assert_int_equal(bl_device_act(d.device), BL_F32);
    assert_int_equal(bl_device_set_act(d.device, BL_BF16), BL_OK);
    assert_int_equal(bl_device_act(d.device), BL_BF16);
    test_device_destroy(d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ops_round_what_they_compute_in_fp32),
        cmocka_unit_test(casts_round_to_nearest_even),
        cmocka_unit_test(dtypes_that_do_not_fit_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
