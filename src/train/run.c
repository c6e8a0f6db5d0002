/* SPDX-License-Identifier: Apache-2.0 */
/* run.c -- a job from its configuration to its end: opens model and data, starts a thread a rank, watches for signals, and says
 * what happened. */
#include "train/train.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/files.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/sizes.h"
#include "train/job.h"

/* ---- opening ---- */

static bl_status open_dataset(const bl_job *job, const char *path, bl_dataset **out)
{
    const bl_train_config *c = job->config;
    bl_dataset_options options = bl_dataset_default_options(path);
    bl_dataset_stats stats;

    options.format = c->data_format;
    options.max_seq_length = c->max_seq_length;
    options.overlong = c->overlong;
    options.train_on_inputs = c->train_on_inputs;
    options.skip_bad = c->skip_bad;
    options.vocab_size = (int32_t)job->host->config.vocab_size;
    options.chat_template = c->chat_template;
    options.template_date = c->template_date;
    options.no_tokenizer = job->tokenizer_error.status == BL_OK ? NULL : &job->tokenizer_error;
    options.n_threads = (int)(c->threads * job->n_ranks);
    BL_TRY(bl_dataset_open(&options, job->tokenizer, out));
    bl_dataset_get_stats(*out, &stats);
    bl_log_info("%s: %lld samples, %lld tokens, %lld of them labels", path, (long long)bl_dataset_count(*out),
                (long long)stats.n_tokens, (long long)stats.n_label_tokens);
    return BL_OK;
}

/* Whether a tokenizer is needed is known once a data set's format is; one that cannot be used stops nothing
 * before. */
static bl_status open_tokenizer(bl_job *job)
{
    const bl_train_config *c = job->config;
    char *path = NULL;
    bool present;

    BL_TRY(bl_path_join(c->model_name_or_path, "tokenizer.json", &path));
    bl_status st = bl_path_exists(path, &present);
    free(path);
    if (st != BL_OK) return st;
    if (!present && (c->data_format == BL_DATA_TOKENS || c->data_format == BL_DATA_AUTO)) return BL_OK;
    st = bl_tokenizer_load(c->model_name_or_path, &job->tokenizer);
    if (st == BL_EINPUT) {
        bl_error_save(&job->tokenizer_error, st);
        return BL_OK;
    }
    BL_TRY(st);
    int64_t tokens = bl_tokenizer_vocab_size(job->tokenizer);
    if (tokens > job->host->config.vocab_size && c->data_format != BL_DATA_TOKENS)
        bl_log_warning("the tokenizer has %lld tokens, the model's embedding %lld rows", (long long)tokens,
                       (long long)job->host->config.vocab_size);
    return BL_OK;
}

/* From here on the rows of both data sets are packed ones. A split is made before, of samples. */
static bl_status pack_data(bl_job *job)
{
    const bl_train_config *c = job->config;
    bl_dataset *rows;

    if (job->validation) {
        BL_TRY(bl_dataset_pack(job->validation, c->packing, c->max_seq_length, 0, job->n_validation_rows, &rows));
        if (job->validation != job->train) bl_dataset_close(job->validation);
        job->validation = rows;
        job->n_validation_rows = bl_dataset_count(rows);
    }
    if (job->train) {
        BL_TRY(bl_dataset_pack(job->train, c->packing, c->max_seq_length, job->first_train_row, job->n_train_rows, &rows));
        bl_dataset_close(job->train);
        job->train = rows;
        job->first_train_row = 0;
        job->n_train_rows = bl_dataset_count(rows);
    }
    return BL_OK;
}

static int64_t longest_row(const bl_dataset *rows, int64_t first, int64_t n)
{
    int64_t longest = 0;
    for (int64_t row = first; rows && row < first + n; row++) longest = bl_max_i64(longest, bl_dataset_n_tokens(rows, row));
    return longest;
}

/* What buffers are sized by: max_seq_length may be far above what the data have. */
static void measure_rows(bl_job *job)
{
    job->longest_train_row = longest_row(job->train, job->first_train_row, job->n_train_rows);
    job->longest_validation_row = longest_row(job->validation, 0, job->n_validation_rows);
    job->host->n_positions = bl_max_i64(1, bl_max_i64(job->longest_train_row, job->longest_validation_row));
}

static bl_status open_data(bl_job *job)
{
    const bl_train_config *c = job->config;

    BL_TRY(open_tokenizer(job));
    if (c->train_file && !job->evaluate_only) {
        BL_TRY(open_dataset(job, c->train_file, &job->train));
        job->n_train_rows = bl_dataset_count(job->train);
    }
    if (c->validation_file) {
        BL_TRY(open_dataset(job, c->validation_file, &job->validation));
        job->n_validation_rows = bl_dataset_count(job->validation);
    } else if (job->train && c->validation_split_percentage > 0) {
        BL_TRY(bl_dataset_split(job->n_train_rows, c->validation_split_percentage, &job->n_validation_rows));
        job->validation = job->train;
        job->first_train_row = job->n_validation_rows;
        job->n_train_rows -= job->n_validation_rows;
    }
    if (job->tokenizer_error.status != BL_OK)
        bl_log_warning("%s; rows of tokens need no tokenizer", job->tokenizer_error.text);
    if (c->packing != BL_PACKING_NONE) BL_TRY(pack_data(job));
    measure_rows(job);
    return BL_OK;
}

/* Which ranks there are, and which of them are this process's. */
static bl_status place_ranks(bl_job *job)
{
    const bl_train_config *c = job->config;
    int n_processes = bl_launch_size(job->launch);
    bl_launch_info info;

    job->n_ranks = job->n_here = job->n_on_host = (int)c->ranks;
    if (!job->launch) return BL_OK;
    if (c->ranks != n_processes)
        return BL_FAIL(BL_EUSAGE, "ranks: %lld, but %d processes were started, and each is a rank: leave the key out",
                       (long long)c->ranks, n_processes);
    job->n_here = 1;
    job->first_here = bl_launch_rank(job->launch);
    bl_launch_read(&info);
    job->first_on_host = info.local_rank;
    job->n_on_host = info.n_local;
    return bl_launch_create_comm(job->launch, c->step_deadline_s, &job->world);
}

static void print_base_formats(const bl_job *job)
{
    char text[BL_BASE_FORMATS_TEXT_BYTES];
    bl_llama_base_formats_describe(&job->base_formats, job->evaluate_only ? "memory" : "training", text);
    bl_log_info("base_format %s: %s", bl_base_format_name(job->config->base_format), text);
}

static bl_status open_job(bl_job *job)
{
    const bl_train_config *c = job->config;

    BL_TRY(bl_llama_host_open(c->model_name_or_path, c->base_format, c->max_seq_length, &job->host));
    job->host->io_engine = c->io_engine;
    job->base_formats = job->host->base_formats;
    if (c->max_seq_length > job->host->config.max_position_embeddings)
        bl_log_warning("max_seq_length %lld is beyond the model's %lld positions", (long long)c->max_seq_length,
                       (long long)job->host->config.max_position_embeddings);
    BL_TRY(open_data(job));
    BL_TRY(bl_job_choose_lora(job));
    print_base_formats(job);
    return BL_OK;
}

bl_status bl_job_check_lock(const bl_job *job)
{
    if (!job->lock) return BL_OK;
    bl_status st = bl_dir_lock_check(job->lock);
    return st == BL_OK ? BL_OK : bl_error_prefix(st, "output_dir");
}

void bl_job_abort_saving(bl_job *job)
{
    if (bl_job_check_lock(job) == BL_OK)
        bl_checkpoint_abort(job->saving);
    else
        bl_checkpoint_leave(job->saving);
    job->saving = NULL;
}

static void close_job(bl_job *job)
{
    bl_comm_destroy(job->world);
    bl_metrics_close(job->metrics);
    (void)bl_trace_close(job->trace);
    bl_job_abort_saving(job);
    if (job->validation != job->train) bl_dataset_close(job->validation);
    bl_dataset_close(job->train);
    bl_tokenizer_destroy(job->tokenizer);
    bl_llama_host_close(job->host);
    free(job->init_adapter);
    free(job->resume_dir);
    free(job->checkpoint_dir);
    bl_dir_lock_release(job->lock);
}

/* ---- running ---- */

/* Waits for the gathers of a pass that does not come: a rank whose own has failed must say so, or the others wait for it. */
static bl_status end_gathers(bl_rank *r, bl_status st)
{
    if (st == BL_OK || st == BL_ESTOPPED) BL_TRY(bl_stream_synchronize(r->gather));
    return st;
}

static void *rank_main(void *argument)
{
    bl_rank *r = argument;
    bl_job *job = r->job;

    r->status = bl_rank_setup(r);
    if (r->status == BL_OK && job->evaluate_only) {
        bl_eval_result result;
        r->status = bl_rank_evaluate(r, &result);
        if (r->status == BL_OK && r->index == 0) job->final_result = result;
    } else if (r->status == BL_OK) {
        r->status = bl_rank_train(r);
    }
    r->status = end_gathers(r, r->status);
    if (r->status != BL_OK) bl_error_save(&r->error, r->status);
    if (r->status != BL_OK && r->status != BL_ESTOPPED) bl_comm_abort(r->world, &r->error); /* to stop is agreed on */
    atomic_fetch_sub(&job->n_running, 1);
    return NULL;
}

/* Ends the ranks inside their step: those that compute at their next visit, those that wait for others at once. */
static void abandon(bl_job *job)
{
    bl_error error = {.status = BL_ESTOPPED};
    snprintf(error.text, sizeof error.text, "stopped inside a step; the newest checkpoint in %s stands", job->checkpoint_dir);
    atomic_store(&job->abandon, 1);
    bl_comm_abort(job->ranks[0].world, &error);
}

static const int stop_signals[] = {SIGTERM, SIGINT, SIGUSR1, SIGXCPU, SIGHUP};

/* A terminal that closes sends SIGHUP, and so does its shell; the limit of CPU time sends SIGXCPU each second. */
static bool repeats_itself(int signal_number)
{
    return signal_number == SIGXCPU || signal_number == SIGHUP;
}

/* A blocked signal waits to be taken, also one that the process ignores: nohup's SIGHUP stays ignored. */
static void list_signals(sigset_t *signals)
{
    struct sigaction action;

    sigemptyset(signals);
    for (size_t i = 0; i < BL_COUNT(stop_signals); i++) {
        int number = stop_signals[i];
        bool is_ignored = sigaction(number, NULL, &action) == 0 && action.sa_handler == SIG_IGN;
        if (number != SIGHUP || !is_ignored) sigaddset(signals, number);
    }
}

/* Those that came again, and would end the process before it has said why it ends. */
static void swallow_repeated(const sigset_t *signals)
{
    const struct timespec now = {0};
    sigset_t repeated;

    sigemptyset(&repeated);
    for (size_t i = 0; i < BL_COUNT(stop_signals); i++)
        if (repeats_itself(stop_signals[i]) && sigismember(signals, stop_signals[i])) sigaddset(&repeated, stop_signals[i]);
    while (sigtimedwait(&repeated, NULL, &now) > 0) continue;
}

/* The second signal is the process's own again: its handler or, without one, its end. No file on disk minds. */
static void give_back(const sigset_t *signals, int signal_number)
{
    pthread_sigmask(SIG_UNBLOCK, signals, NULL);
    raise(signal_number);
    pthread_sigmask(SIG_BLOCK, signals, NULL);
}

/* Waits for the ranks. The first signal asks them to stop after their step, and inside it once grace_s is over; a second one goes
 * to the process. Returns the largest RssAnon seen. */
static int64_t watch(bl_job *job, const sigset_t *signals)
{
    const struct timespec tick = {0, 20 * 1000 * 1000};
    double asked = 0.0;
    int64_t peak = 0;

    while (atomic_load(&job->n_running) > 0) {
        if (bl_launch_should_leave(job->launch)) bl_launch_leave(job->launch);
        int signal_number = sigtimedwait(signals, NULL, &tick);
        peak = bl_max_i64(peak, bl_memory_anonymous_bytes());
        if (signal_number > 0 && !(asked > 0.0 && repeats_itself(signal_number))) {
            if (asked > 0.0) give_back(signals, signal_number);
            asked = bl_now_s();
            if (signal_number == SIGINT) bl_log_note_echo();
            bl_log_info("%s: stopping after this step (at most %.0f s); once more to leave at once", strsignal(signal_number),
                        job->config->grace_s);
            atomic_store(&job->stop, 1);
        }
        if (asked > 0.0 && bl_now_s() - asked > job->config->grace_s && !atomic_load(&job->abandon)) abandon(job);
    }
    return peak;
}

static bl_status create_comms(bl_job *job, bl_comm **comms)
{
    if (!job->launch) return bl_comm_create_local(job->n_ranks, job->config->step_deadline_s, comms);
    comms[0] = job->world;
    job->world = NULL;
    return BL_OK;
}

static bl_status start_ranks(bl_job *job)
{
    bl_comm **comms = calloc((size_t)job->n_here, sizeof *comms);
    job->ranks = calloc((size_t)job->n_here, sizeof *job->ranks);
    bl_status st = comms && job->ranks ? BL_OK : BL_FAIL(BL_ENOMEM, "%d ranks", job->n_here);

    if (st == BL_OK) st = create_comms(job, comms);
    for (int i = 0; st == BL_OK && i < job->n_here; i++) {
        job->ranks[i].job = job;
        job->ranks[i].index = job->first_here + i;
        job->ranks[i].world = comms[i];
    }
    for (int i = 0; st == BL_OK && i < job->n_here; i++) {
        atomic_fetch_add(&job->n_running, 1);
        job->ranks[i].started = pthread_create(&job->ranks[i].thread, NULL, rank_main, &job->ranks[i]) == 0;
        if (job->ranks[i].started) continue;
        atomic_fetch_sub(&job->n_running, 1);
        st = BL_FAIL(BL_ELIMIT, "the thread of rank %d could not be started", job->first_here + i);
        bl_error error;
        bl_error_save(&error, st);
        bl_comm_abort(comms[0], &error);
    }
    free(comms);
    return st;
}

/* How much a rank's failure says: cancelled ranks only heard of it; of those that see a loss that is not finite, some know why. */
static int failure_weight(const bl_rank *r)
{
    return r->status == BL_OK ? 0 : r->status == BL_ECANCELLED ? 1 : r->is_at_fault ? 3 : 2;
}

/* The error that started it. */
static bl_status first_failure(const bl_job *job)
{
    const bl_rank *best = &job->ranks[0];
    for (int i = 1; i < job->n_here; i++)
        if (failure_weight(&job->ranks[i]) > failure_weight(best)) best = &job->ranks[i];
    if (best->status == BL_OK) return BL_OK;
    bl_status st = bl_error_restore(&best->error);
    if (job->n_here > 1 && st != BL_ESTOPPED && st != BL_EINPUT) bl_error_prefix(st, "rank %d", best->index);
    return st;
}

/* After the grace was over: the state of the last completed step, if all ranks agree which one that is. Processes cannot agree on
 * anything any more: their communicator went with the step. */
static bl_status save_abandoned(bl_job *job)
{
    int64_t step = job->ranks[0].steps_done;
    bool agreed = !job->launch;

    for (int i = 0; agreed && i < job->n_ranks; i++)
        agreed = job->ranks[i].state && job->ranks[i].pass && job->ranks[i].steps_done == step;
    if (!agreed)
        return BL_FAIL(BL_ESTOPPED,
                       "stopped on request inside a step, which is lost; the newest checkpoint in %s stands: resume with "
                       "--resume_from_checkpoint true",
                       job->checkpoint_dir);
    for (int i = 0; i < job->n_ranks; i++) {
        const bl_rank *r = &job->ranks[i];
        (void)bl_stream_synchronize(r->compute); /* its error is the abandoned step's; AdamW of `step` ran before it */
    }
    bl_job_abort_saving(job); /* one that was under way when the grace ended */
    if (job->ranks[0].saved_step != step) BL_TRY(bl_job_save_all(job, step));
    return BL_FAIL(BL_ESTOPPED, "stopped on request inside step %lld; saved after step %lld: resume with --resume_from_checkpoint true",
                   (long long)step + 1, (long long)step);
}

static bl_status run_ranks(bl_job *job, int64_t *peak_bytes)
{
    sigset_t signals, old;

    sigemptyset(&signals);
    if (!job->evaluate_only) list_signals(&signals);
    pthread_sigmask(SIG_BLOCK, &signals, &old); /* before the threads, which inherit it */
    bl_status st = start_ranks(job);
    *peak_bytes = job->ranks ? watch(job, &signals) : 0;
    for (int i = 0; job->ranks && i < job->n_here; i++)
        if (job->ranks[i].started) pthread_join(job->ranks[i].thread, NULL);
    if (st == BL_OK) st = first_failure(job);
    if (st != BL_OK && atomic_load(&job->abandon) && (st == BL_ESTOPPED || st == BL_ECANCELLED)) st = save_abandoned(job);
    bl_error error; /* freeing meets the streams' own errors */
    bl_error_save(&error, st);
    for (int i = 0; job->ranks && i < job->n_here; i++) bl_rank_free(&job->ranks[i]);
    free(job->ranks);
    job->ranks = NULL;
    swallow_repeated(&signals);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return st == BL_OK ? BL_OK : bl_error_restore(&error);
}

/* ---- the two jobs ---- */

static void print_model(const bl_job *job)
{
    const bl_train_config *c = job->config;
    char products[BL_CPU_GEMM_TEXT_BYTES];

    bl_cpu_gemm_describe(products);
    bl_log_info("products: %s", products);
    bl_log_info("model: %.1f M parameters, %lld layers; LoRA r %lld, %.2f M trainable; %d ranks x %lld threads, shards of %lld",
                (double)bl_llama_config_n_params(&job->host->config) * 1e-6, (long long)job->host->config.n_layers,
                (long long)job->lora.options.r, (double)(job->lora.n_floats * job->host->config.n_layers) * 1e-6, job->n_ranks,
                (long long)c->threads, (long long)c->shard_size);
}

static bl_status prepare_output(bl_job *job)
{
    const bl_train_config *c = job->config;
    char *path = NULL;
    bl_status st = BL_OK;

    BL_TRY(bl_job_prepare_resume(job));
    job->total_steps = bl_train_total_steps(c, job->n_train_rows);
    if (job->first_here > 0) return BL_OK;
    BL_TRY(bl_path_join(c->output_dir, "config.resolved.yaml", &path));
    st = bl_train_config_write_resolved(c, path);
    free(path);
    if (st != BL_OK) return st;
    BL_TRY(bl_path_join(c->output_dir, "metrics.jsonl", &path));
    st = bl_metrics_open(path, job->metrics_keep_bytes, c->logging_steps, &job->metrics);
    free(path);
    return st;
}

/* Processes of one job write a file each. */
bl_status bl_job_trace_path(const bl_job *job, char **path)
{
    if (!job->launch) return bl_text_format(path, "%s", job->config->trace);
    return bl_text_format(path, "%s.rank%d", job->config->trace, job->first_here);
}

static bl_status open_trace(bl_job *job)
{
    char *path = NULL;

    if (!job->config->trace) return BL_OK;
    BL_TRY(bl_job_trace_path(job, &path));
    bl_status st = bl_trace_open(path, job->first_here, job->n_here, &job->trace);
    free(path);
    return st;
}

static bl_status close_trace(bl_job *job)
{
    bl_trace *trace = job->trace;
    job->trace = NULL;
    return bl_trace_close(trace);
}

/* Evaluates the adapter that was written, on the formats that job->host now has, if that takes no more than training has taken. */
static bl_status evaluate_written(bl_job *job, const bl_memory_ledger *training, bl_eval_result *out)
{
    bl_train_config config = *job->config;
    config.base_format = BL_BASE_STORED;
    config.init_adapter = config.output_dir;
    config.offload_ratio = 0.0; /* a measurement writes no page files */
    config.offload_tier = BL_OFFLOAD_HOST;
    config.offload_dir = NULL;
    bl_job stored = {.config = &config, .host = job->host, .validation = job->validation, .evaluate_only = true,
                     .n_validation_rows = job->n_validation_rows,
                     .longest_validation_row = job->longest_validation_row, .n_ranks = job->n_ranks, .n_here = job->n_here,
                     .n_on_host = job->n_on_host};
    bl_memory_ledger memory;
    int64_t peak_bytes;
    bl_status st = BL_OK;

    BL_TRY_GOTO(st, done, bl_job_choose_lora(&stored));
    BL_TRY_GOTO(st, done, bl_job_choose_placement(&stored));
    BL_TRY_GOTO(st, done, bl_job_predict_memory(&stored, &memory));
    if (memory.total > training->total) {
        bl_log_info("the adapter was not evaluated on the base as stored, which needs more memory than training did; "
                    "ballast eval --base_format stored does it");
        goto done;
    }
    bl_log_info("evaluating the adapter on the base as stored, too (eval_stored_base)");
    BL_TRY_GOTO(st, done, run_ranks(&stored, &peak_bytes));
    *out = stored.final_result;
    bl_log_info("validation loss with the adapter: %.4f as trained, %.4f on the base as stored", job->final_result.loss, out->loss);
done:
    free(stored.init_adapter);
    return st;
}

/* What PEFT and vLLM would get from the checkpoint itself, for the README. Processes have spent their communicator. */
static bl_status evaluate_stored_base(bl_job *job, const bl_memory_ledger *training)
{
    if (!job->config->eval_stored_base || !job->validation || job->launch || !bl_llama_base_is_quantized(&job->base_formats))
        return BL_OK;
    bl_status st = bl_llama_host_set_format(job->host, BL_BASE_STORED);
    if (st == BL_OK) st = evaluate_written(job, training, &job->stored_result);
    if (st == BL_OK && job->stored_result.rows > 0) st = bl_job_write_readme(job, job->config->output_dir);
    return st == BL_OK ? BL_OK : bl_error_prefix(st, "the adapter is written; eval_stored_base");
}

static bl_status train_locked(bl_job *job)
{
    bl_memory_ledger memory;
    int64_t peak_bytes = 0;

    BL_TRY(open_job(job));
    BL_TRY(prepare_output(job));
    BL_TRY(open_trace(job));
    BL_TRY(bl_job_choose_placement(job));
    BL_TRY(bl_job_choose_saving(job));
    BL_TRY(bl_job_predict_memory(job, &memory));
    print_model(job);
    bl_job_print_memory(job, &memory);
    BL_TRY(bl_job_check_memory(job, &memory));
    bl_status st = run_ranks(job, &peak_bytes);
    bl_log_info("memory measured: peak %.1f MiB anonymous, predicted %.1f MiB", (double)peak_bytes / (1 << 20),
                (double)memory.total / (1 << 20));
    if (st == BL_OK) st = close_trace(job);
    if (st != BL_OK || job->first_here > 0) return st;
    BL_TRY(bl_job_check_lock(job));
    BL_TRY(bl_job_write_readme(job, job->config->output_dir));
    bl_log_info("adapter written to %s", job->config->output_dir);
    return evaluate_stored_base(job, &memory);
}

/* output_dir is the business of rank 0's process, which holds its lock for all. */
static bl_status take_output_dir(bl_job *job)
{
    if (job->first_here > 0) return BL_OK;
    bl_status st = bl_dir_create(job->config->output_dir);
    if (st != BL_OK) return bl_error_prefix(st == BL_EINPUT ? BL_EUSAGE : st, "output_dir");
    return bl_dir_lock_acquire(job->config->output_dir, &job->lock);
}

bl_status bl_train_run(const bl_train_config *config, bl_launch *launch)
{
    bl_job job = {.config = config, .launch = launch};

    bl_status st = bl_cpu_gemm_prepare();
    if (st == BL_OK) st = place_ranks(&job);
    if (st == BL_OK) st = bl_job_check_paths(&job);
    if (st == BL_OK) st = take_output_dir(&job);
    if (st == BL_OK) st = train_locked(&job);
    bl_error error;
    bl_error_save(&error, st);
    close_job(&job);
    return st == BL_OK ? BL_OK : bl_error_restore(&error);
}

static bl_status plan_evaluation(bl_job *job)
{
    bl_memory_ledger memory;

    BL_TRY(bl_job_choose_placement(job));
    BL_TRY(bl_job_predict_memory(job, &memory));
    bl_job_print_memory(job, &memory);
    return bl_job_check_memory(job, &memory);
}

bl_status bl_eval_run(const bl_train_config *config, bl_launch *launch, bl_eval_result *out)
{
    bl_job job = {.config = config, .launch = launch, .evaluate_only = true};
    int64_t peak_bytes;

    bl_status st = bl_cpu_gemm_prepare();
    if (st == BL_OK) st = place_ranks(&job);
    if (st == BL_OK) st = open_job(&job);
    if (st == BL_OK && !job.validation) st = BL_FAIL(BL_EUSAGE, "eval needs validation_file");
    if (st == BL_OK) st = bl_job_identify(&job);
    if (st == BL_OK && job.launch) st = bl_job_check_processes(&job);
    if (st == BL_OK) st = plan_evaluation(&job);
    if (st == BL_OK) st = run_ranks(&job, &peak_bytes);
    *out = job.final_result;
    out->base = job.base_formats;
    bl_error error;
    bl_error_save(&error, st);
    close_job(&job);
    return st == BL_OK ? BL_OK : bl_error_restore(&error);
}
