/* SPDX-License-Identifier: Apache-2.0 */
/* processes.c -- a LoRA linear layer whose frozen FP8 weight is sharded over processes, with
 * libballast alone.
 *
 *   cc -std=c17 processes.c $(pkg-config --cflags --libs ballast) -o processes
 *   ./processes 0 2 127.0.0.1 29600 & ./processes 1 2 127.0.0.1 29600
 *
 * Arguments: rank, ranks, address and port of rank 0. Ranks of one host, at 127.0.0.1, need no
 * secret; those of several hosts have one in the environment variable SECRET. Each stores its share
 * of the rows in host memory, and gathers the weight for each call. The outputs have the bits of
 * one process that has the whole weight. Under torchrun, RANK, WORLD_SIZE and MASTER_ADDR are the
 * first three. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <ballast/ballast.h>

enum { T = 24, N = 320, R = 8 };

/* Rows of the weight: from a file, say. */
static bl_status read_rows(void *user, int64_t begin, int64_t end, void *out)
{
    (void)user;
    for (int64_t i = 0; i < (end - begin) * N; i++)
        ((float *)out)[i] = (float)((begin * N + i) * 7919 % 2003 - 1001) * 5e-5f;
    return BL_OK;
}

/* y[T, N] = the layer's output; comm NULL: this process has all of it. */
static bl_status run_layer(bl_comm *comm, float *x, float *y)
{
    bl_linear_options options = {.comm = comm, .max_tokens = T, .tier = BL_TIER_HOST, .ratio = 1};
    bl_linear_spec spec = {.rows = N,
                           .cols = N,
                           .format = BL_FORMAT_FP8_ROW,
                           .dtype = BL_F32,
                           .read_rows = read_rows,
                           .lora = {.r = R, .alpha = 16}};
    bl_linear_stack *stack = NULL;
    bl_stream *stream = NULL;
    bl_status st;

    BL_TRY_GOTO(st, done, bl_device_create_cpu(1, &options.device));
    BL_TRY_GOTO(st, done, bl_stream_create(options.device, "compute", &stream));
    BL_TRY_GOTO(st, done, bl_linear_stack_create(&options, 1, &spec, &stack));
    BL_TRY_GOTO(st, done,
                bl_linear_layer_forward(bl_linear_stack_layer(stack, 0), stream, T,
                                        bl_tensor_f32(x), bl_tensor_f32(y)));
    st = bl_stream_synchronize(stream);
done:
    bl_linear_stack_destroy(stack);
    bl_stream_destroy(stream);
    bl_device_destroy(options.device);
    return st;
}

static bl_status run_alone(bl_comm *comm, void *user)
{
    float *x = user;
    return run_layer(comm, x, x + T * N);
}

int main(int argc, char **argv)
{
    static float sharded[2 * T * N], alone[2 * T * N];
    bl_comm *comm = NULL;

    if (argc != 5) return fprintf(stderr, "processes RANK RANKS ADDRESS PORT\n"), 2;
    bl_comm_processes job = {.rank = atoi(argv[1]),
                             .n_ranks = atoi(argv[2]),
                             .address = argv[3],
                             .port = (uint16_t)atoi(argv[4]),
                             .secret = getenv("SECRET"),
                             .is_one_host = strcmp(argv[3], "127.0.0.1") == 0,
                             .deadline_s = 60};
    for (int i = 0; i < T * N; i++) sharded[i] = alone[i] = (float)(i % 31 - 15) / 16;
    bl_status st = bl_comm_create_processes(&job, &comm);
    if (st == BL_OK) {
        st = run_layer(comm, sharded, sharded + T * N);
        bl_error error;
        bl_error_save(&error, st);
        if (st != BL_OK) bl_comm_abort(comm, &error); /* the others need not wait for this rank */
        bl_comm_destroy(comm);
        (void)bl_error_restore(&error);
    }
    if (st == BL_OK) st = bl_comm_run_local(1, 0, run_alone, alone);
    if (st != BL_OK) return fprintf(stderr, "processes: %s\n", bl_error_text()), 1;
    int same = !memcmp(alone, sharded, sizeof alone);
    printf("rank %d of %d processes: a layer of %d x %d in FP8: %s bits as in one\n", job.rank,
           job.n_ranks, N, N, same ? "the same" : "other");
    return same ? 0 : 1;
}
