/* SPDX-License-Identifier: Apache-2.0 */
/* Trainings of every weight with AdamW's moments in bf16, rounded stochastically: near float64
 * references and near fp32 moments; the same bits wherever the state is, after kills too; and
 * checkpoints, which the other dtype refuses or converts. */
#include "full_runs.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "trained/full.h"
#include "base/files.h"
#include "base/sizes.h"

#define IN_BF16         "optimizer_state_dtype", "bf16"
#define STATE_ON_DISK   "optimizer_tier", "disk"
#define WEIGHTS_ON_DISK "offload_tier", "disk", "offload_ratio", "1"

/* Losses of 20 steps against float64, relative. A moment's rounding is off by 2.3e-3 of it in the
 * mean; after 20 steps AdamW's update of an element is off by about 0.7 % of it, with another sign
 * in each element. Of 20,000 weights the signs leave 1 / 140 of that, 5e-5 of what the updates move
 * the loss, a fifth of it: 1e-5 of the loss. Ten times that; measured 1.5e-5. */
static const double LOSSES = 1e-4, FIRST_LOSS = 1e-6;

enum { STEPS = FULL_RUNS_STEPS, N_CASES = 4 };
static const char *const cases[N_CASES] = {
    "../../full/cases/tiny-gqa", "../../full/cases/tiny-mha-tied", "../../full/cases/qwen3-tied",
    "../../full/cases/falcon-one-norm"};

/* Trains a case with four rows per step; extra: keys and values, NULL behind them. */
static bl_status train_four(const char *name, int n_ranks, const char *output,
                            const char *const *extra)
{
    json_t *golden = golden_load_case(name),
           *topology = json_pack("{s:i, s:i, s:i}", "ranks", n_ranks, "per_device_train_batch_size",
                                 1, "gradient_accumulation_steps", 4 / n_ranks);
    char model[GOLDEN_PATH_BYTES];
    golden_args args = {0};

    assert_true(golden_model(golden, model));
    full_runs_fill(golden, topology, model, runs_path("%s", output), &args);
    for (int i = 0; extra && extra[i]; i += 2) runs_set(&args, extra[i], "%s", extra[i + 1]);
    bl_status st = golden_train(&args);
    golden_args_free(&args);
    json_decref(topology);
    json_decref(golden);
    return st;
}

/* ---- against references ---- */

static void losses_stay_near_the_reference(void **state)
{
    (void)state;
    for (size_t c = 0; c < N_CASES; c++) {
        json_t *golden = golden_load_case(cases[c]), *topology;
        const json_t *steps = json_object_get(json_object_get(golden, "expect"), "steps");
        char model[GOLDEN_PATH_BYTES];
        size_t k;
        assert_true(golden_model(golden, model));
        json_array_foreach(json_object_get(golden, "topologies"), k, topology)
        {
            golden_args args = {0};
            assert_int_equal(bl_tree_remove(runs_path("golden")), BL_OK);
            full_runs_fill(golden, topology, model, runs_path("golden"), &args);
            runs_set(&args, "optimizer_state_dtype", "bf16");
            assert_int_equal(golden_train(&args), BL_OK);
            golden_args_free(&args);
            json_t *metrics = golden_metrics(runs_path("golden"));
            double first = golden_compare_losses(metrics, steps, 1, FIRST_LOSS),
                   losses = golden_compare_losses(metrics, steps, STEPS, LOSSES);
            printf("%s, topology %zu: first loss %.1e, losses %.1e\n", cases[c], k, first, losses);
            json_decref(metrics);
            assert_true(first <= FIRST_LOSS);
            assert_true(losses <= LOSSES);
        }
        json_decref(golden);
    }
}

/* ---- bits ---- */

static void placement_changes_no_bit(void **state)
{
    static const struct {
        const char *what, *args[12]; /* with a NULL behind them */
    } variants[] = {
        {"state on disk", {STATE_ON_DISK}},
        {"a part of the state", {STATE_ON_DISK, "optimizer_ratio", "0.4"}},
        {"weights on disk", {WEIGHTS_ON_DISK}},
        {"all on disk", {STATE_ON_DISK, WEIGHTS_ON_DISK}},
        {"all on disk, pread", {STATE_ON_DISK, WEIGHTS_ON_DISK, "io_engine", "pread"}},
        {"all on disk, one micro-batch per visit",
         {STATE_ON_DISK, WEIGHTS_ON_DISK, "visit_tokens", "1"}},
        {"three threads", {"threads", "3"}},
        {"a ring of four", {"ring_depth", "4"}},
        {"all on disk, checkpoints between steps",
         {STATE_ON_DISK, WEIGHTS_ON_DISK, "save_steps", "3"}},
    };

    (void)state;
    for (size_t c = 0; c < 2; c++)
        for (int n_ranks = 1; n_ranks <= 2; n_ranks++) {
            const char *plain[] = {IN_BF16, NULL};
            full_runs_train(cases[c], n_ranks, "plain", plain);
            for (size_t v = 0; v < BL_COUNT(variants); v++) {
                const char *args[16] = {IN_BF16, "offload_dir", runs_path("pages")};
                memcpy(args + 4, variants[v].args, sizeof variants[v].args);
                full_runs_train(cases[c], n_ranks, "varied", args);
                full_runs_assert_same(STEPS, "plain", "varied", n_ranks, variants[v].what);
            }
        }
}

static void kills_change_no_bit(void **state)
{
    char *pages = strdup(runs_path("pages"));
    const char *plain[] = {IN_BF16, NULL},
               *on_disk[] = {IN_BF16, STATE_ON_DISK, WEIGHTS_ON_DISK, "offload_dir", pages, NULL};

    (void)state;
    runs_seed_random();
    full_runs_kill(1, 6, plain, plain);
    full_runs_kill(2, 6, plain, on_disk);
    free(pages);
}

/* ---- checkpoints ---- */

static bl_safetensors *open_shard(const char *output, int step, int rank, int n_ranks)
{
    char name[BL_SHARD_NAME_BYTES];
    bl_safetensors *file;

    bl_trained_shard_name(rank, n_ranks, name);
    if (bl_safetensors_open(runs_path("%s/checkpoints/step-%d/%s", output, step, name), &file) !=
        BL_OK)
        fail_msg("%s", bl_error_text());
    return file;
}

static void read_moments(const bl_safetensors *file, const char *name, int64_t n, float *values)
{
    const bl_stored_tensor *t = bl_safetensors_find(file, name);
    uint8_t *bytes = malloc((size_t)n * 4);
    size_t element = bl_dtype_bytes(t->dtype);

    assert_int_equal(bl_stored_tensor_read(t, 0, (size_t)n * element, bytes), BL_OK);
    assert_true(bl_dtype_to_f32(t->dtype, bytes, values, (size_t)n));
    free(bytes);
}

static void files_hold_bf16_moments(void **state)
{
    static const struct {
        const char *name;
        bl_dtype dtype;
    } tensors[] = {{"m", BL_BF16},        {"v", BL_BF16},        {"w", BL_F32},
                   {"m_vectors", BL_F32}, {"v_vectors", BL_F32}, {"w_vectors", BL_F32}};
    const char *args[] = {IN_BF16, NULL};

    (void)state;
    full_runs_train(cases[0], 1, "files", args);
    bl_safetensors *file = open_shard("files", STEPS, 0, 1);
    for (size_t i = 0; i < BL_COUNT(tensors); i++) {
        const bl_stored_tensor *t = bl_safetensors_find(file, tensors[i].name);
        assert_non_null(t);
        assert_int_equal(t->dtype, tensors[i].dtype);
        assert_int_equal(t->shape[0],
                         bl_safetensors_find(file, i < 3 ? "w" : "w_vectors")->shape[0]);
    }
    bl_safetensors_close(file);
}

/* The random word of an element does not depend on the rank that has it. Gradients of another
 * number of ranks differ by 1e-6, which moves few elements past their word; with the words of
 * another seed a third of the moments are their other neighbor. */
static void words_depend_on_the_seed_and_not_on_ranks(void **state)
{
    const char *args[] = {IN_BF16, "max_steps", "1", NULL},
               *seeded[] = {IN_BF16, "max_steps", "1", "seed", "43", NULL};
    json_t *golden = golden_load_case(cases[0]);
    char model[GOLDEN_PATH_BYTES];
    bl_model_config config;
    bl_base_layout layout;

    (void)state;
    assert_true(golden_model(golden, model));
    assert_int_equal(bl_model_config_load(model, &config), BL_OK);
    assert_int_equal(bl_model_layout_trained(&config, 2, &layout), BL_OK);
    int64_t n = (int64_t)layout.units[0].matrix[0].part[0].shard_bytes / 4, n_equal = 0;
    bl_base_layout_free(&layout);
    assert_int_equal(train_four(cases[0], 1, "one", args), BL_OK);
    assert_int_equal(train_four(cases[0], 2, "two", args), BL_OK);
    float *one = malloc((size_t)(2 * n) * sizeof *one), *two = malloc((size_t)n * sizeof *two);
    bl_safetensors *file = open_shard("one", 1, 0, 1);
    read_moments(file, "m", 2 * n, one);
    bl_safetensors_close(file);
    for (int rank = 0; rank < 2; rank++) {
        file = open_shard("two", 1, rank, 2);
        read_moments(file, "m", n, two);
        for (int64_t i = 0; i < n; i++) n_equal += one[rank * n + i] == two[i];
        bl_safetensors_close(file);
    }
    printf("%.4f of the moments are equal\n", (double)n_equal / (double)(2 * n));
    assert_true((double)n_equal > 0.98 * (double)(2 * n));
    assert_int_equal(train_four(cases[0], 1, "seeded", seeded), BL_OK);
    file = open_shard("seeded", 1, 0, 1);
    read_moments(file, "m", n, two);
    bl_safetensors_close(file);
    n_equal = 0;
    for (int64_t i = 0; i < n; i++) n_equal += one[i] == two[i];
    assert_true(fabs((double)n_equal / (double)n - 2.0 / 3) < 0.1);
    free(one), free(two);
    json_decref(golden);
}

/* Refused by name, with the remedy; allowed, fp32 moments are rounded to nearest, bf16 ones
 * widened, and the run goes on near the reference. */
static void the_other_dtype_is_refused_or_converted(void **state)
{
    static const char *const dtypes[] = {"fp32", "bf16"};
    char *pages = strdup(runs_path("pages"));
    json_t *golden = golden_load_case(cases[0]);
    const json_t *steps = json_object_get(json_object_get(golden, "expect"), "steps");

    (void)state;
    for (int from = 0; from < 2; from++)
        for (int on_disk = 0; on_disk < 2; on_disk++) {
            const char *before[] = {"optimizer_state_dtype", dtypes[from], "max_steps", "7", NULL},
                       *after[] = {"optimizer_state_dtype",
                                   dtypes[1 - from],
                                   "resume_from_checkpoint",
                                   "true",
                                   "offload_dir",
                                   pages,
                                   "optimizer_tier",
                                   on_disk ? "disk" : "device",
                                   NULL},
                       *allowed[16] = {"allow_resume_mismatch", "true"};
            assert_int_equal(bl_tree_remove(runs_path("other")), BL_OK);
            assert_int_equal(train_four(cases[0], 2, "other", before), BL_OK);
            assert_int_equal(train_four(cases[0], 2, "other", after), BL_ECHECKPOINT);
            if (!strstr(bl_error_text(), "optimizer_state_dtype: ") ||
                !strstr(bl_error_text(), "allow_resume_mismatch: ["))
                fail_msg("%s", bl_error_text());
            memcpy(allowed + 2, after, sizeof after);
            assert_int_equal(train_four(cases[0], 2, "other", allowed), BL_OK);
            json_t *metrics = golden_metrics(runs_path("other"));
            double losses = golden_compare_losses(metrics, steps, STEPS, LOSSES);
            printf("from %s, %s: losses %.1e\n", dtypes[from], on_disk ? "disk" : "memory", losses);
            assert_true(losses <= LOSSES);
            json_decref(metrics);
        }
    free(pages);
    json_decref(golden);
}

int main(int argc, char **argv)
{
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(losses_stay_near_the_reference),
        cmocka_unit_test(placement_changes_no_bit),
        cmocka_unit_test(kills_change_no_bit),
        cmocka_unit_test(files_hold_bf16_moments),
        cmocka_unit_test(words_depend_on_the_seed_and_not_on_ranks),
        cmocka_unit_test(the_other_dtype_is_refused_or_converted),
    };
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
