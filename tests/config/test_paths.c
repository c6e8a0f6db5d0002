/* SPDX-License-Identifier: Apache-2.0 */
/* Keys that name files: the user's home, the Hugging Face cache, several files with shares. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/files.h"
#include "base/sizes.h"
#include "config/config.h"

static char folder[] = "/tmp/ballast-test-paths-XXXXXX";

static bl_status load(const char *yaml, bl_train_config **config)
{
    assert_int_equal(bl_file_write_atomic("c.yaml", yaml, strlen(yaml)), BL_OK);
    return bl_train_config_load(BL_CONFIG_TRAIN, "c.yaml", 0, NULL, config);
}

static void check_model(const char *name, const char *expected)
{
    char yaml[256];
    bl_train_config *c;

    snprintf(yaml, sizeof yaml, "model_name_or_path: %s\noutput_dir: ~/out\ntrain_file: ~x\n",
             name);
    if (load(yaml, &c) != BL_OK) fail_msg("%s", bl_error_text());
    assert_string_equal(c->model_name_or_path, expected);
    assert_string_equal(c->output_dir, "/home/someone/out");
    assert_string_equal(c->train_file, "~x"); /* another user's home is not looked up */
    bl_train_config_free(c);
}

/* The snapshot that refs/main names; a directory of that name comes first, and without a snapshot
 * the name stays for the error that suggests the download. */
static void test_home_and_hub(void **state)
{
    static const char *const variables[] = {"HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"};
    static const char *const dirs[] = {"a", "b/hub", "c/huggingface/hub"};
    (void)state;
    for (size_t i = 0; i < BL_COUNT(variables); i++) unsetenv(variables[i]);
    setenv("HOME", "/home/someone", 1);
    for (size_t i = BL_COUNT(variables); i-- > 0;) {
        char dir[128], path[192], value[8] = {(char)('a' + i)};
        snprintf(dir, sizeof dir, "%s/models--org--Name-1.5", dirs[i]);
        setenv(variables[i], value, 1);
        check_model("org/Name-1.5", "org/Name-1.5");
        snprintf(path, sizeof path, "%s/refs", dir);
        assert_int_equal(bl_dir_create(path), BL_OK);
        snprintf(path, sizeof path, "%s/refs/main", dir);
        assert_int_equal(bl_file_write_atomic(path, "0123abc\n", 8), BL_OK);
        check_model("org/Name-1.5", "org/Name-1.5");
        snprintf(path, sizeof path, "%s/snapshots/0123abc", dir);
        assert_int_equal(bl_dir_create(path), BL_OK);
        check_model("org/Name-1.5", path);
        check_model("~/m", "/home/someone/m");
    }
    assert_int_equal(bl_dir_create("org/Name-1.5"), BL_OK);
    check_model("org/Name-1.5", "org/Name-1.5");
}

#define REQUIRED "model_name_or_path: m\noutput_dir: o\ntrain_file: t\n"

static void test_shares(void **state)
{
    static const struct {
        const char *yaml, *says; /* NULL: fine */
    } cases[] = {
        {"more_train_files: [a, b]\ntrain_file_shares: [1, 0.5, 2]\n", NULL},
        {"more_train_files: a\n", NULL},
        {"train_file_shares: 0.25\n", NULL},
        {"more_train_files: [a]\ntrain_file_shares: [1]\n", "1 numbers for 2 files"},
        {"train_file_shares: [-1]\n", "expected numbers from 0 to 1000, got '-1'"},
        {"train_file_shares: [half]\n", "got 'half'"},
        {"train_file_shares: [2]\nvalidation_split_percentage: 5\n", "could be in both parts"},
    };
    bl_train_config *c;
    (void)state;

    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        char yaml[512];
        snprintf(yaml, sizeof yaml, REQUIRED "%s", cases[i].yaml);
        bl_status st = load(yaml, &c);
        if (st != (cases[i].says ? BL_EUSAGE : BL_OK) ||
            (cases[i].says && !strstr(bl_error_text(), cases[i].says)))
            fail_msg("%s: status %d: %s", cases[i].yaml, (int)st, bl_error_text());
        if (i == 0)
            assert_true(bl_train_config_share(c, 0) == 1 && bl_train_config_share(c, 1) == 0.5 &&
                        bl_train_config_share(c, 2) == 2);
        if (i == 1) assert_true(bl_train_config_share(c, 1) == 1);
        if (st == BL_OK) bl_train_config_free(c);
    }
}

static int enter_folder(void **state)
{
    (void)state;
    return mkdtemp(folder) ? chdir(folder) : -1;
}

static int remove_folder(void **state)
{
    (void)state;
    return chdir("/") || bl_tree_remove(folder) != BL_OK;
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_home_and_hub),
                                       cmocka_unit_test(test_shares)};
    return cmocka_run_group_tests(tests, enter_folder, remove_folder);
}
