/* SPDX-License-Identifier: Apache-2.0 */
/* queue.c -- jobs that join and leave the runs over a base, on one rank.
 *
 * Between rounds all ranks do the same: they retire runs that have ended, and follow rank 0's
 * order to open a job, plan it again or drop it. The first rank of a process (`is_first`) does the
 * work that a process does once. After each step of that work agree() gives every rank the common
 * result; it is also the barrier before the ranks read the files that the first ranks have written.
 *
 * A job is rejected if it cannot be opened, has other common keys than the base, or does not fit in
 * memory alone. It has failed if it was started and cannot be set up. The status does not matter, a
 * bug of Ballast's included: other jobs continue, and a restart does not repeat the job. */
#include "train/run/queue.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/log.h"
#include "base/sizes.h"
#include "store/checkpoint.h"
#include "train/rank/group.h"

enum { MAX_NAME_BYTES = 256 };

typedef enum order_kind { NOTHING, OPEN, PLAN_AGAIN, DROP, OVER } order_kind;

/* Rank 0's order between two rounds. All bytes are sent, padding included. */
typedef struct queue_order {
    int32_t kind, has_run;
    char name[MAX_NAME_BYTES];
} queue_order;

static bool is_first(const bl_rank *rank)
{
    return rank->index == rank->job->topology.first_here;
}

static bl_trainer *trainer_at(const bl_queue *q, int run, const bl_rank *rank)
{
    return &q->trainers[run * q->n_here + rank->index - rank->job->topology.first_here];
}

static int slot_of(const bl_queue *q, const bl_trainer *t)
{
    return (int)(t - q->trainers) / q->n_here;
}

/* ---- agreement ---- */

/* Gives every rank the first failure in rank order; *verdict BL_OK: all have succeeded. Returns a
 * failure that ends the whole queue. */
static bl_status agree(const bl_rank *rank, bl_status own, bl_error *verdict)
{
    int n = rank->job->topology.n_ranks;
    bl_error *all = calloc((size_t)n, sizeof *all);

    if (own == BL_ECANCELED || !all) {
        free(all);
        return all || own != BL_OK ? own : BL_FAIL(BL_ENOMEM, "the states of %d ranks", n);
    }
    bl_error_save(&all[rank->index], own);
    bl_status st = bl_host_comm_gather(&rank->host_comm, all, sizeof *all);
    *verdict = (bl_error){.status = BL_OK};
    for (int i = n - 1; i >= 0 && st == BL_OK; i--)
        if (all[i].status != BL_OK) *verdict = all[i];
    free(all);
    return st;
}

/* ---- slots ---- */

static int find_free(const bl_queue *q)
{
    for (int run = 1; run <= BL_QUEUE_ROOM; run++)
        if (atomic_load(&q->slot[run].state) == BL_SLOT_FREE) return run;
    return 0;
}

void bl_queue_free_slot(bl_queue *q, int run)
{
    bl_queue_slot *slot = &q->slot[run];

    pthread_mutex_lock(&q->changing);
    atomic_store(&slot->state, BL_SLOT_FREE);
    if (slot->config) bl_train_run_close(&q->runs[run]);
    pthread_mutex_unlock(&q->changing);
    bl_train_config_free(slot->config);
    free(slot->name);
    free(slot->label);
    slot->config = NULL;
    slot->name = slot->label = NULL;
    slot->has_run = slot->says_wait = false;
    if (q->open == run) q->open = 0;
}

/* ---- opening ---- */

/* After a kill a job resumes from its newest checkpoint. A job that started from a checkpoint
 * elsewhere and has none yet starts from there again. */
static bl_status continue_job(bl_train_config *c)
{
    char *dir = NULL, *newest = NULL;
    int64_t *steps = NULL;
    size_t n_steps = 0;
    bl_status st = BL_OK;

    c->overwrite_output_dir = false;
    if (bl_train_config_resume(c) == BL_RESUME_PATH) {
        BL_TRY(bl_path_join(c->output_dir, BL_OUTPUT_CHECKPOINTS, &dir));
        st = bl_file_exists(dir) ? bl_checkpoint_list(dir, &steps, &n_steps) : BL_OK;
        free(dir);
        free(steps);
        if (st != BL_OK || n_steps == 0) return st;
    }
    if (!(newest = strdup("true"))) return BL_FAIL(BL_ENOMEM, "a job");
    free(c->resume_from_checkpoint);
    c->resume_from_checkpoint = newest;
    return BL_OK;
}

static bl_status load_config(bl_queue *q, bl_queue_slot *slot)
{
    const bl_train_config *base = q->runs[0].training.config;
    char *path;

    BL_TRY(bl_spool_path(base->queue, slot->name, slot->has_run, &path));
    bl_status st = bl_path_check_private(path);
    if (st == BL_OK) st = bl_train_config_load_job(base, path, &slot->config);
    free(path);
    BL_TRY(st);
    for (int run = 1; run <= BL_QUEUE_ROOM; run++)
        if (atomic_load(&q->slot[run].state) == BL_SLOT_LIVE)
            BL_TRY(bl_train_config_check_apart(q->runs[run].training.config, slot->config));
    return slot->has_run ? continue_job(slot->config) : BL_OK;
}

static bl_status name_slot(bl_queue_slot *slot, const queue_order *order)
{
    slot->has_run = order->has_run;
    slot->name = strdup(order->name);
    slot->label = strndup(order->name, (size_t)(strrchr(order->name, '.') - order->name));
    return slot->name && slot->label ? BL_OK : BL_FAIL(BL_ENOMEM, "job %s", order->name);
}

static bl_status open_job(bl_queue *q, int run, const queue_order *order, const bl_rank *rank)
{
    const bl_job *lead = &q->runs[0].training.job;
    bl_queue_slot *slot = &q->slot[run];
    bl_train_run_state *state = &q->runs[run];
    bl_job *job = &state->training.job;

    BL_TRY(name_slot(slot, order));
    bl_log_set_label(slot->label);
    BL_TRY(load_config(q, slot));
    state->training = (bl_training){.config = slot->config, .name = slot->label};
    job->config = slot->config;
    bl_job_borrow(job, lead);
    job->host_world = rank->host_world;
    BL_TRY(bl_job_check_paths(job));
    if (rank->index == 0) BL_TRY(bl_output_open(slot->config->output_dir, &state->output));
    BL_TRY(bl_job_open_rows(job, NULL));
    job->identity.model = lead->identity.model;
    bl_job_identify_data(job);
    return BL_OK;
}

/* The buffers for sums over NCCL have the size that the base's keys give. */
static bl_status check_sums(const bl_job *lead, const bl_job *job)
{
    if (!lead->launch || lead->gpu.n_gpus == 0 || job->lora.n_floats <= lead->lora.n_floats)
        return BL_OK;
    return BL_FAIL(BL_EUSAGE,
                   "its adapter is larger than the one that lora_r and "
                   "lora_target_modules of the queue's base ask for, %lld and %lld "
                   "weights per layer: GPUs of several processes have no room for it",
                   (long long)job->lora.n_floats, (long long)lead->lora.n_floats);
}

static bl_status compare_job(const bl_queue *q, int run)
{
    const bl_job *job = &q->runs[run].training.job;

    BL_TRY(check_sums(&q->runs[0].training.job, job));
    return job->launch ? bl_job_check_processes(job, job->config->output_dir) : BL_OK;
}

/* ---- planning ---- */

/* Plans for the LIVE runs and this one, into q->planned. BL_ENOMEM: they do not fit. */
static bl_status plan_job(bl_queue *q, int run, const bl_rank *rank)
{
    const bl_training *all[1 + BL_QUEUE_ROOM];
    bl_job planned = q->runs[0].training.job;
    int n = 0;

    for (int i = 1; i <= BL_QUEUE_ROOM; i++)
        if (i == run || atomic_load(&q->slot[i].state) == BL_SLOT_LIVE)
            all[n++] = &q->runs[i].training;
    bl_train_config config = *all[0]->config;
    config.offload_ratio = planned.plan.placement.ratio;
    bl_plan_limits limits = {&config, q->available_bytes, q->gpu_available_bytes};
    bl_placement placement = planned.plan.placement;
    planned.host_world = rank->host_world;
    BL_TRY(bl_trainings_plan(all, n, &limits, &planned));
    q->planned = planned.plan;
    q->planned.placement = placement; /* with the base's paths */
    q->expected = planned.expected;
    return BL_OK;
}

/* ---- joining ---- */

static void give_plan(bl_queue *q, int run)
{
    bl_job *lead = &q->runs[0].training.job;

    pthread_mutex_lock(&q->changing);
    lead->plan = q->planned;
    lead->expected = q->expected;
    for (int i = 1; i <= BL_QUEUE_ROOM; i++)
        if (i == run || atomic_load(&q->slot[i].state) == BL_SLOT_LIVE)
            bl_job_borrow(&q->runs[i].training.job, lead);
    q->create_trainers(q->user, run);
    q->slot[run].has_run = true;
    q->open = 0;
    atomic_store(&q->slot[run].state, BL_SLOT_LIVE);
    pthread_mutex_unlock(&q->changing);
}

/* Afterwards no stream of any rank has work of a pass. */
static bl_status come_to_rest(bl_rank *rank)
{
    bl_rank_drain(rank);
    return bl_host_comm_barrier(&rank->host_comm);
}

/* The pass of the new plan. */
static bl_status replace_pass(bl_trainer **trainers, int n)
{
    bl_rank *lead = trainers[0]->rank;
    int64_t n_micro = 0;

    BL_TRY(bl_rank_replace_pass(lead));
    for (int i = 1; i < n; i++) {
        trainers[i]->rank->pass = lead->pass;
        trainers[i]->rank->group = lead->group;
        n_micro += trainers[i]->config->gradient_accumulation_steps;
    }
    n_micro = bl_max_i64(n_micro, lead->job->plan.pass.max_group);
    bl_pass_micro *micro = realloc(trainers[0]->micro, (size_t)n_micro * sizeof *micro);
    if (!micro) return BL_FAIL(BL_ENOMEM, "%lld micro-batches", (long long)n_micro);
    trainers[0]->micro = micro;
    return BL_OK;
}

/* Moves the job to rejected/, or to failed/ if it was started. */
static bl_status turn_away(bl_queue *q, int run, const bl_rank *rank, const bl_error *why)
{
    bl_queue_slot *slot = &q->slot[run];
    bl_status st = BL_OK;
    bool has_run = slot->has_run;

    if (rank->index == 0) {
        bl_log_warning("job %s %s: %s", slot->name, has_run ? "failed" : "rejected", why->text);
        st = bl_spool_end_job(q->spool, slot->name, has_run,
                              has_run ? BL_SPOOL_FAILED : BL_SPOOL_REJECTED, why->text);
    }
    BL_TRY(bl_host_comm_barrier(&rank->host_comm));
    if (is_first(rank)) bl_queue_free_slot(q, run);
    BL_TRY(bl_host_comm_barrier(&rank->host_comm));
    return st;
}

typedef struct agreement {
    const bl_rank *rank;
    bl_error *verdict;
} agreement;

/* bl_agree_fn */
static bl_status agree_on_step(void *user, bl_status own)
{
    const agreement *a = user;

    BL_TRY(agree(a->rank, own, a->verdict));
    return a->verdict->status == BL_OK ? BL_OK : bl_error_restore(a->verdict);
}

/* Sets up the adapter's state and buffers of the run in trainers[*n - 1]. */
static bl_status set_up(bl_queue *q, int run, bl_trainer **trainers, int *n, bl_error *verdict)
{
    bl_rank *rank = trainers[0]->rank;
    bl_trainer *t = trainers[*n - 1];
    agreement a = {rank, verdict};

    *verdict = (bl_error){.status = BL_OK};
    bl_status st = bl_trainer_setup_beside(t, trainers[0], agree_on_step, &a);
    if (st != BL_OK && verdict->status == BL_OK) return st; /* no agreement */
    if (verdict->status == BL_OK) {
        atomic_store(&t->is_set_up, true);
        return bl_trainers_warm_up(&trainers[*n - 1], 1, trainers[0]->micro);
    }
    BL_TRY(come_to_rest(rank));
    bl_trainer_free(t);
    --*n;
    return turn_away(q, run, rank, verdict);
}

/* The last steps before the run trains, which write files. */
static bl_status begin_job(bl_queue *q, int run, const bl_rank *rank, bl_error *verdict)
{
    bl_train_run_state *state = &q->runs[run];
    bl_status st = BL_OK;

    if (is_first(rank)) st = bl_training_find_start(&state->training, &state->output);
    BL_TRY(agree(rank, st, verdict));
    if (verdict->status != BL_OK) return BL_OK;
    if (is_first(rank)) st = bl_training_begin(&state->training, &state->output);
    if (st == BL_OK && rank->index == 0 && !q->slot[run].has_run)
        st = bl_spool_begin(q->spool, q->slot[run].name);
    return agree(rank, st, verdict);
}

static bl_status join(bl_queue *q, int run, bl_trainer **trainers, int *n, int *n_new)
{
    bl_rank *rank = trainers[0]->rank;
    bl_error verdict;

    BL_TRY(begin_job(q, run, rank, &verdict));
    if (verdict.status != BL_OK) return turn_away(q, run, rank, &verdict);
    if (is_first(rank)) give_plan(q, run);
    BL_TRY(come_to_rest(rank));
    trainers[*n] = trainer_at(q, run, rank);
    ++*n;
    BL_TRY(replace_pass(trainers, *n));
    BL_TRY(set_up(q, run, trainers, n, &verdict));
    *n_new = verdict.status == BL_OK;
    if (*n_new && rank->index == 0)
        bl_log_info("job %s joins; %d in progress", q->slot[run].name, *n - 1);
    return BL_OK;
}

/* Joins the OPEN job if it fits in memory with the others. */
static bl_status admit(bl_queue *q, bl_trainer **trainers, int *n, int *n_new)
{
    const bl_rank *rank = trainers[0]->rank;
    int run = q->open;
    bl_queue_slot *slot = &q->slot[run];
    bl_error verdict;
    bl_status st = BL_OK;

    if (is_first(rank)) st = plan_job(q, run, rank);
    BL_TRY(agree(rank, st, &verdict));
    if (verdict.status == BL_OK) return join(q, run, trainers, n, n_new);
    if (verdict.status != BL_ENOMEM || *n == 1) return turn_away(q, run, rank, &verdict);
    if (rank->index == 0 && !slot->says_wait)
        bl_log_info("job %s waits until a run has ended: %s", slot->name, verdict.text);
    if (rank->index == 0) slot->says_wait = true;
    return BL_OK;
}

static bl_status take(bl_queue *q, const queue_order *order, bl_trainer **trainers, int *n,
                      int *n_new)
{
    const bl_rank *rank = trainers[0]->rank;
    int run = find_free(q); /* the same on all ranks, which have made the same changes */
    bl_error verdict;
    bl_status st = BL_OK;

    BL_TRY(bl_host_comm_barrier(&rank->host_comm)); /* all ranks have found the slot */
    if (is_first(rank)) {
        q->open = run;
        atomic_store(&q->slot[run].state, BL_SLOT_OPEN);
        st = open_job(q, run, order, rank);
    }
    BL_TRY(agree(rank, st, &verdict));
    if (verdict.status != BL_OK) return turn_away(q, run, rank, &verdict);
    if (is_first(rank)) st = compare_job(q, run);
    BL_TRY(agree(rank, st, &verdict));
    if (verdict.status != BL_OK) return turn_away(q, run, rank, &verdict);
    return admit(q, trainers, n, n_new);
}

/* ---- leaving ---- */

static bl_status finish(bl_queue *q, int run, const bl_trainer *t)
{
    bl_train_run_state *state = &q->runs[run];
    const char *name = q->slot[run].name;

    if (t->status != BL_OK)
        return bl_spool_end_job(q->spool, name, true, BL_SPOOL_FAILED, t->error.text);
    bl_status st = bl_training_finish(&state->training, &state->output);
    if (st != BL_OK) {
        bl_log_warning("job %s failed: %s", name, bl_error_text());
        bl_error why;
        bl_error_save(&why, st);
        return bl_spool_end_job(q->spool, name, true, BL_SPOOL_FAILED, why.text);
    }
    bl_log_info("job %s is done", name);
    return bl_spool_end_job(q->spool, name, true, BL_SPOOL_DONE, NULL);
}

/* trainers[at] has ended. */
static bl_status retire(bl_queue *q, bl_trainer **trainers, int *n, int at)
{
    bl_rank *rank = trainers[0]->rank;
    bl_trainer *t = trainers[at];
    int run = slot_of(q, t);
    bl_status st = BL_OK;

    bl_log_set_label(q->slot[run].label);
    if (rank->index == 0) st = finish(q, run, t);
    BL_TRY(st);
    if (rank->index == 0) q->has_change = true;
    BL_TRY(come_to_rest(rank));
    bl_trainer_free(t);
    memmove(&trainers[at], &trainers[at + 1], (size_t)(*n - at - 1) * sizeof(bl_trainer *));
    --*n;
    BL_TRY(bl_host_comm_barrier(&rank->host_comm));
    bl_log_set_label(NULL);
    if (is_first(rank)) bl_queue_free_slot(q, run);
    return bl_host_comm_barrier(&rank->host_comm);
}

/* ---- the order between rounds ---- */

static bl_status decide(bl_queue *q, queue_order *order)
{
    bool stops = bl_spool_stops(q->spool), has_run;
    char *name;

    if (q->open > 0) {
        const bl_queue_slot *slot = &q->slot[q->open];
        bool is_there = bl_spool_has(q->spool, slot->name, slot->has_run);
        if (!is_there) bl_log_info("job %s was withdrawn", slot->name);
        if (!is_there || (stops && !slot->has_run))
            order->kind = DROP;
        else if (q->has_change)
            order->kind = PLAN_AGAIN;
        q->has_change = false;
        return BL_OK;
    }
    if (find_free(q) == 0) return BL_OK;
    BL_TRY(bl_spool_next(q->spool, stops, &name, &has_run));
    if (!name) {
        order->kind = stops ? OVER : NOTHING;
        return BL_OK;
    }
    bool fits = strlen(name) < sizeof order->name;
    order->kind = OPEN;
    order->has_run = has_run;
    snprintf(order->name, sizeof order->name, "%s", name);
    free(name);
    return fits ? BL_OK : BL_FAIL(BL_EUSAGE, "queue: a name of %d bytes", MAX_NAME_BYTES);
}

static bl_status obey(bl_queue *q, const queue_order *order, bl_trainer **trainers, int *n,
                      int *n_new)
{
    bl_rank *rank = trainers[0]->rank;

    switch ((order_kind)order->kind) {
    case OPEN:
        return take(q, order, trainers, n, n_new);
    case PLAN_AGAIN:
        return admit(q, trainers, n, n_new);
    case DROP:
        if (is_first(rank)) bl_queue_free_slot(q, q->open);
        return bl_host_comm_barrier(&rank->host_comm);
    case NOTHING:
    case OVER:
        break;
    }
    return BL_OK;
}

bl_status bl_queue_change(void *user, bl_trainer **trainers, int *n, int *n_new, bool *is_over)
{
    bl_queue *q = user;
    bl_rank *rank = trainers[0]->rank;
    queue_order order;

    *n_new = 0;
    bl_log_set_label(NULL); /* it may be the label of a run that has ended */
    for (int i = *n - 1; i > 0; i--)
        if (trainers[i]->has_ended || trainers[i]->status != BL_OK)
            BL_TRY(retire(q, trainers, n, i));
    memset(&order, 0, sizeof order);
    if (rank->index == 0) BL_TRY(decide(q, &order));
    BL_TRY(bl_host_comm_broadcast(&rank->host_comm, &order, sizeof order));
    *is_over = order.kind == OVER;
    bl_status st = obey(q, &order, trainers, n, n_new);
    bl_log_set_label(NULL);
    return st;
}
