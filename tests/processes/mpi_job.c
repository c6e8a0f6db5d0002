/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_job.c -- starts a job under mpirun or the parent, finds its processes in /proc, and checks
 * that nothing of it is left. */
#include "mpi_job.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/files.h"
#include "base/sizes.h"

enum { MAX_WORDS = GOLDEN_MAX_ARGS + 16 };

bool mpi_is_here(void)
{
    if (system("mpirun --version >/dev/null 2>&1") == 0) return true;
    printf("skip: no mpirun on this machine\n");
    return false;
}

void mpi_start_program(runs_child *child, const char *const *argv)
{
    static int count;

    snprintf(child->log, sizeof child->log, "%s", runs_path("job-%d", count++));
    fflush(NULL);
    child->pid = fork();
    assert_true(child->pid >= 0);
    if (child->pid > 0) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* a job goes with the test that is ended */
    int log = open(child->log, O_WRONLY | O_CREAT | O_TRUNC, 0666),
        null = open("/dev/null", O_RDONLY);
    if (log < 0 || null < 0 || dup2(null, 0) < 0 || dup2(log, 1) < 0 || dup2(log, 2) < 0)
        _exit(126);
    execvp(argv[0], (char *const *)argv);
    _exit(126);
}

void mpi_start(runs_child *child, int n_ranks, const char *program, char *const *words)
{
    char n_text[16];
    const char *argv[MAX_WORDS] = {
        "mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", n_text,
        program};
    int n = 0;

    while (argv[n]) n++;
    for (int i = 0; words[i]; i++) {
        assert_true(n < MAX_WORDS - 1);
        argv[n++] = words[i];
    }
    snprintf(n_text, sizeof n_text, "%d", n_ranks);
    mpi_start_program(child, argv);
}

void mpi_start_ballast(runs_child *child, int n_ranks, const char *program, const char *command,
                       const golden_args *args)
{
    char *words[GOLDEN_MAX_ARGS + 2] = {(char *)command};
    int n = 1;

    for (int i = 0; i < args->n; i += 2) {
        if (strcmp(args->text[i], "--ranks") == 0) continue;
        words[n++] = args->text[i];
        words[n++] = args->text[i + 1];
    }
    mpi_start(child, n_ranks, program ? program : BALLAST_PROGRAM, words);
}

/* The number after ") S " in /proc/PID/stat is the parent; S is the state. */
static bool read_stat(pid_t pid, char *state, pid_t *parent)
{
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    FILE *file = fopen(path, "r");
    if (!file) return false;
    size_t n = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[n] = '\0';
    const char *name_end = strrchr(text, ')');
    int number = 0;
    if (!name_end || sscanf(name_end + 1, " %c %d", state, &number) != 2) return false;
    *parent = number;
    return true;
}

char mpi_state_of(pid_t pid)
{
    char state;
    pid_t parent;
    return read_stat(pid, &state, &parent) ? state : '?';
}

bool mpi_is_running(pid_t pid)
{
    return !strchr("?ZX", mpi_state_of(pid));
}

static bool has_rank(pid_t pid, pid_t launcher, int rank)
{
    static const char *const names[] = {"OMPI_COMM_WORLD_RANK", "BALLAST_TEST_RANK"};
    char path[64], text[1 << 16], wanted[64];
    bool is_it = false;
    snprintf(path, sizeof path, "/proc/%d/environ", (int)pid);
    int fd = open(path, O_RDONLY);
    if (fd < 0) return false;
    ssize_t n = read(fd, text, sizeof text);
    close(fd);
    for (size_t i = 0; n > 0 && i < BL_COUNT(names); i++) {
        size_t length = (size_t)snprintf(wanted, sizeof wanted, "%s=%d", names[i], rank) + 1;
        is_it |= memmem(text, (size_t)n, wanted, length) != NULL;
    }
    /* A child of `ballast` itself. */
    size_t length = (size_t)snprintf(wanted, sizeof wanted, "BALLAST_CHILD=parent=%d rank=%d ",
                                     (int)launcher, rank);
    return is_it || (n > 0 && memmem(text, (size_t)n, wanted, length) != NULL);
}

static pid_t find_rank(pid_t mpirun, int rank)
{
    DIR *folder = opendir("/proc");
    struct dirent *entry;
    pid_t found = 0, parent;
    char state;

    assert_non_null(folder);
    while (!found && (entry = readdir(folder))) {
        pid_t pid = isdigit((unsigned char)entry->d_name[0]) ? atoi(entry->d_name) : 0;
        if (pid > 0 && read_stat(pid, &state, &parent) && parent == mpirun &&
            has_rank(pid, mpirun, rank))
            found = pid;
    }
    closedir(folder);
    return found;
}

pid_t mpi_find_process(const runs_child *child, int rank)
{
    double deadline = bl_now_s() + 60;
    pid_t pid = 0;
    bool is_alive = true;
    while (pid == 0 && is_alive && bl_now_s() < deadline) {
        is_alive = mpi_is_running(child->pid); /* perhaps a child of a child */
        pid = find_rank(child->pid, rank);
        if (pid == 0) runs_sleep_s(0.02);
    }
    if (pid == 0 && is_alive) fail_msg("rank %d was not started", rank);
    return pid;
}

pid_t mpi_process_of(const runs_child *child, int rank)
{
    pid_t pid = mpi_find_process(child, rank);
    if (pid == 0) fail_msg("the job ended before rank %d was found", rank);
    return pid;
}

void mpi_wait_for_text(const runs_child *child, const char *text, int n)
{
    for (int found = 0; found < n; runs_sleep_s(0.005)) {
        bool is_alive = runs_is_alive(child);
        char *log = bl_file_exists(child->log) ? runs_read(child->log, NULL) : NULL;
        found = 0;
        for (const char *at = log; at && (at = strstr(at, text)); at++) found++;
        if (found < n && !is_alive)
            fail_msg("the job ended without saying '%s' %d times: %s", text, n, log ? log : "");
        free(log);
    }
}

bool mpi_comes_to_step(const runs_child *child, const char *output, int64_t n)
{
    while (runs_logged_steps(output) < n) {
        if (!runs_is_alive(child)) return false;
        runs_sleep_s(0.005);
    }
    return true;
}

void mpi_wait_for_steps(const runs_child *child, const char *output, int64_t n)
{
    if (!mpi_comes_to_step(child, output, n))
        fail_msg("the job ended before step %d: %s", (int)n, runs_read(child->log, NULL));
}

void mpi_wait_for_stop(pid_t pid)
{
    double deadline = bl_now_s() + 60;
    while (mpi_state_of(pid) != 'T' && bl_now_s() < deadline) runs_sleep_s(0.01);
    assert_int_equal(mpi_state_of(pid), 'T');
}

void mpi_assert_gone(const pid_t *pids, int n)
{
    double deadline = bl_now_s() + 60;
    for (int i = 0; i < n; i++) {
        while (mpi_is_running(pids[i]) && bl_now_s() < deadline) runs_sleep_s(0.01);
        if (mpi_is_running(pids[i])) fail_msg("rank %d is still running", i);
    }
}

/* The kernel ends orphans when their parent is gone, which may take a moment. */
void mpi_assert_nobody_left(const char *what)
{
    double deadline = bl_now_s() + 60;
    while (waitpid(-1, NULL, WNOHANG) >= 0) {
        if (bl_now_s() > deadline) fail_msg("%s: a process is left", what);
        runs_sleep_s(0.01);
    }
    assert_int_equal(errno, ECHILD);
}

/* ---- /dev/shm ---- */

typedef struct names {
    char name[4096][256];
    int n;
} names;

static names noted;

static void list_shared_memory(names *out)
{
    DIR *folder = opendir("/dev/shm");
    const struct dirent *entry;

    out->n = 0;
    while (folder && (entry = readdir(folder))) {
        struct stat info;
        if (fstatat(dirfd(folder), entry->d_name, &info, AT_SYMLINK_NOFOLLOW) != 0 ||
            info.st_uid != getuid() || strncmp(entry->d_name, "vader", 5) == 0)
            continue;
        assert_true(out->n < (int)BL_COUNT(out->name));
        snprintf(out->name[out->n++], sizeof out->name[0], "%s", entry->d_name);
    }
    if (folder) closedir(folder);
}

static const char *find_new_shared_memory(void)
{
    static names now;

    list_shared_memory(&now);
    for (int i = 0; i < now.n; i++) {
        bool is_old = false;
        for (int k = 0; k < noted.n; k++) is_old |= strcmp(now.name[i], noted.name[k]) == 0;
        if (!is_old) return now.name[i];
    }
    return NULL;
}

void mpi_note_shared_memory(void)
{
    list_shared_memory(&noted);
}

void mpi_assert_shared_memory(void)
{
    double deadline = bl_now_s() + 60;
    const char *name;

    while ((name = find_new_shared_memory()) && bl_now_s() < deadline) runs_sleep_s(0.1);
    if (name) fail_msg("/dev/shm/%s is left", name);
}

/* ---- ends ---- */

void mpi_assert_one_thread_takes_signals(pid_t pid)
{
    char command[256];
    /* Bit 14 of SigBlk is SIGTERM. */
    snprintf(command, sizeof command,
             "for t in /proc/%d/task/*; do [ \"${t##*/}\" = %d ] || "
             "! sed -n 's/^SigBlk:.*\\(.\\)...$/\\1/p' $t/status | grep -q '[012389ab]' || "
             "cat $t/comm; done | grep .",
             (int)pid, (int)pid);
    assert_int_not_equal(system(command), 0);
}

int mpi_wait_after_kill(runs_child *child, const pid_t *ranks, int n_ranks, double limit_s)
{
    double deadline = bl_now_s() + limit_s;

    while (runs_is_alive(child) && bl_now_s() < deadline) runs_sleep_s(0.01);
    mpi_assert_gone(ranks, n_ranks);
    if (runs_is_alive(child)) {
        printf("mpirun is still there after %g s, and none of its processes: it is killed\n",
               limit_s);
        kill(child->pid, SIGKILL);
    }
    return runs_wait(child, limit_s);
}

char *mpi_wrong_error(const runs_child *child, const char *text)
{
    bool is_stop = text && strncmp(text, "stopped ", 8) == 0;
    const char *start = is_stop ? "ballast: stopped " : "ballast: error: ";
    char *log = runs_read(child->log, NULL), *line = strstr(log, start), *wrong = NULL;
    int code = 0;

    if (!text && line)
        code = asprintf(&wrong, "an error: %s", line);
    else if (text && (!line || strstr(line + 1, start)))
        code = asprintf(&wrong, "not one line of error: %s", log);
    else if (text) {
        line[strcspn(line, "\n")] = '\0';
        if (!strstr(line, text)) code = asprintf(&wrong, "'%s' is not in: %s", text, line);
    }
    assert_true(code >= 0);
    free(log);
    return wrong;
}

void mpi_assert_error(const runs_child *child, const char *text)
{
    char *wrong = mpi_wrong_error(child, text);
    if (wrong) fail_msg("%s", wrong);
}
