/* SPDX-License-Identifier: Apache-2.0 */
/* experts_case.h -- a mixture's layer for tests: tokens, their routing, matrices of experts. */
#ifndef BALLAST_TESTS_EXPERTS_CASE_H
#define BALLAST_TESTS_EXPERTS_CASE_H

#include "ops_test.h"

#include "fp8/fp8.h"
#include "ops/experts.h"

enum { T = 37, E = 7, K = 3, H = 70, INTER = 20 };

typedef struct layer {
    test_device d;
    int64_t n_tokens, top_k;
    bool is_normed;
    float *router, *bias, *x, *d_weight;
    void *memory;
    bl_routing routing;
} layer;

static inline layer make_layer(int64_t n_tokens, int64_t top_k, bool is_normed, int n_threads)
{
    layer l = {.d = test_device_create(n_threads),
               .n_tokens = n_tokens,
               .top_k = top_k,
               .is_normed = is_normed,
               .router = test_random_floats(E * H, 1),
               .bias = test_random_floats(E, 12),
               .x = test_random_floats(n_tokens * H, 2),
               .d_weight = test_random_floats(n_tokens * top_k, 3),
               .memory = test_alloc((int64_t)bl_routing_bytes(n_tokens, E, top_k), 1),
               .routing = {.T = n_tokens, .n_experts = E, .top_k = top_k}};
    bl_routing_place(&l.routing, l.memory);
    return l;
}

static inline void free_layer(layer *l)
{
    test_device_destroy(l->d);
    free(l->router);
    free(l->bias);
    free(l->x);
    free(l->d_weight);
    free(l->memory);
}

static inline void route(layer *l, bl_tensor x)
{
    assert_int_equal(bl_route(l->d.stream, &(bl_route_args){.routing = l->routing,
                                                            .H = H,
                                                            .is_normed = l->is_normed,
                                                            .router = l->router,
                                                            .bias = l->bias,
                                                            .x = x}),
                     BL_OK);
    test_finish(l->d);
}

/* The matrices of all experts in a format, and as double. */
typedef struct experts {
    bl_weight weight;
    void *codes;
    float *scales;
    double *values; /* (E rows, cols) */
} experts;

static inline experts make_experts(bl_format format, int64_t rows, int64_t cols)
{
    bl_format_bytes n;
    float *w = test_random_floats(E * rows * cols, 5), *back = test_floats(E * rows * cols);
    experts x = {.values = test_doubles(E * rows * cols)};
    test_device d = test_device_create(1);
    bl_pool *pool = bl_device_pool(d.device);

    assert_true(bl_format_measure(bl_format_describe(format), E * rows, cols, &n));
    x.codes = test_alloc((int64_t)n.codes, 1);
    x.scales = test_floats((int64_t)(n.scales / sizeof(float)) + 1);
    if (format == BL_FORMAT_F32) memcpy(x.codes, w, n.codes);
    if (format == BL_FORMAT_BF16)
        for (int64_t i = 0; i < E * rows * cols; i++)
            ((uint16_t *)x.codes)[i] = bl_f32_to_bf16(w[i]);
    if (format == BL_FORMAT_FP8_ROW)
        assert_int_equal(bl_fp8_row_quantize(pool, BL_F32, w, 0, E * rows, cols, x.codes, x.scales),
                         BL_OK);
    if (format == BL_FORMAT_FP8_BLOCK)
        assert_int_equal(
            bl_fp8_block_quantize(pool, BL_F32, w, 0, E * rows, cols, x.codes, x.scales), BL_OK);
    bl_fp8_dequantize(pool, format, x.codes, x.scales, E * rows, cols, back);
    for (int64_t i = 0; i < E * rows * cols; i++) x.values[i] = (double)back[i];
    x.weight = (bl_weight){
        .rows = E * rows,
        .cols = cols,
        .n_segments = 1,
        .segment = {{format, x.codes, bl_format_has_scales(format) ? x.scales : NULL, E * rows}}};
    free(w);
    free(back);
    test_device_destroy(d);
    return x;
}

static inline void free_experts(experts *x)
{
    free(x->codes);
    free(x->scales);
    free(x->values);
}

#endif
