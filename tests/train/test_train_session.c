/* SPDX-License-Identifier: Apache-2.0 */
/* A session makes the steps of `ballast train`, bit for bit: with one call per step, with the base
 * on disk, and with other adapters in the same visits. Losses, states and samples; errors. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "session_runs.h"

static void train(const golden_args *args)
{
    assert_int_equal(golden_train(args), BL_OK);
}

/* Losses of the log, to its 12 digits. */
static void assert_loss(const session_run *run)
{
    json_t *metrics = golden_metrics(run->config->output_dir), *line;
    size_t i;
    bool is_found = false;

    json_array_foreach(metrics, i, line)
    {
        const json_t *loss = json_object_get(line, "loss");
        if (!loss || json_integer_value(json_object_get(line, "step")) != run->step) continue;
        is_found = true;
        assert_true(fabs(json_number_value(loss) - run->loss) <= 1e-11 * fabs(run->loss));
        break;
    }
    json_decref(metrics);
    assert_true(is_found);
}

static void compare(const char *name, const char *const (*changes)[2], size_t n_changes,
                    const char *const *keys, int n_keys)
{
    golden_args args = {0};

    runs_standard(&args, runs_path("train-%s", name), 1);
    for (size_t i = 0; i < n_changes; i++) runs_set(&args, changes[i][0], "%s", changes[i][1]);
    train(&args);
    session_run *run = session_run_open(&args);
    bl_session *session = session_open_for(run, keys, n_keys);
    session_run_create(session, run);
    while (run->step < run->total_steps) {
        if (session_run_step(run) != BL_OK) fail_msg("%s", bl_error_text());
        session_run_assert_step(run);
    }
    assert_loss(run);
    bl_session_close(session);
    session_run_free(run);
    golden_args_free(&args);
}

static void test_steps_equal_train(void **state)
{
    (void)state;
    compare("standard", NULL, 0, NULL, 0);
}

static void test_micro_batches_of_several_rows(void **state)
{
    static const char *const changes[][2] = {{"per_device_train_batch_size", "3"},
                                             {"lora_r", "16"},
                                             {"weight_decay", "0.1"},
                                             {"max_grad_norm", "0.5"},
                                             {"lora_target_modules", "[q_proj, down_proj]"}};
    (void)state;
    compare("rows", changes, 5, NULL, 0);
}

static void test_base_on_disk(void **state)
{
    static char dir[GOLDEN_PATH_BYTES + 32];
    const char *const keys[] = {"offload_tier=disk", "offload_ratio=1", dir, "visit_tokens=64"};

    (void)state;
    snprintf(dir, sizeof dir, "offload_dir=%s", runs_path("pages"));
    compare("disk", NULL, 0, keys, 4);
}

/* ---- several adapters ---- */

enum { N_TENANTS = 4, FAILING = 3 };

static void *run_tenant(void *argument)
{
    session_run *run = argument;

    while (run->step < run->total_steps)
        if (session_run_step(run) != BL_OK) return NULL;
    return run;
}

/* A thread each; the last one's learning rate makes its weights, then its loss, infinite. */
static void test_tenants_on_threads(void **state)
{
    static const char *const differences[N_TENANTS][2] = {
        {"seed", "1"}, {"lora_r", "4"}, {"lora_alpha", "32"}, {"seed", "9"}};
    session_run *runs[N_TENANTS];
    pthread_t threads[N_TENANTS];

    (void)state;
    for (int i = 0; i < N_TENANTS; i++) {
        golden_args args = {0};
        runs_standard(&args, runs_path("tenant-%d", i), 1);
        runs_set(&args, "eval_strategy", "no");
        runs_set(&args, differences[i][0], "%s", differences[i][1]);
        if (i != FAILING) train(&args);
        runs[i] = session_run_open(&args);
        golden_args_free(&args);
    }
    runs[FAILING]->config->learning_rate = 1e30;
    bl_session *session = session_open_for(runs[0], NULL, 0);
    for (int i = 0; i < N_TENANTS; i++) session_run_create(session, runs[i]);
    for (int i = 0; i < N_TENANTS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, run_tenant, runs[i]), 0);
    for (int i = 0; i < N_TENANTS; i++) {
        void *ended;
        assert_int_equal(pthread_join(threads[i], &ended), 0);
        assert_int_equal(ended == NULL, i == FAILING);
        if (i != FAILING) session_run_assert_step(runs[i]);
    }
    bl_session_close(session);
    for (int i = 0; i < N_TENANTS; i++) session_run_free(runs[i]);
}

/* ---- the other verbs ---- */

typedef struct fixture {
    golden_args args;
    session_run *run;
    bl_session *session;
} fixture;

static void open_fixture(fixture *f)
{
    *f = (fixture){.run = NULL};
    runs_standard(&f->args, runs_path("unused"), 1);
    f->run = session_run_open(&f->args);
    f->session = session_open_for(f->run, NULL, 0);
    session_run_create(f->session, f->run);
}

static void close_fixture(fixture *f)
{
    bl_session_close(f->session);
    session_run_free(f->run);
    golden_args_free(&f->args);
}

static const bl_session_loss cross_entropy = {.kind = BL_SESSION_CROSS_ENTROPY};
static const bl_session_step small_step = {
    .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .max_grad_norm = 1};

/* bl_session_loss_fn of -sum_t log p_t of two rows. */
static bl_status sum_rows(void *user, const float *const *logp, float *const *gradient,
                          double *loss)
{
    const session_run *run = user;

    *loss = 0;
    for (int i = 0; i < 2; i++)
        for (int64_t t = 0; t < run->row[i].n; t++) {
            *loss -= (double)logp[i][t];
            gradient[i][t] = -1;
        }
    return BL_OK;
}

static bl_status fail_loss(void *user, const float *const *logp, float *const *gradient,
                           double *loss)
{
    (void)logp, (void)gradient;
    *loss = 0;
    return bl_session_optim_step(user, &small_step, NULL);
}

static bl_status nan_loss(void *user, const float *const *logp, float *const *gradient,
                          double *loss)
{
    (void)user, (void)logp;
    gradient[0][0] = NAN;
    *loss = 0;
    return BL_OK;
}

/* The same gradient by each kind of loss: one norm. */
static void test_losses_agree(void **state)
{
    fixture f;
    float ones[SESSION_MAX_TOKENS], q[2][SESSION_MAX_TOKENS];
    float *const logp[2] = {q[0], q[1]};
    bl_session_result results[3];
    double norms[3];

    (void)state;
    open_fixture(&f);
    for (int t = 0; t < SESSION_MAX_TOKENS; t++) ones[t] = 1;
    assert_int_equal(bl_session_forward(f.run->adapter, f.run->row, 2, logp), BL_OK);
    const bl_session_loss losses[3] = {{.kind = BL_SESSION_CROSS_ENTROPY, .is_sum = true},
                                       {.kind = BL_SESSION_IMPORTANCE_SAMPLING, .is_sum = true},
                                       {.kind = BL_SESSION_CUSTOM, .fn = sum_rows, .user = f.run}};
    for (int i = 0; i < 3; i++) {
        bl_session_row rows[2] = {f.run->row[0], f.run->row[1]};
        bl_session_adapter *adapter = NULL;
        for (int k = 0; i == 1 && k < 2; k++) {
            rows[k].logprobs = q[k];
            rows[k].advantages = ones;
        }
        assert_int_equal(bl_session_create_lora(f.session, NULL, 0, &adapter), BL_OK);
        assert_int_equal(
            bl_session_forward_backward(adapter, rows, 2, &losses[i], NULL, &results[i]), BL_OK);
        assert_int_equal(bl_session_optim_step(adapter, &small_step, &norms[i]), BL_OK);
        bl_session_drop(adapter);
    }
    assert_int_equal(results[0].n_targets, results[1].n_targets);
    assert_true(fabs(results[2].loss - results[0].loss) < 1e-5 * results[0].loss);
    assert_true(fabs(results[1].loss + (double)results[1].n_targets) < 1e-5);
    for (int i = 1; i < 3; i++) assert_true(fabs(norms[i] - norms[0]) < 1e-6 * norms[0]);
    close_fixture(&f);
}

static void expect(bl_status st, bl_status expected, const char *text)
{
    if (st != expected || !strstr(bl_error_text(), text))
        fail_msg("status %d instead of %d; '%s' in: %s", st, expected, text, bl_error_text());
}

static void test_errors(void **state)
{
    fixture f;
    bl_session_result result;
    bl_session_adapter *other = NULL;
    const char *const bad_keys[] = {"lora_r=0", "output_dir=x", "lora_r"};
    float x[SESSION_MAX_TOKENS] = {NAN};
    int32_t ids[4] = {1, 2, 3, 4}, huge[4] = {1, 2, 3, 1 << 30};
    int64_t n;

    (void)state;
    open_fixture(&f);
    bl_session_adapter *a = f.run->adapter;
    for (size_t i = 0; i < BL_COUNT(bad_keys); i++)
        expect(bl_session_create_lora(f.session, &bad_keys[i], 1, &other), BL_EUSAGE, "");
    assert_null(other);
    const bl_session_loss losses[] = {{.kind = (bl_session_loss_kind)7},
                                      {.kind = BL_SESSION_CUSTOM},
                                      {.kind = BL_SESSION_IMPORTANCE_SAMPLING}};
    const char *const texts[] = {"loss", "fn", "logprobs"};
    for (size_t i = 0; i < BL_COUNT(losses); i++)
        expect(bl_session_forward_backward(a, f.run->row, 1, &losses[i], NULL, &result), BL_EUSAGE,
               texts[i]);
    const bl_session_row rows[] = {{.n = 0},
                                   {.n = 65, .input_ids = ids, .targets = ids},
                                   {.n = 4, .targets = ids},
                                   {.n = 4, .input_ids = ids},
                                   {.n = 4, .input_ids = huge, .targets = ids},
                                   {.n = 4, .input_ids = ids, .targets = huge},
                                   {.n = 1, .input_ids = ids, .targets = ids, .weights = x},
                                   {.n = 1, .input_ids = ids, .targets = ids, .logprobs = x}};
    for (size_t i = 0; i < BL_COUNT(rows); i++)
        expect(bl_session_forward_backward(a, &rows[i], 1, &cross_entropy, NULL, &result),
               BL_EUSAGE, "rows[0]");
    expect(bl_session_forward(a, NULL, 0, (float *const *)&a), BL_EUSAGE, "rows");
    const bl_session_loss inner = {.kind = BL_SESSION_CUSTOM, .fn = fail_loss, .user = a};
    expect(bl_session_forward_backward(a, f.run->row, 2, &inner, NULL, &result), BL_EUSAGE,
           "the function of a custom loss");
    const bl_session_loss nan = {.kind = BL_SESSION_CUSTOM, .fn = nan_loss};
    expect(bl_session_forward_backward(a, f.run->row, 2, &nan, NULL, &result), BL_ENUMERIC,
           "gradient[0][0]");
    expect(bl_session_optim_step(a, &small_step, NULL), BL_EUSAGE, "no gradients");
    const bl_session_sampling options = {.top_p = 2};
    expect(bl_session_sample(a, ids, 4, &options, 2, ids, &n), BL_EUSAGE, "top_p");
    expect(bl_session_save_state(a, ""), BL_EUSAGE, "dir");
    expect(bl_session_load(f.session, "/nonexistent/state", &other), BL_ECHECKPOINT, "state");
    close_fixture(&f);
    f.session = NULL;
    expect(bl_session_open(NULL, 0, &f.session), BL_EUSAGE, "model_name_or_path");
    bl_session_close(NULL);
    bl_session_drop(NULL);
}

static int64_t available_bytes; /* 0: the system's */

int64_t __real_bl_memory_available_bytes(void);
int64_t __wrap_bl_memory_available_bytes(void);
int64_t __wrap_bl_memory_available_bytes(void)
{
    return available_bytes > 0 ? available_bytes : __real_bl_memory_available_bytes();
}

/* An adapter that does not fit is rejected before it is made; the others go on. */
static void test_memory_of_an_adapter(void **state)
{
    const char *const keys[] = {"lora_r=512"};
    bl_session_adapter *large = NULL;
    fixture f;

    (void)state;
    open_fixture(&f);
    available_bytes = 4 << 20;
    expect(bl_session_create_lora(f.session, keys, 1, &large), BL_ENOMEM, "lora_r 512 needs");
    available_bytes = 0;
    assert_null(large);
    assert_int_equal(session_run_step(f.run), BL_OK);
    assert_int_equal(bl_session_create_lora(f.session, keys, 1, &large), BL_OK);
    assert_int_equal(session_run_step(f.run), BL_OK); /* in the pass of the larger rank */
    close_fixture(&f);
}

/* A page of the base that has changed ends the session for all adapters; closing still works. */
static void test_base_changes(void **state)
{
    char dir[GOLDEN_PATH_BYTES + 32];
    const char *const keys[] = {"offload_tier=disk", "offload_ratio=1", dir, "verify_base=always"};
    golden_args args = {0};
    bl_session_adapter *other = NULL;
    float logp[SESSION_MAX_TOKENS];
    float *const out[] = {logp};
    bl_status st = BL_OK;

    (void)state;
    snprintf(dir, sizeof dir, "offload_dir=%s", runs_path("changed-pages"));
    runs_standard(&args, runs_path("unused"), 1);
    session_run *run = session_run_open(&args);
    bl_session *session = session_open_for(run, keys, 4);
    session_run_create(session, run);
    assert_int_equal(session_run_step(run), BL_OK);
    assert_int_equal(bl_session_create_lora(session, NULL, 0, &other), BL_OK);
    runs_flip_in_files(runs_path("changed-pages"), ".pages", 100);
    for (int i = 0; i < 3 && st == BL_OK; i++) st = session_run_step(run); /* past prefetches */
    expect(st, BL_EINPUT, "changed-pages");
    expect(bl_session_forward(other, run->row, 1, out), BL_EINPUT, "changed-pages");
    expect(bl_session_create_lora(session, NULL, 0, &other), BL_EINPUT, "changed-pages");
    bl_session_close(session);
    session_run_free(run);
    golden_args_free(&args);
}

/* A state continues with the bits of its adapter; samples are drawn from (seed, place). */
static void test_states_and_samples(void **state)
{
    fixture f;
    session_run copy;
    const bl_session_sampling options = {.temperature = 1, .top_p = 1, .seed = 3};
    int32_t first[8], second[8];
    int64_t n_first, n_second;

    (void)state;
    open_fixture(&f);
    for (int i = 0; i < 2; i++) assert_int_equal(session_run_step(f.run), BL_OK);
    assert_int_equal(bl_session_save_state(f.run->adapter, runs_path("state")), BL_OK);
    copy = *f.run;
    if (bl_session_load(f.session, runs_path("state"), &copy.adapter) != BL_OK)
        fail_msg("%s", bl_error_text());
    for (int i = 0; i < 2; i++) {
        assert_int_equal(session_run_step(f.run), BL_OK);
        assert_int_equal(session_run_step(&copy), BL_OK);
        assert_true(f.run->loss == copy.loss);
    }
    assert_int_equal(
        bl_session_sample(f.run->adapter, f.run->ids[0], 5, &options, 8, first, &n_first), BL_OK);
    assert_int_equal(
        bl_session_sample(copy.adapter, f.run->ids[0], 5, &options, 8, second, &n_second), BL_OK);
    assert_int_equal(n_first, n_second);
    assert_memory_equal(first, second, (size_t)n_first * sizeof *first);
    close_fixture(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_steps_equal_train),
        cmocka_unit_test(test_micro_batches_of_several_rows),
        cmocka_unit_test(test_base_on_disk),
        cmocka_unit_test(test_tenants_on_threads),
        cmocka_unit_test(test_losses_agree),
        cmocka_unit_test(test_errors),
        cmocka_unit_test(test_memory_of_an_adapter),
        cmocka_unit_test(test_base_changes),
        cmocka_unit_test(test_states_and_samples),
    };
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
