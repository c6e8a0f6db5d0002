/* SPDX-License-Identifier: Apache-2.0 */
/* Moves between tiers: every pair of tiers, with and without memory to pass through, while each
 * stream in turn is late; failures; batches; spans; a simulated device. */
#include "ops_test.h"

#include <errno.h>
#include <stdatomic.h>
#include <unistd.h>

#include "device/model.h"
#include "offload/scratch.h"
#include "offload/transfer.h"
#include "skip.h"

enum { N_BYTES = 8192, N_BLOCKS = 16, PAUSE_US = 20000, MAX_SPANS = 64 };

typedef struct fixture {
    bl_device *device;
    bl_stream *work, *in, *out, *disk;
    bl_event *event;
    bl_timeline *timeline;
    bl_io_files *files;
    bl_mover mover;
    char *device_memory, *host, *through; /* N_BYTES each */
    atomic_int pause_us;                  /* of each request */
    atomic_int fails_at;                  /* request that fails; -1: none */
    atomic_int n_requests, n_arrived;
    _Atomic(bl_status) arrived_status, returns; /* of `arrived` */
    char seen;                                  /* device_memory[0] when `arrived` was called */
} fixture;

static void must(bl_status st)
{
    if (st != BL_OK) fail_msg("%s: %s", bl_status_name(st), bl_error_text());
}

static int64_t io_hook(void *arg, const bl_io_completion *completion)
{
    fixture *f = arg;
    usleep((unsigned)atomic_load(&f->pause_us));
    return atomic_fetch_add(&f->n_requests, 1) == atomic_load(&f->fails_at) ? -EIO
                                                                            : completion->result;
}

static bl_status arrived(void *user, const bl_move *move, bl_status st)
{
    fixture *f = user;
    atomic_fetch_add(&f->n_arrived, move->unit == 7);
    atomic_store(&f->arrived_status, st);
    if (move->is_checked) f->seen = f->device_memory[0];
    return atomic_load(&f->returns) != BL_OK ? BL_FAIL(BL_EINPUT, "planted in arrived") : st;
}

static void open_fixture(fixture *f)
{
    const bl_reader_options options = {.chunk_bytes = N_BYTES, .hook = io_hook, .hook_arg = f};

    *f = (fixture){.fails_at = -1};
    must(bl_device_create_cpu(1, &f->device));
    must(bl_stream_create(f->device, "work", &f->work));
    must(bl_stream_create(f->device, "in", &f->in));
    must(bl_stream_create(f->device, "out", &f->out));
    must(bl_stream_create_host(f->device, "disk", &f->disk));
    must(bl_event_create(f->device, &f->event));
    must(bl_timeline_create(f->device, MAX_SPANS, NULL, NULL, &f->timeline));
    must(bl_scratch_open(".", "test", (int64_t)N_BLOCKS * N_BYTES, &f->files));
    must(bl_device_alloc(f->device, BL_SPACE_DEVICE, N_BYTES, "test", (void **)&f->device_memory));
    must(bl_device_alloc(f->device, BL_SPACE_HOST, N_BYTES, "test", (void **)&f->host));
    must(bl_device_alloc(f->device, BL_SPACE_HOST, N_BYTES, "test", (void **)&f->through));
    f->mover = (bl_mover){.device = f->device,
                          .in = f->in,
                          .out = f->out,
                          .disk = f->disk,
                          .timeline = f->timeline,
                          .arrived = arrived,
                          .user = f};
    must(bl_transfer_open_reader(f->device, &options, f->files, &f->mover.reader[1]));
    assert_non_null(f->mover.reader[1]);
    must(bl_mover_open(&f->mover));
}

static void close_fixture(fixture *f)
{
    bl_stream *const streams[] = {f->work, f->in, f->out, f->disk};

    for (size_t i = 0; i < BL_COUNT(streams); i++) {
        (void)bl_stream_synchronize(streams[i]);
        bl_stream_destroy(streams[i]);
    }
    bl_mover_close(&f->mover);
    bl_reader_destroy(f->mover.reader[1]);
    bl_io_files_close(f->files);
    bl_device_free(f->device, BL_SPACE_DEVICE, f->device_memory);
    bl_device_free(f->device, BL_SPACE_HOST, f->host);
    bl_device_free(f->device, BL_SPACE_HOST, f->through);
    bl_event_destroy(f->event);
    bl_timeline_destroy(f->timeline);
    bl_device_destroy(f->device);
}

/* ---- places ---- */

static bl_place disk_at(int block)
{
    return (bl_place){.tier = BL_TIER_DISK, .file = 1, .offset_bytes = (int64_t)block * N_BYTES};
}

static bl_place device_of(const fixture *f)
{
    return (bl_place){.tier = BL_TIER_DEVICE, .memory = f->device_memory};
}

static bl_place host_of(const fixture *f)
{
    return (bl_place){.tier = BL_TIER_HOST, .memory = f->host};
}

/* Bytes of a place as it is now, with all streams idle. */
static void assert_holds(fixture *f, const bl_place *place, char value)
{
    const char *bytes = place->memory;
    char copy[N_BYTES];

    if (place->tier == BL_TIER_DISK) {
        const bl_place to = {.tier = BL_TIER_HOST, .memory = copy};
        must(bl_transfer_now(&f->mover, place, &to, N_BYTES));
        bytes = copy;
    }
    for (int i = 0; i < N_BYTES; i++)
        if (bytes[i] != value) fail_msg("byte %d is %d, not %d", i, bytes[i], value);
}

static void fill(fixture *f, const bl_place *place, char value)
{
    char bytes[N_BYTES] __attribute__((aligned(BL_IO_ALIGN_BYTES)));
    const bl_place from = {.tier = BL_TIER_HOST, .memory = bytes};

    memset(bytes, value, sizeof bytes);
    if (place->tier == BL_TIER_DISK)
        must(bl_transfer_now(&f->mover, &from, place, N_BYTES));
    else
        memset(place->memory, value, N_BYTES);
}

typedef struct late_args {
    char *memory; /* NULL: only waits */
    char value;
} late_args;

static bl_status late_task(bl_stream *stream, const void *argument)
{
    const late_args *a = argument;
    (void)stream;
    usleep(PAUSE_US);
    if (a->memory) memset(a->memory, a->value, N_BYTES);
    return BL_OK;
}

static void be_late(bl_stream *stream, char *memory, char value)
{
    const late_args args = {memory, value};
    must(bl_stream_call(stream, late_task, &args, sizeof args));
}

/* ---- queued ---- */

enum { LATE_WORK, LATE_IN, LATE_OUT, LATE_DISK, N_LATE };

/* The move reads what `work` writes late, or overwrites it. */
static void check_way(const bl_place *from, const bl_place *to, bool has_through, int late,
                      fixture *f)
{
    bl_stream *const streams[] = {f->work, f->in, f->out, f->disk};
    const bl_move move = {.from = *from,
                          .to = *to,
                          .n_bytes = N_BYTES,
                          .through = has_through ? f->through : NULL,
                          .unit = 7};
    bool writes = from->tier != BL_TIER_DISK;
    char *by_work = writes ? from->memory : to->memory;

    fill(f, from, writes ? 1 : 2);
    fill(f, to, 3);
    memset(f->through, 4, N_BYTES);
    be_late(late == LATE_WORK ? f->work : streams[late], NULL, 0);
    if (late == LATE_WORK)
        be_late(f->work, by_work, writes ? 2 : 5);
    else
        memset(by_work, writes ? 2 : 5, N_BYTES);
    must(bl_transfer_queue(&f->mover, &move, f->work, f->event));
    must(bl_event_synchronize(f->event));
    assert_holds(f, to, 2);
    for (size_t i = 0; i < BL_COUNT(streams); i++) must(bl_stream_synchronize(streams[i]));
    assert_holds(f, to, 2);
}

static void test_every_way(void **state)
{
    fixture f;

    (void)state;
    open_fixture(&f);
    const bl_place device = device_of(&f), host = host_of(&f), disk = disk_at(3);
    atomic_store(&f.pause_us, PAUSE_US / 10);
    for (int late = 0; late < N_LATE; late++) {
        check_way(&host, &device, false, late, &f);
        check_way(&device, &host, false, late, &f);
        for (int through = 0; through < 2; through++) {
            check_way(&disk, &device, through, late, &f);
            check_way(&device, &disk, through, late, &f);
        }
    }
    assert_int_equal(atomic_load(&f.n_arrived), 4 * N_LATE); /* once per leg of the disk */
    close_fixture(&f);
}

/* Reads of all slots are under way before the first is waited for, and arrive in their slots. */
static void test_many_at_once(void **state)
{
    enum { N_SLOTS = 12, PART = 512 };
    fixture f;
    bl_move moves[N_SLOTS];

    (void)state;
    open_fixture(&f);
    for (int i = 0; i < N_SLOTS; i++) {
        bl_place block = disk_at(i);
        fill(&f, &block, (char)(10 + i));
        moves[i] = (bl_move){.from = block,
                             .to = {.tier = BL_TIER_DEVICE, .memory = f.device_memory + i * PART},
                             .n_bytes = PART,
                             .through = f.through + i * PART,
                             .unit = 7};
    }
    atomic_store(&f.n_requests, 0);
    for (int i = 0; i < N_SLOTS; i++) must(bl_transfer_begin(&f.mover, i, &moves[i]));
    must(bl_stream_synchronize(f.disk));
    assert_int_equal(atomic_load(&f.n_arrived), 0);
    for (int i = 0; i < N_SLOTS; i++) must(bl_transfer_finish(&f.mover, i, &moves[i]));
    must(bl_stream_synchronize(f.in));
    assert_int_equal(atomic_load(&f.n_arrived), N_SLOTS);
    assert_int_equal(atomic_load(&f.n_requests), N_SLOTS);
    for (int i = 0; i < N_SLOTS * PART; i++) assert_int_equal(f.device_memory[i], 10 + i / PART);
    close_fixture(&f);
}

typedef struct gate {
    atomic_bool *is_open;
} gate;

static bl_status gate_task(bl_stream *stream, const void *argument)
{
    const gate *a = argument;
    (void)stream;
    while (!atomic_load(a->is_open)) usleep(100);
    return BL_OK;
}

/* A page is read while earlier copies are under way. */
static void test_the_disk_does_not_wait_for_copies(void **state)
{
    atomic_bool is_open = false;
    const gate args = {&is_open};
    fixture f;

    (void)state;
    open_fixture(&f);
    const bl_move move = {.from = disk_at(0),
                          .to = device_of(&f),
                          .n_bytes = N_BYTES,
                          .through = f.through,
                          .unit = 7};
    must(bl_stream_call(f.in, gate_task, &args, sizeof args));
    must(bl_transfer_queue(&f.mover, &move, NULL, f.event));
    while (atomic_load(&f.n_arrived) == 0) usleep(100); /* else the test hangs */
    atomic_store(&is_open, true);
    must(bl_event_synchronize(f.event));
    close_fixture(&f);
}

/* Without a stream for the disk, `in` does its work. */
static void test_one_stream(void **state)
{
    fixture f;

    (void)state;
    open_fixture(&f);
    f.mover.disk = NULL;
    const bl_place disk = disk_at(1), device = device_of(&f);
    const bl_move move = {.from = disk, .to = device, .n_bytes = N_BYTES, .unit = 7};
    fill(&f, &disk, 2);
    be_late(f.in, f.device_memory, 5);
    must(bl_transfer_queue(&f.mover, &move, NULL, f.event));
    must(bl_event_synchronize(f.event));
    assert_holds(&f, &device, 2);
    close_fixture(&f);
}

/* A check comes before the copy, which does not follow if it fails; a failed read has no copy. */
static void test_arrivals(void **state)
{
    fixture f;

    (void)state;
    for (int fails = 0; fails < 2; fails++) {
        open_fixture(&f);
        const bl_place device = device_of(&f), host = host_of(&f);
        bl_move move = {
            .from = host, .to = device, .n_bytes = N_BYTES, .is_checked = true, .unit = 7};
        fill(&f, &host, 2);
        fill(&f, &device, 3);
        atomic_store(&f.returns, fails ? BL_EINPUT : BL_OK);
        must(bl_transfer_queue(&f.mover, &move, NULL, f.event));
        assert_int_equal(bl_event_synchronize(f.event), fails ? BL_EINPUT : BL_OK);
        assert_int_equal(f.seen, 3);
        assert_int_equal(atomic_load(&f.n_arrived), 1);
        assert_holds(&f, &device, fails ? 3 : 2);
        close_fixture(&f);
    }
    for (int through = 0; through < 2; through++) {
        open_fixture(&f);
        const bl_place device = device_of(&f), disk = disk_at(0);
        const bl_move move = {.from = disk,
                              .to = device,
                              .n_bytes = N_BYTES,
                              .through = through ? f.through : NULL,
                              .unit = 7};
        fill(&f, &device, 3);
        atomic_store(&f.fails_at, 0);
        must(bl_transfer_queue(&f.mover, &move, NULL, f.event));
        assert_int_equal(bl_event_synchronize(f.event), BL_EIO);
        assert_int_equal(atomic_load(&f.arrived_status), BL_EIO);
        if (through) assert_holds(&f, &device, 3);
        close_fixture(&f);
    }
}

static void test_a_failing_write(void **state)
{
    fixture f;

    (void)state;
    open_fixture(&f);
    const bl_move move = {.from = device_of(&f),
                          .to = disk_at(0),
                          .n_bytes = N_BYTES,
                          .through = f.through,
                          .unit = 7};
    atomic_store(&f.fails_at, 0);
    must(bl_transfer_queue(&f.mover, &move, NULL, f.event));
    assert_int_equal(bl_event_synchronize(f.event), BL_EIO);
    assert_int_equal(atomic_load(&f.arrived_status), BL_EIO);
    close_fixture(&f);
    open_fixture(&f);
    bl_move odd = move;
    odd.from = device_of(&f);
    odd.through = f.through;
    odd.n_bytes = 100; /* not a block */
    must(bl_transfer_queue(&f.mover, &odd, NULL, f.event));
    assert_int_equal(bl_event_synchronize(f.event), BL_EINTERNAL);
    assert_int_equal(atomic_load(&f.n_arrived), 0);
    close_fixture(&f);
}

/* ---- spans ---- */

static void test_spans(void **state)
{
    bl_timeline_totals totals;
    fixture f;

    (void)state;
    open_fixture(&f);
    bl_move move = {.from = disk_at(0),
                    .to = device_of(&f),
                    .n_bytes = N_BYTES,
                    .through = f.through,
                    .lane = BL_LANE_COPY,
                    .unit = 7};
    for (int named = 0; named < 2; named++) {
        move.name = named ? "named" : NULL;
        must(bl_transfer_queue(&f.mover, &move, NULL, f.event));
        must(bl_event_synchronize(f.event));
        must(bl_stream_synchronize(f.in));
        must(bl_stream_synchronize(f.disk));
        bl_timeline_collect(f.timeline);
        bl_timeline_get_totals(f.timeline, &totals);
        assert_int_equal(totals.lane[BL_LANE_COPY].n_bytes, named * N_BYTES);
        assert_int_equal(totals.lane[BL_LANE_DISK].n_bytes, named * N_BYTES);
    }
    close_fixture(&f);
}

/* ---- in a task ---- */

static void test_batches(void **state)
{
    char bytes[3][N_BYTES] __attribute__((aligned(BL_IO_ALIGN_BYTES)));
    bl_transfer_batch batch = {0};
    bl_place host[3], disk[3];
    fixture f;

    (void)state;
    open_fixture(&f);
    must(bl_event_create(f.device, &batch.copied));
    for (int i = 0; i < 3; i++) {
        host[i] = (bl_place){.tier = BL_TIER_HOST, .memory = bytes[i]};
        disk[i] = disk_at(i);
        fill(&f, &disk[i], (char)(20 + i));
        fill(&f, &host[i], 0);
    }
    atomic_store(&f.pause_us, PAUSE_US / 4);
    fill(&f, &host[2], 9);
    for (int i = 0; i < 2; i++)
        must(bl_transfer_add(&f.mover, &batch, &disk[i], &host[i], N_BYTES));
    must(bl_transfer_add(&f.mover, &batch, &host[2], &disk[2], N_BYTES));
    must(bl_transfer_wait(&batch));
    assert_holds(&f, &host[0], 20);
    assert_holds(&f, &host[1], 21);
    assert_holds(&f, &disk[2], 9);
    /* copies */
    const bl_place device = device_of(&f);
    fill(&f, &device, 0);
    be_late(f.in, NULL, 0);
    must(bl_transfer_add(&f.mover, &batch, &host[2], &device, N_BYTES));
    must(bl_transfer_wait(&batch));
    assert_holds(&f, &device, 9);
    /* a failure, after which the batch is empty */
    for (int fails = 0; fails < 2; fails++) {
        atomic_store(&f.n_requests, 0);
        atomic_store(&f.fails_at, fails);
        for (int i = 0; i < 2; i++)
            must(bl_transfer_add(&f.mover, &batch, &disk[i], &host[i], N_BYTES));
        assert_int_equal(bl_transfer_wait(&batch), BL_EIO);
        must(bl_transfer_wait(&batch));
    }
    atomic_store(&f.fails_at, -1);
    for (int i = 0; i < BL_BATCH_MOVES; i++)
        must(bl_transfer_add(&f.mover, &batch, &disk[1], &host[1], N_BYTES));
    assert_int_equal(bl_transfer_add(&f.mover, &batch, &disk[0], &host[0], N_BYTES), BL_EINTERNAL);
    must(bl_transfer_wait(&batch));
    bl_event_destroy(batch.copied);
    close_fixture(&f);
}

/* A copy that is waited for, each way on its stream. */
static void test_now(void **state)
{
    fixture f;

    (void)state;
    open_fixture(&f);
    const bl_place device = device_of(&f), host = host_of(&f);
    fill(&f, &host, 2);
    be_late(f.in, f.device_memory, 3);
    must(bl_transfer_now(&f.mover, &host, &device, N_BYTES));
    assert_holds(&f, &device, 2);
    be_late(f.out, f.device_memory, 6);
    must(bl_transfer_now(&f.mover, &device, &host, N_BYTES));
    assert_holds(&f, &host, 6);
    atomic_store(&f.fails_at, 0);
    const bl_place disk = disk_at(0);
    assert_int_equal(bl_transfer_now(&f.mover, &disk, &host, N_BYTES), BL_EIO);
    close_fixture(&f);
}

/* ---- a simulated device ---- */

static void test_simulated(void **state)
{
    const bl_model_device_options options = {.kind = BL_DEVICE_CUDA,
                                             .rates = {.memory_bytes_per_s = 100,
                                                       .copy_in_bytes_per_s = 10,
                                                       .disk_bytes_per_s = 2,
                                                       .cores = 4}};
    const bl_reader_options reader = {0};
    bl_stream *in, *disk;
    bl_stamp *begin, *end;
    bl_event *event;
    bl_device *device, *computes;
    void *memory, *through;

    (void)state;
#ifdef __SANITIZE_THREAD__
    TEST_SKIP("ThreadSanitizer leaves no room for the addresses of such a device");
#endif
    must(bl_device_create_model(&options, &device));
    must(bl_stream_create(device, "in", &in));
    must(bl_stream_create_host(device, "disk", &disk));
    must(bl_event_create(device, &event));
    must(bl_stamp_create(device, &begin));
    must(bl_stamp_create(device, &end));
    must(bl_device_alloc(device, BL_SPACE_DEVICE, 20, "memory", &memory));
    must(bl_device_alloc(device, BL_SPACE_HOST, 20, "memory", &through));
    bl_mover mover = {.device = device, .in = in, .disk = disk};
    must(bl_transfer_open_reader(device, &reader, NULL, &mover.reader[0]));
    assert_null(mover.reader[0]);
    must(bl_mover_open(&mover));
    const bl_move move = {.from = {.tier = BL_TIER_DISK},
                          .to = {.tier = BL_TIER_DEVICE, .memory = memory},
                          .n_bytes = 20,
                          .through = through};
    must(bl_stamp_record(begin, in));
    must(bl_transfer_queue(&mover, &move, NULL, event));
    must(bl_stream_wait(in, event));
    must(bl_stamp_record(end, in));
    must(bl_stream_synchronize(in));
    assert_float_equal(bl_stamp_elapsed_s(begin, end), 20 / 2. + 20 / 10., 1e-9);
    assert_true(bl_transfer_is_simulated(device));
    bl_mover_close(&mover);
    bl_device_free(device, BL_SPACE_DEVICE, memory);
    bl_device_free(device, BL_SPACE_HOST, through);
    bl_stamp_destroy(begin);
    bl_stamp_destroy(end);
    bl_event_destroy(event);
    bl_stream_destroy(in);
    bl_stream_destroy(disk);
    bl_device_destroy(device);
    must(bl_device_create_cpu(1, &computes));
    assert_false(bl_transfer_is_simulated(computes));
    bl_device_destroy(computes);
}

static void test_reach(void **state)
{
    (void)state;
    assert_int_equal(bl_transfer_reach(BL_DEVICE_CPU, BL_TIER_DEVICE), BL_TIER_HOST);
    assert_int_equal(bl_transfer_reach(BL_DEVICE_CUDA, BL_TIER_DEVICE), BL_TIER_DEVICE);
    for (int kind = BL_DEVICE_CPU; kind <= BL_DEVICE_CUDA; kind++) {
        assert_int_equal(bl_transfer_reach((bl_device_kind)kind, BL_TIER_HOST), BL_TIER_HOST);
        assert_int_equal(bl_transfer_reach((bl_device_kind)kind, BL_TIER_DISK), BL_TIER_DISK);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_way),  cmocka_unit_test(test_many_at_once),
        cmocka_unit_test(test_one_stream), cmocka_unit_test(test_the_disk_does_not_wait_for_copies),
        cmocka_unit_test(test_arrivals),   cmocka_unit_test(test_a_failing_write),
        cmocka_unit_test(test_spans),      cmocka_unit_test(test_batches),
        cmocka_unit_test(test_now),        cmocka_unit_test(test_simulated),
        cmocka_unit_test(test_reach),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
