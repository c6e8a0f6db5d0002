/* SPDX-License-Identifier: Apache-2.0 */
/* Whole models against float64 results from other code: demo/golden.json, and with
 * BALLAST_TEST_DATA the stories260K models.
 *
 * Tolerance. A logit goes through n roundings, the lengths of all sums on its way: for each layer
 * four of hidden, two of q_width, one of inter, the scores' and the attention's; then the head's.
 * Rounding errors of so long a chain are independent of one another, so it is off by sqrt(n) u of
 * the largest logit, and -log p by twice that; factor 4 for the luck of the draw. Of the families'
 * models 1e-6 of the loss is asked for: transformers in fp32 is off by up to 1.3e-6. */
#include "ops_test.h"
#include "test_ranks.h"

#include <unistd.h>

#include "base/files.h"
#include "base/json.h"
#include "model/generate.h"
#include "model/pass.h"
#include "skip.h"

enum { PATH_BYTES = 512, MAX_TOKENS = 2048 };

/* One rank's model, resident, or sharded over `comm` (n_ranks > 1). */
typedef struct rank_model {
    bl_device *device;
    bl_stream *stream, *gathers, *copies;
    bl_model_weights *weights;
    bl_base *base;
    bl_lora_layout no_lora;
} rank_model;

static const bl_tensor none = {.data = NULL}; /* weights of an adapter */

static bl_status open_model(const bl_model *model, bl_device *device, bl_stream *stream,
                            bl_comm *comm, rank_model *m)
{
    *m = (rank_model){.device = device, .stream = stream};
    bl_lora_layout_init(&model->config, NULL, &m->no_lora);
    BL_TRY(bl_stream_create(device, "gathers", &m->gathers));
    BL_TRY(bl_model_weights_load(model, device, comm, m->gathers, NULL, &m->weights));
    if (bl_comm_size(comm) == 1)
        return bl_base_create_resident(&m->weights->layout, m->weights->shards, &m->base);
    BL_TRY(bl_stream_create(device, "copies", &m->copies));
    return bl_model_base_create(
        m->weights,
        &(bl_model_base_options){
            .shard_group = comm, .copy = m->copies, .gather = m->gathers, .ring_depth = 2},
        &m->base);
}

static void close_model(rank_model *m)
{
    (void)bl_stream_synchronize(m->stream);
    if (m->gathers) (void)bl_stream_synchronize(m->gathers);
    bl_base_destroy(m->base);
    bl_model_weights_free(m->weights);
    bl_stream_destroy(m->gathers);
    bl_stream_destroy(m->copies);
}

/* *sum = -sum of log p(ids[t + 1]) for t in [first, n - 1). */
static bl_status sum_nll(rank_model *m, int32_t *ids, int64_t n, int64_t first, double *sum)
{
    static const bl_pass_options defaults = {.max_group = 1, .ring_depth = 2};
    bl_pass_options options = defaults;
    float weights[MAX_TOKENS] = {0};
    int32_t targets[MAX_TOKENS] = {0}, cu_seqlens[2] = {0, (int32_t)n};
    bl_pass *pass = NULL;

    for (int64_t t = first; t + 1 < n; t++) {
        targets[t] = ids[t + 1];
        weights[t] = 1;
    }
    options.T_max = n;
    BL_TRY(bl_pass_create(m->device, m->weights, m->base, m->stream, &options, &pass));
    bl_micro_batch micro = {.T = n,
                            .n_documents = 1,
                            .ids = ids,
                            .targets = targets,
                            .weights = weights,
                            .cu_seqlens = cu_seqlens};
    bl_pass_micro one = {.batch = &micro, .loss_sum = sum};
    bl_pass_input input = {.n_micro = 1, .micro = &one};
    *sum = 0;
    bl_status st = bl_pass_run(pass, &input);
    bl_status end = bl_stream_synchronize(m->stream);
    bl_pass_destroy(pass);
    return st != BL_OK ? st : end;
}

/* ---- golden cases: demo/golden.json and data/models/.../golden.json differ in names ---- */

typedef struct golden {
    int32_t ids[MAX_TOKENS],
        greedy[MAX_TOKENS]; /* greedy: the prompt of n_prompt ids and its continuation */
    int64_t n, n_prompt, n_greedy;
    double mean_nll, top_logit, lead;
    int32_t top_id;
} golden;

static int64_t read_ids(const json_t *list, int32_t *ids)
{
    for (size_t i = 0; i < json_array_size(list); i++)
        ids[i] = (int32_t)json_integer_value(json_array_get(list, i));
    return (int64_t)json_array_size(list);
}

static golden read_case(const json_t *c)
{
    golden g = {.n_prompt = 8};
    const json_t *top = json_array_get(json_object_get(c, "last_logits_top5"), 0);

    g.n = read_ids(json_object_get(c, "ids"), g.ids);
    g.mean_nll = json_real_value(json_object_get(c, "mean_nll"));
    if (top) {
        g.top_id = (int32_t)json_integer_value(json_array_get(top, 0));
        g.top_logit = json_real_value(json_array_get(top, 1));
        g.n_greedy = read_ids(json_object_get(c, "greedy_from_first_8_ids"), g.greedy);
        g.lead = json_real_value(json_object_get(c, "greedy_min_margin"));
    } else {
        g.top_id = (int32_t)json_integer_value(json_array_get(json_object_get(c, "top_ids"), 0));
        g.top_logit = json_real_value(json_array_get(json_object_get(c, "top_logits"), 0));
        g.n_prompt = read_ids(json_object_get(c, "ids"), g.greedy);
        g.n_greedy = g.n_prompt + read_ids(json_object_get(c, "greedy"), g.greedy + g.n_prompt);
        g.lead = json_real_value(json_object_get(c, "greedy_min_lead"));
    }
    assert_true(g.n > 8 && g.n_greedy > g.n_prompt && g.mean_nll > 0 && g.lead > 0);
    return g;
}

static double logit_error(const bl_model_config *c, int64_t T, double largest)
{
    int64_t layer =
        4 * c->hidden_size + 2 * c->n_heads * c->head_dim + c->intermediate_size + c->head_dim + T;
    return 4 * sqrt((double)(c->n_layers * layer + c->hidden_size)) * U * fmax(largest, 1);
}

static void ok(bl_status st)
{
    if (st != BL_OK) print_error("%s\n", bl_error_text());
    assert_int_equal(st, BL_OK);
}

/* The lowest id of equals. */
static int32_t most_likely(const float *logits, int64_t vocab)
{
    int64_t best = 0;
    for (int64_t i = 1; i < vocab; i++)
        if (logits[i] > logits[best]) best = i;
    return (int32_t)best;
}

static void check_greedy(rank_model *m, const golden *g, double error)
{
    int64_t vocab = m->weights->model->config.vocab_size;
    bl_generator *generator;
    const float *logits;

    ok(bl_generator_create(m->device, m->stream, m->weights, m->base, &m->no_lora, none, g->n,
                           &generator));
    ok(bl_generator_extend(generator, g->ids, g->n, &logits));
    assert_int_equal(most_likely(logits, vocab), g->top_id);
    assert_true(fabs((double)logits[g->top_id] - g->top_logit) <=
                error + 1e-6); /* printed with six decimals */
    bl_generator_destroy(generator);

    ok(bl_generator_create(m->device, m->stream, m->weights, m->base, &m->no_lora, none,
                           g->n_greedy, &generator));
    ok(bl_generator_extend(generator, g->greedy, g->n_prompt, &logits));
    for (int64_t i = g->n_prompt; i < g->n_greedy; i++) {
        int32_t best = most_likely(logits, vocab), id = g->greedy[i];
        /* Where the reference's own lead is within the error, its choice need only be as good as
         * ours. */
        if (g->lead > 2 * error) assert_int_equal(best, id);
        assert_true((double)logits[id] >= (double)logits[best] - 2 * error);
        if (i + 1 < g->n_greedy) ok(bl_generator_extend(generator, &id, 1, &logits));
    }
    bl_generator_destroy(generator);
}

/* Ranks that hold shards must give the bits of the rank that holds all. */
typedef struct sharded_run {
    const bl_model *model;
    golden *g;
    double nll;
    float *logits; /* after all ids */
} sharded_run;

static bl_status run_sharded(test_rank *self)
{
    const sharded_run *run = self->arg;
    bl_generator *generator = NULL;
    const float *logits;
    double sum;
    rank_model m;
    bl_status st;

    BL_TRY_GOTO(st, done, open_model(run->model, self->device, self->stream, self->comm, &m));
    BL_TRY_GOTO(st, done, sum_nll(&m, run->g->ids, run->g->n, 0, &sum));
    TEST_CHECK_GOTO(st, done, sum == run->nll);
    BL_TRY_GOTO(st, done,
                bl_generator_create(self->device, self->stream, m.weights, m.base, &m.no_lora, none,
                                    run->g->n, &generator));
    BL_TRY_GOTO(st, done, bl_generator_extend(generator, run->g->ids, run->g->n, &logits));
    TEST_CHECK_GOTO(
        st, done,
        memcmp(logits, run->logits, (size_t)run->model->config.vocab_size * sizeof *logits) == 0);
    st = bl_stream_synchronize(m.gathers);
done:
    bl_generator_destroy(generator);
    close_model(&m);
    return st;
}

static void check_case(const char *dir, bl_model *model, const json_t *json, bool exact)
{
    test_device d = test_device_create(2);
    golden g = read_case(json);
    double error = logit_error(&model->config, g.n, fabs(g.top_logit)), sum;
    bl_comm *comm;
    rank_model m;

    ok(bl_comm_create_local(1, 0, &comm));
    ok(open_model(model, d.device, d.stream, comm, &m));
    ok(sum_nll(&m, g.ids, g.n, 0, &sum));
    double off = fabs(sum / (double)(g.n - 1) - g.mean_nll);
    /* E4M3 keeps three bits: a weight is off by up to 1/16, some 0.03 rms. Other weights, and so
     * another loss; but a close one. */
    if (!(exact ? off <= 2 * error : off > 1e-6 && off < 0.1)) {
        print_error("%s: mean NLL %.9g, not %.9g: off by %.3g, allowed %.3g\n", dir,
                    sum / (double)(g.n - 1), g.mean_nll, off, 2 * error);
        fail();
    }
    if (exact) check_greedy(&m, &g, error);
    sharded_run run = {model, &g, sum, test_floats(model->config.vocab_size)};
    bl_generator *generator;
    const float *logits;
    ok(bl_generator_create(d.device, d.stream, m.weights, m.base, &m.no_lora, none, g.n,
                           &generator));
    ok(bl_generator_extend(generator, g.ids, g.n, &logits));
    memcpy(run.logits, logits, (size_t)model->config.vocab_size * sizeof *logits);
    bl_generator_destroy(generator);
    for (int ranks = 2; ranks <= 3; ranks++)
        ok(test_ranks_run(ranks, 1, 60, run_sharded, &run, NULL));
    free(run.logits);
    close_model(&m);
    bl_comm_destroy(comm);
    test_device_destroy(d);
}

static void check_golden(const char *dir, const char *golden_path)
{
    json_t *root;

    ok(bl_json_load(golden_path, 1 << 24, &root));
    const json_t *list = json_object_get(root, "cases");
    assert_true(json_array_size(list) >= 3);
    for (int quantized = 0; quantized < 2; quantized++) {
        bl_model *model;
        ok(bl_model_open(dir, quantized ? BL_BASE_FP8_ROW : BL_BASE_STORED, 256, &model));
        for (size_t i = 0; i < json_array_size(list); i++)
            check_case(dir, model, json_array_get(list, i), !quantized);
        bl_model_close(model);
    }
    json_decref(root);
}

static void test_demo(void **state)
{
    (void)state;
    check_golden("demo/base", "demo/golden.json");
}

static void test_stories(void **state)
{
    static const char *const names[] = {"stories260K", "stories260K-bf16",
                                        "stories260K-bf16-sharded"};
    const char *data = getenv("BALLAST_TEST_DATA");
    (void)state;
    TEST_SKIP_WITHOUT_DATA(data);
    for (size_t i = 0; i < BL_COUNT(names); i++) {
        char dir[PATH_BYTES], path[PATH_BYTES + 16];
        snprintf(dir, sizeof dir, "%s/models/%s", data, names[i]);
        snprintf(path, sizeof path, "%s/golden.json", dir);
        check_golden(dir, path);
    }
}

/* ---- other families: models-families/ and models-moe/ of BALLAST_TEST_DATA ---- */

/* The weights of `model` with the configuration `config`, both paths in the data; their folder in
 * `dir`. */
static void link_family(const char *data, const char *model, const char *config,
                        char dir[PATH_BYTES])
{
    char from[4 * PATH_BYTES], to[2 * PATH_BYTES];

    snprintf(dir, PATH_BYTES, "/tmp/ballast-family-XXXXXX");
    assert_non_null(mkdtemp(dir));
    snprintf(from, sizeof from, "%s/%s/model.safetensors", data, model);
    snprintf(to, sizeof to, "%s/model.safetensors", dir);
    assert_int_equal(symlink(from, to), 0);
    snprintf(from, sizeof from, "%s/%s", data, config);
    snprintf(to, sizeof to, "%s/config.json", dir);
    assert_int_equal(symlink(from, to), 0);
}

static void check_family_greedy(rank_model *m, const json_t *greedy)
{
    int64_t vocab = m->weights->model->config.vocab_size;
    int32_t prompt[MAX_TOKENS], tokens[MAX_TOKENS];
    int64_t n_prompt = read_ids(json_object_get(greedy, "prompt"), prompt),
            n = read_ids(json_object_get(greedy, "tokens"), tokens);
    bl_generator *generator;
    const float *logits;

    ok(bl_generator_create(m->device, m->stream, m->weights, m->base, &m->no_lora, none,
                           n_prompt + n, &generator));
    ok(bl_generator_extend(generator, prompt, n_prompt, &logits));
    for (int64_t i = 0; i < n; i++) {
        assert_int_equal(most_likely(logits, vocab), tokens[i]);
        if (i + 1 < n) ok(bl_generator_extend(generator, &tokens[i], 1, &logits));
    }
    bl_generator_destroy(generator);
}

static void check_family(const char *name, const char *dir, const json_t *root)
{
    test_device d = test_device_create(2);
    bl_model *model;
    bl_comm *comm;
    rank_model m;
    double worst = 0;

    ok(bl_model_open(dir, BL_BASE_STORED, 256, &model));
    ok(bl_comm_create_local(1, 0, &comm));
    ok(open_model(model, d.device, d.stream, comm, &m));
    const json_t *list = json_object_get(root, "cases");
    assert_true(json_array_size(list) >= 3);
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *c = json_array_get(list, i);
        golden g = {.n = read_ids(json_object_get(c, "ids"), g.ids),
                    .mean_nll = json_real_value(json_object_get(c, "mean_nll"))};
        double sum;
        ok(sum_nll(&m, g.ids, g.n, 0, &sum));
        worst = fmax(worst, fabs(sum / (double)(g.n - 1) / g.mean_nll - 1));
    }
    print_message("%-16s loss off by %.2g of itself\n", name, worst);
    assert_true(worst <= 1e-6);
    check_family_greedy(&m, json_object_get(root, "greedy"));
    close_model(&m);
    bl_comm_destroy(comm);
    bl_model_close(model);
    test_device_destroy(d);
}

/* The family's folder has golden.json, the configuration in both spellings, and the weights or,
 * in `weights`, the same ones under other names. */
static void check_spellings(const char *family, const char *weights)
{
    static const char *const spellings[] = {"config.json", "config.v4.json"};
    const char *data = getenv("BALLAST_TEST_DATA");

    for (size_t k = 0; k < BL_COUNT(spellings); k++) {
        char dir[PATH_BYTES], path[2 * PATH_BYTES];
        json_t *root;
        snprintf(path, sizeof path, "%s/%s/golden.json", data, family);
        ok(bl_json_load(path, 1 << 24, &root));
        snprintf(path, sizeof path, "%s/%s", family, spellings[k]);
        link_family(data, weights, path, dir);
        check_family(weights, dir, root);
        json_decref(root);
        ok(bl_tree_remove(dir));
    }
}

static void test_families(void **state)
{
    static const char *const names[] = {
        "llama-bias", "llama-yarn",     "llama-longrope", "ministral3-yarn",
        "granite",    "mistral-window", "qwen3"};
    (void)state;
    TEST_SKIP_WITHOUT_DATA(getenv("BALLAST_TEST_DATA"));
    for (size_t i = 0; i < BL_COUNT(names); i++) {
        char family[PATH_BYTES];
        snprintf(family, sizeof family, "models-families/%s", names[i]);
        check_spellings(family, family);
    }
}

/* Published names of the experts' tensors, and those that transformers 5 writes stacked. */
static void test_mixtures(void **state)
{
    (void)state;
    TEST_SKIP_WITHOUT_DATA(getenv("BALLAST_TEST_DATA"));
    check_spellings("models-moe/qwen3_moe", "models-moe/qwen3_moe");
    check_spellings("models-moe/qwen3_moe", "models-moe/qwen3_moe/fused");
    check_spellings("models-moe/mixtral", "models-moe/mixtral");
    check_spellings("models-moe/mixtral", "models-moe/mixtral/fused");
    check_spellings("models-moe/glm4_moe", "models-moe/glm4_moe");
    check_spellings("models-moe/gpt_oss", "models-moe/gpt_oss");
}

/* ---- generation ---- */

typedef struct demo {
    test_device d;
    bl_comm *comm;
    bl_model *model;
    rank_model m;
    golden g;
} demo;

static void open_demo(demo *t, int64_t n_positions)
{
    json_t *root;

    *t = (demo){.d = test_device_create(2)};
    ok(bl_json_load("demo/golden.json", 1 << 24, &root));
    t->g = read_case(json_array_get(json_object_get(root, "cases"), 0));
    json_decref(root);
    ok(bl_comm_create_local(1, 0, &t->comm));
    ok(bl_model_open("demo/base", BL_BASE_STORED, n_positions, &t->model));
    ok(open_model(t->model, t->d.device, t->d.stream, t->comm, &t->m));
}

static void close_demo(demo *t)
{
    close_model(&t->m);
    bl_model_close(t->model);
    bl_comm_destroy(t->comm);
    test_device_destroy(t->d);
}

static bl_generator *new_generator(demo *t, int64_t capacity)
{
    bl_generator *generator;
    ok(bl_generator_create(t->d.device, t->d.stream, t->m.weights, t->m.base, &t->m.no_lora, none,
                           capacity, &generator));
    return generator;
}

static double nll_of(const float *logits, int64_t vocab, int32_t id)
{
    double sum = 0;
    for (int64_t i = 0; i < vocab; i++) sum += exp((double)logits[i]);
    return log(sum) - (double)logits[id];
}

/* A prompt longer than what goes through the layers at once, in one call and in pieces, against the
 * model run over all of it. */
static void test_long_prompts(void **state)
{
    enum { N = 1100 };
    static const int64_t pieces[] = {1, 300, 511, 288};
    int32_t ids[N + 1];
    const float *logits;
    double sum;
    demo t;
    (void)state;

    open_demo(&t, N);
    int64_t vocab = t.model->config.vocab_size;
    for (int64_t i = 0; i <= N; i++) ids[i] = t.g.ids[i % t.g.n];
    double error = logit_error(&t.model->config, N, fabs(t.g.top_logit));
    ok(sum_nll(&t.m, ids, N, N - 2, &sum));
    bl_generator *whole = new_generator(&t, N), *parts = new_generator(&t, N);
    ok(bl_generator_extend(whole, ids, N - 1, &logits));
    assert_true(fabs(nll_of(logits, vocab, ids[N - 1]) - sum) <= 2 * error);
    for (int64_t done = 0, i = 0; i < (int64_t)BL_COUNT(pieces); done += pieces[i++]) {
        ok(bl_generator_extend(parts, ids + done, i == 3 ? pieces[i] - 1 : pieces[i], &logits));
    }
    assert_true(fabs(nll_of(logits, vocab, ids[N - 1]) - sum) <= 2 * error);
    bl_generator_destroy(whole);
    bl_generator_destroy(parts);
    close_demo(&t);
}

/* Each step through the cache, against a generator that reads the whole sequence anew. */
static void test_cache_equals_recomputation(void **state)
{
    const float *cached, *fresh;
    demo t;
    (void)state;

    open_demo(&t, 64);
    int64_t vocab = t.model->config.vocab_size;
    double error = logit_error(&t.model->config, t.g.n, fabs(t.g.top_logit));
    bl_generator *generator = new_generator(&t, 64);
    for (int64_t n = 1; n <= t.g.n; n++) {
        bl_generator *again = new_generator(&t, n);
        ok(bl_generator_extend(generator, t.g.ids + n - 1, 1, &cached));
        ok(bl_generator_extend(again, t.g.ids, n, &fresh));
        for (int64_t i = 0; i < vocab; i++)
            assert_true(fabs((double)cached[i] - (double)fresh[i]) <= 2 * error);
        bl_generator_destroy(again);
    }
    bl_generator_destroy(generator);
    close_demo(&t);
}

static void test_what_generation_refuses(void **state)
{
    bl_generator *generator;
    const float *logits, *after;
    demo t;
    (void)state;

    open_demo(&t, 16);
    assert_int_equal(bl_generator_create(t.d.device, t.d.stream, t.m.weights, t.m.base,
                                         &t.m.no_lora, none, 17, &generator),
                     BL_EUSAGE);
    assert_null(generator);
    generator = new_generator(&t, 12);
    int32_t past_the_end = (int32_t)t.model->config.vocab_size, negative = -1;
    assert_int_equal(bl_generator_extend(generator, t.g.ids, 13, &logits), BL_EUSAGE);
    assert_int_equal(bl_generator_extend(generator, t.g.ids, 0, &logits), BL_EUSAGE);
    assert_int_equal(bl_generator_extend(generator, &past_the_end, 1, &logits), BL_EINPUT);
    assert_int_equal(bl_generator_extend(generator, &negative, 1, &logits), BL_EINPUT);
    ok(bl_generator_extend(generator, t.g.ids, 11, &logits));
    assert_int_equal(bl_generator_extend(generator, t.g.ids, 2, &logits), BL_EUSAGE);
    ok(bl_generator_extend(generator, t.g.ids + 11, 1,
                           &logits)); /* nothing was appended by what was refused */
    float *kept = test_floats(t.model->config.vocab_size);
    memcpy(kept, logits, (size_t)t.model->config.vocab_size * sizeof *kept);
    bl_generator *fresh = new_generator(&t, 12);
    ok(bl_generator_extend(fresh, t.g.ids, 11, &after));
    ok(bl_generator_extend(fresh, t.g.ids + 11, 1, &after));
    test_same_bits("logits", kept, after, t.model->config.vocab_size);
    bl_generator_destroy(fresh);
    bl_generator_destroy(generator);

    for (int64_t i = 0, hidden = t.model->config.hidden_size; i < hidden;
         i++) /* overflows before the head */
        t.m.weights->vectors[2 * t.model->config.n_layers * hidden + i] = 3e38f;
    generator = new_generator(&t, 4);
    assert_int_equal(bl_generator_extend(generator, t.g.ids, 4, &logits), BL_ENUMERIC);
    bl_generator_destroy(generator);
    bl_generator_destroy(NULL);
    free(kept);
    close_demo(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_demo),
        cmocka_unit_test(test_stories),
        cmocka_unit_test(test_families),
        cmocka_unit_test(test_mixtures),
        cmocka_unit_test(test_long_prompts),
        cmocka_unit_test(test_cache_equals_recomputation),
        cmocka_unit_test(test_what_generation_refuses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
