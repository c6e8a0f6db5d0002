/* SPDX-License-Identifier: Apache-2.0 */
/* layer_problem.c -- specifications, inputs and outputs of a small stack of layers. */
#include "layer_problem.h"

const layer_shape shapes[LAYERS] = {{150, 131}, {2, 40}, {304, 160}};

int64_t lora_r(const problem *p, int layer)
{
    return p->specs[layer].lora.r;
}

outputs create_outputs(const problem *p)
{
    outputs o;
    for (int l = 0; l < LAYERS; l++) {
        o.y[l] = test_floats(T * shapes[l].rows);
        o.dx[l] = test_floats(T * shapes[l].cols);
        o.dA[l] = test_floats(lora_r(p, l) * shapes[l].cols);
        o.dB[l] = test_floats(lora_r(p, l) * shapes[l].rows);
    }
    return o;
}

void free_outputs(outputs *o)
{
    for (int l = 0; l < LAYERS; l++) {
        free(o->y[l]);
        free(o->dx[l]);
        free(o->dA[l]);
        free(o->dB[l]);
    }
}

bl_status read_bf16(void *user, int64_t begin, int64_t end, void *out)
{
    const bl_linear_spec *spec = user;
    memcpy(out, (const uint16_t *)spec->weight + begin * spec->cols,
           (size_t)((end - begin) * spec->cols) * sizeof(uint16_t));
    return BL_OK;
}

void create_problem(problem *p, bl_format format, lora_kind kind)
{
    *p = (problem){.format = format, .kind = kind};
    for (int l = 0; l < LAYERS; l++) {
        int64_t N = shapes[l].rows, K = shapes[l].cols, r = kind == PLAIN ? 0 : 5 + l;
        p->w[l] = test_random_floats(N * K, 1 + (uint64_t)l);
        p->bf16[l] = test_alloc(N * K, sizeof(uint16_t));
        for (int64_t i = 0; i < N * K; i++) {
            p->bf16[l][i] = bl_f32_to_bf16(p->w[l][i]);
            p->w[l][i] = bl_bf16_to_f32(p->bf16[l][i]);
        }
        p->x[l] = test_random_floats(T * K, 10 + (uint64_t)l);
        p->dy[l] = test_random_floats(T * N, 20 + (uint64_t)l);
        p->B[l] = test_random_floats(N * r, 30 + (uint64_t)l);
        p->specs[l] =
            (bl_linear_spec){.rows = N,
                             .cols = K,
                             .format = format,
                             .dtype = BL_F32,
                             .weight = p->w[l],
                             .lora = {.r = r, .alpha = 12, .dropout = kind == DROPOUT ? 0.3 : 0}};
        p->bf16_specs[l] = p->specs[l];
        p->bf16_specs[l].dtype = BL_BF16;
        p->bf16_specs[l].weight = p->bf16[l];
    }
    for (int t = 0; t < T; t++) {
        p->sample[t] = (t / 4) * 0x100000001ll;
        p->position[t] = t % 4;
    }
    p->first = create_outputs(p);
}

void free_problem(problem *p)
{
    free_outputs(&p->first);
    for (int l = 0; l < LAYERS; l++) {
        free(p->w[l]);
        free(p->bf16[l]);
        free(p->x[l]);
        free(p->dy[l]);
        free(p->B[l]);
    }
}

bl_status set_B(bl_stream *stream, bl_linear_stack *stack, const problem *p, int layer)
{
    size_t bytes = (size_t)(lora_r(p, layer) * shapes[layer].rows) * sizeof(float);
    bl_device *device = bl_stream_device(stream);
    void *pinned;

    if (bytes == 0) return BL_OK;
    BL_TRY(bl_device_alloc(device, BL_SPACE_HOST, bytes, "B", &pinned));
    memcpy(pinned, p->B[layer], bytes);
    bl_status st = bl_stream_copy(
        stream, bl_linear_layer_lora(bl_linear_stack_layer(stack, layer)).B, pinned, bytes);
    if (st == BL_OK) st = bl_stream_synchronize(stream);
    bl_device_free(device, BL_SPACE_HOST, pinned);
    return st;
}

void forward_once(test_device d, bl_linear_stack *stack, const problem *p, float *y)
{
    assert_int_equal(bl_linear_layer_forward(bl_linear_stack_layer(stack, 0), d.stream, T,
                                             bl_tensor_f32(p->x[0]), bl_tensor_f32(y)),
                     BL_OK);
    test_finish(d);
}
