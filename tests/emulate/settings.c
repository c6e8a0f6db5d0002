/* SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "queue.h"
#include "runtime.h"

void emulated_fatal(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fputs("emulated GPU: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    abort();
}

/* The number that the variable holds, in [least, most]; `otherwise` where it is not set. */
static uint64_t number(const char *name, uint64_t least, uint64_t most, uint64_t otherwise)
{
    const char *text = getenv(name);
    if (!text || !*text) return otherwise;
    char *end;
    unsigned long long value = strtoull(text, &end, 10);
    if (*end || *text == '-' || value < least || value > most)
        emulated_fatal("%s=%s: a number from %llu to %llu", name, text, (unsigned long long)least,
                       (unsigned long long)most);
    return value;
}

static emulated_settings settings;

static void read_environment(void)
{
    const char *mode = getenv("BALLAST_EMULATED");
    if (!mode || !*mode) mode = "concurrent";
    if (strcmp(mode, "strict") != 0 && strcmp(mode, "concurrent") != 0)
        emulated_fatal("BALLAST_EMULATED=%s: concurrent or strict", mode);
    settings = (emulated_settings){
        .is_strict = strcmp(mode, "strict") == 0,
        .capability = (int)number("BALLAST_EMULATED_ARCH", 70, 90, 90),
        .driver_version = (int)number("BALLAST_EMULATED_DRIVER", 0, 99990, 13000),
        .n_devices = (int)number("BALLAST_EMULATED_DEVICES", 0, 64, 1),
        .memory_bytes = (size_t)number("BALLAST_EMULATED_MEMORY_MIB", 1, 1 << 20, 4096) << 20,
        .has_fp8 = number("BALLAST_EMULATED_FP8", 0, 1, 1) != 0,
        .seed = number("BALLAST_EMULATED_SEED", 0, UINT64_MAX, 0),
    };
}

const emulated_settings *emulated_settings_get(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, read_environment);
    return &settings;
}

int emulated_capability(void)
{
    return emulated_settings_get()->capability;
}

uint64_t emulated_seed(void)
{
    return emulated_settings_get()->seed;
}
