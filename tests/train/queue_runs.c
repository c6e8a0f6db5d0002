/* SPDX-License-Identifier: Apache-2.0 */
/* queue_runs.c -- see queue_runs.h. */
#include "queue_runs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/sizes.h"

/* Keys of the jobs besides the standard ones; the last one has evaluations in visits. */
static const char *const differences[QUEUE_N_JOBS][8][2] = {
    {{"max_steps", "60"}, {"lora_r", "8"}, {"save_steps", "10"}, {"eval_steps", "20"}},
    {{"max_steps", "25"},
     {"lora_r", "4"},
     {"gradient_accumulation_steps", "3"},
     {"per_device_train_batch_size", "2"},
     {"lora_target_modules", "[q_proj, down_proj]"},
     {"learning_rate", "0.01"}},
    {{"loss_type", "[sigmoid, sft]"},
     {"loss_weights", "[1, 0.3]"},
     {"data_format", "preference"},
     {"train_file", QUEUE_PAIRS},
     {"validation_file", QUEUE_PAIRS},
     {"max_steps", "30"},
     {"eval_steps", "10"}},
    {{"max_steps", "20"}, {"seed", "7"}, {"eval_steps", "5"}, {"eval_overlap", "true"}},
};

/* Keys of the base, which all runs have in common. */
static bool is_of_base(const char *key)
{
    static const char *const keys[] = {"model_name_or_path", "device", "ranks", "threads",
                                       "max_seq_length"};
    for (size_t i = 0; i < BL_COUNT(keys); i++)
        if (strcmp(key, keys[i]) == 0) return true;
    return false;
}

/* By one rename, so that the queue reads complete files. */
void queue_write_keys(const golden_args *args, const char *path, queue_keys keys)
{
    char temporary[GOLDEN_PATH_BYTES + 8];
    snprintf(temporary, sizeof temporary, "%s.part", path);
    FILE *file = fopen(temporary, "w");
    assert_non_null(file);
    for (int i = 0; i < args->n; i += 2)
        if (keys == QUEUE_ALL_KEYS || is_of_base(args->text[i] + 2) == (keys == QUEUE_BASE_KEYS))
            fprintf(file, "%s: %s\n", args->text[i] + 2, args->text[i + 1]);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(rename(temporary, path), 0);
}

void queue_job_keys(golden_args *args, const char *name, const char *place, int job, int ranks)
{
    runs_standard(args, runs_path("%s-%s-%d", name, place, job), ranks);
    for (size_t i = 0; i < BL_COUNT(differences[job]); i++)
        if (differences[job][i][0])
            runs_set(args, differences[job][i][0], "%s", differences[job][i][1]);
}

void queue_expect_code(runs_child *child, int code)
{
    int ended = runs_wait(child, QUEUE_LIMIT_S);
    if (ended != code) {
        char *log = runs_read(child->log, NULL);
        printf("%s", log);
        free(log);
    }
    assert_int_equal(ended, code);
}

void queue_train_alone(const char *name, int job, int ranks, const char *processes)
{
    golden_args keys = {0}, args = {0};
    runs_child child = {0};
    const char *file = runs_path("%s-alone-%d.yaml", name, job);

    queue_job_keys(&keys, name, "alone", job, ranks);
    queue_write_keys(&keys, file, QUEUE_ALL_KEYS);
    args.text[args.n++] = strdup(file);
    runs_set(&args, "rank_processes", "%s", processes);
    runs_start(&child, "train", &args);
    queue_expect_code(&child, 0);
    golden_args_free(&keys);
    golden_args_free(&args);
}

const char *queue_path(const queue *q, const char *format, const char *name)
{
    char below[320];
    snprintf(below, sizeof below, format, name);
    return runs_path("%s-queue/%s", q->name, below);
}

bool queue_has(const queue *q, const char *format, const char *name)
{
    return access(queue_path(q, format, name), F_OK) == 0;
}

void queue_start(queue *q)
{
    golden_args keys = {0}, args = {0};
    const char *base = runs_path("%s-base.yaml", q->name);

    snprintf(q->dir, sizeof q->dir, "%s", runs_path("%s-queue", q->name));
    runs_standard(&keys, runs_path("unused"), q->ranks);
    queue_write_keys(&keys, base, QUEUE_BASE_KEYS);
    args.text[args.n++] = strdup(base);
    runs_set(&args, "queue", "%s", q->dir);
    runs_set(&args, "rank_processes", "%s", q->processes);
    runs_start(&q->child, "train", &args);
    golden_args_free(&keys);
    golden_args_free(&args);
}

void queue_await(queue *q, const char *path)
{
    for (int i = 0; access(path, F_OK) != 0; i++) {
        if (!runs_is_alive(&q->child) || i > 60000) {
            char *log = runs_read(q->child.log, NULL);
            printf("%s\n%s", path, log);
            free(log);
        }
        assert_true(runs_is_alive(&q->child));
        assert_true(i <= 60000);
        runs_sleep_s(0.001);
    }
}

void queue_await_step(queue *q, const char *output, int64_t step)
{
    for (int i = 0; runs_logged_steps(output) < step; i++) {
        assert_true(runs_is_alive(&q->child));
        assert_true(i <= 60000);
        runs_sleep_s(0.001);
    }
}

void queue_put(queue *q, int job)
{
    golden_args args = {0};
    queue_job_keys(&args, q->name, "queued", job, q->ranks);
    queue_write_keys(&args, queue_path(q, "job%s.yaml", (char[]){(char)('0' + job), '\0'}),
                     QUEUE_JOB_KEYS);
    golden_args_free(&args);
}

void queue_await_end(queue *q, const char *end, int job)
{
    char name[64];
    snprintf(name, sizeof name, "%s/job%d", end, job);
    queue_await(q, queue_path(q, "%s.yaml", name));
}

void queue_stop(queue *q)
{
    runs_write(queue_path(q, "%s", "stop"), "");
    queue_expect_code(&q->child, 0);
    assert_false(queue_has(q, "%s", "stop"));
}

void queue_assert_same(const queue *q, int job)
{
    assert_true(runs_are_same(runs_path("%s-alone-%d", q->name, job),
                              runs_path("%s-queued-%d", q->name, job)));
}

void queue_assert_line(const queue *q, const char *path, const char *text)
{
    char *line = runs_read(queue_path(q, "%s", path), NULL);
    if (!strstr(line, text)) printf("%s: %s", path, line);
    assert_non_null(strstr(line, text));
    assert_ptr_equal(strchr(line, '\n'), line + strlen(line) - 1);
    free(line);
}
