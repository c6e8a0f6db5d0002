/* SPDX-License-Identifier: Apache-2.0 */
/* matmul_plan.c -- the decision between bf16, dequantized and FP8 products, and the layout of their
 * scratch. */
#include "ops/cuda/matmul_plan.h"

#include "base/sizes.h"
#include "ops/cuda/ops_cuda.h"

enum { ALIGNMENT_BYTES = 256, FP8_MULTIPLE = 16, BLOCK_TOKENS_MULTIPLE = 4 };

static bool has_one_format(const bl_weight *w)
{
    for (int s = 1; s < w->n_segments; s++)
        if (w->segment[s].format != w->segment[0].format) return false;
    return w->n_segments > 0;
}

/* Without codes, where only sizes are asked for, as a base lays out segments of one format and of
 * whole groups: without gaps. */
static bool segments_follow_each_other(const bl_weight *w)
{
    const char *end = w->segment[0].codes;
    bool has_codes = end != NULL;
    for (int s = 0; s < w->n_segments; s++) {
        if (has_codes && w->segment[s].codes != end) return false;
        end += w->segment[s].rows * bl_format_row_bytes(w->segment[s].format, w->cols);
    }
    return has_one_format(w);
}

bool ops_matmul_plan_has_fast_sums(const bl_matmul_weight_args *a, ops_gemm_kind kind)
{
    return kind == OPS_GEMM_FP8_ROW &&
           (a->sums == BL_SUMS_FAST || (a->sums == BL_SUMS_FAST_FORWARD && a->forward));
}

bool ops_matmul_plan_is_dense(const bl_weight *weight)
{
    return segments_follow_each_other(weight) && weight->segment[0].format == BL_FORMAT_BF16;
}

/* The product that applies a format's scales to FP8 codes; OPS_GEMM_BF16: there is none. */
static ops_gemm_kind kind_of(bl_format format)
{
    const bl_format_descriptor *f = bl_format_describe(format);

    if (f->dtype != BL_F8_E4M3) return OPS_GEMM_BF16;
    if (f->group_rows == 1 && f->group_cols == 0) return OPS_GEMM_FP8_ROW;
    return f->group_rows == BL_FP8_BLOCK && f->group_cols == BL_FP8_BLOCK ? OPS_GEMM_FP8_BLOCK
                                                                          : OPS_GEMM_BF16;
}

/* For an FP8 product of a weight whose segments follow each other. */
static bool shape_suits(ops_gemm_kind kind, const bl_weight *w, int64_t T)
{
    if (w->rows % FP8_MULTIPLE != 0 || w->cols % FP8_MULTIPLE != 0) return false;
    if (kind == OPS_GEMM_FP8_ROW) return true;
    for (int s = 0; s + 1 < w->n_segments; s++)
        if (w->segment[s].rows % BL_FP8_BLOCK != 0) return false;
    return T % BLOCK_TOKENS_MULTIPLE == 0;
}

ops_gemm_kind ops_matmul_plan_kind(const bl_matmul_weight_args *args, bl_matmul_fallback *reason)
{
    const bl_weight *w = &args->weight;
    bl_matmul_fallback unused;

    if (!reason) reason = &unused;
    if (args->mode != BL_MATMUL_FP8) return OPS_GEMM_BF16;
    ops_gemm_kind kind = has_one_format(w) ? kind_of(w->segment[0].format) : OPS_GEMM_BF16;
    if (kind == OPS_GEMM_BF16) {
        *reason = BL_FALLBACK_FORMAT;
        return OPS_GEMM_BF16;
    }
    /* First: segments that do not have whole groups do not follow each other either. */
    if (!shape_suits(kind, w, args->T)) {
        *reason = BL_FALLBACK_SHAPE;
        return OPS_GEMM_BF16;
    }
    if (!segments_follow_each_other(w)) {
        *reason = BL_FALLBACK_FORMAT;
        return OPS_GEMM_BF16;
    }
    return kind;
}

bl_matmul_mode bl_matmul_weight_mode(const bl_matmul_weight_args *args, bl_matmul_fallback *reason)
{
    return ops_matmul_plan_kind(args, reason) == OPS_GEMM_BF16 ? BL_MATMUL_BF16 : BL_MATMUL_FP8;
}

/* Tokens (or another count) that a product takes of n at most, where each has `elements`. */
static int64_t most_of(int64_t elements)
{
    int64_t most = INT32_MAX / bl_max_i64(1, elements);
    return bl_max_i64(1, most >= BL_FP8_BLOCK ? most / BL_FP8_BLOCK * BL_FP8_BLOCK : most);
}

int64_t ops_matmul_plan_piece(int64_t n, int64_t elements)
{
    return n <= INT32_MAX / bl_max_i64(1, elements) ? n : most_of(elements);
}

int64_t ops_matmul_plan_tokens(const bl_matmul_weight_args *args)
{
    return ops_matmul_plan_piece(args->T, bl_max_i64(args->weight.rows, args->weight.cols));
}

/* Returns where `bytes` begin and moves *end behind them. */
static size_t take(size_t *end, int64_t bytes)
{
    size_t at = *end;
    *end += (size_t)bl_round_up(bytes, ALIGNMENT_BYTES);
    return at;
}

static const int64_t scale_bytes = sizeof(float);

ops_prepared_layout ops_matmul_plan_prepared(const bl_weight *w, ops_gemm_kind kind)
{
    int64_t N = w->rows, K = w->cols;
    bool is_row = kind == OPS_GEMM_FP8_ROW, is_fp8 = kind != OPS_GEMM_BF16;
    ops_prepared_layout at = {.bytes = 0};

    at.dense = take(&at.bytes, is_fp8 || ops_matmul_plan_is_dense(w) ? 0 : N * K * 2);
    if (!is_fp8) return at;
    at.scales = take(&at.bytes,
                     (is_row ? N : ops_matmul_blocks(N) * ops_matmul_grid_stride(K)) * scale_bytes);
    at.turned = take(&at.bytes, N * K);
    at.turned_scales = take(
        &at.bytes, (is_row ? K : ops_matmul_blocks(K) * ops_matmul_grid_stride(N)) * scale_bytes);
    return at;
}

ops_matmul_layout ops_matmul_plan_layout(const bl_matmul_weight_args *args, ops_gemm_kind kind)
{
    const bl_weight *w = &args->weight;
    int64_t T = args->T, inner = args->forward ? w->cols : w->rows;
    bool is_row = kind == OPS_GEMM_FP8_ROW, is_fp8 = kind != OPS_GEMM_BF16;
    size_t made_bytes = ops_matmul_plan_prepared(w, kind).bytes;
    ops_matmul_layout at = {.bytes = 0};

    at.workspace = take(&at.bytes, BL_MATMUL_SCRATCH_BYTES);
    at.has_own = !args->prepared || args->prepared->memory_bytes < made_bytes;
    at.own = take(&at.bytes, at.has_own ? (int64_t)made_bytes : 0);
    at.codes = take(&at.bytes, is_fp8 ? T * inner : 0);
    at.scales =
        take(&at.bytes, is_fp8 ? T * (is_row ? 1 : ops_matmul_blocks(inner)) * scale_bytes : 0);
    return at;
}

bl_quantized ops_cuda_matmul_weight_operand(const bl_matmul_weight_args *args)
{
    if (ops_matmul_plan_kind(args, NULL) != OPS_GEMM_FP8_ROW || !args->scratch ||
        args->scratch_bytes < ops_cuda_matmul_weight_scratch_bytes(args) ||
        ops_matmul_plan_tokens(args) < args->T)
        return (bl_quantized){0};
    ops_matmul_layout at = ops_matmul_plan_layout(args, OPS_GEMM_FP8_ROW);
    char *scratch = args->scratch;
    return (bl_quantized){(uint8_t *)scratch + at.codes, (float *)(void *)(scratch + at.scales)};
}

/* Also of the way that is taken when cuBLASLt refuses, and of fewer tokens, whose number may suit
 * blocks. */
size_t ops_cuda_matmul_weight_scratch_bytes(const bl_matmul_weight_args *args)
{
    bl_matmul_weight_args piece = *args;
    int64_t most = INT32_MAX / bl_max_i64(1, bl_max_i64(args->weight.rows, args->weight.cols));

    piece.T = bl_round_up(bl_min_i64(args->T, bl_max_i64(1, most)), BLOCK_TOKENS_MULTIPLE);
    size_t bf16 = ops_matmul_plan_layout(&piece, OPS_GEMM_BF16).bytes,
           wanted = ops_matmul_plan_layout(&piece, ops_matmul_plan_kind(&piece, NULL)).bytes;
    return bf16 > wanted ? bf16 : wanted;
}

size_t ops_cuda_matmul_prepared_bytes(const bl_matmul_weight_args *args)
{
    bl_matmul_weight_args suited = *args;
    suited.T = 0; /* of any number of tokens that suits blocks */
    return ops_matmul_plan_prepared(&args->weight, ops_matmul_plan_kind(&suited, NULL)).bytes;
}
