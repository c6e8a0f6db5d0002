/* SPDX-License-Identifier: Apache-2.0 */
/* runs.h -- small trainings to be stopped, killed, resumed and compared, in this process or as a
 * child running the program.
 *
 * The standard run: two layers, LoRA with dropout on all projections, shuffled rows, validation; a
 * step takes about a millisecond. Errors end the test. */
#ifndef BALLAST_TESTS_TRAIN_RUNS_H
#define BALLAST_TESTS_TRAIN_RUNS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include <cmocka.h>

#include "golden.h"

/* cmocka group fixtures: make and remove a scratch folder. */
int runs_set_up(void **state);
int runs_tear_down(void **state);

/* A path in the scratch directory; valid until 64 further calls. The caller owns its files. */
const char *runs_path(const char *format, ...) BL_PRINTF(1, 2);

/* The keys of the standard run: 8 steps, a checkpoint after each. */
void runs_standard(golden_args *args, const char *output, int ranks);

/* Whether BALLAST_CPU_F32=portable changes the bits of `products` (bl_cpu_gemm_describe): where the
 * compiler's baseline has no fused multiply-adds, and the processor has. */
bool runs_has_other_products(const char *products);

/* Changes a key, or adds it; takes it out. */
void runs_set(golden_args *args, const char *key, const char *format, ...) BL_PRINTF(3, 4);
void runs_unset(golden_args *args, const char *key);

void runs_copy(const char *from, const char *to); /* a file or a folder; `to` is replaced */
char *runs_read(const char *path,
                size_t *n_bytes); /* with a NUL after it; the caller's; n_bytes may be NULL */
void runs_write(const char *path, const char *text);
void runs_write_bytes(const char *path, const void *bytes, size_t n_bytes);
void runs_flip_bit(const char *path, int64_t offset_bytes); /* negative: from the end */

/* A bit of each file of the folder whose name ends so; there must be one. */
void runs_flip_in_files(const char *dir, const char *ending, int64_t offset_bytes);

/* A copy of the standard run's model whose layer 0 overflows, in the scratch folder. */
const char *runs_overflowing_model(void);

/* Lines of output/metrics.jsonl that belong to steps; 0 without the file. */
int64_t runs_logged_steps(const char *output);

/* Fails unless .ballast-files lists each file of a run and each checkpoint in it, whole or not. */
void runs_assert_listed(const char *output);

/* Whether both runs have the same adapter, byte for byte, and the same metrics except the
 * times. */
bool runs_are_same(const char *output_a, const char *output_b);

/* ---- the program ---- */

typedef struct runs_child {
    pid_t pid;
    char log[GOLDEN_PATH_BYTES]; /* its stderr */
    int64_t max_file_bytes;      /* RLIMIT_FSIZE, set before runs_start; 0: none */
    /* In the child, before it becomes the program; false: exit code 126. */
    bool (*prepare)(const int *arg);
    const int *arg;
} runs_child;

/* Starts `ballast COMMAND args`; stderr goes to child->log, stdout nowhere. */
void runs_start(runs_child *child, const char *command, const golden_args *args);
bool runs_is_alive(const runs_child *child);
/* Stops it (SIGSTOP), all of its threads when this returns; false: it has ended. */
bool runs_stop(const runs_child *child);
/* The exit code, or minus the signal that ended it. A child that takes longer than limit_s is
 * killed, and the test fails. */
int runs_wait(runs_child *child, double limit_s);

/* Fails unless the child's stderr holds exactly one line "ballast: error: ...", the last one, and
 * it contains `text`. */
void runs_assert_error(const runs_child *child, const char *text);
/* The same of "ballast: stopped ...", a run that was asked to stop. */
void runs_assert_stopped(const runs_child *child, const char *text);

void runs_sleep_s(double seconds);

/* Seeds random() with BALLAST_TEST_SEED, or else the clock, and prints the seed: a failure can be
 * repeated. */
void runs_seed_random(void);

/* From 0 to `most` seconds. */
double runs_random_s(double most);

#endif
