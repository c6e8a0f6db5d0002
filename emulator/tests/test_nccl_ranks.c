/* SPDX-License-Identifier: Apache-2.0 */
/* test_nccl_ranks.c -- starts this program again as N ranks, watches their states in /proc, and
 * ends those that hang. */
#include "emulator/tests/test_nccl_ranks.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { BOARD_FD = 40, PINNED_BYTES = 4 << 20, NAP_MS = 300 };
/* After HANG_S a rank's alarm ends it; after KILL_S the parent does: a process that is stopped
 * takes no alarm. */
enum { HANG_S = 180, KILL_S = 240 };

static const char DEVICES[] = "BALLAST_EMULATED_DEVICES=8";

static void nap_ms(long ms)
{
    nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000}, NULL);
}

/* As /proc has it: 'R', 'T' is stopped, 'Z' ended. */
static char state_of(int pid)
{
    char path[64], state;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "r");
    if (!file) return 'Z';
    if (fscanf(file, "%*d %*s %c", &state) != 1) state = 'Z';
    fclose(file);
    return state;
}

/* ---- the parent ---- */

static ranks_board *make_board(int *fd)
{
    *fd = memfd_create("board", MFD_CLOEXEC);
    assert_true(*fd >= 0);
    assert_int_equal(ftruncate(*fd, sizeof(ranks_board)), 0);
    ranks_board *board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
    assert_ptr_not_equal(board, MAP_FAILED);
    return board;
}

static pid_t start(const char *name, int rank, int n_ranks, const char *const *settings,
                   int board_fd, int stderr_fd)
{
    char rank_text[16], n_text[16], parent[16];
    snprintf(rank_text, sizeof rank_text, "%d", rank);
    snprintf(n_text, sizeof n_text, "%d", n_ranks);
    snprintf(parent, sizeof parent, "%d", (int)getpid());
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child > 0) return child;
    putenv((char *)(uintptr_t)DEVICES);
    for (; *settings; settings++) putenv((char *)(uintptr_t)*settings);
    dup2(stderr_fd, STDERR_FILENO);
    dup2(board_fd, BOARD_FD);
    execl("/proc/self/exe", "rank", name, rank_text, n_text, parent, (char *)NULL);
    _exit(127);
}

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* False: the process had to be killed; *state is its state before that. */
static bool wait_for(pid_t pid, double end_s, int *status, char *state)
{
    pid_t ended;
    while ((ended = waitpid(pid, status, WNOHANG)) == 0 && now_s() < end_s) nap_ms(2);
    if (ended == 0) {
        *state = state_of(pid);
        kill(pid, SIGKILL);
        assert_int_equal(waitpid(pid, status, 0), pid);
        return false;
    }
    assert_int_equal(ended, pid);
    return true;
}

ranks_outcome ranks_run(const char *name, int n_ranks, const char *const *settings)
{
    ranks_outcome out;
    int board_fd, stderr_fds[RANKS_MAX];
    ranks_board *board = make_board(&board_fd);
    pid_t pids[RANKS_MAX];
    bool have_ended = true;

    memset(&out, 0, sizeof out);
    for (int rank = 0; rank < n_ranks; rank++) {
        stderr_fds[rank] = memfd_create("stderr", MFD_CLOEXEC);
        assert_true(stderr_fds[rank] >= 0);
        pids[rank] = start(name, rank, n_ranks, settings, board_fd, stderr_fds[rank]);
    }
    double end_s = now_s() + KILL_S;
    for (int rank = 0; rank < n_ranks; rank++) {
        char state;
        bool has_ended = wait_for(pids[rank], end_s, &out.status[rank], &state);
        (void)!pread(stderr_fds[rank], out.text[rank], RANKS_TEXT_BYTES - 1, 0);
        close(stderr_fds[rank]);
        if (has_ended) continue;
        print_error("%s: rank %d had not ended after %d s, state %c: %s\n", name, rank, KILL_S,
                    state, out.text[rank]);
        have_ended = false;
    }
    munmap(board, sizeof *board);
    close(board_fd);
    assert_true(have_ended);
    return out;
}

void ranks_assert_fine(const ranks_outcome *o, int n_ranks)
{
    ranks_assert_others_fine(o, n_ranks, -1);
}

void ranks_assert_others_fine(const ranks_outcome *o, int n_ranks, int but)
{
    bool is_fine = true;
    for (int rank = 0; rank < n_ranks; rank++) {
        if (rank == but) continue;
        if (WIFEXITED(o->status[rank]) && WEXITSTATUS(o->status[rank]) == 0) continue;
        print_error("rank %d: status %#x: %s\n", rank, (unsigned)o->status[rank], o->text[rank]);
        is_fine = false;
    }
    assert_true(is_fine);
}

void ranks_assert_failed(const ranks_outcome *o, int rank, int signal_number, const char *line)
{
    int status = o->status[rank];
    bool is_so = signal_number ? WIFSIGNALED(status) && WTERMSIG(status) == signal_number
                               : WIFEXITED(status) && WEXITSTATUS(status) != 0;
    if (!is_so || !strstr(o->text[rank], line))
        fail_msg("rank %d: status %#x: %s", rank, (unsigned)status, o->text[rank]);
}

int ranks_code(const ranks_outcome *o, int rank)
{
    if (!WIFEXITED(o->status[rank]))
        fail_msg("rank %d: status %#x: %s", rank, (unsigned)o->status[rank], o->text[rank]);
    return WEXITSTATUS(o->status[rank]);
}

/* ---- the ranks ---- */

void ranks_become(int argc, char **argv, const ranks_case *cases)
{
    if (argc != 5 || strcmp(argv[0], "rank") != 0) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != atoi(argv[4])) _exit(1);
    alarm(HANG_S);
    ranks_self self = {.rank = atoi(argv[2]), .n_ranks = atoi(argv[3])};
    self.board = mmap(NULL, sizeof *self.board, PROT_READ | PROT_WRITE, MAP_SHARED, BOARD_FD, 0);
    NEED(self.board != MAP_FAILED);
    atomic_store(&self.board->pids[self.rank], (int)getpid());
    for (; cases->name; cases++)
        if (strcmp(cases->name, argv[1]) == 0) exit(cases->body(&self));
    NEED(!"a case of this name");
}

void ranks_give_up(const char *file, int line, const char *expression)
{
    fprintf(stderr, "%s:%d: not so: %s (%s)\n", file, line, expression, ncclGetLastError(NULL));
    fflush(NULL);
    _exit(1);
}

void ranks_nap(void)
{
    nap_ms(NAP_MS);
}

void ranks_mark(const ranks_self *self, int mark)
{
    atomic_fetch_add(&self->board->marks[mark], 1);
}

void ranks_await(const ranks_self *self, int mark, int n)
{
    while (atomic_load(&self->board->marks[mark]) < n) nap_ms(1);
}

/* Of a process that is gone, and of a zombie, 'Z': the parent looks at the ranks one after the
 * other. */
static void await_state(const ranks_self *self, int rank, char wanted)
{
    const atomic_int *pid = &self->board->pids[rank];
    while (atomic_load(pid) == 0) nap_ms(1);
    for (char state = 'R'; state != wanted && state != 'Z'; state = state_of(atomic_load(pid)))
        nap_ms(1);
}

void ranks_await_end(const ranks_self *self, int rank)
{
    await_state(self, rank, 'Z');
}

void ranks_await_stop(const ranks_self *self, int rank)
{
    await_state(self, rank, 'T');
}

ncclUniqueId ranks_id(const ranks_self *self, int i)
{
    ranks_board *board = self->board;
    if (self->rank == 0) {
        NEED_NCCL(ncclGetUniqueId(&board->ids[i]));
        atomic_store(&board->has_id[i], 1);
    }
    while (!atomic_load(&board->has_id[i])) nap_ms(1);
    return board->ids[i];
}

ncclComm_t ranks_comm(const ranks_self *self, int i)
{
    ncclComm_t comm;
    ncclUniqueId id = ranks_id(self, i);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    NEED_CUDA(cudaSetDevice(self->rank));
    NEED_NCCL(ncclCommInitRankConfig(&comm, self->n_ranks, id, self->rank, &config));
    return comm;
}

void ranks_destroy(ncclComm_t comm)
{
    NEED_NCCL(ncclCommFinalize(comm));
    NEED_NCCL(ncclCommDestroy(comm));
}

ncclResult_t ranks_gather(const ranks_self *self, char *all, size_t bytes, ncclComm_t comm,
                          cudaStream_t stream)
{
    return ncclAllGather(all + (size_t)self->rank * bytes, all, bytes, ncclUint8, comm, stream);
}

cudaStream_t ranks_stream(void)
{
    cudaStream_t stream;
    NEED_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}

char *ranks_memory(size_t bytes)
{
    void *memory;
    NEED_CUDA(cudaMalloc(&memory, bytes));
    return memory;
}

static char *pinned(void)
{
    static _Thread_local char *memory;
    if (memory) return memory;
    memory = mmap(NULL, PINNED_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    NEED(memory != MAP_FAILED);
    NEED_CUDA(
        cudaHostRegister(memory, PINNED_BYTES, cudaHostRegisterPortable | cudaHostRegisterMapped));
    return memory;
}

/* Without a period that the size of a ring could hide. */
static char value_of(size_t i, int seed)
{
    uint64_t x = ((uint64_t)i * 256 + (unsigned)seed) * 0x9E3779B97F4A7C15u;
    return (char)(x >> 56);
}

static void copy(char *to, const char *from, size_t bytes)
{
    cudaStream_t stream = ranks_stream();
    NEED(bytes <= PINNED_BYTES);
    NEED_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream));
    NEED_CUDA(cudaStreamSynchronize(stream));
    NEED_CUDA(cudaStreamDestroy(stream));
}

void ranks_fill(char *memory, size_t bytes, int seed)
{
    char *host = pinned();
    for (size_t i = 0; i < bytes; i++) host[i] = value_of(i, seed);
    copy(memory, host, bytes);
}

bool ranks_holds(const char *memory, size_t bytes, int seed)
{
    char *host = pinned();
    copy(host, memory, bytes);
    for (size_t i = 0; i < bytes; i++)
        if (host[i] != value_of(i, seed)) return false;
    return true;
}

bool ranks_is_idle(cudaStream_t stream)
{
    cudaEvent_t event;
    NEED_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    NEED_CUDA(cudaEventRecord(event, stream));
    nap_ms(1);
    return cudaEventQuery(event) == cudaSuccess; /* kept: it may never be reached */
}
