/* SPDX-License-Identifier: Apache-2.0 */
/* Stacks of LoRA linear layers: y, dx, dA and dB against the double reference of lora_reference.h
 * (the head of test_lora_linear.c derives the tolerance), the same bits for any number of ranks,
 * tier, ratio, ring depth and order of calls, and the memory that was planned. */
#include "layer_problem.h"
#include "test_ranks.h"

#include <limits.h>

#include "../store/tmp_dir.h"
#include "device/guard.h"
#include "linear/layer_internal.h"
#include "lora_reference.h"

enum { STEP = 7, MAX_RANKS = 4 };

static const uint64_t seed = 0x123456789abcull;

/* ---- one run ---- */

typedef struct run_case {
    const problem *problem;
    bl_linear_options options; /* device and comm are the rank's */
    bool is_read;              /* rows in bf16, through read_rows */
    const int *order;          /* of calls, see below; ends with INT_MIN */
    outputs *out;              /* rank 0's; NULL: all ranks compare with the problem's first */
} run_case;

/* Calls of a pass: l is the forward of layer l, ~l its backward. */
static const int training[] = {0, 1, 2, ~2, ~1, ~0, 0, 1, 2, ~2, ~1, ~0, INT_MIN};
static const int recomputing[] = {0, 1, 2, ~2, 1, ~1, 0, ~0, INT_MIN};
static const int jumping[] = {2, 0, 0, ~2, 1, ~0, 0, 2, ~2, 0, ~1, 1, 1, INT_MIN};

static bl_status run_calls(test_rank *self, const run_case *c, bl_linear_stack *stack,
                           const outputs *out)
{
    const problem *p = c->problem;

    for (const int *call = c->order; *call != INT_MIN; call++) {
        int l = *call < 0 ? ~*call : *call;
        bl_linear_layer *layer = bl_linear_stack_layer(stack, l);
        bl_tensor x = bl_tensor_f32(p->x[l]);
        if (*call < 0)
            BL_TRY(bl_linear_layer_backward(layer, self->stream, T, x, bl_tensor_f32(p->dy[l]),
                                            bl_tensor_f32(out->dx[l])));
        else
            BL_TRY(bl_linear_layer_forward(layer, self->stream, T, x, bl_tensor_f32(out->y[l])));
    }
    for (int l = 0; l < LAYERS && lora_r(p, l) > 0; l++) {
        bl_linear_lora_view view = bl_linear_layer_lora(bl_linear_stack_layer(stack, l));
        TEST_CHECK(view.r == lora_r(p, l));
        BL_TRY(bl_stream_copy(self->stream, out->dA[l], view.dA,
                              (size_t)(view.r * shapes[l].cols) * sizeof(float)));
        BL_TRY(bl_stream_copy(self->stream, out->dB[l], view.dB,
                              (size_t)(view.r * shapes[l].rows) * sizeof(float)));
    }
    return bl_stream_synchronize(self->stream);
}

static bl_status compare(const problem *p, const outputs *got)
{
    const outputs *want = &p->first;

    for (int l = 0; l < LAYERS; l++) {
        size_t N = (size_t)shapes[l].rows * sizeof(float),
               K = (size_t)shapes[l].cols * sizeof(float), r = (size_t)lora_r(p, l);
        TEST_CHECK(memcmp(got->y[l], want->y[l], T * N) == 0);
        TEST_CHECK(memcmp(got->dx[l], want->dx[l], T * K) == 0);
        TEST_CHECK(memcmp(got->dA[l], want->dA[l], r * K) == 0);
        TEST_CHECK(memcmp(got->dB[l], want->dB[l], r * N) == 0);
    }
    return BL_OK;
}

static bl_status check_memory(test_rank *self, const run_case *c, const bl_linear_options *options,
                              const bl_linear_spec *specs, size_t before)
{
    bl_linear_memory m;

    BL_TRY(bl_linear_stack_plan(options, LAYERS, specs, &m));
    TEST_CHECK(bl_device_bytes(self->device) - before ==
               m.frozen + m.ring + m.scales + m.lora + m.work);
    TEST_CHECK((m.host > 0) == (options->tier == BL_TIER_HOST && options->ratio > 0));
    TEST_CHECK((m.disk > 0) == (options->tier == BL_TIER_DISK && options->ratio > 0));
    TEST_CHECK((m.frozen > 0) == (options->tier == BL_TIER_DEVICE || options->ratio < 1));
    TEST_CHECK((m.lora > 0) == (c->problem->kind != PLAIN));
    return BL_OK;
}

static bl_status run_rank(test_rank *self)
{
    const run_case *c = self->arg;
    const problem *p = c->problem;
    bl_linear_options options = c->options;
    bl_linear_spec specs[LAYERS];
    bl_linear_stack *stack = NULL;
    outputs mine = create_outputs(p);
    size_t before = bl_device_bytes(self->device);
    bl_status st;

    memcpy(specs, p->specs, sizeof specs);
    for (int l = 0; l < LAYERS && c->is_read; l++) {
        specs[l].dtype = BL_BF16;
        specs[l].weight = NULL;
        specs[l].read_rows = read_bf16;
        specs[l].user = (void *)&p->bf16_specs[l];
    }
    options.device = self->device;
    options.comm = self->comm;
    BL_TRY_GOTO(st, done, bl_linear_stack_create(&options, LAYERS, specs, &stack));
    memset(specs, 0x55, sizeof specs); /* no longer looked at */
    memcpy(specs, p->specs, sizeof specs);
    BL_TRY_GOTO(st, done, check_memory(self, c, &options, specs, before));
    for (int l = 0; l < LAYERS; l++) BL_TRY_GOTO(st, done, set_B(self->stream, stack, p, l));
    bl_linear_stack_set_dropout(stack, STEP, p->sample, p->position);
    int64_t allocations = bl_device_allocations(self->device);
    BL_TRY_GOTO(st, done, run_calls(self, c, stack, c->out && self->rank == 0 ? c->out : &mine));
    TEST_CHECK_GOTO(st, done, bl_device_allocations(self->device) == allocations);
    if (!c->out) BL_TRY_GOTO(st, done, compare(p, &mine));
    st = bl_linear_stack_verify(stack);
done:
    (void)bl_stream_synchronize(self->stream);
    bl_linear_stack_destroy(stack);
    free_outputs(&mine);
    return st;
}

static void run(int n_ranks, run_case *c)
{
    bl_status st = test_ranks_run(n_ranks, 1, 60, run_rank, c, NULL);
    if (st != BL_OK)
        print_error("%s, kind %d, %d ranks, %s, ratio %g, depth %d: %s\n",
                    bl_format_name(c->problem->format), c->problem->kind, n_ranks,
                    bl_tier_name(c->options.tier), c->options.ratio, c->options.ring_depth,
                    bl_error_text());
    assert_int_equal(st, BL_OK);
}

/* ---- against the reference ---- */

static double *decode(const problem *p, int l, bl_pool *pool)
{
    int64_t N = shapes[l].rows, K = shapes[l].cols;
    size_t bytes, n_scales;
    assert_true(bl_format_sizes(p->format, N, K, &bytes, &n_scales));
    uint8_t *codes = test_alloc((int64_t)bytes, 1);
    float *scales = test_floats((int64_t)n_scales), *values = test_floats(N * K);
    double *w = test_doubles(N * K);

    memcpy(values, p->w[l], (size_t)(N * K) * sizeof *values);
    if (p->format == BL_FORMAT_FP8_ROW)
        assert_int_equal(bl_fp8_row_quantize(pool, BL_F32, values, 0, N, K, codes, scales), BL_OK);
    if (p->format == BL_FORMAT_FP8_BLOCK)
        assert_int_equal(bl_fp8_block_quantize(pool, BL_F32, values, 0, N, K, codes, scales),
                         BL_OK);
    if (bl_format_has_scales(p->format))
        bl_fp8_dequantize(pool, p->format, codes, scales, N, K, values);
    for (int64_t i = 0; i < N * K; i++)
        w[i] = p->format == BL_FORMAT_F16 ? bl_f16_to_f32(bl_f32_to_f16(values[i])) : values[i];
    free(values);
    free(scales);
    free(codes);
    return w;
}

static void check_close(const char *what, int l, const float *got, const double *want,
                        const double *sizes, int64_t n, double error)
{
    for (int64_t i = 0; i < n; i++)
        if (!(fabs((double)got[i] - want[i]) <= error * sizes[i])) {
            print_error("layer %d: %s[%lld]: %.9g, not %.9g, allowed %.3g\n", l, what, (long long)i,
                        (double)got[i], want[i], error * sizes[i]);
            fail();
        }
}

static void check_layer(const problem *p, int l, bl_pool *pool)
{
    int64_t N = shapes[l].rows, K = shapes[l].cols, r = lora_r(p, l);
    double *w = decode(p, l, pool), error = (double)(T + K + N + r + 8) * U;
    float *A = test_floats(r * K);
    bl_lora_linear linear = {.n_parts = r > 0,
                             .part = {{.r = r,
                                       .rows = N,
                                       .scale = 12.0f / (float)r,
                                       .A = bl_tensor_f32(A),
                                       .B = bl_tensor_f32(p->B[l])}},
                             .dropout = {.p = p->kind == DROPOUT ? 0.3f : 0,
                                         .seed = seed,
                                         .step = STEP,
                                         .layer = l,
                                         .sample = p->sample,
                                         .position = p->position}};
    lora_inputs inputs = {
        .linear = &linear, .T = T, .K = K, .N = N, .w = w, .x = p->x[l], .dy = p->dy[l]};

    if (r > 0) bl_lora_initialize(seed, l, 0, K, 0, r * K, A);
    lora_reference want = lora_reference_compute(&inputs, false),
                   sizes = lora_reference_compute(&inputs, true);
    check_close("y", l, p->first.y[l], want.y, sizes.y, T * N, error);
    check_close("dx", l, p->first.dx[l], want.dx, sizes.dx, T * K, error);
    if (r > 0) {
        check_close("dA", l, p->first.dA[l], want.dA[0], sizes.dA[0], r * K, error);
        check_close("dB", l, p->first.dB[l], want.dB[0], sizes.dB[0], N * r, error);
    }
    lora_reference_free(&want);
    lora_reference_free(&sizes);
    free(A);
    free(w);
}

static run_case case_of(problem *p)
{
    return (run_case){.problem = p,
                      .options = {.tier = BL_TIER_HOST, .max_tokens = T, .seed = seed},
                      .order = training};
}

/* The first run is alone with everything in device memory; it is right, and all others give its
 * bits. */
static void test_every_way_is_right(void **state)
{
    static const bl_format formats[] = {BL_FORMAT_F32, BL_FORMAT_BF16, BL_FORMAT_F16,
                                        BL_FORMAT_FP8_ROW, BL_FORMAT_FP8_BLOCK};
    static const double ratios[] = {0, 0.5, 1};
    test_device d = test_device_create(1);
    (void)state;

    for (size_t f = 0; f < BL_COUNT(formats); f++)
        for (int kind = PLAIN; kind < N_KINDS; kind++) {
            problem p;
            create_problem(&p, formats[f], kind);
            run_case c = case_of(&p);
            c.out = &p.first;
            run(1, &c);
            for (int l = 0; l < LAYERS; l++) check_layer(&p, l, bl_device_pool(d.device));
            c.out = NULL;
            for (int i = 0; i < MAX_RANKS * 3 * (int)BL_COUNT(ratios); i++) {
                c.options.tier = (bl_tier)(i / MAX_RANKS % 3);
                c.options.ratio = ratios[i / MAX_RANKS / 3];
                c.options.ring_depth = (i + kind) % 5;
                c.options.dir = c.options.tier == BL_TIER_DISK ? tmp_subdir("pages") : NULL;
                c.is_read = (i + kind) % 2;
                run(1 + i % MAX_RANKS, &c);
            }
            free_problem(&p);
        }
    test_device_destroy(d);
}

static void test_any_order_of_calls(void **state)
{
    static const int *const orders[] = {recomputing, jumping};
    problem p;
    (void)state;

    create_problem(&p, BL_FORMAT_FP8_BLOCK, DROPOUT);
    run_case c = case_of(&p);
    c.out = &p.first;
    run(1, &c);
    c.out = NULL;
    c.options.ratio = 1;
    for (int i = 0; i < 2 * 2 * 4; i++) {
        c.order = orders[i % 2];
        c.options.ring_depth = 1 + i / 4;
        run(i / 2 % 2 ? 3 : 1, &c);
    }
    free_problem(&p);
}

static void assert_held(const bl_linear_stack *stack, int64_t now, int64_t next)
{
    assert_int_equal(stack->n_held, 2);
    assert_int_equal(stack->held[0], now);
    assert_int_equal(stack->held[1], next);
}

/* A wrong prediction changes no bits, only waits: checks the ring's units after each call of two
 * passes, up and down. */
static void test_the_next_layer_is_prefetched(void **state)
{
    test_device d = test_device_create(1);
    bl_linear_options o = {.device = d.device, .max_tokens = T, .tier = BL_TIER_HOST, .ratio = 1};
    outputs got;
    bl_linear_stack *stack;
    problem p;
    (void)state;

    create_problem(&p, BL_FORMAT_BF16, PLAIN);
    got = create_outputs(&p);
    assert_int_equal(bl_linear_stack_create(&o, LAYERS, p.specs, &stack), BL_OK);
    for (int pass = 0; pass < 2; pass++) {
        for (int l = 0; l < LAYERS; l++) {
            assert_int_equal(bl_linear_layer_forward(bl_linear_stack_layer(stack, l), d.stream, T,
                                                     bl_tensor_f32(p.x[l]),
                                                     bl_tensor_f32(got.y[l])),
                             BL_OK);
            assert_held(stack, l, l + 1 < LAYERS ? l + 1 : l - 1);
        }
        for (int l = LAYERS - 1; l >= 0; l--) {
            assert_int_equal(bl_linear_layer_backward(bl_linear_stack_layer(stack, l), d.stream, T,
                                                      bl_tensor_f32(p.x[l]), bl_tensor_f32(p.dy[l]),
                                                      bl_tensor_f32(got.dx[l])),
                             BL_OK);
            assert_held(stack, l, l > 0 ? l - 1 : 1);
        }
    }
    test_finish(d);
    bl_linear_stack_destroy(stack);
    free_outputs(&got);
    free_problem(&p);
    test_device_destroy(d);
}

/* Host code touches no device memory: on a guarded device that would end the test. */
static void test_device_memory_is_left_alone(void **state)
{
    problem p;
    (void)state;

    bl_device_guard_memory(true);
    create_problem(&p, BL_FORMAT_FP8_BLOCK, DROPOUT);
    run_case c = case_of(&p);
    c.out = &p.first;
    run(1, &c);
    c.out = NULL;
    for (int tier = 0; tier < 3; tier++) {
        c.options.tier = (bl_tier)tier;
        c.options.ratio = 0.5;
        c.options.dir = tier == BL_TIER_DISK ? tmp_subdir("guarded") : NULL;
        run(2, &c);
    }
    free_problem(&p);
    bl_device_guard_memory(false);
}

/* ---- forward only; masks ---- */

static void test_forward_only(void **state)
{
    test_device d = test_device_create(2);
    float *y = test_floats(T * shapes[0].rows), *with = test_floats(T * shapes[0].rows);
    problem plain, p;
    bl_linear_stack *stack;
    int64_t n;
    (void)state;

    create_problem(&plain, BL_FORMAT_BF16, LORA);
    create_problem(&p, BL_FORMAT_BF16, DROPOUT);
    bl_linear_options o = {.device = d.device, .max_tokens = T, .seed = seed};
    assert_int_equal(bl_linear_stack_create(&o, LAYERS, plain.specs, &stack), BL_OK);
    assert_int_equal(set_B(d.stream, stack, &p, 0), BL_OK);
    forward_once(d, stack, &p, with);
    bl_linear_stack_destroy(stack);

    o.forward_only = true;
    o.tier = BL_TIER_DISK;
    o.ratio = 1;
    o.dir = tmp_subdir("forward");
    assert_int_equal(bl_linear_stack_create(&o, LAYERS, p.specs, &stack), BL_OK);
    assert_int_equal(set_B(d.stream, stack, &p, 0), BL_OK);
    assert_null(bl_linear_stack_gradients(stack, &n));
    bl_linear_lora_view view = bl_linear_layer_lora(bl_linear_stack_layer(stack, 2));
    assert_null(view.dA);
    const float *weights = bl_linear_stack_weights(stack, &n);
    assert_true(view.A >= weights && view.B > view.A && view.B < weights + n);
    for (int pass = 0; pass < 2; pass++)
        for (int l = 0; l < LAYERS; l++) {
            float *out = test_floats(T * shapes[l].rows);
            assert_int_equal(bl_linear_layer_forward(bl_linear_stack_layer(stack, l), d.stream, T,
                                                     bl_tensor_f32(p.x[l]),
                                                     bl_tensor_f32(l == 0 ? y : out)),
                             BL_OK);
            test_finish(d);
            assert_int_equal(bl_linear_stack_verify(stack),
                             BL_OK); /* the next layer is in flight */
            free(out);
        }
    test_same_bits("y without dropout", y, with, T * shapes[0].rows);
    assert_int_equal(bl_linear_layer_backward(bl_linear_stack_layer(stack, 0), d.stream, T,
                                              bl_tensor_f32(p.x[0]), bl_tensor_f32(p.dy[0]),
                                              (bl_tensor){0}),
                     BL_EUSAGE);
    assert_error_has("forward_only");
    bl_linear_stack_destroy(stack);
    free_problem(&plain);
    free_problem(&p);
    free(y);
    free(with);
    test_device_destroy(d);
}

/* ---- a layer that is loaded in several pieces ---- */

enum { LARGE_ROWS = 300, LARGE_COLS = 9000 };

typedef struct large_case {
    bl_format format;
    const float *w, *x;
    double *want; /* [T][LARGE_ROWS] */
} large_case;

/* x times the matrix quantized as a whole. */
static void compute_large(test_device d, large_case *c)
{
    size_t n_bytes, n_scales;
    float *decoded = test_floats(LARGE_ROWS * LARGE_COLS);

    assert_true(bl_format_sizes(c->format, LARGE_ROWS, LARGE_COLS, &n_bytes, &n_scales));
    uint8_t *codes = test_alloc((int64_t)n_bytes, 1);
    float *scales = test_floats((int64_t)n_scales);
    bl_pool *pool = bl_device_pool(d.device);
    if (c->format == BL_FORMAT_FP8_ROW)
        assert_int_equal(
            bl_fp8_row_quantize(pool, BL_F32, c->w, 0, LARGE_ROWS, LARGE_COLS, codes, scales),
            BL_OK);
    else
        assert_int_equal(
            bl_fp8_block_quantize(pool, BL_F32, c->w, 0, LARGE_ROWS, LARGE_COLS, codes, scales),
            BL_OK);
    bl_fp8_dequantize(pool, c->format, codes, scales, LARGE_ROWS, LARGE_COLS, decoded);
    for (int64_t t = 0; t < T; t++)
        for (int64_t n = 0; n < LARGE_ROWS; n++) {
            double sum = 0;
            for (int64_t k = 0; k < LARGE_COLS; k++)
                sum += (double)c->x[t * LARGE_COLS + k] * (double)decoded[n * LARGE_COLS + k];
            c->want[t * LARGE_ROWS + n] = sum;
        }
    free(codes), free(scales), free(decoded);
}

static bl_status run_large(test_rank *self)
{
    const large_case *c = self->arg;
    bl_linear_options o = {.device = self->device, .comm = self->comm, .max_tokens = T};
    bl_linear_spec spec = {.rows = LARGE_ROWS,
                           .cols = LARGE_COLS,
                           .format = c->format,
                           .dtype = BL_F32,
                           .weight = c->w};
    bl_linear_stack *stack = NULL;
    float *y = test_floats(T * LARGE_ROWS);
    bl_status st;

    BL_TRY_GOTO(st, done, bl_linear_stack_create(&o, 1, &spec, &stack));
    BL_TRY_GOTO(st, done,
                bl_linear_layer_forward(bl_linear_stack_layer(stack, 0), self->stream, T,
                                        bl_tensor_f32(c->x), bl_tensor_f32(y)));
    BL_TRY_GOTO(st, done, bl_stream_synchronize(self->stream));
    /* 9,000 products below 1, summed in fp32: an error of sqrt(9000) roundings of a sum of about
     * 50. */
    for (int64_t i = 0; i < T * LARGE_ROWS; i++)
        TEST_CHECK_GOTO(st, done, fabs((double)y[i] - c->want[i]) < 100 * 50 * 0x1p-24 * 2);
done:
    (void)bl_stream_synchronize(self->stream);
    bl_linear_stack_destroy(stack);
    free(y);
    return st;
}

static void test_a_layer_in_pieces(void **state)
{
    static const bl_format formats[] = {BL_FORMAT_FP8_ROW, BL_FORMAT_FP8_BLOCK};
    test_device d = test_device_create(2);
    float *w = test_random_floats(LARGE_ROWS * LARGE_COLS, 3),
          *x = test_random_floats(T * LARGE_COLS, 4);
    large_case c = {.w = w, .x = x, .want = test_doubles(T * LARGE_ROWS)};
    (void)state;

    for (size_t f = 0; f < BL_COUNT(formats); f++) {
        c.format = formats[f];
        compute_large(d, &c);
        for (int n_ranks = 1; n_ranks <= 3; n_ranks++) {
            bl_status st = test_ranks_run(n_ranks, 1, 60, run_large, &c, NULL);
            if (st != BL_OK) print_error("%d ranks: %s\n", n_ranks, bl_error_text());
            assert_int_equal(st, BL_OK);
        }
    }
    free(w), free(x), free(c.want);
    test_device_destroy(d);
}

/* A mask depends on the step and the tokens' keys; without keys tokens are numbered. */
static void test_masks(void **state)
{
    test_device d = test_device_create(1);
    int64_t n = T * shapes[0].rows, sample[T] = {0};
    int32_t position[T];
    float *y[4];
    problem p;
    bl_linear_stack *stack;
    (void)state;

    for (int t = 0; t < T; t++) position[t] = t;
    for (size_t i = 0; i < BL_COUNT(y); i++) y[i] = test_floats(n);
    create_problem(&p, BL_FORMAT_F32, DROPOUT);
    bl_linear_options o = {.device = d.device, .max_tokens = T, .seed = seed};
    assert_int_equal(bl_linear_stack_create(&o, LAYERS, p.specs, &stack), BL_OK);
    assert_int_equal(set_B(d.stream, stack, &p, 0), BL_OK);
    forward_once(d, stack, &p, y[0]);
    bl_linear_stack_set_dropout(stack, 0, sample, position);
    forward_once(d, stack, &p, y[1]);
    bl_linear_stack_set_dropout(stack, 1, NULL, NULL);
    forward_once(d, stack, &p, y[2]);
    bl_linear_stack_set_dropout(stack, 0, p.sample, p.position);
    forward_once(d, stack, &p, y[3]);
    test_same_bits("numbered tokens", y[0], y[1], n);
    assert_memory_not_equal(y[0], y[2], (size_t)n * sizeof(float));
    assert_memory_not_equal(y[0], y[3], (size_t)n * sizeof(float));
    bl_linear_stack_destroy(stack);
    free_problem(&p);
    for (size_t i = 0; i < BL_COUNT(y); i++) free(y[i]);
    test_device_destroy(d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_way_is_right),
        cmocka_unit_test(test_any_order_of_calls),
        cmocka_unit_test(test_the_next_layer_is_prefetched),
        cmocka_unit_test(test_device_memory_is_left_alone),
        cmocka_unit_test(test_forward_only),
        cmocka_unit_test(test_masks),
        cmocka_unit_test(test_a_layer_in_pieces),
    };
    return cmocka_run_group_tests(tests, tmp_dir_create, tmp_dir_remove);
}
