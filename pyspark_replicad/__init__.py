"""Registers the data source `replicad` by being installed: PySpark imports every top-level module named `pyspark_*`.

One such module that fails to import would switch all of them off without a word, so this one never fails. Where
something is missing, a source that says what refuses to be used; without PySpark's sources there is nothing.
"""

from typing import Any

try:
    from pyspark.sql.datasource import DataSource

    try:
        from replicad.spark.session import check_pyspark

        check_pyspark()
        from replicad.spark.source import ReplicadDataSource

        DefaultSource: Any = ReplicadDataSource
    except Exception as error:  # noqa: BLE001 - whatever it is, other data sources must not suffer from it
        _REASON = str(error)

        class Refusing(DataSource):  # type: ignore[misc]
            """Stands in for the source, and says why it cannot be used."""

            def __init__(self, options: dict[str, str]) -> None:
                super().__init__(options)
                raise RuntimeError(_REASON)

            @classmethod
            def name(cls) -> str:
                """The name for `format(...)`."""
                return "replicad"

        DefaultSource = Refusing
except Exception:  # noqa: BLE001, S110 - as above
    pass
