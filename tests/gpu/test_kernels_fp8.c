/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA kernels of fp8/ against the host's functions: bit by bit, since the arithmetic is
 * shared. */
#include "gpu_test.h"

#include "fp8/element.h"
#include "fp8/cuda/fp8_cuda.h"
#include "ops/elementwise.h"
#include "ops/norm.h"

/* As in test_kernels.c; also rows that a cluster of blocks shares (past 16,384 columns: 405B's
 * fused qkv, down and gate_up), and past eight blocks. Matrices of less than a tile, of several,
 * with edges. */
static const shape shapes[] = {{1, 16384, 0},  {2, 18432, 0}, {1, 53248, 0}, {1, 106496, 0},
                               {1, 140000, 0}, {172, 768, 0}, {256, 384, 0}, {7, 172, 0},
                               {129, 100, 1},  {5, 1, 0},     {130, 272, 0}, {33, 256, 16},
                               {144, 4112, 0}, {0, 64, 0}};

typedef struct quantize_args {
    const void *x;
    int64_t ld, T, cols;
    const float *column_factor;
    uint8_t *codes;
    float *scales;
} quantize_args;

static bl_status launch_rows(bl_stream *stream, const void *args)
{
    const quantize_args *a = args;
    return fp8_cuda_quantize_rows(stream, a->x, a->ld, a->column_factor, a->T, a->cols, a->codes,
                                  a->scales);
}

static bl_status launch_groups(bl_stream *stream, const void *args)
{
    const quantize_args *a = args;
    return fp8_cuda_quantize_groups(stream, a->x, a->ld, a->T, a->cols, a->codes, a->scales);
}

/* Rows of very different magnitudes, zeros and numbers too small for a scale among them; rows are
 * `gap` apart. */
static float *activations(gpu_test *t, shape s, int64_t gap, buffer *x)
{
    int64_t ld = s.cols + gap;
    float *values = bf16_inputs(t, s.rows * ld, s.shift, 31, 1.0f, x);
    for (int64_t i = 0; i < s.rows * ld; i++) {
        int64_t row = i / ld;
        values[i] = row % 5 == 1   ? 0.0f
                    : row % 5 == 2 ? values[i] * 0x1p-140f
                                   : ldexpf(values[i], (int)(row % 40) - 20);
        if (row % 7 == 3 && i % 97 == 0) values[i] *= 1000.0f;
        uint16_t bits = bl_f32_to_bf16(values[i]);
        memcpy(x->initial + 2 * i, &bits, 2);
        values[i] = bl_bf16_to_f32(bits);
    }
    return values;
}

static void check_rows_with(gpu_test *t, shape s, bool with_factor, int64_t gap)
{
    int64_t n = s.rows * s.cols, ld = s.cols + gap;
    buffer x, factor, codes = buffer_create(t, (size_t)n, 0),
                      scales = buffer_create(t, (size_t)s.rows * 4, 0);
    float *cx = activations(t, s, gap, &x), *cf = f32_inputs(t, s.cols, 0, 32, &factor),
          *row = test_floats(s.cols);
    quantize_args args = {x.gpu,
                          ld,
                          s.rows,
                          s.cols,
                          with_factor ? (float *)factor.gpu : NULL,
                          (uint8_t *)codes.gpu,
                          (float *)scales.gpu};
    run_twice(t, launch_rows, &args, (buffer *[]){&x, &factor, &codes, &scales}, 4);
    uint8_t *want = test_alloc(n, 1);
    float *want_scales = test_floats(s.rows);
    for (int64_t r = 0; r < s.rows; r++) {
        for (int64_t c = 0; c < s.cols; c++)
            row[c] = with_factor ? cx[r * ld + c] * cf[c] : cx[r * ld + c];
        gpu_ok(bl_fp8_row_quantize(bl_device_pool(t->cpu.device), BL_F32, row, 0, 1, s.cols,
                                   want + r * s.cols, want_scales + r));
    }
    same_bytes("row scales", &scales, want_scales, (size_t)s.rows * 4);
    same_bytes("row codes", &codes, want, (size_t)n);
    free(cx), free(cf), free(row), free(want), free(want_scales);
    buffer_free(t, &x), buffer_free(t, &factor), buffer_free(t, &codes), buffer_free(t, &scales);
}

static void check_quantize_rows(gpu_test *t, shape s)
{
    check_rows_with(t, s, false, 0);
    check_rows_with(t, s, true, 0);
    check_rows_with(t, s, true, 24);
}

static void check_quantize_groups(gpu_test *t, shape s)
{
    enum { GAP = 8 };
    int64_t n = s.rows * s.cols, ld = s.cols + GAP, n_groups = bl_ceil_div(s.cols, BL_FP8_BLOCK);
    buffer x, codes = buffer_create(t, (size_t)n, 0),
              scales = buffer_create(t, (size_t)(s.rows * n_groups) * 4, 0);
    float *cx = activations(t, s, GAP, &x), *want_scales = test_floats(s.rows * n_groups);
    uint8_t *want = test_alloc(n, 1);
    quantize_args args = {
        x.gpu, ld, s.rows, s.cols, NULL, (uint8_t *)codes.gpu, (float *)scales.gpu};
    run_twice(t, launch_groups, &args, (buffer *[]){&x, &codes, &scales}, 3);
    for (int64_t r = 0; r < s.rows; r++)
        for (int64_t g = 0; g < n_groups; g++) {
            int64_t c = g * BL_FP8_BLOCK, width = bl_min_i64(BL_FP8_BLOCK, s.cols - c);
            gpu_ok(bl_fp8_row_quantize(bl_device_pool(t->cpu.device), BL_F32, cx + r * ld + c, 0, 1,
                                       width, want + r * s.cols + c, want_scales + g * s.rows + r));
        }
    same_bytes("group scales", &scales, want_scales, (size_t)(s.rows * n_groups) * 4);
    same_bytes("group codes", &codes, want, (size_t)n);
    free(cx), free(want), free(want_scales);
    buffer_free(t, &x), buffer_free(t, &codes), buffer_free(t, &scales);
}

/* A NaN or an infinity in a row makes its scale NaN, and no other's. */
static void check_not_finite(gpu_test *t, shape s)
{
    if (s.rows < 3) return;
    buffer x, codes = buffer_create(t, (size_t)(s.rows * s.cols), 0),
              scales = buffer_create(t, (size_t)s.rows * 4, 0);
    float *cx = bf16_inputs(t, s.rows * s.cols, 0, 33, 1.0f, &x);
    const uint16_t infinity = 0xff80, nan = 0x7fc1;
    memcpy(x.initial + 2 * (s.cols - 1), &infinity, 2);
    memcpy(x.initial + 2 * (2 * s.cols + s.cols / 2), &nan, 2);
    quantize_args args = {
        x.gpu, s.cols, s.rows, s.cols, NULL, (uint8_t *)codes.gpu, (float *)scales.gpu};
    run_twice(t, launch_rows, &args, (buffer *[]){&x, &codes, &scales}, 3);
    for (int64_t r = 0; r < s.rows; r++) {
        float scale;
        memcpy(&scale, scales.result + 4 * r, 4);
        assert_int_equal(isnan(scale), r == 0 || r == 2);
    }
    free(cx);
    buffer_free(t, &x), buffer_free(t, &codes), buffer_free(t, &scales);
}

/* ---- activations that are quantized where they are made: the codes of a pass over them ---- */

static bl_status launch_rmsnorm(bl_stream *stream, const void *args)
{
    return bl_rmsnorm_forward(stream, args);
}

static bl_status launch_swiglu(bl_stream *stream, const void *args)
{
    return bl_swiglu_forward(stream, args);
}

/* `made` holds the plain op's result; `launch` makes it again, with codes. */
static void check_made(gpu_test *t, shape s, gpu_launch launch, const void *args,
                       buffer *const inputs[2], buffer *made, buffer *codes, buffer *scales)
{
    int64_t n = s.rows * s.cols;
    unsigned char *plain = test_alloc(n, 2);
    uint8_t *want = test_alloc(n, 1);
    float *row = test_floats(s.cols), *want_scales = test_floats(s.rows);

    memcpy(plain, made->result, (size_t)n * 2);
    run_twice(t, launch, args, (buffer *[]){made, codes, scales, inputs[0], inputs[1]},
              inputs[1] ? 5 : 4);
    same_bytes("result", made, plain, (size_t)n * 2);
    for (int64_t r = 0; r < s.rows; r++) {
        for (int64_t c = 0; c < s.cols; c++)
            row[c] = bl_bf16_to_f32(bf16_result(made, r * s.cols + c));
        gpu_ok(bl_fp8_row_quantize(bl_device_pool(t->cpu.device), BL_F32, row, 0, 1, s.cols,
                                   want + r * s.cols, want_scales + r));
    }
    same_bytes("scales", scales, want_scales, (size_t)s.rows * 4);
    same_bytes("codes", codes, want, (size_t)n);
    free(plain), free(want), free(row), free(want_scales);
}

static void check_quantized_rmsnorm(gpu_test *t, shape s)
{
    int64_t n = s.rows * s.cols;
    buffer x, w, y = buffer_create(t, (size_t)n * 2, (size_t)s.shift * 2),
                 codes = buffer_create(t, (size_t)n, 0),
                 scales = buffer_create(t, (size_t)s.rows * 4, 0);
    float *cx = activations(t, s, 0, &x), *cw = f32_inputs(t, s.cols, 0, 37, &w);
    bl_rmsnorm_forward_args args = {.T = s.rows,
                                    .H = s.cols,
                                    .eps = 1e-5,
                                    .x = gpu_bf16(&x),
                                    .w = (float *)w.gpu,
                                    .y = gpu_bf16(&y)};
    run_twice(t, launch_rmsnorm, &args, (buffer *[]){&x, &w, &y}, 3);
    args.quantized = (bl_quantized){(uint8_t *)codes.gpu, (float *)scales.gpu};
    check_made(t, s, launch_rmsnorm, &args, (buffer *[]){&x, &w}, &y, &codes, &scales);
    free(cx), free(cw);
    buffer_free(t, &x), buffer_free(t, &w), buffer_free(t, &y), buffer_free(t, &codes),
        buffer_free(t, &scales);
}

static void check_quantized_swiglu(gpu_test *t, shape s)
{
    int64_t n = s.rows * s.cols;
    buffer gate_up, h = buffer_create(t, (size_t)n * 2, (size_t)s.shift * 2),
                    codes = buffer_create(t, (size_t)n, 0),
                    scales = buffer_create(t, (size_t)s.rows * 4, 0);
    float *values = bf16_inputs(t, 2 * n, s.shift, 38, 16.0f, &gate_up);
    bl_swiglu_forward_args args = {
        .T = s.rows, .I = s.cols, .gate_up = gpu_bf16(&gate_up), .h = gpu_bf16(&h)};
    run_twice(t, launch_swiglu, &args, (buffer *[]){&gate_up, &h}, 2);
    args.quantized = (bl_quantized){(uint8_t *)codes.gpu, (float *)scales.gpu};
    check_made(t, s, launch_swiglu, &args, (buffer *[]){&gate_up, NULL}, &h, &codes, &scales);
    free(values);
    buffer_free(t, &gate_up), buffer_free(t, &h), buffer_free(t, &codes), buffer_free(t, &scales);
}

typedef struct matrix_args {
    bl_format format;
    const void *codes;
    const float *scales;
    int64_t rows, cols, ld;
    void *dst;
} matrix_args;

static bl_status launch_dequantize(bl_stream *stream, const void *args)
{
    const matrix_args *a = args;
    return fp8_cuda_dequantize(stream, a->format, a->codes, a->scales, a->rows, a->cols, a->dst);
}

static void check_dequantize(gpu_test *t, shape s)
{
    int64_t n = s.rows * s.cols,
            n_blocks = bl_ceil_div(s.rows, BL_FP8_BLOCK) * bl_ceil_div(s.cols, BL_FP8_BLOCK);
    buffer scales, codes = buffer_create(t, (size_t)n * 4, (size_t)s.shift * 4),
                   dst = buffer_create(t, (size_t)n * 2, (size_t)s.shift * 2);
    float *cs = f32_inputs(t, bl_max_i64(s.rows, n_blocks), 0, 34, &scales),
          *numbers = test_random_floats(n, 35), *want = test_floats(n);
    for (int format = 0; format < BL_FORMAT_COUNT; format++) {
        if (bl_format_is_packed((bl_format)format)) continue;
        for (int64_t i = 0; i < n; i++) {
            uint16_t half =
                format == BL_FORMAT_F16 ? bl_f32_to_f16(numbers[i]) : bl_f32_to_bf16(numbers[i]);
            uint8_t code = (uint8_t)(i * 37 % 256);
            if ((code & 0x7f) == BL_FP8_NAN) code = 0x80;
            if (bl_format_has_scales((bl_format)format))
                codes.initial[i] = code;
            else if (format == BL_FORMAT_F32)
                memcpy(codes.initial + 4 * i, &numbers[i], 4);
            else
                memcpy(codes.initial + 2 * i, &half, 2);
        }
        bl_fp8_dequantize(bl_device_pool(t->cpu.device), (bl_format)format, codes.initial, cs,
                          s.rows, s.cols, want);
        matrix_args args = {
            (bl_format)format, codes.gpu, (float *)scales.gpu, s.rows, s.cols, 0, dst.gpu};
        run_twice(t, launch_dequantize, &args, (buffer *[]){&codes, &scales, &dst}, 3);
        bf16_is_rounded(bl_format_name((bl_format)format), &dst, want, n);
    }
    free(cs), free(numbers), free(want);
    buffer_free(t, &scales), buffer_free(t, &codes), buffer_free(t, &dst);
}

static bl_status launch_transpose(bl_stream *stream, const void *args)
{
    const matrix_args *a = args;
    return fp8_cuda_transpose(stream, a->codes, a->rows, a->cols, a->dst);
}

static bl_status launch_transpose_scales(bl_stream *stream, const void *args)
{
    const matrix_args *a = args;
    return fp8_cuda_transpose_scales(stream, a->codes, a->rows, a->cols, a->dst, a->ld);
}

static bl_status launch_fill(bl_stream *stream, const void *args)
{
    const matrix_args *a = args;
    return fp8_cuda_fill(stream, a->dst, a->rows, 0.5f);
}

static void check_transpose(gpu_test *t, shape s)
{
    int64_t n = s.rows * s.cols;
    buffer src = buffer_create(t, (size_t)n, (size_t)s.shift), dst = buffer_create(t, (size_t)n, 0);
    for (int64_t i = 0; i < n; i++) src.initial[i] = (uint8_t)(i * 2654435761u >> 13);
    uint8_t *want = test_alloc(n, 1);
    bl_fp8_transpose(bl_device_pool(t->cpu.device), src.initial, s.rows, s.cols, want);
    matrix_args args = {.codes = src.gpu, .rows = s.rows, .cols = s.cols, .dst = dst.gpu};
    run_twice(t, launch_transpose, &args, (buffer *[]){&src, &dst}, 2);
    same_bytes("transpose", &dst, want, (size_t)n);
    free(want);
    buffer_free(t, &src), buffer_free(t, &dst);
}

static void check_scales(gpu_test *t, shape s)
{
    enum { GAP = 3 };
    int64_t n = s.rows * s.cols, ld = s.rows + GAP;
    buffer src, dst = buffer_create(t, (size_t)(s.cols * ld) * 4, 4);
    float *values = f32_inputs(t, n, s.shift, 36, &src), *want = test_floats(s.cols * ld);
    memcpy(want, dst.initial, (size_t)(s.cols * ld) * 4);
    for (int64_t i = 0; i < n; i++) want[i % s.cols * ld + i / s.cols] = values[i];
    matrix_args args = {.codes = src.gpu, .rows = s.rows, .cols = s.cols, .ld = ld, .dst = dst.gpu};
    run_twice(t, launch_transpose_scales, &args, (buffer *[]){&src, &dst}, 2);
    same_bytes("transposed scales", &dst, want, (size_t)(s.cols * ld) * 4);
    args.rows = s.cols * ld;
    for (int64_t i = 0; i < args.rows; i++) want[i] = 0.5f;
    run_twice(t, launch_fill, &args, (buffer *[]){&dst}, 1);
    same_bytes("fill", &dst, want, (size_t)args.rows * 4);
    free(values), free(want);
    buffer_free(t, &src), buffer_free(t, &dst);
}

int main(void)
{
    static const kernel_case kernels[] = {
        {"quantize_rows", check_quantize_rows},
        {"quantize_groups", check_quantize_groups},
        {"rmsnorm, quantized", check_quantized_rmsnorm},
        {"swiglu, quantized", check_quantized_swiglu},
        {"numbers that are not finite", check_not_finite},
        {"dequantize", check_dequantize},
        {"transpose", check_transpose},
        {"transpose_scales, fill", check_scales},
    };
    return run_kernels(kernels, (int)BL_COUNT(kernels), shapes, (int)BL_COUNT(shapes));
}
