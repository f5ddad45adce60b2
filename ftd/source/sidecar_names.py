"""The sidecar files that are published, by name: a closed list, because whoever may attach may read them.

A model's directory may be somebody's home: what is not named here stays there. `docs/sidecar-files.md` is the same
list for users. Exact names, and patterns only where the readers make names up.
"""

from __future__ import annotations

import re

CONFIGURATION = (
    # transformers: `utils/__init__.py`, `processing_utils.py`
    "config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json", "audio_tokenizer_config.json", "chat_template.json", "chat_template.jinja",
    # quantised checkpoints: GPTQ, AWQ, ModelOpt
    "quantize_config.json", "quant_config.json", "hf_quant_config.json",
    # PEFT; Mistral's and Meta's own format; diffusers
    "adapter_config.json", "params.json", "model_index.json",
    # sentence-transformers; the last six are older names of sentence_bert_config.json
    "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", "sentence_roberta_config.json",
    "sentence_distilbert_config.json", "sentence_camembert_config.json", "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json", "sentence_xlnet_config.json",
)  # fmt: skip

TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    # `vocab_files_names` of the tokenizers in transformers 5.24
    "bpe.codes", "byte_maps.json", "dict.txt", "emoji.json", "entity_vocab.json", "merges.txt", "normalizer.json",
    "prophetnet.tokenizer", "sentencepiece.bpe.model", "sentencepiece.model", "source.spm", "spiece.model",
    "spm.model", "spm_char.model", "target.spm", "target_vocab.json", "tokenizer.model", "vocab-src.json",
    "vocab-tgt.json", "vocab.json", "vocab.txt", "word_pronunciation.json", "word_shape.json",
    # Mistral's and OpenAI's vocabularies
    "tekken.json", "tiktoken.model",
)  # fmt: skip

# a tokenizer for later versions (`fast_tokenizer_files`), Mistral's numbered ones, vocabularies in tiktoken's format
_TOKENIZER_PATTERNS = (r"tokenizer\.[0-9.]+\.json", r"tokenizer\.model\.v[0-9]+[a-z0-9]*", r"[\w-]+\.tiktoken")

#: Directory ("" is the model's own) and the files in it, both as patterns of the whole name.
_TABLE = (
    ("", "|".join((*map(re.escape, (*CONFIGURATION, *TOKENIZER)), *_TOKENIZER_PATTERNS))),
    # one level below
    ("additional_chat_templates", r"[\w-]+\.jinja"),
    (r"[0-9]+_[A-Za-z]+", r"config\.json"),  # modules of sentence-transformers: 1_Pooling, 2_Dense
    # processors of transformers with several tokenizers, components of diffusers
    (r"(?:[a-z0-9]+_)*tokenizer(?:_[0-9]+)?", "|".join((*map(re.escape, TOKENIZER), *_TOKENIZER_PATTERNS))),
    ("scheduler", r"scheduler_config\.json"),
    ("feature_extractor|image_processor", r"preprocessor_config\.json"),
    (r"(?:text_encoder|transformer|unet|vae|image_encoder|safety_checker)(?:_[0-9]+)?", r"config\.json"),
)
_PLACES = tuple((re.compile(directory), re.compile(files, re.ASCII)) for directory, files in _TABLE)


def is_sidecar(name: str) -> bool:
    """Whether a file of this relative name is published, whatever its size. Upper and lower case differ."""
    directory, _, file = name.rpartition("/")
    return any(place.fullmatch(directory) and files.fullmatch(file) for place, files in _PLACES)
