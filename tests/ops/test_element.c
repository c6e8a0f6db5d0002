/* SPDX-License-Identifier: Apache-2.0 */
/* The arithmetic on single elements that CUDA's kernels share with the CPU (fp8/element.h,
 * ops/element_internal.h): over all codes, all bf16 numbers and the edges, it has the bits of the
 * CPU ops, and the equation's value. */
#include "ops_test.h"

#include <float.h>

#include "fp8/element.h"
#include "fp8/fp8.h"
#include "ops/element_internal.h"
#include "ops/elementwise.h"
#include "ops/norm.h"
#include "ops/optimizer.h"
#include "ops/rope.h"

enum { N_BF16 = 65536 };

static float bf16_value(int i)
{
    return bl_bf16_to_f32((uint16_t)i);
}

/* Scales for each case of the fast division: its limits, reciprocals that round badly
 * (mantissas of all ones), denormals, the largest, and ordinary ones. */
static const float scales[] = {
    1.0f,           0x1p-80f,         0x1.fffffep-81f, 0x1.fffffep-80f, 0x1p80f,
    0x1.000002p80f, 0x1.fffffep79f,   0x1.fffffep-1f,  0x1.fffffep-9f,  0x1.000002p-9f,
    0x1p-149f,      0x1.8p-140f,      0x1p-126f,       0x1.924924p-7f,  3.3333333e-3f,
    7.0e-4f,        0x1.249248p-100f, 0x1.3p100f,      0x1.6db6dap-12f, FLT_MAX / 448.0f};

static uint8_t encode(float x, bl_e4m3_divisor divisor)
{
    return bl_f32_to_e4m3(bl_e4m3_quotient(x, divisor));
}

static void quotient_has_the_code_of_a_division(float x, bl_e4m3_divisor divisor)
{
    uint8_t want = bl_f32_to_e4m3(x / divisor.scale), got = encode(x, divisor);
    if (got != want) {
        print_error("%a / %a: code %02x, not %02x\n", (double)x, (double)divisor.scale, got, want);
        fail();
    }
}

static void every_bf16_gets_the_code_of_a_division(void **state)
{
    (void)state;
    for (size_t s = 0; s < BL_COUNT(scales); s++) {
        bl_e4m3_divisor divisor = bl_e4m3_divisor_of(scales[s]);
        for (int i = 0; i < N_BF16; i++) {
            float x = bf16_value(i);
            if (isnan(x) || (double)fabsf(x) <= 512.0 * (double)scales[s])
                quotient_has_the_code_of_a_division(x, divisor);
        }
    }
    /* Every absmax that an activation can have, with its whole row's range sampled. */
    for (int i = 0; i < 0x7f80; i += 7) {
        float absmax = bf16_value(i);
        bl_e4m3_divisor divisor = bl_e4m3_divisor_of(bl_e4m3_scale(absmax));
        quotient_has_the_code_of_a_division(absmax, divisor);
        for (int k = i % 61; k <= i; k += 61) {
            quotient_has_the_code_of_a_division(bf16_value(k), divisor);
            quotient_has_the_code_of_a_division(-bf16_value(k), divisor);
        }
    }
}

/* Midpoints between codes, times the scale, and their neighbors: where another quotient is another
 * code. */
static void halfway_cases_get_the_code_of_a_division(void **state)
{
    (void)state;
    uint64_t random = 88172645463325252u;
    for (int round = 0; round < 4000; round++) {
        float scale = round < (int)BL_COUNT(scales)
                          ? scales[round]
                          : (float)exp2(40.0 * test_random(&random)) *
                                (1.0f + 0.5f * (float)test_random(&random));
        bl_e4m3_divisor divisor = bl_e4m3_divisor_of(scale);
        for (int code = 0; code < 0x7e; code++) {
            float middle =
                0.5f * (bl_e4m3_to_f32((uint8_t)code) + bl_e4m3_to_f32((uint8_t)(code + 1)));
            float x = middle * scale;
            if (isinf(x)) continue;
            quotient_has_the_code_of_a_division(x, divisor);
            quotient_has_the_code_of_a_division(nextafterf(x, 0.0f), divisor);
            quotient_has_the_code_of_a_division(-nextafterf(x, FLT_MAX), divisor);
        }
    }
}

static void quantized_rows_are_the_host_s(void **state)
{
    (void)state;
    bl_pool *pool;
    assert_int_equal(bl_pool_create(1, &pool), BL_OK);
    enum { COLS = 3000 };
    for (int round = 0; round < 8; round++) {
        float *x = test_random_floats(COLS, 5u + (uint64_t)round), scale;
        uint8_t codes[COLS];
        for (int i = 0; i < COLS; i++) x[i] = round == 0 ? 0.0f : ldexpf(x[i], 30 * round - 140);
        assert_int_equal(bl_fp8_row_quantize(pool, BL_F32, x, 0, 1, COLS, codes, &scale), BL_OK);
        uint32_t absmax = 0;
        for (int i = 0; i < COLS; i++) absmax = bl_absmax_bits(absmax, x[i]);
        float mine = bl_e4m3_scale(bl_f32_from_bits(absmax));
        assert_memory_equal(&mine, &scale, sizeof mine);
        bl_e4m3_divisor divisor = bl_e4m3_divisor_of(mine);
        for (int i = 0; i < COLS; i++) assert_int_equal(encode(x[i], divisor), codes[i]);
        free(x);
    }
    bl_pool_destroy(pool);
}

static void scales_of_edges(void **state)
{
    (void)state;
    assert_true(bl_e4m3_scale(0.0f) == 1.0f);
    assert_true(bl_e4m3_scale(0x1p-149f) == 1.0f); /* no fp32 scale is so small */
    assert_true(bl_e4m3_scale(448.0f) == 1.0f);
    assert_true(bl_e4m3_scale(FLT_MAX) == FLT_MAX / 448.0f);
    assert_true(isnan(bl_e4m3_scale(INFINITY)));
    assert_true(isnan(bl_e4m3_scale(NAN)));
    assert_true(isnan(bl_f32_from_bits(bl_absmax_bits(bl_f32_bits(INFINITY), -NAN))));
    assert_int_equal(bl_absmax_bits(0, -2.0f), bl_f32_bits(2.0f));
    bl_e4m3_divisor nan = bl_e4m3_divisor_of(NAN);
    assert_int_equal(encode(1.0f, nan) & 0x7f, BL_FP8_NAN);
    assert_int_equal(encode(448.0f, bl_e4m3_divisor_of(1.0f)), 0x7e);
    assert_int_equal(encode(512.0f, bl_e4m3_divisor_of(1.0f)), 0x7e); /* saturates */
    assert_int_equal(encode(-0.0f, bl_e4m3_divisor_of(3.0f)), 0x80);
}

/* Every code and scale: the host's fp32 value; and it rounded to bf16, checked against the
 * definition of rounding. */
static void decoded_codes_are_the_host_s(void **state)
{
    (void)state;
    bl_pool *pool;
    assert_int_equal(bl_pool_create(1, &pool), BL_OK);
    uint8_t codes[256];
    for (int i = 0; i < 256; i++) codes[i] = (uint8_t)i;
    for (size_t s = 0; s < BL_COUNT(scales); s++) {
        float want[256];
        bl_fp8_dequantize(pool, BL_FORMAT_FP8_ROW, codes, &scales[s], 1, 256, want);
        for (int i = 0; i < 256; i++) {
            float got = bl_e4m3_decode(codes[i], scales[s]),
                  near = bl_bf16_to_f32(bl_e4m3_decode_bf16(codes[i], scales[s]));
            assert_memory_equal(&got, &want[i], sizeof got);
            if (isnan(got)) {
                assert_true(isnan(near));
                continue;
            }
            uint16_t bits = bl_e4m3_decode_bf16(codes[i], scales[s]);
            double below = fabs((double)near - (double)bl_bf16_to_f32((uint16_t)(bits - 1))),
                   above = fabs((double)bl_bf16_to_f32((uint16_t)(bits + 1)) - (double)near),
                   error = fabs((double)near - (double)got);
            if ((bits & 0x7fff) != 0 && !isinf(near))
                assert_true(error <= 0.5 * fmax(below, above));
        }
    }
    bl_pool_destroy(pool);
}

static void bf16_rounding_is_to_nearest_even(void **state)
{
    (void)state;
    for (int i = 0; i < N_BF16; i++) {
        float x = bf16_value(i);
        if (isnan(x)) {
            assert_true(isnan(bl_bf16_to_f32(bl_f32_to_bf16(x))));
            continue;
        }
        assert_int_equal(bl_f32_to_bf16(x), i);
        if (isinf(x)) continue;
        uint32_t bits = bl_f32_bits(x);
        assert_int_equal(bl_f32_to_bf16(bl_f32_from_bits(bits + 0x7fff)), i);
        assert_int_equal(bl_f32_to_bf16(bl_f32_from_bits(bits + 0x8001)), i + 1);
        assert_int_equal(bl_f32_to_bf16(bl_f32_from_bits(bits + 0x8000)),
                         i + (i & 1)); /* halfway */
    }
}

/* The op has the element's bits (any NaN for a NaN). */
static void same_element(const char *what, float got, float want, float g, float u)
{
    if (memcmp(&got, &want, sizeof got) != 0 && !(isnan(got) && isnan(want))) {
        print_error("%s(%a, %a): %a, not %a\n", what, (double)g, (double)u, (double)got,
                    (double)want);
        fail();
    }
}

/* All bf16 gates: denormals, infinities and NaN among them. Where everything is finite, within the
 * chain's roundings of the equation: exp 2 u, 1 + e, the quotient and the product 1/2 u each, and
 * denormals of absolute size 2^-149. */
static void swiglu_of_every_gate(void **state)
{
    (void)state;
    static const float ups[] = {1.0f, -0.3f, 0x1p-130f, 3e38f, INFINITY};
    float *gate_up = test_floats(2 * (int64_t)N_BF16), *h = test_floats(N_BF16),
          *d = test_floats(2 * (int64_t)N_BF16);
    float *dh = test_floats(N_BF16);
    test_device device = test_device_create(1);
    for (size_t k = 0; k < BL_COUNT(ups); k++) {
        for (int i = 0; i < N_BF16; i++) {
            gate_up[i] = bf16_value(i);
            gate_up[N_BF16 + i] = ups[k];
            dh[i] = bf16_value(i * 31 % N_BF16);
        }
        bl_swiglu_forward_args forward = {
            .T = 1, .I = N_BF16, .gate_up = bl_tensor_f32(gate_up), .h = bl_tensor_f32(h)};
        bl_swiglu_backward_args backward = {.T = 1,
                                            .I = N_BF16,
                                            .gate_up = bl_tensor_f32(gate_up),
                                            .dh = bl_tensor_f32(dh),
                                            .d_gate_up = bl_tensor_f32(d)};
        assert_int_equal(bl_swiglu_forward(device.stream, &forward), BL_OK);
        assert_int_equal(bl_swiglu_backward(device.stream, &backward), BL_OK);
        test_finish(device);
        for (int i = 0; i < N_BF16; i++) {
            float g = gate_up[i], u = ups[k], element = bl_swiglu(g, u);
            bl_swiglu_gradient gradient = bl_swiglu_gradient_of(g, u, dh[i]);
            same_element("swiglu", h[i], element, g, u);
            same_element("swiglu's dg", d[i], gradient.dg, g, u);
            same_element("swiglu's du", d[N_BF16 + i], gradient.du, g, u);
            double want = (double)g / (1.0 + exp(-(double)g)) * (double)u;
            if (isfinite(want) && fabs(want) < 3e38 && fabsf(g) < 80.0f)
                assert_true(fabs((double)element - want) <= 4.0 * U * fabs(want) + 0x1p-148);
        }
    }
    test_device_destroy(device);
    free(gate_up), free(h), free(d), free(dh);
}

static void rope_and_norm_use_the_elements(void **state)
{
    (void)state;
    enum { D = 64, HALF = D / 2, T = 3 };
    float *x = test_random_floats(T * D, 1), *w = test_random_floats(D, 2),
          *dy = test_random_floats(T * D, 3);
    float y[T * D], rstd[T], dx[T * D], turned[T * D], cosines[T * HALF], sines[T * HALF];
    double inv_freq[HALF];
    for (int i = 0; i < HALF; i++) inv_freq[i] = pow(10000.0, -(double)i / HALF);
    bl_rope_fill_tables(0, T, HALF, inv_freq, 1.0, cosines, sines);
    memcpy(turned, x, sizeof turned);
    const int32_t cu_seqlens[] = {0, 1, T};
    test_device device = test_device_create(1);
    bl_rope_args rope = {.T = T,
                         .n_heads = 1,
                         .d = D,
                         .row_stride = D,
                         .n_documents = 2,
                         .direction = -1,
                         .cu_seqlens = cu_seqlens,
                         .cos_table = cosines,
                         .sin_table = sines,
                         .x = bl_tensor_f32(turned)};
    bl_rmsnorm_forward_args forward = {.T = T,
                                       .H = D,
                                       .eps = 1e-5,
                                       .x = bl_tensor_f32(x),
                                       .w = w,
                                       .y = bl_tensor_f32(y),
                                       .rstd = rstd};
    bl_rmsnorm_backward_args backward = {.T = T,
                                         .H = D,
                                         .x = bl_tensor_f32(x),
                                         .w = w,
                                         .rstd = rstd,
                                         .dy = bl_tensor_f32(dy),
                                         .dx = bl_tensor_f32(dx)};
    assert_int_equal(bl_rope(device.stream, &rope), BL_OK);
    assert_int_equal(bl_rmsnorm_forward(device.stream, &forward), BL_OK);
    assert_int_equal(bl_rmsnorm_backward(device.stream, &backward), BL_OK);
    test_finish(device);
    for (int t = 0; t < T; t++) {
        int64_t position = t - cu_seqlens[bl_document_of(cu_seqlens, 2, t)];
        double sum = 0;
        for (int i = 0; i < D; i++)
            sum += (double)dy[t * D + i] * (double)w[i] * (double)x[t * D + i];
        float along = (float)((double)rstd[t] * (double)rstd[t] * sum / D);
        for (int i = 0; i < D; i++) {
            float normal = bl_rmsnorm_element(x[t * D + i], rstd[t], w[i]);
            float gradient =
                bl_rmsnorm_gradient_element(x[t * D + i], rstd[t], w[i], dy[t * D + i], along);
            same_element("rmsnorm", y[t * D + i], normal, x[t * D + i], w[i]);
            assert_true(fabs((double)(dx[t * D + i] - gradient)) <=
                        1e-6); /* along, summed in another order */
        }
        for (int i = 0; i < HALF; i++) {
            bl_rope_pair pair =
                bl_rope_rotate(x[t * D + i], x[t * D + HALF + i], cosines[position * HALF + i],
                               -sines[position * HALF + i]);
            same_element("rope", turned[t * D + i], pair.a, x[t * D + i], 0);
            same_element("rope", turned[t * D + HALF + i], pair.b, x[t * D + HALF + i], 0);
        }
    }
    test_device_destroy(device);
    free(x), free(w), free(dy);
}

static void adamw_uses_the_element(void **state)
{
    (void)state;
    enum { N = 700 };
    float *w = test_random_floats(N, 1), *m = test_random_floats(N, 2),
          *v = test_random_floats(N, 3), *grad = test_random_floats(N, 4), w2[N], m2[N], v2[N];
    const float edges[] = {0.0f, -0.0f, 1e-42f, 3e38f, INFINITY, NAN};
    for (int i = 0; i < N; i++) v[i] = fabsf(v[i]);
    for (size_t i = 0; i < BL_COUNT(edges); i++) grad[i] = edges[i];
    memcpy(w2, w, sizeof w2), memcpy(m2, m, sizeof m2), memcpy(v2, v, sizeof v2);
    double grad_scale = 0.37;
    bl_adamw_factors factors = bl_adamw_factors_of(5, 1e-3, 0.9, 0.999, 1e-8, 0.01);
    bl_adamw_args args = {.n = N,
                          .step = 5,
                          .lr = 1e-3,
                          .beta1 = 0.9,
                          .beta2 = 0.999,
                          .eps = 1e-8,
                          .weight_decay = 0.01,
                          .grad_scale = &grad_scale,
                          .grad = grad,
                          .w = w,
                          .m = bl_tensor_f32(m),
                          .v = bl_tensor_f32(v)};
    test_device device = test_device_create(1);
    assert_int_equal(bl_adamw(device.stream, &args), BL_OK);
    test_finish(device);
    for (int i = 0; i < N; i++) {
        bl_adamw_element(&factors, grad_scale, grad[i], &w2[i], &m2[i], &v2[i]);
        same_element("adamw's w", w[i], w2[i], grad[i], 0);
        same_element("adamw's m", m[i], m2[i], grad[i], 0);
        same_element("adamw's v", v[i], v2[i], grad[i], 0);
    }
    test_device_destroy(device);
    free(w), free(m), free(v), free(grad);
}

/* Also where the number of an element passes 32 bits, in the middle of a block. */
static void adamw_in_bf16_uses_the_element(void **state)
{
    (void)state;
    enum { N = 1500 };
    static const int64_t firsts[] = {0, 12345, (INT64_C(1) << 32) - 700, INT64_C(3) << 32};
    const float edges[] = {0.0f, -0.0f, 1e-42f, 3e38f, INFINITY, NAN};
    bl_adamw_factors factors = bl_adamw_factors_of(5, 1e-3, 0.9, 0.999, 1e-8, 0.01);
    test_device device = test_device_create(2);

    for (size_t k = 0; k < BL_COUNT(firsts); k++) {
        float *w = test_random_floats(N, 1), *x = test_random_floats(N, 2),
              *grad = test_random_floats(N, 4), w2[N];
        uint16_t m[N], v[N], m2[N], v2[N];
        for (int i = 0; i < N; i++) m[i] = bl_f32_to_bf16(x[i]), v[i] = bl_f32_to_bf16(x[i] * x[i]);
        for (size_t i = 0; i < BL_COUNT(edges); i++) grad[i] = edges[i];
        memcpy(w2, w, sizeof w2), memcpy(m2, m, sizeof m2), memcpy(v2, v, sizeof v2);
        bl_adamw_args args = {.n = N,
                              .step = 5,
                              .lr = 1e-3,
                              .beta1 = 0.9,
                              .beta2 = 0.999,
                              .eps = 1e-8,
                              .weight_decay = 0.01,
                              .grad = grad,
                              .w = w,
                              .m = bl_tensor_of(m, BL_BF16),
                              .v = bl_tensor_of(v, BL_BF16),
                              .seed = 7,
                              .tensor = 3,
                              .first = firsts[k]};
        assert_int_equal(bl_adamw(device.stream, &args), BL_OK);
        test_finish(device);
        for (int i = 0; i < N; i++) {
            uint64_t element = (uint64_t)(firsts[k] + i);
            bl_philox_key key =
                bl_rounding_key_of(bl_rounding_key(7, 5, 3), (uint32_t)(element >> 32));
            bl_adamw_element_bf16(&factors, 1, grad[i], bl_rounding_word(key, (uint32_t)element),
                                  &w2[i], &m2[i], &v2[i]);
            same_element("adamw's w", w[i], w2[i], grad[i], 0);
            assert_int_equal(m[i], m2[i]);
            assert_int_equal(v[i], v2[i]);
        }
        free(w), free(x), free(grad);
    }
    test_device_destroy(device);
}

static void the_factor_of_clipping(void **state)
{
    (void)state;
    assert_true(bl_clip_factor(0.0, 5.0) == 1.0);
    assert_true(bl_clip_factor(1.0, 0.5) == 1.0);
    assert_true(bl_clip_factor(1.0, 4.0) == 1.0 / (4.0 + 1e-6));
    assert_true(isnan(bl_clip_factor(1.0, NAN)));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_bf16_gets_the_code_of_a_division),
        cmocka_unit_test(halfway_cases_get_the_code_of_a_division),
        cmocka_unit_test(quantized_rows_are_the_host_s),
        cmocka_unit_test(scales_of_edges),
        cmocka_unit_test(decoded_codes_are_the_host_s),
        cmocka_unit_test(bf16_rounding_is_to_nearest_even),
        cmocka_unit_test(swiglu_of_every_gate),
        cmocka_unit_test(rope_and_norm_use_the_elements),
        cmocka_unit_test(adamw_uses_the_element),
        cmocka_unit_test(adamw_in_bf16_uses_the_element),
        cmocka_unit_test(the_factor_of_clipping),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
