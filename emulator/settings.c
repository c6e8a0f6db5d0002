/* SPDX-License-Identifier: Apache-2.0 */
/* settings.c -- the environment variables of the emulated GPU, read once and checked. */
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "counts.h"
#include "emulated.h"
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

/* The value, NULL where it is empty or not set. */
static const char *text_of(const char *name)
{
    const char *text = getenv(name);
    return text && *text ? text : NULL;
}

/* Which of the words is the variable's value; the first where it is not set. */
static int choose(const char *name, const char *const *words)
{
    const char *text = text_of(name);
    char list[128] = "";
    if (!text) return 0;
    for (int i = 0; words[i]; i++) {
        if (strcmp(text, words[i]) == 0) return i;
        snprintf(list + strlen(list), sizeof list - strlen(list), "%s%s", i ? " or " : "",
                 words[i]);
    }
    emulated_fatal("%s=%s: %s", name, text, list);
}

#define CHOOSE(name, ...) choose(name, (const char *const[]){__VA_ARGS__, NULL})

static emulated_settings settings;

/* As CUDA reads it: the GPUs in this order, up to the first that is not there. By number only. */
static void read_visible(const char *list)
{
    int n_all = settings.n_devices;
    for (int i = 0; i < n_all; i++) settings.visible[i] = i;
    if (!list) return;
    settings.n_devices = 0;
    while (*list && settings.n_devices < n_all) {
        char *end;
        long device = strtol(list, &end, 10);
        if (end == list || (*end && *end != ','))
            emulated_fatal("CUDA_VISIBLE_DEVICES: numbers only");
        if (device < 0 || device >= n_all) return;
        for (int i = 0; i < settings.n_devices; i++)
            if (settings.visible[i] == device) { /* twice: CUDA shows none */
                settings.n_devices = 0;
                return;
            }
        settings.visible[settings.n_devices++] = (int)device;
        list = *end ? end + 1 : end;
    }
}

static void read_environment(void)
{
    /* CUDA and NCCL read them as they start. */
    const char *loading = getenv("CUDA_MODULE_LOADING"),
               *channels = getenv("NCCL_MAX_P2P_NCHANNELS");
    if (loading && strcmp(loading, "EAGER") == 0) emulated_count("loading:eager", 0);
    if (channels && strcmp(channels, "8") == 0) emulated_count("channels:8", 0);
    settings = (emulated_settings){
        .is_strict = CHOOSE("BALLAST_EMULATED", "concurrent", "strict") == 1,
        .capability = (int)number("BALLAST_EMULATED_ARCH", 70, 90, 90),
        .driver_version = (int)number("BALLAST_EMULATED_DRIVER", 0, 99990, 13000),
        .start_error = (int)number("BALLAST_EMULATED_ERROR", 0, 999, 0),
        .n_most_devices =
            (int)number("BALLAST_EMULATED_GPUS", 1, EMULATED_MAX_DEVICES, EMULATED_MAX_DEVICES),
        .n_devices = (int)number("BALLAST_EMULATED_DEVICES", 0, EMULATED_MAX_DEVICES, 1),
        .memory_bytes = (size_t)number("BALLAST_EMULATED_MEMORY_MIB", 1, 1 << 20, 4096) << 20,
        .has_fp8 = number("BALLAST_EMULATED_FP8", 0, 1, 1) != 0,
        .seed = number("BALLAST_EMULATED_SEED", 0, UINT64_MAX, 0),
        .whole_gpus = (emulated_whole)CHOOSE("BALLAST_EMULATED_WHOLE_GPU", "no", "yes", "crossed"),
        .host = text_of("BALLAST_EMULATED_HOST"),
        .nccl_version = (int)number("BALLAST_EMULATED_NCCL_VERSION", 0, 99999, 22809),
        .nccl_hidden = text_of("BALLAST_EMULATED_NCCL_HIDE"),
        .nccl_windows =
            (emulated_windows)CHOOSE("BALLAST_EMULATED_NCCL_WINDOWS", "yes", "no", "fail"),
        .nccl_reports = CHOOSE("BALLAST_EMULATED_NCCL_ERRORS", "hang", "report") == 1,
        .nccl_abort =
            (emulated_abort)CHOOSE("BALLAST_EMULATED_NCCL_ABORT", "kernels", "all", "hang"),
        .nccl_log = text_of("BALLAST_EMULATED_NCCL_LOG"),
        .fault = text_of("BALLAST_EMULATED_FAULT"),
        .ptx = text_of("BALLAST_EMULATED_PTX"),
    };
    if (settings.n_devices > settings.n_most_devices) settings.n_devices = settings.n_most_devices;
    read_visible(getenv("CUDA_VISIBLE_DEVICES"));
}

/* The program may set the variable after its first call. A shared queue would order streams that
 * nothing else orders, and ThreadSanitizer would then overlook a missing event. */
int emulated_read_queues(int *n_connections)
{
    enum { CONNECTIONS = 8 }; /* unless CUDA_DEVICE_MAX_CONNECTIONS is set */
    const char *text = text_of("CUDA_DEVICE_MAX_CONNECTIONS");
    long value = text ? strtol(text, NULL, 10) : CONNECTIONS;

    *n_connections = value < 1                     ? CONNECTIONS
                     : value > EMULATED_MAX_QUEUES ? EMULATED_MAX_QUEUES
                                                   : (int)value;
#ifdef __SANITIZE_THREAD__
    uint64_t otherwise = 0;
#else
    uint64_t otherwise = (uint64_t)*n_connections;
#endif
    return (int)number("BALLAST_EMULATED_QUEUES", 0, EMULATED_MAX_QUEUES, otherwise);
}

const emulated_settings *emulated_settings_get(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, read_environment);
    return &settings;
}

bool emulated_cuda_have_devices(int n)
{
    int most = emulated_settings_get()->n_most_devices;
    if (n > most) printf("skip: %d GPUs are needed; BALLAST_EMULATED_GPUS=%d\n", n, most);
    return n <= most;
}

int emulated_capability(void)
{
    return emulated_settings_get()->capability;
}

uint64_t emulated_seed(void)
{
    return emulated_settings_get()->seed;
}
