/* SPDX-License-Identifier: Apache-2.0 */
/* offload_ratio auto, and runs that do not fit in memory. */
#include "offload_runs.h"
#include "runs.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/memory.h"

static _Atomic int64_t planted_bytes; /* the system's answer, once; 0: the truth */
/* Before that; the first is about the embedding, the next about all. */
static atomic_int n_true_answers;

static void answer_once(int64_t n_bytes, int n_before)
{
    n_true_answers = n_before;
    planted_bytes = n_bytes;
}

int64_t __real_bl_memory_available_bytes(void);
int64_t __wrap_bl_memory_available_bytes(void);

int64_t __wrap_bl_memory_available_bytes(void)
{
    if (planted_bytes && atomic_fetch_sub(&n_true_answers, 1) > 0)
        return __real_bl_memory_available_bytes();
    int64_t said = atomic_exchange(&planted_bytes, 0);
    return said ? said : __real_bl_memory_available_bytes();
}

/* Of the host's memory, auto takes to the disk what does not fit: nothing, or here, where nothing
 * fits, all. */
static void test_auto_ratio(void **state)
{
    (void)state;
    for (int is_short = 0; is_short < 2; is_short++) {
        char **names;
        size_t n_names;
        golden_args args = {0};
        offload_args(&args, runs_path("auto"), 2);
        runs_set(&args, "offload_ratio", "auto");
        runs_set(&args, "offload_tier", "disk");
        runs_set(&args, "offload_dir", "%s", runs_path("auto-pages"));
        assert_int_equal(bl_dir_create(runs_path("auto-pages")), BL_OK);
        answer_once(is_short ? 1 << 20 : 0, 1);
        assert_int_equal(golden_train(&args), BL_OK);
        assert_true(runs_are_same(plain_run(2), runs_path("auto")));
        assert_int_equal(bl_dir_list(runs_path("auto-pages"), &names, &n_names), BL_OK);
        assert_int_equal(n_names, is_short ? 4 : 0); /* two ranks' pages and lists */
        bl_names_free(names, n_names);
        golden_args_free(&args);
    }
}

/* A run that does not fit says so with both numbers, and names the keys that make it fit, if there
 * are any left. The run that it was to overwrite is as it was. */
static void test_too_little_memory_names_keys(void **state)
{
    const char *adapter = runs_path("small/adapter_model.safetensors");
    golden_args args = {0};

    (void)state;
    offload_args(&args, runs_path("small"), 2);
    assert_int_equal(golden_train(&args), BL_OK);
    golden_args_free(&args);
    for (int ratio = 0; ratio <= 1; ratio++) {
        args = (golden_args){0};
        offload_args(&args, runs_path("small"), 2);
        runs_set(&args, "activation_checkpointing", "full");
        runs_set(&args, "offload_ratio", "%d", ratio);
        runs_set(&args, "offload_tier", "disk");
        runs_set(&args, "offload_dir", "%s", pages_dir(2));
        runs_set(&args, "overwrite_output_dir", "true");
        answer_once(3 << 19, 1);
        assert_int_equal(golden_train(&args), BL_ENOMEM);
        assert_error_has("this run needs about ");
        assert_error_has(" GB of memory, 0.001573 GB are available; ");
        assert_error_has("per_device_train_batch_size, max_seq_length or visit_tokens");
        /* The base is a hundredth of it: no remedy. test_plan has cases where it is one. */
        assert_null(strstr(bl_error_text(), "offload_ratio 1"));
        assert_true(bl_file_exists(adapter));
        golden_args_free(&args);
    }
    answer_once(1, 0);
    args = (golden_args){0};
    offload_args(&args, runs_path("small"), 2);
    assert_int_equal(golden_train(&args), BL_ENOMEM);
    assert_error_has("model.embed_tokens.weight: takes ");
    assert_error_has(" bytes of memory, 1 are available");
    golden_args_free(&args);
}

static bool auto_keeps_all_in_memory(const char *checkpointing, int64_t available_bytes)
{
    char **names;
    size_t n_names;
    golden_args args = {0};

    offload_args(&args, runs_path("auto"), 1);
    runs_set(&args, "max_steps", "1");
    runs_set(&args, "activation_checkpointing", "%s", checkpointing);
    runs_set(&args, "offload_tier", "disk");
    runs_set(&args, "offload_dir", "%s", runs_path("auto-pages"));
    assert_int_equal(bl_tree_remove(runs_path("auto-pages")), BL_OK);
    assert_int_equal(bl_dir_create(runs_path("auto-pages")), BL_OK);
    answer_once(available_bytes, 1);
    assert_int_equal(golden_train(&args), BL_OK);
    assert_int_equal(bl_dir_list(runs_path("auto-pages"), &names, &n_names), BL_OK);
    bl_names_free(names, n_names);
    golden_args_free(&args);
    return n_names == 0;
}

/* The memory that auto wants before it leaves the base in memory, to within 16 KiB. */
static int64_t memory_auto_wants(const char *checkpointing)
{
    int64_t too_little = 1 << 20, enough = 1 << 26;
    while (enough - too_little > 16 << 10) {
        int64_t half = (too_little + enough) / 2;
        *(auto_keeps_all_in_memory(checkpointing, half) ? &enough : &too_little) = half;
    }
    return enough;
}

/* The saved activations count when auto decides about the base. */
static void test_auto_ratio_counts_what_is_kept(void **state)
{
    (void)state;
    assert_true(memory_auto_wants("none") > memory_auto_wants("full") + (64 << 10));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_auto_ratio),
        cmocka_unit_test(test_too_little_memory_names_keys),
        cmocka_unit_test(test_auto_ratio_counts_what_is_kept),
    };
    return cmocka_run_group_tests_name("offload_auto", tests, runs_set_up, runs_tear_down);
}
