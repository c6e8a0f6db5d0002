/* SPDX-License-Identifier: Apache-2.0 */
/* A parent and its ranks, without collectives: this program is both. Each case starts a parent in a
 * new process; a word of the command line selects its ranks' actions. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/sizes.h"
#include "job/internal.h"
#include "comm/nccl/nccl.h"

/* ---- a rank ---- */

enum { CODE_WRONG = 99 };

static const double EXIT_S = 1.0;

static void wait_for_ever(void)
{
    for (;;) pause();
}

static volatile sig_atomic_t n_signals;

static void count_signal(int number)
{
    (void)number;
    n_signals = n_signals + 1;
}

/* Memory that is never freed. */
static bool take(size_t n_bytes)
{
    void *volatile memory = malloc(n_bytes);
    return memory != NULL;
}

static int tell(bl_status st, const char *text)
{
    bl_launch_print_error(BL_FAIL(st, "%s", text));
    return bl_status_exit_code(st);
}

/* Another thread, which has taken no memory before. */
static void *tell_on_thread(void *told)
{
    char byte;
    if (read(*(int *)told, &byte, 1) == 1) tell(BL_ENOMEM, "out of memory: all of it");
    return NULL;
}

static int tell_without_memory(void)
{
    struct rlimit none = {0, 0};
    pthread_t thread;
    int ends[2];

    if (pipe(ends) != 0 || pthread_create(&thread, NULL, tell_on_thread, &ends[0]) != 0 ||
        setrlimit(RLIMIT_AS, &none) != 0)
        return CODE_WRONG;
    for (size_t n = 1 << 20; n >= 16; n /= 2)
        while (take(n)) continue;
    if (write(ends[1], "", 1) != 1) return CODE_WRONG;
    pthread_join(thread, NULL);
    return bl_status_exit_code(BL_ENOMEM);
}

/* Every rank with every other. */
static bool talks(const bl_launch_child *c)
{
    for (int i = 0; i < c->n_ranks; i++)
        if (i != c->rank && write(c->sockets[i], &c->rank, sizeof c->rank) != sizeof c->rank)
            return false;
    for (int i = 0, other = -1; i < c->n_ranks; i++)
        if (i != c->rank &&
            (read(c->sockets[i], &other, sizeof other) != sizeof other || other != i))
            return false;
    return c->sockets[c->rank] == -1;
}

/* Rank 0 writes; the others read after its message. */
static bool shares_memory(const bl_launch_child *c, int fd)
{
    struct stat info;
    int *word;

    if (fstat(fd, &info) != 0 || (c->rank == 0 && info.st_size != 0) || !talks(c)) return false;
    if (c->rank == 0 && ftruncate(fd, 4096) != 0) return false;
    if (c->rank > 0 && read(c->sockets[0], &(char){0}, 1) != 1) return false;
    word = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (word == MAP_FAILED) return false;
    if (c->rank > 0) return *word == 4711;
    *word = 4711;
    for (int i = 1; i < c->n_ranks; i++)
        if (write(c->sockets[i], "", 1) != 1) return false;
    return true;
}

/* Standard streams, the descriptors named by the variable, and the directory being read. */
static bool has_its_own_descriptors(const bl_launch_child *c)
{
    int n = 0;
    DIR *folder = opendir("/proc/self/fd");
    while (readdir(folder)) n++;
    closedir(folder);
    return n - 2 == 3 + 4 + (c->n_ranks - 1) + 1;
}

/* Both are there before the parent sees one. */
static void signal_twice(pid_t pid)
{
    static const int numbers[] = {SIGSTOP, SIGTERM, SIGINT, SIGCONT};
    for (size_t i = 0; i < BL_COUNT(numbers); i++) kill(pid, numbers[i]);
}

static int stop_after_signal(const bl_launch_child *c, bool is_twice, bool waits_for_second)
{
    const struct timespec later = {1, 200 * 1000 * 1000}, moment = {0, 200 * 1000 * 1000};

    signal(SIGTERM, count_signal);
    signal(SIGINT, count_signal);
    if (!talks(c)) return CODE_WRONG;
    if (c->rank == 0 && is_twice) signal_twice(getppid());
    if (c->rank == 0 && !is_twice) kill(getppid(), SIGTERM);
    while (n_signals == 0) usleep(1000); /* a signal before a pause() would leave it waiting */
    if (is_twice) nanosleep(&moment, NULL);
    if (waits_for_second && c->rank == 0) {
        nanosleep(&later, NULL);
        kill(getppid(), SIGTERM);
    }
    if (waits_for_second) wait_for_ever();
    return c->rank == 0 ? tell(BL_ESTOPPED, "stopped after step 4") : 75;
}

/* It may not have begun. */
static void await_end(const bl_launch_child *c, int rank)
{
    char byte;
    while (read(c->sockets[rank], &byte, 1) > 0) continue;
}

static int be_rank(const char *what, const bl_launch_child *c)
{
    bool is_last = c->rank == c->n_ranks - 1;

    if (strcmp(what, "talk") == 0) return talks(c) ? 0 : CODE_WRONG;
    if (strcmp(what, "memory") == 0) return shares_memory(c, c->memory_fd) ? 0 : CODE_WRONG;
    if (strcmp(what, "descriptors") == 0) return has_its_own_descriptors(c) ? 0 : CODE_WRONG;
    if (strcmp(what, "stop") == 0) return stop_after_signal(c, false, false);
    if (strcmp(what, "stop twice") == 0) return stop_after_signal(c, true, false);
    if (strcmp(what, "twice") == 0) return stop_after_signal(c, false, true);
    if (strcmp(what, "fail") == 0) {
        if (c->rank == 1) return tell(BL_ENUMERIC, "rank 2: a loss that is not finite");
        await_end(c, 1);
        return bl_status_exit_code(BL_ENUMERIC);
    }
    if (strcmp(what, "silent") == 0) return is_last ? 3 : 0;
    if (strcmp(what, "unloaded") == 0) return is_last ? 127 : 0;
    if (strcmp(what, "exhausted") == 0) return is_last ? tell_without_memory() : 0;
    if (strcmp(what, "exit") == 0) { /* a handler that hangs */
        job_message done = {0};
        if (!talks(c) || send(c->control_fd, &done, sizeof done, 0) != sizeof done)
            return CODE_WRONG;
        if (is_last) wait_for_ever();
        return 0;
    }
    if (strcmp(what, "early") == 0) { /* no handler yet */
        if (c->rank == 0) kill(getppid(), SIGUSR1);
        wait_for_ever();
    }
    if (is_last) raise(strcmp(what, "crash") == 0 ? SIGSEGV : SIGKILL);
    if (strcmp(what, "kill") == 0) {
        await_end(c, c->n_ranks - 1);
        return tell(BL_ERANK, "rank 2 has died");
    }
    if (strcmp(what, "lost") == 0 || strcmp(what, "failed") == 0) {
        await_end(c, c->n_ranks - 1);
        bl_status st = bl_nccl_report(c->rank, "b", what[0] == 'l', "all_gather", "a cut line");
        bl_launch_print_error(st);
        return bl_status_exit_code(st);
    }
    if (strcmp(what, "late") == 0)
        return tell(BL_ERANK, "rank 1 did not reach all_gather within 5.0 s");
    wait_for_ever();
    return CODE_WRONG;
}

/* ---- parents ---- */

typedef struct outcome {
    bl_error error;
    double elapsed_s;
} outcome;

static outcome run(const char *what, int n_ranks)
{
    char *argv[] = {(char *)"test_parent", (char *)what, NULL};
    int ends[2];
    outcome out;

    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        double start = bl_now_s();
        bl_status st = bl_launch_run_ranks(
            NULL, &(bl_launch_ranks){
                      .n_here = n_ranks, .argv = argv, .takes_requests = true, .exit_s = EXIT_S});
        memset(&out, 0, sizeof out);
        if (st == BL_OK) (void)bl_fail(BL_OK, "%s", "");
        bl_error_save(&out.error, st);
        out.elapsed_s = bl_now_s() - start;
        _exit(write(ends[1], &out, sizeof out) == sizeof out ? 0 : 1);
    }
    close(ends[1]);
    assert_int_equal(read(ends[0], &out, sizeof out), sizeof out);
    close(ends[0]);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    return out;
}

static void expect(const char *what, int n_ranks, bl_status st, const char *text)
{
    outcome out = run(what, n_ranks);
    if (out.error.status != st || !strstr(out.error.text, text))
        fail_msg("%s: %s, not %s: %s", what, bl_status_name(out.error.status), bl_status_name(st),
                 out.error.text);
}

static void test_ranks_are_connected(void **state)
{
    (void)state;
    expect("talk", 1, BL_OK, "");
    expect("talk", 5, BL_OK, "");
    expect("memory", 3, BL_OK, "");
}

static void test_descriptors(void **state)
{
    struct rlimit before, low;
    int open_here = open("/dev/null", O_RDONLY); /* without O_CLOEXEC */

    (void)state;
    assert_true(open_here >= 0);
    expect("descriptors", 3, BL_OK, "");
    close(open_here);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    low = (struct rlimit){40, before.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &low), 0);
    expect("talk", 9, BL_OK, ""); /* 72 sockets in the parent */
    low.rlim_max = 40;
    if (fork() == 0) { /* a lowered hard limit is permanent */
        setrlimit(RLIMIT_NOFILE, &low);
        outcome out = run("talk", 9);
        _exit(out.error.status == BL_ELIMIT && strstr(out.error.text, "socketpair") ? 0 : 1);
    }
    int status;
    assert_true(wait(&status) > 0);
    assert_int_equal(status, 0);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
}

static void test_failures(void **state)
{
    (void)state;
    expect("fail", 4, BL_ENUMERIC, "rank 2: a loss that is not finite");
    expect("silent", 3, BL_ERANK, "rank 2 (process ");
    expect("silent", 3, BL_ERANK, "exited with code 3 and did not say why");
    expect("unloaded", 3, BL_ELIMIT, "did not start: the system could not load its program");
    /* The others have only seen that it is gone. */
    expect("kill", 3, BL_ERANK, "was killed by signal 9 (Killed); the system does that");
    expect("kill", 3, BL_ERANK, "rank 2 (process ");
    expect("lost", 3, BL_ERANK, "was killed by signal 9");
    expect("failed", 3, BL_ERANK, "was killed by signal 9");
    /* Here they know more: the one that was killed came late, too. */
    expect("late", 3, BL_ERANK, "rank 1 did not reach all_gather within 5.0 s");
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) /* the signal is theirs, */
    expect("exhausted", 3, BL_ENOMEM, "out of memory: all of it");  /* and so is malloc */
    expect("crash", 3, BL_ERANK, "was killed by signal 11 (Segmentation fault)");
#endif
}

static void test_ranks_that_are_left_are_killed(void **state)
{
    (void)state;
    outcome out = run("hang", 3);
    assert_int_equal(out.error.status, BL_ERANK);
    assert_non_null(strstr(out.error.text, "rank 2 (process "));
    assert_true(out.elapsed_s >= 4.0);
}

static void test_exit_that_hangs(void **state)
{
    (void)state;
    outcome out = run("exit", 3);
    assert_int_equal(out.error.status, BL_OK);
    assert_true(out.elapsed_s >= EXIT_S);
}

static void test_requests_to_stop(void **state)
{
    (void)state;
    expect("stop", 3, BL_ESTOPPED, "stopped after step 4");
    expect("stop twice", 3, BL_ESTOPPED, "stopped after step 4");
    expect("twice", 3, BL_ESTOPPED, "stopped at once on request");
    expect("early", 3, BL_ESTOPPED, "stopped at once on request");
}

static void test_variable(void **state)
{
    static const char *const bad[] = {
        "",
        "parent=1",
        "parent=1 rank=2 ranks=2 first=0 local=2 control=3 line=4 bulk=5 memory=6 sockets=7,-1",
        "parent=1 rank=0 ranks=2 first=0 local=2 control=3 line=4 bulk=5 memory=6 sockets=-1",
        "parent=1 rank=0 ranks=2 first=0 local=2 control=3 line=4 bulk=5 memory=6 sockets=-1,8,9",
        "parent=1 rank=0 ranks=2 first=1 local=2 control=3 line=4 bulk=5 memory=6 sockets=-1,8"};
    int sockets[] = {4, -1, 11};
    bl_launch_child c = {77, 1, 3, 1, 2, 5, 6, 7, 8, sockets}, back;
    bl_launch_info info;

    (void)state;
    char *text = job_child_format(&c), *value = strchr(text, '=') + 1;
    assert_true(job_child_is(text));
    setenv("BALLAST_CHILD", value, 1);
    assert_int_equal(job_child_read(&back), BL_OK);
    assert_memory_equal(back.sockets, sockets, sizeof sockets);
    free(back.sockets);
    back.sockets = sockets;
    assert_memory_equal(&back, &c, offsetof(bl_launch_child, memory_fd) + sizeof c.memory_fd);
    bl_launch_read(&info);
    assert_int_equal(info.kind, BL_LAUNCH_CHILD);
    assert_int_equal(info.rank, 1);
    assert_int_equal(info.n_processes, 3);
    assert_int_equal(info.local_rank, 0);
    assert_int_equal(info.n_local, 2);
    assert_int_equal(bl_launch_begin(&info), BL_ERANK); /* 77 is not our parent */
    free(text);
    for (size_t i = 0; i < BL_COUNT(bad); i++) {
        setenv("BALLAST_CHILD", bad[i], 1);
        assert_int_equal(bl_launch_begin(&info), BL_EUSAGE);
    }
    unsetenv("BALLAST_CHILD");
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ranks_are_connected),
        cmocka_unit_test(test_descriptors),
        cmocka_unit_test(test_failures),
        cmocka_unit_test(test_ranks_that_are_left_are_killed),
        cmocka_unit_test(test_exit_that_hangs),
        cmocka_unit_test(test_requests_to_stop),
        cmocka_unit_test(test_variable),
    };
    bl_launch_info info;
    bl_launch_child c;

    if (argc < 2) return cmocka_run_group_tests(tests, NULL, NULL);
    if (bl_launch_begin(&info) != BL_OK || job_child_read(&c) != BL_OK) return CODE_WRONG;
    int code = be_rank(argv[1], &c);
    job_child_free(&c);
    return code;
}
