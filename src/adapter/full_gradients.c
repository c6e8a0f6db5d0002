/* SPDX-License-Identifier: Apache-2.0 */
/* full_gradients.c -- the gradients of a step of every weight, as a safetensors file with the
 * model's tensor names: part by part gathered, and written by rank 0. */
#include <stdlib.h>
#include <string.h>

#include "adapter/internal.h"

enum { FLOAT = sizeof(float) };

typedef struct dump {
    bl_adapter_state *state;
    const bl_arch_tensor *tensors;
    bl_stored_tensor_spec *specs;
    size_t n;
    const bl_base_part *gathered; /* the part in `rows`; NULL: none */
    const float *rows;
} dump;

static bl_base_walk walk_to(const bl_base_layout *layout, const bl_base_part *part)
{
    bl_base_walk at = {.layout = layout};
    while (bl_base_next(&at) && at.part != part) continue;
    return at;
}

/* *out: where the part's rows are on this rank, until the next part; collective. */
static bl_status gather(dump *d, const bl_base_part *part, int64_t unit, const float **out)
{
    const bl_adapter_state *s = d->state;
    const adapter_full *f = s->trained;
    const bl_base_walk at = walk_to(f->base_layout, part);

    *out = d->rows;
    if (d->gathered == part) return BL_OK;
    d->gathered = part;
    BL_TRY(adapter_units_gradient(f->units, &at, &d->rows));
    if (f->whole) {
        bl_comm_set_label(s->world, "the gradients of layer", unit);
        BL_TRY(
            bl_comm_all_gather(s->world, s->communication, d->rows, f->whole, part->shard_bytes));
        bl_comm_set_label(s->world, NULL, 0);
        BL_TRY(bl_stream_synchronize(s->communication));
        d->rows = f->whole;
    }
    *out = d->rows;
    return BL_OK;
}

/* writer NULL: another rank's part of it. */
static bl_status write_tensor(dump *d, const bl_arch_tensor *tensor, bl_safetensors_writer *writer)
{
    const bl_adapter_state *s = d->state;
    const adapter_full *f = s->trained;
    int64_t n = tensor->shape[0] * (tensor->n_dims > 1 ? tensor->shape[1] : 1), unit, row;
    const float *floats = f->vector_grad + tensor->offset;

    if (tensor->role != BL_ROLE_VECTOR) {
        const bl_base_part *part =
            bl_adapter_full_place(f->config, f->base_layout, tensor, &unit, &row);
        BL_TRY(gather(d, part, unit, &floats));
        floats += row * part->row_bytes / FLOAT;
    }
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
