"""What the doctor says of a machine: each line where all is well, and where it is not."""

from __future__ import annotations

import pytest

from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.peer.commands.doctor_checks import (
    DeviceFacts,
    FolderFacts,
    Library,
    device_check,
    fault,
    folder_check,
    key_check,
    libraries_check,
    memory_check,
    python_check,
)
from dilocox.peer.resources import Check, DiskNeeds, disk_check, size

GB, MB = 10**9, 2**20


# ---- programs ------------------------------------------------------------------------------------
@pytest.mark.parametrize("version", [(3, 10, 0), (3, 13, 9)])
def test_a_python_that_it_is_written_for_is_fine(version: tuple[int, int, int]) -> None:
    assert python_check(version, "Linux", "x86_64").status == "ok"


@pytest.mark.parametrize("version", [(3, 9, 18), (3, 14, 0)])
def test_another_python_is_named_with_those_that_work(version: tuple[int, int, int]) -> None:
    check = python_check(version, "Linux", "x86_64")
    assert check.status == "failed"
    assert "3.10 to 3.13" in check.remedy


def test_a_system_that_nobody_tried_is_a_warning() -> None:
    check = python_check((3, 11, 7), "Linux", "aarch64")
    assert check.status == "warning"
    assert "x86-64" in check.remedy


def test_libraries_that_are_there_are_listed() -> None:
    check = libraries_check([_library("torch", "2.13.0+cpu", ">=2.6"), _library("x", "1.0")])
    assert (check.status, check.text) == ("ok", "torch 2.13.0+cpu, x 1.0")


def test_a_missing_library_is_installed_by_name_and_version() -> None:
    check = libraries_check([_library("torch", "2.7"), _library("hivemind", "", "==1.1.12")])
    assert check.status == "failed"
    assert check.remedy == "python -m pip install 'hivemind==1.1.12'"


@pytest.mark.parametrize(("version", "needed"), [("1.1.11", "==1.1.12"), ("2.10.0", ">=2.11")])
def test_a_library_of_another_version_is_installed_anew(version: str, needed: str) -> None:
    check = libraries_check([_library("thing", version, needed)])
    assert check.status == "failed"
    assert version in check.text and check.remedy.endswith(f"'thing{needed}'")


def test_versions_are_compared_as_numbers() -> None:
    assert libraries_check([_library("thing", "2.13.0", ">=2.6")]).status == "ok"


def test_a_library_that_cannot_be_loaded_says_why() -> None:
    broken = Library(name="torch", version="2.13.0", fault="libcudart.so: not found")
    check = libraries_check([broken])
    assert check.status == "failed"
    assert "libcudart.so: not found" in check.text and "--force-reinstall" in check.remedy


def _library(name: str, version: str, needed: str = "") -> Library:
    return Library(name=name, version=version, needed=needed)


# ---- errors for people ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("error", "text", "remedy"),
    [
        (
            InvalidInput("key file k has mode 0644: run `chmod 600 k`"),
            "key file k has mode 0644",
            1,
        ),
        (EnvironmentFault("no bootstrap: a, b; check the invite"), "no bootstrap: a, b", 1),
    ],
)
def test_an_error_becomes_its_text_and_its_remedy(error: Exception, text: str, remedy: int) -> None:
    assert isinstance(error, InvalidInput | EnvironmentFault)
    check = fault("x", error)
    assert (check.status, check.text) == ("failed", text)
    assert check.remedy and str(error).endswith(check.remedy)


# ---- state folder --------------------------------------------------------------------------------
def test_a_folder_that_can_be_used_is_fine() -> None:
    assert folder_check(_folder()).status == "ok"
    assert key_check(_folder()).status == "ok"  # the first start makes one
    assert key_check(_folder(peer_id="Qm1")) == Check("key", "ok", "peer Qm1")


def test_a_folder_with_a_running_peer_is_said_and_is_no_failure() -> None:
    check = folder_check(_folder(in_use=True))
    assert check.status == "warning"
    assert "--state" in check.remedy and "--port" in check.remedy


def test_a_paused_peer_is_said_with_the_command_that_ends_it() -> None:
    check = folder_check(_folder(paused=True))
    assert check.status == "warning"
    assert "dilocox resume --state here" in check.remedy


def test_a_folder_that_cannot_be_written_is_a_failure() -> None:
    check = folder_check(_folder(writable=False))
    assert check.status == "failed"
    assert "--state" in check.remedy


def test_a_key_that_cannot_be_used_is_a_failure() -> None:
    check = key_check(_folder(key_fault=InvalidInput("key file k holds no key: move it away")))
    assert (check.status, check.remedy) == ("failed", "move it away")


def _folder(
    *,
    writable: bool = True,
    in_use: bool = False,
    paused: bool = False,
    peer_id: str = "",
    key_fault: InvalidInput | None = None,
) -> FolderFacts:
    return FolderFacts(
        path="here",
        writable=writable,
        in_use=in_use,
        paused=paused,
        peer_id=peer_id,
        key_fault=key_fault,
    )


# ---- room ----------------------------------------------------------------------------------------
def test_a_disk_must_hold_a_snapshot_and_better_all_that_is_to_come() -> None:
    needs = DiskNeeds(more_bytes=3 * GB, snapshot_bytes=GB)
    assert disk_check("here", 0, None).status == "ok"
    assert disk_check("here", 3 * GB, needs).status == "ok"
    check = disk_check("here", GB, needs)
    assert check.status == "warning"
    assert (
        "1.0 GB free" in check.text and "3.0 GB needed" in check.text and "--state" in check.remedy
    )
    check = disk_check("here", GB - 1, needs)
    assert check.status == "failed"
    assert "a snapshot takes 1.0 GB" in check.text and "--state" in check.remedy


def test_memory_that_holds_the_stage_is_fine_and_the_others_are_named() -> None:
    check = memory_check("memory", 8 * GB, None, [GB, 2 * GB, 9 * GB], 1)
    assert check.status == "ok"
    assert "2.0 GB needed for stage 1" in check.text and "of 3 stages 0, 1 fit" in check.text


def test_too_little_memory_names_a_stage_that_fits() -> None:
    check = memory_check("memory", 2 * GB, None, [3 * GB, GB], 0)
    assert check.status == "failed"
    assert "--stage 1" in check.remedy


def test_too_little_memory_for_any_stage_is_said() -> None:
    check = memory_check("memory", GB, None, [3 * GB, 2 * GB], 0)
    assert check.status == "failed"
    assert "no stage fits" in check.text and "--stage" not in check.remedy and check.remedy


def test_little_memory_is_a_warning() -> None:
    assert memory_check("memory", GB, None, [9 * GB // 10], 0).status == "warning"


def test_a_limit_counts_where_it_is_less_than_what_is_free() -> None:
    check = memory_check("memory", 8 * GB, 1.5e9, [2 * GB], 0)
    assert check.status == "failed"
    assert "--memory-limit" in check.text and "raise --memory-limit" in check.remedy
    assert memory_check("memory", 8 * GB, 2.0e9, [2 * GB], 0).status == "ok"  # it was meant so
    assert "free" in memory_check("memory", 1 * GB, 9e9, [GB // 2], 0).text


def test_without_the_run_memory_is_only_shown() -> None:
    assert memory_check("memory", GB, None, None, None) == Check("memory", "ok", "1.0 GB free")


def test_beside_a_peer_that_runs_memory_is_only_shown() -> None:
    assert memory_check("gpu", GB, None, [9 * GB], None) == Check("gpu", "ok", "1.0 GB free")


def test_a_device_is_named_and_one_that_is_not_here_is_a_failure() -> None:
    assert device_check("cpu", DeviceFacts(threads=1)) == Check("device", "ok", "CPU, 1 thread")
    assert device_check("auto", DeviceFacts(threads=2)).text.startswith("CPU, 2 threads; no GPU")
    gpu = DeviceFacts(kind="cuda", name="NVIDIA H200", free_bytes=139 * GB)
    assert device_check("auto", gpu) == Check("device", "ok", "NVIDIA H200, 139 GB free")
    check = device_check("cuda:3", DeviceFacts(fault="invalid device ordinal"))
    assert (check.status, check.remedy) == ("failed", "choose cpu or auto")


@pytest.mark.parametrize(
    ("count", "text"),
    [(12, "12 bytes"), (1_500, "1.5 kB"), (64 * MB, "67.1 MB"), (139 * GB, "139 GB")],
)
def test_sizes_are_for_people(count: int, text: str) -> None:
    assert size(count) == text
