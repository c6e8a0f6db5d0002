/* SPDX-License-Identifier: Apache-2.0 */
/* stop.c -- the ranks of a training while they run, and the signals that end it: at once while
 * ranks are set up, then after the step, or inside it once the grace is over. A save is not ended
 * by that: ending the process inside a save leaves the previous checkpoint, and only the end of the
 * save keeps the step. And the signal that asks for a report. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/signals.h"
#include "base/sizes.h"
#include "train/rank/ranks.h"
#include "train/run/queue.h"

/* Ranks that were loading remove their page files; a hung disk is not waited for. */
static const double CLEAN_UP_S = 2.0;

/* The second signal is the process's own again: its handler or, without one, its end. No file on
 * disk minds. */
static void give_back(const sigset_t *signals, int signal_number)
{
    pthread_sigmask(SIG_UNBLOCK, signals, NULL);
    raise(signal_number);
    pthread_sigmask(SIG_BLOCK, signals, NULL);
}

/* The ranks of this process, and when they were asked to stop. */
typedef struct supervisor {
    bl_train_run_state *runs;
    int n_runs;
    bl_queue *queue;      /* NULL: all runs exist from the start */
    bl_ranks ranks;       /* the lead's */
    bl_rank *borrowed;    /* [n_runs - 1][n_here]: those of the other runs */
    bl_trainer *trainers; /* [n_runs][n_here] */
    bl_control control;
    bool is_child;         /* of a parent, which has the second request for itself */
    double asked_s;        /* BL_NEVER_S: not yet */
    bl_peak_memory of_job; /* by the rank of a job of several processes; host 0: not known */
} supervisor;

static int count_trainers(const supervisor *s)
{
    return s->n_runs * s->ranks.n_here;
}

/* Whether the run has joined; without a queue all have. */
static bool is_there(const supervisor *s, int run)
{
    return !s->queue || (run > 0 && atomic_load(&s->queue->slot[run].state) == BL_SLOT_LIVE);
}

/* A rank here is still being set up. Then no rank of the job has made a step or begun a save, which
 * need all of them: there is nothing to lose. */
static bool is_before_steps(const supervisor *s)
{
    bool is_before = false;
    int n = s->queue ? s->ranks.n_here : count_trainers(s); /* with a queue only the base */
    for (int i = 0; i < n; i++) is_before |= !atomic_load(&s->trainers[i].is_set_up);
    return is_before;
}

static bl_status say_before_steps(void)
{
    return BL_FAIL(BL_ESTOPPED, "stopped on request before this run's first step: nothing is lost; "
                                "resume with --resume_from_checkpoint true");
}

/* True if the ranks are inside a save: one rank of this process is enough. */
static bool is_saving(const supervisor *s)
{
    bool saves = false;
    for (int i = 0; i < count_trainers(s); i++) saves |= atomic_load(&s->trainers[i].is_saving);
    return saves;
}

/* Ends the ranks inside their step: those that compute at their next visit, those that wait for
 * others at once; and those that load at their next piece. */
static void abandon(supervisor *s)
{
    bl_error error = {.status = BL_ESTOPPED};
    if (is_before_steps(s))
        bl_error_save(&error, say_before_steps());
    else
        snprintf(error.text, sizeof error.text,
                 "stopped inside a step; the newest checkpoint in %s is kept",
                 s->queue ? "each output_dir" : s->runs[0].training.checkpoint_dir);
    atomic_store(&s->control.abandon, 1);
    bl_comm_abort(s->ranks.rank[0].host_world, &error);
}

/* Drawn from the logs: the ranks run on. */
static void report_now(const supervisor *s)
{
    bool is_written;

    for (int run = 0; run < s->n_runs; run++) {
        if (!is_there(s, run)) continue;
        const bl_training *training = &s->runs[run].training;
        const bl_output *output = &s->runs[run].output;
        if (!output->metrics) continue; /* rank 0's process has it */
        if (bl_training_write_report(training, output, &is_written) != BL_OK)
            bl_log_warning("no report: %s", bl_error_text());
        else if (is_written)
            bl_log_info("report written to %s/" BL_OUTPUT_REPORT, training->config->output_dir);
        else
            bl_log_info("no report yet: no step has been made");
    }
}

/* The first signal asks the ranks to stop after their step, and inside it once grace_s is over, but
 * not inside a save; before the first step, at once. A second one, later than
 * BL_LAUNCH_ONE_REQUEST_S, goes to the process. A child has one request twice where it went to all
 * processes at once: from the sender, and passed on by the parent. */
static void take_signal(supervisor *s, const sigset_t *signals, int signal_number)
{
    double grace_s = s->runs[0].training.config->grace_s;
    bool is_repeated =
        s->asked_s > BL_NEVER_S && (s->is_child || bl_stop_signal_repeats(signal_number) ||
                                    bl_now_s() - s->asked_s < BL_LAUNCH_ONE_REQUEST_S);

    if (signal_number > 0 && !is_repeated) {
        if (s->asked_s > BL_NEVER_S) give_back(signals, signal_number);
        s->asked_s = bl_now_s();
        if (signal_number == SIGINT) bl_log_note_echo();
        if (is_before_steps(s))
            bl_log_info("%s: stopping before the first step", strsignal(signal_number));
        else
            bl_log_info(
                "%s: stopping after this step (at most %.0f s); once more, a second later, to "
                "quit now",
                strsignal(signal_number), grace_s);
        atomic_store(&s->control.stop, 1);
    }
    bool is_over =
        s->asked_s > BL_NEVER_S && (bl_now_s() - s->asked_s > grace_s || is_before_steps(s));
    if (is_over && !atomic_load(&s->control.abandon) && !is_saving(s)) abandon(s);
    s->ranks.is_cleaning_up = is_over && is_before_steps(s) && bl_now_s() - s->asked_s < CLEAN_UP_S;
}

/* After the grace was over: the state of a run's last completed step, if all ranks agree which one
 * that is. Processes cannot agree on anything any more: their communicator went with the step. */
static bl_status save_abandoned_run(supervisor *s, int run)
{
    const bl_training *training = &s->runs[run].training;
    bl_trainer *trainers = s->trainers + run * s->ranks.n_here;
    int64_t step = trainers->steps_done;
    bool agreed = !training->job.launch;

    for (int i = 0; agreed && i < s->ranks.n_here; i++) agreed = trainers[i].steps_done == step;
    if (!agreed)
        return BL_FAIL(BL_ESTOPPED,
                       "stopped on request inside a step, which is lost; resume with "
                       "--resume_from_checkpoint true from the newest checkpoint in %s",
                       training->checkpoint_dir);
    bl_trainers_settle_save(trainers);
    bl_output_abort_saving(&s->runs[run].output); /* one that was under way when the grace ended */
    if (trainers->saved_step != step) BL_TRY(bl_trainers_save(trainers, step));
    return BL_FAIL(BL_ESTOPPED,
                   "stopped on request inside step %lld; saved after step %lld: resume with "
                   "--resume_from_checkpoint true",
                   (long long)step + 1, (long long)step);
}

/* Of runs that were not done; the message is the first one's. */
static bl_status save_abandoned(supervisor *s)
{
    bl_error error = {.status = BL_OK};

    if (is_before_steps(s)) return say_before_steps();
    /* Its error is the abandoned step's; AdamW of the last step ran before it. */
    for (int i = 0; i < s->ranks.n_here; i++) (void)bl_stream_synchronize(s->ranks.rank[i].compute);
    for (int run = 0; run < s->n_runs; run++) {
        const bl_trainer *first = &s->trainers[run * s->ranks.n_here];
        if (!is_there(s, run) || first->has_ended || first->status != BL_OK) continue;
        bl_status st = save_abandoned_run(s, run);
        if (st != BL_ESTOPPED) return st;
        if (error.status == BL_OK) bl_error_save(&error, st);
    }
    if (error.status == BL_OK) return BL_FAIL(BL_ESTOPPED, "stopped on request");
    return bl_error_restore(&error);
}

static int64_t gpu_peak_bytes(const bl_ranks *ranks)
{
    int64_t n_bytes = 0;
    for (int i = 0; ranks->rank && i < ranks->n_here; i++) {
        const bl_device *device = ranks->rank[i].device;
        if (device && bl_device_get_kind(device) == BL_DEVICE_CUDA)
            n_bytes += (int64_t)bl_device_peak_bytes(device, BL_SPACE_DEVICE);
    }
    return n_bytes;
}

static bl_peak_memory own_peak(const bl_ranks *ranks)
{
    return (bl_peak_memory){.host = atomic_load(&ranks->peak_bytes), .gpu = gpu_peak_bytes(ranks)};
}

/* A process is a rank. */
static bl_status share_peak(supervisor *s, const bl_rank *rank)
{
    const bl_topology *t = &rank->job->topology;
    int first = t->first_here - t->first_on_host;
    bl_peak_memory *all = calloc((size_t)t->n_ranks, sizeof *all), most = {0};

    if (!all) return BL_FAIL(BL_ENOMEM, "the memory of %d processes", t->n_ranks);
    all[rank->index] = own_peak(&s->ranks);
    bl_status st = bl_host_comm_gather(&rank->host_comm, all, sizeof *all);
    for (int i = 0; st == BL_OK && i < t->n_ranks; i++) {
        most.host = bl_max_i64(most.host, all[i].host);
        most.gpu = bl_max_i64(most.gpu, all[i].gpu);
        if (i >= first && i < first + t->n_on_host) most.on_host += all[i].host;
    }
    if (st == BL_OK) s->of_job = most;
    free(all);
    return st;
}

static int64_t count_micro(const supervisor *s)
{
    int64_t n = 0;
    for (int run = 0; run < s->n_runs; run++)
        n += s->runs[run].training.config->gradient_accumulation_steps;
    return n;
}

static bl_status set_up_trainers(supervisor *s, bl_trainer **trainers)
{
    BL_TRY(bl_trainer_setup(trainers[0], count_micro(s)));
    for (int run = 1; run < s->n_runs; run++)
        BL_TRY(bl_trainer_setup_beside(trainers[run], trainers[0], NULL, NULL));
    for (int run = 0; run < s->n_runs; run++) atomic_store(&trainers[run]->is_set_up, true);
    BL_TRY(bl_trainers_warm_up(trainers, s->n_runs, trainers[0]->micro));
    return bl_round_run(trainers, s->n_runs, NULL);
}

/* With a queue: runs join later. */
static bl_status serve_queue(supervisor *s, bl_trainer **trainers)
{
    bl_round_source source = {s->queue, bl_queue_change, s->n_runs};

    BL_TRY(bl_trainer_setup_base(trainers[0]));
    atomic_store(&trainers[0]->is_set_up, true);
    return bl_round_run(trainers, 1, &source);
}

static bl_status train_rank(bl_rank *rank, void *user)
{
    supervisor *s = user;
    int here = rank->index - rank->job->topology.first_here;
    bl_trainer **trainers = calloc((size_t)s->n_runs, sizeof *trainers);

    if (!trainers) return BL_FAIL(BL_ENOMEM, "%d runs", s->n_runs);
    for (int run = 0; run < s->n_runs; run++)
        trainers[run] = &s->trainers[run * s->ranks.n_here + here];
    bl_status st = s->queue ? serve_queue(s, trainers) : set_up_trainers(s, trainers);
    free(trainers);
    if (st != BL_OK) return st;
    return rank->job->launch ? share_peak(s, rank) : BL_OK;
}

static bool is_abandoned(void *user)
{
    const bl_control *control = user;
    return atomic_load(&control->abandon) != 0;
}

static void create_trainer(supervisor *s, int run, int i)
{
    bl_train_run_state *state = &s->runs[run];
    bl_rank *lead = &s->ranks.rank[i],
            *rank = run == 0 ? lead : &s->borrowed[(run - 1) * s->ranks.n_here + i];

    if (run == 0) {
        rank->stop = is_abandoned;
        rank->stop_user = &s->control;
    }
    s->trainers[run * s->ranks.n_here + i] =
        (bl_trainer){.training = &state->training,
                     .job = &state->training.job,
                     .config = state->training.config,
                     .control = &s->control,
                     .output = lead->index == 0 ? &state->output : NULL,
                     .folder = &state->output,
                     .rank = rank};
}

/* bl_queue.create_trainers */
static void create_trainers(void *user, int run)
{
    supervisor *s = user;
    for (int i = 0; i < s->ranks.n_here; i++) create_trainer(s, run, i);
}

static bl_status create_supervisor(bl_train_run_state *runs, int n, bl_queue *queue, supervisor *s)
{
    bl_launch_info info;

    bl_launch_read(&info);
    *s = (supervisor){.runs = runs,
                      .n_runs = n,
                      .queue = queue,
                      .is_child = info.kind == BL_LAUNCH_CHILD,
                      .asked_s = BL_NEVER_S};
    BL_TRY(bl_ranks_create(&runs[0].training.job, &s->ranks));
    s->trainers = calloc((size_t)count_trainers(s), sizeof *s->trainers);
    s->borrowed = calloc((size_t)count_trainers(s), sizeof *s->borrowed);
    if (!s->trainers || !s->borrowed) return BL_FAIL(BL_ENOMEM, "%d trainers", count_trainers(s));
    for (int run = 0; run < (queue ? 1 : n); run++) create_trainers(s, run);
    if (!queue) return BL_OK;
    queue->trainers = s->trainers;
    queue->n_here = s->ranks.n_here;
    queue->create_trainers = create_trainers;
    queue->user = s;
    return BL_OK;
}

static bl_status run_to_end(supervisor *s, const sigset_t *signals)
{
    sigset_t awaited = *signals;
    int signal_number;

    sigaddset(&awaited, BL_REPORT_SIGNAL);
    bl_status st = bl_ranks_start(&s->ranks, train_rank, s);
    while (bl_ranks_wait(&s->ranks, &awaited, &signal_number)) {
        if (s->queue) pthread_mutex_lock(&s->queue->changing);
        if (signal_number == BL_REPORT_SIGNAL) report_now(s);
        take_signal(s, signals, signal_number == BL_REPORT_SIGNAL ? 0 : signal_number);
        if (s->queue) pthread_mutex_unlock(&s->queue->changing);
    }
    st = bl_ranks_join(&s->ranks, st);
    for (int run = 0; run < s->n_runs; run++)
        s->runs[run].status = s->trainers[run * s->ranks.n_here].status;
    if (atomic_load(&s->control.abandon) && (st == BL_ESTOPPED || st == BL_ECANCELED))
        return save_abandoned(s);
    return st;
}

static void free_supervisor(supervisor *s)
{
    /* On a GPU a rank's copies read the others' memory. */
    for (int i = 0; s->ranks.rank && i < s->ranks.n_here; i++) bl_rank_drain(&s->ranks.rank[i]);
    for (int i = 0; s->trainers && i < count_trainers(s); i++)
        if (s->trainers[i].rank) bl_trainer_free(&s->trainers[i]);
    free(s->trainers);
    free(s->borrowed);
    bl_ranks_free(&s->ranks);
}

bl_status bl_training_run_ranks(bl_train_run_state *runs, int n, bl_queue *queue,
                                bl_peak_memory *peak)
{
    sigset_t signals, old;
    supervisor s;

    bl_stop_signals_list(&signals);
    pthread_sigmask(SIG_BLOCK, &signals, &old); /* before the threads, which inherit it */
    bl_report_signal_block();
    bl_status st = create_supervisor(runs, n, queue, &s);
    if (st == BL_OK) st = run_to_end(&s, &signals);
    *peak = s.of_job.host > 0 ? s.of_job : own_peak(&s.ranks);
    bl_error error; /* freeing meets the streams' own errors */
    bl_error_save(&error, st);
    free_supervisor(&s);
    bl_stop_signals_discard_repeated(&signals);
    bl_report_signal_discard();
    if (!(runs[0].training.job.launch && st == BL_ESTOPPED))
        pthread_sigmask(SIG_SETMASK, &old, NULL);
    return st == BL_OK ? BL_OK : bl_error_restore(&error);
}
