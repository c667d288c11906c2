"""The limits of the daemon, each with its default and its reason.

Limits that an operator may have to change are options, with a range. The others are plain fields: their values fit all
installations, so only tests change them. A limit of which no other module has to know is a constant of its module.
"""

from __future__ import annotations

from dataclasses import dataclass

from replicad.config.declaring import amount, check_ranges, count, duration

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30
_DAY = 86400.0
LEASE_TTL_MAX = 3600.0  # seconds that a client may ask for; a worker that is killed blocks its partition for so long
WAIT_MAX = 300.0  # seconds that a request may wait for pods or for a lease; a client asks again then


def _time(default: float, text: str, low: float, high: float = _DAY, *, group: str, more: str = "") -> float:
    return duration(default, text, low, high, group=group, more=more)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits in bytes, seconds and counts.

    Raises:
        UsageError: a value is out of its range.
    """

    # --- options ---
    journal_bytes: int = amount(  # the only memory that grows with the traffic, whatever the number of clients
        64 * _MIB,
        "Memory for new rows of a stream, for all clients.",
        _MIB,
        64 * _GIB,
        group="Streams",
        more="A client that falls behind it is disconnected.",
    )
    bell_interval: float = _time(  # measured: 3 ms from commit to client; with all polling, 1 to 2 % of a processor
        0.004,
        "How often Postgres looks for a change.",
        0.0005,
        1,
        group="Streams",
        more="While there are no changes, polling waits for it.",
    )
    catchup_connections: int = count(  # each reads pieces for all clients; one alone feeds a client at full speed
        4, "Connections to Postgres that read old rows.", 1, 500, group="Streams"
    )
    catchup_bytes: int = amount(  # about half a second of Postgres' fastest COPY; clients that are so far apart share
        64 * _MIB,
        "Memory for old rows, for all clients.",
        _MIB,
        64 * _GIB,
        group="Streams",
        more="Clients that resume from a token share it. More rows are read again for some of them.",
    )
    catchup_pace: int = amount(  # a day of ten small rows a second takes a day at this pace: the client never arrives
        4 * _KIB,
        "A client that takes fewer bytes/s of old rows is cut.",
        0,
        _GIB,
        group="Streams",
        more="The speed is measured over --stall-timeout. 0: no client is cut.",
    )
    tube_connections: int = count(  # a worker takes its pods in milliseconds
        4, "Connections to Postgres that read pods.", 1, 500, group="Tubes and presence"
    )
    lease_ttl: float = _time(
        30.0,
        "A lease expires after so long without its holder.",
        0.5,
        LEASE_TTL_MAX,
        group="Tubes and presence",
        more="The holder is a worker that sends nothing any more.",
    )
    presence_devices: int = count(  # about 1 KB each
        500_000, "Syncing devices that presence stores.", 1, 100_000_000, group="Tubes and presence"
    )
    database_connections: int = count(  # all are short
        8,
        "Connections to Postgres for short requests.",
        3,
        500,
        group="Postgres",
        more="Requests are about leases, and about how far a client may read a tube.",
    )
    statement_timeout: float = _time(  # our statements take less than a second on a healthy server
        60.0,
        "A statement must end within this time.",
        0.1,
        group="Postgres",
        more="Catch-ups and backfills have other limits.",
    )
    max_connections: int = count(  # 10,000 workers, and some for people and health checks
        12_000, "Clients at the same time. One more gets an ERROR.", 1, 1_000_000, group="Limits"
    )
    max_line: int = amount(  # each client can use so much memory
        _MIB, "Longest line that a client may send.", 4 * _KIB, 64 * _MIB, group="Limits"
    )
    stall_timeout: float = _time(  # longer than a short network failure
        60.0,
        "A client that takes nothing for this long is cut.",
        0.1,
        group="Limits",
        more="The client has an answer or old rows to take, and reads less than 1 KiB a second over this time.",
    )
    stop_grace: float = _time(5.0, "On SIGTERM or SIGINT everything ends in time.", 0.1, 600, group="Limits")

    # --- newcomers, and what a client sends ---
    first_line: int = 4 * _KIB  # AUTH, NAME and any other command that a client begins with are shorter
    unfinished_bytes: int = 64 * _MIB  # of all clients; lines above first_line arrive in milliseconds, or are an attack
    line_timeout: float = 30.0  # from the beginning of a line to its end; a line is one or two packets
    http_connections: int = 32  # requests at a time, without /live and health checks; each takes milliseconds
    max_newcomers: int = 1000  # a client sends its first command with its first packet
    tls_handshakes: int = 500  # half a round trip each; a thousand workers that reconnect are through in a second
    auth_timeout: float = 10.0  # a client sends AUTH with its first packet
    first_command_timeout: float = 600.0  # a person with netcat may look at the page first; newcomers are few anyway
    tls_timeout: float = 10.0  # a handshake is two packets each way
    max_pending: int = 256  # requests of one client in one service: the answer to one comes within milliseconds

    # --- what a client is sent ---
    ping_interval: float = 5.0  # as in Synapse: at least one command in this time
    peer_timeout: float = 15.0  # as in Synapse: a client that has sent PING sends something in this time
    journal_seconds: float = 300.0  # a client that is minutes behind is better served from Postgres
    journal_patience: float = 1.0  # a busy machine or a lost packet delays a client for tenths of a second
    journal_pace: int = 64 * _KIB  # bytes/s; 12,000 clients that all take so much are 800 MB/s, a machine's most
    poll_min: float = 0.005  # measured: little more time from commit to client, at no cost for 32 writers
    poll_max: float = 0.05  # twenty cheap statements a second

    def __post_init__(self) -> None:
        check_ranges(self)
