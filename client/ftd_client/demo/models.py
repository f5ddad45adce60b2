"""What the demo needs of transformers: the class of a model directory, inputs for it, embeddings from it.

Everything of a library or of model code that fails becomes one error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from ftd.clock import NS, monotonic_ns
from ftd.errors import BindError
from ftd_client.demo.problems import DemoError, step
from ftd_client.follower import Follower
from ftd_client.meta import meta_parameters
from ftd_client.walk import walk

# What all models of transformers share takes seconds to import (torch.distributed, torch._dynamo) and comes with the
# first one: here, where workers import side by side, and not when they load in turn.
_ = transformers.BertModel

#: Plenty for a sentence, and below the positions of every text model.
_MAX_TOKENS = 128
_SEEDED_TOKENS = 12
#: One of these in a file's name means that a tokenizer was saved with the model. Without any, transformers makes an
#: empty tokenizer of the model's type, which maps all words to one id.
_TOKENIZER_FILES = ("tokenizer", "vocab", "spiece", "sentencepiece")
_OTHER_MODEL = "try another text model: a directory with config.json and the weights in the names of its class"


@dataclass(frozen=True, slots=True)
class Inputs:
    """One text, as a model takes it.

    Attributes:
        label: the text, or what stands in its place.
        tensors: keyword arguments of the forward, each of one row.
    """

    label: str
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Embedded:
    """Outputs of a model for several inputs.

    Attributes:
        vectors: one a text, the mean over its tokens.
        digest: of every output tensor's bytes, so that equal digests mean equal bits.
        first_ms: time of the first forward.
    """

    vectors: list[list[float]]
    digest: str
    first_ms: float


def read_config(directory: Path) -> Any:
    """The configuration in `directory`; code that comes with a model is never run."""
    with step("the model's config.json can't be used", _OTHER_MODEL):
        return transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)


def model_class(config: Any) -> type[nn.Module]:
    """The class that the checkpoint was saved from, else the base class of its kind. Imports the model's code.

    Raises:
        DemoError: this transformers has neither.
    """
    names = getattr(config, "architectures", None) or []
    with step(f"the model class of {type(config).__name__} can't be imported", _OTHER_MODEL):
        found = getattr(transformers, names[0], None) if names else None
        if found is None:
            found = transformers.MODEL_MAPPING.get(type(config), None)
        if isinstance(found, Sequence):
            found = found[0]
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise DemoError(
            f"transformers {transformers.__version__} has no class {names[0] if names else '?'} and no base model of"
            f" {type(config).__name__}",
            _OTHER_MODEL,
        )
    return found


def bound_model(follower: Follower, cls: type[nn.Module], directory: Path) -> tuple[nn.Module, float, float]:
    """A model of `cls` with the follower's weights, and the milliseconds that building and binding took.

    Raises:
        DemoError: it can't be built, or its names and shapes are not those of the checkpoint.
    """
    model, build_ms = _on_meta(cls, directory, torch.device("meta"))
    began_ns = monotonic_ns()
    try:
        follower.bind(model, strict=False)
    except BindError as error:
        if not _only_buffers(model, error):
            raise _unfit(cls, error) from error
        # transformers 4 has no init that recomputes buffers: build them for real, which takes longer
        model, build_ms = _on_meta(cls, directory, meta_parameters())
        began_ns = monotonic_ns()
        follower.bind(model, strict=False)
    return model.eval(), build_ms, _since_ms(began_ns)


def pretrained_model(cls: Any, directory: Path) -> tuple[nn.Module, float]:
    """What transformers makes of the same directory, and the milliseconds that it took."""
    with step(f"{cls.__name__}.from_pretrained failed", _OTHER_MODEL):
        began_ns = monotonic_ns()
        # transformers 5 says `dtype`, and takes the older name too
        model = cls.from_pretrained(directory, torch_dtype="auto", local_files_only=True).eval()
        return model, _since_ms(began_ns)


def make_inputs(config: Any, directory: Path, sentences: Sequence[str]) -> list[Inputs]:
    """The sentences in tokens; without a tokenizer in `directory`, as many rows of token ids from fixed seeds."""
    text_config = config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None) or _MAX_TOKENS
    limit = min(_MAX_TOKENS, positions)
    extra = {}
    if getattr(config, "is_encoder_decoder", False):
        start = getattr(config, "decoder_start_token_id", None)
        extra["decoder_input_ids"] = torch.tensor([[start if start is not None else 0]])
    made = []
    if any(word in path.name for path in directory.rglob("*") for word in _TOKENIZER_FILES):
        with step("the model's tokenizer can't be used", _OTHER_MODEL):
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                directory, trust_remote_code=False, local_files_only=True
            )
            for sentence in sentences:
                tokens = dict(tokenizer(sentence, return_tensors="pt", truncation=True, max_length=limit))
                made.append(Inputs(sentence, {**tokens, **extra}))
        return made
    with step(f"{type(config).__name__} has no vocabulary", _OTHER_MODEL):
        vocabulary = int(text_config.vocab_size)
    for seed in range(len(sentences)):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(vocabulary, (1, min(limit, _SEEDED_TOKENS)), generator=generator)
        made.append(Inputs(f"token ids from seed {seed} (the model has no tokenizer)", {"input_ids": ids, **extra}))
    return made


def embed(model: nn.Module, inputs: Sequence[Inputs]) -> Embedded:
    """Runs the model on each input alone: without padding, every token counts.

    Raises:
        DemoError: the model does not run on text, or gives nothing that can be compared.
    """
    digest = hashlib.sha256()
    vectors: list[list[float]] = []
    first_ms = 0.0
    with step(f"{type(model).__name__} can't run on token ids", _OTHER_MODEL), torch.inference_mode():
        for one in inputs:
            began_ns = monotonic_ns()
            outputs = model(**one.tensors)
            first_ms = first_ms or _since_ms(began_ns)
            for value in outputs.values():
                if isinstance(value, torch.Tensor):
                    digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            vectors.append(_pooled(outputs).float().tolist())
    return Embedded(vectors, digest.hexdigest(), first_ms)


def _pooled(outputs: Any) -> torch.Tensor:
    for name in ("encoder_last_hidden_state", "last_hidden_state", "logits"):
        value = getattr(outputs, name, None)
        if isinstance(value, torch.Tensor):
            return value[0].mean(dim=0) if value.dim() == 3 else value[0].reshape(-1)
    raise DemoError(f"{type(outputs).__name__} holds neither hidden states nor logits", _OTHER_MODEL)


def _on_meta(cls: Any, directory: Path, context: Any) -> tuple[nn.Module, float]:
    began_ns = monotonic_ns()
    config = read_config(directory)
    with step(f"{cls.__name__} can't be built from config.json", _OTHER_MODEL), context:
        model = cls(config)
    return model, _since_ms(began_ns)


def _only_buffers(model: nn.Module, error: BindError) -> bool:
    """Whether every difference is a non-persistent buffer on meta; a difference starts with the tensor's name."""
    names = {group.name for group in walk(model).transient if group.tensor.is_meta}
    return all(line.partition(":")[0].partition(" ")[0] in names for line in error.problems)


def _unfit(cls: type[nn.Module], error: BindError) -> DemoError:
    first = f", the first: {error.problems[0]}" if error.problems else ""
    return DemoError(
        f"{cls.__name__} and the checkpoint differ in {len(error.problems)} tensors{first}",
        "transformers may rename or merge this model's weights as it loads them: save a copy in the names of the class,"
        " model.save_pretrained(DIR, save_original_format=False), and give that to --model",
    )


def _since_ms(began_ns: int) -> float:
    return (monotonic_ns() - began_ns) / NS * 1e3
