/* SPDX-License-Identifier: Apache-2.0 */
/* library.h -- NCCL as a table of functions, found when the program runs, so that a program with
 * CUDA starts on machines without NCCL (docs/design/0016). One list makes the table and what fills
 * it; the types are those of nccl.h's prototypes, so a call that does not fit the header does not
 * compile. For the files of this folder. */
#ifndef BALLAST_COMM_NCCL_LIBRARY_H
#define BALLAST_COMM_NCCL_LIBRARY_H

#include <nccl.h>
#include <stdbool.h>

#include "base/status.h"

#if NCCL_VERSION_CODE < 22800
#error "nccl.h is older than 2.28 (no NCCL_CTA_POLICY_ZERO); an older library may be loaded"
#endif

enum {
    COMM_NCCL_VERSION_MIN = 21900,          /* the first with all that is always called */
    COMM_NCCL_VERSION_WINDOWS = 22700,      /* windows of symmetric memory */
    COMM_NCCL_VERSION_COPY_ENGINES = 22800, /* gathers by copy engines in them */
    COMM_NCCL_VERSION_TELLS = 22900,        /* a window is symmetric, or NULL */
    COMM_NCCL_VERSION_COPIES_WORDS = 22902  /* copy engines meet by copies */
};

/* What every version from COMM_NCCL_VERSION_MIN on has. */
#define COMM_NCCL_FUNCTIONS(V)                                                                     \
    V(ncclGetVersion)                                                                              \
    V(ncclGetErrorString)                                                                          \
    V(ncclGetLastError)                                                                            \
    V(ncclGetUniqueId)                                                                             \
    V(ncclCommInitRankConfig)                                                                      \
    V(ncclCommGetAsyncError)                                                                       \
    V(ncclCommAbort)                                                                               \
    V(ncclCommFinalize)                                                                            \
    V(ncclCommDestroy)                                                                             \
    V(ncclAllGather)                                                                               \
    V(ncclBroadcast)                                                                               \
    V(ncclSend)                                                                                    \
    V(ncclRecv)                                                                                    \
    V(ncclGroupStart)                                                                              \
    V(ncclGroupEnd)                                                                                \
    V(ncclMemAlloc)                                                                                \
    V(ncclMemFree)

/* NULL before COMM_NCCL_VERSION_WINDOWS. */
#define COMM_NCCL_WINDOW_FUNCTIONS(V)                                                              \
    V(ncclCommWindowRegister)                                                                      \
    V(ncclCommWindowDeregister)

#define COMM_NCCL_MEMBER(function) __typeof__(function) *function;
typedef struct comm_nccl_library {
    COMM_NCCL_FUNCTIONS(COMM_NCCL_MEMBER)
    COMM_NCCL_WINDOW_FUNCTIONS(COMM_NCCL_MEMBER)
    int version;     /* 10000 * major + 100 * minor + patch */
    bool is_process; /* its functions were in the process already */
} comm_nccl_library;
#undef COMM_NCCL_MEMBER

/* NCCL's functions where the process has them, otherwise those of libnccl.so.2, which stays loaded.
 * BL_ELIMIT: there is none, a function is missing, or the version is too old; the text says
 * which. */
bl_status comm_nccl_load(comm_nccl_library *out);

/* BL_OK for ncclSuccess. A lost rank is BL_ERANK; lack of memory or a system error is BL_ELIMIT; a
 * call that did not block, because NCCL_COMM_BLOCKING=0 overrides the communicator's configuration,
 * is BL_EUSAGE; the rest is BL_EINTERNAL. The text has the call, its purpose and NCCL's last
 * error. */
bl_status comm_nccl_check(const comm_nccl_library *library, int result, const char *call,
                          const char *what);

#endif
