/* SPDX-License-Identifier: Apache-2.0 */
/* echo.h -- a communicator of many ranks of which only one is real: it measures one rank's whole
 * work on one device. The device copies this rank's data in place of the other ranks' data; a
 * collective takes at least the time of its bytes on a link of a given rate. With a rate, memory
 * that a gather fills again keeps the other ranks' data of the first time, as a link costs the
 * device no copies. Sums are this rank's values. */
#ifndef BALLAST_BENCH_COMMAND_ECHO_H
#define BALLAST_BENCH_COMMAND_ECHO_H

#include "comm/comm.h"

/* bytes_per_s: that a rank receives while all do the same; 0: as fast as the device copies. split
 * gives one of n_ranks again. Destroy it before the device of its streams. BL_ENOMEM. */
bl_status bl_echo_create(int rank, int n_ranks, double bytes_per_s, bl_comm **out);

#endif
