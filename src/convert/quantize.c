/* SPDX-License-Identifier: Apache-2.0 */
/* quantize.c -- the conversion of a model to FP8: rejected sources, and config.json. */
#include "convert/quantize.h"

#include <stdio.h>
#include <string.h>

#include "base/sizes.h"
#include "convert/internal.h"

typedef struct quantization {
    const bl_quantize_options *options;
    bl_conversion conversion;
} quantization;

/* Modules that stay as they are: the head; routers; of a model that is part of a larger one, whose
 * modules other programs name in their own ways, patterns of the head and the other parts. */
static json_t *ignored_modules(const bl_arch *arch)
{
    const char *router = arch->vectors[BL_ROUTER].name; /* "mlp.gate.weight" */
    char text[BL_TENSOR_NAME_BYTES];

    if (router) {
        snprintf(text, sizeof text, "re:.*%.*s$", (int)(strrchr(router, '.') - router), router);
        return json_pack("[s, s]", arch->head, text);
    }
    if (!arch->skipped) return json_pack("[s]", arch->head);
    snprintf(text, sizeof text, "re:.*%s", bl_peft_last_name(arch->head));
    json_t *list = json_pack("[s]", text);
    for (const char *const *part = arch->skipped; list && *part; part++) {
        snprintf(text, sizeof text, "re:.*%s*", *part); /* "vision_tower." and "*" */
        json_array_append_new(list, json_string(text));
    }
    return list;
}

/* As llm-compressor writes FP8_DYNAMIC and FP8_BLOCK. */
json_t *bl_quantization_config(bl_format format, const bl_arch *arch)
{
    int64_t block = bl_format_describe(format)->group_cols; /* 0: scales are per row */
    json_t *weights = json_pack("{s:n, s:n, s:b, s:n, s:i, s:s, s:{}, s:s, s:b, s:s}", "actorder",
                                "block_structure", "dynamic", 0, "group_size", "num_bits", 8,
                                "observer", "minmax", "observer_kwargs", "strategy",
                                block ? "block" : "channel", "symmetric", 1, "type", "float");
    json_t *inputs = json_pack("{s:n, s:n, s:b, s:n, s:i, s:n, s:{}, s:s, s:b, s:s}", "actorder",
                               "block_structure", "dynamic", 1, "group_size", "num_bits", 8,
                               "observer", "observer_kwargs", "strategy", block ? "group" : "token",
                               "symmetric", 1, "type", "float");
    if (block) {
        json_object_set_new(weights, "block_structure",
                            json_pack("[I, I]", (json_int_t)block, (json_int_t)block));
        json_object_set_new(inputs, "group_size", json_integer(block));
    }
    return json_pack("{s:{s:{s:o, s:n, s:[s], s:o}}, s:s, s:o, s:n, s:s, s:s}", "config_groups",
                     "group_0", "input_activations", inputs, "output_activations", "targets",
                     "Linear", "weights", weights, "format", "float-quantized", "ignore",
                     ignored_modules(arch), "kv_cache_scheme", "quant_method", "compressed-tensors",
                     "quantization_status", "compressed");
}

static bl_status plan_shard(void *user, const bl_safetensors *source, bl_shard_plan *out)
{
    quantization *q = user;
    return bl_shard_plan_make(q->conversion.config.arch, source, q->options->format, out);
}

static bl_status write_shard(void *user, size_t index, const char *path, json_t *entry)
{
    quantization *q = user;
    (void)entry;
    return bl_shard_quantize(q->options, &q->conversion, &q->conversion.plans[index], path);
}

static bl_status change_config(void *user, const char *path, json_t *config)
{
    quantization *q = user;
    json_t *added = bl_quantization_config(q->options->format, q->conversion.config.arch);

    if (!added || json_object_set_new(config, "quantization_config", added) != 0)
        return BL_FAIL(BL_ENOMEM, "%s", path);
    return BL_OK;
}

static bl_status refuse_fp8(const quantization *q)
{
    for (size_t i = 0; i < bl_hf_count(q->conversion.model); i++) {
        const bl_stored_tensor *tensor = bl_hf_at(q->conversion.model, i);
        if (bl_dtype_bytes(tensor->dtype) == 1 || bl_hf_quantized_at(q->conversion.model, i))
            return BL_FAIL(BL_EINPUT, "%s: is quantized already: tensor %s is %s",
                           q->options->source, tensor->name, bl_dtype_name(tensor->dtype));
    }
    return BL_OK;
}

bl_status bl_model_quantize(const bl_quantize_options *options, bl_quantize_result *out)
{
    quantization q = {.options = options};
    bl_status st;

    q.conversion = (bl_conversion){
        .source = options->source,
        .target = options->target,
        .manifest_name = BL_QUANTIZE_MANIFEST,
        .done = "quantized",
        .settings = json_pack("{s:s}", "base_format", bl_format_name(options->format)),
        .hashes_source = true,
        .user = &q,
        .write_shard = write_shard,
        .change_config = change_config,
    };
    *out = (bl_quantize_result){0};
    BL_TRY_GOTO(st, done, bl_conversion_open(&q.conversion, plan_shard));
    BL_TRY_GOTO(st, done, refuse_fp8(&q));
    st = bl_conversion_run(&q.conversion);
    *out = q.conversion.result;
done:
    bl_conversion_close(&q.conversion);
    return st;
}
