/* SPDX-License-Identifier: Apache-2.0 */
/* rates.h -- learning rates of single tensors, by the keys learning_rates and
 * embedding_learning_rate: factors of the run's, so that all follow one schedule. */
#ifndef BALLAST_TRAINED_RATES_H
#define BALLAST_TRAINED_RATES_H

#include "arch/lora.h"
#include "arch/trained.h"
#include "config/config.h"

/* Sets set->rate where a key gives other rates, and the layout's. set, lora: what the run trains;
 * NULL: none of it. Of several matching patterns the last counts. BL_EUSAGE: an entry that is not
 * PATTERN=RATE, a pattern that matches nothing that is trained, or LoRA factors of some layers
 * alone. BL_ENOMEM. */
bl_status bl_adapter_choose_rates(const bl_train_config *config, const bl_model_config *model,
                                  bl_trained_set *set, bl_lora_layout *lora);

#endif
