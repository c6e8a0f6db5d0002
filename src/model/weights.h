/* SPDX-License-Identifier: Apache-2.0 */
/* weights.h -- a checkpoint loaded into memory: data held once per host, and data of each rank.
 *
 * Once per host (bl_model): the configuration, the open files, the embedding table in its stored
 * dtype (and the tied head, which is the same table), and the format chosen for each projection.
 * Each rank (bl_model_weights): its row-shard of every frozen matrix, quantized as it was read;
 * scales, where its format stores them whole; the norms; RoPE tables.
 *
 * Base unit i < n_layers is layer i with its BL_LAYER_MATRICES; unit n_layers is the head. On a CPU
 * a tied head is not a unit: it is multiplied as the embedding table, in host memory. Where all
 * weights are trained, the head is always a unit, and so is an embedding that is not tied to it,
 * unit n_layers + 1; the host has no table. */
#ifndef BALLAST_MODEL_WEIGHTS_H
#define BALLAST_MODEL_WEIGHTS_H

#include "base/dtype.h"
#include "comm/comm.h"
#include "comm/host_memory.h"
#include "device/timeline.h"
#include "io/reader.h"
#include "linear/base.h"
#include "arch/block.h"
#include "arch/config.h"
#include "arch/trained.h"
#include "model/placement.h"
#include "store/hf_model.h"

/* The values of base_format. AUTO keeps FP8 tensors as they are and makes the others fp8_row.
 * STORED keeps everything as it is. TRAINED is not a value of the key: every matrix is in fp32, to
 * be trained, frozen ones too. */
typedef enum bl_base_format {
    BL_BASE_AUTO,
    BL_BASE_FP8_ROW,
    BL_BASE_FP8_BLOCK,
    BL_BASE_MXFP4,
    BL_BASE_INT4_G32,
    BL_BASE_INT4_G128,
    BL_BASE_NF4,
    BL_BASE_STORED,
    BL_BASE_TRAINED
} bl_base_format;

/* How many projections are stored in one way and held in another: [a bl_format, or BL_FORMAT_COUNT
 * + a bl_scale_kind][bl_format]. Norms, embedding and head are always held as they are
 * stored and not counted. */
enum {
    BL_STORED_FORMAT_COUNT = BL_FORMAT_COUNT + BL_SCALE_COUNT,
    BL_BASE_FORMATS_TEXT_BYTES = 512
};
typedef struct bl_base_formats {
    int64_t n[BL_STORED_FORMAT_COUNT][BL_FORMAT_COUNT], n_matrices;
    int64_t n_requantized; /* quantized in the checkpoint, and again for the format */
} bl_base_formats;

typedef struct bl_model {
    bl_model_config config;
    bl_hf_model *files; /* NULL: without a checkpoint */
    bl_dtype embedding_dtype;
    /* (vocab, hidden); host memory, read-only; one for all ranks of a host that share it */
    void *embedding;
    size_t embedding_bytes;
    uint64_t embedding_checksum;
    bl_dtype head_dtype; /* as stored; of a tied head the table's */
    /* bl_model_format_count: [layer * n_projections + projection]; those that a layer lacks are
     * unused */
    bl_format *formats;
    bl_base_formats base_formats; /* the same, counted */
    bool largest_scales;          /* of 4-bit formats that are made: not least_squares (packed.h) */
    int64_t n_positions;          /* of the RoPE tables */
    bl_io_files *io_files;  /* the model's files in the order of bl_hf_file; ranks read from them */
    bl_io_engine io_engine; /* how; AUTO unless set after opening */
    bool is_trained; /* opened as BL_BASE_TRAINED: its weights change, and embedding is NULL */
    /* With is_trained: all, unless bl_model_set_trained has chosen; else zeros. */
    bl_trained_set trained;
} bl_model;

/* Which tensors are trained, before weights are loaded: `set` becomes the model's. */
void bl_model_set_trained(bl_model *model, bl_trained_set *set);

/* The unit of the embedding's weights where they are trained: the head's if they are tied. */
int64_t bl_model_embedding_unit(const bl_model *model);

/* Whether exactly the tensors of the configuration are there, with their shapes, dtypes and scales;
 * reads no weights but those of bl_model_config_fit, which it calls. BL_EINPUT lists all
 * that is wrong. */
bl_status bl_model_check(bl_model_config *config, const bl_hf_model *model);

/* Opens a Hugging Face directory, checks that exactly the tensors of config.json are there with
 * their shapes (all that is wrong is listed in one BL_EINPUT), chooses formats and reads the
 * embedding. max_positions: the longest sequence that will be seen. */
bl_status bl_model_open(const char *dir, bl_base_format format, int64_t max_positions,
                        bl_model **out);
/* The same by all ranks of a host, each of which calls it with the host's memory: the embedding is
 * there once, and each rank reads and checks a part of it. A failure of one must abort the job
 * (comm/host_memory.h). NULL: as bl_model_open. n_replicas: how many copies of the base the ranks
 * of this host will load. With several, the files are read through the page cache: a disk reads
 * each row once, not once per copy. */
bl_status bl_model_open_shared(const char *dir, bl_base_format format, int64_t max_positions,
                               bl_host_memory *host, int n_replicas, bl_model **out);
/* As bl_model_open, from config.json and the headers of the tensors' files alone: neither the
 * embedding nor io_files is there. */
bl_status bl_model_open_headers(const char *dir, bl_base_format format, int64_t max_positions,
                                bl_model **out);
void bl_model_close(bl_model *model); /* NULL is fine */
/* Chooses the formats anew. No weights that were loaded from it may be left. BL_EUSAGE as
 * bl_model_open. */
bl_status bl_model_set_format(bl_model *model, bl_base_format format);
const char *bl_base_format_name(bl_base_format format); /* "auto" */
/* How a projection is held that is stored so. FP8 stays FP8 where a format has its blocks. Else it
 * is decoded: to bf16, which is exact where scales are powers of two, or to f32. Where `choice` is
 * an FP8 format, it is then quantized again. BL_EUSAGE: it would be quantized again for nothing;
 * names `what`. */
bl_status bl_base_format_choose(bl_base_format choice, bl_scale_kind stored, bl_dtype stored_dtype,
                                const char *what, bl_format *out);

/* base_formats.c: the counts in words. Held, stored: "fp8_row", or "26 fp8_row, 2 bf16". Described:
 * "bf16 in the checkpoint, fp8_row in WHERE", a mixture pair by pair, each with its matrices. Text
 * that is longer than the buffer is cut. */
void bl_base_formats_count(bl_base_formats *f, bl_scale_kind stored, bl_dtype stored_dtype,
                           bl_format held);
void bl_base_formats_list_held(const bl_base_formats *f, char out[BL_BASE_FORMATS_TEXT_BYTES]);
void bl_base_formats_list_stored(const bl_base_formats *f, char out[BL_BASE_FORMATS_TEXT_BYTES]);
void bl_base_formats_describe(const bl_base_formats *f, const char *where,
                              char out[BL_BASE_FORMATS_TEXT_BYTES]);
/* Projections of all layers; whether the layer of format i has its projection. */
size_t bl_model_format_count(const bl_model_config *config);
bool bl_model_has_format(const bl_model_config *config, size_t i);
/* All of formats[bl_model_format_count] are bf16. */
bool bl_model_base_is_bf16(const bl_model_config *config, const bl_format *formats);
/* Some matrix has lost bits: FP8 here, in the checkpoint not, or with other blocks. */
bool bl_model_base_is_quantized(const bl_base_formats *f);
/* BL_EUSAGE: the device has no products of one of the formats held. */
bl_status bl_base_formats_check_device(const bl_base_formats *f, bl_device_kind kind);

typedef struct bl_model_weights {
    const bl_model *model;
    bl_device *device;
    bl_base_layout layout;
    /* This rank's shards, in the order of bl_base_next, and after them, if some are on disk,
     * `scales`. */
    bl_pages *pages;
    /* All of them, layout.shard_bytes of device memory; NULL when some are elsewhere. */
    void *shards;
    /* Tables of an adapter (PEFT's modules_to_save) that replace the model's: (vocab, hidden),
     * fp32, device memory, whole on this rank; NULL: the model's table is used. Norms of an adapter
     * replace those in `vectors`. */
    float *tables[BL_MODEL_TABLES];
    /* tables[BL_TABLE_HEAD] rounded to bf16, with which a GPU computes; NULL: with the table. */
    void *head_copy;
    /* With trained weights and bf16 activations `pages` has the fp32 weights, and layers compute
     * with `copy`: this rank's rows rounded to bf16, one page per page of the weights, in device
     * memory or in the tiers of the weights. NULL: layers compute with `pages`. */
    bl_base_layout copy_layout;
    bl_pages *copy;
    float *scales; /* of all matrices with BL_SCALES_WHOLE, device memory: n_scales */
    int64_t n_scales;
    float *vectors; /* of each layer, then the final norm: bl_arch_vector_floats, device memory */
    float *rope_tables;  /* of dims.rope */
    bl_block_dims dims;  /* of layer 0: for what all layers have alike */
    bl_weight tied_head; /* the embedding, or an adapter's head; rows 0 when the head is a unit */
    /* Of every weight and scale that the shard group has read, as they are stored: the same for any
     * number of ranks, formats and tiers. Pages from a page file count as the weights they were
     * made from. */
    uint64_t checksum;
} bl_model_weights;

/* The memory of a rank's weights except the base's pages, with data that needs no checkpoint: the
 * layout, RoPE tables, a tied head. Scales and norms are uninitialized, pages is NULL. `model` is
 * borrowed until they are freed. */
bl_status bl_model_weights_create(const bl_model *model, bl_device *device, int n_shards,
                                  bl_model_weights **out);

/* Reads and quantizes this rank's rows and places them in their tiers; rows whose page files are
 * there already are not read again. placement NULL: all in device memory. Collective over
 * `shard_group`: scales are exchanged there. `model` is borrowed until the weights are freed.
 * BL_EINPUT names tensor, row and column of a weight that is not finite. BL_ESTOPPED:
 * placement->stop. After a failure no incomplete page file is left. */
bl_status bl_model_weights_load(const bl_model *model, bl_device *device, bl_comm *shard_group,
                                bl_stream *stream, const bl_placement *placement,
                                bl_model_weights **out);

/* The weights of a model without a checkpoint (bl_model.files is NULL) on a device made of rates
 * (device/model.h): everything has its place, nothing has values. `model` is borrowed until they
 * are freed. */
bl_status bl_model_weights_place(const bl_model *model, bl_device *device, bl_comm *shard_group,
                                 const bl_placement *placement, bl_model_weights **out);

/* How the base is loaded to the device: over a ring of ring_depth slots, in order of the calls.
 * Streams and comm are borrowed. */
struct bl_pager_hooks;
typedef struct bl_model_base_options {
    bl_comm *shard_group;
    bl_stream *copy, *gather; /* different ones */
    int ring_depth;
    /* of the reader of disk pages: bl_model_pager_queue_depth; 0: as for a host's only rank */
    int queue_depth;
    bool verify_always;
    bl_timeline *timeline;              /* may be NULL */
    const struct bl_pager_hooks *hooks; /* may be NULL: offload/pager.h */
} bl_model_base_options;
bl_status bl_model_base_create(const bl_model_weights *weights,
                               const bl_model_base_options *options, bl_base **out);

/* The frozen model's fingerprint, known before all of it is read: a number over the configuration
 * (bl_model_config_describe) and over every tensor's name, stored format and shape, its first and
 * last 4 KiB, and blocks evenly spaced between them, about probe_bytes of all tensors together (0:
 * none). All of a model of up to 8 probe_bytes is read: that takes no longer than to read so many
 * places of a larger one. bl_model_weights.checksum covers every byte, once they are read. */
bl_status bl_model_fingerprint(const bl_model *model, int64_t probe_bytes, uint64_t *fingerprint);

/* What loading depends on: bytes of all tensors as they are stored, and of the longest row of a
 * matrix; whether projections are held in blocks. */
typedef struct bl_model_stored_size {
    int64_t n_bytes, row_bytes;
    bool is_in_blocks;
    /* Of FP8 weights that are decoded to be quantized: the longest row in fp32. 0: none. */
    int64_t decoded_row_bytes;
    int64_t matrix_bytes; /* the largest matrix that is stored transposed; 0: none */
    int64_t scale_bytes;  /* the most scales and zero points of a weight, in fp32; 0: none */
} bl_model_stored_size;
bl_model_stored_size bl_model_measure_stored(const bl_model *model);
/* About the most memory that a rank takes while it loads, besides the loaded data; freed at the
 * end. */
int64_t bl_model_load_bytes(const bl_model_stored_size *stored, int n_shards);
void bl_model_weights_free(bl_model_weights *weights); /* NULL is fine */

/* Whether the head is not a unit of the base: a tied one, on a device that reads host memory. */
bool bl_model_head_is_table(const bl_model_config *config, bl_device_kind kind);
/* Rows of the RoPE tables for sequences of n_positions: where micro-batches are padded
 * (model/feed_internal.h), enough for the padding's document. */
int64_t bl_model_table_positions(bl_device_kind kind, int64_t n_positions);
/* The vectors of layer `layer`; of layer n_layers: the final norm. */
const float *bl_model_layer_vectors(const bl_model_weights *weights, int64_t layer);
/* What every rank holds whole, in device memory: bytes of the scales with BL_SCALES_WHOLE, of the
 * vectors (norms), and of RoPE's tables of n_positions. */
typedef struct bl_model_whole_bytes {
    int64_t scales, vectors, rope_tables;
} bl_model_whole_bytes;
bl_model_whole_bytes bl_model_measure_whole(const bl_model_config *config,
                                            const bl_base_layout *layout, bl_device_kind kind,
                                            int64_t n_positions);

/* The layout alone, as a rank of n_shards would have it: for plans. Scales stay NULL. Free with
 * bl_base_layout_free. */
bl_status bl_model_layout(const bl_model_config *config, const bl_format *formats,
                          bl_dtype head_dtype, bl_device_kind kind, int n_shards,
                          bl_base_layout *out);
/* The same where all weights are trained: fp32, with the embedding. */
bl_status bl_model_layout_trained(const bl_model_config *config, int n_shards, bl_base_layout *out);
/* The layout of the bf16 copy: the same parts and rows. */
bl_status bl_model_layout_copy(const bl_model_config *config, int n_shards, bl_base_layout *out);
/* Queues on `stream`: rounds `rows` (fp32, floats [first, first + n) of this rank's rows of a part
 * of weights->layout) to nearest even into the copy, whose rows must be in device memory. Does
 * nothing without a copy. */
bl_status bl_model_round_rows(const bl_model_weights *weights, const bl_base_walk *at,
                              int64_t first, int64_t n, const float *rows, bl_stream *stream);
/* tables.c: weights->tables[table] = the model's table, widened to fp32, to be changed. Before a
 * pass over the weights is created. The pass then ignores a head that is a unit of the base. A GPU
 * computes with a copy of the head, which bl_model_round_head fills. BL_ENOMEM, BL_EIO. */
bl_status bl_model_replace_table(bl_model_weights *weights, bl_model_table table);
/* Queues on `stream`: rounds a replaced head to nearest even into its bf16 copy. After every change
 * of the head. Without a copy: nothing. */
bl_status bl_model_round_head(const bl_model_weights *weights, bl_stream *stream);
/* Whether a replaced head has such a copy. */
bool bl_model_copies_head(bl_device_kind kind);
void bl_base_layout_free(bl_base_layout *layout);

#endif
