/* SPDX-License-Identifier: Apache-2.0 */
/* The LoRA linear layer on CUDA against the same call on the CPU, on a GPU or, built with
 * BALLAST_CUDA_EMULATED, on the fakes of tests/device and of this folder. All inputs are values
 * that bf16 holds, so that both devices start from the same numbers.
 *
 * Tolerance. Let e(z) be the size of the difference divided by the size of the CPU's result, sizes
 * being root mean squares over all elements of an output. A relative error of at most u on each
 * term of a sum, of either sign and spread evenly, adds terms of mean square u^2/3: e = u / sqrt(3)
 * for a sum of terms of random sign, whose mean square is the sum of its terms' own. Errors of
 * several stages are independent and add as squares. For bf16, u = 2^-8.
 *
 * bf16: the dequantized matrix, u or du, each LoRA term's addition to y or dx (at most 3), the
 * mask, the last addition: at most 7 stages: e <= sqrt(7/3) 2^-8 = 0.6 %. The limit is twice that:
 * small sums have small samples. FP8: the quantized input adds E4M3's u = 2^-4, e = 2^-4 / sqrt(3)
 * = 3.6 %, and less where values fill a binade's top. fp8_row's scales in dy only move values
 * within their binades. The limit is 5 %. dA and dB have no frozen matrix in them: the bf16 bound
 * in both modes. Elements are also checked one by one: none may be off by more than 8 times the
 * root mean square of the allowed difference; a wrong scale of a row, a block or a column is. */
#include "cuda_side.h"

#include "base/dtype.h"
#include "ops/cuda/gemm_cuda.h"
#ifdef BALLAST_CUDA_EMULATED
#include "emulator/emulated.h"
#endif

static const double BF16_ERROR = 0.012, FP8_ERROR = 0.05, WORST_ELEMENT = 8;

static const layer_shape shapes[] = {
    {"the plain base in fp8_row", true, 33, 96, 1, {{BL_FORMAT_FP8_ROW, 160}}, 0, {{0}}, false},
    {"q|k|v in fp8_row, all adapted",
     true,
     40,
     272,
     3,
     {{BL_FORMAT_FP8_ROW, 128}, {BL_FORMAT_FP8_ROW, 32}, {BL_FORMAT_FP8_ROW, 32}},
     3,
     {{16, 0, 128, 0.5f}, {3, 128, 32, 0.5f}, {64, 160, 32, 0.125f}},
     false},
    {"q and v of q|k|v in fp8_row",
     true,
     7,
     96,
     3,
     {{BL_FORMAT_FP8_ROW, 96}, {BL_FORMAT_FP8_ROW, 32}, {BL_FORMAT_FP8_ROW, 32}},
     2,
     {{8, 0, 96, 0.5f}, {8, 128, 32, 0.5f}},
     false},
    {"gate|up in fp8_block",
     true,
     68,
     400,
     2,
     {{BL_FORMAT_FP8_BLOCK, 256}, {BL_FORMAT_FP8_BLOCK, 144}},
     2,
     {{17, 0, 256, 0.25f}, {5, 256, 144, 0.5f}},
     false},
    {"one token, fp8_block: T is no multiple of 4",
     false,
     1,
     640,
     1,
     {{BL_FORMAT_FP8_BLOCK, 528}},
     1,
     {{8, 0, 528, 0.5f}},
     false},
    {"fp8_block whose grids do not stack",
     false,
     16,
     256,
     2,
     {{BL_FORMAT_FP8_BLOCK, 144}, {BL_FORMAT_FP8_BLOCK, 112}},
     1,
     {{8, 144, 112, 0.5f}},
     false},
    {"odd sizes",
     false,
     9,
     51,
     2,
     {{BL_FORMAT_FP8_ROW, 33}, {BL_FORMAT_FP8_ROW, 9}},
     1,
     {{1, 33, 9, 1.0f}},
     false},
    {"dense bf16",
     false,
     24,
     80,
     2,
     {{BL_FORMAT_BF16, 64}, {BL_FORMAT_BF16, 48}},
     2,
     {{4, 0, 64, 0.5f}, {4, 64, 48, 0.5f}},
     false},
    {"mixed formats",
     false,
     24,
     64,
     3,
     {{BL_FORMAT_FP8_ROW, 96}, {BL_FORMAT_F16, 48}, {BL_FORMAT_F32, 16}},
     2,
     {{5, 0, 96, 0.5f}, {7, 144, 16, 1.0f}},
     false},
    {"no tokens", true, 0, 96, 1, {{BL_FORMAT_FP8_ROW, 64}}, 1, {{4, 0, 64, 1.0f}}, false},
    {"q|k|v in fp8_row, their updates stacked",
     true,
     40,
     272,
     3,
     {{BL_FORMAT_FP8_ROW, 128}, {BL_FORMAT_FP8_ROW, 32}, {BL_FORMAT_FP8_ROW, 32}},
     3,
     {{16, 0, 128, 0.5f}, {3, 128, 32, 0.5f}, {64, 160, 32, 0.125f}},
     true},
};

static void compare(const char *name, const char *what, const side *got_side,
                    const void *got_memory, const side *want_side, const void *want_memory,
                    int64_t n, bool is_gradient, double allowed)
{
    double *got = side_fetch(got_side, got_memory, n, !is_gradient),
           *want = side_fetch(want_side, want_memory, n, false);
    double error = 0, size = 0, worst = 0;
    for (int64_t i = 0; i < n; i++) {
        error += (got[i] - want[i]) * (got[i] - want[i]);
        size += want[i] * want[i];
        if (!(fabs(got[i] - want[i]) <= worst)) worst = fabs(got[i] - want[i]);
    }
    double limit = allowed * sqrt(size / (double)bl_max_i64(n, 1));
    if (!(sqrt(error) <= allowed * sqrt(size)) || !(worst <= WORST_ELEMENT * limit))
        fail_msg(
            "%s: %s differs by %.3g of its size (%.3g allowed), one element by %.3g (%.3g allowed)",
            name, what, sqrt(error / size), allowed, worst, WORST_ELEMENT * limit);
    free(got);
    free(want);
}

static void check_layer(test_device cpu, test_device gpu, const layer_shape *shape, float dropout,
                        bl_matmul_mode mode, bool has_residual)
{
    bl_pool *pool = bl_device_pool(cpu.device);
    side want = side_create(cpu, pool, shape, dropout, mode),
         got = side_create(gpu, pool, shape, dropout, mode);
    double frozen = mode == BL_MATMUL_FP8 && shape->is_fp8_possible ? FP8_ERROR : BF16_ERROR;
    if (has_residual) side_add_residual(&want, shape->T), side_add_residual(&got, shape->T);
    side_run(&want, shape->T);
    side_run(&got, shape->T);
    compare(shape->name, "y", &got, got.y.data, &want, want.y.data,
            shape->T * want.linear.weight.rows, false, frozen);
    compare(shape->name, "dx", &got, got.dx.data, &want, want.dx.data, shape->T * shape->K, false,
            frozen);
    for (int i = 0; i < shape->n_parts; i++) {
        const bl_lora_part *g = &got.linear.part[i], *w = &want.linear.part[i];
        compare(shape->name, "dA", &got, g->dA, &want, w->dA, g->r * shape->K, true, BF16_ERROR);
        compare(shape->name, "dB", &got, g->dB, &want, w->dB, g->rows * g->r, true, BF16_ERROR);
    }
    side_destroy(&want);
    side_destroy(&got);
}

static void check_shape(test_device cpu, test_device gpu, const layer_shape *shape, float dropout,
                        bl_matmul_mode mode)
{
    check_layer(cpu, gpu, shape, dropout, mode, false);
}

typedef struct fixture {
    test_device cpu, gpu;
} fixture;

static int setup(void **state)
{
    fixture *f = test_alloc(1, sizeof *f);
    f->cpu = test_device_create(2);
    check_status(bl_device_create_cuda(0, &f->gpu.device));
    check_status(bl_stream_create(f->gpu.device, "test", &f->gpu.stream));
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    fixture *f = *state;
    test_device_destroy(f->cpu);
    test_device_destroy(f->gpu);
    free(f);
    return 0;
}

static void test_bf16_equals_the_cpu(void **state)
{
    fixture *f = *state;
    for (size_t i = 0; i < BL_COUNT(shapes); i++) {
        check_shape(f->cpu, f->gpu, &shapes[i], 0.0f, BL_MATMUL_BF16);
        check_shape(f->cpu, f->gpu, &shapes[i], 0.3f, BL_MATMUL_BF16);
    }
}

static void test_fp8_is_as_near_as_fp8_is(void **state)
{
    fixture *f = *state;
    for (size_t i = 0; i < BL_COUNT(shapes); i++) {
        check_shape(f->cpu, f->gpu, &shapes[i], 0.0f, BL_MATMUL_FP8);
        check_shape(f->cpu, f->gpu, &shapes[i], 0.3f, BL_MATMUL_FP8);
    }
}

/* Another rounding of y, which may be the residual's size; also where cuBLASLt adds to no FP8
 * product, so that the residual is added last. */
static void test_residual_is_added(void **state)
{
    fixture *f = *state;
    for (size_t i = 0; i < BL_COUNT(shapes); i++)
        for (int mode = BL_MATMUL_BF16; mode <= BL_MATMUL_FP8; mode++) {
            check_layer(f->cpu, f->gpu, &shapes[i], 0.0f, (bl_matmul_mode)mode, true);
            check_layer(f->cpu, f->gpu, &shapes[i], 0.3f, (bl_matmul_mode)mode, true);
        }
#ifdef BALLAST_CUDA_EMULATED
    emulated_cublaslt_refuse_fp8_sums(true);
    for (size_t i = 0; i < BL_COUNT(shapes); i++)
        check_layer(f->cpu, f->gpu, &shapes[i], 0.0f, BL_MATMUL_FP8, true);
    emulated_cublaslt_refuse_fp8_sums(false);
#endif
}

/* The same bits from the same input, twice: no atomics, no sums in any order. */
static void test_runs_repeat_bit_for_bit(void **state)
{
    fixture *f = *state;
    for (int mode = BL_MATMUL_BF16; mode <= BL_MATMUL_FP8; mode++) {
        const layer_shape *shape = &shapes[1];
        side s =
            side_create(f->gpu, bl_device_pool(f->cpu.device), shape, 0.3f, (bl_matmul_mode)mode);
        int64_t n_y = shape->T * s.linear.weight.rows, n_a = shape->part[0].r * shape->K;
        side_run(&s, shape->T);
        double *y = side_fetch(&s, s.y.data, n_y, true),
               *dx = side_fetch(&s, s.dx.data, shape->T * shape->K, true),
               *dA = side_fetch(&s, s.linear.part[0].dA, n_a, false);
        side_run(&s, shape->T);
        double *y_again = side_fetch(&s, s.y.data, n_y, true),
               *dx_again = side_fetch(&s, s.dx.data, shape->T * shape->K, true),
               *dA_again = side_fetch(&s, s.linear.part[0].dA, n_a, false);
        assert_memory_equal(y, y_again, (size_t)n_y * sizeof *y);
        assert_memory_equal(dx, dx_again, (size_t)(shape->T * shape->K) * sizeof *dx);
        assert_memory_equal(dA, dA_again, (size_t)n_a * sizeof *dA);
        free(y), free(dx), free(dA), free(y_again), free(dx_again), free(dA_again);
        side_destroy(&s);
    }
}

/* The algorithms that cuBLASLt offers first compute the same bits before and after others were
 * chosen by time, and those repeat themselves. The first run by time leaves garbage, by
 * contract. */
static void test_choice_by_time(void **state)
{
    fixture *f = *state;
    for (int mode = BL_MATMUL_BF16; mode <= BL_MATMUL_FP8; mode++) {
        const layer_shape *shape = &shapes[1];
        side s =
            side_create(f->gpu, bl_device_pool(f->cpu.device), shape, 0.0f, (bl_matmul_mode)mode);
        side cpu =
            side_create(f->cpu, bl_device_pool(f->cpu.device), shape, 0.0f, (bl_matmul_mode)mode);
        int64_t n = shape->T * s.linear.weight.rows;
        double *y[4];
        side_run(&cpu, shape->T);
#ifdef BALLAST_CUDA_EMULATED
        emulated_cublaslt_slow_first(true);
#endif
        for (int i = 0; i < 4; i++) { /* first, by time twice, first */
            check_status(ops_cuda_gemm_choose_by_time(f->gpu.stream, i == 1 || i == 2));
            if (i == 1) side_run(&s, shape->T);
            side_run(&s, shape->T);
#ifdef BALLAST_CUDA_EMULATED
            assert_int_equal(emulated_cublaslt_last_candidate(), i == 1 || i == 2 ? 2 : 0);
#endif
            y[i] = side_fetch(&s, s.y.data, n, true);
            compare(shape->name, "y", &s, s.y.data, &cpu, cpu.y.data, n, false,
                    mode == BL_MATMUL_FP8 ? FP8_ERROR : BF16_ERROR);
        }
#ifdef BALLAST_CUDA_EMULATED
        emulated_cublaslt_slow_first(false);
#endif
        assert_memory_equal(y[0], y[3], (size_t)n * sizeof *y[0]);
        assert_memory_equal(y[1], y[2], (size_t)n * sizeof *y[0]);
        for (int i = 0; i < 4; i++) free(y[i]);
        side_destroy(&s);
        side_destroy(&cpu);
    }
}

/* The plain FP8 product that the layer is measured against. An element may be off by bf16's
 * rounding and, for sums in the tensor cores' 13 bits, by 2^-12 of its terms' sizes an addition of
 * 32 terms; a wrong scale is a factor. */
static void test_plain_fp8_product(void **state)
{
    enum { M = 48, N = 24, K = 128 };
    static const float scales[2] = {0.5f, 4.0f};
    fixture *f = *state;
    side s = {.d = f->gpu, .is_cuda = true};
    uint8_t a[M * K], b[N * K];
    bool is_served;

    for (int i = 0; i < M * K; i++) a[i] = (uint8_t)(i * 37 % 0x7e | (i % 3 == 0 ? 0x80 : 0));
    for (int i = 0; i < N * K; i++) b[i] = (uint8_t)(i * 53 % 0x7e | (i % 5 == 0 ? 0x80 : 0));
    ops_gemm gemm = {.kind = OPS_GEMM_FP8_TENSOR,
                     .transpose_a = true,
                     .d_type = BL_BF16,
                     .alpha = 1,
                     .m = M,
                     .n = N,
                     .k = K,
                     .lda = K,
                     .ldb = K,
                     .ldd = M,
                     .a = side_memory(&s, a, sizeof a),
                     .b = side_memory(&s, b, sizeof b),
                     .a_scale = side_memory(&s, &scales[0], sizeof scales[0]),
                     .b_scale = side_memory(&s, &scales[1], sizeof scales[1]),
                     .d = side_memory(&s, NULL, M * N * 2)};
    check_status(ops_cuda_gemm_is_served(s.d.stream, &gemm, &is_served));
    if (!is_served) printf("skip: no plain FP8 product on this GPU\n");
    for (int fast = 0; is_served && fast < 2; fast++) {
        gemm.fast_sums = fast;
        check_status(ops_cuda_gemm(s.d.stream, &gemm));
#ifdef BALLAST_CUDA_EMULATED
        assert_int_equal(emulated_cublaslt_fast_sums(), fast);
#endif
        double *d = side_fetch(&s, gemm.d, M * N, true);
        for (int i = 0; i < M * N; i++) {
            double want = 0, size = 0;
            for (int k = 0; k < K; k++) {
                double term = 2.0 * (double)bl_e4m3_to_f32(a[i % M * K + k]) *
                              (double)bl_e4m3_to_f32(b[i / M * K + k]);
                want += term;
                size += fabs(term);
            }
            assert_true(fabs(d[i] - want) <= 0x1p-8 * fabs(want) + K / 32 * 0x1p-12 * size);
        }
        free(d);
    }
    side_destroy(&s);
}

static void test_what_makes_no_sense_is_refused(void **state)
{
    fixture *f = *state;
    side s = side_create(f->gpu, bl_device_pool(f->cpu.device), &shapes[1], 0.0f, BL_MATMUL_BF16);
    s.linear.workspace_bytes--;
    assert_int_equal(bl_lora_linear_forward(s.d.stream, &s.linear, shapes[1].T, s.x, s.y),
                     BL_EINTERNAL);
    assert_non_null(strstr(bl_error_text(), "scratch"));
    s.linear.workspace_bytes++;
    bl_tensor x = bl_tensor_of(s.x.data, BL_F32);
    assert_int_equal(bl_lora_linear_forward(s.d.stream, &s.linear, shapes[1].T, x, s.y),
                     BL_EINTERNAL);
    test_finish(s.d);
    side_destroy(&s);
}

/* Scratch is asked for with the most tokens there may be, a number that need not suit blocks where
 * fewer do. */
static void test_scratch_does_not_shrink(void **state)
{
    (void)state;
    bl_weight weight = {.rows = 256,
                        .cols = 128,
                        .n_segments = 1,
                        .segment = {{.format = BL_FORMAT_FP8_BLOCK, .rows = 256}}};
    for (int forward = 0; forward < 2; forward++) {
        size_t before = 0;
        for (int64_t T = 0; T < 1000; T++) {
            bl_matmul_weight_args args = {
                .forward = forward, .mode = BL_MATMUL_FP8, .T = T, .weight = weight};
            size_t bytes = bl_matmul_weight_scratch_bytes(BL_DEVICE_CUDA, &args);
            assert_true(bytes >= before);
            before = bytes;
        }
    }
}

#ifdef BALLAST_CUDA_EMULATED

static void test_fp8_products_are_fp8_products(void **state)
{
    fixture *f = *state;
    for (size_t i = 0; i < BL_COUNT(shapes); i++) {
        int before = emulated_cublaslt_fp8_products();
        check_shape(f->cpu, f->gpu, &shapes[i], 0.0f, BL_MATMUL_FP8);
        assert_int_equal(emulated_cublaslt_fp8_products() - before,
                         shapes[i].is_fp8_possible && shapes[i].T > 0 ? 2 : 0);
    }
}

/* Fast sums are those of products with scales per row, in the direction asked for, and the results
 * are as near as FP8 is. */
static void test_fast_sums(void **state)
{
    fixture *f = *state;
    bl_pool *pool = bl_device_pool(f->cpu.device);

    for (size_t i = 0; i < 4; i++)
        for (int sums = BL_SUMS_FULL; sums <= BL_SUMS_FAST; sums++) {
            const layer_shape *shape = &shapes[i];
            bool is_row = shape->segment[0].format == BL_FORMAT_FP8_ROW;
            side want = side_create(f->cpu, pool, shape, 0, BL_MATMUL_FP8),
                 got = side_create(f->gpu, pool, shape, 0, BL_MATMUL_FP8);
            int before = emulated_cublaslt_fast_sums();
            got.linear.sums = (bl_matmul_sums)sums;
            side_run(&want, shape->T);
            side_run(&got, shape->T);
            assert_int_equal(emulated_cublaslt_fast_sums() - before, is_row ? sums : 0);
            compare(shape->name, "y", &got, got.y.data, &want, want.y.data,
                    shape->T * want.linear.weight.rows, false, FP8_ERROR);
            compare(shape->name, "dx", &got, got.dx.data, &want, want.dx.data, shape->T * shape->K,
                    false, FP8_ERROR);
            side_destroy(&want);
            side_destroy(&got);
        }
}

/* Stacked, x is read by one product for all parts in each pass, dA is one, and dx is gone through
 * once. */
static void test_stacked_updates_share_products(void **state)
{
    fixture *f = *state;
    layer_shape shape = shapes[1];
    for (int stacked = 0; stacked < 2; stacked++) {
        shape.is_stacked = stacked;
        int before = emulated_cublaslt_products();
        check_shape(f->cpu, f->gpu, &shape, 0.0f, BL_MATMUL_BF16);
        assert_int_equal(emulated_cublaslt_products() - before,
                         stacked ? (1 + 3 + 1) + (1 + 6 + 2 + 1) : (6 + 1) + (3 + 6 + 6 + 1));
    }
}

static void test_refused_fp8_falls_back(void **state)
{
    fixture *f = *state;
    emulated_cublaslt_refuse_fp8(true);
    int before = emulated_cublaslt_fp8_products();
    layer_shape shape = shapes[3];
    shape.is_fp8_possible = false;
    check_shape(f->cpu, f->gpu, &shape, 0.3f, BL_MATMUL_FP8);
    assert_int_equal(emulated_cublaslt_fp8_products(), before);
    emulated_cublaslt_refuse_fp8(false);
}

#endif

int main(void)
{
    bl_device *device;
    if (bl_device_create_cuda(0, &device) != BL_OK) {
        printf("skip: no GPU: %s\n", bl_error_text());
        return 77;
    }
    bl_device_destroy(device);
#ifdef BALLAST_CUDA_EMULATED
    printf("descriptors are %schecked by the toolkit's cuBLASLt\n",
           emulated_cublaslt_ask_real() ? "" : "not ");
#endif
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_bf16_equals_the_cpu),
        TEST(test_fp8_is_as_near_as_fp8_is),
        TEST(test_residual_is_added),
        TEST(test_runs_repeat_bit_for_bit),
        TEST(test_what_makes_no_sense_is_refused),
        TEST(test_choice_by_time),
        TEST(test_plain_fp8_product),
        TEST(test_scratch_does_not_shrink),
#ifdef BALLAST_CUDA_EMULATED
        TEST(test_fp8_products_are_fp8_products),
        TEST(test_refused_fp8_falls_back),
        TEST(test_fast_sums),
        TEST(test_stacked_updates_share_products),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
