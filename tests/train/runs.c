/* SPDX-License-Identifier: Apache-2.0 */
/* runs.c -- small trainings in this process or as a child: started, stopped, killed, and compared
 * file by file. */
#include "runs.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/files.h"
#include "base/sizes.h"
#include "store/safetensors.h"

enum { PATH_SLOTS = 64 };

static char scratch[] = "/tmp/ballast-runs-XXXXXX";

int runs_set_up(void **state)
{
    (void)state;
    return mkdtemp(scratch) ? 0 : -1;
}

int runs_tear_down(void **state)
{
    (void)state;
    return bl_tree_remove(scratch) == BL_OK ? 0 : -1;
}

const char *runs_path(const char *format, ...)
{
    static char slots[PATH_SLOTS][GOLDEN_PATH_BYTES];
    static size_t turn;
    char *slot = slots[turn++ % PATH_SLOTS];
    int used = snprintf(slot, GOLDEN_PATH_BYTES, "%s/", scratch);
    va_list list;

    va_start(list, format);
    vsnprintf(slot + used, (size_t)(GOLDEN_PATH_BYTES - used), format, list);
    va_end(list);
    return slot;
}

bool runs_has_other_products(const char *products)
{
#if defined(__x86_64__) && !defined(__FMA__)
    return strcmp(products, "ballast fp32 fma") == 0;
#else
    (void)products;
    return false;
#endif
}

void runs_standard(golden_args *args, const char *output, int ranks)
{
    golden_args_add(args, "model_name_or_path", GOLDEN_DIR "/models/tiny-gqa");
    golden_args_add(args, "device", "cpu"); /* whatever this machine has */
    golden_args_add(args, "train_file", GOLDEN_DIR "/tokens/tiny-more.jsonl");
    golden_args_add(args, "validation_file", GOLDEN_DIR "/tokens/tiny-validation.jsonl");
    golden_args_add(args, "data_format", "tokens");
    golden_args_add(args, "max_seq_length", "64");
    golden_args_add(args, "output_dir", "%s", output);
    golden_args_add(args, "ranks", "%d", ranks);
    golden_args_add(args, "threads", "1");
    golden_args_add(args, "per_device_train_batch_size", "1");
    golden_args_add(args, "gradient_accumulation_steps", "2");
    golden_args_add(args, "lora_dropout", "0.1");
    golden_args_add(args, "learning_rate", "0.005");
    golden_args_add(args, "lr_scheduler_type", "cosine");
    golden_args_add(args, "warmup_steps", "2");
    golden_args_add(args, "max_steps", "8");
    golden_args_add(args, "save_steps", "1");
    golden_args_add(args, "eval_strategy", "steps");
    golden_args_add(args, "eval_steps", "3");
    golden_args_add(args, "logging_steps", "1000000");
}

void runs_set(golden_args *args, const char *key, const char *format, ...)
{
    char value[GOLDEN_PATH_BYTES];
    va_list list;

    va_start(list, format);
    vsnprintf(value, sizeof value, format, list);
    va_end(list);
    golden_args_add(args, key, "%s", value);
}

void runs_unset(golden_args *args, const char *key)
{
    for (int i = 0; i < args->n; i += 2) {
        if (strcmp(args->text[i] + 2, key) != 0) continue;
        free(args->text[i]);
        free(args->text[i + 1]);
        args->n -= 2;
        memmove(args->text + i, args->text + i + 2, (size_t)(args->n - i) * sizeof args->text[0]);
        return;
    }
}

/* ---- files ---- */

void runs_copy(const char *from, const char *to)
{
    char command[2 * GOLDEN_PATH_BYTES + 32];

    assert_int_equal(bl_tree_remove(to), BL_OK);
    snprintf(command, sizeof command, "cp -r '%s' '%s'", from, to);
    assert_int_equal(system(command), 0);
}

char *runs_read(const char *path, size_t *n_bytes)
{
    FILE *file = fopen(path, "rb");
    struct stat info;

    if (!file || fstat(fileno(file), &info) != 0) fail_msg("%s: %s", path, strerror(errno));
    size_t n = (size_t)info.st_size;
    char *bytes = malloc(n + 1);
    assert_non_null(bytes);
    n = fread(bytes, 1, n, file); /* a log may have grown since */
    bytes[n] = '\0';
    fclose(file);
    if (n_bytes) *n_bytes = n;
    return bytes;
}

void runs_write_bytes(const char *path, const void *bytes, size_t n_bytes)
{
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, n_bytes, file), n_bytes);
    assert_int_equal(fclose(file), 0);
}

void runs_write(const char *path, const char *text)
{
    runs_write_bytes(path, text, strlen(text));
}

void runs_flip_bit(const char *path, int64_t offset_bytes)
{
    struct stat info;
    char byte;
    int fd = open(path, O_RDWR | O_CLOEXEC);

    assert_true(fd >= 0 && fstat(fd, &info) == 0);
    if (offset_bytes < 0) offset_bytes += info.st_size;
    assert_int_equal(pread(fd, &byte, 1, offset_bytes), 1);
    byte ^= 1;
    assert_int_equal(pwrite(fd, &byte, 1, offset_bytes), 1);
    assert_int_equal(close(fd), 0);
}

void runs_flip_in_files(const char *dir, const char *ending, int64_t offset_bytes)
{
    DIR *folder = opendir(dir);
    const struct dirent *entry;
    int n = 0;

    assert_non_null(folder);
    while ((entry = readdir(folder)) != NULL) {
        char path[2 * GOLDEN_PATH_BYTES];
        size_t length = strlen(entry->d_name), n_ending = strlen(ending);
        if (length < n_ending || strcmp(entry->d_name + length - n_ending, ending) != 0) continue;
        snprintf(path, sizeof path, "%s/%s", dir, entry->d_name);
        runs_flip_bit(path, offset_bytes);
        n++;
    }
    closedir(folder);
    assert_true(n > 0);
}

const char *runs_overflowing_model(void)
{
    enum { HUGE_BF16 = 0x7f7f, MAX_ELEMENTS = 1 << 12 };
    static uint16_t values[MAX_ELEMENTS];
    const char *model = runs_path("overflowing"),
               *path = runs_path("overflowing/model.safetensors");
    bl_safetensors *file;

    runs_copy(GOLDEN_DIR "/models/tiny-gqa", model);
    assert_int_equal(bl_safetensors_open(path, &file), BL_OK);
    const bl_stored_tensor *t = bl_safetensors_find(file, "model.layers.0.self_attn.o_proj.weight");
    assert_true(t && t->dtype == BL_BF16 && t->n_bytes <= (int64_t)sizeof values);
    for (int i = 0; i < MAX_ELEMENTS; i++) values[i] = HUGE_BF16;
    FILE *out = fopen(path, "r+b");
    assert_true(out && fseek(out, (long)t->offset_bytes, SEEK_SET) == 0);
    assert_int_equal(fwrite(values, 1, (size_t)t->n_bytes, out), t->n_bytes);
    assert_int_equal(fclose(out), 0);
    bl_safetensors_close(file);
    return model;
}

/* ---- comparing ---- */

int64_t runs_logged_steps(const char *output)
{
    char path[GOLDEN_PATH_BYTES + 16];
    int64_t n = 0;

    snprintf(path, sizeof path, "%s/metrics.jsonl", output);
    if (!bl_file_exists(path)) return 0;
    char *text = runs_read(path, NULL);
    for (const char *at = text; (at = strstr(at, "\"loss\"")); at++) n++;
    free(text);
    return n;
}

static json_t *timeless_metrics(const char *output)
{
    static const char *const times[] = {
        "step_s", "tokens_per_s", "tflops",
        "mfu",    "eval_s",       "bf16_fallbacks"}; /* recomputation has more products */
    json_t *lines = golden_metrics(output), *line, *value;
    size_t i;
    const char *key;
    void *next;

    json_array_foreach(lines, i, line)
    {
        for (size_t k = 0; k < BL_COUNT(times); k++) json_object_del(line, times[k]);
        json_object_foreach_safe(
            line, next, key, value) /* what was moved until a step's end depends on time as well */
            if (strstr(key, "_stall_s") || strstr(key, "_bytes")) json_object_del(line, key);
    }
    return lines;
}

static bool same_metrics(const char *a, const char *b)
{
    json_t *left = timeless_metrics(a), *right = timeless_metrics(b);
    size_t n = json_array_size(left), i = 0;
    bool same = n == json_array_size(right);

    if (!same) printf("%s: %zu lines of metrics, %s: %zu\n", a, n, b, json_array_size(right));
    while (same && i < n && json_equal(json_array_get(left, i), json_array_get(right, i))) i++;
    if (same && i < n) printf("%s, %s: line %zu of the metrics differs\n", a, b, i + 1);
    json_decref(left);
    json_decref(right);
    return same && i == n;
}

static void assert_names_listed(const char *dir, const char *prefix, const char *list)
{
    char **names, line[GOLDEN_PATH_BYTES];
    size_t n_names;

    if (!bl_file_exists(dir)) return;
    assert_int_equal(bl_dir_list(dir, &names, &n_names), BL_OK);
    for (size_t i = 0; i < n_names; i++) {
        size_t length = strlen(names[i]);
        bool is_folder = strcmp(names[i], "checkpoints") == 0 || strcmp(names[i], "runs") == 0;
        if (names[i][0] == '.' || is_folder) continue;
        if (length > 4 && strcmp(names[i] + length - 4, ".tmp") == 0) length -= 4;
        if (length > 4 && strncmp(names[i] + length - 4, ".old", 4) == 0) length -= 4;
        snprintf(line, sizeof line, "\n%s%.*s\n", prefix, (int)length, names[i]);
        if (!strstr(list, line)) fail_msg("%s/%s is not listed in: %s", dir, names[i], list);
    }
    bl_names_free(names, n_names);
}

void runs_assert_listed(const char *output)
{
    char path[GOLDEN_PATH_BYTES];

    snprintf(path, sizeof path, "%s/.ballast-files", output);
    char *list = bl_file_exists(path) ? runs_read(path, NULL) : strdup("");
    assert_names_listed(output, "", list);
    snprintf(path, sizeof path, "%s/checkpoints", output);
    assert_names_listed(path, "checkpoints/", list);
    snprintf(path, sizeof path, "%s/runs", output);
    assert_names_listed(path, "runs/", list);
    free(list);
}

bool runs_are_same(const char *output_a, const char *output_b)
{
    size_t n_a, n_b;
    char path_a[GOLDEN_PATH_BYTES + 32], path_b[GOLDEN_PATH_BYTES + 32];

    snprintf(path_a, sizeof path_a, "%s/adapter_model.safetensors", output_a);
    snprintf(path_b, sizeof path_b, "%s/adapter_model.safetensors", output_b);
    char *a = runs_read(path_a, &n_a), *b = runs_read(path_b, &n_b);
    bool same = n_a == n_b && memcmp(a, b, n_a) == 0;
    if (!same) printf("%s and %s differ\n", path_a, path_b);
    free(a);
    free(b);
    return same_metrics(output_a, output_b) && same;
}

/* ---- the program ---- */

void runs_sleep_s(double seconds)
{
    struct timespec left = {(time_t)seconds, (long)(1e9 * (seconds - (double)(time_t)seconds))};
    while (nanosleep(&left, &left) != 0 && errno == EINTR) continue;
}

void runs_seed_random(void)
{
    const char *wanted = getenv("BALLAST_TEST_SEED");
    unsigned seed = wanted ? (unsigned)strtoul(wanted, NULL, 10) : (unsigned)time(NULL);

    printf("BALLAST_TEST_SEED=%u\n", seed);
    fflush(stdout);
    srandom(seed);
}

double runs_random_s(double most)
{
    return most * (double)random() / (double)RAND_MAX;
}

static void run_program(const runs_child *child, char **argv)
{
    int log = open(child->log, O_WRONLY | O_CREAT | O_TRUNC, 0666),
        null = open("/dev/null", O_RDWR);
    struct rlimit limit = {(rlim_t)child->max_file_bytes, (rlim_t)child->max_file_bytes};

    if (log < 0 || null < 0 || dup2(null, 0) < 0 || dup2(null, 1) < 0 || dup2(log, 2) < 0)
        _exit(126);
    if (child->max_file_bytes > 0 && setrlimit(RLIMIT_FSIZE, &limit) != 0) _exit(126);
    if (child->prepare && !child->prepare(child->arg)) _exit(126);
    setenv("TSAN_OPTIONS", "report_thread_leaks=0",
           0); /* a second request to stop leaves its threads */
    execv(argv[0], argv);
    _exit(126);
}

void runs_start(runs_child *child, const char *command, const golden_args *args)
{
    static int count;
    const char *other = getenv("BALLAST_PROGRAM"); /* its path on another machine */
    char *argv[GOLDEN_MAX_ARGS + 3] = {other ? (char *)other : (char[]){BALLAST_PROGRAM},
                                       (char *)command};

    for (int i = 0; i < args->n; i++) argv[2 + i] = args->text[i];
    snprintf(child->log, sizeof child->log, "%s", runs_path("stderr-%d", count++));
    fflush(NULL);
    child->pid = fork();
    assert_true(child->pid >= 0);
    if (child->pid == 0) run_program(child, argv);
}

bool runs_is_alive(const runs_child *child)
{
    siginfo_t info = {0};
    return waitid(P_PID, (id_t)child->pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
           info.si_pid == 0;
}

bool runs_stop(const runs_child *child)
{
    siginfo_t info = {0};
    int result;

    kill(child->pid, SIGSTOP);
    do result = waitid(P_PID, (id_t)child->pid, &info, WSTOPPED | WEXITED | WNOWAIT);
    while (result != 0 && errno == EINTR);
    assert_int_equal(result, 0);
    return info.si_code == CLD_STOPPED;
}

int runs_wait(runs_child *child, double limit_s)
{
    double deadline = bl_now_s() + limit_s;
    int status = 0;

    while (runs_is_alive(child) && bl_now_s() < deadline) runs_sleep_s(0.002);
    bool late = runs_is_alive(child);
    if (late) kill(child->pid, SIGKILL);
    assert_int_equal(waitpid(child->pid, &status, 0), child->pid);
    if (late)
        fail_msg("the program was still running after %g s: %s", limit_s,
                 runs_read(child->log, NULL));
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

static void assert_last_line(const runs_child *child, const char *start, const char *text)
{
    char *log = runs_read(child->log, NULL), *line = strstr(log, start),
         *end = line ? strchr(line, '\n') : NULL;
    bool at_line_start = line && (line == log || line[-1] == '\n');

    if (!at_line_start || !end || end[1] != '\0')
        fail_msg("stderr does not end in one line of '%s': %s", start, log);
    if (!strstr(line, text)) fail_msg("'%s' is not in: %s", text, line);
    free(log);
}

void runs_assert_error(const runs_child *child, const char *text)
{
    assert_last_line(child, "ballast: error: ", text);
}

void runs_assert_stopped(const runs_child *child, const char *text)
{
    assert_last_line(child, "ballast: stopped ", text);
}
