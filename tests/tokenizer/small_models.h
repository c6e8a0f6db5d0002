/* SPDX-License-Identifier: Apache-2.0 */
/* small_models.h -- parts of tokenizer.json that tests put together. */
#ifndef BALLAST_TESTS_TOKENIZER_SMALL_MODELS_H
#define BALLAST_TESTS_TOKENIZER_SMALL_MODELS_H

/* A model whose parts a test may replace. */
#define VOCAB "{\"a\":0,\"b\":1,\"ab\":2,\"</s>\":3}"
#define MODEL(vocab, merges, more)                                                                 \
    "\"model\":{\"type\":\"BPE\",\"vocab\":" vocab ",\"merges\":" merges more "}"
#define GOOD_MODEL MODEL(VOCAB, "[\"a b\"]", "")
#define TOKEN(id, content)                                                                         \
    "{\"id\":" id ",\"content\":\"" content                                                        \
    "\",\"single_word\":false,\"lstrip\":false,\"rstrip\":false,\"normalized\":false,"             \
    "\"special\":true}"

#endif
