/* SPDX-License-Identifier: Apache-2.0 */
#include "mpi_job.h"

#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/files.h"

enum { MAX_WORDS = GOLDEN_MAX_ARGS + 16 };

bool mpi_is_here(void)
{
    if (system("mpirun --version >/dev/null 2>&1") == 0) return true;
    printf("skip: no mpirun on this machine\n");
    return false;
}

void mpi_start(runs_child *child, int n_ranks, const char *program, char *const *words)
{
    static int count;
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
    snprintf(child->log, sizeof child->log, "%s", runs_path("mpirun-%d", count++));
    fflush(NULL);
    child->pid = fork();
    assert_true(child->pid >= 0);
    if (child->pid > 0) return;
    int log = open(child->log, O_WRONLY | O_CREAT | O_TRUNC, 0666),
        null = open("/dev/null", O_RDONLY);
    if (log < 0 || null < 0 || dup2(null, 0) < 0 || dup2(log, 1) < 0 || dup2(log, 2) < 0)
        _exit(126);
    execvp("mpirun", (char *const *)argv);
    _exit(126);
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

bool mpi_is_running(pid_t pid)
{
    char state;
    pid_t parent;
    return read_stat(pid, &state, &parent) && state != 'Z' && state != 'X';
}

static bool has_rank(pid_t pid, int rank)
{
    char path[64], text[1 << 16], wanted[48];
    snprintf(path, sizeof path, "/proc/%d/environ", (int)pid);
    int fd = open(path, O_RDONLY);
    if (fd < 0) return false;
    ssize_t n = read(fd, text, sizeof text);
    close(fd);
    size_t length = (size_t)snprintf(wanted, sizeof wanted, "OMPI_COMM_WORLD_RANK=%d", rank) + 1;
    return n > 0 && memmem(text, (size_t)n, wanted, length) != NULL;
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
        if (pid > 0 && read_stat(pid, &state, &parent) && parent == mpirun && has_rank(pid, rank))
            found = pid;
    }
    closedir(folder);
    return found;
}

pid_t mpi_process_of(const runs_child *child, int rank)
{
    double deadline = bl_now_s() + 60;
    pid_t pid = 0;
    while (pid == 0 && bl_now_s() < deadline) {
        pid = find_rank(child->pid, rank);
        if (pid == 0) runs_sleep_s(0.02);
    }
    if (pid == 0) fail_msg("rank %d was not started", rank);
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

void mpi_assert_gone(const pid_t *pids, int n)
{
    double deadline = bl_now_s() + 60;
    for (int i = 0; i < n; i++) {
        while (mpi_is_running(pids[i]) && bl_now_s() < deadline) runs_sleep_s(0.01);
        if (mpi_is_running(pids[i])) fail_msg("rank %d is still running", i);
    }
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

void mpi_assert_error(const runs_child *child, const char *text)
{
    static const char start[] = "ballast: error: ";
    char *log = runs_read(child->log, NULL), *line = strstr(log, start);

    if (!text) {
        if (line) fail_msg("an error: %s", line);
    } else {
        if (!line || strstr(line + 1, start)) fail_msg("not one line of error: %s", log);
        *strchr(line, '\n') = '\0';
        if (!strstr(line, text)) fail_msg("'%s' is not in: %s", text, line);
    }
    free(log);
}
