"""`async for` over generations: the same pieces, an event loop that goes on, a session that is free
when the consumer has left."""

from __future__ import annotations

import asyncio

from pyllama_mtp import Model, Session

from .support import settings

N = 40


def test_pieces_come_while_the_loop_goes_on(demo: Model, text: list[int]) -> None:
    async def both() -> tuple[list[str], int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        other = asyncio.create_task(tick())
        pieces = [piece async for piece in session.generate(text[:20], max_tokens=N)]
        other.cancel()
        return pieces, ticks

    with Session(demo, settings(3)) as session:
        wanted = list(session.generate(text[:20], max_tokens=N))
        found, ticks = asyncio.run(both())
    assert found == wanted and ticks > len(found)


def test_a_consumer_that_leaves(demo: Model, text: list[int]) -> None:
    async def leave() -> str | None:
        generation = session.generate(text[:20], max_tokens=N)

        async def consume() -> None:
            async for _ in generation:
                await asyncio.sleep(60)

        task = asyncio.create_task(consume())
        while not generation.text:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for _ in range(6000):
            if generation.finish_reason:
                break
            await asyncio.sleep(0.01)
        return generation.finish_reason

    with Session(demo, settings(3)) as session:
        wanted = session.generate(text[:20], max_tokens=N).run().tokens
        assert asyncio.run(leave()) == "interrupted"
        assert session.generate(text[:20], max_tokens=N).run().tokens == wanted
