/* SPDX-License-Identifier: Apache-2.0 */
/* echo.h -- a communicator of many ranks of which one alone is there: it measures one rank's whole
 * work on one device. What would come from the others is a copy of its own, made by the device;
 * what it takes is at least what the bytes would take on a link of a given rate. Sums are its own
 * values. */
#ifndef BALLAST_BENCH_COMMAND_ECHO_H
#define BALLAST_BENCH_COMMAND_ECHO_H

#include "comm/comm.h"

/* bytes_per_s: that a rank receives while all do the same; 0: as fast as the device copies. split
 * gives one of n_ranks again. BL_ENOMEM. */
bl_status bl_echo_create(int rank, int n_ranks, double bytes_per_s, bl_comm **out);

#endif
