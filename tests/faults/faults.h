/* SPDX-License-Identifier: Apache-2.0 */
/* faults.h -- small trainings with one fault in each, and the rules that must hold afterwards.
 *
 * A training runs in a child of fork; the test plants a fault there. Whatever the fault: the
 * child ends within 10 s, either with the result of an undisturbed run, bit for bit, or with a
 * failure of an allowed status whose text says something; the checkpoints that have their final
 * name verify; a final adapter is whole or absent; no page file is half written; and the same
 * command, undisturbed and with resume_from_checkpoint, then gives the undisturbed result. */
#ifndef BALLAST_TESTS_FAULTS_H
#define BALLAST_TESTS_FAULTS_H

#include "../train/runs.h"

/* The trainings: all read the same model; their other inputs and their outputs differ. */
typedef enum faults_job {
    FAULTS_FRESH,  /* 2 ranks, 2 steps, a checkpoint after each, validation */
    FAULTS_RESUME, /* the same from the checkpoint of step 1 */
    FAULTS_TEXT,   /* 2 ranks, 1 step, a tokenizer and rows of text, bad ones among them */
    /* as FRESH, with most of the base in page files and activations in host memory */
    FAULTS_OFFLOAD,
    FAULTS_JOBS
} faults_job;

const char *faults_job_name(faults_job job);

/* How the child ended; in memory that both processes see. */
typedef struct faults_outcome {
    int code; /* exit code of the status, or minus the signal */
    bool is_late;
    char text[BL_ERROR_TEXT_BYTES];
} faults_outcome;

/* cmocka group fixtures: the scratch folder and an undisturbed run of each job. */
int faults_set_up(void **state);
int faults_tear_down(void **state);

/* Called in the child before and after the training, and in the parent while it runs (the child
 * waits for it). Any may be NULL. */
typedef struct faults_hooks {
    void (*before)(void *arg);
    void (*after)(void *arg);
    void (*attach)(void *arg, pid_t child);
    void *arg;
} faults_hooks;

/* Runs the job; a child that takes longer than 10 s is killed. */
void faults_run(faults_job job, const faults_hooks *hooks, faults_outcome *out);

/* Whether the rules above hold for the job's last run; prints `what`, the fault, and the broken
 * rule. `codes` ends with 0: the exit codes allowed besides 0. */
bool faults_check(faults_job job, const char *what, const int *codes,
                  const faults_outcome *outcome);

/* Memory shared with children, zeroed; never freed. */
void *faults_shared(size_t n_bytes);

#endif
