/* SPDX-License-Identifier: Apache-2.0 */
/* bench_tokenizer TOKENIZER TEXT_FILE [RUNS]: encodes the file, cut into chunks of about 4 KiB at
 * line ends, on one core; checks that decoding gives the text back, warms up, and prints the best
 * and the median of RUNS (9) as one JSON line. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/files.h"
#include "tokenizer/tokenizer.h"

enum { CHUNK_BYTES = 4096, MAX_RUNS = 1000 };

static size_t chunk_end(const char *text, size_t n_bytes, size_t start)
{
    if (n_bytes - start <= CHUNK_BYTES) return n_bytes;
    const char *newline = memchr(text + start + CHUNK_BYTES, '\n', n_bytes - start - CHUNK_BYTES);
    return newline ? (size_t)(newline - text) + 1 : n_bytes;
}

static bl_status encode_all(const bl_tokenizer *tokenizer, const char *text, size_t n_bytes,
                            bl_ids *ids)
{
    ids->n = 0;
    for (size_t start = 0, end; start < n_bytes; start = end) {
        end = chunk_end(text, n_bytes, start);
        BL_TRY(bl_tokenizer_encode(tokenizer, text + start, end - start, 0, ids));
    }
    return BL_OK;
}

static bl_status verify(const bl_tokenizer *tokenizer, const char *text, size_t n_bytes)
{
    bl_ids ids = {0};
    char *decoded = NULL;
    size_t n_decoded = 0, n_first = chunk_end(text, n_bytes, 0);

    bl_status st = bl_tokenizer_encode(tokenizer, text, n_first, 0, &ids);
    if (st == BL_OK)
        st = bl_tokenizer_decode(tokenizer, ids.id, ids.n, false, &decoded, &n_decoded);
    if (st == BL_OK && (n_decoded != n_first || memcmp(decoded, text, n_first)))
        st = BL_FAIL(BL_EINPUT, "decoding does not give the text back");
    free(decoded);
    bl_ids_free(&ids);
    return st;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static bl_status bench(const char *tokenizer_path, const char *text_path, int n_runs)
{
    bl_tokenizer *tokenizer = NULL;
    char *text = NULL;
    size_t n_bytes;
    bl_ids ids = {0};
    double s[MAX_RUNS];
    bl_status st;

    double start_s = bl_now_s();
    BL_TRY_GOTO(st, done, bl_tokenizer_load(tokenizer_path, &tokenizer));
    double load_s = bl_now_s() - start_s;
    BL_TRY_GOTO(st, done, bl_file_read_all(text_path, 1u << 30, (void **)&text, &n_bytes));
    BL_TRY_GOTO(st, done, verify(tokenizer, text, n_bytes));
    BL_TRY_GOTO(st, done, encode_all(tokenizer, text, n_bytes, &ids));
    for (int run = 0; run < n_runs; run++) {
        start_s = bl_now_s();
        BL_TRY_GOTO(st, done, encode_all(tokenizer, text, n_bytes, &ids));
        s[run] = bl_now_s() - start_s;
    }
    qsort(s, (size_t)n_runs, sizeof *s, compare);
    printf("{\"bench\":\"tokenizer\",\"tokenizer\":\"%s\",\"file\":\"%s\",\"bytes\":%zu,\"tokens\":"
           "%zu,"
           "\"load_s\":%.3f,"
           "\"runs\":%d,\"median_s\":%.6f,\"min_s\":%.6f,\"mb_per_s\":%.2f}\n",
           tokenizer_path, text_path, n_bytes, ids.n, load_s, n_runs, s[n_runs / 2], s[0],
           1e-6 * (double)n_bytes / s[n_runs / 2]);
done:
    bl_ids_free(&ids);
    free(text);
    bl_tokenizer_destroy(tokenizer);
    return st;
}

int main(int argc, char **argv)
{
    int n_runs = argc > 3 ? atoi(argv[3]) : 9;
    if (argc < 3 || n_runs < 1 || n_runs > MAX_RUNS) {
        fprintf(stderr, "usage: %s TOKENIZER TEXT_FILE [RUNS]\n", argv[0]);
        return 2;
    }
    bl_status st = bench(argv[1], argv[2], n_runs);
    if (st != BL_OK) fprintf(stderr, "%s\n", bl_error_text());
    return bl_status_exit_code(st);
}
