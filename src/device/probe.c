/* SPDX-License-Identifier: Apache-2.0 */
/* probe.c -- finds GPUs in a short-lived child process. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/thread.h"
#include "device/device.h"

typedef struct answer {
    bl_gpu_info gpu;
    bl_error error;
} answer;

_Static_assert(sizeof(answer) <= 4096, "a pipe takes it in one piece");

/* The question's process: it leaves by _exit, so that nothing of the parent's is flushed or freed
 * twice. A driver may keep it for long: it ends with its parent. */
static void answer_and_leave(int index, int fd, pid_t parent)
{
    answer a;

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    memset(&a, 0, sizeof a);
    bl_error_save(&a.error, bl_device_find_cuda(index, &a.gpu));
    bool is_written = write(fd, &a, sizeof a) == (ssize_t)sizeof a;
    _exit(is_written ? 0 : 1);
}

static bool read_answer(int fd, answer *a)
{
    size_t n = 0;

    while (n < sizeof *a) {
        ssize_t got = read(fd, (char *)a + n, sizeof *a - n);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return false;
        n += (size_t)got;
    }
    return true;
}

bl_status bl_device_probe_cuda(int index, bl_gpu_info *out)
{
    int ends[2], status = 0;
    answer a;

    *out = (bl_gpu_info){0};
    if (!bl_device_has_cuda()) return bl_device_find_cuda(index, out);
    if (pipe2(ends, O_CLOEXEC) != 0) return bl_fail_errno(BL_EIO, "CUDA: pipe2");
    /* A terminal's Ctrl-C goes to both: it is the parent's to answer. */
    sigset_t old;
    pid_t parent = getpid();
    bl_thread_block_signals(&old);
    pid_t pid = fork();
    if (pid == 0) answer_and_leave(index, ends[1], parent);
    int code = errno;
    bl_thread_restore_signals(&old);
    close(ends[1]);
    bool has_answer = pid > 0 && read_answer(ends[0], &a);
    close(ends[0]);
    while (pid > 0 && waitpid(pid, &status, 0) < 0 && errno == EINTR) continue;
    errno = code;
    if (pid < 0) return bl_fail_errno(BL_EIO, "CUDA: fork");
    if (!has_answer && WIFSIGNALED(status))
        return BL_FAIL(BL_ELIMIT, "CUDA: the process that looks for GPUs ended by signal %d (%s)",
                       WTERMSIG(status), strsignal(WTERMSIG(status)));
    if (!has_answer) return BL_FAIL(BL_ELIMIT, "CUDA: the process that looks for GPUs has ended");
    *out = a.gpu;
    return a.error.status == BL_OK ? BL_OK : bl_error_restore(&a.error);
}
