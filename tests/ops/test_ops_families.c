/* SPDX-License-Identifier: Apache-2.0 */
/* What families other than Llama need of the ops, bit by bit against the same work done plainly, or
 * against the formula. */
#include "ops_test.h"

#include "ops/elementwise.h"
#include "ops/experts.h"
#include "ops/norm.h"
#include "ops/rope.h"

/* A norm of heads inside wider rows is the norm of the same rows side by side, bit by bit. */
static void norms_of_heads_are_norms_of_rows(void **state)
{
    enum { T = 5, HEADS = 3, H = 7, STRIDE = HEADS * H + 4, N = T * HEADS * H };
    test_device d = test_device_create(2);
    float *x = test_random_floats(N, 1), *w = test_random_floats(H, 2),
          *dy = test_random_floats(N, 3), *y = test_floats(N), *dx = test_floats(N);
    float wide_x[T * STRIDE] = {0}, wide_d[T * STRIDE] = {0}, wide_y[T * STRIDE] = {0};
    float rstd[T * HEADS], wide_rstd[T * HEADS];
    bl_rmsnorm_forward_args forward = {.T = T * HEADS, .H = H, .eps = 1e-5, .w = w, .rstd = rstd};
    bl_rmsnorm_backward_args backward = {.T = T * HEADS, .H = H, .w = w, .rstd = rstd};
    (void)state;

    for (int i = 0; i < N; i++) {
        wide_x[i / (HEADS * H) * STRIDE + i % (HEADS * H)] = x[i];
        wide_d[i / (HEADS * H) * STRIDE + i % (HEADS * H)] = dy[i];
    }
    forward.x = bl_tensor_f32(x), forward.y = bl_tensor_f32(y);
    backward.x = bl_tensor_f32(x), backward.dy = bl_tensor_f32(dy), backward.dx = bl_tensor_f32(dx);
    assert_int_equal(bl_rmsnorm_forward(d.stream, &forward), BL_OK);
    assert_int_equal(bl_rmsnorm_backward(d.stream, &backward), BL_OK);
    forward.T = backward.T = T, forward.n_heads = backward.n_heads = HEADS;
    forward.row_stride = backward.row_stride = STRIDE;
    forward.x = bl_tensor_f32(wide_x), forward.y = bl_tensor_f32(wide_y), forward.rstd = wide_rstd;
    backward.x = bl_tensor_f32(wide_x), backward.rstd = wide_rstd;
    backward.dy = backward.dx = bl_tensor_f32(wide_d); /* in place, as a layer has it */
    assert_int_equal(bl_rmsnorm_forward(d.stream, &forward), BL_OK);
    assert_int_equal(bl_rmsnorm_backward(d.stream, &backward), BL_OK);
    test_finish(d);
    test_same_bits("rstd", wide_rstd, rstd, T * HEADS);
    for (int t = 0; t < T; t++) {
        test_same_bits("y", wide_y + t * STRIDE, y + t * HEADS * H, HEADS * H);
        test_same_bits("dx", wide_d + t * STRIDE, dx + t * HEADS * H, HEADS * H);
        for (int c = HEADS * H; c < STRIDE; c++)
            assert_true(wide_y[t * STRIDE + c] == 0 && wide_d[t * STRIDE + c] == 0);
    }
    free(x), free(w), free(dy), free(y), free(dx);
    test_device_destroy(d);
}

/* A document of more than long_after tokens, with those before it, takes the tables behind. */
static void rope_of_long_documents_has_tables_of_its_own(void **state)
{
    enum { T = 9, D = 4, HALF = D / 2, N_TABLE = 16 * HALF };
    static const int32_t cu[] = {0, 3, 8, 9};
    static const double inv_freq[] = {1.0, 0.1}, long_inv_freq[] = {0.5, 0.01};
    float tables[4 * N_TABLE];
    test_device d = test_device_create(2);
    (void)state;

    bl_rope_fill_tables(0, 16, HALF, inv_freq, 1.0, tables, tables + N_TABLE);
    bl_rope_fill_tables(0, 16, HALF, long_inv_freq, 2.0, tables + 2 * N_TABLE,
                        tables + 3 * N_TABLE);
    assert_true(tables[2 * N_TABLE] == 2.0f); /* scaled */
    for (int offset = 0; offset < 3; offset += 2) {
        float *x = test_random_floats(T * D, 1), *want = test_random_floats(T * D, 1);
        bl_rope_args args = {.T = offset ? 3 : T,
                             .n_heads = 1,
                             .d = D,
                             .row_stride = D,
                             .n_documents = offset ? 1 : 3,
                             .position_offset = offset,
                             .direction = 1,
                             .cu_seqlens = cu,
                             .cos_table = tables,
                             .sin_table = tables + N_TABLE,
                             .x = bl_tensor_f32(x),
                             .long_after = 4,
                             .long_offset = 2 * N_TABLE};
        assert_int_equal(bl_rope(d.stream, &args), BL_OK);
        bl_rope_args one = args; /* document by document, with its tables alone */
        one.n_documents = 1, one.long_after = 0;
        for (int k = 0; k < args.n_documents; k++) {
            int32_t alone[] = {0, cu[k + 1] - cu[k]};
            const float *from = alone[1] + offset > 4 ? tables + 2 * N_TABLE : tables;
            one.T = alone[1], one.cu_seqlens = alone, one.x = bl_tensor_f32(want + cu[k] * D);
            one.cos_table = from, one.sin_table = from + N_TABLE;
            assert_int_equal(bl_rope(d.stream, &one), BL_OK);
            test_finish(d);
        }
        test_same_bits("x", x, want, T * D);
        free(x), free(want);
    }
    test_device_destroy(d);
}

static void scaling_scales(void **state)
{
    enum { N = 40000 };
    test_device d = test_device_create(2);
    float *x = test_random_floats(N, 1), *want = test_random_floats(N, 1);
    bl_scale_args args = {.n = N, .scale = 0.7f, .x = bl_tensor_f32(x), .y = bl_tensor_f32(x)};
    (void)state;

    for (int i = 0; i < N; i++) want[i] = 0.7f * want[i];
    assert_int_equal(bl_scale(d.stream, &args), BL_OK);
    test_finish(d);
    test_same_bits("y", x, want, N);
    free(x), free(want);
    test_device_destroy(d);
}

static void biases_add_to_every_row(void **state)
{
    enum { T = 7, N = 20000 }; /* rows of more than an item's elements */
    test_device d = test_device_create(2);
    float *y = test_random_floats(T * N, 1), *bias = test_random_floats(N, 2),
          *want = test_floats(T * N);
    bl_add_bias_args args = {.T = T, .N = N, .bias = bias, .y = bl_tensor_f32(y)};
    (void)state;

    for (int i = 0; i < T * N; i++) want[i] = y[i] + bias[i % N];
    assert_int_equal(bl_add_bias(d.stream, &args), BL_OK);
    test_finish(d);
    test_same_bits("y", y, want, T * N);
    free(y), free(bias), free(want);
    test_device_destroy(d);
}

static double clamped(double g, double u)
{
    double gate = fmin(g, 2), up = fmax(-2, fmin(u, 2));
    return (up + 1) * gate / (1 + exp(-1.702 * gate));
}

/* h against the formula, its gradients against central differences: off by the step's square times
 * a third derivative below 5, and by 1e-16 / 1e-4; a place is at least a step from a limit. */
static void clamped_swiglu_matches_the_formula(void **state)
{
    enum { N = 5, I = 600, BOTH = 2 * N * I };
    static const double STEP = 1e-4;
    test_device d = test_device_create(3);
    float *x = test_random_floats(BOTH, 20), *dh = test_random_floats(N * I, 21),
          *h = test_floats(N * I), *dx = test_floats(BOTH);
    bl_swiglu_clamped_forward_args forward = {N,  I, 1.702f, 2, bl_tensor_f32(x), bl_tensor_f32(h),
                                              {0}};
    bl_swiglu_clamped_backward_args backward = {
        N, I, 1.702f, 2, bl_tensor_f32(x), bl_tensor_f32(dh), bl_tensor_f32(dx), {0}};
    (void)state;

    for (int i = 0; i < BOTH; i++) x[i] = roundf(x[i] * 4096) / 1024 + 1.0f / 2048;
    assert_int_equal(bl_swiglu_clamped_forward(d.stream, &forward), BL_OK);
    assert_int_equal(bl_swiglu_clamped_backward(d.stream, &backward), BL_OK);
    test_finish(d);
    for (int i = 0; i < N * I; i++) {
        double g = (double)x[2 * i], u = (double)x[2 * i + 1], dy = (double)dh[i],
               want = clamped(g, u),
               dg = dy * (clamped(g + STEP, u) - clamped(g - STEP, u)) / (2 * STEP),
               du = dy * (clamped(g, u + STEP) - clamped(g, u - STEP)) / (2 * STEP);
        test_close("h", h + i, &want, 1, 1e-6, 16 * U);
        test_close("dg", dx + 2 * i, &dg, 1, 1e-6, 16 * U);
        test_close("du", dx + 2 * i + 1, &du, 1, 1e-6, 16 * U);
    }
    /* NaN stays NaN, on both sides */
    x[0] = x[3] = NAN;
    backward.d_gate_up = bl_tensor_f32(x); /* in place */
    assert_int_equal(bl_swiglu_clamped_forward(d.stream, &forward), BL_OK);
    assert_int_equal(bl_swiglu_clamped_backward(d.stream, &backward), BL_OK);
    test_finish(d);
    assert_true(isnan(h[0]) && isnan(h[1]) && isnan(x[0]));
    test_same_bits("in place", x + 4, dx + 4, BOTH - 4);
    test_device_destroy(d);
    free(x), free(dh), free(h), free(dx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(norms_of_heads_are_norms_of_rows),
        cmocka_unit_test(biases_add_to_every_row),
        cmocka_unit_test(clamped_swiglu_matches_the_formula),
        cmocka_unit_test(scaling_scales),
        cmocka_unit_test(rope_of_long_documents_has_tables_of_its_own),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
