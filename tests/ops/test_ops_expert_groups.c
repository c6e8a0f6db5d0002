/* SPDX-License-Identifier: Apache-2.0 */
/* A mixture's layer by groups of experts: any size of group gives the bits of one call. */
#include "experts_case.h"

#include "ops/elementwise.h"

/* The matrices of experts [first, first + n) alone. */
static bl_weight weight_of_group(const experts *x, int64_t first, int64_t n)
{
    const bl_weight_segment *all = &x->weight.segment[0];
    int64_t rows = x->weight.rows / E;
    bl_format_bytes before;
    bl_weight w = x->weight;

    (void)bl_format_measure(bl_format_describe(all->format), first * rows, w.cols, &before);
    w.rows = w.segment[0].rows = n * rows;
    w.segment[0].codes = (const char *)all->codes + before.codes;
    if (all->scales) w.segment[0].scales = (const char *)all->scales + before.scales;
    return w;
}

enum { PAIRS = INTER * INTER / 2 };

/* The same by groups of at most n experts in buffers of a group's rows, and what backward does with
 * rows: h is the input of SwiGLU, and its gradient ends in all_rows (T top_k, INTER). */
static void run_groups(layer *l, int64_t n, const experts *up, const experts *down, bl_dtype dtype,
                       const void *x, void *y, void *all_rows, float *d_weight, float *gradient)
{
    int64_t n_rows = l->n_tokens * bl_min_i64(n, l->top_k);
    size_t bytes = bl_dtype_bytes(dtype);
    void *rows = test_alloc(n_rows * H, bytes), *h = test_alloc(n_rows * INTER, bytes),
         *act = test_alloc(n_rows * INTER / 2, bytes);
    float *sum = test_floats(l->n_tokens * H), *bias = test_random_floats(E * H, 14);
    bl_tensor in = bl_tensor_of(x, dtype), permuted = bl_tensor_of(rows, dtype),
              inner = bl_tensor_of(h, dtype), half = bl_tensor_of(act, dtype),
              all = bl_tensor_of(all_rows, dtype);
    bl_stream *s = l->d.stream;

    route(l, in);
    for (int64_t e = 0; e < E; e += n) {
        int64_t end = bl_min_i64(E, e + n);
        bl_routing g = bl_routing_of_group(&l->routing, e, end - e);
        bl_weight w = weight_of_group(up, e, end - e), v = weight_of_group(down, e, end - e);
        assert_int_equal(bl_permute(s, &(bl_permute_args){g, H, in, permuted}), BL_OK);
        assert_int_equal(
            bl_grouped_matmul(s, &(bl_grouped_matmul_args){g, true, permuted, inner, w, false}),
            BL_OK);
        assert_int_equal(bl_move_rows(s, &(bl_move_rows_args){g, INTER, true, inner, all}), BL_OK);
        assert_int_equal(
            bl_grouped_matmul(s, &(bl_grouped_matmul_args){g, true, inner, permuted, v, false}),
            BL_OK);
        assert_int_equal(
            bl_add_expert_bias(s, &(bl_add_expert_bias_args){g, H, bias + e * H, permuted}), BL_OK);
        assert_int_equal(bl_combine(s, &(bl_combine_args){g, H, true, permuted, in,
                                                          bl_tensor_of(y, dtype), sum}),
                         BL_OK);
        assert_int_equal(bl_weigh_backward(s, &(bl_weigh_backward_args){.routing = g,
                                                                        .C = INTER,
                                                                        .N = H,
                                                                        .h = inner,
                                                                        .d = inner,
                                                                        .dy = permuted,
                                                                        .bias = bias + e * H}),
                         BL_OK);
        assert_int_equal(bl_move_rows(s, &(bl_move_rows_args){g, INTER, false, inner, all}), BL_OK);
        assert_int_equal(
            bl_swiglu_forward(s, &(bl_swiglu_forward_args){.I = INTER / 2,
                                                           .gate_up = inner,
                                                           .h = half,
                                                           .range = bl_routing_range(&g)}),
            BL_OK);
        assert_int_equal(
            bl_swiglu_backward(s, &(bl_swiglu_backward_args){.I = INTER / 2,
                                                             .gate_up = inner,
                                                             .dh = half,
                                                             .d_gate_up = inner,
                                                             .range = bl_routing_range(&g)}),
            BL_OK);
        assert_int_equal(bl_weigh_rows(s, &(bl_weigh_rows_args){g, INTER, 2, true, inner}), BL_OK);
        assert_int_equal(
            bl_grouped_gradient(s, &(bl_grouped_gradient_args){g, INTER, INTER / 2, inner, half,
                                                               gradient + e * PAIRS}),
            BL_OK);
        assert_int_equal(bl_move_rows(s, &(bl_move_rows_args){g, INTER, true, inner, all}), BL_OK);
    }
    test_finish(l->d);
    memcpy(d_weight, l->routing.d_weight, (size_t)(l->n_tokens * l->top_k) * sizeof *d_weight);
    free(rows), free(h), free(act), free(sum), free(bias);
}

/* Groups of any size give a layer's bits. */
static void check_groups(bl_dtype dtype, bl_format format)
{
    layer l = make_layer(T, K, true, 3);
    experts up = make_experts(format, INTER, H), down = make_experts(format, H, INTER);
    size_t bytes = bl_dtype_bytes(dtype), n_y = T * H * bytes, n_rows = T * K * INTER * bytes;
    char *x = test_alloc(T * H, bytes), *y = test_alloc(T * H, bytes),
         *want = test_alloc(T * H, bytes), *rows = test_alloc(T * K * INTER, bytes),
         *want_rows = test_alloc(T * K * INTER, bytes);
    float d_weight[T * K], want_d_weight[T * K], gradient[E * PAIRS], want_gradient[E * PAIRS];

    for (int64_t i = 0; i < T * H; i++)
        if (dtype == BL_F32)
            ((float *)(void *)x)[i] = l.x[i];
        else
            ((uint16_t *)(void *)x)[i] = bl_f32_to_bf16(l.x[i]);
    run_groups(&l, E, &up, &down, dtype, x, want, want_rows, want_d_weight, want_gradient);
    for (int64_t n = 1; n < E; n++) {
        memset(y, 0xff, n_y);
        memset(rows, 0xff, n_rows);
        run_groups(&l, n, &up, &down, dtype, x, y, rows, d_weight, gradient);
        assert_memory_equal(y, want, n_y);
        assert_memory_equal(rows, want_rows, n_rows);
        assert_memory_equal(d_weight, want_d_weight, sizeof d_weight);
        assert_memory_equal(gradient, want_gradient, sizeof gradient);
    }
    free(x), free(y), free(want), free(rows), free(want_rows);
    free_experts(&up);
    free_experts(&down);
    free_layer(&l);
}

static void test_groups(void **state)
{
    (void)state;
    check_groups(BL_F32, BL_FORMAT_F32);
    check_groups(BL_F32, BL_FORMAT_FP8_ROW);
    check_groups(BL_BF16, BL_FORMAT_BF16);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_groups)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
