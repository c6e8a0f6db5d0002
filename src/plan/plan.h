/* SPDX-License-Identifier: Apache-2.0 */
/* plan.h -- decisions before a layer is loaded: where the frozen base is stored, which activations
 * are saved, and the memory that this takes. Results never depend on it. */
#ifndef BALLAST_PLAN_PLAN_H
#define BALLAST_PLAN_PLAN_H

#include "plan/memory.h"

typedef struct bl_plan {
    bl_placement placement;           /* of the frozen base; index is a rank's own */
    bl_optimizer_placement optimizer; /* with finetuning_type full; hooks are NULL */
    bl_pass_options pass; /* as bl_plan_pass_options; save and prepared are what was chosen */
    bl_memory_ledger memory;
    int n_overlapped; /* bl_plan_count_overlapped */
} bl_plan;

/* bl_save of a key's value (auto: what full saves), and the value's name. */
unsigned bl_plan_save_of(bl_activation_checkpointing key);
const char *bl_plan_save_name(unsigned save);

/* Of this host, and of the GPU that the ranks of a process share: from the input, or the bytes
 * available here now. -1: unknown. */
int64_t bl_plan_available_bytes(const bl_plan_input *input);
int64_t bl_plan_gpu_available_bytes(const bl_plan_input *input);

/* The part of `available` bytes that a plan may use: nine tenths. 0 where available is -1. */
int64_t bl_plan_usable_bytes(int64_t available);

/* A training on GPUs: of the auto keys, the fastest choice that fits (search.h), by the rates of
 * input->hardware; when none fits, the one that takes the least memory. Otherwise:
 *   - placement by offload_ratio, offload_tier, offload_dir and the keys optimizer_*; auto
 *     offloads nothing that fits into the usable memory;
 *   - saved activations by activation_checkpointing; auto, in a training, saves the most with which
 *     this host's processes are predicted to take at most half of its memory;
 *   - prepared weights (bl_plan_prepare) where a GPU's visits use them more than once and its
 *     usable memory is still enough. Logs what auto has chosen. BL_ENOMEM. */
bl_status bl_plan_choose(const bl_plan_input *input, bl_plan *out);

/* Logs this process's sizes and where they will be stored. */
void bl_plan_print(const bl_plan_input *input, const bl_plan *plan);

/* BL_ENOMEM when the host or the GPU has less: the numbers, and the keys that would help. */
bl_status bl_plan_check(const bl_plan_input *input, const bl_plan *plan);

#endif
