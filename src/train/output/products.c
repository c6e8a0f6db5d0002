/* SPDX-License-Identifier: Apache-2.0 */
/* products.c -- what changes the bits of a run besides its configuration, data and model: the
 * kind of its products on this machine, or the GPU (src/ops/README.md: all else rounds alike
 * everywhere); and the build of Ballast. */
#include <string.h>

#include "base/build_id.h"
#include "base/json.h"
#include "base/log.h"
#include "train/training_internal.h"

/* Of a checkpoint's state. */
static const char KEY[] = "products", BUILD_KEY[] = "build";

bl_status bl_products_describe(const bl_job *job, char text[BL_CUDA_GEMM_TEXT_BYTES])
{
    if (job->config->device == BL_CONFIG_DEVICE_CUDA)
        return bl_cuda_gemm_describe(job->topology.gpu, text);
    if (job->config->compute_dtype == BL_COMPUTE_BF16)
        bl_cpu_gemm_describe_bf16(text);
    else
        bl_cpu_gemm_describe(text);
    return BL_OK;
}

bl_status bl_products_record(const bl_job *job, json_t *state)
{
    char text[BL_CUDA_GEMM_TEXT_BYTES];
    BL_TRY(bl_products_describe(job, text));
    return json_object_set_new(state, KEY, json_string(text)) == 0 &&
                   json_object_set_new(state, BUILD_KEY, json_string(bl_build_id())) == 0
               ? BL_OK
               : BL_FAIL(BL_ENOMEM, "the description of a checkpoint");
}

bl_status bl_products_compare(const bl_job *job, const char *checkpoint, const json_t *state)
{
    char text[BL_CUDA_GEMM_TEXT_BYTES];
    const char *old = NULL, *build = NULL; /* of checkpoints made before the keys were */

    BL_TRY(bl_json_get_string(checkpoint, state, KEY, BL_JSON_OPTIONAL, &old));
    BL_TRY(bl_products_describe(job, text));
    if (old && strcmp(old, text) != 0)
        bl_log_warning("not bit-identical: checkpoint %s was made with %s, this machine has %s",
                       checkpoint, old, text);
    BL_TRY(bl_json_get_string(checkpoint, state, BUILD_KEY, BL_JSON_OPTIONAL, &build));
    if (!build || strcmp(build, bl_build_id()) != 0)
        bl_log_warning("maybe not bit-identical: checkpoint %s was made by %s%s of Ballast, this "
                       "is build %s",
                       checkpoint, build ? "build " : "an earlier build", build ? build : "",
                       bl_build_id());
    return BL_OK;
}
