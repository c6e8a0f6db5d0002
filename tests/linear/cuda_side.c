/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_side.c -- one LoRA layer on one device, from the same random values on every device. */
#include "cuda_side.h"

#include "base/dtype.h"

void check_status(bl_status st)
{
    if (st != BL_OK) fail_msg("%s: %s", bl_status_name(st), bl_error_text());
}

void *side_memory(side *s, const void *values, size_t bytes)
{
    void *memory;
    assert_true(s->n_buffers < MAX_BUFFERS);
    check_status(bl_device_alloc(s->d.device, BL_SPACE_DEVICE, bytes, "test", &memory));
    s->buffers[s->n_buffers++] = memory;
    if (values) test_write(s->d, memory, values, bytes);
    return memory;
}

static bl_tensor activations(side *s, const float *values, int64_t n)
{
    if (!s->is_cuda) return bl_tensor_f32(side_memory(s, values, (size_t)n * sizeof *values));
    uint16_t *halves = test_alloc(n, sizeof *halves);
    for (int64_t i = 0; i < n; i++) halves[i] = bl_f32_to_bf16(values[i]);
    void *memory = side_memory(s, halves, (size_t)n * sizeof *halves);
    free(halves);
    return bl_tensor_of(memory, BL_BF16);
}

double *side_fetch(const side *s, const void *memory, int64_t n, bool is_half)
{
    size_t bytes = (size_t)n * (is_half ? 2 : 4);
    void *host = test_alloc(n, 4);
    double *values = test_doubles(n);
    test_read(s->d, host, memory, bytes);
    for (int64_t i = 0; i < n; i++)
        values[i] = (double)(is_half ? bl_bf16_to_f32(((const uint16_t *)host)[i])
                                     : ((const float *)host)[i]);
    free(host);
    return values;
}

/* Values that bf16 holds; `n` at most, some channels far larger than others where `spread` says
 * so. */
static float *bf16_values(int64_t n, uint64_t seed, int64_t period)
{
    float *values = test_random_floats(n, seed);
    for (int64_t i = 0; i < n; i++) {
        float factor = period > 0 && i % period % 13 == 5 ? 6.0f : 1.0f;
        values[i] = bl_bf16_to_f32(bl_f32_to_bf16(factor * values[i]));
    }
    return values;
}

/* The matrix, the same codes on both sides; magnitudes vary between a segment's rows, so that
 * scales differ. */
static void add_weight(side *s, const layer_shape *shape, bl_pool *pool)
{
    bl_weight *w = &s->linear.weight;
    size_t total = 0, begin[MAX_PARTS], n_scales[MAX_PARTS], bytes;
    char *codes;

    *w = (bl_weight){.cols = shape->K, .n_segments = shape->n_segments};
    for (int i = 0; i < shape->n_segments; i++) {
        begin[i] = total;
        assert_true(bl_format_sizes(shape->segment[i].format, shape->segment[i].rows, shape->K,
                                    &bytes, &n_scales[i]));
        total += bytes;
        w->rows += shape->segment[i].rows;
    }
    codes = test_alloc((int64_t)total, 1);
    char *memory = side_memory(s, codes, total);
    for (int i = 0; i < shape->n_segments; i++) {
        bl_format format = shape->segment[i].format;
        int64_t rows = shape->segment[i].rows, n = rows * shape->K;
        float *values = test_random_floats(n, 100 + (uint64_t)i),
              *scales = test_floats((int64_t)n_scales[i]);
        for (int64_t k = 0; k < n; k++) values[k] *= 0.5f + (float)(k / shape->K % 7);
        uint8_t *to = (uint8_t *)codes + begin[i];
        for (int64_t k = 0; k < n && format == BL_FORMAT_BF16; k++)
            ((uint16_t *)(void *)to)[k] = bl_f32_to_bf16(values[k]);
        for (int64_t k = 0; k < n && format == BL_FORMAT_F16; k++)
            ((uint16_t *)(void *)to)[k] = bl_f32_to_f16(values[k]);
        if (format == BL_FORMAT_F32) memcpy(to, values, (size_t)n * sizeof *values);
        if (format == BL_FORMAT_FP8_ROW)
            check_status(bl_fp8_row_quantize(pool, BL_F32, values, 0, rows, shape->K, to, scales));
        if (format == BL_FORMAT_FP8_BLOCK)
            check_status(
                bl_fp8_block_quantize(pool, BL_F32, values, 0, rows, shape->K, to, scales));
        w->segment[i] =
            (bl_weight_segment){.format = format, .codes = memory + begin[i], .rows = rows};
        if (n_scales[i])
            w->segment[i].scales = side_memory(s, scales, n_scales[i] * sizeof *scales);
        free(values);
        free(scales);
    }
    if (total) test_write(s->d, memory, codes, total);
    free(codes);
}

/* The parts' A's, one behind the other, and as much room in fp32 for their dA's. */
static void add_stack(side *s, const layer_shape *shape)
{
    int64_t r = 0, done = 0;
    for (int i = 0; i < shape->n_parts; i++) r += shape->part[i].r;
    float *values = test_floats(r * shape->K);
    for (int i = 0; i < shape->n_parts; i++) {
        int64_t n = shape->part[i].r * shape->K;
        float *a = bf16_values(n, 20 + (uint64_t)i, 0);
        memcpy(values + done, a, (size_t)n * sizeof *a);
        free(a);
        done += n;
    }
    bl_tensor A = activations(s, values, r * shape->K);
    float *dA = side_memory(s, NULL, (size_t)(r * shape->K) * sizeof *dA);
    for (int i = 0; i < shape->n_parts; i++) {
        s->linear.part[i].A = A;
        s->linear.part[i].dA = dA;
        A = bl_tensor_at(A, shape->part[i].r * shape->K);
        dA += shape->part[i].r * shape->K;
    }
    free(values);
}

static void add_parts(side *s, const layer_shape *shape)
{
    s->linear.n_parts = shape->n_parts;
    s->linear.is_stacked = shape->is_stacked;
    for (int i = 0; i < shape->n_parts; i++) {
        int64_t r = shape->part[i].r, rows = shape->part[i].rows;
        float *b = bf16_values(rows * r, 30 + (uint64_t)i, 0);
        s->linear.part[i] =
            (bl_lora_part){.r = r,
                           .row_begin = shape->part[i].row_begin,
                           .rows = rows,
                           .scale = shape->part[i].scale,
                           .B = activations(s, b, rows * r),
                           .dB = side_memory(s, NULL, (size_t)(rows * r) * sizeof(float))};
        free(b);
    }
    add_stack(s, shape);
}

void side_take_workspace(side *s, int64_t T)
{
    uint8_t guard[GUARD_BYTES];
    size_t bytes = bl_lora_linear_workspace_bytes(bl_device_get_kind(s->d.device),
                                                  bl_device_act(s->d.device), &s->linear, T);

    assert_true(s->n_guards < MAX_GUARDS);
    memset(guard, 0xa5, sizeof guard);
    s->linear.workspace = side_memory(s, NULL, bytes + GUARD_BYTES);
    s->linear.workspace_bytes = bytes;
    s->guards[s->n_guards] = (char *)s->linear.workspace + bytes;
    test_write(s->d, s->guards[s->n_guards++], guard, sizeof guard);
}

side side_create(test_device d, bl_pool *pool, const layer_shape *shape, float dropout,
                 bl_matmul_mode mode)
{
    side s = {.d = d, .is_cuda = bl_device_get_kind(d.device) == BL_DEVICE_CUDA};
    int64_t T = shape->T, N;
    int64_t *sample = test_alloc(T, sizeof *sample);
    int32_t *position = test_alloc(T, sizeof *position);

    add_weight(&s, shape, pool);
    add_parts(&s, shape);
    N = s.linear.weight.rows;
    for (int64_t t = 0; t < T; t++) sample[t] = t / 5, position[t] = (int32_t)(t % 5);
    s.linear.dropout =
        (bl_lora_dropout){.p = dropout, .seed = 99, .step = 3, .layer = 1, .matrix = 2};
    s.linear.dropout.sample = side_memory(&s, sample, (size_t)T * sizeof *sample);
    s.linear.dropout.position = side_memory(&s, position, (size_t)T * sizeof *position);
    s.linear.mode = mode;
    side_take_workspace(&s, T);
    float *x = bf16_values(T * shape->K, 1, shape->K), *dy = bf16_values(T * N, 2, N);
    s.x = activations(&s, x, T * shape->K);
    s.dy = activations(&s, dy, T * N);
    s.y = activations(&s, dy, T * N); /* garbage */
    s.dx = activations(&s, x, T * shape->K);
    free(x);
    free(dy);
    free(sample);
    free(position);
    return s;
}

void side_add_residual(side *s, int64_t T)
{
    int64_t n = T * s->linear.weight.rows;
    float *values = bf16_values(n, 3, 0);

    for (int64_t i = 0; i < n; i++) values[i] *= 4;
    s->linear.residual = activations(s, values, n);
    free(values);
}

void side_destroy(side *s)
{
    for (int i = 0; i < s->n_guards; i++) {
        uint8_t guard[GUARD_BYTES];
        test_read(s->d, guard, s->guards[i], sizeof guard);
        for (int k = 0; k < GUARD_BYTES; k++) assert_int_equal(guard[k], 0xa5);
    }
    for (int i = 0; i < s->n_buffers; i++)
        bl_device_free(s->d.device, BL_SPACE_DEVICE, s->buffers[i]);
}

void side_run(side *s, int64_t T)
{
    check_status(bl_lora_linear_forward(s->d.stream, &s->linear, T, s->x, s->y));
    check_status(bl_lora_linear_backward(s->d.stream, &s->linear, T, s->x, s->dy, s->dx));
    test_finish(s->d);
}
