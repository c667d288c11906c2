"""Registers the data source `replicad` by being installed: PySpark imports every top-level module named `pyspark_*`.

One such module that fails to import would switch all of them off without a word, so this one never fails: where
something is missing it defines nothing, and `replicad.spark.register(spark)` says what.
"""

try:
    from replicad.spark.session import check_pyspark
    from replicad.spark.source import ReplicadDataSource

    check_pyspark()
    DefaultSource = ReplicadDataSource
except Exception:  # noqa: BLE001, S110 - whatever it is, other data sources must not suffer from it
    pass
