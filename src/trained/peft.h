/* SPDX-License-Identifier: Apache-2.0 */
/* peft.h -- a PEFT adapter and the flat vectors of arch/lora.h. */
#ifndef BALLAST_TRAINED_PEFT_H
#define BALLAST_TRAINED_PEFT_H

#include "device/device.h"
#include "arch/lora.h"
#include "store/peft.h"

/* Options and PEFT's configuration, both ways; the base's shape for store/peft.h. */
void bl_lora_options_of_peft(const bl_peft_config *peft, bl_lora_options *out);
bl_peft_config bl_lora_peft_config(const bl_lora_options *options);
bl_peft_base bl_lora_peft_base(const bl_model_config *config); /* config is borrowed */

/* Opens `dir`, checks it against the model and reads all layers: *weights (n_layers *
 * bl_lora_floats_before(layout, n_layers), device memory, of the dtype of activations there) is the
 * caller's, to be freed
 * with bl_device_free. */
bl_status bl_lora_read_all(const char *dir, const bl_model_config *config, bl_device *device,
                           bl_lora_layout *layout, bl_tensor *weights);

/* The order of a layout's weights that suits activations of dtype `act`: stacked for bf16. */
void bl_lora_layout_order_for(bl_dtype act, bl_lora_layout *layout);

#endif
