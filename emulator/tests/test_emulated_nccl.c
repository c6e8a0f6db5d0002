/* SPDX-License-Identifier: Apache-2.0 */
/* Transfers of the fake NCCL (README.md), between processes and threads, in splits, groups and on
 * several streams; its log of them; and that it leaves nothing behind. A case runs this program
 * again, once per rank. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <cuda_runtime_api.h>
#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "emulator/emulated.h"
#include "emulator/tests/test_nccl_ranks.h"

#define STRICT     "BALLAST_EMULATED=strict"
#define CONCURRENT "BALLAST_EMULATED=concurrent"
#define SEED(n)    "BALLAST_EMULATED_SEED=" #n

/* More than a ring of the fake holds, and no multiple of anything. */
enum { LARGE_BYTES = 300007, SMALL_BYTES = 1000 };

/* ---- values ---- */

static void gather(const ranks_self *self, ncclComm_t comm, cudaStream_t stream, size_t bytes,
                   bool in_place)
{
    size_t n = (size_t)self->n_ranks;
    char *all = ranks_memory(n * bytes), *own = all + (size_t)self->rank * bytes,
         *send = in_place ? own : ranks_memory(bytes);
    ranks_fill(send, bytes, self->rank);
    NEED_NCCL(ncclAllGather(send, all, bytes, ncclUint8, comm, stream));
    NEED_CUDA(cudaStreamSynchronize(stream));
    for (int rank = 0; rank < self->n_ranks; rank++)
        NEED(ranks_holds(all + (size_t)rank * bytes, bytes, rank));
    if (!in_place) NEED_CUDA(cudaFree(send));
    NEED_CUDA(cudaFree(all));
}

static int gathers(const ranks_self *self)
{
    ncclComm_t comm = ranks_comm(self, 0);
    cudaStream_t stream = ranks_stream();
    for (int i = 0; i < 2; i++) {
        gather(self, comm, stream, LARGE_BYTES, i);
        gather(self, comm, stream, SMALL_BYTES, i);
    }
    ranks_destroy(comm);
    NEED_CUDA(cudaStreamDestroy(stream));
    return 0;
}

static int broadcasts(const ranks_self *self)
{
    ncclComm_t comm = ranks_comm(self, 0);
    cudaStream_t stream = ranks_stream();
    char *memory = ranks_memory(LARGE_BYTES), *other = ranks_memory(LARGE_BYTES);
    for (int root = 0; root < self->n_ranks; root++) {
        ranks_fill(memory, LARGE_BYTES, 100 + self->rank);
        NEED_NCCL(ncclBroadcast(memory, memory, LARGE_BYTES, ncclInt8, root, comm, stream));
        NEED_NCCL(ncclBroadcast(memory, other, LARGE_BYTES / 4, ncclFloat32, root, comm, stream));
        NEED_CUDA(cudaStreamSynchronize(stream));
        NEED(ranks_holds(memory, LARGE_BYTES, 100 + root));
        NEED(ranks_holds(other, LARGE_BYTES / 4 * 4, 100 + root));
    }
    ranks_destroy(comm);
    return 0;
}

/* The last rank reads slowly; no rank is ahead of it by more than a ring. */
static int gathers_much(const ranks_self *self)
{
    if (self->rank == self->n_ranks - 1) NEED(setenv("BALLAST_EMULATED_SEED", "1", 1) == 0);
    ncclComm_t comm = ranks_comm(self, 0);
    cudaStream_t stream = ranks_stream();
    gather(self, comm, stream, 10 * LARGE_BYTES, true);
    ranks_destroy(comm);
    return 0;
}

/* Each rank sends each rank, itself included, a part whose size depends on both; then a piece to
 * the next rank only. */
static size_t part_bytes(int from, int to)
{
    return (size_t)(LARGE_BYTES / 8 * (from + 1) + 13 * to);
}

static int exchanges(const ranks_self *self)
{
    ncclComm_t comm = ranks_comm(self, 0);
    cudaStream_t stream = ranks_stream();
    int n = self->n_ranks, rank = self->rank;
    char *out[RANKS_MAX], *in[RANKS_MAX];
    for (int peer = 0; peer < n; peer++) {
        out[peer] = ranks_memory(part_bytes(rank, peer));
        in[peer] = ranks_memory(part_bytes(peer, rank));
        ranks_fill(out[peer], part_bytes(rank, peer), 10 * rank + peer);
    }
    NEED_NCCL(ncclGroupStart());
    for (int peer = 0; peer < n; peer++) {
        NEED_NCCL(ncclSend(out[peer], part_bytes(rank, peer), ncclUint8, peer, comm, stream));
        NEED_NCCL(ncclRecv(in[peer], part_bytes(peer, rank), ncclUint8, peer, comm, stream));
    }
    NEED_NCCL(ncclGroupEnd());
    NEED_CUDA(cudaStreamSynchronize(stream));
    for (int peer = 0; peer < n; peer++)
        NEED(ranks_holds(in[peer], part_bytes(peer, rank), 10 * peer + rank));
    if (rank > 0)
        NEED_NCCL(ncclRecv(in[0], SMALL_BYTES, ncclUint8, rank - 1, comm, stream));
    else
        ranks_fill(in[0], SMALL_BYTES, 77);
    if (rank < n - 1) NEED_NCCL(ncclSend(in[0], SMALL_BYTES, ncclUint8, rank + 1, comm, stream));
    NEED_CUDA(cudaStreamSynchronize(stream));
    NEED(ranks_holds(in[0], SMALL_BYTES, 77));
    ranks_destroy(comm);
    return 0;
}

static void test_values(void **state)
{
    static const char *const names[] = {"gathers", "broadcasts", "exchanges"};
    (void)state;
    for (int i = 0; i < 3; i++)
        for (int n_ranks = 2; n_ranks <= 8; n_ranks *= 2) {
            ranks_outcome o = RANKS(names[i], n_ranks, CONCURRENT);
            ranks_assert_fine(&o, n_ranks);
        }
}

static void test_values_strict_and_delayed(void **state)
{
    static const char *const names[] = {"gathers", "broadcasts", "exchanges"};
    (void)state;
    for (int i = 0; i < 3; i++) {
        ranks_outcome o = RANKS(names[i], 4, STRICT);
        ranks_assert_fine(&o, 4);
        o = RANKS(names[i], 3, CONCURRENT, SEED(7));
        ranks_assert_fine(&o, 3);
        o = RANKS(names[i], 1, CONCURRENT);
        ranks_assert_fine(&o, 1);
    }
    ranks_outcome o = RANKS("gathers_much", 3, CONCURRENT);
    ranks_assert_fine(&o, 3);
}

/* ---- splits ---- */

static void check_gather(const ranks_self *self, ncclComm_t comm, int rank, int n_ranks,
                         const int *seeds)
{
    cudaStream_t stream = ranks_stream();
    char *all = ranks_memory((size_t)n_ranks * SMALL_BYTES);
    int said_rank, said_n, device;
    NEED_NCCL(ncclCommUserRank(comm, &said_rank));
    NEED_NCCL(ncclCommCount(comm, &said_n));
    NEED_NCCL(ncclCommCuDevice(comm, &device));
    NEED(said_rank == rank && said_n == n_ranks && device == self->rank);
    ranks_fill(all + rank * SMALL_BYTES, SMALL_BYTES, self->rank);
    NEED_NCCL(ncclAllGather(all + rank * SMALL_BYTES, all, SMALL_BYTES, ncclUint8, comm, stream));
    NEED_CUDA(cudaStreamSynchronize(stream));
    for (int r = 0; r < n_ranks; r++)
        NEED(ranks_holds(all + r * SMALL_BYTES, SMALL_BYTES, seeds[r]));
    NEED_CUDA(cudaFree(all));
    NEED_CUDA(cudaStreamDestroy(stream));
}

/* Of six: even and odd ones, backwards; of the even ones a pair, and one that has none. */
static int splits(const ranks_self *self)
{
    ncclComm_t comm = ranks_comm(self, 0), half, pair;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    int odd = self->rank % 2, place = self->rank / 2;

    NEED_NCCL(ncclCommSplit(comm, odd, -self->rank, &half, NULL));
    check_gather(self, half, 2 - place, 3, (int[]){4 + odd, 2 + odd, odd});
    if (!odd) {
        config.commName = "pair";
        NEED_NCCL(ncclCommSplit(half, place == 1 ? NCCL_SPLIT_NOCOLOR : 5, 0, &pair, &config));
        NEED((pair == NULL) == (place == 1));
        if (pair) check_gather(self, pair, place == 2 ? 0 : 1, 2, (int[]){4, 0});
        if (pair) ranks_destroy(pair);
    }
    check_gather(self, comm, self->rank, 6, (int[]){0, 1, 2, 3, 4, 5});
    ranks_destroy(half);
    ranks_destroy(comm);
    return 0;
}

static void test_splits(void **state)
{
    (void)state;
    ranks_outcome o = RANKS("splits", 6, CONCURRENT);
    ranks_assert_fine(&o, 6);
    o = RANKS("splits", 6, STRICT);
    ranks_assert_fine(&o, 6);
}

/* ---- several communicators, streams and threads ---- */

/* The same collectives of two communicators, each on its stream, in another order on every second
 * rank; many of them, so that the streams are deep in work. */
static int interleaves(const ranks_self *self)
{
    enum { N = 40 };
    ncclComm_t comms[2] = {ranks_comm(self, 0), ranks_comm(self, 1)};
    cudaStream_t streams[2] = {ranks_stream(), ranks_stream()};
    size_t n = (size_t)self->n_ranks;
    char *all[2] = {ranks_memory(N * n * SMALL_BYTES), ranks_memory(N * n * SMALL_BYTES)};

    for (int c = 0; c < 2; c++)
        for (size_t i = 0; i < N; i++)
            ranks_fill(all[c] + (i * n + (size_t)self->rank) * SMALL_BYTES, SMALL_BYTES,
                       c + (int)i + self->rank);
    for (int c = 0; c < 2; c++)
        for (size_t i = 0; i < N; i++) {
            int which = c ^ (self->rank & 1);
            NEED_NCCL(ranks_gather(self, all[which] + i * n * SMALL_BYTES, SMALL_BYTES,
                                   comms[which], streams[which]));
        }
    for (int c = 0; c < 2; c++) NEED_CUDA(cudaStreamSynchronize(streams[c]));
    for (int c = 0; c < 2; c++)
        for (size_t i = 0; i < N * n; i++)
            NEED(ranks_holds(all[c] + i * SMALL_BYTES, SMALL_BYTES,
                             c + (int)(i / n) + (int)(i % n)));
    for (int c = 0; c < 2; c++) ranks_destroy(comms[c]);
    return 0;
}

static void test_two_communicators(void **state)
{
    (void)state;
    ranks_outcome o = RANKS("interleaves", 3, CONCURRENT);
    ranks_assert_fine(&o, 3);
    o = RANKS("interleaves", 4, CONCURRENT, SEED(11));
    ranks_assert_fine(&o, 4);
}

/* One communicator on two streams: the second broadcast sends the data that the first received, and
 * no event orders the streams. */
static int orders_streams(const ranks_self *self)
{
    ncclComm_t comm = ranks_comm(self, 0);
    cudaStream_t first = ranks_stream(), second = ranks_stream();
    char *memory = ranks_memory(LARGE_BYTES);
    ranks_fill(memory, LARGE_BYTES, self->rank);
    NEED_NCCL(ncclBroadcast(memory, memory, LARGE_BYTES, ncclUint8, 0, comm, first));
    NEED_NCCL(ncclBroadcast(memory, memory, LARGE_BYTES, ncclUint8, 1, comm, second));
    NEED_CUDA(cudaStreamSynchronize(second));
    NEED(ranks_holds(memory, LARGE_BYTES, 0));
    ranks_destroy(comm);
    return 0;
}

static void test_streams_of_one_communicator(void **state)
{
    (void)state;
    ranks_outcome o = RANKS("orders_streams", 2, CONCURRENT);
    ranks_assert_fine(&o, 2);
    o = RANKS("orders_streams", 2, CONCURRENT, SEED(3));
    ranks_assert_fine(&o, 2);
}

typedef struct thread_rank {
    ranks_self self;
    pthread_t thread;
} thread_rank;

static void *run_thread_rank(void *argument)
{
    const ranks_self *self = argument;
    ncclComm_t comm = ranks_comm(self, 0);
    check_gather(self, comm, self->rank, self->n_ranks, (int[]){0, 1, 2});
    ranks_destroy(comm);
    return NULL;
}

/* Three threads of one process, with a GPU each. */
static int is_three_ranks(const ranks_self *self)
{
    thread_rank ranks[3];
    for (int i = 0; i < 3; i++) {
        ranks[i].self = (ranks_self){.rank = i, .n_ranks = 3, .board = self->board};
        NEED(pthread_create(&ranks[i].thread, NULL, run_thread_rank, &ranks[i].self) == 0);
    }
    for (int i = 0; i < 3; i++) NEED(pthread_join(ranks[i].thread, NULL) == 0);
    return 0;
}

static void test_threads(void **state)
{
    (void)state;
    ranks_outcome o = RANKS("is_three_ranks", 1, CONCURRENT);
    ranks_assert_fine(&o, 1);
    o = RANKS("is_three_ranks", 1, STRICT);
    ranks_assert_fine(&o, 1);
}

/* ---- groups ---- */

/* In a group: two gathers, and sends and receives around them, of two communicators, each rank
 * naming them in another order; two parts to the same peer, which arrive in order. */
static int groups(const ranks_self *self)
{
    ncclComm_t comms[2] = {ranks_comm(self, 0), ranks_comm(self, 1)};
    cudaStream_t streams[2] = {ranks_stream(), ranks_stream()};
    int other = 1 - self->rank;
    char *all = ranks_memory(2 * SMALL_BYTES), *out = ranks_memory(2 * LARGE_BYTES),
         *in = ranks_memory(2 * LARGE_BYTES);
    ranks_fill(all + self->rank * SMALL_BYTES, SMALL_BYTES, self->rank);
    ranks_fill(out, LARGE_BYTES, 10 + self->rank);
    ranks_fill(out + LARGE_BYTES, LARGE_BYTES, 20 + self->rank);
    NEED_NCCL(ncclGroupStart());
    if (self->rank == 0) NEED_NCCL(ranks_gather(self, all, SMALL_BYTES, comms[0], streams[0]));
    NEED_NCCL(ncclGroupStart());
    for (int i = 0; i < 2; i++) {
        NEED_NCCL(
            ncclSend(out + i * LARGE_BYTES, LARGE_BYTES, ncclUint8, other, comms[1], streams[1]));
        NEED_NCCL(
            ncclRecv(in + i * LARGE_BYTES, LARGE_BYTES, ncclUint8, other, comms[1], streams[1]));
    }
    NEED_NCCL(ncclGroupEnd());
    NEED_CUDA(cudaStreamSynchronize(streams[1])); /* nothing is launched before the outermost end */
    if (self->rank == 1) NEED_NCCL(ranks_gather(self, all, SMALL_BYTES, comms[0], streams[0]));
    NEED_NCCL(ncclGroupEnd());
    for (int i = 0; i < 2; i++) NEED_CUDA(cudaStreamSynchronize(streams[i]));
    for (int i = 0; i < 2; i++) NEED(ranks_holds(all + i * SMALL_BYTES, SMALL_BYTES, i));
    NEED(ranks_holds(in, LARGE_BYTES, 10 + other));
    NEED(ranks_holds(in + LARGE_BYTES, LARGE_BYTES, 20 + other));
    for (int i = 0; i < 2; i++) ranks_destroy(comms[i]);
    return 0;
}

static void test_groups(void **state)
{
    (void)state;
    ranks_outcome o = RANKS("groups", 2, CONCURRENT);
    ranks_assert_fine(&o, 2);
}

/* ---- the log ---- */

static int is_logged(const ranks_self *self)
{
    ncclComm_t comm = ranks_comm(self, 0);
    cudaStream_t stream = ranks_stream();
    char *all = ranks_memory(2 * SMALL_BYTES), *own = all + self->rank * SMALL_BYTES;
    NEED_NCCL(ranks_gather(self, all, SMALL_BYTES, comm, stream));
    NEED_NCCL(ncclBroadcast(all, all, 12, ncclUint8, 1, comm, stream));
    if (self->rank == 0)
        NEED_NCCL(ncclSend(own, 34, ncclUint8, 1, comm, stream));
    else
        NEED_NCCL(ncclRecv(own, 34, ncclUint8, 0, comm, stream));
    ranks_destroy(comm);
    return 0;
}

static void read_text(const char *path, char *text, size_t text_bytes)
{
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    text[fread(text, 1, text_bytes - 1, file)] = '\0';
    fclose(file);
}

static void test_log_and_counts(void **state)
{
    char folder[] = "/tmp/test_emulated_nccl.XXXXXX", log[64], counts[64], path[80], text[2][4096];
    (void)state;
    assert_non_null(mkdtemp(folder));
    snprintf(log, sizeof log, "BALLAST_EMULATED_NCCL_LOG=%s/log", folder);
    snprintf(counts, sizeof counts, "BALLAST_EMULATED_COUNTS=%s/counts", folder);
    ranks_outcome o = RANKS("is_logged", 2, log, counts);
    ranks_assert_fine(&o, 2);
    for (int rank = 0; rank < 2; rank++) {
        snprintf(path, sizeof path, "%s/log.%d", folder, rank);
        read_text(path, text[rank], sizeof text[rank]);
        unlink(path);
    }
    /* From the communicator's name on all is the same on both ranks, until one sends and the other
     * receives. */
    char *first = strstr(text[0], "launch"), *second = strstr(text[1], "launch");
    assert_true(first && second);
    char *end = strstr(first, "pairs");
    assert_true(end && strncmp(first, second, (size_t)(end - first)) == 0);
    assert_non_null(strstr(first, "all_gather 1000 root=0 stream=0 kernel"));
    assert_non_null(strstr(first, "broadcast 12 root=1 stream=0 kernel"));
    assert_non_null(strstr(first, "pairs send:1:34 stream=0"));
    assert_non_null(strstr(second, "pairs recv:0:34 stream=0"));
    snprintf(path, sizeof path, "%s/counts", folder);
    read_text(path, text[0], sizeof text[0]);
    assert_non_null(strstr(text[0], "nccl:all_gather:kernel 1 1000\n"));
    assert_non_null(strstr(text[0], "nccl:broadcast:kernel 1 12\n"));
    unlink(path);
    assert_int_equal(rmdir(folder), 0);
}

/* ---- nothing is left ---- */

static int count_entries(const char *folder)
{
    int n = 0;
    DIR *dir = opendir(folder);
    NEED(dir);
    while (readdir(dir)) n++;
    closedir(dir);
    return n;
}

/* A communicator that was made and destroyed leaves no descriptor open and no memory mapped. */
static int leaves_nothing(const ranks_self *self)
{
    ncclComm_t first = ranks_comm(self, 0), comm, half;
    cudaStream_t stream = ranks_stream();
    gather(self, first, stream, SMALL_BYTES, true); /* opens the files that stay open */
    int before = count_entries("/proc/self/fd");
    comm = ranks_comm(self, 1);
    NEED_NCCL(ncclCommSplit(comm, self->rank % 2, 0, &half, NULL));
    gather(self, comm, stream, SMALL_BYTES, true);
    ranks_destroy(half);
    ranks_destroy(comm);
    NEED(count_entries("/proc/self/fd") == before);
    ranks_destroy(first);
    return 0;
}

static void test_nothing_is_left(void **state)
{
    (void)state;
    ranks_outcome o = RANKS("leaves_nothing", 4, CONCURRENT);
    ranks_assert_fine(&o, 4);
}

static const ranks_case cases[] = {
    {"gathers", gathers},
    {"gathers_much", gathers_much},
    {"broadcasts", broadcasts},
    {"exchanges", exchanges},
    {"splits", splits},
    {"interleaves", interleaves},
    {"orders_streams", orders_streams},
    {"is_three_ranks", is_three_ranks},
    {"groups", groups},
    {"is_logged", is_logged},
    {"leaves_nothing", leaves_nothing},
    {NULL, NULL},
};

int main(int argc, char **argv)
{
    ranks_become(argc, argv, cases);
    if (!emulated_cuda_have_devices(8)) return 77;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_values_strict_and_delayed),
        cmocka_unit_test(test_splits),
        cmocka_unit_test(test_two_communicators),
        cmocka_unit_test(test_streams_of_one_communicator),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_groups),
        cmocka_unit_test(test_log_and_counts),
        cmocka_unit_test(test_nothing_is_left),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
