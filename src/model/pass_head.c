/* SPDX-License-Identifier: Apache-2.0 */
/* pass_head.c -- the visit of the head: x -> norm -> logits -> loss, and the gradient of x from the
 * same call, so that logits of (T, vocab) never outlive a piece of them (ops/loss_head.h). With a
 * weigher the head is run twice: for the log-probabilities of all micro-batches, which the host
 * waits for, and with the weights that they give; so of the micro-batches that are weighed. */
#include "model/pass_internal.h"
#include "ops/elementwise.h"
#include "ops/loss_head.h"

/* Where the final norm's weights are trained: x (T,H) divided by logits_scaling. */
static bl_status divide_logits(const bl_pass *pass, int64_t T, bl_tensor x)
{
    double scaling = pass->weights->model->config.logits_scaling;

    if (!pass->weights->model->is_trained || scaling == 0) return BL_OK;
    return bl_scale(
        pass->compute,
        &(bl_scale_args){.n = T * pass->hidden, .scale = (float)(1.0 / scaling), .x = x, .y = x});
}

/* Final norm and head: the loss and, in training, the gradient of the last layer's output, with the
 * weights of the batch or others; or, with logp, the log-probabilities alone. */
static bl_status run_head(bl_pass *pass, const bl_pass_micro *micro, int m, const float *weights,
                          float *logp)
{
    const bl_model_config *config = &pass->weights->model->config;
    const bl_micro_batch *b = &pass->batches[m];
    const bl_gradient_sink *sink = logp ? NULL : micro->gradients;
    bl_unit_gradients gradients = {.lora = NULL};
    /* Of the last layer: the rest of it may still hold what that has computed. */
    const bl_block_workspace *ws = &pass->workspaces[0][model_kind_of(pass, pass->n_layers - 1)];
    bl_tensor d = {0}, x = ws->norm;
    const bl_table_term *term = model_table_term(micro->adapter, BL_TABLE_HEAD);
    bl_lora_dropout dropout = {.p = 0};
    bl_block_norm norm = {.T = b->T,
                          .w = bl_model_layer_vectors(pass->weights, pass->n_layers),
                          .x = model_boundary(pass, micro, pass->n_layers, m),
                          .rstd = ws->rstd,
                          .mean = ws->mean};

    if (sink) d = model_boundary_gradient(pass, m);
    if (sink) BL_TRY(sink->begin(sink->user, pass->n_layers, pass->compute, &gradients));
    BL_TRY(bl_block_norm_forward(pass->compute, pass->any, &norm, x));
    BL_TRY(divide_logits(pass, b->T, x));
    if (term) {
        dropout = model_head_dropout(pass, micro, m);
        BL_TRY(model_term_head(pass->compute, term, &dropout, b->T, pass->hidden, x, &pass->terms,
                               gradients.dB, &pass->head_terms[m]));
    }
    BL_TRY(bl_loss_head(pass->compute,
                        &(bl_loss_head_args){.T = b->T,
                                             .H = pass->hidden,
                                             .V = config->vocab_size,
                                             .head = pass->head,
                                             .x = x,
                                             .targets = b->targets,
                                             .weights = weights,
                                             .scale = micro->loss_scale,
                                             .logits = pass->logits,
                                             .dx = d,
                                             .logp = logp ? logp : micro->logp,
                                             .loss_sum = micro->loss_sum,
                                             .d_head = gradients.weights.matrix[0][0],
                                             .term = term ? &pass->head_terms[m] : NULL}));
    if (!sink) return BL_OK;
    if (term)
        BL_TRY(model_term_head_backward(pass->compute, term, &dropout, b->T, pass->hidden, x,
                                        &pass->terms, gradients.dA, d));
    BL_TRY(divide_logits(pass, b->T, d));
    if (gradients.weights.trained)
        BL_TRY(bl_block_norm_gradients(pass->compute, pass->any, &norm, d,
                                       gradients.weights.trained->vectors, BL_ATTENTION_NORM,
                                       gradients.weights.vectors));
    BL_TRY(sink->end(sink->user, pass->n_layers, pass->compute));
    return bl_block_norm_backward(pass->compute, pass->any, &norm, false, d, d);
}

/* Queues the copy of micro-batch m's part of `values`. */
static bl_status move_values(bl_pass *pass, const bl_pass_input *input, int m, bool up)
{
    size_t offset = (size_t)model_group_row(pass, &input->micro[m], m) * sizeof(float),
           n_bytes = (size_t)pass->batches[m].T * sizeof(float);

    return up ? bl_twin_upload(pass->values, pass->compute, offset, n_bytes)
              : bl_twin_download(pass->values, pass->compute, offset, n_bytes);
}

/* After the last micro-batch's log-probabilities: the host gives their weights. */
static bl_status weigh(bl_pass *pass, const bl_pass_input *input)
{
    const float *device_values = pass->values->memory;

    for (int m = 0; m < input->n_micro; m++) {
        pass->host_values[m] = NULL;
        if (!input->micro[m].is_weighed) continue;
        BL_TRY(move_values(pass, input, m, false));
        pass->host_values[m] =
            (float *)pass->values->host + model_group_row(pass, &input->micro[m], m);
    }
    BL_TRY(bl_stream_synchronize(pass->compute));
    BL_TRY(input->weigher->weigh(input->weigher->user, pass->host_values));
    for (int m = 0; m < input->n_micro; m++) {
        const bl_pass_micro *micro = &input->micro[m];
        if (!micro->gradients || !micro->is_weighed) continue;
        BL_TRY(move_values(pass, input, m, true));
        BL_TRY(run_head(pass, micro, m, device_values + model_group_row(pass, micro, m), NULL));
    }
    return BL_OK;
}

bl_status model_pass_run_head(bl_pass *pass, const bl_pass_input *input, int m)
{
    const bl_pass_micro *micro = &input->micro[m];
    float *logp = NULL;

    if (micro->is_weighed) logp = (float *)pass->values->memory + model_group_row(pass, micro, m);
    BL_TRY(run_head(pass, micro, m, pass->batches[m].weights, logp));
    return input->weigher && m + 1 == input->n_micro ? weigh(pass, input) : BL_OK;
}
