/* SPDX-License-Identifier: Apache-2.0 */
/* ballast bench gather: how fast ranks all-gather, as the base's layers are gathered: by threads of
 * one process, by processes of one host or several, between GPUs by NCCL. Compared with nccl-tests,
 * where that is installed. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/sizes.h"
#include "bench/command/bench.h"
#include "bench/command/nccl_tests.h"
#include "comm/comm.h"
#include "job/launch.h"
#include "comm/nccl/nccl.h"
#include "device/staging.h"

typedef enum where { AUTO, CPU, CUDA } where;

typedef struct gather_options {
    bl_string_list bytes;
    int64_t ranks, runs;
    where device;
    bool processes, by_hosts, nccl_tests, json;
} gather_options;

#define OPTION(field, kind)                                                                        \
    .key = #field, .group = "bench gather", .type = BL_OPTION_##kind,                              \
    .offset = offsetof(gather_options, field), .commands = BL_CLI_ANY

static const bl_option table[] = {
    {OPTION(bytes, LIST), .default_text = "1MiB,16MiB,64MiB",
     .help = "gathered sizes: all ranks together"},
    {OPTION(ranks, INT), .default_text = "auto", .has_auto = true, .min = 1, .max = 4096,
     .help = "auto: the GPUs, or two on a CPU; or what mpirun, srun or torchrun have started"},
    {OPTION(device, ENUM), .names = "auto|cpu|cuda", .default_text = "auto",
     .help = "device of the gathered memory; auto: GPUs, if this build and machine have some"},
    {OPTION(processes, BOOL), .default_text = "true",
     .help = "a process per rank; false: threads of one process, all on GPU 0"},
    {OPTION(runs, INT), .default_text = "10", .min = 1, .max = BL_BENCH_MAX_RUNS,
     .help = "timed runs of each size"},
    {OPTION(by_hosts, BOOL), .default_text = "false",
     .help = "gather between GPUs of several hosts as `ballast train` does with gather_by_hosts"},
    {OPTION(nccl_tests, BOOL), .default_text = "true",
     .help = "run nccl-tests' all_gather_perf, too, where it is installed"},
    {OPTION(json, BOOL), .default_text = "false", .help = "print a JSON line for each size"},
};

enum { MAX_SIZES = 64 };
static const double DEADLINE_S = 120;

typedef struct gather_bench {
    const gather_options *options;
    bl_device_kind kind;
    int n_ranks, gpu;
    bool is_nccl;
    bl_launch *launch; /* of a process of several */
    int n_sizes;
    int64_t bytes[MAX_SIZES]; /* of all ranks */
} gather_bench;

/* Of one rank. */
typedef struct gather_rank {
    const gather_bench *bench;
    bl_comm *world,
        *host; /* of device memory, of host memory; the same where the device is a CPU */
    bl_device *device;
    bl_stream *stream;
    double seconds[MAX_SIZES][BL_BENCH_MAX_RUNS]; /* rank 0's are the results */
} gather_rank;

static unsigned char byte_of(int rank, size_t at)
{
    return (unsigned char)(((uint64_t)at * 2654435761u >> 13) + 37u * (unsigned)rank);
}

/* Everything that has come is everybody's own. */
static bl_status check(const gather_rank *r, bl_staging *staging, const void *all, size_t n_each)
{
    unsigned char *host = staging->bytes;

    for (int peer = 0; peer < r->bench->n_ranks; peer++)
        for (size_t first = 0; first < n_each; first += staging->n_bytes) {
            size_t n = (size_t)bl_min_i64((int64_t)staging->n_bytes, (int64_t)(n_each - first));
            BL_TRY(bl_staging_download(staging, host,
                                       (const char *)all + (size_t)peer * n_each + first, n));
            for (size_t i = 0; i < n; i++)
                if (host[i] != byte_of(peer, first + i))
                    return BL_FAIL(BL_EINTERNAL, "bench gather: byte %zu of rank %d differs",
                                   first + i, peer);
        }
    return BL_OK;
}

static bl_status fill(const gather_rank *r, bl_staging *staging, void *own, size_t n_each)
{
    unsigned char *host = staging->bytes;

    for (size_t first = 0; first < n_each; first += staging->n_bytes) {
        size_t n = (size_t)bl_min_i64((int64_t)staging->n_bytes, (int64_t)(n_each - first));
        for (size_t i = 0; i < n; i++) host[i] = byte_of(bl_comm_rank(r->world), first + i);
        BL_TRY(bl_staging_upload(staging, (char *)own + first, host, n));
    }
    return BL_OK;
}

/* Seconds from when all ranks begin to when all have ended. */
static bl_status time_once(const gather_rank *r, void *own, void *all, size_t n_each,
                           double *seconds)
{
    BL_TRY(bl_comm_barrier(r->world, r->stream));
    BL_TRY(bl_stream_synchronize(r->stream));
    double start = bl_now_s();
    BL_TRY(bl_comm_all_gather(r->world, r->stream, own, all, n_each));
    BL_TRY(bl_stream_synchronize(r->stream));
    *seconds = bl_now_s() - start;
    return BL_OK;
}

/* The slowest rank's time of each run, on all ranks. */
static bl_status take_slowest(gather_rank *r, double *seconds, int64_t n)
{
    bl_status st;
    bl_device *cpu;
    bl_stream *stream = NULL;
    int n_ranks = r->bench->n_ranks;
    double *all = calloc((size_t)(n_ranks * n), sizeof *all);

    if (!all) return BL_FAIL(BL_ENOMEM, "bench gather: its times");
    BL_TRY_GOTO(st, freed, bl_device_create_cpu(1, &cpu));
    BL_TRY_GOTO(st, done, bl_stream_create(cpu, "times", &stream));
    BL_TRY_GOTO(st, done,
                bl_comm_all_gather(r->host, stream, seconds, all, (size_t)n * sizeof *seconds));
    BL_TRY_GOTO(st, done, bl_stream_synchronize(stream));
    for (int peer = 0; peer < n_ranks; peer++)
        for (int64_t i = 0; i < n; i++)
            if (all[peer * n + i] > seconds[i]) seconds[i] = all[peer * n + i];
done:
    bl_stream_destroy(stream);
    bl_device_destroy(cpu);
freed:
    free(all);
    return st;
}

static bl_status measure_size(gather_rank *r, bl_staging *staging, int64_t bytes, double *seconds)
{
    size_t n_each = (size_t)(bytes / r->bench->n_ranks);
    double ignored;
    bl_status st;
    char *all;

    BL_TRY(bl_comm_alloc(r->world, r->device, n_each * (size_t)r->bench->n_ranks, "bench gather",
                         (void **)&all));
    char *own = all + (size_t)bl_comm_rank(r->world) * n_each;
    BL_TRY_GOTO(st, done, fill(r, staging, own, n_each));
    BL_TRY_GOTO(st, done, time_once(r, own, all, n_each, &ignored)); /* warms up */
    BL_TRY_GOTO(st, done, check(r, staging, all, n_each));
    BL_TRY_GOTO(st, done, bl_comm_trust_order(r->world));
    for (int64_t run = 0; run < r->bench->options->runs; run++)
        BL_TRY_GOTO(st, done, time_once(r, own, all, n_each, &seconds[run]));
    st = take_slowest(r, seconds, r->bench->options->runs);
done:
    (void)bl_stream_synchronize(r->stream);
    bl_comm_free(r->world, r->device, all);
    return st;
}

/* Each rank receives n_ranks - 1 of n_ranks parts over its links: the bus bandwidth of
 * nccl-tests. */
static void print_size(const gather_bench *b, int64_t bytes, double *seconds)
{
    static const char *const kinds[] = {[BL_DEVICE_CPU] = "cpu", [BL_DEVICE_CUDA] = "cuda"};
    bl_bench_times times = bl_bench_summarize(seconds, b->options->runs);
    double size = (double)(bytes / b->n_ranks * b->n_ranks),
           part = (double)(b->n_ranks - 1) / (double)b->n_ranks;
    const char *way = b->is_nccl ? "nccl" : b->options->processes ? "processes" : "threads";

    if (b->options->json)
        printf("{\"bench\":\"gather\",\"device\":\"%s\",\"ranks\":%d,\"way\":\"%s\",\"bytes\":%.0f,"
               "\"runs\":%lld,\"seconds\":%.9f,\"best_seconds\":%.9f,\"bus_bytes_per_s\":%.6g}\n",
               kinds[b->kind], b->n_ranks, way, size, (long long)b->options->runs, times.median_s,
               times.best_s, size * part / times.median_s);
    else
        printf("%-10s %14.0f %12.1f %12.1f %10.3f %10.3f\n", way, size, times.median_s * 1e6,
               times.best_s * 1e6, size / times.median_s * 1e-9,
               size * part / times.median_s * 1e-9);
    fflush(stdout);
}

static void print_head(const gather_bench *b)
{
    if (b->options->json) return;
    printf("%d ranks, all-gather in place; GB/s by the median\n", b->n_ranks);
    printf("%-10s %14s %12s %12s %10s %10s\n", "", "bytes", "median, us", "best, us", "GB/s",
           "bus GB/s");
}

static bl_status measure(gather_rank *r)
{
    const gather_bench *b = r->bench;
    bl_staging *staging;
    bl_status st = BL_OK;

    BL_TRY(bl_staging_create(r->device, BL_STAGING_BYTES, "bench gather", &staging));
    if (bl_comm_rank(r->world) == 0) print_head(b);
    for (int i = 0; i < b->n_sizes; i++) {
        BL_TRY_GOTO(st, done, measure_size(r, staging, b->bytes[i], r->seconds[i]));
        if (bl_comm_rank(r->world) == 0) print_size(b, b->bytes[i], r->seconds[i]);
    }
done:
    bl_staging_destroy(staging);
    return st;
}

static void leave_job(void *user)
{
    bl_launch_leave(user);
}

static bl_status create_world(gather_rank *r)
{
    bl_nccl_options options = {.name = "bench gather",
                               .deadline_s = DEADLINE_S,
                               .copy_engines = true,
                               .gathers_by_hosts = r->bench->options->by_hosts,
                               .leave = leave_job,
                               .leave_user = r->bench->launch};

    r->world = r->host;
    if (r->bench->kind == BL_DEVICE_CPU) return bl_device_create_cpu(1, &r->device);
    BL_TRY(bl_device_create_cuda(r->bench->gpu, &r->device));
    if (r->bench->is_nccl) return bl_comm_create_nccl(r->host, r->device, &options, &r->world);
    return bl_comm_split(r->host, 0, &r->world); /* it goes before the device does */
}

static bl_status run_rank(bl_comm *comm, void *user)
{
    gather_rank *r = calloc(1, sizeof *r);
    bl_status st;

    if (!r) return BL_FAIL(BL_ENOMEM, "bench gather: a rank");
    r->bench = user;
    r->host = comm;
    BL_TRY_GOTO(st, done, create_world(r));
    BL_TRY_GOTO(st, done, bl_stream_create(r->device, "gather", &r->stream));
    st = measure(r);
done:
    bl_stream_destroy(r->stream);
    if (r->world != r->host) bl_comm_destroy(r->world);
    bl_device_destroy(r->device);
    free(r);
    return st;
}

/* ---- the ways to start the ranks ---- */

static bl_status read_sizes(gather_bench *b)
{
    const bl_string_list *list = &b->options->bytes;

    if (list->n_items > MAX_SIZES)
        return BL_FAIL(BL_EUSAGE, "--bytes: more than %d sizes", (int)MAX_SIZES);
    for (; b->n_sizes < list->n_items; b->n_sizes++)
        BL_TRY(bl_bench_parse_bytes("bytes", list->items[b->n_sizes], 1, &b->bytes[b->n_sizes]));
    return BL_OK;
}

/* The kind of memory, and the number of ranks where no launcher started several. Does not start
 * CUDA in this process. */
static bl_status choose(gather_bench *b)
{
    const gather_options *o = b->options;
    bl_gpu_info gpu = {.n_gpus = 0};
    bl_status st = o->device == CPU ? BL_OK : bl_device_probe_cuda(0, &gpu);

    if (o->device == CUDA) BL_TRY(st);
    b->kind = gpu.n_gpus > 0 ? BL_DEVICE_CUDA : BL_DEVICE_CPU;
    b->n_ranks = o->ranks != BL_OPTION_AUTO ? (int)o->ranks : gpu.n_gpus > 0 ? gpu.n_gpus : 2;
    b->is_nccl = b->kind == BL_DEVICE_CUDA && o->processes;
    return BL_OK;
}

/* One of the job's processes: the launcher gives their number. */
static bl_status run_process(gather_bench *b, bl_launch *launch, const bl_launch_info *info)
{
    bl_comm *host = NULL;

    b->launch = launch;
    b->n_ranks = bl_launch_size(launch);
    b->gpu = info->local_rank;
    bl_status st = bl_launch_create_comm(launch, DEADLINE_S, &host);
    if (st == BL_OK) st = run_rank(host, b);
    bl_comm_destroy(host);
    return st;
}

static void print_nccl_tests(const gather_bench *b)
{
    for (int i = 0; i < b->n_sizes; i++) {
        double bus;
        if (!bl_nccl_tests_gather(b->n_ranks, b->bytes[i], b->options->runs, &bus)) {
            bl_log_warning("skipped: all_gather_perf (nccl-tests): it is not installed, or fails");
            return;
        }
        if (b->options->json)
            printf("{\"bench\":\"gather\",\"device\":\"cuda\",\"ranks\":%d,\"way\":"
                   "\"nccl-tests\",\"bytes\":%lld,\"bus_bytes_per_s\":%.6g}\n",
                   b->n_ranks, (long long)b->bytes[i], bus);
        else
            printf("%-10s %14lld %12s %12s %10s %10.3f\n", "nccl-tests", (long long)b->bytes[i], "",
                   "", "", bus * 1e-9);
    }
}

static bl_status run_here(gather_bench *b, int argc, char *const *argv)
{
    bl_status st = b->options->processes ? bl_cli_start_ranks(NULL, b->n_ranks, "bench", argc, argv,
                                                              false, DEADLINE_S)
                                         : bl_comm_run_local(b->n_ranks, DEADLINE_S, run_rank, b);
    if (st == BL_OK && b->is_nccl && b->options->nccl_tests) print_nccl_tests(b);
    return st;
}

static void leave_with(bl_status st)
{
    _exit(bl_status_exit_code(st));
}

static bl_status run(const void *values, int argc, char *const *argv)
{
    gather_bench b = {.options = values};
    bl_launch_info info;
    bl_launch *launch;
    bl_error error;

    BL_TRY(bl_launch_begin(&info));
    bl_status st = read_sizes(&b);
    if (st == BL_OK) st = choose(&b);
    if (st == BL_OK && info.n_processes == 1 && info.kind != BL_LAUNCH_CHILD)
        return run_here(&b, argc, argv);
    bl_error_save(&error, st); /* all processes have it */
    BL_TRY(bl_launch_open(&(bl_launch_options){.leave = leave_with, .has_failed = st != BL_OK},
                          &launch));
    st = st == BL_OK ? run_process(&b, launch, &info) : bl_error_restore(&error);
    return bl_launch_close(launch, st);
}

const bl_bench bl_bench_gather = {
    .name = "gather",
    .table = table,
    .n_options = BL_COUNT(table),
    .values_bytes = sizeof(gather_options),
    .details =
        "Measures an all-gather in place, as of the base: the slowest rank's time. Verifies the\n"
        "bytes first. bus GB/s counts the bytes that a rank receives, as nccl-tests does.\n",
    .run_ranks = run,
};
