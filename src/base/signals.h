/* SPDX-License-Identifier: Apache-2.0 */
/* signals.h -- the signals that ask a run to stop: SIGTERM, SIGINT, SIGUSR1, SIGXCPU and, unless
 * the process ignores it, SIGHUP. nohup makes a process ignore SIGHUP; it then stays ignored. And
 * SIGUSR2, which asks for a report. */
#ifndef BALLAST_BASE_SIGNALS_H
#define BALLAST_BASE_SIGNALS_H

#include <signal.h>
#include <stdbool.h>

/* Overwrites *signals. */
void bl_stop_signals_list(sigset_t *signals);

/* Installs `handler` for each of them. */
void bl_stop_signals_handle(void (*handler)(int signal_number));

/* Whether one request may raise the signal several times. A terminal that closes sends SIGHUP, and
 * so does its shell; the limit of CPU time sends SIGXCPU each second. */
bool bl_stop_signal_repeats(int signal_number);

/* Asks a training for its report; not a request to stop. */
#define BL_REPORT_SIGNAL SIGUSR2

/* Keeps it from ending the process: blocked in this thread, and in those that it starts. */
void bl_report_signal_block(void);

/* Takes a pending one off this thread. */
void bl_report_signal_discard(void);

/* Takes pending repetitions off a thread that blocks `signals`, those of bl_stop_signals_list. */
void bl_stop_signals_discard_repeated(const sigset_t *signals);

#endif
