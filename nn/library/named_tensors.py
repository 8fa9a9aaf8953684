"""A batch as a dictionary of named tensors."""

from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from dataloading.batch import Batch
from dataloading.dataset.feature_spec import FeatureSpec


def named_tensors(batch: Batch, spec: FeatureSpec) -> dict[str, Tensor | JaggedTensor]:
    """Return the columns of a batch by name, without padding rows; they share memory with the batch.

    Returns labels, weight, keep rate and numerical features as float32 [B]; ids as integers [B], or [B, hotness] of a feature
    with several; those of a ragged feature, and numbers of events, as a `JaggedTensor`.
    """
    rows = batch.num_valid
    labels = [batch.labels] if batch.labels.dim() == 1 else [*batch.labels.unbind(1)]
    single = [values for values in (batch.weights, batch.keep_rates) if values is not None]
    named: dict[str, Tensor | JaggedTensor] = {
        column.name: values[:rows]
        for column, values in zip(
            spec.row_columns, [*labels, *single, *batch.teachers.values()], strict=True
        )
    }
    for column, name in enumerate(spec.numerical):
        named[name] = batch.numerical[:rows, column]
    for feature in spec.categorical:
        ids = batch.feature(feature.name)
        if feature.hotness is None:
            named[feature.name] = JaggedTensor(ids.values(), lengths=ids.lengths()[:rows])
        elif len(ids.values()) == rows:
            named[feature.name] = ids.values()
        else:
            named[feature.name] = ids.values().view(rows, -1)
    events = iter(batch.events)
    for group in spec.sequences:
        lengths = batch.feature(group.features[0]).lengths()[:rows]
        for number in group.numbers:
            named[number.name] = JaggedTensor(next(events), lengths=lengths)
    return named
