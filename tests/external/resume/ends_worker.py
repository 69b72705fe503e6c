"""A worker that ends its streams badly, in every API's words. The prompt says how: `end:NAME`. See ends.py."""

import asyncio
import json
import re
import socket
import struct
import threading

BIG_EVENT_BYTES = 17 << 20  # over the gateway's bound of 16 MiB
ENGINE_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


def event(data, name=None):
    data = data if isinstance(data, str) else json.dumps(data)
    return (f"event: {name}\n" if name else "") + f"data: {data}\n\n"


def typed(kind, **fields):
    return event({"type": kind, **fields}, kind)


class Chat:
    """/v1/chat/completions; Completions differs by the shape of a choice alone."""

    def chunk(self, text, finish=None):
        delta = {"content": text} if text else {}
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return event({"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]})

    def content(self):
        return [self.chunk("Hello"), self.chunk(" you")]

    def finish(self, reason="stop"):
        return [self.chunk("", reason), event("[DONE]")]

    def aborted(self):
        return self.finish("abort")

    def own_error(self):
        error = {"message": "out of blocks", "type": "InternalServerError", "param": None, "code": 500}
        return [event({"error": error}), event("[DONE]")]

    def engine_dead(self):
        error = {"message": ENGINE_DEAD, "type": "InternalServerError", "param": None, "code": 500}
        return [event({"error": error}), event("[DONE]")]

    def half(self):
        return self.chunk(" and more")[:-20]

    def big(self):
        return self.chunk("a" * BIG_EVENT_BYTES)

    whole = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "Hello you"}, "finish_reason": "stop"}]}


class Completions(Chat):
    def chunk(self, text, finish=None):
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
        return event({"id": "c", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]})


class Responses:
    def __init__(self):
        self.base = {"id": "resp_1", "object": "response", "created_at": 1, "model": "m", "parallel_tool_calls": True,
                     "tool_choice": "auto", "tools": [], "error": None, "incomplete_details": None,
                     "instructions": None, "metadata": {}, "temperature": 1, "top_p": 1}

    def response(self, status, **fields):
        return {**self.base, "status": status, "output": [], **fields}

    def delta(self, text, number):
        return typed("response.output_text.delta", sequence_number=number, item_id="i", output_index=0, content_index=0,
                     delta=text, logprobs=[])

    def content(self):
        item = {"id": "i", "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        part = {"type": "output_text", "text": "", "annotations": []}
        place = {"item_id": "i", "output_index": 0, "content_index": 0}
        return [typed("response.created", sequence_number=0, response=self.response("in_progress")),
                typed("response.in_progress", sequence_number=1, response=self.response("in_progress")),
                typed("response.output_item.added", sequence_number=2, output_index=0, item=item),
                typed("response.content_part.added", sequence_number=3, part=part, **place),
                self.delta("Hello", 4), self.delta(" you", 5)]

    def finish(self):
        text = {"type": "output_text", "text": "Hello you", "annotations": []}
        item = {"id": "i", "type": "message", "status": "completed", "role": "assistant", "content": [text]}
        usage = {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5, "input_tokens_details": {"cached_tokens": 0},
                 "output_tokens_details": {"reasoning_tokens": 0}}
        place = {"item_id": "i", "output_index": 0, "content_index": 0}
        done = self.response("completed", output=[item], usage=usage)
        return [typed("response.output_text.done", sequence_number=6, text="Hello you", logprobs=[], **place),
                typed("response.content_part.done", sequence_number=7, part=text, **place),
                typed("response.output_item.done", sequence_number=8, output_index=0, item=item),
                typed("response.completed", sequence_number=9, response=done)]

    def aborted(self):
        return None  # this API has no finish reason

    def own_error(self):
        error = {"code": "server_error", "message": "out of blocks"}
        return [typed("response.failed", sequence_number=6, response=self.response("failed", error=error))]

    def engine_dead(self):
        return [typed("error", code="500", message=ENGINE_DEAD, param=None, sequence_number=6)]

    def half(self):
        return self.delta(" and more", 6)[:-20]

    def big(self):
        return self.delta("a" * BIG_EVENT_BYTES, 6)

    whole = {"id": "resp_1", "object": "response", "created_at": 1, "status": "completed", "model": "m", "output": []}


class Messages:
    def content(self):
        message = {"id": "msg_1", "type": "message", "role": "assistant", "content": [], "model": "m",
                   "stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": 5, "output_tokens": 1}}
        return [typed("message_start", message=message),
                typed("content_block_start", index=0, content_block={"type": "text", "text": ""}),
                self.delta("Hello"), self.delta(" you")]

    def delta(self, text):
        return typed("content_block_delta", index=0, delta={"type": "text_delta", "text": text})

    def finish(self):
        delta = {"stop_reason": "end_turn", "stop_sequence": None}
        return [typed("content_block_stop", index=0), typed("message_delta", delta=delta, usage={"output_tokens": 2}),
                typed("message_stop")]

    def aborted(self):
        return None

    def own_error(self):
        return [typed("error", error={"type": "overloaded_error", "message": "Overloaded"})]

    def engine_dead(self):
        return [typed("error", error={"type": "api_error", "message": ENGINE_DEAD})]

    def half(self):
        return self.delta(" and more")[:-20]

    def big(self):
        return self.delta("a" * BIG_EVENT_BYTES)

    whole = {"id": "msg_1", "type": "message", "role": "assistant", "content": [{"type": "text", "text": "Hello you"}],
             "model": "m", "stop_reason": "end_turn", "stop_sequence": None,
             "usage": {"input_tokens": 5, "output_tokens": 2}}


APIS = {"/v1/chat/completions": Chat(), "/v1/completions": Completions(), "/v1/responses": Responses(),
        "/v1/messages": Messages()}

# What a worker does after its content, and whether a client must see an error. The body is chunked but for one.
ENDS = {
    "cut inside an event": True,
    "clean end inside an event": True,
    "body until close ends early": True,
    "whole events, then nothing": True,
    "last event, then cut": False,
    "finish reason abort": True,
    "engine dead, in band": True,
    "error in the API's words": True,
    "an event over the bound": True,
    "silence at a dead worker": True,
}


class Worker:
    """One worker on a loopback port, in a thread of its own."""

    def __init__(self):
        self.loop, self.server, self.port = asyncio.new_event_loop(), None, 0
        self.served, self.quiet, self.writers = 0, [], set()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.call(self.listen())

    def call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    async def listen(self):
        if self.server is None:
            self.server = await asyncio.start_server(self.serve, "127.0.0.1", self.port, limit=1 << 22)
            self.port = self.server.sockets[0].getsockname()[1]

    def revive(self):
        """Ends what was silent, and listens again."""

        async def revive():
            for writer in self.quiet:
                writer.close()
            self.quiet.clear()
            await self.listen()

        self.call(revive())

    async def die(self, writer):
        """Takes no connection and answers on none that is open; `writer` stays open and says nothing more."""
        self.server.close()
        self.server = None
        self.quiet.append(writer)
        for other in self.writers - {writer}:
            other.close()

    async def serve(self, reader, writer):
        self.writers.add(writer)
        try:
            while await self.answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.writers.discard(writer)
            if writer not in self.quiet:
                writer.close()

    async def answer(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin1")
        path = head.split(" ", 2)[1].split("?")[0]
        length = re.search(r"content-length: *(\d+)", head, re.IGNORECASE)
        body = (await reader.readexactly(int(length[1]))).decode() if length else ""
        if path not in APIS:
            models = [{"id": name, "object": "model"} for name in ("m", "streamed")]
            known = {"object": "list", "data": models} if path == "/v1/models" else None
            await say(writer, 200 if known or path == "/health" else 404, known or {})
            return True
        api, end = APIS[path], re.search(r"end:([\w ,']+)", body)
        if not end:
            await say(writer, 200, api.whole)
            return True
        self.served += 1
        return await self.stream(api, end[1], writer)

    async def stream(self, api, end, writer):
        until_close = end == "body until close ends early"
        framing = "connection: close" if until_close else "transfer-encoding: chunked"
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n{framing}\r\n\r\n".encode())

        async def send(text):
            data = text.encode()
            writer.write(data if until_close else b"%x\r\n" % len(data) + data + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0.005)

        for one in api.content():
            await send(one)
        last = {"last event, then cut": api.finish, "whole": api.finish, "finish reason abort": api.aborted,
                "engine dead, in band": api.engine_dead, "error in the API's words": api.own_error}.get(end, list)
        for one in last():
            await send(one)
        if end in ("cut inside an event", "clean end inside an event"):
            await send(api.half())
        if end == "an event over the bound":
            await send(api.big())
            for one in api.finish():
                await send(one)
        if end == "silence at a dead worker":
            await self.die(writer)
            return False
        if end in ("cut inside an event", "last event, then cut"):
            await asyncio.sleep(0.05)
            reset(writer)
            return False
        if until_close:
            return False
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


async def say(writer, status, body):
    data = json.dumps(body).encode()
    writer.write(f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()


def reset(writer):
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
