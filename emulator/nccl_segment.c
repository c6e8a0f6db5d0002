/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_segment.c -- the shared memory that the ranks of an emulated NCCL communicator meet in: ids,
 * members, rings of messages, futexes. */
#include "nccl_segment.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "nccl_fake.h"
#include "runtime.h"

/* The contents of a unique id. */
typedef struct address {
    char magic[8];
    uint64_t token;
    int32_t pid, fd;
} address;

static const char MAGIC[8] = "fakeNCL";

_Static_assert(sizeof(address) <= NCCL_UNIQUE_ID_BYTES, "fits");

static address address_of(const ncclUniqueId *id)
{
    address a;
    memcpy(&a, id->internal, sizeof a);
    return a;
}

uint64_t emulated_nccl_id_token(const ncclUniqueId *id)
{
    return address_of(id).token;
}

static size_t segment_bytes(int n_ranks)
{
    return sizeof(nccl_segment) + (size_t)n_ranks * ((size_t)n_ranks + 1) * sizeof(nccl_ring);
}

/* ---- ids ---- */

ncclResult_t emulated_nccl_make_id(ncclUniqueId *out)
{
    address a = {.pid = (int32_t)getpid()};
    memcpy(a.magic, MAGIC, sizeof a.magic);
    memset(out, 0, sizeof *out);
    if (getrandom(&a.token, sizeof a.token, 0) != sizeof a.token)
        return emulated_nccl_fail(ncclSystemError, "getrandom: %s", strerror(errno));
    a.fd = memfd_create("fake-nccl", MFD_CLOEXEC);
    if (a.fd < 0) return emulated_nccl_fail(ncclSystemError, "memfd_create: %s", strerror(errno));
    if (ftruncate(a.fd, (off_t)segment_bytes(NCCL_MAX_RANKS)) != 0 ||
        pwrite(a.fd, &a.token, sizeof a.token, offsetof(nccl_segment, token)) != sizeof a.token) {
        close(a.fd);
        return emulated_nccl_fail(ncclSystemError, "a memory file: %s", strerror(errno));
    }
    memcpy(out->internal, &a, sizeof a);
    return ncclSuccess;
}

/* Several ranks may be of the process that made the id: the first who is done closes the
 * descriptor, whose number may be another file's by the time that the second is. */
void emulated_nccl_forget_id(const ncclUniqueId *id)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    address a = address_of(id);
    uint64_t token = 0;
    if (a.pid != getpid()) return;
    pthread_mutex_lock(&lock);
    if (pread(a.fd, &token, sizeof token, offsetof(nccl_segment, token)) == sizeof token &&
        token == a.token)
        close(a.fd);
    pthread_mutex_unlock(&lock);
}

/* ---- members ---- */

static ncclResult_t open_segment(nccl_membership *m, const address *a)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", a->pid, a->fd);
    m->fd = open(path, O_RDWR | O_CLOEXEC);
    if (m->fd < 0)
        return emulated_nccl_fail(kill(a->pid, 0) == 0 ? ncclSystemError : ncclRemoteError,
                                  "the process %d that made the unique id is gone, or not of this "
                                  "process namespace: %s",
                                  a->pid, strerror(errno));
    m->bytes = segment_bytes(m->n_ranks);
    struct stat info;
    void *memory = fstat(m->fd, &info) == 0 && (size_t)info.st_size >= m->bytes
                       ? mmap(NULL, m->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, m->fd, 0)
                       : MAP_FAILED;
    if (memory == MAP_FAILED) {
        close(m->fd);
        return emulated_nccl_fail(ncclSystemError, "no shared memory behind the unique id");
    }
    m->segment = memory;
    if (m->segment->token == a->token) return ncclSuccess;
    emulated_nccl_leave(m, false, false);
    return emulated_nccl_fail(ncclSystemError, "the unique id is over");
}

ncclResult_t emulated_nccl_join(nccl_membership *m, const ncclUniqueId *id, int rank, int n_ranks)
{
    address a = address_of(id);
    struct flock own = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
    uint32_t expected = 0;

    *m = (nccl_membership){.fd = -1, .rank = rank, .n_ranks = n_ranks};
    if (memcmp(a.magic, MAGIC, sizeof MAGIC) != 0)
        return emulated_nccl_fail(ncclInvalidArgument,
                                  "a unique id that ncclGetUniqueId did not make");
    ncclResult_t result = open_segment(m, &a);
    if (result != ncclSuccess) return result;
    if (!atomic_compare_exchange_strong(&m->segment->n_ranks, &expected, (uint32_t)n_ranks) &&
        expected != (uint32_t)n_ranks)
        result = emulated_nccl_fail(ncclInvalidUsage, "rank %d joins %d ranks, another one %u",
                                    rank, n_ranks, expected);
    else if (fcntl(m->fd, F_OFD_SETLK, &own) != 0)
        result = emulated_nccl_fail(ncclInvalidUsage, "two ranks are number %d", rank);
    if (result != ncclSuccess)
        emulated_nccl_leave(m, false, false);
    else
        atomic_store(&m->segment->places[rank].is_taken, 1); /* a rank that is seen has the lock */
    return result;
}

void emulated_nccl_leave(nccl_membership *m, bool in_order, bool keeps)
{
    if (in_order) atomic_store(&m->segment->places[m->rank].has_left, 1);
    close(m->fd); /* with the lock */
    m->fd = -1;
    if (!keeps) {
        munmap(m->segment, m->bytes);
        m->segment = NULL;
    }
}

/* Locks of an open file description have no process; the question needs no lock of one's own. */
bool emulated_nccl_is_dead(const nccl_membership *m, int rank)
{
    nccl_place *place = &m->segment->places[rank];
    struct flock other = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
    if (rank == m->rank || !atomic_load(&place->is_taken)) return false;
    return fcntl(m->fd, F_OFD_GETLK, &other) == 0 && other.l_type == F_UNLCK &&
           !atomic_load(&place->has_left);
}

bool emulated_nccl_has_dead(const nccl_membership *m)
{
    for (int rank = 0; rank < m->n_ranks; rank++)
        if (emulated_nccl_is_dead(m, rank)) return true;
    return false;
}

nccl_ring *emulated_nccl_pair(const nccl_membership *m, int from, int to)
{
    return &m->segment->rings[from * m->n_ranks + to];
}

nccl_ring *emulated_nccl_own_ring(const nccl_membership *m, int from)
{
    return &m->segment->rings[m->n_ranks * m->n_ranks + from];
}

/* ---- notices and bells ---- */

void emulated_nccl_announce(nccl_notice *notices, uint64_t number, const int64_t words[NCCL_WORDS])
{
    nccl_notice *notice = &notices[number % NCCL_AHEAD];
    memcpy(notice->words, words, sizeof notice->words);
    atomic_store_explicit(&notice->number, number + 1, memory_order_release);
}

bool emulated_nccl_read(const nccl_notice *notices, uint64_t number, int64_t words[NCCL_WORDS])
{
    const nccl_notice *notice = &notices[number % NCCL_AHEAD];
    if (atomic_load_explicit(&notice->number, memory_order_acquire) != number + 1) return false;
    memcpy(words, notice->words, sizeof notice->words);
    return true;
}

static long futex(const _Atomic uint32_t *at, int operation, uint32_t value,
                  const struct timespec *most)
{
    return syscall(SYS_futex, at, operation, value, most, NULL, 0);
}

void emulated_nccl_ring_bell(const nccl_membership *m, int rank)
{
    _Atomic uint32_t *bell = &m->segment->places[rank].bell;
    atomic_fetch_add(bell, 1);
    (void)futex(bell, FUTEX_WAKE, INT_MAX, NULL);
}

void emulated_nccl_ring_all(const nccl_membership *m)
{
    for (int rank = 0; rank < m->n_ranks; rank++) emulated_nccl_ring_bell(m, rank);
}

uint32_t emulated_nccl_bell(const nccl_membership *m)
{
    return atomic_load(&m->segment->places[m->rank].bell);
}

void emulated_nccl_wait_bell(const nccl_membership *m, uint32_t seen)
{
    static const struct timespec most = {.tv_nsec = 100000000};
    (void)futex(&m->segment->places[m->rank].bell, FUTEX_WAIT, seen, &most);
}

/* ---- meetings ---- */

/* Whether all ranks of the mask have answered; an answer to another question does not count. */
static bool have_answered(const nccl_membership *m, uint64_t number, uint64_t mask, int64_t what,
                          int64_t said[][NCCL_WORDS])
{
    for (int rank = 0; rank < m->n_ranks; rank++) {
        if (!(mask >> rank & 1)) continue;
        if (!emulated_nccl_read(m->segment->places[rank].meetings, number, said[rank]) ||
            said[rank][0] != what)
            return false;
    }
    return true;
}

ncclResult_t emulated_nccl_meet(nccl_membership *m, const int64_t words[NCCL_WORDS], uint64_t mask,
                                int64_t said[][NCCL_WORDS])
{
    uint64_t number = atomic_fetch_add(&m->n_meetings, 1);
    emulated_nccl_announce(m->segment->places[m->rank].meetings, number, words);
    emulated_nccl_ring_all(m);
    for (;;) {
        uint32_t seen = emulated_nccl_bell(m);
        if (have_answered(m, number, mask, words[0], said)) return ncclSuccess;
        if (atomic_load(&m->is_canceled))
            return emulated_nccl_fail(ncclInternalError, "aborted while it waited for other ranks");
        if (emulated_settings_get()->nccl_reports && emulated_nccl_has_dead(m))
            return emulated_nccl_fail(ncclRemoteError, "a remote process exited prematurely");
        emulated_nccl_wait_bell(m, seen);
    }
}
