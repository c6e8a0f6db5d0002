/* SPDX-License-Identifier: Apache-2.0 */
/* A stack of layers on CUDA against the same stack on the CPU, on a GPU or, built with
 * BALLAST_CUDA_EMULATED, on the fakes of tests/device and of this folder. x, dy and B are values
 * that bf16 holds.
 *
 * Tolerance, as the head of test_linear_cuda.c derives it, with one stage more for A, whose compute
 * copy is rounded to bf16: e <= sqrt(8/3) 2^-8 = 0.64 % of an output's root mean square; 1.3 % is
 * asked for, and 5 % where products are in FP8. */
#include "layer_problem.h"

#include "../store/tmp_dir.h"
#include "ops/ops.h"

static const double ERROR = 0.013, FP8_ERROR = 0.05;

static void round_to_bf16(float *values, int64_t n)
{
    for (int64_t i = 0; i < n; i++) values[i] = bl_bf16_to_f32(bl_f32_to_bf16(values[i]));
}

/* Device memory of n elements in the device's dtype, filled with values unless NULL. */
static bl_tensor put(test_device d, const float *values, int64_t n)
{
    bl_tensor t = {NULL, bl_device_act(d.device)};
    uint16_t *halves = test_alloc(n, sizeof *halves);

    for (int64_t i = 0; i < n; i++) halves[i] = bl_f32_to_bf16(values ? values[i] : NAN);
    assert_int_equal(
        bl_device_alloc(d.device, BL_SPACE_DEVICE, bl_tensor_bytes(t, n), "test", &t.data), BL_OK);
    if (values)
        test_write(d, t.data, t.dtype == BL_F32 ? (const void *)values : halves,
                   bl_tensor_bytes(t, n));
    free(halves);
    return t;
}

/* Frees the tensor. */
static void get(test_device d, bl_tensor t, int64_t n, float *out)
{
    void *bytes = test_alloc(n, sizeof(float));

    test_read(d, bytes, t.data, bl_tensor_bytes(t, n));
    assert_true(bl_dtype_to_f32(t.dtype, bytes, out, (size_t)n));
    bl_device_free(d.device, BL_SPACE_DEVICE, t.data);
    free(bytes);
}

static void run_layer(test_device d, bl_linear_stack *stack, const problem *p, int l, bool forward,
                      outputs *out)
{
    int64_t N = shapes[l].rows, K = shapes[l].cols;
    bl_linear_layer *layer = bl_linear_stack_layer(stack, l);
    bl_tensor x = put(d, p->x[l], T * K), dy = put(d, p->dy[l], T * N);
    bl_tensor result = put(d, NULL, T * (forward ? N : K));
    bl_linear_lora_view view = bl_linear_layer_lora(layer);

    assert_int_equal(forward ? bl_linear_layer_forward(layer, d.stream, T, x, result)
                             : bl_linear_layer_backward(layer, d.stream, T, x, dy, result),
                     BL_OK);
    test_finish(d);
    get(d, result, T * (forward ? N : K), forward ? out->y[l] : out->dx[l]);
    if (!forward && view.r > 0) {
        test_read(d, out->dA[l], view.dA, (size_t)(view.r * K) * sizeof(float));
        test_read(d, out->dB[l], view.dB, (size_t)(view.r * N) * sizeof(float));
    }
    bl_device_free(d.device, BL_SPACE_DEVICE, x.data);
    bl_device_free(d.device, BL_SPACE_DEVICE, dy.data);
}

static void run(bl_device *device, const problem *p, bl_tier tier, outputs *out)
{
    test_device d = {.device = device};
    bl_linear_options o = {.device = device,
                           .max_tokens = T,
                           .seed = 3,
                           .pin = bl_device_get_kind(device) == BL_DEVICE_CUDA,
                           .tier = tier,
                           .ratio = tier == BL_TIER_DEVICE ? 0 : 0.7,
                           .dir = tier == BL_TIER_DISK ? tmp_subdir("pages") : NULL};
    bl_linear_memory m;
    bl_linear_stack *stack;

    assert_int_equal(bl_stream_create(device, "test", &d.stream), BL_OK);
    size_t before = bl_device_bytes(device);
    assert_int_equal(bl_linear_stack_plan(&o, LAYERS, p->specs, &m), BL_OK);
    bl_status st = bl_linear_stack_create(&o, LAYERS, p->specs, &stack);
    if (st != BL_OK) fail_msg("%s", bl_error_text());
    if (tier == BL_TIER_DEVICE)
        assert_int_equal(bl_device_bytes(device) - before,
                         m.frozen + m.ring + m.scales + m.lora + m.work);
    for (int l = 0; l < LAYERS; l++) assert_int_equal(set_B(d.stream, stack, p, l), BL_OK);
    for (int l = 0; l < LAYERS; l++) run_layer(d, stack, p, l, true, out);
    for (int l = LAYERS - 1; l >= 0; l--) run_layer(d, stack, p, l, false, out);
    assert_int_equal(bl_linear_stack_verify(stack), BL_OK);
    bl_linear_stack_destroy(stack);
    bl_stream_destroy(d.stream);
}

static void check_near(const char *what, const float *got, const float *want, int64_t n,
                       double allowed)
{
    double error = 0, size = 0;
    for (int64_t i = 0; i < n; i++) {
        error += pow((double)got[i] - (double)want[i], 2);
        size += pow((double)want[i], 2);
    }
    if (n > 0 && !(sqrt(error) <= allowed * sqrt(size)))
        fail_msg("%s: off by %.3g of its size", what, sqrt(error / size));
}

static void check_outputs(const problem *p, const outputs *out, bool is_fp8)
{
    for (int l = 0; l < LAYERS; l++) {
        int64_t N = shapes[l].rows, K = shapes[l].cols, r = lora_r(p, l);
        double allowed = is_fp8 && l == LAYERS - 1 ? FP8_ERROR : ERROR;
        check_near("y", out->y[l], p->first.y[l], T * N, allowed);
        check_near("dx", out->dx[l], p->first.dx[l], T * K, allowed);
        check_near("dA", out->dA[l], p->first.dA[l], r * K, ERROR);
        check_near("dB", out->dB[l], p->first.dB[l], r * N, ERROR);
    }
}

/* The last layer, alone of its formats and shapes, in FP8: y and dx. */
static void check_fp8(bl_device *cuda, problem *p)
{
    bool is_fp8 = p->format == BL_FORMAT_FP8_ROW; /* T does not suit blocks */
    int64_t before[BL_FALLBACK_COUNT], after[BL_FALLBACK_COUNT], n = 0;
    outputs out = create_outputs(p);

    for (int l = 0; l < LAYERS; l++) p->specs[l].mode = BL_MATMUL_FP8;
    assert_int_equal(bl_matmul_count_fallbacks(cuda, before), BL_OK);
    run(cuda, p, BL_TIER_DEVICE, &out);
    assert_int_equal(bl_matmul_count_fallbacks(cuda, after), BL_OK);
    for (int i = 0; i < BL_FALLBACK_COUNT; i++) n += after[i] - before[i];
    if (after[BL_FALLBACK_CAPABILITY] > 0) is_fp8 = false; /* this GPU has no FP8 */
    assert_int_equal(n, 2 * (is_fp8 ? LAYERS - 1 : LAYERS));
    check_outputs(p, &out, is_fp8);
    free_outputs(&out);
}

static void test_cuda_equals_the_cpu(void **state)
{
    static const bl_format formats[] = {BL_FORMAT_BF16, BL_FORMAT_FP8_ROW, BL_FORMAT_FP8_BLOCK};
    bl_device *cpu, *cuda;
    (void)state;

    assert_int_equal(bl_device_create_cpu(1, &cpu), BL_OK);
    assert_int_equal(bl_device_create_cuda(0, &cuda), BL_OK);
    for (int i = 0; i < (int)BL_COUNT(formats) * N_KINDS; i++) {
        problem p;
        create_problem(&p, formats[i / N_KINDS], (lora_kind)(i % N_KINDS));
        for (int l = 0; l < LAYERS; l++) {
            round_to_bf16(p.x[l], T * shapes[l].cols);
            round_to_bf16(p.dy[l], T * shapes[l].rows);
            round_to_bf16(p.B[l], shapes[l].rows * lora_r(&p, l));
        }
        run(cpu, &p, BL_TIER_DEVICE, &p.first);
        for (int tier = 0; tier < 3; tier++) {
            outputs out = create_outputs(&p);
            run(cuda, &p, (bl_tier)tier, &out);
            check_outputs(&p, &out, false);
            free_outputs(&out);
        }
        check_fp8(cuda, &p);
        free_problem(&p);
    }
    bl_device_destroy(cuda);
    bl_device_destroy(cpu);
}

int main(void)
{
    bl_device *device;
    if (bl_device_create_cuda(0, &device) != BL_OK) {
        printf("skip: no GPU: %s\n", bl_error_text());
        return 77;
    }
    bl_device_destroy(device);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_cuda_equals_the_cpu)};
    return cmocka_run_group_tests(tests, tmp_dir_create, tmp_dir_remove);
}
