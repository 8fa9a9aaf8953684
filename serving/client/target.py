"""The server and the dataset that a client evaluates, opened and compared with each other."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from configs.serving_schema import ClientConfig
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.open_dataset import open_dataset
from dataloading.dataset.source import Source
from serving.client.connection import Address, Connection, get_json
from serving.client.dataset_requests import RequestEncoder
from serving.token_file import read_token


@dataclass(frozen=True, slots=True)
class Target:
    address: Address
    path: str
    source: Source
    encoder: RequestEncoder
    extensions: list[str]


async def open_target(config: ClientConfig) -> Target:
    """Open a dataset, and ask a server for its model.

    Raises ValueError: one of them cannot be used, or they do not fit together.
    """
    assert config.model is not None, "checked by the options"
    assert config.data_path is not None, "likewise"
    address = Address.of(config.url, read_token(config.token_file))
    spec, split = FeatureSpec.load(Path(config.data_path)), config.split
    source = open_dataset(spec)
    if split not in spec.splits or not source.num_rows(split):
        raise ValueError(
            f"split={split}: {config.data_path} has no rows of it; its splits are {', '.join(spec.splits)}"
        )
    path = f"/v2/models/{quote(config.model, safe='')}"
    with closing(Connection(address)) as connection:
        server = await get_json(connection, "/v2")
        metadata = await get_json(connection, path)
    encoder = RequestEncoder(metadata, spec)
    return Target(address, f"{path}/infer", source, encoder, server.get("extensions", []))
