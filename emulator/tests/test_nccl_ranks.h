/* SPDX-License-Identifier: Apache-2.0 */
/* test_nccl_ranks.h -- a function as N processes, each with an emulated GPU: this program again,
 * once a rank (the emulated GPU has threads, so that a fork alone would not do). For tests of the
 * fake NCCL. */
#ifndef BALLAST_TESTS_EMULATE_TEST_NCCL_RANKS_H
#define BALLAST_TESTS_EMULATE_TEST_NCCL_RANKS_H

#include <nccl.h>
#include <stdatomic.h>
#include <stdbool.h>

enum { RANKS_MAX = 8, RANKS_IDS = 4, RANKS_MARKS = 32, RANKS_TEXT_BYTES = 4096 };

/* Memory that the ranks of a run share, besides the fake NCCL's. */
typedef struct ranks_board {
    ncclUniqueId ids[RANKS_IDS];
    atomic_int has_id[RANKS_IDS];
    atomic_int marks[RANKS_MARKS];
    atomic_int pids[RANKS_MAX]; /* 0: not started yet */
} ranks_board;

typedef struct ranks_self {
    int rank, n_ranks;
    ranks_board *board;
} ranks_self;

/* A rank's whole process; its exit code. */
typedef int (*ranks_body)(const ranks_self *self);
typedef struct ranks_case {
    const char *name;
    ranks_body body;
} ranks_case;

/* The result of a run. */
typedef struct ranks_outcome {
    int status[RANKS_MAX];                  /* as waitpid has it */
    char text[RANKS_MAX][RANKS_TEXT_BYTES]; /* stderr */
} ranks_outcome;

/* The case as n_ranks processes with these settings ("NAME=value", then NULL). Returns when all
 * have ended; those that hang are killed after three minutes, and those that do not run at all
 * after four: the test fails. */
ranks_outcome ranks_run(const char *name, int n_ranks, const char *const *settings);
#define RANKS(name, n_ranks, ...) ranks_run(name, n_ranks, (const char *const[]){__VA_ARGS__, NULL})

void ranks_assert_fine(const ranks_outcome *o, int n_ranks);
void ranks_assert_others_fine(const ranks_outcome *o, int n_ranks, int but);
/* A rank ended by this signal (0: with an exit code other than 0), with `line` on stderr. */
/* Rank's exit code. */
int ranks_code(const ranks_outcome *o, int rank);
void ranks_assert_failed(const ranks_outcome *o, int rank, int signal_number, const char *line);

/* In main, before anything else: when this process is a rank, it runs its case and exits. */
void ranks_become(int argc, char **argv, const ranks_case *cases);

/* ---- for bodies ---- */

/* Ends the process with exit code 1 and the expression when it is not so. */
#define NEED(expression)                                                                           \
    do {                                                                                           \
        if (!(expression)) ranks_give_up(__FILE__, __LINE__, #expression);                         \
    } while (0)
#define NEED_NCCL(call) NEED((call) == ncclSuccess)
#define NEED_CUDA(call) NEED((call) == cudaSuccess)
_Noreturn void ranks_give_up(const char *file, int line, const char *expression);

/* One more at this mark; waiting until so many were. */
void ranks_mark(const ranks_self *self, int mark);
void ranks_await(const ranks_self *self, int mark, int n);

/* Waits until that rank's process has ended; until it is stopped, or has ended. */
void ranks_await_end(const ranks_self *self, int rank);
void ranks_await_stop(const ranks_self *self, int rank);

/* Id number i of the board, made by rank 0. */
ncclUniqueId ranks_id(const ranks_self *self, int i);
/* The communicator of all ranks with that id, on GPU `rank`, which becomes current. */
ncclComm_t ranks_comm(const ranks_self *self, int i);

/* The end of a communicator in good order. */
void ranks_destroy(ncclComm_t comm);

cudaStream_t ranks_stream(void);
/* Device memory with `bytes` bytes, and copies of host memory to and from it, which wait. */
char *ranks_memory(size_t bytes);
void ranks_fill(char *memory, size_t bytes, int seed);
/* Whether it has what fill(seed) wrote. */
bool ranks_holds(const char *memory, size_t bytes, int seed);

/* All-gather in place of `bytes` a rank, in memory of n_ranks * bytes. */
ncclResult_t ranks_gather(const ranks_self *self, char *all, size_t bytes, ncclComm_t comm,
                          cudaStream_t stream);

/* Whether the stream's work is over; false may also be said of a stream that only now ends. */
bool ranks_is_idle(cudaStream_t stream);
/* A while, in which what does not hang would have ended: long enough to see a fault mostly, never a
 * reason to fail. */
void ranks_nap(void);

#endif
