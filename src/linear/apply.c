/* SPDX-License-Identifier: Apache-2.0 */
/* apply.c -- binds a unit's weight, LoRA terms and prepared form for one product. */
#include "linear/apply.h"

/* Without the weight. */
static bl_lora_linear bind_terms(const bl_linear_use *use)
{
    bl_lora_linear linear = use->lora;
    linear.dropout.layer = (int32_t)use->unit;
    linear.dropout.matrix = use->matrix;
    linear.prepared =
        use->prepared ? bl_linear_prepared_at(use->prepared, use->unit, use->matrix) : NULL;
    return linear;
}

static bl_status bind(bl_stream *stream, const bl_linear_use *use, bl_lora_linear *out)
{
    *out = bind_terms(use);
    return bl_base_acquire(use->base, use->unit, use->matrix, stream, &out->weight);
}

bl_quantized bl_linear_operand(bl_stream *stream, const bl_linear_use *use, int64_t T, bl_dtype act)
{
    bl_lora_linear linear = bind_terms(use);
    linear.weight = *bl_base_describe(use->base, use->unit, use->matrix);
    return bl_lora_linear_operand(bl_device_get_kind(bl_stream_device(stream)), act, &linear, T);
}

bl_status bl_linear_apply(bl_stream *stream, const bl_linear_use *use, int64_t T, bl_tensor x,
                          bl_tensor y)
{
    bl_lora_linear linear;
    BL_TRY(bind(stream, use, &linear));
    return bl_lora_linear_forward(stream, &linear, T, x, y);
}

bl_status bl_linear_pull_back(bl_stream *stream, const bl_linear_use *use, int64_t T, bl_tensor x,
                              bl_tensor dy, bl_tensor dx)
{
    bl_lora_linear linear;
    BL_TRY(bind(stream, use, &linear));
    return bl_lora_linear_backward(stream, &linear, T, x, dy, dx);
}
