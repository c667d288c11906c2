"""The main process of Synapse that also serves its TCP replication, on the port of the first argument.

Runs in the Python of Synapse 1.79. This release still has the classes of the TCP server, which its tests use, but no
setting for them any more. Nothing of Synapse is replaced.
"""

import sys
from typing import Any

from synapse.app import homeserver  # type: ignore[import-not-found]
from synapse.replication.tcp.resource import ReplicationStreamProtocolFactory  # type: ignore[import-not-found]

port = int(sys.argv.pop(1))
setup = homeserver.setup


def setup_with_listener(arguments: list[str]) -> Any:
    hs = setup(arguments)
    reactor = hs.get_reactor()
    reactor.callWhenRunning(
        lambda: reactor.listenTCP(port, ReplicationStreamProtocolFactory(hs), interface="127.0.0.1")
    )
    return hs


homeserver.setup = setup_with_listener
homeserver.main()
