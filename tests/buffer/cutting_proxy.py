"""A TCP proxy in front of a server that notes what is asked, and cuts or delays connections at the worst moments."""

import contextlib
import re
import select
import socket
import threading
import time

_COMMAND = re.compile(rb"\*\d+\r\n\$\d+\r\n([A-Za-z]+)\r\n")
_GREETINGS = {"HELLO", "AUTH", "CLIENT", "SELECT"}


class Proxy:
    """Forwards to ``port`` on this machine.

    A request is one command, or the commands of one pipeline. What a client says to open a connection is none.

    Attributes:
        port: where it listens.
        requests: names of the commands of each request that came, whether it was cut or not.
        cuts: how many were cut.
        delay: seconds that every request is held back before the server sees it.
        down: whether it behaves like a server that is not there.
    """

    def __init__(self, port):
        self._target = ("127.0.0.1", port)
        self._countdown, self._moment = 0, None
        self._go, self._gone = threading.Event(), threading.Event()
        self.requests = []
        self.cuts = 0
        self.delay = 0.0
        self.down = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, moment, skip=0):
        """Cut the connection of the next request, or, with ``skip``, of one after so many others.

        Args:
            moment: ``before`` the server sees the request, ``after`` it was executed, or before, while the request is
                passed on ``late``: with ``pass_on``.
        """
        self._countdown, self._moment = skip, moment

    def pass_on(self):
        """Pass on the request that is late; return when the server has replied to it, or lets it wait."""
        self._go.set()
        assert self._gone.wait(10)

    def close(self):
        self._go.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _accept(self):
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client):
        """Forward both ways, in whatever pieces the data come, until one side or the cut ends it."""
        losing_reply = False
        with contextlib.suppress(OSError), client, socket.create_connection(self._target) as server:
            other = {client: server, server: client}
            for each in other:
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                for source in select.select(list(other), [], [])[0]:
                    data = source.recv(1 << 20)
                    moment = self._noted(data) if source is client else None
                    losing_reply = losing_reply or moment == "after"
                    if moment in ("before", "late") or (source is server and losing_reply):
                        self.cuts += 1
                        client.close()
                        if moment == "late":
                            self._send_late(server, data)
                        return
                    if self.down or not data:
                        return
                    if source is client:
                        time.sleep(self.delay)
                    other[source].sendall(data)

    def _send_late(self, server, data):
        self._go.wait()
        server.sendall(data)
        select.select([server], [], [], 0.3)
        self._gone.set()

    def _noted(self, data):
        """Note what a client asks; return what is to be done about it, if anything."""
        commands = tuple(name.decode().upper() for name in _COMMAND.findall(data))
        if not commands or commands[0] in _GREETINGS:
            return None
        self.requests.append(commands)
        if self._moment is None:
            return None
        self._countdown -= 1
        if self._countdown >= 0:
            return None
        moment, self._moment = self._moment, None
        return moment


def through(proxy, url):
    """Return ``url``, which names the server behind ``proxy``, with the port of the proxy instead."""
    return re.sub(r"(@127\.0\.0\.1):\d+", rf"\1:{proxy.port}", url)
