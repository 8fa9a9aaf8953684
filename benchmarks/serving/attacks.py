"""Memory of the embedded server while clients break every rule, 1,000 connections at a time, and what others see of it.

    python -m benchmarks.serving.attacks --model MODEL

Each attack prints the largest resident memory of the server beside that before the first one, the answers by status, and the
slowest answers to a patient client: for the health of the server, and for 32 rows of ids. After each attack a good request must
be answered. A MODEL with raw values is attacked with those too. The limits of the server are its defaults.
"""

import argparse
import asyncio
import json
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving.started import ROWS, request_of, start
from serving.client.connection import Address, Connection
from serving.client.dataset_requests import scores_of
from serving.manifest import Manifest
from serving.server.protocol import JSON_BYTES

CONNECTIONS = 1000
CROWD = 60
"""Connections that send megabytes each."""
HELD_S = 4.0
"""Time that an attack keeps its connections."""
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Attack:
    """Content of each connection: sent at once, `repeats` times, to a client that reads or does not."""

    title: str
    content: bytes
    repeats: int = 1
    reads: bool = True
    connections: int = CONNECTIONS


def main() -> None:
    """Run all attacks on a server of the model of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="model directory")
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    process, port = start(args.model)
    try:
        asyncio.run(_run(args.model, process.pid, port))
    finally:
        process.terminate()
        process.wait(60)


async def _run(model: Path, pid: int, port: int) -> None:
    manifest = Manifest.read(model)
    name, body, length = request_of(manifest)
    address, path = Address("127.0.0.1", port), f"/v2/models/{name}/infer"
    for _ in range(100):
        await _good_request(address, path, body, length)
    base = _memory(pid, "VmRSS")
    print(f"resident before: {base:,.0f} MiB")
    print(
        f"{'attack':<46} {'peak MiB':>9} {'more':>6} {'after':>6} {'health s':>9} {'good s':>7}  answers; those of good requests"
    )
    post = f"POST {path} HTTP/1.1\r\nHost: x\r\n"
    for attack in [*attacks(post, body, length), *raw_attacks(post, manifest)]:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets the peak
        async with _probe(port, path, body, length) as probe:
            held = [_attack(port, attack) for _ in range(attack.connections)]
            answers = Counter(await asyncio.gather(*held))
        peak = _memory(pid, "VmHWM")
        await _good_request(address, path, body, length)
        after = _memory(pid, "VmRSS")
        health, good = (probe["slowest"][name] for name in ("health", "good"))
        print(
            f"{attack.title:<46} {peak:9,.0f} {peak - base:6,.0f} {after - base:6,.0f} {health:9.3f} {good:7.3f}  "
            f"{_shown(answers)}; {_shown(probe['statuses']['good'])}",
            flush=True,
        )


def _shown(answers: Mapping[str, int]) -> str:
    return ", ".join(f"{count} x {status}" for status, count in sorted(answers.items()))


@asynccontextmanager
async def _probe(port: int, path: str, body: bytes, length: int) -> AsyncIterator[dict[str, Any]]:
    """Run a patient client until the block ends; what it has seen is then in the dictionary."""
    found: dict[str, Any] = {}
    with tempfile.NamedTemporaryFile() as file:
        file.write(body)
        file.flush()
        module = [sys.executable, "-m", "benchmarks.serving.probe"]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *module, str(port), path, str(length), file.name, stdin=pipe, stdout=pipe
        )
        assert process.stdout is not None
        await process.stdout.readline()
        yield found
        answer, _ = await process.communicate(b"\n")
        found |= json.loads(answer)


def attacks(post: str, body: bytes, length: int) -> Sequence[Attack]:
    """Return the attacks; `post` begins a request, `body` is of a good one, whose JSON has `length` bytes."""
    texts = json.dumps({"inputs": [_texts(1_300_000)]}).encode()
    good = f"{post}Inference-Header-Content-Length: {length}\r\n".encode() + _sized(len(body))
    return [
        Attack("nothing", b""),
        Attack("half of a request's headers", post.encode() + b"X: " + b"a" * 16_000),
        Attack("a claim of 1 GB", post.encode() + _sized(1 << 30)),
        Attack("1 GB in 20 connections, sent", post.encode() + _sized(1 << 30), connections=20),
        Attack("a claim of 60 MB, and one byte", post.encode() + _sized(60 << 20) + b"{"),
        Attack("half a body of 500 kB", post.encode() + _sized(500_000) + bytes(250_000)),
        Attack("300 good requests, answers unread", good + body, repeats=300, reads=False),
        Attack(
            f"8 MB of short texts, {CROWD} connections",
            post.encode() + _sized(len(texts)) + texts,
            connections=CROWD,
        ),
    ]


def raw_attacks(post: str, manifest: Manifest) -> Sequence[Attack]:
    """Return the attacks with raw values: more rows than may wait, and as many as may."""
    columns = (manifest.raw or {}).get("columns", {})
    found = []
    for title, size in (("7.9 MB of raw rows", 7_900_000), ("60,000 raw rows", None)):
        count = 60_000 if size is None else size // (4 * max(1, len(columns)))
        inputs = [
            {"name": name, "datatype": "BYTES", "shape": [count, 1][:kinds], "data": ["1"] * count}
            for name, kinds in columns.items()
        ]
        text = json.dumps({"inputs": inputs}, separators=(",", ":")).encode()
        if columns and len(text) < JSON_BYTES:
            content = post.encode() + _sized(len(text)) + text
            found.append(Attack(f"{title}, {CROWD} connections", content, connections=CROWD))
    return found


def _texts(count: int) -> dict[str, object]:
    data = ["ab"] * count
    return {"name": "ids", "datatype": "BYTES", "shape": [1, count], "data": data}


def _sized(size: int) -> bytes:
    return f"Content-Length: {size}\r\n\r\n".encode()


async def _attack(port: int, attack: Attack) -> str:
    """Hold one connection; return the status of its first answer."""
    end = time.monotonic() + HELD_S
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sending = asyncio.create_task(_send(writer, attack))
    status = "no answer"
    if attack.reads:
        try:
            async with asyncio.timeout(HELD_S):
                line = await reader.readline()
            status = line.split(b" ")[1].decode() if line else "closed"
        except TimeoutError:
            pass
        except OSError:
            status = "reset"
    await asyncio.sleep(end - time.monotonic())
    sending.cancel()
    writer.transport.abort()
    return status


async def _send(writer: asyncio.StreamWriter, attack: Attack) -> None:
    try:
        for _ in range(attack.repeats):
            writer.write(attack.content)
            await writer.drain()
        while attack.title.endswith("sent"):
            writer.write(bytes(MIB))
            await writer.drain()
    except OSError:
        pass  # the server has closed


async def _good_request(address: Address, path: str, body: bytes, length: int) -> None:
    connection = Connection(address)
    for attempt in range(20):
        reply = await connection.call(path, body, length)
        if reply.status != 503 or attempt == 19:
            break
        await asyncio.sleep(0.5)
    scores_of(reply, ROWS)
    connection.close()


def _memory(pid: int, field: str) -> float:
    """Return a number of /proc/PID/status in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{field}:")]
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
