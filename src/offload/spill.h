/* SPDX-License-Identifier: Apache-2.0 */
/* spill.h -- a stack whose lower entries are in host memory: activations that a forward pass saves
 * for the backward pass, newest first.
 *
 * Entries 0, 1, 2, .. are put in this order and taken in the opposite one. Entry e is always in
 * slot e mod n_slots of device memory while it is there. It is copied out when it is put, and comes
 * back when entry e + n_slots is dropped: the order of the stack says when each transfer is due, so
 * none is requested.
 *
 * A transfer is queued when its slot is left and must have ended when the slot is wanted again.
 * With two slots and one entry per visit, that is one visit later: transfers that take no longer
 * than a visit cost no time, and a third slot would only even out visits of different lengths, or
 * entries of different sizes.
 *
 *   slot state  its entry e is                           entered by           left by
 *   EMPTY       not needed (the bytes may be there)      create, begin, drop  reserve
 *   OPEN        being written                            reserve(e)           put(e)
 *   KEPT        complete, on its way out if e < n_host   put(e)               take(e), reserve(e +
 *                                                                             n_slots)
 *   COMING      on its way back                          drop(e + n_slots)    take(e)
 *   TAKEN       in use                                   take(e)              drop(e)
 *
 * Invariants (bl_spill_validate). Let `top` be the number of entries that were put and not dropped.
 *   (1) Slot s holds an entry e with e mod n_slots = s, or none. (2) OPEN is entry top, and before
 *   the first take only; TAKEN is entry top - 1; COMING comes after the first take only. (3) The
 *   newest n_slots entries below top (one less while one is OPEN) are KEPT, COMING or TAKEN, when
 *   the round keeps. (4) All older ones are in host memory or on their way there, when the round
 *   keeps.
 * Beyond what can be checked: (5) whatever writes into a slot waits for the transfer that last
 * touched it, and a transfer waits for the work that last touched its slot. */
#ifndef BALLAST_OFFLOAD_SPILL_H
#define BALLAST_OFFLOAD_SPILL_H

#include <stdbool.h>

#include "device/device.h"
#include "device/timeline.h"

typedef struct bl_spill_options {
    bl_device *device;
    bl_stream *compute; /* writes and reads the entries; borrowed */
    /* Carries the transfers; borrowed, another stream than compute; NULL when n_host = 0. */
    bl_stream *copy;
    int64_t n_entries; /* at most, in a round */
    int64_t n_slots;   /* 1..n_entries */
    /* Entries 0..n_host - 1 are copied out: none, or at least n_entries - n_slots of them. In a
     * round that puts fewer than n_host + n_slots, the entries that are taken must not be written:
     * their copies may be in flight, and look finds them afterwards. */
    int64_t n_host;
    /* Entry e is n_rows rows of row_bytes(user, e) bytes; user is borrowed. */
    int64_t n_rows;
    size_t (*row_bytes)(const void *user, int64_t entry);
    const void *user;
    /* Of bl_spill_measure; borrowed: device memory, and BL_SPACE_HOST memory. */
    void *slots, *host;
    bl_timeline *timeline; /* borrowed; may be NULL */
    int item;              /* in spans and stalls, whose unit is the entry */
} bl_spill_options;

typedef struct bl_spill bl_spill;

/* A slot has room for the largest of its entries; an entry in host memory takes its own bytes. Of
 * n_entries, n_slots, n_host, n_rows, row_bytes and user. */
typedef struct bl_spill_bytes {
    size_t slots, host;
} bl_spill_bytes;
bl_spill_bytes bl_spill_measure(const bl_spill_options *options);

bl_status bl_spill_create(const bl_spill_options *options, bl_spill **out);
void bl_spill_destroy(bl_spill *spill); /* after both streams are idle; NULL is fine */

/* Starts a round; drops the entries of the last. The first n_rows of each entry (<= those of the
 * options) are used and moved. keep false: no entry will be taken, so none is moved and slots are
 * reused in turn. */
bl_status bl_spill_begin(bl_spill *spill, int64_t n_rows, bool keep);
/* After begin: entries before `first` are not taken in this round, so they are not loaded. */
void bl_spill_take_from(bl_spill *spill, int64_t first);

/* The address of `entry` while it is in device memory: valid for tasks queued on compute between
 * reserve and take, or take and drop. After put the slot may still be read, until entry + n_slots
 * is reserved. */
void *bl_spill_at(const bl_spill *spill, int64_t entry);

/* All four queue work and return. The wrong entry is BL_EINTERNAL; when the copy stream has failed
 * by now, its error; a later failure of it reaches compute. */
bl_status bl_spill_reserve(bl_spill *spill,
                           int64_t entry); /* tasks queued on compute from now on may write it */
bl_status bl_spill_put(bl_spill *spill, int64_t entry); /* those queued so far complete it */
bl_status bl_spill_take(bl_spill *spill,
                        int64_t entry); /* those queued from now on see it as it was put */
bl_status bl_spill_drop(bl_spill *spill,
                        int64_t entry); /* those queued so far were the last to use it */

/* With both streams idle: where `entry` of the latest round is as it was put (or as its taker left
 * it), in host or device memory: to be copied from. NULL when that copy has been overwritten. Valid
 * until the next round. */
const void *bl_spill_look(const bl_spill *spill, int64_t entry);

/* Checks the invariants; BL_EINTERNAL names the broken one. */
bl_status bl_spill_validate(const bl_spill *spill);

#endif
