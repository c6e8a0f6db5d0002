/* SPDX-License-Identifier: Apache-2.0 */
/* choose.h -- what a run trains: the LoRA layout, by its configuration or by the adapter that it
 * starts from; or tensors of the model. */
#ifndef BALLAST_TRAINED_CHOOSE_H
#define BALLAST_TRAINED_CHOOSE_H

#include "trained/modules.h"
#include "config/config.h"
#include "arch/lora.h"
#include "arch/trained.h"

/* config->init_adapter, if there is one, fixes r, alpha, rsLoRA and targets: its
 * adapter_config.json is read. Without one an evaluation (is_training false) has no adapter:
 * out->n_floats 0. BL_EUSAGE: a key that contradicts it in a training, or targets that do not
 * exist. */
bl_status bl_adapter_choose_lora(const bl_train_config *config, const bl_model_config *model,
                                 bool is_training, bl_lora_layout *out);

/* PEFT's modules_to_save: those of init_adapter, or in a training without init_adapter those of the
 * key. The caller frees *out. BL_EUSAGE, BL_EINPUT: an unsupported module or run; a key that
 * contradicts init_adapter. */
bl_status bl_adapter_choose_modules(const bl_train_config *config, const bl_model_config *model,
                                    bool is_training, bl_saved_modules *out);

/* With finetuning_type full: the tensors that trainable_modules and freeze choose. The caller frees
 * *out. BL_EUSAGE: an expression without a match; rows of a fused matrix whose pages are on disk;
 * embedding_learning_rate without its tensors. */
bl_status bl_adapter_choose_trained(const bl_train_config *config, const bl_model_config *model,
                                    bl_trained_set *out);

#endif
