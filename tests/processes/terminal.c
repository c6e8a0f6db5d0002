/* SPDX-License-Identifier: Apache-2.0 */
/* terminal.c -- a pseudo-terminal: reads a job's output and types keys. */
#include "terminal.h"

#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "base/clock.h"
#include "runs.h"

static char terminal_name[64];

int terminal_open(void)
{
    int fd = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    assert_true(fd >= 0 && grantpt(fd) == 0 && unlockpt(fd) == 0);
    assert_int_equal(ptsname_r(fd, terminal_name, sizeof terminal_name), 0);
    return fd;
}

bool terminal_take(const int *unused)
{
    (void)unused;
    if (setsid() < 0) return false;
    int fd = open(terminal_name, O_RDWR);
    if (fd < 0 || ioctl(fd, TIOCSCTTY, 0) != 0) return false;
    return dup2(fd, 0) == 0 && dup2(fd, 2) == 2 && close(fd) == 0 &&
           setenv("TERM", "xterm", 1) == 0 && unsetenv("OMPI_COMM_WORLD_RANK") == 0;
}

void terminal_read(int fd, char *text, size_t text_bytes, const char *wanted, double limit_s)
{
    enum { LOOK_MS = 1000 };
    double deadline = bl_now_s() + limit_s;
    size_t used = strlen(text);

    while (!strstr(text, wanted)) {
        struct pollfd asked = {.fd = fd, .events = POLLIN};
        char piece[512];
        if (bl_now_s() > deadline)
            fail_msg("the terminal did not show '%s' in %g s: %s", wanted, limit_s, text);
        if (poll(&asked, 1, LOOK_MS) <= 0) continue;
        ssize_t n = read(fd, piece, sizeof piece);
        if (n <= 0) fail_msg("the terminal ended and did not show '%s': %s", wanted, text);
        size_t room = text_bytes - 1 - used;
        if ((size_t)n > room) {
            memmove(text, text + text_bytes / 2, used - text_bytes / 2 + 1);
            used = strlen(text);
        }
        memcpy(text + used, piece, (size_t)n);
        used += (size_t)n;
        text[used] = '\0';
    }
}
