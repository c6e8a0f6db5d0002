/* SPDX-License-Identifier: Apache-2.0 */
/* faults.c -- runs a small training in a forked child with a fault, and checks its exit code, error
 * line and files. */
#include "faults.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/files.h"
#include "base/sizes.h"
#include "store/checkpoint.h"

/* A training here takes a tenth of a second; with a sanitizer, strace and a loaded machine more
 * than ten. */
static const double LIMIT_S = 300;

static const char *const job_names[FAULTS_JOBS] = {"fresh", "resume", "text", "offload"};

typedef struct shared_run {
    faults_outcome outcome;
    atomic_int is_ready; /* the child waits for SIGUSR2 */
} shared_run;

static shared_run *run;

const char *faults_job_name(faults_job job)
{
    return job_names[job];
}

void *faults_shared(size_t n_bytes)
{
    void *memory = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(memory != MAP_FAILED);
    return memory;
}

/* ---- jobs ---- */

static const char *whole(faults_job job)
{
    return runs_path("whole-%s", job_names[job]);
}

static const char *output(faults_job job)
{
    return runs_path("output-%s", job_names[job]);
}

static void job_keys(faults_job job, const char *folder, golden_args *args)
{
    runs_standard(args, folder, 2);
    runs_set(args, "max_steps", "2");
    runs_set(args, "warmup_steps", "1");
    runs_set(args, "eval_steps", "2");
    runs_set(args, "resume_from_checkpoint", "true");
    if (job == FAULTS_OFFLOAD) {
        runs_set(args, "offload_ratio", "0.7");
        runs_set(args, "offload_tier", "disk");
        runs_set(args, "offload_dir", "%s", runs_path("pages"));
        runs_set(args, "io_engine", "pread"); /* strace does not see the other one's reads */
        runs_set(args, "activation_offload", "true");
        runs_set(args, "verify_base", "save");
    }
    if (job != FAULTS_TEXT) return;
    runs_set(args, "model_name_or_path", "%s", runs_path("model"));
    runs_set(args, "train_file", "%s", runs_path("rows.jsonl"));
    runs_set(args, "data_format", "text");
    runs_set(args, "skip_bad", "true");
    runs_set(args, "eval_strategy", "no");
    runs_set(args, "max_steps", "1");
    runs_set(args, "adapter_dtype", "bf16");
    runs_unset(args, "validation_file");
}

/* A model with a tokenizer, and texts of the few letters that it knows. */
static void make_text_job(void)
{
    static const char rows[] =
        "{\"text\":\"hello abc xy1 fi\"}\n{\"text\":1}\n{\"text\":\"abc abc hello hello x\"}\n\n"
        "{\"text\":\"1 2 3 abc fi xy\"}\n{\"text\":\"hello xy1 a b c hello\"}\n";

    runs_copy(GOLDEN_DIR "/models/tiny-gqa", runs_path("model"));
    runs_copy("tests/tokenizer/fixtures/nfd.json", runs_path("model/tokenizer.json"));
    runs_write(runs_path("model/tokenizer_config.json"),
               "{\"bos_token\":\"<|end|>\",\"eos_token\":\"<|end|>\"}");
    runs_write(runs_path("rows.jsonl"), rows);
}

/* The output of a whole run, as if it had been killed after its first checkpoint. */
static void make_resume_job(void)
{
    static const char *const later[] = {"checkpoints/step-2", "adapter_model.safetensors",
                                        "adapter_config.json", "README.md"};

    runs_copy(whole(FAULTS_RESUME), runs_path("resume-from"));
    for (size_t i = 0; i < BL_COUNT(later); i++)
        assert_int_equal(bl_tree_remove(runs_path("resume-from/%s", later[i])), BL_OK);
}

static void prepare(faults_job job)
{
    assert_int_equal(bl_tree_remove(output(job)), BL_OK);
    assert_int_equal(bl_tree_remove(runs_path("pages")), BL_OK);
    assert_int_equal(bl_dir_create(runs_path("pages")), BL_OK);
    if (job == FAULTS_RESUME) runs_copy(runs_path("resume-from"), output(job));
}

/* ---- the child ---- */

static volatile sig_atomic_t may_go;

static void go(int signal_number)
{
    (void)signal_number;
    may_go = 1;
}

static void wait_for_parent(void)
{
    struct sigaction action = {.sa_handler = go};
    sigset_t blocked, old;

    sigemptyset(&action.sa_mask);
    sigaction(SIGUSR2, &action, NULL);
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGUSR2);
    sigprocmask(SIG_BLOCK, &blocked, &old);
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
    atomic_store(&run->is_ready, 1);
    while (!may_go) sigsuspend(&old);
    sigprocmask(SIG_SETMASK, &old, NULL);
}

static _Noreturn void child_main(faults_job job, const char *folder, const faults_hooks *hooks)
{
    int log = open(runs_path("stderr"), O_WRONLY | O_CREAT | O_TRUNC, 0666);
    static const int crashes[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
    golden_args args = {0};

    if (log < 0 || dup2(log, STDOUT_FILENO) < 0 || dup2(log, STDERR_FILENO) < 0) _exit(126);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (size_t i = 0; i < BL_COUNT(crashes); i++)
        signal(crashes[i], SIG_DFL); /* cmocka's handlers end in exit() */
    job_keys(job, folder, &args);
    if (hooks && hooks->attach) wait_for_parent();
    if (hooks && hooks->before) hooks->before(hooks->arg);
    bl_status st = golden_train(&args);
    golden_args_free(&args);
    if (hooks && hooks->after) hooks->after(hooks->arg);
    snprintf(run->outcome.text, sizeof run->outcome.text, "%s", st == BL_OK ? "" : bl_error_text());
    _exit(bl_status_exit_code(st));
}

static void wait_for_end(pid_t pid, faults_outcome *out)
{
    runs_child child = {.pid = pid};
    double deadline = bl_now_s() + LIMIT_S;
    int status = 0;

    while (runs_is_alive(&child) && bl_now_s() < deadline) runs_sleep_s(0.001);
    bool is_late = runs_is_alive(&child);
    if (is_late) kill(pid, SIGKILL);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    *out = run->outcome;
    out->is_late = is_late;
    out->code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

/* Until the child waits for SIGUSR2. */
static void wait_until_ready(pid_t pid)
{
    runs_child child = {.pid = pid};
    faults_outcome out;

    while (!atomic_load(&run->is_ready) && runs_is_alive(&child)) runs_sleep_s(0.001);
    if (atomic_load(&run->is_ready)) return;
    wait_for_end(pid, &out);
    fail_msg("the child ended before its training began: exit %d", out.code);
}

static void run_child(faults_job job, const char *folder, const faults_hooks *hooks,
                      faults_outcome *out)
{
    memset(run, 0, sizeof *run);
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) child_main(job, folder, hooks);
    if (hooks && hooks->attach) {
        wait_until_ready(pid);
        hooks->attach(hooks->arg, pid);
        kill(pid, SIGUSR2);
    }
    wait_for_end(pid, out);
}

void faults_run(faults_job job, const faults_hooks *hooks, faults_outcome *out)
{
    prepare(job);
    run_child(job, output(job), hooks, out);
}

/* ---- the rules ---- */

/* Prints the failed expectation; false. */
static bool complain(faults_job job, const char *what, const faults_outcome *outcome,
                     const char *wrong)
{
    char *log =
        bl_file_exists(runs_path("stderr")) ? runs_read(runs_path("stderr"), NULL) : strdup("");
    print_error("job %s, %s: %s (exit %d, \"%s\")\n%s\n", job_names[job], what, wrong,
                outcome->code, outcome->text, log);
    free(log);
    return false;
}

static bool checkpoints_verify(faults_job job)
{
    const char *folder = runs_path("output-%s/checkpoints", job_names[job]);
    int64_t *steps = NULL;
    size_t n_steps = 0;
    bool good = true;

    assert_int_equal(bl_checkpoint_list(folder, &steps, &n_steps), BL_OK);
    for (size_t i = 0; i < n_steps; i++) {
        good = good && bl_checkpoint_verify(runs_path("output-%s/checkpoints/step-%lld",
                                                      job_names[job], (long long)steps[i]),
                                            NULL, NULL) == BL_OK;
    }
    free(steps);
    return good;
}

static bool final_file_is_whole(faults_job job, const char *name)
{
    size_t n_expected, n_found;
    const char *path = runs_path("output-%s/%s", job_names[job], name);

    if (!bl_file_exists(path)) return true;
    char *expected = runs_read(runs_path("whole-%s/%s", job_names[job], name), &n_expected),
         *found = runs_read(path, &n_found);
    bool same = n_expected == n_found && memcmp(expected, found, n_found) == 0;
    free(expected);
    free(found);
    return same;
}

static bool page_files_are_whole(void)
{
    char **names;
    size_t n_names;
    bool whole = true;

    assert_int_equal(bl_dir_list(runs_path("pages"), &names, &n_names), BL_OK);
    for (size_t i = 0; i < n_names; i++) whole = whole && !strstr(names[i], ".tmp-");
    bl_names_free(names, n_names);
    return whole;
}

bool faults_check(faults_job job, const char *what, const int *codes, const faults_outcome *outcome)
{
    faults_outcome again;

    if (outcome->is_late) return complain(job, what, outcome, "was killed: it did not end");
    if (outcome->code < 0) return complain(job, what, outcome, "was ended by a signal");
    if (getenv("FAULTS_SHOW"))
        printf("%s, %s: exit %d %s\n", job_names[job], what, outcome->code, outcome->text);
    while (*codes && *codes != outcome->code) codes++;
    if (outcome->code != 0 && !*codes)
        return complain(job, what, outcome, "ended with another exit code than it should");
    if (outcome->code != 0 && !outcome->text[0])
        return complain(job, what, outcome, "failed without a text");
    if (!checkpoints_verify(job)) return complain(job, what, outcome, "left a damaged checkpoint");
    if (!final_file_is_whole(job, "adapter_model.safetensors") ||
        !final_file_is_whole(job, "adapter_config.json"))
        return complain(job, what, outcome, "left a damaged adapter");
    if (!page_files_are_whole()) return complain(job, what, outcome, "left half a page file");
    if (outcome->code != 0) {
        run_child(job, output(job), NULL, &again);
        if (again.code != 0) return complain(job, what, &again, "cannot be resumed");
    }
    return runs_are_same(whole(job), output(job)) ||
           complain(job, what, outcome, "led to another result");
}

/* ---- fixtures ---- */

int faults_set_up(void **state)
{
    faults_outcome outcome;

    if (runs_set_up(state) != 0) return -1;
    run = faults_shared(sizeof *run);
    make_text_job();
    if (bl_dir_create(runs_path("pages")) != BL_OK) return -1;
    for (faults_job job = 0; job < FAULTS_JOBS; job++) {
        run_child(job, whole(job), NULL, &outcome);
        if (outcome.code != 0 && !complain(job, "undisturbed", &outcome, "failed")) return -1;
    }
    make_resume_job();
    return 0;
}

int faults_tear_down(void **state)
{
    return runs_tear_down(state);
}
