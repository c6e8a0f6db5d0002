/* SPDX-License-Identifier: Apache-2.0 */
/* adapter.c -- the adapters of a session: created, updated, sampled from, freed. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#include "base/memory.h"
#include "base/sizes.h"
#include "train/session/session_internal.h"
#include "trained/choose.h"

/* ---- create ---- */

/* Device memory of an adapter; on a CPU the host's. */
static int64_t adapter_bytes(const bl_session *s, const bl_job *job)
{
    bl_adapter_bytes b =
        bl_trained_state_measure(bl_device_act(s->rank->device), &job->lora,
                                 job->model->config.n_layers, 1, (int)s->config->ring_depth);
    bl_replicated_bytes tables = bl_trained_replicated_measure(
        &job->model->config, NULL, &job->lora, BL_DEVICE_CPU, bl_device_act(s->rank->device));
    return 4 * b.shard + b.part + 2 * b.whole + b.copy + b.ring + b.staging + tables.weights +
           tables.moments + tables.gradients;
}

static bl_status check_memory(const bl_session *s, const bl_job *job)
{
    int64_t needed = adapter_bytes(s, job), available = bl_memory_available_bytes();

    if (available < 0 || needed <= bl_plan_usable_bytes(available)) return BL_OK;
    return BL_FAIL(BL_ENOMEM,
                   "out of memory: an adapter with lora_r %" PRId64 " needs %.4g GB, %.4g GB of "
                   "memory are available: a smaller lora_r, or fewer lora_target_modules",
                   job->lora.options.r, bl_gb(needed), bl_gb(available));
}

static bl_status choose(bl_session_adapter *a)
{
    const bl_train_config *c = a->config;
    bl_job *job = &a->job;

    job->config = c;
    bl_job_borrow(job, &a->session->job);
    job->identity.model = a->session->job.identity.model;
    BL_TRY(bl_adapter_choose_lora(c, &job->model->config, true, &job->lora));
    BL_TRY(bl_adapter_choose_modules(c, &job->model->config, true, &job->modules));
    if (job->modules.names.n == 0) return check_memory(a->session, job);
    return BL_FAIL(BL_EUSAGE,
                   "init_adapter %s: its modules_to_save replace modules of the base, which the "
                   "adapters of a session share",
                   c->init_adapter);
}

/* Passes have workspaces for the largest rank so far. */
static bl_status fit_pass(bl_session *s, const bl_lora_layout *lora)
{
    bl_pass_options *pass = &s->job.plan.pass;
    int64_t r = bl_max_i64(pass->lora_r, lora->options.r),
            terms_r = bl_max_i64(pass->terms_r, lora->n_table_floats > 0 ? lora->options.r : 0);

    if (r == pass->lora_r && terms_r == pass->terms_r) return BL_OK;
    pass->lora_r = r;
    pass->terms_r = terms_r;
    bl_rank_drain(s->rank);
    bl_status st = bl_rank_replace_pass(s->rank);
    for (bl_session_adapter *a = s->adapters; a; a = a->next) {
        a->rank.pass = s->rank->pass;
        a->rank.group = s->rank->group;
    }
    if (st != BL_OK) bl_error_save(&s->broken, st);
    return st;
}

static bl_status fill(bl_session_adapter *a, const char *dir)
{
    BL_TRY(choose(a));
    BL_TRY(fit_pass(a->session, &a->job.lora));
    bl_rank_borrow(&a->rank, a->session->rank, &a->job);
    BL_TRY(bl_rank_create_adapter(&a->rank));
    if (dir) return bl_trained_state_read_shards(a->rank.state, dir, 1);
    return bl_rank_fill_adapter(&a->rank);
}

bl_status train_session_create_adapter(bl_session *s, bl_train_config *config, const char *dir,
                                       bl_session_adapter **out)
{
    bl_session_adapter *a = calloc(1, sizeof *a);
    bl_error error;

    *out = NULL;
    if (!a) {
        bl_train_config_free(config);
        return BL_FAIL(BL_ENOMEM, "an adapter");
    }
    *a = (bl_session_adapter){.session = s, .config = config, .next = s->adapters};
    s->adapters = a;
    bl_status st = fill(a, dir);
    bl_error_save(&error, st);
    if (st == BL_OK) {
        *out = a;
        return BL_OK;
    }
    train_session_free_adapter(a);
    return bl_error_restore(&error);
}

void train_session_free_adapter(bl_session_adapter *a)
{
    bl_session_adapter **at = &a->session->adapters;

    while (*at != a) at = &(*at)->next;
    *at = a->next;
    if (a->rank.lead) {
        bl_rank_drain(&a->rank);
        bl_rank_close_run(&a->rank);
    }
    bl_saved_modules_free(&a->job.modules);
    bl_train_config_free(a->config);
    free(a);
}

typedef struct creation {
    bl_train_config *config; /* becomes the adapter's */
    bl_session_adapter *made;
} creation;

static bl_status run_create(session_request *r)
{
    creation *c = r->user;
    bl_train_config *config = c->config;

    c->config = NULL;
    return train_session_create_adapter(r->session, config, NULL, &c->made);
}

bl_status bl_session_create_lora(bl_session *s, const char *const *keys, int n,
                                 bl_session_adapter **out)
{
    creation c = {0};
    session_request r = {.run = run_create, .user = &c};

    *out = NULL;
    BL_TRY(bl_train_config_load_adapter(s->config, keys, n, &c.config));
    bl_status st = train_session_submit(s, &r);
    bl_train_config_free(c.config);
    *out = c.made;
    return st;
}

static bl_status run_drop(session_request *r)
{
    train_session_free_adapter(r->adapter);
    return BL_OK;
}

void bl_session_drop(bl_session_adapter *a)
{
    if (!a) return;
    session_request r = {.adapter = a, .run = run_drop};
    (void)train_session_submit(a->session, &r);
}

/* ---- update ---- */

bl_status train_session_drop_gradients(bl_session_adapter *a)
{
    a->n_calls = a->n_samples = 0;
    BL_TRY(bl_trained_state_clear(a->rank.state));
    return bl_stream_synchronize(a->rank.compute);
}

typedef struct update {
    const bl_session_step *step;
    double grad_norm;
} update;

static bl_status run_update(session_request *r)
{
    bl_session_adapter *a = r->adapter;
    update *u = r->user;
    const bl_session_step *p = u->step;
    bl_lane_totals lanes[BL_N_LANES] = {{0}};
    double loss_sum;

    if (a->n_calls == 0)
        return BL_FAIL(BL_EUSAGE, "optim_step: no gradients: call forward_backward before it");
    BL_TRY(bl_trained_state_reduce(a->rank.state, &loss_sum, &u->grad_norm, lanes));
    if (!isfinite(u->grad_norm)) {
        BL_TRY(train_session_drop_gradients(a));
        return BL_FAIL(BL_ENUMERIC, "optim_step: gradient norm %g: the gradients are dropped",
                       u->grad_norm);
    }
    BL_TRY(bl_trained_state_update(a->rank.state, a->n_updates + 1, p->lr, p->beta1, p->beta2,
                                   p->eps, p->weight_decay, p->max_grad_norm));
    BL_TRY(bl_stream_synchronize(a->rank.compute));
    a->n_updates++;
    a->n_calls = a->n_samples = 0;
    return BL_OK;
}

static bl_status check_number(const char *name, double x, double most)
{
    if (x >= 0 && x <= most) return BL_OK;
    return BL_FAIL(BL_EUSAGE, "%s: %g is not in [0, %g]", name, x, most);
}

bl_status bl_session_optim_step(bl_session_adapter *a, const bl_session_step *step,
                                double *grad_norm)
{
    static const double MOST = 1e30, MOST_BETA = 0.999999; /* that of the keys adam_beta */
    update u = {.step = step};

    BL_TRY(check_number("lr", step->lr, MOST));
    BL_TRY(check_number("betas[0]", step->beta1, MOST_BETA));
    BL_TRY(check_number("betas[1]", step->beta2, MOST_BETA));
    BL_TRY(check_number("eps", step->eps, MOST));
    BL_TRY(check_number("weight_decay", step->weight_decay, MOST));
    BL_TRY(check_number("max_grad_norm", step->max_grad_norm, MOST));
    session_request r = {.adapter = a, .run = run_update, .user = &u};
    BL_TRY(train_session_submit(a->session, &r));
    if (grad_norm) *grad_norm = u.grad_norm;
    return BL_OK;
}

/* ---- through the layers ---- */

static bl_status visit(bl_session_adapter *a, session_visit *v)
{
    session_request r = {.adapter = a, .visit = v};

    bl_status st = train_session_check_visit(a->session, v);
    if (st == BL_OK) st = train_session_submit(a->session, &r);
    train_session_free_visit(v);
    return st;
}

bl_status bl_session_forward_backward(bl_session_adapter *a, const bl_session_row *rows,
                                      int64_t n_rows, const bl_session_loss *loss,
                                      float *const *logp, bl_session_result *out)
{
    session_visit v = {.rows = rows, .n_rows = n_rows, .loss = loss, .logp = logp};

    if (!loss) return BL_FAIL(BL_EUSAGE, "loss is not given");
    BL_TRY(visit(a, &v));
    *out = v.result;
    return BL_OK;
}

bl_status bl_session_forward(bl_session_adapter *a, const bl_session_row *rows, int64_t n_rows,
                             float *const *logp)
{
    session_visit v = {.rows = rows, .n_rows = n_rows, .logp = logp};

    if (!logp) return BL_FAIL(BL_EUSAGE, "logp is not given");
    return visit(a, &v);
}
