/* SPDX-License-Identifier: Apache-2.0 */
/* step_model.h -- a small model of random weights with an adapter and micro-batches, on a device of
 * either kind: for tests of a whole step. Every weight is a number that bf16 holds, so devices
 * begin with the same. */
#ifndef BALLAST_TESTS_TRAIN_STEP_MODEL_H
#define BALLAST_TESTS_TRAIN_STEP_MODEL_H

#include "arch/llama.h"
#include "model/pass.h"
#include "trained/state.h"

enum {
    STEP_LAYERS = 3, /* more than fit the slots of offloaded activations */
    STEP_HIDDEN = 64,
    STEP_INTER = 96,
    STEP_HEADS = 4,
    STEP_KV_HEADS = 2,
    STEP_HEAD_DIM = 16,
    STEP_VOCAB = 48,
    STEP_POISON_ID = STEP_VOCAB - 1, /* its embedding is NaN; in no micro-batch of step_batches */
    STEP_T_MAX = 160,                /* one tile of 128 tokens and a part of another */
    STEP_MICROS = 4
};

/* Choices that must change no bit. */
typedef struct step_choice {
    int group, depth;
    unsigned save;
    bool offload;
    bl_tier tier; /* of the base */
    bool prepares;
} step_choice;

typedef struct step_kind {
    bl_device_kind device;
    bl_format format; /* of the frozen projections: bf16 or fp8_row */
    bl_matmul_mode mode;
    bool is_tied;
    float dropout;
} step_kind;

typedef struct step_model {
    step_kind kind;
    bl_comm *comm;
    bl_device *device;
    bl_stream *compute, *communication, *gather, *copy, *activations;
    bl_staging *staging;
    bl_format formats[STEP_LAYERS * BL_PROJECTIONS];
    bl_model model;
    bl_model_weights weights;
    bl_base *base;
    bl_lora_layout layout;
    bl_trained_state *state;
    bl_pass_adapter adapter;
    bl_pass *pass;
    bl_micro_batch micro[STEP_MICROS];
    bl_twin *batches[STEP_MICROS];
} step_model;

/* A micro-batch in words. Tokens behind n_tokens, if any, have no weight and are a separate
 * document. */
typedef struct step_batch {
    int64_t n_tokens, n_behind;
    int64_t first_document; /* tokens of the first of two; 0: there is one */
    int32_t first_id;
} step_batch;

extern const step_batch step_batches[STEP_MICROS];

/* Gradients in PEFT's order, loss and weights after the step's update. */
typedef struct step_result {
    double loss;
    int64_t n; /* of each array */
    float *gradients, *weights;
} step_result;

/* Whether there is a GPU; prints why not. */
bool step_has_gpu(void);

bl_status step_open(const step_kind *kind, const step_choice *choice, step_model *m);
void step_close(step_model *m);

/* behind: the byte that fills device memory behind each array of micro-batch `index`. */
bl_status step_set_batch(step_model *m, int index, const step_batch *batch, int behind);

/* A step over all micro-batches, with an update. Free with step_free. */
bl_status step_run(step_model *m, const step_choice *choice, step_result *out);
/* The loss of micro-batch `index` alone, without dropout. */
bl_status step_evaluate(step_model *m, int index, double *loss);
void step_free(step_result *result);

/* sqrt(sum (a - b)^2 / sum b^2) */
double step_distance(const float *a, const float *b, int64_t n);

#endif
