/* SPDX-License-Identifier: Apache-2.0 */
/* mailbox.c -- rings of slots in shared memory, one writer and one reader each: two counters, of
 * slots filled and emptied, are all that both sides read. */
#include "comm/wire/mailbox.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Data that one process writes and another reads has separate cache lines. */
enum { LINE_BYTES = 64 };

typedef struct mail_slot {
    int32_t tag;
    uint32_t n_bytes;
    _Alignas(LINE_BYTES) unsigned char bytes[COMM_MAIL_SLOT_BYTES];
} mail_slot;

struct comm_mail_ring {
    _Alignas(LINE_BYTES) atomic_uint n_filled;
    _Alignas(LINE_BYTES) atomic_uint n_emptied;
    mail_slot slots[COMM_MAIL_SLOTS];
};

typedef struct mail_sleeper {
    _Alignas(LINE_BYTES) atomic_bool is_asleep;
} mail_sleeper;

_Static_assert(ATOMIC_INT_LOCK_FREE == 2 && ATOMIC_BOOL_LOCK_FREE == 2,
               "atomics work between processes");
_Static_assert((COMM_MAIL_SLOTS & (COMM_MAIL_SLOTS - 1)) == 0,
               "counts wrap around at a whole ring");

struct comm_mail {
    int index, n;
    size_t n_bytes;
    mail_sleeper *sleepers; /* [n]: the start of the memory */
    comm_mail_ring *rings;  /* [n][n], from and to */
};

bl_status comm_mail_open(int fd, int index, int n, comm_mail **out)
{
    comm_mail *mail = calloc(1, sizeof *mail);
    bl_status st = BL_OK;

    *out = NULL;
    if (!mail) {
        close(fd);
        return BL_FAIL(BL_ENOMEM, "the shared memory of %d processes", n);
    }
    mail->index = index;
    mail->n = n;
    size_t head_bytes = (size_t)n * sizeof *mail->sleepers;
    mail->n_bytes = head_bytes + (size_t)n * (size_t)n * sizeof *mail->rings;
    unsigned char *memory = MAP_FAILED;
    if (ftruncate(fd, (off_t)mail->n_bytes) == 0)
        memory = mmap(NULL, mail->n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED)
        st = bl_fail_errno(BL_EIO, "shared memory of %zu bytes for %d processes", mail->n_bytes, n);
    close(fd);
    if (st != BL_OK) {
        free(mail);
        return st;
    }
    mail->sleepers = (mail_sleeper *)memory;
    mail->rings = (comm_mail_ring *)(memory + head_bytes);
    *out = mail;
    return BL_OK;
}

void comm_mail_close(comm_mail *mail)
{
    if (mail) munmap(mail->sleepers, mail->n_bytes);
    free(mail);
}

comm_mail_ring *comm_mail_ring_of(comm_mail *mail, int from, int to)
{
    return &mail->rings[from * mail->n + to];
}

bool comm_mail_has_room(comm_mail_ring *ring)
{
    return atomic_load_explicit(&ring->n_filled, memory_order_relaxed) -
               atomic_load(&ring->n_emptied) <
           COMM_MAIL_SLOTS;
}

size_t comm_mail_put(comm_mail_ring *ring, int tag, const void *bytes, size_t n_bytes)
{
    if (!comm_mail_has_room(ring)) return 0;
    unsigned n_filled = atomic_load_explicit(&ring->n_filled, memory_order_relaxed);
    mail_slot *slot = &ring->slots[n_filled % COMM_MAIL_SLOTS];
    if (n_bytes > COMM_MAIL_SLOT_BYTES) n_bytes = COMM_MAIL_SLOT_BYTES;
    slot->tag = tag;
    slot->n_bytes = (uint32_t)n_bytes;
    memcpy(slot->bytes, bytes, n_bytes);
    atomic_store(&ring->n_filled, n_filled + 1);
    return n_bytes;
}

const void *comm_mail_look(comm_mail_ring *ring, int *tag, size_t *n_bytes)
{
    unsigned n_emptied = atomic_load_explicit(&ring->n_emptied, memory_order_relaxed);
    const mail_slot *slot = &ring->slots[n_emptied % COMM_MAIL_SLOTS];
    if (atomic_load(&ring->n_filled) == n_emptied) return NULL;
    *tag = slot->tag;
    *n_bytes = slot->n_bytes;
    return slot->bytes;
}

void comm_mail_drop(comm_mail_ring *ring)
{
    unsigned n_emptied = atomic_load_explicit(&ring->n_emptied, memory_order_relaxed);
    atomic_store(&ring->n_emptied, n_emptied + 1);
}

void comm_mail_set_asleep(comm_mail *mail, bool is_asleep)
{
    atomic_store(&mail->sleepers[mail->index].is_asleep, is_asleep);
}

bool comm_mail_must_wake(comm_mail *mail, int index)
{
    atomic_bool *is_asleep = &mail->sleepers[index].is_asleep;
    return atomic_load(is_asleep) && atomic_exchange(is_asleep, false);
}
