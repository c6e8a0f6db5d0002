/* SPDX-License-Identifier: Apache-2.0 */
/* signals.c -- the one list of signals that ask a run to stop, and the one that asks for a
 * report. */
#include "base/signals.h"

#include <stddef.h>
#include <time.h>

#include "base/sizes.h"

static const int stop_signals[] = {SIGTERM, SIGINT, SIGUSR1, SIGXCPU, SIGHUP};

/* A blocked signal stays pending even where the process ignores it, so an ignored SIGHUP is left
 * out. */
void bl_stop_signals_list(sigset_t *signals)
{
    struct sigaction action;

    sigemptyset(signals);
    for (size_t i = 0; i < BL_COUNT(stop_signals); i++) {
        int number = stop_signals[i];
        bool is_ignored = sigaction(number, NULL, &action) == 0 && action.sa_handler == SIG_IGN;
        if (number != SIGHUP || !is_ignored) sigaddset(signals, number);
    }
}

void bl_stop_signals_handle(void (*handler)(int signal_number))
{
    struct sigaction action = {.sa_handler = handler};
    sigset_t signals;

    sigemptyset(&action.sa_mask);
    bl_stop_signals_list(&signals);
    for (size_t i = 0; i < BL_COUNT(stop_signals); i++)
        if (sigismember(&signals, stop_signals[i])) sigaction(stop_signals[i], &action, NULL);
}

bool bl_stop_signal_repeats(int signal_number)
{
    return signal_number == SIGXCPU || signal_number == SIGHUP;
}

static void only_report_signal(sigset_t *signals)
{
    sigemptyset(signals);
    sigaddset(signals, BL_REPORT_SIGNAL);
}

void bl_report_signal_block(void)
{
    sigset_t signals;

    only_report_signal(&signals);
    pthread_sigmask(SIG_BLOCK, &signals, NULL);
}

void bl_report_signal_discard(void)
{
    const struct timespec now = {0};
    sigset_t signals;

    only_report_signal(&signals);
    while (sigtimedwait(&signals, NULL, &now) > 0) continue;
}

void bl_stop_signals_discard_repeated(const sigset_t *signals)
{
    const struct timespec now = {0};
    sigset_t repeated;

    sigemptyset(&repeated);
    for (size_t i = 0; i < BL_COUNT(stop_signals); i++)
        if (bl_stop_signal_repeats(stop_signals[i]) && sigismember(signals, stop_signals[i]))
            sigaddset(&repeated, stop_signals[i]);
    while (sigtimedwait(&repeated, NULL, &now) > 0) continue;
}
