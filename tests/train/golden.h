/* SPDX-License-Identifier: Apache-2.0 */
/* golden.h -- running a case of tests/golden/train (tools/golden/train/README.md) and comparing it
 * with its float64 reference. */
#ifndef BALLAST_TESTS_TRAIN_GOLDEN_H
#define BALLAST_TESTS_TRAIN_GOLDEN_H

#include <jansson.h>

#include "train/train.h"

#define GOLDEN_DIR "tests/golden/train"

enum { GOLDEN_MAX_ARGS = 160, GOLDEN_PATH_BYTES = 512 };

/* "--key value" pairs; owns their text. */
typedef struct golden_args {
    char *text[GOLDEN_MAX_ARGS];
    int n;
} golden_args;

/* Adds a key, or changes its value: the command line takes each once. */
void golden_args_add(golden_args *args, const char *key, const char *format, ...) BL_PRINTF(3, 4);
void golden_args_free(golden_args *args);

json_t *golden_load_case(const char *name); /* the caller's; asserts that it can be read */

/* The case's model folder; false (with a line on stdout) when the data it needs is not on this
 * machine. */
bool golden_model(const json_t *golden, char path[GOLDEN_PATH_BYTES]);

/* The case's keys as arguments, without model and output; topology's keys win over the config's.
 * NULL: none. */
void golden_config(const json_t *golden, const json_t *topology, golden_args *args);

/* Trains with these arguments; returns the status and prints its text when it is not BL_OK. */
bl_status golden_train(const golden_args *args);
/* The same with what offload/pager.h offers tests; NULL: nothing. */
bl_status golden_train_hooked(const golden_args *args, const struct bl_pager_hooks *hooks);

/* The loss on GOLDEN_VALIDATION on that device, with the base as stored; adapter NULL: the base
 * alone. */
#define GOLDEN_VALIDATION GOLDEN_DIR "/tokens/tiny-validation.jsonl"
double golden_evaluate(const char *model, const char *device, const char *adapter);

/* Lines of output_dir/metrics.jsonl as a JSON array; the caller's. */
json_t *golden_metrics(const char *output_dir);
/* The loss of the last evaluation in it; 0 without one. */
double golden_last_eval_loss(const char *output_dir);

/* Both return the largest deviation and print the worst offender when it is above `limit`: losses
 * of the first `n` steps, relative; per-tensor norms and projections of a safetensors file against
 * `expected` (tensor -> [norm, projection, projection]), relative to the tensor's norm or, when
 * scale > 0, to scale. */
double golden_compare_losses(const json_t *metrics, const json_t *steps, size_t n, double limit);
double golden_compare_tensors(const char *path, const json_t *expected, double scale, double limit);

#endif
