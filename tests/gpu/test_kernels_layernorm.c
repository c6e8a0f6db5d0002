/* SPDX-License-Identifier: Apache-2.0 */
/* LayerNorm and GELU on CUDA against their CPU twins, over the shapes below. */
#include "gpu_test.h"

#include "ops/elementwise.h"
#include "ops/norm.h"

/* Falcon-180B's rows; rows too long for a block's registers; not multiples of 8, of a warp; one
 * token, one column, none; buffers that begin anywhere. */
static const shape shapes[] = {{1, 14848, 0}, {2, 53248, 0}, {172, 768, 0},
                               {7, 172, 0},   {129, 100, 1}, {5, 1, 0},
                               {2, 2049, 3},  {1, 16391, 0}, {0, 64, 0}};

#define LAUNCH(op)                                                                                 \
    static bl_status launch_##op(bl_stream *stream, const void *args)                              \
    {                                                                                              \
        return bl_##op(stream, args);                                                              \
    }
LAUNCH(layernorm_forward)
LAUNCH(layernorm_backward)
LAUNCH(gelu_forward)
LAUNCH(gelu_backward)

/* ---- LayerNorm ---- */

/* As in RMSNorm: groups' sums of eight are off by 9 u of their magnitudes, which are below 5; the
 * mean so by 45 u, rstd by as much; y by that times rstd |w| <= 2. dx: the two sums, as `along` of
 * RMSNorm, and the mean's error in them; rstd is 0.5 here, where H > 1. */
static void check_layernorm(gpu_test *t, shape s)
{
    int64_t n = s.rows * s.cols;
    size_t row_bytes = (size_t)s.rows * 4;
    buffer x, w, b, dy, y = buffer_create(t, (size_t)n * 2, (size_t)s.shift * 2),
                        dx = buffer_create(t, (size_t)n * 2, (size_t)s.shift * 2),
                        mean = buffer_create(t, row_bytes, 0),
                        rstd = buffer_create(t, row_bytes, 0);
    float *cx = bf16_inputs(t, n, s.shift, 31, 4.0f, &x), *cw = f32_inputs(t, s.cols, 0, 32, &w),
          *cb = f32_inputs(t, s.cols, 0, 33, &b), *cdy = bf16_inputs(t, n, s.shift, 34, 1.0f, &dy),
          *cy = test_floats(n), *cdx = test_floats(n), *cmean = test_floats(s.rows),
          *crstd = test_floats(s.rows);
    bl_layernorm_forward_args forward = {.T = s.rows,
                                         .H = s.cols,
                                         .eps = 1e-5,
                                         .x = bl_tensor_f32(cx),
                                         .w = cw,
                                         .b = cb,
                                         .y = bl_tensor_f32(cy),
                                         .mean = cmean,
                                         .rstd = crstd};
    bl_layernorm_backward_args backward = {.T = s.rows,
                                           .H = s.cols,
                                           .x = bl_tensor_f32(cx),
                                           .w = cw,
                                           .mean = cmean,
                                           .rstd = crstd,
                                           .dy = bl_tensor_f32(cdy),
                                           .dx = bl_tensor_f32(cdx)};
    gpu_ok(bl_layernorm_forward(t->cpu.stream, &forward));
    gpu_ok(bl_layernorm_backward(t->cpu.stream, &backward));
    test_finish(t->cpu);
    double *slack = test_doubles(n), *d_slack = test_doubles(n);
    for (int64_t i = 0; i < n; i++) {
        double scale = (double)crstd[i / s.cols];
        slack[i] = 200 * U * fmax(1, scale);
        d_slack[i] = 400 * U * fmax(1, scale);
    }
    forward.x = backward.x = gpu_bf16(&x), forward.w = backward.w = (float *)w.gpu;
    forward.mean = (float *)mean.gpu, forward.rstd = (float *)rstd.gpu;
    forward.b = (float *)b.gpu, forward.y = gpu_bf16(&y);
    backward.mean = forward.mean, backward.rstd = forward.rstd;
    backward.dy = gpu_bf16(&dy), backward.dx = gpu_bf16(&dx);
    run_twice(t, launch_layernorm_forward, &forward, (buffer *[]){&x, &w, &b, &y, &mean, &rstd}, 6);
    bf16_is_within("layernorm y", &y, cy, slack, U, n);
    memcpy(mean.initial, mean.result, row_bytes), memcpy(rstd.initial, rstd.result, row_bytes);
    run_twice(t, launch_layernorm_backward, &backward, (buffer *[]){&x, &w, &mean, &rstd, &dy, &dx},
              6);
    bf16_is_within("layernorm dx", &dx, cdx, d_slack, U, n);
    unsigned char *apart = test_alloc(n, 2);
    memcpy(apart, dx.result, (size_t)n * 2);
    backward.dx = gpu_bf16(&dy);
    run_twice(t, launch_layernorm_backward, &backward, (buffer *[]){&x, &w, &mean, &rstd, &dy}, 5);
    same_bytes("layernorm dx over dy", &dy, apart, (size_t)n * 2);
    for (int64_t i = 0; i < n; i++) { /* accumulated: twice the value; its rounding to bf16 */
        cdx[i] = 2 * bl_bf16_to_f32(bf16_result(&dx, i));
        d_slack[i] = 0x1p-8 * fabs((double)cdx[i]);
    }
    memcpy(dx.initial, apart, (size_t)n * 2);
    backward.dx = gpu_bf16(&dx), backward.accumulate = 1;
    run_twice(t, launch_layernorm_backward, &backward, (buffer *[]){&x, &w, &mean, &rstd, &dy, &dx},
              6);
    bf16_is_within("layernorm dx added", &dx, cdx, d_slack, U, n);
    memcpy(apart, y.result, (size_t)n * 2);
    forward.y = gpu_bf16(&x), forward.mean = forward.rstd = NULL;
    run_twice(t, launch_layernorm_forward, &forward, (buffer *[]){&x, &w, &b}, 3);
    same_bytes("layernorm in place", &x, apart, (size_t)n * 2);
    free(cx), free(cw), free(cb), free(cdy), free(cy), free(cdx), free(cmean), free(crstd);
    free(slack), free(d_slack), free(apart);
    buffer *all[] = {&x, &w, &b, &dy, &y, &dx, &mean, &rstd};
    for (size_t i = 0; i < BL_COUNT(all); i++) buffer_free(t, all[i]);
}

/* ---- GELU ---- */

/* exp is off by 2^-22 + |x| 2^-23 (element_internal.h) of a number that is at most exp(-|x|): 8 u
 * of 1 at most, and times 2 c' u below 4. */
static void check_gelu(gpu_test *t, shape s)
{
    int64_t n = s.rows * s.cols;
    buffer u, dh, h = buffer_create(t, (size_t)n * 2, (size_t)s.shift * 2),
                  du = buffer_create(t, (size_t)n * 2, (size_t)s.shift * 2);
    float *cu = bf16_inputs(t, n, s.shift, 35, 8.0f, &u),
          *cdh = bf16_inputs(t, n, s.shift, 36, 1.0f, &dh), *ch = test_floats(n),
          *cdu = test_floats(n);
    double *slack = test_doubles(n);
    for (int64_t i = 0; i < n; i++) slack[i] = 40 * U;
    for (int form = BL_GELU_ERF; form <= BL_GELU_TANH; form++) {
        bl_gelu_forward_args forward = {
            .n = n, .form = (bl_gelu_form)form, .u = bl_tensor_f32(cu), .h = bl_tensor_f32(ch)};
        bl_gelu_backward_args backward = {.n = n,
                                          .form = (bl_gelu_form)form,
                                          .u = bl_tensor_f32(cu),
                                          .dh = bl_tensor_f32(cdh),
                                          .du = bl_tensor_f32(cdu)};
        gpu_ok(bl_gelu_forward(t->cpu.stream, &forward));
        gpu_ok(bl_gelu_backward(t->cpu.stream, &backward));
        test_finish(t->cpu);
        forward.u = backward.u = gpu_bf16(&u), forward.h = gpu_bf16(&h);
        backward.dh = gpu_bf16(&dh), backward.du = gpu_bf16(&du);
        run_twice(t, launch_gelu_forward, &forward, (buffer *[]){&u, &h}, 2);
        bf16_is_within("gelu h", &h, ch, slack, U, n);
        run_twice(t, launch_gelu_backward, &backward, (buffer *[]){&u, &dh, &du}, 3);
        bf16_is_within("gelu du", &du, cdu, slack, U, n);
    }
    free(cu), free(cdh), free(ch), free(cdu), free(slack);
    buffer_free(t, &u), buffer_free(t, &dh), buffer_free(t, &h), buffer_free(t, &du);
}

int main(void)
{
    static const kernel_case kernels[] = {
        {"layernorm", check_layernorm},
        {"gelu", check_gelu},
    };
    return run_kernels(kernels, (int)BL_COUNT(kernels), shapes, (int)BL_COUNT(shapes));
}
