// The driver's calls for streams, events, captures and graphs.
#pragma once

#include "kernels_of.h"

namespace driver {

API cuStreamCreate(Stream** stream, unsigned) {
    CALL;
    CHECK(call.check());
    *stream = new Stream;
    (*stream)->context = current;
    state.streams.insert(*stream);
    return SUCCESS;
}

API cuStreamDestroy_v2(Stream* stream) {
    CALL;
    CHECK(call.check());
    if (state.streams.count(stream)) run_until(*stream, stream->begun);
    return forget(call, state.streams, stream);
}

API cuStreamSynchronize(Stream* stream) {
    CALL;
    CHECK(call.check());
    CHECK(check_wait(call, stream));
    run_until(*stream, stream->begun);
    return stream->context->broken;
}

API cuEventCreate(Event** event, unsigned flags) {
    CALL;
    CHECK(call.check());
    *event = new Event;
    (*event)->context = current, (*event)->is_timed = (flags & 2) == 0;
    state.events.insert(*event);
    return SUCCESS;
}

API cuEventDestroy_v2(Event* event) {
    CALL;
    return forget(call, state.events, event);
}

API cuEventRecord(Event* event, Stream* stream) {
    CALL;
    CHECK(call.check());
    if (!state.events.count(event)) return call.refuse(INVALID_HANDLE, "no such event");
    if (!state.streams.count(stream)) return call.refuse(INVALID_HANDLE, "no such stream");
    if (event->context != stream->context) return call.refuse(INVALID_HANDLE, "an event of another context");
    event->is_captured = stream->capture != nullptr;
    if (event->is_captured) return SUCCESS;
    event->stream = stream, event->behind = stream->begun;
    auto stamp = [=] {
        if (state.events.count(event)) event->at = std::chrono::steady_clock::now();
        return SUCCESS;
    };
    CHECK(put(call, stream, Work{stamp}));
    event->behind = stream->begun;
    return SUCCESS;
}

API cuEventSynchronize(Event* event) {
    CALL;
    CHECK(call.check());
    if (!state.events.count(event)) return call.refuse(INVALID_HANDLE, "no such event");
    if (event->is_captured) return call.refuse(CAPTURED_EVENT, "an event of a capture");
    if (state.streams.count(event->stream)) run_until(*event->stream, event->behind);
    return event->context->broken;
}

API cuEventQuery(Event* event) {
    CALL;
    CHECK(call.check());
    if (!state.events.count(event)) return call.refuse(INVALID_HANDLE, "no such event");
    bool is_open = state.streams.count(event->stream) && event->stream->done < event->behind;
    // It is asked again: the work goes on meanwhile.
    if (is_open) run_until(*event->stream, event->stream->done + 1);
    return is_open ? NOT_READY : event->context->broken;
}

API cuEventElapsedTime_v2(float* milliseconds, const Event* from, const Event* to) {
    CALL;
    CHECK(call.check());
    for (const Event* event : {from, to}) {
        bool is_known = state.events.count(const_cast<Event*>(event)) && event->is_timed && event->stream;
        if (!is_known) return call.refuse(INVALID_HANDLE, "an event that was not recorded, or without time");
        if (state.streams.count(event->stream) && event->stream->done < event->behind) return NOT_READY;
    }
    *milliseconds = std::chrono::duration<float, std::milli>(to->at - from->at).count();
    return SUCCESS;
}

// === captures and graphs ===

API cuStreamBeginCapture_v2(Stream* stream, unsigned mode) {
    CALL;
    CHECK(call.check());
    if (!state.streams.count(stream)) return call.refuse(INVALID_HANDLE, "no such stream");
    if (stream->capture) return call.refuse(ILLEGAL_STATE, "the stream is captured");
    stream->capture = std::make_unique<Capture>();
    stream->capture->thread = std::this_thread::get_id(), stream->capture->mode = mode;
    ++state.captures;
    return SUCCESS;
}

API cuStreamEndCapture(Stream* stream, Graph** graph) {
    CALL;
    *graph = nullptr;
    CHECK(call.check());
    if (!state.streams.count(stream)) return call.refuse(INVALID_HANDLE, "no such stream");
    if (!stream->capture) return call.refuse(ILLEGAL_STATE, "the stream is not captured");
    Capture& capture = *stream->capture;
    if (capture.mode != 2 && capture.thread != std::this_thread::get_id())
        return call.refuse(CAPTURE_WRONG_THREAD, "another thread began the capture");
    std::unique_ptr<Capture> done = std::move(stream->capture);
    if (done->is_invalid) return CAPTURE_INVALIDATED;
    *graph = new Graph{std::move(done->works)};
    state.graphs.insert(*graph);
    return SUCCESS;
}

API cuStreamIsCapturing(Stream* stream, unsigned* status) {
    CALL;
    if (!state.streams.count(stream)) return call.refuse(INVALID_HANDLE, "no such stream");
    *status = !stream->capture ? 0 : stream->capture->is_invalid ? 2 : 1;
    return SUCCESS;
}

API cuGraphInstantiateWithFlags(Graph** instance, Graph* graph, unsigned long long) {
    CALL;
    CHECK(call.check());
    if (!state.graphs.count(graph)) return call.refuse(INVALID_HANDLE, "no such graph");
    *instance = new Graph{graph->works};
    state.instances.insert(*instance);
    return SUCCESS;
}

API cuGraphLaunch(Graph* instance, Stream* stream) {
    CALL;
    CHECK(call.check());
    if (!state.instances.count(instance)) return call.refuse(INVALID_HANDLE, "no such graph");
    if (fails_as_asked()) return fail_as_asked(call, stream);
    ++state.replays;
    for (const Work& work : instance->works) CHECK(put(call, stream, work));
    return SUCCESS;
}

API cuGraphExecDestroy(Graph* instance) {
    CALL;
    return forget(call, state.instances, instance);
}

API cuGraphDestroy(Graph* graph) {
    CALL;
    return forget(call, state.graphs, graph);
}

}  // namespace driver
