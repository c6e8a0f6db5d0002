/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA kernels of ops/ against their CPU twins, over the shapes below. */
#include "gpu_test.h"

#include "ops/element_internal.h"
#include "ops/elementwise.h"
#include "ops/norm.h"
#include "ops/optimizer.h"
#include "ops/rope.h"

/* Rows and widths of Llama 3.1 405B (16,384 and 53,248 channels); rows too long for a block's
 * registers; not multiples of 8 (element by element), of 128, of a warp; one token, one column,
 * none; buffers that begin anywhere. */
static const shape shapes[] = {{1, 16384, 0}, {2, 53248, 0}, {3, 18432, 0}, {172, 768, 0},
                               {7, 172, 0},   {129, 100, 1}, {5, 1, 0},     {2, 2049, 3},
                               {33, 256, 8},  {1, 16391, 0}, {0, 64, 0}};

#define LAUNCH(op)                                                                                 \
    static bl_status launch_##op(bl_stream *stream, const void *args)                              \
    {                                                                                              \
        return bl_##op(stream, args);                                                              \
    }
LAUNCH(rmsnorm_forward)
LAUNCH(rmsnorm_backward)
LAUNCH(rope)
LAUNCH(swiglu_forward)
LAUNCH(swiglu_backward)
LAUNCH(add)
LAUNCH(accumulate)
LAUNCH(add_bias)
LAUNCH(scale)
LAUNCH(cast)
LAUNCH(dropout)
LAUNCH(embedding)
LAUNCH(adamw)
LAUNCH(sum_squares)
LAUNCH(clip_scale)
LAUNCH(add_sums)

/* ---- RMSNorm ---- */

/* Forward. Sums of eight squares in fp32: 7 u of a positive sum, so rstd is off by 4 u; 1 u for
 * rounding it, 2 u for two products; the CPU's own 3 u: 10 u. */
static void check_rmsnorm_forward(gpu_test *t, shape s)
{
    int64_t n = s.rows * s.cols;
    buffer x, w, y = buffer_create(t, (size_t)n * 2, (size_t)s.shift * 2),
                 rstd = buffer_create(t, (size_t)s.rows * 4, 0);
    float *cx = bf16_inputs(t, n, s.shift, 1, 3.0f, &x), *cw = f32_inputs(t, s.cols, 0, 2, &w),
          *cy = test_floats(n), *crstd = test_floats(s.rows);
    bl_rmsnorm_forward_args cpu = {.T = s.rows,
                                   .H = s.cols,
                                   .eps = 1e-5,
                                   .x = bl_tensor_f32(cx),
                                   .w = cw,
                                   .y = bl_tensor_f32(cy),
                                   .rstd = crstd};
    gpu_ok(bl_rmsnorm_forward(t->cpu.stream, &cpu));
    test_finish(t->cpu);
    bl_rmsnorm_forward_args gpu = cpu;
    gpu.x = gpu_bf16(&x), gpu.w = (float *)w.gpu, gpu.y = gpu_bf16(&y),
    gpu.rstd = (float *)rstd.gpu;
    run_twice(t, launch_rmsnorm_forward, &gpu, (buffer *[]){&x, &w, &y, &rstd}, 4);
    bf16_is_within("rmsnorm y", &y, cy, NULL, 10 * U, n);
    for (int64_t i = 0; i < s.rows; i++) {
        float got;
        memcpy(&got, rstd.result + 4 * i, 4);
        assert_true(fabs((double)got - (double)crstd[i]) <= 6 * U * (double)crstd[i]);
    }
    gpu.y = gpu_bf16(&x); /* in place, without rstd */
    gpu.rstd = NULL;
    run_twice(t, launch_rmsnorm_forward, &gpu, (buffer *[]){&x, &w}, 2);
    same_bytes("rmsnorm in place", &x, y.result, (size_t)n * 2);
    free(cx), free(cw), free(cy), free(crstd);
    buffer_free(t, &x), buffer_free(t, &w), buffer_free(t, &y), buffer_free(t, &rstd);
}

/* What fp32 may add to bf16's rounding: the products and differences, 4 u of their terms, and
 * `along`, a sum whose groups of eight are off by 9 u of the sum of magnitudes. */
static double *rmsnorm_backward_slack(const bl_rmsnorm_backward_args *a, const float *before)
{
    double *slack = test_doubles(a->T * a->H);
    for (int64_t t = 0; t < a->T; t++) {
        const float *x = (const float *)a->x.data + t * a->H,
                    *dy = (const float *)a->dy.data + t * a->H;
        double magnitude = 0, rstd = (double)a->rstd[t];
        for (int64_t h = 0; h < a->H; h++)
            magnitude += fabs((double)dy[h] * (double)a->w[h] * (double)x[h]);
        double along = rstd * rstd * magnitude / (double)a->H;
        for (int64_t h = 0; h < a->H; h++)
            slack[t * a->H + h] =
                U * rstd *
                    (4 * fabs((double)dy[h] * (double)a->w[h]) + 16 * along * fabs((double)x[h])) +
                2 * U * fabs((double)before[t * a->H + h]);
    }
    return slack;
}

static void check_rmsnorm_backward(gpu_test *t, shape s)
{
    int64_t n = s.rows * s.cols;
    buffer x, w, dy, dx, rstd;
    float *cx = bf16_inputs(t, n, s.shift, 3, 2.0f, &x), *cw = f32_inputs(t, s.cols, 0, 4, &w),
          *cdy = bf16_inputs(t, n, s.shift, 5, 1.0f, &dy),
          *before = bf16_inputs(t, n, s.shift, 6, 1.0f, &dx), *cdx = test_floats(n),
          *crstd = f32_inputs(t, s.rows, 0, 7, &rstd);
    for (int64_t i = 0; i < s.rows; i++) crstd[i] = fabsf(crstd[i]) + 0.1f;
    memcpy(rstd.initial, crstd, (size_t)s.rows * 4);
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        memcpy(cdx, before, (size_t)n * 4);
        bl_rmsnorm_backward_args cpu = {.T = s.rows,
                                        .H = s.cols,
                                        .accumulate = accumulate,
                                        .x = bl_tensor_f32(cx),
                                        .w = cw,
                                        .rstd = crstd,
                                        .dy = bl_tensor_f32(cdy),
                                        .dx = bl_tensor_f32(cdx)};
        gpu_ok(bl_rmsnorm_backward(t->cpu.stream, &cpu));
        test_finish(t->cpu);
        bl_rmsnorm_backward_args gpu = cpu;
        gpu.x = gpu_bf16(&x), gpu.w = (float *)w.gpu, gpu.rstd = (float *)rstd.gpu,
        gpu.dy = gpu_bf16(&dy), gpu.dx = gpu_bf16(&dx);
        run_twice(t, launch_rmsnorm_backward, &gpu, (buffer *[]){&x, &w, &rstd, &dy, &dx}, 5);
        double *slack = rmsnorm_backward_slack(&cpu, before);
        bf16_is_within("rmsnorm dx", &dx, cdx, slack, U, n);
        free(slack);
        if (accumulate) break;
        unsigned char *apart = test_alloc(n, 2);
        memcpy(apart, dx.result, (size_t)n * 2);
        gpu.dx = gpu_bf16(&dy);
        run_twice(t, launch_rmsnorm_backward, &gpu, (buffer *[]){&x, &w, &rstd, &dy}, 4);
        same_bytes("rmsnorm dx over dy", &dy, apart, (size_t)n * 2);
        free(apart);
    }
    free(cx), free(cw), free(cdy), free(before), free(cdx), free(crstd);
    buffer_free(t, &x), buffer_free(t, &w), buffer_free(t, &dy), buffer_free(t, &dx),
        buffer_free(t, &rstd);
}

/* Norms of heads inside wider rows: bit by bit those of the same rows side by side, which the
 * checks above compare with the CPU. */
static void check_head_rows(gpu_test *t, int64_t H, int64_t stride_more)
{
    enum { T = 5, HEADS = 3 };
    int64_t dense = HEADS * H, stride = dense + stride_more, n = T * stride, rows = T * HEADS;
    buffer x, w, d, rstd = buffer_create(t, (size_t)rows * 4, 0), dense_x, dense_d,
                    dense_y = buffer_create(t, (size_t)(T * dense) * 2, 0),
                    y = buffer_create(t, (size_t)n * 2, 0);
    float *cx = bf16_inputs(t, n, 0, 1, 3.0f, &x), *cd = bf16_inputs(t, n, 0, 2, 1.0f, &d),
          *cw = f32_inputs(t, H, 0, 3, &w);
    unsigned char *rows_x = test_alloc(T * dense, 2), *rows_d = test_alloc(T * dense, 2);
    bl_rmsnorm_forward_args forward = {.T = T,
                                       .H = H,
                                       .eps = 1e-5,
                                       .n_heads = HEADS,
                                       .row_stride = stride,
                                       .w = (float *)w.gpu,
                                       .rstd = (float *)rstd.gpu,
                                       .x = gpu_bf16(&x),
                                       .y = gpu_bf16(&y)};
    for (int64_t i = 0; i < T; i++) {
        memcpy(rows_x + i * dense * 2, x.initial + i * stride * 2, (size_t)dense * 2);
        memcpy(rows_d + i * dense * 2, d.initial + i * stride * 2, (size_t)dense * 2);
    }
    dense_x = bytes_input(t, rows_x, (size_t)(T * dense) * 2);
    dense_d = bytes_input(t, rows_d, (size_t)(T * dense) * 2);
    run_twice(t, launch_rmsnorm_forward, &forward, (buffer *[]){&x, &w, &y, &rstd}, 4);
    memcpy(rstd.initial, rstd.result, (size_t)rows * 4);
    bl_rmsnorm_backward_args backward = {.T = T,
                                         .H = H,
                                         .n_heads = HEADS,
                                         .row_stride = stride,
                                         .w = (float *)w.gpu,
                                         .rstd = (float *)rstd.gpu,
                                         .x = gpu_bf16(&x),
                                         .dy = gpu_bf16(&d),
                                         .dx = gpu_bf16(&d)};
    run_twice(t, launch_rmsnorm_backward, &backward, (buffer *[]){&x, &w, &rstd, &d}, 4);
    forward.T = backward.T = rows, forward.n_heads = backward.n_heads = 0;
    forward.x = backward.x = gpu_bf16(&dense_x), forward.y = gpu_bf16(&dense_y);
    backward.dy = backward.dx = gpu_bf16(&dense_d);
    run_twice(t, launch_rmsnorm_forward, &forward, (buffer *[]){&dense_x, &w, &dense_y, &rstd}, 4);
    run_twice(t, launch_rmsnorm_backward, &backward, (buffer *[]){&dense_x, &w, &rstd, &dense_d},
              4);
    for (int64_t i = 0; i < T; i++) {
        assert_memory_equal(y.result + i * stride * 2, dense_y.result + i * dense * 2,
                            (size_t)dense * 2);
        assert_memory_equal(d.result + i * stride * 2, dense_d.result + i * dense * 2,
                            (size_t)dense * 2);
        assert_memory_equal(d.result + (i * stride + dense) * 2,
                            d.initial + (i * stride + dense) * 2, (size_t)stride_more * 2);
    }
    free(cx), free(cd), free(cw), free(rows_x), free(rows_d);
    buffer_free(t, &x), buffer_free(t, &w), buffer_free(t, &d), buffer_free(t, &rstd),
        buffer_free(t, &dense_x), buffer_free(t, &dense_d), buffer_free(t, &dense_y),
        buffer_free(t, &y);
}

static void check_head_norms(gpu_test *t, shape s)
{
    if (s.rows != 1) return; /* uses other shapes, once */
    check_head_rows(t, 128, 256);
    check_head_rows(t, 20, 3);
}

/* ---- RoPE: the same operations, so the same fp32 numbers ---- */

static void check_rope_heads(gpu_test *t, int64_t T, int64_t n_heads, int64_t d, int64_t rotated,
                             int64_t row_stride, int shift)
{
    enum { DOCUMENTS = 4, OFFSET = 3 };
    int64_t half = rotated / 2, n = T * row_stride, n_table = 2 * (T + OFFSET + 1) * half;
    const int32_t cu[DOCUMENTS + 1] = {0, (int32_t)(T / 3), (int32_t)(T / 3), (int32_t)(T / 2),
                                       (int32_t)T};
    buffer x, cosines, sines, cu_seqlens = bytes_input(t, cu, sizeof cu);
    float *cx = bf16_inputs(t, n, shift, 8, 1.0f, &x), *cc = f32_inputs(t, n_table, 0, 9, &cosines),
          *cs = f32_inputs(t, n_table, 0, 10, &sines);
    bl_rope_args cpu = {.T = T,
                        .n_heads = n_heads,
                        .d = d,
                        .row_stride = row_stride,
                        .n_documents = DOCUMENTS,
                        .position_offset = OFFSET,
                        .direction = -1,
                        .cu_seqlens = cu,
                        .cos_table = cc,
                        .sin_table = cs,
                        .x = bl_tensor_f32(cx),
                        .long_after = T / 2 - T / 3 + OFFSET, /* the last document is longer */
                        .long_offset = n_table / 2,
                        .d_rotated = rotated};
    gpu_ok(bl_rope(t->cpu.stream, &cpu));
    test_finish(t->cpu);
    bl_rope_args gpu = cpu;
    gpu.cu_seqlens = (int32_t *)cu_seqlens.gpu;
    gpu.cos_table = (float *)cosines.gpu, gpu.sin_table = (float *)sines.gpu, gpu.x = gpu_bf16(&x);
    run_twice(t, launch_rope, &gpu, (buffer *[]){&x, &cosines, &sines, &cu_seqlens}, 4);
    bf16_is_rounded("rope", &x, cx, n);
    free(cx), free(cc), free(cs);
    buffer_free(t, &x), buffer_free(t, &cosines), buffer_free(t, &sines),
        buffer_free(t, &cu_seqlens);
}

static void check_rope(gpu_test *t, shape s)
{
    if (s.cols == 16384)
        check_rope_heads(t, 5, 136, 128, 128, 18432, 0); /* 405B's q and k in the fused rows */
    if (s.cols >= 64) check_rope_heads(t, s.rows, 2, 20, 20, 64, s.shift);
    if (s.cols >= 256) check_rope_heads(t, s.rows, 3, 64, 64, 3 * 64 + 8, s.shift);
    if (s.cols >= 256) check_rope_heads(t, s.rows, 3, 128, 96, 3 * 128 + 8, s.shift);
    if (s.cols >= 64) check_rope_heads(t, s.rows, 2, 20, 6, 64, s.shift);
    if (s.cols >= 64) check_rope_heads(t, s.rows, 2, 20, 16, 64, s.shift);
}

/* ---- SwiGLU ---- */

/* exp is off by 2^-22 + |g| 2^-23 (element_internal.h), |g| <= 16: 36 u; sigma, the products and
 * the CPU's exp: 10 u more. Where 1 + g (1 - sigma) cancels, the error is that of its terms. */
static void check_swiglu(gpu_test *t, shape s)
{
    int64_t I = s.cols, n = s.rows * I;
    buffer gate_up, dh, h = buffer_create(t, (size_t)n * 2, (size_t)s.shift * 2),
                        d = buffer_create(t, (size_t)n * 4, 0);
    float *cg = bf16_inputs(t, 2 * n, s.shift, 11, 16.0f, &gate_up),
          *cdh = bf16_inputs(t, n, s.shift, 12, 1.0f, &dh), *ch = test_floats(n),
          *cd = test_floats(2 * n);
    bl_swiglu_forward_args forward = {
        .T = s.rows, .I = I, .gate_up = bl_tensor_f32(cg), .h = bl_tensor_f32(ch)};
    bl_swiglu_backward_args backward = {.T = s.rows,
                                        .I = I,
                                        .gate_up = bl_tensor_f32(cg),
                                        .dh = bl_tensor_f32(cdh),
                                        .d_gate_up = bl_tensor_f32(cd)};
    gpu_ok(bl_swiglu_forward(t->cpu.stream, &forward));
    gpu_ok(bl_swiglu_backward(t->cpu.stream, &backward));
    test_finish(t->cpu);
    double *slack = test_doubles(2 * n);
    for (int64_t i = 0; i < n; i++) {
        int64_t at = i / I * 2 * I + i % I;
        double g = (double)cg[at], sigma = 1 / (1 + exp(-g));
        slack[at] = 50 * U * fabs((double)cdh[i] * (double)cg[at + I]) * sigma * (1 + fabs(g));
    }
    forward.gate_up = backward.gate_up = gpu_bf16(&gate_up);
    forward.h = gpu_bf16(&h), backward.dh = gpu_bf16(&dh), backward.d_gate_up = gpu_bf16(&d);
    run_twice(t, launch_swiglu_forward, &forward, (buffer *[]){&gate_up, &h}, 2);
    bf16_is_within("swiglu h", &h, ch, NULL, 50 * U, n);
    run_twice(t, launch_swiglu_backward, &backward, (buffer *[]){&gate_up, &dh, &d}, 3);
    bf16_is_within("swiglu d_gate_up", &d, cd, slack, 50 * U, 2 * n);
    unsigned char *apart = test_alloc(n, 4);
    memcpy(apart, d.result, (size_t)n * 4);
    backward.d_gate_up = gpu_bf16(&gate_up);
    run_twice(t, launch_swiglu_backward, &backward, (buffer *[]){&gate_up, &dh}, 2);
    if (s.shift == 0) same_bytes("swiglu in place", &gate_up, apart, (size_t)n * 4);
    free(cg), free(cdh), free(ch), free(cd), free(slack), free(apart);
    buffer_free(t, &gate_up), buffer_free(t, &dh), buffer_free(t, &h), buffer_free(t, &d);
}

/* ---- additions, casts: exact ---- */

static void check_add(gpu_test *t, shape s)
{
    int64_t n = s.rows * s.cols;
    buffer a, b, y = buffer_create(t, (size_t)n * 2, (size_t)s.shift * 2), fa, fb;
    float *ca = bf16_inputs(t, n, s.shift, 13, 1.0f, &a),
          *cb = bf16_inputs(t, n, s.shift, 14, 1.0f, &b), *cy = test_floats(n),
          *cfa = f32_inputs(t, n, s.shift, 15, &fa), *cfb = f32_inputs(t, n, s.shift, 16, &fb);
    bl_add_args add = {
        .n = n, .a = bl_tensor_f32(ca), .b = bl_tensor_f32(cb), .y = bl_tensor_f32(cy)};
    gpu_ok(bl_add(t->cpu.stream, &add));
    bl_accumulate_args accumulate = {.n = n, .x = bl_tensor_f32(cfa), .y = bl_tensor_f32(cfb)};
    gpu_ok(bl_accumulate(t->cpu.stream, &accumulate));
    test_finish(t->cpu);
    add = (bl_add_args){.n = n, .a = gpu_bf16(&a), .b = gpu_bf16(&b), .y = gpu_bf16(&y)};
    run_twice(t, launch_add, &add, (buffer *[]){&a, &b, &y}, 3);
    bf16_is_rounded("add", &y, cy, n);
    accumulate = (bl_accumulate_args){.n = n, .x = gpu_f32(&fa), .y = gpu_f32(&fb)};
    run_twice(t, launch_accumulate, &accumulate, (buffer *[]){&fa, &fb}, 2);
    same_bytes("accumulate", &fb, cfb, (size_t)n * 4);
    free(ca), free(cb), free(cy), free(cfa), free(cfb);
    buffer_free(t, &a), buffer_free(t, &b), buffer_free(t, &y), buffer_free(t, &fa),
        buffer_free(t, &fb);
}

static void check_add_bias(gpu_test *t, shape s)
{
    int64_t n = s.rows * s.cols;
    buffer y, bias;
    float *cy = bf16_inputs(t, n, s.shift, 21, 1.0f, &y),
          *cbias = f32_inputs(t, s.cols, 0, 22, &bias);
    bl_add_bias_args add = {.T = s.rows, .N = s.cols, .bias = cbias, .y = bl_tensor_f32(cy)};
    gpu_ok(bl_add_bias(t->cpu.stream, &add));
    test_finish(t->cpu);
    add.bias = (float *)bias.gpu, add.y = gpu_bf16(&y);
    run_twice(t, launch_add_bias, &add, (buffer *[]){&y, &bias}, 2);
    bf16_is_rounded("add_bias", &y, cy, n);
    free(cy), free(cbias);
    buffer_free(t, &y), buffer_free(t, &bias);
}

static void check_scale(gpu_test *t, shape s)
{
    int64_t n = s.rows * s.cols;
    buffer x;
    float *cx = bf16_inputs(t, n, s.shift, 23, 1.0f, &x);
    bl_scale_args args = {.n = n, .scale = 0.7f, .x = bl_tensor_f32(cx), .y = bl_tensor_f32(cx)};
    gpu_ok(bl_scale(t->cpu.stream, &args));
    test_finish(t->cpu);
    args.x = args.y = gpu_bf16(&x);
    run_twice(t, launch_scale, &args, (buffer *[]){&x}, 1);
    bf16_is_rounded("scale", &x, cx, n);
    free(cx);
    buffer_free(t, &x);
}

static void check_cast(gpu_test *t, shape s)
{
    int64_t n = s.rows * s.cols;
    buffer wide, narrow = buffer_create(t, (size_t)n * 2, (size_t)s.shift * 2), near,
                 widened = buffer_create(t, (size_t)n * 4, 0);
    float *cw = f32_inputs(t, n, s.shift, 17, &wide),
          *cn = bf16_inputs(t, n, s.shift, 18, 1.0f, &near);
    bl_cast_args cast = {.n = n, .x = gpu_f32(&wide), .y = gpu_bf16(&narrow)};
    run_twice(t, launch_cast, &cast, (buffer *[]){&wide, &narrow}, 2);
    bf16_is_rounded("cast", &narrow, cw, n);
    cast = (bl_cast_args){.n = n, .x = gpu_bf16(&near), .y = gpu_f32(&widened)};
    run_twice(t, launch_cast, &cast, (buffer *[]){&near, &widened}, 2);
    same_bytes("cast", &widened, cn, (size_t)n * 4);
    cast = (bl_cast_args){.n = n, .x = gpu_bf16(&near), .y = gpu_bf16(&narrow)};
    run_twice(t, launch_cast, &cast, (buffer *[]){&near, &narrow}, 2);
    bf16_is_rounded("copy", &narrow, cn, n);
    free(cw), free(cn);
    buffer_free(t, &wide), buffer_free(t, &narrow), buffer_free(t, &near), buffer_free(t, &widened);
}

/* ---- dropout: exact, mask and all ---- */

static void check_dropout(gpu_test *t, shape s)
{
    int64_t n = s.rows * s.cols;
    buffer x, fx, y = buffer_create(t, (size_t)n * 2, (size_t)s.shift * 2);
    float *cx = bf16_inputs(t, n, s.shift, 19, 1.0f, &x), *cfx = f32_inputs(t, n, s.shift, 20, &fx),
          *cy = test_floats(n);
    int64_t *samples = test_alloc(s.rows, 8);
    int32_t *positions = test_alloc(s.rows, 4);
    for (int64_t i = 0; i < s.rows; i++) {
        samples[i] = i / 3 + ((int64_t)(i % 2) << 40);
        positions[i] = (int32_t)(i * 977 % 131072);
    }
    buffer sample = bytes_input(t, samples, (size_t)s.rows * 8),
           position = bytes_input(t, positions, (size_t)s.rows * 4);
    const float rates[] = {0.0f, 0.1f, 0.75f};
    for (size_t k = 0; k < BL_COUNT(rates); k++) {
        bl_dropout_args cpu = {.T = s.rows,
                               .C = s.cols,
                               .p = rates[k],
                               .seed = 0x123456789abcdefu,
                               .step = 7,
                               .layer = 125,
                               .matrix = 3,
                               .sample = samples,
                               .position = positions,
                               .x = bl_tensor_f32(cx),
                               .y = bl_tensor_f32(cy)};
        gpu_ok(bl_dropout(t->cpu.stream, &cpu));
        test_finish(t->cpu);
        bl_dropout_args gpu = cpu;
        gpu.sample = (int64_t *)sample.gpu, gpu.position = (int32_t *)position.gpu,
        gpu.x = gpu_bf16(&x), gpu.y = gpu_bf16(&y);
        run_twice(t, launch_dropout, &gpu, (buffer *[]){&x, &y, &sample, &position}, 4);
        bf16_is_rounded("dropout", &y, cy, n);
        cpu.x = bl_tensor_f32(cfx);
        gpu_ok(bl_dropout(t->cpu.stream, &cpu));
        test_finish(t->cpu);
        gpu.x = gpu.y = gpu_f32(&fx);
        run_twice(t, launch_dropout, &gpu, (buffer *[]){&fx, &sample, &position}, 3);
        same_bytes("dropout of fp32", &fx, cy, (size_t)n * 4);
    }
    free(cx), free(cfx), free(cy), free(samples), free(positions);
    buffer_free(t, &x), buffer_free(t, &fx), buffer_free(t, &y), buffer_free(t, &sample),
        buffer_free(t, &position);
}

/* ---- embedding: exact ---- */

static void check_embedding(gpu_test *t, shape s)
{
    enum { V = 11 };
    int64_t n = s.rows * s.cols;
    buffer table, y = buffer_create(t, (size_t)n * 2, (size_t)s.shift * 2);
    float *ct = f32_inputs(t, V * s.cols, s.shift, 21, &table), *cy = test_floats(n);
    int32_t *cids = test_alloc(s.rows, 4);
    for (int64_t i = 0; i < s.rows; i++) cids[i] = (int32_t)(i * 7 % V);
    buffer ids = bytes_input(t, cids, (size_t)s.rows * 4);
    const bl_dtype dtypes[] = {BL_F32, BL_F16, BL_BF16};
    for (size_t k = 0; k < BL_COUNT(dtypes);
         k++) { /* the same bytes, read as another type; F16 without its NaN */
        if (dtypes[k] == BL_F16)
            for (int64_t i = 0; i < V * s.cols; i++) {
                uint16_t bits = bl_f32_to_f16(ct[i]);
                memcpy(table.initial + 2 * i, &bits, 2);
            }
        if (dtypes[k] == BL_BF16)
            for (int64_t i = 0; i < V * s.cols; i++) {
                uint16_t bits = bl_f32_to_bf16(ct[i]);
                memcpy(table.initial + 2 * i, &bits, 2);
            }
        bl_embedding_args cpu = {.T = s.rows,
                                 .H = s.cols,
                                 .ids = cids,
                                 .table = bl_tensor_of(table.initial, dtypes[k]),
                                 .y = bl_tensor_f32(cy)};
        gpu_ok(bl_embedding(t->cpu.stream, &cpu));
        test_finish(t->cpu);
        bl_embedding_args gpu = cpu;
        gpu.ids = (int32_t *)ids.gpu, gpu.table = bl_tensor_of(table.gpu, dtypes[k]),
        gpu.y = gpu_bf16(&y);
        run_twice(t, launch_embedding, &gpu, (buffer *[]){&table, &ids, &y}, 3);
        bf16_is_rounded("embedding", &y, cy, n);
    }
    free(ct), free(cy), free(cids);
    buffer_free(t, &table), buffer_free(t, &y), buffer_free(t, &ids);
}

/* ---- the optimizer: AdamW and clipping exactly; a sum of n squares in double within 2 n 2^-53
 * ---- */

static void check_adamw(gpu_test *t, shape s, bl_dtype dtype)
{
    int64_t n = s.rows * s.cols, moment_bytes = n * (int64_t)bl_dtype_bytes(dtype);
    bool is_bf16 = dtype == BL_BF16;
    buffer w, m, v, grad;
    float *cw = f32_inputs(t, n, s.shift, 22, &w), *cgrad = f32_inputs(t, n, s.shift, 25, &grad),
          *fm = is_bf16 ? bf16_inputs(t, n, s.shift, 23, 1.0f, &m)
                        : f32_inputs(t, n, s.shift, 23, &m),
          *fv = is_bf16 ? bf16_inputs(t, n, s.shift, 24, 1.0f, &v)
                        : f32_inputs(t, n, s.shift, 24, &v);
    unsigned char *cm = test_alloc(n, 4), *cv = test_alloc(n, 4);
    for (int64_t i = 0; i < n; i++) {
        float size = fabsf(fv[i]) * 1e-3f;
        uint16_t half = bl_f32_to_bf16(size);
        memcpy(v.initial + i * (is_bf16 ? 2 : 4), is_bf16 ? (void *)&half : (void *)&size,
               is_bf16 ? 2 : 4);
    }
    memcpy(cm, m.initial, (size_t)moment_bytes), memcpy(cv, v.initial, (size_t)moment_bytes);
    double factor = 0.37;
    buffer scale = bytes_input(t, &factor, sizeof factor);
    bl_adamw_args cpu = {.n = n,
                         .step = 3,
                         .lr = 1e-3,
                         .beta1 = 0.9,
                         .beta2 = 0.999,
                         .eps = 1e-8,
                         .weight_decay = 0.1,
                         .grad_scale = &factor,
                         .grad = cgrad,
                         .w = cw,
                         .m = bl_tensor_of(cm, dtype),
                         .v = bl_tensor_of(cv, dtype),
                         .seed = 42,
                         .tensor = 1,
                         .first = (INT64_C(1) << 32) - n / 2};
    gpu_ok(bl_adamw(t->cpu.stream, &cpu));
    test_finish(t->cpu);
    bl_adamw_args gpu = cpu;
    gpu.grad_scale = (double *)scale.gpu, gpu.grad = (float *)grad.gpu;
    gpu.w = (float *)w.gpu, gpu.m.data = m.gpu, gpu.v.data = v.gpu;
    run_twice(t, launch_adamw, &gpu, (buffer *[]){&w, &m, &v, &grad, &scale}, 5);
    same_bytes("adamw w", &w, cw, (size_t)n * 4);
    same_bytes("adamw m", &m, cm, (size_t)moment_bytes);
    same_bytes("adamw v", &v, cv, (size_t)moment_bytes);
    free(cw), free(cm), free(cv), free(cgrad), free(fm), free(fv);
    buffer_free(t, &w), buffer_free(t, &m), buffer_free(t, &v), buffer_free(t, &grad),
        buffer_free(t, &scale);
}

static void check_adamw_f32(gpu_test *t, shape s)
{
    check_adamw(t, s, BL_F32);
}

static void check_adamw_bf16(gpu_test *t, shape s)
{
    check_adamw(t, s, BL_BF16);
}

/* Of integers: exact in any order. */
static void check_sums(gpu_test *t)
{
    enum { N = 701 };
    double sums[N], before = 0.25, got;

    for (int i = 0; i < N; i++) sums[i] = i;
    buffer x = bytes_input(t, sums, sizeof sums), sum = bytes_input(t, &before, sizeof before);
    bl_add_sums_args args = {.n = N, .sums = (double *)x.gpu, .sum = (double *)sum.gpu};
    run_twice(t, launch_add_sums, &args, (buffer *[]){&x, &sum}, 2);
    memcpy(&got, sum.result, sizeof got);
    assert_true(got == 0.25 + N * (N - 1) / 2);
    buffer_free(t, &x), buffer_free(t, &sum);
}

/* The first shape selects so many gradients that a block needs several rounds for its slice. */
static void check_norm_of_gradients(gpu_test *t, shape s)
{
    int64_t n = s.rows == 1 && s.cols == 16384 ? 10000019 : s.rows * s.cols;
    double want = 0.25, got, results[2], before[3] = {0.25, 0, 0};
    check_sums(t);
    buffer x, sum = bytes_input(t, before, sizeof before);
    float *cx = f32_inputs(t, n, s.shift, 26, &x);
    bl_sum_squares_args squares = {.n = n, .x = cx, .sum = &want};
    gpu_ok(bl_sum_squares(t->cpu.stream, &squares));
    test_finish(t->cpu);
    squares = (bl_sum_squares_args){.n = n, .x = (float *)x.gpu, .sum = (double *)sum.gpu};
    run_twice(t, launch_sum_squares, &squares, (buffer *[]){&x, &sum}, 2);
    memcpy(&got, sum.result, sizeof got);
    assert_true(fabs(got - want) <= 2 * (double)(n + 1) * 0x1p-53 * want);

    const double limits[] = {0.0, 1e-3, 1e9};
    for (size_t k = 0; k < BL_COUNT(limits); k++) {
        bl_clip_scale_args clip = {.max_norm = limits[k],
                                   .sum_squares = (double *)sum.gpu,
                                   .norm = (double *)sum.gpu + 1,
                                   .grad_scale = (double *)sum.gpu + 2};
        run_twice(t, launch_clip_scale, &clip, (buffer *[]){&sum}, 1);
        memcpy(results, sum.result + sizeof(double), sizeof results);
        assert_true(results[0] == 0.5 && results[1] == bl_clip_factor(limits[k], 0.5));
    }
    free(cx);
    buffer_free(t, &x), buffer_free(t, &sum);
}

int main(void)
{
    static const kernel_case kernels[] = {
        {"rmsnorm_forward", check_rmsnorm_forward},
        {"rmsnorm_backward", check_rmsnorm_backward},
        {"norms of heads", check_head_norms},
        {"rope", check_rope},
        {"swiglu", check_swiglu},
        {"add", check_add},
        {"add_bias", check_add_bias},
        {"scale", check_scale},
        {"cast", check_cast},
        {"dropout", check_dropout},
        {"embedding", check_embedding},
        {"adamw", check_adamw_f32},
        {"adamw, moments in bf16", check_adamw_bf16},
        {"norm of gradients", check_norm_of_gradients},
    };
    return run_kernels(kernels, (int)BL_COUNT(kernels), shapes, (int)BL_COUNT(shapes));
}
