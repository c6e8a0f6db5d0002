/* SPDX-License-Identifier: Apache-2.0 */
/* ballast bench io: how fast the reader's engines stream a file, compared with fio with the same
 * requests in the same run. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/files.h"
#include "base/json.h"
#include "base/log.h"
#include "base/sizes.h"
#include "bench/command/bench.h"
#include "bench/command/file.h"
#include "bench/command/program.h"

typedef struct io_options {
    char *file, *dir, *size, *chunk;
    int64_t queue_depth, runs;
    bl_io_engine io_engine;
    bool fio, json;
} io_options;

#define OPTION(field, kind)                                                                        \
    .key = #field, .group = "bench io", .type = BL_OPTION_##kind,                                  \
    .offset = offsetof(io_options, field), .commands = BL_CLI_ANY

static const bl_option table[] = {
    {OPTION(file, PATH), .help = "the file to read"},
    {OPTION(dir, PATH),
     .help = "directory for a temporary file of random bytes, instead of --file"},
    {OPTION(size, STRING), .default_text = "4GiB", .help = "size of the temporary file"},
    {OPTION(io_engine, ENUM), .names = "auto|uring|pread", .default_text = "auto",
     .help = "engine to measure; auto: each"},
    {OPTION(queue_depth, INT), .default_text = "32", .min = 1, .max = 1024,
     .help = "requests in flight"},
    {OPTION(chunk, STRING), .default_text = "4MiB", .help = "bytes per request"},
    {OPTION(runs, INT), .default_text = "5", .min = 1, .max = BL_BENCH_MAX_RUNS,
     .help = "rounds, in which the contenders take turns"},
    {OPTION(fio, BOOL), .default_text = "true", .help = "measure fio, too, where it is installed"},
    {OPTION(json, BOOL), .default_text = "false",
     .help = "print a JSON line for each contender, not a table"},
};

typedef enum contender { FIO, URING, PREAD, N_CONTENDERS } contender;
static const char *const names[N_CONTENDERS] = {"fio", "uring", "pread"};

typedef struct io_bench {
    const io_options *options;
    bl_bench_file file;
    bl_reader_options reader;
    bool takes_part[N_CONTENDERS];
    double seconds[N_CONTENDERS][BL_BENCH_MAX_RUNS];
} io_bench;

enum { MAX_CHUNK_BYTES = 1 << 30 };

/* fio takes ':' for the end of a name and '\' for an escape. The caller frees. */
static char *fio_file_argument(const char *path)
{
    static const char key[] = "--filename=";
    char *text = malloc(sizeof key + 2 * strlen(path)), *to = text;
    if (!text) return NULL;
    to = stpcpy(to, key);
    for (; *path; path++) {
        if (*path == ':' || *path == '\\') *to++ = '\\';
        *to++ = *path;
    }
    *to = '\0';
    return text;
}

/* The seconds by fio's own clock, which starts when its buffers are there; negative: no such
 * reading here. */
static double run_fio(const io_bench *b)
{
    char depth[32], bytes[48], direct[16];
    char *file = fio_file_argument(b->file.path), *text = NULL;
    char name[] = "fio", job[] = "--name=bench", rw[] = "--rw=read",
         engine[] = "--ioengine=io_uring";
    char readonly[] = "--readonly", format[] = "--output-format=json",
         clock[] = "--clocksource=clock_gettime";
    char *const arguments[] = {name,  job,    file,     rw,     engine, depth,
                               bytes, direct, readonly, format, clock,  NULL};
    json_t *report = NULL;
    double io_bytes = 0.0, bytes_per_s = 0.0;

    snprintf(depth, sizeof depth, "--iodepth=%lld", (long long)b->options->queue_depth);
    snprintf(bytes, sizeof bytes, "--bs=%zu", b->reader.chunk_bytes);
    snprintf(direct, sizeof direct, "--direct=%d", b->file.is_direct);
    bl_bench_file_drop_cache(&b->file);
    if (file) text = bl_bench_run_program(arguments);
    const char *document = text ? strchr(text, '{') : NULL; /* fio may print notes before it */
    if (document && bl_json_parse("fio", 1, document, strlen(document), &report) == BL_OK) {
        json_t *job_read =
            json_object_get(json_array_get(json_object_get(report, "jobs"), 0), "read");
        io_bytes = json_number_value(json_object_get(job_read, "io_bytes"));
        bytes_per_s = json_number_value(json_object_get(job_read, "bw_bytes"));
    }
    json_decref(report);
    free(text);
    free(file);
    /* Only the rate counts: fio does not read a last piece that O_DIRECT cannot read. */
    return io_bytes > 0.0 && bytes_per_s > 0.0 ? (double)b->file.n_bytes / bytes_per_s : -1.0;
}

/* The contender's turn. The round before the first verifies the bytes, and reports a contender that
 * cannot take part. */
static bl_status take_turn(io_bench *b, contender who, bool is_warm_up, double *seconds)
{
    if (who == FIO) {
        *seconds = run_fio(b);
        if (*seconds < 0.0) {
            if (!is_warm_up) return BL_FAIL(BL_EIO, "fio read the file before and fails now");
            bl_log_warning("skipped: fio (io_uring): it is not installed, or cannot read the file");
            b->takes_part[FIO] = false;
        }
        return BL_OK;
    }
    const char *engine;
    b->reader.engine = who == URING ? BL_IO_URING : BL_IO_PREAD;
    BL_TRY(bl_bench_file_read(&b->file, &b->reader, is_warm_up, seconds, &engine));
    if (strcmp(engine, names[who]) != 0) b->takes_part[who] = false; /* the reader has warned */
    return BL_OK;
}

static bl_status measure(io_bench *b)
{
    double ignored;
    for (int64_t run = -1; run < b->options->runs; run++)
        for (contender who = 0; who < N_CONTENDERS; who++)
            if (b->takes_part[who])
                BL_TRY(take_turn(b, who, run < 0, run < 0 ? &ignored : &b->seconds[who][run]));
    return BL_OK;
}

static void print_contender(io_bench *b, contender who, const double *ratios)
{
    const io_options *o = b->options;
    double gb = 1e-9 * (double)b->file.n_bytes;
    bl_bench_times times = bl_bench_summarize(b->seconds[who], o->runs);

    if (o->json) {
        printf(
            "{\"bench\":\"io\",\"reader\":\"%s\",\"bytes\":%lld,\"direct\":%s,\"queue_depth\":%lld,"
            "\"chunk_bytes\":%zu,\"runs\":%lld,\"best_gb_per_s\":%.4g,\"median_gb_per_s\":%.4g",
            names[who], (long long)b->file.n_bytes, b->file.is_direct ? "true" : "false",
            (long long)o->queue_depth, b->reader.chunk_bytes, (long long)o->runs, gb / times.best_s,
            gb / times.median_s);
        if (ratios) printf(",\"best_of_fio\":%.3f,\"median_of_fio\":%.3f", ratios[0], ratios[1]);
        printf("}\n");
        return;
    }
    printf("%-8s %10.3f %10.3f", names[who], gb / times.best_s, gb / times.median_s);
    if (ratios) printf(" %13.3f %13.3f", ratios[0], ratios[1]);
    printf("\n");
}

/* Two ratios of speeds to fio's: of the fastest runs, and the median of each round's. */
static void print_results(io_bench *b)
{
    int64_t n = b->options->runs;
    double ratios[N_CONTENDERS][2], inverse[BL_BENCH_MAX_RUNS];

    for (contender who = URING; b->takes_part[FIO] && who < N_CONTENDERS; who++) {
        if (!b->takes_part[who]) continue;
        for (int64_t i = 0; i < n; i++) inverse[i] = b->seconds[who][i] / b->seconds[FIO][i];
        ratios[who][1] = 1.0 / bl_bench_summarize(inverse, n).median_s;
    }
    if (!b->options->json) {
        printf("%lld bytes, %lld rounds, %s\n", (long long)b->file.n_bytes, (long long)n,
               b->file.is_direct ? "O_DIRECT"
                                 : "through the page cache: this file system has no O_DIRECT");
        printf("%-8s %10s %10s", "reader", "best GB/s", "median");
        if (b->takes_part[FIO]) printf(" %13s %13s", "best : fio", "median : fio");
        printf("\n");
    }
    double fio_best_s = b->takes_part[FIO] ? bl_bench_summarize(b->seconds[FIO], n).best_s : 0.0;
    for (contender who = 0; who < N_CONTENDERS; who++) {
        if (!b->takes_part[who]) continue;
        ratios[who][0] = fio_best_s / bl_bench_summarize(b->seconds[who], n).best_s;
        print_contender(b, who, b->takes_part[FIO] && who != FIO ? ratios[who] : NULL);
    }
}

static bl_status run(const void *values)
{
    const io_options *o = values;
    int64_t size_bytes, chunk_bytes;
    bl_status st;

    if (!o->file == !o->dir) return BL_FAIL(BL_EUSAGE, "bench io: give either --file or --dir");
    BL_TRY(bl_bench_parse_bytes("size", o->size, BL_IO_CHUNK_BYTES, &size_bytes));
    BL_TRY(bl_bench_parse_bytes("chunk", o->chunk, BL_IO_ALIGN_BYTES, &chunk_bytes));
    if (chunk_bytes > MAX_CHUNK_BYTES)
        return BL_FAIL(BL_EUSAGE, "--chunk: at most 1GiB, got '%s'", o->chunk);
    io_bench *b = calloc(1, sizeof *b);
    if (!b) return BL_FAIL(BL_ENOMEM, "bench io: its times");
    b->options = o;
    b->reader =
        (bl_reader_options){.queue_depth = (int)o->queue_depth, .chunk_bytes = (size_t)chunk_bytes};
    b->takes_part[FIO] = o->fio;
    b->takes_part[URING] = o->io_engine != BL_IO_PREAD;
    b->takes_part[PREAD] = o->io_engine != BL_IO_URING;
    BL_TRY_GOTO(st, done,
                o->file ? bl_bench_file_open(o->file, &b->file)
                        : bl_bench_file_make(o->dir, size_bytes, &b->file));
    BL_TRY_GOTO(st, done, measure(b));
    print_results(b);
done:
    bl_bench_file_close(&b->file);
    free(b);
    return st;
}

const bl_bench bl_bench_io = {
    .name = "io",
    .table = table,
    .n_options = BL_COUNT(table),
    .values_bytes = sizeof(io_options),
    .details = "Each engine streams the file past the page cache, taking turns with fio (io_uring) "
               "at the same "
               "depth "
               "and size of\n"
               "request; a first round verifies the bytes. GB/s of the best round and the median. "
               "The ratios to fio\n"
               "are those of the best rounds, and the median of each round's.\n",
    .run = run,
};
