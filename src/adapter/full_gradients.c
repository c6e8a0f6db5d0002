/* SPDX-License-Identifier: Apache-2.0 */
/* full_gradients.c -- the gradients of a step of the trained weights, as a safetensors file with
 * the model's tensor names: part by part gathered, and written by rank 0. */
#include <stdlib.h>
#include <string.h>

#include "adapter/internal.h"

enum { FLOAT = sizeof(float) };

typedef struct dump {
    bl_adapter_state *state;
    const bl_arch_tensor *tensors;
    bl_stored_tensor_spec *specs;
    size_t n;
    const bl_base_part *gathered; /* the part in state->trained->whole; NULL: none */
} dump;

/* Of several ranks: the part's rows of all of them; collective. Frozen rows of this rank have any
 * values. */
static bl_status gather(dump *d, int64_t unit, int matrix)
{
    const bl_adapter_state *s = d->state;
    const adapter_full *f = s->trained;
    const bl_base_part *part = &f->base_layout->units[unit].matrix[matrix].part[0];
    const float *rows;

    if (d->gathered == part) return BL_OK;
    d->gathered = part;
    for (int64_t i = f->spans.first[unit]; i < f->spans.first[unit + 1]; i++) {
        const adapter_span *span = &f->spans.span[i];
        if (span->at.idx_matrix != matrix) continue;
        BL_TRY(adapter_units_gradient(f->units, span, &rows));
        BL_TRY(bl_stream_copy(s->communication, s->partial + span->first, rows,
                              (size_t)(span->n * FLOAT)));
        BL_TRY(bl_stream_synchronize(s->communication)); /* before the next are in that place */
    }
    bl_comm_set_label(s->world, "the gradients of layer", unit);
    BL_TRY(bl_comm_all_gather(s->world, s->communication, s->partial, f->whole, part->shard_bytes));
    bl_comm_set_label(s->world, NULL, 0);
    return bl_stream_synchronize(s->communication);
}

/* *out: the tensor's gradient, until the next call. */
static bl_status find_rows(dump *d, const bl_arch_tensor *tensor, const float **out)
{
    const adapter_full *f = d->state->trained;
    int64_t unit, row;
    int matrix;

    adapter_full_place(f->config, tensor, &unit, &matrix, &row);
    int64_t cols = f->base_layout->units[unit].matrix[matrix].part[0].row_bytes / FLOAT;
    if (f->reduces) {
        BL_TRY(gather(d, unit, matrix));
        *out = f->whole + row * cols;
        return BL_OK;
    }
    const adapter_span *span = adapter_span_at(&f->spans, unit, matrix, row);
    BL_TRY(adapter_units_gradient(f->units, span, out));
    *out += (row - span->row) * cols;
    return BL_OK;
}

/* writer NULL: another rank's part of it. */
static bl_status write_tensor(dump *d, const bl_arch_tensor *tensor, bl_safetensors_writer *writer)
{
    const bl_adapter_state *s = d->state;
    int64_t n = tensor->shape[0] * (tensor->n_dims > 1 ? tensor->shape[1] : 1);
    const float *floats;

    if (tensor->role == BL_ROLE_VECTOR)
        floats = s->trained->vector_grad + tensor->offset;
    else
        BL_TRY(find_rows(d, tensor, &floats));
    return writer ? adapter_append_bytes(writer, s->staging, floats, (size_t)(n * FLOAT)) : BL_OK;
}

/* All ranks need the order of the file, which the writer decides: it has none for the others. */
static int by_name(const void *a, const void *b)
{
    return strcmp(((const bl_arch_tensor *)a)->name, ((const bl_arch_tensor *)b)->name);
}

static bl_status write_all(dump *d, const char *path)
{
    static const char *const metadata[] = {"content", BL_GRADIENTS_MARK};
    bl_safetensors_writer *writer = NULL;
    bl_status st = BL_OK;

    if (bl_comm_rank(d->state->world) == 0)
        BL_TRY(bl_safetensors_create(path, d->specs, d->n, metadata, 1, &writer));
    for (size_t i = 0; i < d->n; i++)
        BL_TRY_GOTO(st, done, write_tensor(d, &d->tensors[i], writer));
    if (writer) st = bl_safetensors_writer_commit(writer);
    writer = NULL;
done:
    bl_safetensors_writer_abort(writer);
    return st;
}

bl_status adapter_full_write_gradients(bl_adapter_state *s, const char *path)
{
    const bl_model_config *config = s->trained->config;
    size_t most = (size_t)bl_arch_tensor_count(config), n = 0;
    bl_arch_tensor *tensors = calloc(most, sizeof *tensors);
    bl_stored_tensor_spec *specs = calloc(most, sizeof *specs);
    bl_status st = tensors && specs ? BL_OK : BL_FAIL(BL_ENOMEM, "the list of gradients");

    /* The last of them may be on their way to the disk. */
    if (st == BL_OK) st = bl_adapter_full_flush(s);
    for (size_t i = 0; st == BL_OK && i < most; i++) {
        bl_arch_tensor t = bl_arch_tensor_at(config, (int64_t)i);
        if (t.role == BL_ROLE_HEAD && config->tie_word_embeddings) continue;
        if (!s->trained->set->tensor[i]) continue;
        tensors[n++] = t;
    }
    if (st == BL_OK) {
        qsort(tensors, n, sizeof *tensors, by_name);
        for (size_t i = 0; i < n; i++)
            specs[i] = (bl_stored_tensor_spec){tensors[i].name,
                                               BL_F32,
                                               tensors[i].n_dims,
                                               {tensors[i].shape[0], tensors[i].shape[1]}};
        dump d = {.state = s, .tensors = tensors, .specs = specs, .n = n};
        st = write_all(&d, path);
    }
    free(specs);
    free(tensors);
    return st;
}
