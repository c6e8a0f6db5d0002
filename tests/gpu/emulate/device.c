/* SPDX-License-Identifier: Apache-2.0 */
/* A CUDA device that is the CPU: what the launchers ask of device/cuda/, and the ops that have no kernel of
 * their own. A launch has run when it returns. */
#include "emulate/device.h"

#include "base/dtype.h"
#include "device/cuda/stream.h"

bl_status emulated_device_create(int index, bl_device **out)
{
    (void)index;
    return bl_device_create_cpu(1, out);
}

void *bl_cuda_stream_handle(bl_stream *stream)
{
    return stream;
}

void *bl_cuda_stream_scratch(bl_stream *stream)
{
    static _Alignas(256) unsigned char scratch[BL_CUDA_STREAM_SCRATCH_BYTES];
    (void)stream;
    return scratch;
}

bl_status bl_cuda_launched(const char *what)
{
    (void)what;
    return BL_OK;
}

bl_status bl_cuda_fail(const char *what, int cuda_error)
{
    return BL_FAIL(BL_EINTERNAL, "%s: error %d", what, cuda_error);
}

const bl_cuda_properties *bl_cuda_device_properties(const bl_device *device)
{
    static const bl_cuda_properties hopper = {.capability = 90, .n_multiprocessors = 132};
    (void)device;
    return &hopper;
}

bl_status ops_cuda_accumulate(bl_stream *stream, const bl_accumulate_args *a)
{
    bl_add_args sum = {.n = a->n, .a = a->y, .b = a->x, .y = a->y};
    return ops_cuda_add(stream, &sum);
}

static double element(const void *matrix, int64_t i)
{
    return (double)bl_bf16_to_f32(((const uint16_t *)matrix)[i]);
}

/* bf16 operands, sums in double, C in fp32: what the loss head asks for. */
bl_status ops_cuda_matmul(bl_stream *stream, const bl_matmul_args *a)
{
    (void)stream;
    if (a->a.dtype != BL_BF16 || a->c.dtype != BL_F32)
        return BL_FAIL(BL_EINTERNAL, "matmul: not emulated");
    for (int64_t m = 0; m < a->M; m++)
        for (int64_t n = 0; n < a->N; n++) {
            double sum = 0;
            for (int64_t k = 0; k < a->K; k++)
                sum += element(a->a.data, a->transpose_a ? k * a->lda + m : m * a->lda + k) *
                       element(a->b.data, a->transpose_b ? n * a->ldb + k : k * a->ldb + n);
            float *c = (float *)a->c.data + m * a->ldc + n;
            *c = (float)((double)a->alpha * sum +
                         (a->beta != 0.0f ? (double)a->beta * (double)*c : 0.0));
        }
    return BL_OK;
}
