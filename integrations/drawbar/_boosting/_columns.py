"""Which column of a dataset plays which role."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, kw_only=True)
class ColumnRoles:
    """The columns of a dataset by role.

    Every column without a role is a feature, except for the index of a pandas DataFrame.

    Args:
        label: What is learned: a column, or several for as many outputs.
        weight: Weight of each row.
        group: Query of each row, for ranking. Rows of one query lie side by side.
        base_margin: Where each row's margin starts: a column, or several for as many classes.
        categorical: Features whose values are categories, strings or integers from 0. A column of
            Arrow's dictionary type (pandas' `category`) is categorical without being named.

    Raises:
        TypeError: A name is no string.
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
                f"categorical_features must be a list of columns, found {self.categorical!r}"
            )
        object.__setattr__(self, "categorical", tuple(self.categorical))
        if not isinstance(self.label, str):
            if not isinstance(self.label, Sequence) or not self.label:
                raise TypeError(
                    f"label_column must be the name of a column, or a list of them, found "
                    f"{self.label!r}"
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
                raise TypeError(f"{role} must name columns, found {name!r}")
            if name in roles:
                raise ValueError(f"{name!r} is both the {roles[name]} and in {role}")
            roles[name] = role

    @property
    def labels(self) -> tuple[str, ...]:
        """The columns that are learned."""
        return (self.label,) if isinstance(self.label, str) else tuple(self.label)

    @property
    def base_margins(self) -> tuple[str, ...]:
        """The columns of the base margin, none if there is none."""
        return tuple(self.base_margin or ())

    def assignments(self) -> Iterator[tuple[str, str]]:
        """Give the trainer's argument and the column for each role that a column plays."""
        for each in self.labels:
            yield "label_column", each
        if self.weight is not None:
            yield "weight_column", self.weight
        if self.group is not None:
            yield "group_column", self.group
        for each in self.base_margins:
            yield "base_margin_column", each

    def features(self, names: Sequence[str]) -> tuple[str, ...]:
        """Give the features among a dataset's columns, in their order."""
        assigned = {name for _, name in self.assignments()}
        return tuple(name for name in names if name not in assigned and not _is_pandas_index(name))

    def validate(self, dataset: str, types: Mapping[str, pa.DataType | None]) -> None:
        """Check that a dataset has the columns, and that its features can be learned from.

        Args:
            dataset: Its name, for the message.
            types: Arrow's type of each column, None where it is not known.

        Raises:
            ValueError: A column is missing, or has a type that is no number and no category.
        """
        expected = (
            *self.assignments(),
            *(("categorical_features", name) for name in self.categorical),
        )
        for role, name in expected:
            if name not in types:
                raise ValueError(
                    f"{role} is {name!r}, but datasets[{dataset!r}] has the columns "
                    f"{', '.join(map(repr, types)) or 'none'}"
                )
        validate_types(dataset, types, self)


def validate_types(
    dataset: str, types: Mapping[str, pa.DataType | None], columns: ColumnRoles
) -> None:
    """Check the types of a dataset's columns.

    Raises:
        ValueError: A column can be neither a number nor a category.
    """
    import pyarrow.types as is_type

    for name, arrow_type in types.items():
        if arrow_type is None or _is_numeric(arrow_type) or _is_pandas_index(name):
            continue
        text = is_type.is_string(arrow_type) or is_type.is_large_string(arrow_type)
        if name == columns.group and text:
            continue
        if any(name == assigned for _, assigned in columns.assignments()):
            raise ValueError(
                f"column {name!r} of datasets[{dataset!r}] must hold numbers, found {arrow_type}; "
                "encode it first"
            )
        if is_type.is_dictionary(arrow_type) or (text and name in columns.categorical):
            continue
        advice = (
            "name it in categorical_features, make it a pandas category, or drop it"
            if text
            else "make numbers of it, or drop it"
        )
        raise ValueError(f"feature {name!r} of datasets[{dataset!r}] holds {arrow_type}; {advice}")


def _is_pandas_index(name: str) -> bool:
    """Whether a column is the index of a pandas DataFrame, as Arrow names it."""
    return name.startswith("__index_level_") and name.endswith("__")


def _is_numeric(arrow_type: pa.DataType) -> bool:
    import pyarrow.types as is_type

    tests = (is_type.is_integer, is_type.is_floating, is_type.is_boolean, is_type.is_decimal)
    return is_type.is_null(arrow_type) or any(test(arrow_type) for test in tests)
