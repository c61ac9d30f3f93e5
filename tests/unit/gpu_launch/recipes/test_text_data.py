"""Text for recipes: which files are read, in which forms, and what is refused with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_launch.errors import UsageError
from gpu_launch.recipes.text_data import TextCodec, iter_documents

CODEC = TextCodec(
    encode=lambda text: list(text.encode()),
    format_chat=lambda messages: "|".join(message["content"] for message in messages),
    end=None,
)


def test_files_are_read_in_the_order_of_their_paths(tmp_path: Path) -> None:
    """Also in folders below; other files are passed over."""
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.MD").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "c.jsonl").write_text(
        '{"text": "third"}\n\n{"prompt": "2 + 2", "completion": " = 4"}\n'
        '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}\n'
    )
    (tmp_path / "d.bin").write_bytes(b"\xff")
    assert list(iter_documents(tmp_path, CODEC)) == ["first", "second", "third", "2 + 2 = 4", "hi|yes"]
    assert list(iter_documents(tmp_path / "a.txt", CODEC)) == ["first"]


@pytest.mark.parametrize(
    "record", ['{"txt": "x"}', '{"text": 1}', '{"prompt": "x"}', "[1]", "7", "{", '{"messages": [{"role": "user"}]}']
)
def test_records_in_another_form_are_named(tmp_path: Path, record: str) -> None:
    """With file and line."""
    (tmp_path / "x.jsonl").write_text(f'{{"text": "x"}}\n{record}\n')
    with pytest.raises(UsageError, match=r'x\.jsonl, line 2: a record such as \{"text"'):
        list(iter_documents(tmp_path, CODEC))


def test_nothing_to_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no files that end in \.txt, \.md, \.jsonl"):
        list(iter_documents(tmp_path, CODEC))
    with pytest.raises(UsageError, match="there is no such file or folder"):
        list(iter_documents(tmp_path / "none", CODEC))
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"x\.txt is not a text in UTF-8"):
        list(iter_documents(tmp_path, CODEC))
