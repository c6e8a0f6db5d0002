/* SPDX-License-Identifier: Apache-2.0 */
/* The ops of a mixture's layer against their formulas in double, written as one loop over tokens
 * and experts; gradients through the router against differences of the formula.
 *
 * Tolerances. A logit is a sum of H <= 70 products in fp32, off by at most H u of the sum of their
 * sizes, which is below 20 here: 8e-5 absolute, that much relative in its exponential. The largest
 * errors seen are a hundredth of that; 1e-5 is asked for. In bf16 what is stored is off by 2^-9 of
 * itself. */
#include "experts_case.h"

#include "ops/matmul.h"

/* w[0..top_k) of `chosen` for a row of x. */
static void weights_of(const layer *l, const double *x, const int32_t *chosen, double *w)
{
    double p[E], sum = 0, of_chosen = 0;

    for (int e = 0; e < E; e++) {
        p[e] = (double)l->bias[e];
        for (int h = 0; h < H; h++) p[e] += x[h] * (double)l->router[e * H + h];
        p[e] = exp(p[e]);
        sum += p[e];
    }
    for (int64_t j = 0; j < l->top_k; j++) {
        w[j] = p[chosen[j]] / sum;
        of_chosen += w[j];
    }
    for (int64_t j = 0; j < l->top_k && l->is_normed; j++) w[j] /= of_chosen;
}

static void check_routing(const layer *l)
{
    const bl_routing *r = &l->routing;
    int64_t n_rows = l->n_tokens * l->top_k;

    for (int64_t t = 0; t < l->n_tokens; t++) {
        const int32_t *chosen = r->expert + t * l->top_k;
        double x[H], w[E], p[E];
        int32_t all[E];
        layer plain = *l;
        plain.top_k = E;
        plain.is_normed = false;
        for (int e = 0; e < E; e++) all[e] = e;
        for (int h = 0; h < H; h++) x[h] = (double)l->x[t * H + h];
        weights_of(&plain, x, all, p);
        weights_of(l, x, chosen, w);
        test_close("score", r->score + t * E, p, E, 0, 1e-5);
        test_close("weight", r->weight + t * l->top_k, w, l->top_k, 0, 1e-5);
        for (int64_t j = 0; j < l->top_k; j++) {
            int n_better = 0;
            for (int e = 0; e < E; e++) n_better += p[e] > p[chosen[j]];
            assert_true(n_better < l->top_k);
            if (j > 0) assert_true(chosen[j] > chosen[j - 1]);
            int32_t row = r->row[t * l->top_k + j];
            assert_in_range(row, r->first[chosen[j]], r->first[chosen[j] + 1] - 1);
            assert_int_equal(r->token[row], t);
        }
    }
    assert_int_equal(r->first[0], 0);
    assert_int_equal(r->first[E], n_rows);
    for (int e = 0; e < E; e++)
        for (int32_t row = r->first[e] + 1; row < r->first[e + 1]; row++)
            assert_true(r->token[row] > r->token[row - 1]);
}

static void test_route(void **state)
{
    (void)state;
    for (int64_t top_k = 1; top_k <= E; top_k++)
        for (int is_normed = 0; is_normed < 2; is_normed++) {
            layer l = make_layer(T, top_k, is_normed, 1 + (int)top_k % 3);
            route(&l, bl_tensor_f32(l.x));
            check_routing(&l);
            free_layer(&l);
        }
}

/* Of equal scores the lower indices; all tokens may go to the same experts. */
static void test_ties(void **state)
{
    layer l = make_layer(T, K, true, 2);
    (void)state;

    memset(l.router, 0, E * H * sizeof(float));
    free(l.bias);
    l.bias = NULL;
    route(&l, bl_tensor_f32(l.x));
    for (int64_t i = 0; i < T * K; i++) {
        assert_int_equal(l.routing.expert[i], i % K);
        assert_float_equal(l.routing.weight[i], 1.0 / K, 1e-7);
    }
    for (int e = 0; e <= E; e++) assert_int_equal(l.routing.first[e], T * (e < K ? e : K));
    free_layer(&l);
}

/* dx += d_weight times the derivative of the weights, by central differences of the formula in
 * double: off by the step's square, 1e-10, and 1e-16 / 1e-5. */
static void test_route_backward(void **state)
{
    static const double STEP = 1e-5;
    (void)state;

    for (int is_normed = 0; is_normed < 2; is_normed++) {
        layer l = make_layer(T, K, is_normed, 2);
        float *dx = test_random_floats(T * H, 4), *before = test_random_floats(T * H, 4);
        route(&l, bl_tensor_f32(l.x));
        memcpy(l.routing.d_weight, l.d_weight, T * K * sizeof(float));
        assert_int_equal(
            bl_route_backward(l.d.stream, &(bl_route_backward_args){.routing = l.routing,
                                                                    .H = H,
                                                                    .is_normed = is_normed,
                                                                    .router = l.router,
                                                                    .dx = bl_tensor_f32(dx)}),
            BL_OK);
        test_finish(l.d);
        for (int64_t t = 0; t < T; t++)
            for (int64_t h = 0; h < H; h++) {
                double x[H], up[K], down[K], want = (double)before[t * H + h];
                for (int i = 0; i < H; i++) x[i] = (double)l.x[t * H + i];
                x[h] += STEP;
                weights_of(&l, x, l.routing.expert + t * K, up);
                x[h] -= 2 * STEP;
                weights_of(&l, x, l.routing.expert + t * K, down);
                for (int j = 0; j < K; j++)
                    want += (double)l.d_weight[t * K + j] * (up[j] - down[j]) / (2 * STEP);
                test_close("dx", dx + t * H + h, &want, 1, 1e-6, 1e-5);
            }
        free(dx);
        free(before);
        free_layer(&l);
    }
}

/* y_t = z_t + sum_j w_j W_e x_t with the weights that the routing has. */
static void check_products(bl_format format, int64_t rows, bool forward)
{
    layer l = make_layer(T, K, true, 3);
    int64_t cols = H, n_in = forward ? cols : rows, n_out = forward ? rows : cols;
    experts w = make_experts(format, rows, cols);
    float *in = test_random_floats(T * n_in, 6), *z = test_random_floats(T * n_out, 7),
          *permuted = test_floats(T * K * n_in), *out = test_floats(T * K * n_out),
          *y = test_floats(T * n_out);

    route(&l, bl_tensor_f32(l.x));
    assert_int_equal(bl_permute(l.d.stream, &(bl_permute_args){.routing = l.routing,
                                                               .C = n_in,
                                                               .x = bl_tensor_f32(in),
                                                               .rows = bl_tensor_f32(permuted)}),
                     BL_OK);
    assert_int_equal(
        bl_grouped_matmul(l.d.stream, &(bl_grouped_matmul_args){.routing = l.routing,
                                                                .forward = forward,
                                                                .in = bl_tensor_f32(permuted),
                                                                .out = bl_tensor_f32(out),
                                                                .weight = w.weight}),
        BL_OK);
    assert_int_equal(bl_combine(l.d.stream, &(bl_combine_args){.routing = l.routing,
                                                               .C = n_out,
                                                               .is_weighted = true,
                                                               .rows = bl_tensor_f32(out),
                                                               .z = bl_tensor_f32(z),
                                                               .y = bl_tensor_f32(y)}),
                     BL_OK);
    test_finish(l.d);
    for (int64_t t = 0; t < T; t++)
        for (int64_t o = 0; o < n_out; o++) {
            double want = (double)z[t * n_out + o];
            for (int64_t j = t * K; j < (t + 1) * K; j++) {
                const double *m = w.values + l.routing.expert[j] * rows * cols;
                double sum = 0;
                for (int64_t i = 0; i < n_in; i++)
                    sum += (double)in[t * n_in + i] * (forward ? m[o * cols + i] : m[i * cols + o]);
                want += (double)l.routing.weight[j] * sum;
            }
            test_close(bl_format_name(format), y + t * n_out + o, &want, 1, 2e-5, 1e-5);
        }
    free(in), free(z), free(permuted), free(out), free(y);
    free_experts(&w);
    free_layer(&l);
}

static void test_products(void **state)
{
    static const bl_format formats[] = {BL_FORMAT_F32, BL_FORMAT_BF16, BL_FORMAT_FP8_ROW};
    (void)state;

    for (int forward = 0; forward < 2; forward++) {
        for (size_t f = 0; f < BL_COUNT(formats); f++) check_products(formats[f], INTER, forward);
        check_products(BL_FORMAT_FP8_BLOCK, BL_FP8_BLOCK, forward);
    }
}

/* Rows of more than an item's elements, and of less. */
static void test_biases(void **state)
{
    static const int64_t widths[] = {1, H, 20000};
    (void)state;

    for (size_t k = 0; k < BL_COUNT(widths); k++) {
        layer l = make_layer(T, K, true, 3);
        int64_t N = widths[k];
        float *rows = test_random_floats(T * K * N, 8), *before = test_random_floats(T * K * N, 8),
              *bias = test_random_floats(E * N, 10);
        route(&l, bl_tensor_f32(l.x));
        assert_int_equal(
            bl_add_expert_bias(l.d.stream, &(bl_add_expert_bias_args){.routing = l.routing,
                                                                      .N = N,
                                                                      .bias = bias,
                                                                      .rows = bl_tensor_f32(rows)}),
            BL_OK);
        test_finish(l.d);
        for (int64_t i = 0; i < T * K; i++)
            for (int64_t c = 0; c < N; c++) {
                int64_t at = l.routing.row[i] * N + c;
                assert_true(rows[at] == before[at] + bias[l.routing.expert[i] * N + c]);
            }
        free(rows), free(before), free(bias);
        free_layer(&l);
    }
}

/* d_weight = h . d + dy . b and d times w: the gradients of sum_j w_j (h_j . d_j + dy_j . b_j). */
static void check_weigh_backward(bool has_bias)
{
    enum { N = 530 };
    layer l = make_layer(T, K, true, 2);
    float *dy = test_random_floats(T * K * N, 11), *bias = test_random_floats(E * N, 10);
    float *h = test_random_floats(T * K * H, 8), *d = test_random_floats(T * K * H, 9),
          *before = test_random_floats(T * K * H, 9);

    route(&l, bl_tensor_f32(l.x));
    assert_int_equal(
        bl_weigh_backward(l.d.stream, &(bl_weigh_backward_args){.routing = l.routing,
                                                                .C = H,
                                                                .N = N,
                                                                .h = bl_tensor_f32(h),
                                                                .d = bl_tensor_f32(d),
                                                                .dy = bl_tensor_f32(dy),
                                                                .bias = has_bias ? bias : NULL}),
        BL_OK);
    test_finish(l.d);
    for (int64_t i = 0; i < T * K; i++) {
        int64_t at = l.routing.row[i] * H;
        double dot = 0;
        for (int64_t c = at; c < at + H; c++) {
            double want = (double)before[c] * (double)l.routing.weight[i];
            dot += (double)h[c] * (double)before[c];
            test_close("d", d + c, &want, 1, 0, 2 * U);
        }
        const float *b = bias + l.routing.expert[i] * N, *row = dy + l.routing.row[i] * N;
        for (int64_t c = 0; has_bias && c < N; c++) dot += (double)row[c] * (double)b[c];
        test_close("d_weight", l.routing.d_weight + i, &dot, 1, 1e-9, 2 * U);
    }
    free(h), free(d), free(before), free(dy), free(bias);
    free_layer(&l);
}

static void test_weigh_backward(void **state)
{
    (void)state;
    check_weigh_backward(false);
    check_weigh_backward(true);
}

static bl_tensor tensor_of(const float *values, int64_t n, bl_dtype dtype, void **memory)
{
    *memory = test_alloc(n, bl_dtype_bytes(dtype));
    for (int64_t i = 0; i < n; i++)
        if (dtype == BL_F32)
            ((float *)*memory)[i] = values[i];
        else
            ((uint16_t *)*memory)[i] = bl_f32_to_bf16(values[i]);
    return bl_tensor_of(*memory, dtype);
}

static double value_of(bl_tensor t, int64_t i)
{
    if (t.dtype == BL_F32) return (double)((const float *)t.data)[i];
    return (double)bl_bf16_to_f32(((const uint16_t *)t.data)[i]);
}

/* Rows times factors of fp32 or bf16, added; rows scaled and weighted; gradients of factors, of
 * which those of experts without a row are 0. Few tokens leave experts without. */
static void check_factors(int64_t n_tokens, bl_dtype dtype)
{
    enum { R = 3 };
    const float scale = 1.5f;
    layer l = make_layer(n_tokens, 1, false, 3);
    float *a = test_random_floats(E * R * H, 10), *x = test_random_floats(n_tokens * H, 11),
          *u = test_random_floats(n_tokens * R, 12), *gradient = test_random_floats(E * R * H, 13);
    void *of_a, *of_x, *of_u, *of_before;
    bl_tensor A = tensor_of(a, E * R * H, dtype, &of_a),
              X = tensor_of(x, n_tokens * H, dtype, &of_x),
              U_ = tensor_of(u, n_tokens * R, dtype, &of_u),
              before = tensor_of(u, n_tokens * R, dtype, &of_before);
    bl_format format = dtype == BL_F32 ? BL_FORMAT_F32 : BL_FORMAT_BF16;
    double tolerance = dtype == BL_F32 ? 1e-6 : 0x1p-8;
    int n_without = 0;

    route(&l, bl_tensor_f32(l.x));
    bl_grouped_matmul_args product = {
        l.routing, true, X, U_, {E * R, H, 1, {{format, A.data, NULL, E * R}}}, true};
    bl_weigh_rows_args weigh = {l.routing, R, scale, true, U_};
    assert_int_equal(bl_grouped_matmul(l.d.stream, &product), BL_OK);
    assert_int_equal(bl_weigh_rows(l.d.stream, &weigh), BL_OK);
    bl_grouped_gradient_args outer = {l.routing, R, H, U_, X, gradient};
    assert_int_equal(bl_grouped_gradient(l.d.stream, &outer), BL_OK);
    test_finish(l.d);
    for (int64_t e = 0; e < E; e++) {
        double sums[R * H] = {0};
        n_without += l.routing.first[e] == l.routing.first[e + 1];
        for (int64_t row = l.routing.first[e]; row < l.routing.first[e + 1]; row++)
            for (int64_t k = 0; k < R; k++) {
                double want = value_of(before, row * R + k);
                for (int64_t h = 0; h < H; h++)
                    want += value_of(A, (e * R + k) * H + h) * value_of(X, row * H + h);
                want *= (double)(scale * l.routing.weight[l.routing.token[row]]);
                float got = (float)value_of(U_, row * R + k);
                test_close("u", &got, &want, 1, 2 * tolerance, 2 * tolerance);
                for (int64_t h = 0; h < H; h++)
                    sums[k * H + h] += (double)got * value_of(X, row * H + h);
            }
        test_close("gradient", gradient + e * R * H, sums, R * H, 1e-5, 1e-5);
    }
    assert_true(n_tokens > E || n_without > 0);
    free(a), free(x), free(u), free(gradient);
    free(of_a), free(of_x), free(of_u), free(of_before);
    free_layer(&l);
}

static void test_factors(void **state)
{
    (void)state;
    check_factors(T, BL_F32);
    check_factors(T, BL_BF16);
    check_factors(5, BL_F32);
    check_factors(5, BL_BF16);
}

/* What one token's layer gives, through all ops of forward. */
static void run_layer(layer *l, const experts *up, const experts *down, bl_dtype dtype,
                      const void *x, void *y)
{
    int64_t n_rows = l->n_tokens * l->top_k;
    size_t bytes = bl_dtype_bytes(dtype);
    void *rows = test_alloc(n_rows * H, bytes), *h = test_alloc(n_rows * INTER, bytes);
    bl_tensor in = bl_tensor_of(x, dtype), permuted = bl_tensor_of(rows, dtype),
              inner = bl_tensor_of(h, dtype);

    route(l, in);
    assert_int_equal(bl_permute(l->d.stream, &(bl_permute_args){l->routing, H, in, permuted}),
                     BL_OK);
    assert_int_equal(
        bl_grouped_matmul(l->d.stream, &(bl_grouped_matmul_args){l->routing, true, permuted, inner,
                                                                 up->weight, false}),
        BL_OK);
    assert_int_equal(
        bl_grouped_matmul(l->d.stream, &(bl_grouped_matmul_args){l->routing, true, inner, permuted,
                                                                 down->weight, false}),
        BL_OK);
    assert_int_equal(bl_combine(l->d.stream, &(bl_combine_args){l->routing, H, true, permuted, in,
                                                                bl_tensor_of(y, dtype), NULL}),
                     BL_OK);
    test_finish(l->d);
    free(rows), free(h);
}

/* A token has the bits that it has alone, and with any number of threads. */
static void check_rows(bl_dtype dtype, bl_format format)
{
    enum { MANY = 700 };
    layer all = make_layer(MANY, K, true, 3), one = make_layer(1, K, true, 1);
    experts up = make_experts(format, INTER, H), down = make_experts(format, H, INTER);
    size_t row_bytes = H * bl_dtype_bytes(dtype);
    char *x = test_alloc(MANY, row_bytes), *y = test_alloc(MANY, row_bytes),
         *alone = test_alloc(1, row_bytes);

    for (int64_t i = 0; i < MANY * H; i++)
        if (dtype == BL_F32)
            ((float *)(void *)x)[i] = all.x[i];
        else
            ((uint16_t *)(void *)x)[i] = bl_f32_to_bf16(all.x[i]);
    run_layer(&all, &up, &down, dtype, x, y);
    for (int64_t t = 0; t < MANY; t += 23) {
        run_layer(&one, &up, &down, dtype, x + t * (int64_t)row_bytes, alone);
        assert_memory_equal(alone, y + t * (int64_t)row_bytes, row_bytes);
    }
    free(x), free(y), free(alone);
    free_experts(&up);
    free_experts(&down);
    free_layer(&all);
    free_layer(&one);
}

/* Sizes at which the library under the products would choose other kernels or orders of sums for
 * other numbers of rows. */
static void check_many_rows(bool forward)
{
    enum { N_OUT = 160, N_IN = 2100, ROWS = 303, AT = 299 };
    static int32_t all[] = {0, 300, ROWS}, first[] = {0, 1, 1}, second[] = {0, 0, 1};
    test_device d = test_device_create(3);
    int64_t rows = forward ? N_OUT : N_IN, cols = forward ? N_IN : N_OUT;
    float *w = test_random_floats(2 * rows * cols, 5), *x = test_random_floats(ROWS * N_IN, 6),
          *y = test_floats(ROWS * N_OUT), *alone = test_floats(N_OUT);
    bl_grouped_matmul_args args = {
        .routing = {.T = ROWS, .n_experts = 2, .top_k = 1, .first = all},
        .forward = forward,
        .in = bl_tensor_f32(x),
        .out = bl_tensor_f32(y),
        .weight = {2 * rows, cols, 1, {{BL_FORMAT_F32, w, NULL, 2 * rows}}}};

    assert_int_equal(bl_grouped_matmul(d.stream, &args), BL_OK);
    for (int e = 0; e < 2; e++) {
        int64_t row = e ? ROWS - 1 : AT;
        args.routing.first = e ? second : first;
        args.in = bl_tensor_f32(x + row * N_IN);
        args.out = bl_tensor_f32(alone);
        assert_int_equal(bl_grouped_matmul(d.stream, &args), BL_OK);
        test_finish(d);
        assert_memory_equal(alone, y + row * N_OUT, N_OUT * sizeof(float));
    }
    test_device_destroy(d);
    free(w), free(x), free(y), free(alone);
}

static void test_rows_are_apart(void **state)
{
    (void)state;
    check_rows(BL_BF16, BL_FORMAT_BF16);
    check_rows(BL_BF16, BL_FORMAT_FP8_ROW);
    check_rows(BL_F32, BL_FORMAT_F32);
    check_rows(BL_F32, BL_FORMAT_FP8_ROW);
    check_many_rows(true);
    check_many_rows(false);
}

static void test_what_is_rejected(void **state)
{
    layer l = make_layer(1, K, true, 1);
    experts w = make_experts(BL_FORMAT_F32, INTER, H);
    bl_route_args args = {.routing = l.routing, .H = H, .router = l.router};
    bl_grouped_matmul_args product = {.routing = l.routing, .weight = w.weight};
    (void)state;

    args.routing.top_k = E + 1;
    assert_int_equal(bl_route(l.d.stream, &args), BL_EINTERNAL);
    product.weight.segment[0].format = BL_FORMAT_FP8_BLOCK; /* 20 rows per expert */
    assert_int_equal(bl_grouped_matmul(l.d.stream, &product), BL_EINTERNAL);
    product.weight.n_segments = 2;
    assert_int_equal(bl_grouped_matmul(l.d.stream, &product), BL_EINTERNAL);
    free_experts(&w);
    free_layer(&l);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_route),           cmocka_unit_test(test_ties),
        cmocka_unit_test(test_route_backward),  cmocka_unit_test(test_products),
        cmocka_unit_test(test_weigh_backward),  cmocka_unit_test(test_rows_are_apart),
        cmocka_unit_test(test_factors),         cmocka_unit_test(test_biases),
        cmocka_unit_test(test_what_is_rejected)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
