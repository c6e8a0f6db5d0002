/* SPDX-License-Identifier: Apache-2.0 */
/* host_memory.h -- data that a host needs once: pieces of one memory file (memfd) that all ranks of
 * the host, processes of one parent, map.
 *
 *   piece     entered by   allowed
 *   FILLING   take         each rank writes the part that it has to fill, and no other
 *   SEALED    seal         every rank reads; a write ends the process with SIGSEGV
 *
 * Every call that takes a bl_host_memory, except rank, size, bytes, beat and return, is collective
 * over the ranks of the host: all make the same calls in the same order with equal sizes, each from
 * one thread. So the offsets in the file agree without being sent. The ranks' requests are compared
 * in a header of the file: a difference is BL_EINTERNAL on every rank.
 *
 * Ranks wait in collectives of the communicator given to open. So waiting for a rank that fills a
 * piece ends as comm.h says: when the job is aborted, when a rank is lost, or after the deadline. A
 * rank that fails has to abort the job, or the others wait for it.
 *
 * NULL means no sharing: threads of one process, tasks of mpirun, a single rank. The same calls
 * then give pieces of private memory. */
#ifndef BALLAST_COMM_HOST_MEMORY_H
#define BALLAST_COMM_HOST_MEMORY_H

#include "comm/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct bl_host_memory bl_host_memory;

/* fd: the memory file, the same one on all ranks and empty; -1: none. comm: the ranks of this host.
 * Both are borrowed until close. *out = NULL without a file, or for a single rank. Errors: as
 * bl_host_memory_take; BL_EINTERNAL: the file is not empty. */
bl_status bl_host_memory_open(int fd, bl_comm *comm, bl_host_memory **out);
/* Pieces stay mapped, until they are returned. Not collective. NULL is fine. */
void bl_host_memory_close(bl_host_memory *memory);

int bl_host_memory_rank(const bl_host_memory *memory); /* among the ranks of the host; NULL: 0 */
int bl_host_memory_size(const bl_host_memory *memory); /* NULL: 1 */
/* What this host's ranks share by it, header and padding to whole pages included; NULL: 0. */
int64_t bl_host_memory_bytes(const bl_host_memory *memory);

/* *out = n_bytes of zeros in host memory, at the beginning of a page: the same bytes for every
 * rank. `what` is for errors. The memory is taken from the system here, not when it is first
 * written. BL_ENOMEM: bytes needed, and those available or the system's reason; BL_ELIMIT: a limit
 * on the size of files (RLIMIT_FSIZE), which the system applies to memory files, too; BL_EINTERNAL:
 * ranks asked for different sizes. */
bl_status bl_host_memory_take(bl_host_memory *memory, size_t n_bytes, const char *what, void **out);

/* Waits until all ranks are here; all then see earlier writes of each into its pieces. */
bl_status bl_host_memory_meet(bl_host_memory *memory);
/* Meets; the piece is read-only afterwards. n_bytes as it was taken. */
bl_status bl_host_memory_seal(bl_host_memory *memory, void *piece, size_t n_bytes);
/* Unmaps a piece in this process. The host has its memory back when all processes have closed the
 * file. Not collective, needs no bl_host_memory; NULL is fine. n_bytes as it was taken. */
void bl_host_memory_return(void *piece, size_t n_bytes);

/* While the first rank works for long before all meet, it calls beat now and then, and the others
 * are in await: so they wait as long as it is at work, and after the deadline without a beat they
 * give it up. beat tells the others at most once a second, and is BL_ECANCELED when one of them
 * has failed. await of the first rank ends that of the others. */
bl_status bl_host_memory_beat(bl_host_memory *memory);
bl_status bl_host_memory_await(bl_host_memory *memory);

/* The first rank's n_bytes at `bytes` to all. */
bl_status bl_host_memory_tell(bl_host_memory *memory, void *bytes, size_t n_bytes);

/* Makes *bytes of the first rank, *n_bytes (> 0) from malloc, a sealed piece, and frees them; the
 * other ranks' are overwritten: *bytes is the piece, *n_bytes its size. Without sharing (NULL) a
 * rank gets a piece as well. */
bl_status bl_host_memory_publish(bl_host_memory *memory, const char *what, void **bytes,
                                 size_t *n_bytes);

#ifdef __cplusplus
}
#endif

#endif
