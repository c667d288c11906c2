"""Options of the Spark source: an option that cannot be used is refused, with the names of those that can."""

from __future__ import annotations

import pytest

from replicad.errors import UsageError
from replicad.spark.options import OPTIONS, parse_options


def test_defaults_are_those_of_the_table() -> None:
    options = parse_options({"tube": "cities"}, streaming=True)
    assert (options.host, options.port, options.max_pods, options.max_backfill_pods) == (
        "127.0.0.1",
        9009,
        10_000,
        1000,
    )
    assert (options.poll_timeout, options.lease_ttl, options.fail_on_data_loss) == (1.0, 30.0, True)
    assert options.claim_wait > options.lease_ttl  # a dead predecessor is never in the way


def test_names_are_read_in_any_case_and_times_with_units() -> None:
    options = parse_options({"TUBE": "t", "maxpodspertrigger": "7", "POLLTIMEOUT": "250ms", "leaseWait": "2m"})
    assert (options.tube, options.max_pods, options.poll_timeout, options.claim_wait) == ("t", 7, 0.25, 120.0)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "give the option tube or stream. The options are host, port"),
        ({"tube": "t", "stream": "s"}, "tube and stream are both given"),
        ({"tube": "t", "maxPodsPerTriger": "5"}, "did you mean maxPodsPerTrigger.*The options are"),
        ({"tube": "t", "minPartitions": "5"}, "option 'minPartitions' is not known. The options are host, port"),
        ({"tube": "t", "port": "http"}, "option port: 'http' is not valid; give a whole number"),
        ({"tube": "t", "port": "70000"}, "from 1 to 65535"),
        ({"tube": "t", "pollTimeout": "1 day"}, "option pollTimeout: '1 day' is not valid"),
        ({"tube": "t", "pollTimeout": "1h"}, "from 0 to 300"),
        ({"tube": "t", "includePayload": "perhaps"}, "give true or false"),
        ({"tube": "t", "startingOffsets": "latest"}, "is for streams only"),
        ({"stream": "s", "startingOffsets": "yesterday"}, "earliest, latest or a token"),
        ({"tube": "t", "token": "a", "tokenFile": "b"}, "token and tokenFile are both given"),
        ({"tube": "t", "minPodsPerTrigger": "11", "maxPodsPerTrigger": "10"}, "is above maxPodsPerTrigger=10"),
        ({"tube": "t", "maxTriggerDelay": "1m"}, "needs minPodsPerTrigger"),
        ({"stream": "s", "maxPodsPerTrigger": "10"}, "cannot be used with .* stream; there are host"),
        ({"tube": "t", "encoding": "json"}, "option encoding: 'json' is not valid; give auto, lines or arrow"),
        ({"stream": "s", "encoding": "arrow"}, "option encoding cannot be used with .* stream"),
        ({"tube": "a tube"}, "option tube: 'a tube' is not valid"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_remedy(given: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_options(given, streaming=True)


def test_limits_of_triggers_do_not_go_with_a_batch_read() -> None:
    parse_options({"tube": "t", "maxPodsPerTrigger": "10"}, streaming=None)
    with pytest.raises(UsageError, match="option maxPodsPerTrigger cannot be used with a batch read of a tube"):
        parse_options({"tube": "t", "maxPodsPerTrigger": "10"}, streaming=False)


def test_the_token_stays_out_of_messages_and_repr() -> None:
    with pytest.raises(UsageError) as caught:
        parse_options({"tube": "t", "token": "top secret"})
    assert "secret" not in str(caught.value).replace("the value", "")
    assert "hush" not in repr(parse_options({"tube": "t", "token": "hush"}))


def test_every_option_is_documented() -> None:
    assert len({option.name for option in OPTIONS}) == len(OPTIONS)
    assert all(option.help for option in OPTIONS)
