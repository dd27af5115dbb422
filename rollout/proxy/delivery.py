"""Delivered replies: find out which ones their clients have read.

When the kernel has taken a reply, the client may still have gone without reading it. Two things prove that it was read,
without the client's help, unless what reads only hands it on (``Session.relayed``):

* On a unix socket the kernel knows how much of what was written the other process has not taken out. If that is
  nothing, and the other end was not closed with something unread in it, then all of it was read.
* A TCP client that has read everything closes its end in order; for one that has not, its kernel sends a reset. (A
  client's next request would prove as much, if no client sent requests ahead.)
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import select
import socket
import struct
import termios

from rollout.proxy.session import Session
from rollout.proxy.tree import Node

# The state of a TCP connection that only the client has closed, in order (linux/tcp_states.h).
_CLOSE_WAIT = 8


class Deliveries:
    """Deliveries holds, by connection, the replies that are not yet known to have been read."""

    def __init__(self) -> None:
        self._sent: dict[asyncio.Transport, list[tuple[Session, Node]]] = {}

    def sent(self, transport: asyncio.Transport, session: Session, node: Node) -> None:
        """Note that the kernel has taken all of a reply."""
        self._sent.setdefault(transport, []).append((session, node))
        node.sent, node.pending = True, node.pending + 1

    def look(self, session: Session) -> None:
        """Mark the replies of a session that have been read by now as delivered."""
        for transport, sent in list(self._sent.items()):
            # A connection that is closing may have told its error to the event loop, which hands it to `ended`.
            ours = not session.relayed and any(owner is session for owner, _ in sent)
            if ours and not transport.is_closing() and _read(transport):
                self._settle(transport, read=True)

    def ended(self, transport: asyncio.Transport | None, error: BaseException | None) -> None:
        """Note that a connection has ended, with an ``error`` if not in order. Its socket is still open now."""
        if transport in self._sent:
            self._settle(transport, error is None and _read(transport))

    def forget(self, session: Session) -> None:
        """Forget the replies of a session."""
        left = {transport: [one for one in sent if one[0] is not session] for transport, sent in self._sent.items()}
        self._sent = {transport: sent for transport, sent in left.items() if sent}

    def _settle(self, transport: asyncio.Transport, read: bool) -> None:
        for session, node in self._sent.pop(transport):
            node.delivered = node.delivered or (read and not session.relayed)
            node.pending -= 1


def _read(transport: asyncio.Transport) -> bool:
    """Tell whether all that was written to a connection is known to have been read."""
    number = transport.get_extra_info("socket").fileno()
    if number < 0 or struct.unpack("i", fcntl.ioctl(number, termios.TIOCOUTQ, bytes(4)))[0]:
        return False
    with socket.socket(fileno=os.dup(number)) as end:
        if end.family != socket.AF_UNIX:
            return end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CLOSE_WAIT
    # An end that is closed with something unread first gives us an error, and then frees what was in it.
    poll = select.poll()
    poll.register(number, 0)
    return not any(events & select.POLLERR for _, events in poll.poll(0))
