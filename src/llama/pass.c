/* SPDX-License-Identifier: Apache-2.0 */
#include "llama/pass.h"

#include <math.h>
#include <stdlib.h>

#include "base/sizes.h"
#include "ops/elementwise.h"
#include "ops/loss_head.h"
#include "ops/norm.h"

struct bl_llama_pass {
    bl_device *device;
    const bl_llama_weights *weights;
    bl_base *base;
    bl_stream *compute;
    bl_pass_options options;
    int64_t n_layers, hidden, T_alloc;
    int64_t n_boundaries; /* layer inputs kept: n_layers + 1 in training, else 2 */
    float *memory;
    float *boundaries;    /* [n_boundaries][max_group][T_alloc * hidden] */
    float *d;             /* [max_group][T_alloc * hidden]: gradient of the boundary between two layers */
    float *saved;         /* [n_layers][max_group][saved_floats * T_alloc] */
    float *logits;
    int64_t saved_floats;
    int64_t n_visits; /* of the pass under way: n_layers + 1, or 2 n_layers + 1 with backward */
    bl_block_workspace workspace;
};

typedef struct pass_memory {
    int64_t boundaries, d, saved, logits, workspace, total; /* floats */
} pass_memory;

static pass_memory measure(const bl_llama_config *config, const bl_pass_options *o)
{
    bl_block_dims dims = bl_block_dims_of(config);
    int64_t T = bl_round_up(o->T_max, 64), group = o->max_group;
    pass_memory m = {0};

    m.boundaries = (o->training ? config->n_layers + 1 : 2) * group * T * dims.hidden;
    m.workspace = bl_block_workspace_floats(&dims, T, o->lora->options.r, o->lora->options.dropout > 0, o->training);
    m.logits = bl_round_up(bl_loss_head_scratch_floats(config->vocab_size), 64);
    if (o->training) {
        m.d = group * T * dims.hidden;
        m.saved = config->n_layers * group * T * bl_block_saved_floats(&dims, o->save);
    }
    m.total = m.boundaries + m.d + m.saved + m.logits + m.workspace;
    return m;
}

int64_t bl_llama_pass_bytes(const bl_llama_config *config, const bl_pass_options *options)
{
    return measure(config, options).total * (int64_t)sizeof(float);
}

bl_status bl_llama_pass_create(bl_device *device, const bl_llama_weights *weights, bl_base *base, bl_stream *compute,
                               const bl_pass_options *options, bl_llama_pass **out)
{
    const bl_llama_config *config = &weights->host->config;
    pass_memory m = measure(config, options);

    *out = NULL;
    bl_llama_pass *pass = calloc(1, sizeof *pass);
    if (!pass) return BL_FAIL(BL_ENOMEM, "a model pass");
    *pass = (bl_llama_pass){.device = device, .weights = weights, .base = base, .compute = compute, .options = *options,
                            .n_layers = config->n_layers, .hidden = config->hidden_size,
                            .T_alloc = bl_round_up(options->T_max, 64), .n_boundaries = options->training ? config->n_layers + 1 : 2,
                            .saved_floats = bl_block_saved_floats(&weights->dims, options->save)};
    bl_status st = bl_device_alloc(device, BL_SPACE_DEVICE, (size_t)m.total * sizeof(float), "activations",
                                   (void **)&pass->memory);
    if (st != BL_OK) {
        free(pass);
        return st;
    }
    pass->boundaries = pass->memory;
    pass->d = pass->boundaries + m.boundaries;
    pass->saved = pass->d + m.d;
    pass->logits = pass->saved + m.saved;
    bl_block_place_workspace(&weights->dims, pass->T_alloc, options->lora->options.r, options->lora->options.dropout > 0,
                             options->training, pass->logits + m.logits, &pass->workspace);
    *out = pass;
    return BL_OK;
}

void bl_llama_pass_destroy(bl_llama_pass *pass)
{
    if (!pass) return;
    bl_device_free(pass->device, BL_SPACE_DEVICE, pass->memory);
    free(pass);
}

/* The input of layer `layer` (n_layers: of the final norm) for micro-batch m. */
static float *boundary(const bl_llama_pass *pass, int64_t layer, int m)
{
    int64_t row = layer % pass->n_boundaries;
    return pass->boundaries + (row * pass->options.max_group + m) * pass->T_alloc * pass->hidden;
}

static float *boundary_gradient(const bl_llama_pass *pass, int m)
{
    return pass->d + m * pass->T_alloc * pass->hidden;
}

/* What a layer's forward leaves for its backward. Only the head comes between those of the last layer, so with a single micro-batch
 * the workspace still holds all that it computed. */
static bl_block_tensors kept_tensors(const bl_llama_pass *pass, const bl_pass_input *input, int64_t layer, int m)
{
    bl_block_tensors t = {0};
    if (pass->options.training && pass->saved_floats > 0) {
        int64_t floats = pass->saved_floats * pass->T_alloc;
        bl_block_place_saved(&pass->weights->dims, pass->options.save, pass->T_alloc,
                             pass->saved + (layer * pass->options.max_group + m) * floats, &t);
    }
    if (layer == pass->n_layers - 1 && input->n_micro == 1) t = bl_block_effective_tensors(&t, &pass->workspace);
    t.x = boundary(pass, layer, m);
    return t;
}

/* Position `at` in the order of visits: 0..L-1, the head, then in training L-1..0; what follows is the next pass's start, layer 0. */
static int64_t visit_unit(const bl_llama_pass *pass, int64_t at)
{
    at %= pass->n_visits;
    return at <= pass->n_layers ? at : 2 * pass->n_layers - at;
}

static bl_status prefetch(bl_llama_pass *pass, int64_t at)
{
    bool tied = pass->weights->tied_head.rows > 0;
    for (int64_t ahead = 0; ahead < pass->options.ring_depth; ahead++) {
        int64_t unit = visit_unit(pass, at + ahead);
        if (unit == pass->n_layers) { /* nothing may be gathered beyond a head that still needs the whole ring */
            if (tied) continue;
            return bl_base_prefetch(pass->base, unit);
        }
        BL_TRY(bl_base_prefetch(pass->base, unit));
        if (pass->options.lora_ring && at + ahead < pass->n_visits) /* LoRA weights may change between passes */
            BL_TRY(bl_gather_ring_prefetch(pass->options.lora_ring, unit));
    }
    return BL_OK;
}

static bl_status begin_visit(bl_llama_pass *pass, const bl_pass_input *input, int64_t at, bl_block *block)
{
    int64_t layer = visit_unit(pass, at);
    const void *lora = NULL;

    if (input->stop && input->stop(input->stop_user)) return BL_FAIL(BL_ESTOPPED, "stopped inside a step");
    BL_TRY(prefetch(pass, at));
    if (layer == pass->n_layers) return BL_OK;
    if (pass->options.lora_ring) BL_TRY(bl_gather_ring_acquire(pass->options.lora_ring, layer, 0, pass->compute, &lora));
    const float *norms = pass->weights->norms + 2 * layer * pass->hidden;
    *block = (bl_block){.dims = &pass->weights->dims, .base = pass->base, .layer = layer, .norm1 = norms,
                        .norm2 = norms + pass->hidden, .lora = pass->options.lora, .lora_weights = lora,
                        .dropout = input->dropout};
    return BL_OK;
}

static bl_status end_visit(bl_llama_pass *pass, int64_t at)
{
    int64_t unit = visit_unit(pass, at), next = at + 1;
    /* A tied head lies in host memory: around it the last layer is visited twice in a row. */
    if (pass->weights->tied_head.rows > 0 && next < pass->n_visits && visit_unit(pass, next) == pass->n_layers) next++;
    bool again = unit == visit_unit(pass, next); /* visited again at once: keep it */
    if (!again) BL_TRY(bl_base_release(pass->base, unit, pass->compute));
    if ((!again || next >= pass->n_visits) && unit < pass->n_layers && pass->options.lora_ring)
        BL_TRY(bl_gather_ring_release(pass->options.lora_ring, unit, pass->compute));
    return BL_OK;
}

static bl_status embed(bl_llama_pass *pass, const bl_pass_input *input)
{
    const bl_llama_host *host = pass->weights->host;
    for (int m = 0; m < input->n_micro; m++) {
        const bl_micro_batch *b = &input->micro[m];
        BL_TRY(bl_embedding(pass->compute, &(bl_embedding_args){.T = b->T, .H = pass->hidden, .dtype = host->embedding_dtype,
                                                                .ids = b->ids, .table = host->embedding, .y = boundary(pass, 0, m)}));
    }
    return BL_OK;
}

static bl_status visit_forward(bl_llama_pass *pass, const bl_pass_input *input, int64_t at)
{
    bl_block block;

    BL_TRY(begin_visit(pass, input, at, &block));
    for (int m = 0; m < input->n_micro; m++) {
        bl_block_tensors kept = kept_tensors(pass, input, block.layer, m);
        BL_TRY(bl_block_forward(pass->compute, &block, &input->micro[m], &kept, &pass->workspace,
                                boundary(pass, block.layer + 1, m)));
    }
    return end_visit(pass, at);
}

/* Final norm, head, loss and, in training, the gradient of the last layer's output. */
static bl_status visit_head(bl_llama_pass *pass, const bl_pass_input *input, bool backward)
{
    const bl_llama_config *config = &pass->weights->host->config;
    const float *w = pass->weights->norms + 2 * pass->n_layers * pass->hidden;
    bl_weight head;

    BL_TRY(begin_visit(pass, input, pass->n_layers, NULL));
    if (pass->weights->tied_head.rows > 0)
        head = pass->weights->tied_head;
    else
        BL_TRY(bl_base_acquire(pass->base, pass->n_layers, 0, pass->compute, &head));
    for (int m = 0; m < input->n_micro; m++) {
        const bl_micro_batch *b = &input->micro[m];
        const float *x = boundary(pass, pass->n_layers, m);
        float *d = backward ? boundary_gradient(pass, m) : NULL;
        BL_TRY(bl_rmsnorm_forward(pass->compute, &(bl_rmsnorm_forward_args){.T = b->T, .H = pass->hidden, .eps = config->rms_norm_eps,
                                                                            .x = x, .w = w, .y = pass->workspace.norm,
                                                                            .rstd = pass->workspace.rstd}));
        BL_TRY(bl_loss_head(pass->compute, &(bl_loss_head_args){.T = b->T, .H = pass->hidden, .V = config->vocab_size,
                                                                .head = head, .x = pass->workspace.norm, .targets = b->targets,
                                                                .weights = b->weights, .scale = input->loss_scale,
                                                                .logits = pass->logits, .dx = d, .loss_sum = input->loss_sum}));
        if (backward)
            BL_TRY(bl_rmsnorm_backward(pass->compute, &(bl_rmsnorm_backward_args){.T = b->T, .H = pass->hidden, .x = x, .w = w,
                                                                                  .rstd = pass->workspace.rstd, .dy = d, .dx = d}));
    }
    return end_visit(pass, pass->n_layers);
}

static bl_status visit_backward(bl_llama_pass *pass, const bl_pass_input *input, int64_t at)
{
    bl_block block;

    BL_TRY(begin_visit(pass, input, at, &block));
    for (int m = 0; m < input->n_micro; m++) {
        bl_block_tensors kept = kept_tensors(pass, input, block.layer, m);
        float *gradients;
        BL_TRY(input->sink->begin(input->sink->user, block.layer, pass->compute, &gradients));
        BL_TRY(bl_block_backward(pass->compute, &block, &input->micro[m], &kept, &pass->workspace, boundary_gradient(pass, m),
                                 gradients));
        BL_TRY(input->sink->end(input->sink->user, block.layer, pass->compute));
    }
    return end_visit(pass, at);
}

bl_status bl_llama_pass_train(bl_llama_pass *pass, const bl_pass_input *input)
{
    pass->n_visits = 2 * pass->n_layers + 1;
    BL_TRY(embed(pass, input));
    for (int64_t at = 0; at < pass->n_layers; at++) BL_TRY(visit_forward(pass, input, at));
    BL_TRY(visit_head(pass, input, true));
    for (int64_t at = pass->n_layers + 1; at < pass->n_visits; at++) BL_TRY(visit_backward(pass, input, at));
    return BL_OK;
}

bl_status bl_llama_pass_evaluate(bl_llama_pass *pass, const bl_pass_input *input)
{
    bl_pass_input plain = *input;
    plain.dropout.p = 0;
    pass->n_visits = pass->n_layers + 1;
    BL_TRY(embed(pass, &plain));
    for (int64_t at = 0; at < pass->n_layers; at++) BL_TRY(visit_forward(pass, &plain, at));
    return visit_head(pass, &plain, false);
}

static bool all_finite(const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (!isfinite(x[i])) return false;
    return true;
}

bool bl_llama_pass_find_bad(const bl_llama_pass *pass, const bl_pass_input *input, int64_t *layer, int *micro)
{
    if (bl_device_get_kind(pass->device) != BL_DEVICE_CPU || !pass->options.training) return false;
    for (*layer = -1; *layer < pass->n_layers; ++*layer)
        for (*micro = 0; *micro < input->n_micro; ++*micro)
            if (!all_finite(boundary(pass, *layer + 1, *micro), input->micro[*micro].T * pass->hidden)) return true;
    return false;
}
