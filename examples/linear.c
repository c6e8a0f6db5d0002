/* SPDX-License-Identifier: Apache-2.0 */
/* linear.c -- LoRA linear layers whose frozen weights are quantized, sharded over ranks and stored
 * out of device memory, forward and backward, with libballast alone.
 *
 *   cc -std=c17 linear.c $(pkg-config --cflags --libs ballast) -o linear && ./linear [DIR]
 *
 * Four layers run on two ranks, threads of this process. Each stores half of every FP8 weight, in
 * host memory or, with DIR (which must exist), in page files there; calls gather a layer's weight
 * just in time. One rank with all weights in device memory gives the same bits. A CPU computes,
 * whose device memory is any memory; for a GPU x, y and their gradients would be of
 * bl_device_alloc. */
#include <stdio.h>
#include <string.h>

#include <ballast/ballast.h>

enum { LAYERS = 4, T = 24, N = 320, R = 8 };

typedef struct pass {
    bl_linear_options options;
    float x[LAYERS + 1][T * N], dx[LAYERS + 1][T * N]; /* layer i turns x[i] into x[i + 1] */
    float gradients[LAYERS * 2 * N * R];               /* dA and dB */
} pass;

/* Rows of a weight: from a file, say. */
static bl_status read_rows(void *user, int64_t begin, int64_t end, void *out)
{
    (void)user;
    for (int64_t i = 0; i < (end - begin) * N; i++)
        ((float *)out)[i] = (float)((begin * N + i) * 7919 % 2003 - 1001) * 5e-5f;
    return BL_OK;
}

static bl_status run_layers(bl_linear_stack *stack, bl_stream *stream, pass *p)
{
    for (int i = 0; i < LAYERS; i++)
        BL_TRY(bl_linear_layer_forward(bl_linear_stack_layer(stack, i), stream, T,
                                       bl_tensor_f32(p->x[i]), bl_tensor_f32(p->x[i + 1])));
    for (int i = LAYERS - 1; i >= 0; i--)
        BL_TRY(bl_linear_layer_backward(bl_linear_stack_layer(stack, i), stream, T,
                                        bl_tensor_f32(p->x[i]), bl_tensor_f32(p->dx[i + 1]),
                                        bl_tensor_f32(p->dx[i])));
    BL_TRY(bl_stream_copy(stream, p->gradients, bl_linear_stack_gradients(stack, NULL),
                          sizeof p->gradients));
    return bl_stream_synchronize(stream);
}

static bl_status run_rank(bl_comm *comm, void *user)
{
    pass *all = user, mine = *all; /* each rank computes everything */
    bl_linear_spec specs[LAYERS];
    bl_linear_stack *stack = NULL;
    bl_stream *stream = NULL;
    bl_status st;

    for (int i = 0; i < LAYERS; i++)
        specs[i] = (bl_linear_spec){.rows = N,
                                    .cols = N,
                                    .format = BL_FORMAT_FP8_ROW,
                                    .dtype = BL_F32,
                                    .read_rows = read_rows,
                                    .lora = {.r = R, .alpha = 16}};
    mine.options.comm = comm;
    BL_TRY_GOTO(st, done, bl_device_create_cpu(1, &mine.options.device));
    BL_TRY_GOTO(st, done, bl_stream_create(mine.options.device, "compute", &stream));
    BL_TRY_GOTO(st, done, bl_linear_stack_create(&mine.options, LAYERS, specs, &stack));
    BL_TRY_GOTO(st, done, run_layers(stack, stream, &mine));
    if (bl_comm_rank(comm) == 0) *all = mine;
done:
    if (stream) (void)bl_stream_synchronize(stream);
    bl_linear_stack_destroy(stack);
    bl_stream_destroy(stream);
    bl_device_destroy(mine.options.device);
    return st;
}

int main(int argc, char **argv)
{
    static pass alone = {.options = {.max_tokens = T}}, sharded;

    for (int i = 0; i < T * N; i++) {
        alone.x[0][i] = (float)(i % 31 - 15) / 16;
        alone.dx[LAYERS][i] = (float)(i % 17 - 8) / 8;
    }
    sharded = alone;
    sharded.options.tier = argc > 1 ? BL_TIER_DISK : BL_TIER_HOST;
    sharded.options.dir = argc > 1 ? argv[1] : NULL;
    sharded.options.ratio = 1;
    bl_status st = bl_comm_run_local(1, 0, run_rank, &alone);
    if (st == BL_OK) st = bl_comm_run_local(2, 0, run_rank, &sharded);
    if (st != BL_OK) return fprintf(stderr, "linear: %s\n", bl_error_text()), 1;
    int same = !memcmp(alone.x, sharded.x, sizeof alone.x) &&
               !memcmp(alone.dx, sharded.dx, sizeof alone.dx) &&
               !memcmp(alone.gradients, sharded.gradients, sizeof alone.gradients);
    printf("%d layers of %d x %d in FP8 on 2 ranks, from %s: %s bits as on one, from device\n",
           LAYERS, N, N, bl_tier_name(sharded.options.tier), same ? "the same" : "other");
    return same ? 0 : 1;
}
