/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that ranks of a host share: one writes and the others read, if all make the same calls;
 * rejections by their text; the same calls of a rank alone. Ranks are threads, each of which maps
 * one memory file separately, and processes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <dirent.h>
#include <fcntl.h>
#include <glob.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/sizes.h"
#include "comm/host_memory.h"
#include "host_ranks.h"
#include "skip.h"

static const double LONG_WORK_DEADLINE_S = 10;
static const int rank_counts[] = {1, 2, 3, 4};

static int memory_file(void)
{
    int fd = memfd_create("test_host_memory", MFD_CLOEXEC);
    assert_true(fd >= 0);
    return fd;
}

/* Whether a memory file takes huge pages, whatever its size: then it has more blocks than bytes. */
static bool has_huge_files(void)
{
    static const char *const patterns[] = {
        "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
        "/sys/kernel/mm/transparent_hugepage/hugepages-*/shmem_enabled"};
    glob_t found = {0};
    bool has = false;

    for (size_t i = 0; i < BL_COUNT(patterns); i++)
        (void)glob(patterns[i], i ? GLOB_APPEND : 0, NULL, &found);
    for (size_t i = 0; i < found.gl_pathc; i++) {
        char line[128] = "";
        FILE *file = fopen(found.gl_pathv[i], "r");
        if (file && !fgets(line, sizeof line, file)) line[0] = '\0';
        if (file) fclose(file);
        has |= strstr(line, "[always]") || strstr(line, "[force]");
    }
    globfree(&found);
    return has;
}

/* Runs fn as ranks that have fd. */
static bl_status run(int n_ranks, test_rank_fn fn, int *fd, bl_error *errors)
{
    return test_ranks_run(n_ranks, 1, 60, fn, fd, errors);
}

static bl_status open_memory(const test_rank *self, bl_host_memory **out)
{
    return bl_host_memory_open(*(const int *)self->arg, self->comm, out);
}

/* ---- pieces ---- */

/* Of sizes around a page: zeros at first; then each rank fills its part, and all see all. */
static bl_status fill_parts(test_rank *self)
{
    static const size_t sizes[] = {1, 100, 4095, 4096, 4097, 3 << 20};
    char *piece[BL_COUNT(sizes)];
    bl_host_memory *memory;
    bl_status st = BL_OK;

    BL_TRY(open_memory(self, &memory));
    TEST_CHECK((memory == NULL) == (self->n_ranks == 1));
    TEST_CHECK(bl_host_memory_rank(memory) == self->rank);
    TEST_CHECK(bl_host_memory_size(memory) == self->n_ranks);
    for (size_t i = 0; i < BL_COUNT(sizes); i++) {
        BL_TRY_GOTO(st, done, bl_host_memory_take(memory, sizes[i], "a test", (void **)&piece[i]));
        TEST_CHECK_GOTO(st, done, (uintptr_t)piece[i] % 4096 == 0);
        size_t begin = sizes[i] * (size_t)self->rank / (size_t)self->n_ranks,
               end = sizes[i] * ((size_t)self->rank + 1) / (size_t)self->n_ranks;
        for (size_t k = begin; k < end; k++) {
            TEST_CHECK_GOTO(st, done, piece[i][k] == 0);
            piece[i][k] = (char)(k * 7 + i);
        }
    }
    for (size_t i = 0; i < BL_COUNT(sizes); i++)
        BL_TRY_GOTO(st, done, bl_host_memory_seal(memory, piece[i], sizes[i]));
    for (size_t i = 0; i < BL_COUNT(sizes); i++)
        for (size_t k = 0; k < sizes[i]; k++)
            TEST_CHECK_GOTO(st, done, piece[i][k] == (char)(k * 7 + i));
    for (size_t i = 0; i < BL_COUNT(sizes); i++) bl_host_memory_return(piece[i], sizes[i]);
done:
    bl_host_memory_close(memory);
    return st;
}

static void check_pieces(int n_ranks, struct stat *info)
{
    int fd = memory_file();

    assert_int_equal(run(n_ranks, fill_parts, &fd, NULL), BL_OK);
    assert_int_equal(fstat(fd, info), 0);
    /* Each byte once, whatever the number of ranks: the pieces in whole pages, and the header. */
    assert_int_equal(info->st_size, n_ranks == 1 ? 0 : (1 + 1 + 1 + 1 + 2 + 768 + 1) * 4096);
    close(fd);
}

static void test_pieces(void **state)
{
    struct stat info;

    (void)state;
    for (size_t i = 0; i < BL_COUNT(rank_counts); i++) check_pieces(rank_counts[i], &info);
}

static void test_memory_taken(void **state)
{
    struct stat info;

    (void)state;
    if (has_huge_files()) TEST_SKIP("shmem_enabled: memory files take huge pages here");
    for (size_t i = 0; i < BL_COUNT(rank_counts); i++) {
        check_pieces(rank_counts[i], &info);
        assert_int_equal(info.st_blocks * 512, info.st_size);
    }
}

/* Without a file every rank has separate memory. */
static bl_status fill_own(test_rank *self)
{
    bl_host_memory *memory;
    int *piece;

    BL_TRY(open_memory(self, &memory));
    TEST_CHECK(!memory && bl_host_memory_bytes(memory) == 0);
    BL_TRY(bl_host_memory_take(memory, sizeof *piece, "a test", (void **)&piece));
    *piece = self->rank;
    BL_TRY(bl_host_memory_seal(memory, piece, sizeof *piece));
    BL_TRY(bl_comm_barrier(self->comm, self->stream));
    BL_TRY(bl_stream_synchronize(self->stream));
    TEST_CHECK(*piece == self->rank);
    bl_host_memory_return(piece, sizeof *piece);
    return BL_OK;
}

static void test_without_a_file(void **state)
{
    int fd = -1;

    (void)state;
    assert_int_equal(run(3, fill_own, &fd, NULL), BL_OK);
}

static bl_status publish(test_rank *self)
{
    bl_host_memory *memory;
    bl_status st = BL_OK;
    void *bytes = NULL;
    size_t n_bytes = 0;
    int told = self->rank == 0 ? 42 : -1;

    BL_TRY(open_memory(self, &memory));
    BL_TRY_GOTO(st, done, bl_host_memory_tell(memory, &told, sizeof told));
    TEST_CHECK_GOTO(st, done, told == 42);
    for (size_t n = 1; n < 100000; n = n * 9 + 1) {
        if (self->rank == 0) {
            bytes = malloc(n);
            n_bytes = n;
            memset(bytes, (int)n & 0xff, n);
        }
        BL_TRY_GOTO(st, done, bl_host_memory_publish(memory, "a test", &bytes, &n_bytes));
        TEST_CHECK_GOTO(st, done, n_bytes == n);
        for (size_t k = 0; k < n; k++)
            TEST_CHECK_GOTO(st, done, ((unsigned char *)bytes)[k] == (n & 0xff));
        bl_host_memory_return(bytes, n_bytes);
    }
done:
    bl_host_memory_close(memory);
    return st;
}

static void test_publish(void **state)
{
    (void)state;
    for (size_t i = 0; i < BL_COUNT(rank_counts); i++) {
        int fd = memory_file();
        assert_int_equal(run(rank_counts[i], publish, &fd, NULL), BL_OK);
        close(fd);
    }
}

/* The first rank works twice as long as the deadline. */
static bl_status work_long(test_rank *self)
{
    bl_host_memory *memory;
    bl_status st = BL_OK;
    double end_s = bl_now_s() + 2 * LONG_WORK_DEADLINE_S;

    BL_TRY(open_memory(self, &memory));
    while (st == BL_OK && self->rank == 0 && bl_now_s() < end_s) {
        st = bl_host_memory_beat(memory);
        usleep(1000);
    }
    if (st == BL_OK) st = bl_host_memory_await(memory);
    if (st == BL_OK) st = bl_host_memory_meet(memory);
    bl_host_memory_close(memory);
    return st;
}

/* The deadline is far longer than a beat's period, so that a slow machine does not miss it. */
static void test_long_work(void **state)
{
    int fd = memory_file();

    (void)state;
    if (test_ranks_run(3, 1, LONG_WORK_DEADLINE_S, work_long, &fd, NULL) != BL_OK)
        fail_msg("%s", bl_error_text());
    close(fd);
}

/* A rank that waits fails: the one at work learns of it by its next beat. */
static bl_status fail_waiting(test_rank *self)
{
    bl_host_memory *memory;
    bl_status st = BL_OK;

    BL_TRY(open_memory(self, &memory));
    while (st == BL_OK && self->rank == 0) st = bl_host_memory_beat(memory);
    if (self->rank == 1) st = BL_FAIL(BL_EIO, "train.jsonl: read error");
    if (self->rank == 2) st = bl_host_memory_await(memory);
    bl_host_memory_close(memory);
    return st;
}

static void test_failure_while_waiting(void **state)
{
    int fd = memory_file();
    bl_error errors[3];

    (void)state;
    assert_int_equal(run(3, fail_waiting, &fd, errors), BL_EIO);
    assert_int_equal(errors[0].status, BL_ECANCELED);
    assert_int_equal(errors[2].status, BL_ECANCELED);
    close(fd);
}

/* ---- refusals ---- */

/* The last rank wants one byte more, in the second call. */
static bl_status differ(test_rank *self)
{
    bl_host_memory *memory;
    void *first = NULL, *second = NULL;
    size_t n_bytes = self->rank == self->n_ranks - 1 ? 101 : 100;

    BL_TRY(open_memory(self, &memory));
    bl_status st = bl_host_memory_take(memory, 64, "what all want", &first);
    if (st == BL_OK) st = bl_host_memory_take(memory, n_bytes, "the index", &second);
    bl_host_memory_return(first, 64);
    bl_host_memory_return(second, n_bytes);
    bl_host_memory_close(memory);
    return st;
}

static void test_different_sizes(void **state)
{
    (void)state;
    for (size_t i = 1; i < BL_COUNT(rank_counts); i++) {
        int fd = memory_file(), n = rank_counts[i];
        bl_error errors[4];
        char expected[256];
        snprintf(expected, sizeof expected,
                 "the index: ranks 0 and %d of the host ask for different memory: 100 bytes at "
                 "8192 in call 2, and 101 at 8192 in call 2",
                 n - 1);
        assert_int_equal(run(n, differ, &fd, errors), BL_EINTERNAL);
        for (int r = 0; r < n; r++) { /* all ranks fail */
            assert_int_equal(errors[r].status, BL_EINTERNAL);
            assert_string_equal(errors[r].text, expected);
        }
        close(fd);
    }
}

/* A file that has been used is another job's, or another host_memory's. */
static bl_status open_only(test_rank *self)
{
    bl_host_memory *memory;
    BL_TRY(open_memory(self, &memory));
    bl_host_memory_close(memory);
    return BL_OK;
}

static void test_used_file(void **state)
{
    int fd = memory_file();
    bl_error errors[2];

    (void)state;
    assert_int_equal(ftruncate(fd, 1), 0);
    assert_int_equal(run(2, open_only, &fd, errors), BL_EINTERNAL);
    assert_string_equal(errors[0].text, "the host's memory file is used already: 1 bytes");
    assert_int_equal(errors[1].status, BL_ECANCELED);
    close(fd);
}

static bl_status take_much(test_rank *self)
{
    bl_host_memory *memory;
    void *piece = NULL;
    size_t n_bytes = (size_t)1 << 20;

    BL_TRY(open_memory(self, &memory));
    bl_status st = bl_host_memory_take(memory, n_bytes, "the embedding", &piece);
    bl_host_memory_return(piece, n_bytes);
    bl_host_memory_close(memory);
    return st;
}

/* SIGXFSZ would end a process that did not ask first. */
static void test_file_limit(void **state)
{
    struct rlimit before, limit;
    int fd = memory_file();
    bl_error errors[2];

    (void)state;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    limit = before;
    limit.rlim_cur = 512 << 10;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    bl_status st = run(2, take_much, &fd, errors);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    assert_int_equal(st, BL_ELIMIT);
    assert_string_equal(errors[0].text,
                        "the embedding: memory that the ranks of a host share is a file of 1052672 "
                        "bytes, and files may have 524288 (ulimit -f, RLIMIT_FSIZE): raise the "
                        "limit, or use rank_processes false");
    assert_int_equal(errors[1].status, BL_ECANCELED);
    close(fd);
}

/* More than any host has: a refusal before anything is taken. */
static bl_status take_too_much(test_rank *self)
{
    bl_host_memory *memory;
    void *piece;

    BL_TRY(open_memory(self, &memory));
    bl_status st = bl_host_memory_take(memory, (size_t)1 << 50, "the embedding", &piece);
    bl_host_memory_close(memory);
    return st;
}

static void test_too_much(void **state)
{
    static const char expected[] = "the embedding: takes 1125899906842624 bytes of memory, ";

    (void)state;
    for (int n = 1; n <= 2; n++) {
        int fd = memory_file();
        struct stat info;
        bl_error errors[2];
        assert_int_equal(run(n, take_too_much, &fd, errors), BL_ENOMEM);
        assert_memory_equal(errors[0].text, expected, sizeof expected - 1);
        assert_int_equal(fstat(fd, &info), 0);
        assert_true(info.st_size <= 4096); /* the header */
        close(fd);
    }
}

/* The system's own refusal: a sealed file cannot grow. */
static void test_refused_by_the_system(void **state)
{
    int fd = memfd_create("test_host_memory", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    bl_error errors[2];

    (void)state;
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_GROW), 0);
    assert_int_equal(run(2, open_only, &fd, errors), BL_ENOMEM);
    assert_string_equal(errors[0].text,
                        "the header of a host's shared memory: takes 4096 bytes of memory that the "
                        "ranks of the host share: Operation not permitted");
    close(fd);
}

/* A rank that fills fails: the others do not wait for it. */
static bl_status fail_filling(test_rank *self)
{
    bl_host_memory *memory;
    void *piece;
    bl_status st;

    BL_TRY(open_memory(self, &memory));
    BL_TRY_GOTO(st, done, bl_host_memory_take(memory, 4096, "a test", &piece));
    st = self->rank == 1 ? BL_FAIL(BL_EINPUT, "train.jsonl:3: no text")
                         : bl_host_memory_seal(memory, piece, 4096);
    bl_host_memory_return(piece, 4096);
done:
    bl_host_memory_close(memory);
    return st;
}

static void test_failing_filler(void **state)
{
    int fd = memory_file();
    bl_error errors[4];

    (void)state;
    assert_int_equal(run(4, fail_filling, &fd, errors), BL_EINPUT);
    for (int r = 0; r < 4; r++)
        assert_int_equal(errors[r].status, r == 1 ? BL_EINPUT : BL_ECANCELED);
    close(fd);
}

/* ---- processes ---- */

static void test_pieces_of_processes(void **state)
{
    static const test_rank_fn cases[] = {fill_parts, publish};
    host_rank_end ends[4];

    (void)state;
    for (size_t i = 0; i < 2 * BL_COUNT(rank_counts); i++) {
        int fd = memory_file(), n = rank_counts[i / 2];
        host_ranks_run(n, 60, cases[i % 2], &fd, ends);
        for (int r = 0; r < n; r++)
            if (ends[r].error.status != BL_OK || ends[r].signal_number != 0)
                fail_msg("case %zu, rank %d of %d: signal %d, %s", i % 2, r, n,
                         ends[r].signal_number, ends[r].error.text);
        close(fd);
    }
}

static void test_refusals_of_processes(void **state)
{
    int fd = memory_file();
    host_rank_end ends[4];
    int n_found = 0;

    (void)state;
    host_ranks_run(3, 60, differ, &fd, ends);
    for (int r = 0; r < 3; r++) n_found += ends[r].error.status == BL_EINTERNAL;
    for (int r = 0; r < 3; r++) /* one that is late hears of it before it finds it */
        if (ends[r].error.status != BL_EINTERNAL)
            assert_int_equal(ends[r].error.status, BL_ECANCELED);
    assert_true(n_found > 0);
    close(fd);
    fd = memory_file();
    host_ranks_run(4, 60, fail_filling, &fd, ends);
    for (int r = 0; r < 4; r++)
        assert_int_equal(ends[r].error.status, r == 1 ? BL_EINPUT : BL_ECANCELED);
    close(fd);
}

/* The rank that fills is killed: without a deadline, the others learn of it. Rank 0 takes, the last
 * one fills. */
static bl_status die_filling(test_rank *self)
{
    bl_host_memory *memory;
    char *piece;

    BL_TRY(open_memory(self, &memory));
    bl_status st = bl_host_memory_take(memory, 1 << 20, "a test", (void **)&piece);
    if (st == BL_OK && self->rank == self->n_ranks - 1) {
        memset(piece, 1, 1 << 19);
        raise(SIGKILL);
    }
    if (st == BL_OK) st = bl_host_memory_seal(memory, piece, 1 << 20);
    bl_host_memory_return(piece, 1 << 20);
    bl_host_memory_close(memory);
    return st;
}

static void test_death_of_the_filler(void **state)
{
    (void)state;
    for (size_t i = 1; i < BL_COUNT(rank_counts); i++) {
        int fd = memory_file(), n = rank_counts[i];
        host_rank_end ends[4];
        char expected[64];
        snprintf(expected, sizeof expected, "rank %d has died", n - 1);
        host_ranks_run(n, 0, die_filling, &fd, ends);
        assert_int_equal(ends[n - 1].signal_number, SIGKILL);
        for (int r = 0; r < n - 1; r++) {
            /* The wire of each has seen it, or heard it of another. */
            assert_true(ends[r].error.status == BL_ERANK || ends[r].error.status == BL_ECANCELED);
            if (ends[r].error.status == BL_ERANK) assert_string_equal(ends[r].error.text, expected);
        }
        close(fd);
    }
}

/* Threads of this process that a signal may be given to; of two of them, the system chooses. */
static int count_takers(int signal_number)
{
    DIR *dir = opendir("/proc/self/task");
    int n = 0;

    for (struct dirent *entry; dir && (entry = readdir(dir));) {
        char path[300], line[256];
        unsigned long long blocked;
        snprintf(path, sizeof path, "/proc/self/task/%s/status", entry->d_name);
        FILE *file = entry->d_name[0] == '.' ? NULL : fopen(path, "r");
        while (file && fgets(line, sizeof line, file))
            if (sscanf(line, "SigBlk: %llx", &blocked) == 1)
                n += (blocked >> (signal_number - 1) & 1) == 0;
        if (file) fclose(file);
    }
    if (dir) closedir(dir);
    return n;
}

static bl_status count_takers_around(test_rank *self)
{
    bl_host_memory *memory;

    /* A thread that is about to begin has all signals blocked: the stream's has begun then. */
    BL_TRY(bl_comm_barrier(self->comm, self->stream));
    BL_TRY(bl_stream_synchronize(self->stream));
    int before = count_takers(SIGTERM);
    TEST_CHECK(before > 0);
    BL_TRY(open_memory(self, &memory));
    int now = count_takers(SIGTERM);
    bl_host_memory_close(memory);
    TEST_CHECK(now == before);
    return BL_OK;
}

/* A request to stop is for the thread that waits for it, whose mask alone decides when it comes. */
static void test_takes_no_signals(void **state)
{
    int fd = memory_file();
    host_rank_end ends[2];

    (void)state;
    host_ranks_run(2, 60, count_takers_around, &fd, ends);
    for (int r = 0; r < 2; r++)
        if (ends[r].error.status != BL_OK) fail_msg("rank %d: %s", r, ends[r].error.text);
    close(fd);
}

/* A write to a sealed piece ends the process: a child writes. */
static void test_sealed_is_read_only(void **state)
{
    int status;

    (void)state;
    pid_t child = fork();
    if (child == 0) {
        volatile char *piece = NULL;
        signal(SIGSEGV, SIG_DFL);
        if (bl_host_memory_take(NULL, 5000, "a test", (void **)&piece) != BL_OK) _exit(1);
        piece[4999] = 1;
        if (bl_host_memory_seal(NULL, (void *)piece, 5000) != BL_OK || piece[4999] != 1) _exit(2);
        piece[4999] = 2;
        _exit(3);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    assert_false(WIFEXITED(status) && WEXITSTATUS(status) <= 3 && WEXITSTATUS(status) > 0);
#else
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
#endif
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pieces),
        cmocka_unit_test(test_memory_taken),
        cmocka_unit_test(test_without_a_file),
        cmocka_unit_test(test_publish),
        cmocka_unit_test(test_different_sizes),
        cmocka_unit_test(test_used_file),
        cmocka_unit_test(test_file_limit),
        cmocka_unit_test(test_too_much),
        cmocka_unit_test(test_refused_by_the_system),
        cmocka_unit_test(test_failing_filler),
        cmocka_unit_test(test_pieces_of_processes),
        cmocka_unit_test(test_takes_no_signals),
        cmocka_unit_test(test_long_work),
        cmocka_unit_test(test_failure_while_waiting),
        cmocka_unit_test(test_refusals_of_processes),
        cmocka_unit_test(test_death_of_the_filler),
        cmocka_unit_test(test_sealed_is_read_only),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
