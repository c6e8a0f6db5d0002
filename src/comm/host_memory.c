/* SPDX-License-Identifier: Apache-2.0 */
/* host_memory.c -- one memory file per host, inherited by its ranks: every piece is agreed upon,
 * reserved by the first rank and mapped by all. */
#include "comm/host_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/memory.h"
#include "base/sizes.h"

/* What a rank asks for, in the header of the file; a cache line. There are two of each rank: one is
 * written while slower ranks still compare the other. */
typedef struct request {
    uint64_t number; /* of the call, from 1 */
    uint64_t offset_bytes, n_bytes;
    uint64_t padding[5];
} request;

struct bl_host_memory {
    int fd;
    bl_comm *comm;
    bl_device *device;
    bl_stream *stream;
    request *header; /* [2][size], shared */
    int64_t header_bytes, next_bytes;
    uint64_t n_taken;
    double beat_s; /* of the last beat */
};

static int64_t page_bytes(void)
{
    return (int64_t)sysconf(_SC_PAGESIZE);
}

/* Whole pages, at least one; -1: more than can be counted. */
static int64_t mapped_bytes(size_t n_bytes)
{
    if (n_bytes > (size_t)INT64_MAX / 2) return -1;
    return bl_round_up(bl_max_i64((int64_t)n_bytes, 1), page_bytes());
}

int bl_host_memory_rank(const bl_host_memory *memory)
{
    return memory ? bl_comm_rank(memory->comm) : 0;
}

int bl_host_memory_size(const bl_host_memory *memory)
{
    return memory ? bl_comm_size(memory->comm) : 1;
}

int64_t bl_host_memory_bytes(const bl_host_memory *memory)
{
    return memory ? memory->next_bytes : 0;
}

/* ---- memory from the system ---- */

/* With less the system would end a process of the host while the memory is filled. */
static bl_status check_available(int64_t n_bytes, const char *what)
{
    int64_t available = bl_memory_available_bytes();

    if (available < 0 || n_bytes <= available) return BL_OK;
    return BL_FAIL(BL_ENOMEM, "%s: takes %lld bytes of memory, %lld are available", what,
                   (long long)n_bytes, (long long)available);
}

/* Beyond it the system would also send SIGXFSZ. */
static bl_status check_file_limit(int64_t end_bytes, const char *what)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY ||
        (rlim_t)end_bytes <= limit.rlim_cur)
        return BL_OK;
    return BL_FAIL(BL_ELIMIT,
                   "%s: memory that the ranks of a host share is a file of %lld bytes, and files "
                   "may have %lld "
                   "(ulimit -f, RLIMIT_FSIZE): raise the limit, or use rank_processes false",
                   what, (long long)end_bytes, (long long)limit.rlim_cur);
}

/* Takes the pages now: later, a lack of memory would be a signal (SIGBUS) and no error. */
static bl_status reserve(const bl_host_memory *m, int64_t offset, int64_t n_bytes, const char *what)
{
    int result;

    BL_TRY(check_file_limit(offset + n_bytes, what));
    BL_TRY(check_available(n_bytes, what));
    while ((result = fallocate(m->fd, 0, offset, n_bytes)) != 0 && errno == EINTR) continue;
    if (result == 0) return BL_OK;
    return BL_FAIL(BL_ENOMEM, "%s: takes %lld bytes of memory that the ranks of the host share: %s",
                   what, (long long)n_bytes, strerror(errno));
}

static bl_status map(int fd, int64_t offset, int64_t n_bytes, const char *what, void **out)
{
    int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    void *at = mmap(NULL, (size_t)n_bytes, PROT_READ | PROT_WRITE, flags, fd, (off_t)offset);

    *out = at == MAP_FAILED ? NULL : at;
    if (!*out)
        return BL_FAIL(BL_ENOMEM, "%s: takes %lld bytes of memory: %s", what, (long long)n_bytes,
                       strerror(errno));
    return BL_OK;
}

void bl_host_memory_return(void *piece, size_t n_bytes)
{
    if (piece) munmap(piece, (size_t)mapped_bytes(n_bytes));
}

/* ---- open, close ---- */

bl_status bl_host_memory_meet(bl_host_memory *m)
{
    if (!m) return BL_OK;
    BL_TRY(bl_comm_barrier(m->comm, m->stream));
    return bl_stream_synchronize(m->stream);
}

static bl_status make_header(bl_host_memory *m)
{
    static const char what[] = "the header of a host's shared memory";
    size_t n_bytes = 2 * (size_t)bl_comm_size(m->comm) * sizeof *m->header;
    struct stat info;
    void *header;

    m->header_bytes = m->next_bytes = mapped_bytes(n_bytes);
    if (bl_comm_rank(m->comm) == 0) {
        if (fstat(m->fd, &info) != 0) return bl_fail_errno(BL_EIO, "fstat of a memory file");
        if (info.st_size != 0)
            return BL_FAIL(BL_EINTERNAL, "the host's memory file is used already: %lld bytes",
                           (long long)info.st_size);
        BL_TRY(reserve(m, 0, m->header_bytes, what));
    }
    BL_TRY(bl_host_memory_meet(m));
    BL_TRY(map(m->fd, 0, m->header_bytes, what, &header));
    m->header = header;
    return BL_OK;
}

/* Its thread lives as long as a training, and takes no signals: they are for threads that wait for
 * them. */
static bl_status open_stream(bl_host_memory *m)
{
    sigset_t all, old;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    bl_status st = bl_device_create_cpu(1, &m->device);
    if (st == BL_OK) st = bl_stream_create(m->device, "host memory", &m->stream);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return st;
}

bl_status bl_host_memory_open(int fd, bl_comm *comm, bl_host_memory **out)
{
    bl_status st = BL_OK;

    *out = NULL;
    if (fd < 0 || bl_comm_size(comm) == 1) return BL_OK;
    bl_host_memory *m = calloc(1, sizeof *m);
    if (!m) return BL_FAIL(BL_ENOMEM, "shared memory of a host");
    m->fd = fd;
    m->comm = comm;
    BL_TRY_GOTO(st, done, open_stream(m));
    BL_TRY_GOTO(st, done, make_header(m));
    *out = m;
    m = NULL;
done:
    bl_host_memory_close(m);
    return st;
}

void bl_host_memory_close(bl_host_memory *m)
{
    if (!m) return;
    bl_stream_destroy(m->stream);
    bl_device_destroy(m->device);
    if (m->header) munmap(m->header, (size_t)m->header_bytes);
    free(m);
}

/* ---- pieces ---- */

static bl_status compare_requests(const bl_host_memory *m, const request *all, const char *what)
{
    for (int r = 1; r < bl_comm_size(m->comm); r++)
        if (memcmp(&all[0], &all[r], sizeof all[0]) != 0)
            return BL_FAIL(BL_EINTERNAL,
                           "%s: ranks 0 and %d of the host ask for different memory: %llu bytes at "
                           "%llu in call "
                           "%llu, and %llu at %llu in call %llu",
                           what, r, (unsigned long long)all[0].n_bytes,
                           (unsigned long long)all[0].offset_bytes,
                           (unsigned long long)all[0].number, (unsigned long long)all[r].n_bytes,
                           (unsigned long long)all[r].offset_bytes,
                           (unsigned long long)all[r].number);
    return BL_OK;
}

static bl_status take_shared(bl_host_memory *m, size_t n_bytes, int64_t n_mapped, const char *what,
                             void **out)
{
    int64_t offset = m->next_bytes;
    int rank = bl_comm_rank(m->comm), size = bl_comm_size(m->comm);
    request *all = m->header + (m->n_taken % 2) * (uint64_t)size;

    m->n_taken++;
    m->next_bytes += n_mapped;
    all[rank] = (request){
        .number = m->n_taken, .offset_bytes = (uint64_t)offset, .n_bytes = (uint64_t)n_bytes};
    if (rank == 0) BL_TRY(reserve(m, offset, n_mapped, what));
    BL_TRY(bl_host_memory_meet(m));
    BL_TRY(compare_requests(m, all, what));
    return map(m->fd, offset, n_mapped, what, out);
}

bl_status bl_host_memory_take(bl_host_memory *m, size_t n_bytes, const char *what, void **out)
{
    int64_t n_mapped = mapped_bytes(n_bytes);

    *out = NULL;
    if (n_mapped < 0 || (m && n_mapped > INT64_MAX / 2 - m->next_bytes))
        return BL_FAIL(BL_ENOMEM, "%s: %zu bytes", what, n_bytes);
    if (m) return take_shared(m, n_bytes, n_mapped, what, out);
    BL_TRY(check_available(n_mapped, what));
    return map(-1, 0, n_mapped, what, out);
}

bl_status bl_host_memory_seal(bl_host_memory *m, void *piece, size_t n_bytes)
{
    BL_TRY(bl_host_memory_meet(m));
    if (mprotect(piece, (size_t)mapped_bytes(n_bytes), PROT_READ) != 0)
        return bl_fail_errno(BL_ENOMEM, "mprotect of %zu bytes", n_bytes);
    return BL_OK;
}

/* ---- from the first rank to all ---- */

bl_status bl_host_memory_tell(bl_host_memory *m, void *bytes, size_t n_bytes)
{
    if (!m) return BL_OK;
    BL_TRY(bl_comm_broadcast(m->comm, m->stream, bytes, n_bytes, 0));
    return bl_stream_synchronize(m->stream);
}

bl_status bl_host_memory_beat(bl_host_memory *m)
{
    static const double PERIOD_S = 1;
    uint64_t is_over = 0;

    if (!m || bl_now_s() - m->beat_s < PERIOD_S) return BL_OK;
    BL_TRY(bl_host_memory_tell(m, &is_over, sizeof is_over));
    m->beat_s = bl_now_s();
    return BL_OK;
}

bl_status bl_host_memory_await(bl_host_memory *m)
{
    uint64_t is_over = bl_host_memory_rank(m) == 0;

    do {
        BL_TRY(bl_host_memory_tell(m, &is_over, sizeof is_over));
    } while (m && !is_over);
    return BL_OK;
}

bl_status bl_host_memory_publish(bl_host_memory *m, const char *what, void **bytes, size_t *n_bytes)
{
    void *own = *bytes, *piece;
    uint64_t n = *n_bytes;

    BL_TRY(bl_host_memory_tell(m, &n, sizeof n));
    BL_TRY(bl_host_memory_take(m, (size_t)n, what, &piece));
    if (bl_host_memory_rank(m) == 0) memcpy(piece, own, (size_t)n);
    bl_status st = bl_host_memory_seal(m, piece, (size_t)n);
    if (st != BL_OK) {
        bl_host_memory_return(piece, (size_t)n);
        return st;
    }
    if (bl_host_memory_rank(m) == 0) free(own);
    *bytes = piece;
    *n_bytes = (size_t)n;
    return BL_OK;
}
