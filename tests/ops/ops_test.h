/* SPDX-License-Identifier: Apache-2.0 */
/* ops_test.h -- shared by the tests of ops: a device and stream, reproducible numbers, comparison
 * with a double reference.
 *
 * Tolerances. u = 2^-24 is the rounding error of fp32. An element computed by a chain of k
 * roundings is off by k u of its size; a sum of n terms by at most n u of the sum of their sizes,
 * and by about sqrt(n) u of it when the errors are independent. Each test states its chain. */
#ifndef BALLAST_TESTS_OPS_TEST_H
#define BALLAST_TESTS_OPS_TEST_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/sizes.h"
#include "device/device.h"

static const double U = 1.0 / 16777216.0;

typedef struct test_device {
    bl_device *device;
    bl_stream *stream;
} test_device;

static inline test_device test_device_create(int n_threads)
{
    test_device d;
    assert_int_equal(bl_device_create_cpu(n_threads, &d.device), BL_OK);
    assert_int_equal(bl_stream_create(d.device, "test", &d.stream), BL_OK);
    return d;
}

static inline void test_device_destroy(test_device d)
{
    bl_stream_destroy(d.stream);
    bl_device_destroy(d.device);
}

/* Waits for the stream and prints why it failed, if it did. */
static inline void test_finish(test_device d)
{
    bl_status status = bl_stream_synchronize(d.stream);
    if (status != BL_OK) print_error("%s\n", bl_error_text());
    assert_int_equal(status, BL_OK);
}

static inline void *test_alloc(int64_t count, size_t size)
{
    void *memory = calloc((size_t)(count > 0 ? count : 1), size);
    assert_non_null(memory);
    return memory;
}

static inline float *test_floats(int64_t count)
{
    return test_alloc(count, sizeof(float));
}
static inline double *test_doubles(int64_t count)
{
    return test_alloc(count, sizeof(double));
}

/* test_write copies from `host` to device memory, test_read back: through pinned memory, as a GPU
 * needs it. Both wait. */
static inline void test_write(test_device d, void *memory, const void *host, size_t bytes)
{
    void *pinned;
    assert_int_equal(bl_device_alloc(d.device, BL_SPACE_HOST, bytes, "test", &pinned), BL_OK);
    memcpy(pinned, host, bytes);
    assert_int_equal(bl_stream_copy(d.stream, memory, pinned, bytes), BL_OK);
    test_finish(d);
    bl_device_free(d.device, BL_SPACE_HOST, pinned);
}

static inline void test_read(test_device d, void *host, const void *memory, size_t bytes)
{
    void *pinned;
    assert_int_equal(bl_device_alloc(d.device, BL_SPACE_HOST, bytes, "test", &pinned), BL_OK);
    assert_int_equal(bl_stream_copy(d.stream, pinned, memory, bytes), BL_OK);
    test_finish(d);
    memcpy(host, pinned, bytes);
    bl_device_free(d.device, BL_SPACE_HOST, pinned);
}

/* Uniform in [-1, 1): xorshift64*. */
static inline double test_random(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return (double)(int64_t)(*state * 2685821657736338717u) / 9223372036854775808.0;
}

static inline float *test_random_floats(int64_t count, uint64_t seed)
{
    float *x = test_floats(count);
    uint64_t state = seed * 2654435761u + 88172645463325252u;
    for (int64_t i = 0; i < count; i++) x[i] = (float)test_random(&state);
    return x;
}

/* |got - want| <= absolute + relative |want| for all elements. */
static inline void test_close(const char *what, const float *got, const double *want, int64_t n,
                              double absolute, double relative)
{
    for (int64_t i = 0; i < n; i++) {
        double error = fabs((double)got[i] - want[i]),
               allowed = absolute + relative * fabs(want[i]);
        if (!(error <= allowed)) {
            print_error("%s[%lld]: %.9g, not %.9g: off by %.3g, allowed %.3g\n", what, (long long)i,
                        (double)got[i], want[i], error, allowed);
            fail();
        }
    }
}

static inline void test_same_bits(const char *what, const float *a, const float *b, int64_t n)
{
    if (memcmp(a, b, (size_t)n * sizeof *a) != 0) {
        print_error("%s: other bits with another number of threads\n", what);
        fail();
    }
}

#endif
