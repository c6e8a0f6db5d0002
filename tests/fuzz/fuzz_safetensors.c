/* SPDX-License-Identifier: Apache-2.0 */
/* A safetensors file. First byte 'f': the rest is the file as it is; 'j': header JSON, "%%", data,
 * with the length and the amount of data made right. */
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"
#include "store/safetensors.h"

enum { MAX_READ_BYTES = 1 << 20 };

static void read_tensor(const bl_stored_tensor *tensor)
{
    char text[BL_SHAPE_TEXT_BYTES];

    if (strlen(bl_shape_text(tensor->n_dims, tensor->shape, text)) >= sizeof text) abort();
    if (tensor->n_bytes > MAX_READ_BYTES) return;
    void *bytes = malloc((size_t)tensor->n_bytes + 1);
    float *values =
        malloc((size_t)tensor->n_bytes * sizeof *values + 1); /* an element is a byte at least */
    if (!bytes || !values) abort();
    if (bl_stored_tensor_read(tensor, 0, (size_t)tensor->n_bytes, bytes) != BL_OK)
        abort(); /* it was inside the file */
    fuzz_check(bl_stored_tensor_read_f32(tensor, values));
    free(values);
    free(bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes)
{
    fuzz_input input = {.bytes = bytes, .n_bytes = n_bytes};
    bl_safetensors *file = NULL;

    if (fuzz_byte(&input) == 'f') {
        fuzz_write("model.safetensors", (fuzz_part){input.bytes, input.n_bytes});
    } else {
        fuzz_part header = fuzz_next(&input), data = fuzz_next(&input);
        fuzz_write_safetensors("model.safetensors", header, data);
    }
    bl_status st = bl_safetensors_open(fuzz_path("model.safetensors"), &file);
    fuzz_check(st);
    if ((st == BL_OK) != (file != NULL)) abort();
    for (size_t i = 0; file && i < bl_safetensors_count(file); i++) {
        const bl_stored_tensor *tensor = bl_safetensors_at(file, i);
        if (bl_safetensors_find(file, tensor->name) != tensor) abort();
        read_tensor(tensor);
    }
    bl_safetensors_close(file);
    return 0;
}
