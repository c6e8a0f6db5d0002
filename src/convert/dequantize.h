/* SPDX-License-Identifier: Apache-2.0 */
/* dequantize.h -- a checkpoint in FP8 or 4 bits in, the same model without them out.
 *
 *   W = round(code * scale)      the product in fp32, as training has it; rounded to the format
 *
 * for every projection that is stored so, with the scales of store/hf_model.h. In F32 nothing
 * is rounded: the loss of the result has the bits of the source's. Projections in other dtypes
 * are converted to the format, too; everything else is copied, except scales of codes, of
 * activations and of the KV cache. config.json loses its quantization_config.
 *
 * The directory is written as convert/quantize.h says; ballast_dequantize.json is its manifest. */
#ifndef BALLAST_CONVERT_DEQUANTIZE_H
#define BALLAST_CONVERT_DEQUANTIZE_H

#include "convert/quantize.h"

/* options->format: BF16, F16 or F32. Errors as bl_model_quantize, and BL_EINPUT: no projection of
 * the source is quantized, or another tensor is; BL_ENUMERIC: a value is beyond the format's
 * range. */
bl_status bl_model_dequantize(const bl_quantize_options *options, bl_quantize_result *out);

#endif
