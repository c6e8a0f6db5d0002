/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that runs out at every point of a training: loading, steps and saves, one allocation at a
 * time (transient) and permanently (persistent).
 *
 * The linker's --wrap puts this file between our code and the allocating functions of libc; jansson
 * allocates through our code (base/json.c). What other libraries allocate inside (YAML, PCRE2,
 * libc's streams) is not reached.
 *
 *   test_faults_alloc [POINTS]            how many points in all (100), spread over the allocations
 *                                         of each job
 *   test_faults_alloc JOB FIRST LAST      every allocation of a job from FIRST to LAST, to look for
 *                                         a fault met */
#include "faults.h"

#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { EXIT_LIMIT = 4, LEAK = 99 };

typedef struct injection {
    atomic_long n_seen;
    atomic_int is_armed;
    long fail_at; /* 0: count only */
    bool is_persistent;
} injection;

static injection *injected;
static int n_points = 100;

#pragma GCC diagnostic ignored "-Wmissing-prototypes" /* names that the linker makes */

static bool refuse(void)
{
    if (!injected || !atomic_load_explicit(&injected->is_armed, memory_order_relaxed)) return false;
    long n = atomic_fetch_add(&injected->n_seen, 1) + 1;
    if (injected->fail_at == 0 || n < injected->fail_at ||
        (n > injected->fail_at && !injected->is_persistent))
        return false;
    errno = ENOMEM;
    return true;
}

void *__real_malloc(size_t n);
void *__wrap_malloc(size_t n)
{
    return refuse() ? NULL : __real_malloc(n);
}

void *__real_calloc(size_t n, size_t size);
void *__wrap_calloc(size_t n, size_t size)
{
    return refuse() ? NULL : __real_calloc(n, size);
}

void *__real_realloc(void *old, size_t n);
void *__wrap_realloc(void *old, size_t n)
{
    return refuse() ? NULL : __real_realloc(old, n);
}

void *__real_reallocarray(void *old, size_t n, size_t size);
void *__wrap_reallocarray(void *old, size_t n, size_t size)
{
    return refuse() ? NULL : __real_reallocarray(old, n, size);
}

void *__real_aligned_alloc(size_t alignment, size_t n);
void *__wrap_aligned_alloc(size_t alignment, size_t n)
{
    return refuse() ? NULL : __real_aligned_alloc(alignment, n);
}

int __real_posix_memalign(void **out, size_t alignment, size_t n);
int __wrap_posix_memalign(void **out, size_t alignment, size_t n)
{
    return refuse() ? ENOMEM : __real_posix_memalign(out, alignment, n);
}

char *__real_strdup(const char *text);
char *__wrap_strdup(const char *text)
{
    return refuse() ? NULL : __real_strdup(text);
}

char *__real_strndup(const char *text, size_t n);
char *__wrap_strndup(const char *text, size_t n)
{
    return refuse() ? NULL : __real_strndup(text, n);
}

int __real_vasprintf(char **out, const char *format, va_list args);
int __wrap_vasprintf(char **out, const char *format, va_list args)
{
    return refuse() ? -1 : __real_vasprintf(out, format, args);
}

int __wrap_asprintf(char **out, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int n = __wrap_vasprintf(out, format, args);
    va_end(args);
    return n;
}

FILE *__real_open_memstream(char **text, size_t *n);
FILE *__wrap_open_memstream(char **text, size_t *n)
{
    return refuse() ? NULL : __real_open_memstream(text, n);
}

FILE *__real_fopen(const char *path, const char *mode);
FILE *__wrap_fopen(const char *path, const char *mode)
{
    return refuse() ? NULL : __real_fopen(path, mode);
}

DIR *__real_opendir(const char *path);
DIR *__wrap_opendir(const char *path)
{
    return refuse() ? NULL : __real_opendir(path);
}

void *__real_mmap(void *at, size_t n, int protection, int flags, int fd, off_t offset);
void *__wrap_mmap(void *at, size_t n, int protection, int flags, int fd, off_t offset)
{
    return refuse() ? MAP_FAILED : __real_mmap(at, n, protection, flags, fd, offset);
}

int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*main)(void *), void *arg);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*main)(void *), void *arg)
{
    return refuse() ? EAGAIN : __real_pthread_create(thread, attributes, main, arg);
}

/* ---- points ---- */

__attribute__((weak)) int
__lsan_do_recoverable_leak_check(void); /* where AddressSanitizer is linked */

static void arm(void *arg)
{
    (void)arg;
    atomic_store(&injected->is_armed, 1);
}

static void disarm(void *arg)
{
    (void)arg;
    atomic_store(&injected->is_armed, 0);
    if (__lsan_do_recoverable_leak_check && __lsan_do_recoverable_leak_check()) _exit(LEAK);
}

static const faults_hooks hooks = {.before = arm, .after = disarm};

static void run_point(faults_job job, long fail_at, bool is_persistent, faults_outcome *outcome)
{
    *injected = (injection){.fail_at = fail_at, .is_persistent = is_persistent};
    faults_run(job, &hooks, outcome);
}

/* Whether all is as it should be. */
static bool check_point(faults_job job, long fail_at, bool is_persistent, int *n_failed)
{
    static const int codes[] = {EXIT_LIMIT, 0};
    char what[96];
    faults_outcome outcome;

    run_point(job, fail_at, is_persistent, &outcome);
    *n_failed += outcome.code != 0;
    snprintf(what, sizeof what, "allocation %ld %s", fail_at,
             is_persistent ? "and all after it fail" : "fails");
    return faults_check(job, what, codes, &outcome);
}

static void check_job(faults_job job)
{
    static const int no_code[] = {0};
    faults_outcome outcome;
    int n_failed = 0, n_bad = 0, n = n_points / (2 * FAULTS_JOBS);

    run_point(job, 0, false, &outcome);
    long n_allocations = atomic_load(&injected->n_seen);
    assert_true(faults_check(job, "undisturbed", no_code, &outcome));
    for (int i = 0; i < n; i++) {
        /* Evenly spread, the first and the last among them. */
        long step = (n_allocations - 1) * i / n;
        n_bad += !check_point(job, 1 + step, false, &n_failed);
        n_bad += !check_point(job, n_allocations - step, true, &n_failed);
    }
    printf("job %s: %ld allocations, %d points, %d of them ended in an error\n",
           faults_job_name(job), n_allocations, 2 * n, n_failed);
    assert_int_equal(n_bad, 0);
    assert_true(n_failed > n); /* a lost allocation is hardly ever without consequence */
}

static void test_fresh(void **state)
{
    (void)state;
    check_job(FAULTS_FRESH);
}

static void test_resume(void **state)
{
    (void)state;
    check_job(FAULTS_RESUME);
}

static void test_text(void **state)
{
    (void)state;
    check_job(FAULTS_TEXT);
}

static void test_offload(void **state)
{
    (void)state;
    check_job(FAULTS_OFFLOAD);
}

static bool check_range(const char *name, long first, long last)
{
    int n_bad = 0, n_failed = 0;

    for (int job = 0; job < FAULTS_JOBS; job++)
        for (long i = first; strcmp(faults_job_name(job), name) == 0 && i <= last; i++)
            n_bad += !check_point(job, i, false, &n_failed) + !check_point(job, i, true, &n_failed);
    printf("job %s, allocations %ld to %ld: %d bad, %d ended in an error\n", name, first, last,
           n_bad, n_failed);
    return n_bad == 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fresh),
        cmocka_unit_test(test_resume),
        cmocka_unit_test(test_text),
        cmocka_unit_test(test_offload),
    };

    injected = faults_shared(sizeof *injected);
    if (argc == 4) {
        void *state = NULL;
        faults_set_up(&state);
        bool is_good = check_range(argv[1], atol(argv[2]), atol(argv[3]));
        faults_tear_down(&state);
        return is_good ? 0 : 1;
    }
    if (argc > 1) n_points = atoi(argv[1]);
    return cmocka_run_group_tests(tests, faults_set_up, faults_tear_down);
}
