/* SPDX-License-Identifier: Apache-2.0 */
/* gpu_test.h -- shared by the tests of CUDA's kernels: two devices, buffers with guards, repeated
 * launches.
 *
 * A kernel runs twice on outputs that were poisoned before each run. Both runs must give the same
 * bits, the guards around the buffers must be untouched, and the result must be the CPU op's on the
 * same numbers: exactly, where the arithmetic is shared (element.h), else within the bound that the
 * test derives. Inputs are numbers that bf16 holds, so that both devices begin with the same. u =
 * 2^-24 is fp32's rounding error, 2^-8 bf16's. */
#ifndef BALLAST_TESTS_GPU_TEST_H
#define BALLAST_TESTS_GPU_TEST_H

#include "../ops/ops_test.h"

#include "base/dtype.h"
#include "ops/ops.h"

#ifdef BALLAST_CUDA_EMULATED
#include "emulator/emulated.h"
#endif

enum { SKIPPED = 77, GUARD_BYTES = 64, POISON = 0xff, TILE = 128 };

static const double BF16 = 1.0 / 256.0;

#ifdef BALLAST_CUDA_EMULATED
/* Rows that end within a sector cost up to a fifth at these shapes; a warp whose threads leave gaps
 * costs half. */
static const double LEAST_SHARE_OF_SECTORS = 0.78;
#endif

/* In elements; `shift` of them are between an aligned address and each buffer's first. */
typedef struct shape {
    int64_t rows, cols;
    int shift;
} shape;

typedef struct gpu_test {
    test_device cpu, gpu;
} gpu_test;

/* `initial`, `result`: host copies of the buffer before and after a run. Kernels get `gpu`. */
typedef struct buffer {
    size_t bytes, shift_bytes;
    unsigned char *initial, *result;
    char *memory, *gpu;
} buffer;

static inline void gpu_ok(bl_status status)
{
    if (status != BL_OK) print_error("%s\n", bl_error_text());
    assert_int_equal(status, BL_OK);
}

/* False, with a line that says why: no GPU. */
static inline bool gpu_test_create(gpu_test *t)
{
    if (bl_device_create_cuda(0, &t->gpu.device) != BL_OK) {
        printf("skip: no GPU: %s\n", bl_error_text());
        return false;
    }
    gpu_ok(bl_stream_create(t->gpu.device, "test", &t->gpu.stream));
    t->cpu = test_device_create(2);
    return true;
}

static inline void gpu_test_destroy(gpu_test *t)
{
    test_device_destroy(t->gpu);
    test_device_destroy(t->cpu);
}

static inline buffer buffer_create(gpu_test *t, size_t bytes, size_t shift_bytes)
{
    buffer b = {.bytes = bytes, .shift_bytes = shift_bytes};
    size_t room = bytes + shift_bytes + 2 * GUARD_BYTES;
    b.initial = test_alloc((int64_t)bytes, 1);
    memset(b.initial, POISON, bytes);
    void *memory, *result;
    gpu_ok(bl_device_alloc(t->gpu.device, BL_SPACE_DEVICE, room, "a test's buffer", &memory));
    gpu_ok(bl_device_alloc(t->gpu.device, BL_SPACE_HOST, room, "a test's results", &result));
    b.memory = memory;
    b.result = result;
    b.gpu = b.memory + GUARD_BYTES + shift_bytes;
    return b;
}

static inline bl_tensor gpu_bf16(const buffer *b)
{
    return bl_tensor_of(b->gpu, BL_BF16);
}

static inline bl_tensor gpu_f32(const buffer *b)
{
    return bl_tensor_of(b->gpu, BL_F32);
}

static inline void buffer_free(gpu_test *t, buffer *b)
{
    bl_device_free(t->gpu.device, BL_SPACE_DEVICE, b->memory);
    bl_device_free(t->gpu.device, BL_SPACE_HOST, b->result);
    free(b->initial);
}

/* The guards around it become poison. */
static inline void buffer_upload(gpu_test *t, buffer *b)
{
    size_t room = b->bytes + b->shift_bytes + 2 * GUARD_BYTES;
    memset(b->result, POISON, room);
    memcpy(b->result + GUARD_BYTES + b->shift_bytes, b->initial, b->bytes);
    test_write(t->gpu, b->memory, b->result, room);
}

static inline void buffer_download(gpu_test *t, buffer *b)
{
    size_t room = b->bytes + b->shift_bytes + 2 * GUARD_BYTES,
           before = GUARD_BYTES + b->shift_bytes;
    test_read(t->gpu, b->result, b->memory, room);
    for (size_t i = 0; i < before; i++) assert_int_equal(b->result[i], POISON);
    for (size_t i = before + b->bytes; i < room; i++) assert_int_equal(b->result[i], POISON);
    memmove(b->result, b->result + before, b->bytes);
}

typedef bl_status (*gpu_launch)(bl_stream *stream, const void *args);

/* Runs the launch twice on fresh copies of all buffers; results are the second run's. */
static inline void run_twice(gpu_test *t, gpu_launch launch, const void *args,
                             buffer *const *buffers, int n_buffers)
{
    unsigned char *first[16] = {0};
    assert_true(n_buffers <= 16);
    for (int run = 0; run < 2; run++) {
        for (int i = 0; i < n_buffers; i++) buffer_upload(t, buffers[i]);
        gpu_ok(launch(t->gpu.stream, args));
        gpu_ok(bl_stream_synchronize(t->gpu.stream));
        for (int i = 0; i < n_buffers; i++) {
            buffer_download(t, buffers[i]);
            if (run == 0) {
                first[i] = test_alloc((int64_t)buffers[i]->bytes, 1);
                memcpy(first[i], buffers[i]->result, buffers[i]->bytes);
            } else if (memcmp(first[i], buffers[i]->result, buffers[i]->bytes) != 0) {
                print_error("buffer %d: two runs, other bits\n", i);
                fail();
            }
        }
    }
    for (int i = 0; i < n_buffers; i++) free(first[i]);
}

/* n bf16 numbers for the GPU; the same as floats, which the caller frees, for the CPU. */
static inline float *bf16_inputs(gpu_test *t, int64_t n, int shift, uint64_t seed, float size,
                                 buffer *b)
{
    float *values = test_random_floats(n, seed);
    *b = buffer_create(t, (size_t)n * 2, (size_t)shift * 2);
    for (int64_t i = 0; i < n; i++) {
        uint16_t bits = bl_f32_to_bf16(values[i] * size);
        memcpy(b->initial + 2 * i, &bits, sizeof bits);
        values[i] = bl_bf16_to_f32(bits);
    }
    return values;
}

static inline float *f32_inputs(gpu_test *t, int64_t n, int shift, uint64_t seed, buffer *b)
{
    float *values = test_random_floats(n, seed);
    *b = buffer_create(t, (size_t)n * 4, (size_t)shift * 4);
    memcpy(b->initial, values, (size_t)n * 4);
    return values;
}

static inline buffer bytes_input(gpu_test *t, const void *source, size_t bytes)
{
    buffer b = buffer_create(t, bytes, 0);
    memcpy(b.initial, source, bytes);
    return b;
}

static inline uint16_t bf16_result(const buffer *b, int64_t i)
{
    uint16_t bits;
    memcpy(&bits, b->result + 2 * i, sizeof bits);
    return bits;
}

/* The GPU's bf16 is the CPU's fp32, rounded. */
static inline void bf16_is_rounded(const char *what, const buffer *got, const float *want,
                                   int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        uint16_t bits = bf16_result(got, i);
        if (bits != bl_f32_to_bf16(want[i])) {
            print_error("%s[%lld]: %a, not %a rounded\n", what, (long long)i,
                        (double)bl_bf16_to_f32(bits), (double)want[i]);
            fail();
        }
    }
}

/* |got - want| <= 2^-8 |want| + slack[i] (or without slack u-multiples of |want|), for bf16
 *   results. */
static inline void bf16_is_within(const char *what, const buffer *got, const float *want,
                                  const double *slack, double relative, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        double value = (double)bl_bf16_to_f32(bf16_result(got, i)),
               error = fabs(value - (double)want[i]);
        double allowed =
            (BF16 + relative) * fabs((double)want[i]) + (slack ? slack[i] : 0.0) + 0x1p-133;
        if (!(error <= allowed)) {
            print_error("%s[%lld]: %.9g, not %.9g: off by %.3g, allowed %.3g\n", what, (long long)i,
                        value, (double)want[i], error, allowed);
            fail();
        }
    }
}

static inline void same_bytes(const char *what, const buffer *got, const void *want, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        if (got->result[i] != ((const unsigned char *)want)[i]) {
            print_error("%s: byte %zu is %02x, not %02x\n", what, i, got->result[i],
                        ((const unsigned char *)want)[i]);
            fail();
        }
}

/* What follows is counted anew. */
static inline void forget_accesses(void)
{
#ifdef BALLAST_CUDA_EMULATED
    emulated_forget_accesses();
#endif
}

/* Of checked kernels since then (emulator/README.md). */
static inline void meets_banks_at_most(double times)
{
#ifdef BALLAST_CUDA_EMULATED
    if (emulated_bank_passes() > times) {
        print_error("its warps go to shared memory %.3f times as often as they need\n",
                    emulated_bank_passes());
        fail();
    }
#endif
    (void)times;
}

typedef struct kernel_case {
    const char *name;
    void (*check)(gpu_test *t, shape s);
} kernel_case;

typedef struct kernel_run {
    gpu_test *test;
    const kernel_case *kernel;
    const shape *shapes;
    int n_shapes;
} kernel_run;

static inline void run_shapes(void **state)
{
    const kernel_run *run = *state;
    for (int i = 0; i < run->n_shapes; i++) {
        print_message("%s: %lld x %lld, shifted by %d\n", run->kernel->name,
                      (long long)run->shapes[i].rows, (long long)run->shapes[i].cols,
                      run->shapes[i].shift);
        forget_accesses();
        run->kernel->check(run->test, run->shapes[i]);
#ifdef BALLAST_CUDA_EMULATED
        if (emulated_share_of_sectors() < LEAST_SHARE_OF_SECTORS) {
            print_error("its warps use %.2f of the memory sectors that they access\n",
                        emulated_share_of_sectors());
            fail();
        }
#endif
        /* Tiles at the edges of matrices, and unaligned ones, may conflict. */
        if (run->shapes[i].rows % TILE == 0 && run->shapes[i].cols % TILE == 0 &&
            run->shapes[i].shift == 0)
            meets_banks_at_most(1);
    }
}

enum { KERNELS_MAX = 16 };

/* The body of main: each kernel, a test, over all shapes. */
static inline int run_kernels(const kernel_case *kernels, int n_kernels, const shape *shapes,
                              int n_shapes)
{
    struct CMUnitTest tests[KERNELS_MAX];
    kernel_run runs[KERNELS_MAX];
    gpu_test t;
    if (!gpu_test_create(&t)) return SKIPPED;
    for (int k = 0; k < n_kernels; k++) {
        runs[k] = (kernel_run){&t, &kernels[k], shapes, n_shapes};
        tests[k] = (struct CMUnitTest){kernels[k].name, run_shapes, NULL, NULL, &runs[k]};
    }
    int n_failed = _cmocka_run_group_tests("kernels", tests, (size_t)n_kernels, NULL, NULL);
    gpu_test_destroy(&t);
    return n_failed;
}

#endif
