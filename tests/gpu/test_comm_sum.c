/* SPDX-License-Identifier: Apache-2.0 */
/* The sum of ranks' parts on a GPU has the bits of the CPU's (comm/sum.c): every element type, from
 * 1 to 8 ranks, lengths about a block's, parts that begin anywhere, the result in the place of the
 * own part. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "comm/nccl/sum_cuda.h"
#include "comm/sum_internal.h"
#include "device/device.h"

enum { MAX_RANKS = 8, MAX_N = 40001, UNTOUCHED = 0x5A };

typedef struct place {
    bl_device *device;
    bl_stream *stream;
    unsigned char *host, *memory,
        *sums; /* MAX_RANKS parts, and the device's copy; sums: the expected values */
} place;

static const size_t PLACE_BYTES = (size_t)MAX_RANKS * MAX_N * sizeof(double);

static uint64_t random_bits(uint64_t *state)
{
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

/* Numbers that round in every sum, and now and then -0, a denormal number or infinity. */
static double value_of(uint64_t bits)
{
    switch (bits % 16) {
    case 0:
        return -0.0;
    case 1:
        return 1e-42;
    case 2:
        return bits & 256 ? 1e38 : -1e38;
    default:
        return (double)(int64_t)bits * 0x1p-50;
    }
}

static void fill(place *p, bl_comm_element element, int64_t n, uint64_t seed)
{
    for (int64_t i = 0; i < n; i++) {
        uint64_t bits = random_bits(&seed);
        if (element == BL_COMM_F32)
            ((float *)(void *)p->host)[i] = (float)value_of(bits);
        else if (element == BL_COMM_F64)
            ((double *)(void *)p->host)[i] = value_of(bits);
        else
            ((uint64_t *)(void *)p->host)[i] = bits;
    }
}

static void expect_sum(place *p, bl_comm_element element, int n_ranks, int64_t stride, int64_t n)
{
    comm_blocks one = comm_blocks_of(n_ranks, n_ranks);
    const void *values[MAX_RANKS];

    for (int r = 0; r < n_ranks; r++)
        values[r] = p->host + (size_t)(r * stride) * comm_sum_element_bytes(element);
    comm_sum_blocks(element, &one, values, 0, p->sums, n);
}

/* The own part is stored apart from the others; its place among them holds garbage. */
static void check(place *p, bl_comm_element element, int n_ranks, int rank, int64_t n)
{
    size_t unit = comm_sum_element_bytes(element);
    int64_t stride = n + 3;
    unsigned char *own = p->memory + (size_t)(n_ranks * stride) * unit;

    fill(p, element, n_ranks * stride, (uint64_t)(n * 100 + n_ranks));
    expect_sum(p, element, n_ranks, stride, n);
    memcpy(p->host + (size_t)(n_ranks * stride) * unit, p->host + (size_t)(rank * stride) * unit,
           (size_t)stride * unit);
    memset(p->host + (size_t)(rank * stride) * unit, UNTOUCHED, (size_t)stride * unit);
    assert_true((size_t)((n_ranks + 1) * stride) * unit <= PLACE_BYTES + MAX_N);
    assert_int_equal(
        bl_stream_copy(p->stream, p->memory, p->host, (size_t)((n_ranks + 1) * stride) * unit),
        BL_OK);
    comm_sum_args args = {.element = element,
                          .rank = rank,
                          .n_ranks = n_ranks,
                          .own = own,
                          .parts = p->memory,
                          .stride_bytes = (size_t)stride * unit,
                          .to = own,
                          .n = n};
    assert_int_equal(comm_cuda_sum(p->stream, &args), BL_OK);
    unsigned char *behind = p->host + (size_t)(n_ranks * stride) * unit;
    memcpy(p->sums + (size_t)n * unit, behind + (size_t)n * unit, 3 * unit); /* untouched */
    assert_int_equal(bl_stream_copy(p->stream, p->host, own, (size_t)stride * unit), BL_OK);
    assert_int_equal(bl_stream_synchronize(p->stream), BL_OK);
    if (memcmp(p->host, p->sums, (size_t)stride * unit) != 0)
        fail_msg("element %d, rank %d of %d, %lld elements: other bits", (int)element, rank,
                 n_ranks, (long long)n);
}

static void open_place(place *p)
{
    size_t bytes = PLACE_BYTES + MAX_N;
    assert_int_equal(bl_device_create_cuda(0, &p->device), BL_OK);
    assert_int_equal(bl_stream_create(p->device, "sums", &p->stream), BL_OK);
    assert_int_equal(bl_device_alloc(p->device, BL_SPACE_HOST, bytes, "host", (void **)&p->host),
                     BL_OK);
    assert_int_equal(
        bl_device_alloc(p->device, BL_SPACE_DEVICE, bytes, "parts", (void **)&p->memory), BL_OK);
    p->sums = malloc(bytes);
    assert_non_null(p->sums);
}

static void close_place(place *p)
{
    bl_stream_destroy(p->stream);
    bl_device_free(p->device, BL_SPACE_HOST, p->host);
    bl_device_free(p->device, BL_SPACE_DEVICE, p->memory);
    bl_device_destroy(p->device);
    free(p->sums);
}

static void test_bits(void **state)
{
    static const int64_t lengths[] = {1, 3, 255, 257, 1024, 1025, 4 * 256 * 9 + 1};
    static const bl_comm_element elements[] = {BL_COMM_F32, BL_COMM_F64, BL_COMM_I64};
    place p;

    (void)state;
    open_place(&p);
    for (size_t e = 0; e < BL_COUNT(elements); e++)
        for (size_t i = 0; i < BL_COUNT(lengths); i++)
            for (int n_ranks = 1; n_ranks <= MAX_RANKS; n_ranks += n_ranks < 4 ? 1 : 4)
                for (int rank = 0; rank < n_ranks; rank += 1 + n_ranks / 4)
                    check(&p, elements[e], n_ranks, rank, lengths[i]);
    close_place(&p);
}

static void test_none_and_nonsense(void **state)
{
    place p;

    (void)state;
    open_place(&p);
    comm_sum_args none = {.element = BL_COMM_F32, .n_ranks = 1, .own = p.memory, .to = p.memory};
    assert_int_equal(comm_cuda_sum(p.stream, &none), BL_OK);
    comm_sum_args nonsense = none;
    nonsense.element = (bl_comm_element)17;
    assert_int_equal(comm_cuda_sum(p.stream, &nonsense), BL_EINTERNAL);
    close_place(&p);
}

int main(void)
{
    bl_device *device;
    if (bl_device_create_cuda(0, &device) != BL_OK) {
        printf("skip: no GPU: %s\n", bl_error_text());
        return 77;
    }
    bl_device_destroy(device);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bits),
        cmocka_unit_test(test_none_and_nonsense),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
