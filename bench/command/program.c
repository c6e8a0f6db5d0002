/* SPDX-License-Identifier: Apache-2.0 */
/* program.c -- runs another program and reads its output: fio and all_gather_perf. */
#include "bench/command/program.h"

#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

enum { OUTPUT_MAX_BYTES = 1 << 20 };

char *bl_bench_run_program(char *const *arguments)
{
    posix_spawn_file_actions_t actions;
    int ends[2], exit_status = -1;
    pid_t child = -1;
    char *text = calloc(1, OUTPUT_MAX_BYTES + 1);

    if (!text || pipe2(ends, O_CLOEXEC) != 0) {
        free(text);
        return NULL;
    }
    if (posix_spawn_file_actions_init(&actions) == 0) {
        bool is_ready = posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO) == 0 &&
                        posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null",
                                                         O_WRONLY, 0) == 0;
        if (!is_ready ||
            posix_spawnp(&child, arguments[0], &actions, NULL, arguments, environ) != 0)
            child = -1;
        posix_spawn_file_actions_destroy(&actions);
    }
    close(ends[1]);
    ssize_t got = 0;
    for (size_t n = 0; child > 0 && n < OUTPUT_MAX_BYTES; n += (size_t)got) {
        do {
            got = read(ends[0], text + n, OUTPUT_MAX_BYTES - n);
        } while (got < 0 && errno == EINTR);
        if (got <= 0) break;
    }
    close(ends[0]);
    while (child > 0 && waitpid(child, &exit_status, 0) < 0 && errno == EINTR) continue;
    if (exit_status != 0) {
        free(text);
        return NULL;
    }
    return text;
}
