/* SPDX-License-Identifier: Apache-2.0 */
/* time.h -- how long a training step takes, and its stalls.
 *
 * The objects of one rank, without weights, queue a step on a device made of rates
 * (device/model.h): streams that do their work in order, events between them, and resources (links,
 * memory, cores, disk) that streams share. The costs of ops: ops/cost.h. The known errors of the
 * model: docs/internals/plan.md. */
#ifndef BALLAST_PLAN_TIME_H
#define BALLAST_PLAN_TIME_H

#include <stdbool.h>
#include <stdint.h>

#include "device/rates.h"
#include "device/timeline.h"
#include "arch/block.h"
#include "arch/lora.h"
#include "arch/trained.h"
#include "model/placement.h"
#include "ops/matmul.h"
#include "plan/hardware.h"

/* The rates of one of n_ranks_on_host ranks. On a GPU each has a separate device; on the CPU they
 * share the host's cores, of which each computes with `threads`, on activations of dtype `act`. */
bl_rates bl_time_rates_of(const bl_hardware *hardware, int n_ranks_on_host, int threads,
                          bl_dtype act);

/* Consecutive layers that are alike. */
typedef struct bl_time_run {
    int64_t n_layers;
    bl_layer_kind kind;
    bl_format format[BL_MAX_PROJECTIONS]; /* as held */
    unsigned save;                        /* bl_save */
    unsigned bf16_matrices;               /* bit m: bl_layer_matrix m is an exception from mode */
    const bl_trained_unit *trained;       /* with is_trained; NULL: every tensor */
    bool is_last;                         /* backward ends there: bl_block.is_last */
} bl_time_run;

/* Micro-batches that losses of preferences add to a step, all without gradients
 * (train/rank/preference.h). */
typedef struct bl_time_preference {
    bool is_weighed;     /* the head is run for log-probabilities, then with their weights */
    bool has_reference;  /* each micro-batch once more by the reference */
    bool is_adapter;     /* the reference is an adapter, not the base alone */
    bool has_mismatched; /* kto: as many other answers, by the policy and any reference */
} bl_time_preference;

/* An evaluation by a rank; n_micro 0: none. All tokens carry loss. */
typedef struct bl_time_evaluation {
    int64_t n_micro, micro_tokens;
    double document_tokens;
    bool is_overlapped; /* in the visits of the next step, not in separate passes (eval_overlap) */
} bl_time_evaluation;

/* Another training over the same base, whose micro-batches share the visits. The members are those
 * of bl_time_input. */
typedef struct bl_time_training {
    const bl_lora_layout *lora;
    int64_t micro_tokens;
    double document_tokens, label_part, useful_part;
    int n_micro;
    bl_time_preference preference;
    bl_time_evaluation evaluation;
} bl_time_training;

/* Borrowed for the call. */
typedef struct bl_time_input {
    const bl_model_config *model;
    const bl_lora_layout *lora; /* n_floats 0: no adapter */
    /* Full fine-tuning, without an adapter: each rank has its rows of every matrix and of the
     * tables, with gradients and moments; n_shards is n_ranks. The part offload_ratio of the fp32
     * weights is in `tier`. With bf16 activations the ring gathers the bf16 copy: from device
     * memory, or with places_copy from the tiers of the weights. */
    bool is_trained, places_copy;
    bl_dtype moments;       /* with is_trained: AdamW's, of matrices */
    double optimizer_ratio; /* of moments and gradients, in whole layers, in optimizer_tier */
    bl_tier optimizer_tier; /* BL_TIER_DEVICE: all are in device memory */
    const bl_trained_set *trained; /* with is_trained; NULL: every tensor */
    const bl_trained_set *modules; /* trained whole together with LoRA; NULL: none */
    const bl_time_run *runs;       /* together the model's layers */
    int n_runs;
    bl_dtype head_dtype; /* of the tables, as stored */
    bl_device_kind kind;
    bl_dtype act;        /* of activations */
    bl_matmul_mode mode; /* of products with frozen matrices, on CUDA */
    bl_matmul_sums sums; /* of those in FP8 */
    bl_rates rates;
    int n_ranks, n_hosts;  /* equal hosts, ranks numbered host by host */
    int n_shards;          /* ranks of a shard group */
    int sum_block;         /* ranks per block of a sum; 0: BL_COMM_SUM_BLOCK */
    bool gathers_by_hosts; /* GPUs: gather_by_hosts */
    int ring_depth;

    int64_t micro_tokens;   /* of a micro-batch of one rank, those that are computed */
    double document_tokens; /* sum of squares of documents' lengths / sum of lengths */
    double label_part;      /* of the tokens that carry loss: 0..1 */
    double useful_part;     /* of the tokens that are not padding: tokens_per_s counts these */
    int n_micro;            /* micro-batches per step, of one rank */
    bl_time_preference preference;
    bl_time_evaluation evaluation;
    const bl_time_training *others; /* after this one in a round: a step of each */
    int n_others;
    int group;        /* micro-batches of all trainings that are visited together */
    int n_overlapped; /* of evaluations, at most, in a pass (bl_plan_count_overlapped) */

    double offload_ratio;
    bl_tier tier;     /* HOST or DISK: where that part is */
    double host_part; /* DISK: fraction of it in host memory */
    bool offload_activations;
    bool writes_device;    /* the host reads the disk straight into device memory: a CPU */
    bool decodes_each_use; /* a weight is dequantized for each product, not once per visit */
} bl_time_input;

typedef enum bl_time_phase {
    BL_TIME_FORWARD, /* of layers, embedding included */
    BL_TIME_HEAD,
    BL_TIME_BACKWARD,
    BL_TIME_OPTIMIZER, /* reduction of the gradients' norm, AdamW, the host's own work */
    BL_TIME_PHASES
} bl_time_phase;

typedef struct bl_time_part {
    double seconds;                       /* of a step */
    double compute_s, wait_s[BL_N_LANES]; /* compute stream: at work; stalled on a lane */
    double busy_s[BL_N_LANES];            /* of each lane's stream, at work or slowed by others */
    bl_lane bound; /* the lane that takes longest: compute, or the lane that it waits for */
} bl_time_part;

/* How the products with frozen matrices are made, by bl_matmul_weight_mode. */
typedef struct bl_time_products {
    int64_t n_matrices, n_fp8; /* of all layers; those whose products are in FP8 */
    int64_t n_exceptions;      /* bf16 by run.bf16_matrices */
    bl_matmul_fallback reason; /* why others are not, the first of them; BL_FALLBACK_COUNT: none */
} bl_time_products;
void bl_time_count_products(const bl_time_input *input, bl_time_products *out);

/* The compute of a layer, per micro-batch: by kind of op, in each direction. */
typedef struct bl_time_amount {
    double seconds, bytes, flops; /* bytes: of device memory, read and written */
} bl_time_amount;
enum { BL_TIME_OF_FORWARD, BL_TIME_OF_RECOMPUTATION, BL_TIME_OF_BACKWARD, BL_TIME_DIRECTIONS };
enum { BL_TIME_BUDGET_LINES = 8 };
typedef struct bl_time_budget_line {
    const char *name;
    bl_time_amount part[BL_TIME_DIRECTIONS];
} bl_time_budget_line;
typedef struct bl_time_budget {
    int n;
    bl_time_budget_line line[BL_TIME_BUDGET_LINES];
} bl_time_budget;

/* Of a layer of the kind of most layers. Norms and the activation function are never saved: their
 * recomputation counts as backward. Without stalls and contention for memory. BL_ENOMEM. */
bl_status bl_time_budget_layer(const bl_time_input *input, bl_time_budget *out);

/* Of several trainings: of a round. */
typedef struct bl_time_estimate {
    double step_s;
    bl_time_part part[BL_TIME_PHASES]; /* their seconds are the step's */
    double tokens_per_s;               /* of all ranks and trainings, useful ones */
    /* of a step, all ranks: as mfu in metrics.jsonl counts them, no recomputation */
    double model_flops;
    bl_time_products products;
    double mfu; /* of the FP8 peak if any product is in FP8, else of the other; 0: not known */
    double bytes[BL_N_LANES]; /* a step and rank, received */
} bl_time_estimate;

/* Simulates each visit of the step. BL_EUSAGE: a rate that is needed is 0; BL_ENOMEM. */
bl_status bl_time_predict(const bl_time_input *input, bl_time_estimate *out);

/* Seconds of an evaluation of training i (0: the input's own; then others): in separate passes, a
 * micro-batch each; and what it takes as configured: with `is_overlapped`, by how much the round
 * is longer whose visits it shares. 0 without evaluation. Errors of bl_time_predict. */
typedef struct bl_time_evaluation_estimate {
    double apart_s, seconds;
} bl_time_evaluation_estimate;
bl_status bl_time_predict_evaluation(const bl_time_input *input, int training,
                                     bl_time_evaluation_estimate *out);

/* Passes, in the order of the program. */
typedef enum bl_time_passes {
    BL_TIME_FIRST_PASS,       /* of a round */
    BL_TIME_ROUND,            /* all of a round: a step of each training */
    BL_TIME_ROUND_EVALUATING, /* with the overlapped evaluations */
    BL_TIME_EVALUATIONS       /* in separate passes, training by training */
} bl_time_passes;
/* The work before, which has prefetched for the first of the passes. */
typedef enum bl_time_before {
    BL_TIME_AFTER_NOTHING,
    BL_TIME_AFTER_STEP,
    BL_TIME_AFTER_EVALUATION
} bl_time_before;

/* The spans of these passes, as the program's timeline gives them (device/timeline.h), in the same
 * order; each pass begins at the time 0. */
bl_status bl_time_trace(const bl_time_input *input, bl_time_passes passes, bl_time_before before,
                        bl_span_sink sink, void *user);

/* An SVG of the streams during the visits of a layer in the middle and of its neighbors. title: its
 * subject. Errors also as bl_file_write_atomic's. */
bl_status bl_time_draw(const bl_time_input *input, const char *title, const char *path);

/* Of the longest phase. */
bl_lane bl_time_bound(const bl_time_estimate *estimate);

const char *bl_time_phase_name(bl_time_phase phase); /* "forward", "head", "backward", ... */

#endif
