/* SPDX-License-Identifier: Apache-2.0 */
/* ballast bench hardware: the hardware of this host and its rates, as a table and as hardware.json,
 * whose keys docs/plan.md describes. */
#include <inttypes.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/cores.h"
#include "base/files.h"
#include "base/json.h"
#include "base/memory.h"
#include "base/sizes.h"
#include "bench/command/bench.h"
#include "bench/command/file.h"
#include "bench/command/rates.h"
#include "ops/gemm.h"

typedef struct hardware_options {
    char *dir, *disk_size, *memory_size, *output;
    int64_t threads, matrix_size, runs;
    bool json;
} hardware_options;

#define OPTION(field, kind)                                                                        \
    .key = #field, .group = "bench hardware", .type = BL_OPTION_##kind,                            \
    .offset = offsetof(hardware_options, field), .commands = BL_CLI_ANY

static const bl_option table[] = {
    {OPTION(output, PATH), .help = "file for the results, for example hardware.json"},
    {OPTION(json, BOOL), .default_text = "false", .help = "print that JSON document, not a table"},
    {OPTION(dir, PATH),
     .help = "directory on the disk to measure; a temporary file is written there"},
    {OPTION(disk_size, STRING), .default_text = "1GiB", .help = "size of that file"},
    {OPTION(memory_size, STRING), .default_text = "256MiB",
     .help = "size of the copied block; well above the processor's caches"},
    {OPTION(matrix_size, INT), .default_text = "2048", .min = 128, .max = 32768,
     .help = "rows and columns of the matrices that are multiplied and converted"},
    {OPTION(threads, INT), .default_text = "auto", .has_auto = true, .min = 1, .max = 1024,
     .help = "maximum CPU threads; auto: the usable cores"},
    {OPTION(runs, INT), .default_text = "5", .min = 1, .max = BL_BENCH_MAX_RUNS,
     .help = "timed runs of each"},
};

enum { SYSTEM_TEXT_BYTES = 4096, MAX_NODES = 1024 };

typedef struct hardware {
    const hardware_options *options;
    int n_threads; /* at most */
    int64_t disk_bytes, memory_bytes;
    json_t *report;
} hardware;

static bl_status put(json_t *object, const char *key, json_t *value)
{
    if (json_object_set_new(object, key, value) != 0 || bl_json_ran_out())
        return BL_FAIL(BL_ENOMEM, "the report's key %s", key);
    return BL_OK;
}

/* ---- the hardware ---- */

/* The beginning of a system file, whose size the system does not report; empty when it is not
 * there. */
static void read_system_text(const char *path, char text[static SYSTEM_TEXT_BYTES])
{
    FILE *file = fopen(path, "re");
    size_t n_bytes = file ? fread(text, 1, SYSTEM_TEXT_BYTES - 1, file) : 0;
    text[n_bytes] = '\0';
    if (file) fclose(file);
}

static json_t *describe_processor(void)
{
    char name[BL_PROCESSOR_NAME_BYTES];

    bl_processor_name(name);
    return name[0] ? json_string(name) : json_null();
}

/* Of RLIMIT_MEMLOCK; null: none. */
static json_t *locked_limit_bytes(void)
{
    struct rlimit limit;
    bool is_bounded = getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur < INT64_MAX;
    return is_bounded ? json_integer((json_int_t)limit.rlim_cur) : json_null();
}

/* The cores of a NUMA node that this process may use: a list as in "0-3,8" of the system's, and the
 * affinity. False: none. */
static bool get_node_cores(int node, const cpu_set_t *allowed, cpu_set_t *out)
{
    char path[64], text[SYSTEM_TEXT_BYTES];

    CPU_ZERO(out);
    snprintf(path, sizeof path, "/sys/devices/system/node/node%d/cpulist", node);
    read_system_text(path, text);
    for (char *at = text; *at >= '0' && *at <= '9'; at += *at == ',') {
        long first = strtol(at, &at, 10), last = first;
        if (*at == '-') last = strtol(at + 1, &at, 10);
        for (long core = first; core <= last && core < CPU_SETSIZE; core++)
            if (CPU_ISSET(core, allowed)) CPU_SET(core, out);
    }
    return CPU_COUNT(out) > 0;
}

static bl_status get_allowed_cores(cpu_set_t *out)
{
    if (sched_getaffinity(0, sizeof *out, out) == 0) return BL_OK;
    return bl_fail_errno(BL_ELIMIT, "asking for the cores of this process");
}

/* The first GPU, and how many there are like it; null, or 0, where this build or machine has
 * none. */
static bl_status report_gpus(json_t *report)
{
    bl_gpu_info gpu = {.n_gpus = 0};
    size_t free_bytes = 0, total_bytes = 0;
    bool has_gpu = bl_device_find_cuda(0, &gpu) == BL_OK;

    if (has_gpu) BL_TRY(bl_device_measure_cuda(0, &free_bytes, &total_bytes));
    BL_TRY(put(report, "gpus", json_integer(gpu.n_gpus)));
    BL_TRY(put(report, "gpu", has_gpu ? json_string(gpu.name) : json_null()));
    BL_TRY(put(report, "gpu_capability", has_gpu ? json_integer(gpu.capability) : json_null()));
    return put(report, "gpu_memory_bytes",
               has_gpu ? json_integer((json_int_t)total_bytes) : json_null());
}

static bl_status report_host(hardware *h)
{
    static const char *const lists[] = {"memory_copy", "disk_read", "disk_write", "all_gather",
                                        "device_copy", "gemm",      "fp8"};
    int64_t free_bytes = 0, node_count = 0, available = bl_memory_available_bytes();
    cpu_set_t allowed, cores;

    BL_TRY(get_allowed_cores(&allowed));
    for (int node = 0; node < MAX_NODES; node++)
        node_count += get_node_cores(node, &allowed, &cores);
    BL_TRY(put(h->report, "hardware_version", json_integer(1)));
    BL_TRY(put(h->report, "processor", describe_processor()));
    BL_TRY(put(h->report, "online_cores", json_integer(sysconf(_SC_NPROCESSORS_ONLN))));
    BL_TRY(put(h->report, "usable_cores", json_integer(bl_cores_usable())));
    BL_TRY(put(h->report, "numa_nodes", json_integer(bl_max_i64(node_count, 1))));
    BL_TRY(put(h->report, "memory_bytes",
               json_integer((json_int_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE))));
    BL_TRY(put(h->report, "available_memory_bytes",
               available < 0 ? json_null() : json_integer(available)));
    BL_TRY(put(h->report, "locked_memory_limit_bytes", locked_limit_bytes()));
    if (h->options->dir) BL_TRY(bl_dir_free_bytes(h->options->dir, &free_bytes));
    BL_TRY(put(h->report, "free_disk_bytes",
               h->options->dir ? json_integer(free_bytes) : json_null()));
    BL_TRY(report_gpus(h->report));
    for (size_t i = 0; i < BL_COUNT(lists); i++) BL_TRY(put(h->report, lists[i], json_array()));
    return BL_OK;
}

static void print_host(const json_t *report)
{
    const char *key;
    json_t *value;

    json_object_foreach((json_t *)report, key, value)
    {
        if (json_is_integer(value))
            printf("%-26s %" JSON_INTEGER_FORMAT "\n", key, json_integer_value(value));
        if (json_is_string(value)) printf("%-26s %s\n", key, json_string_value(value));
        if (json_is_null(value)) printf("%-26s none\n", key);
    }
    printf("\n%-14s %-64s %10s %10s\n", "10^9 a second", "", "best", "median");
}

/* ---- rates ---- */

static void print_rate(const char *kind, json_t *entry, const char *unit, bl_rate rate)
{
    char line[256] = "";
    const char *key;
    json_t *value;

    json_object_foreach(entry, key, value)
    {
        size_t at = strlen(line);
        if (json_is_integer(value))
            snprintf(line + at, sizeof line - at, "%s %" JSON_INTEGER_FORMAT "  ", key,
                     json_integer_value(value));
        else if (json_is_string(value))
            snprintf(line + at, sizeof line - at, "%s  ", json_string_value(value));
    }
    printf("%-14s %-64s %10.3f %10.3f %s\n", kind, line, 1e-9 * rate.best, 1e-9 * rate.median,
           unit);
    fflush(stdout);
}

/* Appends to the report's list `kind`; owns `entry`, which describes the measurement. */
static bl_status add_rate(hardware *h, const char *kind, json_t *entry, const char *unit,
                          bl_rate rate)
{
    char best[64], median[64];
    json_t *list = json_object_get(h->report, kind);
    bl_status st = BL_OK;

    snprintf(best, sizeof best, "best_%s_per_s", unit);
    snprintf(median, sizeof median, "median_%s_per_s", unit);
    if (!h->options->json && entry) print_rate(kind, entry, unit, rate);
    BL_TRY_GOTO(st, done, put(entry, best, json_real(rate.best)));
    BL_TRY_GOTO(st, done, put(entry, median, json_real(rate.median)));
    if (json_array_append(list, entry) != 0) st = BL_FAIL(BL_ENOMEM, "the report's list %s", kind);
done:
    json_decref(entry);
    return st;
}

/* The next number of threads to try: 1, 2, 4, ... and last `most`; 0: that was it. */
static int next_threads(int n_threads, int most)
{
    return n_threads >= most ? 0 : (int)bl_min_i64(2 * (int64_t)n_threads, most);
}

static bl_status measure_memory(hardware *h)
{
    bl_rate rate;

    for (int n = 1; n > 0; n = next_threads(n, h->n_threads)) {
        BL_TRY(bl_rate_memory_copy(n, (size_t)h->memory_bytes, h->options->runs, &rate));
        BL_TRY(add_rate(
            h, "memory_copy",
            json_pack("{s:i, s:I}", "threads", n, "copied_bytes", (json_int_t)h->memory_bytes),
            "bytes", rate));
    }
    return BL_OK;
}

/* The cores of each node, with memory of the same node. The threads of a pool inherit the affinity
 * of the thread that creates it. */
static bl_status measure_nodes(hardware *h)
{
    cpu_set_t allowed, cores;
    bl_status st = BL_OK;
    bl_rate rate;

    if (json_integer_value(json_object_get(h->report, "numa_nodes")) < 2) return BL_OK;
    BL_TRY(get_allowed_cores(&allowed));
    for (int node = 0; node < MAX_NODES; node++) {
        if (!get_node_cores(node, &allowed, &cores)) continue;
        int n = (int)bl_min_i64(h->n_threads, CPU_COUNT(&cores));
        if (sched_setaffinity(0, sizeof cores, &cores) != 0) {
            st = bl_fail_errno(BL_ELIMIT, "moving to NUMA node %d", node);
            goto done;
        }
        BL_TRY_GOTO(st, done,
                    bl_rate_memory_copy(n, (size_t)h->memory_bytes, h->options->runs, &rate));
        BL_TRY_GOTO(st, done,
                    add_rate(h, "memory_copy",
                             json_pack("{s:i, s:i, s:I}", "numa_node", node, "threads", n,
                                       "copied_bytes", (json_int_t)h->memory_bytes),
                             "bytes", rate));
    }
done:
    sched_setaffinity(0, sizeof allowed, &allowed);
    return st;
}

static bl_status add_disk(hardware *h, const char *kind, const bl_bench_file *file,
                          const char *engine, double *seconds)
{
    bl_bench_times times = bl_bench_summarize(seconds, h->options->runs);
    double n_bytes = (double)h->disk_bytes;

    return add_rate(h, kind,
                    json_pack("{s:s, s:s, s:b, s:i, s:i, s:I}", "dir", h->options->dir, "engine",
                              engine, "direct", file->is_direct, "queue_depth", BL_IO_QUEUE_DEPTH,
                              "chunk_bytes", BL_IO_CHUNK_BYTES, "file_bytes",
                              (json_int_t)h->disk_bytes),
                    "bytes", (bl_rate){n_bytes / times.best_s, n_bytes / times.median_s});
}

static bl_status measure_disk(hardware *h)
{
    const hardware_options *o = h->options;
    const bl_reader_options reader = {
        .engine = BL_IO_AUTO, .queue_depth = BL_IO_QUEUE_DEPTH, .chunk_bytes = BL_IO_CHUNK_BYTES};
    double reads[BL_BENCH_MAX_RUNS], writes[BL_BENCH_MAX_RUNS], ignored;
    const char *engine;
    bl_bench_file file;
    bl_status st;

    if (!o->dir) {
        if (!o->json) printf("%-14s skipped: no --dir\n", "disk_read");
        if (!o->json) printf("%-14s skipped: no --dir\n", "disk_write");
        return BL_OK;
    }
    BL_TRY_GOTO(st, done, bl_bench_file_make(o->dir, h->disk_bytes, &file));
    BL_TRY_GOTO(st, done, bl_bench_file_read(&file, &reader, true, &ignored, &engine));
    for (int64_t run = 0; run < o->runs; run++)
        BL_TRY_GOTO(st, done, bl_bench_file_read(&file, &reader, false, &reads[run], &engine));
    BL_TRY_GOTO(st, done, add_disk(h, "disk_read", &file, engine, reads));
    for (int64_t run = 0; run < o->runs; run++)
        BL_TRY_GOTO(st, done, bl_bench_file_write(&file, &reader, &writes[run], &engine));
    st = add_disk(h, "disk_write", &file, engine, writes);
done:
    bl_bench_file_close(&file);
    return st;
}

static bl_status measure_gathers(hardware *h)
{
    bl_rate rate;
    size_t bytes_per_rank;

    for (int n = 2; n <= h->n_threads; n *= 2) {
        bytes_per_rank = (size_t)(h->memory_bytes / n);
        BL_TRY(bl_rate_all_gather(n, bytes_per_rank, h->options->runs, &rate));
        BL_TRY(add_rate(
            h, "all_gather",
            json_pack("{s:i, s:I}", "ranks", n, "bytes_per_rank", (json_int_t)bytes_per_rank),
            "bytes", rate));
    }
    return BL_OK;
}

static bl_status measure_copies(hardware *h, const char *name, bl_device *const *devices,
                                int n_devices)
{
    static const char *const directions[] = {"device_to_host", "host_to_device"};
    bl_rate rate;

    for (int to_device = 1; to_device >= 0; to_device--) {
        BL_TRY(bl_rate_device_copy(devices, n_devices, to_device, (size_t)h->memory_bytes,
                                   h->options->runs, &rate));
        BL_TRY(add_rate(h, "device_copy",
                        json_pack("{s:s, s:i, s:s, s:I}", "device", name, "devices", n_devices,
                                  "direction", directions[to_device], "copied_bytes",
                                  (json_int_t)h->memory_bytes),
                        "bytes", rate));
    }
    return BL_OK;
}

static bl_status measure_fp8(hardware *h, int n_threads, bl_device *device)
{
    const hardware_options *o = h->options;
    int64_t n = o->matrix_size;
    bl_rate rate;

    for (bl_format format = BL_FORMAT_FP8_ROW; format <= BL_FORMAT_FP8_BLOCK; format++)
        for (int back = 0; back < 2; back++) {
            BL_TRY(back ? bl_rate_fp8_dequantize(device, format, n, n, o->runs, &rate)
                        : bl_rate_fp8_quantize(device, format, n, n, o->runs, &rate));
            json_t *entry =
                json_pack("{s:s, s:i, s:s, s:s, s:I}", "device", "cpu", "threads", n_threads,
                          "format", bl_format_name(format), "direction",
                          back ? "dequantize" : "quantize", "matrix_size", (json_int_t)n);
            BL_TRY(add_rate(h, "fp8", entry, "weights", rate));
        }
    return BL_OK;
}

static bl_status measure_gemm(hardware *h, const char *name, int n_threads, bl_dtype dtype,
                              bl_device *device)
{
    const hardware_options *o = h->options;
    bl_rate rate;

    BL_TRY(bl_rate_gemm(device, dtype, o->matrix_size, o->runs, &rate));
    json_t *entry =
        json_pack("{s:s, s:i, s:s, s:I}", "device", name, "threads", n_threads, "dtype",
                  dtype == BL_F32 ? "f32" : "bf16", "matrix_size", (json_int_t)o->matrix_size);
    return add_rate(h, "gemm", entry, "flops", rate);
}

static bl_status measure_cpu(hardware *h, int n_threads)
{
    bl_device *device;
    bl_status st;

    BL_TRY(bl_device_create_cpu(n_threads, &device));
    if (n_threads == 1) BL_TRY_GOTO(st, done, measure_copies(h, "cpu", &device, 1));
    BL_TRY_GOTO(st, done, measure_gemm(h, "cpu", n_threads, BL_F32, device));
    if (bl_cpu_gemm_has_bf16())
        BL_TRY_GOTO(st, done, measure_gemm(h, "cpu", n_threads, BL_BF16, device));
    st = measure_fp8(h, n_threads, device);
done:
    bl_device_destroy(device);
    return st;
}

/* All GPUs at once, as when each rank offloads: the host's memory may be slower than their links
 * together. */
static bl_status measure_gpus_together(hardware *h)
{
    bl_device *devices[BL_RATE_MAX_DEVICES];
    int n_gpus = (int)json_integer_value(json_object_get(h->report, "gpus")), n = 0;
    bl_status st = BL_OK;

    if (n_gpus < 2) return BL_OK;
    n_gpus = (int)bl_min_i64(n_gpus, BL_RATE_MAX_DEVICES);
    for (; n < n_gpus && st == BL_OK; n += st == BL_OK) st = bl_device_create_cuda(n, &devices[n]);
    if (st == BL_OK) st = measure_copies(h, "cuda", devices, n);
    while (n > 0) bl_device_destroy(devices[--n]);
    return st;
}

/* The first GPU, where the build and the machine have one. */
static bl_status measure_gpu(hardware *h)
{
    bl_device *device;
    bl_status st = bl_device_create_cuda(0, &device);

    if (st == BL_ELIMIT) {
        if (!h->options->json) printf("%-14s skipped: %s\n", "device cuda", bl_error_text());
        return BL_OK;
    }
    BL_TRY(st);
    BL_TRY_GOTO(st, done, measure_copies(h, "cuda", &device, 1));
    st = measure_gemm(h, "cuda", 1, BL_BF16, device);
done:
    bl_device_destroy(device);
    return st;
}

static bl_status measure(hardware *h)
{
    BL_TRY(measure_memory(h));
    BL_TRY(measure_nodes(h));
    BL_TRY(measure_disk(h));
    BL_TRY(measure_gathers(h));
    BL_TRY(measure_cpu(h, 1));
    if (h->n_threads > 1) BL_TRY(measure_cpu(h, h->n_threads));
    BL_TRY(measure_gpu(h));
    return measure_gpus_together(h);
}

static bl_status write_report(const hardware *h)
{
    char *dump = json_dumps(h->report, JSON_INDENT(1) | JSON_REAL_PRECISION(6)), *text = NULL;
    bl_status st = BL_OK;

    if (!dump || bl_json_ran_out()) {
        st = BL_FAIL(BL_ENOMEM, "the report's text");
        goto done;
    }
    BL_TRY_GOTO(st, done, bl_text_format(&text, "%s\n", dump));
    if (h->options->json) fputs(text, stdout);
    if (h->options->output) st = bl_file_write_atomic(h->options->output, text, strlen(text));
done:
    free(dump);
    free(text);
    return st;
}

static bl_status run(const void *values)
{
    const hardware_options *o = values;
    hardware h = {.options = o};
    cpu_set_t allowed;
    bl_status st;

    BL_TRY(bl_bench_parse_bytes("disk_size", o->disk_size, BL_IO_CHUNK_BYTES, &h.disk_bytes));
    BL_TRY(bl_bench_parse_bytes("memory_size", o->memory_size, 1 << 10, &h.memory_bytes));
    if (o->output) BL_TRY(bl_file_check_output(o->output)); /* before minutes of measuring */
    BL_TRY(get_allowed_cores(&allowed));
    h.n_threads = o->threads == BL_OPTION_AUTO ? CPU_COUNT(&allowed) : (int)o->threads;
    bl_json_watch_memory();
    if (!(h.report = json_object())) return BL_FAIL(BL_ENOMEM, "the report");
    BL_TRY_GOTO(st, done, report_host(&h));
    if (!o->json) print_host(h.report);
    BL_TRY_GOTO(st, done, measure(&h));
    st = write_report(&h);
done:
    json_decref(h.report);
    return st;
}

const bl_bench bl_bench_hardware = {
    .name = "hardware",
    .table = table,
    .n_options = BL_COUNT(table),
    .values_bytes = sizeof(hardware_options),
    .details = "Cores, memory, limits, and how fast memory, disk, local ranks and the device are: "
               "the best run and "
               "the median. Each\n"
               "measurement verifies its result before it is timed. docs/plan.md describes "
               "hardware.json.\n",
    .run = run,
};
