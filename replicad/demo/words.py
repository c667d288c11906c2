"""The long texts of the demonstration: the query on the copy, and what to type next."""

from __future__ import annotations

from pathlib import Path

from replicad.demo.show import near, program
from replicad.postgres.programs import find_programs

QUERY = """\
from replicad.spark.sinks import parquet

cities = parquet.table("{folder}")
by_country = cities.group_by("country").aggregate([("id", "count"), ("population", "sum")])
answer = by_country.sort_by([("population_sum", "descending")]).slice(0, 5).to_pandas()"""

NEXT = """\

Now try it yourself. Serve the data of this demonstration again, or your own Postgres:

  {program} serve --data-folder {folder}/postgres
  {program} serve --database postgresql://user@host/name

Send commands by hand, in another terminal:

  nc 127.0.0.1 9009
  REPLICATE census EARLIEST        the rows of a stream, old and new
  TUBE cities                      the number of its partitions
  CLAIM cities 0/1                 lease the whole tube, then read it: PODS cities 0/1 TERM limit=5

Change rows in a third terminal, and watch:

  {psql} '{url}' \\
    -c "UPDATE shard_0003.cities SET name = upper(name)"

Read it with Spark:

  from replicad.spark import build_session

  spark = build_session("touches")  # or a session of your own, after replicad.spark.register(session)
  touches = spark.readStream.format("replicad").option("tube", "cities").load()
  touches.writeStream.format("console").option("checkpointLocation", "/tmp/touches").start().awaitTermination()

The copy is in {folder}/downstream, the logs are in {folder}. Read on in README.md."""


def next_steps(folder: Path, url: str) -> str:
    """What to type next; `url` is that of the demonstration's Postgres."""
    return NEXT.format(program=program(), folder=folder, psql=near(find_programs() / "psql"), url=url)
