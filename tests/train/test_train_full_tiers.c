/* SPDX-License-Identifier: Apache-2.0 */
/* Trainings of every weight whose weights, moments and gradients are on disk, wholly or in part:
 * the bits of runs in memory, whatever else changes; reads and writes that fail; a full disk;
 * kills. */
#include "full_runs.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/files.h"
#include "base/sizes.h"
#include "io/reader.h"
#include "offload/pager.h"

enum { N_CASES = 2 };
static const char *const cases[N_CASES] = {"../../full/cases/tiny-mha-tied",
                                           "../../full/cases/tiny-gqa"}; /* tied, not tied */

#define STATE_ON_DISK   "optimizer_tier", "disk"
#define WEIGHTS_ON_DISK "offload_tier", "disk", "offload_ratio", "1"

/* ---- bits ---- */

/* Each case on one rank and on two has half of the variants and "all": each variant is tried with
 * both cases, with one of them on one rank, with the other on two. */
static void placement_changes_no_bit(void **state)
{
    static const struct {
        const char *what, *args[16]; /* with a NULL behind them */
    } variants[] = {
        {"state in host memory", {"optimizer_tier", "host"}},
        {"state on disk", {STATE_ON_DISK}},
        {"half of the state", {STATE_ON_DISK, "optimizer_ratio", "0.5"}},
        {"a tenth of the state", {STATE_ON_DISK, "optimizer_ratio", "0.1"}},
        {"weights on disk", {WEIGHTS_ON_DISK}},
        {"half of the weights", {"offload_tier", "disk", "offload_ratio", "0.5"}},
        {"weights in host memory", {"offload_tier", "host", "offload_ratio", "1"}},
        {"all", {STATE_ON_DISK, WEIGHTS_ON_DISK}},
        {"parts of both",
         {STATE_ON_DISK, "optimizer_ratio", "0.6", "offload_tier", "disk", "offload_ratio", "0.4",
          "offload_host_part", "0.5"}},
        {"all, pread", {STATE_ON_DISK, WEIGHTS_ON_DISK, "io_engine", "pread"}},
        {"all, a ring of one", {STATE_ON_DISK, WEIGHTS_ON_DISK, "ring_depth", "1"}},
        {"all, a ring of four", {STATE_ON_DISK, WEIGHTS_ON_DISK, "ring_depth", "4"}},
        {"all, one micro-batch per visit", {STATE_ON_DISK, WEIGHTS_ON_DISK, "visit_tokens", "1"}},
        {"all, nothing recomputed",
         {STATE_ON_DISK, WEIGHTS_ON_DISK, "activation_checkpointing", "none"}},
        {"all, activations in host memory",
         {STATE_ON_DISK, WEIGHTS_ON_DISK, "activation_offload", "true", "visit_tokens", "1"}},
        {"all, evaluations between steps",
         {STATE_ON_DISK, WEIGHTS_ON_DISK, "validation_file",
          "tests/golden/families/tokens/rows.jsonl", "eval_strategy", "steps", "eval_steps", "3"}},
        {"all, evaluations in the same visits",
         {STATE_ON_DISK, WEIGHTS_ON_DISK, "validation_file",
          "tests/golden/families/tokens/rows.jsonl", "eval_strategy", "steps", "eval_steps", "2",
          "eval_overlap", "true"}},
        {"all, checkpoints between steps", {STATE_ON_DISK, WEIGHTS_ON_DISK, "save_steps", "3"}},
    };

    (void)state;
    for (size_t c = 0; c < N_CASES; c++)
        for (int n_ranks = 1; n_ranks <= 2; n_ranks++) {
            full_runs_train(cases[c], n_ranks, "plain", NULL);
            for (size_t v = 0; v < BL_COUNT(variants); v++) {
                const char *args[20] = {"offload_dir", runs_path("pages")};
                if ((v + c + (size_t)n_ranks) % 2 != 0 && strcmp(variants[v].what, "all") != 0)
                    continue;
                memcpy(args + 2, variants[v].args, sizeof variants[v].args);
                full_runs_train(cases[c], n_ranks, "varied", args);
                full_runs_assert_same(FULL_RUNS_STEPS, "plain", "varied", n_ranks,
                                      variants[v].what);
            }
        }
}

/* ---- units of many pieces ---- */

enum { WIDE_ROWS = 200000, WIDE_STEPS = 3 };

static bool is_table(const char *name)
{
    return strcmp(name, "model.embed_tokens.weight") == 0 || strcmp(name, "lm_head.weight") == 0;
}

/* The header of a file whose tables have WIDE_ROWS rows. */
static json_t *widen_header(json_t *header)
{
    json_t *wide = json_object(), *tensor;
    json_int_t at = 0;
    const char *name;

    json_object_foreach(header, name, tensor)
    {
        if (strcmp(name, "__metadata__") == 0) continue;
        const json_t *offsets = json_object_get(tensor, "data_offsets");
        json_int_t n_bytes = json_integer_value(json_array_get(offsets, 1)) -
                             json_integer_value(json_array_get(offsets, 0));
        json_t *copy = json_deep_copy(tensor);
        if (is_table(name)) {
            json_t *shape = json_object_get(copy, "shape");
            n_bytes = n_bytes / json_integer_value(json_array_get(shape, 0)) * WIDE_ROWS;
            json_array_set_new(shape, 0, json_integer(WIDE_ROWS));
        }
        json_object_set_new(copy, "data_offsets", json_pack("[I, I]", at, at + n_bytes));
        json_object_set_new(wide, name, copy);
        at += n_bytes;
    }
    return wide;
}

/* The model in `from` with larger tables, which repeat its rows. */
static void write_wide_model(const char *from, const char *to)
{
    char path[2 * GOLDEN_PATH_BYTES], *text;
    size_t n_file;
    uint64_t n_header;
    const char *name;
    json_t *tensor;

    snprintf(path, sizeof path, "%s/config.json", from);
    json_t *config = json_load_file(path, 0, NULL);
    json_object_set_new(config, "vocab_size", json_integer(WIDE_ROWS));
    assert_int_equal(bl_dir_create(to), BL_OK);
    snprintf(path, sizeof path, "%s/config.json", to);
    assert_int_equal(json_dump_file(config, path, 0), 0);
    snprintf(path, sizeof path, "%s/model.safetensors", from);
    char *file = runs_read(path, &n_file);
    memcpy(&n_header, file, sizeof n_header);
    json_t *header = json_loadb(file + sizeof n_header, n_header, 0, NULL);
    json_t *wide = widen_header(header);
    text = json_dumps(wide, JSON_COMPACT);
    snprintf(path, sizeof path, "%s/model.safetensors", to);
    FILE *out = fopen(path, "wb");
    assert_non_null(out);
    const char *data = file + sizeof n_header + n_header;
    n_header = (strlen(text) + 7) / 8 * 8;
    fwrite(&n_header, sizeof n_header, 1, out);
    fprintf(out, "%-*s", (int)n_header, text);
    json_object_foreach(wide, name, tensor)
    {
        const json_t *old = json_object_get(json_object_get(header, name), "data_offsets"),
                     *new = json_object_get(tensor, "data_offsets");
        json_int_t from_at = json_integer_value(json_array_get(old, 0)),
                   n = json_integer_value(json_array_get(old, 1)) - from_at,
                   n_left = json_integer_value(json_array_get(new, 1)) -
                            json_integer_value(json_array_get(new, 0));
        for (; n_left > 0; n_left -= n)
            fwrite(data + from_at, 1, (size_t)(n_left < n ? n_left : n), out);
    }
    assert_int_equal(fclose(out), 0);
    free(text), free(file);
    json_decref(config), json_decref(header), json_decref(wide);
}

/* A table of ten pieces: slots of pieces are filled again while earlier ones are written. */
static void a_unit_of_many_pieces(void **state)
{
    const char *to_disk[] = {STATE_ON_DISK, WEIGHTS_ON_DISK, NULL};
    json_t *golden = golden_load_case(cases[1]), *topology;
    char model[GOLDEN_PATH_BYTES], *wide = strdup(runs_path("wide"));

    (void)state;
    assert_true(golden_model(golden, model));
    write_wide_model(model, wide);
    topology = json_pack("{s:i, s:i, s:i}", "ranks", 1, "per_device_train_batch_size", 1,
                         "gradient_accumulation_steps", 1);
    for (int is_on_disk = 0; is_on_disk < 2; is_on_disk++) {
        golden_args args = {0};
        full_runs_fill(golden, topology, wide,
                       runs_path(is_on_disk ? "wide_on_disk" : "wide_in_memory"), &args);
        runs_set(&args, "max_steps", "%d", WIDE_STEPS);
        runs_set(&args, "offload_dir", "%s", runs_path("pages"));
        for (int i = 0; is_on_disk && to_disk[i]; i += 2)
            runs_set(&args, to_disk[i], "%s", to_disk[i + 1]);
        assert_int_equal(golden_train(&args), BL_OK);
        golden_args_free(&args);
    }
    full_runs_assert_same(WIDE_STEPS, "wide_in_memory", "wide_on_disk", 1, "many pieces");
    assert_int_equal(bl_tree_remove(wide), BL_OK);
    free(wide);
    json_decref(topology), json_decref(golden);
}

/* Nothing of it is left on the disk: the files have no names. */
static void the_directory_is_left_empty(void **state)
{
    const char *args[] = {STATE_ON_DISK, WEIGHTS_ON_DISK, "offload_dir", runs_path("empty"), NULL};
    char **names;
    size_t n;

    (void)state;
    full_runs_train(cases[0], 2, "varied", args);
    assert_int_equal(bl_dir_list(runs_path("empty"), &names, &n), BL_OK);
    assert_int_equal(n, 0);
    bl_names_free(names, n);
}

/* ---- checkpoints ---- */

/* Of any placement, and of another number of ranks: rows are read into pages piece by piece. */
static void a_checkpoint_goes_to_any_placement(void **state)
{
    char *pages = strdup(runs_path("pages"));
    const char *to_disk[] = {STATE_ON_DISK, WEIGHTS_ON_DISK, "offload_dir", pages, NULL};
    json_t *golden = golden_load_case(cases[1]);
    char model[GOLDEN_PATH_BYTES];

    (void)state;
    assert_true(golden_model(golden, model));
    for (int n_before = 1; n_before <= 4; n_before *= 2)
        for (int is_on_disk = 0; is_on_disk < 2; is_on_disk++) {
            const char *output = is_on_disk ? "on_disk" : "in_memory";
            assert_int_equal(bl_tree_remove(runs_path("%s", output)), BL_OK);
            for (int part = 0; part < 2; part++) {
                int n_ranks = part == 0 ? n_before : 2;
                json_t *topology =
                    json_pack("{s:i, s:i, s:i}", "ranks", n_ranks, "per_device_train_batch_size", 1,
                              "gradient_accumulation_steps", 4 / n_ranks);
                golden_args args = {0};
                full_runs_fill(golden, topology, model, runs_path("%s", output), &args);
                if (part == 0) runs_set(&args, "max_steps", "7");
                if (part == 1) runs_set(&args, "resume_from_checkpoint", "true");
                if (part == 1) runs_set(&args, "allow_resume_mismatch", "true");
                for (int i = 0; part == is_on_disk && to_disk[i]; i += 2)
                    runs_set(&args, to_disk[i], "%s", to_disk[i + 1]);
                assert_int_equal(golden_train(&args), BL_OK);
                golden_args_free(&args);
                json_decref(topology);
            }
            if (is_on_disk)
                full_runs_assert_same(FULL_RUNS_STEPS, "in_memory", "on_disk", 2,
                                      "resumed on disk");
        }
    free(pages);
    json_decref(golden);
}

static void kills_change_no_bit(void **state)
{
    const char *args[] = {STATE_ON_DISK, WEIGHTS_ON_DISK, "offload_dir", runs_path("pages"), NULL};

    (void)state;
    runs_seed_random();
    for (int n_ranks = 1; n_ranks <= 2; n_ranks++) full_runs_kill(n_ranks, 6, NULL, args);
}

/* ---- slow writes ---- */

static int64_t slow_write(void *user, const bl_io_completion *c)
{
    const struct timespec pause = {0, 10 * 1000 * 1000};

    (void)user;
    if (c->is_write) nanosleep(&pause, NULL);
    return c->result;
}

/* Slow writes make each step long, so runs are short. The dump is of the first step. A read that
 * overtakes an update changes the next step. */
#define FEW_STEPS "max_steps", "3"
enum { N_STEPS = 3 };

/* The last gradients are still being written when it begins. */
static void a_dump_waits_for_the_disk(void **state)
{
    char *plain = strdup(runs_path("plain.gradients")),
         *varied = strdup(runs_path("varied.gradients")), *pages = strdup(runs_path("pages"));
    const char *in_memory[] = {FEW_STEPS, "dump_gradients", plain, NULL},
               *on_disk[] = {FEW_STEPS,        STATE_ON_DISK, "offload_dir", pages,
                             "dump_gradients", varied,        NULL};
    const bl_pager_hooks hooks = {.io = slow_write};

    (void)state;
    for (size_t c = 0; c < N_CASES; c++)
        for (int n_ranks = 1; n_ranks <= 2; n_ranks++) {
            full_runs_train(cases[c], n_ranks, "plain", in_memory);
            assert_int_equal(full_runs_try(cases[c], n_ranks, "varied", on_disk, &hooks), BL_OK);
            full_runs_assert_same_file(plain, varied);
            full_runs_assert_same(N_STEPS, "plain", "varied", n_ranks, "a dump");
        }
    free(pages);
    free(varied);
    free(plain);
}

/* Also where weights are read on a stream of the pager's own. */
static void reads_follow_updates(void **state)
{
    char *pages = strdup(runs_path("pages"));
    const char *in_memory[] = {FEW_STEPS, NULL},
               *args[] = {FEW_STEPS, STATE_ON_DISK, WEIGHTS_ON_DISK, "offload_dir", pages, NULL};
    const bl_pager_hooks hooks = {.io = slow_write, .bounces = true};

    (void)state;
    for (int n_ranks = 1; n_ranks <= 2; n_ranks++) {
        full_runs_train(cases[1], n_ranks, "plain", in_memory);
        assert_int_equal(full_runs_try(cases[1], n_ranks, "varied", args, &hooks), BL_OK);
        full_runs_assert_same(N_STEPS, "plain", "varied", n_ranks, "slow writes");
    }
    free(pages);
}

/* ---- failures ---- */

typedef struct io_faults {
    atomic_int n_left; /* transfers of the kind before one fails */
    bool is_write;
    int64_t result;
} io_faults;

static int64_t fail_from_then_on(void *user, const bl_io_completion *c)
{
    io_faults *faults = user;
    if (c->is_write != faults->is_write || atomic_fetch_sub(&faults->n_left, 1) > 0)
        return c->result;
    return faults->result;
}

static int64_t fail_no_other(void *user, const bl_io_completion *c)
{
    io_faults *faults = user;
    bool is_it = c->is_write == faults->is_write && atomic_fetch_sub(&faults->n_left, 1) == 0;
    return is_it ? faults->result : c->result;
}

/* One transfer of the state, the weights or their bf16 copy fails and no later one, so that only
 * its waiter can tell. */
static void a_single_failure_ends_the_run(void **state)
{
    enum { N_TRANSFERS = 40, STRIDE = 3 };
    char *pages = strdup(runs_path("pages"));
    const char *const args[2][16] = {{FEW_STEPS, STATE_ON_DISK, "offload_dir", pages, NULL},
                                     {FEW_STEPS, STATE_ON_DISK, WEIGHTS_ON_DISK, "offload_dir",
                                      pages, "compute_dtype", "bf16", "offload_compute_copy",
                                      "true", NULL}};

    (void)state;
    for (int k = 0; k < 2 * N_TRANSFERS; k += STRIDE)
        for (int copy = 0; copy < 2; copy++) {
            io_faults fault = {k / 2, k % 2 == 1, -EIO};
            bl_pager_hooks hooks = {.io = fail_no_other, .io_user = &fault};
            bl_status st = full_runs_try(cases[1], 1, "failed", args[copy], &hooks);
            if (st != BL_EIO || !strstr(bl_error_text(), pages))
                fail_msg("transfer %d, %d: status %d, %s", k, copy, (int)st, bl_error_text());
        }
    free(pages);
}

/* Each failure at every point of a run, alternately on one rank and on two. */
static void failures_end_the_run(void **state)
{
    static const struct {
        bool is_write;
        int64_t result;
        bl_status status;
        const char *text;
    } faults[] = {{true, -ENOSPC, BL_ELIMIT, "No space left on device"},
                  {true, -EIO, BL_EIO, "writing"},
                  {false, -EIO, BL_EIO, "reading"}};
    static const int after[] = {0, 3, 20, 57};
    char *pages = strdup(runs_path("pages"));
    const char *args[] = {STATE_ON_DISK, WEIGHTS_ON_DISK, "offload_dir", pages, NULL};

    (void)state;
    for (size_t i = 0; i < BL_COUNT(faults); i++)
        for (size_t k = 0; k < BL_COUNT(after); k++)
            for (int n_ranks = 1; n_ranks <= 2; n_ranks++) {
                if ((i + k) % 2 != (size_t)n_ranks % 2) continue;
                io_faults fault = {after[k], faults[i].is_write, faults[i].result};
                bl_pager_hooks hooks = {.io = fail_from_then_on, .io_user = &fault};
                assert_int_equal(full_runs_try(cases[1], n_ranks, "failed", args, &hooks),
                                 faults[i].status);
                if (!strstr(bl_error_text(), faults[i].text) || !strstr(bl_error_text(), pages))
                    fail_msg("%s", bl_error_text());
            }
    free(pages);
}

static void too_small_a_disk_is_refused(void **state)
{
    const char *args[] = {STATE_ON_DISK, "offload_dir", runs_path("absent/pages"), NULL};
    golden_args child_args = {0};
    runs_child child = {.max_file_bytes = 4096};

    (void)state;
    full_runs_train(cases[1], 1, "created", args); /* with its parents */
    full_runs_kill_args(1, "limited", &child_args);
    runs_set(&child_args, "model_name_or_path", "%s", GOLDEN_DIR "/models/tiny-gqa");
    runs_set(&child_args, "optimizer_tier", "disk");
    runs_set(&child_args, "offload_dir", "%s", runs_path("pages"));
    runs_start(&child, "train", &child_args);
    int code = runs_wait(&child, 60);
    assert_int_equal(code, bl_status_exit_code(BL_ELIMIT));
    runs_assert_error(&child, "the optimizer state of rank 0 takes");
    golden_args_free(&child_args);
}

/* ---- rejected configurations ---- */

static void unsuitable_keys_are_refused(void **state)
{
    golden_args args = {0};

    (void)state;
    runs_standard(&args, runs_path("lora"), 1);
    runs_set(&args, "optimizer_tier", "host");
    assert_int_equal(golden_train(&args), BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "optimizer_tier: LoRA's optimizer state is small"));
    runs_set(&args, "optimizer_tier", "device");
    runs_set(&args, "optimizer_state_dtype", "bf16");
    assert_int_equal(golden_train(&args), BL_EUSAGE);
    assert_non_null(
        strstr(bl_error_text(), "optimizer_state_dtype: LoRA's optimizer state is small"));
    runs_set(&args, "optimizer_state_dtype", "fp32");
    runs_set(&args, "embedding_learning_rate", "1e-4");
    assert_int_equal(golden_train(&args), BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "embedding_learning_rate: finetuning_type lora"));
    golden_args_free(&args);
    args = (golden_args){0};
    full_runs_kill_args(1, "full", &args);
    runs_set(&args, "embedding_learning_rate", "1e-4");
    runs_set(&args, "learning_rate", "0");
    assert_int_equal(golden_train(&args), BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "embedding_learning_rate 0.0001 with learning_rate 0"));
    golden_args_free(&args);
}

int main(int argc, char **argv)
{
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(placement_changes_no_bit),
        cmocka_unit_test(a_unit_of_many_pieces),
        cmocka_unit_test(the_directory_is_left_empty),
        cmocka_unit_test(a_checkpoint_goes_to_any_placement),
        cmocka_unit_test(kills_change_no_bit),
        cmocka_unit_test(a_dump_waits_for_the_disk),
        cmocka_unit_test(reads_follow_updates),
        cmocka_unit_test(failures_end_the_run),
        cmocka_unit_test(a_single_failure_ends_the_run),
        cmocka_unit_test(too_small_a_disk_is_refused),
        cmocka_unit_test(unsuitable_keys_are_refused),
    };
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
