"""Columns of Arrow's dictionary type, which pandas calls categories.

Each chunk of a column has its own dictionary. If an operation needs one chunk, Arrow combines the
dictionaries. This fails if the combined dictionary has more values than 8-bit codes can number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa


def widen_dictionaries(table: pa.Table) -> pa.Table:
    """Use 32-bit codes in all dictionaries, also in those within structs and lists."""
    for number, field in enumerate(table.schema):
        wide = _widen_type(field.type)
        if wide != field.type:
            column = table.column(number).cast(wide)
            table = table.set_column(number, field.with_type(wide), column)
    return table


def list_small_dictionaries(schema: pa.Schema) -> list[str]:
    """Return the columns with dictionaries whose codes have less than 32 bits."""
    return [field.name for field in schema if _widen_type(field.type) != field.type]


def check_dictionaries(schema: pa.Schema) -> None:
    """Check that workers can read the categories.

    Raises:
        TypeError: They cannot, such as pandas' intervals.
    """
    import pyarrow as pa

    for field in schema:
        for kind in _list_dictionary_types(field.type):
            if isinstance(kind.value_type, pa.BaseExtensionType):
                raise TypeError(
                    f"column {field.name!r} has categories of the type {kind.value_type}, which "
                    "workers cannot read. Convert them, for example with "
                    f'frame[{field.name!r}].astype(str).astype("category")'
                )


def decode_dictionary(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the values of a column."""
    import pyarrow as pa

    kind = column.type
    return column.cast(kind.value_type) if pa.types.is_dictionary(kind) else column


def explain_combine_error(error: Exception, name: str, source: Any) -> ValueError | None:
    """Return an error that names the dataset and its columns if Arrow cannot combine dictionaries.

    Args:
        error: Any error of Arrow or Ray Data.
        name: Name of the dataset.
        source: The `ray.data.DataIterator` that raised it.
    """
    if "These dictionaries cannot be combined" not in str(error):
        return None
    import pyarrow as pa

    schema = getattr(source.schema(), "base_schema", None)
    # Schemas of pandas blocks have no types.
    columns = list_small_dictionaries(schema) if isinstance(schema, pa.Schema) else []
    where = ", ".join(map(repr, columns)) or "a column"
    return ValueError(
        f"the blocks of datasets[{name!r}] have different categories in {where}, together more "
        "than codes of 8 or 16 bits can number. Convert the column to strings, or to "
        "pyarrow.dictionary(pyarrow.int32(), pyarrow.string())"
    )


def _widen_type(kind: Any) -> Any:
    """Return an Arrow type in which all dictionaries have codes of at least 32 bits."""
    import pyarrow as pa

    types = pa.types
    if types.is_dictionary(kind):
        is_small = kind.index_type.bit_width < 32
        return pa.dictionary(pa.int32(), kind.value_type, kind.ordered) if is_small else kind
    if types.is_struct(kind):
        return pa.struct([field.with_type(_widen_type(field.type)) for field in kind])
    if types.is_map(kind):
        item = kind.item_field.with_type(_widen_type(kind.item_type))
        return pa.map_(_widen_type(kind.key_type), item, kind.keys_sorted)
    if not hasattr(kind, "value_field"):
        return kind
    value = kind.value_field.with_type(_widen_type(kind.value_type))
    if types.is_fixed_size_list(kind):
        return pa.list_(value, kind.list_size)
    make = {types.is_list: pa.list_, types.is_large_list: pa.large_list}
    return next((make_list(value) for is_kind, make_list in make.items() if is_kind(kind)), kind)


def _list_dictionary_types(kind: Any) -> list[Any]:
    """Return the dictionary types within an Arrow type."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return [kind]
    fields = [kind.field(number) for number in range(kind.num_fields)]
    return [found for field in fields for found in _list_dictionary_types(field.type)]
