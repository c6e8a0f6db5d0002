/* SPDX-License-Identifier: Apache-2.0 */
/* trace.c -- writes spans as Chrome trace events. */
#include "train/trace.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct bl_trace {
    pthread_mutex_t lock; /* guards the members below */
    FILE *file;
    char *path;
};

static void write_name(FILE *file, const char *what, int rank, int lane, const char *name)
{
    fprintf(file,
            "{\"name\":\"%s\",\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":\"%s\"}},\n",
            what, rank, lane, name);
}

bl_status bl_trace_open(const char *path, int first_rank, int n_ranks, bl_trace **out)
{
    *out = NULL;
    bl_trace *trace = calloc(1, sizeof *trace);
    if (trace) trace->path = strdup(path);
    if (!trace || !trace->path) {
        free(trace);
        return BL_FAIL(BL_ENOMEM, "the trace");
    }
    trace->file = fopen(path, "we");
    if (!trace->file) {
        bl_status st = bl_fail_errno(BL_EIO, "open %s", path);
        free(trace->path);
        free(trace);
        return st;
    }
    pthread_mutex_init(&trace->lock, NULL);
    fprintf(trace->file, BL_TRACE_MARK "\n");
    for (int rank = first_rank; rank < first_rank + n_ranks; rank++) {
        char name[32];
        snprintf(name, sizeof name, "rank %d", rank);
        write_name(trace->file, "process_name", rank, 0, name);
        for (int lane = 0; lane < BL_N_LANES; lane++)
            write_name(trace->file, "thread_name", rank, lane, bl_lane_name((bl_lane)lane));
    }
    *out = trace;
    return BL_OK;
}

void bl_trace_span(void *user, const bl_span *span)
{
    const bl_trace_rank *self = user;
    bl_lane lane = span->is_stall ? BL_LANE_COMPUTE : span->lane;

    pthread_mutex_lock(&self->trace->lock);
    fprintf(self->trace->file,
            "{\"name\":\"%s%s%s\",\"ph\":\"X\",\"ts\":%.3f,\"dur\":%.3f,\"pid\":%d,\"tid\":%d,"
            "\"args\":{",
            span->name, span->is_stall ? " for " : "",
            span->is_stall ? bl_lane_name(span->lane) : "", span->begin_s * 1e6,
            (span->end_s - span->begin_s) * 1e6, self->rank, (int)lane);
    if (span->unit >= 0) fprintf(self->trace->file, "\"layer\":%lld,", (long long)span->unit);
    if (span->item >= 0) fprintf(self->trace->file, "\"item\":%d,", span->item);
    fprintf(self->trace->file, "\"bytes\":%lld}},\n", (long long)span->n_bytes);
    pthread_mutex_unlock(&self->trace->lock);
}

bl_status bl_trace_close(bl_trace *trace)
{
    bl_status st = BL_OK;

    if (!trace) return BL_OK;
    /* An event without content ends the list: JSON allows no comma after the last one. */
    fprintf(trace->file, "{\"name\":\"end\",\"ph\":\"M\",\"pid\":0,\"tid\":0,\"args\":{}}]}\n");
    bool failed = ferror(trace->file) != 0;
    if (fclose(trace->file) != 0)
        st = bl_fail_errno(BL_EIO, "write %s", trace->path);
    else if (failed) /* its errno is long gone */
        st = BL_FAIL(BL_EIO, "write %s: a part of it could not be written", trace->path);
    pthread_mutex_destroy(&trace->lock);
    free(trace->path);
    free(trace);
    return st;
}
