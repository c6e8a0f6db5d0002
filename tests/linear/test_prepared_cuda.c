/* SPDX-License-Identifier: Apache-2.0 */
/* Visits of the units of a base with prepared matrices, on the emulated GPU: they give the bits of
 * visits without; all micro-batches and both directions use a matrix prepared once, and the next
 * visit prepares it again. */
#include "cuda_side.h"

#include "base/sizes.h"
#include "linear/apply.h"

enum { UNITS = 3, MATRICES = 2, MICROS = 2, T = 32, H = 128, WIDE = 256, GUARD = 0x5a };

/* Unit 1 has blocks; unit 2's second matrix is stored in bf16. Rows are two segments, as
 * gate|up. */
static bl_format format_of(int unit, int matrix)
{
    return unit == 2 && matrix == 1 ? BL_FORMAT_BF16
           : unit == 1              ? BL_FORMAT_FP8_BLOCK
                                    : BL_FORMAT_FP8_ROW;
}

typedef struct model {
    test_device d;
    bl_base_unit units[UNITS];
    bl_base_layout layout;
    bl_base *base;
    char *shards;
    size_t n_scales;
    float *scales;
    void *saved_shards, *saved_scales;
    bl_tensor x[MICROS], dy[MICROS], y, dx;
    char *workspace;
    size_t workspace_bytes;
} model;

static void *take(test_device d, size_t n_bytes)
{
    void *memory;
    check_status(bl_device_alloc(d.device, BL_SPACE_DEVICE, n_bytes, "test", &memory));
    return memory;
}

static bl_tensor random_activations(test_device d, int64_t n, uint64_t seed)
{
    float *values = test_random_floats(n, seed);
    uint16_t *halves = test_alloc(n, sizeof *halves);
    void *memory = take(d, (size_t)n * sizeof *halves);
    for (int64_t i = 0; i < n; i++) halves[i] = bl_f32_to_bf16(values[i]);
    test_write(d, memory, halves, (size_t)n * sizeof *halves);
    free(values), free(halves);
    return bl_tensor_of(memory, BL_BF16);
}

/* Matrix 0 is (WIDE, H), matrix 1 (H, H); random codes, never a NaN's. */
static void create_layout(model *m)
{
    m->layout = (bl_base_layout){.n_shards = 1, .n_units = UNITS, .units = m->units};
    for (int u = 0; u < UNITS; u++) {
        m->units[u].n_matrices = MATRICES;
        for (int i = 0; i < MATRICES; i++) {
            int64_t rows = i == 0 ? WIDE : H;
            bl_format format = format_of(u, i);
            int n = i == 0 ? 2 : 1;
            bl_weight *w = &m->units[u].matrix[i].weight;
            *w = (bl_weight){.rows = rows, .cols = H, .n_segments = n};
            for (int s = 0; s < n; s++)
                w->segment[s] = (bl_weight_segment){.format = format, .rows = rows / n};
        }
    }
    check_status(bl_base_layout_finish(&m->layout));
}

/* Scales of blocks are parts of the shards. */
static void fill_paged_scales(const model *m, uint8_t *shards, const float *scales)
{
    for (bl_base_walk at = {.layout = &m->layout}; bl_base_next(&at);)
        if (at.part->is_scales)
            memcpy(shards + m->units[at.idx_unit].offset + at.part->shard_offset, scales,
                   at.part->shard_bytes);
}

static void fill_base(model *m)
{
    uint8_t *codes = test_alloc((int64_t)m->layout.shard_bytes, 1);
    float *scales = test_random_floats(UNITS * MATRICES * WIDE, 5);
    size_t n = m->layout.shard_bytes, used = 0;

    for (size_t i = 0; i < n; i++) codes[i] = (uint8_t)(i * 37 % 0x60 | (i % 3 ? 0x80 : 0));
    m->shards = take(m->d, n);
    m->n_scales = UNITS * MATRICES * WIDE;
    m->scales = take(m->d, m->n_scales * sizeof(float));
    for (size_t i = 0; i < m->n_scales; i++) scales[i] = 0.01f + fabsf(scales[i]) / 64;
    fill_paged_scales(m, codes, scales);
    test_write(m->d, m->shards, codes, n);
    test_write(m->d, m->scales, scales, m->n_scales * sizeof(float));
    for (int u = 0; u < UNITS; u++)
        for (int i = 0; i < MATRICES; i++)
            for (int s = 0; s < m->units[u].matrix[i].weight.n_segments; s++) {
                bl_weight_segment *segment = &m->units[u].matrix[i].weight.segment[s];
                size_t n_bytes, count;
                bl_format_sizes(segment->format, segment->rows, H, &n_bytes, &count);
                segment->scales = count > 0 ? m->scales + used : NULL;
                used += (count + 3) / 4 * 4;
            }
    m->saved_shards = codes;
    m->saved_scales = scales;
    check_status(bl_base_create_resident(&m->layout, m->shards, &m->base));
}

static bl_linear_use use_of(model *m, int unit, int matrix, bl_matmul_mode mode,
                            bl_linear_prepared *prepared)
{
    return (bl_linear_use){
        .base = m->base,
        .unit = unit,
        .matrix = matrix,
        .prepared = prepared,
        .lora = {.mode = mode, .workspace = m->workspace, .workspace_bytes = m->workspace_bytes}};
}

/* Of the products of both matrices; with prepared memory where `prepared` is there. */
static size_t needed_workspace(model *m, bl_matmul_mode mode, bl_linear_prepared *prepared)
{
    size_t most = 0;
    for (int u = 0; u < UNITS; u++)
        for (int i = 0; i < MATRICES; i++) {
            bl_linear_use use = use_of(m, u, i, mode, NULL);
            use.lora.weight = m->units[u].matrix[i].weight;
            use.lora.prepared = prepared ? bl_linear_prepared_at(prepared, u, i) : NULL;
            size_t n = bl_lora_linear_workspace_bytes(BL_DEVICE_CUDA, BL_BF16, &use.lora, T);
            if (n > most) most = n;
        }
    return most;
}

/* Both matrices, both directions, for one micro-batch; appends what comes out. */
static uint16_t *run_micro(model *m, int unit, int micro, bl_matmul_mode mode,
                           bl_linear_prepared *prepared, bool backward, uint16_t *out)
{
    for (int i = 0; i < MATRICES; i++) {
        bl_linear_use use = use_of(m, unit, i, mode, prepared);
        int64_t rows = i == 0 ? WIDE : H;
        check_status(bl_linear_apply(m->d.stream, &use, T, m->x[micro], m->y));
        test_read(m->d, out, m->y.data, (size_t)(T * rows) * sizeof *out);
        out += T * rows;
        if (!backward) continue;
        check_status(bl_linear_pull_back(m->d.stream, &use, T, m->x[micro], m->dy[micro], m->dx));
        test_read(m->d, out, m->dx.data, (size_t)(T * H) * sizeof *out);
        out += T * H;
    }
    return out;
}

/* What the base is made of becomes garbage, as in a slot of the ring that is filled anew. */
static void spoil(model *m, bool codes)
{
    if (codes) check_status(bl_stream_zero(m->d.stream, m->shards, m->layout.shard_bytes));
    check_status(bl_stream_zero(m->d.stream, m->scales, m->n_scales * sizeof(float)));
    test_finish(m->d);
}

static void mend(model *m)
{
    test_write(m->d, m->shards, m->saved_shards, m->layout.shard_bytes);
    test_write(m->d, m->scales, m->saved_scales, m->n_scales * sizeof(float));
}

enum { MICRO_OUT = T * (WIDE + H + 2 * H), OUT = 2 * UNITS * MICROS * MICRO_OUT };

/* A pass up and down, layer-major. `spoils`: from the second micro-batch of a visit on, only the
 * matrices prepared by the first one are valid. */
static void run_pass(model *m, bl_matmul_mode mode, bl_linear_prepared *prepared, bool spoils,
                     uint16_t *out)
{
    for (int visit = 0; visit < 2 * UNITS; visit++) {
        int unit = visit < UNITS ? visit : 2 * UNITS - 1 - visit;
        /* What is stored in bf16 is not copied; nor are codes that FP8 multiplies as they are. */
        bool is_made = format_of(unit, 1) != BL_FORMAT_BF16;
        for (int micro = 0; micro < MICROS; micro++) {
            out = run_micro(m, unit, micro, mode, prepared, visit >= UNITS, out);
            if (spoils && is_made) spoil(m, mode == BL_MATMUL_BF16);
        }
        if (spoils) mend(m);
        if (prepared) bl_linear_prepared_forget(prepared);
    }
}

static void create_model(model *m)
{
    *m = (model){0};
    check_status(bl_device_create_cuda(0, &m->d.device));
    check_status(bl_stream_create(m->d.device, "test", &m->d.stream));
    create_layout(m);
    fill_base(m);
    for (int i = 0; i < MICROS; i++) {
        m->x[i] = random_activations(m->d, T * H, 10 + (uint64_t)i);
        m->dy[i] = random_activations(m->d, T * WIDE, 20 + (uint64_t)i);
    }
    m->y = random_activations(m->d, T * WIDE, 30);
    m->dx = random_activations(m->d, T * WIDE, 31);
}

static void free_model(model *m)
{
    void *const memory[] = {m->shards,    m->scales,    m->y.data,     m->dx.data,
                            m->x[0].data, m->x[1].data, m->dy[0].data, m->dy[1].data};
    bl_base_destroy(m->base);
    for (size_t i = 0; i < BL_COUNT(memory); i++)
        bl_device_free(m->d.device, BL_SPACE_DEVICE, memory[i]);
    free(m->saved_shards), free(m->saved_scales);
    test_device_destroy(m->d);
}

/* Memory of n bytes with guards behind, and whether they are as they were. */
static char *take_guarded(test_device d, size_t n_bytes)
{
    char *memory = take(d, n_bytes + GUARD_BYTES);
    uint8_t guard[GUARD_BYTES];
    memset(guard, GUARD, sizeof guard);
    test_write(d, memory + n_bytes, guard, sizeof guard);
    return memory;
}

static void free_guarded(test_device d, char *memory, size_t n_bytes)
{
    uint8_t guard[GUARD_BYTES];
    test_read(d, guard, memory + n_bytes, sizeof guard);
    for (int i = 0; i < GUARD_BYTES; i++) assert_int_equal(guard[i], GUARD);
    bl_device_free(d.device, BL_SPACE_DEVICE, memory);
}

static void run_guarded(model *m, bl_matmul_mode mode, bl_linear_prepared *prepared, bool spoils,
                        uint16_t *out)
{
    size_t n_bytes = prepared ? bl_linear_prepared_bytes(prepared) : 0;
    char *memory = take_guarded(m->d, n_bytes);
    if (prepared) bl_linear_prepared_place(prepared, memory);
    m->workspace_bytes = needed_workspace(m, mode, prepared);
    m->workspace = take_guarded(m->d, m->workspace_bytes);
    run_pass(m, mode, prepared, spoils, out);
    free_guarded(m->d, m->workspace, m->workspace_bytes);
    free_guarded(m->d, memory, n_bytes);
}

static void check_mode(model *m, bl_matmul_mode mode)
{
    uint16_t *want = test_alloc(OUT, sizeof *want), *got = test_alloc(OUT, sizeof *got);
    bl_linear_prepared prepared;

    memset(want, 0, OUT * sizeof *want);
    memset(got, 0, OUT * sizeof *got);
    run_guarded(m, mode, NULL, false, want);
    bl_linear_prepared_measure(BL_DEVICE_CUDA, &m->layout, UNITS, mode, NULL, &prepared);
    for (int spoils = 0; spoils < 2; spoils++) {
        run_guarded(m, mode, &prepared, spoils, got);
        assert_memory_equal(got, want, OUT * sizeof *got);
    }
    free(want), free(got);
}

static void test_visits_have_the_same_bits(void **state)
{
    model m;
    (void)state;
    create_model(&m);
    check_mode(&m, BL_MATMUL_BF16);
    check_mode(&m, BL_MATMUL_FP8);
    free_model(&m);
}

static void test_measure(void **state)
{
    model m = {0};
    bl_linear_prepared bf16, fp8, cpu, excepted;
    uint8_t exceptions[UNITS] = {1, 1, 1};
    (void)state;

    create_layout(&m);
    bl_linear_prepared_measure(BL_DEVICE_CPU, &m.layout, UNITS, BL_MATMUL_FP8, NULL, &cpu);
    assert_int_equal(bl_linear_prepared_bytes(&cpu), 0);
    assert_null(bl_linear_prepared_at(&cpu, 0, 0));
    bl_linear_prepared_measure(BL_DEVICE_CUDA, &m.layout, UNITS, BL_MATMUL_BF16, NULL, &bf16);
    assert_int_equal(bf16.matrix[0].memory_bytes, WIDE * H * 2);
    assert_int_equal(bl_linear_prepared_bytes(&bf16), WIDE * H * 2 + H * H * 2);
    bl_linear_prepared_measure(BL_DEVICE_CUDA, &m.layout, UNITS, BL_MATMUL_FP8, NULL, &fp8);
    assert_int_equal(fp8.matrix[0].memory_bytes, WIDE * H + (WIDE + H) * sizeof(float));
    bl_linear_prepared_measure(BL_DEVICE_CUDA, &m.layout, UNITS, BL_MATMUL_FP8, exceptions,
                               &excepted);
    assert_int_equal(excepted.matrix[0].memory_bytes, 0);
    assert_int_equal(excepted.matrix[1].memory_bytes, fp8.matrix[1].memory_bytes);
}

/* Another unit, or the end of the visit, forgets. */
static void test_what_is_forgotten(void **state)
{
    model m = {0};
    bl_linear_prepared p;
    (void)state;

    create_layout(&m);
    bl_linear_prepared_measure(BL_DEVICE_CUDA, &m.layout, UNITS, BL_MATMUL_BF16, NULL, &p);
    bl_linear_prepared_place(&p, (void *)(uintptr_t)256);
    bl_linear_prepared_at(&p, 0, 0)->made = 1;
    assert_int_equal(bl_linear_prepared_at(&p, 0, 1)->made, 0);
    assert_int_equal(bl_linear_prepared_at(&p, 0, 0)->made, 1);
    assert_int_equal(bl_linear_prepared_at(&p, 1, 0)->made, 0);
    bl_linear_prepared_at(&p, 1, 0)->made = 1;
    bl_linear_prepared_forget(&p);
    assert_int_equal(bl_linear_prepared_at(&p, 1, 0)->made, 0);
    assert_ptr_equal(bl_linear_prepared_at(&p, 1, 1)->memory,
                     (char *)bl_linear_prepared_at(&p, 1, 0)->memory + WIDE * H * 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_visits_have_the_same_bits),
                                       cmocka_unit_test(test_measure),
                                       cmocka_unit_test(test_what_is_forgotten)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
