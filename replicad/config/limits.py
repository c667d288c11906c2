"""All limits of the daemon, each with its default, its range and its reason."""

from __future__ import annotations

from dataclasses import dataclass

from replicad.config.declaring import amount, check_ranges, count, duration

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30
_DAY = 86400.0


def _time(default: float, text: str, low: float, high: float = _DAY) -> float:
    return duration(default, text, low, high)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits in bytes, seconds and counts.

    Raises:
        UsageError: a value is out of its range, or two are in conflict.
    """

    max_line: int = amount(
        _MIB,
        "Longest line accepted from a client. Each client can use so much memory.",
        4 * _KIB,
        64 * _MIB,
    )
    first_line: int = amount(  # AUTH, NAME and any other command that a client begins with are shorter
        4 * _KIB,
        "Longest line accepted from a client before its first valid command (if a token is set: before AUTH).",
        512,
        64 * _MIB,
    )
    unfinished_bytes: int = amount(  # lines above --first-line arrive within milliseconds, or are an attack
        64 * _MIB,
        "Memory for unfinished lines of all clients. Beyond it the oldest of the address that has the most is cut.",
        _MIB,
        64 * _GIB,
    )
    line_timeout: float = _time(  # a line is one or two packets
        30.0, "A line that a client began must end within this time.", 0.1
    )
    max_connections: int = count(  # 10,000 workers, and some for people and health checks
        12_000, "Connections at the same time. One more gets an ERROR and is closed.", 1, 1_000_000
    )
    http_connections: int = count(  # some scrapers and browsers; each is answered within milliseconds
        32, "Requests of --http that are answered at the same time, without /live and health checks.", 1, 10_000
    )
    max_newcomers: int = count(  # a client sends its first command with its first packet
        1000,
        "Connections that have not sent a valid command (with a token: AUTH). One more, and the oldest is closed.",
        1,
        1_000_000,
    )
    tls_handshakes: int = count(  # half a round trip each; a thousand workers that reconnect are through in a second
        500, "TLS handshakes at the same time. One more, and one that waits for its client is closed.", 1, 1_000_000
    )
    max_pending: int = count(  # for each service: requests for streams and for tubes have separate queues
        256,
        "Requests of one client that may wait for their answers; a client that sends one more is disconnected.",
        1,
        100_000,
    )
    pending_bytes: int = amount(  # a few of the longest ACKs
        4 * _MIB,
        "Requests of one client that may wait for their answers, in bytes. A longer one may wait alone.",
        64 * _KIB,
        _GIB,
    )
    auth_timeout: float = _time(10.0, "If a token is set, a client must send AUTH within this time.", 0.1)
    first_command_timeout: float = _time(  # a person with netcat may look at the page first; newcomers are few anyway
        600.0, "A client must send its first valid command within this time.", 0.1
    )
    tls_timeout: float = _time(10.0, "A TLS handshake must end within this time.", 0.1)
    ping_interval: float = _time(  # as in Synapse
        5.0, "Every client is sent at least one command in this time, if necessary a PING.", 0.05
    )
    peer_timeout: float = _time(  # as in Synapse
        15.0, "A client that has sent a PING and then nothing for this long is disconnected.", 0.1
    )
    stall_timeout: float = _time(  # longer than a short network failure
        60.0, "A client that reads nothing of an answer for this long is disconnected.", 0.1
    )
    queued_bytes: int = amount(  # ten thousand answers
        _MIB,
        "Answers and relayed lines that may wait for one client; a client that reads so slowly is disconnected.",
        64 * _KIB,
        _GIB,
    )
    relay_bytes: int = amount(  # ten thousand lines; senders wait for room, other daemons' oldest lines are dropped
        _MIB, "Lines for all clients (REMOTE_SERVER_UP, LOCK_RELEASED) that may wait to be sent.", 64 * _KIB, _GIB
    )
    turn_lines: int = count(  # a quarter of a millisecond
        16, "Lines of one client that are handled before other clients get their turn.", 1, 100_000
    )
    turn_bytes: int = amount(  # splitting so much into lines takes less than a millisecond, even if they are blank
        8 * _KIB, "Bytes of one client that are handled before other clients get their turn.", 512, _MIB
    )
    journal_bytes: int = amount(  # the only memory that grows with the traffic, whatever the number of clients
        64 * _MIB,
        "Memory for rows on their way to clients, shared by all. A client that falls behind it is disconnected.",
        _MIB,
        64 * _GIB,
    )
    journal_chunks: int = count(8192, "Chunks in the journal: limits its overhead if chunks are small.", 16, 10_000_000)
    journal_seconds: float = _time(  # a client that is minutes behind is better served from Postgres
        300.0, "Age of the oldest row in the journal.", 1
    )
    journal_patience: float = _time(  # a busy machine or a lost packet delays a client for tenths of a second
        1.0,
        "While the journal is full, a client that takes nothing for this long while others wait is disconnected.",
        0.05,
    )
    journal_pace: int = amount(  # 12,000 clients that all take so much are 800 MB/s, about what one machine sends
        64 * _KIB,
        "While the journal is full, a client for which others wait must take so many bytes per second.",
        1,
        _GIB,
    )
    poll_min: float = _time(  # measured: little more time from commit to client, at no cost for 32 writers
        0.005, "Interval of polling Postgres while there are changes.", 0.001, 60
    )
    poll_max: float = _time(  # twenty cheap statements a second
        0.05, "Interval of polling Postgres while there are no changes.", 0.001, 60
    )
    bell_interval: float = _time(  # measured: 3 ms from commit to client; with all polling, 1 to 2 % of a processor
        0.004,
        "While there are no changes, Postgres itself looks this often for the next one, and polling waits for it.",
        0.0005,
        1,
    )
    database_connections: int = count(  # all are short
        8, "Connections to Postgres for short requests: leases, and how far a client may read a tube.", 3, 500
    )
    catchup_connections: int = count(  # each reads pieces for all clients; one alone feeds a client at full speed
        4, "Connections to Postgres that read old rows for clients that resume from a token.", 1, 500
    )
    catchup_bytes: int = amount(  # about half a second of Postgres' fastest COPY; clients that are so far apart share
        64 * _MIB,
        "Memory for old rows that clients which resume from a token share. More rows are read again for some of them.",
        _MIB,
        64 * _GIB,
    )
    client_catchups: int = count(  # they share one socket, so more at the same time are no faster
        4, "Streams that one client is sent old rows of at the same time; the others wait.", 1, 10_000
    )
    catchup_pace: int = amount(  # a day of ten small rows a second takes a day at this pace: the client never arrives
        4 * _KIB,
        "A client that takes fewer bytes a second of old rows, over the stall time-out, is disconnected. 0: none is.",
        0,
        _GIB,
    )
    tube_connections: int = count(  # a worker takes its pods in milliseconds
        4, "Connections to Postgres that read pods of tubes for clients.", 1, 500
    )
    connect_timeout: float = _time(10.0, "A connection to Postgres must be made within this time.", 0.1, 600)
    statement_timeout: float = _time(  # our statements take less than a second on a healthy server
        60.0, "A statement must end within this time; catch-ups and backfills have other limits.", 0.1
    )
    lease_ttl: float = _time(30.0, "A lease of a partition expires when its holder sends nothing for this long.", 0.5)
    lease_ttl_max: float = _time(  # a worker that is killed blocks its partition for so long
        3600.0, "The longest lease that a client may ask for.", 0.5
    )
    wait_max: float = _time(300.0, "The longest that a request may wait for pods or for a lease.", 0)
    presence_devices: int = count(  # about 1 KB each
        500_000, "Syncing devices that presence stores; one more is refused.", 1, 100_000_000
    )
    stop_grace: float = _time(5.0, "On SIGTERM or SIGINT everything ends within this time.", 0.1, 600)

    def __post_init__(self) -> None:
        check_ranges(self, ("poll_min", "poll_max"), ("ping_interval", "peer_timeout"), ("lease_ttl", "lease_ttl_max"))
