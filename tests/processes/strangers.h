/* SPDX-License-Identifier: Apache-2.0 */
/* strangers.h -- connections of a process outside of the job, to the ports at which its processes
 * listen. */
#ifndef BALLAST_TESTS_STRANGERS_H
#define BALLAST_TESTS_STRANGERS_H

#include <sys/types.h>

enum { STRANGERS_MAX = 64 };

typedef struct strangers {
    int fds[STRANGERS_MAX], n;
} strangers;

/* Goes to every TCP port at which the process listens, says `word`, and stays. Returns how many
 * there are. */
int strangers_visit(pid_t pid, const char *word, strangers *all);
void strangers_leave(strangers *all);

#endif
