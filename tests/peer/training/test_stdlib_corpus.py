"""The embedded default text: what is in it, what is held out, and a Python that has none."""

from pathlib import Path

import pytest

from dilocox.dht.errors import EnvironmentFault
from dilocox.peer.training.data_sources import HELD_OUT_MODULES, MAX_FILE_BYTES, library_files


def write(library: Path, *names: str, size: int = 10) -> None:
    for name in names:
        path = library / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"#" * size)


def test_this_python_has_megabytes_to_train_on_and_all_held_out_modules() -> None:
    training, held_out = library_files()
    assert sum(file.size for file in training) > 4_000_000
    assert {file.name for file in held_out} == {f"{module}.py" for module in HELD_OUT_MODULES}
    assert 0.02 < sum(file.size for file in held_out) / sum(file.size for file in training) < 0.15


def test_tests_tables_programs_and_packages_are_left_out(tmp_path: Path) -> None:
    left_out = [
        "test/test_os.py",
        "unittest/test/test_case.py",
        "lib2to3/tests/data.py",
        "idlelib/pyshell.py",
        "encodings/cp1252.py",
        "pydoc_data/topics.py",
        "distutils/core.py",
        "turtledemo/clock.py",
        "site-packages/numpy/core.py",
        "dist-packages/apt.py",
        "config-3.11-x86_64-linux-gnu/python-config.py",
        "__pycache__/os.py",
        "_sysconfigdata__linux_.py",
        "sitecustomize.py",
    ]
    write(tmp_path, "os.py", "email/parser.py", "argparse.py", "LICENSE.txt", *left_out)
    training, held_out = library_files(tmp_path)
    assert [file.name for file in training] == ["email/parser.py", "os.py"]
    assert [file.name for file in held_out] == ["argparse.py"]


def test_empty_and_very_large_files_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, "os.py", "argparse.py")
    write(tmp_path, "empty.py", size=0)
    write(tmp_path, "large.py", size=MAX_FILE_BYTES + 1)
    write(tmp_path, "just_right.py", size=MAX_FILE_BYTES)
    training, _ = library_files(tmp_path)
    assert [file.name for file in training] == ["just_right.py", "os.py"]


def test_a_held_out_module_counts_by_its_path_not_by_its_name(tmp_path: Path) -> None:
    write(tmp_path, "json/decoder.py", "decoder.py", "other/argparse.py")
    training, held_out = library_files(tmp_path)
    assert [file.name for file in training] == ["decoder.py", "other/argparse.py"]
    assert [file.name for file in held_out] == ["json/decoder.py"]


@pytest.mark.parametrize("names", [(), ("os.py",), ("argparse.py",)])
def test_a_python_without_sources_is_a_fault_that_names_the_option(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    write(tmp_path, *names)
    with pytest.raises(EnvironmentFault, match=r"no sources.*--data.*data\.source"):
        library_files(tmp_path)


def test_a_zipped_library_is_the_same_fault(tmp_path: Path) -> None:
    zipped = tmp_path / "python311.zip"
    zipped.write_bytes(b"PK")
    with pytest.raises(EnvironmentFault, match=r"python311\.zip"):
        library_files(zipped)
