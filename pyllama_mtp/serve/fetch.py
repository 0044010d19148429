"""Images that clients name by URLs: fetched from public addresses only, and within limits.

The name in a URL is resolved once. Its addresses are checked, and the connection goes to one of
them, so a name cannot lead elsewhere between check and connection (DNS rebinding). Each redirect is
checked in the same way. Proxies of the environment are not used: they would resolve names again.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import socket
from collections.abc import Sequence

import httpx

from pyllama_mtp.errors import UsageError

from .bodies import ImageUrl, Message

#: Limits of all images of a request together, and redirects of one.
MOST_BYTES, MOST_SECONDS, MOST_REDIRECTS = 32 << 20, 20.0, 3
#: Special networks, of IANA's registries for IPv4 and IPv6 (RFC 6890), that Python's tables lack.
SPECIAL = [
    *map(ipaddress.ip_network, ("192.0.0.0/24", "192.31.196.0/24", "192.52.193.0/24")),
    *map(ipaddress.ip_network, ("192.88.99.0/24", "192.175.48.0/24")),
    *map(ipaddress.ip_network, ("2001::/23", "2002::/16", "2620:4f:8000::/48", "3fff::/20")),
]
#: All of IPv6 that is given out.
UNICAST = ipaddress.ip_network("2000::/3")


async def fetch_images(messages: Sequence[Message]) -> None:
    """Put data URLs in the place of http(s) URLs of images. Raises UsageError: one that cannot be
    fetched, or must not be."""
    images = [image for message in messages for image in message.images]
    if named := [one for one in images if one.url.lower().startswith(("http:", "https:"))]:
        try:
            await asyncio.wait_for(_fetch_all(named), MOST_SECONDS)
        except asyncio.TimeoutError:
            raise UsageError(
                f"images cannot be fetched within {MOST_SECONDS:g} s; send them as data URLs"
            ) from None


async def _fetch_all(images: Sequence[ImageUrl]) -> None:
    room = MOST_BYTES
    async with httpx.AsyncClient(trust_env=False, timeout=None) as client:
        for image in images:
            try:
                data = await _fetch(client, httpx.URL(image.url), room)
            except (httpx.HTTPError, httpx.InvalidURL, UsageError, OSError, UnicodeError) as error:
                why = str(error) or type(error).__name__
                raise UsageError(
                    f"the image {image.url[:200]!r} cannot be fetched: {why}"
                ) from None
            room -= len(data)
            image.url = f"data:image/fetched;base64,{base64.b64encode(data).decode()}"


async def _fetch(client: httpx.AsyncClient, url: httpx.URL, room: int) -> bytes:
    for _ in range(1 + MOST_REDIRECTS):
        request = client.build_request(
            "GET",
            url.copy_with(host=await _public_address(url)),
            headers={"Host": url.netloc.decode(), "Accept-Encoding": "identity"},
            extensions={"sni_hostname": url.raw_host.decode()},
        )
        response = await client.send(request, stream=True)
        try:
            if response.has_redirect_location:
                url = url.join(response.headers["location"])
                continue
            if response.status_code != httpx.codes.OK:
                raise UsageError(f"the answer has the status {response.status_code}")
            data = bytearray()
            async for part in response.aiter_raw():
                data += part
                if len(data) > room:
                    raise UsageError(
                        f"the images of a request may have {MOST_BYTES >> 20} MiB together; use "
                        "smaller ones"
                    )
            return bytes(data)
        finally:
            await response.aclose()
    raise UsageError(f"more than {MOST_REDIRECTS} redirects")


async def _public_address(url: httpx.URL) -> str:
    """An address of a URL's host. Raises UsageError: one of them is not public, or it has none."""
    if url.scheme not in ("http", "https"):
        raise UsageError(f"only http and https are allowed, and not {url.scheme}")
    addresses = await resolve(url.raw_host.decode())
    if not addresses or not all(map(is_public, addresses)):
        raise UsageError(f"{url.host!r} is not at a public address")
    return addresses[0]


async def resolve(host: str) -> list[str]:
    """The addresses of a name."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def is_public(address: str) -> bool:
    """Whether an address is one of the public internet: not private, loopback, link-local, shared,
    reserved or multicast, nor an IPv6 address that stands for an IPv4 address."""
    ip = ipaddress.ip_address(address)
    if ip.version == UNICAST.version and ip not in UNICAST:
        return False
    special = ip.is_multicast or ip.is_reserved or any(ip in network for network in SPECIAL)
    return ip.is_global and not special
