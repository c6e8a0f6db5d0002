/* SPDX-License-Identifier: Apache-2.0 */
/* Source of the table's columns: nccl-tests, src/common.cu (writeBenchmarkLineBody) and
 * doc/PERFORMANCE.md. */
#include "bench/command/nccl_tests.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench/command/program.h"

/* size count type redop root, then time algbw busbw #wrong out of place, and the same in place.
 * Columns from 0; GB/s. A line that begins with # is a comment. It rounds sizes down to whole
 * elements for each GPU. */
enum { SIZE_COLUMN = 0, IN_PLACE_BUSBW_COLUMN = 11, MAX_LINE_BYTES = 512 };

bool bl_nccl_tests_parse(const char *text, int64_t n_bytes, double *bus_bytes_per_s)
{
    for (const char *line = text; *line; line += strcspn(line, "\n"), line += *line == '\n') {
        char copy[MAX_LINE_BYTES], *rest = copy, *word;
        int column = 0;
        size_t n = strcspn(line, "\n");

        if (n >= sizeof copy || line[0] == '#') continue;
        memcpy(copy, line, n);
        copy[n] = '\0';
        for (; (word = strtok_r(rest, " \t", &rest)) != NULL; column++) {
            char *end;
            if (column == SIZE_COLUMN && llabs(strtoll(word, &end, 10) - n_bytes) > n_bytes / 100)
                break;
            if (column != IN_PLACE_BUSBW_COLUMN) continue;
            *bus_bytes_per_s = strtod(word, &end) * 1e9;
            return *end == '\0' && *bus_bytes_per_s > 0;
        }
    }
    return false;
}

bool bl_nccl_tests_gather(int n_gpus, int64_t n_bytes, int64_t runs, double *bus_bytes_per_s)
{
    char name[] = "all_gather_perf", begin[] = "-b", end[] = "-e", gpus[] = "-g", times[] = "-n";
    char bytes[32], n[16], count[32];
    char *const arguments[] = {name, begin, bytes, end, bytes, gpus, n, times, count, NULL};

    snprintf(bytes, sizeof bytes, "%lld", (long long)n_bytes);
    snprintf(n, sizeof n, "%d", n_gpus);
    snprintf(count, sizeof count, "%lld", (long long)runs);
    char *text = bl_bench_run_program(arguments);
    bool is_there = text && bl_nccl_tests_parse(text, n_bytes, bus_bytes_per_s);
    free(text);
    return is_there;
}
