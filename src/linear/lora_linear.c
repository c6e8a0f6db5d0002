/* SPDX-License-Identifier: Apache-2.0 */
/* Workspace: u (T,r) | du (T,r) | with dropout: D x (T,K) | the scratch of the products, where the device
 * needs one. u is made again in backward instead of kept: its r K T multiplications are N / r times fewer
 * than the layer's own.
 *
 * On a GPU what touches x or dx takes as long as their bytes do, whatever r is. So there A's that lie one behind the other are taken as
 * one, (r_1 + r_2 + ..., K), for these products, with u and du in columns side by side: the parts are a stack. Else each is its own.
 *
 * The updates go first and the frozen product is added to them: where y is bf16, the small term is the one that is rounded twice. Rows of
 * W without an update start at zero. */
#include "linear/lora_linear.h"

#include "base/sizes.h"
#include "ops/elementwise.h"
#include "ops/matmul.h"

enum { ALIGNMENT_BYTES = 256 };

typedef struct workspace {
    bl_tensor u, du, masked;
    void *scratch;
    size_t scratch_bytes; /* 0 where the device needs none */
} workspace;

typedef struct workspace_layout {
    size_t du, masked, scratch; /* offsets in bytes; u is at 0 */
} workspace_layout;

/* On the CPU nothing is padded. */
static workspace_layout lay_out(bl_dtype act, const bl_lora_linear *linear, int64_t T)
{
    bool is_f32 = act == BL_F32, is_stacked = linear->is_stacked && !is_f32;
    int64_t alignment = is_f32 ? 1 : ALIGNMENT_BYTES, unit_bytes = (int64_t)bl_dtype_bytes(act),
            r = 0;
    bool dropout = linear->n_parts > 0 && linear->dropout.p > 0;
    workspace_layout at;

    for (int p = 0; p < linear->n_parts; p++)
        r = is_stacked ? r + linear->part[p].r : bl_max_i64(r, linear->part[p].r);
    size_t u_bytes = (size_t)bl_round_up(T * r * unit_bytes, alignment);
    at.du = u_bytes;
    at.masked = 2 * u_bytes;
    at.scratch =
        at.masked +
        (dropout ? (size_t)bl_round_up(T * linear->weight.cols * unit_bytes, alignment) : 0);
    return at;
}

/* Of the frozen product in both directions; 0 where a device needs none. */
static size_t product_scratch_bytes(bl_device_kind kind, const bl_lora_linear *linear, int64_t T)
{
    bl_matmul_weight_args forward = {.forward = true,
                                     .mode = linear->mode,
                                     .T = T,
                                     .weight = linear->weight},
                          backward = forward;
    backward.forward = false;
    size_t y = bl_matmul_weight_scratch_bytes(kind, &forward),
           dx = bl_matmul_weight_scratch_bytes(kind, &backward);
    return y > dx ? y : dx;
}

size_t bl_lora_linear_workspace_bytes(bl_device_kind kind, const bl_lora_linear *linear, int64_t T)
{
    return lay_out(bl_act_dtype(kind), linear, T).scratch + product_scratch_bytes(kind, linear, T);
}

static workspace divide_workspace(bl_stream *stream, const bl_lora_linear *linear, int64_t T)
{
    bl_device_kind kind = bl_device_get_kind(bl_stream_device(stream));
    bl_dtype act = bl_act_dtype(kind);
    workspace_layout at = lay_out(act, linear, T);
    char *memory = linear->workspace;
    bool has_scratch = product_scratch_bytes(kind, linear, T) > 0;

    if (!memory) return (workspace){.scratch_bytes = 0}; /* a CPU's plain base needs none */
    return (workspace){.u = bl_tensor_of(memory, act),
                       .du = bl_tensor_of(memory + at.du, act),
                       .masked = bl_tensor_of(memory + at.masked, act),
                       .scratch = has_scratch ? memory + at.scratch : NULL,
                       .scratch_bytes = has_scratch && linear->workspace_bytes > at.scratch
                                            ? linear->workspace_bytes - at.scratch
                                            : 0};
}

/* dst = D src; K channels a token. */
static bl_status apply_dropout(bl_stream *stream, const bl_lora_linear *linear, int64_t T,
                               bl_tensor src, bl_tensor dst)
{
    const bl_lora_dropout *d = &linear->dropout;
    return bl_dropout(stream, &(bl_dropout_args){.T = T,
                                                 .C = linear->weight.cols,
                                                 .p = d->p,
                                                 .seed = d->seed,
                                                 .step = d->step,
                                                 .layer = d->layer,
                                                 .matrix = d->matrix,
                                                 .sample = d->sample,
                                                 .position = d->position,
                                                 .x = src,
                                                 .y = dst});
}

/* out = in W^T (forward) or in W, + beta out */
static bl_status frozen_product(bl_stream *stream, const bl_lora_linear *linear,
                                const workspace *ws, bool forward, int64_t T, float beta,
                                bl_tensor in, bl_tensor out)
{
    return bl_matmul_weight(stream, &(bl_matmul_weight_args){.forward = forward,
                                                             .mode = linear->mode,
                                                             .beta = beta,
                                                             .T = T,
                                                             .in = in,
                                                             .out = out,
                                                             .weight = linear->weight,
                                                             .scratch = ws->scratch,
                                                             .scratch_bytes = ws->scratch_bytes});
}

/* A product of activations and LoRA weights. */
static bl_matmul_args small_product(const workspace *ws)
{
    size_t bytes =
        ws->scratch_bytes < BL_MATMUL_SCRATCH_BYTES ? ws->scratch_bytes : BL_MATMUL_SCRATCH_BYTES;
    return (bl_matmul_args){.alpha = 1.0f, .scratch = ws->scratch, .scratch_bytes = bytes};
}

typedef struct stack {
    const bl_lora_part *part; /* the first of */
    int n_parts;
    int64_t r; /* of all of them */
} stack;

/* The stack that begins with part p. */
static stack stack_at(const bl_lora_linear *linear, const workspace *ws, int p)
{
    stack s = {.part = &linear->part[p], .n_parts = 1, .r = linear->part[p].r};

    if (!linear->is_stacked || ws->u.dtype == BL_F32) return s;
    for (s.n_parts = 1; p + s.n_parts < linear->n_parts; s.n_parts++) s.r += s.part[s.n_parts].r;
    return s;
}

/* Where the columns of the stack's part `index` begin in u or du (T, r of the stack). */
static bl_tensor columns_of(const stack *s, int index, bl_tensor u)
{
    int64_t column = 0;
    for (int i = 0; i < index; i++) column += s->part[i].r;
    return bl_tensor_at(u, column);
}

/* u (T,r) = input A^T */
static bl_status project_down(bl_stream *stream, const bl_lora_linear *linear, const stack *s,
                              const workspace *ws, int64_t T, bl_tensor input)
{
    bl_matmul_args product = small_product(ws);
    int64_t K = linear->weight.cols;

    product.transpose_b = true;
    product.M = T, product.N = s->r, product.K = K;
    product.lda = K, product.ldb = K, product.ldc = s->r;
    product.a = input, product.b = s->part->A, product.c = ws->u;
    return bl_matmul(stream, &product);
}

/* y's columns of the stack's part `index` (T,rows) = s u B^T */
static bl_status project_up(bl_stream *stream, const bl_lora_linear *linear, const stack *s,
                            int index, const workspace *ws, int64_t T, bl_tensor y)
{
    const bl_lora_part *part = &s->part[index];
    bl_matmul_args product = small_product(ws);

    product.transpose_b = true;
    product.M = T, product.N = part->rows, product.K = part->r;
    product.lda = s->r, product.ldb = part->r, product.ldc = linear->weight.rows;
    product.alpha = part->scale;
    product.a = columns_of(s, index, ws->u), product.b = part->B;
    product.c = bl_tensor_at(y, part->row_begin);
    return bl_matmul(stream, &product);
}

/* Whether each row of W has exactly one update: nothing of y is left to clear. */
static bool parts_cover_rows(const bl_lora_linear *linear)
{
    int64_t rows = 0;
    for (int p = 0; p < linear->n_parts; p++) rows += linear->part[p].rows;
    return rows == linear->weight.rows;
}

bl_status bl_lora_linear_forward(bl_stream *stream, const bl_lora_linear *linear, int64_t T,
                                 bl_tensor x, bl_tensor y)
{
    workspace ws = divide_workspace(stream, linear, T);
    bl_tensor input = x;

    if (T == 0) return BL_OK;
    if (linear->n_parts > 0 && linear->dropout.p > 0) {
        BL_TRY(apply_dropout(stream, linear, T, x, ws.masked));
        input = ws.masked;
    }
    if (linear->n_parts > 0 && !parts_cover_rows(linear))
        BL_TRY(bl_stream_zero(stream, y.data, bl_tensor_bytes(y, T * linear->weight.rows)));
    for (int p = 0; p < linear->n_parts;) {
        stack s = stack_at(linear, &ws, p);
        BL_TRY(project_down(stream, linear, &s, &ws, T, input));
        for (int i = 0; i < s.n_parts; i++) BL_TRY(project_up(stream, linear, &s, i, &ws, T, y));
        p += s.n_parts;
    }
    return frozen_product(stream, linear, &ws, true, T, linear->n_parts > 0 ? 1.0f : 0.0f, x, y);
}

static bl_status zero_gradients(bl_stream *stream, const bl_lora_part *part, int64_t K)
{
    BL_TRY(bl_stream_zero(stream, part->dA, (size_t)(part->r * K) * sizeof(float)));
    return bl_stream_zero(stream, part->dB, (size_t)(part->rows * part->r) * sizeof(float));
}

/* Of the stack's part `index`: dB (rows,r) = s dy^T u, and its columns of du (T,r) = s dy B. */
static bl_status pull_up(bl_stream *stream, const bl_lora_linear *linear, const stack *s, int index,
                         const workspace *ws, int64_t T, bl_tensor dy)
{
    const bl_lora_part *part = &s->part[index];
    bl_matmul_args product = small_product(ws);
    int64_t r = part->r;

    product.a = bl_tensor_at(dy, part->row_begin);
    product.lda = linear->weight.rows;
    product.alpha = part->scale;

    product.transpose_a = true;
    product.M = part->rows, product.N = r, product.K = T;
    product.ldb = s->r, product.ldc = r;
    product.b = columns_of(s, index, ws->u), product.c = bl_tensor_f32(part->dB);
    BL_TRY(bl_matmul(stream, &product));

    product.transpose_a = false;
    product.M = T, product.N = r, product.K = part->rows;
    product.ldb = r, product.ldc = s->r;
    product.b = part->B, product.c = columns_of(s, index, ws->du);
    return bl_matmul(stream, &product);
}

/* dA (r,K) = du^T input, and unless out is none: out (T,K) = du A + beta out. */
static bl_status pull_down(bl_stream *stream, const bl_lora_linear *linear, const stack *s,
                           const workspace *ws, int64_t T, bl_tensor input, float beta,
                           bl_tensor out)
{
    bl_matmul_args product = small_product(ws);
    int64_t r = s->r, K = linear->weight.cols;

    product.a = ws->du;
    product.lda = r, product.ldb = K, product.ldc = K;

    product.transpose_a = true;
    product.M = r, product.N = K, product.K = T;
    product.b = input, product.c = bl_tensor_f32(s->part->dA);
    BL_TRY(bl_matmul(stream, &product));
    if (!bl_tensor_is_there(out)) return BL_OK;

    product.transpose_a = false;
    product.M = T, product.N = K, product.K = r;
    product.beta = beta;
    product.b = s->part->A, product.c = out;
    return bl_matmul(stream, &product);
}

bl_status bl_lora_linear_backward(bl_stream *stream, const bl_lora_linear *linear, int64_t T,
                                  bl_tensor x, bl_tensor dy, bl_tensor dx)
{
    bool dropout = linear->n_parts > 0 && linear->dropout.p > 0;
    workspace ws = divide_workspace(stream, linear, T);
    bl_tensor input = x;

    if (T == 0) {
        for (int p = 0; p < linear->n_parts; p++)
            BL_TRY(zero_gradients(stream, &linear->part[p], linear->weight.cols));
        return BL_OK;
    }
    if (dropout) {
        BL_TRY(apply_dropout(stream, linear, T, x, ws.masked));
        input = ws.masked;
    }
    for (int p = 0; p < linear->n_parts;) {
        stack s = stack_at(linear, &ws, p);
        BL_TRY(project_down(stream, linear, &s, &ws, T, input));
        for (int i = 0; i < s.n_parts; i++) BL_TRY(pull_up(stream, linear, &s, i, &ws, T, dy));
        BL_TRY(pull_down(stream, linear, &s, &ws, T, input, p == 0 ? 0.0f : 1.0f, dx));
        p += s.n_parts;
    }
    if (!bl_tensor_is_there(dx)) return BL_OK;
    if (dropout)
        BL_TRY(apply_dropout(stream, linear, T, dx,
                             dx)); /* the updates' input gradient alone is masked */
    return frozen_product(stream, linear, &ws, false, T, linear->n_parts > 0 ? 1.0f : 0.0f, dy, dx);
}
