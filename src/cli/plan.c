/* SPDX-License-Identifier: Apache-2.0 */
/* ballast plan: memory and time of a training, before anything is loaded. */
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/log.h"
#include "base/sizes.h"
#include "cli/cli.h"
#include "cli/plan_data_internal.h"
#include "plan/expect.h"
#include "plan/ladder_report.h"
#include "plan/report.h"
#include "plan/what_if.h"

typedef enum measuring { MEASURE_ONCE, MEASURE_AGAIN, MEASURE_NEVER } measuring;

typedef struct plan_options {
    char *hardware, *svg, *what_if;
    measuring measure;
    bl_plan_objective objective;
    bool json, details, ladder;
    bool has_total_tokens; /* given */
    bl_string_list family, lengths;
    int64_t tokens;
    double total_tokens, price_per_hour, host_memory_gb;
    int64_t pcie_lanes;
} plan_options;

#define OPTION(field, kind)                                                                        \
    .key = #field, .group = "plan", .type = BL_OPTION_##kind,                                      \
    .offset = offsetof(plan_options, field), .commands = BL_CLI_ANY

static const bl_option table[] = {
    {OPTION(hardware, STRING),
     .help = "the machine: 8xh100, 2x8xh100 (hosts), 1xgh200, cpu, ..., or a hardware.json; none: "
             "this one"},
    {OPTION(host_memory_gb, REAL), .default_text = "0", .min = 0, .max = 1e6,
     .help = "memory per host in place of the machine's, GB (10^9 bytes); 0: the machine's"},
    {OPTION(pcie_lanes, INT), .default_text = "0", .min = 0, .max = 32,
     .help = "PCIe lanes per GPU in place of the machine's 16 (8 where a consumer board has two "
             "GPUs); 0: the machine's"},
    {OPTION(tokens, INT), .default_text = "auto", .has_auto = true, .min = 1, .max = 1048576,
     .help = "tokens per row of the data; auto: max_seq_length"},
    {OPTION(total_tokens, REAL), .default_text = "1e8", .min = 1, .max = 1e18,
     .help = "tokens of the training, for its time, energy and price; default: those of the run, "
             "where its data are here"},
    {OPTION(price_per_hour, REAL), .default_text = "0", .min = 0, .max = 1e9,
     .help =
         "price of all hosts together, in any currency: prints the cost of the training; 0: none"},
    {OPTION(objective, ENUM), .names = "speed|memory", .default_text = "speed",
     .help = "speed: the fastest that fits, or what takes less host memory and is at most 5 % "
             "slower; memory: the least GPU memory, then the least host memory"},
    {OPTION(details, BOOL), .default_text = "false",
     .help = "print memory by item, disk space, time by phase, and the rates with their sources"},
    {OPTION(measure, ENUM), .names = "once|again|never", .default_text = "once",
     .help =
         "the rates of this machine's processor, where --hardware is not given: measured for a "
         "few seconds and kept (once), measured anew (again), or assumed from a preset (never)"},
    {OPTION(json, BOOL), .default_text = "false", .help = "print one JSON document"},
    {OPTION(svg, PATH),
     .help = "directory for pictures: memory.svg and streams.svg, ladder.svg, what_if.svg"},
    {OPTION(what_if, STRING),
     .help = "KEY=a,b,c: the plan with each value of a key of a training, of a figure of the "
             "machine (copy_in_bytes_per_s), of hardware or tokens"},
    {OPTION(ladder, BOOL), .default_text = "false",
     .help = "memory of classical strategies: ZeRO's stages, LoRA, FP8, sharding, offloading; "
             "and keys of `ballast train` for each of them, with their planned memory"},
    {OPTION(family, LIST),
     .help = "names of models: the fastest of ZeRO's stages with LoRA that fits, by lengths"},
    {OPTION(lengths, LIST), .default_text = "256,512,1024,2048,4096",
     .help = "sequence lengths for --family, in tokens"},
};

static void print_options(FILE *out, bl_options_style style)
{
    bl_cli_print_table(table, BL_COUNT(table), out, style);
    if (style == BL_OPTIONS_WORDS) bl_train_config_print(BL_CONFIG_TRAIN, style, out);
    if (style == BL_OPTIONS_HELP || style == BL_OPTIONS_MAN)
        fputs("\nAnd the options of `ballast train`, of which none is required but the model.\n",
              out);
}

/* Whether the word is "--key" or "--key=value" of a key of this table. */
static const bl_option *own_option(const char *word)
{
    size_t n_bytes;

    if (strncmp(word, "--", 2) != 0) return NULL;
    word += 2;
    n_bytes = strcspn(word, "=");
    for (size_t i = 0; i < BL_COUNT(table); i++) {
        size_t k = 0;
        while (k < n_bytes &&
               (table[i].key[k] == word[k] || (table[i].key[k] == '_' && word[k] == '-')))
            k++;
        if (k == n_bytes && table[i].key[k] == '\0') return &table[i];
    }
    return NULL;
}

/* Sorts the words: those of this command first, then the training's. Returns the number of the
 * first. */
static int deal_out(int argc, char *const *argv, char **words)
{
    int n_own = 0, n_others = 0;
    char **others = words + argc;

    for (int i = 0; i < argc; i++) {
        const bl_option *o = own_option(argv[i]);
        bool has_value = o && !strchr(argv[i], '=') && i + 1 < argc &&
                         (o->type != BL_OPTION_BOOL || strncmp(argv[i + 1], "--", 2) != 0);
        if (has_value && o->type == BL_OPTION_BOOL) {
            bool ignored;
            has_value = bl_text_parse_bool(argv[i + 1], &ignored);
        }
        if (!o) {
            others[n_others++] = argv[i];
            continue;
        }
        words[n_own++] = argv[i];
        if (has_value) words[n_own++] = argv[++i];
    }
    return n_own;
}

/* Takes the document. */
static bl_status print_document(json_t *document)
{
    char *text = json_dumps(document, JSON_INDENT(1) | JSON_REAL_PRECISION(6));
    json_decref(document);
    if (!text) return BL_FAIL(BL_ENOMEM, "the plan's text");
    puts(text);
    free(text);
    return BL_OK;
}

static bl_status draw(const bl_plan_report *report, const char *dir)
{
    char *memory = NULL, *streams = NULL;
    bl_status st;

    BL_TRY(bl_dir_create(dir));
    BL_TRY_GOTO(st, done, bl_path_join(dir, "memory.svg", &memory));
    BL_TRY_GOTO(st, done, bl_path_join(dir, "streams.svg", &streams));
    BL_TRY_GOTO(st, done, bl_plan_draw_memory(report, memory));
    st = bl_plan_draw_streams(report, streams);
done:
    free(memory);
    free(streams);
    return st;
}

static bl_status tell_one(const bl_plan_report *given, const plan_options *o)
{
    bl_plan_report of_run = *given;
    const bl_plan_report *report = &of_run;
    const bl_plan_case *c = report->c;
    bool knows_rows = c->input.rows.n_micro > 0;
    bl_plan_input input = c->input;
    bl_plan_expectation expected;

    input.config = report->config;
    if (knows_rows) BL_TRY(bl_plan_expect(&input, report->plan, &expected));
    if (knows_rows && !report->together && !o->has_total_tokens) {
        of_run.expected = &expected;
        of_run.total_tokens =
            expected.time.tokens_per_s * expected.time.step_s * (double)c->input.rows.n_steps;
    }
    if (o->svg) BL_TRY(draw(report, o->svg));
    if (!o->json) {
        BL_TRY(bl_plan_report_print(report, o->details, stdout));
        if (knows_rows)
            bl_plan_expectation_print(&input, report->plan, report->time, &expected, stdout);
        if (knows_rows && report->together)
            bl_plan_together_print_expected(report->together, &expected.time, stdout);
        return bl_plan_case_check(report->c);
    }
    json_t *document, *part = NULL;
    BL_TRY(bl_plan_report_describe(report, &document));
    bl_status st = knows_rows ? bl_plan_expectation_describe(&input, &expected, &part) : BL_OK;
    if (part && json_object_set_new(document, "expected", part) != 0)
        st = BL_FAIL(BL_ENOMEM, "out of memory: the plan's document");
    if (st != BL_OK) {
        json_decref(document);
        return st;
    }
    BL_TRY(print_document(document));
    return bl_plan_case_check(report->c);
}

/* Of several runs, each is planned alone, too. */
static bl_status tell(const bl_plan_report *report, const plan_options *o)
{
    const bl_plan_case *c = report->c;
    bl_plan_together together;
    bl_plan_report of_all = *report;

    if (c->configs.n == 1) return tell_one(report, o);
    bl_status st = bl_plan_compare_alone(&c->input, &c->configs, &together);
    of_all.together = &together;
    if (st == BL_OK) st = tell_one(&of_all, o);
    bl_plan_together_free(&together);
    return st;
}

/* The plan that a training chooses; also prints its time. */
static bl_status plan_as_configured(const bl_plan_case *c, const plan_options *o)
{
    bl_plan plan;
    bl_time_estimate time;

    BL_TRY(bl_plan_choose(&c->input, &plan));
    BL_TRY(bl_plan_check(&c->input, &plan));
    BL_TRY(bl_plan_estimate(&c->input, &plan, &time));
    return tell(&(bl_plan_report){.c = c,
                                  .config = c->config,
                                  .plan = &plan,
                                  .time = &time,
                                  .total_tokens = o->total_tokens,
                                  .price_per_hour = o->price_per_hour},
                o);
}

/* Of a GPU's memory, or of a host's. */
static bl_memory_item largest_item(const bl_memory_ledger *m, bool of_host)
{
    int largest = 0;
    for (int i = 1; i < BL_MEMORY_ITEMS; i++) {
        int64_t more = of_host ? m->item[i].host - m->item[largest].host
                               : m->item[i].device - m->item[largest].device;
        if (more > 0) largest = i;
    }
    return (bl_memory_item)largest;
}

static double usable_gb(const bl_figure *memory_bytes)
{
    return (double)bl_plan_usable_bytes((int64_t)memory_bytes->value) * 1e-9;
}

static bl_status refuse(const bl_plan_case *c, unsigned free_keys, const bl_plan_choice *choice)
{
    char remedies[BL_PLAN_REMEDY_BYTES];
    const bl_memory_ledger *m = &choice->best.plan.memory;
    bool is_full = bl_train_config_is_full(c->config);
    bl_memory_item gpu = largest_item(m, false), host = largest_item(m, true);

    BL_TRY(bl_plan_find_remedies(&c->input, free_keys, remedies));
    int64_t n_processes = bl_ceil_div(c->input.topology.n_on_host, c->input.topology.n_here);
    return BL_FAIL(
        BL_ENOMEM,
        "%s on %s takes at least %.1f GB per GPU, of which %.1f GB may be used, and %.1f GB per "
        "host, "
        "of which %.1f GB may be used; the largest parts per rank: %s %.1f GB of the GPU, %s %.1f "
        "GB of the host; %s%s",
        c->model.name, c->hardware.name, (double)m->device * 1e-9,
        usable_gb(&c->hardware.device_memory_bytes), (double)(m->total * n_processes) * 1e-9,
        usable_gb(&c->hardware.host_memory_bytes), bl_memory_item_name(gpu, is_full),
        (double)m->item[gpu].device * 1e-9, bl_memory_item_name(host, is_full),
        (double)m->item[host].host * 1e-9,
        remedies[0] ? "it fits with " : "no single change makes it fit", remedies);
}

/* Keys that are not given are chosen by time; with a file, those alone that a training would
 * choose. */
static bl_status plan_fastest(const bl_plan_case *c, const plan_options *o)
{
    bl_plan_choice choice;
    unsigned free_keys =
        c->config->source.file ? bl_plan_auto_keys(c->config) : bl_plan_keys_left_open(c->config);

    BL_TRY(bl_plan_search(&c->input, free_keys, o->objective, &choice));
    if (choice.n_fit == 0) return refuse(c, free_keys, &choice);
    return tell(&(bl_plan_report){.c = c,
                                  .config = &choice.best.config,
                                  .plan = &choice.best.plan,
                                  .time = &choice.best.time,
                                  .choice = &choice,
                                  .total_tokens = o->total_tokens,
                                  .price_per_hour = o->price_per_hour},
                o);
}

/* ---- classical strategies ---- */

static bl_plan_machine machine_of(const plan_options *o)
{
    return (bl_plan_machine){o->hardware, o->host_memory_gb, o->pcie_lanes};
}

static bl_status tell_ladder(const bl_plan_case *c, const plan_options *o)
{
    bl_ladder_case ladder = {.hardware = &c->hardware,
                             .model_name = c->model.name,
                             .model = &c->model.config,
                             .length = c->input.longest_train_row,
                             .lora_r = c->config->lora_r,
                             .model_path = c->config->model_name_or_path,
                             .machine = machine_of(o)};
    json_t *document;

    if (o->svg) {
        char *path;
        BL_TRY(bl_dir_create(o->svg));
        BL_TRY(bl_path_join(o->svg, "ladder.svg", &path));
        bl_status st = bl_ladder_draw(&ladder, path);
        free(path);
        BL_TRY(st);
    }
    if (!o->json) return bl_ladder_print(&ladder, stdout);
    BL_TRY(bl_ladder_describe(&ladder, &document));
    return print_document(document);
}

enum { MAX_LENGTHS = 6 }; /* columns of a screen */

static bl_status tell_family(const bl_plan_case *c, const plan_options *o)
{
    int64_t lengths[MAX_LENGTHS];

    if (o->lengths.n_items < 1 || o->lengths.n_items > MAX_LENGTHS)
        return BL_FAIL(BL_EUSAGE, "--lengths: 1 to %d numbers of tokens", MAX_LENGTHS);
    for (int64_t k = 0; k < o->lengths.n_items; k++) {
        char *end;
        lengths[k] = strtoll(o->lengths.items[k], &end, 10);
        if (*end != '\0' || lengths[k] < 1 || lengths[k] > 1 << 24)
            return BL_FAIL(BL_EUSAGE, "--lengths: expected a number of tokens, got '%s'",
                           o->lengths.items[k]);
    }
    return bl_family_print(&c->hardware, (const char *const *)o->family.items,
                           (size_t)o->family.n_items, lengths, (size_t)o->lengths.n_items,
                           c->lora.options.r, stdout);
}

static bl_status choose_kind(const bl_plan_case *c, const plan_options *o)
{
    bool is_gpu = c->hardware.kind == BL_DEVICE_CUDA;

    if ((o->ladder || o->family.n_items > 0) && !is_gpu)
        return BL_FAIL(BL_EUSAGE, "--%s needs --hardware with GPUs, as 8xh100",
                       o->ladder ? "ladder" : "family");
    if (o->objective == BL_PLAN_BY_MEMORY && !is_gpu)
        return BL_FAIL(BL_EUSAGE, "--objective memory needs --hardware with GPUs; on a CPU give "
                                  "--activation_checkpointing full");
    if (o->family.n_items > 0) return tell_family(c, o);
    if (o->ladder) return tell_ladder(c, o);
    return is_gpu ? plan_fastest(c, o) : plan_as_configured(c, o);
}

static bl_status tell_what_if(const plan_options *o, int argc, char *const *argv)
{
    bl_what_if_case c = {.machine = machine_of(o),
                         .row_tokens = o->tokens == BL_OPTION_AUTO ? 0 : o->tokens,
                         .objective = o->objective,
                         .argc = argc,
                         .argv = argv};
    bl_what_if *w = malloc(sizeof *w);
    json_t *document = NULL;
    char *path = NULL;
    bl_status st;

    if (!w) return BL_FAIL(BL_ENOMEM, "a plan's table");
    BL_TRY_GOTO(st, done, bl_what_if_run(&c, o->what_if, w));
    if (o->svg) {
        BL_TRY_GOTO(st, done, bl_dir_create(o->svg));
        BL_TRY_GOTO(st, done, bl_path_join(o->svg, "what_if.svg", &path));
        BL_TRY_GOTO(st, done, bl_what_if_draw(w, path));
    }
    if (!o->json) bl_what_if_print(w, stdout);
    if (o->json) st = bl_what_if_describe(w, &document);
    if (st == BL_OK && document) st = print_document(document);
done:
    free(path);
    free(w);
    return st;
}

/* Of a CPU, before its rates are measured: a training that does not fit needs none. */
static bl_status check_memory(const bl_plan_case *c)
{
    bl_plan plan;

    if (c->hardware.kind != BL_DEVICE_CPU) return BL_OK;
    BL_TRY(bl_plan_choose(&c->input, &plan));
    return bl_plan_check(&c->input, &plan);
}

/* With a family, its first model is the model of the plan. */
static bl_status plan(const plan_options *o, int argc, char **argv)
{
    bl_plan_machine machine = machine_of(o);
    bl_plan_case c;

    if (o->what_if) return tell_what_if(o, argc, argv);
    if (o->family.n_items > 0) {
        argv[argc++] = "--model_name_or_path";
        argv[argc++] = o->family.items[0];
    }
    bl_status st =
        bl_plan_case_open_on(&machine, o->tokens == BL_OPTION_AUTO ? 0 : o->tokens, argc, argv, &c);
    if (st == BL_OK && o->tokens == BL_OPTION_AUTO && o->family.n_items == 0)
        st = bl_cli_plan_read_data(&c);
    if (st == BL_OK && !o->hardware) st = check_memory(&c);
    if (st == BL_OK && !o->hardware)
        st = bl_cli_plan_measure(&c, o->measure != MEASURE_NEVER, o->measure == MEASURE_AGAIN);
    if (st == BL_OK) st = choose_kind(&c, o);
    bl_plan_case_close(&c);
    return st;
}

static bl_status run(int argc, char *const *argv)
{
    bl_status st;
    plan_options values = {0};
    uint8_t origins[BL_COUNT(table)];
    int n_words;
    const bl_options options = BL_CLI_OPTIONS(table, &values, origins);
    char **words = calloc(2 * (size_t)argc + 2 + 1, sizeof *words); /* and a family's model */

    if (!words) return BL_FAIL(BL_ENOMEM, "%d words", argc);
    int n_own = deal_out(argc, argv, words);
    BL_TRY_GOTO(st, done, bl_cli_read(&options, n_own, words, 0, NULL, &n_words));
    values.has_total_tokens = bl_options_origin(&options, "total_tokens") != BL_FROM_DEFAULT;
    st = plan(&values, argc - n_own, words + argc);
done:
    bl_options_clear(&options);
    free(words);
    return st;
}

const bl_command bl_command_plan = {
    .name = "plan",
    .arguments =
        "CONFIG.yaml [CONFIG.yaml ...] | --model DIR|NAME [--hardware NAME|FILE] [--key value ...]",
    .summary = "predict memory, time and energy of a training, and choose its keys",
    .details =
        "Loads no weights: reads a model's name (llama-3.1-405b) or its directory's headers, and "
        "a machine's name\n"
        "(8xh100) or hardware.json. Keeps given keys and chooses the others: the fastest plan that "
        "fits. With a\n"
        "file, chooses as `ballast train` does; several files, or lists of values, are several "
        "runs over one base,\n"
        "compared with each alone. Exits 4 if nothing fits, and suggests changes. "
        "Exits 3 or\n"
        "4 after a plan whose model or GPU training does not support. docs/plan.md\n",
    .print_options = print_options,
    .run = run,
};
