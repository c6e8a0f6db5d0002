# SPDX-License-Identifier: Apache-2.0
"""Small tokenizers of the shapes that published models have, trained on the license's text and written by transformers."""
import json
import os

from cases import ROOT
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ['<unk>', '<s>', '</s>']
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = LLAMA3.replace(r'\p{N}{1,3}', r'\p{N}')


def corpus():
    with open(os.path.join(ROOT, 'LICENSE')) as f:
        return f.read().splitlines()


def byte_level(steps, normalizer=None):
    """Byte-level BPE behind these pre-tokenizers; bos in front, as Llama 3's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    return tokenizer


def split(pattern):
    return byte_level_steps(pre_tokenizers.Split(Regex(pattern), 'isolated'))


def byte_level_steps(first):
    return [first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


def llama2():
    """BPE over whole texts, spaces as U+2581, unknown characters as bytes."""
    tokenizer = Tokenizer(models.BPE(unk_token='<unk>', fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend('\u2581'), normalizers.Replace(' ', '\u2581')])
    tokenizer.decoder = decoders.Sequence([decoders.Replace('\u2581', ' '), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(' ', 1, 0)])
    tokenizer.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=250, special_tokens=SPECIAL, show_progress=False))
    text = json.loads(tokenizer.to_str())
    words = [w for w in sorted(text['model']['vocab'], key=text['model']['vocab'].get) if w not in SPECIAL]
    every = SPECIAL + ['<0x%02X>' % b for b in range(256)] + words
    text['model']['vocab'] = {w: i for i, w in enumerate(every)}
    return Tokenizer.from_str(json.dumps(text))


def unigram():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(corpus(), trainers.UnigramTrainer(vocab_size=300, special_tokens=SPECIAL, unk_token='<unk>',
                                                                    show_progress=False))
    return tokenizer


#  title: what makes it
SHAPES = {
    'ByteLevel': lambda: byte_level([pre_tokenizers.ByteLevel(add_prefix_space=False)]),
    'Split, ByteLevel': lambda: byte_level(split(LLAMA3)),
    'NFC, Split, ByteLevel': lambda: byte_level(split(QWEN), normalizers.NFC()),
    'Digits, ByteLevel': lambda: byte_level([pre_tokenizers.Digits(individual_digits=True),
                                             pre_tokenizers.ByteLevel(add_prefix_space=False)]),
    'Prepend, byte fallback': llama2,
    'Unigram, Metaspace': unigram,
}


def make(shape):
    tokenizer = SHAPES[shape]()
    if shape != 'ByteLevel':
        tokenizer.post_processor = processors.TemplateProcessing(single='<s> $A', pair='<s> $A $B',
                                                                 special_tokens=[('<s>', tokenizer.token_to_id('<s>'))])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token='<unk>', bos_token='<s>', eos_token='</s>')
