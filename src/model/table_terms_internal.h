/* SPDX-License-Identifier: Apache-2.0 */
/* table_terms_internal.h -- LoRA terms of the embedding and the head (bl_table_term). For pass.c,
 * pass_head.c and generate.c. All calls queue on `stream`; products are in the dtype of
 * activations, gradients fp32. */
#ifndef BALLAST_MODEL_TABLE_TERMS_INTERNAL_H
#define BALLAST_MODEL_TABLE_TERMS_INTERNAL_H

#include "model/pass.h"
#include "ops/loss_head.h"

/* Of a micro-batch at work: r channels of the LoRA path and their gradient, and D x. */
typedef struct model_term_space {
    bl_tensor u, du; /* (T, r) */
    bl_tensor x;     /* (T, hidden); none without dropout */
} model_term_space;

/* Bytes for T tokens; r 0: none. */
int64_t model_term_space_bytes(bl_dtype act, int64_t T, int64_t r, int64_t hidden,
                               bool has_dropout);
void model_term_space_place(bl_dtype act, int64_t T, int64_t r, bool has_dropout, void *memory,
                            model_term_space *out);

/* The term of a table; NULL: the adapter, which may be NULL, has none. */
const bl_table_term *model_table_term(const bl_pass_adapter *adapter, bl_model_table table);

/* BL_EINTERNAL: the micro-batch has terms beyond the options. */
bl_status model_terms_check(const bl_pass_options *options, const bl_pass_micro *micro);

/* y (T, hidden) += multiplier s a B^T, a_t = row ids[t] of A (vocab, r). */
bl_status model_term_embed(bl_stream *stream, const bl_table_term *term, double multiplier,
                           int64_t T, int64_t hidden, const int32_t *ids,
                           const model_term_space *space, bl_tensor y);
/* gradients: of the embedding's unit; dB += multiplier s dy^T a, row ids[t] of dA += multiplier s
 * dy_t B. */
bl_status model_term_embed_backward(bl_stream *stream, const bl_table_term *term, double multiplier,
                                    int64_t T, int64_t hidden, const int32_t *ids, bl_tensor dy,
                                    const model_term_space *space,
                                    const bl_unit_gradients *gradients);

/* u = D x A^T, D the mask of `dropout` (p 0: none); *out: the term for the loss head, which adds to
 * dB; NULL: not to. */
bl_status model_term_head(bl_stream *stream, const bl_table_term *term,
                          const bl_lora_dropout *dropout, int64_t T, int64_t hidden, bl_tensor x,
                          const model_term_space *space, float *dB, bl_loss_head_term *out);
/* After the loss head: dA += du^T D x, dx += D du A. */
bl_status model_term_head_backward(bl_stream *stream, const bl_table_term *term,
                                   const bl_lora_dropout *dropout, int64_t T, int64_t hidden,
                                   bl_tensor x, const model_term_space *space, float *dA,
                                   bl_tensor dx);

#endif
