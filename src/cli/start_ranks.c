/* SPDX-License-Identifier: Apache-2.0 */
/* start_ranks.c -- a command with several ranks: starts itself once per rank and waits for them. */
#include <errno.h> /* program_invocation_name */
#include <stdlib.h>

#include "cli/cli.h"

bl_status bl_cli_start_ranks(bl_launch *launch, int n_here, const char *command, int argc,
                             char *const *argv, bool takes_requests, double deadline_s)
{
    static const double EXIT_S = 60.0; /* pinned memory of hundreds of GB takes seconds to go */
    const char **words = calloc((size_t)argc + 3, sizeof *words);

    if (!words) return BL_FAIL(BL_ENOMEM, "the arguments of %d ranks", n_here);
    words[0] = program_invocation_name;
    words[1] = command;
    for (int i = 0; i < argc; i++) words[2 + i] = argv[i];
    bl_status st = bl_launch_run_ranks(launch, &(bl_launch_ranks){.n_here = n_here,
                                                                  .argv = (char *const *)words,
                                                                  .takes_requests = takes_requests,
                                                                  .deadline_s = deadline_s,
                                                                  .exit_s = EXIT_S});
    free(words);
    return st;
}
