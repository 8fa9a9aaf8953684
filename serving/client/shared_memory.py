"""Inputs in shared memory, which Triton reads in place of a body: Triton's extension of system shared memory."""

import json
import secrets
from collections.abc import Mapping, Sequence
from multiprocessing.shared_memory import SharedMemory

import numpy as np

from serving.client.connection import Connection, ServerError
from serving.client.dataset_requests import EncodedRequest
from serving.client.load import Body

PATH = "/v2/systemsharedmemory/region"
EXTENSION = "system_shared_memory"


class SharedInputs:
    """A region of shared memory with the inputs of requests."""

    def __init__(self, requests: Sequence[EncodedRequest]) -> None:
        self._name = f"serving-{secrets.token_hex(8)}"
        size = sum(array.nbytes for request in requests for array in request.inputs.values())
        self._memory = SharedMemory(self._name, create=True, size=max(size, 1))
        self._size, offset, self.bodies = size, 0, []
        for request in requests:
            entries = []
            for name, array in request.inputs.items():
                target = np.ndarray(array.shape, array.dtype, self._memory.buf, offset)
                target[...] = array
                entries.append(self._entry(name, array, offset))
                offset += array.nbytes
            document = {"inputs": entries, "parameters": {"binary_data_output": True}}
            content = json.dumps(document).encode()
            self.bodies.append(Body(content, len(content)))

    def _entry(self, name: str, array: np.ndarray, offset: int) -> Mapping[str, object]:
        datatype = {"f4": "FP32", "i4": "INT32", "i8": "INT64"}[array.dtype.str[1:]]
        parameters = {
            "shared_memory_region": self._name,
            "shared_memory_byte_size": array.nbytes,
            "shared_memory_offset": offset,
        }
        shape = list(array.shape)
        return {"name": name, "datatype": datatype, "shape": shape, "parameters": parameters}

    async def register(self, connection: Connection) -> None:
        """Tell the server about the region. Raises ServerError: it has no such extension, or runs on another machine."""
        document = {"key": f"/{self._name}", "offset": 0, "byte_size": self._size}
        path = f"{PATH}/{self._name}/register"
        reply = await connection.call(path, json.dumps(document).encode())
        if reply.status != 200:
            raise ServerError(
                f"shared_memory=true: the server answers {reply.status}, {reply.message}"
            )

    async def close(self, connection: Connection) -> None:
        try:
            await connection.call(f"{PATH}/{self._name}/unregister", b"")
        finally:
            self._memory.close()
            self._memory.unlink()
