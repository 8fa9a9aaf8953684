"""The embedded server and the export under fault: swaps of versions under load, and SIGKILL at random moments.

    python -m benchmarks.serving.faults --checkpoint RUN/checkpoints/step_N --other RUN2/checkpoints/step_N --out DIR

Swaps: requests of a closed load while versions of two checkpoints replace each other; every answer must equal that of the version
it names. Kills: the server is killed around a swap and starts again; the export is killed at random moments and starts again.
A line that shows a fault, or kills that never hit a running export, end the command with exit code 1 and one line.
"""

import argparse
import asyncio
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from serving.client.connection import Address, Connection, Reply
from serving.client.dataset_requests import scores_of
from serving.manifest import Manifest, ModelError

ROWS = 32
TOLERANCE = 1e-6
PATIENT = ("poll_s=0.05", "deadline_ms=60000")
READY = re.compile(r"version (\d+) on http://127\.0\.0\.1:(\d+)")


def main() -> None:
    """Run all faults of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", required=True, help="of one run")
    parser.add_argument("--other", required=True, help="of another run of the same model")
    parser.add_argument("--out", type=Path, required=True, help="folder to write, emptied first")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--swaps", type=int, default=20)
    parser.add_argument("--kills", type=int, default=10, help="of the server, and of the export")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    random.seed(args.seed)
    models = [args.out / "a", args.out / "b"]
    for path, checkpoint in zip(models, (args.checkpoint, args.other), strict=True):
        subprocess.run(_export(checkpoint, path), check=True, stdout=subprocess.DEVNULL)
    try:
        swaps(models, args.out / "swaps", args.requests, args.swaps)
        kills_of_server(models, args.out / "kills", args.kills)
        kills_of_export(args.checkpoint, args.out / "export", args.kills)
    except FaultError as error:
        sys.exit(f"error: {error}")


class FaultError(Exception):
    """A fault that was found, or none that could have been."""


def report(line: str, *, is_good: bool) -> None:
    """Print the result of a part.

    Raises:
        FaultError: it is no good one.
    """
    print(line, flush=True)
    if not is_good:
        raise FaultError(f"this must not be: {line}")


def swaps(models: list[Path], root: Path, num_requests: int, num_swaps: int) -> None:
    """Send requests while versions are swapped; print what failed."""
    put(models[0], root / "1")
    process, _, port = start(root, *PATIENT)
    try:
        asyncio.run(_swaps(models, root, port, num_requests, num_swaps))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


async def _swaps(
    models: list[Path], root: Path, port: int, num_requests: int, num_swaps: int
) -> None:
    name, body, length = request_of(Manifest.read(models[0]))
    address, path = Address("127.0.0.1", port), f"/v2/models/{name}/infer"
    answers: list[tuple[str, np.ndarray] | str] = []
    first = Connection(address)
    wanted = {"1": _answer(await first.call(path, body, length))[1]}
    asked = iter(range(num_requests))

    async def ask(connection: Connection) -> None:
        for _ in asked:
            try:
                answers.append(_answer(await connection.call(path, body, length)))
            except ValueError as error:
                answers.append(str(error))
        connection.close()

    async def swap() -> None:
        for number in range(2, num_swaps + 2):
            while len(answers) < (number - 1) * num_requests // (num_swaps + 1):
                await asyncio.sleep(0.01)
            await asyncio.to_thread(put, models[(number - 1) % 2], root / str(number))
            while str(number) not in wanted:
                # Asked beside the load, when nothing is swapped: what the version answers by itself.
                version, scores = _answer(await first.call(path, body, length))
                wanted.setdefault(version, scores)
                await asyncio.sleep(0.01)

    started = time.perf_counter()
    await asyncio.gather(swap(), *(ask(Connection(address)) for _ in range(4)))
    seconds = time.perf_counter() - started
    first.close()
    found = [answer for answer in answers if not isinstance(answer, str)]
    wrong = sum(float(np.abs(s - wanted[version]).max()) > TOLERANCE for version, s in found)
    difference = float(np.abs(wanted["1"] - wanted["2"]).max())
    versions = len({version for version, _ in found})
    failed = len(answers) - len(found)
    report(
        f"swaps: {len(answers):,} requests of {ROWS} rows in {seconds:.0f} s, {versions} versions answered, "
        f"{failed} failed, {wrong} wrong (the models differ by {difference:.3f})",
        is_good=not failed and not wrong and difference > TOLERANCE,
    )


def kills_of_server(models: list[Path], root: Path, count: int) -> None:
    """Kill the server around swaps; it must start again with the newest version."""
    put(models[0], root / "1")
    wrong = 0
    for number in range(2, count + 2):
        process, _, _ = start(root, *PATIENT)
        put(models[(number - 1) % 2], root / str(number))
        time.sleep(random.uniform(0, 0.3))
        process.kill()
        process.wait(60)
        process, version, _ = start(root, *PATIENT)
        process.kill()
        process.wait(60)
        wrong += version != str(number)
    report(
        f"server: killed {count} times around a swap, {wrong} starts without the newest version",
        is_good=not wrong,
    )


def kills_of_export(checkpoint: str, root: Path, count: int) -> None:
    """Kill the export; its output must be absent or complete, and the next export must succeed.

    Raises:
        FaultError: it is not so, or no kill has hit a running export.
    """
    seconds = float("inf")
    # The first one reads its imports from the disk, and so takes longer than those that are killed.
    for name in ("0", "00"):
        started = time.perf_counter()
        subprocess.run(_export(checkpoint, root / name), check=True, stdout=subprocess.DEVNULL)
        seconds = min(seconds, time.perf_counter() - started)
    torn = complete = hits = 0
    for number in range(1, count + 1):
        path = root / str(number)
        process = subprocess.Popen(
            _export(checkpoint, path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(seconds * random.uniform(0.5, 1.05))
        process.kill()
        was_running = process.wait(60) == -signal.SIGKILL
        if path.exists():
            torn, complete = torn + (not is_intact(path)), complete + is_intact(path)
            continue
        hits += was_running
        subprocess.run(_export(checkpoint, path), check=True, stdout=subprocess.DEVNULL)
        torn += not is_intact(path)
    left = [path.name for path in root.iterdir() if not path.name.isdigit()]
    report(
        f"export: {hits} of {count} kills hit it, {complete} found it complete, {torn} torn, {len(left)} leftovers after the "
        "next one",
        is_good=not torn and not left,
    )
    if not hits:
        raise FaultError(f"none of {count} kills has hit a running export, so they prove nothing")


def is_intact(path: Path) -> bool:
    """Return whether a model directory is complete."""
    try:
        Manifest.read(path).verify(path)
    except ModelError:
        return False
    return True


def put(model: Path, target: Path) -> None:
    """Copy a version as an export does: it appears complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    shutil.copytree(model, partial)
    os.rename(partial, target)


def start(root: Path, *options: str) -> tuple[subprocess.Popen, str, int]:
    """Start the server; return its process, version and port."""
    command = [sys.executable, "-m", "serving.run", f"model={root}", "port=0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    line = process.stderr.readline()
    found = READY.search(line)
    if found is None:
        process.kill()
        raise RuntimeError(f"the server ends: {line}")
    return process, found[1], int(found[2])


def request_of(manifest: Manifest) -> tuple[str, bytes, int]:
    """Return the name of a model, and the body of a request with the length of its JSON."""
    generator = np.random.default_rng(1)
    highest = [f.cardinality for f in manifest.fixed for _ in range(f.hotness or 0)]
    arrays = {
        "numerical": generator.normal(size=(ROWS, len(manifest.numerical))).astype("<f4"),
        "ids": generator.integers(0, highest, (ROWS, len(highest))).astype("<i4"),
    }
    arrays |= {
        f.name: generator.integers(0, f.cardinality, (ROWS, 2), "<i4") for f in manifest.ragged
    }
    entries = [
        {
            "name": name,
            "datatype": "FP32" if name == "numerical" else "INT32",
            "shape": list(array.shape),
            "parameters": {"binary_data_size": array.nbytes},
        }
        for name, array in arrays.items()
    ]
    head = json.dumps({"inputs": entries, "parameters": {"binary_data_output": True}}).encode()
    return manifest.name, head + b"".join(a.tobytes() for a in arrays.values()), len(head)


def _answer(reply: Reply) -> tuple[str, np.ndarray]:
    """Return version and scores of a response."""
    scores = scores_of(reply, ROWS)
    length = int(reply.headers["inference-header-content-length"])
    version = json.loads(reply.body[:length])["model_version"]
    return version, np.concatenate(list(scores.values()))


def _export(checkpoint: str, path: Path) -> list[str]:
    path.parent.mkdir(parents=True, exist_ok=True)
    return [
        *(sys.executable, "-m", "serving.export", f"checkpoint={checkpoint}", f"output={path}"),
        "rows=256",
    ]


if __name__ == "__main__":
    main()
