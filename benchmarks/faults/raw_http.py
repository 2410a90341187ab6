"""HTTP without a client library, which would never leave in the middle or send nonsense."""

import asyncio

_PATIENCE_S = 120.0


async def post(port: int, path: str, body: bytes, *, leaves_after: int | None = None) -> tuple[int, bytes]:
    """Status and body of a POST; status 0 if the connection broke before there was one.

    leaves_after: bytes of the answer after which the connection is reset.
    """
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    answer = await exchange(port, head.encode() + body, leaves_after=leaves_after)
    line, _, rest = answer.partition(b"\r\n")
    words = line.split()
    return (int(words[1]) if len(words) > 1 else 0), rest.partition(b"\r\n\r\n")[2]


async def exchange(
    port: int, data: bytes, *, leaves_after: int | None = None, patience_s: float = _PATIENCE_S
) -> bytes:
    """What a server says to some bytes, until it ends the connection, that breaks, or `patience_s` have passed."""
    answer = b""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return answer
    try:
        async with asyncio.timeout(patience_s):
            writer.write(data)
            while leaves_after is None or len(answer) < leaves_after:
                piece = await reader.read(4096)
                if not piece:
                    break
                answer += piece
    except (OSError, TimeoutError):
        return answer
    finally:
        writer.transport.abort()
    return answer
