/* SPDX-License-Identifier: Apache-2.0 */
/* search.h -- the fastest way that fits, or one near it that takes less: every combination of the
 * free keys, by the ledger of memory.h and the time of time.h. Results of a training never depend
 * on any of these keys but per_device_train_batch_size and gradient_accumulation_steps, whose
 * product stays. */
#ifndef BALLAST_PLAN_SEARCH_H
#define BALLAST_PLAN_SEARCH_H

#include "plan/estimate.h"

/* Keys that may be chosen; the others stay as the configuration has them. Bits. */
typedef enum bl_plan_freedom {
    BL_FREE_RATIO = 1, /* offload_ratio */
    BL_FREE_TIER = 2,  /* offload_tier: the disk, where the host's memory is too small */
    BL_FREE_SAVE = 4,  /* activation_checkpointing */
    BL_FREE_ACTIVATION_OFFLOAD = 8, /* activation_offload */
    BL_FREE_VISIT = 16,             /* visit_tokens */
    BL_FREE_MICRO_BATCH = 32,       /* per_device_train_batch_size x gradient_accumulation_steps */
    BL_FREE_RING = 64,              /* ring_depth */
    BL_FREE_SHARDS = 128,           /* shard_size: all ranks, those of a host, 1 */
    BL_FREE_HOST_PART = 256,        /* offload_host_part, on the disk tier: the most that fits */
    BL_FREE_LAYERS = 512,           /* activation_checkpointing_layers: eighths of the layers */
    /* optimizer_tier: device, or offload_tier; of the latter optimizer_ratio, where that is auto:
     * the same as offload_ratio, or 1 where nothing else is offloaded. */
    BL_FREE_OPTIMIZER = 1024,
    BL_FREE_COPY = 2048 /* offload_compute_copy */
} bl_plan_freedom;

/* The keys that are `auto` and that a training chooses itself; of those that can be chosen: the
 * ones that the user has not given. */
unsigned bl_plan_auto_keys(const bl_train_config *config);
unsigned bl_plan_keys_left_open(const bl_train_config *config);

/* One combination. config: a copy that borrows the strings of the input's. */
typedef struct bl_plan_option {
    bl_train_config config;
    bool prepares; /* weights once per visit, not at each use: not a key, the program's choice */
    bl_plan plan;
    bl_time_estimate time;
} bl_plan_option;

typedef struct bl_plan_choice {
    int64_t n_options, n_fit; /* tried; of these, that fit */
    bl_plan_option best;      /* n_fit 0: the one that needs the least memory; time is zero */
    /* By speed: the fastest, if that is not chosen; else the fastest that differs in more than
     * offload_ratio, ring_depth and how a step is divided. tokens_per_s 0: none. */
    bl_plan_option second;
} bl_plan_choice;

/* BY_SPEED: of the options within 5 % of the fastest the one that takes least of a host's memory;
 * less than 5 % of that memory is not worth any speed. Of options that are equally fast, to a
 * quarter of a percent, the one that offloads less of the base is better, then the one that takes
 * less memory. BY_MEMORY: the least of a GPU's memory, then of a host's. */
typedef enum bl_plan_objective { BL_PLAN_BY_SPEED, BL_PLAN_BY_MEMORY } bl_plan_objective;

/* For a training on GPUs. Nine tenths of the GPU's and the host's memory may be taken.
 * Deterministic. BL_ENOMEM; errors of bl_time_predict. */
bl_status bl_plan_search(const bl_plan_input *input, unsigned free_keys,
                         bl_plan_objective objective, bl_plan_choice *out);

/* After a search that found nothing: single changes that would fit, the least of each kind:
 * "offload_tier disk, or 2 hosts of this kind, 16 ranks"; "" when there is none. */
enum { BL_PLAN_REMEDY_BYTES = 512 };
bl_status bl_plan_find_remedies(const bl_plan_input *input, unsigned free_keys,
                                char out[BL_PLAN_REMEDY_BYTES]);

#endif
