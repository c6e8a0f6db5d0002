/* SPDX-License-Identifier: Apache-2.0 */
/* bench_io FILE [SIZE_MB [RUNS]]: how fast the reader's engines stream a file, beside fio (io_uring,
 * O_DIRECT, 32 x 4 MiB).
 *
 * FILE is made of random bytes when it is not there and removed again at the end. All take turns, run by run,
 * past the page cache; the fastest run of each counts, and the median is printed too. One JSON line a reader.
 * Without fio its line is missing, which stderr says. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/sizes.h"
#include "io/reader.h"

enum { MAX_RUNS = 101, PIECE_BYTES = 4 << 20 };

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Random, lest a file system or disk compresses it. */
static bool make_file(const char *path, int64_t n_bytes)
{
    static uint64_t piece[PIECE_BYTES / sizeof(uint64_t)];
    uint64_t x = 88172645463325252u;
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    bool is_written = fd >= 0;

    for (int64_t at = 0; is_written && at < n_bytes; at += PIECE_BYTES) {
        for (size_t i = 0; i < BL_COUNT(piece); i++) {
            x ^= x << 13, x ^= x >> 7, x ^= x << 17;
            piece[i] = x;
        }
        is_written = pwrite(fd, piece, sizeof piece, at) == PIECE_BYTES;
    }
    is_written = is_written && fsync(fd) == 0;
    if (fd >= 0) close(fd);
    return is_written;
}

/* Seconds, or a negative number. */
static double run_engine(const char *path, int64_t n_bytes, bl_io_engine engine)
{
    const bl_reader_options options = {.engine = engine};
    const bl_io_range range = {0, 0, n_bytes};
    bl_io_files *files = NULL;
    bl_reader *reader = NULL;
    bl_io_chunk chunk;
    bl_status st;
    double seconds = -1.0;

    BL_TRY_GOTO(st, done, bl_io_files_open(&path, 1, true, &files));
    double start = now_s();
    BL_TRY_GOTO(st, done, bl_reader_create(&options, files, &reader));
    BL_TRY_GOTO(st, done, bl_reader_stream(reader, &range, 1));
    do {
        BL_TRY_GOTO(st, done, bl_reader_next(reader, &chunk));
    } while (chunk.bytes);
    seconds = now_s() - start;
    if (engine == BL_IO_URING && strcmp(bl_reader_engine_name(reader), "uring") != 0) seconds = -1.0;
done:
    if (st != BL_OK) fprintf(stderr, "bench_io: %s\n", bl_error_text());
    bl_reader_destroy(reader);
    bl_io_files_close(files);
    return seconds;
}

static double run_fio(const char *path, int64_t n_bytes)
{
    char command[1024], line[512];
    double seconds = -1.0;

    snprintf(command, sizeof command,
             "fio --name=bench --filename='%s' --rw=read --bs=4M --iodepth=32 --ioengine=io_uring --direct=1 "
             "--readonly "
             "--size=%lld --output-format=json 2>/dev/null",
             path, (long long)n_bytes);
    FILE *fio = popen(command, "r");
    while (fio && fgets(line, sizeof line, fio)) {
        const char *runtime = strstr(line, "\"runtime\" : ");
        if (runtime && seconds < 0.0) seconds = 1e-3 * strtod(runtime + strlen("\"runtime\" : "), NULL);
    }
    if (fio) pclose(fio);
    return seconds;
}

static int compare_seconds(const void *a, const void *b)
{
    const double *x = a, *y = b;
    return (*x > *y) - (*x < *y);
}

static void print_line(const char *reader, int64_t n_bytes, double *seconds, int n_runs, double fio_s)
{
    qsort(seconds, (size_t)n_runs, sizeof *seconds, compare_seconds);
    if (seconds[0] <= 0.0) {
        fprintf(stderr, "skipped: %s is not available here\n", reader);
        return;
    }
    double gb = (double)n_bytes * 1e-9;
    printf(
        "{\"bench\":\"io\",\"reader\":\"%s\",\"bytes\":%lld,\"best_gb_per_s\":%.3f,\"median_gb_per_s\":%.3f",
        reader, (long long)n_bytes, gb / seconds[0], gb / seconds[n_runs / 2]);
    if (fio_s > 0.0) printf(",\"percent_of_fio\":%.1f", 100.0 * fio_s / seconds[0]);
    printf("}\n");
}

int main(int argc, char **argv)
{
    static double uring[MAX_RUNS], pread[MAX_RUNS], fio[MAX_RUNS];
    struct stat info;

    if (argc < 2) {
        fprintf(stderr, "usage: bench_io FILE [SIZE_MB [RUNS]]\n");
        return 2;
    }
    int64_t n_bytes = bl_round_up((argc > 2 ? atoll(argv[2]) : 2048) << 20, PIECE_BYTES);
    int n_runs = argc > 3 ? atoi(argv[3]) : 5;
    bool is_there = stat(argv[1], &info) == 0;
    if (n_bytes <= 0 || n_runs < 1 || n_runs > MAX_RUNS) return 2;
    if (!is_there && !make_file(argv[1], n_bytes)) {
        perror(argv[1]);
        unlink(argv[1]);
        return 4;
    }
    if (is_there) n_bytes = info.st_size;
    for (int run = 0; run < n_runs; run++) {
        fio[run] = run_fio(argv[1], n_bytes);
        uring[run] = run_engine(argv[1], n_bytes, BL_IO_URING);
        pread[run] = run_engine(argv[1], n_bytes, BL_IO_PREAD);
    }
    print_line("fio", n_bytes, fio, n_runs, -1.0);
    print_line("uring", n_bytes, uring, n_runs, fio[0]);
    print_line("pread", n_bytes, pread, n_runs, fio[0]);
    if (!is_there) unlink(argv[1]);
    return 0;
}
