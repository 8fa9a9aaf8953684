"""Inputs in shared memory, which Triton reads in place of a body: Triton's extension of system shared memory."""

import json
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from multiprocessing.shared_memory import SharedMemory

import numpy as np

from serving.client.connection import Address, Connection, ServerError
from serving.client.dataset_requests import EncodedRequest, input_entry
from serving.client.load import Body

PATH = "/v2/systemsharedmemory/region"
EXTENSION = "system_shared_memory"


@asynccontextmanager
async def shared_bodies(
    address: Address, requests: Sequence[EncodedRequest]
) -> AsyncIterator[list[Body]]:
    """Yield requests whose inputs are in a region of shared memory that the server knows.

    Raises ServerError: it has no such extension, or runs on another machine.
    """
    region = f"serving-{secrets.token_hex(8)}"
    size = sum(array.nbytes for request in requests for array in request.inputs.values())
    memory = SharedMemory(region, create=True, size=max(size, 1))
    connection = Connection(address)
    try:
        bodies, offset = [], 0
        for request in requests:
            entries = []
            for name, array in request.inputs.items():
                target = np.ndarray(array.shape, array.dtype, memory.buf, offset)
                target[...] = array
                where = {
                    "shared_memory_region": region,
                    "shared_memory_byte_size": array.nbytes,
                    "shared_memory_offset": offset,
                }
                entries.append(input_entry(name, array, where))
                offset += array.nbytes
            document = {"inputs": entries, "parameters": {"binary_data_output": True}}
            content = json.dumps(document).encode()
            bodies.append(Body(content, len(content)))
        described = {"key": f"/{region}", "offset": 0, "byte_size": size}
        reply = await connection.call(f"{PATH}/{region}/register", json.dumps(described).encode())
        if reply.status != 200:
            raise ServerError(
                f"shared_memory=true: the server answers {reply.status}, {reply.message}"
            )
        yield bodies
    finally:
        try:
            await connection.call(f"{PATH}/{region}/unregister", b"")
        finally:
            memory.close()
            memory.unlink()
            connection.close()
