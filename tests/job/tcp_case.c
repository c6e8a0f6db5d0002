/* SPDX-License-Identifier: Apache-2.0 */
/* tcp_case.c -- listening and connecting sockets on the loopback address. */
#include "tcp_case.h"

#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"

const job_address tcp_here = {.bytes = {127, 0, 0, 1}};

double tcp_soon(void)
{
    return bl_now_s() + 120;
}

job_listener tcp_listen_here(void)
{
    job_listener l;
    assert_int_equal(job_tcp_listen(&tcp_here, 1, 0, &l), BL_OK);
    assert_int_equal(l.n, 1);
    return l;
}

int tcp_accept(const job_listener *l)
{
    struct pollfd p = {.fd = l->fds[0], .events = POLLIN};
    assert_int_equal(poll(&p, 1, 120000), 1);
    int fd = accept(l->fds[0], NULL, NULL);
    assert_true(fd >= 0);
    return fd;
}

int tcp_connect(uint16_t port)
{
    int fd = job_tcp_connect(&tcp_here, port, tcp_soon());
    assert_true(fd >= 0);
    return fd;
}

pid_t tcp_start(int (*run)(const void *), const void *argument)
{
    pid_t pid = fork();

    assert_true(pid >= 0);
    if (pid > 0) return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    _exit(run(argument));
}

int tcp_wait_for(pid_t pid)
{
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
