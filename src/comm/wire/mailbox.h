/* SPDX-License-Identifier: Apache-2.0 */
/* mailbox.h -- bulk data between the processes of a host, through memory that they share: for each
 * ordered pair of them a ring of slots, which one process fills and the other empties. No function
 * waits: each reports a ring that is full or empty.
 *
 *   n_filled - n_emptied is in 0 .. COMM_MAIL_SLOTS; the sender alone changes the first, the
 *   receiver alone the second, each after it is done with the slot's bytes.
 *
 * Sleep: a process says that it is about to sleep, and then looks once more; a process that changes
 * a count then looks whether the other sleeps, and rings (a frame through the socket) if so. In the
 * one total order of these four accesses (C11, 7.17.3: seq_cst) either the sleeper sees the change
 * or the other sees the sleeper. */
#ifndef BALLAST_COMM_WIRE_MAILBOX_H
#define BALLAST_COMM_WIRE_MAILBOX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum { COMM_MAIL_SLOTS = 8, COMM_MAIL_SLOT_BYTES = 64 << 10 };

typedef struct comm_mail comm_mail;           /* the shared memory of a host */
typedef struct comm_mail_ring comm_mail_ring; /* of it: from one process to another */

/* Process `index` of n. Takes the file over, sets its size and maps it: n (n - 1) rings of half a
 * megabyte, memory once it is used. */
bl_status comm_mail_open(int fd, int index, int n, comm_mail **out);
void comm_mail_close(comm_mail *mail); /* NULL is fine */

comm_mail_ring *comm_mail_ring_of(comm_mail *mail, int from, int to);

/* Copies up to a slot of `bytes` into the ring; returns how many: 0 when it is full. */
size_t comm_mail_put(comm_mail_ring *ring, int tag, const void *bytes, size_t n_bytes);
bool comm_mail_has_room(comm_mail_ring *ring);

/* The oldest filled slot, which stays until it is dropped; NULL: none. */
const void *comm_mail_look(comm_mail_ring *ring, int *tag, size_t *n_bytes);
void comm_mail_drop(comm_mail_ring *ring);

void comm_mail_set_asleep(comm_mail *mail, bool is_asleep); /* this process */
/* Whether process `index` sleeps, and no thread has undertaken to wake it: the caller must. */
bool comm_mail_must_wake(comm_mail *mail, int index);

#endif
