/* SPDX-License-Identifier: Apache-2.0 */
/* table_terms.c -- LoRA terms of the embedding and the head, from products and gathers of ops/. The
 * head's product with B and its gradient are in the loss head, which never stores all logits. */
#include "model/table_terms_internal.h"

#include "base/sizes.h"
#include "ops/elementwise.h"
#include "ops/matmul.h"

enum { ALIGNMENT_BYTES = 256 };

/* Bytes of n elements, aligned. */
static int64_t place_bytes(bl_dtype act, int64_t n)
{
    return bl_round_up(n * (int64_t)bl_dtype_bytes(act), ALIGNMENT_BYTES);
}

int64_t model_term_space_bytes(bl_dtype act, int64_t T, int64_t r, int64_t hidden, bool has_dropout)
{
    if (r == 0) return 0;
    return 2 * place_bytes(act, T * r) + (has_dropout ? place_bytes(act, T * hidden) : 0);
}

void model_term_space_place(bl_dtype act, int64_t T, int64_t r, bool has_dropout, void *memory,
                            model_term_space *out)
{
    char *at = memory;

    *out = (model_term_space){.u = bl_tensor_of(NULL, act)};
    if (r == 0) return;
    out->u = bl_tensor_of(at, act);
    out->du = bl_tensor_of(at + place_bytes(act, T * r), act);
    if (has_dropout) out->x = bl_tensor_of(at + 2 * place_bytes(act, T * r), act);
}

const bl_table_term *model_table_term(const bl_pass_adapter *adapter, bl_model_table table)
{
    if (!adapter || !adapter->terms || adapter->terms[table].r == 0) return NULL;
    return &adapter->terms[table];
}

bl_status model_terms_check(const bl_pass_options *options, const bl_pass_micro *micro)
{
    for (int t = 0; t < BL_MODEL_TABLES; t++) {
        const bl_table_term *term = model_table_term(micro->adapter, (bl_model_table)t);
        if (term && term->r > options->terms_r)
            return BL_FAIL(BL_EINTERNAL, "a term of the embedding or the head beyond the pass's "
                                         "options");
    }
    return BL_OK;
}

/* ---- the embedding ---- */

static bl_status gather(bl_stream *stream, const bl_table_term *term, int64_t T, const int32_t *ids,
                        const model_term_space *space)
{
    return bl_embedding(
        stream,
        &(bl_embedding_args){.T = T, .H = term->r, .ids = ids, .table = term->A, .y = space->u});
}

bl_status model_term_embed(bl_stream *stream, const bl_table_term *term, double multiplier,
                           int64_t T, int64_t hidden, const int32_t *ids,
                           const model_term_space *space, bl_tensor y)
{
    if (T == 0) return BL_OK;
    BL_TRY(gather(stream, term, T, ids, space));
    return bl_matmul(stream, &(bl_matmul_args){.transpose_b = true,
                                               .M = T,
                                               .N = hidden,
                                               .K = term->r,
                                               .lda = term->r,
                                               .ldb = term->r,
                                               .ldc = hidden,
                                               .alpha = (float)(multiplier * (double)term->scale),
                                               .beta = 1.0f,
                                               .a = space->u,
                                               .b = term->B,
                                               .c = y});
}

bl_status model_term_embed_backward(bl_stream *stream, const bl_table_term *term, double multiplier,
                                    int64_t T, int64_t hidden, const int32_t *ids, bl_tensor dy,
                                    const model_term_space *space,
                                    const bl_unit_gradients *gradients)
{
    int64_t r = term->r;
    bl_matmul_args product = {.M = T,
                              .N = r,
                              .K = hidden,
                              .lda = hidden,
                              .ldb = r,
                              .ldc = r,
                              .alpha = (float)(multiplier * (double)term->scale),
                              .a = dy,
                              .b = term->B,
                              .c = space->du};

    if (T == 0) return BL_OK;
    BL_TRY(bl_matmul(stream, &product));
    BL_TRY(bl_embedding_backward(
        stream,
        &(bl_embedding_backward_args){
            .T = T, .H = r, .scale = 1.0f, .ids = ids, .dy = space->du, .table = gradients->dA}));
    BL_TRY(gather(stream, term, T, ids, space));
    product.transpose_a = true;
    product.M = hidden, product.K = T;
    product.beta = 1.0f;
    product.b = space->u, product.c = bl_tensor_f32(gradients->dB);
    return bl_matmul(stream, &product);
}

/* ---- the head ---- */

static bl_status mask(bl_stream *stream, const bl_lora_dropout *d, int64_t T, int64_t hidden,
                      bl_tensor x, bl_tensor y)
{
    return bl_dropout(stream, &(bl_dropout_args){.T = T,
                                                 .C = hidden,
                                                 .p = d->p,
                                                 .seed = d->seed,
                                                 .step = d->step,
                                                 .layer = d->layer,
                                                 .matrix = d->matrix,
                                                 .sample = d->sample,
                                                 .position = d->position,
                                                 .x = x,
                                                 .y = y});
}

bl_status model_term_head(bl_stream *stream, const bl_table_term *term,
                          const bl_lora_dropout *dropout, int64_t T, int64_t hidden, bl_tensor x,
                          const model_term_space *space, float *dB, bl_loss_head_term *out)
{
    int64_t r = term->r;

    *out = (bl_loss_head_term){
        .r = r, .scale = term->scale, .u = space->u, .du = space->du, .B = term->B, .dB = dB};
    if (T == 0) return BL_OK;
    if (dropout->p > 0) {
        BL_TRY(mask(stream, dropout, T, hidden, x, space->x));
        x = space->x;
    }
    return bl_matmul(stream, &(bl_matmul_args){.transpose_b = true,
                                               .M = T,
                                               .N = r,
                                               .K = hidden,
                                               .lda = hidden,
                                               .ldb = hidden,
                                               .ldc = r,
                                               .alpha = 1.0f,
                                               .a = x,
                                               .b = term->A,
                                               .c = space->u});
}

bl_status model_term_head_backward(bl_stream *stream, const bl_table_term *term,
                                   const bl_lora_dropout *dropout, int64_t T, int64_t hidden,
                                   bl_tensor x, const model_term_space *space, float *dA,
                                   bl_tensor dx)
{
    bool drops = dropout->p > 0;
    int64_t r = term->r;
    bl_matmul_args product = {.transpose_a = true,
                              .M = r,
                              .N = hidden,
                              .K = T,
                              .lda = r,
                              .ldb = hidden,
                              .ldc = hidden,
                              .alpha = 1.0f,
                              .beta = 1.0f,
                              .a = space->du,
                              .b = drops ? space->x : x,
                              .c = bl_tensor_f32(dA)};

    if (T == 0) return BL_OK;
    BL_TRY(bl_matmul(stream, &product));
    product.transpose_a = false;
    product.M = T, product.K = r;
    product.b = term->A, product.c = dx;
    if (!drops) return bl_matmul(stream, &product);
    product.beta = 0;
    product.c = space->x;
    BL_TRY(bl_matmul(stream, &product));
    BL_TRY(mask(stream, dropout, T, hidden, space->x, space->x));
    return bl_accumulate(stream, &(bl_accumulate_args){.n = T * hidden, .x = space->x, .y = dx});
}
