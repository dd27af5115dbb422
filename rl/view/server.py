"""The HTTP server of the pages: read-only but for labels, on the loopback interface unless told otherwise.

Episodes are hostile text. Every answer has a content-security policy that allows nothing but this server's own files,
no inline script or style among them. On loopback a request must name this machine, so that no other site's page can
reach the server through a name that it has pointed here; elsewhere a token is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import ipaddress
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from rl.view import pages
from rl.view.library import Library, NotFound

STATIC = Path(__file__).with_name("static")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_COOKIE = "view"
_PAUSE_S = 1.0  # between two looks at the records


def is_loopback(host: str) -> bool:
    """Tell whether an address or name is this machine's own."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


def application(library: Library, token: str = "") -> web.Application:
    """Return the web application. token: what a request must show; empty for a server on loopback."""
    app = web.Application(middlewares=[_guard(token)], client_max_size=1 << 16)
    for path in pages.PAGES:
        app.router.add_get(path, functools.partial(_answer, library))
    for path, page in pages.WRITES.items() if library.who else ():
        app.router.add_post(path, functools.partial(_write, library, page))
    app.router.add_static("/static", STATIC)
    app.on_response_prepare.append(_add_headers)

    async def reading(app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(_follow(library))
        yield
        library.stop()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await asyncio.to_thread(library.close)

    app.cleanup_ctx.append(reading)
    return app


async def _follow(library: Library) -> None:
    """Take in what the runs write, for ever."""
    while True:
        with contextlib.suppress(OSError):  # of a network disk: the next look may succeed
            await asyncio.to_thread(library.refresh)
        await asyncio.sleep(_PAUSE_S)


async def _answer(library: Library, request: web.Request) -> web.Response:
    made = await asyncio.to_thread(pages.answer, library, request.path, dict(request.query))
    if made.to:
        raise web.HTTPFound(made.to)
    body = made.body.encode("utf-8", "replace")
    response = web.Response(
        body=body, status=made.status, content_type=made.type, charset="utf-8", headers=made.headers
    )
    if len(body) > 1 << 14:
        response.enable_compression()
    return response


async def _write(library: Library, page: pages.Handler, request: web.Request) -> web.Response:
    # A page of another site cannot set this header without asking, and is not allowed to.
    if request.headers.get("X-View") != "1":
        return web.Response(status=403, text="view: not from a page of this view\n")
    given = {str(key): str(value) for key, value in (await request.post()).items()}
    try:
        made = await asyncio.to_thread(page, library, given)
    except (NotFound, pages.BadLink) as error:
        return web.Response(status=400, text=f"{error}\n")
    return web.Response(body=made.body.encode("utf-8", "replace"), content_type=made.type)


def _guard(token: str) -> Middleware:
    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if token:
            given = request.query.get("token", "")
            if given and hmac.compare_digest(given.encode(), token.encode()):
                place = str(request.rel_url.without_query_params("token"))
                response = web.Response(status=302, headers={"Location": place})
                response.set_cookie(_COOKIE, token, httponly=True, samesite="Strict", path="/")
                return response
            if not hmac.compare_digest(request.cookies.get(_COOKIE, "").encode(), token.encode()):
                return web.Response(status=403, text="view: open the address with its token\n")
        elif not is_loopback(request.host.rpartition(":")[0] or request.host):
            return web.Response(status=403, text="view: open it as localhost\n")
        return await handler(request)

    return guard


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)
