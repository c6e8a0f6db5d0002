/* SPDX-License-Identifier: Apache-2.0 */
/* AdamW against a double reference written the way torch.optim.AdamW (single tensor) orders it;
 * norms and clipping. */
#include "ops_test.h"

#include "ops/optimizer.h"

static void adamw_follows_torch(void **state)
{
    (void)state;
    const int64_t sizes[] = {0, 1, 7, 40000};
    for (size_t k = 0; k < BL_COUNT(sizes); k++) {
        int64_t n = sizes[k];
        const double lr = 1e-2, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, decay = 0.1, clip = 0.25;
        float *first = NULL;
        for (int threads = 1; threads <= 3; threads++) {
            test_device d = test_device_create(threads);
            float *w = test_random_floats(n, 1), *m = test_floats(n), *v = test_floats(n);
            double *want = test_doubles(n), *want_m = test_doubles(n), *want_v = test_doubles(n);
            for (int64_t i = 0; i < n; i++) want[i] = (double)w[i];
            for (int64_t step = 1; step <= 5; step++) {
                float *grad = test_random_floats(n, (uint64_t)step + 10);
                bl_adamw_args args = {.n = n,
                                      .step = step,
                                      .lr = lr,
                                      .beta1 = beta1,
                                      .beta2 = beta2,
                                      .eps = eps,
                                      .weight_decay = decay,
                                      .grad_scale = step % 2 ? &clip : NULL,
                                      .grad = grad,
                                      .w = w,
                                      .m = bl_tensor_f32(m),
                                      .v = bl_tensor_f32(v)};
                assert_int_equal(bl_adamw(d.stream, &args), BL_OK);
                test_finish(d);
                for (int64_t i = 0; i < n; i++) {
                    double g = (double)grad[i] * (step % 2 ? clip : 1.0);
                    want[i] *= 1 - lr * decay;
                    want_m[i] += (1 - beta1) * (g - want_m[i]);
                    want_v[i] = beta2 * want_v[i] + (1 - beta2) * g * g;
                    double correction1 = 1 - pow(beta1, (double)step),
                           correction2 = 1 - pow(beta2, (double)step);
                    want[i] -=
                        lr / correction1 * want_m[i] / (sqrt(want_v[i]) / sqrt(correction2) + eps);
                }
                free(grad);
            }
            /* Each of the 5 steps rounds the sum that is m, and a difference and a product of a
             * tenth of 1.4 at most before it. m can pass through zero, so its errors count against
             * its terms, not against itself. Of v the square, too, and what is added is at most v.
             * An update is at most about 3 lr, of six roundings and the errors of m and v. */
            test_close("m", m, want_m, n, 5 * (0.4 + 0.3) * U, U);
            test_close("v", v, want_v, n, 0, 5 * 4 * U);
            test_close("w", w, want, n, 5 * U + 5 * 3 * lr * 20 * U, 5 * U);
            if (first)
                test_same_bits("w", first, w, n);
            else
                first = w;
            if (w != first) free(w);
            free(m);
            free(v);
            free(want);
            free(want_m);
            free(want_v);
            test_device_destroy(d);
        }
        free(first);
    }
}

static void first_step_moves_by_the_learning_rate(void **state)
{
    (void)state;
    float w[3] = {1, 1, 1}, m[3] = {0}, v[3] = {0}, grad[3] = {1e-3f, -5.0f, 0.0f};
    test_device d = test_device_create(1);
    bl_adamw_args args = {.n = 3,
                          .step = 1,
                          .lr = 0.125,
                          .beta1 = 0.9,
                          .beta2 = 0.999,
                          .eps = 0,
                          .grad = grad,
                          .w = w,
                          .m = bl_tensor_f32(m),
                          .v = bl_tensor_f32(v)};
    args.eps = 1e-12;
    bl_adamw(d.stream, &args);
    test_finish(d);
    test_close("w", w, (const double[]){0.875, 1.125, 1}, 3, 3 * U, 0);
    args.step = 0;
    assert_int_equal(bl_adamw(d.stream, &args), BL_EINTERNAL);
    test_device_destroy(d);
}

static void squares_are_summed_in_one_order(void **state)
{
    (void)state;
    const int64_t sizes[] = {0, 1, 15, 16385, 5000001};
    for (size_t k = 0; k < BL_COUNT(sizes); k++) {
        int64_t n = sizes[k];
        float *x = test_random_floats(n, 4);
        double want = 0.5, got[3];
        for (int64_t i = 0; i < n; i++) want += (double)x[i] * (double)x[i];
        for (int threads = 1; threads <= 3; threads++) {
            test_device d = test_device_create(threads);
            got[threads - 1] = 0.5;
            bl_sum_squares(d.stream,
                           &(bl_sum_squares_args){.n = n, .x = x, .sum = &got[threads - 1]});
            test_finish(d);
            test_device_destroy(d);
            assert_true(got[threads - 1] == got[0]);
        }
        assert_true(fabs(got[0] - want) <= 1e-12 * want); /* n terms in double: sqrt(5e6) 1.1e-16 */
        free(x);
    }
}

static void sums_are_added(void **state)
{
    double sums[1000], want = 0.5, got = 0.5;

    (void)state;
    for (int i = 0; i < 1000; i++) want += sums[i] = 1.0 / (i + 3);
    test_device d = test_device_create(2);
    bl_add_sums(d.stream, &(bl_add_sums_args){1000, sums, &got});
    test_finish(d);
    test_device_destroy(d);
    assert_true(got == want);
}

/* Nothing is queued: results are there at once. */
static void updates_on_the_host_are_the_same(void **state)
{
    enum { N = 40000 };
    float *grad = test_random_floats(N, 5), *w[2], *m[2], *v[2];
    double clip = 0.25;
    test_device d = test_device_create(3);

    (void)state;
    for (int i = 0; i < 2; i++) {
        w[i] = test_random_floats(N, 6), m[i] = test_random_floats(N, 7);
        v[i] = calloc(N, sizeof(float));
        bl_adamw_args args = {.n = N,
                              .step = 2,
                              .lr = 1e-2,
                              .beta1 = 0.9,
                              .beta2 = 0.999,
                              .eps = 1e-8,
                              .grad_scale = &clip,
                              .grad = grad,
                              .w = w[i],
                              .m = bl_tensor_f32(m[i]),
                              .v = bl_tensor_f32(v[i])};
        if (i == 0)
            bl_adamw(d.stream, &args), test_finish(d);
        else
            assert_int_equal(bl_adamw_on_host(d.stream, &args), BL_OK);
        args.step = 0;
        assert_int_equal(bl_adamw_on_host(d.stream, &args), BL_EINTERNAL);
    }
    assert_memory_equal(w[0], w[1], N * sizeof(float));
    assert_memory_equal(m[0], m[1], N * sizeof(float));
    assert_memory_equal(v[0], v[1], N * sizeof(float));
    for (int i = 0; i < 2; i++) free(w[i]), free(m[i]), free(v[i]);
    free(grad);
    test_device_destroy(d);
}

static void clipping_is_torchs(void **state)
{
    (void)state;
    const struct {
        double squares, max_norm, scale;
    } cases[] = {{4, 1, 1 / (2 + 1e-6)}, {0.25, 1, 1},     {4, 0, 1},    {0, 1, 1},
                 {4, 2, 2 / (2 + 1e-6)}, {INFINITY, 1, 0}, {NAN, 1, NAN}};
    test_device d = test_device_create(1);
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        double norm = -1, scale = -1;
        bl_clip_scale(d.stream, &(bl_clip_scale_args){.max_norm = cases[i].max_norm,
                                                      .sum_squares = &cases[i].squares,
                                                      .norm = &norm,
                                                      .grad_scale = &scale});
        test_finish(d);
        assert_true(isnan(cases[i].squares) ? isnan(norm) : norm == sqrt(cases[i].squares));
        assert_true(isnan(cases[i].scale) ? isnan(scale) : scale == cases[i].scale);
    }
    test_device_destroy(d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(adamw_follows_torch),
        cmocka_unit_test(first_step_moves_by_the_learning_rate),
        cmocka_unit_test(squares_are_summed_in_one_order),
        cmocka_unit_test(sums_are_added),
        cmocka_unit_test(updates_on_the_host_are_the_same),
        cmocka_unit_test(clipping_is_torchs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
