/* SPDX-License-Identifier: Apache-2.0 */
/* processes.c -- what the processes of a job agree on before their ranks start: that they see the same folder, model, data and
 * configuration, and where rank 0's has found the run. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "base/files.h"
#include "base/log.h"
#include "base/sizes.h"
#include "ops/gemm.h"
#include "train/training.h"

static const char PROBE_NAME[] = ".ballast.probe";

/* Collectives of a process's main thread. */
typedef struct talk {
    bl_comm *world; /* borrowed */
    bl_device *device;
    bl_stream *stream;
} talk;

static void talk_close(talk *t)
{
    bl_stream_destroy(t->stream);
    bl_device_destroy(t->device);
}

static bl_status talk_open(const bl_job *job, talk *t)
{
    *t = (talk){.world = job->world};
    BL_TRY(bl_device_create_cpu(1, &t->device));
    bl_status st = bl_stream_create(t->device, "agree", &t->stream);
    if (st != BL_OK) talk_close(t);
    return st;
}

static bl_status broadcast(const talk *t, void *bytes, size_t n_bytes)
{
    BL_TRY(bl_comm_broadcast(t->world, t->stream, bytes, n_bytes, 0));
    return bl_stream_synchronize(t->stream);
}

/* ---- the same folder, model, data and configuration ---- */

typedef struct view {
    uint64_t folder, model, weights, train, validation, config;
} view;

static bl_status read_probe(const char *path, uint64_t *token)
{
    enum { MAX_BYTES = 64 };
    void *bytes;
    size_t n_bytes;

    BL_TRY(bl_file_read_all(path, MAX_BYTES, &bytes, &n_bytes));
    *token = strtoull(bytes, NULL, 16);
    free(bytes);
    return BL_OK;
}

/* What this process finds in output_dir where rank 0's has put `token`. A network file system may show it late. */
static uint64_t find_token(const char *path, uint64_t token)
{
    enum { TRIES = 50 };
    const struct timespec pause = {0, 100 * 1000 * 1000};
    uint64_t found = ~token;

    for (int i = 0; i < TRIES; i++) {
        if (read_probe(path, &found) == BL_OK && found == token) break;
        nanosleep(&pause, NULL);
    }
    return found;
}

static bl_status write_probe(const char *path, uint64_t *token)
{
    char text[24];
    if (getrandom(token, sizeof *token, 0) != sizeof *token)
        return bl_fail_errno(BL_EIO, "getrandom");
    snprintf(text, sizeof text, "%016" PRIx64 "\n", *token);
    return bl_file_write_atomic(path, text, strlen(text));
}

/* About this much of the model each process reads once more, so that hosts with different ones do not train together; what those of one host
 * read is in its page cache after the first. */
enum { PROBE_BYTES = 128 << 20 };

static bl_status look_at_folder(const talk *t, const char *probe, view *own)
{
    uint64_t token = 0;

    if (bl_comm_rank(t->world) == 0) BL_TRY(write_probe(probe, &token));
    BL_TRY(broadcast(t, &token, sizeof token));
    own->folder = find_token(probe, token);
    return BL_OK;
}

static bl_status look(const bl_job *job, const talk *t, const char *probe, view *own)
{
    *own = (view){.model = job->identity.model,
                  .train = job->identity.train,
                  .validation = job->identity.validation};
    if (probe) BL_TRY(look_at_folder(t, probe, own));
    BL_TRY(bl_llama_fingerprint(job->model, PROBE_BYTES, &own->weights));
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

static bl_status compare_views(const bl_job *job, const char *output_dir, const view *views)
{
    char folder[512];
    if (output_dir) {
        snprintf(folder, sizeof folder,
                 "output_dir %.400s (it must lie on a file system that all hosts share) is",
                 output_dir);
        BL_TRY(compare(views, job->topology.n_ranks, offsetof(view, folder), folder));
    }
    BL_TRY(compare(views, job->topology.n_ranks, offsetof(view, config), "the configuration is"));
    BL_TRY(compare(views, job->topology.n_ranks, offsetof(view, model),
                   "the model's config.json, or its tensors, are"));
    BL_TRY(
        compare(views, job->topology.n_ranks, offsetof(view, weights), "the model's weights are"));
    BL_TRY(compare(views, job->topology.n_ranks, offsetof(view, train), "the training data are"));
    return compare(views, job->topology.n_ranks, offsetof(view, validation),
                   "the validation data are");
}

bl_status bl_job_check_processes(const bl_job *job, const char *output_dir)
{
    bl_status st = BL_OK;
    talk t;
    view own, *views = calloc((size_t)job->topology.n_ranks, sizeof *views);
    char *probe = NULL;

    if (!views) return BL_FAIL(BL_ENOMEM, "%d processes", job->topology.n_ranks);
    if ((st = talk_open(job, &t)) != BL_OK) goto done;
    if (output_dir) BL_TRY_GOTO(st, closed, bl_path_join(output_dir, PROBE_NAME, &probe));
    BL_TRY_GOTO(st, closed, look(job, &t, probe, &own));
    BL_TRY_GOTO(st, closed, bl_comm_all_gather(t.world, t.stream, &own, views, sizeof own));
    BL_TRY_GOTO(st, closed, bl_stream_synchronize(t.stream));
    st = compare_views(job, output_dir, views);
closed:
    talk_close(&t);
    if (job->topology.first_here == 0 && probe && st == BL_OK) st = bl_tree_remove(probe);
done:
    free(probe);
    free(views);
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
    talk t;

    memset(&sent, 0, sizeof sent); /* all its bytes are sent */
    sent.start = *start;
    sent.start.dir = NULL;
    if (start->dir && strlen(start->dir) >= MAX_PATH_BYTES)
        return BL_FAIL(BL_EUSAGE, "%s: a path of more than %d bytes", start->dir,
                       MAX_PATH_BYTES - 1);
    if (start->dir) memcpy(sent.dir, start->dir, strlen(start->dir));
    BL_TRY(talk_open(job, &t));
    bl_status st = broadcast(&t, &sent, sizeof sent);
    talk_close(&t);
    if (st != BL_OK || job->topology.first_here == 0) return st;
    *start = sent.start;
    if (sent.dir[0] && !(start->dir = strdup(sent.dir))) return BL_FAIL(BL_ENOMEM, "a path");
    return BL_OK;
}

/* ---- machines ---- */

typedef struct machine {
    char products[BL_CPU_GEMM_TEXT_BYTES];
} machine;

static void warn_of_machines(const machine *machines, int n_ranks)
{
    int n_others = 0, last = 0;

    for (int i = 1; i < n_ranks; i++)
        if (strcmp(machines[i].products, machines[0].products) != 0) {
            n_others++;
            last = i;
        }
    if (n_others > 0)
        bl_log_warning("not bit-identical on other hosts: products are made with %s on rank 0 and "
                       "otherwise on %d ranks, as %s on rank %d",
                       machines[0].products, n_others, machines[last].products, last);
}

bl_status bl_job_compare_machines(const bl_job *job)
{
    machine own = {0}, *machines = calloc((size_t)job->topology.n_ranks, sizeof *machines);
    bl_status st;
    talk t;

    if (!machines) return BL_FAIL(BL_ENOMEM, "the machines of %d processes", job->topology.n_ranks);
    BL_TRY_GOTO(st, done, talk_open(job, &t));
    bl_cpu_gemm_describe(own.products);
    st = bl_comm_all_gather(t.world, t.stream, &own, machines, sizeof own);
    if (st == BL_OK) st = bl_stream_synchronize(t.stream);
    talk_close(&t);
    if (st == BL_OK && job->topology.first_here == 0)
        warn_of_machines(machines, job->topology.n_ranks);
done:
    free(machines);
    return st;
}
