/* SPDX-License-Identifier: Apache-2.0 */
/* queue_runs.h -- a queue in a child process that runs the program, its jobs, and the same jobs
 * trained alone.
 *
 * Paths are in the scratch directory of runs.h. Errors end the test. */
#ifndef BALLAST_TESTS_TRAIN_QUEUE_RUNS_H
#define BALLAST_TESTS_TRAIN_QUEUE_RUNS_H

#include "runs.h"

enum { QUEUE_N_JOBS = 4, QUEUE_LIMIT_S = 120 };

#define QUEUE_PAIRS "tests/golden/preference/tokens/pairs.jsonl"

typedef enum queue_keys { QUEUE_BASE_KEYS, QUEUE_JOB_KEYS, QUEUE_ALL_KEYS } queue_keys;

typedef struct queue {
    const char *name;
    int ranks;
    const char *processes; /* rank_processes */
    char dir[GOLDEN_PATH_BYTES];
    runs_child child;
} queue;

/* Writes the arguments of this kind as a YAML file, by one rename. */
void queue_write_keys(const golden_args *args, const char *path, queue_keys keys);

/* The keys of one of the jobs, 0 <= job < QUEUE_N_JOBS; output_dir is NAME-PLACE-JOB. */
void queue_job_keys(golden_args *args, const char *name, const char *place, int job, int ranks);

/* Trains the job in a process of one run, to NAME-alone-JOB. */
void queue_train_alone(const char *name, int job, int ranks, const char *processes);

/* Waits for the child's end; prints its log unless it ends with this exit code. */
void queue_expect_code(runs_child *child, int code);

/* A path in the queue's directory, in a static buffer as from runs_path; whether it exists. */
const char *queue_path(const queue *q, const char *format, const char *name);
bool queue_has(const queue *q, const char *format, const char *name);

/* Starts the program; stops it by the file `stop`, and waits for its end with exit code 0. */
void queue_start(queue *q);
void queue_stop(queue *q);

/* Writes jobJOB.yaml into the directory; its output_dir is NAME-queued-JOB. */
void queue_put(queue *q, int job);

/* Wait until the file exists; until the run has logged `step` steps; until jobJOB.yaml is in the
 * directory `end` (done, failed, rejected). The program must be alive. */
void queue_await(queue *q, const char *path);
void queue_await_step(queue *q, const char *output, int64_t step);
void queue_await_end(queue *q, const char *end, int job);

/* Fails unless the queued job has the same bits as the job trained alone (runs_are_same). */
void queue_assert_same(const queue *q, int job);

/* Fails unless the file in the queue's directory is one line that contains the text. */
void queue_assert_line(const queue *q, const char *path, const char *text);

#endif
