/* SPDX-License-Identifier: Apache-2.0 */
/* output.c -- the README.md beside an adapter: what it is, what it was worth, how to use it. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/sizes.h"
#include "train/job.h"

static void target_list(const bl_job *job, char *text, size_t n_bytes)
{
    size_t used = 0;
    text[0] = '\0';
    for (int p = 0; p < BL_PROJECTIONS; p++)
        if (job->lora.options.target[p])
            used += (size_t)snprintf(text + used, n_bytes - used, "%s%s", used ? ", " : "", bl_projection_get((bl_projection)p)->name);
}

static bl_status write_losses(const bl_job *job, char **text)
{
    if (!job->validation)
        return bl_text_format(text, "| | training loss |\n|---|---|\n| first step | %.4f |\n| last step | %.4f |\n", job->first_loss,
                              job->last_loss);
    return bl_text_format(text,
                          "| | validation loss | perplexity |\n|---|---|---|\n| base | %.4f | %.3f |\n| base + adapter | %.4f | %.3f |\n",
                          job->base_result.loss, exp(job->base_result.loss), job->final_result.loss, exp(job->final_result.loss));
}

bl_status bl_job_write_readme(const bl_job *job, const char *dir)
{
    const bl_train_config *c = job->config;
    char targets[128], *losses = NULL, *text = NULL, *path = NULL;
    bl_status st = BL_OK;

    target_list(job, targets, sizeof targets);
    BL_TRY_GOTO(st, done, write_losses(job, &losses));
    BL_TRY_GOTO(st, done,
                bl_text_format(&text,
                               "---\nbase_model: %s\nlibrary_name: peft\npipeline_tag: text-generation\ntags:\n- lora\n---\n"
                               "# LoRA adapter for %s\n\n"
                               "Trained with Ballast: %lld steps, %lld sequences a step, r %lld, alpha %g, on %s.\n\n%s\n"
                               "## Use\n\n"
                               "```\nballast generate --model %s --adapter %s --prompt \"...\"\n```\n\n"
                               "With PEFT: `PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(\"%s\"), \"%s\")`.\n"
                               "With vLLM: `vllm serve %s --enable-lora --max-lora-rank %lld --lora-modules tuned=%s`.\n\n"
                               "`config.resolved.yaml` holds every setting of the run, `metrics.jsonl` a line a step.\n",
                               c->model_name_or_path, c->model_name_or_path, (long long)job->total_steps,
                               (long long)bl_train_batch_rows(c), (long long)job->lora.options.r, job->lora.options.alpha, targets,
                               losses, c->model_name_or_path, dir, c->model_name_or_path, dir, c->model_name_or_path,
                               (long long)job->lora.options.r, dir));
    BL_TRY_GOTO(st, done, bl_path_join(dir, "README.md", &path));
    st = bl_file_write_atomic(path, text, strlen(text));
done:
    free(path);
    free(text);
    free(losses);
    return st;
}
