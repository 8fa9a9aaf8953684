"""HSTU: a transducer over a user's events and the candidates behind them (arXiv:2402.17152), as in MLPerf's `dlrm_v4`."""

import math
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from dataloading.dataset.feature_spec import FeatureSpec
from nn.embedding.declared_tables import Tables
from nn.layers import hstu
from nn.layers.hstu import SampleParts
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.layers.sequence import rows_at
from nn.layers.sequence_events import SequenceEvents
from nn.layers.stu import PositionDropout, RelativeBias, STULayer, SwishMLP, kept_columns
from nn.models.event_features import find_events
from nn.models.model import Activations, Model
from nn.models.options import AttentionNorm, HSTUOptions, ItemMLPs, QueryTime
from nn.ops.hstu_attention import JaggedPositions

# B: samples, N: numerical features, K: context vectors, M: candidates, P: positions, D: columns of a position


class HSTU(Model):
    """Dense component of HSTU.

    A sample is [context][events, oldest first][candidates]. Logit = MLP(user * item): user is the candidate's position behind all
    `STULayer`s, with hour and day of the query; item is an MLP of the candidate's own vectors. Context are the other features.
    """

    Options = HSTUOptions

    def __init__(self, options: HSTUOptions, spec: FeatureSpec) -> None:
        super().__init__()
        self._options, self._found = options, find_events(options, spec)
        found, width, hidden = self._found, options.width, options.input_hidden
        columns, inputs = options.embedding_dim, found.inputs
        self._num_context = found.num_features + bool(found.numbers)
        self._more = self._num_context + inputs.num_candidates  # positions beside the events
        self._max_length = inputs.group.max_length + self._more
        additional = len(inputs.group.features) - 1
        once = options.item_mlps is ItemMLPs.item
        self.items = hstu.ItemVectors(columns, additional, hidden, width, once_per_item=once)
        self.actions = None
        if options.action is not None:
            self.actions = hstu.ActionVectors(
                options.action_bits, options.action_dim, hidden, width
            )
        self.context = hstu.ContextVectors(found.num_features, columns, found.numbers, width)
        buckets = options.time_buckets if inputs.group.time is not None else None
        # Named as checkpoints have it.
        self.places = hstu.PositionVectors(options.positions, buckets, width)
        self.dropout = PositionDropout(options.input_dropout)
        self.layers = nn.ModuleList(
            STULayer(
                width,
                options.heads,
                options.head_dim,
                options.dropout,
                silu_all=options.silu_all,
                concat=options.concat,
            )
            for _ in range(options.layers)
        )
        biases = options.layers if options.relative_bias else 0
        of_one = self._max_length - inputs.num_candidates + 1
        self.biases = nn.ModuleList(RelativeBias(of_one) for _ in range(biases))
        self.user = hstu.UserVectors(width, has_clock=found.hour is not None)
        self.candidate = SwishMLP(inputs.item_columns, width, width, uniform=True)
        tasks = len(spec.labels) // inputs.num_candidates
        self.head = SwishMLP(width, width, tasks, norm=False, uniform=True)

    @classmethod
    def tables(cls, options: HSTUOptions, spec: FeatureSpec) -> Tables:
        """Return a table per feature; those of candidates and events hand out their rows.

        Raises ValueError: raised by `find_events`.
        """
        return find_events(options, spec).inputs.declare(options, spec)

    def activations(self) -> Activations:
        """Return what positions and distinct rows keep, and the work of a sample of mean length."""
        options, inputs = self._options, self._found.inputs
        inner = options.heads * options.head_dim
        layers = cast("list[STULayer]", list(self.layers))
        at_position, at_row = self.items.kept()
        columns = kept_columns(layers, at_position)
        length, whole = inputs.mean_events + self._more, len(layers) - 1
        # Of the last layer, positions other than candidates need values and keys alone.
        weights = options.width * inner * (whole * (4 + (3 if options.concat else 1)) + 2)
        keys = whole * length + 2 * inputs.num_candidates
        return Activations(
            backward_columns=self._more * columns,
            event_columns={inputs.group.name: columns},
            row_columns={inputs.tables[inputs.items[0]]: at_row},
            products={
                "positions": round(2 * (length - 1) * weights),
                "attention": round(2 * inner * length * keys),
            },
        )

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        """Map numerical [B, N] and `PooledEmbeddings` to logits [B, M * tasks] in float32, [B] of one task and candidate."""
        assert isinstance(embeddings, PooledEmbeddings), "tables hand out rows"
        found, options, inputs = self._found, self._options, self._found.inputs
        events, num_candidates = embeddings.sequence(inputs.group.name), inputs.num_candidates
        items = [embeddings.distinct_rows(inputs.tables[name], name) for name in inputs.items]
        parts = SampleParts.of(events, self._num_context, num_candidates)
        at, queries = parts.at, parts.at.last(num_candidates)[0]
        features = [events.rows[name] for name in inputs.group.features]
        of_items = self.items([of.rows for of in features], parts.positions(features, items))
        if self._num_context:
            vectors = torch.cat(inputs.others(embeddings), dim=1) if found.num_features else None
            of_items = parts.with_context(of_items, self.context(vectors, numerical))
        rows = [of_items]
        if self.actions is not None:
            rows.append(self.actions(events.numbers[options.action], parts))
        rows = [replace(of, scale=math.sqrt(options.width)) for of in rows]
        hours = None if found.hour is None else numerical[:, found.hour].float()
        from_last = options.query_time is QueryTime.last_event
        ages, seconds = hstu.times_of(events, inputs.group.time, parts, hours, from_last=from_last)
        rows += self.places(at, self._num_context, num_candidates, seconds)
        x = self.dropout.of_rows(rows, at)

        norm = self._norm(at, events)
        for number, layer in enumerate(self.layers):
            only = number == options.layers - 1
            bias = (
                self.biases[number](ages, at, queries if only else at, num_candidates)
                if self.biases
                else None
            )
            x = layer(x, at, norm, num_candidates, only_candidates=only, bias=bias)
        # Not by id, which would look up the rows of all events too.
        own = [rows_at(of.rows, of.positions[: x.shape[0]]) for of in items]
        item = self.candidate(torch.cat(own, dim=1))
        logits = self.head(self.user(x, hours) * item).float().view(at.starts.shape[0], -1)
        return logits.squeeze(1) if logits.shape[1] == 1 else logits

    def _norm(self, at: JaggedPositions, events: SequenceEvents) -> Tensor:
        """Return what the attention of each sample is divided by, [B], as if it had one candidate: others change no score."""
        how = self._options.attention_norm
        if how is AttentionNorm.batch_max:
            return (events.longest + self._num_context + 1).expand_as(at.lengths)
        is_own = {AttentionNorm.length: True, AttentionNorm.capacity: False}[how]
        length = at.lengths if is_own else torch.full_like(at.lengths, self._max_length)
        return length - (self._found.inputs.num_candidates - 1)
