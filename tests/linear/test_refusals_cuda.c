/* SPDX-License-Identifier: Apache-2.0 */
/* What cuBLASLt does not serve, on the emulated GPU: FP8 products that it rejects are replaced in
 * the right order and counted; and what it is asked for besides the product. */
#include "layer_runs.h"
#include "emulator/emulated.h"

#include <cublasLt.h>
#include <math.h>

#include "base/sizes.h"
#include "ops/cuda/ops_cuda.h"

static void check_counts(fixture *f, int64_t format, int64_t shape, int64_t capability,
                         int64_t refused)
{
    int64_t counts[BL_FALLBACK_COUNT];
    check_status(bl_matmul_count_fallbacks(f->gpu.device, counts));
    assert_int_equal(counts[BL_FALLBACK_FORMAT], format);
    assert_int_equal(counts[BL_FALLBACK_SHAPE], shape);
    assert_int_equal(counts[BL_FALLBACK_CAPABILITY], capability);
    assert_int_equal(counts[BL_FALLBACK_REFUSED], refused);
}

static void test_fallbacks_are_counted(void **state)
{
    fixture *f = *state;
    layer_shape dense = runs_row_shape, odd = runs_row_shape, few = runs_block_shape;
    outputs out;

    for (int i = 0; i < 3; i++) dense.segment[i].format = BL_FORMAT_BF16;
    odd.K = 51;
    few.T = 66;
    check_counts(f, 0, 0, 0, 0);
    out = runs_shape(f, &runs_row_shape, 0, BL_MATMUL_FP8), runs_free(&out);
    out = runs_shape(f, &odd, 0, BL_MATMUL_BF16), runs_free(&out);
    check_counts(f, 0, 0, 0, 0);
    out = runs_shape(f, &dense, 0, BL_MATMUL_FP8), runs_free(&out); /* y and dx */
    check_counts(f, 2, 0, 0, 0);
    out = runs_shape(f, &odd, 0, BL_MATMUL_FP8), runs_free(&out);
    out = runs_shape(f, &few, 0, BL_MATMUL_FP8), runs_free(&out);
    check_counts(f, 2, 4, 0, 0);
    emulated_cublaslt_refuse_fp8(true);
    layer_shape other = runs_row_shape;
    other.T = 48; /* not asked for yet */
    outputs refused = runs_shape(f, &other, 0.3f, BL_MATMUL_FP8),
            want = runs_shape(f, &other, 0.3f, BL_MATMUL_BF16);
    emulated_cublaslt_refuse_fp8(false);
    check_counts(f, 2, 4, 0, 2);
    assert_true(runs_are_same(&refused, &want));
    runs_free(&refused), runs_free(&want);
    for (int i = 0; i < BL_FALLBACK_COUNT; i++)
        for (int k = 0; k < i; k++)
            assert_string_not_equal(bl_matmul_fallback_text((bl_matmul_fallback)i),
                                    bl_matmul_fallback_text((bl_matmul_fallback)k));
}

/* cuBLASLt offers an FP8 product that adds, and refuses it when it is called: FP8 all the same, the
 * frozen product first. The first call computes what later ones do. */
static void test_sums_that_are_refused_go_the_other_way_round(void **state)
{
    fixture *f = *state;
    for (int shape = 0; shape < 2; shape++)
        for (int drops = 0; drops < 2; drops++) {
            const layer_shape *l = shape ? &runs_block_shape : &runs_row_shape;
            float dropout = drops ? 0.3f : 0.0f;
            side s = side_create(f->gpu, bl_device_pool(f->cpu.device), l, dropout, BL_MATMUL_FP8);
            outputs normal = runs_layer(&s, l);
            test_finish(s.d);
            emulated_cublaslt_refuse_fp8_sums(true);
            int before = emulated_cublaslt_fp8_products();
            outputs first = runs_layer(&s, l), second = runs_layer(&s, l);
            assert_int_equal(emulated_cublaslt_fp8_products() - before, 4);
            emulated_cublaslt_refuse_fp8_sums(false);
            outputs later = runs_layer(&s, l); /* a rejection is permanent */
            check_counts(f, 0, 0, 0, 0);
            assert_true(runs_are_same(&first, &second) && runs_are_same(&first, &later));
            /* The same sums, rounded in another order: a few times bf16's 2^-8 of them. */
            for (int i = 0; i < N_OUTPUTS; i++) {
                double error = 0, size = 0;
                for (int64_t k = 0; k < normal.n[i]; k++) {
                    error += pow(first.value[i][k] - normal.value[i][k], 2);
                    size += pow(normal.value[i][k], 2);
                }
                assert_true(sqrt(error) <= 0x1p-7 * sqrt(size));
            }
            assert_memory_not_equal(first.value[0], normal.value[0],
                                    (size_t)normal.n[0] * sizeof(double));
            runs_free(&normal), runs_free(&first), runs_free(&second);
            runs_free(&later);
            side_destroy(&s);
            runs_renew_gpu(f);
        }
}

/* Then bf16, with the LoRA terms first, whichever status says so. */
static void test_calls_that_are_refused_fall_back(void **state)
{
    static const int statuses[] = {CUBLAS_STATUS_NOT_SUPPORTED, CUBLAS_STATUS_INVALID_VALUE,
                                   CUBLAS_STATUS_ARCH_MISMATCH, CUBLAS_STATUS_INTERNAL_ERROR};
    fixture *f = *state;
    outputs want = runs_shape(f, &runs_row_shape, 0.3f, BL_MATMUL_BF16);

    for (size_t i = 0; i < BL_COUNT(statuses); i++) {
        side s = side_create(f->gpu, bl_device_pool(f->cpu.device), &runs_row_shape, 0.3f,
                             BL_MATMUL_FP8);
        emulated_cublaslt_refuse_fp8_calls(statuses[i]);
        outputs first = runs_layer(&s, &runs_row_shape), second = runs_layer(&s, &runs_row_shape);
        emulated_cublaslt_refuse_fp8_calls(CUBLAS_STATUS_SUCCESS);
        assert_true(runs_are_same(&first, &want) && runs_are_same(&second, &want));
        check_counts(f, 0, 0, 0, 4);
        runs_free(&first), runs_free(&second);
        side_destroy(&s);
        runs_renew_gpu(f);
    }
    runs_free(&want);
}

/* The relative distance of two runs, over all outputs. */
static double distance(const outputs *a, const outputs *b)
{
    double error = 0, size = 0;
    for (int i = 0; i < N_OUTPUTS; i++)
        for (int64_t k = 0; k < a->n[i]; k++) {
            error += pow(a->value[i][k] - b->value[i][k], 2);
            size += pow(b->value[i][k], 2);
        }
    return sqrt(error / size);
}

/* Whatever is refused, wherever and with whichever status: no error, the same bits again, and what
 * FP8 or bf16 would have given. Each of the outcomes comes up. */
static void test_refusals_at_random(void **state)
{
    enum { N_SEEDS = 40 };
    fixture *f = *state;
    int n_fp8 = 0, n_other_order = 0, n_bf16 = 0;

    for (int shape = 0; shape < 2; shape++) {
        const layer_shape *l = shape ? &runs_block_shape : &runs_row_shape;
        outputs bf16 = runs_shape(f, l, 0.3f, BL_MATMUL_BF16),
                fp8 = runs_shape(f, l, 0.3f, BL_MATMUL_FP8);
        double apart = distance(&fp8, &bf16);
        for (unsigned seed = 1; seed <= N_SEEDS; seed++) {
            int64_t counts[BL_FALLBACK_COUNT];
            runs_renew_gpu(f);
            emulated_cublaslt_refuse_at_random(seed);
            outputs first = runs_shape(f, l, 0.3f, BL_MATMUL_FP8),
                    second = runs_shape(f, l, 0.3f, BL_MATMUL_FP8);
            emulated_cublaslt_refuse_at_random(0);
            check_status(bl_matmul_count_fallbacks(f->gpu.device, counts));
            int64_t n = counts[BL_FALLBACK_REFUSED];
            assert_true(runs_are_same(&first, &second));
            assert_true(distance(&first, &bf16) <= 1.1 * apart);
            if (n > 0) { /* y and dx have the same tokens, so both are */
                assert_true(n == 4 && runs_are_same(&first, &bf16));
                n_bf16++;
            } else if (runs_are_same(&first, &fp8)) {
                n_fp8++;
            } else {
                assert_true(distance(&first, &fp8) <= 0x1p-7);
                n_other_order++;
            }
            runs_free(&first), runs_free(&second);
        }
        runs_free(&bf16), runs_free(&fp8);
        runs_renew_gpu(f);
    }
    assert_true(n_fp8 > 0 && n_bf16 > 0 && n_other_order > 0);
}

/* What says that something else is wrong is an error, and so is any status once FP8 has worked. */
static void test_other_statuses_are_errors(void **state)
{
    static const struct {
        int status;
        bool has_run;
        bl_status want;
    } cases[] = {{CUBLAS_STATUS_EXECUTION_FAILED, false, BL_EINTERNAL},
                 {CUBLAS_STATUS_ALLOC_FAILED, false, BL_ENOMEM},
                 {CUBLAS_STATUS_INTERNAL_ERROR, true, BL_EINTERNAL}};
    fixture *f = *state;

    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        side s =
            side_create(f->gpu, bl_device_pool(f->cpu.device), &runs_row_shape, 0, BL_MATMUL_FP8);
        if (cases[i].has_run) side_run(&s, runs_row_shape.T);
        emulated_cublaslt_refuse_fp8_calls(cases[i].status);
        assert_int_equal(bl_lora_linear_forward(s.d.stream, &s.linear, runs_row_shape.T, s.x, s.y),
                         cases[i].want);
        emulated_cublaslt_refuse_fp8_calls(CUBLAS_STATUS_SUCCESS);
        check_counts(f, 0, 0, 0, 0);
        test_finish(s.d);
        side_destroy(&s);
        runs_renew_gpu(f);
    }
}

/* The next algorithm takes the place of one that is refused when it is called. */
static void test_the_next_algorithm_is_taken(void **state)
{
    fixture *f = *state;
    emulated_cublaslt_refuse_candidates(1);
    outputs first = runs_shape(f, &runs_row_shape, 0, BL_MATMUL_FP8);
    assert_int_equal(emulated_cublaslt_last_candidate(), 2);
    emulated_cublaslt_refuse_candidates(0);
    outputs second = runs_shape(f, &runs_row_shape, 0, BL_MATMUL_FP8);
    assert_int_equal(emulated_cublaslt_last_candidate(), 2);
    assert_true(runs_are_same(&first, &second));
    check_counts(f, 0, 0, 0, 0);
    runs_free(&first), runs_free(&second);
}

/* Before the first product, and not all of them. */
static void test_multiprocessors_are_spared(void **state)
{
    fixture *f = *state;

    check_status(bl_matmul_spare_multiprocessors(f->gpu.device, 8));
    outputs some = runs_shape(f, &runs_row_shape, 0, BL_MATMUL_FP8);
    assert_int_equal(emulated_cublaslt_multiprocessors(), 132 - 8);
    assert_int_equal(bl_matmul_spare_multiprocessors(f->gpu.device, 8), BL_EINTERNAL);
    assert_int_equal(bl_matmul_spare_multiprocessors(f->gpu.device, 132), BL_ELIMIT);
    runs_renew_gpu(f);
    outputs all = runs_shape(f, &runs_row_shape, 0, BL_MATMUL_FP8);
    assert_int_equal(emulated_cublaslt_multiprocessors(), 0);
    runs_free(&some), runs_free(&all);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, runs_setup, runs_teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_fallbacks_are_counted),
        TEST(test_sums_that_are_refused_go_the_other_way_round),
        TEST(test_calls_that_are_refused_fall_back),
        TEST(test_refusals_at_random),
        TEST(test_other_statuses_are_errors),
        TEST(test_the_next_algorithm_is_taken),
        TEST(test_multiprocessors_are_spared),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
