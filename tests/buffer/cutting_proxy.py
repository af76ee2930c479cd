"""A TCP proxy that cuts a connection at the worst moments."""

import contextlib
import select
import socket
import threading


class Proxy:
    """Forwards to ``port`` on this machine; ``cut`` makes the next script call lose its connection."""

    def __init__(self, port):
        self._target = ("127.0.0.1", port)
        self._moment = None
        self.cuts = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, moment):
        """Lose the next script call ``before`` the server sees it, or its reply ``after`` it was executed."""
        self._moment = moment

    def close(self):
        self._listener.close()

    def _accept(self):
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client):
        """Forward both ways, in whatever pieces the data come, until one side or the cut ends it."""
        losing_reply = False
        with client, socket.create_connection(self._target) as server, contextlib.suppress(OSError):
            other = {client: server, server: client}
            while True:
                for source in select.select(list(other), [], [])[0]:
                    data = source.recv(1 << 20)
                    if source is client and b"EVALSHA" in data:
                        moment, self._moment = self._moment, None
                        losing_reply = moment == "after"
                        if moment == "before":
                            self.cuts += 1
                            return
                    elif source is server and losing_reply:
                        self.cuts += 1
                        return
                    if not data:
                        return
                    other[source].sendall(data)
