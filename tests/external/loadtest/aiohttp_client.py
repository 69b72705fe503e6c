"""A client as Python load testers are built: one event loop, aiohttp, a semaphore, JSON parsed from each event, times taken
with perf_counter. Prints how many requests and events it saw. Usage: see --help."""

import argparse
import asyncio
import json
import time

import aiohttp


async def one(session: aiohttp.ClientSession, url: str, body: bytes, places: asyncio.Semaphore) -> tuple[float, int]:
    async with places:
        start, first, events, rest = time.perf_counter(), 0.0, 0, b""
        async with session.post(url, data=body, headers={"content-type": "application/json"}) as response:
            response.raise_for_status()
            async for chunk in response.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n\n")
                for line in lines:
                    data = line.removeprefix(b"data: ")
                    if data == b"[DONE]":
                        continue
                    event = json.loads(data)
                    if event["choices"] and event["choices"][0]["delta"].get("content"):
                        first = first or time.perf_counter()
                        events += 1
        return first - start, events


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--concurrency", type=int, required=True)
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--body", required=True)
    args = parser.parse_args()
    places = asyncio.Semaphore(args.concurrency)
    connector = aiohttp.TCPConnector(limit=args.concurrency)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as session:
        start = time.perf_counter()
        jobs = (one(session, args.url, args.body.encode(), places) for _ in range(args.requests))
        seen = await asyncio.gather(*jobs)
        took = time.perf_counter() - start
    events = sum(count for _, count in seen)
    print(f"{len(seen)} requests and {events} events with text in {took:.1f} s")


asyncio.run(main())
