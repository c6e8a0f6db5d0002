/* SPDX-License-Identifier: Apache-2.0 */
/* ballast bench NAME: finds the measurement, reads its options and runs it. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/nearest.h"
#include "base/sizes.h"
#include "bench/command/bench.h"

static const bl_bench *const benches[] = {
    &bl_bench_linear,    &bl_bench_io,   &bl_bench_pager,  &bl_bench_hardware, &bl_bench_step,
    &bl_bench_attention, &bl_bench_plan, &bl_bench_gather, &bl_bench_gemm,     &bl_bench_optimizer};

static void print_options(FILE *out, bl_options_style style)
{
    bool is_markdown = style == BL_OPTIONS_MARKDOWN;

    if (is_markdown) fputs("\n`ballast bench --help` lists the options of each.\n", out);
    for (size_t i = 0; i < BL_COUNT(benches); i++) {
        if (is_markdown)
            fprintf(out, "\n### bench %s\n", benches[i]->name);
        else
            bl_cli_print_table(benches[i]->table, benches[i]->n_options, out, style);
        if (style == BL_OPTIONS_WORDS) continue;
        fputc('\n', out);
        if (style == BL_OPTIONS_MAN)
            bl_options_print_roff(benches[i]->details, out);
        else
            fputs(benches[i]->details, out);
    }
}

/* NULL, with a failure recorded, when there is none. */
static const bl_bench *find_bench(const char *name)
{
    const char *names[BL_COUNT(benches)];
    char list[256] = "";

    for (size_t i = 0; i < BL_COUNT(benches); i++) {
        names[i] = benches[i]->name;
        if (name && strcmp(names[i], name) == 0) return benches[i];
        snprintf(list + strlen(list), sizeof list - strlen(list), "%s%s", i ? ", " : "", names[i]);
    }
    const char *nearest = name ? bl_text_nearest(name, names, BL_COUNT(names)) : NULL;
    if (nearest)
        BL_FAIL(BL_EUSAGE, "bench: %s: unknown benchmark; did you mean %s?", name, nearest);
    else if (name)
        BL_FAIL(BL_EUSAGE, "bench: %s: unknown benchmark; one of %s", name, list);
    else
        BL_FAIL(BL_EUSAGE, "bench: missing benchmark name; one of %s", list);
    return NULL;
}

static bl_status run(int argc, char *const *argv)
{
    const bl_bench *bench = find_bench(argc > 0 ? argv[0] : NULL);
    if (!bench) return BL_EUSAGE;

    bl_status st = BL_OK;
    int n_words;
    bl_options options = {
        .table = bench->table, .n_options = bench->n_options, .command = BL_CLI_ANY};
    options.values = calloc(1, bench->values_bytes);
    options.origins = calloc(bench->n_options, 1);
    if (!options.values || !options.origins) {
        st = BL_FAIL(BL_ENOMEM, "bench: its options");
        goto done;
    }
    BL_TRY_GOTO(st, done, bl_cli_read(&options, argc - 1, argv + 1, 0, NULL, &n_words));
    st = bench->run ? bench->run(options.values) : bench->run_ranks(options.values, argc, argv);
done:
    if (options.values) bl_options_clear(&options);
    free(options.values);
    free(options.origins);
    return st;
}

static int compare_seconds(const void *a, const void *b)
{
    const double *x = a, *y = b;
    return (*x > *y) - (*x < *y);
}

bl_bench_times bl_bench_summarize(double *seconds, int64_t n)
{
    qsort(seconds, (size_t)n, sizeof *seconds, compare_seconds);
    return (bl_bench_times){seconds[0], 0.5 * (seconds[(n - 1) / 2] + seconds[n / 2])};
}

bl_status bl_bench_parse_bytes(const char *key, const char *text, int64_t multiple_bytes,
                               int64_t *n_bytes)
{
    static const struct {
        const char *name;
        int64_t bytes;
    } units[] = {
        {"", 1}, {"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"TiB", INT64_C(1) << 40}};
    char *end;

    errno = 0;
    long long count = strtoll(text, &end, 10);
    bool is_good = text[0] >= '0' && text[0] <= '9' && errno == 0;
    size_t u = 0;
    while (u < BL_COUNT(units) && strcmp(end, units[u].name) != 0) u++;
    is_good = is_good && u < BL_COUNT(units) &&
              !bl_mul_i64_overflows(count, units[u].bytes, n_bytes) && *n_bytes > 0 &&
              *n_bytes % multiple_bytes == 0;
    if (is_good) return BL_OK;
    return BL_FAIL(BL_EUSAGE,
                   "--%s: expected a size as in 512MiB (KiB, MiB, GiB, TiB), a multiple of %lld "
                   "bytes, got '%s'",
                   key, (long long)multiple_bytes, text);
}

const bl_command bl_command_bench = {
    .name = "bench",
    .arguments = "NAME [--key value ...]",
    .summary = "measure a part of the program against a baseline",
    .details = "",
    .print_options = print_options,
    .run = run,
};
