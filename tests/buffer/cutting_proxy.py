"""A TCP proxy that cuts a connection at the worst moments."""

import contextlib
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
        """Forward one request, then its reply, and so on: the clients never send a request before they have that."""
        with client, socket.create_connection(self._target) as server, contextlib.suppress(OSError):
            while request := client.recv(1 << 20):
                moment = None
                if b"EVALSHA" in request:
                    moment, self._moment = self._moment, None
                if moment == "before":
                    self.cuts += 1
                    return
                server.sendall(request)
                reply = server.recv(1 << 20)
                if moment == "after":
                    self.cuts += 1
                    return
                client.sendall(reply)
