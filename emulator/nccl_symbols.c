/* SPDX-License-Identifier: Apache-2.0 */
/* libnccl.so.2 as the program's loader sees it: programs of the emulated build are linked with
 * --wrap=dlopen, --wrap=dlsym and --wrap=dlclose (the CMake target ballast_nccl), so that no other
 * NCCL can get in, and one may be missing, old or without some function. */
#include <dlfcn.h>
#include <nccl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "runtime.h"

void *__real_dlopen(const char *file, int flags);
void *__real_dlsym(void *handle, const char *name);
int __real_dlclose(void *handle);
void *__wrap_dlopen(const char *file, int flags);
void *__wrap_dlsym(void *handle, const char *name);
int __wrap_dlclose(void *handle);

typedef void (*function)(void);

/* The first version that has it, where that is later than 2.18. */
typedef struct symbol {
    const char *name;
    function address;
    int since;
} symbol;

#define SYMBOL(name)                                                                               \
    {                                                                                              \
#name, (function)name, 0                                                                   \
    }
#define SYMBOL_SINCE(name, since)                                                                  \
    {                                                                                              \
#name, (function)name, since                                                               \
    }

static const symbol symbols[] = {
    SYMBOL(ncclGetVersion),
    SYMBOL(ncclGetUniqueId),
    SYMBOL(ncclCommInitRankConfig),
    SYMBOL(ncclCommSplit),
    SYMBOL(ncclCommFinalize),
    SYMBOL(ncclCommDestroy),
    SYMBOL(ncclCommAbort),
    SYMBOL(ncclCommGetAsyncError),
    SYMBOL(ncclCommCount),
    SYMBOL(ncclCommCuDevice),
    SYMBOL(ncclCommUserRank),
    SYMBOL(ncclGetErrorString),
    SYMBOL(ncclGetLastError),
    SYMBOL_SINCE(ncclMemAlloc, 21900),
    SYMBOL_SINCE(ncclMemFree, 21900),
    SYMBOL_SINCE(ncclCommWindowRegister, 22700),
    SYMBOL_SINCE(ncclCommWindowDeregister, 22700),
    SYMBOL(ncclAllGather),
    SYMBOL(ncclBroadcast),
    SYMBOL(ncclSend),
    SYMBOL(ncclRecv),
    SYMBOL(ncclGroupStart),
    SYMBOL(ncclGroupEnd),
};

static char library; /* its address is the handle */

/* Whether the list of names, with commas between them, has this one. */
static bool is_hidden(const char *name)
{
    size_t length = strlen(name);
    const char *list = emulated_settings_get()->nccl_hidden;
    while (list && *list) {
        size_t n = strcspn(list, ",");
        if (n == length && strncmp(list, name, n) == 0) return true;
        list += n + (list[n] == ',');
    }
    return false;
}

static void *find(const char *name)
{
    int version = emulated_settings_get()->nccl_version;
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        void *address;
        if (strcmp(symbols[i].name, name) != 0) continue;
        if (version < symbols[i].since || version == 0 || is_hidden(name)) return NULL;
        memcpy(&address, &symbols[i].address, sizeof address);
        return address;
    }
    return NULL;
}

/* Requested from the system in place of a library or function that the fake lacks, so that dlerror
 * has a text. */
static const char MISSING_LIBRARY[] = "libnccl.so.2 (emulated: none)";
static const char MISSING_SYMBOL[] = "emulated_nccl_has_no_such_function";

void *__wrap_dlopen(const char *file, int flags)
{
    const char *base = file ? strrchr(file, '/') : NULL;
    base = base ? base + 1 : file;
    if (!base || strncmp(base, "libnccl.so", strlen("libnccl.so")) != 0)
        return __real_dlopen(file, flags);
    return emulated_settings_get()->nccl_version ? &library : __real_dlopen(MISSING_LIBRARY, flags);
}

void *__wrap_dlsym(void *handle, const char *name)
{
    if (handle != &library) return __real_dlsym(handle, name);
    void *address = find(name);
    return address ? address : __real_dlsym(RTLD_DEFAULT, MISSING_SYMBOL);
}

int __wrap_dlclose(void *handle)
{
    return handle == &library ? 0 : __real_dlclose(handle);
}
