/* SPDX-License-Identifier: Apache-2.0 */
/* loss_head.cu -- the head and its loss on CUDA.
 *
 * Tokens are taken in chunks: logits = x W^T in fp32, softmax and its gradient in place, dx =
 * dlogits W. The host does not know which tokens count (the weights are in device memory), so none
 * are packed; those of weight 0 get zeros. A head that is not bf16 is dequantized a piece of rows
 * at a time; products of pieces add up in fp32. */
#include <float.h>

#include "base/sizes.h"
#include "fp8/cuda/fp8_cuda.h"
#include "fp8/cuda/vector.cuh"
#include "ops/element_internal.h"
#include "ops/cuda/loss_head_plan.h"
#include "ops/cuda/ops_cuda.h"

enum { SOFTMAX_THREADS = 512, SUM_THREADS = 256 };

/* ---- softmax ---- */

typedef struct softmax_task {
    int64_t V, ld; /* logits: ld floats per row; dlogits: bf16, 2 ld per row, in the same memory */
    bool with_gradient;
    double scale;
    const int32_t *targets;
    const float *weights;
    float *logits;
    double *logp_wide;
    float *logp;
} softmax_task;

/* The sum of exp(x - largest) over the logits a thread has seen. It starts from -FLT_MAX, not
 * -infinity: a difference of infinities is NaN, and logits of -infinity are legal. */
typedef struct running_sum {
    float largest, sum;
} running_sum;

__device__ static inline void see_group(running_sum *so_far, const float x[BL_GROUP],
                                        int64_t n_valid)
{
    float largest = so_far->largest;
#pragma unroll
    for (int i = 0; i < BL_GROUP; i++)
        if (i < n_valid) largest = fmaxf(largest, x[i]);
    float sum = so_far->sum * bl_exp(so_far->largest - largest);
#pragma unroll
    for (int i = 0; i < BL_GROUP; i++)
        if (i < n_valid) sum += bl_exp(x[i] - largest);
    so_far->largest = largest;
    so_far->sum = sum;
}

/* All threads' sums become the row's, in every thread. */
__device__ static inline void merge_sums(running_sum mine, float *largest, double *sum)
{
    __shared__ float largest_of[SOFTMAX_THREADS / BL_WARP];
    __shared__ double partial[SOFTMAX_THREADS / BL_WARP], of_row;
    int lane = (int)threadIdx.x % BL_WARP, warp = (int)threadIdx.x / BL_WARP;
    float most = bl_warp_max(mine.largest);
    if (lane == 0) largest_of[warp] = most;
    __syncthreads();
    most = bl_warp_max(lane < SOFTMAX_THREADS / BL_WARP ? largest_of[lane] : -FLT_MAX);
    double total = bl_block_sum((double)(mine.sum * bl_exp(mine.largest - most)), partial);
    if (threadIdx.x == 0) of_row = total;
    __syncthreads();
    *largest = most;
    *sum = of_row;
}

/* Row by row of groups, from the front: bf16 element v replaces half of fp32 element v/2, which the
 * block has read when it writes, for it reads a whole stretch, waits, and writes that stretch. */
__device__ static inline void write_gradient(const softmax_task &task, float *row, int64_t target,
                                             float largest, double sum, double factor)
{
    bl_bf16 *out = (bl_bf16 *)row;
    float multiplier = (float)(factor / sum),
          at_target = (float)(factor * (exp((double)row[target] - largest) / sum - 1.0));
    __syncthreads(); /* row[target] is read by all */
    for (int64_t begin = 0; begin < task.V; begin += SOFTMAX_THREADS * BL_GROUP) {
        int64_t v = begin + (int64_t)threadIdx.x * BL_GROUP;
        float x[BL_GROUP];
        bl_load(row + v, task.V - v, true, x);
#pragma unroll
        for (int i = 0; i < BL_GROUP; i++) {
            x[i] = bl_exp(x[i] - largest) * multiplier;
            if (v + i == target) x[i] = at_target;
        }
        __syncthreads();
        bl_store(out + v, task.V - v, true, x);
    }
}

__device__ static inline void write_constant(const softmax_task &task, float *row, float value)
{
    bl_bf16 *out = (bl_bf16 *)row;
    const float values[BL_GROUP] = {value, value, value, value, value, value, value, value};
    for (int64_t v = (int64_t)threadIdx.x * BL_GROUP; v < task.V; v += SOFTMAX_THREADS * BL_GROUP)
        bl_store(out + v, task.V - v, true, values);
}

/* A block processes a token's row. */
__global__ void __launch_bounds__(SOFTMAX_THREADS, 2) softmax_kernel(softmax_task task)
{
    int64_t t = blockIdx.x;
    float *row = task.logits + t * task.ld, weight = task.weights[t];
    int64_t target = weight != 0.0f ? task.targets[t] : 0;
    bool is_bad = target < 0 || target >= task.V;
    if (weight == 0.0f || is_bad) {
        float value = is_bad ? nanf("") : 0.0f;
        if (task.with_gradient) write_constant(task, row, value);
        if (threadIdx.x == 0) {
            task.logp_wide[t] = (double)value;
            if (task.logp) task.logp[t] = value;
        }
        return;
    }
    running_sum mine = {-FLT_MAX, 0.0f};
    for (int64_t v = (int64_t)threadIdx.x * BL_GROUP; v < task.V; v += SOFTMAX_THREADS * BL_GROUP) {
        float x[BL_GROUP];
        bl_load(row + v, task.V - v, true, x);
        see_group(&mine, x, task.V - v);
    }
    float largest;
    double sum;
    merge_sums(mine, &largest, &sum);
    if (threadIdx.x == 0) {
        double logp = (double)row[target] - (double)largest - log(sum);
        task.logp_wide[t] = logp;
        if (task.logp) task.logp[t] = (float)logp;
    }
    __syncthreads();
    if (task.with_gradient)
        write_gradient(task, row, target, largest, sum, task.scale * (double)weight);
}

/* One block; the products side by side, the sum in order. */
__global__ void __launch_bounds__(SUM_THREADS)
    loss_sum_kernel(int64_t n_tokens, const float *weights, const double *logp, double *loss_sum)
{
    __shared__ double products[OPS_LOSS_HEAD_TOKENS];
    for (int64_t t = threadIdx.x; t < n_tokens; t += SUM_THREADS)
        products[t] = weights[t] != 0.0f ? (double)weights[t] * logp[t] : 0.0;
    __syncthreads();
    if (threadIdx.x != 0) return;
    double sum = *loss_sum;
    for (int64_t t = 0; t < n_tokens; t++) sum -= products[t];
    *loss_sum = sum;
}

/* ---- products with the head ---- */

typedef struct head_chunk {
    bl_stream *stream;
    const bl_loss_head_args *args;
    ops_loss_head_layout at;
    int64_t first, n_tokens;
} head_chunk;

/* logits, or the sum of dx, of a piece of the head: rows [row, row + n_rows), as bf16 at
 * `matrix`. */
static bl_status multiply_piece(const head_chunk *c, bool forward, int64_t row, int64_t n_rows,
                                const void *matrix)
{
    const bl_loss_head_args *a = c->args;
    char *scratch = (char *)a->logits;
    bl_matmul_args product = {};
    product.alpha = 1.0f;
    product.M = c->n_tokens;
    product.b = bl_tensor_of(matrix, BL_BF16);
    product.ldb = a->H;
    product.scratch = scratch + c->at.gemm;
    product.scratch_bytes = BL_MATMUL_SCRATCH_BYTES;
    if (forward) {
        product.transpose_b = true;
        product.N = n_rows;
        product.K = product.lda = a->H;
        product.a = bl_tensor_at(a->x, c->first * a->H);
        product.c = bl_tensor_f32((float *)scratch + row);
        product.ldc = c->at.ld;
    } else {
        product.N = product.ldc = a->H;
        product.K = n_rows;
        product.a = bl_tensor_of((const bl_bf16 *)scratch + row, BL_BF16);
        product.lda = 2 * c->at.ld;
        product.c = bl_tensor_f32((float *)(scratch + c->at.dx));
        product.beta = row > 0 ? 1.0f : 0.0f;
    }
    return ops_cuda_matmul(c->stream, &product);
}

static bl_status multiply_segment(const head_chunk *c, bool forward, const bl_weight_segment *s,
                                  int64_t first_row)
{
    int64_t H = c->args->H;
    if (s->format == BL_FORMAT_BF16)
        return multiply_piece(c, forward, first_row, s->rows, s->codes);
    int64_t row_bytes = bl_format_row_bytes(s->format, H);
    void *decoded = (char *)c->args->logits + c->at.decoded;
    for (int64_t row = 0; row < s->rows;
         row += OPS_LOSS_HEAD_ROWS) { /* a multiple of any group's rows */
        int64_t n_rows = bl_min_i64(OPS_LOSS_HEAD_ROWS, s->rows - row);
        BL_TRY(
            fp8_cuda_dequantize(c->stream, s->format, (const char *)s->codes + row * row_bytes,
                                (const float *)s->scales + bl_format_scale_index(s->format, row, H),
                                n_rows, H, decoded));
        BL_TRY(multiply_piece(c, forward, first_row + row, n_rows, decoded));
    }
    return BL_OK;
}

static bl_status multiply_head(const head_chunk *c, bool forward)
{
    const bl_weight *head = &c->args->head;
    int64_t row = 0;
    for (int i = 0; i < head->n_segments; i++) {
        if (head->segment[i].rows > 0) BL_TRY(multiply_segment(c, forward, &head->segment[i], row));
        row += head->segment[i].rows;
    }
    return BL_OK;
}

/* d_head += dlogits^T x of the chunk, before dx, which may be x, is written */
static bl_status add_head_gradient(const head_chunk *c)
{
    const bl_loss_head_args *a = c->args;
    char *scratch = (char *)a->logits;
    bl_matmul_args product = {};
    product.transpose_a = true;
    product.alpha = product.beta = 1.0f;
    product.M = a->V;
    product.N = product.ldb = product.ldc = a->H;
    product.K = c->n_tokens;
    product.a = bl_tensor_of((const bl_bf16 *)scratch, BL_BF16);
    product.lda = 2 * c->at.ld;
    product.b = bl_tensor_at(a->x, c->first * a->H);
    product.c = bl_tensor_f32(a->d_head);
    product.scratch = scratch + c->at.gemm;
    product.scratch_bytes = BL_MATMUL_SCRATCH_BYTES;
    return ops_cuda_matmul(c->stream, &product);
}

/* ---- a chunk ---- */

static bl_status run_chunk(const head_chunk *c)
{
    const bl_loss_head_args *a = c->args;
    char *scratch = (char *)a->logits;
    softmax_task task;
    task.V = a->V;
    task.ld = c->at.ld;
    task.with_gradient = bl_tensor_is_there(a->dx);
    task.scale = a->scale;
    task.targets = a->targets + c->first;
    task.weights = a->weights + c->first;
    task.logits = (float *)scratch;
    task.logp_wide = (double *)(scratch + c->at.logp);
    task.logp = a->logp ? a->logp + c->first : NULL;

    BL_TRY(multiply_head(c, true));
    BL_TRY(bl_launch("loss_head: softmax", c->stream, {c->n_tokens, SOFTMAX_THREADS, 1},
                     softmax_kernel, task));
    if (a->loss_sum)
        BL_TRY(bl_launch("loss_head: loss_sum", c->stream, {1, SUM_THREADS, 1}, loss_sum_kernel,
                         c->n_tokens, task.weights, task.logp_wide, a->loss_sum));
    if (!bl_tensor_is_there(a->dx)) return BL_OK;
    if (a->d_head) BL_TRY(add_head_gradient(c));
    BL_TRY(multiply_head(c, false));
    bl_cast_args narrow = {};
    narrow.n = c->n_tokens * a->H;
    narrow.x = bl_tensor_f32((float *)(scratch + c->at.dx));
    narrow.y = bl_tensor_at(a->dx, c->first * a->H);
    return ops_cuda_cast(c->stream, &narrow);
}

extern "C" bl_status ops_cuda_loss_head(bl_stream *stream, const bl_loss_head_args *a)
{
    if (a->T < 0 || a->H < 1 || a->V < 1)
        return BL_FAIL(BL_EINTERNAL, "loss_head: %lld tokens, %lld channels, vocabulary of %lld",
                       (long long)a->T, (long long)a->H, (long long)a->V);
    head_chunk c = {stream, a, ops_loss_head_plan(a->T, a->H, a->V), 0, 0};
    for (c.first = 0; c.first < a->T; c.first += c.at.chunk) {
        c.n_tokens = bl_min_i64(c.at.chunk, a->T - c.first);
        BL_TRY(run_chunk(&c));
    }
    return BL_OK;
}
