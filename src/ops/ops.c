/* SPDX-License-Identifier: Apache-2.0 */
/* The public ops: each checks what every device checks and calls the table of its stream's device.
 * This is where ops tell the kinds of device apart; a new kind is a row of `tables`. */
#include "ops/ops_internal.h"

#include <limits.h>

#include "device/model.h"

static const ops_table *table_of(bl_device_kind kind)
{
    static const ops_table *const tables[] = {
        [BL_DEVICE_CPU] = &ops_cpu_table, [BL_DEVICE_CUDA] = &ops_cuda_table};
    return tables[kind];
}

static const ops_table *ops_of_device(const bl_device *device)
{
    bl_device_kind kind = bl_device_get_kind(device);

    if (!bl_device_model(device)) return table_of(kind);
    return kind == BL_DEVICE_CUDA ? &ops_model_cuda_table : &ops_model_cpu_table;
}

static const ops_table *ops_of(bl_stream *stream)
{
    return ops_of_device(bl_stream_device(stream));
}

/* All tensors that are there have one dtype, a bit of `acts`. */
static bl_status check_dtypes(const char *what, unsigned acts, const bl_tensor *tensors, size_t n)
{
    const bl_tensor *first = NULL;

    for (size_t i = 0; i < n; i++) {
        const bl_tensor *t = &tensors[i];
        if (!bl_tensor_is_there(*t)) continue;
        if (!(acts >> t->dtype & 1u))
            return BL_FAIL(BL_EINTERNAL, "%s: this device takes no tensor of dtype %s", what,
                           bl_dtype_name(t->dtype));
        if (first && t->dtype != first->dtype)
            return BL_FAIL(BL_EINTERNAL, "%s: a tensor is %s where another is %s", what,
                           bl_dtype_name(t->dtype), bl_dtype_name(first->dtype));
        if (!first) first = t;
    }
    return BL_OK;
}

#define CHECK_DTYPES(what, acts, ...)                                                              \
    check_dtypes(what, acts, (const bl_tensor[]){__VA_ARGS__},                                     \
                 sizeof((const bl_tensor[]){__VA_ARGS__}) / sizeof(bl_tensor))

/* Of an op that also takes fp32. */
static unsigned acts_or_f32(const ops_table *ops)
{
    return ops->acts | BL_DTYPE_BIT(BL_F32);
}

/* The quantization that an op does in addition to its result. */
static bl_status check_quantized(bl_stream *stream, const char *what, bl_quantized quantized)
{
    if (!quantized.codes || bl_device_get_kind(bl_stream_device(stream)) == BL_DEVICE_CUDA)
        return BL_OK;
    return BL_FAIL(BL_EINTERNAL, "%s: a CPU quantizes no activations", what);
}

/* ---- norm.h, rope.h ---- */

bl_status bl_rmsnorm_forward(bl_stream *stream, const bl_rmsnorm_forward_args *args)
{
    const ops_table *ops = ops_of(stream);
    BL_TRY(CHECK_DTYPES("rmsnorm_forward", ops->acts, args->x, args->y));
    BL_TRY(check_quantized(stream, "rmsnorm_forward", args->quantized));
    if (args->quantized.codes && args->n_heads > 0)
        return BL_FAIL(BL_EINTERNAL, "rmsnorm_forward: norms of heads are not quantized");
    return ops->rmsnorm_forward(stream, args);
}

bl_status bl_rmsnorm_backward(bl_stream *stream, const bl_rmsnorm_backward_args *args)
{
    const ops_table *ops = ops_of(stream);
    BL_TRY(CHECK_DTYPES("rmsnorm_backward", ops->acts, args->x, args->dy, args->dx));
    return ops->rmsnorm_backward(stream, args);
}

bl_status bl_layernorm_forward(bl_stream *stream, const bl_layernorm_forward_args *args)
{
    const ops_table *ops = ops_of(stream);
    BL_TRY(CHECK_DTYPES("layernorm_forward", ops->acts, args->x, args->y));
    return ops->layernorm_forward(stream, args);
}

bl_status bl_layernorm_backward(bl_stream *stream, const bl_layernorm_backward_args *args)
{
    const ops_table *ops = ops_of(stream);
    BL_TRY(CHECK_DTYPES("layernorm_backward", ops->acts, args->x, args->dy, args->dx));
    return ops->layernorm_backward(stream, args);
}

bl_status bl_rope(bl_stream *stream, const bl_rope_args *args)
{
    const ops_table *ops = ops_of(stream);
    BL_TRY(CHECK_DTYPES("rope", ops->acts, args->x));
    if (args->d % 2 != 0 || args->d_rotated % 2 != 0 || args->d_rotated < 0 ||
        args->d_rotated > args->d || (args->direction != 1 && args->direction != -1))
        return BL_FAIL(BL_EINTERNAL, "rope: %lld of head dimension %lld, direction %d",
                       (long long)args->d_rotated, (long long)args->d, args->direction);
    return ops->rope(stream, args);
}

/* ---- attention.h ---- */

static bl_status check_attention(int64_t n_heads, int64_t n_kv_heads, int64_t d, int64_t window,
                                 int64_t q_stride, int64_t kv_stride, int64_t o_stride)
{
    if (window < 0) return BL_FAIL(BL_EINTERNAL, "attention: window %lld", (long long)window);
    if (n_kv_heads < 1 || n_heads % n_kv_heads != 0 || d < 1 || d > 256)
        return BL_FAIL(BL_EINTERNAL,
                       "attention: %lld query heads on %lld key heads of dimension %lld",
                       (long long)n_heads, (long long)n_kv_heads, (long long)d);
    if (q_stride < d || q_stride > INT_MAX || kv_stride < d || kv_stride > INT_MAX ||
        o_stride < d || o_stride > INT_MAX)
        return BL_FAIL(BL_EINTERNAL, "attention: strides %lld, %lld, %lld", (long long)q_stride,
                       (long long)kv_stride, (long long)o_stride);
    return BL_OK;
}

bl_status bl_attention_forward(bl_stream *stream, const bl_attention_forward_args *args)
{
    const ops_table *ops = ops_of(stream);
    BL_TRY(CHECK_DTYPES("attention_forward", ops->acts, args->q, args->k, args->v, args->o));
    BL_TRY(check_attention(args->n_heads, args->n_kv_heads, args->d, args->window, args->q_stride,
                           args->kv_stride, args->o_stride));
    if (args->position_offset < 0 || (args->position_offset > 0 && args->n_documents != 1))
        return BL_FAIL(BL_EINTERNAL, "attention: position offset %lld with %lld documents",
                       (long long)args->position_offset, (long long)args->n_documents);
    return ops->attention_forward(stream, args);
}

bl_status bl_attention_backward(bl_stream *stream, const bl_attention_backward_args *args)
{
    const ops_table *ops = ops_of(stream);
    BL_TRY(CHECK_DTYPES("attention_backward", ops->acts, args->q, args->k, args->v, args->o,
                        args->do_, args->dq, args->dk, args->dv));
    BL_TRY(check_attention(args->n_heads, args->n_kv_heads, args->d, args->window, args->q_stride,
                           args->kv_stride, args->o_stride));
    return ops->attention_backward(stream, args);
}

/* ---- elementwise.h ---- */

bl_status bl_swiglu_forward(bl_stream *stream, const bl_swiglu_forward_args *args)
{
    const ops_table *ops = ops_of(stream);
    BL_TRY(CHECK_DTYPES("swiglu_forward", ops->acts, args->gate_up, args->h));
    BL_TRY(check_quantized(stream, "swiglu_forward", args->quantized));
    return ops->swiglu_forward(stream, args);
}

bl_status bl_swiglu_backward(bl_stream *stream, const bl_swiglu_backward_args *args)
{
    const ops_table *ops = ops_of(stream);
    BL_TRY(CHECK_DTYPES("swiglu_backward", ops->acts, args->gate_up, args->dh, args->d_gate_up));
    return ops->swiglu_backward(stream, args);
}

bl_status bl_gelu_forward(bl_stream *stream, const bl_gelu_forward_args *args)
{
    const ops_table *ops = ops_of(stream);
    BL_TRY(CHECK_DTYPES("gelu_forward", ops->acts, args->u, args->h));
    return ops->gelu_forward(stream, args);
}

bl_status bl_gelu_backward(bl_stream *stream, const bl_gelu_backward_args *args)
{
    const ops_table *ops = ops_of(stream);
    BL_TRY(CHECK_DTYPES("gelu_backward", ops->acts, args->u, args->dh, args->du));
    return ops->gelu_backward(stream, args);
}

bl_status bl_add(bl_stream *stream, const bl_add_args *args)
{
    const ops_table *ops = ops_of(stream);
    BL_TRY(CHECK_DTYPES("add", acts_or_f32(ops), args->a, args->b, args->y));
    return ops->add(stream, args);
}

bl_status bl_add_bias(bl_stream *stream, const bl_add_bias_args *args)
{
    const ops_table *ops = ops_of(stream);
    BL_TRY(CHECK_DTYPES("add_bias", ops->acts, args->y));
    return ops->add_bias(stream, args);
}

bl_status bl_scale(bl_stream *stream, const bl_scale_args *args)
{
    const ops_table *ops = ops_of(stream);
    BL_TRY(CHECK_DTYPES("scale", ops->acts, args->x, args->y));
    return ops->scale(stream, args);
}

bl_status bl_accumulate(bl_stream *stream, const bl_accumulate_args *args)
{
    bl_add_args sum = {.n = args->n,
                       .a = args->y,
                       .b = args->x,
                       .y = args->y,
                       .without_workers = args->without_workers};
    return bl_add(stream, &sum);
}

bl_status ops_check_cast(const bl_cast_args *args)
{
    const bl_tensor both[] = {args->x, args->y};
    for (int i = 0; i < 2; i++)
        if (both[i].dtype != BL_F32 && both[i].dtype != BL_BF16)
            return BL_FAIL(BL_EINTERNAL, "cast: a tensor is %s", bl_dtype_name(both[i].dtype));
    return BL_OK;
}

bl_status bl_cast(bl_stream *stream, const bl_cast_args *args)
{
    BL_TRY(ops_check_cast(args));
    return ops_of(stream)->cast(stream, args);
}

bl_status bl_dropout(bl_stream *stream, const bl_dropout_args *args)
{
    const ops_table *ops = ops_of(stream);
    BL_TRY(CHECK_DTYPES("dropout", acts_or_f32(ops), args->x, args->y));
    if (!(args->p >= 0.0f && args->p < 1.0f))
        return BL_FAIL(BL_EUSAGE, "dropout probability %g", (double)args->p);
    return ops->dropout(stream, args);
}

bl_status bl_embedding(bl_stream *stream, const bl_embedding_args *args)
{
    const ops_table *ops = ops_of(stream);
    BL_TRY(CHECK_DTYPES("embedding", ops->acts, args->y));
    bl_dtype dtype = args->table.dtype;
    if (dtype != BL_F32 && dtype != BL_F16 && dtype != BL_BF16)
        return BL_FAIL(BL_EINPUT, "embedding table of type %s; F32, F16 and BF16 can be used",
                       bl_dtype_name(dtype));
    return ops->embedding(stream, args);
}

/* ---- gradients of trained weights ---- */

bl_status bl_norm_gradients(bl_stream *stream, const bl_norm_gradients_args *args)
{
    const ops_table *ops = ops_of(stream);
    BL_TRY(CHECK_DTYPES("norm_gradients", ops->acts, args->x, args->dy));
    return ops->norm_gradients(stream, args);
}

bl_status bl_embedding_backward(bl_stream *stream, const bl_embedding_backward_args *args)
{
    const ops_table *ops = ops_of(stream);
    BL_TRY(CHECK_DTYPES("embedding_backward", ops->acts, args->dy));
    return ops->embedding_backward(stream, args);
}

/* ---- loss_head.h ---- */

bl_status bl_loss_head(bl_stream *stream, const bl_loss_head_args *args)
{
    const ops_table *ops = ops_of(stream);
    BL_TRY(CHECK_DTYPES("loss_head", ops->acts, args->x, args->dx));
    if (args->head.rows != args->V || args->head.cols != args->H)
        return BL_FAIL(BL_EINTERNAL,
                       "loss head: a head of %lld x %lld for vocabulary %lld and %lld channels",
                       (long long)args->head.rows, (long long)args->head.cols, (long long)args->V,
                       (long long)args->H);
    if (args->term) {
        BL_TRY(CHECK_DTYPES("loss_head", ops->acts, args->x, args->term->u, args->term->B));
        if (bl_device_get_kind(bl_stream_device(stream)) != BL_DEVICE_CPU)
            return BL_FAIL(BL_EINTERNAL, "loss head: a LoRA term on a GPU");
    }
    if (args->d_head && !bl_tensor_is_there(args->dx))
        return BL_FAIL(BL_EINTERNAL, "loss head: the head's gradient needs dx");
    return ops->loss_head(stream, args);
}

size_t bl_loss_head_scratch_bytes(bl_device_kind kind, int64_t T, int64_t H, int64_t V)
{
    return table_of(kind)->loss_head_scratch_bytes(T, H, V);
}

/* ---- optimizer.h ---- */

bl_status ops_check_adamw(const bl_adamw_args *args)
{
    if (args->step < 1)
        return BL_FAIL(BL_EINTERNAL, "adamw: steps count from 1, not %lld", (long long)args->step);
    if (args->m.dtype != args->v.dtype || (args->m.dtype != BL_F32 && args->m.dtype != BL_BF16))
        return BL_FAIL(BL_EINTERNAL, "adamw: moments of dtype %s and %s",
                       bl_dtype_name(args->m.dtype), bl_dtype_name(args->v.dtype));
    return BL_OK;
}

bl_status bl_adamw(bl_stream *stream, const bl_adamw_args *args)
{
    BL_TRY(ops_check_adamw(args));
    return ops_of(stream)->adamw(stream, args);
}

bl_status bl_sum_squares(bl_stream *stream, const bl_sum_squares_args *args)
{
    return ops_of(stream)->sum_squares(stream, args);
}

bl_status bl_add_sums(bl_stream *stream, const bl_add_sums_args *args)
{
    return ops_of(stream)->add_sums(stream, args);
}

bl_status bl_clip_scale(bl_stream *stream, const bl_clip_scale_args *args)
{
    return ops_of(stream)->clip_scale(stream, args);
}

/* ---- matmul.h ---- */

bl_status bl_matmul(bl_stream *stream, const bl_matmul_args *args)
{
    const ops_table *ops = ops_of(stream);
    BL_TRY(CHECK_DTYPES("matmul", ops->acts, args->a, args->b));
    BL_TRY(CHECK_DTYPES("matmul", acts_or_f32(ops), args->c, args->addend));
    if (args->a.dtype == BL_F32) BL_TRY(CHECK_DTYPES("matmul", ops->acts, args->a, args->c));
    return ops->matmul(stream, args);
}

bl_status bl_matmul_weight(bl_stream *stream, const bl_matmul_weight_args *args)
{
    const ops_table *ops = ops_of(stream);
    BL_TRY(CHECK_DTYPES("matmul_weight", ops->acts, args->in, args->out, args->addend));
    return ops->matmul_weight(stream, args);
}

size_t bl_matmul_weight_scratch_bytes(bl_device_kind kind, const bl_matmul_weight_args *args)
{
    return table_of(kind)->matmul_weight_scratch_bytes(args);
}

bl_quantized bl_matmul_weight_operand(bl_device_kind kind, const bl_matmul_weight_args *args)
{
    const ops_table *ops = table_of(kind);
    return ops->matmul_weight_operand ? ops->matmul_weight_operand(args) : (bl_quantized){0};
}

size_t bl_matmul_prepared_bytes(bl_device_kind kind, const bl_matmul_weight_args *args)
{
    return table_of(kind)->matmul_prepared_bytes(args);
}

bl_status bl_matmul_weight_is_refused(bl_stream *stream, const bl_matmul_weight_args *args,
                                      bool *out)
{
    return ops_of(stream)->matmul_weight_is_refused(stream, args, out);
}

bl_status bl_matmul_end_warm_up(bl_device *device)
{
    return ops_of_device(device)->matmul_end_warm_up(device);
}

bl_status bl_matmul_spare_multiprocessors(bl_device *device, int n)
{
    return ops_of_device(device)->matmul_spare_multiprocessors(device, n);
}

bl_status bl_matmul_count_fallbacks(bl_device *device, int64_t counts[BL_FALLBACK_COUNT])
{
    return ops_of_device(device)->matmul_count_fallbacks(device, counts);
}

bool bl_matmul_has_fp8(int capability)
{
    enum { HOPPER = 90 };
    return capability == HOPPER;
}

const char *bl_matmul_fallback_text(bl_matmul_fallback reason)
{
    static const char *const texts[BL_FALLBACK_COUNT] = {
        [BL_FALLBACK_FORMAT] = "it is not stored in one FP8 format",
        [BL_FALLBACK_SHAPE] = "FP8 products need multiples of 16, and whole blocks",
        [BL_FALLBACK_CAPABILITY] = "FP8 products need a GPU of capability 9.0",
        [BL_FALLBACK_REFUSED] = "cuBLASLt has no such FP8 product",
    };
    return texts[reason];
}
