"""HTTP for the rest of the program: a client that trio code awaits, a server that runs in a trio nursery.

Both live on p2p.bridge's asyncio thread. What other packages use is named here; the parts are `client`, `server`,
`answers` (bodies and errors), `files` (sending them) and `listen` (ports).
"""

from p2p.http.answers import (
    MAX_BODY_BYTES,
    MSGPACK,
    PROGRESS_TIMEOUT_S,
    body_chunks,
    error_response,
    msgpack_response,
    read_body,
)
from p2p.http.client import HttpClient, HttpResponse
from p2p.http.files import OCTETS, PIECE_BYTES, FileRange, send_ranges
from p2p.http.listen import listening_socket
from p2p.http.server import BoundAddress, HttpServer
from p2p.http.stream import Sink

__all__ = [
    "MAX_BODY_BYTES",
    "MSGPACK",
    "OCTETS",
    "PIECE_BYTES",
    "PROGRESS_TIMEOUT_S",
    "BoundAddress",
    "FileRange",
    "HttpClient",
    "HttpResponse",
    "HttpServer",
    "Sink",
    "body_chunks",
    "error_response",
    "listening_socket",
    "msgpack_response",
    "read_body",
    "send_ranges",
]
