"""One batch from its input to its output, in steps that an end of the process may interrupt."""

import asyncio
import copy
import io
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from tempfile import TemporaryFile
from typing import IO

from deployments.batch_runner.pause import Pause
from deployments.batch_runner.requests import SendRequest, UnknownKey
from deployments.contract import ErrorKind
from deployments.ingress.batches.lines import (
    BatchLine,
    raw_lines,
    read_line,
    result_of,
    unanswered_line,
)
from deployments.ingress.batches.records import (
    ENDED,
    BatchErrors,
    BatchRecord,
    BatchStatus,
    LineFault,
    OpenBatch,
)
from deployments.ingress.batches.store import BatchStore, parts_of
from deployments.ingress.batches.usage import BatchUsage
from deployments.ingress.http.errors import RequestError

_MAX_FAULTS = 100
_READ_BYTES = 1 << 16
_PART_BYTES = 1 << 22
_PART_SECONDS = 2.0

logger = logging.getLogger("loray.batches")


class _WrongInput(Exception):
    """The input cannot be run; faults: what is wrong with it."""

    def __init__(self, faults: list[LineFault]) -> None:
        super().__init__(faults)
        self.faults = faults


class BatchWork:
    """Runs one batch to its end.

    Lines are read as they are sent, and one that the server refuses is forgotten and read again: a
    batch that waits for its key's quota keeps few lines in memory, and no slot.

    Finished lines are kept in parts: files of lines "NUMBER OK RESULT". A part is written every few
    seconds, so that an interrupted batch computes few lines again.
    """

    def __init__(
        self, store: BatchStore, entry: OpenBatch, slots: asyncio.Semaphore, max_line_bytes: int
    ) -> None:
        """slots: shared by the requests of all batches that the server has now."""
        self._store = store
        self._entry = entry
        self._slots = slots
        self._max_line_bytes = max_line_bytes
        self._done: set[int] = set()
        self._pause = Pause()
        self._refusals = 0
        self._finished: list[bytes] = []
        self._finished_bytes = 0
        self._writes: list[asyncio.Task[None]] = []
        self._ends_as: BatchStatus = "completed"

    async def run(self, sender: Callable[[], SendRequest]) -> None:
        """Check the input, send what is not done yet, and write the output."""
        entry = self._entry
        self._record = await asyncio.to_thread(self._store.batch, entry.owner, entry.id)
        if self._record.status not in ENDED:
            await self._answer(sender)
            await asyncio.to_thread(self._end)
            logger.info("batch %s: %s", entry.id, self._record.status)
        await asyncio.to_thread(self._store.close, entry)

    async def _answer(self, sender: Callable[[], SendRequest]) -> None:
        """Send what is not done yet; a batch that cannot go on fails."""
        try:
            await asyncio.to_thread(self._recall)
            send = sender()
            await asyncio.to_thread(self._check)
            await self._send_lines(send)
        except UnknownKey:
            self._fail([LineFault("unknown_key", "this API key is not configured any more")])
        except _WrongInput as wrong:
            self._fail(wrong.faults)
        except RequestError as error:
            # All else is a storage that is away for a while.
            if error.kind is not ErrorKind.NOT_FOUND:
                raise
            self._fail([LineFault("invalid_input_file", error.message)])

    def _recall(self) -> None:
        """Read which lines have a result already."""
        counts = self._record.request_counts
        counts.completed = counts.failed = 0
        for number, succeeded, _ in self._results():
            self._count(number, succeeded)

    def _check(self) -> None:
        """Check every line, unless that was done before."""
        record = self._record
        if record.in_progress_at is None:
            total, faults = self._faults()
            if faults:
                raise _WrongInput(faults)
            record.request_counts.total = total
            record.in_progress_at = self._store.now
        record.status = "in_progress"
        self._store.save_batch(self._entry.owner, record)

    def _faults(self) -> tuple[int, list[LineFault]]:
        """The number of lines, and the first faults."""
        seen: set[str] = set()
        faults: list[LineFault] = []
        total = 0
        for total, line in enumerate(self._lines(), 1):
            if total > self._store.config.max_lines:
                message = f"a batch has at most {self._store.config.max_lines} lines"
                return total, [LineFault("too_many_lines", message)]
            if isinstance(line, BatchLine) and line.custom_id in seen:
                line = LineFault("duplicate_custom_id", "`custom_id` was used before",
                                 line.number, "custom_id")  # fmt: skip
            if isinstance(line, LineFault):
                faults.append(line)
                if len(faults) >= _MAX_FAULTS:
                    break
            else:
                seen.add(line.custom_id)
        return total, faults if total else [LineFault("empty_file", "the file has no lines")]

    def _fail(self, faults: list[LineFault]) -> None:
        self._ends_as = "failed"
        self._record.errors = BatchErrors(faults)

    def _lines(self) -> Iterator[BatchLine | LineFault]:
        """The lines of the input without a result."""
        record, most = self._record, self._max_line_bytes
        with self._store.content(self._entry.owner, record.input_file_id) as stream:
            for number, raw in raw_lines(stream, most):
                if number not in self._done:
                    yield read_line(number, raw, most, record.endpoint)

    async def _send_lines(self, send: SendRequest) -> None:
        """Send all lines without a result, until the batch is cancelled or expired."""
        if await self._is_to_end():
            return
        running: set[asyncio.Task[None]] = set()
        feeding = asyncio.create_task(self._feed(send, running))
        watching = asyncio.create_task(self._watch())
        try:
            first, _ = await asyncio.wait({feeding, watching}, return_when=asyncio.FIRST_COMPLETED)
            for task in first:
                task.result()
        finally:
            for task in (feeding, watching, *running):
                task.cancel()
            await asyncio.gather(feeding, watching, *running, return_exceptions=True)
        await self._save_part()

    async def _feed(self, send: SendRequest, running: set[asyncio.Task[None]]) -> None:
        """Send the lines until each has a result; those that were refused are read again."""
        refusals = -1
        while refusals < self._refusals:
            refusals = self._refusals
            async with aclosing(self._pending()) as pending:
                async for line in pending:
                    await self._start(send, line, running)
            await asyncio.gather(*running)

    async def _start(
        self, send: SendRequest, line: BatchLine, running: set[asyncio.Task[None]]
    ) -> None:
        """Send a line when there is a slot for it, and none that the server would refuse."""
        if self._finished_bytes >= _PART_BYTES:
            await self._save_part()
        await self._slot()
        task = asyncio.create_task(self._send(send, line))
        running.add(task)
        task.add_done_callback(lambda _: self._slots.release())
        await self._pause.trial(task)
        for done in [each for each in running if each.done()]:
            running.remove(done)
            done.result()

    async def _slot(self) -> None:
        """Take a slot, but hold none during a pause."""
        while True:
            await self._pause.over()
            await self._slots.acquire()
            if not self._pause.holds:
                return
            self._slots.release()

    async def _pending(self) -> AsyncGenerator[BatchLine, None]:
        """The lines without a result; read in a thread, some at a time."""
        lines = self._lines()

        def some() -> list[BatchLine]:
            found, size = [], 0
            for line in lines:
                if isinstance(line, BatchLine):
                    found.append(line)
                    size += len(line.body)
                    if size >= _READ_BYTES:
                        break
            return found

        while found := await asyncio.to_thread(some):
            for line in found:
                yield line

    async def _send(self, send: SendRequest, line: BatchLine) -> None:
        """Send one line, and keep its result until the next part is written."""
        reply = await send(line.url, line.body)
        if reply.is_refusal:
            self._refusals += 1
            self._pause.begin(reply)
            return
        succeeded, result = result_of(line, reply.status, reply.body)
        self._finished.append(b"%d %d " % (line.number, succeeded) + result)
        self._finished_bytes += len(result)
        self._count(line.number, succeeded)

    def _count(self, number: int, succeeded: bool) -> None:
        if number not in self._done:
            self._done.add(number)
            counts = self._record.request_counts
            counts.completed += succeeded
            counts.failed += not succeeded

    async def _watch(self) -> None:
        """Write parts from time to time; ends when the batch is cancelled or expired."""
        while not await self._is_to_end():
            await asyncio.sleep(_PART_SECONDS)
            await self._save_part()

    async def _is_to_end(self) -> bool:
        entry, record = self._entry, self._record
        since = await asyncio.to_thread(self._store.cancelling_since, entry.owner, entry.id)
        if since is not None:
            record.cancelling_at, self._ends_as = since, "cancelled"
        elif self._store.now >= record.expires_at:
            self._ends_as = "expired"
        return self._ends_as != "completed"

    async def _save_part(self) -> None:
        """Write the results since the last part."""
        finished, self._finished, self._finished_bytes = self._finished, [], 0
        if finished:
            # A copy: what is counted meanwhile is not in this part.
            record = copy.deepcopy(self._record)
            writing = asyncio.to_thread(self._write_part, b"".join(finished), record)
            self._writes.append(asyncio.create_task(writing))
        # A thread goes on when the task that waits for it is cancelled, so others wait for it too.
        await asyncio.shield(asyncio.gather(*self._writes))
        self._writes.clear()

    def _write_part(self, finished: bytes, record: BatchRecord) -> None:
        name = f"{time.time_ns():020d}-{secrets.token_hex(4)}"
        self._store.storage.write(f"{parts_of(self._entry)}/{name}", finished)
        self._store.save_batch(self._entry.owner, record)

    def _results(self) -> Iterator[tuple[int, bool, bytes]]:
        """Number, success and result of each finished line, once."""
        seen: set[int] = set()
        folder, storage = parts_of(self._entry), self._store.storage
        for part in storage.objects(folder):
            for raw in io.BytesIO(storage.read(f"{folder}/{part.name}") or b""):
                number, succeeded, result = raw.split(b" ", 2)
                if int(number) not in seen:
                    seen.add(int(number))
                    yield int(number), succeeded == b"1", result

    def _end(self) -> None:
        """Write the output of a batch that has begun, and how it ended."""
        record = self._record
        if record.in_progress_at is not None:
            self._write_output()
        record.status = self._ends_as
        setattr(record, f"{self._ends_as}_at", self._store.now)
        self._store.save_batch(self._entry.owner, record)

    def _write_output(self) -> None:
        """Write the results, and those of requests that failed or were not sent, as two files."""
        record = self._record
        record.status, record.finalizing_at = "finalizing", self._store.now
        self._store.save_batch(self._entry.owner, record)
        record.usage = BatchUsage()
        with TemporaryFile() as output, TemporaryFile() as errors:
            for _, succeeded, result in self._results():
                (output if succeeded else errors).write(result)
                if succeeded:
                    record.usage.add(result)
            if self._ends_as != "completed":
                self._write_unsent(errors)
            record.output_file_id = self._add_file(output, "output")
            record.error_file_id = self._add_file(errors, "error")

    def _write_unsent(self, errors: IO[bytes]) -> None:
        ended = "was cancelled" if self._ends_as == "cancelled" else self._ends_as
        message = f"the batch {ended} before this request was done"
        try:
            for line in self._lines():
                if isinstance(line, BatchLine):
                    code = f"batch_{self._ends_as}"
                    errors.write(unanswered_line(line.custom_id, code, message))
        except RequestError as error:
            # Of an input that was deleted meanwhile nobody knows the lines.
            if error.kind is not ErrorKind.NOT_FOUND:
                raise

    def _add_file(self, content: IO[bytes], kind: str) -> str | None:
        """Keep a file of results; None if it is empty."""
        if not content.tell():
            return None
        content.seek(0)
        entry = self._entry
        name = f"{entry.id}_{kind}.jsonl"
        kept = self._store.add_file(entry.owner, content, name, entry.output_keep_s, output=True)
        return kept.id
