/* SPDX-License-Identifier: Apache-2.0 */
/* memory.h -- the memory that a run will take, item by item, from the functions whose sizes it is
 * allocated with; docs/internals/plan.md explains the items. */
#ifndef BALLAST_PLAN_MEMORY_H
#define BALLAST_PLAN_MEMORY_H

#include "trained/full.h"
#include "model/pass.h"
#include "plan/input.h"

typedef enum bl_memory_item {
    BL_MEMORY_BASE,          /* this rank's shard of the base, the head's among it */
    BL_MEMORY_SCALES,        /* of all rows */
    BL_MEMORY_NORMS,         /* and RoPE's tables */
    BL_MEMORY_RING,          /* gathered layers */
    BL_MEMORY_READER,        /* buffers of reads from disk */
    BL_MEMORY_LORA,          /* its part of the weights, and of the compute copy */
    BL_MEMORY_GRADIENTS,     /* its part, and those of the current layer */
    BL_MEMORY_ADAM,          /* both moments */
    BL_MEMORY_LORA_RING,     /* gathered LoRA weights */
    BL_MEMORY_LAYER_INPUTS,  /* of all layers, or their stack's slots */
    BL_MEMORY_SAVED,         /* activations kept besides layer inputs */
    BL_MEMORY_BOUNDARY,      /* the gradient between two layers */
    BL_MEMORY_WORKSPACE,     /* of a layer at work */
    BL_MEMORY_PREPARED,      /* copies of weights that a visit's products make */
    BL_MEMORY_LOGITS,        /* of the loss head */
    BL_MEMORY_TOKENS,        /* of this step and the next */
    BL_MEMORY_STAGING,       /* between host and device */
    BL_MEMORY_WORKERS,       /* scratch of the host's threads */
    BL_MEMORY_COMMUNICATION, /* a GPU's communicator */
    BL_MEMORY_CONTEXT,       /* a GPU's context, kernels and libraries */
    BL_MEMORY_ITEMS
} bl_memory_item;

/* "frozen base"; "weights" where all are trained. */
const char *bl_memory_item_name(bl_memory_item item, bool is_trained);

/* Bytes of a rank. */
typedef struct bl_memory_amount {
    int64_t device, host;
} bl_memory_amount;

/* Bytes, of a rank unless noted. On a CPU device memory is host memory. */
typedef struct bl_memory_ledger {
    bl_memory_amount item[BL_MEMORY_ITEMS];
    int64_t device;          /* of all items: a GPU's own memory */
    int64_t disk;            /* page files of the base, and the optimizer's */
    int64_t embedding, data; /* host memory: one of each process, or of the host */
    int64_t process;         /* of a process, host memory */
    int64_t tokenizer;       /* likewise */
    /* Of a host, what its processes share (topology.shares_memory): embedding and data; else 0. */
    int64_t shared;
    /* Of a process with its ranks, host memory, its part of `shared` included: at the peak while it
     * loads; at the peak. The sum over all processes of a host is the host's need. */
    int64_t loading, total;
} bl_memory_ledger;

/* With the base placed and the pass's sizes as given, and with finetuning_type full moments and
 * gradients placed as `optimizer` (else it may be NULL): the bound, as if micro-batches were all
 * full. BL_ENOMEM. */
bl_status bl_plan_predict_memory(const bl_plan_input *input, const bl_placement *placement,
                                 const bl_optimizer_placement *optimizer,
                                 const bl_pass_options *pass, bl_memory_ledger *out);
/* The memory expected with the micro-batches of input->rows. Pages of a CPU that no row reaches
 * take no memory; a GPU's are allocated: there it is the bound, as without known rows. */
bl_status bl_plan_expect_memory(const bl_plan_input *input, const bl_placement *placement,
                                const bl_optimizer_placement *optimizer,
                                const bl_pass_options *pass, bl_memory_ledger *out);

/* The process's own part of `total`, as the system counts it (RssAnon): without its part of
 * `shared`. */
int64_t bl_memory_own_bytes(const bl_memory_ledger *ledger, const bl_topology *topology);
/* Of a host: one copy, or one per process. */
int64_t bl_memory_embedding_bytes(const bl_memory_ledger *ledger, const bl_topology *topology);
/* Each plans with its part of the host's memory. */
int bl_plan_processes_on_host(const bl_topology *topology);

/* Bytes that a process with n_ranks ranks, which share a GPU, allocates there besides its context,
 * without NCCL's; 0 on a CPU. */
int64_t bl_memory_gpu_bytes(const bl_memory_ledger *ledger, int n_ranks);

/* A GPU's context and, in a job of several ranks, communicator: what these items have. */
int64_t bl_plan_gpu_reserve_bytes(int n_ranks);

/* Bytes that NCCL takes of the GPU of a process: 0 in a job of one process. The ledger's
 * bl_memory_gpu_bytes counts communicators' memory for sums separately. */
int64_t bl_plan_communicator_bytes(const bl_topology *topology);

/* Of items [first, last], device and host memory together. */
int64_t bl_memory_sum(const bl_memory_ledger *ledger, bl_memory_item first, bl_memory_item last);

/* The sizes of the pass, without prepared weights. activations and timeline are a rank's own: NULL
 * here. */
bl_pass_options bl_plan_pass_options(const bl_plan_input *input, unsigned save);

/* Of all trainings: tokens of the largest micro-batch that their rows can make, without
 * evaluations; micro-batches of a step of each. */
int64_t bl_plan_micro_tokens(const bl_plan_input *input);
int64_t bl_plan_count_micro(const bl_plan_input *input);

/* Of such a pass: micro-batches of evaluations that it can have among its companions, each with
 * its own. 0: evaluations have separate passes. */
int bl_plan_count_overlapped(const bl_plan_input *input, const bl_pass_options *pass);

/* Gives each matrix of a layer memory for copies that the micro-batches of a visit share
 * (linear/prepared.h). BL_ENOMEM. */
bl_status bl_plan_prepare(const bl_plan_input *input, bl_pass_options *pass);
/* Whether products of a visit make the same thing of a matrix more than once: for another
 * micro-batch or, in bf16, to recompute; on a GPU. */
bool bl_plan_uses_prepared(const bl_plan_input *input, const bl_pass_options *pass);

/* Ranks of a shard group. */
int bl_plan_n_shards(const bl_train_config *config, const bl_topology *topology);

#endif
