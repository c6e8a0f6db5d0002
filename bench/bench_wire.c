/* SPDX-License-Identifier: Apache-2.0 */
/* bench_wire.c -- how fast processes of one host exchange bulk data: bench_wire N
 * sockets|shared|mpirun; the last: mpirun starts them. One JSON line per collective and size, the
 * fastest of some repetitions; "bytes" is the whole buffer that every rank gathers, or adds to the
 * sum. */
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/sizes.h"
#include "job/launch.h"
#include "comm/wire.h"

enum { MAX_RANKS = 16, REPETITIONS = 9 };

static const size_t SIZES[] = {64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20};

typedef struct bench {
    bl_comm *comm;
    bl_stream *stream;
    float *whole, *part;
    const char *transport;
} bench;

static bl_status run_once(const bench *b, bool sums, size_t n_bytes, double *out_s)
{
    int size = bl_comm_size(b->comm), rank = bl_comm_rank(b->comm);
    size_t part_bytes = n_bytes / (size_t)size / sizeof(float) * sizeof(float);

    BL_TRY(bl_comm_barrier(b->comm, b->stream));
    BL_TRY(bl_stream_synchronize(b->stream));
    double start_s = bl_now_s();
    if (sums)
        BL_TRY(bl_comm_reduce_scatter_f32(b->comm, b->stream, b->whole, b->part,
                                          (int64_t)(part_bytes / sizeof(float))));
    else
        BL_TRY(bl_comm_all_gather(b->comm, b->stream,
                                  b->whole + (size_t)rank * part_bytes / sizeof(float), b->whole,
                                  part_bytes));
    BL_TRY(bl_stream_synchronize(b->stream));
    *out_s = bl_now_s() - start_s;
    return BL_OK;
}

static bl_status measure(const bench *b, bool sums, size_t n_bytes)
{
    int size = bl_comm_size(b->comm);
    double best_s = INFINITY, s;

    for (int i = 0; i <= REPETITIONS; i++) { /* the first touches the memory */
        BL_TRY(run_once(b, sums, n_bytes, &s));
        if (i > 0) best_s = fmin(best_s, s);
    }
    if (bl_comm_rank(b->comm) > 0) return BL_OK;
    printf("{\"bench\": \"wire\", \"transport\": \"%s\", \"ranks\": %d, \"collective\": \"%s\", "
           "\"bytes\": %zu, \"us\": %.1f, \"received_gb_per_s\": %.3f}\n",
           b->transport, size, sums ? "reduce_scatter" : "all_gather", n_bytes, 1e6 * best_s,
           1e-9 * (double)n_bytes * (size - 1) / size / best_s);
    fflush(stdout);
    return BL_OK;
}

/* Takes the communicator over. */
static bl_status measure_all(bl_comm *comm, const char *transport)
{
    size_t most = SIZES[BL_COUNT(SIZES) - 1];
    bench b = {.comm = comm, .transport = transport, .whole = malloc(most), .part = malloc(most)};
    bl_device *device = NULL;
    bl_status st = b.whole && b.part ? BL_OK : BL_FAIL(BL_ENOMEM, "%zu bytes", most);

    if (st == BL_OK) memset(b.whole, 0, most);
    if (st == BL_OK) st = bl_device_create_cpu(1, &device);
    if (st == BL_OK) st = bl_stream_create(device, "bench", &b.stream);
    for (int sums = 0; sums < 2; sums++)
        for (size_t i = 0; st == BL_OK && i < BL_COUNT(SIZES); i++)
            st = measure(&b, sums == 1, SIZES[i]);
    bl_stream_destroy(b.stream);
    bl_device_destroy(device);
    bl_comm_destroy(comm);
    free(b.whole);
    free(b.part);
    return st;
}

static void report(const bl_error *error)
{
    fprintf(stderr, "bench_wire: %s\n", error->text);
}

static bl_status run_rank(bl_wire *wire, const char *transport)
{
    bl_comm *comm;
    bl_error error;
    bl_status st = bl_comm_create_wire(wire, &comm);

    if (st == BL_OK) st = measure_all(comm, transport);
    bl_error_save(&error, st);
    if (st != BL_OK) bl_wire_abort(wire, &error);
    bl_status verdict = bl_wire_close(wire);
    return verdict != BL_OK ? verdict : st;
}

/* ---- over sockets: this process starts the ranks ---- */

static int be_rank(int rank, int n, int (*sockets)[MAX_RANKS], int shared_fd)
{
    bl_wire_links links = {.rank = rank,
                           .n_processes = n,
                           .n_on_host = n,
                           .sockets = sockets[rank],
                           .shared_fd = shared_fd};
    bl_wire *wire;

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (int a = 0; a < n; a++)
        for (int b = 0; a != rank && b < n; b++)
            if (a != b) close(sockets[a][b]);
    bl_status st = bl_wire_open_sockets(&links, report, &wire);
    if (st == BL_OK) st = run_rank(wire, shared_fd >= 0 ? "shared" : "sockets");
    return bl_status_exit_code(st);
}

static int run_sockets(int n, bool shared)
{
    int sockets[MAX_RANKS][MAX_RANKS], pair[2], status, code = 0;
    int fd = shared ? memfd_create("bench", MFD_CLOEXEC) : -1;

    for (int a = 0; a < n; a++) {
        sockets[a][a] = -1;
        for (int b = 0; b < a; b++) {
            if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) return 4;
            sockets[a][b] = pair[0];
            sockets[b][a] = pair[1];
        }
    }
    for (int rank = 0; rank < n; rank++)
        if (fork() == 0) _exit(be_rank(rank, n, sockets, fd));
    for (int a = 0; a < n; a++)
        for (int b = 0; b < n; b++)
            if (a != b) close(sockets[a][b]);
    while (wait(&status) > 0)
        if (status != 0) code = 7;
    return code;
}

/* ---- mpirun starts them ---- */

static bl_status run_launched(void)
{
    bl_launch *launch = NULL;
    bl_comm *comm = NULL;

    BL_TRY(bl_launch_open(&(bl_launch_options){.leave = NULL}, &launch));
    bl_status st = bl_launch_create_comm(launch, 0, &comm);
    if (st == BL_OK) st = measure_all(comm, "mpirun");
    return bl_launch_close(launch, st);
}

static int run_mpirun(const char *program, const char *n_text)
{
    bl_launch_info info;

    bl_launch_read(&info);
    if (!info.launcher) {
        execlp("mpirun", "mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none",
               "-n", n_text, program, n_text, "mpirun", NULL);
        perror("mpirun");
        return 4;
    }
    return bl_status_exit_code(run_launched());
}

int main(int argc, char **argv)
{
    int n = argc == 3 ? atoi(argv[1]) : 0;

    if (n < 2 || n > MAX_RANKS) {
        fputs("run it as: bench_wire N sockets|shared|mpirun\n", stderr);
        return 2;
    }
    if (strcmp(argv[2], "mpirun") == 0) return run_mpirun(argv[0], argv[1]);
    return run_sockets(n, strcmp(argv[2], "shared") == 0);
}
