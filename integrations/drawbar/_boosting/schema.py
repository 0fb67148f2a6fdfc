"""Feature schema that all ranks agree on before training.

If a rank passes other columns or category codes to the library, training yields a wrong model
without an error. All ranks therefore derive the same schema, or the same error, from the summaries
of all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

from drawbar._boosting.block import Array, Block
from drawbar._boosting.columns import ColumnRoles
from drawbar._boosting.reader import ColumnFormat, LabelRange, ShardSummary


@dataclass(frozen=True)
class Feature:
    """Column of the feature matrix.

    Args:
        name: Name of the column.
        categories: Value of each code; None for a numeric feature.
        has_named_categories: Whether codes stand for other values, such as strings. Otherwise,
            categories are integers that are their own codes.
    """

    name: str
    categories: tuple[Any, ...] | None = None
    has_named_categories: bool = False


@dataclass(frozen=True)
class Schema:
    """Features in the order that all ranks use."""

    features: tuple[Feature, ...]

    @property
    def names(self) -> list[str]:
        """Names of the features."""
        return [feature.name for feature in self.features]

    def matches(self, local: ShardSummary) -> bool:
        """Return whether a rank's order and codes equal the schema's."""
        recoded = (new != np.arange(len(new)) for new in self._code_mappings(local).values())
        return local.features == tuple(self.names) and not any(map(np.any, recoded))

    def convert(self, block: Block, local: ShardSummary) -> Block:
        """Convert a block from this rank's order and codes to the schema's."""
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
        """Return the schema's code of each local code, for columns with named categories."""
        return {
            column: _code_mapping(local.categories[feature.name], feature.categories or ())
            for column, feature in enumerate(self.features)
            if feature.name in local.categories
        }


def build_schema(
    summaries: Mapping[str, Sequence[ShardSummary]], columns: ColumnRoles, reading: ColumnFormat
) -> Schema:
    """Derive the schema from all datasets of all ranks.

    Args:
        summaries: Summaries of all ranks for each dataset. The first dataset is the training one.
        columns: Roles of the columns.
        reading: Column formats that the library accepts.

    Raises:
        ValueError: The datasets are not compatible.
    """
    datasets = list(summaries)
    training = datasets[0]
    names = _common_features(training, summaries[training])
    for dataset in datasets:
        rows = sum(summary.rows for summary in summaries[dataset])
        if not rows:
            raise ValueError(f"datasets[{dataset!r}] has no rows.")
        _require_same_features(
            training, names, dataset, _common_features(dataset, summaries[dataset])
        )
        _check_numbers(dataset, summaries[dataset], columns, reading)
    all_summaries = [summary for ranks in summaries.values() for summary in ranks]
    return Schema(tuple(_merge_feature(name, all_summaries) for name in names))


def label_range(summaries: Iterable[ShardSummary]) -> LabelRange:
    """Return the range of the labels of all ranks."""
    return reduce(LabelRange.merge, (summary.label for summary in summaries))


def _common_features(dataset: str, summaries: Sequence[ShardSummary]) -> tuple[str, ...]:
    known = [summary.features for summary in summaries if summary.features is not None]
    if not known:
        raise ValueError(f"datasets[{dataset!r}] has no rows.")
    for features in known[1:]:
        _require_same_features(dataset, known[0], f"{dataset} (another worker's part)", features)
    return known[0]


def _require_same_features(
    first: str, first_names: Sequence[str], second: str, second_names: Sequence[str]
) -> None:
    missing = sorted(set(first_names) - set(second_names))
    extra = sorted(set(second_names) - set(first_names))
    if missing or extra:
        raise ValueError(
            f"The features of {second!r} differ from {first!r}: "
            f"missing {missing or 'none'}, additional {extra or 'none'}."
        )


def _check_numbers(
    dataset: str, summaries: Sequence[ShardSummary], columns: ColumnRoles, reading: ColumnFormat
) -> None:
    """Check labels, weights, and base margins.

    LightGBM would replace invalid values by 0 or 1e38. XGBoost would train no trees with base
    margins that are NaN.
    """
    rows = sum(summary.rows for summary in summaries)
    missing = sum((summary.missing for summary in summaries), Counter[str]())
    infinite = sum((summary.infinite for summary in summaries), Counter[str]())
    margins = columns.base_margins
    if reading.has_default_margin and all(missing[name] == rows for name in margins):
        for name in margins:
            del missing[name]
    for counts, state in ((missing, "null or NaN"), (infinite, "infinite as float32")):
        for name, count in counts.items():
            role = next(role for role, column in columns.assignments() if column == name)
            raise ValueError(
                f"{count} of {rows} values in column {name!r} ({role}) of datasets[{dataset!r}] "
                f"are {state}. Drop these rows, or replace these values."
            )


def _merge_feature(name: str, summaries: Sequence[ShardSummary]) -> Feature:
    """Merge a feature of all ranks: the union of categories, in their common order or sorted.

    Categories of pandas' and Arrow's categorical types are named even if they are 0, 1, 2, ...,
    because a table with other categories in this column has other codes.
    """
    lists = [s.categories[name] for s in summaries if name in s.categories]
    max_codes = [s.max_codes[name] for s in summaries if name in s.max_codes]
    if lists and max_codes:
        raise ValueError(
            f"Feature {name!r} mixes named categories and integers. Use one kind in all datasets."
        )
    if max_codes:
        return Feature(name, tuple(range(max(max_codes) + 1)))
    if not lists:
        return Feature(name)
    has_strings = any(name in summary.string_features for summary in summaries)
    if not has_strings and all(values == lists[0] for values in lists):
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
