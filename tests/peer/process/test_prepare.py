"""What a peer sets up: which text `--data` means, which device there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.dht.manifest import DataSpec
from dilocox.peer.process.prepare import own_data
from dilocox.peer.training.data_sources import open_source
from dilocox.pipeline.stage import chosen_device


@pytest.mark.parametrize(
    ("run_format", "option", "format_of_option"),
    [
        ("stdlib", "notes.txt", "text"),
        ("stdlib", "folder", "text"),
        ("stdlib", "rows.jsonl", "json"),
        ("json", "folder", "json"),
        ("json", "notes.txt", "text"),
        ("parquet", "*.parquet", "parquet"),
        ("text", "README.md", "text"),
    ],
)
def test_own_data_is_read_in_the_format_of_its_ending_else_of_the_run_else_as_text(
    run_format: Any, option: str, format_of_option: str
) -> None:
    source = "stdlib" if run_format == "stdlib" else "data"
    run = DataSpec(source=source, format=run_format, parts=3)
    spec = own_data(run, option)
    assert (spec.source, spec.format, spec.parts) == (option, format_of_option, 1)
    assert own_data(run, "") is run


def test_own_files_are_what_is_trained_on_in_a_run_on_the_standard_library(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"secret garden {number}\n" * 300)
    source = open_source(own_data(DataSpec(parts=1), str(tmp_path)))
    document = source.part(0, "order").read()
    assert document is not None and b"secret garden" in document


@pytest.mark.parametrize(
    ("option", "content", "said"),
    [
        ("absent.txt", None, "no text file is there"),
        ("a.txt.gz", b"x", "compressed"),
        ("a.txt", b"too short to hold any out", "part 0 of .* is empty; give more text"),
        ("a.jsonl", b'{"te', "cannot be read .* that their ending names"),
    ],
)
def test_a_mistake_in_own_data_names_the_option(
    option: str, content: bytes | None, said: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / option).write_bytes(content)
    with pytest.raises((InvalidInput, EnvironmentFault), match=said) as mistake:
        open_source(own_data(DataSpec(), str(tmp_path / option))).part(0, "order")
    assert "--data" in str(mistake.value) and "data." not in str(mistake.value)


def test_a_device_that_is_not_here_is_named_with_the_mend() -> None:
    assert chosen_device("cpu") == torch.device("cpu")
    assert chosen_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(InvalidInput, match=r"--device abacus: .*; choose cpu or auto"):
        chosen_device("abacus")
