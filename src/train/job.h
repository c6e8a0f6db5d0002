/* SPDX-License-Identifier: Apache-2.0 */
/* job.h -- the data of both kinds of run, training and evaluation: the model, the rows, the ranks,
 * and the decisions before they start. */
#ifndef BALLAST_TRAIN_JOB_H
#define BALLAST_TRAIN_JOB_H

#include "trained/modules.h"
#include "comm/host_memory.h"
#include "job/launch.h"
#include "model/weights.h"
#include "plan/plan.h"
#include "train/data.h"
#include "train/trace.h"
#include "train/train.h"

/* Fingerprints of the inputs of a result; 0: no such data. */
typedef struct bl_identity {
    uint64_t model, train, validation;
} bl_identity;

/* Ranks have it const: nothing of it changes while they run. Of several runs over one base each has
 * a job; all but the first have borrowed everything that is not a run's (bl_job_borrow). */
typedef struct bl_job {
    const bl_train_config *config;
    const struct bl_job *lead;          /* the job whose base this run uses; NULL: this one's */
    const struct bl_pager_hooks *hooks; /* of bl_train_run */
    bl_launch *launch;                  /* NULL: all ranks are this process's */
    bl_topology topology;
    bl_gpu_info gpu; /* number topology.gpu; n_gpus 0: the ranks compute on CPUs */
    /* Of the one rank of this process, until that rank has it; NULL without launch. */
    bl_comm *host_world;
    /* Of the ranks of this host, and their shared memory; both NULL where ranks share only their
     * process. The main thread's. */
    bl_comm *host_ranks;
    bl_host_memory *host_memory;

    bl_model *model;
    bl_base_formats base_formats; /* of the base that the ranks load */
    bl_run_data data;
    bl_lora_layout lora;      /* n_floats 0: no adapter */
    bl_saved_modules modules; /* modules_to_save of the adapter; zeros: none */
    bl_identity identity;
    bl_plan plan;
    bl_memory_ledger expected; /* by it: with the micro-batches that a training's rows make */
    uint8_t *bf16_matrices;    /* plan.pass's: compute_bf16_modules by layer; owned */
    bl_trace *trace;           /* NULL: none; ranks write to it at any time */
} bl_job;

/* open.c. Close after any failure, too. */

/* Which ranks there are, and which of them are this process's. */
bl_status bl_job_place_ranks(bl_job *job);
/* Gives `job` all of `lead` that is not a run's: ranks, communicators, model, plan, trace. The
 * members are lead's, which outlives it. Again after lead has more of them. */
void bl_job_borrow(bl_job *job, const bl_job *lead);
/* The model, by job->config. */
bl_status bl_job_open_model(bl_job *job);
/* After job->data are open: the model's tables are as long as the longest sequence; of several
 * runs, the lead's first. */
void bl_job_measure_rows(bl_job *job);
/* Logs how the base is stored and held; `where`, as in "fp8_row in memory". */
void bl_job_print_base_formats(const bl_job *job, const char *where);
/* Of an evaluation: a training sets is_training. Needs all of the job but its plan. */
bl_plan_input bl_job_plan_input(const bl_job *job);
/* Makes offload_dir for the disk tier and chooses job->plan. BL_EUSAGE: it is not a directory, or
 * compute_bf16_modules names a layer that the model does not have. */
bl_status bl_job_choose_plan(bl_job *job, const bl_plan_input *input);
/* Of a base whose runs come later: chooses job->plan so that a run with its keys and rows of
 * max_seq_length fits, by the memory available now; sets job->lora and *input. */
bl_status bl_job_place_base(bl_job *job, bl_plan_input *input);
/* Chooses job->plan for a base that is already placed, by the offload_ratio of the input. */
bl_status bl_job_choose_pass(bl_job *job, const bl_plan_input *input);
void bl_job_close(bl_job *job);

/* identity.c: the fingerprints of model and data; collective over processes that share their host's
 * memory. */
bl_status bl_job_identify(bl_job *job);
void bl_job_identify_data(bl_job *job); /* only the data; not collective */
/* bl_model_fingerprint of the model, whose bytes are read once per host. */
bl_status bl_job_fingerprint(const bl_job *job, int64_t probe_bytes, uint64_t *fingerprint);
/* Of the bytes of init_adapter's configuration and tensors; 0: the run has none. */
bl_status bl_job_hash_adapter(const bl_train_config *config, uint64_t *hash);

/* processes.c: how the processes of a job, with a rank each, agree before their ranks start.
 * Collective over the processes. */

/* Whether all see the same output_dir (a shared file system; NULL: there is none), model, adapter,
 * data and configuration. Of the model each host reads all, if it is small, or some blocks
 * everywhere (bl_model_fingerprint): ranks of one shard group read each row but once. */
bl_status bl_job_check_processes(const bl_job *job, const char *output_dir);
/* Gives `input` the least memory available to any process, so that all choose alike. */
bl_status bl_job_share_memory(const bl_job *job, bl_plan_input *input);
/* BL_ELIMIT when some rank has chosen another plan than rank 0's: its layers would come in another
 * order. */
bl_status bl_job_compare_plans(const bl_job *job);
/* Warns of ranks whose products may round differently from rank 0's. */
bl_status bl_job_compare_products(const bl_job *job);
/* Returns when all processes of the job have called it, or with the error of one that has
 * failed. */
bl_status bl_job_meet(const bl_job *job);

/* run_evaluation.c: the mean loss over the validation rows of a job that has its plan, by ranks
 * that live as long as the call. *out is set in the process of rank 0. */
bl_status bl_job_evaluate(bl_job *job, bl_eval_result *out);

#endif
