/* SPDX-License-Identifier: Apache-2.0 */
/* ballast verify: whether an adapter fits a base, which programs load it, and whether a merged
 * model is both. */
#include <stdlib.h>
#include <string.h>

#include "base/cores.h"
#include "base/sizes.h"
#include "cli/cli.h"
#include "convert/verify.h"

/* Lines of faults and warnings for people; --json has all. */
enum { MAX_LINES = 20 };

typedef struct verify_options {
    bool json;
    int64_t threads;
} verify_options;

static const bl_option table[] = {
    {.key = "json",
     .group = "Options",
     .type = BL_OPTION_BOOL,
     .offset = offsetof(verify_options, json),
     .commands = BL_CLI_ANY,
     .default_text = "false",
     .help = "print one JSON document"},
    {.key = "threads",
     .group = "Options",
     .type = BL_OPTION_INT,
     .offset = offsetof(verify_options, threads),
     .commands = BL_CLI_ANY,
     .default_text = "auto",
     .has_auto = true,
     .min = 1,
     .max = 4096,
     .help = "CPU threads"},
};

static void print_options(FILE *out, bl_options_style style)
{
    bl_cli_print_table(table, BL_COUNT(table), out, style);
}

static const char *text_of(const json_t *object, const char *key)
{
    const char *text = json_string_value(json_object_get(object, key));
    return text ? text : "";
}

static void print_faults(const json_t *faults)
{
    const json_t *fault;
    size_t i;

    json_array_foreach(faults, i, fault)
    {
        if (i == MAX_LINES) {
            printf("... and %zu more: --json lists all\n", json_array_size(faults) - MAX_LINES);
            break;
        }
        printf("%s: %s: %s; expected %s\n", text_of(fault, "kind"), text_of(fault, "tensor"),
               text_of(fault, "found"), text_of(fault, "expected"));
    }
}

static void print_loads(const json_t *loads)
{
    static const char *const names[][2] = {{"peft-0.17", "PEFT 0.17.0 to 0.18.1"},
                                           {"peft-0.19.1", "PEFT 0.19.1 and later"},
                                           {"vllm", "vLLM 0.33.0"},
                                           {"sglang", "SGLang 0.5.23"}};
    const json_t *finding;
    size_t i;

    for (size_t k = 0; k < BL_COUNT(names); k++) {
        const json_t *program = json_object_get(loads, names[k][0]);
        bool loads_all = json_is_true(json_object_get(program, "loads_all"));
        printf("%s: %s\n", names[k][1], loads_all ? "loads all of it" : "does not load all of it");
        json_array_foreach(json_object_get(program, "findings"), i, finding)
        {
            if (i == MAX_LINES) break;
            printf("  %s %s (%lld): %s\n", text_of(finding, "effect"), text_of(finding, "tensors"),
                   (long long)json_integer_value(json_object_get(finding, "count")),
                   text_of(finding, "reason"));
        }
    }
}

static void print_merged(const json_t *totals)
{
    const char *name;
    json_t *value;
    bool is_first = true;

    if (!totals) return;
    printf("merged: ");
    json_object_foreach((json_t *)totals, name, value)
    {
        if (json_is_integer(value) && json_integer_value(value) == 0) continue;
        if (json_is_integer(value))
            printf("%s%lld %s", is_first ? "" : ", ", (long long)json_integer_value(value), name);
        else
            printf("%s%s %.4g", is_first ? "" : ", ", name, json_real_value(value));
        is_first = false;
    }
    putchar('\n');
}

static void print_report(const json_t *report)
{
    const json_t *faults = json_object_get(report, "faults"), *warning, *modules;
    size_t i, n = json_array_size(faults);

    if (n == 0)
        printf("ok\n");
    else
        printf("%zu fault%s\n", n, n == 1 ? "" : "s");
    print_faults(faults);
    json_array_foreach(json_object_get(report, "warnings"), i, warning)
    {
        if (i < MAX_LINES) printf("warning: %s\n", json_string_value(warning));
    }
    modules = json_object_get(report, "adapter_modules");
    printf("adapter: %lld of %lld modules fit; r %lld, lora_alpha %g%s%s\n",
           (long long)json_integer_value(json_object_get(modules, "n_fit")),
           (long long)json_integer_value(json_object_get(modules, "n")),
           (long long)json_integer_value(json_object_get(modules, "r")),
           json_real_value(json_object_get(modules, "lora_alpha")),
           *text_of(modules, "layout") ? "; experts in the layout " : "",
           text_of(modules, "layout"));
    print_merged(json_object_get(report, "merged_tensors"));
    print_loads(json_object_get(report, "loads"));
}

static bl_status verify(verify_options *values, const char *const *words, int n_words)
{
    bl_verify_options options = {
        .base = words[0], .adapter = words[1], .merged = n_words > 2 ? words[2] : NULL};
    json_t *report = NULL;
    size_t n_faults = 0;
    bl_status st;

    if (values->threads == BL_OPTION_AUTO) values->threads = bl_cores_usable();
    BL_TRY(bl_pool_create((int)values->threads, &options.pool));
    BL_TRY_GOTO(st, done, bl_model_verify(&options, &report, &n_faults));
    if (values->json) {
        json_dumpf(report, stdout, JSON_INDENT(2));
        putchar('\n');
    } else {
        print_report(report);
    }
    if (n_faults > 0)
        st =
            BL_FAIL(BL_EINPUT, "%s: %zu fault%s", options.merged ? options.merged : options.adapter,
                    n_faults, n_faults == 1 ? "" : "s");
done:
    json_decref(report);
    bl_pool_destroy(options.pool);
    return st;
}

static bl_status run(int argc, char *const *argv)
{
    bl_status st;
    verify_options values;
    uint8_t origins[BL_COUNT(table)];
    const char *words[3];
    int n_words;
    const bl_options options = BL_CLI_OPTIONS(table, &values, origins);

    BL_TRY_GOTO(st, done, bl_cli_read(&options, argc, argv, 3, words, &n_words));
    if (n_words < 2) {
        st = BL_FAIL(BL_EUSAGE, "verify: missing directory; usage: ballast verify BASE ADAPTER "
                                "[MERGED]");
        goto done;
    }
    st = verify(&values, words, n_words);
done:
    bl_options_clear(&options);
    return st;
}

const bl_command bl_command_verify = {
    .name = "verify",
    .arguments = "BASE ADAPTER [MERGED] [--json]",
    .summary = "check that an adapter fits its base, and that a merged model is their sum",
    .details =
        "Reads directories of any architecture, dense or mixture, by names and shapes alone.\n"
        "Prints faults: one line each with tensor, found, expected; then which programs load\n"
        "all of the adapter. With MERGED: whether each matrix is base plus delta, how much of\n"
        "the delta rounding kept, and whether anything else differs. Exit code 3: a fault.\n"
        "docs/formats.md\n",
    .print_options = print_options,
    .run = run,
};
