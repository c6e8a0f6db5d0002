/* SPDX-License-Identifier: Apache-2.0 */
/* ballast train and ballast eval: two commands over one table of options. */
#include <math.h>
#include <signal.h>
#include <unistd.h>

#include "base/log.h"
#include "base/sizes.h"
#include "cli/cli.h"
#include "train/train.h"

static void print_train_options(FILE *out, bool as_markdown)
{
    if (as_markdown)
        bl_train_config_print_markdown(out);
    else
        bl_train_config_print_help(BL_CONFIG_TRAIN, out);
}

/* A request to stop before or after training, and a second one during it: there is nothing to finish, all
 * files are whole. */
static void leave_at_once(int signal_number)
{
    if (signal_number == SIGINT) bl_log_note_echo();
    bl_log_error_at_exit("stopped at once on request; resume with --resume_from_checkpoint true");
    _exit(bl_status_exit_code(BL_ESTOPPED));
}

/* A job of several processes: mpirun ends them by a signal when one has failed, which has said why. */
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

static void take_requests_to_stop(void (*handler)(int))
{
    static const int signals[] = {SIGTERM, SIGINT, SIGUSR1, SIGXCPU, SIGHUP};
    struct sigaction leave = {.sa_handler = handler}, before;
    sigemptyset(&leave.sa_mask);
    for (size_t i = 0; i < BL_COUNT(signals); i++) {
        bool is_ignored = sigaction(signals[i], NULL, &before) == 0 && before.sa_handler == SIG_IGN;
        if (signals[i] != SIGHUP || !is_ignored)
            sigaction(signals[i], &leave, NULL); /* nohup has ignored it */
    }
}

static bl_status run_train(int argc, char *const *argv)
{
    bl_train_config *config = NULL;
    bl_launch *launch;

    take_requests_to_stop(leave_at_once);
    /* First: what is wrong with a configuration is told once, too. */
    BL_TRY(bl_launch_open(leave_with, &launch));
    if (bl_launch_size(launch) > 1) take_requests_to_stop(leave_silently);
    bl_status st = bl_train_config_load(BL_CONFIG_TRAIN, NULL, argc, argv, &config);
    if (st == BL_OK) st = bl_train_run(config, launch);
    bl_train_config_free(config);
    return bl_launch_close(launch, st);
}

const bl_command bl_command_train = {
    .name = "train",
    .arguments = "CONFIG.yaml [--key value ...]",
    .summary = "fine-tune: write a PEFT adapter",
    .details = "Trains LoRA weights over the frozen model and writes adapter, metrics.jsonl, "
               "checkpoints and "
               "a README.md\n"
               "into output_dir. SIGTERM, SIGINT, SIGUSR1, SIGHUP or SIGXCPU stop it after the "
               "step (exit 75); go on\n"
               "with --resume_from_checkpoint true. Under nohup SIGHUP does nothing.\n",
    .print_options = print_train_options,
    .is_job = true,
    .run = run_train,
};

static void print_eval_options(FILE *out, bool as_markdown)
{
    if (as_markdown)
        fputs("\nThe options of `ballast train` that concern model, data and execution.\n", out);
    else
        bl_train_config_print_help(BL_CONFIG_EVAL, out);
}

static void print_result(const bl_eval_result *result)
{
    char held[BL_BASE_FORMATS_TEXT_BYTES], stored[BL_BASE_FORMATS_TEXT_BYTES];

    bl_llama_base_formats_list_held(&result->base, held);
    bl_llama_base_formats_list_stored(&result->base, stored);
    printf("{\"eval_loss\":%.12g,\"perplexity\":%.12g,\"label_tokens\":%lld,\"rows\":%lld,\"base_"
           "format\":\"%s\","
           "\"checkpoint_format\":\"%s\"}\n",
           result->loss, exp(result->loss), (long long)result->label_tokens,
           (long long)result->rows, held, stored);
}

static bl_status run_eval(int argc, char *const *argv)
{
    bl_train_config *config = NULL;
    bl_launch *launch;
    bl_eval_result result;

    BL_TRY(bl_launch_open(leave_with, &launch));
    bool prints = bl_launch_rank(launch) == 0;
    bl_status st = bl_train_config_load(BL_CONFIG_EVAL, NULL, argc, argv, &config);
    if (st == BL_OK) st = bl_eval_run(config, launch, &result);
    bl_train_config_free(config);
    st = bl_launch_close(launch, st);
    if (st != BL_OK || !prints) return st;
    print_result(&result);
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
