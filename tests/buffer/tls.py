"""TLS for tests: an authority with a certificate for 127.0.0.1, and a front that ends TLS for a plain server."""

import contextlib
import select
import socket
import ssl
import subprocess
import threading


class Authority:
    """A certificate authority of its own.

    Attributes:
        ca: path of its certificate.
        certificate: path of one that it gave to a server on 127.0.0.1.
        key: path of the key of that.
    """

    def __init__(self, folder):
        folder.mkdir()
        self.ca, self.certificate, self.key = (folder / name for name in ("ca.pem", "server.pem", "server-key.pem"))
        ca_key, request, extensions = (folder / name for name in ("ca-key.pem", "server.csr", "extensions"))
        extensions.write_text("subjectAltName=IP:127.0.0.1\n")
        _openssl("req", "-x509", *_new_key(ca_key), "-subj", f"/CN={folder.name}", "-days", "2", "-out", self.ca)
        _openssl("req", *_new_key(self.key), "-subj", "/CN=127.0.0.1", "-out", request)
        by_ca = ("-CA", self.ca, "-CAkey", ca_key, "-CAcreateserial", "-days", "2", "-extfile", extensions)
        _openssl("x509", "-req", "-in", request, *by_ca, "-out", self.certificate)


class Front:
    """Ends TLS in front of the server on ``target`` of this machine; listens on ``port``."""

    def __init__(self, target, authority):
        self._target = ("127.0.0.1", target)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(authority.certificate, authority.key)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _accept(self):
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client):
        with (
            contextlib.suppress(OSError),
            client,
            self._context.wrap_socket(client, server_side=True) as outside,
            socket.create_connection(self._target) as inside,
        ):
            while True:
                for source in select.select([outside, inside], [], [])[0]:
                    data = source.recv(1 << 20)
                    while source is outside and outside.pending():  # what was read from the network with that
                        data += outside.recv(1 << 20)
                    if not data:
                        return
                    (inside if source is outside else outside).sendall(data)


def _new_key(path):
    return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", path)


def _openssl(*arguments):
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
