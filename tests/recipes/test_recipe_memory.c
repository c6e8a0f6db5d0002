/* SPDX-License-Identifier: Apache-2.0 */
/* test_recipe_memory.c -- each recipe fits the host that its head declares, by the trainer's own
 * plan.
 *
 * Two lines in the head of a recipe are read:
 *
 *   # host: 8 x 80 GB, 2048 GB RAM, 1 host
 *   # needs: 67.2 GB per GPU and 310 GB RAM per host; on CPUs 819 GB RAM per host
 *
 * The first is GPUs per host, memory per GPU, memory per host, number of hosts. The second must be
 * what is computed, within 1 % or 0.5 GB. GB are 10^9 bytes. A rank is one GPU's share. On one host
 * the key `ranks` starts all ranks in one process; over several hosts recipes/two_nodes.sbatch
 * starts one process per rank. A tenth of each memory is left free, as `offload_ratio: auto` does.
 * Rows are as long as max_seq_length, checkpoints are bf16.
 *
 * Device memory: the ledger's rows (src/plan/memory.c) without their part in host memory, and the
 * bf16 copy of a decoded gate_up (docs/gpu.md). Activations are in this version's fp32.
 * Host memory: offloaded base and activations, scratch, and the embedding once per process.
 * On CPUs both are host memory: the ledger's total. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <glob.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "base/sizes.h"
#include "config/config.h"
#include "plan/lora.h"
#include "plan/plan.h"

#define GB        1e9
#define PART_USED 0.9 /* of a memory */
static const char SBATCH[] = "recipes/two_nodes.sbatch";

enum {
    LINE_BYTES = 512,
    PATH_BYTES = 64,
    THREADS = 16,            /* per rank; the machine of this test is not the recipe's */
    LOADING_BYTES = 16 << 20 /* per rank, docs/memory.md; the library looks at files for it */
};

/* What is wrong with a recipe; bits. */
enum {
    BAD_HEAD = 1,  /* no declared host, or no stated needs */
    BAD_RANKS = 2, /* not one rank per GPU of the hosts */
    TOO_LARGE = 4, /* for the declared host */
    BAD_NEEDS = 8  /* stated, but not what is computed */
};

typedef struct recipe_head {
    int n_hosts, n_devices; /* devices per host */
    double device_gb, host_gb;
    double needs_device_gb, needs_host_gb, needs_cpu_gb;
} recipe_head;

typedef struct recipe_needs {
    int n_ranks;
    int64_t device; /* bytes per rank */
    int64_t host;   /* bytes per host, beside the devices' */
    int64_t cpu;    /* bytes per host where the ranks compute on CPUs */
} recipe_needs;

static bool read_head(const char *path, recipe_head *head)
{
    char line[LINE_BYTES];
    bool has_host = false, has_needs = false;
    FILE *file = fopen(path, "r");

    assert_non_null(file);
    *head = (recipe_head){0};
    while (fgets(line, sizeof line, file)) {
        if (sscanf(line, "# host: %d x %lf GB, %lf GB RAM, %d host", &head->n_devices,
                   &head->device_gb, &head->host_gb, &head->n_hosts) == 4)
            has_host = true;
        if (sscanf(line,
                   "# needs: %lf GB per GPU and %lf GB RAM per host; on CPUs %lf GB RAM per host",
                   &head->needs_device_gb, &head->needs_host_gb, &head->needs_cpu_gb) == 3)
            has_needs = true;
    }
    fclose(file);
    if (!has_host) print_message("%s: no line '# host: ...'\n", path);
    if (!has_needs) print_message("%s: no line '# needs: ...'\n", path);
    return has_host && has_needs;
}

/* Value of "#SBATCH --KEY=N"; -1: none. */
static int sbatch_value(const char *path, const char *key)
{
    char line[LINE_BYTES], format[64];
    int value = -1;
    FILE *file = fopen(path, "r");

    assert_non_null(file);
    snprintf(format, sizeof format, "#SBATCH --%s=%%d", key);
    while (value < 0 && fgets(line, sizeof line, file)) {
        int n;
        if (sscanf(line, format, &n) == 1) value = n;
    }
    fclose(file);
    return value;
}

static const char *preset_of(const char *model_path)
{
    static const struct {
        const char *directory, *preset;
    } models[] = {{"Llama-3.1-405B-Instruct", "llama3.1-405b"},
                  {"Llama-2-70b-hf", "llama2-70b"},
                  {"Llama-2-70b-chat-hf", "llama2-70b"},
                  {"Llama-3.1-8B", "llama3.1-8b"}};
    const char *slash = strrchr(model_path, '/');
    const char *name = slash ? slash + 1 : model_path;

    for (size_t i = 0; i < BL_COUNT(models); i++)
        if (strcmp(models[i].directory, name) == 0) return models[i].preset;
    return NULL;
}

/* What the launch makes of the recipe: one process with all ranks, or one process per rank. */
static bool has_its_ranks(const char *path, const char *sbatch, const bl_train_config *c,
                          const recipe_head *head)
{
    int n_ranks = head->n_hosts * head->n_devices;

    if (head->n_hosts == 1) {
        if (bl_train_config_given(c, "ranks") && c->ranks == n_ranks) return true;
        print_message("%s: ranks is not %d\n", path, n_ranks);
        return false;
    }
    int n_tasks = sbatch_value(sbatch, "ntasks-per-node"), n_nodes = sbatch_value(sbatch, "nodes");
    if (!bl_train_config_given(c, "ranks") && n_nodes == head->n_hosts &&
        n_tasks * n_nodes == n_ranks)
        return true;
    print_message("%s: %d tasks on each of %d nodes (%s) and key ranks %s, for %d ranks\n", path,
                  n_tasks, n_nodes, sbatch,
                  bl_train_config_given(c, "ranks") ? "given" : "left out", n_ranks);
    return false;
}

/* What the trainer plans with, without model and data. */
typedef struct plan_case {
    bl_llama_config model;
    bl_format *formats;
    bl_lora_layout lora;
    bl_plan_input input;
} plan_case;

static void make_input(const recipe_head *head, bl_train_config *c, plan_case *p)
{
    bool has_validation = c->validation_file || c->validation_split_percentage > 0;

    *p = (plan_case){0};
    assert_non_null(preset_of(c->model_name_or_path));
    assert_int_equal(bl_llama_config_preset(preset_of(c->model_name_or_path), &p->model), BL_OK);
    assert_true(c->base_format == BL_BASE_AUTO || c->base_format == BL_BASE_FP8_ROW);
    int64_t n_formats = p->model.n_layers * BL_PROJECTIONS;
    p->formats = calloc((size_t)n_formats, sizeof *p->formats);
    assert_non_null(p->formats);
    for (int64_t i = 0; i < n_formats; i++) p->formats[i] = BL_FORMAT_FP8_ROW;

    if (!bl_train_config_given(c, "shard_size")) c->shard_size = head->n_hosts * head->n_devices;
    c->ranks = head->n_hosts * head->n_devices;
    c->threads = THREADS;
    assert_int_equal(bl_train_config_validate(BL_CONFIG_TRAIN, c), BL_OK);
    assert_int_equal(bl_plan_choose_lora(c, &p->model, true, &p->lora), BL_OK);
    p->input = (bl_plan_input){.config = c,
                               .model = &p->model,
                               .formats = p->formats,
                               .embedding_dtype = BL_BF16,
                               .head_dtype = BL_BF16,
                               .n_positions = c->max_seq_length,
                               .load_bytes = LOADING_BYTES,
                               .lora = &p->lora,
                               .topology = {.n_ranks = (int)c->ranks,
                                            .n_here = head->n_hosts == 1 ? (int)c->ranks : 1,
                                            .n_on_host = head->n_devices},
                               .is_training = true,
                               .longest_train_row = c->max_seq_length,
                               .longest_validation_row = has_validation ? c->max_seq_length : 0,
                               .available_bytes = -1};
}

static void predict(const plan_case *p, recipe_needs *needs)
{
    const bl_llama_config *m = &p->model;
    const bl_topology *t = &p->input.topology;
    int64_t n_processes = t->n_on_host / t->n_here;
    int64_t decoded = 2 * m->intermediate_size * m->hidden_size * 2;
    bl_plan plan;

    assert_int_equal(bl_plan_choose(&p->input, &plan), BL_OK);
    const bl_memory_ledger *l = &plan.memory;
    int64_t host = 0;
    for (int i = 0; i < BL_MEMORY_ITEMS; i++) host += l->item[i].host;
    needs->n_ranks = t->n_ranks;
    needs->device = l->device + decoded;
    needs->host = t->n_on_host * host + n_processes * (l->embedding + l->process);
    needs->cpu = n_processes * l->total;
}

static bool is_near(double stated, double computed)
{
    enum { ROUNDED_TO_GB = 1 };
    return fabs(stated - computed) <= fmax(computed / 100, ROUNDED_TO_GB / 2.0);
}

static unsigned compare(const char *path, const recipe_head *head, const recipe_needs *needs)
{
    double device = (double)needs->device / GB, ram = (double)needs->host / GB,
           cpu = (double)needs->cpu / GB;
    unsigned faults = 0;

    print_message("%s: %d ranks, %.1f GB per GPU and %.0f GB RAM per host; on CPUs %.0f GB RAM per "
                  "host\n",
                  path, needs->n_ranks, device, ram, cpu);
    if (device > head->device_gb * PART_USED || ram > head->host_gb * PART_USED ||
        cpu > head->host_gb * PART_USED) {
        print_message("%s: does not fit nine tenths of %.0f GB per GPU and %.0f GB RAM per host\n",
                      path, head->device_gb, head->host_gb);
        faults |= TOO_LARGE;
    }
    if (!is_near(head->needs_device_gb, device) || !is_near(head->needs_host_gb, ram) ||
        !is_near(head->needs_cpu_gb, cpu)) {
        print_message("%s: its '# needs:' line is not what is computed\n", path);
        faults |= BAD_NEEDS;
    }
    return faults;
}

static unsigned find_faults(const char *path, const char *sbatch)
{
    bl_train_config *c = NULL;
    plan_case p;
    recipe_head head;
    recipe_needs needs;

    if (!read_head(path, &head)) return BAD_HEAD;
    assert_int_equal(bl_train_config_load(BL_CONFIG_TRAIN, path, 0, NULL, &c), BL_OK);
    unsigned faults = has_its_ranks(path, sbatch, c, &head) ? 0 : BAD_RANKS;
    make_input(&head, c, &p);
    predict(&p, &needs);
    faults |= compare(path, &head, &needs);
    free(p.formats);
    bl_train_config_free(c);
    return faults;
}

static void test_recipes_fit_their_hosts(void **state)
{
    glob_t found;
    int n_wrong = 0;

    (void)state;
    assert_int_equal(glob("recipes/*.yaml", 0, NULL, &found), 0);
    assert_true(found.gl_pathc > 0);
    for (size_t i = 0; i < found.gl_pathc; i++)
        n_wrong += find_faults(found.gl_pathv[i], SBATCH) != 0;
    globfree(&found);
    assert_int_equal(n_wrong, 0);
}

/* Copies `from` into a new file in /tmp without the lines that begin with `without`; `instead`
 * (NULL: nothing) replaces the first of them. path[PATH_BYTES] is the new file's. */
static void plant(const char *from, const char *without, const char *instead, char *path)
{
    char line[LINE_BYTES];
    int n_left_out = 0;

    strcpy(path, "/tmp/ballast-recipe-XXXXXX");
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    FILE *in = fopen(from, "r"), *out = fdopen(fd, "w");
    assert_non_null(in);
    assert_non_null(out);
    while (fgets(line, sizeof line, in)) {
        if (strncmp(line, without, strlen(without)) != 0)
            fputs(line, out);
        else if (n_left_out++ == 0 && instead)
            fputs(instead, out);
    }
    fclose(in);
    assert_int_equal(fclose(out), 0);
    assert_true(n_left_out > 0);
}

static void test_a_wrong_recipe_is_found(void **state)
{
    static const struct {
        const char *without, *instead;
        unsigned fault;
    } cases[] = {
        {"offload_", NULL, TOO_LARGE},
        {"# host:", "# host: 8 x 40 GB, 2048 GB RAM, 1 host\n", TOO_LARGE},
        {"# host:", "# host: 8 x 80 GB, 512 GB RAM, 1 host\n", TOO_LARGE},
        {"ranks:", "ranks: 4\n", BAD_RANKS},
        {"ranks:", NULL, BAD_RANKS},
        {"# host:", NULL, BAD_HEAD},
        {"# needs:", "# needs: 1 GB per GPU and 1 GB RAM per host; on CPUs 1 GB RAM per host\n",
         BAD_NEEDS},
    };
    char path[PATH_BYTES];

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        plant("recipes/llama31-405b-one-node.yaml", cases[i].without, cases[i].instead, path);
        unsigned faults = find_faults(path, SBATCH);
        unlink(path);
        assert_int_equal(faults & cases[i].fault, cases[i].fault);
    }
}

static void test_one_task_per_host_is_found(void **state)
{
    char path[PATH_BYTES];

    (void)state;
    plant(SBATCH, "#SBATCH --ntasks-per-node", "#SBATCH --ntasks-per-node=1\n", path);
    unsigned faults = find_faults("recipes/llama31-405b-two-nodes.yaml", path);
    unlink(path);
    assert_int_equal(faults, BAD_RANKS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_recipes_fit_their_hosts),
        cmocka_unit_test(test_a_wrong_recipe_is_found),
        cmocka_unit_test(test_one_task_per_host_is_found),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
