"""Manifest of a model of which only the raw values matter."""

import json
from pathlib import Path

from dataloading.dataset.feature_spec import FeatureSpec
from serving.manifest import Feature, Manifest, Output, describe_files
from serving.raw_description import ModelParts, check_raw
from serving.raw_records import RawDescription


def raw_manifest(spec: FeatureSpec, description: dict, directory: Path, output: str) -> Manifest:
    """Return the manifest of a model without tables, whose description is checked as at a load.

    Args:
        spec: of the dataset.
        description: of its raw values, which are written in the directory.
        directory: of the model.
        output: name of the only one.
    """
    manifest = Manifest(
        name="m",
        model="m",
        numerical=list(spec.numerical),
        categorical=[Feature(f.name, f.cardinality, f.hotness) for f in spec.categorical],
        keep_rate=None,
        outputs=[Output(output, True)],
        dtype="fp32",
        tables=[],
        raw=json.loads(json.dumps(description)),
        files=describe_files(directory),
    )
    features = {f.name: (f.cardinality, f.hotness) for f in manifest.categorical}
    raw = RawDescription.of(manifest.raw)
    check_raw(raw, manifest.numerical, ModelParts(features, manifest.keys, manifest.files, {}))
    return manifest
