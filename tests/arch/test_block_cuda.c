/* SPDX-License-Identifier: Apache-2.0 */
/* A decoder layer on CUDA against the same layer on the CPU, in every format, with and without
 * prepared weights, in memory of exactly the bytes that a plan counts, with guarded bytes behind.
 *
 * Tolerance. Both devices start from the same numbers: weights of the same codes, values that bf16
 * holds. Each value that is stored in bf16 on the way is off by at most u = 2^-8 of itself, e = u /
 * sqrt(3) = 0.23 % root mean square, and stages add as squares. Forward has 13 of them (two norms,
 * four products with up to three additions each, RoPE, attention, SwiGLU, two residual sums),
 * backward as many again on top of it: sqrt(26) e = 1.2 %. 2.5 % is asked for: small sums have
 * small samples. In FP8 each product's input is rounded to E4M3 moreover, 3.6 % at most
 * (test_linear_cuda.c): of the products on the way of a result, at most 12 (forward 4, backward 4,
 * recomputed 4), sqrt(12) 3.6 % = 12.5 %; asked for is that. A wrong scale, row or mask is a
 * multiple. Weights are small enough that scores of attention are about one: a sharp softmax would
 * multiply errors. */
#include "ops_test.h"

#include "arch/block.h"
#include "arch/list_internal.h"
#include "arch/llama.h"
#include "arch/rope.h"
#include "model/weights.h"
#include "ops/rope.h"

static const double BF16_ERROR = 0.025, FP8_ERROR = 0.125;

enum { T = 128, DOCUMENTS = 3, R = 4, GUARD_BYTES = 4096, GUARD = 0xa5 };

static const int32_t document_starts[DOCUMENTS + 1] = {0, 37, 38, T};

/* Sizes that FP8 products support, and those of a small model: products of 344 rows are in bf16. */
typedef struct dims_case {
    int64_t hidden, inter, n_heads, n_kv_heads, head_dim;
    bool is_fp8_possible;
    unsigned biases;     /* of bl_model_config */
    bool has_head_norms; /* of q and k */
    int64_t window;      /* 0: none */
    double residual;     /* multiplier; 0: none */
    bool is_falcon;
    bool is_one_format; /* fp8_row: the others differ in products alone */
} dims_case;

static const dims_case dims_cases[] = {
    {128, 256, 4, 4, 32, true, .biases = 0},
    {64, 172, 8, 4, 8, false, .biases = 0},
    {64, 172, 8, 4, 8, false, .biases = 15, .has_head_norms = true},
    {64, 172, 8, 4, 8, false, .window = 9, .residual = 0.7, .is_one_format = true},
    {64, 172, 8, 2, 8, false, .biases = 15, .is_falcon = true, .is_one_format = true}};

typedef struct host {
    bl_model_config config;
    bl_base_layout layout;
    uint8_t *shards;
    float *scales, *norms, *cos_table, *sin_table, *x, *d;
    size_t n_scales;
    float *factors[2 * BL_PROJECTIONS]; /* A and B of each */
} host;

static void check(bl_status st)
{
    if (st != BL_OK) fail_msg("%s: %s", bl_status_name(st), bl_error_text());
}

/* Of values that bf16 holds. */
static float *random_values(int64_t n, uint64_t seed, float factor)
{
    float *values = test_random_floats(n, seed);
    for (int64_t i = 0; i < n; i++) values[i] = bl_bf16_to_f32(bl_f32_to_bf16(factor * values[i]));
    return values;
}

static void encode(bl_pool *pool, const bl_weight_segment *s, int64_t cols, uint64_t seed,
                   uint8_t *codes, float *scales)
{
    float *values = random_values(s->rows * cols, seed, 0.1f);

    if (s->format == BL_FORMAT_FP8_ROW)
        check(bl_fp8_row_quantize(pool, BL_F32, values, 0, s->rows, cols, codes, scales));
    else if (s->format == BL_FORMAT_FP8_BLOCK)
        check(bl_fp8_block_quantize(pool, BL_F32, values, 0, s->rows, cols, codes, scales));
    for (int64_t i = 0; s->format == BL_FORMAT_BF16 && i < s->rows * cols; i++)
        ((uint16_t *)(void *)codes)[i] = bl_f32_to_bf16(values[i]);
    free(values);
}

/* Those that are not in the base's shards; a multiple of 4. */
static size_t count_whole_scales(const bl_weight_segment *s, int64_t cols)
{
    size_t bytes, n;
    assert_true(bl_format_sizes(s->format, s->rows, cols, &bytes, &n));
    return bl_format_describe(s->format)->home == BL_SCALES_WHOLE ? (n + 3) / 4 * 4 : 0;
}

/* Codes of all segments, and scales of blocks, where the layout has them; other scales one after
 * the other, from multiples of 4 on. */
static void fill_base(host *h, bl_pool *pool)
{
    bl_base *base;
    h->shards = test_alloc((int64_t)h->layout.shard_bytes, 1);
    h->scales = test_floats(8 * (2 * h->config.intermediate_size + 4 * h->config.hidden_size));
    check(bl_base_create_resident(&h->layout, h->shards, &base));
    for (int m = 0; m < h->layout.units[0].n_matrices; m++) {
        bl_weight w;
        check(bl_base_acquire(base, 0, m, NULL, &w));
        for (int s = 0; s < w.n_segments; s++) {
            const bl_weight_segment *segment = &w.segment[s];
            float *scales =
                segment->scales ? (float *)(uintptr_t)segment->scales : h->scales + h->n_scales;
            encode(pool, segment, w.cols, 100 + (uint64_t)(m * 8 + s),
                   (uint8_t *)(uintptr_t)segment->codes, scales);
            h->n_scales += count_whole_scales(segment, w.cols);
        }
    }
    bl_base_destroy(base);
}

static const bl_arch *arch_of(const dims_case *c)
{
    if (c->is_falcon) return &bl_arch_falcon;
    return c->has_head_norms ? &bl_arch_qwen3 : &bl_arch_llama;
}

static void create_host(const dims_case *c, bl_format format, bl_pool *pool, host *h)
{
    bl_format formats[BL_PROJECTIONS];
    double inverse[64];

    *h = (host){.config = {.arch = arch_of(c),
                           .activation = c->is_falcon ? BL_GELU : BL_SWIGLU,
                           .windows = {.tokens = c->window, .layers = {c->window ? 1 : 0}},
                           .residual_multiplier = c->residual,
                           .biases = c->biases,
                           .vocab_size = 8,
                           .hidden_size = c->hidden,
                           .intermediate_size = c->inter,
                           .n_layers = 1,
                           .n_heads = c->n_heads,
                           .n_kv_heads = c->n_kv_heads,
                           .head_dim = c->head_dim,
                           .rms_norm_eps = 1e-5,
                           .tie_word_embeddings = true,
                           .rope_theta = 100.0}};
    for (int p = 0; p < BL_PROJECTIONS; p++) formats[p] = format;
    check(bl_model_layout(&h->config, formats, BL_BF16, BL_DEVICE_CPU, 1, &h->layout));
    fill_base(h, pool);
    h->cos_table = test_floats(T * c->head_dim / 2);
    h->sin_table = test_floats(T * c->head_dim / 2);
    bl_model_rope_inv_freq(&h->config, false, inverse);
    bl_rope_fill_tables(0, T, c->head_dim / 2, inverse, 1.0, h->cos_table, h->sin_table);
    h->norms = test_random_floats(bl_arch_layer_floats(&h->config, BL_LAYER_DENSE), 5);
    for (int64_t i = 0; i < bl_arch_vector_offset(&h->config, BL_LAYER_DENSE, BL_LAYER_VECTORS);
         i++)
        h->norms[i] += 1.5f;
    h->x = random_values(T * c->hidden, 6, 1);
    h->d = random_values(T * c->hidden, 7, 1);
    for (int p = 0; p < h->config.arch->n_projections; p++) {
        int64_t rows, cols;
        bl_projection_shape(&h->config, p, &rows, &cols);
        h->factors[2 * p] = random_values(R * cols, 20 + (uint64_t)p, 0.1f);
        h->factors[2 * p + 1] = random_values(R * rows, 40 + (uint64_t)p, 0.1f);
    }
}

static void free_host(host *h)
{
    bl_base_layout_free(&h->layout);
    free(h->shards), free(h->scales), free(h->norms), free(h->cos_table), free(h->sin_table);
    free(h->x), free(h->d);
    for (int i = 0; i < 2 * BL_PROJECTIONS; i++) free(h->factors[i]);
}

/* ---- a layer on a device ---- */

enum { MAX_BUFFERS = 20 };

typedef struct side {
    test_device d;
    bl_device_kind kind;
    void *buffers[MAX_BUFFERS];
    int n_buffers;
    bl_base_unit unit;
    bl_base_layout layout;
    bl_base *base;
    bl_block_dims dims;
    bl_lora_layout lora;
    bl_linear_prepared prepared;
    bl_block block;
    bl_micro_batch batch;
} side;

static void *put(side *s, const void *values, size_t n_bytes)
{
    void *memory;
    assert_true(s->n_buffers < MAX_BUFFERS);
    check(bl_device_alloc(s->d.device, BL_SPACE_DEVICE, n_bytes, "test", &memory));
    s->buffers[s->n_buffers++] = memory;
    if (values) test_write(s->d, memory, values, n_bytes);
    return memory;
}

static bl_tensor put_activations(side *s, const float *values, int64_t n)
{
    bl_dtype act = bl_device_act(s->d.device);
    uint16_t *halves = test_alloc(n, sizeof *halves);
    for (int64_t i = 0; i < n; i++) halves[i] = bl_f32_to_bf16(values[i]);
    void *memory =
        put(s, act == BL_F32 ? (const void *)values : halves, (size_t)n * bl_dtype_bytes(act));
    free(halves);
    return bl_tensor_of(memory, act);
}

static float *fetch(const side *s, bl_tensor t, int64_t n)
{
    void *bytes = test_alloc(n, sizeof(float));
    float *values = test_floats(n);
    test_read(s->d, bytes, t.data, bl_tensor_bytes(t, n));
    assert_true(bl_dtype_to_f32(t.dtype, bytes, values, (size_t)n));
    free(bytes);
    return values;
}

/* Guarded bytes behind n_bytes, and a look at them. */
static void *put_guarded(side *s, size_t n_bytes)
{
    char *memory = put(s, NULL, n_bytes + GUARD_BYTES);
    uint8_t guard[GUARD_BYTES];
    memset(guard, GUARD, sizeof guard);
    test_write(s->d, memory + n_bytes, guard, sizeof guard);
    return memory;
}

static void check_guard(const side *s, const char *memory, size_t n_bytes)
{
    uint8_t guard[GUARD_BYTES];
    test_read(s->d, guard, memory + n_bytes, sizeof guard);
    for (int i = 0; i < GUARD_BYTES; i++) assert_int_equal(guard[i], GUARD);
}

static void put_base(side *s, const host *h)
{
    float *scales = put(s, h->scales, (h->n_scales + 4) * sizeof *scales);
    s->unit = h->layout.units[0];
    s->layout = (bl_base_layout){
        .n_shards = 1, .n_units = 1, .units = &s->unit, .shard_bytes = h->layout.shard_bytes};
    for (int m = 0; m < s->unit.n_matrices; m++) {
        bl_weight *w = &s->unit.matrix[m].weight;
        for (int i = 0; i < w->n_segments; i++) {
            size_t n = count_whole_scales(&w->segment[i], w->cols);
            w->segment[i].scales = n > 0 ? scales : NULL;
            scales += n;
        }
    }
    check(bl_base_create_resident(&s->layout, put(s, h->shards, h->layout.shard_bytes), &s->base));
}

static void put_lora(side *s, const host *h, float dropout)
{
    bl_lora_options options = {.r = R, .alpha = 2.0 * R, .dropout = (double)dropout};
    for (int p = 0; p < h->config.arch->n_projections; p++) options.target[p] = true;
    bl_lora_layout_init(&h->config, &options, &s->lora);
    bl_lora_layout_stack(&s->lora, s->kind == BL_DEVICE_CUDA);
    float *weights = test_floats(s->lora.n_floats);
    for (int p = 0; p < h->config.arch->n_projections; p++) {
        memcpy(weights + s->lora.a_offset[p], h->factors[2 * p],
               (size_t)(R * s->lora.a_cols[p]) * sizeof *weights);
        memcpy(weights + s->lora.b_offset[p], h->factors[2 * p + 1],
               (size_t)(R * s->lora.b_rows[p]) * sizeof *weights);
    }
    s->block.lora = &s->lora;
    s->block.lora_weights = put_activations(s, weights, s->lora.n_floats);
    s->block.dropout = (bl_lora_dropout){.p = dropout, .seed = 11, .step = 5};
    free(weights);
}

static void put_batch(side *s)
{
    int32_t position[T];
    int64_t sample[T];
    for (int t = 0; t < T; t++) position[t] = t % 50, sample[t] = t / 50;
    s->batch = (bl_micro_batch){.T = T, .n_documents = DOCUMENTS};
    s->batch.position = put(s, position, sizeof position);
    s->batch.sample = put(s, sample, sizeof sample);
    s->batch.cu_seqlens = put(s, document_starts, sizeof document_starts);
}

static void create_side(side *s, test_device d, const host *h, bl_matmul_mode mode, bool prepares,
                        float dropout)
{
    int64_t half = h->config.head_dim / 2;

    *s = (side){.d = d, .kind = bl_device_get_kind(d.device)};
    put_base(s, h);
    s->dims = bl_block_dims_of(&h->config, BL_LAYER_DENSE, s->kind, bl_device_act(s->d.device));
    s->dims.mode = mode;
    s->dims.is_dense = s->unit.matrix[0].weight.segment[0].format == BL_FORMAT_BF16;
    s->dims.rope.cos_table = put(s, h->cos_table, (size_t)(T * half) * sizeof(float));
    s->dims.rope.sin_table = put(s, h->sin_table, (size_t)(T * half) * sizeof(float));
    s->block = (bl_block){.dims = &s->dims, .base = s->base};
    s->block.vectors = put(s, h->norms, (size_t)s->dims.vector_floats * sizeof(float));
    put_lora(s, h, dropout);
    put_batch(s);
    if (!prepares) return;
    bl_linear_prepared_measure(s->kind, &s->layout, 1, mode, NULL, &s->prepared);
    for (int m = 0; m < BL_LAYER_MATRICES; m++)
        s->dims.prepared_bytes[m] = s->prepared.matrix[m].memory_bytes;
    s->block.prepared = &s->prepared;
}

static void destroy_side(side *s)
{
    bl_base_destroy(s->base);
    for (int i = 0; i < s->n_buffers; i++)
        bl_device_free(s->d.device, BL_SPACE_DEVICE, s->buffers[i]);
}

typedef struct result {
    float *out, *d, *gradients;
} result;

/* Forward and backward with only what `save` keeps between the two. */
static result run(side *s, const host *h, unsigned save)
{
    int64_t H = h->config.hidden_size, rows = bl_block_rows(&s->dims, T);
    size_t n_bytes =
               (size_t)bl_block_workspace_bytes(&s->dims, rows, R, s->block.dropout.p > 0, true),
           n_saved = (size_t)(rows * bl_block_saved_bytes(&s->dims, save)),
           n_prepared = bl_linear_prepared_bytes(&s->prepared);
    char *memory = put_guarded(s, n_bytes), *saved = put_guarded(s, n_saved),
         *prepared = put_guarded(s, n_prepared);
    bl_tensor out = put_activations(s, h->x, T * H), d = put_activations(s, h->d, T * H);
    float *gradients = put(s, NULL, (size_t)s->lora.n_floats * sizeof *gradients);
    bl_block_tensors kept = {0};
    bl_block_workspace ws;

    if (save) bl_block_place_saved(&s->dims, save, T, saved, &kept);
    kept.x = put_activations(s, h->x, T * H);
    bl_linear_prepared_place(&s->prepared, prepared);
    bl_block_place_workspace(&s->dims, rows, R, s->block.dropout.p > 0, true, memory, &ws);
    check(bl_block_forward(s->d.stream, &s->block, &s->batch, &kept, &ws, out));
    check(bl_stream_synchronize(s->d.stream));
    check(bl_stream_zero(s->d.stream, memory, n_bytes));
    bl_linear_prepared_forget(&s->prepared);
    check(bl_block_backward(s->d.stream, &s->block, &s->batch, &kept, &ws, d, gradients));
    test_finish(s->d);
    check_guard(s, memory, n_bytes);
    check_guard(s, saved, n_saved);
    check_guard(s, prepared, n_prepared);
    result r = {fetch(s, out, T * H), fetch(s, d, T * H),
                fetch(s, bl_tensor_f32(gradients), s->lora.n_floats)};
    return r;
}

static void free_result(result *r)
{
    free(r->out), free(r->d), free(r->gradients);
}

static void check_near(const char *what, const float *got, const float *want, int64_t n,
                       double allowed)
{
    double error = 0, size = 0;
    for (int64_t i = 0; i < n; i++) {
        error += pow((double)got[i] - (double)want[i], 2);
        size += pow((double)want[i], 2);
    }
    if (!(sqrt(error) <= allowed * sqrt(size)))
        fail_msg("%s: off by %.3g of its size, %.3g is allowed", what, sqrt(error / size), allowed);
}

/* Factor by factor: the layouts differ. */
static void compare(const side *got_side, const result *got, const side *want_side,
                    const result *want, double allowed)
{
    int64_t n = T * want_side->dims.hidden;
    check_near("out", got->out, want->out, n, allowed);
    check_near("dx", got->d, want->d, n, allowed);
    for (int p = 0; p < want_side->lora.arch->n_projections; p++) {
        const bl_lora_layout *g = &got_side->lora, *w = &want_side->lora;
        check_near("dA", got->gradients + g->a_offset[p], want->gradients + w->a_offset[p],
                   R * w->a_cols[p], allowed);
        check_near("dB", got->gradients + g->b_offset[p], want->gradients + w->b_offset[p],
                   R * w->b_rows[p], allowed);
    }
}

static bool same(const result *a, const result *b, const side *s)
{
    size_t n = (size_t)(T * s->dims.hidden) * sizeof(float);
    return memcmp(a->out, b->out, n) == 0 && memcmp(a->d, b->d, n) == 0 &&
           memcmp(a->gradients, b->gradients, (size_t)s->lora.n_floats * sizeof(float)) == 0;
}

/* One shape in one format: each mode near the CPU, and the same bits whatever is saved or
 * prepared. */
static void check_case(const dims_case *c, bl_format format, float dropout)
{
    test_device cpu = test_device_create(1), gpu = {0};
    host h;
    side want_side;

    check(bl_device_create_cuda(0, &gpu.device));
    check(bl_stream_create(gpu.device, "test", &gpu.stream));
    create_host(c, format, bl_device_pool(cpu.device), &h);
    create_side(&want_side, cpu, &h, BL_MATMUL_BF16, false, dropout);
    result want = run(&want_side, &h, BL_SAVE_S4);
    for (int mode = BL_MATMUL_BF16; mode <= BL_MATMUL_FP8; mode++) {
        result first = {0};
        for (int i = 0; i < 4; i++) {
            side s;
            create_side(&s, gpu, &h, (bl_matmul_mode)mode, i & 1, dropout);
            result got = run(&s, &h, i & 2 ? BL_SAVE_S0 : BL_SAVE_S4);
            if (i == 0) {
                compare(&s, &got, &want_side, &want,
                        mode == BL_MATMUL_FP8 ? FP8_ERROR : BF16_ERROR);
                first = got;
            } else {
                assert_true(same(&got, &first, &s));
                free_result(&got);
            }
            destroy_side(&s);
        }
        free_result(&first);
    }
    int64_t counts[BL_FALLBACK_COUNT];
    bl_gpu_info info;
    check(bl_device_find_cuda(0, &info));
    check(bl_matmul_count_fallbacks(gpu.device, counts));
    assert_int_equal(counts[BL_FALLBACK_CAPABILITY] > 0,
                     bl_format_has_scales(format) && info.capability != 90);
    assert_int_equal(counts[BL_FALLBACK_SHAPE] > 0,
                     bl_format_has_scales(format) && !c->is_fp8_possible);
    assert_int_equal(counts[BL_FALLBACK_FORMAT] > 0, !bl_format_has_scales(format));
    free_result(&want);
    destroy_side(&want_side);
    free_host(&h);
    test_device_destroy(cpu);
    test_device_destroy(gpu);
}

static void test_cuda_equals_the_cpu(void **state)
{
    static const bl_format formats[] = {BL_FORMAT_FP8_ROW, BL_FORMAT_FP8_BLOCK, BL_FORMAT_BF16};
    (void)state;
    for (size_t c = 0; c < BL_COUNT(dims_cases); c++)
        for (size_t f = 0; f < (dims_cases[c].is_one_format ? 1 : BL_COUNT(formats)); f++)
            check_case(&dims_cases[c], formats[f], f == 0 ? 0.2f : 0);
}

int main(void)
{
    bl_device *device;
    if (bl_device_create_cuda(0, &device) != BL_OK) {
        printf("skip: no GPU: %s\n", bl_error_text());
        return 77;
    }
    bl_device_destroy(device);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_cuda_equals_the_cpu)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
