"""What all ranks agree on before training: the features, their order, the number of each category.

A library that is given other columns or other category codes on some rank trains nonsense without a
word. Here every rank sees every rank's summary and comes to the same schema, or to the same error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

from drawbar._boosting._block import Array, Block
from drawbar._boosting._reader import LabelRange, ShardSummary


@dataclass(frozen=True)
class Feature:
    """One column of the matrix.

    Args:
        name: The column's name.
        categories: The value of each code, or None for a number.
        has_named_categories: Whether they are values that the codes stand for, such as strings, or
            integers that are their own codes.
    """

    name: str
    categories: tuple[Any, ...] | None = None
    has_named_categories: bool = False


@dataclass(frozen=True)
class Schema:
    """The features in the order that all ranks use."""

    features: tuple[Feature, ...]

    @property
    def names(self) -> list[str]:
        """The names of the features."""
        return [feature.name for feature in self.features]

    def matches(self, local: ShardSummary) -> bool:
        """Whether a rank's own order and codes are those of the schema."""
        recoded = (new != np.arange(len(new)) for new in self._code_mappings(local).values())
        return local.features == tuple(self.names) and not any(map(np.any, recoded))

    def convert(self, block: Block, local: ShardSummary) -> Block:
        """Give a block of this rank's own order and codes in those of the schema."""
        if self.matches(local):
            return block
        order = [(local.features or ()).index(name) for name in self.names]
        features = [block.features[number] for number in order]
        codes = self._code_mappings(local)
        for number, new in codes.items():
            features[number] = _apply_codes(features[number], new)
        shared = {
            new for new, old in enumerate(order) if old in block.shared_features
        } - codes.keys()
        return replace(block, features=tuple(features), shared_features=frozenset(shared))

    def _code_mappings(self, local: ShardSummary) -> dict[int, Array]:
        """Give the new codes of a rank's own, for each column with categories by name."""
        return {
            column: _code_mapping(local.categories[feature.name], feature.categories or ())
            for column, feature in enumerate(self.features)
            if feature.name in local.categories
        }


def build_schema(summaries: Mapping[str, Sequence[ShardSummary]]) -> Schema:
    """Come to the schema of all datasets of all ranks.

    Args:
        summaries: Every rank's summary for each dataset; the first dataset is the training one.

    Raises:
        ValueError: The datasets do not go together; the message names columns and ranks.
    """
    datasets = list(summaries)
    training = datasets[0]
    names = _common_features(training, summaries[training])
    for dataset in datasets:
        rows = sum(summary.rows for summary in summaries[dataset])
        if not rows:
            raise ValueError(f"datasets[{dataset!r}] has no rows")
        _require_same_features(
            training, names, dataset, _common_features(dataset, summaries[dataset])
        )
        _check_labels(dataset, label_range(summaries[dataset]))
    everyone = [summary for each in summaries.values() for summary in each]
    return Schema(tuple(_merge_feature(name, everyone) for name in names))


def label_range(summaries: Iterable[ShardSummary]) -> LabelRange:
    """Give the range of all ranks' labels."""
    return reduce(LabelRange.merge, (summary.label for summary in summaries))


def _common_features(dataset: str, summaries: Sequence[ShardSummary]) -> tuple[str, ...]:
    known = [summary.features for summary in summaries if summary.features is not None]
    if not known:
        raise ValueError(f"datasets[{dataset!r}] has no rows")
    for each in known[1:]:
        _require_same_features(dataset, known[0], f"{dataset} (another worker's part)", each)
    return known[0]


def _require_same_features(
    left: str, ours: Sequence[str], right: str, theirs: Sequence[str]
) -> None:
    missing, extra = sorted(set(ours) - set(theirs)), sorted(set(theirs) - set(ours))
    if missing or extra:
        raise ValueError(
            f"the features of {right!r} are not those of {left!r}: "
            f"missing {missing or 'none'}, further {extra or 'none'}"
        )


def _check_labels(dataset: str, label: LabelRange) -> None:
    if label.missing:
        raise ValueError(
            f"{label.missing} labels of datasets[{dataset!r}] are null or NaN; drop these rows"
        )


def _merge_feature(name: str, summaries: Sequence[ShardSummary]) -> Feature:
    """Give a feature with the union of all ranks' categories: in the order they share, or sorted.

    pandas' and Arrow's own categories have names also where these are 0, 1, 2 ...: in a table whose
    column has others of them, they have other codes.
    """
    lists = [s.categories[name] for s in summaries if name in s.categories]
    highest = [s.max_codes[name] for s in summaries if name in s.max_codes]
    if lists and highest:
        raise ValueError(f"feature {name!r} holds categories by name and integers, by turns")
    if highest:
        return Feature(name, tuple(range(max(highest) + 1)))
    if not lists:
        return Feature(name)
    texts = any(name in summary.string_features for summary in summaries)
    if not texts and all(each == lists[0] for each in lists):
        return Feature(name, tuple(lists[0]), has_named_categories=True)
    return Feature(name, tuple(sorted(set().union(*lists))), has_named_categories=True)


def _apply_codes(codes: Array, new: Array) -> Array:
    known = ~np.isnan(codes)
    recoded = codes.copy()
    recoded[known] = new[codes[known].astype(np.int64)]
    return recoded


def _code_mapping(local: Sequence[object], agreed: Sequence[object]) -> Array:
    numbers = {value: code for code, value in enumerate(agreed)}
    return np.array([numbers[value] for value in local], dtype=np.float32)
