"""Everyday events of an installation: what causes each, where it is seen, and the remedy that is printed.

docs/everyday.md lists them (`python -m tests.everyday_page`). tests/integration/test_everyday_events.py causes them
on a real Postgres, with the least roles, looks as a role that only looks, and runs the printed remedies word for word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

OWNER, OPERATOR, APP = "everyday_owner", "everyday_ops", "everyday_app"


@dataclass(frozen=True)
class Event:
    """An event on a stream or tube called `name`, whose table is `app.<name>`.

    `title`: for the page. `prepare` and `cause`: SQL, which runs as `by`; {daemon}, {app} and {owner} are filled in.
    `seen`: a regular expression that a line of `streams list` or `tubes list`, of the doctor and of /readyz matches.
    `figure`: the start of a line of /metrics; default: the figure of the present troubles. `unseen`: the views that do
    not show it, each with the reason. `remedies`: roles, each with a regular expression; what it matches in the printed
    text is run as that role. `then`: what a person does besides. `viewer`: the role that looks.
    """

    name: str
    kind: str  # stream or tube
    title: str
    cause: str
    seen: str
    remedies: tuple[tuple[str, str], ...]  # the role, the pattern
    prepare: str = ""
    changes: bool = False  # the stream has the changes of the table
    add: str = ""  # further arguments of stream_add or of attaching
    by: str = OWNER
    unseen: Mapping[str, str] = field(default_factory=dict)
    figure: str = ""
    viewer: str = OPERATOR
    stays: bool = False  # the session that causes it stays open
    also: str = ""  # what another session commits, as `by`
    then_by: str = ""  # default: as `by`
    then: str = ""  # what a person does besides the printed command: SQL as `by`


SERVED_UP_TO_IT = "the rows before it are served"
STREAM_TABLE = "CREATE TABLE app.{name} (id bigserial PRIMARY KEY, body text, writer text)"
TUBE_TABLE = "CREATE TABLE app.{name} (id bigint PRIMARY KEY, v integer, body text)"
ALTER = r"replicad streams alter {name} --table app\.{name}\b"

EVENTS: tuple[Event, ...] = (
    Event(
        "swapped",
        "stream",
        "A migration renames a stream's table and makes a new one of its name",
        "BEGIN; ALTER TABLE app.swapped RENAME TO swapped_old; CREATE TABLE app.swapped (id bigserial PRIMARY KEY, "
        "body text, writer text); COMMIT",
        r"app\.swapped is another table now",
        (("daemon", ALTER),),
    ),
    Event(
        "copied",
        "stream",
        "A copy of a stream's table draws from its sequence (`LIKE ... INCLUDING ALL`)",
        "CREATE TABLE app.copied_new (LIKE app.copied INCLUDING ALL)",
        r"sequence app\.copied_id_seq feeds app\.copied_new too",
        (("daemon", r"run: (replicad streams alter copied --table app\.copied)(?!_)"),),
    ),
    Event(
        "viewed",
        "stream",
        "A view takes the name of a stream's table",
        "ALTER TABLE app.viewed RENAME TO viewed_base; CREATE VIEW app.viewed AS SELECT * FROM app.viewed_base",
        r"app\.viewed is another relation now",
        (("daemon", r"replicad streams alter viewed --table app\.viewed_base"),),
    ),
    Event(
        "refed",
        "stream",
        "The id column takes its ids from another sequence",
        "CREATE SEQUENCE app.refed_other OWNED BY app.refed.id; "
        "ALTER TABLE app.refed ALTER id SET DEFAULT nextval('app.refed_other')",
        r"takes its ids from sequence app\.refed_other now",
        (("daemon", r"replicad streams alter refed --table app\.refed\b"),),
    ),
    Event(
        "renumbered",
        "stream",
        "The sequence that writers call by its name was replaced",
        "ALTER SEQUENCE app.renumbered_ids RENAME TO renumbered_old; CREATE SEQUENCE app.renumbered_ids START 100",
        r"renumbered_ids is another sequence now",
        (("daemon", r"replicad streams alter renumbered --table app\.renumbered --sequence app\.renumbered_ids"),),
        prepare="CREATE SEQUENCE app.renumbered_ids; ALTER TABLE app.renumbered ALTER id DROP DEFAULT",
        add=", sequence => 'app.renumbered_ids'",
    ),
    Event(
        "published",
        "stream",
        "The table of positions was replaced",
        "ALTER TABLE app.published_at RENAME TO published_old; CREATE TABLE app.published_at (LIKE app.published_old); "
        "INSERT INTO app.published_at SELECT * FROM app.published_old",
        r"published_at is another relation now",
        (
            (
                "daemon",
                r"replicad streams alter published --table app\.published --positions-table app\.published_at",
            ),
        ),
        prepare="CREATE TABLE app.published_at (stream_name text, instance_name text, stream_id bigint); "
        "INSERT INTO app.published_at VALUES ('published', 'w', 0)",
        add=", method => 'positions_table', positions => 'app.published_at'",
    ),
    Event(
        "unpublished",
        "stream",
        "No writer publishes a position",
        "TRUNCATE app.unpublished_at; SELECT pg_notify('x', '')",
        r"no writer has published a position in app\.unpublished_at|no position yet",
        (),
        prepare="CREATE TABLE app.unpublished_at (stream_name text, instance_name text, stream_id bigint)",
        add=", method => 'positions_table', positions => 'app.unpublished_at'",
        figure='replicad_stream_state{state="starting",stream="unpublished"} 1',
        then="INSERT INTO app.unpublished_at VALUES ('unpublished', 'w', 0)",
    ),
    Event(
        "cached",
        "stream",
        "The sequence got a cache (`CACHE 10`)",
        "ALTER SEQUENCE app.cached_id_seq CACHE 10",
        r"CACHE 1\b",
        ((OWNER, r"ALTER SEQUENCE app\.cached_id_seq CACHE 1"),),
    ),
    Event(
        "cycled",
        "stream",
        "The sequence may begin again (`CYCLE`)",
        "ALTER SEQUENCE app.cycled_id_seq CYCLE",
        r"NO CYCLE",
        ((OWNER, r"ALTER SEQUENCE app\.cycled_id_seq NO CYCLE"),),
    ),
    Event(
        "backwards",
        "stream",
        "The sequence counts downwards",
        "ALTER SEQUENCE app.backwards_id_seq INCREMENT -1 MINVALUE -1000 MAXVALUE 1000",
        r"counts downwards|runs downwards",
        ((OWNER, r"ALTER SEQUENCE app\.backwards_id_seq INCREMENT BY 1\b"),),
    ),
    Event(
        "renamed",
        "stream",
        "The id column of a stream was renamed",
        "ALTER TABLE app.renamed RENAME COLUMN id TO number",
        r"has no column id any more",
        (("daemon", r"replicad streams remove renamed --yes"),),
    ),
    Event(
        "dropped",
        "stream",
        "The table of a stream was dropped",
        "DROP TABLE app.dropped",
        r"its table was dropped",
        (("daemon", r"replicad streams remove dropped --yes"),),
    ),
    Event(
        "walled",
        "stream",
        "Row security was enabled and forced on a stream's table",
        "ALTER TABLE app.walled ENABLE ROW LEVEL SECURITY; ALTER TABLE app.walled FORCE ROW LEVEL SECURITY",
        r"row security can hide rows of app\.walled",
        ((OWNER, r"ALTER TABLE app\.walled NO FORCE ROW LEVEL SECURITY"),),
    ),
    Event(
        "retyped",
        "stream",
        "The id column became bigint, and replicad was not told so",
        "ALTER TABLE app.retyped ALTER id TYPE bigint",
        r"--sequence-changed",
        (("daemon", r"replicad streams alter retyped --sequence-changed same"),),
        prepare="DROP TABLE app.retyped; "
        "CREATE TABLE app.retyped (id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY, body text); "
        "INSERT INTO app.retyped (body) SELECT g FROM generate_series(1, 20) g",
    ),
    Event(
        "unreadable",
        "stream",
        "A row fails to become JSON",
        "INSERT INTO app.unreadable (body) VALUES ('{\"a\"'), ('{}')",
        r"id 1 ",
        (("daemon", r"replicad streams skip unreadable 1 --yes"),),
        add=", row_sql => 't.body::json'",
        unseen={"ready": SERVED_UP_TO_IT},
    ),
    Event(
        "long",
        "stream",
        "A row is longer than the stream allows",
        "INSERT INTO app.long (body) VALUES (repeat('x', 5000))",
        r"id 1 ",
        (("daemon", r"replicad streams skip long 1 --yes"),),
        add=", max_row => 2000",
        unseen={"ready": SERVED_UP_TO_IT},
    ),
    Event(
        "ahead",
        "stream",
        "Rows were loaded with ids that the sequence has not reached",
        "INSERT INTO app.ahead (id, body) VALUES (500, 'x')",
        r"its sequence stands at 0",
        ((OWNER, r"SELECT setval\('[^']+', 500\)"),),
        unseen={
            "ready": "the stream is served, and its rows wait for the sequence",
            "metrics": "a daemon counts rows up to the last value of the sequence",
        },
        viewer="{daemon}",
    ),
    Event(
        "kept",
        "stream",
        "The daemon's role lost a right on a superuser's table",
        "REVOKE SELECT ON app.kept FROM {daemon}",
        r"GRANT SELECT ON (TABLE )?app\.kept",
        (("postgres", r"GRANT SELECT ON (TABLE )?app\.kept TO {daemon}"),),
        by="postgres",
    ),
    Event(
        "sequenced",
        "stream",
        "The daemon's role lost a right on a superuser's sequence",
        "REVOKE ALL ON SEQUENCE app.sequenced_id_seq FROM {daemon}",
        r"GRANT SELECT ON SEQUENCE app\.sequenced_id_seq",
        (("postgres", r"GRANT SELECT ON SEQUENCE app\.sequenced_id_seq TO {daemon}"),),
        by="postgres",
    ),
    Event(
        "opened",
        "stream",
        "A transaction that has written to a stream's table stays open",
        "BEGIN; INSERT INTO app.opened (body) VALUES ('x')",
        r"pid \d+",
        ((APP, r"SELECT pg_terminate_backend\(\d+\)"),),
        by=APP,
        stays=True,
        also="INSERT INTO app.opened (body) VALUES ('y')",
        unseen={"ready": "the stream is served, and goes on when the transaction ends"},
        figure='replicad_stream_held_back_seconds{kind="transaction",stream="opened"}',
        viewer="{daemon}",
    ),
    Event(
        "prepared",
        "stream",
        "A prepared transaction was forgotten",
        "BEGIN; INSERT INTO app.prepared (body) VALUES ('x'); PREPARE TRANSACTION 'everyday'",
        r"prepared transaction everyday",
        ((APP, r"ROLLBACK PREPARED 'everyday'"),),
        by=APP,
        also="INSERT INTO app.prepared (body) VALUES ('y')",
        unseen={"ready": "the stream is served, and goes on when the transaction ends"},
        figure='replicad_stream_held_back_seconds{kind="prepared",stream="prepared"}',
        viewer="{daemon}",
    ),
    Event(
        "locked",
        "stream",
        "A session keeps a lock on a stream's table against readers",
        "BEGIN; LOCK TABLE app.locked IN ACCESS EXCLUSIVE MODE",
        r"pid \d+|is locked",
        ((OWNER, r"SELECT pg_terminate_backend\(\d+\)"),),
        stays=True,
        viewer="{daemon}",
        unseen={
            "ready": "the stream is served, and goes on when the lock is released",
            "metrics": "no row waits until one is written",
        },
    ),
    Event(
        "used",
        "stream",
        "The ids of a stream are nearly used up",
        "SELECT setval('app.used_id_seq', 2100000000)",
        r"its sequence has used 98%",
        (),
        prepare="ALTER TABLE app.used ALTER id TYPE integer; ALTER SEQUENCE app.used_id_seq AS integer",
        unseen={
            "lists": "there are ids left",
            "ready": "there are ids left",
            "metrics": "`replicad_stream_last_value` is the last id, whatever the type",
        },
        viewer="{daemon}",
        then="BEGIN; ALTER TABLE app.used ALTER COLUMN id TYPE bigint; ALTER SEQUENCE app.used_id_seq AS bigint; "
        "SELECT replicad.stream_sequence_changed('used', 'same'); COMMIT",
        then_by="postgres",
    ),
    Event(
        "muted",
        "stream",
        "The triggers of a table with a stream of changes were disabled",
        "ALTER TABLE app.muted DISABLE TRIGGER USER",
        r"triggers of replicad on app\.muted are missing or disabled",
        (("daemon", r"replicad streams snapshot muted --anew"),),
        changes=True,
    ),
    # --- tubes ---
    Event(
        "busy",
        "tube",
        "A transaction that has touched ids stays open",
        "BEGIN; INSERT INTO app.busy VALUES (1)",
        r"pid \d+",
        ((APP, r"SELECT pg_terminate_backend\(\d+\)"),),
        by=APP,
        stays=True,
        unseen={
            "lists": "`replicad top` shows it",
            "ready": "the tube is served, and goes on when the transaction ends",
        },
        figure='replicad_tube_held_back_seconds{kind="transaction",tube="busy"}',
        viewer="{daemon}",
    ),
    Event(
        "waiting",
        "tube",
        "Pods wait, and no worker runs",
        "INSERT INTO app.waiting VALUES (1)",
        r"1 pod waits for up to",
        (),
        by=APP,
        unseen={"lists": "`replicad tubes stats` counts them", "ready": "the daemon serves the tube"},
        figure='replicad_tube_pods{partition="0",tube="waiting"} 1',
        viewer="{daemon}",
        then="DELETE FROM tube.waiting",
        then_by="{daemon}",
    ),
    Event(
        "expired",
        "tube",
        "A worker was killed and its lease has expired",
        "SELECT tube.tube_lease_claim('expired', 1, 0, 'w', '0.5 s', '{}')",
        r"lease",
        (),
        by="{daemon}",
        unseen={"ready": "the daemon serves the tube"},
        then="DELETE FROM tube.tube_lease WHERE tube = 'expired'",
    ),
    Event(
        "owned",
        "tube",
        "An attached table got another owner",
        "ALTER TABLE app.owned OWNER TO {daemon}",
        r"run with the rights of role",
        (("daemon", r"replicad tubes attach owned app\.owned --shard 0"),),
        by="postgres",
        unseen={
            "lists": "changes are recorded",
            "ready": "changes are recorded",
            "metrics": "changes are recorded",
        },
    ),
    Event(
        "parted",
        "tube",
        "A migration renames an attached table and makes a new one of its name",
        "BEGIN; ALTER TABLE app.parted RENAME TO parted_old; "
        "CREATE TABLE app.parted (LIKE app.parted_old INCLUDING ALL); COMMIT",
        r"another table than the attached one has the name app\.parted",
        (
            ("daemon", r"replicad tubes attach parted app\.parted --shard 0"),
            ("daemon", r"replicad tubes backfill parted --shard 0"),
        ),
    ),
    Event(
        "untriggered",
        "tube",
        "A trigger of a tube was dropped",
        "DROP TRIGGER untriggered_untriggered_after_update_trigger ON app.untriggered",
        r"changes of table app\.untriggered are not recorded",
        (
            ("daemon", r"replicad tubes attach untriggered app\.untriggered --shard 0"),
            ("daemon", r"replicad tubes backfill untriggered --shard 0"),
        ),
    ),
    Event(
        "disabled",
        "tube",
        "The triggers of a table were disabled",
        "ALTER TABLE app.disabled DISABLE TRIGGER USER",
        r"changes of table app\.disabled are not recorded",
        (
            ("daemon", r"replicad tubes attach disabled app\.disabled --shard 0"),
            ("daemon", r"replicad tubes backfill disabled --shard 0"),
        ),
    ),
    Event(
        "rekeyed",
        "tube",
        "The key column of an attached table was renamed: every write fails",
        "ALTER TABLE app.rekeyed RENAME COLUMN id TO number",
        r"each write of app\.rekeyed fails",
        (("daemon", r"replicad tubes detach rekeyed app\.rekeyed"),),
    ),
    Event(
        "unpredicated",
        "tube",
        "A column of a predicate was dropped: every write fails",
        "ALTER TABLE app.unpredicated DROP COLUMN v",
        r"each write of app\.unpredicated fails",
        (("daemon", r"replicad tubes detach unpredicated app\.unpredicated"),),
        add=", predicate => 'v > 0'",
    ),
    Event(
        "gone",
        "tube",
        "An attached table was dropped",
        "DROP TABLE app.gone",
        r"a table that was attached to it was dropped",
        (("daemon", r"replicad tubes detach gone \d+"),),
    ),
    Event(
        "unattached",
        "tube",
        "A partition was added to an attached table",
        "CREATE TABLE app.unattached_2 PARTITION OF app.unattached FOR VALUES FROM (100) TO (200)",
        r"a partition of app\.unattached that was added later",
        (("daemon", r"replicad tubes attach unattached app\.unattached --shard 0"),),
        prepare="DROP TABLE app.unattached; CREATE TABLE app.unattached (id bigint PRIMARY KEY, v integer) PARTITION "
        "BY RANGE (id); CREATE TABLE app.unattached_1 PARTITION OF app.unattached FOR VALUES FROM (1) TO (100)",
    ),
    Event(
        "shrunk",
        "tube",
        "A partition of an attached table was dropped",
        "DROP TABLE app.shrunk_1",
        r"partitions of app\.shrunk were dropped or detached",
        (("daemon", r"replicad tubes backfill shrunk --shard 0"),),
        prepare="DROP TABLE app.shrunk; CREATE TABLE app.shrunk (id bigint PRIMARY KEY, v integer) PARTITION BY "
        "RANGE (id); CREATE TABLE app.shrunk_1 PARTITION OF app.shrunk FOR VALUES FROM (1) TO (100)",
    ),
    Event(
        "emptied",
        "tube",
        "The table of a tube was dropped",
        "DROP TABLE tube.emptied",
        r"its table tube\.emptied is missing",
        (("daemon", r"replicad tubes create emptied --partitions 1"),),
        by="{daemon}",
    ),
    Event(
        "replica",
        "tube",
        "A user of the application writes with `session_replication_role = replica`",
        "ALTER ROLE {app} SET session_replication_role = replica",
        r"has session_replication_role = replica",
        (("postgres", r"ALTER ROLE {app} RESET session_replication_role"),),
        by="postgres",
    ),
    Event(
        "paused",
        "tube",
        "An operator has paused a tube",
        "SELECT tube.tube_pause('paused', 'a migration')",
        r"paused since [-0-9]+ [:0-9]+ UTC: a migration",
        (("daemon", r"replicad tubes resume paused"),),
        by="{daemon}",
        unseen={"ready": "it is on purpose, and other tubes are served"},
        figure='replicad_tube_paused_seconds{tube="paused"}',
    ),
    Event(
        "rekinded",
        "tube",
        "The key of an attached table got another type: every write fails",
        "ALTER TABLE app.rekinded ALTER id TYPE text",
        r"each write of app\.rekinded fails",
        (("daemon", r"replicad tubes detach rekinded app\.rekinded"),),
    ),
    Event(
        "adopted",
        "tube",
        "A partition with rows was attached to an attached table",
        "CREATE TABLE app.adopted_2 (id bigint PRIMARY KEY, v integer); INSERT INTO app.adopted_2 VALUES (100, 1); "
        "ALTER TABLE app.adopted ATTACH PARTITION app.adopted_2 FOR VALUES FROM (100) TO (200)",
        r"a partition of app\.adopted that was added later",
        (
            ("daemon", r"replicad tubes attach adopted app\.adopted --shard 0"),
            ("daemon", r"replicad tubes backfill adopted --shard 0"),
        ),
        prepare="DROP TABLE app.adopted; CREATE TABLE app.adopted (id bigint PRIMARY KEY, v integer) PARTITION "
        "BY RANGE (id); CREATE TABLE app.adopted_1 PARTITION OF app.adopted FOR VALUES FROM (1) TO (100)",
    ),
    Event(
        "parked",
        "tube",
        "Ids were parked",
        "INSERT INTO tube.tube_parked (tube, seq, op, shard, ids, ts, tries, error)"
        " VALUES ('parked', 1, 'U', 0, '{1}', now(), 3, 'no such column')",
        r"1 pod is parked",
        (("daemon", r"replicad tubes parked list parked"),),
        by="{daemon}",
        unseen={"ready": "other pods are served"},
        figure='replicad_tube_parked_pods{partition="0",tube="parked"} 1',
        then="SELECT tube.tube_parked_drop('parked', NULL)",
    ),
)
