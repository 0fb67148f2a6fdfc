"""Map dataset columns to roles: label, weight, group, base margin, feature."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, kw_only=True)
class ColumnRoles:
    """Columns of a dataset by role.

    Every column without a role is a feature, except for the index of a pandas DataFrame.

    Args:
        label: Target column, or several columns for several outputs.
        weight: Column with the weight of each row.
        group: Column with the query of each row, for ranking. Rows of a query are contiguous.
        base_margin: Column with the initial margin of each row, or one column for each class.
        categorical: Features whose values are categories: strings, or integers from 0. Columns of
            Arrow's dictionary type (`category` in pandas) are always categorical.

    Raises:
        TypeError: A name is not a string.
        ValueError: A column has two roles.
    """

    label: str | Sequence[str]
    weight: str | None = None
    group: str | None = None
    base_margin: str | Sequence[str] | None = None
    categorical: Sequence[str] = ()

    def __post_init__(self) -> None:
        margins = (self.base_margin,) if isinstance(self.base_margin, str) else self.base_margin
        object.__setattr__(self, "base_margin", tuple(margins or ()))
        if isinstance(self.categorical, str):
            raise TypeError(
                f"categorical_features must be a list of columns, found {self.categorical!r}."
            )
        object.__setattr__(self, "categorical", tuple(self.categorical))
        if not isinstance(self.label, str):
            if not isinstance(self.label, Sequence) or not self.label:
                raise TypeError(
                    f"label_column must be a column name or a list of column names, found "
                    f"{self.label!r}."
                )
            object.__setattr__(self, "label", tuple(self.label))
        self._check_names()

    def _check_names(self) -> None:
        roles: dict[str, str] = {}
        for role, name in (
            *self.assignments(),
            *(("categorical_features", c) for c in self.categorical),
        ):
            if not isinstance(name, str):
                raise TypeError(f"{role} must name columns, found {name!r}.")
            if name in roles:
                raise ValueError(
                    f"Column {name!r} is used in {roles[name]} and in {role}. Use it only once."
                )
            roles[name] = role

    @property
    def labels(self) -> tuple[str, ...]:
        """Target columns."""
        return (self.label,) if isinstance(self.label, str) else tuple(self.label)

    @property
    def base_margins(self) -> tuple[str, ...]:
        """Columns of the base margin; empty if there is none."""
        return tuple(self.base_margin or ())

    def assignments(self) -> Iterator[tuple[str, str]]:
        """Yield the trainer's argument and the column for each column that has a role."""
        for label in self.labels:
            yield "label_column", label
        if self.weight is not None:
            yield "weight_column", self.weight
        if self.group is not None:
            yield "group_column", self.group
        for margin in self.base_margins:
            yield "base_margin_column", margin

    def features(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the features among the columns of a dataset, in their order."""
        assigned = {name for _, name in self.assignments()}
        return tuple(name for name in names if name not in assigned and not _is_pandas_index(name))

    def validate(self, dataset: str, types: Mapping[str, pa.DataType | None]) -> None:
        """Check that a dataset has the columns and that its features have supported types.

        Args:
            dataset: Name of the dataset, for error messages.
            types: Arrow type of each column, or None if it is unknown.

        Raises:
            ValueError: A column is missing, or is neither numeric nor categorical.
        """
        expected = (
            *self.assignments(),
            *(("categorical_features", name) for name in self.categorical),
        )
        for role, name in expected:
            if name not in types:
                raise ValueError(
                    f"{role} is {name!r}, but datasets[{dataset!r}] has the columns "
                    f"{', '.join(map(repr, types)) or 'none'}."
                )
        validate_types(dataset, types, self)


def validate_types(
    dataset: str, types: Mapping[str, pa.DataType | None], columns: ColumnRoles
) -> None:
    """Check the types of a dataset's columns.

    Raises:
        ValueError: A column is neither numeric nor categorical.
    """
    import pyarrow.types as is_type

    for name, arrow_type in types.items():
        if arrow_type is None or _is_numeric(arrow_type) or _is_pandas_index(name):
            continue
        is_text = is_type.is_string(arrow_type) or is_type.is_large_string(arrow_type)
        is_category = is_type.is_dictionary(arrow_type)
        if name == columns.group and (is_text or is_category):
            continue
        if any(name == assigned for _, assigned in columns.assignments()):
            raise ValueError(
                f"Column {name!r} of datasets[{dataset!r}] must be numeric, found {arrow_type}. "
                "Encode it as numbers."
            )
        if is_category or (is_text and name in columns.categorical):
            continue
        advice = (
            "Add it to categorical_features, convert it to a pandas category, or drop it."
            if is_text
            else "Convert it to numbers, or drop it."
        )
        raise ValueError(
            f"Feature {name!r} of datasets[{dataset!r}] has type {arrow_type}. {advice}"
        )


def _is_pandas_index(name: str) -> bool:
    """Return whether a column is the index of a pandas DataFrame, by its name in Arrow."""
    return name.startswith("__index_level_") and name.endswith("__")


def _is_numeric(arrow_type: pa.DataType) -> bool:
    import pyarrow.types as is_type

    tests = (is_type.is_integer, is_type.is_floating, is_type.is_boolean, is_type.is_decimal)
    return is_type.is_null(arrow_type) or any(test(arrow_type) for test in tests)
