"""Log of served requests, as rows of JSON lines that preprocessing reads, and what the logged rows say of ids and scores.

A row has the values of a request under the names of their columns, and beside them `served_id`, by which labels are joined
later, `served_row`, its position in the request, `served_time`, `served_version`, and the score of each output, `served_NAME`.
"""

import json
import random
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
import torch
from prometheus_client import Counter

from configs.messages import os_error_text, shown
from dataloading.dataset.durable_files import AppendedFile
from serving.inference.model_rows import Rows
from serving.inference.raw_columns import without_end
from serving.inference.requests import takes_ids
from serving.inference.versions import Model, Version
from serving.manifest import IDS, NUMERICAL, PADDING
from serving.server.http_server import RequestError
from serving.server.metrics import Metrics
from serving.server.protocol import TEXT, InferRequest, Tensor, refuse

MOST_WAITING = 16 << 20
"""Bytes of bodies whose requests may wait for the thread; further requests are dropped."""
MOST_REMEMBERED = 1 << 18
"""Rows whose scores wait for their labels."""
MOST_ID = 256
"""Characters of an id that is remembered."""
FILES = 8
"""Into which the log is divided at least: an old one goes at a time."""


@dataclass(slots=True)
class LoggedRequest:
    """A request that is logged; `rows` and `scores`, float32 [B, O], come when it is scored."""

    version: Version
    request: InferRequest
    num_bytes: int  # of its body
    read: Callable[[], Rows]
    rows: Rows = field(init=False)
    scores: np.ndarray = field(init=False)

    def keep_rows(self) -> Rows:
        self.rows = self.read()
        return self.rows


class RequestLog:
    """Writer of a share of the requests, in a thread; no answer waits for it, and rows that it has no time for are dropped.

    `most_bytes`: of all files, of which the oldest is removed. Raises OSError: there cannot be such a folder.
    """

    def __init__(
        self, folder: Path, share: float, most_bytes: int, log: Callable[[str], None]
    ) -> None:
        self._folder, self._share, self._most_bytes, self._log = folder, share, most_bytes, log
        folder.mkdir(parents=True, exist_ok=True)
        self._file: AppendedFile | None = None
        self._file_bytes = 0
        self._has_failed = False
        self._waiting: SimpleQueue[LoggedRequest | None] = SimpleQueue()
        # Each is counted by one thread: the loop, and the one that writes.
        self._bytes_put = self._bytes_taken = 0
        # By id: name of the version, whose tables are large, and its scores by output.
        self._scored: OrderedDict[str, tuple[str, Mapping[str, np.ndarray]]] = OrderedDict()
        self._rows_scored = 0

    def start(self, metrics: Metrics) -> None:
        """Write until `stop`, and count in the metrics of the server."""

        def counter(name: str, meaning: str, *labels: str) -> Counter:
            made = Counter(f"serving_{name}", meaning, labels, registry=metrics.registry)
            # Labels come late: theirs are kept for some versions that answer no more.
            chosen = metrics.of_late if name.startswith("label") else metrics.by_version
            chosen += [made] if "version" in labels else []
            return made

        of = ("version", "output")
        self._dropped = counter("log_dropped_rows", "Rows that were to be logged, and were not.")
        self._ids = counter("logged_ids", "Ids of logged rows.", "feature")
        meaning = "Those of values that are missing, or that the model does not know."
        self._unknown = counter("logged_unknown_ids", meaning, "feature")
        self._logged = counter("logged_rows", "Logged rows of an output with probabilities.", *of)
        self._logged_scores = counter("logged_scores", "Sum of their scores.", *of)
        self._labelled = counter("labelled_rows", "Logged rows whose labels came.", *of)
        self._labelled_scores = counter("labelled_scores", "Sum of their scores.", *of)
        self._labels = counter("labels", "Sum of their labels.", *of)
        self._thread = Thread(target=self._run, name="request log")
        self._thread.start()

    def stop(self) -> None:
        self._waiting.put(None)
        self._thread.join()

    def is_chosen(self) -> bool:
        return random.random() < self._share

    def put(self, request: LoggedRequest) -> None:
        identity, version = request.request.id or "", request.version
        waiting = self._bytes_put - self._bytes_taken + request.num_bytes
        if waiting > MOST_WAITING or len(identity) > MOST_ID:
            self._dropped.inc(len(request.scores))
            return
        self._bytes_put += request.num_bytes
        self._waiting.put(request)
        outputs = [o.name if o.is_binary else "" for o in version.model.manifest.outputs]
        # A copy: they may be a part of a batch's.
        scores = dict(zip(outputs, request.scores.T.copy(), strict=True))
        for name in set(outputs) - {""}:
            self._logged.labels(version.name, name).inc(len(scores[name]))
            self._logged_scores.labels(version.name, name).inc(float(scores[name].sum()))
        self._forget(identity)
        self._scored[identity] = version.name, scores
        self._rows_scored += len(request.scores)
        while self._rows_scored > MOST_REMEMBERED:
            self._forget(next(iter(self._scored)))

    def label(self, identity: str | None, labels: Mapping[str, Tensor]) -> None:
        """Compare the labels of a logged request, by output, with its scores, once.

        Raises RequestError: no such request is remembered, or a label is none of its outputs.
        """
        if identity is None or identity not in self._scored:
            text = f"no request with the id {shown(identity)} is logged, or its labels came already"
            raise RequestError(HTTPStatus.NOT_FOUND, text)
        version, scores = self._scored[identity]
        for name, tensor in labels.items():
            if name not in scores:
                named = ", ".join(map(shown, filter(None, scores)))
                refuse(
                    f"{shown(name)} is no output with probabilities; those are {named or 'none'}"
                )
            values, wanted = tensor.values, len(scores[name])
            is_right = tensor.datatype != TEXT and values.size == wanted
            if not is_right or not ((values >= 0) & (values <= 1)).all():
                refuse(f"labels of {shown(name)}: want {wanted:,} numbers from 0 to 1")
        for name, tensor in labels.items():
            self._labelled.labels(version, name).inc(len(scores[name]))
            self._labelled_scores.labels(version, name).inc(float(scores[name].sum()))
            self._labels.labels(version, name).inc(float(tensor.values.sum()))
        self._forget(identity)

    def _forget(self, identity: str) -> None:
        _, scores = self._scored.pop(identity, ("", {}))
        self._rows_scored -= max(map(len, scores.values()), default=0)

    def _run(self) -> None:
        while (request := self._waiting.get()) is not None:
            try:
                for name, ids in _ids(request):
                    self._ids.labels(name).inc(ids.numel())
                    self._unknown.labels(name).inc(int((ids == 0).sum()))
                # A JSON text may hold half a character.
                lines = "".join(f"{line}\n" for line in _lines(request))
                self._append(lines.encode(errors="replace"))
            except Exception as error:  # whatever is wrong with a row, the next one is logged
                self._dropped.inc(len(request.scores))
                if not self._has_failed:
                    text = os_error_text(error) if isinstance(error, OSError) else repr(error)
                    self._log(f"served requests are not logged: {text}")
                self._has_failed = True
            finally:
                self._bytes_taken += request.num_bytes
        if self._file is not None:
            self._file.close()

    def _append(self, text: bytes) -> None:
        size = self._most_bytes // FILES
        if self._file is None or self._file_bytes + len(text) > size:
            if self._file is not None:
                self._file.close()
                self._file = None
            files = sorted(self._folder.glob("requests_*.jsonl"))
            sizes = [path.stat().st_size for path in files]
            while files and sum(sizes) > self._most_bytes - max(size, len(text)):
                files.pop(0).unlink(missing_ok=True)
                sizes.pop(0)
            stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
            name = f"requests_{stamp}_{time.monotonic_ns()}_{socket.gethostname()}.jsonl"
            self._file, self._file_bytes = AppendedFile(self._folder / name, is_text=True), 0
        self._file.append(text)
        self._file_bytes += len(text)


def _ids(request: LoggedRequest) -> Iterator[tuple[str, torch.Tensor]]:
    for name, ids in request.rows.ragged.items():
        yield name, ids.values
    fixed = request.version.model.manifest.fixed
    sizes = [feature.hotness or 0 for feature in fixed]
    for feature, part in zip(fixed, request.rows.ids.split(sizes, dim=1), strict=True):
        yield feature.name, part


def _lines(request: LoggedRequest) -> Iterator[str]:
    version, now = request.version, round(time.time(), 3)
    columns = dict(_columns(request.request, version.model, request.rows))
    for output, scores in zip(version.model.manifest.outputs, request.scores.T, strict=True):
        columns[f"served_{output.name}"] = scores.tolist()
    for row in range(len(request.scores)):
        values = {name: column[row] for name, column in columns.items()}
        values |= {"served_id": request.request.id, "served_row": row, "served_time": now}
        yield json.dumps(values | {"served_version": version.name}, ensure_ascii=False)


def _columns(
    request: InferRequest, model: Model, scored: Rows
) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield the values of every row by the names of raw columns, or of features."""
    manifest, raw = model.manifest, model.raw
    is_raw = not takes_ids(manifest, request.inputs)
    moments = {sequence.name for sequence in manifest.sequences}
    for name, tensor in request.inputs.items():
        flat = tensor.values if tensor.datatype == TEXT else tensor.values.reshape(-1).tolist()
        # NaN is a missing number, and not JSON.
        flat = [None if value != value else value for value in flat]
        width = len(flat) // request.num_rows
        rows = [flat[i * width : (i + 1) * width] for i in range(request.num_rows)]
        if is_raw and raw is not None and raw.inputs.get(name) == 2:
            yield name, [without_end(row) for row in rows]
        elif name in scored.numbers:
            lengths = scored.numbers[name].lengths.tolist()
            yield name, [row[:length] for row, length in zip(rows, lengths, strict=True)]
        elif is_raw or name == manifest.keep_rate or name in moments:
            yield name, [row[0] for row in rows]
        elif name == NUMERICAL:
            yield from zip(manifest.numerical, zip(*rows, strict=True), strict=True)
        elif name == IDS:
            columns = iter(zip(*rows, strict=True))
            for feature in manifest.fixed:
                parts = [next(columns) for _ in range(feature.hotness or 0)]
                is_single = feature.hotness == 1
                yield feature.name, parts[0] if is_single else [*zip(*parts, strict=True)]
        else:
            yield name, [[number for number in row if number != PADDING] for row in rows]
