/* SPDX-License-Identifier: Apache-2.0 */
/* readme.c -- the README.md of an adapter: its description, its losses and on which base, how to
 * use it. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/sizes.h"
#include "train/data/sampler.h"
#include "train/training_internal.h"

/* Projections with LoRA terms, and modules that are trained whole. */
static void target_list(const bl_job *job, char *text, size_t n_bytes)
{
    const bl_peft_saved_names *saved = &job->modules.names;
    size_t used = 0;
    text[0] = '\0';
    for (int p = 0; p < job->lora.arch->n_projections; p++)
        if (job->lora.options.target[p])
            used += (size_t)snprintf(text + used, n_bytes - used, "%s%s", used ? ", " : "",
                                     bl_projection_name(&job->lora.arch->projections[p]));
    for (int i = 0; i < saved->n && used < n_bytes; i++)
        used +=
            (size_t)snprintf(text + used, n_bytes - used, "%s%s",
                             i == 0 ? "; trained whole (modules_to_save): " : ", ", saved->name[i]);
}

static bl_status write_losses(const bl_job *job, const bl_outcome *outcome, char **text)
{
    char stored[128] = "", base[128] = "";

    if (!job->data.validation.set)
        return bl_text_format(
            text, "| | training loss |\n|---|---|\n| first step | %.4f |\n| last step | %.4f |\n",
            outcome->first_loss, outcome->last_loss);
    if (outcome->stored.rows > 0)
        snprintf(stored, sizeof stored, "| base as stored + adapter | %.4f | %.3f |\n",
                 outcome->stored.loss, exp(outcome->stored.loss));
    if (!isnan(outcome->base.loss))
        snprintf(base, sizeof base, "| base | %.4f | %.3f |\n", outcome->base.loss,
                 exp(outcome->base.loss));
    return bl_text_format(text,
                          "| | validation loss | perplexity |\n|---|---|---|\n%s| %s | "
                          "%.4f | %.3f |\n%s",
                          base, job->model->is_trained ? "fine-tuned" : "base + adapter",
                          outcome->trained.loss, exp(outcome->trained.loss), stored);
}

/* The model and `dir` as words of a shell's command. */
typedef struct command_words {
    char *model, *dir;
} command_words;

/* In single quotes, unless no character needs them. */
static bl_status quote_word(const char *text, char **out)
{
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                                "_-./:=@%+,";

    if (*text && strspn(text, plain) == strlen(text)) return bl_text_format(out, "%s", text);
    char *end = *out = malloc(4 * strlen(text) + 3);
    if (!end) return BL_FAIL(BL_ENOMEM, "out of memory: words of a command");
    *end++ = '\'';
    for (; *text; text++) {
        if (*text == '\'') end = stpcpy(end, "'\\'");
        *end++ = *text;
    }
    strcpy(end, "'");
    return BL_OK;
}

static void free_words(command_words *words)
{
    free(words->model);
    free(words->dir);
}

/* To be freed also after a failure. */
static bl_status make_words(const bl_job *job, const char *dir, command_words *out)
{
    *out = (command_words){0};
    BL_TRY(quote_word(job->config->model_name_or_path, &out->model));
    return quote_word(dir, &out->dir);
}

/* Which base the losses are those of, and how to have the other's. */
static bl_status write_base(const bl_job *job, bool has_stored, const char *dir, char **text)
{
    char formats[BL_BASE_FORMATS_TEXT_BYTES];

    bl_base_formats_describe(&job->base_formats, "training", formats);
    if (!bl_model_base_is_quantized(&job->base_formats))
        return bl_text_format(text, "Frozen base: %s.\n", formats);
    if (has_stored)
        return bl_text_format(
            text,
            "Frozen base: %s. The losses are those of the base as trained; the last row is "
            "that of the base as stored, which PEFT and vLLM load from the checkpoint.\n",
            formats);
    command_words words;
    bl_status st = make_words(job, dir, &words);
    if (st == BL_OK)
        st = bl_text_format(
            text,
            "Frozen base: %s. The losses are those of the base as trained. On the base as stored, "
            "which PEFT and "
            "vLLM load from the checkpoint, the adapter was not evaluated; this does:\n\n"
            "```\nballast eval %s/config.resolved.yaml --adapter %s --base_format stored%s\n```\n",
            formats, words.dir, words.dir,
            job->config->validation_file ? "" : " --validation_file FILE");
    free_words(&words);
    return st;
}

bl_status bl_training_next_command(const bl_job *job, const char *dir, char **text)
{
    bl_base_format format = job->config->base_format;
    bool is_auto = format == BL_BASE_AUTO;
    command_words words;
    bl_status st = make_words(job, dir, &words);

    if (st == BL_OK && job->model->is_trained)
        st = bl_text_format(
            text, "ballast generate --model %s/" BL_OUTPUT_MODEL " --prompt \"...\"", words.dir);
    else if (st == BL_OK)
        st = bl_text_format(text, "ballast generate --model %s --adapter %s%s%s --prompt \"...\"",
                            words.model, words.dir, is_auto ? "" : " --base_format ",
                            is_auto ? "" : bl_base_format_name(format));
    free_words(&words);
    return st;
}

/* The value of vLLM's --max-lora-rank for an adapter of rank r: it takes these only
 * (MaxLoRARanks in vllm/config/lora.py). A larger rank stays, and vLLM rejects it. */
static long long rank_in_vllm(int64_t r)
{
    static const int64_t ranks[] = {1, 8, 16, 32, 64, 128, 256, 320, 512};
    for (size_t i = 0; i < BL_COUNT(ranks); i++)
        if (r <= ranks[i]) return (long long)ranks[i];
    return (long long)r;
}

/* vLLM and SGLang serve LoRA terms alone. */
static bl_status write_serving(const bl_job *job, const command_words *words, char **text)
{
    const char *model = words->model, *dir = words->dir;
    long long r = rank_in_vllm(bl_lora_largest_r(&job->lora));

    if (job->modules.names.n > 0)
        return bl_text_format(
            text,
            "vLLM serves no adapters with `modules_to_save`: merge it into a model first (`ballast "
            "merge --model %s --adapter %s --output_dir merged`).%s\n",
            model, dir,
            job->model->config.tie_word_embeddings && bl_saved_modules_have_table(&job->modules)
                ? " Here embedding and head are one weight in the model (`tie_word_embeddings`) "
                  "and two in the adapter, which cannot be merged."
                : "");
    bool is_stacked =
        bl_lora_has_experts(&job->lora) && job->lora.options.layout == BL_PEFT_STACKED;
    return bl_text_format(
        text,
        "%sWith vLLM: `vllm serve %s --enable-lora --max-lora-rank %lld --lora-modules "
        "tuned=%s`.\n"
        "With SGLang: `python -m sglang.launch_server --model-path %s --enable-lora "
        "--lora-paths tuned=%s`.\n",
        is_stacked ? "vLLM and SGLang read routed experts one by one, as `ballast convert-adapter "
                     "IN OUT --adapter_layout per_expert` writes them.\n"
                   : "",
        model, r, dir, model, dir);
}

/* The base as trained, in FP8. */
static bl_status write_serving_base(const bl_job *job, const command_words *words, char **text)
{
    const bl_train_config *c = job->config;

    return bl_text_format(text,
                          "\nBoth then add the adapter to the base as stored. To serve the "
                          "base as trained, write its FP8 "
                          "codes to another folder:\n\n"
                          "```\nballast quantize %s base-FP8 --base_format %s\n"
                          "vllm serve base-FP8 --enable-lora --max-lora-rank %lld "
                          "--lora-modules tuned=%s\n```\n\n"
                          "These are the codes and scales of the training, bit for bit. In "
                          "training activations are not "
                          "quantized, in vLLM they are, too. Tried: the library with which "
                          "vLLM reads such a folder, not vLLM "
                          "itself.\n",
                          words->model,
                          c->base_format == BL_BASE_FP8_BLOCK ? "fp8_block" : "fp8_row",
                          (long long)rank_in_vllm(bl_lora_largest_r(&job->lora)), words->dir);
}

static bl_status write_use(const bl_job *job, const char *dir, char **text)
{
    const char *model = job->config->model_name_or_path;
    char *serving = NULL, *served = NULL, *command = NULL;
    command_words words;
    bl_status st;

    BL_TRY_GOTO(st, done, make_words(job, dir, &words));
    BL_TRY_GOTO(st, done, bl_training_next_command(job, dir, &command));
    BL_TRY_GOTO(st, done, write_serving(job, &words, &serving));
    bl_format made;
    bool is_packed = bl_format_parse(bl_base_format_name(job->config->base_format), &made) &&
                     bl_format_is_packed(made); /* ballast quantize writes FP8 only */
    if (bl_model_base_is_quantized(&job->base_formats) && !is_packed && job->modules.names.n == 0)
        BL_TRY_GOTO(st, done, write_serving_base(job, &words, &served));
    st = bl_text_format(
        text,
        "## Use\n\n"
        "```\n%s\n```\n\n"
        "With PEFT: `PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(\"%s\"), "
        "\"%s\")`.\n%s%s\n"
        "`config.resolved.yaml` holds every setting of the run, `metrics.jsonl` a line a "
        "step.\n",
        command, model, dir, serving, served ? served : "");
done:
    free_words(&words);
    free(command);
    free(serving);
    free(served);
    return st;
}

/* Sentences about a run that did not end with its last step's adapter; else "". */
static void describe_ending(const bl_training *training, const bl_outcome *outcome, char *text,
                            size_t n_bytes)
{
    char stopped[80] = "", best[128] = "";

    if (outcome->n_steps < training->total_steps)
        snprintf(stopped, sizeof stopped, " Early stopping ended the run, planned for %lld steps.",
                 (long long)training->total_steps);
    if (outcome->adapter_step < outcome->n_steps)
        snprintf(best, sizeof best,
                 " The %s is that of step %lld, which had the lowest validation loss.",
                 training->job.model->is_trained ? "model" : "adapter",
                 (long long)outcome->adapter_step);
    snprintf(text, n_bytes, "%s%s", stopped, best);
}

/* Of a model that was trained itself. */
static bl_status write_model_card(const bl_training *training, const bl_outcome *outcome,
                                  const char *dir, char **text)
{
    const bl_job *job = &training->job;
    const bl_train_config *c = job->config;
    char ending[256], formats[BL_BASE_FORMATS_TEXT_BYTES], chosen[BL_TRAINED_TEXT_BYTES],
        trained[BL_TRAINED_TEXT_BYTES + 64] = "Every weight was trained", *losses = NULL,
                                        *command = NULL;
    bl_status st;

    bl_trained_describe(&job->model->config, &job->model->trained, chosen);
    if (!job->model->trained.is_all)
        snprintf(trained, sizeof trained, "A part of the model (%s) was trained", chosen);
    describe_ending(training, outcome, ending, sizeof ending);
    bl_base_formats_describe(&job->base_formats, "training", formats);
    BL_TRY_GOTO(st, done, write_losses(job, outcome, &losses));
    BL_TRY_GOTO(st, done, bl_training_next_command(job, dir, &command));
    st = bl_text_format(
        text,
        "---\nbase_model: %s\nbase_model_relation: finetune\npipeline_tag: "
        "text-generation\n---\n# %s, fine-tuned\n\n"
        "%s with Ballast: %lld steps, %lld sequences a "
        "step.%s Projections: %s.\n\n%s\n## Use\n\n```\n%s\n```\n\n"
        "With transformers: `AutoModelForCausalLM.from_pretrained(\"%s/model\")`.\n",
        c->model_name_or_path, c->model_name_or_path, trained, (long long)outcome->n_steps,
        (long long)bl_train_batch_rows(c), ending, formats, losses, command, dir);
done:
    free(command);
    free(losses);
    return st;
}

bl_status bl_training_readme(const bl_training *training, const bl_outcome *outcome,
                             const char *dir, char **text)
{
    const bl_job *job = &training->job;
    const bl_train_config *c = job->config;
    char targets[128 + BL_PEFT_MAX_SAVED * (BL_PEFT_SAVED_BYTES + 2)], ending[256],
        *losses = NULL, *base = NULL, *use = NULL;
    bl_status st = BL_OK;

    if (job->model->is_trained) return write_model_card(training, outcome, dir, text);
    target_list(job, targets, sizeof targets);
    describe_ending(training, outcome, ending, sizeof ending);
    BL_TRY_GOTO(st, done, write_losses(job, outcome, &losses));
    BL_TRY_GOTO(st, done, write_base(job, outcome->stored.rows > 0, dir, &base));
    BL_TRY_GOTO(st, done, write_use(job, dir, &use));
    BL_TRY_GOTO(st, done,
                bl_text_format(text,
                               "---\nbase_model: %s\nlibrary_name: peft\npipeline_tag: "
                               "text-generation\ntags:\n- lora\n---\n"
                               "# LoRA adapter for %s\n\n"
                               "Trained with Ballast: %lld steps, %lld sequences a step, r %lld, "
                               "alpha %g, on %s.%s\n\n%s\n%s\n%s",
                               c->model_name_or_path, c->model_name_or_path,
                               (long long)outcome->n_steps, (long long)bl_train_batch_rows(c),
                               (long long)job->lora.options.r, job->lora.options.alpha, targets,
                               ending, losses, base, use));
done:
    free(use);
    free(base);
    free(losses);
    return st;
}

bl_status bl_training_write_readme(const bl_training *training, const bl_outcome *outcome,
                                   const char *dir)
{
    char *text = NULL, *path = NULL;
    bl_status st;

    BL_TRY(bl_training_readme(training, outcome, dir, &text));
    BL_TRY_GOTO(st, done, bl_path_join(dir, BL_OUTPUT_README, &path));
    st = bl_file_write_atomic(path, text, strlen(text));
done:
    free(path);
    free(text);
    return st;
}
