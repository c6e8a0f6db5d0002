/* SPDX-License-Identifier: Apache-2.0 */
/* train.h -- whole jobs: training and evaluation as the commands run them. */
#ifndef BALLAST_TRAIN_TRAIN_H
#define BALLAST_TRAIN_TRAIN_H

#include "job/launch.h"
#include "config/config.h"
#include "train/preference.h"

struct bl_pager_hooks;

/* For both: `launch` was opened with a `leave` function (job/launch.h), which ends the process when
 * another one of the job fails. */

/* Trains a LoRA adapter by `config` and writes it into config->output_dir. Starts one thread per
 * rank. While they run, SIGTERM, SIGINT, SIGUSR1, SIGXCPU or, unless it is ignored, SIGHUP leads to
 * BL_ESTOPPED after saving a checkpoint; a second one of the first three, later than
 * BL_LAUNCH_ONE_REQUEST_S, as those before and after, is the process's own to handle, and it may
 * exit at any moment. SIGHUP and SIGXCPU come more than once by themselves: while the ranks end,
 * they are swallowed. Other errors: as docs/reliability.md lists them.
 *
 * launch: the processes of the job, each of which calls this and is one rank; rank 0's writes
 * output_dir, the others their shards of checkpoints. NULL: all ranks are threads of this
 * process.
 *
 * hooks: offload/pager.h, borrowed for the call; NULL except in tests and benches. */
bl_status bl_train_run(const bl_train_config *config, bl_launch *launch,
                       const struct bl_pager_hooks *hooks);

/* The same for configs[n], borrowed, over one base, whose keys they share
 * (bl_train_configs_load): in a job's rounds each run makes one step, and each layer's
 * frozen weights serve the micro-batches of all. Run i writes configs[i]->output_dir with the bits
 * that it has alone. BL_ENUMERIC: the loss of some run was not finite; the others have ended well.
 */
bl_status bl_train_run_all(const bl_train_config *const *configs, int n, bl_launch *launch,
                           const struct bl_pager_hooks *hooks);

/* Trains the jobs in config->queue (run/spool.h) over the base of `config`. They train as in
 * bl_train_run_all, and join and leave between steps. Returns BL_OK when a stop file exists and the
 * jobs in progress have ended, even if some have failed. BL_ESTOPPED: a signal, as above; the same
 * call continues. */
bl_status bl_train_run_queue(const bl_train_config *config, bl_launch *launch,
                             const struct bl_pager_hooks *hooks);

typedef struct bl_eval_result {
    double loss; /* mean of -log p over the labels, or of a preference loss */
    int64_t label_tokens, rows;
    bl_base_formats base;             /* set by bl_eval_run */
    bl_preference_metrics preference; /* of preference losses, with their loss */
} bl_eval_result;

/* The loss of config->model_name_or_path, with config->init_adapter if given, on
 * config->validation_file. *out is set in the process of rank 0. */
bl_status bl_eval_run(const bl_train_config *config, bl_launch *launch, bl_eval_result *out);

#endif
