/* SPDX-License-Identifier: Apache-2.0 */
/* Calls of a layer with the caller's A and B: the bits of a stack's own, added to gradients,
 * biases, any number of tokens, bf16 tensors on the CPU, the learned order, ranks that call layers
 * in different orders, and refusals. */
#include "layer_problem.h"
#include "ops/gemm.h"
#include "test_ranks.h"

#include "../store/tmp_dir.h"

#include <math.h>

enum { R = 5, STEP = 3, MANY = 1100 }; /* MANY: three panels of tokens */

static float *external_A(const bl_linear_lora_view *view, int64_t cols)
{
    float *A = test_floats(view->r * cols);
    memcpy(A, view->A, (size_t)(view->r * cols) * sizeof(float));
    return A;
}

static void run_both(test_device d, bl_linear_layer *layer, bl_linear_call call)
{
    call.size_bytes = sizeof call;
    assert_int_equal(bl_linear_call_forward(layer, d.stream, &call), BL_OK);
    assert_int_equal(bl_linear_call_backward(layer, d.stream, &call), BL_OK);
    test_finish(d);
}

/* With dropout and a growing workspace: bits as from the stack's A and B; a second backward that
 * accumulates doubles the gradients, exactly. */
static void test_external_weights(void **state)
{
    test_device d = test_device_create(2);
    bl_linear_options o = {.device = d.device, .max_tokens = T, .seed = 11}, grows = o;
    bl_linear_spec specs[LAYERS];
    bl_linear_stack *own, *external;
    problem p;
    (void)state;

    create_problem(&p, BL_FORMAT_FP8_ROW, DROPOUT);
    outputs got = create_outputs(&p);
    memcpy(specs, p.specs, sizeof specs);
    for (int l = 0; l < LAYERS; l++) specs[l].lora.is_external = true;
    grows.max_tokens = 0;
    assert_int_equal(bl_linear_stack_create(&o, LAYERS, p.specs, &own), BL_OK);
    assert_int_equal(bl_linear_stack_create(&grows, LAYERS, specs, &external), BL_OK);
    assert_null(bl_linear_layer_lora(bl_linear_stack_layer(external, 0)).A);
    bl_linear_stack_set_dropout(own, STEP, p.sample, p.position);
    for (int l = 0; l < LAYERS; l++) {
        assert_int_equal(set_B(d.stream, own, &p, l), BL_OK);
        bl_linear_layer *layer = bl_linear_stack_layer(own, l);
        bl_linear_lora_view view = bl_linear_layer_lora(layer);
        float *A = external_A(&view, shapes[l].cols);
        run_both(d, layer,
                 (bl_linear_call){.T = T,
                                  .x = bl_tensor_f32(p.x[l]),
                                  .y = bl_tensor_f32(p.first.y[l]),
                                  .dy = bl_tensor_f32(p.dy[l]),
                                  .dx = bl_tensor_f32(p.first.dx[l])});
        bl_linear_call call = {.size_bytes = sizeof call,
                               .T = T,
                               .rows = shapes[l].rows,
                               .cols = shapes[l].cols,
                               .x = bl_tensor_f32(p.x[l]),
                               .y = bl_tensor_f32(got.y[l]),
                               .dy = bl_tensor_f32(p.dy[l]),
                               .dx = bl_tensor_f32(got.dx[l]),
                               .A = A,
                               .B = p.B[l],
                               .dA = got.dA[l],
                               .dB = got.dB[l],
                               .has_keys = true,
                               .step = STEP,
                               .sample = p.sample,
                               .position = p.position};
        run_both(d, bl_linear_stack_layer(external, l), call);
        size_t K = (size_t)shapes[l].cols, N = (size_t)shapes[l].rows, r = (size_t)view.r;
        assert_memory_equal(got.y[l], p.first.y[l], T * N * sizeof(float));
        assert_memory_equal(got.dx[l], p.first.dx[l], T * K * sizeof(float));
        assert_memory_equal(got.dA[l], view.dA, r * K * sizeof(float));
        assert_memory_equal(got.dB[l], view.dB, r * N * sizeof(float));
        call.accumulate = true;
        run_both(d, bl_linear_stack_layer(external, l), call);
        for (size_t i = 0; i < r * K; i++) assert_true(got.dA[l][i] == 2 * view.dA[i]);
        for (size_t i = 0; i < r * N; i++) assert_true(got.dB[l][i] == 2 * view.dB[i]);
        call.skip_dropout = true;
        run_both(d, bl_linear_stack_layer(external, l), call);
        assert_memory_not_equal(got.y[l], p.first.y[l], T * N * sizeof(float));
        free(A);
    }
    bl_linear_stack_destroy(external);
    bl_linear_stack_destroy(own);
    free_outputs(&got);
    free_problem(&p);
    test_device_destroy(d);
}

typedef struct large {
    float *x, *y, *dy, *dx, *A, *B, *dA, *dB;
} large;

static large create_large(void)
{
    int64_t N = shapes[0].rows, K = shapes[0].cols;
    return (large){.x = test_random_floats(MANY * K, 1),
                   .y = test_floats(MANY * N),
                   .dy = test_random_floats(MANY * N, 2),
                   .dx = test_floats(MANY * K),
                   .A = test_random_floats(R * K, 3),
                   .B = test_random_floats(N * R, 4),
                   .dA = test_floats(R * K),
                   .dB = test_floats(N * R)};
}

static void free_large(large *l)
{
    float *all[] = {l->x, l->y, l->dy, l->dx, l->A, l->B, l->dA, l->dB};
    for (size_t i = 0; i < BL_COUNT(all); i++) free(all[i]);
}

static uint16_t *to_bf16(float *values, int64_t n)
{
    uint16_t *out = test_alloc(n, sizeof *out);
    for (int64_t i = 0; i < n; i++) {
        out[i] = bl_f32_to_bf16(values[i]);
        values[i] = bl_bf16_to_f32(out[i]);
    }
    return out;
}

static double largest(const float *values, int64_t n)
{
    double most = 0;
    for (int64_t i = 0; i < n; i++) most = fmax(most, fabs((double)values[i]));
    return most;
}

/* Of two vectors: the norm of their difference, relative to the second's. */
static double error_of(const float *values, const float *expected, int64_t n)
{
    double error = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        double off = (double)values[i] - (double)expected[i];
        error += off * off;
        norm += (double)expected[i] * (double)expected[i];
    }
    return sqrt(error / norm);
}

static float *to_floats(const uint16_t *halves, int64_t n)
{
    float *out = test_floats(n);
    for (int64_t i = 0; i < n; i++) out[i] = bl_bf16_to_f32(halves[i]);
    return out;
}

/* The same call with bf16 tensors. Where the processor multiplies bf16, up to six factors and
 * results of a LoRA term are rounded (D x, A, u or du, B, the term, the sum), each by at most 2^-9
 * of its value. Else outputs are the rounded fp32 ones: half a bf16 ulp, 2^-8 of a value, and the
 * differences of sums of panels, 1e-5 of the largest. */
static void check_bf16(const large *l, const uint16_t *y, const uint16_t *dx, const float *dA,
                       const float *dB)
{
    int64_t N = shapes[0].rows, K = shapes[0].cols;
    float *wide_y = to_floats(y, MANY * N), *wide_dx = to_floats(dx, MANY * K);
    const struct {
        const float *values, *expected;
        int64_t n;
        double unit; /* of a value: how much is rounded off at the end */
    } all[] = {{wide_y, l->y, MANY * N, 0x1p-8},
               {wide_dx, l->dx, MANY * K, 0x1p-8},
               {dA, l->dA, R * K, 0},
               {dB, l->dB, N * R, 0}};
    for (size_t o = 0; o < BL_COUNT(all); o++) {
        const float *values = all[o].values, *expected = all[o].expected;
        double most = largest(expected, all[o].n);
        assert_true(error_of(values, expected, all[o].n) <= 6 * 0x1p-9);
        for (int64_t i = 0; !bl_cpu_gemm_has_bf16() && i < all[o].n; i++)
            assert_true(fabs((double)values[i] - (double)expected[i]) <=
                        all[o].unit * fabs((double)expected[i]) + 1e-5 * most);
    }
    free(wide_y);
    free(wide_dx);
}

/* Masks are the same, across panels too. Three panels follow a call of few tokens: the workspace
 * grows. */
static void test_bf16_and_bias(void **state)
{
    test_device d = test_device_create(2);
    bl_linear_options o = {.device = d.device, .seed = 4};
    int64_t N = shapes[0].rows, K = shapes[0].cols;
    large l = create_large();
    uint16_t *x = to_bf16(l.x, MANY * K), *dy = to_bf16(l.dy, MANY * N),
             *y = test_alloc(MANY * N, 2), *dx = test_alloc(MANY * K, 2);
    float *bias = test_random_floats(N, 9), *dA = test_floats(R * K), *dB = test_floats(N * R);
    bl_linear_stack *stack, *plain;
    problem p;
    (void)state;

    create_problem(&p, BL_FORMAT_FP8_BLOCK, DROPOUT);
    bl_linear_spec spec = p.specs[0], without;
    spec.lora = (bl_linear_lora){.r = R, .alpha = 7, .dropout = 0.2, .is_external = true};
    without = spec;
    spec.bias = bias;
    assert_int_equal(bl_linear_stack_create(&o, 1, &spec, &stack), BL_OK);
    assert_int_equal(bl_linear_stack_create(&o, 1, &without, &plain), BL_OK);
    bl_linear_call call = {.T = 3,
                           .x = bl_tensor_f32(l.x),
                           .y = bl_tensor_f32(l.y),
                           .dy = bl_tensor_f32(l.dy),
                           .dx = bl_tensor_f32(l.dx),
                           .A = l.A,
                           .B = l.B,
                           .dA = l.dA,
                           .dB = l.dB};
    run_both(d, bl_linear_stack_layer(stack, 0), call);
    float *few = test_floats(3 * N);
    memcpy(few, l.y, (size_t)(3 * N) * sizeof(float));
    run_both(d, bl_linear_stack_layer(plain, 0), call);
    for (int64_t i = 0; i < 3 * N; i++) assert_true(few[i] == l.y[i] + bias[i % N]);
    call.skip_bias = true;
    memcpy(few, l.y, (size_t)(3 * N) * sizeof(float));
    run_both(d, bl_linear_stack_layer(stack, 0), call);
    assert_memory_equal(few, l.y, (size_t)(3 * N) * sizeof(float));
    call.skip_bias = false;
    call.T = MANY;
    run_both(d, bl_linear_stack_layer(stack, 0), call);
    bl_linear_call bf16 = call;
    bf16.x = bl_tensor_of(x, BL_BF16), bf16.y = bl_tensor_of(y, BL_BF16);
    bf16.dy = bl_tensor_of(dy, BL_BF16), bf16.dx = bl_tensor_of(dx, BL_BF16);
    bf16.dA = dA, bf16.dB = dB;
    run_both(d, bl_linear_stack_layer(stack, 0), bf16);
    check_bf16(&l, y, dx, dA, dB);
    bl_linear_stack_destroy(plain);
    bl_linear_stack_destroy(stack);
    void *all[] = {x, dy, y, dx, bias, dA, dB, few};
    for (size_t i = 0; i < BL_COUNT(all); i++) free(all[i]);
    free_large(&l);
    free_problem(&p);
    test_device_destroy(d);
}

static bl_linear_stats stats_of(bl_linear_stack *stack)
{
    bl_linear_stats stats = {.size_bytes = sizeof stats};
    assert_int_equal(bl_linear_stack_get_stats(stack, &stats), BL_OK);
    return stats;
}

/* Layers 2, 0, 1 and back, as no rule would guess: from the second pass on nothing waits for a
 * gather that was not begun, and another order is counted. */
static void test_order_is_learned(void **state)
{
    static const int order[] = {2, 0, 1};
    test_device d = test_device_create(1);
    bl_linear_options o = {.device = d.device, .tier = BL_TIER_HOST, .ratio = 1};
    bl_linear_stack *stack;
    problem p;
    int64_t n_first = 0;
    (void)state;

    create_problem(&p, BL_FORMAT_FP8_ROW, PLAIN);
    assert_int_equal(bl_linear_stack_create(&o, LAYERS, p.specs, &stack), BL_OK);
    for (int pass = 0; pass < 4; pass++) {
        for (int i = 0; i < 2 * LAYERS; i++) {
            int l = order[i < LAYERS ? i : 2 * LAYERS - 1 - i];
            bl_linear_call call = {.size_bytes = sizeof call,
                                   .T = T,
                                   .x = bl_tensor_f32(p.x[l]),
                                   .y = bl_tensor_f32(p.first.y[l]),
                                   .dy = bl_tensor_f32(p.dy[l]),
                                   .dx = bl_tensor_f32(p.first.dx[l])};
            bl_linear_layer *layer = bl_linear_stack_layer(stack, l);
            assert_int_equal(i < LAYERS ? bl_linear_call_forward(layer, d.stream, &call)
                                        : bl_linear_call_backward(layer, d.stream, &call),
                             BL_OK);
            test_finish(d);
        }
        bl_linear_stats s = stats_of(stack);
        if (pass == 0) n_first = s.n_on_demand;
        assert_true(n_first >= 2); /* the first pass guesses wrong */
        assert_int_equal(s.n_on_demand, n_first);
        assert_int_equal(s.n_strays, 0);
        assert_int_equal(s.n_forward, (pass + 1) * LAYERS);
        assert_int_equal(s.n_timed, (pass + 1) * 2 * LAYERS);
    }
    forward_once(d, stack, &p, p.first.y[0]);
    assert_int_equal(stats_of(stack).n_strays, 1);
    assert_true(stats_of(stack).gathered_bytes > 0);
    bl_linear_stack_destroy(stack);
    free_problem(&p);
    test_device_destroy(d);
}

/* Of a base in device memory nothing is gathered; of one half in host memory, its host layers. */
static void test_resident_layers_are_not_gathered(void **state)
{
    static const double ratios[] = {0, 0.5, 1};
    test_device d = test_device_create(1);
    problem p;
    int64_t gathers[BL_COUNT(ratios)];
    size_t bytes[BL_COUNT(ratios)];
    (void)state;

    create_problem(&p, BL_FORMAT_FP8_ROW, PLAIN);
    for (size_t i = 0; i < BL_COUNT(ratios); i++) {
        bl_linear_options o = {.device = d.device, .tier = BL_TIER_HOST, .ratio = ratios[i]};
        bl_linear_stack *stack;
        assert_int_equal(bl_linear_stack_create(&o, LAYERS, p.specs, &stack), BL_OK);
        for (int l = 0; l < LAYERS; l++) {
            bl_linear_call call = {.size_bytes = sizeof call,
                                   .T = T,
                                   .x = bl_tensor_f32(p.x[l]),
                                   .y = bl_tensor_f32(p.first.y[l])};
            assert_int_equal(
                bl_linear_call_forward(bl_linear_stack_layer(stack, l), d.stream, &call), BL_OK);
            test_finish(d);
        }
        bl_linear_stats s = stats_of(stack);
        gathers[i] = s.n_gathers, bytes[i] = s.gathered_bytes;
        assert_true(s.n_on_demand <= s.n_gathers);
        bl_linear_stack_destroy(stack);
    }
    assert_int_equal(gathers[0], 0);
    assert_int_equal(bytes[0], 0);
    assert_true(gathers[1] > 0 && gathers[1] < gathers[2]);
    assert_true(bytes[1] > 0 && bytes[1] < bytes[2]);
    free_problem(&p);
    test_device_destroy(d);
}

/* Layers of equal size, so that only their names differ: rank 1 calls layer 2 where rank 0 calls
 * layer 1. */
static bl_status call_in_another_order(test_rank *self)
{
    enum { N = 16, N_LAYERS = 3 };
    static const float w[N * N], x[T * N];
    const bl_linear_spec spec = {
        .rows = N, .cols = N, .dtype = BL_F32, .format = BL_FORMAT_F32, .weight = w};
    const bl_linear_spec specs[N_LAYERS] = {spec, spec, spec};
    const int orders[2][N_LAYERS] = {{0, 1, 2}, {0, 2, 1}};
    bl_linear_options o = {.device = self->device, .comm = self->comm, .ring_depth = 1};
    bl_linear_stack *stack = NULL;
    float y[T * N];

    BL_TRY(bl_linear_stack_create(&o, N_LAYERS, specs, &stack));
    bl_status st = BL_OK;
    for (int i = 0; i < N_LAYERS && st == BL_OK; i++)
        st = bl_linear_layer_forward(bl_linear_stack_layer(stack, orders[self->rank % 2][i]),
                                     self->stream, T, bl_tensor_f32((float *)x), bl_tensor_f32(y));
    if (st == BL_OK) st = bl_stream_synchronize(self->stream);
    bl_error error;
    bl_error_save(&error, st);
    if (st != BL_OK) bl_comm_abort(self->comm, &error);
    bl_linear_stack_destroy(stack);
    return bl_error_restore(&error);
}

static void test_ranks_in_different_orders(void **state)
{
    bl_error errors[3];
    (void)state;

    assert_int_equal(test_ranks_run(3, 1, 60, call_in_another_order, NULL, errors), BL_EINTERNAL);
    for (int r = 0; r < 3; r++) {
        assert_int_equal(errors[r].status, BL_EINTERNAL);
        assert_non_null(strstr(errors[r].text, "all_gather of layer 1,"));
        assert_non_null(strstr(errors[r].text, "all_gather of layer 2,"));
    }
}

static void expect_refusal(bl_linear_layer *layer, bl_stream *stream, bl_linear_call call,
                           const char *text)
{
    assert_int_equal(bl_linear_call_backward(layer, stream, &call), BL_EUSAGE);
    assert_error_has(text);
}

static void test_rejected_calls(void **state)
{
    test_device d = test_device_create(1);
    bl_linear_options o = {.device = d.device};
    bl_linear_stack *stack;
    bl_linear_stats stats = {.size_bytes = 8};
    problem p;
    (void)state;

    create_problem(&p, BL_FORMAT_F32, LORA);
    p.specs[0].lora.is_external = true;
    assert_int_equal(bl_linear_stack_create(&o, 1, p.specs, &stack), BL_OK);
    bl_linear_layer *layer = bl_linear_stack_layer(stack, 0);
    bl_linear_call good = {.size_bytes = sizeof good,
                           .T = T,
                           .x = bl_tensor_f32(p.x[0]),
                           .dy = bl_tensor_f32(p.dy[0]),
                           .A = p.w[0],
                           .B = p.B[0],
                           .dA = p.first.dA[0],
                           .dB = p.first.dB[0]},
                   c;
    c = good, c.size_bytes = 8, expect_refusal(layer, d.stream, c, "a call of 8 bytes");
    c = good, c.rows = 7;
    expect_refusal(layer, d.stream, c, "layer 0: a call of 7 x 0, the weight is 150 x 131");
    c = good, c.A = NULL, expect_refusal(layer, d.stream, c, "layer 0: A is NULL");
    c = good, c.dB = NULL, expect_refusal(layer, d.stream, c, "layer 0: dB is NULL");
    c = good, c.T = -1, expect_refusal(layer, d.stream, c, "-1 tokens");
    c = good, c.x.dtype = BL_F16, expect_refusal(layer, d.stream, c, "x is F16");
    assert_int_equal(bl_linear_call_forward(layer, d.stream, NULL), BL_EUSAGE);
    assert_error_has("call is NULL");
    assert_int_equal(bl_linear_stack_get_stats(stack, &stats), BL_EUSAGE);
    assert_int_equal(bl_linear_stack_get_stats(NULL, &stats), BL_EUSAGE);
    assert_int_equal(bl_linear_call_backward(layer, d.stream, &good), BL_OK);
    test_finish(d);
    bl_linear_stack_destroy(stack);
    free_problem(&p);
    test_device_destroy(d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_external_weights),
        cmocka_unit_test(test_bf16_and_bias),
        cmocka_unit_test(test_order_is_learned),
        cmocka_unit_test(test_resident_layers_are_not_gathered),
        cmocka_unit_test(test_ranks_in_different_orders),
        cmocka_unit_test(test_rejected_calls),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
