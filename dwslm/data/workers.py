"""Worker processes: those that do chunks, which come back in order, and one that trains a tokenizer.

A worker is this file run by a new interpreter that talks through two pipes: lengths, JSON and raw bytes. It ends when
its input does, so a parent that is killed leaves none behind. Plain pipes rather than `multiprocessing`: its pools
outlive a killed parent, and import the caller's main module once more for each worker.
"""

import json
import os
import queue
import signal
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import IO

from dwslm.data.chunks import Chunk
from dwslm.data.encode import (
    ChunkWork,
    EncodeSettings,
    Reply,
    Task,
    reply_from_frames,
    reply_to_frames,
)
from dwslm.data.tokenizer import train_tokenizer

ALONE = 4
"""Input of fewer chunks than this is done here: starting workers would take longer."""

_LENGTHS = struct.Struct("<QQ")
_AHEAD = 2  # chunks a worker that may be read ahead of the one that is waited for
_START = "import sys; sys.path.insert(0, {!r}); from dwslm.data.workers import {name}; {name}()"


def in_order(
    tasks: Iterable[Task], settings: EncodeSettings, workers: int
) -> Generator[tuple[Task, Reply], None, None]:
    """Do tasks in worker processes; each comes back with its reply, in the order given.

    Memory: a worker's own (the tokenizer and one chunk, about 100 MB), and three chunks a worker here.

    Raises:
        ValueError: what a task raised, when its turn has come.
        ChildProcessError: a worker died.
    """
    tasks = iter(tasks)
    first = list(islice(tasks, ALONE)) if workers > 1 else []
    everything = chain(first, tasks)
    if len(first) < ALONE:
        work = ChunkWork(settings)
        for task in everything:
            yield task, work.do(task)
        return
    pool = _Pool(settings, workers)
    try:
        waiting: deque[tuple[Task, Future[Reply]]] = deque()
        for task in everything:
            waiting.append((task, pool.submit(task)))
            if len(waiting) > _AHEAD * workers:
                task, reply = waiting.popleft()
                yield task, reply.result()
        while waiting:
            task, reply = waiting.popleft()
            yield task, reply.result()
    finally:
        pool.close()


class _Pool:
    """Processes, each with a thread here that waits for it."""

    def __init__(self, settings: EncodeSettings, count: int):
        self._threads = ThreadPoolExecutor(count)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        try:
            for _ in range(count):
                process = _start("serve")
                self._processes.append(process)
                _send(process.stdin, json.dumps(asdict(settings)).encode("ascii"), b"")
                self._idle.put(process)
        except BaseException:
            self.close()
            raise

    def submit(self, task: Task) -> "Future[Reply]":
        return self._threads.submit(self._call, task)

    def _call(self, task: Task) -> Reply:
        process = self._idle.get()
        try:
            head = {**asdict(task), "chunk": {**asdict(task.chunk), "payload": ""}}
            _send(process.stdin, json.dumps(head).encode("ascii"), task.chunk.payload)
            head_bytes, payload = _receive(process.stdout)
        except (BrokenPipeError, EOFError):
            raise _died(process, "give fewer --workers") from None
        finally:
            self._idle.put(process)
        reply = reply_from_frames(head_bytes, payload)
        if "error" in reply.head:
            raise ValueError(reply.head["error"])
        return reply

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in self._processes:
            _let_go(process)


def train_elsewhere(texts: Iterable[str], vocab_size: int) -> bytes:
    """Train a tokenizer in a process of its own, for the memory that it takes (about 9 bytes for each byte of text) is
    never given back to the system; the content of its file.

    Raises:
        ValueError: too little text for the vocabulary.
        ChildProcessError: the process died.
    """
    process = _start("serve_training")
    try:
        with suppress(BrokenPipeError):  # one that has refused reads no further
            _send(process.stdin, json.dumps({"vocab_size": vocab_size}).encode("ascii"), b"")
            for text in texts:
                _send(process.stdin, b"more", text.encode("utf-8"))
            _send(process.stdin, b"", b"")
        head, payload = _receive(process.stdout)
    except EOFError:
        raise _died(process, "give a smaller --tokenizer-bytes") from None
    finally:
        process.kill()
        process.wait()
        _let_go(process)
    if head:
        raise ValueError(json.loads(head)["error"])
    return payload


def _start(name: str) -> "subprocess.Popen[bytes]":
    code = _START.format(str(Path(__file__).resolve().parents[2]), name=name)
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _died(process: "subprocess.Popen[bytes]", remedy: str) -> ChildProcessError:
    code = process.wait()
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}, see above"
    if code:
        how += f"; if memory was short, {remedy}"
    else:
        how = "ended without a reply"
    return ChildProcessError(f"a worker of prepare {how}. Run the same command again: finished shards are kept")


def _let_go(process: "subprocess.Popen[bytes]") -> None:
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(BrokenPipeError):  # what a killed worker had not read yet
            pipe.close()


def serve_training() -> None:
    """Train a tokenizer on the texts from standard input."""
    requests, replies = _pipes()
    try:
        vocab_size = json.loads(_receive(requests)[0])["vocab_size"]
        try:
            trained = train_tokenizer(iter(lambda: _receive(requests)[1].decode("utf-8"), ""), vocab_size)
        except ValueError as error:
            _send(replies, json.dumps({"error": str(error)}).encode("ascii"), b"")
        else:
            _send(replies, b"", trained.to_str(pretty=True).encode("utf-8"))
    except (EOFError, BrokenPipeError):  # the parent is gone
        os._exit(0)


def serve() -> None:
    """Do tasks from standard input until it ends: the life of a worker."""
    requests, replies = _pipes()
    try:
        work = ChunkWork(EncodeSettings(**json.loads(_receive(requests)[0])))
        while True:
            head, payload = _receive(requests)
            values = json.loads(head)
            chunk = Chunk(**{**values.pop("chunk"), "payload": payload})
            try:
                reply = work.do(Task(**{**values, "chunk": chunk, "wanted": tuple(values["wanted"])}))
            except ValueError as error:
                reply = Reply({"error": str(error)})
            _send(replies, *reply_to_frames(reply))
    except (EOFError, BrokenPipeError):  # the parent is done, or gone
        os._exit(0)


def _pipes() -> tuple[IO[bytes], IO[bytes]]:
    """The two ends of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent sees to its workers
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing that a library prints may get among the replies
    return requests, replies


def _send(pipe: IO[bytes] | None, head: bytes, payload: bytes) -> None:
    assert pipe is not None
    pipe.write(_LENGTHS.pack(len(head), len(payload)))
    pipe.write(head)
    pipe.write(payload)
    pipe.flush()


def _receive(pipe: IO[bytes] | None) -> tuple[bytes, bytes]:
    assert pipe is not None
    lengths = _read(pipe, _LENGTHS.size)
    head, payload = _LENGTHS.unpack(lengths)
    return _read(pipe, head), _read(pipe, payload)


def _read(pipe: IO[bytes], size: int) -> bytes:
    content = pipe.read(size)
    if len(content) < size:
        raise EOFError("the pipe was closed")
    return content
