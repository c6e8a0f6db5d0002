/* SPDX-License-Identifier: Apache-2.0 */
/* library.c -- finds NCCL in the process or loads libnccl, checks its version, and names the
 * functions that it lacks. */
#include "comm/nccl/library.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static const char LIBRARY[] = "libnccl.so.2";

/* A pointer to a function out of one to an object, which ISO C has no cast for. */
static bool find(void *from, const char *name, void *function)
{
    void *found = dlsym(from, name);
    memcpy(function, &found, sizeof found);
    return found != NULL;
}

/* The names of the functions that are not there: "ncclMemAlloc, ncclMemFree". */
static void name_missing(char *text, size_t text_bytes, const char *name)
{
    size_t length = strlen(text);
    snprintf(text + length, text_bytes - length, "%s%s", length ? ", " : "", name);
}

static bl_status check_version(comm_nccl_library *out)
{
    BL_TRY(
        comm_nccl_check(out, (int)out->ncclGetVersion(&out->version), "ncclGetVersion", LIBRARY));
    if (out->version >= COMM_NCCL_VERSION_MIN) return BL_OK;
    return BL_FAIL(BL_ELIMIT, "NCCL %d.%d is too old: Ballast needs %d.%d", out->version / 10000,
                   out->version / 100 % 100, COMM_NCCL_VERSION_MIN / 10000,
                   COMM_NCCL_VERSION_MIN / 100 % 100);
}

bl_status comm_nccl_load(comm_nccl_library *out)
{
    char missing[512] = "";
    void *from = RTLD_DEFAULT;

    *out = (comm_nccl_library){.is_process = dlsym(RTLD_DEFAULT, "ncclGetVersion") != NULL};
    if (!out->is_process && !(from = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL)))
        return BL_FAIL(BL_ELIMIT, "several GPUs need NCCL: %s", dlerror());
#define FIND(function)                                                                             \
    if (!find(from, #function, &out->function)) name_missing(missing, sizeof missing, #function);
    COMM_NCCL_FUNCTIONS(FIND)
#undef FIND
    if (missing[0] && out->ncclGetVersion && out->ncclGetErrorString && out->ncclGetLastError)
        BL_TRY(check_version(out)); /* too old says more */
    if (missing[0]) return BL_FAIL(BL_ELIMIT, "%s has no %s", LIBRARY, missing);
#define FIND(function) (void)find(from, #function, &out->function);
    COMM_NCCL_WINDOW_FUNCTIONS(FIND)
#undef FIND
    return check_version(out);
}

bl_status comm_nccl_check(const comm_nccl_library *library, int result, const char *call,
                          const char *what)
{
    ncclResult_t code = (ncclResult_t)result;
    bl_status st = BL_EINTERNAL;

    if (code == ncclSuccess) return BL_OK;
    if (code == ncclInProgress) /* config.blocking is 1, but the environment is stronger */
        return BL_FAIL(BL_EUSAGE, "%s of %s did not block: unset NCCL_COMM_BLOCKING", call, what);
    if (code == ncclRemoteError) st = BL_ERANK;
    if (code == ncclSystemError || code == ncclUnhandledCudaError) st = BL_ELIMIT;
    const char *last = library->ncclGetLastError(NULL);
    return BL_FAIL(st, "%s of %s: %s%s%s", call, what, library->ncclGetErrorString(code),
                   last && last[0] ? ": " : "", last ? last : "");
}
