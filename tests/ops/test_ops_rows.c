/* SPDX-License-Identifier: Apache-2.0 */
/* RMSNorm, RoPE, SwiGLU, additions, casts, embedding: against double references and central
 * differences of them. */
#include "ops_test.h"

#include "ops/elementwise.h"
#include "ops/matmul.h"
#include "ops/norm.h"
#include "ops/cpu/ops_cpu.h"
#include "ops/rope.h"

static const int64_t T_CASES[] = {0, 1, 7, 129};
static const int64_t H_CASES[] = {64, 172, 100, 1};
enum { THREADS_MAX = 3 };

/* Central differences in double: (f(x + s) - f(x - s)) / 2s is off by s^2 |f'''| / 6 + 1e-16 |f| /
 *   s; with s
 * = 1e-4 and the smooth functions here, below 1e-7 of their scale: well under what fp32 is
 * allowed. */
static const double STEP = 1e-4;

/* ---- exp ---- */

static void exp_is_within_one_ulp(void **state)
{
    (void)state;
    double worst = 0;
    /* Every 509th float of [-104, 89], both signs. */
    for (uint32_t bits = 0; bits < 0x43000000u; bits += 509) {
        for (uint32_t sign = 0; sign < 2; sign++) {
            uint32_t with_sign = bits | sign << 31;
            float x;
            memcpy(&x, &with_sign, sizeof x);
            double want = exp((double)x);
            float got = ops_expf(x);
            if (want > 3.4028235e38 * (1 + U)) {
                assert_true(isinf(got));
                continue;
            }
            int exponent;
            frexp(want, &exponent);
            double ulp = ldexp(1.0, exponent - 24 > -149 ? exponent - 24 : -149);
            double error = fabs((double)got - want) / ulp;
            if (error > worst) worst = error;
        }
    }
    print_message("exp: worst error %.3f ulp\n", worst);
    assert_true(worst <= 1.0);
    assert_true(ops_expf(0.0f) == 1.0f);
    assert_true(ops_expf(-INFINITY) == 0.0f);
    assert_true(isinf(ops_expf(INFINITY)));
    assert_true(isnan(ops_expf(NAN)));
}

static void row_helpers_cover_every_length(void **state)
{
    (void)state;
    for (int64_t n = 0; n < 600; n += n < 70 ? 1 : 37) {
        float *x = test_random_floats(n, (uint64_t)n + 1), most = -INFINITY;
        double squares = 0, sum = 0;
        for (int64_t i = 0; i < n; i++) {
            squares += (double)x[i] * (double)x[i];
            sum += exp((double)x[i] - 0.5);
            if (x[i] > most) most = x[i];
        }
        assert_true(ops_max(x, n) == most);
        assert_true(fabs(ops_dot(x, x, n) - squares) <= 1e-14 * squares);
        /* exp 1 ulp = 2 u, sums of 8 lanes' 16 + 4 halvings, all positive */
        assert_true(fabs(ops_exp_sum(x, n, 0.5f) - sum) <= 24 * U * sum);
        free(x);
    }
    float odd[40];
    for (int i = 0; i < 40; i++) odd[i] = -3.0f;
    odd[0] = odd[20] = NAN;
    odd[39] = 2.0f;
    assert_true(ops_max(odd, 40) == 2.0f);
    assert_true(isnan(ops_exp_sum(odd, 40, 2.0f)));
}

/* ---- RMSNorm ---- */

static void norm_reference(int64_t T, int64_t H, double eps, const double *x, const float *w,
                           double *y, double *rstd)
{
    for (int64_t t = 0; t < T; t++) {
        double sum = 0;
        for (int64_t h = 0; h < H; h++) sum += x[t * H + h] * x[t * H + h];
        rstd[t] = 1.0 / sqrt(sum / (double)H + eps);
        for (int64_t h = 0; h < H; h++) y[t * H + h] = x[t * H + h] * rstd[t] * (double)w[h];
    }
}

static double *widen(const float *x, int64_t n)
{
    double *wide = test_doubles(n);
    for (int64_t i = 0; i < n; i++) wide[i] = (double)x[i];
    return wide;
}

static double norm_loss(int64_t H, double eps, const double *x, const float *w, const float *dy)
{
    double *y = test_doubles(H), rstd, loss = 0;
    norm_reference(1, H, eps, x, w, y, &rstd);
    for (int64_t h = 0; h < H; h++) loss += y[h] * (double)dy[h];
    free(y);
    return loss;
}

static void check_norm(int64_t T, int64_t H)
{
    const double eps = 1e-5;
    int64_t n = T * H;
    float *x = test_random_floats(n, 1), *w = test_random_floats(H, 2),
          *dy = test_random_floats(n, 3);
    float *y[THREADS_MAX], *dx[THREADS_MAX], *rstd = test_floats(T);
    double *wide = widen(x, n), *want = test_doubles(n), *want_rstd = test_doubles(T);
    for (int threads = 1; threads <= THREADS_MAX; threads++) {
        test_device d = test_device_create(threads);
        y[threads - 1] = test_floats(n);
        dx[threads - 1] = test_floats(n);
        bl_rmsnorm_forward_args forward = {.T = T,
                                           .H = H,
                                           .eps = eps,
                                           .x = bl_tensor_f32(x),
                                           .w = w,
                                           .y = bl_tensor_f32(y[threads - 1]),
                                           .rstd = rstd};
        assert_int_equal(bl_rmsnorm_forward(d.stream, &forward), BL_OK);
        bl_rmsnorm_backward_args backward = {.T = T,
                                             .H = H,
                                             .x = bl_tensor_f32(x),
                                             .w = w,
                                             .rstd = rstd,
                                             .dy = bl_tensor_f32(dy),
                                             .dx = bl_tensor_f32(dx[threads - 1])};
        assert_int_equal(bl_rmsnorm_backward(d.stream, &backward), BL_OK);
        test_finish(d);
        if (threads > 1) {
            test_same_bits("y", y[0], y[threads - 1], n);
            test_same_bits("dx", dx[0], dx[threads - 1], n);
        }
        if (threads ==
            THREADS_MAX) { /* accumulating adds to old values; in place overwrites dy and x */
            backward.accumulate = 1;
            assert_int_equal(bl_rmsnorm_backward(d.stream, &backward), BL_OK);
            forward.y = bl_tensor_f32(x);
            forward.rstd = NULL;
            test_finish(d);
            for (int64_t i = 0; i < n; i++) assert_true(dx[threads - 1][i] == 2.0f * dx[0][i]);
            assert_int_equal(
                bl_rmsnorm_backward(d.stream, &(bl_rmsnorm_backward_args){.T = T,
                                                                          .H = H,
                                                                          .x = bl_tensor_f32(x),
                                                                          .w = w,
                                                                          .rstd = rstd,
                                                                          .dy = bl_tensor_f32(dy),
                                                                          .dx = bl_tensor_f32(dy)}),
                BL_OK);
            assert_int_equal(bl_rmsnorm_forward(d.stream, &forward), BL_OK);
            test_finish(d);
            test_same_bits("y in place", y[0], x, n);
            test_same_bits("dx in place", dx[0], dy, n);
        }
        test_device_destroy(d);
    }
    norm_reference(T, H, eps, wide, w, want, want_rstd);
    test_close("rstd", rstd, want_rstd, T, 0, 1.01 * U); /* one rounding of a double */
    test_close("y", y[0], want, n, 0, 3.01 * U);         /* rstd, two products */
    free(dy);
    dy = test_random_floats(n, 3);
    for (int64_t i = 0; i<n; i += n> 500 ? 97 : 1) {
        int64_t row = i / H * H;
        double keep = wide[i], up, down;
        wide[i] = keep + STEP;
        up = norm_loss(H, eps, wide + row, w, dy + row);
        wide[i] = keep - STEP;
        down = norm_loss(H, eps, wide + row, w, dy + row);
        wide[i] = keep;
        /* rstd times a difference of two terms of size rstd^0: 6 roundings; |rstd| < 40 for one
         * channel, where x^2 rstd^2 = 1 - tiny cancels and the third derivative is large. */
        double scale = want_rstd[i / H], curve = STEP * STEP * scale * scale * scale;
        double want_dx = (up - down) / (2 * STEP);
        test_close("dx", dx[0] + i, &want_dx, 1, 8 * U * scale + 2 * curve + 1e-11, 0);
    }
    for (int i = 0; i < THREADS_MAX; i++) {
        free(y[i]);
        free(dx[i]);
    }
    free(x);
    free(w);
    free(dy);
    free(rstd);
    free(wide);
    free(want);
    free(want_rstd);
}

static void norm_matches_reference_and_differences(void **state)
{
    (void)state;
    for (size_t i = 0; i < BL_COUNT(T_CASES); i++)
        for (size_t j = 0; j < BL_COUNT(H_CASES); j++) check_norm(T_CASES[i], H_CASES[j]);
}

/* ---- RoPE ---- */

/* rotated: channels of a head of d. */
static void check_rope(int64_t d, int64_t rotated, int64_t n_heads, const int32_t *cu_seqlens,
                       int64_t n_documents, int64_t offset)
{
    int64_t T = cu_seqlens[n_documents], stride = n_heads * d + 5, n = T * stride,
            half = rotated / 2, n_positions = 200;
    double *inv_freq = test_doubles(half), *want = test_doubles(n);
    for (int64_t i = 0; i < half; i++)
        inv_freq[i] = pow(10000.0, -2.0 * (double)i / (double)rotated);
    float *cosines = test_floats(n_positions * half), *sines = test_floats(n_positions * half);
    bl_rope_fill_tables(0, n_positions, half, inv_freq, 1.0, cosines, sines);
    float *x = test_random_floats(n, 5), *first = NULL;
    for (int64_t i = 0; i < n; i++) want[i] = (double)x[i];
    for (int64_t document = 0; document < n_documents; document++) {
        for (int64_t t = cu_seqlens[document]; t < cu_seqlens[document + 1]; t++) {
            for (int64_t pair = 0; pair < n_heads * half; pair++) {
                int64_t a = t * stride + pair / half * d + pair % half, b = a + half;
                double angle = (double)(t - cu_seqlens[document] + offset) * inv_freq[pair % half];
                want[a] = (double)x[a] * cos(angle) - (double)x[b] * sin(angle);
                want[b] = (double)x[b] * cos(angle) + (double)x[a] * sin(angle);
            }
        }
    }
    for (int threads = 1; threads <= THREADS_MAX; threads++) {
        test_device device = test_device_create(threads);
        float *y = test_floats(n);
        memcpy(y, x, (size_t)n * sizeof *y);
        bl_rope_args args = {.T = T,
                             .n_heads = n_heads,
                             .d = d,
                             .row_stride = stride,
                             .n_documents = n_documents,
                             .position_offset = offset,
                             .direction = 1,
                             .cu_seqlens = cu_seqlens,
                             .cos_table = cosines,
                             .sin_table = sines,
                             .x = bl_tensor_f32(y),
                             .d_rotated = rotated < d ? rotated : 0};
        assert_int_equal(bl_rope(device.stream, &args), BL_OK);
        test_finish(device);
        test_close("rope", y, want, n, 6 * U,
                   0); /* two products of table entries, each 1 rounding, and the sum: |x| <= 1 */
        if (!first) {
            first = y;
        } else {
            test_same_bits("rope", first, y, n);
            /* A rotation is linear and orthogonal: its backward, the transpose, is the rotation
             * back. */
            args.direction = -1;
            assert_int_equal(bl_rope(device.stream, &args), BL_OK);
            test_finish(device);
            for (int64_t i = 0; i < n; i++) want[i] = (double)x[i];
            test_close("rope back", y, want, n, 12 * U, 0);
            for (int64_t i = 0; i < n; i++) want[i] = (double)first[i];
            free(y);
        }
        if (threads > 1)
            for (int64_t i = 0; i < n; i++) want[i] = (double)first[i];
        test_device_destroy(device);
    }
    free(first);
    free(x);
    free(want);
    free(inv_freq);
    free(cosines);
    free(sines);
}

static void rope_rotates_by_position_in_the_document(void **state)
{
    (void)state;
    const int32_t none[] = {0}, one[] = {0, 1}, several[] = {0, 1, 2, 2, 70, 129};
    check_rope(8, 8, 1, none, 0, 0);
    check_rope(8, 8, 3, one, 1, 0);
    check_rope(64, 64, 2, several, 5, 0);
    check_rope(96, 96, 4, several, 5, 0);
    check_rope(128, 128, 1, several, 5, 0);
    check_rope(64, 64, 2, one, 1, 150);
    check_rope(128, 96, 3, several, 5, 0); /* a part of each head */
    check_rope(20, 2, 3, several, 5, 7);
}

/* ---- SwiGLU ---- */

static double swiglu(double g, double u)
{
    return g / (1.0 + exp(-g)) * u;
}

static void check_swiglu(int64_t T, int64_t I)
{
    int64_t n = T * I;
    float *gate_up = test_random_floats(2 * n, 7), *dh = test_random_floats(n, 8);
    for (int64_t i = 0; i < 2 * n; i++) gate_up[i] *= 6.0f;
    double *want = test_doubles(n), *want_gradient = test_doubles(2 * n);
    for (int64_t t = 0; t < T; t++) {
        for (int64_t i = 0; i < I; i++) {
            double g = (double)gate_up[t * 2 * I + i], u = (double)gate_up[t * 2 * I + I + i],
                   dy = (double)dh[t * I + i];
            want[t * I + i] = swiglu(g, u);
            want_gradient[t * 2 * I + i] =
                dy * (swiglu(g + STEP, u) - swiglu(g - STEP, u)) / (2 * STEP);
            want_gradient[t * 2 * I + I + i] =
                dy * (swiglu(g, u + STEP) - swiglu(g, u - STEP)) / (2 * STEP);
        }
    }
    float *first = NULL, *first_gradient = NULL;
    for (int threads = 1; threads <= THREADS_MAX; threads++) {
        test_device d = test_device_create(threads);
        float *h = test_floats(n), *gradient = test_floats(2 * n);
        bl_swiglu_forward_args forward = {
            .T = T, .I = I, .gate_up = bl_tensor_f32(gate_up), .h = bl_tensor_f32(h)};
        bl_swiglu_backward_args backward = {.T = T,
                                            .I = I,
                                            .gate_up = bl_tensor_f32(gate_up),
                                            .dh = bl_tensor_f32(dh),
                                            .d_gate_up = bl_tensor_f32(gradient)};
        assert_int_equal(bl_swiglu_forward(d.stream, &forward), BL_OK);
        assert_int_equal(bl_swiglu_backward(d.stream, &backward), BL_OK);
        test_finish(d);
        /* Exp 2, sum, quotient, product, and exp's share of the sum: 7 at most. */
        test_close("swiglu", h, want, n, 0, 7 * U);
        /* dg: dh u sigma is 5 + 2 roundings, the bracket adds terms up to |g| = 6 with 4 roundings
         * each: |dh u| <= 6 */
        test_close("d gate_up", gradient, want_gradient, 2 * n, 6 * 30 * U * 0.3 + 6 * STEP * STEP,
                   8 * U);
        if (first) {
            test_same_bits("swiglu", first, h, n);
            test_same_bits("d gate_up", first_gradient, gradient, 2 * n);
            memcpy(gradient, gate_up, (size_t)(2 * n) * sizeof *gradient);
            backward.gate_up = bl_tensor_f32(gradient); /* in place */
            assert_int_equal(bl_swiglu_backward(d.stream, &backward), BL_OK);
            test_finish(d);
            test_same_bits("d gate_up in place", first_gradient, gradient, 2 * n);
            free(h);
            free(gradient);
        } else {
            first = h;
            first_gradient = gradient;
        }
        test_device_destroy(d);
    }
    free(first);
    free(first_gradient);
    free(gate_up);
    free(dh);
    free(want);
    free(want_gradient);
}

static void swiglu_matches_reference_and_differences(void **state)
{
    (void)state;
    for (size_t i = 0; i < BL_COUNT(T_CASES); i++)
        for (size_t j = 0; j < BL_COUNT(H_CASES); j++) check_swiglu(T_CASES[i], H_CASES[j]);
}

static void swiglu_survives_extremes(void **state)
{
    (void)state;
    float gate_up[8] = {-1e30f, -200.0f, 200.0f, 1e30f, 1.0f, 1.0f, 1.0f, 1.0f}, h[4],
          dh[4] = {1, 1, 1, 1}, gradient[8];
    test_device d = test_device_create(1);
    bl_swiglu_forward(
        d.stream, &(bl_swiglu_forward_args){
                      .T = 1, .I = 4, .gate_up = bl_tensor_f32(gate_up), .h = bl_tensor_f32(h)});
    bl_swiglu_backward(d.stream, &(bl_swiglu_backward_args){.T = 1,
                                                            .I = 4,
                                                            .gate_up = bl_tensor_f32(gate_up),
                                                            .dh = bl_tensor_f32(dh),
                                                            .d_gate_up = bl_tensor_f32(gradient)});
    test_finish(d);
    test_close("silu", h, (const double[]){0, 0, 200, 1e30}, 4, 0, U);
    test_close("silu'", gradient, (const double[]){0, 0, 1, 1, 0, 0, 200, 1e30}, 8, 0, U);
    test_device_destroy(d);
}

/* ---- additions, embedding ---- */

static void additions_add(void **state)
{
    (void)state;
    const int64_t sizes[] = {0, 1, 17, 3 * OPS_ITEM_ELEMENTS + 5};
    test_device d = test_device_create(2);
    for (size_t k = 0; k < BL_COUNT(sizes); k++) {
        int64_t n = sizes[k];
        float *a = test_random_floats(n, 1), *b = test_random_floats(n, 2), *y = test_floats(n);
        bl_add(d.stream,
               &(bl_add_args){
                   .n = n, .a = bl_tensor_f32(a), .b = bl_tensor_f32(b), .y = bl_tensor_f32(y)});
        test_finish(d);
        for (int64_t i = 0; i < n; i++) assert_true(y[i] == a[i] + b[i]);
        bl_accumulate(d.stream,
                      &(bl_accumulate_args){.n = n, .x = bl_tensor_f32(b), .y = bl_tensor_f32(a)});
        test_finish(d);
        test_same_bits("accumulate", a, y, n);
        bl_add_args alone = {.n = n,
                             .a = bl_tensor_f32(a),
                             .b = bl_tensor_f32(b),
                             .y = bl_tensor_f32(y),
                             .without_workers = true};
        bl_add(d.stream, &alone);
        test_finish(d);
        for (int64_t i = 0; i < n; i++) assert_true(y[i] == a[i] + b[i]);
        free(a);
        free(b);
        free(y);
    }
    test_device_destroy(d);
}

static void embedding_takes_rows_of_any_float_type(void **state)
{
    (void)state;
    enum { V = 5, H = 100, T = 7 };
    const int32_t ids[T] = {4, 0, 0, 3, 1, 2, 4};
    float *values = test_random_floats(V * H, 3), y[T * H];
    uint16_t half[V * H], brain[V * H];
    for (int i = 0; i < V * H; i++) {
        /* Bf16 has fewer mantissa bits than f16: exact in all three. */
        values[i] = bl_bf16_to_f32(bl_f32_to_bf16(values[i]));
        half[i] = bl_f32_to_f16(values[i]);
        brain[i] = bl_f32_to_bf16(values[i]);
    }
    const struct {
        bl_dtype dtype;
        const void *table;
    } cases[] = {{BL_F32, values}, {BL_F16, half}, {BL_BF16, brain}};
    test_device d = test_device_create(2);
    for (size_t k = 0; k < BL_COUNT(cases); k++) {
        bl_embedding_args args = {.T = T,
                                  .H = H,
                                  .ids = ids,
                                  .table = bl_tensor_of(cases[k].table, cases[k].dtype),
                                  .y = bl_tensor_f32(y)};
        assert_int_equal(bl_embedding(d.stream, &args), BL_OK);
        test_finish(d);
        for (int t = 0; t < T; t++)
            for (int h = 0; h < H; h++)
                assert_true(fabsf(y[t * H + h] - values[ids[t] * H + h]) <= 6e-8f);
    }
    bl_embedding_args none = {.T = 0, .H = H, .table.dtype = BL_F32};
    assert_int_equal(bl_embedding(d.stream, &none), BL_OK);
    none.table.dtype = BL_I32;
    assert_int_equal(bl_embedding(d.stream, &none), BL_EINPUT);
    test_finish(d);
    test_device_destroy(d);
    free(values);
}

static void casts_round_to_nearest_even(void **state)
{
    enum { N = 40001 }; /* three items of a light loop */
    test_device d = test_device_create(2);
    float *x = test_random_floats(N, 3), *back = test_floats(N), *copy = test_floats(N);
    uint16_t *halves = test_alloc(N, sizeof *halves);
    (void)state;
    x[7] = NAN;
    assert_int_equal(
        bl_cast(d.stream,
                &(bl_cast_args){.n = N, .x = bl_tensor_f32(x), .y = bl_tensor_of(halves, BL_BF16)}),
        BL_OK);
    assert_int_equal(bl_cast(d.stream, &(bl_cast_args){.n = N,
                                                       .x = bl_tensor_of(halves, BL_BF16),
                                                       .y = bl_tensor_f32(back)}),
                     BL_OK);
    assert_int_equal(
        bl_cast(d.stream, &(bl_cast_args){.n = N, .x = bl_tensor_f32(x), .y = bl_tensor_f32(copy)}),
        BL_OK);
    test_finish(d);
    for (int i = 0; i < N; i++) {
        assert_int_equal(halves[i], bl_f32_to_bf16(x[i]));
        if (i != 7) assert_true(back[i] == bl_bf16_to_f32(halves[i]));
    }
    assert_true(isnan(back[7]));
    assert_memory_equal(copy, x, N * sizeof *x);
    free(x);
    free(back);
    free(copy);
    free(halves);
    test_device_destroy(d);
}

/* Rejected at the call, and no memory is touched: tensors of two dtypes, or without one. */
static void other_dtypes_are_refused(void **state)
{
    test_device d = test_device_create(1);
    float x[4] = {1, 2, 3, 4};
    bl_tensor f32 = bl_tensor_f32(x), bf16 = bl_tensor_of(x, BL_BF16), unset = {.data = x};
    (void)state;
    assert_int_equal(bl_add(d.stream, &(bl_add_args){.n = 4, .a = unset, .b = unset, .y = unset}),
                     BL_EINTERNAL);
    for (int k = 0; k < 2; k++) {
        bl_tensor bad = k ? unset : bf16;
        assert_int_equal(bl_add(d.stream, &(bl_add_args){.n = 4, .a = f32, .b = bad, .y = f32}),
                         BL_EINTERNAL);
        assert_int_equal(
            bl_swiglu_forward(d.stream,
                              &(bl_swiglu_forward_args){.T = 1, .I = 2, .gate_up = f32, .h = bad}),
            BL_EINTERNAL);
        assert_int_equal(bl_matmul(d.stream, &(bl_matmul_args){.M = 1,
                                                               .N = 1,
                                                               .K = 1,
                                                               .lda = 1,
                                                               .ldb = 1,
                                                               .ldc = 1,
                                                               .a = f32,
                                                               .b = f32,
                                                               .c = bad}),
                         BL_EINTERNAL);
    }
    assert_int_equal(bl_cast(d.stream, &(bl_cast_args){.n = 4, .x = f32, .y = unset}),
                     BL_EINTERNAL);
    test_finish(d);
    for (int i = 0; i < 4; i++) assert_true(x[i] == (float)(i + 1));
    test_device_destroy(d);
}

/* A product with an addend has the bits of one that adds to the addend's copy; rows have gaps. */
static void an_addend_takes_the_place_of_the_result(void **state)
{
    enum { M = 5, N = 3, K = 4, LD = 6 };
    test_device d = test_device_create(2);
    float *a = test_random_floats(M * K, 1), *b = test_random_floats(K * N, 2),
          *addend = test_random_floats(M * LD, 3), *c = test_random_floats(M * LD, 4),
          *want = test_floats(M * LD);
    bl_matmul_args args = {.M = M,
                           .N = N,
                           .K = K,
                           .lda = K,
                           .ldb = N,
                           .ldc = LD,
                           .alpha = 2,
                           .beta = 0.5f,
                           .a = bl_tensor_f32(a),
                           .b = bl_tensor_f32(b),
                           .c = bl_tensor_f32(want)};
    bl_matmul_weight_args frozen = {
        .forward = true,
        .beta = 1,
        .T = M,
        .in = args.a,
        .out = args.c,
        .weight = {.rows = N,
                   .cols = K,
                   .n_segments = 1,
                   .segment = {{.format = BL_FORMAT_F32, .codes = b, .rows = N}}}};
    (void)state;
    memcpy(want, c, M * LD * sizeof *c);
    for (int row = 0; row < M; row++) memcpy(want + row * LD, addend + row * LD, N * sizeof *c);
    assert_int_equal(bl_matmul(d.stream, &args), BL_OK);
    args.c = bl_tensor_f32(c), args.addend = bl_tensor_f32(addend);
    assert_int_equal(bl_matmul(d.stream, &args), BL_OK);
    test_finish(d);
    test_same_bits("c", c, want, M * LD);
    memcpy(want, addend, M * N * sizeof *c);
    assert_int_equal(bl_matmul_weight(d.stream, &frozen), BL_OK);
    frozen.out = bl_tensor_f32(c), frozen.addend = bl_tensor_f32(addend);
    assert_int_equal(bl_matmul_weight(d.stream, &frozen), BL_OK);
    test_finish(d);
    test_same_bits("out", c, want, M * N);
    free(a), free(b), free(addend), free(c), free(want);
    test_device_destroy(d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exp_is_within_one_ulp),
        cmocka_unit_test(row_helpers_cover_every_length),
        cmocka_unit_test(norm_matches_reference_and_differences),
        cmocka_unit_test(rope_rotates_by_position_in_the_document),
        cmocka_unit_test(swiglu_matches_reference_and_differences),
        cmocka_unit_test(swiglu_survives_extremes),
        cmocka_unit_test(additions_add),
        cmocka_unit_test(casts_round_to_nearest_even),
        cmocka_unit_test(other_dtypes_are_refused),
        cmocka_unit_test(embedding_takes_rows_of_any_float_type),
        cmocka_unit_test(an_addend_takes_the_place_of_the_result),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
