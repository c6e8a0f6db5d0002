/* SPDX-License-Identifier: Apache-2.0 */
/* ballast train and ballast eval: two commands over one table of options. */
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "base/signals.h"
#include "cli/cli.h"
#include "comm/nccl/nccl.h"
#include "train/train.h"

static void print_train_options(FILE *out, bl_options_style style)
{
    bl_train_config_print(style == BL_OPTIONS_MARKDOWN ? BL_CONFIG_TRAIN | BL_CONFIG_EVAL
                                                       : BL_CONFIG_TRAIN,
                          style, out);
}

/* A request to stop before or after training, and a second one during it: there is nothing to
 * finish, all files are whole. */
static void leave_at_once(int signal_number)
{
    if (signal_number == SIGINT) bl_log_note_echo();
    bl_log_stopped_at_exit("stopped at once on request; resume with --resume_from_checkpoint true");
    _exit(bl_status_exit_code(BL_ESTOPPED));
}

/* A job of several processes: who started them ends them by a signal when one has failed, which has
 * said why; and a parent speaks for its children. */
static void leave_silently(int signal_number)
{
    (void)signal_number;
    _exit(bl_status_exit_code(BL_ESTOPPED));
}

/* Another process of the job has failed, and ranks of this one still run. */
static void leave_with(bl_status st)
{
    _exit(bl_status_exit_code(st));
}

/* The work of a process that is a rank, or has the ranks as threads. */
typedef bl_status (*job_fn)(const bl_train_configs *configs, bl_launch *launch, void *user);

static bl_status run_configs(const bl_train_configs *configs, bl_launch *launch,
                             const char *command, int argc, char *const *argv, job_fn run,
                             void *user)
{
    const bl_train_config *config = configs->run[0]; /* of execution all have the same keys */
    int n_started = bl_train_config_starts_ranks(config);

    BL_TRY(bl_launch_agree(launch, n_started));
    if (n_started > 0)
        return bl_cli_start_ranks(launch, n_started, command, argc, argv,
                                  strcmp(command, "train") == 0, config->step_deadline_s);
    return run(configs, launch, user);
}

static bl_status load_configs(bl_config_command which, int argc, char *const *argv,
                              bl_train_configs *out)
{
    if (which == BL_CONFIG_TRAIN) return bl_train_configs_load(argc, argv, out);
    *out = (bl_train_configs){.run = calloc(1, sizeof *out->run)};
    if (!out->run) return BL_FAIL(BL_ENOMEM, "a configuration");
    bl_status st = bl_train_config_load(which, NULL, argc, argv, &out->run[0]);
    out->n = st == BL_OK;
    return st;
}

/* One job: an error of its configuration is printed once, too, however many processes it has. The
 * configuration is read before there are threads. */
static bl_status run_job(bl_config_command which, const char *command, int argc, char *const *argv,
                         job_fn run, void *user)
{
    bl_train_configs configs;
    bl_launch *launch;
    bl_error error;

    bl_status st = load_configs(which, argc, argv, &configs);
    bl_error_save(&error, st);
    bl_launch_options options = {.leave = leave_with, .has_failed = st != BL_OK};
    if (st == BL_OK && which == BL_CONFIG_TRAIN)
        options.secret_dir =
            configs.run[0]->queue ? configs.run[0]->queue : configs.run[0]->output_dir;
    bl_status opened = bl_launch_open(&options, &launch);
    if (opened != BL_OK) {
        bl_train_configs_free(&configs);
        return st == BL_OK ? opened : bl_error_restore(&error);
    }
    if (bl_launch_size(launch) > 1 && which == BL_CONFIG_TRAIN)
        bl_stop_signals_handle(leave_silently);
    st = st == BL_OK ? run_configs(&configs, launch, command, argc, argv, run, user)
                     : bl_error_restore(&error);
    bl_train_configs_free(&configs);
    return bl_launch_close(launch, st);
}

static bl_status train(const bl_train_configs *configs, bl_launch *launch, void *user)
{
    (void)user;
    if (configs->run[0]->queue) return bl_train_run_queue(configs->run[0], launch, NULL);
    return bl_train_run_all((const bl_train_config *const *)configs->run, configs->n, launch, NULL);
}

static bl_status run_train(int argc, char *const *argv)
{
    bl_launch_info info;

    bl_report_signal_block(); /* while there are no threads */
    BL_TRY(bl_launch_begin(&info));
    if (info.n_processes > 1) bl_nccl_prepare_environment();
    bool is_one_of_several = info.kind == BL_LAUNCH_CHILD || info.n_processes > 1;
    bl_stop_signals_handle(is_one_of_several ? leave_silently : leave_at_once);
    return run_job(BL_CONFIG_TRAIN, "train", argc, argv, train, NULL);
}

const bl_command bl_command_train = {
    .name = "train",
    .arguments = "CONFIG.yaml [CONFIG.yaml ...] [--key value ...]",
    .summary = "fine-tune: write a PEFT adapter, several over one base, or a model",
    .details = "Trains LoRA weights over the frozen model, or every weight (finetuning_type full). "
               "Writes the\n"
               "adapter or the model, metrics.jsonl, report.svg, checkpoints and a README.md into "
               "output_dir.\n"
               "SIGTERM, SIGINT, SIGUSR1, SIGHUP or SIGXCPU stop it after the step (exit 75); "
               "resume with\n"
               "--resume_from_checkpoint true. Under nohup SIGHUP does nothing. SIGUSR2 writes "
               "report.svg while the\n"
               "run continues.\n"
               "Several files, or several values of a key in a file (learning_rate: [1e-4, 2e-4]), "
               "are several runs\n"
               "over one base; --queue DIR keeps the base loaded and trains the jobs that are "
               "moved into DIR\n"
               "(docs/several-runs.md).\n",
    .print_options = print_train_options,
    .is_job = true,
    .run = run_train,
};

static void print_eval_options(FILE *out, bl_options_style style)
{
    if (style == BL_OPTIONS_MARKDOWN)
        fputs("\nThe options of `ballast train` that concern model, data and execution.\n", out);
    else
        bl_train_config_print(BL_CONFIG_EVAL, style, out);
}

static void print_result(const bl_eval_result *result)
{
    char held[BL_BASE_FORMATS_TEXT_BYTES], stored[BL_BASE_FORMATS_TEXT_BYTES];

    bl_base_formats_list_held(&result->base, held);
    bl_base_formats_list_stored(&result->base, stored);
    printf("{\"eval_loss\":%.12g,\"perplexity\":%.12g,\"label_tokens\":%lld,\"rows\":%lld,\"base_"
           "format\":\"%s\","
           "\"checkpoint_format\":\"%s\"}\n",
           result->loss, exp(result->loss), (long long)result->label_tokens,
           (long long)result->rows, held, stored);
}

typedef struct evaluation {
    bl_eval_result result;
    bool is_here; /* rank 0 is this process's */
} evaluation;

static bl_status evaluate(const bl_train_configs *configs, bl_launch *launch, void *user)
{
    evaluation *e = user;
    e->is_here = bl_launch_rank(launch) == 0;
    return bl_eval_run(configs->run[0], launch, &e->result);
}

static bl_status run_eval(int argc, char *const *argv)
{
    bl_launch_info info;
    evaluation e = {.is_here = false};

    BL_TRY(bl_launch_begin(&info));
    if (info.n_processes > 1) bl_nccl_prepare_environment();
    BL_TRY(run_job(BL_CONFIG_EVAL, "eval", argc, argv, evaluate, &e));
    if (e.is_here) print_result(&e.result);
    return BL_OK;
}

const bl_command bl_command_eval = {
    .name = "eval",
    .arguments = "--model DIR [--adapter DIR] --validation_file FILE [--key value ...]",
    .summary = "print the loss and perplexity of a model, with or without an adapter",
    .details = "Prints one JSON line: eval_loss (mean over labels), perplexity, label_tokens, "
               "rows, base_format (of the\n"
               "frozen projections in memory) and checkpoint_format (in the checkpoint). "
               "docs/formats.md\n",
    .print_options = print_eval_options,
    .is_job = true,
    .run = run_eval,
};
