/* SPDX-License-Identifier: Apache-2.0 */
/* dequantize.c -- the conversion of a quantized checkpoint to another format: a merge without
 * adapters, whose source has FP8 or 4 bits and whose README is the source's. */
#include "convert/dequantize.h"

#include "convert/merge_internal.h"

static bl_status require_quantized(bl_merge *m)
{
    const bl_hf_model *model = m->conversion.model;

    for (size_t i = 0; i < bl_hf_count(model); i++)
        m->is_quantized_source = m->is_quantized_source || bl_hf_quantized_at(model, i);
    return m->is_quantized_source
               ? BL_OK
               : BL_FAIL(BL_EINPUT,
                         "%s: no projection is FP8 or 4 bits: there is nothing to dequantize",
                         m->conversion.source);
}

bl_status bl_model_dequantize(const bl_quantize_options *options, bl_quantize_result *out)
{
    return bl_merge_without_adapters(options, BL_DEQUANTIZE_MANIFEST, "dequantized",
                                     require_quantized, out);
}
