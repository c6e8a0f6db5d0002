/* SPDX-License-Identifier: Apache-2.0 */
/* ladder.h -- the classical ways to train a model on several devices, and their memory: replication
 * on every device (data parallelism), ZeRO's three stages, LoRA, FP8, a sharded frozen base, and
 * that base in host memory. For comparison: Ballast's own memory comes from memory.h.
 *
 * Psi parameters in all, P of them in the seven projections, p trained ones, N devices. With mixed
 * precision and AdamW (Rajbhandari et al., ZeRO, 2020, section 3.1) a device holds 2 Psi bytes of
 * weights, 2 Psi of gradients and 12 Psi of optimizer state (fp32 weights, two moments); stage 1
 * divides the last by N, stage 2 also the gradients, stage 3 also the weights. With LoRA the frozen
 * weights have neither gradients nor state, and the p trained ones are fp32: 4 p of weights, 4 p of
 * gradients, 8 p of moments.
 *
 * Activations without recomputation (Korthikanti et al., Reducing Activation Recomputation, 2022,
 * equation 2; fp16, one head dimension per head, attention's scores kept), s tokens per sequence, b
 * sequences, h channels, a heads: s b h (34 + 5 a s / h) bytes per layer. With it: 2 s b h per
 * layer, and one whole layer. */
#ifndef BALLAST_PLAN_LADDER_H
#define BALLAST_PLAN_LADDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "arch/config.h"
#include "plan/hardware.h"

/* What a training does. */
typedef struct bl_strategy {
    int zero_stage;      /* 0..3 */
    bool lora;           /* the base is frozen */
    bool fp8;            /* its projections are one byte per weight; with lora */
    bool shards_base;    /* 1 / N of it on each device, also below stage 3; with lora */
    bool offloads_base;  /* it is in host memory; without lora the weights */
    bool offloads_state; /* gradients and optimizer state are in host memory; without lora */
    bool checkpointing;  /* activations are recomputed from each layer's input */
} bl_strategy;

/* The tensors that it applies to. */
typedef struct bl_strategy_job {
    const bl_model_config *model;
    double n_params;       /* Psi; 0: the model's own number */
    int n_devices;         /* N */
    int64_t length, batch; /* s, b: of one device at a time */
    int64_t lora_r;        /* of all seven projections */
} bl_strategy_job;

/* Bytes of one device, and of the host for one device. */
typedef struct bl_strategy_memory {
    int64_t weights, gradients,
        optimizer; /* what ZeRO calls model states; lora's weights in them */
    int64_t activations, logits;
    int64_t buffers; /* buckets of reductions; gathered layers */
    int64_t host;
} bl_strategy_memory;

void bl_strategy_count(const bl_strategy *strategy, const bl_strategy_job *job,
                       bl_strategy_memory *out);
/* Weights, gradients and optimizer. */
int64_t bl_strategy_states(const bl_strategy_memory *memory);
int64_t bl_strategy_total(const bl_strategy_memory *memory); /* of the device */

/* Seconds of a step of one micro-batch: products and attention at the sustained rate, then what
 * travels between the devices of a host, one after the other (nothing overlaps). */
double bl_strategy_step_s(const bl_strategy *strategy, const bl_strategy_job *job,
                          const bl_hardware *hardware);

/* A device's usable memory: all of it less 1 GiB of context and libraries, and of that 95 % (an
 * allocator's fragments). Both are assumed. */
int64_t bl_strategy_room(const bl_hardware *hardware);

/* The rungs: none, ZeRO-1, -2, -3, state in host memory, weights in host memory; LoRA under ZeRO-2,
 * FP8, a sharded base, that base in host memory. Each adds to the ones before it; a ZeRO stage
 * replaces the stage before it. */
typedef struct bl_ladder_rung {
    const char *name;
    bl_strategy strategy;
} bl_ladder_rung;
extern const bl_ladder_rung bl_ladder[];
extern const size_t bl_ladder_length;

/* The fastest of ZeRO stage 1..3 with LoRA, with and without recomputation, that fits: of those
 * within 1 % of it the smallest stage. False: none fits, and out is the one that takes least.
 * job->n_devices is the hardware's. */
bool bl_strategy_choose(const bl_strategy_job *job, const bl_hardware *hardware, bl_strategy *out);

#endif
