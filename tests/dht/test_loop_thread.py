"""The thread with an event loop: what it begins with, what it is asked, and how it ends."""

from __future__ import annotations

import asyncio
import threading

import pytest

from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.dht.rpc import LoopThread


class Handle:
    """Of p2pd; `done` says what happened, in order."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def made(self) -> Handle:
        self.done.append("made")
        return self

    async def begin(self) -> None:
        self.done.append("begin")

    async def end(self) -> None:
        self.done.append("end")

    async def shutdown(self) -> None:
        self.done.append("shutdown")


async def forever() -> None:
    await asyncio.Event().wait()


def test_it_begins_with_its_handle_and_ends_before_it() -> None:
    handle = Handle()
    thread = LoopThread("test", p2p=handle.made, begin=handle.begin, end=handle.end)
    thread.start(5.0)
    assert thread.running and thread.p2p is handle
    assert thread.ask(asyncio.sleep(0, "answer"), 5.0) == "answer"
    thread.close()
    thread.close()
    assert handle.done == ["made", "begin", "end", "shutdown"]
    assert not thread.running and thread.loop.is_closed()


def test_what_is_asked_in_vain_is_said_and_what_comes_too_late_does_nothing() -> None:
    thread = LoopThread("test")
    thread.start(5.0)
    with pytest.raises(ConnectionError, match="busy"):
        thread.ask(forever(), 0.05)
    thread.close()
    with pytest.raises(ConnectionError, match="has ended"):
        thread.ask(forever(), 1.0)
    called = threading.Event()
    thread.post(called.set)
    assert not called.is_set()
    with pytest.raises(EnvironmentFault, match="ended before"):
        thread.start(1.0)


def test_a_start_that_fails_or_hangs_names_the_reason_and_leaves_nothing() -> None:
    async def fails() -> None:
        raise OSError("no p2pd")

    for begin, reason in ((fails, "no p2pd"), (forever, "TimeoutError")):
        handle = Handle()
        thread = LoopThread("test", p2p=handle.made, begin=begin, end=handle.end)
        with pytest.raises(EnvironmentFault, match=f"the test thread did not start.*{reason}"):
            thread.start(0.1)
        assert handle.done == ["made", "end", "shutdown"] and not thread.running


def test_an_error_for_people_is_raised_as_it_is() -> None:
    async def finds_the_disk_full() -> None:
        raise InvalidInput("free some space")

    thread = LoopThread("test", begin=finds_the_disk_full)
    with pytest.raises(InvalidInput, match=r"^free some space$"):
        thread.start(5.0)
    assert not thread.running


def test_an_end_that_fails_is_logged_and_the_rest_is_given_up_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fails() -> None:
        raise OSError("the disk is gone")

    handle, cancelled = Handle(), threading.Event()

    async def waits() -> None:
        try:
            await forever()
        finally:
            cancelled.set()

    thread = LoopThread("test", p2p=handle.made, end=fails)
    thread.start(5.0)
    thread.post(lambda: handle.tasks.append(thread.loop.create_task(waits())))
    thread.ask(asyncio.sleep(0), 5.0)
    thread.close()
    assert cancelled.is_set() and handle.done == ["made", "shutdown"]
    assert not thread.running and "the disk is gone" in caplog.text


def test_one_that_was_never_started_can_be_closed() -> None:
    thread = LoopThread("test")
    thread.close()
    assert thread.loop.is_closed()
