"""Text for causal language models: files, records, and sequences of tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_launch.errors import UsageError

_TEXTS, _RECORDS = (".txt", ".md"), (".jsonl",)
_FORMS = '{"text": …}, {"prompt": …, "completion": …} or {"messages": […]}'


@dataclass(frozen=True, kw_only=True)
class TextCodec:
    """How a model reads text."""

    encode: Callable[[str], Sequence[int]]
    #: Text of a chat's messages, each with `role` and `content`.
    format_chat: Callable[[list[dict[str, str]]], str]
    #: Token between two documents; None for none.
    end: int | None


def load_codec(folder: Path, vocabulary: int) -> TextCodec:
    """Return the codec of a model's tokenizer; a model of 256 tokens without a tokenizer reads bytes.

    Raises:
        UsageError: The folder has no tokenizer.
    """
    from transformers import AutoTokenizer

    if vocabulary == 256 and not any(folder.glob("tokenizer*")):
        return TextCodec(encode=lambda text: list(text.encode()), format_chat=_format_plain, end=10)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder}: the model's tokenizer cannot be loaded: {error}") from None

    def format_chat(messages: list[dict[str, str]]) -> str:
        if not tokenizer.chat_template:
            return _format_plain(messages)
        return str(tokenizer.apply_chat_template(messages, tokenize=False))

    return TextCodec(
        encode=lambda text: tokenizer(text, add_special_tokens=False).input_ids,
        format_chat=format_chat,
        end=tokenizer.eos_token_id,
    )


def _format_plain(messages: list[dict[str, str]]) -> str:
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


def iter_documents(path: Path, codec: TextCodec) -> Iterator[str]:
    """Return the documents of a file, or of all files of a folder in the order of their paths.

    Raises:
        UsageError: There is nothing to read, or a record is in another form; the text names file and line.
    """
    if not path.exists():
        raise UsageError(f"{path}: there is no such file or folder.")
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    files = [file for file in files if file.suffix.lower() in _TEXTS + _RECORDS]
    if not files:
        raise UsageError(f"{path} has no files that end in {', '.join(_TEXTS + _RECORDS)}.")
    for file in files:
        try:
            if file.suffix.lower() in _TEXTS:
                yield file.read_text(encoding="utf-8")
            else:
                yield from _iter_records(file, codec)
        except UnicodeError:
            raise UsageError(f"{file} is not a text in UTF-8.") from None


def _iter_records(file: Path, codec: TextCodec) -> Iterator[str]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield _format_record(json.loads(line), codec)
            except (ValueError, KeyError, TypeError):
                raise UsageError(f"{file}, line {number}: a record such as {_FORMS} is needed.") from None


def _format_record(record: Any, codec: TextCodec) -> str:
    if "messages" in record:
        return codec.format_chat(record["messages"])
    texts = [record["text"]] if "text" in record else [record["prompt"], record["completion"]]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError
    return "".join(texts)


def build_sequences(path: Path, codec: TextCodec, length: int) -> Any:
    """Return all text as a tensor of shape (sequences, `length`) of token ids; what is left over is dropped.

    Raises:
        UsageError: The text is shorter than one sequence, or cannot be read.
    """
    import torch

    tokens: list[int] = []
    for document in iter_documents(path, codec):
        tokens.extend(codec.encode(document))
        if codec.end is not None:
            tokens.append(codec.end)
    if len(tokens) < length:
        raise UsageError(
            f"{path} has {len(tokens)} tokens, fewer than one sequence of {length}: set a shorter sequence."
        )
    count = len(tokens) // length
    return torch.tensor(tokens[: count * length]).view(count, length)


def split_held_out(sequences: Any, share: float) -> tuple[Any, Any]:
    """Return the sequences for training and those held out, the last ones: at least one, unless the share is 0.

    Raises:
        UsageError: Nothing is left for training.
    """
    held_out = 0 if share == 0 else max(1, round(len(sequences) * share))
    if held_out >= len(sequences):
        raise UsageError(
            f"The data has {len(sequences)} sequences, and {held_out} of them are held out: set a shorter sequence, or "
            "held_out=0."
        )
    split = len(sequences) - held_out
    return sequences[:split], sequences[split:]
