/* SPDX-License-Identifier: Apache-2.0 */
/* loss_head.c -- the head and its loss on the CPU.
 *
 * Tokens that count are packed, so that no product is spent on a masked prompt, and taken in chunks
 * whose logits fit the scratch: logits = x W^T, softmax and its gradient in place, dx = dlogits W.
 * Packed inputs are in dx itself (their product is finished before the gradient is written over
 * them) and are spread out to their tokens at the end; without dx they follow the logits. A LoRA
 * term's u and du of a chunk are at the end of the scratch. */
#include "ops/loss_head.h"

#include <math.h>

#include "ops/gemm.h"
#include "ops/cpu/ops_cpu.h"

enum {
    CHUNK_TOKENS_MAX = 1024, /* more gains no speed */
    CHUNK_TOKENS_MIN = 16,   /* of the largest vocabularies: 2 M floats at V = 128,256 */
    SCRATCH_FLOATS_MIN = 1 << 20,
    SCRATCH_FLOATS_MAX = 1 << 24 /* 64 MiB; 512 tokens at V = 32,000 */
};

typedef struct chunk {
    const bl_loss_head_args *args;
    int64_t n_tokens;
    bl_tensor u, du;                 /* [n_tokens][r], packed; none without a term */
    int64_t token[CHUNK_TOKENS_MAX]; /* packed row -> token of the micro-batch */
    double logp[CHUNK_TOKENS_MAX];
} chunk;

static int64_t scratch_floats(int64_t V)
{
    int64_t enough =
        bl_max_i64(SCRATCH_FLOATS_MIN,
                   bl_min_i64(V, SCRATCH_FLOATS_MAX / CHUNK_TOKENS_MAX) * CHUNK_TOKENS_MAX);
    return bl_max_i64(enough, V * CHUNK_TOKENS_MIN);
}

size_t ops_cpu_loss_head_scratch_bytes(int64_t T, int64_t H, int64_t V)
{
    (void)T, (void)H;
    return (size_t)scratch_floats(V) * sizeof(float);
}

/* One row of logits becomes its log-probability and, with dx, scale weight (softmax - onehot), in
 * bf16 in the first half of the row. */
static void softmax_item(void *arg, int64_t index, void *scratch)
{
    chunk *c = arg;
    const bl_loss_head_args *a = c->args;
    int64_t token = c->token[index], target = a->targets[token];
    float *row = (float *)a->logits + index * a->V, highest = ops_max(row, a->V),
          logit = row[target];
    double sum = ops_exp_sum(row, a->V, highest);
    (void)scratch;
    c->logp[index] = (double)logit - (double)highest - log(sum);
    if (!bl_tensor_is_there(a->dx)) return;
    double factor = a->scale * (double)a->weights[token], hit = (double)row[target] / sum;
    if (a->dx.dtype == BL_BF16) {
        ops_scale_round(a->V, (float)(factor / sum), row, (uint16_t *)row);
        ((uint16_t *)row)[target] = bl_f32_to_bf16((float)(factor * (hit - 1.0)));
    } else {
        ops_scale(a->V, (float)(factor / sum), row);
        row[target] = (float)(factor * (hit - 1.0));
    }
}

/* Packs the tokens that count from *next_token on, at most n_max of them, into the rows of
 * `packed`. */
static bl_status gather_chunk(chunk *c, int64_t *next_token, int64_t n_max, bl_tensor packed)
{
    const bl_loss_head_args *a = c->args;
    size_t row_bytes = bl_tensor_bytes(a->x, a->H);
    int64_t t = *next_token;
    for (c->n_tokens = 0; t < a->T && c->n_tokens < n_max; t++) {
        if (a->weights[t] == 0.0f) continue;
        if (a->targets[t] < 0 || a->targets[t] >= a->V)
            return BL_FAIL(BL_EINPUT,
                           "loss head: target %d of token %lld is outside the vocabulary of %lld",
                           a->targets[t], (long long)t, (long long)a->V);
        memmove(bl_tensor_at(packed, c->n_tokens * a->H).data, bl_tensor_at(a->x, t * a->H).data,
                row_bytes);
        if (a->term)
            memcpy(bl_tensor_at(c->u, c->n_tokens * a->term->r).data,
                   bl_tensor_at(a->term->u, t * a->term->r).data,
                   bl_tensor_bytes(c->u, a->term->r));
        c->token[c->n_tokens++] = t;
    }
    *next_token = t;
    return BL_OK;
}

/* logits = packed W^T, in fp32 */
static bl_status make_logits(bl_pool *pool, const chunk *c, bl_tensor packed)
{
    const bl_loss_head_args *a = c->args;

    if (packed.dtype == BL_F32)
        return bl_cpu_gemm_weight_nt(pool, c->n_tokens, packed.data, a->H, &a->head, 0.0f,
                                     a->logits, a->V);
    return bl_cpu_gemm_bf16_weight_nt(pool, c->n_tokens, packed.data, a->H, &a->head, 0.0f, BL_F32,
                                      a->logits, a->V);
}

/* ---- the LoRA term ---- */

/* logits += s u B^T */
static bl_status add_term(bl_pool *pool, const chunk *c)
{
    const bl_loss_head_args *a = c->args;
    const bl_loss_head_term *term = a->term;

    if (c->u.dtype == BL_F32)
        return bl_cpu_gemm_f32(pool, false, true, c->n_tokens, a->V, term->r, term->scale,
                               c->u.data, term->r, term->B.data, term->r, 1.0f, a->logits, a->V);
    return bl_cpu_gemm_bf16(pool, false, true, c->n_tokens, a->V, term->r, term->scale, c->u.data,
                            term->r, term->B.data, term->r, 1.0f, BL_F32, a->logits, a->V);
}

/* dB += s dlogits^T u; du = s dlogits B, written to the rows of its tokens */
static bl_status pull_back_term(bl_pool *pool, const chunk *c)
{
    const bl_loss_head_args *a = c->args;
    const bl_loss_head_term *term = a->term;
    int64_t r = term->r, n = c->n_tokens;

    if (c->u.dtype == BL_F32) {
        BL_TRY(bl_cpu_gemm_f32(pool, true, false, a->V, r, n, term->scale, a->logits, a->V,
                               c->u.data, r, 1.0f, term->dB, r));
        BL_TRY(bl_cpu_gemm_f32(pool, false, false, n, r, a->V, term->scale, a->logits, a->V,
                               term->B.data, r, 0.0f, c->du.data, r));
    } else {
        BL_TRY(bl_cpu_gemm_bf16(pool, true, false, a->V, r, n, term->scale, a->logits, 2 * a->V,
                                c->u.data, r, 1.0f, BL_F32, term->dB, r));
        BL_TRY(bl_cpu_gemm_bf16(pool, false, false, n, r, a->V, term->scale, a->logits, 2 * a->V,
                                term->B.data, r, 0.0f, BL_BF16, c->du.data, r));
    }
    for (int64_t i = 0; i < n; i++)
        memcpy(bl_tensor_at(term->du, c->token[i] * r).data, bl_tensor_at(c->du, i * r).data,
               bl_tensor_bytes(c->du, r));
    return BL_OK;
}

/* packed = dlogits W; dlogits are in the dtype of packed, a row in the place of a row of logits */
static bl_status pull_back(bl_pool *pool, const chunk *c, bl_tensor packed)
{
    const bl_loss_head_args *a = c->args;

    if (packed.dtype == BL_F32)
        return bl_cpu_gemm_weight_nn(pool, c->n_tokens, a->logits, a->V, &a->head, 0.0f,
                                     packed.data, a->H);
    return bl_cpu_gemm_bf16_weight_nn(pool, c->n_tokens, a->logits, 2 * a->V, &a->head, 0.0f,
                                      BL_BF16, packed.data, a->H);
}

/* d_head += dlogits^T packed, before packed is overwritten */
static bl_status add_head_gradient(bl_pool *pool, const chunk *c, bl_tensor packed)
{
    const bl_loss_head_args *a = c->args;

    if (packed.dtype == BL_BF16)
        return bl_cpu_gemm_bf16(pool, true, false, a->V, a->H, c->n_tokens, 1.0f, a->logits,
                                2 * a->V, packed.data, a->H, 1.0f, BL_F32, a->d_head, a->H);
    return bl_cpu_gemm_f32(pool, true, false, a->V, a->H, c->n_tokens, 1.0f, a->logits, a->V,
                           packed.data, a->H, 1.0f, a->d_head, a->H);
}

static bl_status run_chunk(bl_pool *pool, chunk *c, bl_tensor packed)
{
    const bl_loss_head_args *a = c->args;
    BL_TRY(make_logits(pool, c, packed));
    if (a->term) BL_TRY(add_term(pool, c));
    bl_pool_run(pool, c->n_tokens, softmax_item, c);
    for (int64_t i = 0; i < c->n_tokens; i++) {
        int64_t t = c->token[i];
        if (a->loss_sum) *a->loss_sum -= (double)a->weights[t] * c->logp[i];
        if (a->logp) a->logp[t] = (float)c->logp[i];
    }
    if (!bl_tensor_is_there(a->dx)) return BL_OK;
    if (a->d_head) BL_TRY(add_head_gradient(pool, c, packed));
    if (a->term) BL_TRY(pull_back_term(pool, c));
    return pull_back(pool, c, packed);
}

/* Row k of the n_packed first rows of dx goes to the k-th token that counts; the other tokens get
 * 0. A packed row is never behind its token, so from the back none is overwritten before it has
 * moved. */
static void spread_rows(const bl_loss_head_args *a, int64_t n_packed)
{
    size_t row_bytes = bl_tensor_bytes(a->dx, a->H);
    for (int64_t t = a->T - 1; t >= 0; t--) {
        if (a->weights[t] == 0.0f)
            memset(bl_tensor_at(a->dx, t * a->H).data, 0, row_bytes);
        else if (--n_packed != t)
            memcpy(bl_tensor_at(a->dx, t * a->H).data, bl_tensor_at(a->dx, n_packed * a->H).data,
                   row_bytes);
    }
}

/* Tokens of a chunk: chunks of about the same size, at most n_max. */
static int64_t size_of_chunks(const bl_loss_head_args *a, int64_t n_max)
{
    int64_t n_tokens = 0;
    for (int64_t t = 0; t < a->T; t++) n_tokens += a->weights[t] != 0.0f;
    return bl_max_i64(1, bl_ceil_div(n_tokens, bl_max_i64(1, bl_ceil_div(n_tokens, n_max))));
}

bl_status ops_cpu_loss_head(bl_stream *stream, const bl_loss_head_args *a)
{
    chunk c = {.args = a};
    bool has_dx = bl_tensor_is_there(a->dx);
    int64_t r = a->term ? a->term->r : 0, n_packed = 0,
            floats_per_token = a->V + (has_dx ? 0 : a->H) + 2 * r;
    int64_t n_max = bl_min_i64(CHUNK_TOKENS_MAX, scratch_floats(a->V) / floats_per_token);
    if (n_max < 1)
        return BL_FAIL(BL_EINTERNAL, "loss head: %lld channels for a vocabulary of %lld",
                       (long long)a->H, (long long)a->V);
    /* After the logits and, in a forward pass, the inputs. */
    c.u = bl_tensor_of((float *)a->logits + n_max * (floats_per_token - 2 * r), a->x.dtype);
    c.du = bl_tensor_at(c.u, n_max * r);
    if (r > 0 && has_dx) memset(a->term->du.data, 0, bl_tensor_bytes(a->term->du, a->T * r));
    if (a->logp) memset(a->logp, 0, (size_t)a->T * sizeof *a->logp);
    int64_t n_chunk = size_of_chunks(a, n_max);
    for (int64_t next_token = 0; next_token < a->T;) {
        bl_tensor packed = has_dx ? bl_tensor_at(a->dx, n_packed * a->H)
                                  : bl_tensor_of((float *)a->logits + n_max * a->V, a->x.dtype);
        BL_TRY(gather_chunk(&c, &next_token, n_chunk, packed));
        if (c.n_tokens > 0) BL_TRY(run_chunk(ops_pool(stream), &c, packed));
        n_packed += c.n_tokens;
    }
    if (has_dx) spread_rows(a, n_packed);
    return BL_OK;
}
