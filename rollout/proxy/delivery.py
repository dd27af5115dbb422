"""Delivered replies: find out which ones their clients have read.

When the kernel has taken a reply, the client may still have gone without reading it. Two things prove that it was read,
without the client's help:

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
from collections.abc import Iterator

from rollout.proxy.session import Session
from rollout.proxy.tree import Node

# States of a TCP connection (linux/tcp_states.h): that only the client has closed, in order; that has ended, where both
# have.
_CLOSE_WAIT, _CLOSE, _TIME_WAIT = 8, 7, 6
# The most sockets that are kept for a session: each takes a descriptor.
_KEPT = 8

_End = asyncio.Transport | socket.socket


class Deliveries:
    """Deliveries holds, by connection, the replies that are not yet known to have been read.

    A client may ask for its connection to be closed after the reply (``Connection: close``). It still reads then, so
    our socket is kept until that is known.
    """

    def __init__(self) -> None:
        self._sent: dict[_End, list[tuple[Session, Node]]] = {}

    def sent(self, transport: asyncio.Transport, session: Session, node: Node) -> None:
        """Note that the kernel has taken all of a reply."""
        self._sent.setdefault(transport, []).append((session, node))
        node.sent, node.pending = True, node.pending + 1

    def look(self, session: Session) -> None:
        """Mark the replies of a session that have been read by now as delivered."""
        for end in list(self._of(session)):
            # A connection that is closing may have told its error to the event loop, which hands it to `ended`.
            if isinstance(end, socket.socket) or not end.is_closing():
                read = _read(end)
                if read or (isinstance(end, socket.socket) and read is not None):
                    self._settle(end, read)

    def ended(self, transport: asyncio.Transport | None, error: BaseException | None) -> None:
        """Note that a connection has ended, with an ``error`` if not in order. Its socket is still open now."""
        if transport not in self._sent:
            return
        read = _read(transport) if error is None else False
        if read is not None:
            self._settle(transport, read)
            return
        kept = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        try:
            kept.shutdown(socket.SHUT_WR)
        except OSError:  # the client has gone meanwhile
            self._settle(transport, bool(_read(transport)))
            kept.close()
            return
        self._sent[kept] = self._sent.pop(transport)
        (session, _), *_ = self._sent[kept]
        closed = [end for end in self._of(session) if isinstance(end, socket.socket)]
        for end in closed[:-_KEPT]:
            self._settle(end, bool(_read(end)))

    def forget(self, session: Session) -> None:
        """Forget the replies of a session."""
        for end in list(self._of(session)):
            left = [one for one in self._sent.pop(end) if one[0] is not session]
            if left:
                self._sent[end] = left
            elif isinstance(end, socket.socket):
                end.close()

    def _of(self, session: Session) -> Iterator[_End]:
        return (end for end, sent in self._sent.items() if any(owner is session for owner, _ in sent))

    def _settle(self, end: _End, read: bool) -> None:
        for _, node in self._sent.pop(end):
            node.delivered = node.delivered or read
            node.pending -= 1
        if isinstance(end, socket.socket):
            end.close()


def _read(end: _End) -> bool | None:
    """Tell whether all that was written to a connection is known to have been read; None if it still may be."""
    own = end if isinstance(end, socket.socket) else end.get_extra_info("socket")
    number = own.fileno()
    if number < 0:
        return False
    unread = struct.unpack("i", fcntl.ioctl(number, termios.TIOCOUTQ, bytes(4)))[0]
    # An end that is closed with something unread first gives us an error, and then frees what was in it.
    poll = select.poll()
    poll.register(number, 0)
    if any(events & select.POLLERR for _, events in poll.poll(0)):
        return False
    with socket.socket(fileno=os.dup(number)) as other:
        if other.family != socket.AF_UNIX:
            state = other.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
            if state in (_CLOSE, _TIME_WAIT):
                return not unread
            return True if state == _CLOSE_WAIT and not unread else None
    return None if unread else True
