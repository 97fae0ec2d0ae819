"""Pages of the web: read as text, from public addresses only."""

from __future__ import annotations

from ipaddress import IPv4Address

import pytest
from aiohttp import web

from gangline.agents.tools.contract import ToolFailed
from support.node.loopback import serving
from support.requirements import need_module

PAGE = """<html><head><title>A page</title><style>b{}</style></head><body><nav>menu</nav><h1>Head</h1>
<p>One <b>bold</b>
 word.</p><script>alert(1)</script><ul><li>first<li>second</ul><p>f&uuml;r</body></html>"""


async def _site(request: web.Request) -> web.Response:
    match request.path:
        case "/page":
            return web.Response(body=PAGE.encode("latin-1"), headers={"Content-Type": "text/html; charset=latin-1"})
        case "/there":
            raise web.HTTPFound("/page")
        case "/private":
            raise web.HTTPFound(request.query["to"])
        case "/round":
            raise web.HTTPFound("/round")
        case "/file":
            raise web.HTTPFound("file:///etc/passwd")
        case "/image":
            return web.Response(body=b"\x89PNG", content_type="image/png")
        case "/huge":
            return web.Response(text="x" * (5 << 20))
        case _:
            return web.Response(status=404)


async def test_pages_are_read_as_text_and_redirects_are_judged_anew() -> None:
    need_module("selectolax", "pip install 'gangline[search]'")
    from gangline.agents.tools.search.pages import PageReader

    reader = PageReader(may_dial=lambda address: address == IPv4Address("127.0.0.1"), ports=None)
    async with serving(_site) as url, serving(_site, "127.0.0.2") as private:
        page = await reader.read(f"{url}/there")
        assert (page.title, page.address) == ("A page", f"{url}/page")
        assert page.text == "Head\nOne bold word.\nfirst\nsecond\nfür"
        assert len((await reader.read(f"{url}/huge")).text) == 4 << 20
        for path, why in (
            (f"/private?to={private}/page", "not on the public internet"),
            ("/round", "redirects more than 5 times"),
            ("/file", "must begin with http"),
            ("/image", "image/png, not text"),
            ("/none", "status 404"),
        ):
            with pytest.raises(ToolFailed, match=why):
                await reader.read(url + path)
    await reader.close()


@pytest.mark.parametrize(
    "address",
    [
        *(
            "http://127.0.0.1/",
            "http://localhost/",
            "http://[::1]/",
            "http://[::ffff:127.0.0.1]/",
            "http://2130706433/",
        ),
        *("http://127.1/", "http://0x7f000001/", "http://0/", "http://169.254.169.254/latest", "http://10.0.0.1/"),
        *("http://127.0.0.1:8080/", "http://example.com:22/", "ftp://example.com/", "file:///etc/passwd", "x", ""),
        *("http://", "http://[", "http://user:word@127.0.0.1/", "http://\ud800/", "gopher://a"),
    ],
)
async def test_nothing_but_the_public_web_is_read(address: str) -> None:
    need_module("selectolax", "pip install 'gangline[search]'")
    from gangline.agents.tools.search.pages import PageReader

    reader = PageReader(timeout_s=5)
    with pytest.raises(ToolFailed, match=r"public internet|is not an address|its own port|cannot be read"):
        await reader.read(address)
    await reader.close()


async def test_a_page_of_any_depth_becomes_text() -> None:
    need_module("selectolax", "pip install 'gangline[search]'")
    from gangline.agents.tools.search.pages import text_of_html

    assert text_of_html("<div>" * 5000 + "deep")[1] == "deep"
    assert text_of_html("") == ("", "")
