/* SPDX-License-Identifier: Apache-2.0 */
/* absent.c -- `ballast bench linear` on a GPU in builds without CUDA: an error. */
#include "bench/command/linear_cuda.h"

bl_status bl_bench_linear_cuda(bl_device *device, bl_stream *stream, const bl_linear_case *shape)
{
    (void)device, (void)stream, (void)shape;
    return BL_FAIL(BL_ELIMIT, "bench linear: this build has no CUDA");
}
