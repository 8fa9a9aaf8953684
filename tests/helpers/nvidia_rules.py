"""Rules of the readers of NVIDIA's recipes: DeepLearningExamples, PyTorch DLRM and TensorFlow2 DLRM_and_DCNv2.

Their `check_feature_spec` ends with a bare assertion where a rule is violated. The rules here are in our words, of both
recipes together, with those of the code that opens the files.
"""

from pathlib import Path
from typing import Any

import numpy as np
import yaml

SECTIONS = {"channel_spec", "feature_spec", "metadata", "source_spec"}
CHANNELS = {"categorical", "label", "numerical"}
SPLITS = {"train", "test"}
ID_DTYPES = {"int8", "int16", "int32"}


def violated_rules(root: Path) -> list[str]:
    """Return the rules of NVIDIA's readers that the dataset in `root` violates."""
    document = yaml.safe_load((root / "feature_spec.yaml").read_text())
    return [*_of_names(document), *_of_dtypes(document), *_of_splits(root, document)]


def _of_names(document: dict[str, Any]) -> list[str]:
    """Return what is wrong with sections, channels and the features in them."""
    channels, features = document["channel_spec"], document["feature_spec"]
    # The sections are the keyword arguments of a constructor.
    wrong = [f"sections {sorted(document)}"] * (set(document) != SECTIONS)
    wrong += [f"channels {sorted(channels)}"] * (set(channels) != CHANNELS)
    wrong += [f"labels {channels['label']}"] * (len(channels["label"]) != 1)
    # The TensorFlow reader never sets its list of numericals without a chunk of them.
    wrong += ["no numerical"] * (not channels["numerical"])
    names = [name for channel in CHANNELS for name in channels[channel]]
    wrong += [f"features {names}"] * (sorted(names) != sorted(features))
    return wrong


def _of_dtypes(document: dict[str, Any]) -> list[str]:
    channels, features = document["channel_spec"], document["feature_spec"]
    wrong = []
    for name in channels["categorical"]:
        dtype, rows = features[name]["dtype"], features[name]["cardinality"]
        wrong += [f"{name} is {dtype}"] * (dtype not in ID_DTYPES)
        wrong += [f"{name} has {rows!r} rows"] * (type(rows) is not int or rows < 1)
    for name in channels["numerical"]:
        wrong += [f"{name} is {features[name]['dtype']}"] * (features[name]["dtype"] != "float16")
    [label] = channels["label"]
    return wrong + [f"{label} is no bool"] * (features[label]["dtype"] != "bool")


def _of_splits(root: Path, document: dict[str, Any]) -> list[str]:
    """Return what is wrong with splits, their chunks and the bytes of their files."""
    channels, features = document["channel_spec"], document["feature_spec"]
    sources = document["source_spec"]
    wrong = [f"splits {sorted(sources)}"] * (set(sources) != SPLITS)
    alone = [[name] for name in (*channels["categorical"], *channels["label"])]
    for split, chunks in sources.items():
        # Every feature in one chunk: all numericals in channel order, any other feature by itself.
        listed = [chunk["features"] for chunk in chunks]
        wanted = sorted([*alone, channels["numerical"]])
        wrong += [f"{split}: chunks {listed}"] * (sorted(listed) != wanted)
        wrong += [f"{split}: a chunk of {c['type']}" for c in chunks if c["type"] != "split_binary"]
        wrong += [f"{split}: files {c['files']}" for c in chunks if len(c["files"]) != 1]
        rows = set()
        for chunk in chunks:
            first = features[chunk["features"][0]]
            values = np.fromfile(root / chunk["files"][0], first["dtype"])
            count, rest = divmod(len(values), len(chunk["features"]))
            rows.add((count, rest))
            if (
                "cardinality" in first
                and not 0 <= values.min() <= values.max() < first["cardinality"]
            ):
                wrong.append(f"{split}: ids of {chunk['features'][0]}")
            elif first["dtype"] == "bool" and values.view(np.uint8).max() > 1:
                wrong.append(f"{split}: labels")
        # Batches are counted per file and must agree.
        wrong += [f"{split}: rows {sorted(rows)}"] * (len(rows) != 1 or (0, 0) in rows)
    return wrong
