/* SPDX-License-Identifier: Apache-2.0 */
/* lora_linear.c -- forward and backward of a linear layer with LoRA terms, product by product.
 *
 * Workspace: u (T,r) | du (T,r) | with dropout: D x (T,K) | the scratch of the products, where the
 * device needs one. u is made again in backward instead of kept: its r K T multiplications are
 * N / r times fewer than the layer's own.
 *
 * On a GPU what touches x or dx takes as long as their bytes do, whatever r is. So there A's that
 * are contiguous are taken as one, (r_1 + r_2 + ..., K), for these products, with u and du in
 * columns side by side: the parts are a stack. Else each is its own.
 *
 * The LoRA terms go first and the frozen product is added to them: where y is bf16, the small term
 * is the one that is rounded twice. A residual goes before both (CUDA): y is then rounded twice at
 * the size of the sum, and a pass over y and one over the residual are saved. Rows of W without a
 * LoRA term start at zero. Where cuBLASLt has no FP8 product that adds to its result, the frozen
 * product goes first, and where it has none at all, it is in bf16 (`way`). Which of the three
 * depends on the shape alone: a refusal that shows only when the product is called has the call
 * start again in the next way. */
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

/* In fp32 nothing is padded. */
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
                                     .weight = linear->weight,
                                     .prepared = linear->prepared},
                          backward = forward;
    backward.forward = false;
    size_t y = bl_matmul_weight_scratch_bytes(kind, &forward),
           dx = bl_matmul_weight_scratch_bytes(kind, &backward);
    return y > dx ? y : dx;
}

size_t bl_lora_linear_workspace_bytes(bl_device_kind kind, bl_dtype act,
                                      const bl_lora_linear *linear, int64_t T)
{
    return lay_out(act, linear, T).scratch + product_scratch_bytes(kind, linear, T);
}

/* act: the dtype of the activations of the call. */
static workspace divide_workspace(bl_device_kind kind, bl_dtype act, const bl_lora_linear *linear,
                                  int64_t T)
{
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

/* dst = D src; K channels per token. */
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
static bl_matmul_weight_args frozen_args(const bl_lora_linear *linear, const workspace *ws,
                                         bool forward, int64_t T, float beta, bl_tensor in,
                                         bl_tensor out)
{
    return (bl_matmul_weight_args){.forward = forward,
                                   .mode = linear->mode,
                                   .sums = linear->sums,
                                   .beta = beta,
                                   .T = T,
                                   .in = in,
                                   .out = out,
                                   .weight = linear->weight,
                                   .scratch = ws->scratch,
                                   .scratch_bytes = ws->scratch_bytes,
                                   .prepared = linear->prepared,
                                   .is_quantized = forward && linear->is_quantized};
}

bl_quantized bl_lora_linear_operand(bl_device_kind kind, bl_dtype act, const bl_lora_linear *linear,
                                    int64_t T)
{
    workspace ws = divide_workspace(kind, act, linear, T);
    bl_tensor none = {0};
    bl_matmul_weight_args args = frozen_args(linear, &ws, true, T, 0, none, none);
    return T > 0 ? bl_matmul_weight_operand(kind, &args) : (bl_quantized){0};
}

/* The ways to add the LoRA terms and the frozen product, best first. */
typedef enum order {
    ADD_FROZEN,     /* terms; then the frozen product, in the requested mode, is added */
    ADD_TERMS,      /* the other way round */
    ADD_FROZEN_BF16 /* as the first, in bf16 where FP8 is not supported */
} order;

/* A pass over one layer. frozen: as the first way has it. */
typedef struct pass {
    const bl_lora_linear *linear;
    const workspace *ws;
    int64_t T;
    bl_tensor x, input; /* of the frozen product; of the terms: with dropout D x */
    bl_tensor y, dy, dx;
    bool begins_with_residual; /* forward, where the frozen product is last */
    bl_matmul_weight_args frozen;
} pass;

static bl_status run_frozen(bl_stream *stream, const pass *p, order way, bl_tensor out,
                            bool *is_refused)
{
    bl_matmul_weight_args args = p->frozen;
    args.out = out;
    if (way == ADD_TERMS) args.beta = 0;
    if (way != ADD_FROZEN_BF16) args.is_refused = is_refused;
    return bl_matmul_weight(stream, &args);
}

/* In the first way that is supported. */
static bl_status run_ways(bl_stream *stream, const pass *p,
                          bl_status (*run)(bl_stream *stream, const pass *p, order way,
                                           bool *is_refused))
{
    bool has_choice = p->linear->mode == BL_MATMUL_FP8 && p->frozen.beta != 0;

    for (order way = ADD_FROZEN; has_choice && way < ADD_FROZEN_BF16; way++) {
        bl_matmul_weight_args args = p->frozen;
        bool is_refused;
        if (way == ADD_TERMS) args.beta = 0;
        BL_TRY(bl_matmul_weight_is_refused(stream, &args, &is_refused));
        if (is_refused) continue;
        BL_TRY(run(stream, p, way, &is_refused));
        if (!is_refused) return BL_OK;
    }
    return run(stream, p, ADD_FROZEN_BF16, NULL);
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

/* y's columns of the stack's part `index` (T,rows) = s u B^T + beta times those of z: y or
 * another matrix of its shape */
static bl_status project_up(bl_stream *stream, const bl_lora_linear *linear, const stack *s,
                            int index, const workspace *ws, int64_t T, float beta, bl_tensor z,
                            bl_tensor y)
{
    const bl_lora_part *part = &s->part[index];
    bl_matmul_args product = small_product(ws);

    product.transpose_b = true;
    product.M = T, product.N = part->rows, product.K = part->r;
    product.lda = s->r, product.ldb = part->r, product.ldc = linear->weight.rows;
    product.alpha = part->scale, product.beta = beta;
    product.a = columns_of(s, index, ws->u), product.b = part->B;
    product.c = bl_tensor_at(y, part->row_begin);
    if (beta != 0 && z.data != y.data) product.addend = bl_tensor_at(z, part->row_begin);
    return bl_matmul(stream, &product);
}

/* Whether each row of W has exactly one update: nothing of y is left to clear. */
static bool parts_cover_rows(const bl_lora_linear *linear)
{
    int64_t rows = 0;
    for (int p = 0; p < linear->n_parts; p++) rows += linear->part[p].rows;
    return rows == linear->weight.rows;
}

/* y = the LoRA terms + beta z; z: y or another matrix of its shape */
static bl_status add_terms(bl_stream *stream, const pass *p, float beta, bl_tensor z)
{
    const bl_lora_linear *linear = p->linear;

    if (beta == 0 && linear->n_parts > 0 && !parts_cover_rows(linear))
        BL_TRY(
            bl_stream_zero(stream, p->y.data, bl_tensor_bytes(p->y, p->T * linear->weight.rows)));
    for (int i = 0; i < linear->n_parts;) {
        stack s = stack_at(linear, p->ws, i);
        BL_TRY(project_down(stream, linear, &s, p->ws, p->T, p->input));
        for (int k = 0; k < s.n_parts; k++)
            BL_TRY(project_up(stream, linear, &s, k, p->ws, p->T, beta, z, p->y));
        i += s.n_parts;
    }
    return BL_OK;
}

/* y += the residual */
static bl_status add_residual(bl_stream *stream, const pass *p)
{
    bl_tensor z = p->linear->residual;
    if (!bl_tensor_is_there(z)) return BL_OK;
    return bl_add(stream,
                  &(bl_add_args){.n = p->T * p->linear->weight.rows, .a = z, .b = p->y, .y = p->y});
}

/* Where the residual is not the first product's addend, it is added last. */
static bl_status run_forward(bl_stream *stream, const pass *p, order way, bool *is_refused)
{
    const bl_lora_linear *linear = p->linear;

    if (way == ADD_TERMS) {
        BL_TRY(run_frozen(stream, p, way, p->y, is_refused));
        if (*is_refused) return BL_OK;
        BL_TRY(add_terms(stream, p, 1, p->y));
        return add_residual(stream, p);
    }
    if (linear->n_parts > 0)
        BL_TRY(add_terms(stream, p, p->begins_with_residual ? 1 : 0, linear->residual));
    BL_TRY(run_frozen(stream, p, way, p->y, is_refused));
    if (p->begins_with_residual || (is_refused && *is_refused)) return BL_OK;
    return add_residual(stream, p);
}

bl_status bl_lora_linear_forward(bl_stream *stream, const bl_lora_linear *linear, int64_t T,
                                 bl_tensor x, bl_tensor y)
{
    bl_device_kind kind = bl_device_get_kind(bl_stream_device(stream));
    workspace ws = divide_workspace(kind, x.dtype, linear, T);
    bool has_terms = linear->n_parts > 0;
    pass p = {.linear = linear, .ws = &ws, .T = T, .x = x, .input = x, .y = y};

    if (T == 0) return BL_OK;
    p.begins_with_residual = bl_tensor_is_there(linear->residual) && kind == BL_DEVICE_CUDA &&
                             (!has_terms || parts_cover_rows(linear));
    if (linear->n_parts > 0 && linear->dropout.p > 0) {
        BL_TRY(apply_dropout(stream, linear, T, x, ws.masked));
        p.input = ws.masked;
    }
    p.frozen =
        frozen_args(linear, &ws, true, T, has_terms || p.begins_with_residual ? 1.0f : 0.0f, x, y);
    if (!has_terms && p.begins_with_residual) p.frozen.addend = linear->residual;
    return run_ways(stream, &p, run_forward);
}

static bl_status zero_gradients(bl_stream *stream, const bl_lora_part *part, int64_t K)
{
    if (part->accumulate) return BL_OK;
    BL_TRY(bl_stream_zero(stream, part->dA, (size_t)(part->r * K) * sizeof(float)));
    return bl_stream_zero(stream, part->dB, (size_t)(part->rows * part->r) * sizeof(float));
}

/* Of the stack's part `index`: dB (rows,r) = s dy^T u or +=, and its columns of du (T,r) = s dy
 * B. */
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
    product.beta = part->accumulate ? 1.0f : 0.0f;
    BL_TRY(bl_matmul(stream, &product));

    product.transpose_a = false;
    product.beta = 0;
    product.M = T, product.N = r, product.K = part->rows;
    product.ldb = r, product.ldc = s->r;
    product.b = part->B, product.c = columns_of(s, index, ws->du);
    return bl_matmul(stream, &product);
}

/* dA (r,K) = du^T input or +=, and unless out is none: out (T,K) = du A + beta out. */
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
    product.beta = s->part->accumulate ? 1.0f : 0.0f;
    BL_TRY(bl_matmul(stream, &product));
    if (!bl_tensor_is_there(out)) return BL_OK;

    product.transpose_a = false;
    product.M = T, product.N = K, product.K = r;
    product.beta = beta;
    product.b = s->part->A, product.c = out;
    return bl_matmul(stream, &product);
}

/* dA, dB, and unless dx is none: dx = the LoRA terms, without a mask, or += */
static bl_status pull_terms(bl_stream *stream, const pass *p, float beta)
{
    const bl_lora_linear *linear = p->linear;

    for (int i = 0; i < linear->n_parts;) {
        stack s = stack_at(linear, p->ws, i);
        BL_TRY(project_down(stream, linear, &s, p->ws, p->T, p->input));
        for (int k = 0; k < s.n_parts; k++)
            BL_TRY(pull_up(stream, linear, &s, k, p->ws, p->T, p->dy));
        BL_TRY(pull_down(stream, linear, &s, p->ws, p->T, p->input, i == 0 ? beta : 1.0f, p->dx));
        i += s.n_parts;
    }
    return BL_OK;
}

/* The mask is the LoRA terms' alone. When they are not the first to be in dx, the frozen product
 * takes the place of D x, which is not needed any more. */
static bl_status run_backward(bl_stream *stream, const pass *p, order way, bool *is_refused)
{
    const bl_lora_linear *linear = p->linear;
    bool dropout = linear->n_parts > 0 && linear->dropout.p > 0;
    int64_t n = p->T * linear->weight.cols;

    if (way == ADD_TERMS && !dropout) {
        BL_TRY(run_frozen(stream, p, way, p->dx, is_refused));
        return *is_refused ? BL_OK : pull_terms(stream, p, 1);
    }
    if (dropout) BL_TRY(apply_dropout(stream, linear, p->T, p->x, p->ws->masked));
    BL_TRY(pull_terms(stream, p, 0));
    if (!bl_tensor_is_there(p->dx)) return BL_OK;
    if (dropout) BL_TRY(apply_dropout(stream, linear, p->T, p->dx, p->dx));
    if (way != ADD_TERMS) return run_frozen(stream, p, way, p->dx, is_refused);
    BL_TRY(run_frozen(stream, p, way, p->ws->masked, is_refused));
    return *is_refused
               ? BL_OK
               : bl_add(stream, &(bl_add_args){.n = n, .a = p->dx, .b = p->ws->masked, .y = p->dx});
}

bl_status bl_lora_linear_backward(bl_stream *stream, const bl_lora_linear *linear, int64_t T,
                                  bl_tensor x, bl_tensor dy, bl_tensor dx)
{
    workspace ws =
        divide_workspace(bl_device_get_kind(bl_stream_device(stream)), dy.dtype, linear, T);
    pass p = {.linear = linear, .ws = &ws, .T = T, .x = x, .input = x, .dy = dy, .dx = dx};

    if (T == 0) {
        for (int i = 0; i < linear->n_parts; i++)
            BL_TRY(zero_gradients(stream, &linear->part[i], linear->weight.cols));
        return BL_OK;
    }
    if (linear->n_parts > 0 && linear->dropout.p > 0) p.input = ws.masked;
    p.frozen = frozen_args(linear, &ws, false, T, linear->n_parts > 0 ? 1.0f : 0.0f, dy, dx);
    if (!bl_tensor_is_there(dx)) return run_backward(stream, &p, ADD_FROZEN_BF16, NULL);
    return run_ways(stream, &p, run_backward);
}
