/* SPDX-License-Identifier: Apache-2.0 */
/* processes.c -- the agreement of a job's processes before their ranks start: that all see the same
 * directory, model, data and configuration, that they start from the checkpoint that rank 0 has
 * found, and how much memory they plan with. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include <xxhash.h>

#include "base/clock.h"
#include "base/files.h"
#include "base/host_name.h"
#include "base/log.h"
#include "base/sizes.h"
#include "ops/gemm.h"
#include "train/host_comm.h"
#include "train/training_internal.h"

/* Rank 0's file in output_dir that the others look for; its token is drawn, so that no host has
 * looked for that name before. */
static const char PROBE_PREFIX[] = ".ballast.probe";

/* A wait longer than QUICK_S is logged. NFS caches a directory for a minute at most. */
static const double QUICK_S = 5.0, PATIENCE_S = 65.0;

/* ---- the same directory, model, data and configuration ---- */

/* 1 or 0. */
typedef struct view {
    uint64_t folder, is_elsewhere; /* the same directory; an existing, different one */
    uint64_t model, weights, adapter, train, validation, config;
    uint64_t schedule; /* keys that decide when and how collectives run, and change no result */
} view;

typedef struct probe {
    uint64_t token, inode; /* of the directory; on shared file systems the same on all hosts */
} probe;

/* Until it sees rank 0's file; at most for_s. */
static bl_status find_probe(const char *dir, const probe *p, double for_s, view *own)
{
    const struct timespec pause = {0, 100 * 1000 * 1000};
    double until = bl_now_s() + for_s;
    char *path = NULL;

    BL_TRY(bl_text_format(&path, "%s/%s-%016" PRIx64, dir, PROBE_PREFIX, p->token));
    for (;;) {
        uint64_t inode = bl_dir_look_anew(dir);
        own->folder = access(path, F_OK) == 0;
        own->is_elsewhere = !own->folder && inode != 0 && inode != p->inode;
        if (own->folder || bl_now_s() >= until) break;
        nanosleep(&pause, NULL);
    }
    free(path);
    return BL_OK;
}

/* Also removes probes left by crashes. Does not follow links, and keeps directories of such a
 * name. */
static void remove_probes(const char *dir)
{
    char **names = NULL, *path;
    size_t n_names = 0;

    if (bl_dir_list(dir, &names, &n_names) != BL_OK) return;
    for (size_t i = 0; i < n_names; i++) {
        if (strncmp(names[i], PROBE_PREFIX, strlen(PROBE_PREFIX)) != 0) continue;
        if (bl_path_join(dir, names[i], &path) != BL_OK) continue;
        (void)unlink(path);
        free(path);
    }
    bl_names_free(names, n_names);
}

static bl_status write_probe(const char *dir, probe *p)
{
    char *path = NULL;

    remove_probes(dir);
    if (getrandom(&p->token, sizeof p->token, 0) != sizeof p->token)
        return bl_fail_errno(BL_EIO, "getrandom");
    p->inode = bl_dir_look_anew(dir);
    BL_TRY(bl_text_format(&path, "%s/%s-%016" PRIx64, dir, PROBE_PREFIX, p->token));
    bl_status st = bl_file_write_atomic(path, "", 0);
    free(path);
    return st;
}

/* About this much of the model each host, or process that shares nothing, reads once more, so that
 * hosts with different ones do not train together. */
enum { PROBE_BYTES = 128 << 20 };

static uint64_t hash_schedule(const bl_train_config *c)
{
    int64_t threshold;

    memcpy(&threshold, &c->early_stopping_threshold, sizeof threshold);
    const int64_t keys[] = {(int64_t)c->save_strategy,
                            c->save_steps,
                            (int64_t)c->eval_strategy,
                            c->eval_steps,
                            c->load_best_model_at_end,
                            c->early_stopping_patience,
                            threshold,
                            c->shard_size,
                            c->per_device_eval_batch_size,
                            c->dump_gradients != NULL,
                            c->ring_depth,
                            c->expert_group,
                            c->gather_by_hosts};
    return XXH3_64bits(keys, sizeof keys);
}

static bl_status look(const bl_job *job, view *own)
{
    own->model = job->identity.model;
    own->train = job->identity.train;
    own->validation = job->identity.validation;
    own->schedule = hash_schedule(job->config);
    /* Where all share one host's memory, they read the same files; a borrowed base was compared. */
    if (!job->lead && bl_host_memory_size(job->host_memory) < job->topology.n_ranks)
        BL_TRY(bl_job_fingerprint(job, PROBE_BYTES, &own->weights));
    BL_TRY(bl_job_hash_adapter(job->config, &own->adapter));
    return bl_train_config_hash(job->config, BL_EFFECT_RESULT, &own->config);
}

/* The ranks whose number at `offset` is not rank 0's: a failure that names `what` and them. */
static bl_status compare(const view *views, int n_ranks, size_t offset, const char *what)
{
    char list[128] = "";
    size_t used = 0;

    for (int i = 1; i < n_ranks && used < sizeof list - 16; i++)
        if (memcmp((const char *)&views[0] + offset, (const char *)&views[i] + offset,
                   sizeof(uint64_t)) != 0)
            used += (size_t)snprintf(list + used, sizeof list - used, "%s%d", used ? ", " : "", i);
    return used == 0 ? BL_OK
                     : BL_FAIL(BL_EUSAGE, "%s not the same on rank 0 and on rank %s", what, list);
}

static bl_status compare_views(const bl_job *job, const view *views)
{
    BL_TRY(compare(views, job->topology.n_ranks, offsetof(view, config), "the configuration is"));
    BL_TRY(compare(
        views, job->topology.n_ranks, offsetof(view, schedule),
        "save_strategy, save_steps, eval_strategy, eval_steps, load_best_model_at_end, "
        "early_stopping_patience, early_stopping_threshold, "
        "per_device_eval_batch_size, shard_size, ring_depth, expert_group, gather_by_hosts or "
        "dump_gradients are"));
    BL_TRY(compare(views, job->topology.n_ranks, offsetof(view, model),
                   "the model's config.json, or its tensors, are"));
    BL_TRY(
        compare(views, job->topology.n_ranks, offsetof(view, weights), "the model's weights are"));
    BL_TRY(compare(views, job->topology.n_ranks, offsetof(view, adapter), "init_adapter is"));
    BL_TRY(compare(views, job->topology.n_ranks, offsetof(view, train), "the training data are"));
    return compare(views, job->topology.n_ranks, offsetof(view, validation),
                   "the validation data are");
}

/* Whether all see the same directory. */
static bl_status compare_folders(const bl_job *job, const char *dir, const view *views)
{
    char folder[512];

    snprintf(folder, sizeof folder,
             "output_dir %.400s (it must lie on a file system that all hosts share) is", dir);
    return compare(views, job->topology.n_ranks, offsetof(view, folder), folder);
}

/* A different directory stays different; a missing one may still appear. */
static bl_status find_folder(const bl_job *job, const bl_host_comm *t, const char *dir, view *views)
{
    view *own = &views[job->topology.first_here];
    probe p = {0};
    int n_ranks = job->topology.n_ranks;
    bool is_elsewhere = false, is_seen = true;

    if (job->topology.first_here == 0) BL_TRY(write_probe(dir, &p));
    BL_TRY(bl_host_comm_broadcast(t, &p, sizeof p));
    BL_TRY(find_probe(dir, &p, QUICK_S, own));
    BL_TRY(bl_host_comm_gather(t, views, sizeof *views));
    for (int i = 0; i < n_ranks; i++) {
        is_elsewhere |= views[i].is_elsewhere != 0;
        is_seen &= views[i].folder != 0;
    }
    if (!is_seen && !is_elsewhere) {
        bl_log_info("waiting for another host to see a new file in output_dir %s, at most %.0f s",
                    dir, PATIENCE_S - QUICK_S);
        BL_TRY(find_probe(dir, &p, PATIENCE_S - QUICK_S, own));
        BL_TRY(bl_host_comm_gather(t, views, sizeof *views));
    }
    return compare_folders(job, dir, views);
}

bl_status bl_job_check_processes(const bl_job *job, const char *output_dir)
{
    bl_status st = BL_OK;
    bl_host_comm t;
    view *views = calloc((size_t)job->topology.n_ranks, sizeof *views);

    if (!views) return BL_FAIL(BL_ENOMEM, "%d processes", job->topology.n_ranks);
    if ((st = bl_host_comm_open(job->host_world, NULL, &t)) != BL_OK) goto done;
    if (output_dir) {
        st = find_folder(job, &t, output_dir, views);
        bl_error error;
        bl_error_save(&error, st);
        if (job->topology.first_here == 0) remove_probes(output_dir);
        if (st != BL_OK) BL_TRY_GOTO(st, closed, bl_error_restore(&error));
    }
    BL_TRY_GOTO(st, closed, look(job, &views[job->topology.first_here]));
    BL_TRY_GOTO(st, closed, bl_host_comm_gather(&t, views, sizeof *views));
    st = compare_views(job, views);
closed:
    bl_host_comm_close(&t);
done:
    free(views);
    return st;
}

bl_status bl_job_meet(const bl_job *job)
{
    bl_host_comm t;

    BL_TRY(bl_host_comm_open(job->host_world, NULL, &t));
    bl_status st = bl_host_comm_barrier(&t);
    bl_host_comm_close(&t);
    return st;
}

/* ---- where the run is ---- */

enum { MAX_PATH_BYTES = 4096 };

typedef struct sent_start {
    bl_start start;           /* without its dir */
    char dir[MAX_PATH_BYTES]; /* "": from the start */
} sent_start;

bl_status bl_job_share_start(const bl_job *job, bl_start *start)
{
    sent_start sent;
    bl_host_comm t;

    memset(&sent, 0, sizeof sent); /* all its bytes are sent */
    sent.start = *start;
    sent.start.dir = NULL;
    if (start->dir && strlen(start->dir) >= MAX_PATH_BYTES)
        return BL_FAIL(BL_EUSAGE, "%s: a path of more than %d bytes", start->dir,
                       MAX_PATH_BYTES - 1);
    if (start->dir) memcpy(sent.dir, start->dir, strlen(start->dir));
    BL_TRY(bl_host_comm_open(job->host_world, NULL, &t));
    bl_status st = bl_host_comm_broadcast(&t, &sent, sizeof sent);
    bl_host_comm_close(&t);
    if (st != BL_OK || job->topology.first_here == 0) return st;
    *start = sent.start;
    if (sent.dir[0] && !(start->dir = strdup(sent.dir))) return BL_FAIL(BL_ENOMEM, "a path");
    return BL_OK;
}

/* ---- products ---- */

typedef struct rank_products {
    char text[BL_CUDA_GEMM_TEXT_BYTES];
} rank_products;

static void warn_of_products(const rank_products *products, int n_ranks)
{
    int n_others = 0, last = 0;

    for (int i = 1; i < n_ranks; i++)
        if (strcmp(products[i].text, products[0].text) != 0) {
            n_others++;
            last = i;
        }
    if (n_others > 0)
        bl_log_warning("not bit-identical on other hosts: products are made with %s on rank 0 and "
                       "otherwise on %d ranks, as %s on rank %d",
                       products[0].text, n_others, products[last].text, last);
}

bl_status bl_job_compare_products(const bl_job *job)
{
    rank_products *products = calloc((size_t)job->topology.n_ranks, sizeof *products);
    bl_status st;
    bl_host_comm t;

    if (!products) return BL_FAIL(BL_ENOMEM, "the machines of %d processes", job->topology.n_ranks);
    BL_TRY_GOTO(st, done, bl_host_comm_open(job->host_world, NULL, &t));
    st = bl_products_describe(job, products[job->topology.first_here].text);
    if (st == BL_OK) st = bl_host_comm_gather(&t, products, sizeof *products);
    bl_host_comm_close(&t);
    if (st == BL_OK && job->topology.first_here == 0)
        warn_of_products(products, job->topology.n_ranks);
done:
    free(products);
    return st;
}

/* ---- plans ---- */

typedef struct rank_memory {
    int64_t host, gpu; /* bytes; -1: not known */
    int64_t tokenizer; /* bytes */
    char name[64];     /* of the host */
} rank_memory;

static int64_t bytes_at(const rank_memory *memory, int rank, size_t offset)
{
    return *(const int64_t *)(const void *)((const char *)&memory[rank] + offset);
}

/* The rank that has the least. */
static int find_least(const rank_memory *memory, int n_ranks, size_t offset)
{
    int found = 0;
    for (int i = 1; i < n_ranks; i++)
        if (bytes_at(memory, i, offset) < bytes_at(memory, found, offset)) found = i;
    return found;
}

/* Never 0, which would mean this process's own memory; -1: not known. */
static int64_t least(const rank_memory *memory, int n_ranks, size_t offset)
{
    int64_t n_bytes = bytes_at(memory, find_least(memory, n_ranks, offset), offset);
    return n_bytes == 0 ? 1 : n_bytes;
}

/* All ranks plan with the least memory of any: another process on one GPU slows all. */
static void warn_of_least_gpu(const rank_memory *memory, int n_ranks)
{
    int rank = find_least(memory, n_ranks, offsetof(rank_memory, gpu));
    int64_t gpu = memory[rank].gpu, most = gpu;

    for (int i = 0; i < n_ranks; i++) most = bl_max_i64(most, memory[i].gpu);
    if (gpu < 0 || gpu >= most / 100 * 95) return;
    bl_log_warning("rank %d on host %s: its GPU has %.4g GB free for the run, others up to %.4g, "
                   "and all ranks plan with the least; does another process use it (nvidia-smi)?",
                   rank, memory[rank].name, bl_gb(gpu), bl_gb(most));
}

/* The ranks of a host share its memory, so only hosts are compared. */
static void warn_of_least_host(const rank_memory *memory, int n_ranks)
{
    int rank = find_least(memory, n_ranks, offsetof(rank_memory, host));
    int64_t host = memory[rank].host, most = host;

    for (int i = 0; i < n_ranks; i++)
        if (strcmp(memory[i].name, memory[rank].name) != 0) most = bl_max_i64(most, memory[i].host);
    if (host < 0 || host >= most / 100 * 95) return;
    bl_log_warning("host %s has %.4g GB of memory available, others up to %.4g, and all ranks "
                   "plan with the least",
                   memory[rank].name, bl_gb(host), bl_gb(most));
}

/* The first choice that is not rank 0's, by its offset in an array of them; -1: none. */
static int find_other(const void *choices, size_t n_bytes, int n_ranks)
{
    for (int i = 1; i < n_ranks; i++)
        if (memcmp(choices, (const char *)choices + (size_t)i * n_bytes, n_bytes) != 0) return i;
    return -1;
}

bl_status bl_job_share_memory(const bl_job *job, bl_plan_input *input)
{
    int n_ranks = job->topology.n_ranks;
    bool has_gpu = job->config->device == BL_CONFIG_DEVICE_CUDA;
    rank_memory *memory = calloc((size_t)n_ranks, sizeof *memory);
    bl_status st;
    bl_host_comm t;

    if (!memory) return BL_FAIL(BL_ENOMEM, "the memory of %d processes", n_ranks);
    BL_TRY_GOTO(st, done, bl_host_comm_open(job->host_world, NULL, &t));
    rank_memory *own = &memory[job->topology.first_here];
    own->host = bl_plan_available_bytes(input);
    own->tokenizer = input->tokenizer_bytes;
    own->gpu = has_gpu ? bl_plan_gpu_available_bytes(input) : -1;
    bl_host_name(own->name, sizeof own->name);
    st = bl_host_comm_gather(&t, memory, sizeof *memory);
    bl_host_comm_close(&t);
    if (st == BL_OK && job->topology.first_here == 0) {
        warn_of_least_gpu(memory, n_ranks);
        warn_of_least_host(memory, n_ranks);
    }
    for (int i = 0; i < n_ranks; i++) /* measured: processes must plan alike */
        input->tokenizer_bytes = bl_max_i64(input->tokenizer_bytes, memory[i].tokenizer);
    input->available_bytes = least(memory, n_ranks, offsetof(rank_memory, host));
    input->gpu_available_bytes = least(memory, n_ranks, offsetof(rank_memory, gpu));
done:
    free(memory);
    return st;
}

/* The choices of a plan that change collectives or results. */
typedef struct choice {
    int64_t max_group, n_saved, n_saving_all, ratio_ppm, prepared_bytes, places_copy,
        optimizer_tier, optimizer_ppm;
} choice;

bl_status bl_job_compare_plans(const bl_job *job)
{
    int n_ranks = job->topology.n_ranks;
    const bl_plan *plan = &job->plan;
    choice *choices = calloc((size_t)n_ranks, sizeof *choices);
    bl_status st;
    bl_host_comm t;

    if (!choices) return BL_FAIL(BL_ENOMEM, "the plans of %d processes", n_ranks);
    BL_TRY_GOTO(st, done, bl_host_comm_open(job->host_world, NULL, &t));
    choices[job->topology.first_here] =
        (choice){plan->pass.max_group,
                 (int64_t)plan->pass.save,
                 plan->pass.n_saving_all,
                 (int64_t)(plan->placement.ratio * 1e6),
                 (int64_t)bl_linear_prepared_bytes(&plan->pass.prepared),
                 plan->placement.places_copy,
                 (int64_t)plan->optimizer.tier,
                 (int64_t)(plan->optimizer.ratio * 1e6)};
    st = bl_host_comm_gather(&t, choices, sizeof *choices);
    bl_host_comm_close(&t);
    int other = st == BL_OK ? find_other(choices, sizeof *choices, n_ranks) : -1;
    if (other > 0)
        st = BL_FAIL(BL_ELIMIT,
                     "ranks 0 and %d plan differently: their hosts or GPUs are not alike; set "
                     "offload_ratio, activation_checkpointing and visit_tokens%s",
                     other,
                     bl_train_config_is_full(job->config)
                         ? ", optimizer_tier and offload_compute_copy"
                         : "");
done:
    free(choices);
    return st;
}
