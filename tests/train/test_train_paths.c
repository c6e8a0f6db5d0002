/* SPDX-License-Identifier: Apache-2.0 */
/* A run compares its output paths with its input paths before it writes: each rejection leaves
 * every file as it was. And a directory that is removed during a run, by `rm` or by the next run,
 * ends it. */
#include "runs.h"

#include <glob.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/files.h"
#include "base/sizes.h"

enum { EXIT_IO = 4 };

static const double LIMIT_S = 600; /* for a child; a sanitizer makes it 20 times slower */

/* Inputs of a run's own, that it could destroy. */
static void make_inputs(void)
{
    assert_int_equal(bl_dir_create(runs_path("in")), BL_OK);
    runs_copy(GOLDEN_DIR "/models/tiny-gqa", runs_path("in/model"));
    runs_copy(GOLDEN_DIR "/tokens/tiny-more.jsonl", runs_path("in/train.jsonl"));
    runs_copy(GOLDEN_DIR "/tokens/tiny-validation.jsonl", runs_path("in/valid.jsonl"));
    runs_write(runs_path("in/run.yaml"), "max_steps: 1\n");
}

static void input_keys(golden_args *args, const char *output)
{
    runs_standard(args, output, 1);
    runs_set(args, "model_name_or_path", "%s", runs_path("in/model"));
    runs_set(args, "train_file", "%s", runs_path("in/train.jsonl"));
    runs_set(args, "validation_file", "%s", runs_path("in/valid.jsonl"));
    runs_set(args, "max_steps", "1");
}

static int set_up(void **state)
{
    if (runs_set_up(state) != 0) return -1;
    make_inputs();
    golden_args args = {0};
    input_keys(&args, runs_path("in/adapter"));
    runs_set(&args, "lora_r", "4");
    assert_int_equal(golden_train(&args), BL_OK);
    golden_args_free(&args);
    return 0;
}

/* Names, sizes, times and kinds of all files in the scratch directory, except locks. */
static char *snapshot(void)
{
    char command[2 * GOLDEN_PATH_BYTES], path[GOLDEN_PATH_BYTES];

    snprintf(path, sizeof path, "%s", runs_path("../snapshot-%d", (int)getpid()));
    snprintf(command, sizeof command,
             "find '%s' ! -name .ballast.lock -printf '%%P %%y %%s %%T@ %%i %%l\\n' | LC_ALL=C "
             "sort >'%s'",
             runs_path("."), path);
    assert_int_equal(system(command), 0);
    char *text = runs_read(path, NULL);
    assert_int_equal(unlink(path), 0);
    return text;
}

static void assert_refused(const golden_args *args, const char *text_a, const char *text_b)
{
    char *before = snapshot();

    assert_int_equal(golden_train(args), BL_EUSAGE);
    if (!strstr(bl_error_text(), text_a) || !strstr(bl_error_text(), text_b))
        fail_msg("\"%s\" lacks \"%s\" or \"%s\"", bl_error_text(), text_a, text_b);
    char *after = snapshot();
    assert_string_equal(before, after);
    free(before);
    free(after);
}

/* ---- an output that is an input ---- */

static void test_files_that_are_read(void **state)
{
    static const struct {
        const char *key, *path, *text; /* text: the input's key */
    } cases[] = {
        {"dump_gradients", "in/train.jsonl", "in/train.jsonl (train_file)"},
        {"dump_gradients", "in/../in/valid.jsonl", "in/valid.jsonl (validation_file)"},
        {"dump_gradients", "in/model/model.safetensors", "(model_name_or_path)"},
        {"dump_gradients", "in/adapter/adapter_model.safetensors", "(init_adapter)"},
        {"dump_gradients", "in/hard", "in/train.jsonl (train_file)"},
        {"dump_gradients", "in/soft", "in/model/config.json (model_name_or_path)"},
        {"dump_gradients", "in/late", "in/late.tmp (chat_template)"},
        {"dump_gradients", "in/new/adapter_model.safetensors", "(output_dir) are one file"},
        {"trace", "in/train.jsonl", "in/train.jsonl (train_file)"},
        {"trace", "in/model/tokenizer.json", "(model_name_or_path)"},
        {"trace", "in/late.tmp", "in/late.tmp (chat_template)"},
        {"trace", "in/new/metrics.jsonl", "(output_dir) are one file"},
        {"output_dir", "in/model", "is the folder of model_name_or_path"},
        {"output_dir", "in/link/.", "is the folder of init_adapter"},
        {"output_dir", "in/adapter/checkpoints/step-1", "is the folder of resume_from_checkpoint"},
        {"output_dir", "in/linked", "in/train.jsonl (train_file)"},
    };

    (void)state;
    runs_write(runs_path("in/late.tmp"), "{}");
    runs_write(runs_path("in/model/tokenizer.json"), "{}");
    assert_int_equal(link(runs_path("in/train.jsonl"), runs_path("in/hard")), 0);
    assert_int_equal(symlink("model/config.json", runs_path("in/soft")), 0);
    assert_int_equal(symlink("adapter", runs_path("in/link")), 0);
    assert_int_equal(bl_dir_create(runs_path("in/linked")), BL_OK);
    assert_int_equal(symlink("../train.jsonl", runs_path("in/linked/metrics.jsonl")), 0);
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        golden_args args = {0};
        input_keys(&args, runs_path("in/new"));
        runs_set(&args, "init_adapter", "%s", runs_path("in/adapter"));
        runs_set(&args, "resume_from_checkpoint", "%s", runs_path("in/adapter/checkpoints/step-1"));
        runs_set(&args, "chat_template", "%s", runs_path("in/late.tmp"));
        runs_set(&args, cases[i].key, "%s", runs_path("%s", cases[i].path));
        assert_refused(&args, cases[i].key, cases[i].text);
        golden_args_free(&args);
    }
    assert_int_equal(unlink(runs_path("in/model/tokenizer.json")), 0);
}

/* What a run removes: an input among its old checkpoints. */
static void test_inputs_among_checkpoints(void **state)
{
    golden_args args = {0};

    (void)state;
    runs_copy(runs_path("in/adapter"), runs_path("in/old"));
    runs_copy(runs_path("in/train.jsonl"), runs_path("in/old/checkpoints/train.jsonl"));
    input_keys(&args, runs_path("in/old"));
    runs_set(&args, "overwrite_output_dir", "true");
    runs_set(&args, "train_file", "%s", runs_path("in/old/checkpoints/step-1/../train.jsonl"));
    assert_refused(&args,
                   "train_file: ", "in/old/checkpoints, where output_dir's run removes files");
    golden_args_free(&args);
}

/* The configuration is an input; the one that a run has recorded may be run again in its place. */
static void test_configuration(void **state)
{
    const char *record = runs_path("in/again/config.resolved.yaml");
    golden_args args = {0};
    char *words[] = {(char *)record, (char[]){"--overwrite_output_dir"}, (char[]){"true"},
                     (char[]){"--trace"}, NULL};
    bl_train_config *config;

    (void)state;
    input_keys(&args, runs_path("in/again"));
    assert_int_equal(golden_train(&args), BL_OK);
    golden_args_free(&args);
    words[4] = (char *)record;
    assert_int_equal(bl_train_config_load(BL_CONFIG_TRAIN, NULL, 5, words, &config), BL_OK);
    char *before = snapshot();
    assert_int_equal(bl_train_run(config, NULL, NULL), BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "trace: "));
    assert_non_null(strstr(bl_error_text(), "(the configuration)"));
    char *after = snapshot();
    assert_string_equal(before, after);
    free(before);
    free(after);
    bl_train_config_free(config);
    assert_int_equal(bl_train_config_load(BL_CONFIG_TRAIN, NULL, 3, words, &config), BL_OK);
    assert_int_equal(bl_train_run(config, NULL, NULL), BL_OK);
    bl_train_config_free(config);
}

/* ---- an output that is not a file ---- */

static void test_what_cannot_be_written(void **state)
{
    static const struct {
        const char *key, *path, *text;
    } cases[] = {
        {"dump_gradients", "/dev/null", "dump_gradients: /dev/null: is a device"},
        {"dump_gradients", "in/fifo", "in/fifo: is a FIFO"},
        {"dump_gradients", "in/model", "in/model: is a folder"},
        {"trace", "in/fifo", "in/fifo: is a FIFO"},
        {"trace", "in/model", "in/model: is a folder"},
        {"output_dir", "in/train.jsonl", "in/train.jsonl: exists and is not a folder"},
        {"output_dir", "in/train.jsonl/out", "creating the folder: Not a directory"},
        {"output_dir", "in/shape-0", "output_dir: "},
        {"output_dir", "in/shape-1", "metrics.jsonl: is a folder"},
        {"output_dir", "in/shape-2", "adapter_model.safetensors: is a FIFO"},
        {"output_dir", "in/shape-3", ".ballast.lock: is a symbolic link"},
    };

    (void)state;
    assert_int_equal(mkfifo(runs_path("in/fifo"), 0600), 0);
    for (int i = 0; i < 4; i++) assert_int_equal(bl_dir_create(runs_path("in/shape-%d", i)), BL_OK);
    runs_write(runs_path("in/shape-0/checkpoints"), "");
    assert_int_equal(bl_dir_create(runs_path("in/shape-1/metrics.jsonl")), BL_OK);
    assert_int_equal(mkfifo(runs_path("in/shape-2/adapter_model.safetensors"), 0600), 0);
    runs_write(runs_path("in/precious"), "12 precious words");
    assert_int_equal(symlink("../precious", runs_path("in/shape-3/.ballast.lock")), 0);
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        golden_args args = {0};
        input_keys(&args, runs_path("in/new"));
        runs_set(&args, "overwrite_output_dir", "true");
        runs_set(&args, cases[i].key, "%s",
                 cases[i].path[0] == '/' ? cases[i].path : runs_path("%s", cases[i].path));
        assert_refused(&args, cases[i].text, "");
        golden_args_free(&args);
    }
}

/* A trace is written in place, so a device may have it, and stays one. */
static void test_trace_to_a_device(void **state)
{
    golden_args args = {0};
    struct stat info;

    (void)state;
    input_keys(&args, runs_path("in/traced"));
    runs_set(&args, "trace", "/dev/null");
    assert_int_equal(golden_train(&args), BL_OK);
    assert_int_equal(stat("/dev/null", &info), 0);
    assert_true(S_ISCHR(info.st_mode));
    golden_args_free(&args);
}

/* ---- what others wrote into output_dir ---- */

/* The standard run of one step; `key` is set to "true", unless it is NULL. */
static void one_step(golden_args *args, const char *output, const char *key)
{
    input_keys(args, output);
    if (key) runs_set(args, key, "true");
}

/* A start with the key ends with `status`. */
static void start_with(const char *output, const char *key, bl_status status)
{
    golden_args args = {0};
    one_step(&args, output, key);
    assert_int_equal(golden_train(&args), status);
    golden_args_free(&args);
}

/* No key makes a run replace a file that has one of its names and that no run wrote. */
static void test_names_that_are_taken(void **state)
{
    static const struct {
        const char *dir, *name, *link; /* link: its target; NULL: a file */
    } taken[] = {{"", "README.md", NULL},
                 {"", "config.resolved.yaml", NULL},
                 {"", "adapter_config.json", NULL},
                 {"", "adapter_model.safetensors.tmp", NULL},
                 {"", "metrics.jsonl", NULL},
                 {"", "metrics.jsonl", "nothing"},
                 {"", "metrics.jsonl", "../in/model/README.md"},
                 {"", ".ballast-files", NULL},
                 {"checkpoints/step-1", "optimizer.pt", NULL},
                 {"checkpoints/step-1.tmp", "notes", NULL}};
    static const char *const keys[] = {NULL, "resume_from_checkpoint", "overwrite_output_dir"};

    (void)state;
    for (size_t i = 0; i < BL_COUNT(taken); i++) {
        const char *dir = runs_path("occupied-%zu/%s", i, taken[i].dir),
                   *path = runs_path("occupied-%zu/%s/%s", i, taken[i].dir, taken[i].name);
        assert_int_equal(bl_dir_create(dir), BL_OK);
        if (taken[i].link)
            assert_int_equal(symlink(taken[i].link, path), 0);
        else
            runs_write(path, "precious");
        runs_write(runs_path("occupied-%zu/.ballast.lock", i), "");
        for (size_t k = 0; k < BL_COUNT(keys); k++) {
            golden_args args = {0};
            one_step(&args, runs_path("occupied-%zu", i), keys[k]);
            assert_refused(&args, "output_dir: ", taken[i].dir[0] ? taken[i].dir : taken[i].name);
            golden_args_free(&args);
        }
    }
}

/* dump_gradients and trace replace empty files and their own kind. */
static void test_dumps_over_other_files(void **state)
{
    static const struct {
        const char *key, *path, *other;
    } dumps[] = {{"dump_gradients", "dumps/g", "dumps/t"}, {"trace", "dumps/t", "dumps/g"}};

    (void)state;
    assert_int_equal(bl_dir_create(runs_path("dumps")), BL_OK);
    for (size_t n = 0; n < 2; n++)
        for (size_t i = 0; i < BL_COUNT(dumps); i++) {
            golden_args args = {0};
            if (n == 0) runs_write(runs_path("%s", dumps[i].path), "");
            one_step(&args, runs_path("dumping"), "overwrite_output_dir");
            runs_set(&args, dumps[i].key, "%s", runs_path("%s", dumps[i].path));
            assert_int_equal(golden_train(&args), BL_OK);
            golden_args_free(&args);
        }
    runs_copy(runs_path("in/adapter/adapter_model.safetensors"), runs_path("dumps/adapter"));
    for (size_t i = 0; i < BL_COUNT(dumps); i++) {
        const char *const others[] = {dumps[i].other, "dumps/adapter", "in/run.yaml"};
        for (size_t k = 0; k < BL_COUNT(others); k++) {
            golden_args args = {0};
            one_step(&args, runs_path("dumping"), "overwrite_output_dir");
            runs_set(&args, dumps[i].key, "%s", runs_path("%s", others[k]));
            assert_refused(&args, dumps[i].key, "exists and is another kind of file");
            golden_args_free(&args);
        }
    }
}

/* Other files in output_dir and in its checkpoints stay, whatever the keys. */
static void test_files_of_others_stay(void **state)
{
    static const char *const theirs[] = {"notes.txt",
                                         "checkpoints/checkpoint-500/optimizer.pt",
                                         "checkpoints/llama-ft-final/x",
                                         "checkpoints/step-best/x",
                                         "checkpoints/step-best.tmp/x",
                                         "checkpoints/step-01.tmp/x"};
    static const char *const keys[] = {"resume_from_checkpoint", "overwrite_output_dir"};

    (void)state;
    for (size_t i = 0; i < BL_COUNT(theirs); i++) {
        const char *path = runs_path("shared/%s", theirs[i]);
        char *dir = strndup(path, (size_t)(strrchr(path, '/') - path));
        assert_int_equal(bl_dir_create(dir), BL_OK);
        free(dir);
        runs_write(path, "precious");
    }
    for (size_t k = 0; k < BL_COUNT(keys); k++) {
        start_with(runs_path("shared"), keys[k], BL_OK);
        assert_true(bl_file_exists(runs_path("shared/checkpoints/step-1/manifest.json")));
        for (size_t i = 0; i < BL_COUNT(theirs); i++) {
            char *text = runs_read(runs_path("shared/%s", theirs[i]), NULL);
            assert_string_equal(text, "precious");
            free(text);
        }
    }
}

/* Removes a run's checkpoints; with `adapter`, its last files too. */
static void forget(const char *name, bool adapter)
{
    static const char *const end[] = {"adapter_model.safetensors", "adapter_config.json",
                                      "README.md"};
    assert_int_equal(bl_tree_remove(runs_path("%s/checkpoints", name)), BL_OK);
    for (size_t i = 0; adapter && i < BL_COUNT(end); i++)
        assert_int_equal(unlink(runs_path("%s/%s", name, end[i])), 0);
}

/* resume_from_checkpoint true without a checkpoint: a run that was killed before its first one
 * starts over, a finished adapter is not deleted. */
static void test_resume_without_a_checkpoint(void **state)
{
    golden_args args = {0};

    (void)state;
    one_step(&args, runs_path("tidied"), "resume_from_checkpoint");
    assert_int_equal(golden_train(&args), BL_OK);
    runs_copy(runs_path("tidied"), runs_path("killed"));
    forget("tidied", false);
    assert_refused(&args, "tidied holds an adapter", "overwrite_output_dir: true");
    golden_args_free(&args);
    start_with(runs_path("tidied"), "overwrite_output_dir", BL_OK);

    forget("killed", true);
    start_with(runs_path("killed"), NULL, BL_EUSAGE);
    start_with(runs_path("killed"), "resume_from_checkpoint", BL_OK);
    assert_true(runs_are_same(runs_path("tidied"), runs_path("killed")));
}

/* Runs of an earlier version kept no list: their files are recognized by their contents. */
static void test_a_run_without_a_list(void **state)
{
    (void)state;
    start_with(runs_path("listed"), NULL, BL_OK);
    assert_int_equal(unlink(runs_path("listed/.ballast-files")), 0);
    assert_int_equal(bl_dir_create(runs_path("listed/checkpoints/step-9.tmp")), BL_OK);
    runs_copy(runs_path("listed"), runs_path("mixed"));
    start_with(runs_path("listed"), NULL, BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "holds a run already"));
    start_with(runs_path("listed"), "resume_from_checkpoint", BL_OK);
    assert_false(bl_file_exists(runs_path("listed/checkpoints/step-9.tmp")));
    assert_int_equal(unlink(runs_path("listed/.ballast-files")), 0);
    start_with(runs_path("listed"), "overwrite_output_dir", BL_OK);

    runs_write(runs_path("mixed/README.md"), "my model card");
    start_with(runs_path("mixed"), "overwrite_output_dir", BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "mixed/adapter_model.safetensors: exists"));
    runs_write(runs_path("mixed/checkpoints/step-1/optimizer.pt"), "x");
    forget("mixed", true);
    assert_int_equal(bl_dir_create(runs_path("mixed/checkpoints/step-1")), BL_OK);
    runs_write(runs_path("mixed/checkpoints/step-1/optimizer.pt"), "x");
    start_with(runs_path("mixed"), "overwrite_output_dir", BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "mixed/checkpoints/step-1: exists"));
}

/* A directory whose checkpoints are another run's: its save_total_limit would remove them. */
static void test_checkpoints_is_a_link(void **state)
{
    golden_args args = {0};

    (void)state;
    assert_int_equal(bl_dir_create(runs_path("linking")), BL_OK);
    assert_int_equal(bl_dir_create(runs_path("target/step-1")), BL_OK);
    assert_int_equal(symlink("../target", runs_path("linking/checkpoints")), 0);
    one_step(&args, runs_path("linking"), "overwrite_output_dir");
    assert_refused(&args, "output_dir: ", "linking/checkpoints: is a symbolic link");
    golden_args_free(&args);
}

/* A run that is continued from a copy of hard links (cp -al) leaves the original's log alone. */
static void test_a_log_with_two_names(void **state)
{
    char command[3 * GOLDEN_PATH_BYTES];
    golden_args args = {0};

    (void)state;
    start_with(runs_path("original"), NULL, BL_OK);
    char *before = runs_read(runs_path("original/metrics.jsonl"), NULL);
    snprintf(command, sizeof command, "cp -al '%s' '%s'", runs_path("original"),
             runs_path("linked-copy"));
    assert_int_equal(system(command), 0);
    assert_int_equal(unlink(runs_path("linked-copy/.ballast.lock")), 0);
    one_step(&args, runs_path("linked-copy"), "resume_from_checkpoint");
    runs_set(&args, "max_steps", "2");
    runs_set(&args, "lr_scheduler_type", "constant");
    runs_set(&args, "warmup_steps", "0");
    runs_set(&args, "allow_resume_mismatch", "true");
    assert_int_equal(golden_train(&args), BL_OK);
    golden_args_free(&args);
    assert_int_equal(runs_logged_steps(runs_path("linked-copy")), 2);
    char *after = runs_read(runs_path("original/metrics.jsonl"), NULL);
    assert_string_equal(before, after);
    free(before);
    free(after);
}

/* ---- offload_dir ---- */

/* Made for the disk tier, with its parents; the host tier has no use for it, says so and makes
 * none. */
static void test_offload_dir_is_made(void **state)
{
    static const char *const tiers[] = {"host", "disk"};
    const char *pages = runs_path("not/yet/there");

    (void)state;
    for (size_t i = 0; i < BL_COUNT(tiers); i++) {
        golden_args args = {0};
        runs_child child = {0};
        runs_standard(&args, runs_path("offloaded-%zu", i), 1);
        runs_set(&args, "offload_ratio", "1");
        runs_set(&args, "offload_tier", "%s", tiers[i]);
        runs_set(&args, "offload_dir", "%s", pages);
        runs_start(&child, "train", &args);
        assert_int_equal(runs_wait(&child, LIMIT_S), 0);
        assert_int_equal(bl_file_exists(pages), i == 1);
        char *log = runs_read(child.log, NULL);
        assert_int_equal(strstr(log, "not/yet/there is not used: offload_tier is host") != NULL,
                         i == 0);
        free(log);
        golden_args_free(&args);
    }
    assert_true(runs_are_same(runs_path("offloaded-0"), runs_path("offloaded-1")));
}

/* ---- an output_dir that changes hands ---- */

static void long_keys(golden_args *args, const char *output, int ranks)
{
    runs_standard(args, output, ranks);
    runs_set(args, "max_steps", "1000000");
    runs_set(args, "save_steps", "5");
    runs_set(args, "save_total_limit", "2");
    runs_set(args, "eval_strategy", "no");
}

static void start_long(runs_child *child, const char *output, int ranks)
{
    golden_args args = {0};
    long_keys(&args, output, ranks);
    runs_start(child, "train", &args);
    golden_args_free(&args);
    while (runs_logged_steps(output) < 7) {
        assert_true(runs_is_alive(child));
        runs_sleep_s(0.005);
    }
}

static void stop_in_place(runs_child *child)
{
    siginfo_t info;
    kill(child->pid, SIGSTOP);
    assert_int_equal(waitid(P_PID, (id_t)child->pid, &info, WSTOPPED), 0); /* all its threads */
}

static void test_removed_and_made_again(void **state)
{
    static const char *const removed[] = {"", "/.ballast.lock"}; /* the folder; the lock alone */
    const char *whole = runs_path("whole");
    golden_args args = {0};

    (void)state;
    runs_standard(&args, whole, 2);
    assert_int_equal(golden_train(&args), BL_OK);
    for (size_t i = 0; i < BL_COUNT(removed); i++) {
        const char *output = runs_path("taken-%zu", i);
        runs_child first = {0};
        start_long(&first, output, 2);
        stop_in_place(&first);
        assert_int_equal(bl_tree_remove(runs_path("taken-%zu%s", i, removed[i])), BL_OK);
        runs_child second = {0};
        runs_set(&args, "output_dir", "%s", output);
        runs_set(&args, "overwrite_output_dir", "true");
        runs_start(&second, "train", &args);
        assert_int_equal(runs_wait(&second, LIMIT_S), 0);
        kill(first.pid, SIGCONT);
        assert_int_equal(runs_wait(&first, LIMIT_S), EXIT_IO);
        runs_assert_error(&first, "was removed and made again while this process used it");
        assert_true(runs_are_same(whole, output));
        assert_false(bl_file_exists(runs_path("taken-%zu/checkpoints/step-10", i)));
    }
    golden_args_free(&args);
}

static bool is_there(const char *output, const char *names)
{
    char pattern[GOLDEN_PATH_BYTES];
    glob_t found;

    snprintf(pattern, sizeof pattern, "%s/checkpoints/%s", output, names);
    bool any = glob(pattern, GLOB_NOSORT, NULL, &found) == 0;
    globfree(&found);
    return any;
}

/* A removed directory is not made again, least of all by the run that lost it. Whenever it is
 * removed, also in the middle of a save, which reads its files back, the error names the
 * directory. */
static void test_removed(void **state)
{
    static const char *const moments[] = {"*", "*.tmp", "*.tmp/state-*", "*.tmp/adapter_*"};
    enum { N_TRIES = 12 };

    (void)state;
    for (int i = 0; i < N_TRIES; i++) {
        const char *output = runs_path("gone-%d", i), *moment = moments[i % 4];
        runs_child child = {0};
        start_long(&child, output, 1 + i / 4 % 2);
        while (!is_there(output, moment)) assert_true(runs_is_alive(&child));
        stop_in_place(&child);
        assert_int_equal(bl_tree_remove(output), BL_OK);
        kill(child.pid, SIGCONT);
        assert_int_equal(runs_wait(&child, LIMIT_S), EXIT_IO);
        runs_assert_error(&child, "was removed while this process used it");
        assert_false(bl_file_exists(output));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_files_that_are_read),
        cmocka_unit_test(test_inputs_among_checkpoints),
        cmocka_unit_test(test_configuration),
        cmocka_unit_test(test_what_cannot_be_written),
        cmocka_unit_test(test_trace_to_a_device),
        cmocka_unit_test(test_names_that_are_taken),
        cmocka_unit_test(test_dumps_over_other_files),
        cmocka_unit_test(test_files_of_others_stay),
        cmocka_unit_test(test_resume_without_a_checkpoint),
        cmocka_unit_test(test_a_run_without_a_list),
        cmocka_unit_test(test_checkpoints_is_a_link),
        cmocka_unit_test(test_a_log_with_two_names),
        cmocka_unit_test(test_offload_dir_is_made),
        cmocka_unit_test(test_removed_and_made_again),
        cmocka_unit_test(test_removed),
    };
    return cmocka_run_group_tests(tests, set_up, runs_tear_down);
}
