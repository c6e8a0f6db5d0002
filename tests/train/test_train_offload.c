/* SPDX-License-Identifier: Apache-2.0 */
/* The placement of the base and the activations, the way of loading and its time never change a
 * bit of the results; and errors of pages that cannot be loaded. */
#include "offload_runs.h"
#include "runs.h"

#include <dirent.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/files.h"
#include "base/sizes.h"
#include "offload/pager.h"

static const double SOON_S =
    60; /* no rank waits for one that has failed; the deadline of others is half an hour */

/* ---- hooks ---- */

/* Sleeps and short reads, different for each call; an error at one of them. */
typedef struct disturbance {
    atomic_uint n_calls, n_reads;
    unsigned fails_from; /* reads from this one on bring -error; 0: none does */
    int error;
} disturbance;

static unsigned scramble(unsigned n)
{
    n *= 2654435761u;
    return n ^ (n >> 15);
}

static void sleep_a_little(void *user, bl_tier tier, int64_t page, size_t n_bytes)
{
    disturbance *d = user;
    (void)tier, (void)page, (void)n_bytes;
    usleep(scramble(atomic_fetch_add(&d->n_calls, 1)) % 300);
}

static int64_t disturb_read(void *user, const bl_io_completion *completion)
{
    disturbance *d = user;
    unsigned n = atomic_fetch_add(&d->n_reads, 1) + 1;

    if (d->fails_from > 0 && n >= d->fails_from) return -d->error;
    if (completion->result <= 1) return completion->result;
    switch (scramble(n) % 4) {
    case 0:
        return -EINTR;
    case 1:
        return completion->result / 2;
    case 2:
        usleep(200);
        return completion->result;
    default:
        return completion->result;
    }
}

static bl_pager_hooks disturbing_hooks(disturbance *d)
{
    return (bl_pager_hooks){
        .io = disturb_read, .io_user = d, .pace = sleep_a_little, .pace_user = d};
}

/* ---- runs ---- */

typedef struct placement_case {
    int ranks, depth;
    double ratio, host_part;
    const char *tier, *engine;
    bool is_disturbed, is_synchronous, bounces;
} placement_case;

static void place(golden_args *args, const placement_case *c)
{
    runs_set(args, "offload_ratio", "%g", c->ratio);
    runs_set(args, "offload_tier", "%s", c->tier);
    runs_set(args, "ring_depth", "%d", c->depth);
    if (strcmp(c->tier, "disk") == 0) runs_set(args, "offload_dir", "%s", pages_dir(c->ranks));
    if (c->host_part > 0) runs_set(args, "offload_host_part", "%g", c->host_part);
    if (c->engine) runs_set(args, "io_engine", "%s", c->engine);
}

static void assert_same_bits(const placement_case *c)
{
    golden_args args = {0};
    disturbance d = {0};
    bl_pager_hooks hooks = c->is_disturbed ? disturbing_hooks(&d) : (bl_pager_hooks){0};

    hooks.is_synchronous = c->is_synchronous;
    hooks.bounces = c->bounces;
    offload_args(&args, runs_path("placed"), c->ranks);
    place(&args, c);
    bool same = golden_train_hooked(&args, &hooks) == BL_OK &&
                runs_are_same(plain_run(c->ranks), runs_path("placed"));
    if (!same)
        fail_msg("%d ranks, ratio %g, tier %s, engine %s, ring of %d%s%s%s", c->ranks, c->ratio,
                 c->tier, c->engine ? c->engine : "-", c->depth,
                 c->is_disturbed ? ", disturbed" : "", c->is_synchronous ? ", synchronous" : "",
                 c->bounces ? ", bounced" : "");
    golden_args_free(&args);
}

static void test_no_placement_changes_a_bit(void **state)
{
    static const int ranks[] = {1, 2, 4, 8}, depths[] = {1, 2, 4};
    static const double ratios[] = {1, 0.3, 0.5};
    static const struct {
        const char *tier, *engine;
    } ways[] = {{"host", NULL}, {"disk", "uring"}, {"disk", "pread"}};

    (void)state;
    for (size_t r = 0; r < BL_COUNT(ranks); r++)
        for (size_t d = 0; d < BL_COUNT(depths); d++) {
            if (ranks[r] == 8 && depths[d] != 2) continue; /* eight threads take long */
            /* All in device memory: tier and engine are not looked at. */
            assert_same_bits(&(placement_case){.ranks = ranks[r],
                                               .depth = depths[d],
                                               .ratio = 0,
                                               .tier = "host",
                                               .is_disturbed = (r + d) % 2});
            /* Every way and depth on up to four ranks; every ratio with each pair of ranks, way and
             * depth. Runs find the page files of other ratios, larger and smaller. */
            for (size_t w = 0; w < BL_COUNT(ways); w++)
                assert_same_bits(&(placement_case){.ranks = ranks[r],
                                                   .depth = depths[d],
                                                   .ratio = ratios[(r + w + d) % 3],
                                                   .tier = ways[w].tier,
                                                   .host_part = w == 2 ? 0.4 : 0,
                                                   .engine = ways[w].engine,
                                                   .is_disturbed = (r / 2 + w + d) % 2,
                                                   .bounces = (r + d) % 2});
        }
}

static void test_no_overlap_changes_no_bit(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 2; ranks++)
        assert_same_bits(&(placement_case){.ranks = ranks,
                                           .depth = 2,
                                           .ratio = 0.5,
                                           .tier = "disk",
                                           .engine = "auto",
                                           .is_disturbed = true,
                                           .is_synchronous = true});
}

/* On several ranks each kind of checkpointing has one of the two sizes of visits. */
static void test_offloaded_activations_change_no_bit(void **state)
{
    static const char *const keeps[] = {"none", "mlp", "selective", "full"}, *const visits[] = {
                                                                                 "1", "100000"};

    (void)state;
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        for (size_t k = 0; k < BL_COUNT(keeps); k++)
            for (size_t v = 0; v < BL_COUNT(visits); v++) {
                golden_args args = {0};
                if (ranks > 1 && (k + v + (size_t)ranks / 2) % 2 != 0) continue;
                offload_args(&args, runs_path("activations"), ranks);
                runs_set(&args, "activation_offload", "true");
                runs_set(&args, "activation_checkpointing", "%s", keeps[k]);
                runs_set(&args, "visit_tokens", "%s", visits[v]);
                runs_set(&args, "offload_ratio", "%s", v == 0 ? "0" : "0.5");
                assert_int_equal(golden_train(&args), BL_OK);
                if (!runs_are_same(plain_run(ranks), runs_path("activations")))
                    fail_msg("%d ranks, keeping %s, visits of %s", ranks, keeps[k], visits[v]);
                golden_args_free(&args);
            }
}

static double sum_of_metrics(const char *output, const char *key)
{
    json_t *lines = golden_metrics(output), *line;
    double sum = 0;
    size_t i;

    json_array_foreach(lines, i, line) sum += json_number_value(json_object_get(line, key));
    json_decref(lines);
    return sum;
}

/* A step's byte counts are checked: all pages come from disk, on any number of ranks the same bytes
 * except the padding of shards, and every rank receives the parts that it does not read itself. A
 * transfer in flight when a step ends is counted in the next step, and after the last in none: at
 * most the two units of the ring out of 5 in each of three steps, so a quarter is enough; rank 0's
 * own part would be a half. */
static void test_bytes_are_counted(void **state)
{
    double bytes_of_one = 0;

    (void)state;
    for (int ranks = 1; ranks <= 4; ranks *= 2) {
        golden_args args = {0};
        const char *output = runs_path("counted-%d", ranks);
        offload_args(&args, output, ranks);
        place(&args, &(placement_case){.ranks = ranks, .depth = 2, .ratio = 1, .tier = "disk"});
        assert_int_equal(golden_train(&args), BL_OK);
        double disk = sum_of_metrics(output, "disk_bytes"),
               gather = sum_of_metrics(output, "gather_bytes");
        if (ranks == 1) bytes_of_one = disk;
        if (disk < 0.75 * bytes_of_one || disk > 1.25 * bytes_of_one)
            fail_msg("%d ranks: %g bytes, not %g", ranks, disk, bytes_of_one);
        assert_true(gather >= 0.75 * (ranks - 1) * disk && gather <= 1.25 * (ranks - 1) * disk);
        assert_true(disk > 0 && sum_of_metrics(output, "disk_stall_s") > 0);
        assert_true(sum_of_metrics(output, "copy_bytes") == 0);
        assert_true((sum_of_metrics(output, "lora_bytes") > 0) == (ranks > 1));
        golden_args_free(&args);
    }
}

/* ---- what fails ---- */

/* Reads that fail from some point on end the run with file, page and reason; the checkpoint before
 * them is resumed from. */
static void test_read_error_names_its_page(void **state)
{
    static const struct {
        int error;
        const char *text;
    } errors[] = {{EIO, "Input/output error"}, {ENOMEM, "Cannot allocate memory"}};
    static const char *const engines[] = {"uring", "pread"};

    (void)state;
    for (size_t e = 0; e < BL_COUNT(errors); e++)
        for (int ranks = 1; ranks <= 4; ranks *= 2) {
            golden_args args = {0};
            placement_case c = {
                .ranks = ranks, .depth = 2, .ratio = 1, .tier = "disk", .engine = engines[e]};
            disturbance quiet = {0}, d = {.error = errors[e].error};
            bl_pager_hooks hooks = disturbing_hooks(&quiet);
            offload_args(&args, runs_path("failing"), ranks);
            runs_set(&args, "save_steps", "1");
            place(&args, &c);
            assert_int_equal(golden_train_hooked(&args, &hooks), BL_OK); /* to count its reads */
            assert_true(runs_are_same(plain_run(ranks), runs_path("failing")));
            d.fails_from = atomic_load(&quiet.n_reads) * 3 / 4;
            hooks = disturbing_hooks(&d);
            double start = bl_now_s();
            bl_status st = golden_train_hooked(&args, &hooks);
            assert_true(bl_now_s() - start < SOON_S);
            assert_true(st == BL_EIO || st == BL_ENOMEM);
            assert_error_has(".pages");
            if (!strstr(bl_error_text(), "page lm_head"))
                assert_error_has("page model.layers."); /* whichever it was */
            assert_error_has("offset");
            assert_error_has(errors[e].text);
            runs_unset(&args, "overwrite_output_dir");
            runs_set(&args, "resume_from_checkpoint", "true");
            assert_int_equal(golden_train(&args), BL_OK);
            assert_true(runs_are_same(plain_run(ranks), runs_path("failing")));
            golden_args_free(&args);
        }
}

/* A damaged page file ends the run that meets it, by name, and the next run writes it anew. */
static void test_damaged_page_is_found(void **state)
{
    static const struct {
        int64_t offset_bytes;
        const char *page;
    } places[] = {
        {100, "model.layers.0.self_attn.q_proj+k_proj+v_proj"},
        {-2 * BL_IO_ALIGN_BYTES, "scales"}}; /* the last page; behind it is the seal's block */
    placement_case c = {.ranks = 2, .depth = 2, .ratio = 1, .tier = "disk"};

    (void)state;
    for (size_t i = 0; i < BL_COUNT(places); i++) {
        golden_args args = {0};
        offload_args(&args, runs_path("damaged"), 2);
        place(&args, &c);
        runs_set(&args, "offload_dir", "%s", runs_path("damaged-pages"));
        assert_int_equal(bl_dir_create(runs_path("damaged-pages")), BL_OK);
        assert_int_equal(golden_train(&args), BL_OK);
        runs_flip_in_files(runs_path("damaged-pages"), ".pages", places[i].offset_bytes);
        assert_int_equal(golden_train(&args), BL_EINPUT);
        assert_error_has("checksum");
        assert_error_has(places[i].page);
        assert_int_equal(golden_train(&args), BL_OK);
        assert_true(runs_are_same(plain_run(2), runs_path("damaged")));
        golden_args_free(&args);
    }
}

/* Flips a bit of one rank's page file at a call in the midst of a run. */
typedef struct saboteur {
    atomic_uint n_calls;
    unsigned at; /* 0: never */
    const char *dir;
} saboteur;

static void flip_meanwhile(void *user, bl_tier tier, int64_t page, size_t n_bytes)
{
    saboteur *s = user;
    (void)tier, (void)page, (void)n_bytes;
    if (atomic_fetch_add(&s->n_calls, 1) + 1 == s->at)
        runs_flip_in_files(s->dir, "-1-of-4.pages", 100);
}

/* What one rank of four finds, when it looks, ends all of them at once; the checkpoint before it is
 * resumed from, with pages anew. */
static void test_one_rank_finds_damage(void **state)
{
    static const char *const ways[] = {"save", "always"};
    placement_case c = {.ranks = 4, .depth = 2, .ratio = 1, .tier = "disk"};

    (void)state;
    for (size_t w = 0; w < BL_COUNT(ways); w++) {
        golden_args args = {0};
        saboteur quiet = {0}, s = {.dir = pages_dir(4)};
        bl_pager_hooks hooks = {.pace = flip_meanwhile, .pace_user = &quiet};
        offload_args(&args, runs_path("sabotaged"), 4);
        runs_set(&args, "save_steps", "1");
        runs_set(&args, "verify_base", "%s", ways[w]);
        place(&args, &c);
        assert_int_equal(golden_train_hooked(&args, &hooks), BL_OK); /* to count the calls */
        assert_true(runs_are_same(plain_run(4), runs_path("sabotaged")));
        s.at = atomic_load(&quiet.n_calls) * 2 / 3;
        hooks.pace_user = &s;
        double start = bl_now_s();
        assert_int_equal(golden_train_hooked(&args, &hooks), BL_EINPUT);
        assert_true(bl_now_s() - start < SOON_S);
        assert_error_has(
            "-1-of-4.pages: page model.layers.0.self_attn.q_proj+k_proj+v_proj at 0: checksum");
        runs_unset(&args, "overwrite_output_dir");
        runs_set(&args, "resume_from_checkpoint", "true");
        assert_int_equal(golden_train(&args), BL_OK);
        assert_true(runs_are_same(plain_run(4), runs_path("sabotaged")));
        golden_args_free(&args);
    }
}

/* A byte in memory of the first page of the pages that were made last, at one of the
 * verifications. */
static bl_pages *made_pages;
static int n_verified, flips_at; /* 0: never */

bl_status __real_bl_pager_create(const bl_pager_options *options, bl_pages *pages, int64_t n_units,
                                 const bl_pager_unit *units, bl_pager **out);
bl_status __wrap_bl_pager_create(const bl_pager_options *options, bl_pages *pages, int64_t n_units,
                                 const bl_pager_unit *units, bl_pager **out);
bl_status __real_bl_pager_verify(bl_pager *pager);
bl_status __wrap_bl_pager_verify(bl_pager *pager);

bl_status __wrap_bl_pager_create(const bl_pager_options *options, bl_pages *pages, int64_t n_units,
                                 const bl_pager_unit *units, bl_pager **out)
{
    if (flips_at > 0) made_pages = pages; /* then there is one rank */
    return __real_bl_pager_create(options, pages, n_units, units, out);
}

bl_status __wrap_bl_pager_verify(bl_pager *pager)
{
    if (flips_at > 0 && ++n_verified == flips_at)
        ((char *)bl_pages_memory(made_pages, 0))[100] ^= 4;
    return __real_bl_pager_verify(pager);
}

static void test_damage_in_memory_is_not_saved(void **state)
{
    (void)state;
    for (int is_host = 0; is_host < 2; is_host++) {
        golden_args args = {0};
        offload_args(&args, runs_path("flipped"), 1);
        runs_set(&args, "save_steps", "1");
        runs_set(&args, "verify_base", "save");
        runs_set(&args, "offload_ratio", "%d", is_host);
        n_verified = 0;
        flips_at = 2;
        assert_int_equal(golden_train(&args), BL_EINPUT);
        flips_at = 0;
        assert_int_equal(n_verified, 2);
        assert_error_has("memory of page model.layers.0.self_attn.q_proj+k_proj+v_proj: checksum ");
        assert_true(bl_file_exists(runs_path("flipped/checkpoints/step-1")));
        assert_false(bl_file_exists(runs_path("flipped/checkpoints/step-2")));
        runs_unset(&args, "overwrite_output_dir");
        runs_set(&args, "resume_from_checkpoint", "true");
        assert_int_equal(golden_train(&args), BL_OK);
        assert_true(runs_are_same(plain_run(1), runs_path("flipped")));
        golden_args_free(&args);
    }
}

static void test_wrong_keys(void **state)
{
    golden_args args = {0};

    (void)state;
    offload_args(&args, runs_path("wrong"), 1);
    runs_set(&args, "offload_tier", "disk");
    assert_int_equal(golden_train(&args), BL_EUSAGE);
    assert_error_has("offload_dir");
    runs_set(&args, "offload_dir", "%s", GOLDEN_DIR "/models/tiny-gqa/config.json");
    for (int ratio = 0; ratio <= 1; ratio++) {
        runs_set(&args, "offload_ratio", "%d", ratio);
        assert_int_equal(golden_train(&args), BL_EUSAGE);
        assert_error_has("offload_dir: ");
        assert_error_has("config.json: exists and is not a folder");
    }
    runs_set(&args, "offload_dir", "%s", GOLDEN_DIR "/models/tiny-gqa/config.json/pages");
    assert_int_equal(golden_train(&args), BL_EUSAGE);
    assert_error_has("config.json/pages: creating the folder: Not a directory");
    golden_args_free(&args);
}

static bool is_valid_trace(const char *path)
{
    json_t *trace = json_load_file(path, 0, NULL);
    const json_t *events = json_object_get(trace, "traceEvents"), *event;
    size_t i, n_spans = 0;

    json_array_foreach(events, i, event)
    {
        const char *phase = json_string_value(json_object_get(event, "ph"));
        if (!phase || phase[0] != 'X') continue;
        n_spans++;
        if (json_number_value(json_object_get(event, "dur")) < 0) n_spans = 0;
    }
    json_decref(trace);
    return n_spans > 0;
}

static void test_trace_can_be_read(void **state)
{
    golden_args args = {0};

    (void)state;
    offload_args(&args, runs_path("traced"), 2);
    place(&args, &(placement_case){.ranks = 2, .depth = 2, .ratio = 0.5, .tier = "disk"});
    runs_set(&args, "activation_offload", "true");
    runs_set(&args, "trace", "%s", runs_path("trace.json"));
    assert_int_equal(golden_train(&args), BL_OK);
    assert_true(is_valid_trace(runs_path("trace.json")));
    golden_args_free(&args);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_placement_changes_a_bit),
        cmocka_unit_test(test_no_overlap_changes_no_bit),
        cmocka_unit_test(test_offloaded_activations_change_no_bit),
        cmocka_unit_test(test_bytes_are_counted),
        cmocka_unit_test(test_read_error_names_its_page),
        cmocka_unit_test(test_damaged_page_is_found),
        cmocka_unit_test(test_one_rank_finds_damage),
        cmocka_unit_test(test_damage_in_memory_is_not_saved),
        cmocka_unit_test(test_wrong_keys),
        cmocka_unit_test(test_trace_can_be_read),
    };
    return cmocka_run_group_tests_name("offload", tests, runs_set_up, runs_tear_down);
}
