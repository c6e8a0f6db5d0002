/* SPDX-License-Identifier: Apache-2.0 */
/* The program: finds the command, and turns a failure into one line on stderr and an
 * exit code. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>
#ifdef BALLAST_HAS_MIMALLOC
#include <mimalloc.h>
#endif

#include "base/build_id.h"
#include "base/log.h"
#include "base/sizes.h"
#include "base/version.h"
#include "cli/cli.h"
#include "device/device.h"
#include "job/launch.h"

bl_status bl_cli_read(const bl_options *options, int argc, char *const *argv, int max_words,
                      const char **words, int *n_words)
{
    BL_TRY(bl_options_init(options));
    BL_TRY(bl_options_read_line(options, argc, argv, max_words, words, n_words));
    return bl_options_check_required(options);
}

static bool asks_for_help(int argc, char *const *argv)
{
    for (int i = 0; i < argc && strcmp(argv[i], "--") != 0; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) return true;
    }
    return false;
}

static bl_status dispatch(int argc, char *const *argv)
{
    if (argc < 2) return BL_FAIL(BL_EUSAGE, "no command; `ballast help` lists them");
    const char *name = argv[1];
    if (strcmp(name, "--version") == 0) name = "version";
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0) name = "help";

    const bl_command *command = bl_cli_find_command(name);
    if (!command) return BL_EUSAGE;
    if (asks_for_help(argc - 2, argv + 2)) {
        bl_cli_print_command(command);
        return BL_OK;
    }
    if (command->is_job)
        signal(SIGPIPE, SIG_IGN); /* of a log; output at the end is checked below */
    return command->run(argc - 2, argv + 2);
}

/* A standard stream that is closed when the program starts stays useless, but nothing else gets its
 * number: output to it would end up in that file. Read-only, so that writing a result to it is
 * still an error. */
static void occupy_standard_streams(void)
{
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++) {
        if (fcntl(fd, F_GETFD) >= 0 || errno != EBADF) continue;
        if (open("/dev/null", O_RDONLY) < 0)
            (void)!open("/", O_RDONLY | O_DIRECTORY); /* takes the lowest number */
    }
}

static _Noreturn void leave_by_signal(int signal_number)
{
    _exit(128 + signal_number);
}

/* The kernel keeps signals without a handler from process 1, which the program is in a container:
 * it would not notice a request to stop. A command with its own handlers sets them later;
 * processes that this one starts have none of these. */
static void take_signals_as_process_1(void)
{
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1};
    struct sigaction leave = {.sa_handler = leave_by_signal}, before;

    if (getpid() != 1) return;
    sigemptyset(&leave.sa_mask);
    for (size_t i = 0; i < BL_COUNT(signals); i++)
        if (sigaction(signals[i], NULL, &before) == 0 && before.sa_handler == SIG_DFL)
            sigaction(signals[i], &leave, NULL);
}

/* Each thread's stack has the size of the limit, and an overflow is SIGSEGV. A training needs
 * between 64 and 128 KiB. */
#define STACK_NEEDED_BYTES ((rlim_t)256 * 1024)

/* Prints its error without stdio, whose buffer for stderr takes 8 KiB of the stack. */
static bl_status check_stack_limit(void)
{
    static char line[128];
    struct rlimit limit;

    if (getrlimit(RLIMIT_STACK, &limit) != 0 || limit.rlim_cur >= STACK_NEEDED_BYTES) return BL_OK;
    int n_bytes = snprintf(line, sizeof line,
                           "ballast: error: the stack limit is %llu KiB and %llu KiB are needed: "
                           "ulimit -s 8192\n",
                           (unsigned long long)limit.rlim_cur / 1024,
                           (unsigned long long)STACK_NEEDED_BYTES / 1024);
    (void)!write(STDERR_FILENO, line, (size_t)n_bytes);
    return BL_ELIMIT;
}

int main(int argc, char **argv)
{
    if (check_stack_limit() != BL_OK) return bl_status_exit_code(BL_ELIMIT);
    occupy_standard_streams();
    take_signals_as_process_1();
#ifdef BALLAST_HAS_MIMALLOC
    mi_option_set_default(mi_option_decommit_delay,
                          1); /* ms until freed pages go back: docs/internals/plan.md */
#endif
    /* A file beyond the limit is an error to report, EFBIG, not the end of the process. */
    signal(SIGXFSZ, SIG_IGN);
    bl_device_prepare_environment(); /* while there are no threads */
    bl_status st = dispatch(argc, argv);
    if (st == BL_OK && (fflush(stdout) != 0 || ferror(stdout)))
        st = bl_fail_errno(BL_EIO, "writing to the standard output");
    if (st != BL_OK) bl_launch_print_error(st); /* unless another process of the job has said it */
    return bl_status_exit_code(st);
}
