"""Who may ask a page on loopback, and what the browser may do with the answer.

Any web page can have a browser on this computer ask 127.0.0.1. Three things tell its requests from the node's own page:
the Host header (a name that was rebound by DNS is not a loopback name), the Origin header, and the fetch metadata that
browsers add (W3C Fetch Metadata). Programs such as curl send neither of the last two. Other users of this computer are
not kept out: loopback is theirs too.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final
from urllib.parse import urlsplit

import msgspec
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from node.logs import printable
from node.status import is_loopback

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_HINTS: Final = defaultdict(
    str,
    {
        403: "open http://127.0.0.1:<port>/ in a tab of its own; from elsewhere, through a tunnel (docs/dashboard.md)",
        404: "the page is at /; /status, /metrics and /health are beside it",
        405: "only GET is answered: a node is told what to do by its command line",
    },
)
_OWN_SITES: Final = ("same-origin", "none")
"""Values of Sec-Fetch-Site: from the page itself, or from the address bar."""


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse what another site's page asks, and whatever would change something; seal the answers."""
    try:
        _require_own(request)
        response = await reading_only(request, handler)
    except web.HTTPException as error:
        response = refusal(request, error)
    if not response.prepared:
        response.headers.update(HEADERS)
    return response


async def reading_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer what asks and changes nothing. Raises HTTPMethodNotAllowed for the rest."""
    if request.method not in ("GET", "HEAD"):
        raise web.HTTPMethodNotAllowed(request.method, ["GET", "HEAD"])
    return await handler(request)


def refusal(request: web.Request, error: web.HTTPException) -> web.Response:
    """Why not, in the JSON of every other answer: `{"error", "hint"}`."""
    said = {"error": f"{request.method} {printable(request.path[:200])}: {error.reason}", "hint": _HINTS[error.status]}
    allowed = {name: error.headers[name] for name in (hdrs.ALLOW,) if name in error.headers}
    return web.Response(
        body=msgspec.json.encode(said), status=error.status, content_type="application/json", headers=allowed
    )


def _require_own(request: web.Request) -> None:
    host = request.headers.get(hdrs.HOST, "")
    if not is_loopback(host):
        raise web.HTTPForbidden(reason="the status is for this computer alone: ask 127.0.0.1 or localhost")
    origin = request.headers.get(hdrs.ORIGIN)
    if origin is not None and (urlsplit(origin).scheme, urlsplit(origin).netloc.lower()) != ("http", host.lower()):
        raise web.HTTPForbidden(reason="another site's page asks; only the node's own page may")
    site = request.headers.get("Sec-Fetch-Site", "none")
    if site not in _OWN_SITES and not _is_link(request):
        raise web.HTTPForbidden(reason="another site's page asks; only the node's own page may")


def _is_link(request: web.Request) -> bool:
    """A person follows a link to the page itself, say from the documentation; it shows in a window of its own."""
    mode, target = request.headers.get("Sec-Fetch-Mode"), request.headers.get("Sec-Fetch-Dest")
    return request.path == "/" and mode == "navigate" and target == "document"
