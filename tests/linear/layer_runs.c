/* SPDX-License-Identifier: Apache-2.0 */
/* layer_runs.c -- as its header says. */
#include "layer_runs.h"

const layer_shape runs_row_shape = {
    "q|k|v in fp8_row",
    true,
    40,
    272,
    3,
    {{BL_FORMAT_FP8_ROW, 128}, {BL_FORMAT_FP8_ROW, 32}, {BL_FORMAT_FP8_ROW, 32}},
    3,
    {{16, 0, 128, 0.5f}, {3, 128, 32, 0.5f}, {8, 160, 32, 0.125f}},
    true};
const layer_shape runs_block_shape = {"gate|up in fp8_block",
                                      true,
                                      68,
                                      400,
                                      2,
                                      {{BL_FORMAT_FP8_BLOCK, 256}, {BL_FORMAT_FP8_BLOCK, 144}},
                                      2,
                                      {{17, 0, 256, 0.25f}, {5, 256, 144, 0.5f}},
                                      false};

int runs_setup(void **state)
{
    fixture *f = test_alloc(1, sizeof *f);
    f->cpu = test_device_create(2);
    check_status(bl_device_create_cuda(0, &f->gpu.device));
    check_status(bl_stream_create(f->gpu.device, "test", &f->gpu.stream));
    *state = f;
    return 0;
}

void runs_renew_gpu(fixture *f)
{
    test_device_destroy(f->gpu);
    check_status(bl_device_create_cuda(0, &f->gpu.device));
    check_status(bl_stream_create(f->gpu.device, "test", &f->gpu.stream));
}

int runs_teardown(void **state)
{
    fixture *f = *state;
    test_device_destroy(f->cpu);
    test_device_destroy(f->gpu);
    free(f);
    return 0;
}

outputs runs_layer(side *s, const layer_shape *l)
{
    outputs out = {.n = {l->T * s->linear.weight.rows, l->T * l->K}};
    side_run(s, l->T);
    out.value[0] = side_fetch(s, s->y.data, out.n[0], true);
    out.value[1] = side_fetch(s, s->dx.data, out.n[1], true);
    for (int p = 0; p < s->linear.n_parts; p++) {
        const bl_lora_part *part = &s->linear.part[p];
        out.n[2 + 2 * p] = part->r * l->K;
        out.n[3 + 2 * p] = part->rows * part->r;
        out.value[2 + 2 * p] = side_fetch(s, part->dA, out.n[2 + 2 * p], false);
        out.value[3 + 2 * p] = side_fetch(s, part->dB, out.n[3 + 2 * p], false);
    }
    return out;
}

bool runs_are_same(const outputs *a, const outputs *b)
{
    bool is_same = true;
    for (int i = 0; i < N_OUTPUTS; i++)
        is_same = is_same && (a->n[i] == 0 || memcmp(a->value[i], b->value[i],
                                                     (size_t)a->n[i] * sizeof(double)) == 0);
    return is_same;
}

void runs_free(outputs *o)
{
    for (int i = 0; i < N_OUTPUTS; i++) free(o->value[i]);
}

outputs runs_shape(fixture *f, const layer_shape *l, float dropout, bl_matmul_mode mode)
{
    side s = side_create(f->gpu, bl_device_pool(f->cpu.device), l, dropout, mode);
    outputs out = runs_layer(&s, l);
    side_destroy(&s);
    return out;
}
