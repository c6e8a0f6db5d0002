/* SPDX-License-Identifier: Apache-2.0 */
/* environment.c -- reads a process's place in a job from the environment. Opens nothing. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/sizes.h"
#include "job/internal.h"

enum { MAX_PROCESSES = 1 << 20 };

/* Ballast's own: from a parent to its child. */
static const char CHILD_VARIABLE[] = "BALLAST_CHILD";
static const char CHILD_NUMBERS[] = "parent=%d rank=%d ranks=%d first=%d local=%d control=%d "
                                    "line=%d bulk=%d memory=%d sockets=";

/* The variables by which one kind of launcher places a process. */
typedef struct variables {
    bl_launch_kind kind;
    const char *launcher, *size, *rank, *n_local, *local_rank;
    const char *address;  /* is needed, too, for more than one process; NULL: none is */
    const char *signs[2]; /* only this launcher sets them; NULL: none */
    bool has_scripts;     /* rank 0 without a size is a script outside of the launcher's steps */
} variables;

static const variables torchrun = {.kind = BL_LAUNCH_TORCHRUN,
                                   .launcher = "torchrun",
                                   .size = "WORLD_SIZE",
                                   .rank = "RANK",
                                   .n_local = "LOCAL_WORLD_SIZE",
                                   .local_rank = "LOCAL_RANK",
                                   .address = "MASTER_ADDR",
                                   .signs = {"GROUP_RANK", "TORCHELASTIC_RUN_ID"}};
static const variables open_mpi = {.kind = BL_LAUNCH_MPI,
                                   .launcher = "mpirun",
                                   .size = "OMPI_COMM_WORLD_SIZE",
                                   .rank = "OMPI_COMM_WORLD_RANK",
                                   .n_local = "OMPI_COMM_WORLD_LOCAL_SIZE",
                                   .local_rank = "OMPI_COMM_WORLD_LOCAL_RANK"};
static const variables pmi = {.kind = BL_LAUNCH_MPI,
                              .launcher = "mpirun",
                              .size = "PMI_SIZE",
                              .rank = "PMI_RANK",
                              .n_local = "MPI_LOCALNRANKS",
                              .local_rank = "MPI_LOCALRANKID"};
static const variables slurm = {.kind = BL_LAUNCH_MPI,
                                .launcher = "srun",
                                .size = "SLURM_STEP_NUM_TASKS",
                                .rank = "SLURM_PROCID",
                                .n_local = "SLURM_STEP_TASKS_PER_NODE",
                                .local_rank = "SLURM_LOCALID",
                                .has_scripts = true};

/* A number of the environment; NOT_SET, or MALFORMED. Of Slurm's list "4(x2),3" the first one. */
enum { NOT_SET = -1, MALFORMED = -2 };

static int number_of(const variables *v, const char *name)
{
    const char *text = name ? getenv(name) : NULL;
    size_t n_digits = text ? strspn(text, "0123456789") : 0;
    bool is_list = v == &slurm && name == v->n_local;

    if (!text) return NOT_SET;
    if (n_digits == 0 || strlen(text) != (is_list ? strspn(text, "0123456789(x),") : n_digits))
        return MALFORMED;
    long value = strtol(text, NULL, 10);
    return value > MAX_PROCESSES ? MALFORMED : (int)value;
}

static bool read_variables(const variables *v, const char *needs, bl_launch_info *out)
{
    int size = number_of(v, v->size), rank = number_of(v, v->rank);

    if (size < 1 || rank < 0 || rank >= size || (needs && !getenv(needs))) return false;
    int n_local = number_of(v, v->n_local), local_rank = number_of(v, v->local_rank);
    if (local_rank < 0) local_rank = 0;
    if (n_local <= local_rank) n_local = local_rank + 1; /* of Slurm's "2,4" the 2 */
    *out = (bl_launch_info){.kind = size > 1 ? v->kind : BL_LAUNCH_ALONE,
                            .launcher = v->launcher,
                            .rank = rank,
                            .n_processes = size,
                            .local_rank = local_rank,
                            .n_local = n_local};
    return true;
}

/* ---- checks ---- */

static bl_status fail_value(const char *name, const char *what)
{
    return BL_FAIL(BL_EUSAGE, "%s is '%.100s', but %s; correct or unset the launcher's variables",
                   name, getenv(name), what);
}

static const char *find_set(const variables *v)
{
    const char *const names[] = {v->rank,       v->size,     v->n_local,
                                 v->local_rank, v->signs[0], v->signs[1]};

    for (size_t i = 0; i < BL_COUNT(names); i++)
        if (names[i] && getenv(names[i])) return names[i];
    return NULL;
}

/* Each one that is set is a number. */
static bl_status check_numbers(const variables *v)
{
    const char *const names[] = {v->size, v->rank, v->n_local, v->local_rank, v->signs[0]};

    for (size_t i = 0; i < BL_COUNT(names); i++) {
        int value = number_of(v, names[i]), least = names[i] == v->size || names[i] == v->n_local;
        char text[64];
        snprintf(text, sizeof text, "it must be a number from %d to %d", least, MAX_PROCESSES);
        if (value != NOT_SET && value < least) return fail_value(names[i], text);
    }
    return BL_OK;
}

/* The variable that is missing in a set that has some; NULL: none. */
static const char *find_missing(const variables *v)
{
    int size = number_of(v, v->size), rank = number_of(v, v->rank);
    bool has_n_local = getenv(v->n_local), has_local_rank = getenv(v->local_rank);

    if (!find_set(v) || size == 1) return NULL;
    if (size == NOT_SET) return v->has_scripts && rank <= 0 && !has_n_local ? NULL : v->size;
    if (rank == NOT_SET) return v->rank;
    if (has_n_local != has_local_rank) return has_n_local ? v->local_rank : v->n_local;
    const char *address = v->address ? getenv(v->address) : v->size;
    return address && address[0] ? NULL : v->address;
}

/* Numbers of a complete set agree. */
static bl_status check_agreement(const variables *v)
{
    int size = number_of(v, v->size), rank = number_of(v, v->rank);
    int n_local = number_of(v, v->n_local), local_rank = number_of(v, v->local_rank);
    char text[160];

    if (size < 1) return BL_OK;
    snprintf(text, sizeof text, "%s is '%d'", v->size, size);
    if (rank >= size) return fail_value(v->rank, text);
    if (n_local > size && v != &slurm) return fail_value(v->n_local, text);
    if (n_local < 1 || local_rank < n_local || v == &slurm) return BL_OK;
    snprintf(text, sizeof text, "%s is '%d'", v->n_local, n_local);
    return fail_value(v->local_rank, text);
}

/* Variables of several processes that do not place this one. */
static bl_status check_others(void)
{
    static const char *const others[] = {"PMIX_RANK", "MV2_COMM_WORLD_SIZE", "PET_NNODES"};

    for (size_t i = 0; i < BL_COUNT(others); i++) {
        const char *text = getenv(others[i]);
        if (text && (i == 0 || (strcmp(text, "1") != 0 && strcmp(text, "1:1") != 0)))
            return fail_value(others[i], "no variables of mpirun, srun or torchrun place this "
                                         "process among several");
    }
    return BL_OK;
}

bl_status job_environment_check(const bl_launch_info *info)
{
    static const variables *const all[] = {&torchrun, &open_mpi, &pmi, &slurm};

    for (size_t i = 0; i < BL_COUNT(all); i++) {
        BL_TRY(check_numbers(all[i]));
        BL_TRY(check_agreement(all[i]));
        const char *missing = find_missing(all[i]), *set = missing ? find_set(all[i]) : NULL;
        char text[160];
        if (!missing) continue;
        snprintf(text, sizeof text, "%s is not set", missing);
        bool is_unused = missing == all[i]->size || missing == all[i]->rank;
        if (info->n_processes == 1 || !is_unused) return fail_value(set, text);
        if (info->rank == 0)
            bl_log_warning("%s is '%.100s', but %s: using the variables of %s", set, getenv(set),
                           text, info->launcher);
    }
    return info->launcher ? BL_OK : check_others();
}

/* ---- */

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
    /* The launcher that started this process last takes precedence: mpirun's daemons and torchrun
     * are a step of Slurm's themselves, or torchrun a task of mpirun, and their processes inherit
     * its variables. PMI's size and rank are also set by `srun --mpi=pmi2`; MPICH and Intel MPI add
     * the local ones. Kubernetes sets torchrun's variables, but neither the local ones nor the name
     * of the run. */
    static const struct {
        const variables *of;
        const char *needs; /* another variable that is set; NULL: none */
    } all[] = {{&torchrun, "TORCHELASTIC_RUN_ID"}, {&open_mpi, NULL}, {&pmi, "MPI_LOCALRANKID"},
               {&torchrun, "MASTER_ADDR"},         {&slurm, NULL},    {&pmi, NULL}};

    *out = (bl_launch_info){.n_processes = 1, .n_local = 1};
    if (read_child(out)) return;
    for (size_t i = 0; i < BL_COUNT(all); i++)
        if (read_variables(all[i].of, all[i].needs, out)) return;
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
