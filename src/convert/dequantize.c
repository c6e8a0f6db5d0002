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

static bl_status dequantize(bl_merge *m)
{
    BL_TRY(bl_conversion_open(&m->conversion, bl_merge_plan_shard));
    BL_TRY(require_quantized(m));
    return bl_conversion_run(&m->conversion);
}

bl_status bl_model_dequantize(const bl_quantize_options *options, bl_quantize_result *out)
{
    const bl_merge_options merge = {.source = options->source,
                                    .target = options->target,
                                    .io_engine = options->io_engine,
                                    .pool = options->pool};
    bl_merge m = {.options = &merge, .format = options->format};

    m.conversion = (bl_conversion){
        .source = options->source,
        .target = options->target,
        .manifest_name = BL_DEQUANTIZE_MANIFEST,
        .done = "dequantized",
        .settings = json_pack("{s:s}", "base_format", bl_format_name(options->format)),
        .hashes_source = true,
        .user = &m,
        .write_shard = bl_merge_write_shard,
        .change_config = bl_merge_change_config,
    };
    *out = (bl_quantize_result){0};
    bl_status st = dequantize(&m);
    if (st == BL_OK) *out = m.conversion.result;
    bl_conversion_close(&m.conversion);
    return st;
}
