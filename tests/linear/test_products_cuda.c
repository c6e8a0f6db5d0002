/* SPDX-License-Identifier: Apache-2.0 */
/* The linear layer around its products on CUDA, on the emulated GPU: plans are reused, wide
 * products are split, and a frozen matrix is prepared once. */
#include "layer_runs.h"
#include "emulator/emulated.h"

#include <cublasLt.h>
#include <sys/mman.h>

#include "base/sizes.h"
#include "fp8/cuda/fp8_cuda.h"
#include "ops/cuda/gemm_cuda.h"
#include "ops/cuda/matmul_plan.h"
#include "ops/cuda/ops_cuda.h"
#include "ops/cuda/plan_cache.h"

/* ---- plans ---- */

/* A product of n columns; pointers are not looked at. */
static ops_gemm gemm_of(int64_t n)
{
    void *somewhere = (void *)(uintptr_t)256;
    return (ops_gemm){.kind = OPS_GEMM_BF16,
                      .d_type = BL_BF16,
                      .m = 64,
                      .n = n,
                      .k = 32,
                      .lda = 64,
                      .ldb = 32,
                      .ldd = 64,
                      .a = somewhere,
                      .b = somewhere,
                      .d = somewhere};
}

/* Searches for algorithms that asking for n columns takes. */
static int searches(fixture *f, int64_t n)
{
    ops_gemm gemm = gemm_of(n);
    int before = emulated_cublaslt_heuristics();
    bool is_served;
    check_status(ops_cuda_gemm_is_served(f->gpu.stream, &gemm, &is_served));
    assert_true(is_served);
    return emulated_cublaslt_heuristics() - before;
}

static void test_plans_are_found_again(void **state)
{
    enum { SHAPES = 50 * 64 }; /* products of a step, numbers of tokens */
    fixture *f = *state;

    for (int n = 1; n <= SHAPES; n++) assert_int_equal(searches(f, n), 1);
    for (int round = 0; round < 2; round++)
        for (int n = 1; n <= SHAPES; n++) assert_int_equal(searches(f, n), 0);
}

static void test_the_oldest_plan_goes(void **state)
{
    fixture *f = *state;

    for (int n = 1; n <= OPS_PLAN_CACHE_MAX; n++) searches(f, n);
    assert_int_equal(searches(f, 1), 0); /* in use */
    assert_int_equal(searches(f, OPS_PLAN_CACHE_MAX + 1), 1);
    assert_int_equal(searches(f, 1), 0);
    for (int n = 3; n <= OPS_PLAN_CACHE_MAX; n++) assert_int_equal(searches(f, n), 0);
    assert_int_equal(searches(f, 2), 1);
}

static void test_a_failed_plan_hides_no_other(void **state)
{
    fixture *f = *state;
    ops_gemm gemm = gemm_of(100);
    bool is_served;

    for (int n = 1; n < 10; n++) searches(f, n);
    emulated_cublaslt_fail_heuristics(1);
    assert_int_equal(ops_cuda_gemm_is_served(f->gpu.stream, &gemm, &is_served), BL_ENOMEM);
    for (int n = 10; n < 20; n++) assert_int_equal(searches(f, n), 1);
    for (int n = 1; n < 20; n++) assert_int_equal(searches(f, n), 0);
    assert_int_equal(searches(f, 100), 1);
}

/* Where a matrix happens to be stored does not choose the algorithm. */
static void test_plans_look_at_16_bytes_of_alignment(void **state)
{
    fixture *f = *state;
    ops_gemm gemm = gemm_of(8);
    bool is_served;

    searches(f, 8);
    int before = emulated_cublaslt_heuristics();
    gemm.a = (void *)(uintptr_t)(256 + 16);
    check_status(ops_cuda_gemm_is_served(f->gpu.stream, &gemm, &is_served));
    assert_int_equal(emulated_cublaslt_heuristics(), before);
    gemm.a = (void *)(uintptr_t)(256 + 8);
    check_status(ops_cuda_gemm_is_served(f->gpu.stream, &gemm, &is_served));
    assert_int_equal(emulated_cublaslt_heuristics(), before + 1);
}

/* ---- splits ---- */

static void test_pieces_stay_below_2_31_elements(void **state)
{
    static const int64_t widths[] = {1, 172, 16384, 106496, INT64_C(1) << 26, INT64_C(1) << 40},
                         tokens[] = {1, 127, 128, 20164, 20165, 20166, 65536, INT64_C(1) << 22};
    (void)state;
    for (size_t w = 0; w < BL_COUNT(widths); w++)
        for (size_t t = 0; t < BL_COUNT(tokens); t++) {
            int64_t n = tokens[t], piece = ops_matmul_plan_piece(n, widths[w]);
            bool fits = widths[w] <= INT32_MAX / n;
            assert_true(piece >= 1 && piece <= n);
            assert_true(fits == (piece == n) || n == 1);
            if (widths[w] < INT32_MAX) assert_true(piece * widths[w] <= INT32_MAX);
            if (!fits && widths[w] <= 16777215) assert_int_equal(piece % 128, 0);
        }
    /* 405B's gate_up */
    assert_int_equal(ops_matmul_plan_piece(20164, 106496), 20164);
    assert_int_equal(ops_matmul_plan_piece(20165, 106496), 157 * 128);
}

/* Small whole numbers: sums are exact in any order. */
static float whole(int64_t i)
{
    return (float)(i * 7 % 5 - 2);
}

/* C (M,N) = A (M,K) B^T or A^T B with rows of A and C so far apart that 300 of them span 2^31
 * elements. Memory that is reserved, not taken. */
static void check_wide_product(fixture *f, bool transpose_a)
{
    enum { TOKENS = 300, N = 8, K = 16 };
    const int64_t ld = INT64_C(1) << 23;
    size_t bytes = (size_t)ld * TOKENS * 2;
    uint16_t *wide[2];
    uint16_t b[N * K];
    float sums[N * K];
    int before = emulated_cublaslt_products();

    for (int i = 0; i < 2; i++) {
        wide[i] = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        assert_true(wide[i] != MAP_FAILED);
        for (int64_t t = 0; t < TOKENS; t++)
            for (int k = 0; k < K; k++) wide[i][t * ld + k] = bl_f32_to_bf16(whole(t + k + i));
    }
    for (int i = 0; i < N * K; i++) b[i] = bl_f32_to_bf16(whole(3 * i));
    bl_matmul_args args = {.transpose_a = transpose_a,
                           .transpose_b = !transpose_a,
                           .M = transpose_a ? K : TOKENS,
                           .N = N,
                           .K = transpose_a ? TOKENS : K,
                           .lda = ld,
                           .ldb = transpose_a ? ld : K,
                           .ldc = transpose_a ? N : ld,
                           .alpha = 1,
                           .a = bl_tensor_of(wide[0], BL_BF16),
                           .b = bl_tensor_of(transpose_a ? (void *)wide[1] : b, BL_BF16),
                           .c = transpose_a ? bl_tensor_f32(sums) : bl_tensor_of(wide[1], BL_BF16)};
    check_status(bl_matmul(f->gpu.stream, &args));
    test_finish(f->gpu);
    assert_int_equal(emulated_cublaslt_products() - before, 3); /* of 128 */
    for (int64_t i = 0; i < args.M; i++)
        for (int64_t j = 0; j < N; j++) {
            float want = 0;
            for (int64_t k = 0; k < args.K; k++)
                want += transpose_a ? whole(k + i) * whole(k + j + 1)
                                    : whole(i + k) * whole(3 * (j * K + k));
            float got = transpose_a ? sums[i * N + j] : bl_bf16_to_f32(wide[1][i * ld + j]);
            assert_true(got == want);
        }
    for (int i = 0; i < 2; i++) munmap(wide[i], bytes);
}

static void test_wide_products_are_split(void **state)
{
    check_wide_product(*state, false);
    check_wide_product(*state, true);
}

/* C (M,N) = A (M,K) B^T, exact in any order of the sums; whether its sums were in parts. */
static bool is_split(fixture *f, int64_t M, int64_t N, int64_t K, size_t scratch_bytes)
{
    side s = {.d = f->gpu, .is_cuda = true};
    uint16_t *a = test_alloc(M * K, sizeof *a), *b = test_alloc(N * K, sizeof *b);
    int before = emulated_cublaslt_split_products();

    for (int64_t i = 0; i < M * K; i++) a[i] = bl_f32_to_bf16(whole(i + i / K));
    for (int64_t i = 0; i < N * K; i++) b[i] = bl_f32_to_bf16(whole(3 * i));
    bl_matmul_args args = {
        .transpose_b = true,
        .M = M,
        .N = N,
        .K = K,
        .lda = K,
        .ldb = K,
        .ldc = N,
        .alpha = 1,
        .a = bl_tensor_of(side_memory(&s, a, (size_t)(M * K) * sizeof *a), BL_BF16),
        .b = bl_tensor_of(side_memory(&s, b, (size_t)(N * K) * sizeof *b), BL_BF16),
        .c = bl_tensor_f32(side_memory(&s, NULL, (size_t)(M * N) * sizeof(float))),
        .scratch = scratch_bytes > 0 ? side_memory(&s, NULL, scratch_bytes) : NULL,
        .scratch_bytes = scratch_bytes};
    check_status(bl_matmul(f->gpu.stream, &args));
    test_finish(f->gpu);
    double *c = side_fetch(&s, args.c.data, M * N, false);
    for (int64_t i = 0; i < M; i += 7)
        for (int64_t j = 0; j < N; j++) {
            double want = 0;
            for (int64_t k = 0; k < K; k++)
                want += (double)whole(i * K + k + i) * (double)whole(3 * (j * K + k));
            assert_true(c[i * N + j] == want);
        }
    free(a), free(b), free(c);
    side_destroy(&s);
    return emulated_cublaslt_split_products() > before;
}

/* Those of few tiles and long sums; with room for the parts. */
static void test_skinny_products_split_their_sums(void **state)
{
    enum { ROOM = 1 << 20 };
    (void)state;
    assert_true(is_split(*state, 256, 16, 4096, ROOM));
    assert_false(is_split(*state, 256, 16, 4096, 0));
    assert_false(is_split(*state, 256, 16, 4096, 1024));
    assert_false(is_split(*state, 256, 16, 2047, ROOM));
    assert_false(is_split(*state, 67 * 128, 1, 2048, ROOM)); /* tiles for half of the GPU */
}

/* Those of a layer: u, forward and backward. dy B has a sum of 32 terms; dA and dB, of 8. */
static void test_a_layer_splits_its_skinny_sums(void **state)
{
    static const layer_shape wide = {
        "wide", true, 8, 2048, 1, {{BL_FORMAT_FP8_ROW, 32}}, 1, {{8, 0, 32, 0.5f}}, false};
    fixture *f = *state;
    side s = side_create(f->gpu, bl_device_pool(f->cpu.device), &wide, 0.0f, BL_MATMUL_FP8);
    int before = emulated_cublaslt_split_products();

    side_run(&s, wide.T);
    assert_int_equal(emulated_cublaslt_split_products() - before, 2);
    side_destroy(&s);
}

/* ---- inputs that are in E4M3 already ---- */

static double *forward_y(side *s, const layer_shape *l)
{
    check_status(bl_lora_linear_forward(s->d.stream, &s->linear, l->T, s->x, s->y));
    test_finish(s->d);
    return side_fetch(s, s->y.data, l->T * s->linear.weight.rows, true);
}

/* x's codes to where the layer reads them. */
static void quantize_x(side *s, const layer_shape *l)
{
    bl_quantized to = bl_lora_linear_operand(BL_DEVICE_CUDA, BL_BF16, &s->linear, l->T);
    assert_non_null(to.codes);
    check_status(fp8_cuda_quantize_rows(s->d.stream, s->x.data, l->K, NULL, l->T, l->K, to.codes,
                                        to.scales));
}

static void test_refused_products_read_x(void **state)
{
    const layer_shape *l = &runs_row_shape;
    fixture *f = *state;
    side s = side_create(f->gpu, bl_device_pool(f->cpu.device), l, 0.0f, BL_MATMUL_FP8);

    emulated_cublaslt_refuse_fp8(true);
    double *bf16 = forward_y(&s, l);
    s.linear.is_quantized = true;
    quantize_x(&s, l);
    double *given = forward_y(&s, l);
    emulated_cublaslt_refuse_fp8(false);
    assert_memory_equal(given, bf16, (size_t)(l->T * s.linear.weight.rows) * sizeof *bf16);
    free(bf16), free(given);
    side_destroy(&s);
}

/* The layer's bits are the same, whichever op quantizes, and a layer that is given codes reads
 * them. */
static void test_codes_may_be_there_already(void **state)
{
    const layer_shape *l = &runs_row_shape;
    fixture *f = *state;
    side s = side_create(f->gpu, bl_device_pool(f->cpu.device), l, 0.3f, BL_MATMUL_FP8);
    size_t bytes = (size_t)(l->T * s.linear.weight.rows) * sizeof(double);
    double *own = forward_y(&s, l);

    s.linear.is_quantized = true;
    quantize_x(&s, l);
    double *given = forward_y(&s, l);
    assert_memory_equal(given, own, bytes);

    bl_quantized at = bl_lora_linear_operand(BL_DEVICE_CUDA, BL_BF16, &s.linear, l->T);
    check_status(bl_stream_zero(s.d.stream, at.codes, (size_t)(l->T * l->K)));
    double *other = forward_y(&s, l);
    assert_memory_not_equal(other, own, bytes);

    free(own), free(given), free(other);
    side_destroy(&s);
}

static bl_quantized operand_of(side *s, int64_t T, bl_dtype act, bl_device_kind kind)
{
    return bl_lora_linear_operand(kind, act, &s->linear, T);
}

/* Products that do not quantize whole rows have no memory for codes. */
static void test_no_place_for_codes(void **state)
{
    fixture *f = *state;
    side row =
             side_create(f->gpu, bl_device_pool(f->cpu.device), &runs_row_shape, 0, BL_MATMUL_FP8),
         block = side_create(f->gpu, bl_device_pool(f->cpu.device), &runs_block_shape, 0,
                             BL_MATMUL_FP8);
    int64_t T = runs_row_shape.T;

    assert_non_null(operand_of(&row, T, BL_BF16, BL_DEVICE_CUDA).codes);
    assert_null(operand_of(&row, 0, BL_BF16, BL_DEVICE_CUDA).codes);
    assert_null(operand_of(&row, T, BL_F32, BL_DEVICE_CPU).codes);
    assert_null(operand_of(&block, T, BL_BF16, BL_DEVICE_CUDA).codes);
    row.linear.mode = BL_MATMUL_BF16;
    assert_null(operand_of(&row, T, BL_BF16, BL_DEVICE_CUDA).codes);
    row.linear.mode = BL_MATMUL_FP8;
    row.linear.workspace_bytes -= 256; /* too small for the product, too */
    assert_null(operand_of(&row, T, BL_BF16, BL_DEVICE_CUDA).codes);
    side_destroy(&row);
    side_destroy(&block);
}

/* With a frozen matrix, in pieces: the bits of the same tokens alone. */
static void test_pieces_are_products_of_their_tokens(void **state)
{
    enum { PIECE = 16 };
    fixture *f = *state;
    for (int mode = BL_MATMUL_BF16; mode <= BL_MATMUL_FP8; mode++)
        for (int shape = 0; shape < 2; shape++)
            for (int forward = 0; forward < 2; forward++) {
                const layer_shape *l = shape ? &runs_block_shape : &runs_row_shape;
                side s = side_create(f->gpu, bl_device_pool(f->cpu.device), l, 0.0f,
                                     (bl_matmul_mode)mode);
                int64_t N = s.linear.weight.rows, inner = forward ? l->K : N,
                        outer = forward ? N : l->K;
                bl_matmul_weight_args args = {.forward = forward,
                                              .mode = (bl_matmul_mode)mode,
                                              .beta = 1,
                                              .T = l->T,
                                              .in = forward ? s.x : s.dy,
                                              .out = forward ? s.y : s.dx,
                                              .weight = s.linear.weight,
                                              .scratch = s.linear.workspace,
                                              .scratch_bytes = s.linear.workspace_bytes};
                double *before = side_fetch(&s, args.out.data, l->T * outer, true);
                uint16_t *start = test_alloc(l->T * outer, sizeof *start);
                for (int64_t i = 0; i < l->T * outer; i++)
                    start[i] = bl_f32_to_bf16((float)before[i]);
                check_status(ops_cuda_matmul_weight_in_pieces(s.d.stream, &args, PIECE));
                test_finish(s.d);
                double *pieces = side_fetch(&s, args.out.data, l->T * outer, true);
                test_write(s.d, args.out.data, start, (size_t)(l->T * outer) * sizeof *start);
                for (int64_t t = 0; t < l->T; t += PIECE) {
                    bl_matmul_weight_args one = args;
                    one.T = bl_min_i64(PIECE, l->T - t);
                    one.in = bl_tensor_at(args.in, t * inner);
                    one.out = bl_tensor_at(args.out, t * outer);
                    check_status(bl_matmul_weight(s.d.stream, &one));
                }
                test_finish(s.d);
                double *alone = side_fetch(&s, args.out.data, l->T * outer, true);
                assert_memory_equal(pieces, alone, (size_t)(l->T * outer) * sizeof *alone);
                assert_memory_not_equal(pieces, before, (size_t)(l->T * outer) * sizeof *alone);
                free(before), free(start), free(pieces), free(alone);
                side_destroy(&s);
            }
}

/* ---- prepared ---- */

static size_t prepared_bytes(const side *s)
{
    bl_matmul_weight_args args = {.mode = s->linear.mode, .weight = s->linear.weight};
    return bl_matmul_prepared_bytes(BL_DEVICE_CUDA, &args);
}

/* Erases codes and scales: later products must use the prepared matrix. (FP8 forward multiplies the
 * codes as they are, so its codes stay.) */
static void spoil_weight(side *s, bool codes)
{
    bl_weight *w = &s->linear.weight;
    for (int i = 0; i < w->n_segments; i++) {
        bl_weight_segment *segment = &w->segment[i];
        size_t bytes, n_scales;
        assert_true(bl_format_sizes(segment->format, segment->rows, w->cols, &bytes, &n_scales));
        if (codes) check_status(bl_stream_zero(s->d.stream, (void *)segment->codes, bytes));
        check_status(
            bl_stream_zero(s->d.stream, (void *)segment->scales, n_scales * sizeof(float)));
    }
    test_finish(s->d);
}

static void test_prepared_is_made_once(void **state)
{
    fixture *f = *state;
    for (int mode = BL_MATMUL_BF16; mode <= BL_MATMUL_FP8; mode++)
        for (int shape = 0; shape < 2; shape++) {
            const layer_shape *l = shape ? &runs_block_shape : &runs_row_shape;
            side s =
                side_create(f->gpu, bl_device_pool(f->cpu.device), l, 0.3f, (bl_matmul_mode)mode);
            size_t without = s.linear.workspace_bytes;
            outputs want = runs_layer(&s, l);
            bl_matmul_prepared prepared = {.memory_bytes = prepared_bytes(&s)};
            assert_true(prepared.memory_bytes > 0);
            prepared.memory = side_memory(&s, NULL, prepared.memory_bytes);
            s.linear.prepared = &prepared;
            side_take_workspace(&s, l->T);
            if (mode == BL_MATMUL_BF16)
                assert_int_equal(without - s.linear.workspace_bytes, prepared.memory_bytes);
            outputs first = runs_layer(&s, l);
            assert_true(runs_are_same(&first, &want) && prepared.made != 0);
            spoil_weight(&s, mode == BL_MATMUL_BF16);
            outputs second = runs_layer(&s, l);
            assert_true(runs_are_same(&second, &want));
            prepared.made = 0;
            outputs spoilt = runs_layer(&s, l);
            assert_false(runs_are_same(&spoilt, &want));
            runs_free(&want), runs_free(&first), runs_free(&second), runs_free(&spoilt);
            side_destroy(&s);
        }
}

/* FP8 that is refused is dequantized in scratch when prepared memory is for codes, and there when
 * it is large enough; with too little it is not touched. */
static void test_prepared_of_any_size_gives_the_same_bits(void **state)
{
    fixture *f = *state;
    const layer_shape *l = &runs_row_shape;
    for (int refused = 0; refused < 2; refused++) {
        side s = side_create(f->gpu, bl_device_pool(f->cpu.device), l, 0.0f, BL_MATMUL_FP8);
        emulated_cublaslt_refuse_fp8(refused);
        outputs want = runs_layer(&s, l);
        size_t codes = prepared_bytes(&s), dense = (size_t)(s.linear.weight.rows * l->K * 2),
               sizes[] = {0, codes - 1, codes, dense + 512};
        for (size_t i = 0; i < BL_COUNT(sizes); i++) {
            bl_matmul_prepared prepared = {.memory_bytes = sizes[i]};
            prepared.memory = side_memory(&s, NULL, sizes[i] + 1);
            s.linear.prepared = &prepared;
            side_take_workspace(&s, l->T);
            outputs got = runs_layer(&s, l);
            assert_true(runs_are_same(&got, &want));
            bool is_used = refused ? sizes[i] >= dense : sizes[i] >= codes;
            assert_true(is_used == (prepared.made != 0));
            runs_free(&got);
        }
        runs_free(&want);
        side_destroy(&s);
        emulated_cublaslt_refuse_fp8(false);
        runs_renew_gpu(f);
    }
}

/* Products of one shape in FP8 and of another in bf16 share memory: neither takes the other's for
 * its own. */
static void test_kinds_take_turns_in_prepared_memory(void **state)
{
    fixture *f = *state;
    const layer_shape *l = &runs_block_shape;
    side s = side_create(f->gpu, bl_device_pool(f->cpu.device), l, 0.0f, BL_MATMUL_FP8);
    layer_shape odd = *l;
    odd.T = 66; /* not a multiple of 4: bf16 */
    outputs want = runs_layer(&s, l), want_odd = runs_layer(&s, &odd);
    bl_matmul_prepared prepared = {.memory_bytes =
                                       (size_t)(s.linear.weight.rows * l->K * 2) + 4096};
    prepared.memory = side_memory(&s, NULL, prepared.memory_bytes);
    s.linear.prepared = &prepared;
    side_take_workspace(&s, l->T);
    for (int i = 0; i < 2; i++) {
        outputs got = runs_layer(&s, l), got_odd = runs_layer(&s, &odd);
        assert_true(runs_are_same(&got, &want) && runs_are_same(&got_odd, &want_odd));
        runs_free(&got), runs_free(&got_odd);
    }
    runs_free(&want), runs_free(&want_odd);
    side_destroy(&s);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, runs_setup, runs_teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_plans_are_found_again),
        TEST(test_the_oldest_plan_goes),
        TEST(test_a_failed_plan_hides_no_other),
        TEST(test_plans_look_at_16_bytes_of_alignment),
        TEST(test_pieces_stay_below_2_31_elements),
        TEST(test_wide_products_are_split),
        TEST(test_skinny_products_split_their_sums),
        TEST(test_a_layer_splits_its_skinny_sums),
        TEST(test_codes_may_be_there_already),
        TEST(test_refused_products_read_x),
        TEST(test_no_place_for_codes),
        TEST(test_pieces_are_products_of_their_tokens),
        TEST(test_prepared_is_made_once),
        TEST(test_prepared_of_any_size_gives_the_same_bits),
        TEST(test_kinds_take_turns_in_prepared_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
