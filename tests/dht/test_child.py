"""The pipe into the DHT child that the processes of a peer share."""

import multiprocessing

from dilocox.dht.node_process import SharedPipe

SENDERS, MESSAGES, BYTES = 2, 200, 40_000  # more than a pipe takes in one piece
LIMIT_S = 30.0


def test_large_messages_of_two_processes_arrive_whole():
    forking = multiprocessing.get_context("fork")
    reader, writer = forking.Pipe(duplex=False)
    shared = SharedPipe(writer, forking.RLock())

    def send(sender: int) -> None:
        for _ in range(MESSAGES):
            shared.send(bytes([sender]) * BYTES)

    senders = [forking.Process(target=send, args=(number,), daemon=True) for number in (1, 2)]
    for process in senders:
        process.start()
    heard: list[bytes] = []
    while len(heard) < SENDERS * MESSAGES:
        assert reader.poll(LIMIT_S)
        heard.append(reader.recv())
    for process in senders:
        process.join(LIMIT_S)
    assert sorted(heard) == [bytes([number]) * BYTES for number in (1, 2) for _ in range(MESSAGES)]
