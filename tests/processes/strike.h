/* SPDX-License-Identifier: Apache-2.0 */
/* strike.h -- a fault in one rank of a job of processes, at a chosen point: a library for
 * LD_PRELOAD (strike.c), which the parent's children inherit. The program has no code for it.
 *
 *   STRIKE_VARIABLE   RANK:WHERE:N:WHAT[=SECONDS]   1:wire:17:kill, 0:file:3:slow=9.5
 *   STRIKE_LOG_VARIABLE   a file that gets a line when it has happened (CLOCK_MONOTONIC, seconds),
 *                         or, with WHAT
 *                     count, a line per point: "wire 17 MESSAGE", "file 3 rename"
 *
 * WHERE, the points of a rank, counted from 1:
 *   begin   before main
 *   wire    a frame (comm/wire/peer.h) to the next rank, before its first byte: every collective
 *           has one or more
 *   file    a call that makes a file or changes one: open to write, write, fsync, rename, mkdir,
 *           unlink, ftruncate
 *   end     when the program has returned from main, or calls _exit
 *
 * WHAT:
 *   kill    SIGKILL
 *   torn    SIGKILL, after half of the frame's header (of `wire`)
 *   stop    SIGSTOP, without SIGCONT
 *   pause   the whole process, for SECONDS
 *   slow    all threads for SECONDS, except the wire's
 *   fail    the call fails: at `wire` the connection does (ETIMEDOUT, on both ends), at `file` with
 *           EIO */
#ifndef BALLAST_TESTS_STRIKE_H
#define BALLAST_TESTS_STRIKE_H

#define STRIKE_VARIABLE     "BALLAST_TEST_STRIKE"
#define STRIKE_LOG_VARIABLE "BALLAST_TEST_STRUCK"

#endif
