/* SPDX-License-Identifier: Apache-2.0 */
/* quantize.c -- the conversion of a model to a format with scales: a merge without adapters, whose
 * source is not quantized and whose README is the source's. */
#include "convert/quantize.h"

#include "convert/merge_internal.h"

static bl_status refuse_quantized(bl_merge *m)
{
    const bl_conversion *c = &m->conversion;

    for (size_t i = 0; i < bl_hf_count(c->model); i++) {
        const bl_stored_tensor *tensor = bl_hf_at(c->model, i);
        if (bl_dtype_bytes(tensor->dtype) == 1 || bl_hf_quantized_at(c->model, i))
            return BL_FAIL(BL_EINPUT, "%s: is quantized already: tensor %s is %s", c->source,
                           tensor->name, bl_dtype_name(tensor->dtype));
    }
    return BL_OK;
}

bl_status bl_model_quantize(const bl_quantize_options *options, bl_quantize_result *out)
{
    return bl_merge_without_adapters(options, BL_QUANTIZE_MANIFEST, "quantized", refuse_quantized,
                                     out);
}
