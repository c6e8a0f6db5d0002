/* SPDX-License-Identifier: Apache-2.0 */
/* The stream contract of device.h on a CUDA device: on a GPU, or on the emulated one (emulator/).
 * No task here waits for another stream's task: CUDA may run all host functions on one thread. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/sizes.h"
#include "device/cuda/stream.h"
#include "device/device.h"
#ifdef BALLAST_CUDA_EMULATED
#include "emulator/emulated.h"
#endif

static void assert_ok(bl_status st)
{
    if (st != BL_OK) fail_msg("%s: %s", bl_status_name(st), bl_error_text());
}

typedef struct fixture {
    bl_device *device;
    bl_stream *a, *b, *c;
    bl_event *event, *other;
} fixture;

static int setup(void **state)
{
    fixture *f = calloc(1, sizeof *f);
    assert_non_null(f);
    assert_ok(bl_device_create_cuda(0, &f->device));
    assert_ok(bl_stream_create(f->device, "a", &f->a));
    assert_ok(bl_stream_create(f->device, "b", &f->b));
    assert_ok(bl_stream_create(f->device, "c", &f->c));
    assert_ok(bl_event_create(f->device, &f->event));
    assert_ok(bl_event_create(f->device, &f->other));
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    fixture *f = *state;
    bl_event_destroy(f->event);
    bl_event_destroy(f->other);
    bl_stream_destroy(f->a);
    bl_stream_destroy(f->b);
    bl_stream_destroy(f->c);
    assert_int_equal(bl_device_bytes(f->device), 0);
    bl_device_destroy(f->device);
    free(f);
    return 0;
}

/* ---- tasks ---- */

typedef struct note_args {
    int *list, *n, number;
} note_args;

static bl_status note(bl_stream *stream, const void *args)
{
    const note_args *a = args;
    (void)stream;
    a->list[(*a->n)++] = a->number;
    return BL_OK;
}

static bl_status break_down(bl_stream *stream, const void *args)
{
    (void)stream;
    return BL_FAIL(BL_ENUMERIC, "task %d broke down", *(const int *)args);
}

static void give_note(bl_stream *stream, int *list, int *n, int number)
{
    assert_ok(bl_stream_call(stream, note, &(note_args){list, n, number}, sizeof(note_args)));
}

static void give_failure(bl_stream *stream, int number)
{
    assert_ok(bl_stream_call(stream, break_down, &number, sizeof number));
}

static void assert_failed(bl_status st, const char *text)
{
    assert_int_equal(st, BL_ENUMERIC);
    assert_string_equal(bl_error_text(), text);
}

/* ---- the contract ---- */

static void test_memory_goes_there_and_back(void **state)
{
    fixture *f = *state;
    enum { BYTES = 100003 };
    unsigned char *host, *back, *device;
    assert_ok(bl_device_alloc(f->device, BL_SPACE_HOST, BYTES, "host", (void **)&host));
    assert_ok(bl_device_alloc(f->device, BL_SPACE_HOST, BYTES, "back", (void **)&back));
    assert_ok(bl_device_alloc(f->device, BL_SPACE_DEVICE, BYTES, "device", (void **)&device));
    assert_int_equal((uintptr_t)host % BL_DEVICE_ALIGNMENT_BYTES, 0);
    assert_int_equal((uintptr_t)device % 256, 0);
    assert_int_equal(bl_device_bytes(f->device), 3 * BYTES);

    memset(back, 1, BYTES); /* new device memory holds zeros */
    assert_ok(bl_stream_copy(f->a, back, device, BYTES));
    assert_ok(bl_stream_synchronize(f->a));
    for (int i = 0; i < BYTES; i++) assert_int_equal(back[i], 0);

    for (int i = 0; i < BYTES; i++) host[i] = (unsigned char)(i * 7);
    assert_ok(bl_stream_copy(f->a, device, host, BYTES));
    assert_ok(bl_stream_zero(f->a, device + 10, 20));
    assert_ok(bl_event_record(f->event, f->a));
    assert_ok(bl_stream_wait(f->b, f->event));
    assert_ok(bl_stream_copy(f->b, back, device, BYTES));
    assert_ok(bl_stream_zero(f->b, back, 5));
    assert_ok(bl_stream_synchronize(f->b));
    for (int i = 0; i < BYTES; i++)
        assert_int_equal(back[i], i < 5 || (i >= 10 && i < 30) ? 0 : (unsigned char)(i * 7));

    bl_device_free(f->device, BL_SPACE_HOST, host);
    bl_device_free(f->device, BL_SPACE_HOST, back);
    bl_device_free(f->device, BL_SPACE_DEVICE, device);
}

static void test_impossible_memory_is_refused(void **state)
{
    fixture *f = *state;
    void *memory;
    assert_int_equal(
        bl_device_alloc(f->device, BL_SPACE_DEVICE, (size_t)1 << 45, "the moon", &memory),
        BL_ENOMEM);
    assert_null(memory);
    assert_non_null(strstr(bl_error_text(), "the moon"));
    assert_ok(bl_stream_synchronize(f->a)); /* and nothing is broken by that */
}

static void test_tasks_run_in_order_through_a_small_ring(void **state)
{
    fixture *f = *state;
    enum { N = 3 * BL_STREAM_DEPTH + 5 };
    int list[N], n = 0;
    for (int i = 0; i < N; i++) give_note(f->a, list, &n, i);
    assert_ok(bl_stream_synchronize(f->a));
    assert_int_equal(n, N);
    for (int i = 0; i < N; i++) assert_int_equal(list[i], i);
}

static void test_first_error_is_sticky(void **state)
{
    fixture *f = *state;
    int list[4], n = 0;
    give_note(f->a, list, &n, 1);
    assert_ok(bl_event_record(f->event, f->a)); /* before the failure */
    give_failure(f->a, 1);
    give_failure(f->a, 2);
    give_note(f->a, list, &n, 2);
    assert_ok(bl_event_record(f->other, f->a)); /* after it */
    assert_failed(bl_stream_synchronize(f->a), "task 1 broke down");
    assert_failed(bl_stream_synchronize(f->a), "task 1 broke down");
    assert_failed(bl_stream_status(f->a), "task 1 broke down");
    assert_int_equal(n, 1);
    assert_ok(bl_event_synchronize(f->event));
    assert_failed(bl_event_synchronize(f->other), "task 1 broke down");
    assert_ok(bl_stream_status(f->b));
}

static void test_waiters_inherit_the_error(void **state)
{
    fixture *f = *state;
    int list[8], n = 0, list_c[8], n_c = 0;
    give_note(f->b, list, &n, 1);
    assert_ok(bl_event_record(f->other, f->b)); /* before b waits */
    give_failure(f->a, 7);
    assert_ok(bl_event_record(f->event, f->a));
    assert_ok(bl_stream_synchronize(f->b));
    assert_ok(bl_stream_wait(f->b, f->event));
    give_note(f->b, list, &n, 2);
    assert_failed(bl_stream_synchronize(f->b), "task 7 broke down");
    assert_int_equal(n, 1);
    assert_ok(bl_event_synchronize(f->other));

    assert_ok(bl_stream_wait(f->c, f->other)); /* of b, and b had not failed there */
    give_note(f->c, list_c, &n_c, 3);
    assert_ok(bl_stream_synchronize(f->c));
    assert_ok(bl_event_record(f->other, f->b)); /* by way of b, whose own tasks all went well */
    assert_ok(bl_stream_wait(f->c, f->other));
    give_note(f->c, list_c, &n_c, 4);
    assert_failed(bl_stream_synchronize(f->c), "task 7 broke down");
    assert_int_equal(n_c, 1);
}

static void test_the_earlier_of_two_errors_is_told(void **state)
{
    fixture *f = *state;
    give_failure(f->b, 1);
    assert_failed(bl_stream_synchronize(f->b), "task 1 broke down");
    give_failure(f->a, 2);
    assert_failed(bl_stream_synchronize(f->a), "task 2 broke down");
    assert_ok(bl_event_record(f->event, f->a));
    assert_ok(bl_event_record(f->other, f->b));
    assert_ok(bl_stream_wait(f->c, f->event));
    assert_ok(bl_stream_wait(f->c, f->other));
    assert_failed(bl_stream_synchronize(f->c), "task 1 broke down");
}

typedef struct latch {
    bool is_open;
} latch;

static bl_status wait_for_latch(bl_stream *stream, const void *args)
{
    latch *l = *(latch *const *)args;
    (void)stream;
    while (!__atomic_load_n(&l->is_open, __ATOMIC_ACQUIRE))
        sched_yield(); /* no sleep: a host function holds up those of other streams */
    return BL_OK;
}

static void open_latch(latch *l)
{
    __atomic_store_n(&l->is_open, true, __ATOMIC_RELEASE);
}

/* Like aborted work: it ends after the device has failed, and no call returns BL_OK for it. */
static void test_a_device_fails_as_a_whole(void **state)
{
    fixture *f = *state;
    const bl_error lost = {BL_ENUMERIC, "a collective was lost"}, later = {BL_EIO, "later"};
    const char *mode = getenv("BALLAST_EMULATED");
    latch gate = {.is_open = mode && strcmp(mode, "strict") == 0}, *l = &gate;
    int list[1], n_a = 0;

    assert_ok(bl_event_record(f->other, f->b));
    assert_ok(bl_stream_call(f->a, wait_for_latch, &l, sizeof l));
    give_note(f->a, list, &n_a, 1);
    assert_ok(bl_event_record(f->event, f->a));
    assert_ok(bl_stream_status(f->a));
    bl_cuda_device_fail(f->device, &lost);
    bl_cuda_device_fail(f->device, &later); /* the first counts */
    assert_failed(bl_stream_status(f->a), "a collective was lost");
    open_latch(l);
    assert_failed(bl_stream_synchronize(f->a), "a collective was lost");
    assert_failed(bl_event_synchronize(f->event), "a collective was lost");
    assert_failed(bl_event_synchronize(f->other), "a collective was lost");
    assert_failed(bl_stream_synchronize(f->c), "a collective was lost");
    if (!mode || strcmp(mode, "strict") != 0) assert_int_equal(n_a, 0); /* skipped */
}

static void test_adopted_memory_counts(void **state)
{
    fixture *f = *state;
    size_t peak = bl_device_peak_bytes(f->device, BL_SPACE_DEVICE);
    int64_t n = bl_device_allocations(f->device);

    bl_device_adopt(f->device, BL_SPACE_DEVICE, 1000);
    assert_int_equal(bl_device_bytes(f->device), 1000);
    assert_int_equal(bl_device_allocations(f->device), n + 1);
    bl_device_disown(f->device, BL_SPACE_DEVICE, 1000);
    assert_int_equal(bl_device_bytes(f->device), 0);
    assert_int_equal(bl_device_peak_bytes(f->device, BL_SPACE_DEVICE), peak + 1000);
}

static void test_events_outlive_streams_and_lanes_are_used_again(void **state)
{
    fixture *f = *state;
    int list[100], n = 0;
    bl_stream *short_lived;
    assert_ok(bl_stream_wait(f->a, f->event)); /* never recorded: no wait */
    assert_ok(bl_event_synchronize(f->event));
    for (int i = 0; i < 100; i++) {
        assert_ok(bl_stream_create(f->device, "short-lived", &short_lived));
        give_note(short_lived, list, &n, i);
        assert_ok(bl_event_record(f->event, short_lived));
        bl_stream_destroy(short_lived);
        assert_int_equal(n, i + 1);
        assert_ok(bl_event_synchronize(f->event));
    }
    assert_ok(bl_stream_create(f->device, "failing",
                               &short_lived)); /* in the lane of the event's stream, and after it */
    give_failure(short_lived, 5);
    assert_failed(bl_stream_synchronize(short_lived), "task 5 broke down");
    assert_ok(bl_event_synchronize(f->event));
    assert_ok(bl_event_record(f->other, short_lived));
    bl_stream_destroy(short_lived);
    assert_failed(bl_event_synchronize(f->other), "task 5 broke down");
    assert_ok(bl_stream_create(f->device, "next", &short_lived));
    assert_ok(bl_stream_synchronize(short_lived));
    bl_stream_destroy(short_lived);
}

static void test_too_many_streams_are_refused(void **state)
{
    fixture *f = *state;
    bl_stream *streams[40];
    int n = 0;
    bl_status st;
    while ((st = bl_stream_create(f->device, "one more", &streams[n])) == BL_OK && n < 39) n++;
    assert_int_equal(st, BL_ELIMIT);
    assert_int_equal(n, 29); /* 32 with those of the fixture */
    while (n > 0) bl_stream_destroy(streams[--n]);
}

static void test_large_arguments_are_refused(void **state)
{
    fixture *f = *state;
    unsigned char args[BL_STREAM_ARGS_BYTES + 1] = {0};
    assert_int_equal(bl_stream_call(f->a, note, args, sizeof args), BL_EINTERNAL);
    assert_ok(bl_stream_synchronize(f->a));
}

static void test_stamps_tell_the_time(void **state)
{
    fixture *f = *state;
    bl_stamp *first, *second;
    int list[1], n = 0;
    assert_ok(bl_stamp_create(f->device, &first));
    assert_ok(bl_stamp_create(f->device, &second));
    assert_true(bl_stamp_seconds(first) == BL_NEVER_S);
    assert_true(bl_stamp_elapsed_s(first, second) == 0);
    double from = bl_now_s();
    assert_ok(bl_stamp_record(first, f->a));
    give_note(f->a, list, &n, 1);
    assert_ok(bl_stamp_record(second, f->a));
    assert_ok(bl_stream_synchronize(f->a));
    double to = bl_now_s();
    /* A base's time is known to half the round trip of its event, which a loaded machine may
     * stretch to tens of milliseconds; a wrong unit or clock is further away. */
    assert_true(bl_stamp_seconds(first) > from - 0.25 && bl_stamp_seconds(second) < to + 0.25);
    assert_true(bl_stamp_seconds(first) <= bl_stamp_seconds(second));
    assert_true(bl_stamp_elapsed_s(first, second) > 0 &&
                bl_stamp_elapsed_s(first, second) <= to - from);
    bl_stamp_destroy(first);
    bl_stamp_destroy(second);
}

static void test_pinned_memory_of_the_callers(void **state)
{
    fixture *f = *state;
    enum { BYTES = 1 << 20 };
    void *memory = aligned_alloc(4096, BYTES), *device;
    memset(memory, 3, BYTES);
    assert_ok(bl_device_pin(f->device, memory, BYTES));
    assert_ok(bl_device_alloc(f->device, BL_SPACE_DEVICE, BYTES, "device", &device));
    assert_ok(bl_stream_copy(f->a, device, memory, BYTES));
    assert_ok(bl_stream_synchronize(f->a));
    bl_device_unpin(f->device, memory, BYTES);
    assert_ok(bl_device_pin(f->device, memory, BYTES)); /* it was let go whole */
    bl_device_unpin(f->device, memory, BYTES);
    bl_device_free(f->device, BL_SPACE_DEVICE, device);
    free(memory);
}

static void test_a_foreign_stream_serves(void **state)
{
    fixture *f = *state;
    cudaStream_t foreign;
    bl_stream *wrapped;
    int list[2], n = 0;
    assert_int_equal(cudaStreamCreateWithFlags(&foreign, cudaStreamNonBlocking), cudaSuccess);
    assert_ok(bl_stream_wrap_cuda(f->device, foreign, &wrapped));
    assert_ptr_equal(bl_cuda_stream_handle(wrapped), foreign);
    give_note(wrapped, list, &n, 1);
    assert_ok(bl_event_record(f->event, wrapped));
    assert_ok(bl_stream_wait(f->a, f->event));
    give_note(f->a, list, &n, 2);
    assert_ok(bl_stream_synchronize(f->a));
    assert_int_equal(n, 2);
    bl_stream_destroy(wrapped);
    assert_int_equal(cudaStreamDestroy(foreign), cudaSuccess);

    bl_device *cpu;
    assert_ok(bl_device_create_cpu(1, &cpu));
    assert_int_equal(bl_stream_wrap_cuda(cpu, NULL, &wrapped), BL_EUSAGE);
    bl_device_destroy(cpu);
}

#ifdef BALLAST_CUDA_EMULATED

static void test_host_memory_is_registered_in_pieces(void **state)
{
    fixture *f = *state;
    const size_t piece = (size_t)1 << 30;
    unsigned char *host, *device;
    assert_ok(bl_device_alloc(f->device, BL_SPACE_HOST, piece + 8192, "host", (void **)&host));
    assert_ok(bl_device_alloc(f->device, BL_SPACE_DEVICE, 8192, "device", (void **)&device));
    assert_in_range(emulated_cuda_registrations(), 2, 3);
    unsigned char *boundary = (unsigned char *)(((uintptr_t)host / piece + 1) * piece);
    if (boundary > host + piece) boundary = host + piece; /* then the allocation began at one */
    size_t before = boundary - host < 4096 ? (size_t)(boundary - host) : 4096;
    unsigned char *from = boundary - before;
    for (int i = 0; i < 8192; i++) from[i] = (unsigned char)(i * 3);
    assert_ok(bl_stream_copy(f->a, device, from,
                             8192)); /* the fake refuses a copy across two registrations */
    memset(from, 0, 8192);
    assert_ok(bl_stream_synchronize(f->a));
    bl_device_free(f->device, BL_SPACE_DEVICE, device);
    bl_device_free(f->device, BL_SPACE_HOST, host);
    assert_int_equal(emulated_cuda_registrations(), 0);
}

static void test_a_broken_gpu_is_told_and_nothing_hangs(void **state)
{
    fixture *f = *state;
    int list[2 * BL_STREAM_DEPTH], n = 0;
    give_note(f->a, list, &n, 0);
    assert_ok(bl_stream_synchronize(f->a));
    emulated_cuda_break();
    assert_int_equal(bl_stream_synchronize(f->a), BL_EINTERNAL);
    assert_non_null(strstr(bl_error_text(), "illegal memory access"));
    assert_non_null(strstr(bl_error_text(), "cuda"));
    assert_int_equal(bl_stream_copy(f->a, list, list + 1, 4), BL_EINTERNAL);
    assert_int_equal(bl_event_record(f->event, f->a), BL_EINTERNAL);
    emulated_cuda_mend();
}

/* One thread drives both, and each call is about the other one than the call before: it makes its
 * own device current. */
static void test_two_gpus_by_turns(void **state)
{
    fixture *f = *state;
    bl_device *second;
    bl_stream *there;
    bl_event *event;
    bl_stamp *stamp;
    int *here_memory, *there_memory, list[2], n = 0;
    emulated_cuda_set_machine(13000, 2);
    assert_ok(bl_device_create_cuda(1, &second));
    assert_ok(bl_stream_create(second, "there", &there));
    assert_ok(bl_event_create(second, &event));
    assert_ok(bl_stamp_create(second, &stamp));
    assert_ok(
        bl_device_alloc(f->device, BL_SPACE_DEVICE, sizeof(int), "here", (void **)&here_memory));
    assert_ok(
        bl_device_alloc(second, BL_SPACE_DEVICE, sizeof(int), "there", (void **)&there_memory));
    for (int i = 0; i < 2; i++) {
        assert_ok(bl_stream_zero(there, there_memory, sizeof(int)));
        assert_ok(bl_event_record(f->event, f->a));
        assert_ok(bl_stream_wait(there, f->event));
        give_note(f->a, list, &n, i);
        assert_ok(bl_stream_copy(there, there_memory, here_memory, sizeof(int)));
        assert_ok(bl_event_record(event, there));
        assert_ok(bl_stream_wait(f->a, event)); /* which zeroes the copy's source */
        assert_ok(bl_stream_synchronize(f->a));
        assert_ok(bl_stamp_record(stamp, there));
        assert_ok(bl_stream_zero(f->a, here_memory, sizeof(int)));
        assert_ok(bl_event_synchronize(event));
        assert_ok(bl_stream_synchronize(f->a));
        assert_ok(bl_stream_synchronize(there));
        assert_true(bl_stamp_seconds(stamp) > BL_NEVER_S);
    }
    assert_int_equal(n, 2);
    bl_device_free(f->device, BL_SPACE_DEVICE, here_memory);
    bl_device_free(second, BL_SPACE_DEVICE, there_memory);
    bl_stamp_destroy(stamp);
    bl_event_destroy(event);
    bl_stream_destroy(there);
    bl_device_destroy(second);
    emulated_cuda_set_machine(13000, 1);
}

static void test_machines_that_will_not_do(void **state)
{
    bl_device *device;
    (void)state;
    emulated_cuda_set_machine(0, 0);
    assert_int_equal(bl_device_create_cuda(0, &device), BL_ELIMIT);
    assert_non_null(strstr(bl_error_text(), "no NVIDIA driver"));
    emulated_cuda_set_machine(12040, 1);
    assert_int_equal(bl_device_create_cuda(0, &device), BL_ELIMIT);
    assert_non_null(strstr(bl_error_text(), "driver serves CUDA 12.4"));
    emulated_cuda_set_machine(13000, 1);
    assert_int_equal(bl_device_create_cuda(1, &device), BL_ELIMIT);
    assert_non_null(strstr(bl_error_text(), "GPU 1 is not among this machine's 1"));
    assert_null(device);
}

/* A GPU that is there and does not work is the machine's matter, not an error of this program. */
static void test_errors_of_machines(void **state)
{
    static const cudaError_t errors[] = {cudaErrorStubLibrary,
                                         cudaErrorInsufficientDriver,
                                         cudaErrorDevicesUnavailable,
                                         cudaErrorNoKernelImageForDevice,
                                         cudaErrorECCUncorrectable,
                                         cudaErrorNvlinkUncorrectable,
                                         cudaErrorUnsupportedPtxVersion,
                                         cudaErrorOperatingSystem,
                                         cudaErrorSystemNotReady,
                                         cudaErrorSystemDriverMismatch,
                                         cudaErrorCompatNotSupportedOnDevice,
                                         cudaErrorUnknown};
    (void)state;
    for (size_t i = 0; i < BL_COUNT(errors); i++) {
        assert_int_equal(bl_cuda_fail("cudaSetDevice", (int)errors[i]), BL_ELIMIT);
        assert_int_equal(strncmp(bl_error_text(), "cudaSetDevice: ", 15), 0);
        assert_non_null(strstr(bl_error_text(), cudaGetErrorName(errors[i])));
    }
    assert_int_equal(bl_cuda_fail("cudaMalloc", cudaErrorMemoryAllocation), BL_ENOMEM);
    assert_int_equal(bl_cuda_fail("cudaMemcpy", cudaErrorInvalidValue), BL_EINTERNAL);
}

#endif

/* A process that is forked for the question answers as this one would. */
static void test_probe(void **state)
{
    bl_gpu_info found, probed;
    char text[BL_ERROR_TEXT_BYTES];

    (void)state;
    assert_int_equal(bl_device_probe_cuda(0, &probed), BL_OK);
    assert_int_equal(bl_device_find_cuda(0, &found), BL_OK);
    assert_memory_equal(&probed, &found, sizeof found);
    assert_int_equal(bl_device_find_cuda(found.n_gpus, &found), BL_ELIMIT);
    snprintf(text, sizeof text, "%s", bl_error_text());
    assert_int_equal(bl_device_probe_cuda(probed.n_gpus, &probed), BL_ELIMIT);
    assert_string_equal(bl_error_text(), text);
}

static bool interrupts_forks;

static void interrupt_child(void)
{
    if (interrupts_forks) kill(getpid(), SIGINT);
}

/* Ctrl-C at a terminal goes to both processes: the one that asks takes it, the other answers. */
static void test_probe_is_not_interrupted(void **state)
{
    bl_gpu_info probed;

    (void)state;
    assert_int_equal(pthread_atfork(NULL, NULL, interrupt_child), 0);
    interrupts_forks = true;
    bl_status st = bl_device_probe_cuda(0, &probed);
    interrupts_forks = false;
    if (st != BL_OK) fail_msg("%s", bl_error_text());
    assert_true(probed.n_gpus > 0);
}

static void test_launches_are_bounded(void **state)
{
    fixture *f = *state;
    void *memory;
    assert_ok(bl_device_alloc(f->device, BL_SPACE_DEVICE, 256, "zeros", &memory));
    for (int i = 0; i < 3000; i++) assert_ok(bl_stream_zero(f->a, memory, 256));
    assert_ok(bl_stream_synchronize(f->a));
    bl_device_free(f->device, BL_SPACE_DEVICE, memory);
}

int main(void)
{
    bl_device *device;
    if (bl_device_create_cuda(0, &device) != BL_OK) {
        printf("skip: no GPU: %s\n", bl_error_text());
        return 77;
    }
    bl_device_destroy(device);
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_probe),
        cmocka_unit_test(test_probe_is_not_interrupted),
        TEST(test_memory_goes_there_and_back),
        TEST(test_impossible_memory_is_refused),
        TEST(test_tasks_run_in_order_through_a_small_ring),
        TEST(test_first_error_is_sticky),
        TEST(test_waiters_inherit_the_error),
        TEST(test_the_earlier_of_two_errors_is_told),
        TEST(test_a_device_fails_as_a_whole),
        TEST(test_launches_are_bounded),
        TEST(test_adopted_memory_counts),
        TEST(test_events_outlive_streams_and_lanes_are_used_again),
        TEST(test_too_many_streams_are_refused),
        TEST(test_large_arguments_are_refused),
        TEST(test_stamps_tell_the_time),
        TEST(test_pinned_memory_of_the_callers),
        TEST(test_a_foreign_stream_serves),
#ifdef BALLAST_CUDA_EMULATED
        TEST(test_host_memory_is_registered_in_pieces),
        TEST(test_a_broken_gpu_is_told_and_nothing_hangs),
        TEST(test_two_gpus_by_turns),
        cmocka_unit_test(test_machines_that_will_not_do),
        cmocka_unit_test(test_errors_of_machines),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
