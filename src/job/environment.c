/* SPDX-License-Identifier: Apache-2.0 */
/* environment.c -- reads a process's place in a job from the environment. Opens nothing. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "job/internal.h"

enum { MAX_PROCESSES = 1 << 20 };

/* Ballast's own: from a parent to its child. */
static const char CHILD_VARIABLE[] = "BALLAST_CHILD";
static const char CHILD_NUMBERS[] = "parent=%d rank=%d ranks=%d first=%d local=%d control=%d "
                                    "line=%d bulk=%d memory=%d sockets=";

/* A number of the environment, or `missing`. */
static int number_of(const char *name, int missing)
{
    const char *text = getenv(name);
    char *end;
    if (!text) return missing;
    long value = strtol(text, &end, 10);
    return end == text || value < 0 || value > MAX_PROCESSES ? missing : (int)value;
}

typedef struct variables {
    bl_launch_kind kind;
    const char *launcher, *size, *rank, *n_local, *local_rank;
    const char *needs; /* another variable that is set; NULL: none */
} variables;

static bool read_variables(const variables *v, bl_launch_info *out)
{
    int size = number_of(v->size, 0), rank = number_of(v->rank, -1);

    if (size < 1 || rank < 0 || rank >= size || (v->needs && !getenv(v->needs))) return false;
    int n_local = number_of(v->n_local, 1); /* of Slurm's "4(x2)" the 4 */
    int local_rank = number_of(v->local_rank, 0);
    if (n_local <= local_rank) n_local = local_rank + 1; /* and of its "2,4" the 2 */
    *out = (bl_launch_info){.kind = size > 1 ? v->kind : BL_LAUNCH_ALONE,
                            .launcher = v->launcher,
                            .rank = rank,
                            .n_processes = size,
                            .local_rank = local_rank,
                            .n_local = n_local};
    return true;
}

static bool read_child(bl_launch_info *out)
{
    bl_launch_child child;

    if (!getenv(CHILD_VARIABLE)) return false;
    *out = (bl_launch_info){
        .kind = BL_LAUNCH_CHILD, .launcher = "ballast", .n_processes = 1, .n_local = 1};
    if (job_child_read(&child) != BL_OK) return true; /* bl_launch_begin says so */
    out->rank = child.rank;
    out->n_processes = child.n_ranks;
    out->local_rank = child.rank - child.first_on_host;
    out->n_local = child.n_on_host;
    job_child_free(&child);
    return true;
}

void bl_launch_read(bl_launch_info *out)
{
    /* Whoever started this process last comes first: mpirun's daemons and torchrun are a step of
     * Slurm's themselves, or torchrun a task of mpirun, and their processes inherit its variables.
     * PMI's size and rank are also set by `srun --mpi=pmi2`; MPICH and Intel MPI add the local
     * ones. Kubernetes sets torchrun's variables, but neither the local ones nor the name of the
     * run. */
    static const variables all[] = {
        {BL_LAUNCH_TORCHRUN, "torchrun", "WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK",
         "TORCHELASTIC_RUN_ID"},
        {BL_LAUNCH_MPI, "mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK",
         "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", NULL},
        {BL_LAUNCH_MPI, "mpirun", "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID",
         "MPI_LOCALRANKID"},
        {BL_LAUNCH_TORCHRUN, "torchrun", "WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK",
         "MASTER_ADDR"},
        {BL_LAUNCH_MPI, "srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_TASKS_PER_NODE",
         "SLURM_LOCALID", NULL},
        {BL_LAUNCH_MPI, "mpirun", "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID",
         NULL},
    };

    *out = (bl_launch_info){.n_processes = 1, .n_local = 1};
    if (read_child(out)) return;
    for (size_t i = 0; i < BL_COUNT(all); i++)
        if (read_variables(&all[i], out)) return;
}

/* ---- a child of bl_launch_run_ranks ---- */

char *job_child_format(const bl_launch_child *child)
{
    char *text = NULL;
    size_t n_bytes;
    FILE *out = open_memstream(&text, &n_bytes);

    if (!out) return NULL;
    fprintf(out, "%s=", CHILD_VARIABLE);
    fprintf(out, CHILD_NUMBERS, child->parent, child->rank, child->n_ranks, child->first_on_host,
            child->n_on_host, child->control_fd, child->line_fd, child->bulk_fd, child->memory_fd);
    for (int i = 0; i < child->n_ranks; i++) fprintf(out, "%s%d", i ? "," : "", child->sockets[i]);
    if (fclose(out) == 0) return text;
    free(text);
    return NULL;
}

bool job_child_is(const char *definition)
{
    return strncmp(definition, CHILD_VARIABLE, sizeof CHILD_VARIABLE - 1) == 0 &&
           definition[sizeof CHILD_VARIABLE - 1] == '=';
}

/* "3,-1,5": exactly n numbers. */
static bool parse_sockets(const char *text, int n, int *sockets)
{
    for (int i = 0; i < n; i++) {
        char *end;
        long fd = strtol(text, &end, 10);
        if (end == text || fd < -1 || fd > MAX_PROCESSES || *end != (i + 1 < n ? ',' : '\0'))
            return false;
        sockets[i] = (int)fd;
        text = end + 1;
    }
    return true;
}

/* All but the sockets, without memory. */
static bool parse_numbers(const char *text, bl_launch_child *c)
{
    return sscanf(text, CHILD_NUMBERS, &c->parent, &c->rank, &c->n_ranks, &c->first_on_host,
                  &c->n_on_host, &c->control_fd, &c->line_fd, &c->bulk_fd, &c->memory_fd) == 9 &&
           c->n_ranks >= 1 && c->n_ranks <= MAX_PROCESSES && c->n_on_host >= 1 &&
           c->first_on_host >= 0 && c->rank >= c->first_on_host &&
           c->rank - c->first_on_host < c->n_on_host &&
           c->n_on_host <= c->n_ranks - c->first_on_host;
}

static bool parse_child(const char *text, bl_launch_child *c)
{
    const char *sockets = strstr(text, "sockets=");

    if (!sockets || !parse_numbers(text, c)) return false;
    c->sockets = calloc((size_t)c->n_ranks, sizeof *c->sockets);
    return c->sockets && parse_sockets(sockets + strlen("sockets="), c->n_ranks, c->sockets);
}

int job_child_control(void)
{
    const char *text = getenv(CHILD_VARIABLE);
    bl_launch_child child = {0};

    return text && parse_numbers(text, &child) ? child.control_fd : -1;
}

bl_status job_child_read(bl_launch_child *out)
{
    const char *text = getenv(CHILD_VARIABLE);

    *out = (bl_launch_child){0};
    if (text && parse_child(text, out)) return BL_OK;
    job_child_free(out);
    return BL_FAIL(BL_EUSAGE, "%s: only ballast itself sets this variable; unset it",
                   CHILD_VARIABLE);
}

void job_child_free(bl_launch_child *child)
{
    free(child->sockets);
    child->sockets = NULL;
}
