/* SPDX-License-Identifier: Apache-2.0 */
/* The linear layer around its products on CUDA, on the emulated GPU: plans are reused, wide
 * products are split, a frozen matrix is prepared once, and FP8 products that cuBLASLt rejects are
 * replaced in the right order and counted. */
#include "cuda_side.h"
#include "emulator/emulated.h"

#include <cublasLt.h>
#include <sys/mman.h>

#include "base/sizes.h"
#include "ops/cuda/gemm_cuda.h"
#include "ops/cuda/matmul_plan.h"
#include "ops/cuda/ops_cuda.h"
#include "ops/cuda/plan_cache.h"

enum { N_OUTPUTS = 2 + 2 * MAX_PARTS };

static const layer_shape row_shape = {
    "q|k|v in fp8_row",
    true,
    40,
    272,
    3,
    {{BL_FORMAT_FP8_ROW, 128}, {BL_FORMAT_FP8_ROW, 32}, {BL_FORMAT_FP8_ROW, 32}},
    3,
    {{16, 0, 128, 0.5f}, {3, 128, 32, 0.5f}, {8, 160, 32, 0.125f}},
    true};
static const layer_shape block_shape = {"gate|up in fp8_block",
                                        true,
                                        68,
                                        400,
                                        2,
                                        {{BL_FORMAT_FP8_BLOCK, 256}, {BL_FORMAT_FP8_BLOCK, 144}},
                                        2,
                                        {{17, 0, 256, 0.25f}, {5, 256, 144, 0.5f}},
                                        false};

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

/* Plans remember rejections permanently. */
static void renew_gpu(fixture *f)
{
    test_device_destroy(f->gpu);
    check_status(bl_device_create_cuda(0, &f->gpu.device));
    check_status(bl_stream_create(f->gpu.device, "test", &f->gpu.stream));
}

static int teardown(void **state)
{
    fixture *f = *state;
    test_device_destroy(f->cpu);
    test_device_destroy(f->gpu);
    free(f);
    return 0;
}

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

/* With a frozen matrix, in pieces: the bits of the same tokens alone. */
static void test_pieces_are_products_of_their_tokens(void **state)
{
    enum { PIECE = 16 };
    fixture *f = *state;
    for (int mode = BL_MATMUL_BF16; mode <= BL_MATMUL_FP8; mode++)
        for (int shape = 0; shape < 2; shape++)
            for (int forward = 0; forward < 2; forward++) {
                const layer_shape *l = shape ? &block_shape : &row_shape;
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

typedef struct outputs {
    double *value[N_OUTPUTS];
    int64_t n[N_OUTPUTS];
} outputs;

static outputs run_layer(side *s, const layer_shape *l)
{
    outputs out = {.n = {l->T * s->linear.weight.rows, l->T * l->K}};
    side_run(s, l->T);
    out.value[0] = side_fetch(s, s->y.data, out.n[0], true);
    out.value[1] = side_fetch(s, s->dx.data, out.n[1], true);
    for (int p = 0; p < s->linear.n_parts; p++) {
        const bl_lora_part *part = &s->linear.part[p];
        out.n[2 + 2 * p] = part->r * l->K;
        out.n[3 + 2 * p] = part->rows * part->r;
        out.value[2 + 2 * p] = side_fetch(s, part->dA, out.n[2 + 2 * p], false);
        out.value[3 + 2 * p] = side_fetch(s, part->dB, out.n[3 + 2 * p], false);
    }
    return out;
}

static bool same(const outputs *a, const outputs *b)
{
    bool is_same = true;
    for (int i = 0; i < N_OUTPUTS; i++)
        is_same = is_same && (a->n[i] == 0 || memcmp(a->value[i], b->value[i],
                                                     (size_t)a->n[i] * sizeof(double)) == 0);
    return is_same;
}

static void free_outputs(outputs *o)
{
    for (int i = 0; i < N_OUTPUTS; i++) free(o->value[i]);
}

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
            const layer_shape *l = shape ? &block_shape : &row_shape;
            side s =
                side_create(f->gpu, bl_device_pool(f->cpu.device), l, 0.3f, (bl_matmul_mode)mode);
            size_t without = s.linear.workspace_bytes;
            outputs want = run_layer(&s, l);
            bl_matmul_prepared prepared = {.memory_bytes = prepared_bytes(&s)};
            assert_true(prepared.memory_bytes > 0);
            prepared.memory = side_memory(&s, NULL, prepared.memory_bytes);
            s.linear.prepared = &prepared;
            side_take_workspace(&s, l->T);
            if (mode == BL_MATMUL_BF16)
                assert_int_equal(without - s.linear.workspace_bytes, prepared.memory_bytes);
            outputs first = run_layer(&s, l);
            assert_true(same(&first, &want) && prepared.made != 0);
            spoil_weight(&s, mode == BL_MATMUL_BF16);
            outputs second = run_layer(&s, l);
            assert_true(same(&second, &want));
            prepared.made = 0;
            outputs spoilt = run_layer(&s, l);
            assert_false(same(&spoilt, &want));
            free_outputs(&want), free_outputs(&first), free_outputs(&second), free_outputs(&spoilt);
            side_destroy(&s);
        }
}

/* FP8 that is refused is dequantized in scratch when prepared memory is for codes, and there when
 * it is large enough; with too little it is not touched. */
static void test_prepared_of_any_size_gives_the_same_bits(void **state)
{
    fixture *f = *state;
    const layer_shape *l = &row_shape;
    for (int refused = 0; refused < 2; refused++) {
        side s = side_create(f->gpu, bl_device_pool(f->cpu.device), l, 0.0f, BL_MATMUL_FP8);
        emulated_cublaslt_refuse_fp8(refused);
        outputs want = run_layer(&s, l);
        size_t codes = prepared_bytes(&s), dense = (size_t)(s.linear.weight.rows * l->K * 2),
               sizes[] = {0, codes - 1, codes, dense + 512};
        for (size_t i = 0; i < BL_COUNT(sizes); i++) {
            bl_matmul_prepared prepared = {.memory_bytes = sizes[i]};
            prepared.memory = side_memory(&s, NULL, sizes[i] + 1);
            s.linear.prepared = &prepared;
            side_take_workspace(&s, l->T);
            outputs got = run_layer(&s, l);
            assert_true(same(&got, &want));
            bool is_used = refused ? sizes[i] >= dense : sizes[i] >= codes;
            assert_true(is_used == (prepared.made != 0));
            free_outputs(&got);
        }
        free_outputs(&want);
        side_destroy(&s);
        emulated_cublaslt_refuse_fp8(false);
        renew_gpu(f);
    }
}

/* Products of one shape in FP8 and of another in bf16 share memory: neither takes the other's for
 * its own. */
static void test_kinds_take_turns_in_prepared_memory(void **state)
{
    fixture *f = *state;
    const layer_shape *l = &block_shape;
    side s = side_create(f->gpu, bl_device_pool(f->cpu.device), l, 0.0f, BL_MATMUL_FP8);
    layer_shape odd = *l;
    odd.T = 66; /* not a multiple of 4: bf16 */
    outputs want = run_layer(&s, l), want_odd = run_layer(&s, &odd);
    bl_matmul_prepared prepared = {.memory_bytes =
                                       (size_t)(s.linear.weight.rows * l->K * 2) + 4096};
    prepared.memory = side_memory(&s, NULL, prepared.memory_bytes);
    s.linear.prepared = &prepared;
    side_take_workspace(&s, l->T);
    for (int i = 0; i < 2; i++) {
        outputs got = run_layer(&s, l), got_odd = run_layer(&s, &odd);
        assert_true(same(&got, &want) && same(&got_odd, &want_odd));
        free_outputs(&got), free_outputs(&got_odd);
    }
    free_outputs(&want), free_outputs(&want_odd);
    side_destroy(&s);
}

/* ---- fallbacks ---- */

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

static outputs run_shape(fixture *f, const layer_shape *l, float dropout, bl_matmul_mode mode)
{
    side s = side_create(f->gpu, bl_device_pool(f->cpu.device), l, dropout, mode);
    outputs out = run_layer(&s, l);
    side_destroy(&s);
    return out;
}

static void test_fallbacks_are_counted(void **state)
{
    fixture *f = *state;
    layer_shape dense = row_shape, odd = row_shape, few = block_shape;
    outputs out;

    for (int i = 0; i < 3; i++) dense.segment[i].format = BL_FORMAT_BF16;
    odd.K = 51;
    few.T = 66;
    check_counts(f, 0, 0, 0, 0);
    out = run_shape(f, &row_shape, 0, BL_MATMUL_FP8), free_outputs(&out);
    out = run_shape(f, &odd, 0, BL_MATMUL_BF16), free_outputs(&out);
    check_counts(f, 0, 0, 0, 0);
    out = run_shape(f, &dense, 0, BL_MATMUL_FP8), free_outputs(&out); /* y and dx */
    check_counts(f, 2, 0, 0, 0);
    out = run_shape(f, &odd, 0, BL_MATMUL_FP8), free_outputs(&out);
    out = run_shape(f, &few, 0, BL_MATMUL_FP8), free_outputs(&out);
    check_counts(f, 2, 4, 0, 0);
    emulated_cublaslt_refuse_fp8(true);
    layer_shape other = row_shape;
    other.T = 48; /* not asked for yet */
    outputs refused = run_shape(f, &other, 0.3f, BL_MATMUL_FP8),
            want = run_shape(f, &other, 0.3f, BL_MATMUL_BF16);
    emulated_cublaslt_refuse_fp8(false);
    check_counts(f, 2, 4, 0, 2);
    assert_true(same(&refused, &want));
    free_outputs(&refused), free_outputs(&want);
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
            const layer_shape *l = shape ? &block_shape : &row_shape;
            float dropout = drops ? 0.3f : 0.0f;
            side s = side_create(f->gpu, bl_device_pool(f->cpu.device), l, dropout, BL_MATMUL_FP8);
            outputs normal = run_layer(&s, l);
            test_finish(s.d);
            emulated_cublaslt_refuse_fp8_sums(true);
            int before = emulated_cublaslt_fp8_products();
            outputs first = run_layer(&s, l), second = run_layer(&s, l);
            assert_int_equal(emulated_cublaslt_fp8_products() - before, 4);
            emulated_cublaslt_refuse_fp8_sums(false);
            outputs later = run_layer(&s, l); /* a rejection is permanent */
            check_counts(f, 0, 0, 0, 0);
            assert_true(same(&first, &second) && same(&first, &later));
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
            free_outputs(&normal), free_outputs(&first), free_outputs(&second);
            free_outputs(&later);
            side_destroy(&s);
            renew_gpu(f);
        }
}

/* Then bf16, with the LoRA terms first, whichever status says so. */
static void test_calls_that_are_refused_fall_back(void **state)
{
    static const int statuses[] = {CUBLAS_STATUS_NOT_SUPPORTED, CUBLAS_STATUS_INVALID_VALUE,
                                   CUBLAS_STATUS_ARCH_MISMATCH, CUBLAS_STATUS_INTERNAL_ERROR};
    fixture *f = *state;
    outputs want = run_shape(f, &row_shape, 0.3f, BL_MATMUL_BF16);

    for (size_t i = 0; i < BL_COUNT(statuses); i++) {
        side s =
            side_create(f->gpu, bl_device_pool(f->cpu.device), &row_shape, 0.3f, BL_MATMUL_FP8);
        emulated_cublaslt_refuse_fp8_calls(statuses[i]);
        outputs first = run_layer(&s, &row_shape), second = run_layer(&s, &row_shape);
        emulated_cublaslt_refuse_fp8_calls(CUBLAS_STATUS_SUCCESS);
        assert_true(same(&first, &want) && same(&second, &want));
        check_counts(f, 0, 0, 0, 4);
        free_outputs(&first), free_outputs(&second);
        side_destroy(&s);
        renew_gpu(f);
    }
    free_outputs(&want);
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
        side s = side_create(f->gpu, bl_device_pool(f->cpu.device), &row_shape, 0, BL_MATMUL_FP8);
        if (cases[i].has_run) side_run(&s, row_shape.T);
        emulated_cublaslt_refuse_fp8_calls(cases[i].status);
        assert_int_equal(bl_lora_linear_forward(s.d.stream, &s.linear, row_shape.T, s.x, s.y),
                         cases[i].want);
        emulated_cublaslt_refuse_fp8_calls(CUBLAS_STATUS_SUCCESS);
        check_counts(f, 0, 0, 0, 0);
        test_finish(s.d);
        side_destroy(&s);
        renew_gpu(f);
    }
}

/* The next algorithm takes the place of one that is refused when it is called. */
static void test_the_next_algorithm_is_taken(void **state)
{
    fixture *f = *state;
    emulated_cublaslt_refuse_candidates(1);
    outputs first = run_shape(f, &row_shape, 0, BL_MATMUL_FP8);
    assert_int_equal(emulated_cublaslt_last_candidate(), 2);
    emulated_cublaslt_refuse_candidates(0);
    outputs second = run_shape(f, &row_shape, 0, BL_MATMUL_FP8);
    assert_int_equal(emulated_cublaslt_last_candidate(), 2);
    assert_true(same(&first, &second));
    check_counts(f, 0, 0, 0, 0);
    free_outputs(&first), free_outputs(&second);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_plans_are_found_again),
        TEST(test_the_oldest_plan_goes),
        TEST(test_a_failed_plan_hides_no_other),
        TEST(test_plans_look_at_16_bytes_of_alignment),
        TEST(test_pieces_stay_below_2_31_elements),
        TEST(test_wide_products_are_split),
        TEST(test_pieces_are_products_of_their_tokens),
        TEST(test_prepared_is_made_once),
        TEST(test_prepared_of_any_size_gives_the_same_bits),
        TEST(test_kinds_take_turns_in_prepared_memory),
        TEST(test_fallbacks_are_counted),
        TEST(test_sums_that_are_refused_go_the_other_way_round),
        TEST(test_calls_that_are_refused_fall_back),
        TEST(test_other_statuses_are_errors),
        TEST(test_the_next_algorithm_is_taken),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
