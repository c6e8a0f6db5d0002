/* SPDX-License-Identifier: Apache-2.0 */
/* report.c -- a job's final message. Nothing else in comm and job prints an error.
 *
 * | the end | is printed by | through |
 * | a job of one process | that process | bl_launch_print_error |
 * | before the processes are connected | each process that has an error's text |
 *   bl_launch_print_error |
 * | a rank has failed | the lowest rank that answers: its wire asks for it | job_report |
 * | all ranks have agreed to stop | rank 0 | job_report |
 * | any of these in a child | its parent, which judges (parent/verdict.c) | a message,
 *   bl_launch_print_error |
 *
 * After job_report a process prints nothing more, and its error's text is empty, so that its last
 * words are. */
#include <sys/socket.h>

#include "base/log.h"
#include "job/internal.h"

/* False: this process is not a child, or its parent does not listen. Takes no memory: the error may
 * be that there is none, for a new thread before others. */
static bool tell_parent(const bl_error *error)
{
    job_message message = {.error = *error};
    int fd = job_child_control();

    return fd >= 0 && send(fd, &message, sizeof message, MSG_NOSIGNAL) == (ssize_t)sizeof message;
}

static void print_error(const bl_error *error)
{
    if (tell_parent(error)) return;
    if (error->status == BL_ESTOPPED)
        bl_log_stopped(error->text);
    else
        bl_log_error(error->text);
}

void job_report(const bl_error *error)
{
    print_error(error);
    bl_log_set_silent(true);
}

bl_status job_end_report(bl_status st)
{
    bl_error error = {.status = st};

    if (st == BL_OK || st == BL_ESTOPPED) (void)tell_parent(&error);
    return bl_error_restore(&error);
}

void bl_launch_print_error(bl_status st)
{
    bl_error error;

    bl_error_save(&error, st);
    if (error.text[0]) print_error(&error);
}
