/* SPDX-License-Identifier: Apache-2.0 */
/* Operations that wait for a slow base, and those that do not, from the trace of a run. */
#include "runs.h"

#include <string.h>
#include <unistd.h>

#include "device/timeline.h"
#include "offload/pager.h"

enum { STEPS = 3, MICRO_BATCHES = 2, PAUSE_US = 3000, MAX_TRIES = 5 };

static void sleep_long(void *user, bl_tier tier, int64_t page, size_t n_bytes)
{
    (void)tier, (void)page, (void)n_bytes;
    usleep(*(const useconds_t *)user);
}

static bool is_span(const json_t *event, const char *name, bl_lane lane, int layer)
{
    const char *own = json_string_value(json_object_get(event, "name"));
    const json_t *at = json_object_get(json_object_get(event, "args"), "layer");

    return own && strcmp(own, name) == 0 && at && json_integer_value(at) == layer &&
           json_integer_value(json_object_get(event, "tid")) == (int)lane &&
           json_integer_value(json_object_get(event, "pid")) == 0;
}

/* Of rank 0: layer 1's gradients that are summed before all of layer 0 has arrived, although that
 * was requested earlier. The trace lists a rank's spans in the order in which they were queued. */
static void count_gradients(const char *path, int *n, int *n_early)
{
    json_t *trace = json_load_file(path, 0, NULL), *event;
    double come_us = 0;
    size_t i;

    *n = *n_early = 0;
    assert_non_null(trace);
    json_array_foreach(json_object_get(trace, "traceEvents"), i, event)
    {
        double begin_us = json_number_value(json_object_get(event, "ts")),
               long_us = json_number_value(json_object_get(event, "dur"));
        if (is_span(event, "gather", BL_LANE_GATHER, 0)) come_us = begin_us + long_us;
        if (!is_span(event, "gradients", BL_LANE_LORA, 1)) continue;
        ++*n;
        *n_early += begin_us + long_us < come_us;
    }
    json_decref(trace);
}

static void train(const char *output, const char *ratio, const char *trace,
                  const bl_pager_hooks *hooks)
{
    golden_args args = {0};

    runs_standard(&args, output, 2);
    runs_set(&args, "max_steps", "%d", STEPS);
    runs_set(&args, "gradient_accumulation_steps", "%d", MICRO_BATCHES);
    runs_set(&args, "save_steps", "0");
    runs_set(&args, "offload_tier", "host");
    runs_set(&args, "offload_ratio", "%s", ratio);
    if (trace) runs_set(&args, "trace", "%s", trace);
    assert_int_equal(golden_train_hooked(&args, hooks), BL_OK);
    golden_args_free(&args);
}

/* A base that comes slowly, four pauses a layer, holds up its own users only. One early sum is
 * enough: none is, however slow the base is, where they share a stream or a communicator. On a
 * loaded machine the sums may be slow, too. */
static void test_gradients_do_not_wait_for_the_base(void **state)
{
    useconds_t pause_us = PAUSE_US;
    bl_pager_hooks hooks = {.pace = sleep_long, .pace_user = &pause_us};
    int n, n_early = 0;

    (void)state;
    train(runs_path("plain"), "0", NULL, NULL);
    for (int i = 0; i < MAX_TRIES && n_early == 0; i++, pause_us *= 2) {
        const char *slow = runs_path("slow-%d", i), *trace = runs_path("slow-%d.json", i);
        train(slow, "1", trace, &hooks);
        assert_true(runs_are_same(runs_path("plain"), slow));
        count_gradients(trace, &n, &n_early);
        assert_int_equal(n, MICRO_BATCHES * STEPS);
    }
    assert_true(n_early > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_gradients_do_not_wait_for_the_base)};
    return cmocka_run_group_tests_name("overlap", tests, runs_set_up, runs_tear_down);
}
