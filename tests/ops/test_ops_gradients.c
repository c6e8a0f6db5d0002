/* SPDX-License-Identifier: Apache-2.0 */
/* Gradients of trained weights, against sums in double: of norms, heads' norms and biases, of the
 * embedding, of the head. All are added to their outputs; 1 to 3 threads give the same bits. bf16
 * tensors give the bits of the same numbers in fp32. */
#include "half_test.h"

#include "ops/elementwise.h"
#include "ops/loss_head.h"
#include "ops/norm.h"

enum { THREADS_MAX = 3 };

/* ---- norms and biases ---- */

typedef struct norm_case {
    int64_t T, H, n_heads, row_stride; /* n_heads 0: dense rows */
    bool has_mean, has_dw, has_db;
} norm_case;

static void norm_reference(norm_case c, const float *x, const float *dy, const float *mean,
                           const float *rstd, double *dw, double *db)
{
    int64_t n_heads = c.n_heads ? c.n_heads : 1, stride = c.n_heads ? c.row_stride : c.H;

    for (int64_t t = 0; t < c.T; t++)
        for (int64_t k = 0; k < n_heads; k++)
            for (int64_t h = 0; h < c.H; h++) {
                int64_t at = t * stride + k * c.H + h, r = t * n_heads + k;
                double shift = c.has_mean ? (double)mean[r] : 0;
                dw[h] += (double)dy[at] * ((double)x[at] - shift) * (double)rstd[r];
                db[h] += (double)dy[at];
            }
}

/* One rounding of the sum, and one of its addend. */
static void check_norm(norm_case c)
{
    int64_t n_rows = c.T * (c.n_heads ? c.n_heads : 1), n = c.T * (c.n_heads ? c.row_stride : c.H);
    float *x = test_random_floats(n, 1), *dy = test_random_floats(n, 2),
          *mean = test_random_floats(n_rows, 3), *rstd = test_random_floats(n_rows, 4),
          *first[2] = {NULL, NULL};
    double *want[2] = {test_doubles(c.H), test_doubles(c.H)};

    norm_reference(c, x, dy, mean, rstd, want[0], want[1]);
    for (int64_t h = 0; h < c.H; h++) want[0][h] += 0.5, want[1][h] += 0.5;
    for (int threads = 1; threads <= THREADS_MAX; threads++) {
        test_device d = test_device_create(threads);
        float *got[2] = {test_floats(c.H), test_floats(c.H)};
        for (int64_t h = 0; h < c.H; h++) got[0][h] = got[1][h] = 0.5f;
        bl_norm_gradients_args args = {.T = c.T,
                                       .H = c.H,
                                       .dy = bl_tensor_f32(dy),
                                       .n_heads = c.n_heads,
                                       .row_stride = c.row_stride};
        if (c.has_dw) args.x = bl_tensor_f32(x), args.rstd = rstd, args.dw = got[0];
        if (c.has_dw && c.has_mean) args.mean = mean;
        if (c.has_db) args.db = got[1];
        assert_int_equal(bl_norm_gradients(d.stream, &args), BL_OK);
        test_finish(d);
        test_device_destroy(d);
        for (int i = 0; i < 2; i++) {
            bool is_there = i == 0 ? c.has_dw : c.has_db;
            for (int64_t h = 0; h < c.H && !is_there; h++) assert_true(got[i][h] == 0.5f);
            if (is_there) test_close(i ? "db" : "dw", got[i], want[i], c.H, 1e-12, 2 * U);
            if (threads > 1) test_same_bits("threads", first[i], got[i], c.H);
            if (threads > 1) free(got[i]);
            if (threads == 1) first[i] = got[i];
        }
    }
    free(x), free(dy), free(mean), free(rstd), free(first[0]), free(first[1]);
    free(want[0]), free(want[1]);
}

static void sums_over_rows_match_the_formula(void **state)
{
    static const int64_t T[] = {0, 1, 7, 300}, H[] = {1, 64, 100, 576};

    (void)state;
    for (size_t i = 0; i < BL_COUNT(T); i++)
        for (size_t k = 0; k < BL_COUNT(H); k++) {
            check_norm((norm_case){T[i], H[k], 0, 0, false, true, false});
            check_norm((norm_case){T[i], H[k], 0, 0, true, true, true});
            check_norm((norm_case){T[i], H[k], 0, 0, false, false, true});
            check_norm((norm_case){T[i], H[k], 3, 3 * H[k] + 11, false, true, false});
        }
}

/* ---- embedding ---- */

static void tokens_add_to_their_rows(void **state)
{
    enum { TOKENS = 37, WIDTH = 130, VOCABULARY = 9 };
    float *dy = test_random_floats(TOKENS * WIDTH, 5), *first = NULL;
    float want[VOCABULARY * WIDTH];
    int32_t ids[TOKENS];

    (void)state;
    for (int t = 0; t < TOKENS; t++) ids[t] = (t * t + 3) % (VOCABULARY - 1); /* one is not used */
    for (int i = 0; i < VOCABULARY * WIDTH; i++) want[i] = 0.25f;
    for (int t = 0; t < TOKENS; t++) /* in the order of tokens: the same roundings */
        for (int h = 0; h < WIDTH; h++) want[ids[t] * WIDTH + h] += 1.5f * dy[t * WIDTH + h];
    for (int threads = 1; threads <= THREADS_MAX; threads++) {
        test_device d = test_device_create(threads);
        float *table = test_floats(VOCABULARY * WIDTH);
        for (int i = 0; i < VOCABULARY * WIDTH; i++) table[i] = 0.25f;
        assert_int_equal(
            bl_embedding_backward(d.stream, &(bl_embedding_backward_args){.T = TOKENS,
                                                                          .H = WIDTH,
                                                                          .scale = 1.5f,
                                                                          .ids = ids,
                                                                          .dy = bl_tensor_f32(dy),
                                                                          .table = table}),
            BL_OK);
        test_finish(d);
        test_device_destroy(d);
        test_same_bits("table", want, table, VOCABULARY * WIDTH);
        free(first);
        first = table;
    }
    free(first), free(dy);
}

/* ---- bf16 ---- */

static void bf16_rows_are_widened(void **state)
{
    enum { TOKENS = 37, WIDTH = 130, VOCABULARY = 9 };
    float *x = test_random_floats(TOKENS * WIDTH, 11), *dy = test_random_floats(TOKENS * WIDTH, 12),
          *mean = test_random_floats(TOKENS, 13), *rstd = test_random_floats(TOKENS, 14), *dw[2],
          *db[2], *table[2];
    int32_t ids[TOKENS];
    test_device d = test_device_create(2);

    (void)state;
    test_round_floats(x, TOKENS * WIDTH), test_round_floats(dy, TOKENS * WIDTH);
    uint16_t *half_x = test_rounded(x, TOKENS * WIDTH), *half_dy = test_rounded(dy, TOKENS * WIDTH);
    for (int t = 0; t < TOKENS; t++) ids[t] = t % VOCABULARY;
    for (int i = 0; i < 2; i++) {
        dw[i] = test_floats(WIDTH), db[i] = test_floats(WIDTH);
        table[i] = test_floats(VOCABULARY * WIDTH);
        bl_tensor of_dy = i ? bl_tensor_of(half_dy, BL_BF16) : bl_tensor_f32(dy);
        bl_norm_gradients_args norm = {.T = TOKENS,
                                       .H = WIDTH,
                                       .x = i ? bl_tensor_of(half_x, BL_BF16) : bl_tensor_f32(x),
                                       .dy = of_dy,
                                       .mean = mean,
                                       .rstd = rstd,
                                       .dw = dw[i],
                                       .db = db[i]};
        bl_embedding_backward_args embedding = {
            .T = TOKENS, .H = WIDTH, .scale = 1.5f, .ids = ids, .dy = of_dy, .table = table[i]};
        assert_int_equal(bl_norm_gradients(d.stream, &norm), BL_OK);
        assert_int_equal(bl_embedding_backward(d.stream, &embedding), BL_OK);
        test_finish(d);
    }
    assert_true(dw[0][1] != 0 && db[0][1] != 0 && table[0][1] != 0);
    test_same_bits("dw", dw[0], dw[1], WIDTH);
    test_same_bits("db", db[0], db[1], WIDTH);
    test_same_bits("table", table[0], table[1], VOCABULARY * WIDTH);
    for (int i = 0; i < 2; i++) free(dw[i]), free(db[i]), free(table[i]);
    free(x), free(dy), free(mean), free(rstd), free(half_x), free(half_dy);
    test_device_destroy(d);
}

/* ---- head ---- */

/* The sum of T products of a logit's gradient and an input, in fp32, over chunks: T u of the sum of
 * sizes, at most T of 1 x 1 x scale each; the softmax is off by some u. In bf16 the logit's
 * gradient, 1 x scale at most, is rounded once. */
static void check_head_gradient(bl_dtype dtype)
{
    enum { TOKENS = 33, WIDTH = 24, VOCABULARY = 70 };
    float *x = test_random_floats(TOKENS * WIDTH, 6),
          *head = test_random_floats(VOCABULARY * WIDTH, 7), *dx = test_floats(TOKENS * WIDTH),
          *d_head = test_floats(VOCABULARY * WIDTH), *weights = test_floats(TOKENS);
    double *want = test_doubles(VOCABULARY * WIDTH), scale = 1.0 / 11;
    int32_t targets[TOKENS];
    test_device d = test_device_create(2);

    test_round_floats(x, TOKENS * WIDTH), test_round_floats(head, VOCABULARY * WIDTH);
    uint16_t *half = test_rounded(x, TOKENS * WIDTH);
    for (int t = 0; t < TOKENS; t++) {
        double logits[VOCABULARY] = {0}, sum = 0;
        targets[t] = t * 7 % VOCABULARY;
        weights[t] = t % 3 == 0 ? 0.0f : t % 2 ? 1.0f : -0.5f;
        for (int v = 0; v < VOCABULARY; v++) {
            for (int h = 0; h < WIDTH; h++)
                logits[v] += (double)x[t * WIDTH + h] * (double)head[v * WIDTH + h];
            sum += exp(logits[v]);
        }
        for (int v = 0; v < VOCABULARY; v++)
            for (int h = 0; h < WIDTH; h++)
                want[v * WIDTH + h] += scale * (double)weights[t] *
                                       (exp(logits[v]) / sum - (v == targets[t] ? 1.0 : 0.0)) *
                                       (double)x[t * WIDTH + h];
    }
    for (int i = 0; i < VOCABULARY * WIDTH; i++) d_head[i] = 2.0f, want[i] += 2.0;
    bl_loss_head_args args = {
        .T = TOKENS,
        .H = WIDTH,
        .V = VOCABULARY,
        .head = {.rows = VOCABULARY,
                 .cols = WIDTH,
                 .n_segments = 1,
                 .segment = {{.format = BL_FORMAT_F32, .codes = head, .rows = VOCABULARY}}},
        .x = dtype == BL_BF16 ? bl_tensor_of(half, BL_BF16) : bl_tensor_f32(x),
        .dx = bl_tensor_of(dx, dtype),
        .targets = targets,
        .weights = weights,
        .scale = scale,
        .logits = test_floats(1 << 21),
        .d_head = d_head};
    assert_int_equal(bl_loss_head(d.stream, &args), BL_OK);
    test_finish(d);
    double rounding = dtype == BL_BF16 ? TOKENS * scale * U_BF16 : 0;
    test_close("d_head", d_head, want, VOCABULARY * WIDTH, TOKENS * U + rounding, 4 * U);
    args.dx = (bl_tensor){0};
    assert_int_equal(bl_loss_head(d.stream, &args), BL_EINTERNAL);
    test_device_destroy(d);
    free(args.logits), free(x), free(head), free(dx), free(d_head), free(weights), free(want);
    free(half);
}

static void the_head_gets_a_gradient(void **state)
{
    (void)state;
    check_head_gradient(BL_F32);
    check_head_gradient(BL_BF16);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(sums_over_rows_match_the_formula),
                                       cmocka_unit_test(tokens_add_to_their_rows),
                                       cmocka_unit_test(bf16_rows_are_widened),
                                       cmocka_unit_test(the_head_gets_a_gradient)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
