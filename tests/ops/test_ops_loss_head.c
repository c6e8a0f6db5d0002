/* SPDX-License-Identifier: Apache-2.0 */
/* The loss head against the formula in double: packing of the tokens that count, chunks, signed
 * weights, forward-only mode. */
#include "half_test.h"

#include "base/sizes.h"
#include "ops/loss_head.h"

typedef struct problem {
    int64_t T, H, V;
    double scale;
    float *x, *head, *weights;
    int32_t *targets;
    bl_weight weight;
    double *want_logp, *want_dx, want_loss;
} problem;

enum { WEIGHTS_ALL, WEIGHTS_SOME, WEIGHTS_SIGNED, WEIGHTS_NONE, WEIGHTS_BUT_ONE };

static float weight_of(int kind, int64_t t)
{
    if (kind == WEIGHTS_ALL) return 1.0f;
    if (kind == WEIGHTS_NONE) return 0.0f;
    if (kind == WEIGHTS_BUT_ONE) return t == 2 ? 0.0f : 1.0f;
    if (t % 5 < 3) return 0.0f; /* runs of masked tokens, the first token among them */
    return kind == WEIGHTS_SOME ? 1.0f : t % 2 ? -0.75f : 1.5f;
}

/* Row t of the reference at x + by e_h: its log-probability, and with `dx` the gradient. */
static double reference_row(const problem *p, int64_t t, int64_t h_moved, double by, double *dx)
{
    double *logits = test_doubles(p->V), most = -INFINITY, sum = 0;
    for (int64_t v = 0; v < p->V; v++) {
        for (int64_t h = 0; h < p->H; h++)
            logits[v] += ((double)p->x[t * p->H + h] + (h == h_moved ? by : 0)) *
                         (double)p->head[v * p->H + h];
        most = fmax(most, logits[v]);
    }
    for (int64_t v = 0; v < p->V; v++) sum += exp(logits[v] - most);
    for (int64_t v = 0; dx && v < p->V; v++) {
        double d = exp(logits[v] - most) / sum - (v == p->targets[t] ? 1.0 : 0.0);
        for (int64_t h = 0; h < p->H; h++)
            dx[h] += p->scale * (double)p->weights[t] * d * (double)p->head[v * p->H + h];
    }
    double logp = logits[p->targets[t]] - most - log(sum);
    free(logits);
    return logp;
}

static problem problem_create(int64_t T, int64_t H, int64_t V, int weights, bl_dtype dtype)
{
    problem p = {.T = T, .H = H, .V = V, .scale = 1.0 / 37};
    p.x = test_random_floats(T * H, 1);
    p.head = test_random_floats(V * H, 2);
    if (dtype == BL_BF16) {
        test_round_floats(p.x, T * H);
        test_round_floats(p.head, V * H);
    }
    p.weights = test_floats(T);
    p.targets = test_alloc(T, sizeof *p.targets);
    p.want_logp = test_doubles(T);
    p.want_dx = test_doubles(T * H);
    uint64_t random = 77;
    for (int64_t t = 0; t < T; t++) {
        p.weights[t] = weight_of(weights, t);
        p.targets[t] = (int32_t)((test_random(&random) + 1) / 2 * (double)V);
        if (p.weights[t] == 0.0f) p.targets[t] = -100; /* must not be looked at */
    }
    for (int64_t t = 0; t < T; t++) {
        if (p.weights[t] == 0.0f) continue;
        p.want_logp[t] = reference_row(&p, t, -1, 0, p.want_dx + t * H);
        p.want_loss -= (double)p.weights[t] * p.want_logp[t];
    }
    p.weight = (bl_weight){.rows = V,
                           .cols = H,
                           .n_segments = 1,
                           .segment = {{.format = BL_FORMAT_F32, .codes = p.head, .rows = V}}};
    return p;
}

static void problem_destroy(problem *p)
{
    free(p->x);
    free(p->head);
    free(p->weights);
    free(p->targets);
    free(p->want_logp);
    free(p->want_dx);
}

/* A logit is a sum of H products below 1 with mean square 1/9: it is off by 4 standard deviations
 * of a random walk of H roundings of partial sums below sqrt(H) / 3 * 3, hence 4 u H / 4. log p
 * takes two such errors. dx sums V terms p W with sum p = 1, |W| < 1, each relatively off by twice
 * a logit's error, and one product and a sum of V terms. */
static double logit_tolerance(int64_t H)
{
    return (double)(H + 16) * U;
}

/* On the CPU neither T nor H matters. */
static int64_t scratch_floats(int64_t V)
{
    return (int64_t)(bl_loss_head_scratch_bytes(BL_DEVICE_CPU, 7, 64, V) / sizeof(float));
}

static void check(int64_t T, int64_t H, int64_t V, int weights)
{
    problem p = problem_create(T, H, V, weights, BL_F32);
    int64_t n_scratch = scratch_floats(V);
    float *logits = test_floats(n_scratch), *dx = test_floats(T * H), *logp = test_floats(T);
    float *first_dx = test_floats(T * H), *first_logp = test_floats(T);
    double largest = 0;
    for (int64_t t = 0; t < T; t++) largest = fmax(largest, fabs((double)p.weights[t]));
    for (int threads = 1; threads <= 3; threads++) {
        test_device d = test_device_create(threads);
        double loss = 0.25, loss_forward = 0.25;
        for (int64_t i = 0; i < T * H; i++) dx[i] = NAN;
        for (int64_t t = 0; t < T; t++) logp[t] = NAN;
        bl_loss_head_args args = {.T = T,
                                  .H = H,
                                  .V = V,
                                  .head = p.weight,
                                  .x = bl_tensor_f32(p.x),
                                  .targets = p.targets,
                                  .weights = p.weights,
                                  .scale = p.scale,
                                  .logits = logits,
                                  .dx = bl_tensor_f32(dx),
                                  .logp = logp,
                                  .loss_sum = &loss};
        assert_int_equal(bl_loss_head(d.stream, &args), BL_OK);
        test_finish(d);
        test_close("logp", logp, p.want_logp, T, 2 * logit_tolerance(H), U);
        test_close("dx", dx, p.want_dx, T * H,
                   p.scale * largest * (2 * logit_tolerance(H) + 32 * U), 0);
        assert_true(fabs(loss - 0.25 - p.want_loss) <=
                    2 * logit_tolerance(H) * largest * (double)T);
        for (int64_t t = 0; t < T; t++) {
            if (p.weights[t] != 0.0f) continue;
            assert_true(logp[t] == 0.0f);
            for (int64_t h = 0; h < H; h++) assert_true(dx[t * H + h] == 0.0f);
        }
        if (threads == 1) {
            memcpy(first_dx, dx, (size_t)(T * H) * sizeof *dx);
            memcpy(first_logp, logp, (size_t)T * sizeof *dx);
        }
        test_same_bits("dx", first_dx, dx, T * H);
        test_same_bits("logp", first_logp, logp, T);
        /* forward only, and dx over x */
        args.dx = (bl_tensor){0};
        args.loss_sum = &loss_forward;
        assert_int_equal(bl_loss_head(d.stream, &args), BL_OK);
        test_finish(d);
        test_close("logp, forward only", logp, p.want_logp, T, 2 * logit_tolerance(H), U);
        assert_true(fabs(loss_forward - loss) <= 2 * logit_tolerance(H) * largest * (double)T);
        memcpy(dx, p.x, (size_t)(T * H) * sizeof *dx);
        args.x = args.dx = bl_tensor_f32(dx);
        args.logp = NULL;
        args.loss_sum = NULL;
        assert_int_equal(bl_loss_head(d.stream, &args), BL_OK);
        test_finish(d);
        test_same_bits("dx over x", first_dx, dx, T * H);
        test_device_destroy(d);
    }
    free(logits);
    free(dx);
    free(logp);
    free(first_dx);
    free(first_logp);
    problem_destroy(&p);
}

/* On bf16, with a head that is stored in it: logits are sums of the same exact products in fp32.
 * dlogits are rounded to bf16 for the second product, and sum up to 2 at most with |W| < 1; dx,
 * below 2, is rounded once. */
static void check_bf16(int64_t T, int64_t H, int64_t V, int weights)
{
    problem p = problem_create(T, H, V, weights, BL_BF16);
    float *logits = test_floats(scratch_floats(V)), *dx = test_floats(T * H),
          *logp = test_floats(T), *first = test_floats(T * H);
    uint16_t *head = test_rounded(p.head, V * H);
    double largest = 0;

    p.weight.segment[0].format = BL_FORMAT_BF16;
    p.weight.segment[0].codes = head;
    for (int64_t t = 0; t < T; t++) largest = fmax(largest, fabs((double)p.weights[t]));
    for (int threads = 1; threads <= 3; threads++) {
        test_device d = test_device_create(threads);
        uint16_t *x = test_rounded(p.x, T * H);
        double loss[2] = {0};
        bl_loss_head_args args = {.T = T,
                                  .H = H,
                                  .V = V,
                                  .head = p.weight,
                                  .x = bl_tensor_of(x, BL_BF16),
                                  .targets = p.targets,
                                  .weights = p.weights,
                                  .scale = p.scale,
                                  .logits = logits,
                                  .logp = logp,
                                  .loss_sum = &loss[0]};
        assert_int_equal(bl_loss_head(d.stream, &args), BL_OK);
        args.dx = args.x; /* dx over x */
        args.loss_sum = &loss[1];
        assert_int_equal(bl_loss_head(d.stream, &args), BL_OK);
        test_finish(d);
        assert_true(loss[0] == loss[1]);
        assert_true(fabs(loss[0] - p.want_loss) <= 2 * logit_tolerance(H) * largest * (double)T);
        test_close("logp", logp, p.want_logp, T, 2 * logit_tolerance(H), U);
        test_widen(x, dx, T * H);
        test_close("dx", dx, p.want_dx, T * H,
                   p.scale * largest * (4 * U_BF16 + 2 * logit_tolerance(H) + 32 * U), 0);
        if (threads == 1) memcpy(first, dx, (size_t)(T * H) * sizeof *dx);
        test_same_bits("dx", first, dx, T * H);
        free(x);
        test_device_destroy(d);
    }
    free(logits), free(dx), free(logp), free(first), free(head);
    problem_destroy(&p);
}

static void loss_on_bf16_matches_the_formula(void **state)
{
    (void)state;
    check_bf16(0, 64, 100, WEIGHTS_ALL);
    check_bf16(1, 64, 1, WEIGHTS_ALL);
    check_bf16(7, 172, 333, WEIGHTS_SIGNED);
    check_bf16(129, 101, 1000, WEIGHTS_SOME);
    check_bf16(129, 64, 50, WEIGHTS_NONE);
    check_bf16(1025, 8, 20, WEIGHTS_ALL);
    check_bf16(3, 64, 40000, WEIGHTS_ALL);
}

static void loss_matches_the_formula(void **state)
{
    (void)state;
    check(0, 64, 100, WEIGHTS_ALL);
    check(1, 64, 1, WEIGHTS_ALL);
    check(7, 172, 333, WEIGHTS_ALL);
    check(7, 172, 333, WEIGHTS_SIGNED);
    check(129, 100, 1000, WEIGHTS_SOME);
    check(129, 100, 1000, WEIGHTS_SIGNED);
    check(129, 64, 50, WEIGHTS_NONE);
    check(7, 64, 50, WEIGHTS_BUT_ONE);
    check(3, 64, 40000, WEIGHTS_ALL);
    check(9, 300, 16, WEIGHTS_ALL); /* more channels than words */
}

/* More tokens than one chunk holds. */
static void chunks_join_without_a_seam(void **state)
{
    (void)state;
    check(2600, 8, 20, WEIGHTS_SIGNED);
    check(1025, 8, 20, WEIGHTS_ALL);
    check(1024, 8, 20, WEIGHTS_ALL);
    check(70, 4, 140000, WEIGHTS_SOME);
}

/* c (M,N) += alpha a b, in double; strides of rows and columns. */
static void multiply(int64_t M, int64_t N, int64_t K, double alpha, const float *a, int64_t a_row,
                     int64_t a_col, const float *b, int64_t b_row, int64_t b_col, double *c)
{
    for (int64_t i = 0; i < M; i++)
        for (int64_t k = 0; k < N; k++) {
            double sum = 0;
            for (int64_t j = 0; j < K; j++)
                sum += (double)a[i * a_row + j * a_col] * (double)b[j * b_row + k * b_col];
            c[i * N + k] += alpha * sum;
        }
}

/* The head p.head is W' = W + s B A. W with the term s B A has the same loss; dx + du A equals the
 * dx of W', and dB equals s dW' A^T. */
static void check_term(int64_t T, int64_t H, int64_t V, int weights, int64_t r)
{
    const double s = 0.75;
    problem p = problem_create(T, H, V, weights, BL_F32);
    int64_t n_scratch = scratch_floats(V);
    float *a = test_random_floats(r * H, 3), *b = test_random_floats(V * r, 4),
          *w = test_floats(V * H), *u = test_floats(T * r), *du = test_floats(T * r),
          *db = test_floats(V * r), *dw = test_floats(V * H), *dx = test_floats(T * H),
          *logp = test_floats(T), *logits = test_floats(n_scratch);
    double *term = test_doubles(V * H), *x_a = test_doubles(T * r), *whole = test_doubles(T * H),
           *want_db = test_doubles(V * r), loss = 0;
    test_device d = test_device_create(2);

    multiply(V, H, r, s, b, r, 1, a, H, 1, term);
    for (int64_t i = 0; i < V * H; i++) w[i] = (float)((double)p.head[i] - term[i]);
    multiply(T, r, H, 1, p.x, H, 1, a, 1, H, x_a);
    for (int64_t i = 0; i < T * r; i++) u[i] = (float)x_a[i], du[i] = NAN;
    bl_loss_head_args args = {.T = T,
                              .H = H,
                              .V = V,
                              .head = p.weight,
                              .x = bl_tensor_f32(p.x),
                              .targets = p.targets,
                              .weights = p.weights,
                              .scale = p.scale,
                              .logits = logits,
                              .dx = bl_tensor_f32(dx),
                              .d_head = dw};
    assert_int_equal(bl_loss_head(d.stream, &args), BL_OK);
    test_finish(d);
    multiply(V, r, H, s, dw, H, 1, a, 1, H, want_db);
    const bl_loss_head_term of_head = {.r = r,
                                       .scale = (float)s,
                                       .u = bl_tensor_f32(u),
                                       .du = bl_tensor_f32(du),
                                       .B = bl_tensor_f32(b),
                                       .dB = db};
    args.head.segment[0].codes = w;
    args.d_head = NULL;
    args.term = &of_head;
    args.logp = logp;
    args.loss_sum = &loss;
    assert_int_equal(bl_loss_head(d.stream, &args), BL_OK);
    test_finish(d);
    /* Logits are r H + H products instead of H, of numbers below 1 + s r. */
    double tolerance = (1 + s * (double)r) * 4 * logit_tolerance(H);
    test_close("logp", logp, p.want_logp, T, tolerance, U);
    assert_true(fabs(loss - p.want_loss) <= tolerance * 1.5 * (double)T);
    for (int64_t i = 0; i < T * H; i++) whole[i] = p.want_dx[i];
    multiply(T, H, r, -1, du, r, 1, a, H, 1, whole);
    test_close("dx", dx, whole, T * H, 1.5 * p.scale * (1 + s * (double)r) * (tolerance + 64 * U),
               0);
    test_close("dB", db, want_db, V * r, 1.5 * p.scale * (double)T * (tolerance + 64 * U), 0);
    for (int64_t t = 0; t < T; t++)
        for (int64_t k = 0; p.weights[t] == 0.0f && k < r; k++) assert_true(du[t * r + k] == 0.0f);
    args.dx = (bl_tensor){0};
    memset(logp, 0, (size_t)T * sizeof *logp);
    assert_int_equal(bl_loss_head(d.stream, &args), BL_OK);
    test_finish(d);
    test_close("logp, forward only", logp, p.want_logp, T, tolerance, U);
    test_device_destroy(d);
    float *const floats[] = {a, b, w, u, du, db, dw, dx, logp, logits};
    for (size_t i = 0; i < BL_COUNT(floats); i++) free(floats[i]);
    free(term), free(x_a), free(whole), free(want_db);
    problem_destroy(&p);
}

/* Over several chunks, too. */
static void a_term_is_a_part_of_the_head(void **state)
{
    (void)state;
    check_term(7, 64, 50, WEIGHTS_ALL, 4);
    check_term(2600, 8, 20, WEIGHTS_SIGNED, 3);
    check_term(70, 4, 140000, WEIGHTS_SOME, 2);
    check_term(5, 16, 30, WEIGHTS_NONE, 1);
}

static void gradient_matches_central_differences(void **state)
{
    (void)state;
    problem p = problem_create(7, 64, 100, WEIGHTS_SIGNED, BL_F32);
    float *logits = test_floats(scratch_floats(100)), *dx = test_floats(7 * 64);
    test_device d = test_device_create(2);
    bl_loss_head_args args = {.T = 7,
                              .H = 64,
                              .V = 100,
                              .head = p.weight,
                              .x = bl_tensor_f32(p.x),
                              .targets = p.targets,
                              .weights = p.weights,
                              .scale = p.scale,
                              .logits = logits,
                              .dx = bl_tensor_f32(dx)};
    bl_loss_head(d.stream, &args);
    test_finish(d);
    for (int64_t i = 0; i < 7 * 64; i++) {
        /* step^2 / 6 of a third derivative below 8 |W|^3: 2e-8 */
        double step = 1e-4, weight = (double)p.weights[i / 64], want = 0;
        if (weight != 0)
            want = -p.scale * weight *
                   (reference_row(&p, i / 64, i % 64, step, NULL) -
                    reference_row(&p, i / 64, i % 64, -step, NULL)) /
                   (2 * step);
        test_close("dx", dx + i, &want, 1,
                   p.scale * 1.5 * (2 * logit_tolerance(64) + 32 * U + 2e-8), 0);
    }
    test_device_destroy(d);
    free(logits);
    free(dx);
    problem_destroy(&p);
}

static void bad_input_is_seen(void **state)
{
    (void)state;
    problem p = problem_create(5, 8, 20, WEIGHTS_ALL, BL_F32);
    float *logits = test_floats(scratch_floats(20)), dx[5 * 8];
    double loss = 0;
    bl_loss_head_args args = {.T = 5,
                              .H = 8,
                              .V = 20,
                              .head = p.weight,
                              .x = bl_tensor_f32(p.x),
                              .targets = p.targets,
                              .weights = p.weights,
                              .scale = 1,
                              .logits = logits,
                              .dx = bl_tensor_f32(dx),
                              .loss_sum = &loss};
    /* NaN and infinite logits reach the loss. */
    const float bad[] = {NAN, INFINITY};
    for (size_t k = 0; k < BL_COUNT(bad); k++) {
        test_device d = test_device_create(1);
        float keep = p.x[3];
        p.x[3] = bad[k];
        loss = 0;
        assert_int_equal(bl_loss_head(d.stream, &args), BL_OK);
        test_finish(d);
        assert_false(isfinite(loss));
        p.x[3] = keep;
        test_device_destroy(d);
    }
    const int32_t outside[] = {-1, 20};
    for (size_t k = 0; k < BL_COUNT(outside); k++) {
        test_device d = test_device_create(1);
        p.targets[4] = outside[k];
        assert_int_equal(bl_loss_head(d.stream, &args), BL_OK);
        assert_int_equal(bl_stream_synchronize(d.stream), BL_EINPUT);
        test_device_destroy(d);
    }
    test_device d = test_device_create(1);
    args.V = 21;
    assert_int_equal(bl_loss_head(d.stream, &args), BL_EINTERNAL);
    test_device_destroy(d);
    free(logits);
    problem_destroy(&p);
}

static void scratch_is_bounded(void **state)
{
    (void)state;
    assert_int_equal(scratch_floats(16), 1 << 20);
    assert_int_equal(scratch_floats(4096), 4096 * 1024);
    assert_int_equal(scratch_floats(128256), 1 << 24);
    assert_int_equal(scratch_floats(2000000), 32000000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(loss_matches_the_formula),
        cmocka_unit_test(loss_on_bf16_matches_the_formula),
        cmocka_unit_test(chunks_join_without_a_seam),
        cmocka_unit_test(a_term_is_a_part_of_the_head),
        cmocka_unit_test(gradient_matches_central_differences),
        cmocka_unit_test(bad_input_is_seen),
        cmocka_unit_test(scratch_is_bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
