/* SPDX-License-Identifier: Apache-2.0 */
/* pass_model.h -- a small model of random weights, sharded over the ranks of a test, with LoRA
 * adapters and micro-batches, for the tests of model/pass.h. */
#ifndef TEST_PASS_MODEL_H
#define TEST_PASS_MODEL_H

#include "ops_test.h"
#include "test_ranks.h"

#include "arch/llama.h"
#include "model/pass.h"

enum {
    LAYERS = 5, /* more than fit the slots of offloaded activations */
    HIDDEN = 16,
    INTER = 24,
    HEADS = 2,
    KV_HEADS = 1,
    HEAD_DIM = 8,
    VOCAB = 37,
    MICROS = 4,
    T_MAX = 9
};

typedef struct variant {
    int group, depth;
    unsigned save;
    bool offload;
    int64_t n_saving_all;
} variant;

/* Random weights of LoRA, a shard per rank. */
typedef struct pass_adapter {
    bl_lora_layout layout;
    float *shards;
    bl_pass_adapter use; /* with a separate dropout */
} pass_adapter;

typedef struct pass_model {
    bl_format formats[LAYERS * BL_PROJECTIONS];
    bl_model model;
    bl_model_weights weights;
    bl_base *base;
    pass_adapter lora;
    bl_stream *gathers, *copies, *activations;
    bl_timeline *timeline;
    bl_micro_batch micro[MICROS];
    int32_t ids[T_MAX], targets[T_MAX], position[T_MAX], cu_seqlens[MICROS][2];
    float ones[T_MAX];
    int64_t sample[T_MAX];
    double *loss; /* [MICROS] */
} pass_model;

extern const bl_model_config pass_config;

/* depth: of the rings of base and adapter. */
bl_status pass_model_create(test_rank *self, int depth, pass_model *m);
void pass_model_close(test_rank *self, pass_model *m, bl_pass *pass);

/* number: chooses the weights. */
bl_status pass_adapter_create(test_rank *self, bl_stream *gathers, int depth, int64_t r,
                              float dropout, int number, pass_adapter *out);
void pass_adapter_close(pass_adapter *adapter);

/* A pass for training, as large as its own account says. */
bl_status pass_create(test_rank *self, pass_model *m, const variant *v, bl_pass **out);

#endif
