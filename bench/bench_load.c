/* SPDX-License-Identifier: Apache-2.0 */
/* bench_load MODEL [DIR] -- how fast a checkpoint is loaded into memory (fp8_row, stored) or into
 * page files in DIR, compared with its bounds, in turns: fio (io_uring, O_DIRECT, 32 x 4 MiB) over
 * the same files; the quantizer on weights in memory; first touch of as much memory as the shard
 * takes. One JSON line per round. Each load runs in a child; its largest RSS measures memory. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/files.h"
#include "base/log.h"
#include "base/sizes.h"
#include "model/weights.h"

enum {
    N_ROUNDS = 5,
    COMMAND_BYTES = 16384,
    QUANTIZE_ROWS = 4096,
    QUANTIZE_COLS = 8192,
    N_THREADS_MAX = 64
};

typedef struct load_result {
    bl_status status;
    double seconds;
    int64_t stored_bytes, kept_bytes, rss_bytes; /* read; in the shard; the most the process held */
} load_result;

static int n_threads(void)
{
    return (int)bl_min_i64(N_THREADS_MAX, sysconf(_SC_NPROCESSORS_ONLN));
}

/* ---- a load ---- */

static bl_status load(const char *path, bl_base_format format, const char *dir, load_result *out)
{
    bl_placement placement = {
        .ratio = dir ? 1 : 0, .tier = dir ? BL_TIER_DISK : BL_TIER_HOST, .dir = dir};
    bl_model *model = NULL;
    bl_model_weights *weights = NULL;
    bl_device *device = NULL;
    bl_stream *stream = NULL;
    bl_comm *comm = NULL;
    bl_status st;

    BL_TRY_GOTO(st, done, bl_model_open(path, format, 64, &model));
    BL_TRY_GOTO(st, done, bl_comm_create_local(1, 0.0, &comm));
    BL_TRY_GOTO(st, done, bl_device_create_cpu(n_threads(), &device));
    BL_TRY_GOTO(st, done, bl_stream_create(device, "load", &stream));
    double start = bl_now_s();
    BL_TRY_GOTO(st, done, bl_model_weights_load(model, device, comm, stream, &placement, &weights));
    out->seconds = bl_now_s() - start;
    for (size_t i = 0; i < bl_hf_count(model->files); i++)
        out->stored_bytes += bl_hf_at(model->files, i)->n_bytes;
    out->stored_bytes -= model->config.vocab_size * model->config.hidden_size *
                         (int64_t)bl_dtype_bytes(model->embedding_dtype);
    out->kept_bytes = dir ? 0 : (int64_t)weights->layout.shard_bytes;
done:
    bl_model_weights_free(weights);
    bl_stream_destroy(stream);
    bl_device_destroy(device);
    bl_comm_destroy(comm);
    bl_model_close(model);
    return st;
}

/* In a child: memory of one load is not there for the next. */
static load_result load_in_child(const char *model, bl_base_format format, const char *dir)
{
    load_result result = {.status = BL_EINTERNAL};
    struct rusage usage;
    int ends[2], code;

    if (pipe(ends) != 0) return result;
    pid_t child = fork();
    if (child == 0) {
        bl_log_set_silent(true);
        result.status = load(model, format, dir, &result);
        if (result.status != BL_OK) bl_log_error(bl_error_text());
        _exit(write(ends[1], &result, sizeof result) == (ssize_t)sizeof result ? 0 : 1);
    }
    close(ends[1]);
    if (child < 0 || read(ends[0], &result, sizeof result) != (ssize_t)sizeof result)
        result.status = BL_EINTERNAL;
    close(ends[0]);
    if (child > 0 && wait4(child, &code, 0, &usage) == child)
        result.rss_bytes = usage.ru_maxrss * 1024;
    return result;
}

/* ---- its bounds ---- */

/* GB/s; 0 without fio. */
static double run_fio(const char *model)
{
    char command[COMMAND_BYTES], line[512];
    double bytes_per_s = 0;

    snprintf(command, sizeof command,
             "fio --name=load --readonly --filename=$(ls '%s'/*.safetensors | paste -sd:) "
             "--ioengine=io_uring --direct=1 --iodepth=32 "
             "--bs=4M --rw=read --output-format=json 2>/dev/null",
             model);
    FILE *pipe = popen(command, "r");
    while (pipe && fgets(line, sizeof line, pipe)) {
        const char *at = strstr(line, "\"bw_bytes\"");
        if (at && bytes_per_s == 0) sscanf(at, "\"bw_bytes\" : %lf", &bytes_per_s);
    }
    if (pipe) pclose(pipe);
    return bytes_per_s * 1e-9;
}

/* GB/s of bf16 read. */
static double run_quantizer(void)
{
    enum { RUNS = 5 };
    size_t n = (size_t)QUANTIZE_ROWS * QUANTIZE_COLS;
    uint16_t *source = malloc(n * sizeof *source);
    uint8_t *codes = malloc(n);
    float *scales = malloc(QUANTIZE_ROWS * sizeof *scales);
    bl_pool *pool = NULL;
    double best_s = 1e9;

    if (source && codes && scales && bl_pool_create(n_threads(), &pool) == BL_OK) {
        for (size_t i = 0; i < n; i++) source[i] = (uint16_t)(0x3c00 + i % 511);
        for (int run = 0; run <= RUNS; run++) {
            double start = bl_now_s();
            if (bl_fp8_row_quantize(pool, BL_BF16, source, 0, QUANTIZE_ROWS, QUANTIZE_COLS, codes,
                                    scales) != BL_OK)
                break;
            if (run > 0 && bl_now_s() - start < best_s) best_s = bl_now_s() - start;
        }
    }
    bl_pool_destroy(pool);
    free(scales);
    free(codes);
    free(source);
    return 1e-9 * (double)(n * sizeof *source) / best_s;
}

typedef struct touch_args {
    char *memory;
    size_t n_bytes;
} touch_args;

static void touch_piece(void *arg, int64_t index, void *scratch)
{
    touch_args *t = arg;
    enum { PIECE = 2 << 20, PAGE = 4096 };
    (void)scratch;
    for (size_t at = (size_t)index * PIECE; at < (size_t)(index + 1) * PIECE && at < t->n_bytes;
         at += PAGE)
        t->memory[at] = 1;
}

/* GB/s of memory that the system hands out, with all threads. */
static double run_touch(size_t n_bytes)
{
    touch_args args = {
        mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), n_bytes};
    bl_pool *pool = NULL;
    double start = 0, end = 0;

    if (args.memory == MAP_FAILED) return 0; /* of nothing, too */
    madvise(args.memory, n_bytes, MADV_HUGEPAGE);
    if (bl_pool_create(n_threads(), &pool) == BL_OK) {
        start = bl_now_s();
        bl_pool_run(pool, bl_ceil_div((int64_t)n_bytes, 2 << 20), touch_piece, &args);
        end = bl_now_s();
    }
    bl_pool_destroy(pool);
    munmap(args.memory, n_bytes);
    return end > start ? 1e-9 * (double)n_bytes / (end - start) : 0;
}

static void print_load(const char *name, const load_result *r, double bound)
{
    double rate = 1e-9 * (double)r->stored_bytes / r->seconds;
    printf(",\"%s_gb_per_s\":%.3f,\"%s_of_bound\":%.3f,\"%s_rss_above_shard_mb\":%.0f", name, rate,
           name, rate / bound, name, 1e-6 * (double)(r->rss_bytes - r->kept_bytes));
}

/* The bound of a load: the least of three rates: reading, quantizing, and making room for the bytes
 * that are kept. */
static double least(double a, double b)
{
    return b > 0 && b < a ? b : a;
}

static bool remove_page_files(const char *dir)
{
    char command[COMMAND_BYTES];
    snprintf(command, sizeof command, "rm -f '%s'/base-*.pages '%s'/base-*.json", dir, dir);
    return system(command) == 0;
}

/* A shared disk's speed changes within seconds: a load is compared with fio just before and just
 * after it. Memory that a virtual machine has returned to its host is ten times as slow at the next
 * first touch, whatever program touches it: so as much memory as a load may take is touched and
 * freed right before it, and before the touch that is measured. */
static bool run_round(const char *model, const char *dir, int round)
{
    enum { WARM_BYTES_MORE = 1 << 28 };
    static size_t warm_bytes; /* known after the first load */
    double fio[4] = {run_fio(model)};
    run_touch(warm_bytes);
    load_result fp8 = load_in_child(model, BL_BASE_FP8_ROW, NULL), disk = {0};
    warm_bytes = (size_t)fp8.stored_bytes + WARM_BYTES_MORE;
    fio[1] = run_fio(model);
    run_touch(warm_bytes);
    load_result stored = load_in_child(model, BL_BASE_STORED, NULL);
    fio[2] = run_fio(model);
    run_touch(warm_bytes);
    double touch = run_touch((size_t)stored.kept_bytes);
    if (dir) {
        if (!remove_page_files(dir)) return false;
        run_touch(warm_bytes);
        disk = load_in_child(model, BL_BASE_FP8_ROW, dir);
        fio[3] = run_fio(model);
    }
    if (fp8.status != BL_OK || stored.status != BL_OK || disk.status != BL_OK) return false;
    double quantizer = run_quantizer(),
           touch_fp8 = touch * (double)fp8.stored_bytes / (double)fp8.kept_bytes;
    printf("{\"bench\":\"load\",\"round\":%d,\"stored_bytes\":%lld,\"fio_gb_per_s\":[%.3f,%.3f,%."
           "3f,%.3f],\"quantizer_gb_per_s\":%.3f,"
           "\"touch_gb_per_s\":%.3f",
           round, (long long)fp8.stored_bytes, fio[0], fio[1], fio[2], fio[3], quantizer, touch);
    print_load("fp8_row", &fp8, least(least(quantizer, (fio[0] + fio[1]) / 2), touch_fp8));
    print_load("stored", &stored, least(touch, (fio[1] + fio[2]) / 2));
    if (dir) print_load("fp8_row_to_disk", &disk, least(quantizer, (fio[2] + fio[3]) / 2));
    printf("}\n");
    fflush(stdout);
    return true;
}

int main(int argc, char **argv)
{
    if (argc < 2 || argc > 3) {
        fprintf(stderr, "usage: bench_load MODEL [DIR]\n");
        return 2;
    }
    for (int round = 0; round <= N_ROUNDS; round++) /* the first warms up */
        if (!run_round(argv[1], argc > 2 ? argv[2] : NULL, round)) return 1;
    return 0;
}
