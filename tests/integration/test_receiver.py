"""The receiver that tests of the sender deliver to: it counts requests at the same time as the sender sees them."""

from __future__ import annotations

import trio

from ..federation_receiver import Receiver, Reply
from .conftest import PATIENCE

BODY = b'{"facts":[],"updates":[]}'
REQUEST = b"POST /a/ HTTP/1.1\r\nhost: x\r\nreplicad-transaction: %d\r\ncontent-length: %d\r\n\r\n%s"


async def post(receiver: Receiver, number: int) -> trio.SocketStream:
    """Send a request and wait until it has arrived."""
    stream = await trio.open_tcp_stream("127.0.0.1", receiver.port)
    before = len(receiver.requests)
    await stream.send_all(REQUEST % (number, len(BODY), BODY))
    await receiver.expect(lambda: len(receiver.requests) > before, PATIENCE)
    return stream


async def test_a_request_that_was_given_up_is_no_longer_in_flight_though_its_answer_is_still_to_come() -> None:
    async with Receiver(lambda _: Reply(delay=3600)).listening() as receiver:
        for number in range(3):
            await (await post(receiver, number)).aclose()
        assert receiver.most_in_flight == 1
        kept = [await post(receiver, number) for number in range(3, 6)]
        assert receiver.most_in_flight == len(kept)
