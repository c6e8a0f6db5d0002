/* SPDX-License-Identifier: Apache-2.0 */
/* case.h -- a plan's input from names and keys alone: for a model that need not be there, on a
 * machine that need not be this one. */
#ifndef BALLAST_PLAN_CASE_H
#define BALLAST_PLAN_CASE_H

#include "trained/modules.h"
#include "plan/hardware.h"
#include "plan/input.h"
#include "plan/model.h"
#include "plan/time.h"

typedef struct bl_plan_case {
    bl_hardware hardware;
    bl_train_configs configs;      /* of all runs over the base, in their order */
    const bl_train_config *config; /* of the first one */
    bl_plan_model model;
    uint8_t *bf16_matrices; /* compute_bf16_modules, by layer */
    bl_lora_layout lora;
    bl_lora_layout *other_loras; /* [configs.n - 1] */
    bl_plan_run *others;         /* [configs.n - 1]: input.others */
    bl_trained_set trained;      /* zeros: LoRA is */
    bl_saved_modules modules;    /* zeros: none */
    bl_rates measured;           /* where input.measured points, if anywhere */
    bl_plan_input input; /* of a training; refers to the members above: a case does not move */
} bl_plan_case;

/* `name`: as bl_hardware_load takes it; NULL: this machine. Others 0: as that machine has them. */
typedef struct bl_plan_machine {
    const char *name;
    double host_memory_gb;
    int64_t pcie_lanes;
} bl_plan_machine;
bl_status bl_plan_case_open_on(const bl_plan_machine *machine, int64_t row_tokens, int argc,
                               char *const *argv, bl_plan_case *out);

/* argv: the keys of a training, and YAML files, as `ballast train` takes them. model_name_or_path
 * is what bl_plan_model_open takes, `hardware` what bl_hardware_load takes; NULL: this machine.
 * row_tokens: of the longest row of the data; 0: max_seq_length. Every GPU is a rank, and a
 * process; ranks of a CPU host are threads of one, and so are those of this machine, which `ranks`
 * counts. Close it, also after a failure. */
bl_status bl_plan_case_open(const char *hardware, int64_t row_tokens, int argc, char *const *argv,
                            bl_plan_case *out);
/* What training would end with, though the plan can be made: BL_EINPUT, the model is not supported;
 * BL_ELIMIT, the GPU is not. */
bl_status bl_plan_case_check(const bl_plan_case *c);
void bl_plan_case_close(bl_plan_case *c);

#endif
