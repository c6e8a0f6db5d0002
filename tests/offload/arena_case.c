/* SPDX-License-Identifier: Apache-2.0 */
/* arena_case.c -- the helpers of arena_case.h. */
#include "arena_case.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

void assert_ok(bl_status st)
{
    if (st != BL_OK) fail_msg("%s: %s", bl_status_name(st), bl_error_text());
}

int set_up(void **state)
{
    return bl_device_create_cpu(2, (bl_device **)state) == BL_OK ? 0 : -1;
}

int tear_down(void **state)
{
    bl_device_destroy(*state);
    return 0;
}

bl_arena_info get_info(const bl_arena *arena)
{
    bl_arena_info info;
    bl_arena_get_info(arena, &info);
    return info;
}

static int run_child(int (*fn)(bl_device *device), char text[TEXT_BYTES])
{
    int ends[2], status = -1;
    size_t n_bytes = 0;
    ssize_t n;

    assert_int_equal(pipe(ends), 0);
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        bl_device *device;
        alarm(60);
        if (dup2(ends[1], STDERR_FILENO) < 0 || bl_device_create_cpu(1, &device) != BL_OK)
            _exit(98);
        int code = fn(device);
        bl_device_destroy(device);
        _exit(code);
    }
    close(ends[1]);
    while (n_bytes < TEXT_BYTES - 1 &&
           (n = read(ends[0], text + n_bytes, TEXT_BYTES - 1 - n_bytes)) > 0)
        n_bytes += (size_t)n;
    text[n_bytes] = '\0';
    close(ends[0]);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 99;
}

void assert_child_succeeds(int (*fn)(bl_device *device), char text[TEXT_BYTES])
{
    int code = run_child(fn, text);
    if (code != 0) fail_msg("exit code %d: %s", code, text);
}

int count(const char *text, const char *part)
{
    int n = 0;
    for (const char *at = strstr(text, part); at; at = strstr(at + 1, part)) n++;
    return n;
}
