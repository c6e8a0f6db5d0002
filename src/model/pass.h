/* SPDX-License-Identifier: Apache-2.0 */
/* pass.h -- the model run layer-major: each layer is visited once for a group of micro-batches.
 *
 * A visit acquires a layer's frozen matrices and LoRA weights once, takes the group's micro-batches
 * through it one after the other, and releases them. Gathers are paid once per group;
 * layer-internal memory is one micro-batch's; layer inputs, saved tensors and the boundary
 * gradients are the whole group's. Layer inputs and saved tensors are two stacks (offload/spill.h):
 * with offload_activations device memory has those of two layers, host memory the others. The order
 * of visits is known (bl_pass: 0..L-1, head, L-1..0, and from the start again), so each visit
 * prefetches the ones to come.
 *
 * Micro-batches are padded where the device needs whole tiles of tokens (model/feed_internal.h).
 *
 * The size of the group never changes a bit: micro-batches do not mix, the loss is summed
 * micro-batch by micro-batch, and gradients are handed out per layer and micro-batch. */
#ifndef BALLAST_MODEL_PASS_H
#define BALLAST_MODEL_PASS_H

#include "linear/base.h"
#include "offload/gather_ring.h"
#include "device/timeline.h"
#include "arch/block.h"
#include "arch/lora.h"
#include "model/weights.h"

/* Where backward puts the gradients of one unit: fp32, device memory. Units: layers; n_layers: the
 * head (matrix[0], (vocab, hidden)) with the final norm; n_layers + 1: the embedding (matrix[0]),
 * also where that is the head. */
typedef struct bl_unit_gradients {
    float *lora;                 /* a layer's flat vector (bl_lora_layer_floats), overwritten */
    float *dA, *dB;              /* of the LoRA term of the unit's table, added to */
    bl_weight_gradients weights; /* of the model's tensors, added to; zeros: all are frozen */
} bl_unit_gradients;

/* Takes the gradients of one run. begin fills *out, zeros before, with destinations that are valid
 * until end, which says that the tasks queued on `stream` so far complete them. Called in the order
 * of a pass's backward visits: unit n_layers, L-1 down to the first trained layer, n_layers + 1
 * where has_embedding is set; micro-batches 0..n-1 in each. Where the model's weights are trained
 * (bl_model.is_trained), open comes before the micro-batches of a visit, close after them. */
typedef struct bl_gradient_sink {
    void *user;
    bl_status (*open)(void *user, int64_t unit, bl_stream *stream);
    bl_status (*begin)(void *user, int64_t unit, bl_stream *stream, bl_unit_gradients *out);
    bl_status (*end)(void *user, int64_t unit, bl_stream *stream);
    bl_status (*close)(void *user, int64_t unit, bl_stream *stream);
    bool has_embedding; /* the embedding or its term has gradients */
} bl_gradient_sink;

/* Trained weights whose update may be pending until their next use. update is called before a unit
 * is loaded, in the order of forward visits, for the embedding first. It queues the pending update;
 * later loads of the base, and later work on compute, see the new weights. */
typedef struct bl_weight_updates {
    void *user;
    bl_status (*update)(void *user, int64_t unit);
} bl_weight_updates;

/* The LoRA term of the embedding or the head (arch/lora.h), whole on this rank, in device memory;
 * A and B in the dtype of activations.
 *   embedding  A (vocab, r), B (hidden, r):  y_t += s B a, a = row id_t of A, before
 *                                            bl_model_config.embedding_multiplier
 *   head       A (r, hidden), B (vocab, r):  logits_t += s B A D x_t, D the dropout mask
 * Without dropout in the embedding, as in huggingface/peft tuners/lora/layer.py Embedding. */
typedef struct bl_table_term {
    int64_t r; /* 0: none */
    float scale;
    bl_tensor A, B;
} bl_table_term;

/* Trainable weights that micro-batches go through. Unit i of `ring` is layer i's flat vector, one
 * item, in the dtype of the device's activations. lora and ring are borrowed. */
typedef struct bl_pass_adapter {
    const bl_lora_layout *lora;
    bl_gather_ring *ring;
    bl_lora_dropout dropout;    /* p, seed, step; of micro-batches with gradients alone */
    const bl_table_term *terms; /* [BL_MODEL_TABLES], borrowed; NULL: none. On a CPU */
} bl_pass_adapter;

/* A micro-batch, its adapter and the destinations of its results. Neighbors may differ in all of
 * it: one visit serves several adapters, an evaluation and the frozen base alone, at one transfer
 * of the weights. */
typedef struct bl_pass_micro {
    const bl_micro_batch *batch;    /* T = 0 is legal: the rank only takes part in the gathers */
    const bl_pass_adapter *adapter; /* NULL: the frozen base alone */
    double *loss_sum; /* one double of device memory, added to: -sum_t weight_t log p(target_t) */
    const bl_gradient_sink *gradients; /* NULL: forward and loss only */
    double loss_scale;                 /* of the gradient: 1 / number of labels of the step */
    /* (T) of device memory, overwritten: log p(target_t), 0 where the weight is 0; NULL: not
     * wanted. On a CPU, of micro-batches that are not weighed. */
    float *logp;
    /* Without gradients: it accompanies the others, with two layer inputs at a time instead of all
     * (bl_pass_options.max_companions). */
    bool is_companion;
    bool is_weighed; /* the pass's weigher has its log-probabilities, and gives its weights */
} bl_pass_micro;

/* Losses that are functions of log-probabilities, such as those of preferences: their gradient is
 * that of the loss head with other weights. In the head's visit, when the log-probabilities of the
 * whole group are known, weigh gets values[m][t] (host memory, T of micro-batch m; 0 where the
 * batch's weight is 0) of the micro-batches that are weighed, NULL of the others, and replaces
 * those of micro-batches with gradients by the weights of the tokens. Called once per pass by its
 * thread; an error ends the pass. */
typedef struct bl_pass_weigher {
    void *user;
    bl_status (*weigh)(void *user, float *const *values);
} bl_pass_weigher;

typedef struct bl_pass_options {
    /* Of the device, for bl_pass_measure before there is one; create looks at its device. */
    bl_device_kind kind;
    bl_dtype act; /* of activations */
    /* Of products with the frozen projections on CUDA; and, by layer, those that are made in bf16
     * all the same: bit m is bl_layer_matrix m. NULL: none. Borrowed by the pass. */
    bl_matmul_mode mode;
    bl_matmul_sums sums;
    const uint8_t *bf16_matrices;
    /* All projections are stored as bf16; all weights are trained (bl_model.is_trained); the
     * embedding is an adapter's (bl_model_weights.tables). create looks at its weights. */
    bool is_dense, is_trained, has_table;
    /* Layers before it have no backward pass, and keep nothing for one (bl_trained_set). create
     * looks at its weights. */
    int64_t first_trained;
    /* Bytes of what products make of a layer's matrices and a visit keeps:
     * bl_linear_prepared_measure of the base. Zeros: each product makes its own. */
    bl_linear_prepared prepared;
    int64_t T_max;      /* tokens of the largest micro-batch */
    int max_group;      /* micro-batches visited together, >= 1, companions apart */
    int max_companions; /* and these */
    bool weighs;        /* passes may have a weigher */
    int ring_depth;     /* how far to look ahead */
    unsigned save; /* bl_save, of all layers but n_saving_all, which are spread evenly: these */
    int64_t n_saving_all; /* keep BL_SAVE_S4 */
    bool training;        /* false: forward only, two layer inputs are kept */
    /* Layer inputs and saved tensors go to host memory and back; nothing without training. */
    bool offload_activations;
    bool pin;          /* that memory, where the system allows it (offload/arena.h) */
    int64_t lora_r;    /* the largest rank of its adapters; 0: it never has one */
    bool lora_dropout; /* whether any of them drops */
    int64_t terms_r; /* the largest rank of terms of the embedding or the head; 0: there are none */
    /* Carries what goes to host memory and back: not compute. NULL without offload_activations. */
    bl_stream *activations;
    /* May be NULL: a compute span for each visit, "forward", "head", "backward", which may
     * contain stalls. */
    bl_timeline *timeline;
} bl_pass_options;

typedef struct bl_pass bl_pass;

/* bl_save of a layer. */
unsigned bl_pass_save_of(const bl_pass_options *options, int64_t n_layers, int64_t layer);

/* Takes all the memory the pass will ever need. weights, base, streams and timeline are
 * borrowed. */
bl_status bl_pass_create(bl_device *device, const bl_model_weights *weights, bl_base *base,
                         bl_stream *compute, const bl_pass_options *options, bl_pass **out);
void bl_pass_destroy(bl_pass *pass); /* after the streams are idle; NULL is fine */

/* Bytes that create takes, by purpose. Device memory: the members up to values; host memory: the
 * others, of offloaded activations, and on a GPU of the embeddings of a group. */
typedef struct bl_pass_bytes {
    int64_t inputs;     /* layer inputs: all, or the slots of their stack */
    int64_t saved;      /* activations kept besides layer inputs, likewise */
    int64_t boundary;   /* the gradient between two layers */
    int64_t logits;     /* of the loss head */
    int64_t workspace;  /* of a layer at work, prepared weights among it */
    int64_t feed;       /* padded micro-batches (model/feed_internal.h) */
    int64_t companions; /* layer inputs of micro-batches that accompany others */
    int64_t terms;      /* of the terms of the embedding and the head */
    int64_t values;     /* log-probabilities and weights; and the same in host memory */
    int64_t host_inputs, host_saved;
    int64_t host_embeddings; /* of a group */
} bl_pass_bytes;
bl_pass_bytes bl_pass_measure(const bl_model_config *config, const bl_pass_options *options);

/* What of it is touched where pages take memory when they are first written, on a CPU: by
 * micro-batches with gradients of at most T_train tokens, and evaluations of at most T_evaluation;
 * 0: there are none. */
bl_pass_bytes bl_pass_touched(const bl_model_config *config, const bl_pass_options *options,
                              int64_t T_train, int64_t T_evaluation);

/* Borrowed for the call; the device memory behind it until the streams have run. */
typedef struct bl_pass_input {
    int n_micro; /* <= max_group, and companions */
    const bl_pass_micro *micro;
    /* Asked before each visit; true ends the pass with BL_ESTOPPED. NULL: never. */
    bool (*stop)(void *user);
    void *stop_user;
    const bl_pass_weigher *weigher;   /* of the micro-batches that are weighed; NULL: none is */
    const bl_weight_updates *updates; /* of the base's weights; NULL: no update is pending */
} bl_pass_input;

/* One group: forward and loss, and backward where a micro-batch has somewhere to put its gradients.
 * The work is queued, at most two visits ahead of the device: a visit waits for the end of the one
 * two before it. So the call returns its first error, or a stop, within two visits, and while the
 * last two still run. BL_EINTERNAL: more micro-batches, a larger LoRA rank, dropout or gradients
 * than the options said. */
bl_status bl_pass_run(bl_pass *pass, const bl_pass_input *input);

/* In the layers a micro-batch has a multiple of so many tokens, or those of T_max: at most
 * BL_FEED_BUCKETS different numbers (model/feed_internal.h). 0: its own number, on a CPU. */
int64_t bl_pass_token_step(const bl_pass *pass);

/* After a loss that is not finite and with compute idle: the first layer of the group `input`,
 * which must be the last, whose output holds a NaN or infinity (-1: the embedding), and the
 * micro-batch of the group. False: none of them does, or they cannot be read. */
bool bl_pass_find_bad(const bl_pass *pass, const bl_pass_input *input, int64_t *layer, int *micro);

/* The invariants of its stacks (offload/spill.h), at any time between two calls that queue work;
 * BL_EINTERNAL says which is broken. */
bl_status bl_pass_validate(const bl_pass *pass);

#endif
