/* SPDX-License-Identifier: Apache-2.0 */
/* The LoRA linear layer against a naive double reference of its four equations.
 *
 * Tolerance. Every output is a sum of products of inputs. In fp32 each product is rounded once for
 * each factor beyond the first and a sum of n terms adds at most n roundings, so an output is off
 * by at most n u times the same sum over absolute values (Higham 2002, "Accuracy and Stability of
 * Numerical Algorithms", sections 3.1 and 3.5). The reference is therefore run twice, once with the
 * values and once with their sizes, and n is the longest chain: T + K + N + r, and 8 for scale,
 * mask, alpha and beta. */
#include "ops_test.h"

#include "linear/lora_linear.h"
#include "lora_reference.h"

enum { MAX_PARTS = BL_LORA_PARTS };

typedef struct layer_shape {
    const char *name;
    int64_t T, K;
    int n_segments;
    struct {
        bl_format format;
        int64_t rows;
    } segment[MAX_PARTS];
    int n_parts;
    struct {
        int64_t r, row_begin, rows;
        float scale;
    } part[MAX_PARTS];
} layer_shape;

static const layer_shape shapes[] = {
    {"the plain base", 7, 33, 1, {{BL_FORMAT_F32, 20}}, 0, {{0}}},
    {"one token", 1, 5, 1, {{BL_FORMAT_F32, 3}}, 1, {{1, 0, 3, 2.0f}}},
    {"fp8_row, r 1", 7, 130, 1, {{BL_FORMAT_FP8_ROW, 129}}, 1, {{1, 0, 129, 0.5f}}},
    {"q|k|v in bf16",
     130,
     257,
     3,
     {{BL_FORMAT_BF16, 128}, {BL_FORMAT_BF16, 64}, {BL_FORMAT_BF16, 64}},
     3,
     {{3, 0, 128, 2.0f}, {64, 128, 64, 0.25f}, {17, 192, 64, 1.0f}}},
    {"q and v of q|k|v",
     7,
     96,
     3,
     {{BL_FORMAT_FP8_ROW, 96}, {BL_FORMAT_FP8_ROW, 32}, {BL_FORMAT_FP8_ROW, 32}},
     2,
     {{8, 0, 96, 2.0f}, {8, 128, 32, 2.0f}}},
    {"up of gate|up in fp8_block",
     7,
     300,
     2,
     {{BL_FORMAT_FP8_BLOCK, 200}, {BL_FORMAT_FP8_BLOCK, 100}},
     1,
     {{9, 200, 100, 4.0f}}},
    {"mixed widths",
     33,
     64,
     3,
     {{BL_FORMAT_FP8_ROW, 96}, {BL_FORMAT_BF16, 40}, {BL_FORMAT_F32, 24}},
     2,
     {{5, 0, 96, 2.0f}, {7, 136, 24, 2.0f}}},
    {"fp8_block beside f16",
     7,
     140,
     2,
     {{BL_FORMAT_FP8_BLOCK, 140}, {BL_FORMAT_F16, 20}},
     2,
     {{2, 0, 140, 16.0f}, {31, 140, 20, 0.125f}}},
    {"rows inside f16", 7, 48, 1, {{BL_FORMAT_F16, 50}}, 1, {{6, 11, 13, 1.0f}}},
    {"no tokens", 0, 24, 1, {{BL_FORMAT_FP8_ROW, 16}}, 1, {{4, 0, 16, 1.0f}}},
};

/* A layer with its inputs and the places of its outputs; everything is allocated to the size it
 * needs and no more. */
typedef struct problem {
    const layer_shape *shape;
    int64_t T, K, N;
    bl_lora_linear linear;
    double *w; /* (N,K), decoded */
    float *x, *dy, *y, *dx;
    int64_t *sample;
    int32_t *position;
    void *codes[MAX_PARTS];
    float *scales[MAX_PARTS];
    int64_t code_bytes[MAX_PARTS], n_scales[MAX_PARTS];
} problem;

static void fill_nan(float *values, int64_t n)
{
    for (int64_t i = 0; i < n; i++) values[i] = NAN;
}

static void add_segment(problem *p, bl_pool *pool, int s, double *w)
{
    bl_format format = p->shape->segment[s].format;
    int64_t rows = p->shape->segment[s].rows, n = rows * p->K;
    float *values = test_random_floats(n, 100 + (uint64_t)s);
    size_t bytes, n_scales;

    assert_true(bl_format_sizes(format, rows, p->K, &bytes, &n_scales));
    p->codes[s] = test_alloc((int64_t)bytes, 1);
    p->scales[s] = n_scales ? test_floats((int64_t)n_scales) : NULL;
    p->code_bytes[s] = (int64_t)bytes;
    p->n_scales[s] = (int64_t)n_scales;
    uint16_t *halves = p->codes[s];
    switch (format) {
    case BL_FORMAT_FP8_ROW:
        assert_int_equal(
            bl_fp8_row_quantize(pool, BL_F32, values, 0, rows, p->K, p->codes[s], p->scales[s]),
            BL_OK);
        break;
    case BL_FORMAT_FP8_BLOCK:
        assert_int_equal(
            bl_fp8_block_quantize(pool, BL_F32, values, 0, rows, p->K, p->codes[s], p->scales[s]),
            BL_OK);
        break;
    case BL_FORMAT_F32:
        memcpy(p->codes[s], values, bytes);
        break;
    case BL_FORMAT_F16:
        for (int64_t i = 0; i < n; i++) halves[i] = bl_f32_to_f16(values[i]);
        break;
    default:
        for (int64_t i = 0; i < n; i++) halves[i] = bl_f32_to_bf16(values[i]);
        break;
    }
    bl_fp8_dequantize(pool, format, p->codes[s], p->scales[s], rows, p->K, values);
    for (int64_t i = 0; i < n; i++) w[i] = values[i];
    p->linear.weight.segment[s] = (bl_weight_segment){format, p->codes[s], p->scales[s], rows};
    free(values);
}

static problem create_problem(const layer_shape *shape, bl_pool *pool, float dropout, uint64_t seed)
{
    problem p = {.shape = shape, .T = shape->T, .K = shape->K};
    int64_t r_max = 0, row = 0;

    for (int s = 0; s < shape->n_segments; s++) p.N += shape->segment[s].rows;
    p.w = test_doubles(p.N * p.K);
    p.linear.weight = (bl_weight){.rows = p.N, .cols = p.K, .n_segments = shape->n_segments};
    for (int s = 0; s < shape->n_segments; s++) {
        add_segment(&p, pool, s, p.w + row * p.K);
        row += shape->segment[s].rows;
    }
    p.linear.n_parts = shape->n_parts;
    for (int i = 0; i < shape->n_parts; i++) {
        int64_t r = shape->part[i].r, rows = shape->part[i].rows;
        p.linear.part[i] = (bl_lora_part){
            .r = r,
            .row_begin = shape->part[i].row_begin,
            .rows = rows,
            .scale = shape->part[i].scale,
            .A = bl_tensor_f32(test_random_floats(r * p.K, seed + 10 + (uint64_t)i)),
            .B = bl_tensor_f32(test_random_floats(rows * r, seed + 20 + (uint64_t)i)),
            .dA = test_floats(r * p.K),
            .dB = test_floats(rows * r)};
        fill_nan(p.linear.part[i].dA, r * p.K);
        fill_nan(p.linear.part[i].dB, rows * r);
        r_max = bl_max_i64(r_max, r);
    }
    p.x = test_random_floats(p.T * p.K, seed + 1);
    p.dy = test_random_floats(p.T * p.N, seed + 2);
    p.y = test_floats(p.T * p.N);
    p.dx = test_floats(p.T * p.K);
    fill_nan(p.y, p.T * p.N);
    fill_nan(p.dx, p.T * p.K);
    p.sample = test_alloc(p.T, sizeof *p.sample);
    p.position = test_alloc(p.T, sizeof *p.position);
    for (int64_t t = 0; t < p.T; t++) {
        p.sample[t] = (t / 5) * 0x100000001ll; /* both halves count */
        p.position[t] = (int32_t)(t % 5);
    }
    p.linear.dropout = (bl_lora_dropout){.p = dropout,
                                         .seed = 0x123456789abcull,
                                         .step = 7,
                                         .layer = 3,
                                         .matrix = 2,
                                         .sample = p.sample,
                                         .position = p.position};
    p.linear.workspace_bytes =
        bl_lora_linear_workspace_bytes(BL_DEVICE_CPU, BL_F32, &p.linear, p.T);
    int64_t floats = (int64_t)(p.linear.workspace_bytes / sizeof(float));
    if (p.linear.n_parts > 0)
        assert_int_equal(floats, 2 * p.T * r_max + (dropout > 0 ? p.T * p.K : 0));
    p.linear.workspace = test_floats(floats);
    fill_nan(p.linear.workspace, floats);
    return p;
}

static void free_problem(problem *p)
{
    for (int i = 0; i < p->linear.n_parts; i++) {
        free(p->linear.part[i].A.data);
        free(p->linear.part[i].B.data);
        free(p->linear.part[i].dA);
        free(p->linear.part[i].dB);
    }
    for (int s = 0; s < p->shape->n_segments; s++) {
        free(p->codes[s]);
        free(p->scales[s]);
    }
    free(p->w);
    free(p->x);
    free(p->dy);
    free(p->y);
    free(p->dx);
    free(p->sample);
    free(p->position);
    free(p->linear.workspace);
}

/* ---- the reference ---- */

static lora_reference compute_reference(const problem *p, bool sizes)
{
    return lora_reference_compute(&(lora_inputs){.linear = &p->linear,
                                                 .T = p->T,
                                                 .K = p->K,
                                                 .N = p->N,
                                                 .w = p->w,
                                                 .x = p->x,
                                                 .dy = p->dy},
                                  sizes);
}

static int64_t largest_rank(const problem *p)
{
    int64_t r = 0;
    for (int i = 0; i < p->linear.n_parts; i++) r = bl_max_i64(r, p->linear.part[i].r);
    return r;
}

static double chain_error(const problem *p)
{
    return (double)(p->T + p->K + p->N + largest_rank(p) + 8) * U;
}

static void check_close(const problem *p, const char *what, const float *got, const double *want,
                        const double *sizes, int64_t n)
{
    double error = chain_error(p);
    for (int64_t i = 0; i < n; i++)
        if (!(fabs((double)got[i] - want[i]) <= error * sizes[i])) {
            print_error("%s, dropout %g: %s[%lld]: %.9g, not %.9g, allowed %.3g\n", p->shape->name,
                        (double)p->linear.dropout.p, what, (long long)i, (double)got[i], want[i],
                        error * sizes[i]);
            fail();
        }
}

static void queue_forward(test_device d, const bl_lora_linear *linear, const problem *p)
{
    assert_int_equal(
        bl_lora_linear_forward(d.stream, linear, p->T, bl_tensor_f32(p->x), bl_tensor_f32(p->y)),
        BL_OK);
}

/* dx NULL: none */
static void queue_backward(test_device d, const bl_lora_linear *linear, const problem *p, float *dx)
{
    assert_int_equal(bl_lora_linear_backward(d.stream, linear, p->T, bl_tensor_f32(p->x),
                                             bl_tensor_f32(p->dy), bl_tensor_f32(dx)),
                     BL_OK);
}

static void run(test_device d, problem *p)
{
    queue_forward(d, &p->linear, p);
    queue_backward(d, &p->linear, p, p->dx);
    test_finish(d);
}

static void test_against_reference(void **state)
{
    static const float dropouts[] = {0.0f, 0.3f};
    test_device d = test_device_create(2);
    (void)state;

    for (size_t i = 0; i < BL_COUNT(shapes) * BL_COUNT(dropouts); i++) {
        problem p = create_problem(&shapes[i / 2], bl_device_pool(d.device), dropouts[i % 2], i);
        lora_reference want = compute_reference(&p, false), sizes = compute_reference(&p, true);
        run(d, &p);
        check_close(&p, "y", p.y, want.y, sizes.y, p.T * p.N);
        check_close(&p, "dx", p.dx, want.dx, sizes.dx, p.T * p.K);
        for (int q = 0; q < p.linear.n_parts; q++) {
            const bl_lora_part *part = &p.linear.part[q];
            check_close(&p, "dA", part->dA, want.dA[q], sizes.dA[q], part->r * p.K);
            check_close(&p, "dB", part->dB, want.dB[q], sizes.dB[q], part->rows * part->r);
        }
        lora_reference_free(&want);
        lora_reference_free(&sizes);
        free_problem(&p);
    }
    test_device_destroy(d);
}

/* Added to what y is without it, rounded once more. */
static void test_residual(void **state)
{
    test_device d = test_device_create(2);
    (void)state;

    for (size_t i = 0; i < BL_COUNT(shapes); i++) {
        problem p = create_problem(&shapes[i], bl_device_pool(d.device), 0.0f, i);
        int64_t n = p.T * p.N;
        float *residual = test_random_floats(n, 77), *want = test_floats(n);
        run(d, &p);
        for (int64_t k = 0; k < n; k++) want[k] = residual[k] + p.y[k];
        p.linear.residual = bl_tensor_f32(residual);
        run(d, &p);
        test_same_bits("y", p.y, want, n);
        free(residual), free(want);
        free_problem(&p);
    }
    test_device_destroy(d);
}

/* The frozen matrix, the input and the adapter are read only; three threads give the bits of one;
 * dx NULL changes no bit. */
static void test_what_is_left_alone(void **state)
{
    const layer_shape *shape = &shapes[6];
    test_device one = test_device_create(1), three = test_device_create(3);
    problem p = create_problem(shape, bl_device_pool(one.device), 0.3f, 5);
    problem q = create_problem(shape, bl_device_pool(one.device), 0.3f, 5);
    problem fresh = create_problem(shape, bl_device_pool(one.device), 0.3f, 5);
    (void)state;

    run(one, &p);
    run(three, &q);
    for (int s = 0; s < shape->n_segments; s++) {
        assert_memory_equal(p.codes[s], fresh.codes[s], (size_t)p.code_bytes[s]);
        if (p.n_scales[s]) test_same_bits("scales", p.scales[s], fresh.scales[s], p.n_scales[s]);
    }
    test_same_bits("x", p.x, fresh.x, p.T * p.K);
    test_same_bits("dy", p.dy, fresh.dy, p.T * p.N);
    test_same_bits("y", p.y, q.y, p.T * p.N);
    test_same_bits("dx", p.dx, q.dx, p.T * p.K);
    queue_backward(one, &fresh.linear, &fresh, NULL);
    test_finish(one);
    for (int i = 0; i < shape->n_parts; i++) {
        const bl_lora_part *a = &p.linear.part[i], *b = &q.linear.part[i],
                           *c = &fresh.linear.part[i];
        test_same_bits("A", a->A.data, c->A.data, a->r * p.K);
        test_same_bits("B", a->B.data, c->B.data, a->rows * a->r);
        test_same_bits("dA", a->dA, b->dA, a->r * p.K);
        test_same_bits("dB", a->dB, b->dB, a->rows * a->r);
        test_same_bits("dA without dx", a->dA, c->dA, a->r * p.K);
        test_same_bits("dB without dx", a->dB, c->dB, a->rows * a->r);
    }
    free_problem(&p);
    free_problem(&q);
    free_problem(&fresh);
    test_device_destroy(one);
    test_device_destroy(three);
}

/* Two adapters over one frozen matrix, queued on one stream without a pause, give the results of
 * each alone. */
static void test_two_adapters_over_one_base(void **state)
{
    const layer_shape *shape = &shapes[4];
    test_device d = test_device_create(2);
    problem alone[2], both[2];
    (void)state;

    for (int i = 0; i < 2; i++) {
        alone[i] = create_problem(shape, bl_device_pool(d.device), 0, 40 + (uint64_t)i);
        both[i] = create_problem(shape, bl_device_pool(d.device), 0, 40 + (uint64_t)i);
        run(d, &alone[i]);
    }
    both[1].linear.weight = both[0].linear.weight;
    for (int i = 0; i < 2; i++) {
        bl_lora_linear linear = both[i].linear; /* the call copies its arguments */
        queue_forward(d, &linear, &both[i]);
        queue_backward(d, &linear, &both[i], both[i].dx);
        memset(&linear, 0, sizeof linear);
    }
    test_finish(d);
    for (int i = 0; i < 2; i++) {
        test_same_bits("y", alone[i].y, both[i].y, alone[i].T * alone[i].N);
        test_same_bits("dx", alone[i].dx, both[i].dx, alone[i].T * alone[i].K);
        test_same_bits("dA", alone[i].linear.part[1].dA, both[i].linear.part[1].dA,
                       alone[i].linear.part[1].r * alone[i].K);
        free_problem(&alone[i]);
        free_problem(&both[i]);
    }
    test_device_destroy(d);
}

/* ---- finite differences of L = |y|^2 / 2, so that dy = y ---- */

static double loss(test_device d, problem *p)
{
    double sum = 0;
    queue_forward(d, &p->linear, p);
    test_finish(d);
    for (int64_t i = 0; i < p->T * p->N; i++) sum += 0.5 * (double)p->y[i] * (double)p->y[i];
    return sum;
}

/* L is quadratic in x, A or B alone, so the central difference along any direction and of any step
 * is the derivative; the only errors are the rounding of y, `noise` = sum |y| error(y) on each
 * side, and that of the moved values, at most u of each. */
static void check_direction(test_device d, problem *p, const char *what, float *values,
                            const float *gradient, int64_t n, double noise)
{
    enum { STEP = 1 };
    float *v = test_random_floats(n, 77), *kept = test_floats(n);
    double slope = 0, rounding = 0;

    memcpy(kept, values, (size_t)n * sizeof *kept);
    for (int64_t i = 0; i < n; i++)
        v[i] = copysignf(v[i], gradient[i]); /* uphill: a slope well above the noise */
    for (int64_t i = 0; i < n; i++) slope += (double)gradient[i] * (double)v[i];
    for (int64_t i = 0; i < n; i++) rounding += fabs((double)gradient[i]) * (1 + STEP) * U;
    for (int64_t i = 0; i < n; i++) values[i] = kept[i] + STEP * v[i];
    double above = loss(d, p);
    for (int64_t i = 0; i < n; i++) values[i] = kept[i] - STEP * v[i];
    double below = loss(d, p);
    memcpy(values, kept, (size_t)n * sizeof *kept);
    /* At the moved points y, and with it the noise, is larger: by 1 + STEP at most in each of the
     * two factors. */
    double allowed = noise * (1 + STEP) * (1 + STEP) / STEP + rounding;
    if (!(fabs((above - below) / (2.0 * STEP) - slope) <= allowed)) {
        print_error("%s: %s: slope %.9g, gradient says %.9g, allowed %.3g\n", p->shape->name, what,
                    (above - below) / (2.0 * STEP), slope, allowed);
        fail();
    }
    assert_true(fabs(slope) > 4 * allowed); /* the test can tell */
    free(v);
    free(kept);
}

static void test_finite_differences(void **state)
{
    static const int chosen[] = {1, 2, 4, 6, 8};
    test_device d = test_device_create(2);
    (void)state;

    for (int i = 0; i < 10; i++) {
        problem p = create_problem(&shapes[chosen[i / 2]], bl_device_pool(d.device),
                                   i % 2 ? 0.3f : 0.0f, 60 + (uint64_t)i);
        lora_reference sizes = compute_reference(&p, true);
        double noise = 0, y_error = (double)(p.K + largest_rank(&p) + 8) * U;

        loss(d, &p);
        memcpy(p.dy, p.y, (size_t)(p.T * p.N) * sizeof *p.y);
        for (int64_t j = 0; j < p.T * p.N; j++)
            noise += fabs((double)p.y[j]) * y_error * sizes.y[j];
        run(d, &p);
        check_direction(d, &p, "x", p.x, p.dx, p.T * p.K, noise);
        for (int q = 0; q < p.linear.n_parts; q++) {
            bl_lora_part *part = &p.linear.part[q];
            check_direction(d, &p, "A", part->A.data, part->dA, part->r * p.K, noise);
            check_direction(d, &p, "B", part->B.data, part->dB, part->rows * part->r, noise);
        }
        lora_reference_free(&sizes);
        free_problem(&p);
    }
    test_device_destroy(d);
}

/* W = 0, A = 1, B = 1, x = 1, dy = 1: y counts a token's kept channels, dA a channel's kept tokens,
 * times 1 / (1 - p). Nothing here knows how the mask is drawn. */
static void test_dropout_counts(void **state)
{
    enum { T = 130, K = 256 };
    static const float p = 0.25f;
    test_device d = test_device_create(2);
    float *w = test_floats(K), *ones = test_floats(T * K), *y = test_floats(T),
          *dA = test_floats(K), *dB = test_floats(1);
    float *first = test_floats(T), *workspace = test_floats(2 * T + T * K);
    int64_t *sample = test_alloc(T, sizeof *sample);
    int32_t *position = test_alloc(T, sizeof *position);
    (void)state;

    for (int i = 0; i < T * K; i++) ones[i] = 1;
    for (int t = 0; t < T; t++) position[t] = t;
    bl_tensor all_ones = bl_tensor_f32(ones);
    bl_lora_linear linear = {
        .weight = {.rows = 1, .cols = K, .n_segments = 1, .segment = {{BL_FORMAT_F32, w, NULL, 1}}},
        .n_parts = 1,
        .part = {{1, 0, 1, 1.0f, all_ones, all_ones, dA, dB, false}},
        .dropout = {.p = p, .seed = 9, .sample = sample, .position = position},
        .workspace = workspace};
    for (int variant = 0; variant < 4; variant++) { /* as it is; another step, layer, matrix */
        linear.dropout.step = variant == 1;
        linear.dropout.layer = variant == 2;
        linear.dropout.matrix = variant == 3;
        assert_int_equal(bl_lora_linear_forward(d.stream, &linear, T, all_ones, bl_tensor_f32(y)),
                         BL_OK);
        assert_int_equal(
            bl_lora_linear_backward(d.stream, &linear, T, all_ones, all_ones, (bl_tensor){0}),
            BL_OK);
        test_finish(d);
        double by_token = 0, by_channel = 0;
        for (int t = 0; t < T; t++) by_token += (double)y[t] * (1 - (double)p);
        for (int k = 0; k < K; k++) by_channel += (double)dA[k] * (1 - (double)p);
        assert_true(fabs(by_token - by_channel) <=
                    T * K * U * T * K); /* one mask in both directions */
        /* Binomial: within five standard deviations, one wrong alarm in two million masks, and this
         * one is fixed. */
        assert_true(fabs(by_token - T * K * (1 - (double)p)) <=
                    5 * sqrt(T * K * (double)p * (1 - (double)p)));
        if (variant == 0)
            memcpy(first, y, T * sizeof *y);
        else
            assert_memory_not_equal(first, y, T * sizeof *y);
    }
    free(w), free(ones), free(y), free(dA), free(dB), free(first), free(workspace), free(sample),
        free(position);
    test_device_destroy(d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_reference),
        cmocka_unit_test(test_residual),
        cmocka_unit_test(test_what_is_left_alone),
        cmocka_unit_test(test_two_adapters_over_one_base),
        cmocka_unit_test(test_finite_differences),
        cmocka_unit_test(test_dropout_counts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
