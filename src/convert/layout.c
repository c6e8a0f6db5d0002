/* SPDX-License-Identifier: Apache-2.0 */
/* layout.c -- how a projection is stored in a format with scales, as other libraries read it:
 *
 *   fp8_row, fp8_block  compressed-tensors, float-quantized: X.weight F8_E4M3 [rows, cols],
 *                       X.weight_scale F32 [rows, 1] or the grid of blocks
 *   mxfp4               compressed-tensors, mxfp4-pack-quantized: X.weight_packed U8
 *                       [rows, cols/2], X.weight_scale U8 [rows, cols/32]
 *   int4_g32, int4_g128 compressed-tensors, pack-quantized: X.weight_packed I32 [rows, cols/8],
 *                       X.weight_scale BF16 [rows, cols/group], X.weight_shape I64 [2]
 *   nf4                 bitsandbytes: X.weight U8 [rows*cols/2, 1], X.weight.absmax F32,
 *                       X.weight.quant_map F32 [16], X.weight.quant_state.bitsandbytes__nf4 U8
 *
 * compressed-tensors 0.20.1 (compressors/), bitsandbytes 0.50.2 (QuantState.as_dict). */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/files.h"
#include "convert/internal.h"
#include "model/rows.h"

enum { INT4_PER_WORD = 8, STATE_BYTES = 192 };

const char *bl_torch_dtype_name(bl_dtype dtype)
{
    return dtype == BL_F32 ? "float32" : dtype == BL_F16 ? "float16" : "bfloat16";
}

/* ---- tensors ---- */

/* The text of bitsandbytes' quant_state. `dtype` is that of dequantized weights. */
static int write_state(const bl_stored_tensor *t, char text[STATE_BYTES])
{
    return snprintf(text, STATE_BYTES,
                    "{\"quant_type\": \"nf4\", \"blocksize\": %" PRId64
                    ", \"dtype\": \"%s\", \"shape\": [%" PRId64 ", %" PRId64 "]}",
                    bl_format_describe(BL_FORMAT_NF4)->group_cols, bl_torch_dtype_name(t->dtype),
                    t->shape[0], t->shape[1]);
}

/* cols 0: one dimension. */
static bl_status add(bl_shard_plan *plan, const bl_stored_tensor *tensor, bl_shard_role role,
                     const char *end, bl_dtype dtype, int64_t rows, int64_t cols)
{
    bl_shard_part *part = &plan->parts[plan->n_specs];
    bl_stored_tensor_spec *spec = &plan->specs[plan->n_specs];

    *part = (bl_shard_part){.role = role, .tensor = tensor};
    BL_TRY(bl_text_format(&part->name, "%s%s", tensor->name, end));
    *spec = (bl_stored_tensor_spec){
        .name = part->name, .dtype = dtype, .n_dims = cols > 0 ? 2 : 1, .shape = {rows, cols}};
    plan->n_specs++;
    plan->n_bytes += rows * (cols > 0 ? cols : 1) * (int64_t)bl_dtype_bytes(dtype);
    return BL_OK;
}

static bl_status add_int4(bl_shard_plan *plan, const bl_stored_tensor *t, const bl_format_bytes *n)
{
    int64_t rows = t->shape[0];

    BL_TRY(add(plan, t, BL_SHARD_CODES, "_packed", BL_I32, rows, t->shape[1] / INT4_PER_WORD));
    BL_TRY(add(plan, t, BL_SHARD_SCALES, "_scale", BL_BF16, rows, n->scale_cols));
    return add(plan, t, BL_SHARD_CONSTANT, "_shape", BL_I64, 2, 0);
}

static bl_status add_nf4(bl_shard_plan *plan, const bl_stored_tensor *t, const bl_format_bytes *n)
{
    char text[STATE_BYTES];

    BL_TRY(add(plan, t, BL_SHARD_CODES, "", BL_U8, (int64_t)n->codes, 1));
    BL_TRY(add(plan, t, BL_SHARD_SCALES, ".absmax", BL_F32, n->scale_rows * n->scale_cols, 0));
    BL_TRY(add(plan, t, BL_SHARD_CONSTANT, ".quant_map", BL_F32, 16, 0));
    return add(plan, t, BL_SHARD_CONSTANT, ".quant_state.bitsandbytes__nf4", BL_U8,
               write_state(t, text), 0);
}

bl_status bl_shard_plan_format(bl_shard_plan *plan, const bl_stored_tensor *tensor,
                               bl_format format)
{
    const bl_format_descriptor *f = bl_format_describe(format);
    int64_t rows = tensor->shape[0];
    bl_format_bytes n;

    BL_TRY(bl_model_check_groups(format, tensor->name, tensor->shape[1]));
    if (!bl_format_measure(f, rows, tensor->shape[1], &n))
        return BL_FAIL(BL_EINPUT, "tensor %s is too large", tensor->name);
    if (format == BL_FORMAT_INT4_G32 || format == BL_FORMAT_INT4_G128)
        return add_int4(plan, tensor, &n);
    if (format == BL_FORMAT_NF4) return add_nf4(plan, tensor, &n);
    bool is_packed = bl_format_is_packed(format);
    BL_TRY(add(plan, tensor, BL_SHARD_CODES, is_packed ? "_packed" : "", f->dtype, rows, n.row));
    return add(plan, tensor, BL_SHARD_SCALES, "_scale", is_packed ? BL_U8 : BL_F32, n.scale_rows,
               n.scale_cols);
}

bl_status bl_shard_write_constants(const bl_shard_plan *plan, size_t codes, bl_format format,
                                   bl_safetensors_writer *writer)
{
    const bl_stored_tensor *t = plan->parts[codes].tensor;
    char text[STATE_BYTES];

    for (size_t i = codes + 2; i < plan->n_specs && plan->parts[i].role == BL_SHARD_CONSTANT; i++) {
        const bl_stored_tensor_spec *spec = &plan->specs[i];
        const void *bytes = bl_format_describe(format)->values; /* quant_map */
        if (spec->dtype == BL_I64) bytes = t->shape;
        if (spec->dtype == BL_U8) bytes = (write_state(t, text), text);
        BL_TRY(bl_safetensors_writer_put(writer, i, 0, bytes,
                                         (size_t)spec->shape[0] * bl_dtype_bytes(spec->dtype)));
    }
    return BL_OK;
}

/* ---- config.json ---- */

/* Modules that stay as they are: the head; routers; of a model that is part of a larger one, whose
 * modules other programs name in their own ways, patterns of the head and the other parts. any: how
 * the library begins a pattern that matches anywhere. */
static json_t *ignored_modules(const bl_arch *arch, const char *any)
{
    const char *router = arch->vectors[BL_ROUTER].name; /* "mlp.gate.weight" */
    char text[BL_TENSOR_NAME_BYTES];

    if (router) {
        snprintf(text, sizeof text, "%s%.*s$", any, (int)(strrchr(router, '.') - router), router);
        return json_pack("[s, s]", arch->head, text);
    }
    if (!arch->skipped) return json_pack("[s]", arch->head);
    snprintf(text, sizeof text, "%s%s", any, bl_peft_last_name(arch->head));
    json_t *list = json_pack("[s]", text);
    for (const char *const *part = arch->skipped; list && *part; part++) {
        snprintf(text, sizeof text, "%s%s*", any, *part); /* "vision_tower." and "*" */
        json_array_append_new(list, json_string(text));
    }
    return list;
}

/* As llm-compressor writes FP8_DYNAMIC and FP8_BLOCK, W4A16 and MXFP4A16: only with FP8 are
 * activations quantized, too. */
static json_t *compressed_tensors(bl_format format, const bl_arch *arch)
{
    const bl_format_descriptor *f = bl_format_describe(format);
    bool is_packed = bl_format_is_packed(format), is_int = f->scale_dtype == BL_BF16;
    int64_t block = f->group_cols; /* 0: scales are per row */
    const char *name = is_int      ? "pack-quantized"
                       : is_packed ? "mxfp4-pack-quantized"
                                   : "float-quantized";
    json_t *weights = json_pack("{s:n, s:n, s:b, s:n, s:i, s:s, s:{}, s:s, s:b, s:s}", "actorder",
                                "block_structure", "dynamic", 0, "group_size", "num_bits", f->bits,
                                "observer", "minmax", "observer_kwargs", "strategy",
                                is_packed ? "group"
                                : block   ? "block"
                                          : "channel",
                                "symmetric", 1, "type", is_int ? "int" : "float");
    json_t *inputs = is_packed
                         ? json_null()
                         : json_pack("{s:n, s:n, s:b, s:n, s:i, s:n, s:{}, s:s, s:b, s:s}",
                                     "actorder", "block_structure", "dynamic", 1, "group_size",
                                     "num_bits", 8, "observer", "observer_kwargs", "strategy",
                                     block ? "group" : "token", "symmetric", 1, "type", "float");
    if (is_packed) {
        json_object_set_new(weights, "group_size", json_integer(block));
    } else if (block) {
        json_object_set_new(weights, "block_structure",
                            json_pack("[I, I]", (json_int_t)block, (json_int_t)block));
        json_object_set_new(inputs, "group_size", json_integer(block));
    }
    if (is_packed && !is_int)
        json_object_set_new(weights, "scale_dtype", json_string("torch.uint8"));
    json_t *group = json_pack("{s:o, s:n, s:[s], s:o}", "input_activations", inputs,
                              "output_activations", "targets", "Linear", "weights", weights);
    if (is_packed) json_object_set_new(group, "format", json_string(name));
    return json_pack("{s:{s:o}, s:s, s:o, s:n, s:s, s:s}", "config_groups", "group_0", group,
                     "format", name, "ignore", ignored_modules(arch, "re:.*"), "kv_cache_scheme",
                     "quant_method", "compressed-tensors", "quantization_status", "compressed");
}

/* As transformers' BitsAndBytesConfig, without its keys of 8 bits that have no effect. */
static json_t *bitsandbytes(const bl_arch *arch)
{
    return json_pack("{s:b, s:b, s:s, s:s, s:s, s:b, s:o, s:s}", "load_in_4bit", 1, "load_in_8bit",
                     0, "bnb_4bit_quant_type", "nf4", "bnb_4bit_quant_storage", "uint8",
                     "bnb_4bit_compute_dtype", "bfloat16", "bnb_4bit_use_double_quant", 0,
                     "llm_int8_skip_modules", ignored_modules(arch, ".*"), "quant_method",
                     "bitsandbytes");
}

json_t *bl_quantization_config(bl_format format, const bl_arch *arch)
{
    return format == BL_FORMAT_NF4 ? bitsandbytes(arch) : compressed_tensors(format, arch);
}
