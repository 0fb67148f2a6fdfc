"""Columns have one role each."""

from __future__ import annotations

from typing import Any

import pytest

from drawbar._boosting import ColumnRoles


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"label": "y", "weight": "y"}, "'y' is used in label_column and in weight_column"),
        ({"label": "y", "categorical": ["y"]}, "'y' is used in label_column and in categorical"),
        ({"label": 3}, "label_column must be a column name or a list of column names, found 3"),
        ({"label": ["y", "y"]}, "'y' is used in label_column and in label_column"),
        ({"label": "y", "categorical": "c"}, "must be a list of columns, found 'c'"),
        ({"label": "y", "group": 2}, "group_column must name columns, found 2"),
    ],
)
def test_column_roles_with_invalid_arguments_raise(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        ColumnRoles(**arguments)


def test_columns_without_role_are_features() -> None:
    columns = ColumnRoles(label="y", weight="w", group="g", base_margin="m")
    names = ["a", "y", "w", "__index_level_0__", "b", "g", "m"]
    assert columns.features(names) == ("a", "b")
