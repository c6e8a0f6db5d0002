/* SPDX-License-Identifier: Apache-2.0 */
/* The public ops: each checks what every device checks and calls the table of its stream's device.
 * This is where ops tell the kinds of device apart; a new kind is a row of `tables`. */
#include "ops/ops_internal.h"

#include <limits.h>

#include "base/sizes.h"
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

/* The dtypes of column `dtypes` of list.h. */
static unsigned dtypes_of_acts(const ops_table *ops)
{
    return ops->acts;
}

static unsigned dtypes_of_acts_or_f32(const ops_table *ops)
{
    return ops->acts | BL_DTYPE_BIT(BL_F32);
}

/* All tensors that are there have one dtype, a bit of `dtypes`. */
static bl_status check_dtypes(const char *what, unsigned dtypes, const bl_tensor *tensors, size_t n)
{
    const bl_tensor *first = NULL;

    for (size_t i = 0; i < n; i++) {
        const bl_tensor *t = &tensors[i];
        if (!bl_tensor_is_there(*t)) continue;
        if (!(dtypes >> t->dtype & 1u))
            return BL_FAIL(BL_EINTERNAL, "%s: this device takes no tensor of dtype %s", what,
                           bl_dtype_name(t->dtype));
        if (first && t->dtype != first->dtype)
            return BL_FAIL(BL_EINTERNAL, "%s: a tensor is %s where another is %s", what,
                           bl_dtype_name(t->dtype), bl_dtype_name(first->dtype));
        if (!first) first = t;
    }
    return BL_OK;
}

#define CHECK_DTYPES(what, dtypes, ...)                                                            \
    check_dtypes(what, dtypes, (const bl_tensor[]){{0}, __VA_ARGS__},                              \
                 sizeof((const bl_tensor[]){{0}, __VA_ARGS__}) / sizeof(bl_tensor))

/* The quantization that an op does in addition to its result. */
static bl_status check_quantized(bl_stream *stream, const char *what, bl_quantized quantized)
{
    if (!quantized.codes || bl_device_get_kind(bl_stream_device(stream)) == BL_DEVICE_CUDA)
        return BL_OK;
    return BL_FAIL(BL_EINTERNAL, "%s: a CPU quantizes no activations", what);
}

/* ---- column `check` of list.h ---- */

#define check_nothing(stream, args) BL_OK
#define check_cast(stream, args)    ops_check_cast(args)
#define check_adamw(stream, args)   ops_check_adamw(args)

static bl_status check_rmsnorm(bl_stream *stream, const bl_rmsnorm_forward_args *args)
{
    BL_TRY(check_quantized(stream, "rmsnorm_forward", args->quantized));
    if (args->quantized.codes && args->n_heads > 0)
        return BL_FAIL(BL_EINTERNAL, "rmsnorm_forward: norms of heads are not quantized");
    return BL_OK;
}

static bl_status check_rope(bl_stream *stream, const bl_rope_args *args)
{
    (void)stream;
    if (args->d % 2 != 0 || args->d_rotated % 2 != 0 || args->d_rotated < 0 ||
        args->d_rotated > args->d || (args->direction != 1 && args->direction != -1))
        return BL_FAIL(BL_EINTERNAL, "rope: %lld of head dimension %lld, direction %d",
                       (long long)args->d_rotated, (long long)args->d, args->direction);
    return BL_OK;
}

static bl_status check_heads(int64_t n_heads, int64_t n_kv_heads, int64_t d, int64_t window,
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

static bl_status check_attention(bl_stream *stream, const bl_attention_forward_args *args)
{
    BL_TRY(check_heads(args->n_heads, args->n_kv_heads, args->d, args->window, args->q_stride,
                       args->kv_stride, args->o_stride));
    if (args->position_offset < 0 || (args->position_offset > 0 && args->n_documents != 1))
        return BL_FAIL(BL_EINTERNAL, "attention: position offset %lld with %lld documents",
                       (long long)args->position_offset, (long long)args->n_documents);
    if (args->sinks && bl_device_get_kind(bl_stream_device(stream)) != BL_DEVICE_CPU)
        return BL_FAIL(BL_ELIMIT, "attention_forward: there is no CUDA kernel with sinks");
    return BL_OK;
}

static bl_status check_attention_backward(bl_stream *stream, const bl_attention_backward_args *args)
{
    (void)stream;
    return check_heads(args->n_heads, args->n_kv_heads, args->d, args->window, args->q_stride,
                       args->kv_stride, args->o_stride);
}

static bl_status check_swiglu(bl_stream *stream, const bl_swiglu_forward_args *args)
{
    return check_quantized(stream, "swiglu_forward", args->quantized);
}

bl_status ops_check_cast(const bl_cast_args *args)
{
    const bl_tensor both[] = {args->x, args->y};
    for (int i = 0; i < 2; i++)
        if (both[i].dtype != BL_F32 && both[i].dtype != BL_BF16)
            return BL_FAIL(BL_EINTERNAL, "cast: a tensor is %s", bl_dtype_name(both[i].dtype));
    return BL_OK;
}

static bl_status check_dropout(bl_stream *stream, const bl_dropout_args *args)
{
    (void)stream;
    if (args->p >= 0.0f && args->p < 1.0f) return BL_OK;
    return BL_FAIL(BL_EUSAGE, "dropout probability %g", (double)args->p);
}

static bl_status check_embedding(bl_stream *stream, const bl_embedding_args *args)
{
    bl_dtype dtype = args->table.dtype;
    (void)stream;
    if (dtype == BL_F32 || dtype == BL_F16 || dtype == BL_BF16) return BL_OK;
    return BL_FAIL(BL_EINPUT, "embedding table of type %s; F32, F16 and BF16 can be used",
                   bl_dtype_name(dtype));
}

static bl_status check_loss_head(bl_stream *stream, const bl_loss_head_args *args)
{
    if (args->head.rows != args->V || args->head.cols != args->H)
        return BL_FAIL(BL_EINTERNAL,
                       "loss head: a head of %lld x %lld for vocabulary %lld and %lld channels",
                       (long long)args->head.rows, (long long)args->head.cols, (long long)args->V,
                       (long long)args->H);
    if (args->term) {
        BL_TRY(
            CHECK_DTYPES("loss_head", ops_of(stream)->acts, args->x, args->term->u, args->term->B));
        if (bl_device_get_kind(bl_stream_device(stream)) != BL_DEVICE_CPU)
            return BL_FAIL(BL_EINTERNAL, "loss head: a LoRA term on a GPU");
    }
    if (args->d_head && !bl_tensor_is_there(args->dx))
        return BL_FAIL(BL_EINTERNAL, "loss head: the head's gradient needs dx");
    return BL_OK;
}

bl_status ops_check_adamw(const bl_adamw_args *args)
{
    if (args->step < 1)
        return BL_FAIL(BL_EINTERNAL, "adamw: steps count from 1, not %lld", (long long)args->step);
    if (args->m.dtype != args->v.dtype || (args->m.dtype != BL_F32 && args->m.dtype != BL_BF16))
        return BL_FAIL(BL_EINTERNAL, "adamw: moments of dtype %s and %s",
                       bl_dtype_name(args->m.dtype), bl_dtype_name(args->v.dtype));
    return BL_OK;
}

static bl_status check_matmul(bl_stream *stream, const bl_matmul_args *args)
{
    const ops_table *ops = ops_of(stream);
    BL_TRY(CHECK_DTYPES("matmul", dtypes_of_acts_or_f32(ops), args->c, args->addend));
    if (args->a.dtype == BL_F32) BL_TRY(CHECK_DTYPES("matmul", ops->acts, args->a, args->c));
    return BL_OK;
}

static bl_status check_route(bl_stream *stream, const bl_route_args *args)
{
    const bl_routing *r = &args->routing;
    (void)stream;
    enum { MOST_EXPERTS = 1 << 12 }; /* an item's scratch has two numbers for each */
    bool has_groups = args->n_groups > 1,
         fits = r->n_experts <= MOST_EXPERTS &&
                (!has_groups || (r->n_experts % args->n_groups == 0 && args->top_groups >= 1 &&
                                 r->top_k <= args->top_groups * (r->n_experts / args->n_groups)));
    if (fits && r->top_k >= 1 && r->top_k <= r->n_experts && r->T <= INT32_MAX / r->top_k)
        return BL_OK;
    return BL_FAIL(BL_EINTERNAL, "route: %lld tokens to %lld of %lld experts", (long long)r->T,
                   (long long)r->top_k, (long long)r->n_experts);
}

static bl_status check_grouped_matmul(bl_stream *stream, const bl_grouped_matmul_args *args)
{
    const bl_weight *w = &args->weight;
    int64_t n = args->routing.n_experts,
            group = bl_format_describe(w->segment[0].format)->group_rows;
    (void)stream;
    if (w->n_segments == 1 && w->rows % n == 0 && (n == 1 || w->rows / n % group == 0))
        return BL_OK;
    return BL_FAIL(BL_EINTERNAL, "grouped matmul: %lld rows in %d segments for %lld experts",
                   (long long)w->rows, w->n_segments, (long long)n);
}

/* ---- the ops ---- */

#define PUBLIC(op, check, dtypes, ...)                                                             \
    bl_status bl_##op(bl_stream *stream, const bl_##op##_args *args)                               \
    {                                                                                              \
        const ops_table *ops = ops_of(stream);                                                     \
        BL_TRY(CHECK_DTYPES(#op, dtypes_of_##dtypes(ops), __VA_ARGS__));                           \
        BL_TRY(check(stream, args));                                                               \
        return ops->op(stream, args);                                                              \
    }
BL_OPS_LIST(PUBLIC)

bl_status bl_accumulate(bl_stream *stream, const bl_accumulate_args *args)
{
    bl_add_args sum = {.n = args->n,
                       .a = args->y,
                       .b = args->x,
                       .y = args->y,
                       .without_workers = args->without_workers};
    return bl_add(stream, &sum);
}

/* ---- sizes, and the state of a device's products ---- */

/* The arrays of a routing at `memory`, or with NULL nowhere; returns their bytes. */
static size_t place_routing(bl_routing *r, char *memory)
{
    const int64_t pairs = r->T * r->top_k,
                  n[] = {pairs, pairs, pairs, r->n_experts + 1, pairs, pairs, r->T * r->n_experts};
    void **const arrays[] = {(void **)&r->expert, (void **)&r->row,    (void **)&r->token,
                             (void **)&r->first,  (void **)&r->weight, (void **)&r->d_weight,
                             (void **)&r->score};
    size_t used = 0;

    for (size_t i = 0; i < BL_COUNT(n); i++) {
        *arrays[i] = memory ? memory + used : NULL;
        used += (size_t)bl_round_up(n[i] * 4, BL_DEVICE_ALIGNMENT_BYTES);
    }
    return used;
}

size_t bl_routing_bytes(int64_t T, int64_t n_experts, int64_t top_k)
{
    bl_routing r = {.T = T, .n_experts = n_experts, .top_k = top_k};
    return place_routing(&r, NULL);
}

void bl_routing_place(bl_routing *routing, void *memory)
{
    (void)place_routing(routing, memory);
    routing->n_all = (int32_t)routing->n_experts;
    routing->first_expert = 0;
}

bl_routing bl_routing_of_group(const bl_routing *all, int64_t first, int64_t n)
{
    bl_routing group = *all;

    group.n_experts = n;
    group.first_expert = (int32_t)first;
    if (group.first) group.first += first;
    return group;
}

bl_row_range bl_routing_range(const bl_routing *group)
{
    if (!group->first) return (bl_row_range){0};
    return (bl_row_range){group->first, group->first + group->n_experts};
}

size_t bl_loss_head_scratch_bytes(bl_device_kind kind, int64_t T, int64_t H, int64_t V)
{
    return table_of(kind)->loss_head_scratch_bytes(T, H, V);
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
