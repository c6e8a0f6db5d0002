/* SPDX-License-Identifier: Apache-2.0 */
/* pager.c -- matrices on disk, streamed through a small ring of memory while a stream multiplies
 * them, with libballast alone.
 *
 *   cc -std=c17 pager.c $(pkg-config --cflags --libs ballast) -o pager && ./pager [DIR]
 *
 * The page file is in DIR (which must exist) and is used again by the next run; without DIR it is
 * made in /tmp and removed. Each matrix is a page on disk and a unit of the pager; the products,
 * which are exact in fp32, are compared with integers. */
#define _POSIX_C_SOURCE 200809L /* mkdtemp */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <ballast/ballast.h>

enum { N_MATRICES = 24, ROWS = 512, COLS = 1024, RING_DEPTH = 3, N_PASSES = 2 };

static const size_t MATRIX_BYTES = sizeof(float) * ROWS * COLS;

static int element(int matrix, int row, int col)
{
    return (matrix * 31 + row * 7 + col) % 13 - 6;
}

static int factor(int col)
{
    return col % 5 - 2;
}

typedef struct product_args {
    const float *matrix;
    float *y; /* [ROWS] */
} product_args;

/* A task of the compute stream: y = matrix x. */
static bl_status multiply(bl_stream *stream, const void *args)
{
    const product_args *a = args;
    (void)stream;
    for (int r = 0; r < ROWS; r++) {
        a->y[r] = 0.0f;
        for (int c = 0; c < COLS; c++) a->y[r] += a->matrix[r * COLS + c] * (float)factor(c);
    }
    return BL_OK;
}

/* Pages on disk, written by the first run. */
static bl_status make_pages(bl_device *device, const char *dir, bl_pages **out)
{
    static char names[N_MATRICES][16];
    bl_page_spec specs[N_MATRICES];
    bl_pages_options options = {.device = device, .node = -1, .dir = dir, .key = 1, .n_shards = 1};
    float *matrix = malloc(MATRIX_BYTES);
    bl_status st = BL_OK;

    for (int m = 0; m < N_MATRICES; m++) {
        snprintf(names[m], sizeof names[m], "matrix %d", m);
        specs[m] = (bl_page_spec){names[m], MATRIX_BYTES, BL_TIER_DISK};
    }
    if (!matrix) return BL_FAIL(BL_ENOMEM, "a matrix");
    BL_TRY_GOTO(st, done, bl_pages_create(&options, N_MATRICES, specs, out));
    for (int m = 0; m < N_MATRICES && !bl_pages_has_disk(*out); m++) {
        for (int i = 0; i < ROWS * COLS; i++) matrix[i] = (float)element(m, i / COLS, i % COLS);
        BL_TRY_GOTO(st, done, bl_pages_write(*out, m, 0, matrix, MATRIX_BYTES));
    }
    st = bl_pages_seal(*out);
done:
    free(matrix);
    return st;
}

/* Hints run ahead of use by the depth of the ring; nothing here waits for anything but a free
 * slot. */
static bl_status stream_matrices(bl_gather_ring *ring, bl_stream *compute, float *y)
{
    for (int i = 0; i < N_PASSES * N_MATRICES; i++) {
        product_args args = {.y = y + i % N_MATRICES * ROWS};
        const void *matrix;
        for (int ahead = 0; ahead < RING_DEPTH; ahead++)
            BL_TRY(bl_gather_ring_prefetch(ring, (i + ahead) % N_MATRICES));
        BL_TRY(bl_gather_ring_acquire(ring, i % N_MATRICES, 0, compute, &matrix));
        args.matrix = matrix;
        BL_TRY(bl_stream_call(compute, multiply, &args, sizeof args));
        BL_TRY(bl_gather_ring_release(ring, i % N_MATRICES, compute));
    }
    return bl_stream_synchronize(compute);
}

static int count_wrong(const float *y)
{
    int n_wrong = 0;
    for (int m = 0; m < N_MATRICES; m++)
        for (int r = 0; r < ROWS; r++) {
            int sum = 0;
            for (int c = 0; c < COLS; c++) sum += element(m, r, c) * factor(c);
            n_wrong += y[m * ROWS + r] != (float)sum;
        }
    return n_wrong;
}

static void print_rate(const bl_timeline *timeline)
{
    bl_timeline_totals totals;
    bl_timeline_get_totals(timeline, &totals);
    const bl_lane_totals *disk = &totals.lane[BL_LANE_DISK];
    printf("%d matrices of %d x %d, %d times: %.1f MB through a ring of %d, %.2f GB/s from disk; "
           "compute "
           "waited %.3f s for it\n",
           N_MATRICES, ROWS, COLS, N_PASSES, 1e-6 * (double)disk->n_bytes, RING_DEPTH,
           1e-9 * (double)disk->n_bytes / disk->busy_s, disk->stall_s);
}

static bl_status run(const char *dir, float *y)
{
    bl_pager_unit units[N_MATRICES];
    bl_device *device = NULL;
    bl_stream *compute = NULL, *copy = NULL, *gather = NULL;
    bl_timeline *timeline = NULL;
    bl_pages *pages = NULL;
    bl_pager *pager = NULL;
    bl_status st = BL_OK;

    for (int m = 0; m < N_MATRICES; m++) units[m] = (bl_pager_unit){.n_items = 1, .page = {m}};
    BL_TRY_GOTO(st, done, bl_device_create_cpu(1, &device));
    BL_TRY_GOTO(st, done, bl_stream_create(device, "compute", &compute));
    BL_TRY_GOTO(st, done, bl_stream_create(device, "copy", &copy));
    BL_TRY_GOTO(st, done, bl_stream_create(device, "gather", &gather));
    BL_TRY_GOTO(st, done, bl_timeline_create(device, 1024, NULL, NULL, &timeline));
    BL_TRY_GOTO(st, done, make_pages(device, dir, &pages));
    bl_pager_options options = {.device = device,
                                .copy = copy,
                                .gather = gather,
                                .ring_depth = RING_DEPTH,
                                .timeline = timeline};
    BL_TRY_GOTO(st, done, bl_pager_create(&options, pages, N_MATRICES, units, &pager));
    BL_TRY_GOTO(st, done, stream_matrices(bl_pager_ring(pager), compute, y));
    BL_TRY_GOTO(st, done, bl_stream_synchronize(copy));
    bl_timeline_collect(timeline);
    print_rate(timeline);
done:
    if (compute) (void)bl_stream_synchronize(compute);
    bl_pager_destroy(pager);
    bl_pages_destroy(pages);
    bl_timeline_destroy(timeline);
    bl_stream_destroy(gather);
    bl_stream_destroy(copy);
    bl_stream_destroy(compute);
    bl_device_destroy(device);
    return st;
}

int main(int argc, char **argv)
{
    static float y[N_MATRICES * ROWS];
    char temporary[] = "/tmp/ballast-pager-XXXXXX", command[64];
    const char *dir = argc > 1 ? argv[1] : mkdtemp(temporary);
    bl_status st = dir ? run(dir, y) : BL_FAIL(BL_EIO, "no folder in /tmp");
    int n_wrong = st == BL_OK ? count_wrong(y) : 0;

    if (st != BL_OK)
        fprintf(stderr, "pager: %s\n", bl_error_text());
    else
        printf("%d of %d sums are wrong\n", n_wrong, N_MATRICES * ROWS);
    if (argc == 1 && dir) {
        snprintf(command, sizeof command, "rm -r %s", temporary);
        if (system(command) != 0) fprintf(stderr, "pager: %s is still there\n", temporary);
    }
    return st == BL_OK && n_wrong == 0 ? 0 : 1;
}
