/* SPDX-License-Identifier: Apache-2.0 */
/* LayerNorm and GELU against double references and central differences of them: odd shapes, offsets
 * far larger than the spread, in place, 1 to 3 threads. */
#include "ops_test.h"

#include "ops/elementwise.h"
#include "ops/norm.h"

enum { THREADS_MAX = 3 };

/* Central differences: off by STEP^2 / 6 of the third derivative. */
static const double STEP = 1e-4;

/* ---- LayerNorm ---- */

static double row_loss(int64_t H, double eps, const double *x, const float *w, const float *b,
                       const float *dy, double *y)
{
    double mean = 0, variance = 0, loss = 0;
    for (int64_t h = 0; h < H; h++) mean += x[h] / (double)H;
    for (int64_t h = 0; h < H; h++) variance += (x[h] - mean) * (x[h] - mean) / (double)H;
    for (int64_t h = 0; h < H; h++) {
        double value =
            (x[h] - mean) / sqrt(variance + eps) * (double)w[h] + (b ? (double)b[h] : 0.0);
        if (y) y[h] = value;
        loss += value * (double)dy[h];
    }
    return loss;
}

typedef struct layer_case {
    int64_t T, H;
    float offset; /* of x, whose spread is about 0.6 */
    bool has_bias;
} layer_case;

typedef struct layer_problem {
    float *x, *w, *b, *dy, *y, *dx, *mean, *rstd;
} layer_problem;

static layer_problem layer_create(layer_case c)
{
    int64_t n = c.T * c.H;
    layer_problem p = {test_random_floats(n, 1),
                       test_random_floats(c.H, 2),
                       c.has_bias ? test_random_floats(c.H, 3) : NULL,
                       test_random_floats(n, 4),
                       test_floats(n),
                       test_floats(n),
                       test_floats(c.T),
                       test_floats(c.T)};
    for (int64_t i = 0; i < n; i++) p.x[i] += c.offset;
    return p;
}

static void layer_free(layer_problem *p)
{
    free(p->x), free(p->w), free(p->b), free(p->dy), free(p->y), free(p->dx), free(p->mean),
        free(p->rstd);
}

static void layer_run(layer_case c, layer_problem *p, int threads)
{
    int64_t n = c.T * c.H;
    test_device d = test_device_create(threads);
    bl_layernorm_forward_args forward = {.T = c.T,
                                         .H = c.H,
                                         .eps = 1e-5,
                                         .x = bl_tensor_f32(p->x),
                                         .w = p->w,
                                         .b = p->b,
                                         .y = bl_tensor_f32(p->y),
                                         .mean = p->mean,
                                         .rstd = p->rstd};
    bl_layernorm_backward_args backward = {.T = c.T,
                                           .H = c.H,
                                           .x = bl_tensor_f32(p->x),
                                           .w = p->w,
                                           .mean = p->mean,
                                           .rstd = p->rstd,
                                           .dy = bl_tensor_f32(p->dy),
                                           .dx = bl_tensor_f32(p->dx)};
    float *once = test_floats(n), *in_place = test_floats(n);
    assert_int_equal(bl_layernorm_forward(d.stream, &forward), BL_OK);
    assert_int_equal(bl_layernorm_backward(d.stream, &backward), BL_OK);
    test_finish(d);
    memcpy(once, p->dx, (size_t)n * sizeof *once);
    memcpy(in_place, p->dy, (size_t)n * sizeof *in_place);
    backward.accumulate = 1;
    assert_int_equal(bl_layernorm_backward(d.stream, &backward), BL_OK);
    backward.accumulate = 0;
    backward.dy = backward.dx = bl_tensor_f32(in_place);
    assert_int_equal(bl_layernorm_backward(d.stream, &backward), BL_OK);
    test_finish(d);
    for (int64_t i = 0; i < n; i++) assert_true(p->dx[i] == 2.0f * once[i]);
    test_same_bits("dx in place", once, in_place, n);
    memcpy(p->dx, once, (size_t)n * sizeof *once);
    memcpy(in_place, p->x, (size_t)n * sizeof *in_place);
    forward.x = forward.y = bl_tensor_f32(in_place);
    forward.mean = forward.rstd = NULL;
    assert_int_equal(bl_layernorm_forward(d.stream, &forward), BL_OK);
    test_finish(d);
    test_same_bits("y in place", p->y, in_place, n);
    free(once), free(in_place);
    test_device_destroy(d);
}

/* y: the mean is rounded (u |offset|, times rstd <= 1 / sqrt(eps) at most, 2 here where H > 1), and
 * four roundings of numbers below 4. dx: as in RMSNorm, 8 u of rstd times terms below 4; curve: of
 * the differences. One channel alone is its own mean: y is b, dx 0. */
static void check_layer(layer_case c, double *worst)
{
    int64_t n = c.T * c.H;
    layer_problem first = layer_create(c);
    double *x = test_doubles(n), *y = test_doubles(n);
    layer_run(c, &first, 1);
    for (int threads = 2; threads <= THREADS_MAX; threads++) {
        layer_problem p = layer_create(c);
        layer_run(c, &p, threads);
        test_same_bits("y", first.y, p.y, n);
        test_same_bits("dx", first.dx, p.dx, n);
        layer_free(&p);
    }
    for (int64_t i = 0; i < n; i++) x[i] = (double)first.x[i];
    for (int64_t t = 0; t < c.T; t++)
        row_loss(c.H, 1e-5, x + t * c.H, first.w, first.b, first.dy + t * c.H, y + t * c.H);
    double rounded = 2 * U * (fabs((double)c.offset) + 1), bound = 3 * rounded + 16 * U;
    for (int64_t i = 0; i < n; i++) worst[0] = fmax(worst[0], fabs((double)first.y[i] - y[i]));
    test_close("layernorm", first.y, y, n, c.H > 1 ? bound : 320 * rounded, 4 * U);
    for (int64_t i = 0; i<n; i += n> 500 ? 97 : 1) {
        int64_t t = i / c.H, row = t * c.H;
        double keep = x[i], up, down, scale = (double)first.rstd[t];
        x[i] = keep + STEP;
        up = row_loss(c.H, 1e-5, x + row, first.w, first.b, first.dy + row, NULL);
        x[i] = keep - STEP;
        down = row_loss(c.H, 1e-5, x + row, first.w, first.b, first.dy + row, NULL);
        x[i] = keep;
        double want = (up - down) / (2 * STEP), curve = STEP * STEP * scale * scale * scale;
        worst[1] = fmax(worst[1], fabs((double)first.dx[i] - want));
        test_close("layernorm dx", first.dx + i, &want, 1,
                   scale * (32 * U + rounded * scale * 4) + 2 * curve + 1e-10, 0);
    }
    free(x), free(y);
    layer_free(&first);
}

static void layernorm_matches_reference_and_differences(void **state)
{
    const layer_case cases[] = {{0, 64, 0, true},     {1, 64, 0, true},   {7, 172, 0, false},
                                {129, 100, 3, true},  {7, 13, -40, true}, {5, 1, 0, true},
                                {3, 1030, 500, false}};
    double worst[2] = {0};
    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) check_layer(cases[i], worst);
    print_message("layernorm: y off by at most %.2g, dx by %.2g\n", worst[0], worst[1]);
}

/* ---- GELU ---- */

static double gelu(bl_gelu_form form, double u)
{
    if (form == BL_GELU_ERF) return u * erfc(-u / sqrt(2.0)) / 2;
    return u / (1 + exp(-2 * sqrt(2 / acos(-1.0)) * (u + 0.044715 * u * u * u)));
}

static double gelu_gradient(bl_gelu_form form, double u)
{
    double step = 1e-5; /* third derivatives are below 2 */
    if (form == BL_GELU_ERF)
        return erfc(-u / sqrt(2.0)) / 2 + u * exp(-u * u / 2) / sqrt(2 * acos(-1.0));
    return (gelu(form, u + step) - gelu(form, u - step)) / (2 * step);
}

/* Phi is off by 8 u relatively on either side of 0, and in the tail by the rounding of u^2 / 2,
 * which is below 40; sigma by 8 u, in the tail by the rounding of 2 c. Both derivatives add two
 * terms below 1.2. */
static void check_gelu(bl_gelu_form form, int64_t n)
{
    float *u = test_random_floats(n, 9), *dh = test_random_floats(n, 10), *h = test_floats(n),
          *du = test_floats(n), *first_h = test_floats(n), *first_du = test_floats(n);
    double *want_h = test_doubles(n), *want_du = test_doubles(n);
    for (int64_t i = 0; i < n; i++) {
        u[i] *= 8.0f;
        want_h[i] = gelu(form, (double)u[i]);
        want_du[i] = gelu_gradient(form, (double)u[i]) * (double)dh[i];
    }
    for (int threads = 1; threads <= THREADS_MAX; threads++) {
        test_device d = test_device_create(threads);
        bl_gelu_forward_args forward = {
            .n = n, .form = form, .u = bl_tensor_f32(u), .h = bl_tensor_f32(h)};
        bl_gelu_backward_args backward = {.n = n,
                                          .form = form,
                                          .u = bl_tensor_f32(u),
                                          .dh = bl_tensor_f32(dh),
                                          .du = bl_tensor_f32(du)};
        assert_int_equal(bl_gelu_forward(d.stream, &forward), BL_OK);
        assert_int_equal(bl_gelu_backward(d.stream, &backward), BL_OK);
        test_finish(d);
        if (threads == 1) {
            memcpy(first_h, h, (size_t)n * sizeof *h);
            memcpy(first_du, du, (size_t)n * sizeof *du);
        }
        test_same_bits("gelu", first_h, h, n);
        test_same_bits("gelu'", first_du, du, n);
        if (threads == THREADS_MAX) { /* in place: over dh, then over u */
            backward.du = backward.dh;
            forward.h = forward.u;
            assert_int_equal(bl_gelu_backward(d.stream, &backward), BL_OK);
            assert_int_equal(bl_gelu_forward(d.stream, &forward), BL_OK);
            test_finish(d);
            test_same_bits("gelu in place", first_h, u, n);
            test_same_bits("gelu' in place", first_du, dh, n);
        }
        test_device_destroy(d);
    }
    double worst[2] = {0};
    for (int64_t i = 0; i < n; i++) {
        worst[0] = fmax(worst[0], fabs((double)first_h[i] - want_h[i]));
        worst[1] = fmax(worst[1], fabs((double)first_du[i] - want_du[i]));
    }
    if (n > 0)
        print_message("gelu form %d: h off by %.2g, du by %.2g\n", (int)form, worst[0], worst[1]);
    test_close("gelu", first_h, want_h, n, 2 * U, 8 * U);
    test_close("gelu'", first_du, want_du, n, 16 * U + 1e-9, 8 * U);
    free(u), free(dh), free(h), free(du), free(first_h), free(first_du), free(want_h),
        free(want_du);
}

static void gelu_matches_reference(void **state)
{
    const int64_t sizes[] = {0, 1, 13, 50000};
    (void)state;
    for (size_t i = 0; i < BL_COUNT(sizes); i++) {
        check_gelu(BL_GELU_ERF, sizes[i]);
        check_gelu(BL_GELU_TANH, sizes[i]);
    }
}

static void gelu_survives_extremes(void **state)
{
    enum { N = 6 };
    float u[N] = {-1e30f, -300.0f, -0.0f, 300.0f, 1e30f, NAN}, ones[N] = {1, 1, 1, 1, 1, 1};
    (void)state;
    for (int form = BL_GELU_ERF; form <= BL_GELU_TANH; form++) {
        float h[N], du[N];
        test_device d = test_device_create(1);
        bl_gelu_forward_args forward = {
            .n = N, .form = (bl_gelu_form)form, .u = bl_tensor_f32(u), .h = bl_tensor_f32(h)};
        bl_gelu_backward_args backward = {.n = N,
                                          .form = (bl_gelu_form)form,
                                          .u = bl_tensor_f32(u),
                                          .dh = bl_tensor_f32(ones),
                                          .du = bl_tensor_f32(du)};
        assert_int_equal(bl_gelu_forward(d.stream, &forward), BL_OK);
        assert_int_equal(bl_gelu_backward(d.stream, &backward), BL_OK);
        test_finish(d);
        assert_true(h[0] == 0 && h[1] == 0 && h[2] == 0 && h[3] == 300.0f && h[4] == 1e30f);
        assert_true(du[0] == 0 && du[1] == 0 && fabsf(du[2] - 0.5f) <= (float)(2 * U));
        assert_true(du[3] == 1 && du[4] == 1 && isnan(h[5]) && isnan(du[5]));
        test_device_destroy(d);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layernorm_matches_reference_and_differences),
        cmocka_unit_test(gelu_matches_reference),
        cmocka_unit_test(gelu_survives_extremes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
