/* SPDX-License-Identifier: Apache-2.0 */
/* precompute.c -- precompute_ref_log_probs: before a run's first step the sums of its reference are
 * read from output_dir, or computed and stored there.
 *
 * Each training row goes through the reference once, in the micro-batch of the first epoch, and
 * each validation row in that of an evaluation: so the sums have the same bits as in the policy's
 * visits. kto's mismatched answers depend on the micro-batch: those of all steps are computed. The
 * passes are forward only and have as many micro-batches as a step's. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/build_id.h"
#include "base/clock.h"
#include "base/files.h"
#include "base/log.h"
#include "base/sizes.h"
#include "base/xxh3.h"
#include "train/rank/evaluate.h"
#include "train/rank/preference.h"
#include "train/rank/trainer.h"

enum { SUMS_AT_ONCE = 1 << 20 };

/* ---- the key ---- */

/* Rows, reference, products, and the division of rows into micro-batches. The caller frees
 * *text. */
static bl_status describe(const bl_trainer *t, char **text)
{
    const bl_job *job = t->job;
    const bl_train_config *c = t->config;
    const bl_reference_size *size = &bl_preference_known(t->rank->preference)->size;
    char products[BL_CUDA_GEMM_TEXT_BYTES];
    int64_t n_positions = bl_train_position(c, size->n_rows, t->training->total_steps);
    bool pads = bl_pass_token_step(t->rank->pass) > 0;
    uint64_t reference, bf16 = 0;

    BL_TRY(bl_job_hash_adapter(c, &reference));
    BL_TRY(bl_products_describe(job, products));
    if (job->bf16_matrices)
        bf16 = XXH3_64bits(job->bf16_matrices, (size_t)job->model->config.n_layers);
    return bl_text_format(
        text,
        "rows %016" PRIx64 " %lld %lld; validation %016" PRIx64 " %lld %lld; positions %lld; "
        "ld_alpha %.17g; unpaired %d\n"
        "model %016" PRIx64 " %016" PRIx64 " %s %d; adapter %016" PRIx64 "\n"
        "products %s; dtype %d; fast sums %d; bf16 %016" PRIx64 "; padded to %lld; build %s\n"
        "ranks %d; batches %lld %lld %lld; seed %lld; shuffle %d; epochs %d; longest %lld\n",
        job->identity.train, (long long)job->data.train.first, (long long)size->n_rows,
        job->identity.validation, (long long)job->data.validation.first,
        (long long)size->n_validation,
        (long long)(size->is_unpaired ? n_positions : bl_min_i64(n_positions, size->n_rows)),
        c->ld_alpha, size->is_unpaired, job->identity.model, t->rank->weights->checksum,
        bl_base_format_name(c->base_format), (int)c->base_format_scales, reference, products,
        (int)c->compute_dtype, (int)c->fp8_fast_accumulation, bf16,
        (long long)(pads ? job->plan.pass.T_max : 0), bl_build_id(), job->topology.n_ranks,
        (long long)c->per_device_train_batch_size, (long long)c->gradient_accumulation_steps,
        (long long)c->per_device_eval_batch_size, (long long)c->seed, c->shuffle, (int)c->epoch_end,
        (long long)c->max_seq_length);
}

/* ---- the passes ---- */

/* The micro-batches first .. first + n - 1 of a step. */
static bl_status run_group(bl_trainer *t, int64_t step, int first, int n)
{
    bl_rank *r = t->rank;
    const bl_batches *batches = t->batches[step & 1];
    int at = 0;

    bl_group_clear(r->group);
    for (int i = 0; i < n; i++)
        BL_TRY(
            bl_group_add(r->group, &(bl_pass_micro){.batch = batches->micro + first + i}, 1, &at));
    BL_TRY(bl_preference_join(r->preference, BL_PREFERENCE_STEP, batches, t->mismatched[step & 1],
                              first, n, 0, r->group));
    bl_pass_input input = bl_group_input(r->group);
    input.stop = r->stop;
    input.stop_user = r->stop_user;
    return bl_pass_run(r->pass, &input);
}

static bl_status run_step(bl_trainer *t, int64_t step)
{
    int n_micro = t->batches[0]->n_micro, most = t->job->plan.pass.max_group;

    bl_preference_begin(t->rank->preference, BL_PREFERENCE_STEP,
                        bl_train_position(t->config, t->job->data.train.n, step));
    bl_trainer_begin_fill(t, step);
    BL_TRY(bl_trainer_end_fill(t));
    for (int first = 0; first < n_micro; first += most)
        BL_TRY(run_group(t, step, first, (int)bl_min_i64(most, n_micro - first)));
    return BL_OK;
}

/* All of them, or those of the first epoch. */
static bl_status run_steps(bl_trainer *t)
{
    const bl_reference_size *size = &bl_preference_known(t->rank->preference)->size;

    for (int64_t step = 0; step < t->training->total_steps; step++) {
        int64_t first = bl_train_position(t->config, size->n_rows, step);
        if (!size->is_unpaired && first >= size->n_rows) break;
        BL_TRY(run_step(t, step));
    }
    return BL_OK;
}

static bl_status compute(bl_trainer *t)
{
    bl_rank *r = t->rank;

    BL_TRY(bl_preference_begin_collecting(r->preference));
    BL_TRY(run_steps(t));
    if (r->evaluation) {
        bl_evaluation_begin(r->evaluation);
        BL_TRY(bl_evaluation_run(r->evaluation));
    }
    return bl_preference_end_collecting(r->preference);
}

/* ---- the file ---- */

static void report(const char *path, bl_reference_found found, const bl_reference_size *size)
{
    long long n = (long long)(size->n_rows + size->n_validation);

    switch (found) {
    case BL_REFERENCE_READ:
        bl_log_info("reference: log-probabilities of %lld rows read from %s", n, path);
        break;
    case BL_REFERENCE_ABSENT:
        bl_log_info("reference: computing log-probabilities before the first step "
                    "(precompute_ref_log_probs)");
        break;
    case BL_REFERENCE_STALE:
        bl_log_info("reference: %s is of other data, batches, model or adapter: computing "
                    "log-probabilities again",
                    path);
        break;
    case BL_REFERENCE_DAMAGED:
        bl_log_warning("reference: %s is damaged: computing log-probabilities again", path);
        break;
    }
}

/* Rank 0's. */
static bl_status read_file(const bl_trainer *t, const char *path, const char *key,
                           bl_reference_found *found)
{
    bl_reference_sums *known = bl_preference_known(t->rank->preference);

    BL_TRY(bl_output_check_lock(t->output));
    BL_TRY(bl_output_failure(t->output, bl_reference_sums_read(path, key, known, found)));
    report(path, *found, &known->size);
    return BL_OK;
}

static bl_status write_file(const bl_trainer *t, const char *path, const char *key)
{
    static const char *const added[] = {BL_OUTPUT_REFERENCE};
    const bl_reference_sums *known = bl_preference_known(t->rank->preference);

    BL_TRY(bl_output_check_lock(t->output));
    BL_TRY(bl_output_list(t->config->output_dir, t->output, added, BL_COUNT(added)));
    return bl_output_failure(t->output, bl_reference_sums_write(path, key, known));
}

/* Rank 0's to all. */
static bl_status share(const bl_trainer *t)
{
    bl_reference_sums *known = bl_preference_known(t->rank->preference);

    for (int64_t first = 0; first < known->n; first += SUMS_AT_ONCE)
        BL_TRY(bl_host_comm_broadcast(&t->rank->host_comm, known->train + first,
                                      (size_t)bl_min_i64(SUMS_AT_ONCE, known->n - first) *
                                          sizeof *known->train));
    return BL_OK;
}

/* path, key: rank 0's; NULL on others. */
static bl_status read_or_compute(bl_trainer *t, const char *path, const char *key)
{
    double started = bl_now_s();
    bl_reference_found found = BL_REFERENCE_ABSENT;

    if (t->output) BL_TRY(read_file(t, path, key, &found));
    BL_TRY(bl_host_comm_broadcast(&t->rank->host_comm, &found, sizeof found));
    if (found == BL_REFERENCE_READ) return share(t);
    BL_TRY(compute(t));
    if (!t->output) return BL_OK;
    BL_TRY(write_file(t, path, key));
    bl_log_info("reference: done in %.1f s, kept in %s", bl_now_s() - started, path);
    return BL_OK;
}

bl_status bl_trainer_precompute(bl_trainer *t)
{
    char *path = NULL, *key = NULL;
    bl_status st = BL_OK;

    if (!bl_preference_known(t->rank->preference)) return BL_OK;
    if (t->output) st = bl_path_join(t->config->output_dir, BL_OUTPUT_REFERENCE, &path);
    if (st == BL_OK && t->output) st = describe(t, &key);
    if (st == BL_OK) st = read_or_compute(t, path, key);
    free(path);
    free(key);
    return st;
}
